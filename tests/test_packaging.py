"""What a wheel and a source archive hold, and that importing the package pulls in nothing but NumPy."""

from __future__ import annotations

import hashlib
import importlib
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest

import streamkl_cupy

pytest.importorskip("hatchling", reason="needs hatchling, of the test extra")

ROOT = Path(__file__).parents[1]
INSTALL = ROOT / "docs" / "install.md"


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def cuda_sources() -> dict[str, str]:
    files = (path for path in (ROOT / "cuda_src").rglob("*") if path.is_file())
    return {path.relative_to(ROOT / "cuda_src").as_posix(): digest(path.read_bytes()) for path in files}


def hatchling(root: Path, out: Path, target: str) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = out.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, unpacked."""
    out = tmp_path_factory.mktemp("sdist")
    with tarfile.open(hatchling(ROOT, out, "sdist")) as archive:
        # Our own archive, made a moment ago; the filter argument is missing in early releases of Python 3.10.
        for member in archive.getmembers():
            assert member.isfile(), member.name
            target = out / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            extracted = archive.extractfile(member)
            assert extracted is not None
            target.write_bytes(extracted.read())
    (folder,) = (path for path in out.iterdir() if path.is_dir())
    return folder


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Contents of the wheel built from the source archive: what is missing from either is missing here."""
    with zipfile.ZipFile(hatchling(sdist, tmp_path_factory.mktemp("wheel"), "wheel")) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def metadata(wheel: dict[str, bytes]) -> Message:
    (name,) = (name for name in wheel if name.endswith(".dist-info/METADATA"))
    return message_from_string(wheel[name].decode())


def test_wheel_holds_every_cuda_source_unchanged(wheel: dict[str, bytes]) -> None:
    prefix = "streamkl_cupy/cuda_src/"
    shipped = {name[len(prefix) :]: digest(data) for name, data in wheel.items() if name.startswith(prefix)}
    assert shipped == cuda_sources()


def test_wheel_holds_the_package_and_nothing_beside_it(wheel: dict[str, bytes]) -> None:
    info = f"streamkl_cupy-{streamkl_cupy.__version__}.dist-info"
    assert {name.split("/")[0] for name in wheel} == {"streamkl_cupy", info}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "streamkl_cupy").rglob("*.py")}
    assert modules | {"streamkl_cupy/py.typed"} <= set(wheel)
    assert any(name.endswith("licenses/LICENSE") for name in wheel)


def test_numpy_and_what_holds_its_blas_is_all_that_is_required(wheel: dict[str, bytes]) -> None:
    required = metadata(wheel).get_all("Requires-Dist") or []
    assert [line for line in required if "extra ==" not in line] == ["numpy>=2.0", "threadpoolctl>=3.8"]


def test_extras_are_those_the_documentation_names(wheel: dict[str, bytes]) -> None:
    extras = set(metadata(wheel).get_all("Provides-Extra") or [])
    shown = re.findall(r"`(\w+)`", re.search(r"\| extra \|.*?\n\n", INSTALL.read_text(encoding="utf-8"), re.DOTALL)[0])
    assert extras <= set(shown)
    assert extras == {"cuda12", "cuda13", "torch", "jax", "hf", "flax", "examples", "bench", "docs", "test", "dev"}


def test_the_command_is_the_module(wheel: dict[str, bytes]) -> None:
    (entries,) = (text for name, text in wheel.items() if name.endswith("/entry_points.txt"))
    assert "streamkl-cupy = streamkl_cupy.__main__:main" in entries.decode()
    assert callable(importlib.import_module("streamkl_cupy.__main__").main)


def test_source_archive_holds_the_whole_project(sdist: Path) -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout, nothing to compare with")
    tracked = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    packed = {path.relative_to(sdist).as_posix() for path in sdist.rglob("*") if path.is_file()}
    assert tracked - packed == set()


def test_import_pulls_in_no_framework() -> None:
    heavy = ("torch", "jax", "cupy", "matplotlib", "tqdm")
    code = f"import sys, streamkl_cupy; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

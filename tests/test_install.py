"""The advice on what to install: one place, one rule, and commands that work for the copy at hand."""

from __future__ import annotations

import ctypes
import importlib
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamkl_cupy.cli import compile as compile_command
from streamkl_cupy.cli import doctor, environment
from streamkl_cupy.compiler import nvrtc as compiler
from streamkl_cupy.errors import CompilerError, install
from streamkl_cupy.frameworks.cupy import cupy_module

ROOT = Path(__file__).resolve().parents[1]


def driver(monkeypatch: pytest.MonkeyPatch, version: int | None, status: int = 0) -> None:
    """Let the driver support this version of CUDA, as it writes it; None for no driver."""

    def get_version(pointer: Any) -> int:
        pointer._obj.value = version
        return status

    def library(name: str) -> Any:
        if version is None:
            raise OSError(f"{name}: cannot open shared object file")
        return SimpleNamespace(cuDriverGetVersion=get_version)

    monkeypatch.setattr(ctypes, "CDLL", library)


@pytest.mark.parametrize(
    "version, extra",
    [(12080, "cuda12"), (12000, "cuda12"), (13000, "cuda13"), (13020, "cuda13"), (14000, "cuda13"), (11080, "cuda12")],
)
def test_the_driver_decides(version: int, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, version)
    assert install.cuda() == install.command(extra)
    # What nvidia-smi says goes before.
    assert install.cuda("13.1") == install.command("cuda13")
    assert install.cuda("12.4") == install.command("cuda12")


@pytest.mark.parametrize("version, status", [(None, 0), (13000, 100)])
def test_without_a_driver_both_are_named_with_the_rule(
    version: int | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(monkeypatch, version, status)
    words = install.cuda()
    assert words.startswith(install.command("cuda12"))
    assert "cuda13" in words
    assert "exactly one of the two" in words
    assert 'nvidia-smi shows after "CUDA Version"' in words


@pytest.mark.parametrize("version", [None, 12080, 13000])
def test_every_message_gives_the_same_advice(version: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, version)
    monkeypatch.setattr(environment, "cupy_wheels", list)
    found = [doctor.wheels_and_driver({})[0].fix]
    monkeypatch.setitem(sys.modules, "cupy", None)
    for act in (compiler.supported_archs, cupy_module):
        with pytest.raises((CompilerError, ImportError)) as caught:
            act()
        found.append(str(caught.value).splitlines()[0].partition(": ")[2])
    assert found == [install.cuda()] * 3
    monkeypatch.setattr(compile_command, "supported_archs", lambda: (80,))
    with pytest.raises(CompilerError, match=re.escape(install.cuda(upgrade=True))):
        compile_command._check_compiler({"sm_90"})


def test_in_a_checkout_the_command_names_it() -> None:
    assert install.command() == f'pip install -e "{ROOT}"'
    assert install.command("cuda12", "torch") == f'pip install -e "{ROOT}[cuda12,torch]"'
    assert install.command("torch", upgrade=True).startswith("pip install --upgrade ")


def test_elsewhere_the_command_names_the_installed_package(tmp_path: Path) -> None:
    """pip takes what is installed for the name and looks for nothing but what the extra needs."""
    shutil.copytree(ROOT / "streamkl_cupy", tmp_path / "streamkl_cupy", ignore=shutil.ignore_patterns("__pycache__"))
    code = "from streamkl_cupy.errors import install; print(install.command('cuda12'), install.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split(" /")[0] == 'pip install "streamkl-cupy[cuda12]"'
    assert str(tmp_path) in done.stdout


def test_extras_that_are_advised_exist() -> None:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11 reads TOML")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    advised = {install.cuda_extra("12.0"), install.cuda_extra("13.0")}
    call = re.compile(r"\b(?:install|command)\(([^()]*)\)")
    for path in [*(ROOT / "streamkl_cupy").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        for given in call.findall(path.read_text(encoding="utf-8")):
            advised |= set(re.findall(r"""["'](\w+)["']""", given))
    assert {"cuda12", "cuda13", "torch", "bench", "examples"} <= advised <= set(extras)


def test_nobody_else_names_the_package_to_pip() -> None:
    """No index has it: such a command fails, or brings somebody else's package."""
    texts = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")]
    for folder in ("streamkl_cupy", "examples", "cuda_src", "tests"):
        texts += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".cu", ".cuh")]
    allowed = {ROOT / "streamkl_cupy" / "errors" / "install.py", Path(__file__).resolve()}
    guilty = [
        path.relative_to(ROOT).as_posix()
        for path in texts
        if path not in allowed and re.search(r"pip install[^\n]*streamkl.cupy", path.read_text(encoding="utf-8"))
    ]
    assert guilty == []


def test_importing_it_needs_nothing_but_the_standard_library() -> None:
    code = f"import runpy, sys; runpy.run_path({install.__file__!r}); print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert importlib.import_module("streamkl_cupy.errors.install") is install

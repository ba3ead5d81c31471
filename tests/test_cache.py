"""The disk cache: right key, whole entries, many processes, and no failure of its own. Needs NVRTC, no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

from streamkl_cupy import compile as compiler
from streamkl_cupy import settings
from streamkl_cupy.source import flatten

pytest.importorskip("cupy", reason="needs CuPy and the NVRTC it brings")

SOURCE = 'extern "C" __global__ void f(float* x) { x[threadIdx.x] = 1.0f; }\n'
CHILD = f"""
import sys
from streamkl_cupy.compile import cached_image
image = cached_image({SOURCE!r}, "sm_80")
print(image.path, image.data[:4] == b"\\x7fELF")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(settings.CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_warned", False)
    return tmp_path / "cache"


def child_environment(**changes: str | None) -> dict[str, str]:
    root = str(Path(compiler.__file__).parents[1])
    merged: dict[str, str | None] = {**os.environ, "PYTHONPATH": root, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def run_child(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    # Every warning shows, whatever filters a program would have: "exactly one" is counted, not deduplicated.
    command = [sys.executable, "-W", "always", "-c", CHILD]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


def stamp(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return path.name, status.st_ino, status.st_mtime_ns


def test_key_covers_every_input() -> None:
    base = (SOURCE, "sm_80", ("-a", "-b"), (12, 9))
    others = [
        (SOURCE + " ", "sm_80", ("-a", "-b"), (12, 9)),
        (SOURCE, "sm_90a", ("-a", "-b"), (12, 9)),
        (SOURCE, "sm_80", ("-a",), (12, 9)),
        (SOURCE, "sm_80", ("-a-b",), (12, 9)),
        (SOURCE, "sm_80", ("-b", "-a"), (12, 9)),
        (SOURCE, "sm_80", ("-a", "-b"), (13, 0)),
        (SOURCE, "sm_80", ("-a", "-b"), (1, 29)),
    ]
    keys = [compiler.cache_key(*inputs) for inputs in [base, *others]]
    assert len(set(keys)) == len(keys)
    assert compiler.cache_key(*base) == keys[0]


def test_key_covers_the_schema_and_the_standing_options(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {compiler.cache_key(SOURCE, "sm_80", (), (12, 9))}
    monkeypatch.setattr(compiler, "SCHEMA", compiler.SCHEMA + 1)
    keys.add(compiler.cache_key(SOURCE, "sm_80", (), (12, 9)))
    monkeypatch.setattr(compiler, "BASE_OPTIONS", ("-std=c++20",))
    keys.add(compiler.cache_key(SOURCE, "sm_80", (), (12, 9)))
    assert len(keys) == 3


def test_key_covers_the_text_of_every_header(tmp_path: Path) -> None:
    (tmp_path / "f.cu").write_text('#include "a.cuh"\n' + SOURCE)
    (tmp_path / "a.cuh").write_text('#include "b.cuh"\n')
    (tmp_path / "b.cuh").write_text("struct B { int x; };\n")
    before = compiler.cache_key(flatten("f.cu", {}, {}, tmp_path), "sm_80", (), (12, 9))
    (tmp_path / "b.cuh").write_text("struct B { int y; };\n")
    after = compiler.cache_key(flatten("f.cu", {}, {}, tmp_path), "sm_80", (), (12, 9))
    assert before != after


def test_second_call_reads_the_entry_and_does_not_compile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiler.cached_image(SOURCE, "sm_80")
    assert first.path is not None
    assert first.path.read_bytes() == first.data

    def forbidden(*_: object) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler, "build", forbidden)
    assert compiler.cached_image(SOURCE, "sm_80") == first
    assert [path.name for path in folder.iterdir()] == [first.path.name]


def test_second_process_leaves_the_entry_alone_and_is_quick(folder: Path) -> None:
    run_child(child_environment())
    before = [stamp(path) for path in folder.iterdir()]
    assert len(before) == 1
    run_child(child_environment())
    assert [stamp(path) for path in folder.iterdir()] == before


def test_reading_an_entry_takes_milliseconds(folder: Path) -> None:
    compiler.cached_image(SOURCE, "sm_80")
    started = time.perf_counter()
    compiler.cached_image(SOURCE, "sm_80")
    assert time.perf_counter() - started < 0.3


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: b"garbage" * 100,
        lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
    ],
    ids=["empty", "one byte short", "half", "garbage", "one bit"],
)
def test_damaged_entry_is_built_again(folder: Path, damage: object) -> None:
    good = compiler.cached_image(SOURCE, "sm_80")
    assert good.path is not None
    good.path.write_bytes(damage(good.data))  # type: ignore[operator]
    again = compiler.cached_image(SOURCE, "sm_80")
    assert again.data[:4] == b"\x7fELF"
    assert again.path is not None
    assert again.path.read_bytes() == again.data
    assert compiler.cached_image(SOURCE, "sm_80") == again


def test_failed_write_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.warns(RuntimeWarning, match="No space left on device"):
        image = compiler.cached_image(SOURCE, "sm_80")
    assert image.path is None
    assert list(folder.iterdir()) == []


def test_folder_that_cannot_be_made_costs_one_warning(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file in the way stops every user, root included, which a folder without write permission does not.
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(settings.CACHE_DIR, str(tmp_path / "file" / "cache"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        images = [compiler.cached_image(SOURCE, "sm_80") for _ in range(3)]
    assert len(caught) == 1
    assert settings.CACHE_DIR in str(caught[0].message)
    assert all(image.path is None and image.data[:4] == b"\x7fELF" for image in images)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder_costs_one_warning(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o500)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        images = [compiler.cached_image(SOURCE, "sm_80") for _ in range(2)]
    assert ["cannot be kept" in str(warning.message) for warning in caught] == [True]
    assert all(image.path is None for image in images)


def test_missing_home_costs_one_warning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(settings.CACHE_DIR)
    monkeypatch.setattr(Path, "home", no_home)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        images = [compiler.cached_image(SOURCE, "sm_80") for _ in range(2)]
    assert [warning.category for warning in caught] == [RuntimeWarning]
    assert all(image.path is None and image.data[:4] == b"\x7fELF" for image in images)


def test_process_whose_home_cannot_be_made_warns_once_and_works(tmp_path: Path) -> None:
    # The import of CuPy itself fails in such a home, unless it is given another folder.
    (tmp_path / "home").write_text("not a folder")
    environment = child_environment(
        **{"HOME": str(tmp_path / "home"), settings.CACHE_DIR: None, "CUPY_CACHE_DIR": None}
    )
    done = run_child(environment)
    assert done.stdout.split() == ["None", "True"]
    assert done.stderr.count("RuntimeWarning") == 1, done.stderr


def test_process_without_home_works_in_a_named_folder(tmp_path: Path) -> None:
    names = {settings.CACHE_DIR: str(tmp_path / "ours"), "CUPY_CACHE_DIR": str(tmp_path / "cupy")}
    done = run_child(child_environment(HOME=None, **names))
    assert done.stdout.split()[1] == "True"
    assert "RuntimeWarning" not in done.stderr
    assert len(list((tmp_path / "ours").iterdir())) == 1


def test_home_is_the_default_and_the_variable_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.CACHE_DIR, raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert settings.cache_dir() == tmp_path / ".cache" / "streamkl_cupy"
    monkeypatch.setenv(settings.CACHE_DIR, "")
    assert settings.cache_dir() == tmp_path / ".cache" / "streamkl_cupy"
    monkeypatch.setenv(settings.CACHE_DIR, "some/where")
    assert settings.cache_dir() == Path.cwd() / "some" / "where"


def test_sixteen_processes_at_once_on_an_empty_cache(folder: Path) -> None:
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", CHILD]
    environment = child_environment()
    children = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(16)
    ]
    outputs = [child.communicate(timeout=300) for child in children]
    assert [child.returncode for child in children] == [0] * 16, outputs
    assert {out.split()[1] for out, _ in outputs} == {"True"}
    entries = list(folder.iterdir())
    assert entries
    assert all(path.suffix == ".cubin" for path in entries)
    assert all(path.name == compiler._entry_name(path.name.split("-")[0], path.read_bytes()) for path in entries)

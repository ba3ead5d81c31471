"""The disk cache: right key, whole entries, many processes, and no failure of its own. Needs NVRTC, no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from streamkl_cupy.compiler import cache, settings
from streamkl_cupy.compiler import nvrtc as compiler
from streamkl_cupy.compiler.source import flatten

pytest.importorskip("cupy", reason="needs CuPy and the NVRTC it brings")

SOURCE = 'extern "C" __global__ void f(float* x) { x[threadIdx.x] = 1.0f; }\n'
CHILD = f"""
import sys
from streamkl_cupy.compiler.nvrtc import cached_image
image = cached_image({SOURCE!r}, "sm_80")
print(image.path, image.data[:4] == b"\\x7fELF")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(settings.CACHE_DIR, str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_warned", False)
    monkeypatch.delenv(settings.CACHE_TRUST, raising=False)
    return tmp_path / "cache"


def child_environment(**changes: str | None) -> dict[str, str]:
    root = str(Path(compiler.__file__).parents[2])
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
    assert [path.name for path in folder.glob("*.cubin")] == [first.path.name]


def test_second_process_leaves_the_entry_alone_and_is_quick(folder: Path) -> None:
    run_child(child_environment())
    before = [stamp(path) for path in sorted(folder.iterdir())]
    assert [name.rpartition(".")[2] for name, *_ in before] == ["log", "cubin"]
    run_child(child_environment())
    assert [stamp(path) for path in sorted(folder.iterdir())] == before


def test_reading_an_entry_takes_milliseconds(folder: Path) -> None:
    compiler.cached_image(SOURCE, "sm_80")
    started = time.thread_time()  # of this thread, whatever else the machine does
    compiler.cached_image(SOURCE, "sm_80")
    assert time.thread_time() - started < 0.3


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
    assert len(list((tmp_path / "ours").glob("*.cubin"))) == 1


def test_home_is_the_default_and_the_variable_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.CACHE_DIR, raising=False)
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert settings.cache_dir() == tmp_path / ".cache" / "streamkl_cupy"
    monkeypatch.setenv(settings.CACHE_DIR, "")
    assert settings.cache_dir() == tmp_path / ".cache" / "streamkl_cupy"
    monkeypatch.setenv(settings.CACHE_DIR, "some/where")
    assert settings.cache_dir() == Path.cwd() / "some" / "where"


def test_processes_at_once_on_an_empty_cache(folder: Path) -> None:
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", CHILD]
    environment = child_environment()
    children = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(6)
    ]
    outputs = [child.communicate(timeout=300) for child in children]
    assert [child.returncode for child in children] == [0] * 6, outputs
    assert {out.split()[1] for out, _ in outputs} == {"True"}
    entries = list(folder.glob("*.cubin"))
    assert entries
    assert {path.suffix for path in folder.iterdir()} == {".cubin", ".log"}
    assert all(path.name == cache._entry_name(path.name.split("-")[0], path.read_bytes()) for path in entries)


# --- what the compiler said ---


def test_an_entry_comes_back_with_what_the_compiler_said(folder: Path) -> None:
    built = compiler.build(SOURCE, "sm_80")
    compiler.keep(SOURCE, "sm_80", (), built)
    assert compiler.cached_build(SOURCE, "sm_80") == built
    assert compiler.cached_build(SOURCE, "sm_80", listed=cache.names()) == built
    assert compiler.cached_build(SOURCE + " ", "sm_80") is None
    assert compiler.cached_image(SOURCE, "sm_80").data == built.image


@pytest.mark.parametrize("damage", [None, "Used 3 registers", ""], ids=["gone", "another", "empty"])
def test_a_log_that_does_not_prove_itself_counts_as_absent(folder: Path, damage: str | None) -> None:
    compiler.keep(SOURCE, "sm_80", (), compiler.build(SOURCE, "sm_80"))
    (log,) = folder.glob("*.log")
    if damage is None:
        log.unlink()
    else:
        log.write_text(damage)
    assert compiler.cached_build(SOURCE, "sm_80") is None
    # It is needed for a report, not for a launch.
    assert cache.read(compiler._key(SOURCE, "sm_80", ())) is not None


# --- whom it is taken from ---

has_owners = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="this system has no owners and modes of files")
as_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files away")
OTHER = 54321


def planted(folder: Path, data: bytes = b"not from here") -> Path:
    """An entry that proves itself, as anybody who can write to a folder can make it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / cache._entry_name(compiler._key(SOURCE, "sm_80", ()), data)
    path.write_bytes(data)
    return path


def refused(folder: Path, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled, nothing is read or written, one warning says why; the switch changes all of that."""
    before = [stamp(path) for path in sorted(folder.iterdir())]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        images = [compiler.cached_image(SOURCE, "sm_80") for _ in range(2)]
    assert [image.path for image in images] == [None] * 2
    assert all(image.data[:4] == b"\x7fELF" for image in images)
    assert [stamp(path) for path in sorted(folder.iterdir())] == before
    assert len(caught) == 1
    message = str(caught[0].message)
    assert caught[0].category is RuntimeWarning
    assert why in message
    assert f"{settings.CACHE_DIR} to a folder of your own" in message
    assert f"{settings.CACHE_TRUST}=1" in message
    monkeypatch.setenv(settings.CACHE_TRUST, "1")
    assert compiler.cached_image(SOURCE, "sm_80").data == b"not from here"


@has_owners
@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702])
def test_a_folder_that_others_can_write_is_not_used(folder: Path, mode: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(folder)
    folder.chmod(mode)
    refused(folder, f"{folder} can be written by everybody (chmod go-w changes it)", monkeypatch)


@as_root
def test_a_folder_that_a_group_can_write_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(folder)
    os.chown(folder, 0, OTHER)
    folder.chmod(0o775)
    refused(folder, f"{folder} can be written by group {OTHER}", monkeypatch)


@as_root
def test_a_folder_of_somebody_else_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(folder)
    os.chown(folder, OTHER, 0)
    refused(folder, f"{folder} belongs to user {OTHER}, who is neither root nor this user", monkeypatch)


@has_owners
def test_a_folder_that_others_can_replace_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(folder)
    folder.parent.chmod(0o777)
    refused(folder, f"{folder.parent} can be written by everybody", monkeypatch)
    monkeypatch.delenv(settings.CACHE_TRUST)
    folder.parent.chmod(0o1777)  # as /tmp: what is in it is its owner's to replace
    assert compiler.cached_image(SOURCE, "sm_80").data == b"not from here"


@as_root
def test_a_folder_on_somebody_elses_ground_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(folder)
    os.chown(folder.parent, OTHER, 0)
    refused(folder, f"{folder.parent} belongs to user {OTHER}", monkeypatch)


@has_owners
def test_links_of_ones_own_are_followed_and_what_they_lead_to_is_judged(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tmp_path / "ground" / "real"
    planted(real)
    folder.symlink_to(Path("ground", "..", "ground", "real"))
    assert compiler.cached_image(SOURCE, "sm_80").data == b"not from here"
    (tmp_path / "way").symlink_to(tmp_path)
    monkeypatch.setenv(settings.CACHE_DIR, str(tmp_path / "way" / "ground" / ".." / "cache"))
    assert compiler.cached_image(SOURCE, "sm_80").data == b"not from here"
    real.parent.chmod(0o777)
    refused(folder, f"{real.parent} can be written by everybody", monkeypatch)


@as_root
def test_a_link_of_somebody_else_is_not_followed(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted(tmp_path / "real")
    folder.symlink_to(tmp_path / "real")
    os.chown(folder, OTHER, 0, follow_symlinks=False)
    refused(folder, f"{folder} belongs to user {OTHER}", monkeypatch)


def test_links_in_a_circle_cost_one_warning(folder: Path) -> None:
    folder.symlink_to(folder.name)
    with pytest.warns(RuntimeWarning, match="cannot be kept"):
        assert compiler.cached_image(SOURCE, "sm_80").path is None


@has_owners
def test_an_entry_that_others_can_write_is_built_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    path = planted(folder)
    path.chmod(0o666)
    with pytest.warns(RuntimeWarning, match=rf"{path.name} is not used, .*can be written by everybody"):
        image = compiler.cached_image(SOURCE, "sm_80")
    assert image.data[:4] == b"\x7fELF"
    assert image.path is not None
    assert image.path.stat().st_mode & 0o022 == 0


@as_root
def test_an_entry_of_somebody_else_is_built_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    path = planted(folder)
    os.chown(path, OTHER, 0)
    with pytest.warns(RuntimeWarning, match=f"belongs to user {OTHER}"):
        assert compiler.cached_image(SOURCE, "sm_80").data[:4] == b"\x7fELF"


@has_owners
@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_is_no_entry(folder: Path, tmp_path: Path, kind: str) -> None:
    folder.mkdir(mode=0o700)
    path = planted(folder)
    path.rename(tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "pipe":
        os.mkfifo(path, 0o600)
    else:
        path.mkdir()
    assert compiler.cached_image(SOURCE, "sm_80").data[:4] == b"\x7fELF"


@has_owners
def test_a_folder_that_somebody_else_makes_first_is_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def raced(path: Path) -> None:
        path.mkdir()
        path.chmod(0o777)

    monkeypatch.setattr(cache, "_make", raced)
    with pytest.warns(RuntimeWarning, match="can be written by everybody"):
        assert compiler.cached_image(SOURCE, "sm_80").path is None
    assert list(folder.iterdir()) == []


@has_owners
@pytest.mark.parametrize("mask", [0o000, 0o002, 0o077])
def test_what_is_made_is_this_users_alone_whatever_the_umask(
    tmp_path: Path, mask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.CACHE_DIR, str(tmp_path / "new" / "folders"))
    before = os.umask(mask)
    try:
        image = compiler.cached_image(SOURCE, "sm_80")
    finally:
        os.umask(before)
    assert image.path is not None
    assert [(tmp_path / path).stat().st_mode & 0o777 for path in ("new", "new/folders")] == [0o700] * 2
    assert {path.stat().st_mode & 0o777 for path in image.path.parent.iterdir()} == {0o644 & ~mask}
    assert compiler.cached_image(SOURCE, "sm_80") == image


def test_where_files_have_no_owners_the_folder_is_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = planted(folder)
    folder.chmod(0o777)
    path.chmod(0o666)
    monkeypatch.delattr(os, "geteuid", raising=False)
    assert compiler.cached_image(SOURCE, "sm_80").data == b"not from here"


def status(uid: int, gid: int, mode: int) -> os.stat_result:
    return os.stat_result((mode, 0, 0, 1, uid, gid, 0, 0, 0, 0))


@has_owners
@pytest.mark.parametrize(
    "uid, gid, mode, on_the_way, fine",
    [
        (1000, 1000, 0o100644, False, True),
        (0, 0, 0o100644, False, True),
        (1001, 1000, 0o100600, False, False),
        (65534, 65534, 0o100600, False, False),
        (1000, 1000, 0o100664, False, True),  # the group is the user's own
        (0, 1000, 0o100664, False, True),
        (1000, 1001, 0o100664, False, False),  # it has another member
        (1000, 1002, 0o100664, False, False),  # it has another name
        (1000, 1003, 0o100664, False, False),  # it has no name
        (1000, 0, 0o100664, False, False),
        (1000, 1000, 0o100646, False, False),
        (1000, 1000, 0o040777, True, False),
        (0, 0, 0o041777, True, True),
        (0, 0, 0o041777, False, False),
        (1001, 1001, 0o041777, True, False),
        (1000, 1000, 0o120777, True, True),
        (1001, 1001, 0o120777, True, False),
        (65534, 65534, 0o040755, True, True),  # the host's root, in a container that does not know it
        (65534, 65534, 0o040777, True, False),
    ],
)
def test_who_can_change_a_file(
    uid: int, gid: int, mode: int, on_the_way: bool, fine: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import grp
    import pwd

    groups = {
        0: SimpleNamespace(gr_name="root", gr_mem=[]),
        1000: SimpleNamespace(gr_name="me", gr_mem=["me"]),
        1001: SimpleNamespace(gr_name="me", gr_mem=["me", "you"]),
        1002: SimpleNamespace(gr_name="us", gr_mem=[]),
    }
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    # All but the last are this user's first group, so that the other conditions are what decides.
    monkeypatch.setattr(pwd, "getpwuid", lambda _: SimpleNamespace(pw_name="me", pw_uid=1000, pw_gid=gid))
    monkeypatch.setattr(grp, "getgrgid", lambda group: groups[group])
    monkeypatch.setattr(cache, "_owner_unknown", lambda: 65534)
    fault = cache._fault(Path("x"), status(uid, gid, mode), on_the_way)
    assert (fault == "") == fine, fault


@has_owners
def test_the_first_group_of_nobody_or_of_root_is_not_private(monkeypatch: pytest.MonkeyPatch) -> None:
    import grp
    import pwd

    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_name="me", gr_mem=[]))
    for uid, gid, private in ((1000, 1000, True), (1000, 1001, False), (0, 1000, False)):
        user = SimpleNamespace(pw_name="me", pw_uid=uid, pw_gid=gid)
        monkeypatch.setattr(pwd, "getpwuid", lambda _, user=user: user)
        assert cache._is_private(1000) is private


@pytest.mark.parametrize("value, trusted", [("1", True), ("", False), ("0", False), ("yes", False), (None, False)])
def test_only_1_is_trust(value: str | None, trusted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if value is None:
        monkeypatch.delenv(settings.CACHE_TRUST, raising=False)
    else:
        monkeypatch.setenv(settings.CACHE_TRUST, value)
    assert settings.cache_trusts_all() is trusted

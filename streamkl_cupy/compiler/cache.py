"""The folder of compiled kernels: what an entry is, and whom it is taken from.

An entry is one plain image named `<key>-<checksum>.cubin`. The key covers whatever decides the image; the checksum
makes the entry prove itself, so a file cut short or damaged counts as absent and is built again. What the compiler said
of it lies beside it as `<key>-<checksum>-<checksum of the text>.log`. Entries appear by an atomic rename, so any number
of processes may start on an empty folder.

A checksum says nothing of who wrote a file, and an image is code. Files and folders are therefore used only where
nobody but this user and root can change them, as ssh does with keys, unless `STREAMKL_CACHE_TRUST=1`.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import warnings
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from . import settings

_LONGEST_CHAIN = 40
"""Symbolic links followed on the way to the folder, as many as Linux does."""


class Entry(NamedTuple):
    """A loadable image, and the file that holds it (None when there is no usable folder)."""

    data: bytes
    path: Path | None


def names() -> list[str]:
    """Names of all files in the folder, ascending, for many calls of `read`; none where it is not to be used."""
    folder = settings.cache_dir()
    if folder is None:
        return []
    try:
        if reason := refusal(folder):
            warn_once(reason)
            return []
        return sorted(path.name for path in folder.iterdir())
    except OSError:  # not there, or not readable, which `write` reports
        return []


def read(key: str, listed: Sequence[str] | None = None) -> Entry | None:
    """The entry of a key, if it is there, proves itself and comes from somebody to be trusted."""
    # More than one file per key is possible (a toolkit that is not bit-reproducible); any that proves itself will do.
    for name, path in _files(f"{key}-", ".cubin", listed):
        data = _bytes_of(path)
        if data is not None and name == _entry_name(key, data):
            return Entry(data, path)
    return None


def read_log(entry: str, listed: Sequence[str] | None = None) -> str | None:
    """What the compiler said of the entry of this file name; None where that was not kept."""
    for name, path in _files(f"{entry.removesuffix('.cubin')}-", ".log", listed):
        data = _bytes_of(path)
        if data is not None and name == _log_name(entry, data):
            return data.decode(errors="surrogateescape")
    return None


def _files(prefix: str, suffix: str, listed: Sequence[str] | None) -> Iterator[tuple[str, Path]]:
    folder = settings.cache_dir()
    found = names() if listed is None else listed
    for i in range(bisect_left(found, prefix), len(found)):
        if not found[i].startswith(prefix):
            return
        if folder is not None and found[i].endswith(suffix):
            yield found[i], folder / found[i]


def write(key: str, image: bytes, log: str) -> Path | None:
    """Keep an image and the compiler's log; the image's file, or None where that cannot be, which costs a warning."""
    folder = settings.cache_dir()
    if folder is None:
        warn_once(f"no home folder is known, so compiled kernels are not kept; set {settings.CACHE_DIR} to a folder")
        return None
    name, text = _entry_name(key, image), log.encode(errors="surrogateescape")
    try:
        if reason := prepare(folder):
            warn_once(reason)
            return None
        # The image last, so that whoever finds one finds its log.
        _replace(folder / _log_name(name, text), text)
        _replace(folder / name, image)
    except OSError as error:
        warn_once(
            f"compiled kernels cannot be kept in {folder} ({error}), so each process compiles its own; "
            f"set {settings.CACHE_DIR} to a folder that can be written"
        )
        return None
    return folder / name


def refusal(folder: Path) -> str:
    """Why a folder of kernels is neither read nor written, and what to do; empty where all is well.

    Judged are the folder and all that leads to it, symbolic links included, in that order from the root: what was found
    right cannot be changed by others, so neither can the way to what comes next. What is missing is right: `prepare`
    makes it for this user alone.

    Raises:
        OSError: the folder cannot be reached.
    """
    if _all_are_trusted():
        return ""
    here = Path(folder.anchor)
    parts = [*reversed(folder.parts[1:]), "."]
    links = 0
    while parts:
        part = parts.pop()
        here = here.parent if part == ".." else here / part
        try:
            status = os.lstat(here)
        except FileNotFoundError:
            return ""
        link = stat.S_ISLNK(status.st_mode)
        if fault := _fault(here, status, on_the_way=link or bool(parts)):
            return _advice(f"compiled kernels in {folder} are not used, and none are kept there", fault)
        if link:
            links += 1
            if links > _LONGEST_CHAIN:
                raise OSError(f"too many symbolic links at {here}")
            target = here.readlink()
            here = Path(target.anchor) if target.anchor else here.parent
            parts += [*reversed(target.parts[1:] if target.anchor else target.parts), "."]
    return ""


def prepare(folder: Path) -> str:
    """Make a folder of kernels if it is missing, for this user alone; empty, or the reason not to use it, as `refusal`.

    Raises:
        OSError: it cannot be made or reached.
    """
    if reason := refusal(folder):
        return reason
    if folder.is_dir():
        return ""
    _make(folder)
    # Somebody else may have made it a moment earlier.
    return refusal(folder)


def _make(folder: Path) -> None:
    if folder.parent != folder and not folder.parent.exists():
        _make(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)


_warned = False


def warn_once(message: str) -> None:
    """One `RuntimeWarning` per process about kernels that are not kept; later ones are silent."""
    # The standard "once" filter is the program's to change; this promise is ours.
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def _advice(what: str, fault: str) -> str:
    return (
        f"{what}, because others could put code there: {fault}. Mend that, or set {settings.CACHE_DIR} to a folder of "
        f"your own, or {settings.CACHE_TRUST}=1 to trust everybody who can write there"
    )


def _all_are_trusted() -> bool:
    # Windows has no such owners and modes; there a user's folders are closed to others by other means.
    return settings.cache_trusts_all() or not hasattr(os, "geteuid")


def _fault(path: Path, status: os.stat_result, on_the_way: bool = False) -> str:
    """What lets others change a file or folder; empty where nothing does.

    `on_the_way` to the folder of kernels symbolic links have no modes, and a sticky bit, as /tmp has it, protects what
    is inside from others.
    """
    owner, mode = status.st_uid, status.st_mode
    if owner not in (0, os.geteuid()) and not (on_the_way and owner == _owner_unknown()):
        return f"{path} belongs to user {owner}, who is neither root nor this user, {os.geteuid()} (chown changes it)"
    if on_the_way and (stat.S_ISLNK(mode) or mode & stat.S_ISVTX):
        return ""
    if mode & stat.S_IWOTH or (mode & stat.S_IWGRP and not _is_private(status.st_gid)):
        who = "everybody" if mode & stat.S_IWOTH else f"group {status.st_gid}"
        return f"{path} can be written by {who} (chmod go-w changes it)"
    return ""


def _is_private(group: int) -> bool:
    """Whether a group is this user's alone, as many systems give each user one that may write to all of the user's
    files: it has the user's name, is the user's first group and lists nobody else."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    alone = found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}
    # Root's group is no such group: containers put users without a name into it.
    return alone and user.pw_gid == group and user.pw_uid != 0


def _owner_unknown() -> int | None:
    """Who owns what belongs to nobody known in a container that maps only some users, such as the host's root."""
    try:
        mapped = Path("/proc/self/uid_map").read_text(encoding="ascii").split()
        if mapped == ["0", "0", "4294967295"]:
            return None
        return int(Path("/proc/sys/kernel/overflowuid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _bytes_of(path: Path) -> bytes | None:
    """What a file holds; None where there is none or somebody else could have written it.

    The file that is judged is the very one that is read.
    """
    try:
        with open(path, "rb", opener=_open_no_link) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return None
            if not _all_are_trusted() and (fault := _fault(path, status)):
                warn_once(_advice(f"the compiled kernel {path} is not used, but built again", fault))
                return None
            return file.read()
    except OSError:
        return None


def _open_no_link(path: str, flags: int) -> int:
    # Without O_NONBLOCK a pipe that lies here would wait for somebody to write.
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def _replace(path: Path, data: bytes) -> None:
    """Written whole under a name nobody looks for, then renamed: readers see all of a file or none of it."""
    partial = path.parent / f".{path.stem}-{os.getpid()}-{secrets.token_hex(4)}.partial"
    try:
        # Others may read it, where the folder lets them in; nobody else may write it, whatever the umask.
        with open(partial, "xb", opener=lambda name, flags: os.open(name, flags, 0o644)) as file:
            file.write(data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _entry_name(key: str, image: bytes) -> str:
    return f"{key}-{_checksum(image)}.cubin"


def _log_name(entry: str, text: bytes) -> str:
    return f"{entry.removesuffix('.cubin')}-{_checksum(text)}.log"


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]

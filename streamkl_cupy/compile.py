"""From one CUDA text to a kernel that can be launched: NVRTC, a cache on disk, a cache in memory.

NVRTC is driven directly, through the bindings CuPy ships: CuPy's own compile path always asks for a plain `sm_90`,
without the instructions of `sm_90a`. Nothing here needs a GPU except `load`.

A cache entry is one plain image named `<key>-<checksum>.cubin`. The key covers whatever decides the image; the checksum
makes the entry prove itself, so a file cut short or damaged counts as absent and is built again. Entries appear by an
atomic rename, so any number of processes may start on an empty cache.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import os
import re
import secrets
import sys
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from . import settings
from .errors import CompilerError, DriverError

# Raise it when the meaning of an entry changes in a way that the other parts of the key do not show.
SCHEMA = 1
# `-v` makes ptxas report registers and spills; `-default-device` is what lets NVRTC 12 accept lambdas in kernels.
BASE_OPTIONS = ("-std=c++17", "-default-device", "--ptxas-options=-v")

_INSTALL = 'pip install "streamkl-cupy[cuda12]" (or [cuda13]: exactly one, matching the driver)'
_REGISTERS = re.compile(r"Used (\d+) registers")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_SMEM = re.compile(r"(\d+) bytes smem")
_NOTE = re.compile(r"\bwarning\b|\(C\d{4}\)")
_ERROR_AT = re.compile(r"^(?P<file>[^\s(][^(\n]*)\((?P<line>\d+)\): (?:catastrophic )?error", re.MULTILINE)
_LINE_DIRECTIVE = re.compile(r'#line (\d+) "([^"]*)"')
_UNNAMED = "kernel.cu"
_CUPY_CACHE_DIR = "CUPY_CACHE_DIR"


class Build(NamedTuple):
    """A compiled text and what the compiler said of it; of several kernels the largest use of each resource.

    `spill_bytes` adds stores and loads. `notes` holds every warning and every numbered remark of ptxas, such as the
    C75xx ones about serialised matrix instructions; a kernel fit to ship has none. For a `compute_*` architecture the
    image is PTX and the figures are zero: the driver assembles it later.
    """

    image: bytes
    log: str
    registers: int
    spill_bytes: int
    stack_bytes: int
    smem_bytes: int
    notes: tuple[str, ...]


class Image(NamedTuple):
    """A loadable image, and the cache file that holds it (None when there is no usable cache)."""

    data: bytes
    path: Path | None


def supported_archs() -> tuple[int, ...]:
    """Architectures the installed NVRTC can target, as numbers such as 80 or 90, ascending.

    Raises:
        CompilerError: CuPy or NVRTC is missing.
    """
    return tuple(sorted(_nvrtc().getSupportedArchs()))


def build(source: str, arch: str, options: Sequence[str] = ()) -> Build:
    """Compile a text, always afresh.

    Args:
        source: CUDA C++ that includes nothing.
        arch: "sm_80", "sm_90a", ... for machine code, "compute_90", ... for PTX.
        options: NVRTC options beyond `BASE_OPTIONS`; one option each, no architecture.

    Raises:
        ValueError: an option sets the architecture.
        CompilerError: NVRTC is missing or refuses the text; the message holds the log and the lines it complains of.
    """
    for option in options:
        if re.match(r"--?(arch|gpu-architecture)\b", option):
            raise ValueError(
                f"options: got {option!r}; give the architecture as arch, a second one is an error in NVRTC"
            )
    nvrtc = _nvrtc()
    program = nvrtc.createProgram(source, _UNNAMED, (), ())
    try:
        try:
            nvrtc.compileProgram(program, (f"-arch={arch}", *BASE_OPTIONS, *options))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program).strip("\0 \n")
            excerpt = _excerpt(source, log)
            raise CompilerError(f"NVRTC refused the kernel for {arch}: {error}\n{log}\n{excerpt}".rstrip()) from error
        log = nvrtc.getProgramLog(program).strip("\0 \n")
        # CuPy drops the last byte of what NVRTC returns: right for a string, so for PTX. An ELF image ends in
        # a zero byte of its own, and a file without it is one byte short.
        image = nvrtc.getPTX(program) if arch.startswith("compute_") else nvrtc.getCUBIN(program) + b"\0"
    finally:
        nvrtc.destroyProgram(program)
    return _report(image, log)


def cache_key(source: str, arch: str, options: Sequence[str], nvrtc_version: tuple[int, int]) -> str:
    """Name under which the image of these inputs is kept: equal names only for equal inputs."""
    parts = (str(SCHEMA), *map(str, nvrtc_version), arch, *BASE_OPTIONS, *options, source)
    digest = hashlib.sha256()
    for part in parts:
        # The length in front keeps ("ab", "c") apart from ("a", "bc").
        data = part.encode()
        digest.update(b"%d:" % len(data) + data)
    return digest.hexdigest()[:32]


def cached_image(source: str, arch: str, options: Sequence[str] = ()) -> Image:
    """The image of a text, from the cache on disk if it is there, built and stored otherwise. Needs no GPU.

    A cache that cannot be written costs one `RuntimeWarning` per process, never the result.
    """
    key = cache_key(source, arch, options, _nvrtc().getVersion())
    folder = settings.cache_dir()
    if folder is not None and (found := _lookup(folder, key)):
        return found
    image = build(source, arch, options).image
    return Image(image, _store(folder, key, image))


_kernels: dict[tuple[Any, ...], Any] = {}


def load(source: str, symbol: str, arch: str, options: Sequence[str] = (), smem_bytes: int = 0) -> Any:
    """The kernel `symbol` of a text, ready to launch on the current device.

    Args:
        source, arch, options: as for `build`.
        symbol: its `extern "C"` name.
        smem_bytes: dynamic shared memory its launches will ask for.

    Returns:
        A `cupy.RawKernel`, loaded and configured; the same object for the same arguments on the same device.

    Raises:
        CompilerError: as for `build`.
        DriverError: no usable GPU, or the driver refuses the image, the symbol or the shared memory.
    """
    nvrtc = _nvrtc()
    cupy = import_cupy()
    try:
        device = cupy.cuda.runtime.getDevice()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise DriverError(f"no usable NVIDIA driver or GPU: {error}") from error
    # Kernels and their attributes belong to one device.
    memory_key = (device, symbol, arch, tuple(options), smem_bytes, nvrtc.getVersion(), source)
    kernel = _kernels.get(memory_key)
    if kernel is None:
        with _file_of(cached_image(source, arch, options)) as path:
            try:
                kernel = cupy.RawModule(path=str(path)).get_function(symbol)
                # The first attribute set loads the module, here rather than inside a later graph capture.
                kernel.max_dynamic_shared_size_bytes = smem_bytes
            except cupy.cuda.driver.CUDADriverError as error:
                capability = cupy.cuda.Device().compute_capability
                raise DriverError(
                    f"the driver refused kernel {symbol!r}, built for {arch}, with {smem_bytes} bytes of dynamic "
                    f"shared memory on a GPU of compute capability {capability}: {error}"
                ) from error
        kernel = _kernels.setdefault(memory_key, kernel)
    return kernel


@contextmanager
def _file_of(image: Image) -> Iterator[Path]:
    """A file with the image, for as long as loading takes."""
    if image.path is not None:
        yield image.path
        return
    with tempfile.TemporaryDirectory(prefix="streamkl_cupy-") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(image.data)
        yield path


def import_cupy() -> Any:
    """CuPy, also where the home folder cannot be written.

    CuPy makes its own cache folder when it is imported and fails where it cannot. There it gets a temporary one, for
    the life of the process, and the program one warning.

    Raises:
        CompilerError: CuPy is not installed, or cannot be imported.
    """
    if "cupy" not in sys.modules and _CUPY_CACHE_DIR not in os.environ:
        try:
            Path("~/.cupy/kernel_cache").expanduser().mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError) as error:
            _warn_once(
                f"the home folder cannot be written ({error}), so compiled kernels are not kept; "
                f"set {settings.CACHE_DIR} and {_CUPY_CACHE_DIR} to folders that can be"
            )
            folder = tempfile.TemporaryDirectory(prefix="streamkl_cupy-", ignore_cleanup_errors=True)
            atexit.register(folder.cleanup)
            os.environ[_CUPY_CACHE_DIR] = folder.name
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise CompilerError(f"CuPy is missing, CUDA kernels cannot be compiled: {_INSTALL}\n{error}") from error
    except OSError as error:
        raise CompilerError(
            f"CuPy cannot be imported, is {_CUPY_CACHE_DIR} a folder that can be written? {error}"
        ) from error


def _nvrtc() -> Any:
    """CuPy's NVRTC bindings, proven to have a library behind them."""
    nvrtc = import_cupy().cuda.nvrtc
    try:
        nvrtc.getVersion()
    except (OSError, RuntimeError) as error:
        raise CompilerError(
            f"NVRTC, the run-time compiler of CUDA, is missing, CUDA kernels cannot be compiled: {_INSTALL}\n{error}"
        ) from error
    return nvrtc


def _lookup(folder: Path, key: str) -> Image | None:
    # More than one file per key is possible (a toolkit that is not bit-reproducible); any that proves itself will do.
    for path in sorted(folder.glob(f"{key}-*.cubin")):
        try:
            data = path.read_bytes()
        except OSError:
            continue
        if path.name == _entry_name(key, data):
            return Image(data, path)
    return None


def _store(folder: Path | None, key: str, image: bytes) -> Path | None:
    if folder is None:
        _warn_once(f"no home folder is known, so compiled kernels are not kept; set {settings.CACHE_DIR} to a folder")
        return None
    path = folder / _entry_name(key, image)
    # Written whole under a name nobody looks for, then renamed: readers see all of an entry or none of it.
    partial = folder / f".{key}-{os.getpid()}-{secrets.token_hex(4)}.partial"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            partial.write_bytes(image)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        _warn_once(
            f"compiled kernels cannot be kept in {folder} ({error}), so each process compiles its own; "
            f"set {settings.CACHE_DIR} to a folder that can be written"
        )
        return None
    return path


def _entry_name(key: str, image: bytes) -> str:
    return f"{key}-{hashlib.sha256(image).hexdigest()[:16]}.cubin"


_warned = False


def _warn_once(message: str) -> None:
    # The standard "once" filter is the program's to change; this promise is ours.
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def _report(image: bytes, log: str) -> Build:
    frames = [tuple(map(int, match)) for match in _STACK.findall(log)]
    return Build(
        image=image,
        log=log,
        registers=max(map(int, _REGISTERS.findall(log)), default=0),
        spill_bytes=max((stores + loads for _, stores, loads in frames), default=0),
        stack_bytes=max((stack for stack, _, _ in frames), default=0),
        smem_bytes=max(map(int, _SMEM.findall(log)), default=0),
        notes=tuple(line.strip() for line in log.splitlines() if _NOTE.search(line)),
    )


def _excerpt(source: str, log: str, context: int = 3) -> str:
    """The lines around the first error of a log, numbered as in the file they came from."""
    error = _ERROR_AT.search(log)
    if error is None:
        return ""
    wanted = (error["file"], int(error["line"]))
    shown = []
    file, number = _UNNAMED, 0
    for line in source.splitlines():
        if directive := _LINE_DIRECTIVE.fullmatch(line):
            file, number = directive[2], int(directive[1]) - 1
            continue
        number += 1
        if file == wanted[0] and abs(number - wanted[1]) <= context:
            shown.append(f"{'>' if number == wanted[1] else ' '} {number:5d} | {line}")
    return "\n".join((f"{wanted[0]}:", *shown))

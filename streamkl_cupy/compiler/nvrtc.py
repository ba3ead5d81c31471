"""From one CUDA text to a kernel that can be launched: NVRTC, a cache on disk (`cache.py`), a cache in memory.

NVRTC is driven directly, through the bindings CuPy ships: CuPy's own compile path always asks for a plain `sm_90`,
without the instructions of `sm_90a`. Nothing here needs a GPU except `load`.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CompilerError, DriverError, install
from . import cache, settings

# Raise it when the meaning of an entry changes in a way that the other parts of the key do not show.
SCHEMA = 1
# `-v` makes ptxas report registers and spills; `-default-device` is what lets NVRTC 12 accept lambdas in kernels.
BASE_OPTIONS = ("-std=c++17", "-default-device", "--ptxas-options=-v")
# From here on NVRTC has a cache of its own, which gives the image of a text it has seen without what ptxas said of it.
_CACHING_NVRTC = (12, 9)
_NO_CACHE = "--no-cache"

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


class Loaded(NamedTuple):
    """A kernel on one device: the driver's handle, and the `cupy.cuda.Function` that keeps its module loaded."""

    handle: int
    function: Any


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
    afresh = (_NO_CACHE,) if nvrtc.getVersion() >= _CACHING_NVRTC else ()
    program = nvrtc.createProgram(source, _UNNAMED, (), ())
    try:
        try:
            nvrtc.compileProgram(program, (f"-arch={arch}", *BASE_OPTIONS, *afresh, *options))
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


def cached_image(source: str, arch: str, options: Sequence[str] = ()) -> cache.Entry:
    """The image of a text, from the cache on disk if it is there, built and stored otherwise. Needs no GPU.

    A cache that cannot be used costs one `RuntimeWarning` per process, never the result.
    """
    if found := cache.read(_key(source, arch, options)):
        return found
    built = build(source, arch, options)
    return cache.Entry(built.image, keep(source, arch, options, built))


def cached_build(
    source: str, arch: str, options: Sequence[str] = (), listed: Sequence[str] | None = None
) -> Build | None:
    """What `build` gave for a text when it was stored; None where image or log is not in the cache on disk.

    A log that says nothing counts as none: ptxas says something of every kernel.

    `listed` is `cache.names()`, for many calls.
    """
    entry = cache.read(_key(source, arch, options), listed)
    if entry is None or entry.path is None:
        return None
    log = cache.read_log(entry.path.name, listed)
    return _report(entry.data, log) if log else None


def keep(source: str, arch: str, options: Sequence[str], built: Build) -> Path | None:
    """Store what `build` gave for a text in the cache on disk; its file, or None where that cannot be."""
    return cache.write(_key(source, arch, options), built.image, built.log)


def _key(source: str, arch: str, options: Sequence[str]) -> str:
    return cache_key(source, arch, options, _nvrtc().getVersion())


_kernels: dict[tuple[Any, ...], Loaded] = {}


def load(source: str, symbol: str, arch: str, options: Sequence[str] = (), smem_bytes: int = 0) -> Loaded:
    """The kernel `symbol` of a text, ready to launch on the current device.

    The driver gets the bytes that the cache has checked, not the name of a file that could be another one by then.

    Args:
        source, arch, options: as for `build`.
        symbol: its `extern "C"` name.
        smem_bytes: dynamic shared memory its launches will ask for.

    Returns:
        The kernel, loaded and configured; the same object for the same arguments on the same device.

    Raises:
        CompilerError: as for `build`.
        DriverError: no usable GPU, or the driver refuses the image, the symbol or the shared memory.
    """
    nvrtc = _nvrtc()
    cuda = import_cupy().cuda
    try:
        device = cuda.runtime.getDevice()
    except cuda.runtime.CUDARuntimeError as error:
        raise DriverError(f"no usable NVIDIA driver or GPU: {error}") from error
    # Kernels and their attributes belong to one device.
    memory_key = (device, symbol, arch, tuple(options), smem_bytes, nvrtc.getVersion(), source)
    kernel = _kernels.get(memory_key)
    if kernel is None:
        image = cached_image(source, arch, options).data
        try:
            module = cuda.Module()
            module.load(image)
            function = module.get_function(symbol)
            # A driver that loads lazily does so at the first attribute set: here, rather than inside a later capture.
            cuda.driver.funcSetAttribute(
                function.ptr, cuda.driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, smem_bytes
            )
        except (cuda.driver.CUDADriverError, cuda.runtime.CUDARuntimeError) as error:
            capability = cuda.Device().compute_capability
            raise DriverError(
                f"the driver refused kernel {symbol!r}, built for {arch}, with {smem_bytes} bytes of dynamic "
                f"shared memory on a GPU of compute capability {capability}: {error}"
            ) from error
        kernel = _kernels.setdefault(memory_key, Loaded(function.ptr, function))
    return kernel


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
            cache.warn_once(
                f"the home folder cannot be written ({error}), so compiled kernels are not kept; "
                f"set {settings.CACHE_DIR} and {_CUPY_CACHE_DIR} to folders that can be"
            )
            folder = tempfile.TemporaryDirectory(prefix="streamkl_cupy-", ignore_cleanup_errors=True)
            atexit.register(folder.cleanup)
            os.environ[_CUPY_CACHE_DIR] = folder.name
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "cupy"
        state = "is missing" if absent else "cannot be imported"
        raise CompilerError(f"CuPy {state}, CUDA kernels cannot be compiled: {install.cuda()}\n{error}") from error
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
            f"NVRTC, CUDA's run-time compiler, is missing, CUDA kernels cannot be compiled: {install.cuda()}\n{error}"
        ) from error
    return nvrtc


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

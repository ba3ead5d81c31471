"""GPUs as planning sees them: a typical one of each architecture, and those that are installed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..errors import DriverError


@dataclass(frozen=True)
class DeviceFacts:
    """What planning needs to know of a GPU."""

    compute_capability: tuple[int, int]
    smem_per_block: int
    """Most shared memory one block may ask for, bytes."""
    multiprocessors: int
    name: str = ""

    @property
    def flag(self) -> str:
        """The compiler's name of the architecture; with an "a" behind it, of all its instructions."""
        return "sm_{}{}".format(*self.compute_capability)


GPUS = {
    facts.flag: facts
    for facts in (
        DeviceFacts((8, 0), 166_912, 108, "sm_80"),
        DeviceFacts((8, 6), 101_376, 84, "sm_86"),
        DeviceFacts((8, 9), 101_376, 128, "sm_89"),
        DeviceFacts((9, 0), 232_448, 132, "sm_90"),
        DeviceFacts((10, 0), 232_448, 148, "sm_100"),
        DeviceFacts((12, 0), 101_376, 170, "sm_120"),
    )
}


def facts_for_arch(arch: str) -> DeviceFacts:
    """Facts of a typical GPU of an architecture such as "sm_80", for planning where there is none."""
    try:
        return GPUS[arch]
    except KeyError:
        raise ValueError(f"arch: {arch!r} is not known; known are {', '.join(GPUS)}") from None


@lru_cache(maxsize=64)
def device_facts(index: int) -> DeviceFacts:
    """Facts of an installed GPU.

    Raises:
        CompilerError: there is no CuPy.
        DriverError: there is no driver or no such GPU.
    """
    # Imported here, because plans are made where nothing is compiled.
    from ..compiler.nvrtc import import_cupy

    cupy = import_cupy()
    runtime = cupy.cuda.runtime
    try:
        properties = runtime.getDeviceProperties(index)
        smem_per_block = runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, index)
    except runtime.CUDARuntimeError as error:
        raise DriverError(
            f"GPU {index} cannot be used: {error}. Check nvidia-smi for a driver and a device, "
            "or pass NumPy arrays to compute on the CPU"
        ) from error
    return DeviceFacts(
        compute_capability=(properties["major"], properties["minor"]),
        smem_per_block=smem_per_block,
        multiprocessors=properties["multiProcessorCount"],
        name=properties["name"].decode(),
    )

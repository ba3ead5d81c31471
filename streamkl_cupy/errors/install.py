"""The advice on what to install, for every message that gives one: what works for this copy of the package.

No package index has the project yet. When one does, this is the place to change. Only the standard library is needed,
so that the examples can read this file where the package itself is missing.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

DRIVER_LIBRARY = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"


def command(*extras: str, upgrade: bool = False) -> str:
    """The command that installs extras of this package, from whatever folder it is typed in.

    In a checkout pip gets its path. Elsewhere the package came as a wheel: pip takes the installed one for the name and
    asks an index only for what the extras need.
    """
    root = Path(__file__).resolve().parents[2]
    is_checkout = (root / "pyproject.toml").is_file() and (root / "cuda_src").is_dir()
    wanted = f"[{','.join(extras)}]" if extras else ""
    what = f'-e "{root}{wanted}"' if is_checkout else f'"streamkl-cupy{wanted}"'
    return f"pip install {'--upgrade --upgrade-strategy eager ' if upgrade else ''}{what}"


def cuda_extra(driver_cuda: str = "") -> str:
    """Which of cuda12 and cuda13 fits a driver that supports this version of CUDA, as "12.8"; empty where unknown."""
    major = (driver_cuda or _driver_cuda()).partition(".")[0]
    if not major.isdigit():
        return ""
    return "cuda13" if int(major) >= 13 else "cuda12"


def cuda(driver_cuda: str = "", upgrade: bool = False) -> str:
    """How to install CuPy and its compiler: the extra that fits the driver, both with the rule where there is none."""
    extra = cuda_extra(driver_cuda)
    if extra:
        return command(extra, upgrade=upgrade)
    return (
        f"{command('cuda12', upgrade=upgrade)}, or the same with cuda13: exactly one of the two, the one whose number "
        'nvidia-smi shows after "CUDA Version" on the machine with the GPU'
    )


def _driver_cuda() -> str:
    """The version of CUDA that the installed driver supports; empty without a driver."""
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL(DRIVER_LIBRARY).cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return ""
    return "" if failed else f"{version.value // 1000}.{version.value % 1000 // 10}"

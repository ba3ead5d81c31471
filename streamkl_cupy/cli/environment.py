"""Where a result comes from: versions, driver, GPUs, clocks, memory. Nothing here fails; what is unknown is absent."""

from __future__ import annotations

import datetime
import importlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from .. import __version__
from ..compiler.nvrtc import import_cupy

T = TypeVar("T")

PACKAGES = ("numpy", "cupy", "torch", "jax", "triton", "ml_dtypes")
_SMI_TIMEOUT = 20


def versions() -> dict[str, str]:
    """Installed versions by name, without importing anything."""
    found = {"streamkl_cupy": __version__, "python": platform.python_version(), "platform": platform.platform()}
    installed = {name: _version(name) for name in PACKAGES if name != "cupy"}
    installed["cupy"] = ", ".join(cupy_wheels())
    return found | {name: version for name, version in installed.items() if version}


def cupy_wheels() -> list[str]:
    """Installed distributions that bring CuPy; more than one break each other."""
    names = ("cupy", "cupy-cuda11x", "cupy-cuda12x", "cupy-cuda13x")
    return [f"{name} {version}" for name in names if (version := _version(name))]


def _version(distribution: str) -> str:
    # Absent, mostly; what half an uninstallation leaves behind raises other things, or has no version.
    return attempt(lambda: importlib.metadata.version(distribution) or "unknown", "")


def cuda_versions() -> dict[str, str]:
    """Versions of NVRTC, of the CUDA runtime, and of what the driver supports, as far as CuPy can tell."""
    # A broken CuPy is reported elsewhere.
    cuda = attempt(lambda: import_cupy().cuda, None)
    if cuda is None:
        return {}
    found = {
        "nvrtc": attempt(lambda: ".".join(map(str, cuda.nvrtc.getVersion())), ""),
        "cuda_runtime": attempt(lambda: _number(cuda.runtime.runtimeGetVersion()), ""),
        "cuda_driver": attempt(lambda: _number(cuda.runtime.driverGetVersion()), ""),
    }
    # Without a driver CUDA answers 0.
    return {name: value for name, value in found.items() if value not in ("", "0.0")}


def attempt(source: Callable[[], T], otherwise: T) -> T:
    """An answer, or `otherwise` where there is none.

    Broken packages and absent libraries and drivers raise whatever they like, SystemExit included.
    """
    try:
        return source()
    except KeyboardInterrupt:
        raise
    except BaseException:
        return otherwise


def _number(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def smi(query: str) -> list[list[str]]:
    """What `nvidia-smi --query-gpu` answers, one list per GPU; empty where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run(
            [tool, f"--query-gpu={query}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SMI_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.strip().splitlines() if done.returncode == 0 else []
    return [[cell.strip() for cell in line.split(",")] for line in lines]


def driver() -> dict[str, str]:
    """Version of the driver, and the CUDA version it supports, from nvidia-smi."""
    found = {}
    if rows := smi("driver_version"):
        found["driver"] = rows[0][0]
        try:
            head = subprocess.run(
                ["nvidia-smi"], capture_output=True, text=True, errors="replace", timeout=_SMI_TIMEOUT
            ).stdout
        except (OSError, subprocess.TimeoutExpired):
            return found
        if version := re.search(r"CUDA Version: *([\d.]+)", head):
            found["driver_cuda"] = version[1]
    return found


def clocks(work: Callable[[], Any], index: int = 0) -> dict[str, str]:
    """Clocks, power and temperature of a GPU while it runs `work` over and over."""
    query = "clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    try:
        asking = subprocess.Popen(
            [tool, f"--id={index}", f"--query-gpu={query}", "--format=csv,noheader"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
    except OSError:
        return {}
    while asking.poll() is None:
        work()
    cells = [cell.strip() for cell in (asking.stdout.read() if asking.stdout else "").split(",")]
    names = query.split(",")
    return dict(zip(names, cells)) if len(cells) == len(names) else {}


def card() -> str:
    """Name of the current GPU."""
    cupy = importlib.import_module("cupy")
    return str(cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())["name"].decode())


def processor() -> str:
    """Name of the CPU and how many cores this process may use."""
    from ..concurrency.threads import usable_cores

    name = platform.processor() or platform.machine()
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
        name = found[1] if found else name
    except OSError:
        pass
    return f"{name}, {usable_cores()} cores"


def available_bytes() -> int | None:
    """Main memory this process can still take, by the kernel's word and the container's limit; None where unknown."""
    limits = []
    try:
        found = re.search(r"^MemAvailable: *(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
        if found:
            limits.append(int(found[1]) * 1024)
        group = Path("/sys/fs/cgroup")
        most = (group / "memory.max").read_text(encoding="ascii").strip()
        if most != "max":
            limits.append(int(most) - int((group / "memory.current").read_text(encoding="ascii")))
    except (OSError, ValueError):
        pass
    return min(limits) if limits else None


def now() -> str:
    """Date and time in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def threads() -> str:
    """The thread settings that BLAS libraries read."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def command() -> str:
    """The command line, for whoever wants to do it again; without the private matter of where results go."""
    given = list(sys.argv[1:])
    if "--out" in given:
        at = given.index("--out")
        del given[at : at + 2]
    return " ".join(["python -m streamkl_cupy", *given])

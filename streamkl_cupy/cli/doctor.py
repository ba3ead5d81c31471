"""`python -m streamkl_cupy doctor`: does it work here, and what fixes it where it does not."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from .. import settings
from ..api import attention_kl_value_and_grad
from ..arch import DeviceFacts
from ..compile import supported_archs
from ..problem import INPUT_NAMES, STUDENT
from ..testing import problems, reference
from . import environment, report
from .compile import writable

HELP = "check this machine: versions, GPUs, cache, and one checked computation per framework"
EPILOG = """\
examples:
  python -m streamkl_cupy doctor             read it, or paste it into a bug report
  python -m streamkl_cupy doctor --json      the same for programs
  python -m streamkl_cupy doctor --cpu       judge the CPU path alone

Exit code: 0 the GPU computes the right numbers (with --cpu: the CPU does), 1 it does not, 2 wrong arguments.
"""

# One value and all gradients this close to float64 prove that everything between the call and the card works; the
# tests judge accuracy more finely.
TOLERANCE = 2e-3


@dataclass
class Check:
    """One finding. `status` is "ok", "missing" (could be installed), or "broken"; `fix` says what to do."""

    name: str
    status: str
    detail: str
    fix: str = ""


@dataclass
class Findings:
    """Everything the command found."""

    ok: bool = False
    versions: dict[str, str] = field(default_factory=dict)
    devices: list[dict[str, Any]] = field(default_factory=list)
    cache: dict[str, Any] = field(default_factory=dict)
    checks: list[Check] = field(default_factory=list)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this command."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--cpu", action="store_true", help="a machine without a GPU is fine")


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit code."""
    findings = examine()
    needed = "numpy on cpu" if options.cpu else "cupy on cuda"
    findings.ok = any(check.name == needed and check.status == "ok" for check in findings.checks)
    if options.json:
        print(json.dumps(asdict(findings), indent=1))
    else:
        show(findings, options.cpu)
    return 0 if findings.ok else 1


def examine() -> Findings:
    """Look at everything; a failure is a finding, never an exception."""
    findings = Findings(
        versions={**environment.versions(), **environment.cuda_versions(), **environment.driver()}, cache=cache()
    )
    findings.checks += wheels_and_driver(findings.versions)
    findings.devices = devices(findings.checks)
    findings.checks += cache_checks(findings.cache)
    findings.checks += computations(bool(findings.devices), findings.versions)
    return findings


def wheels_and_driver(versions: dict[str, str]) -> list[Check]:
    """Whether CuPy, its compiler and the driver are there and fit together."""
    extra = "cuda12" if versions.get("driver_cuda", "13").startswith("12") else "cuda13"
    install = f'pip install "streamkl-cupy[{extra}]"'
    checks = []
    wheels = environment.cupy_wheels()
    if len(wheels) > 1:
        names = " ".join(wheel.split()[0] for wheel in wheels)
        checks.append(
            Check(
                "CuPy", "broken", f"several wheels share one folder: {names}", f"pip uninstall -y {names} && {install}"
            )
        )
    elif not wheels:
        checks.append(Check("CuPy", "missing", "without it nothing runs on a GPU", install))
    else:
        checks.append(_attempt("CuPy", lambda: _cupy_detail(wheels[0]), install))
        checks.append(_attempt("NVRTC", _nvrtc_detail, install))
    if "driver" in versions:
        checks.append(
            Check("driver", "ok", f"{versions['driver']}, supports CUDA {versions.get('driver_cuda', 'unknown')}")
        )
    elif "cuda_driver" in versions:
        checks.append(Check("driver", "ok", f"supports CUDA {versions['cuda_driver']}; nvidia-smi is not on the PATH"))
    else:
        checks.append(
            Check(
                "driver",
                "missing",
                "no NVIDIA driver answers",
                "install NVIDIA's driver (a container needs docker run --gpus all); the CPU path works without",
            )
        )
    return checks


def _cupy_detail(wheel: str) -> str:
    importlib.import_module("cupy")
    return wheel


def _nvrtc_detail() -> str:
    archs = supported_archs()
    return f"{environment.cuda_versions().get('nvrtc', '?')}, for sm_{archs[0]} to sm_{archs[-1]}"


def devices(checks: list[Check]) -> list[dict[str, Any]]:
    """Usable GPUs with the kernels each would run; what is wrong with one is added to `checks`."""
    try:
        count = int(importlib.import_module("cupy").cuda.runtime.getDeviceCount())
    except Exception:  # no CuPy, no driver, no GPU: said by other checks
        return []
    found: list[dict[str, Any]] = []
    for index in range(count):
        # One GPU in trouble must not hide the others.
        check = _attempt(
            f"GPU {index}",
            lambda index=index: found.append(_device(index)) or "",  # type: ignore[misc,func-returns-value]
            "see nvidia-smi; leave it out with CUDA_VISIBLE_DEVICES",
        )
        checks += [check] if check.status != "ok" else []
    return found


def _device(index: int) -> dict[str, Any]:
    from ..launch import device_facts

    facts = device_facts(index)
    _, total = importlib.import_module("cupy").cuda.Device(index).mem_info
    return {
        "index": index,
        "name": facts.name,
        "capability": ".".join(map(str, facts.compute_capability)),
        "memory_gib": round(total / 2**30, 1),
        "multiprocessors": facts.multiprocessors,
        "shared_kib_per_block": facts.smem_per_block // 1024,
        "family": family_of(facts),
    }


def family_of(facts: DeviceFacts) -> str:
    """The kernels a GPU runs for an ordinary problem, or why it runs none."""
    from ..catalogue import ELEMENT_TYPES, problem
    from ..planning import make_plan

    try:
        plan = make_plan(problem((128, 128), ELEMENT_TYPES[0]), facts)
    except NotImplementedError as reason:
        return f"none: {reason}"
    return f"{plan.forward.family} ({plan.forward.arch})"


def cache() -> dict[str, Any]:
    """The folder of compiled kernels."""
    folder = settings.cache_dir()
    if folder is None:
        return {"folder": None, "writable": False, "kernels": 0, "mib": 0.0}
    with os.scandir(folder) if folder.is_dir() else nullcontext(()) as files:
        sizes = [file.stat().st_size for file in files if file.name.endswith(".cubin")]
    return {
        "folder": str(folder),
        "writable": writable(folder),
        "kernels": len(sizes),
        "mib": round(sum(sizes) / 2**20, 1),
    }


def cache_checks(found: dict[str, Any]) -> list[Check]:
    """Whether compiled kernels are kept."""
    detail = f"{found['folder']}: {found['kernels']} kernels, {found['mib']} MiB"
    if found["writable"]:
        return [Check("kernel cache", "ok", detail)]
    fix = f"set {settings.CACHE_DIR} to a folder that can be written; without one each process compiles anew"
    return [Check("kernel cache", "broken", f"{detail}, cannot be written", fix)]


def computations(gpu: bool, versions: dict[str, str]) -> list[Check]:
    """A small problem through every framework that is here, on the CPU and on the GPU."""
    # JAX would take most of the card for itself at its first array.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    checks = [_attempt("numpy on cpu", lambda: compute(lambda x: x), "please report this")]
    if gpu:
        checks.append(
            _attempt("cupy on cuda", lambda: compute(importlib.import_module("cupy").asarray), "see the message above")
        )
    for name, to_framework in (("torch", _to_torch), ("jax", _to_jax)):
        if importlib.util.find_spec(name) is None:
            checks.append(Check(name, "missing", "not installed, not needed", f'pip install "streamkl-cupy[{name}]"'))
            continue
        places = ["cpu", *(["cuda"] if gpu and "cupy" in versions else [])]
        for place in places:
            fix = f"install a {name} built for this driver's CUDA" if place == "cuda" else f"reinstall {name}"
            checks.append(
                _attempt(f"{name} on {place}", lambda put=to_framework, place=place: compute(put(place)), fix)  # type: ignore[misc]
            )
    return checks


def _to_torch(place: str) -> Callable[[Any], Any]:
    torch = importlib.import_module("torch")
    return lambda x: torch.from_numpy(x).to(place)


def _to_jax(place: str) -> Callable[[Any], Any]:
    jax = importlib.import_module("jax")
    device = jax.devices(place)[0]
    return lambda x: jax.device_put(x, device)


def compute(convert: Callable[[Any], Any]) -> str:
    """Loss and all gradients of one small problem, checked against float64; how close they came.

    Raises:
        ArithmeticError: they are wrong.
    """
    # Ragged sizes and grouped keys, so that edges are computed too; a new problem each time.
    case = problems.make(
        M=70,
        N=133,
        H=4,
        D_t=64,
        D_s=32,
        student_key_heads=2,
        dtypes="float16",
        seed=int(np.random.default_rng().integers(2**31)),
    )
    given = [convert(x.astype(np.float16)) for x in case.arrays]
    value, grads = attention_kl_value_and_grad(*given, wrt=INPUT_NAMES, causal=True, reduction="sum")
    rows = reference.forward(*case.arrays, causal=True)
    want = reference.backward(np.ones_like(rows.kl), *case.arrays, causal=True).value
    errors = {"value": abs(float(value) - rows.kl.sum()) / (1 + rows.kl.sum())}
    for name in (*STUDENT, "teacher_q", "teacher_k"):
        got = _host(getattr(grads, name))
        expected = getattr(want, name)
        errors[name] = float(np.linalg.norm(got - expected) / np.linalg.norm(expected))
    worst = max(errors, key=lambda name: errors[name])
    if not all(error < TOLERANCE for error in errors.values()):
        raise ArithmeticError(f"{worst} is off by {errors[worst]:.1e} (relative) from float64")
    return f"value and four gradients right, {errors[worst]:.0e} from float64 at most"


def _host(x: Any) -> np.ndarray[Any, Any]:
    if hasattr(x, "detach"):
        x = x.detach().cpu().numpy()
    elif hasattr(x, "get"):
        x = x.get()
    return np.asarray(x).astype(np.float64)


def _attempt(name: str, look: Callable[[], str], fix: str) -> Check:
    try:
        return Check(name, "ok", look())
    except Exception as error:  # whatever is broken here is what the user came to learn
        return Check(name, "broken", _words(error), fix)


def _words(error: Exception) -> str:
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"


def show(findings: Findings, cpu: bool) -> None:
    """Print tables and the verdict."""
    report.table("Versions", ("<", "<"), findings.versions.items())
    if findings.devices:
        keys = list(findings.devices[0])
        cells = [[str(device[key]) for key in keys] for device in findings.devices]
        report.table("GPUs", [f"<{key.replace('_', ' ')}" for key in keys], cells)
    report.table("Checks", ("<", "<", "<", "<fix"), [list(asdict(check).values()) for check in findings.checks])
    if findings.ok:
        print("Ready." if not cpu else "Ready, on the CPU.")
        return
    print("Not ready: no GPU computes the right numbers here. What to do, in this order:" if not cpu else "Not ready:")
    for check in findings.checks:
        if check.status == "broken" or (check.name in ("CuPy", "driver") and check.status == "missing"):
            print(f"  {check.name}: {check.fix or check.detail}")
    if not cpu:
        print("The CPU path is judged by --cpu.")

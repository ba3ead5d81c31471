"""`python -m streamkl_cupy doctor`: does it work here, and what fixes it where it does not."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..api import attention_kl_value_and_grad
from ..compiler import settings
from ..compiler.nvrtc import import_cupy, supported_archs
from ..errors import install
from ..kernels.gpus import DeviceFacts
from ..problem import INPUT_NAMES, STUDENT
from ..testing import problems, reference
from . import environment, report
from .compile import unusable
from .environment import attempt

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
PATIENCE = 300.0
"""Seconds for all computations of one framework; importing a large one from a slow disk takes a minute."""


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
    # What packages print when they are imported is none of ours, least of all in JSON.
    with redirect_stdout(sys.stderr):
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
    get_cupy = install.cuda(versions.get("driver_cuda") or versions.get("cuda_driver", ""))
    checks = []
    wheels = environment.cupy_wheels()
    names = " ".join(wheel.split()[0] for wheel in wheels)
    if len(wheels) > 1:
        anew = f"pip uninstall -y {names} && {get_cupy}"
        checks.append(Check("CuPy", "broken", f"several wheels share one folder: {names}", anew))
    elif not wheels:
        checks.append(Check("CuPy", "missing", "without it nothing runs on a GPU", get_cupy))
    else:
        anew = f"pip uninstall -y {names} && {get_cupy}"
        checks.append(_attempt("CuPy", lambda: _cupy_detail(wheels[0]), anew))
        checks.append(_attempt("NVRTC", _nvrtc_detail, get_cupy))
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
    import_cupy()
    return wheel


def _nvrtc_detail() -> str:
    archs = supported_archs()
    return f"{environment.cuda_versions().get('nvrtc', '?')}, for sm_{archs[0]} to sm_{archs[-1]}"


def devices(checks: list[Check]) -> list[dict[str, Any]]:
    """Usable GPUs with the kernels each would run; what is wrong with one is added to `checks`."""
    # Without CuPy, a driver or a GPU there are none: said by other checks.
    count = attempt(lambda: int(import_cupy().cuda.runtime.getDeviceCount()), 0)
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
    from ..kernels.gpus import device_facts

    facts = device_facts(index)
    _, total = import_cupy().cuda.Device(index).mem_info
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
    from ..planning import make_plan
    from .catalogue import ELEMENT_TYPES, problem

    try:
        plan = make_plan(problem((128, 128), ELEMENT_TYPES[0]), facts)
    except NotImplementedError as reason:
        return f"none: {reason}"
    return f"{plan.forward.family} ({plan.forward.arch})"


def cache() -> dict[str, Any]:
    """The folder of compiled kernels, and why it is of no use, where it is of none."""
    folder = settings.cache_dir()
    if folder is None:
        problem = f"no home folder is known; set {settings.CACHE_DIR} to a folder"
        return {"folder": None, "usable": False, "problem": problem, "kernels": 0, "mib": 0.0}
    problem = unusable(folder)
    nothing: list[int] = []
    sizes = attempt(lambda: [path.stat().st_size for path in folder.glob("*.cubin")], nothing)
    return {
        "folder": str(folder),
        "usable": not problem,
        "problem": problem,
        "kernels": len(sizes),
        "mib": round(sum(sizes) / 2**20, 1),
    }


def cache_checks(found: dict[str, Any]) -> list[Check]:
    """Whether compiled kernels are kept, and who is trusted to put some there."""
    detail = f"{found['folder']}: {found['kernels']} kernels, {found['mib']} MiB"
    if found["usable"]:
        everybody = settings.cache_trusts_all()
        whom = f"everybody who can write there, by {settings.CACHE_TRUST}" if everybody else "this user and root alone"
        return [Check("kernel cache", "ok", f"{detail}, from {whom}")]
    return [Check("kernel cache", "broken", f"{detail}; each process compiles anew", found["problem"])]


def computations(gpu: bool, versions: dict[str, str]) -> list[Check]:
    """A small problem through every framework that is here, on the CPU and on the GPU."""
    checks = [_attempt("numpy on cpu", lambda: compute(lambda x: x), "please report this")]
    if gpu:
        checks += in_a_process("cupy", ["cuda"])
    for name in ("torch", "jax"):
        # A finder that fails has found something.
        if attempt(lambda name=name: importlib.util.find_spec(name) is None, False):  # type: ignore[misc]
            checks.append(Check(name, "missing", "not installed, not needed", install.command(name)))
        else:
            checks += in_a_process(name, ["cpu", *(["cuda"] if gpu and "cupy" in versions else [])])
    return checks


def in_a_process(framework: str, devices: Sequence[str]) -> list[Check]:
    """Compute with a framework in a process of its own.

    A broken framework may raise, exit, crash, hang or print whatever it likes; here each of that is a finding.
    """
    # What this process can import, and JAX without the most of the card that it would take at its first array.
    paths = os.pathsep.join(path or "." for path in sys.path)
    env = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", **os.environ, "PYTHONPATH": paths}
    code = f"from {__name__} import answer; answer{(framework, *devices)}"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env=env,
    ) as child:
        try:
            out, err = child.communicate(timeout=PATIENCE)
            end = _ending(child.returncode)
        except subprocess.TimeoutExpired:
            child.kill()
            out, err = child.communicate()
            end = f"no answer in {PATIENCE:.0f} s"
    checks = [Check(**json.loads(line)) for line in out.splitlines(keepends=True) if line.endswith("\n")]
    checks += [
        Check(f"{framework} on {device}", "broken", end, _remedy(framework, device))
        for device in devices[len(checks) :]
    ]
    said = [line.strip() for line in err.splitlines() if line.strip()]
    for check in checks:
        if check.status == "broken" and said:
            check.detail += f" (printed last: {said[-1][:200]})"
    return checks


def _ending(code: int) -> str:
    if code >= 0:
        return f"the process ended with exit code {code} in the middle of it"
    return f"the process was ended by {attempt(lambda: signal.Signals(-code).name, f'signal {-code}')}"


def _remedy(framework: str, device: str) -> str:
    if framework == "cupy":
        return "see the message above"
    return f"install a {framework} built for this driver's CUDA" if device == "cuda" else f"reinstall {framework}"


def answer(framework: str, *devices: str) -> None:
    """In that process: print one finding per device, each a line of JSON, and nothing else to standard output."""
    findings = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    convert = {"cupy": _to_cupy, "torch": _to_torch, "jax": _to_jax}[framework]
    for device in devices:
        check = _attempt(
            f"{framework} on {device}",
            lambda device=device: compute(convert(device)),  # type: ignore[misc]
            _remedy(framework, device),
        )
        print(json.dumps(asdict(check)), file=findings, flush=True)


def _to_cupy(device: str) -> Callable[[Any], Any]:
    return import_cupy().asarray  # type: ignore[no-any-return]


def _to_torch(device: str) -> Callable[[Any], Any]:
    torch = importlib.import_module("torch")
    return lambda x: torch.from_numpy(x).to(device)


def _to_jax(device: str) -> Callable[[Any], Any]:
    jax = importlib.import_module("jax")
    device = jax.devices(device)[0]
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
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # whatever is broken here is what the user came to learn; SystemExit too
        return Check(name, "broken", _words(error), fix)


def _words(error: BaseException) -> str:
    lines = [line for line in attempt(lambda: str(error), "").strip().splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}".removesuffix(": ")


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

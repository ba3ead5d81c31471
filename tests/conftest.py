"""What every test shares: when the marked ones are skipped and why, seeds, and one adaptor per kind of array."""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import os
import secrets
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TypeVar

# Before NumPy is imported. These products are small: several BLAS threads spend their time waiting for each other, and
# on busy cores they make a run several times longer.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from numpy.typing import NDArray

import streamkl_cupy
from streamkl_cupy.numpy_backend.elements import narrow, widen
from streamkl_cupy.options import MASK_ARRAYS
from streamkl_cupy.problem import INPUT_NAMES
from streamkl_cupy.testing import reference
from streamkl_cupy.testing.compare import check_gradients, check_lse, check_rows
from streamkl_cupy.testing.problems import Case

# XLA would otherwise take most of the GPU's memory from the tests of the other frameworks.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

Array = NDArray[Any]
T = TypeVar("T")
EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--passed", metavar="FILE", help="leave out tests that FILE lists, and add those that pass to it")
    parser.addoption("--seed", type=int, default=None, help="repeat a run's random inputs (the seed is in its header)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--seed") is None:
        config.option.seed = secrets.randbelow(10**6)


def pytest_report_header(config: pytest.Config) -> str:
    return f"random inputs: --seed {config.getoption('--seed')}"


@functools.cache
def gpu_missing() -> str:
    """Why tests marked gpu cannot run here; empty where they can."""
    try:
        import cupy
    except ImportError:
        return "needs CuPy, which is not installed"
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"needs an NVIDIA GPU: {error}"
    return "" if count else "needs an NVIDIA GPU: none found"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if file := config.getoption("--passed"):
        known = set(Path(file).read_text(encoding="utf-8").splitlines() if Path(file).exists() else ())
        items[:] = [item for item in items if item.nodeid not in known]
    for item in items:
        if "gpu" in item.keywords and gpu_missing():
            item.add_marker(pytest.mark.skip(reason=gpu_missing()))
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow: give --slow to run it"))
    long = [item for item in items if "long" in item.keywords]
    others = [item for item in items if "long" not in item.keywords]
    items[:] = dealt(long, others, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def dealt(long: list[T], others: list[T], processes: int) -> list[T]:
    """One list of which each process has a piece, as xdist cuts it: the long ones are dealt out in turns, and first.

    A process that is done takes of the end of another's piece, so that what is left at the end is short.
    """
    found: list[T] = []
    left = len(long) + len(others)
    for i in range(processes):
        mine = long[i::processes]
        more = max(left // (processes - i) - len(mine), 0)
        found += mine + others[:more]
        others, left = others[more:], left - len(mine) - len(others[:more])
    return found


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    worker = hasattr(session.config, "workerinput")
    if (file := session.config.getoption("--passed")) and reporter is not None and not worker:
        with Path(file).open("a", encoding="utf-8") as listed:
            listed.writelines(f"{report.nodeid}\n" for report in reporter.stats.get("passed", []))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = terminalreporter.stats.get("skipped", [])
    # A module that is skipped as a whole reports without keywords.
    skipped = [report for report in reports if "gpu" in getattr(report, "keywords", ())]
    if skipped and gpu_missing():
        terminalreporter.write_line(f"{len(skipped)} gpu tests did not run: {gpu_missing()}", yellow=True)


def functions_run(call: Callable[[], object]) -> list[str]:
    """Functions of the package that a call runs, each time, as module.function; without those written inside others."""
    found = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "call" and module.startswith("streamkl_cupy.") and frame.f_code.co_name[0] != "<":
            found.append(f"{module.removeprefix('streamkl_cupy.')}.{frame.f_code.co_name}")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


# Where these are of a call like one before: it is looked up, not read, checked, planned or compiled again.
LOOKED_UP = frozenset(
    (
        *(
            "advice.signatures",
            "api",
            "arrays",
            "autodiff.torch",
            "call",
            "concurrency.locks",
            "launch",
            "options",
            "torch",
            "validate",
            "arguments",
        ),
        *("frameworks", "frameworks.base", "frameworks.cupy", "frameworks.numpy", "frameworks.torch"),
        "results",
        "rules.reductions",
    )
)


# What runs where addresses are new.
PACKED_ANEW = frozenset(
    {
        *(
            f"launch.{name}"
            for name in ("_launch", "forward", "backward", "commands", "keep", "_commands", "_read_rows")
        ),
        *("call.views", "call.views_of", "call.outputs", "arrays.at"),
    }
)


def check_looked_up(call: Callable[[], object], most: int) -> None:
    """Demand that a call like one before is looked up, by at most so many functions of the package."""
    call()
    call()
    found = functions_run(call)
    others = {name.rpartition(".")[0] for name in found} - LOOKED_UP
    assert not others, found
    assert not {name for name in found if name in ("call._read", "call.prepare", "validate.to_problem")}, found
    # Results may lie where none did before, and are written into packed arguments then.
    found = [name for name in found if name not in PACKED_ANEW]
    assert len(found) <= most, found


@pytest.fixture(autouse=True)
def no_garbage(request: pytest.FixtureRequest) -> None:
    """A CUDA graph that the collector destroys while another is captured would invalidate that one."""
    if "gpu" in request.keywords and ("graph" in request.node.name or "capture" in request.node.name):
        gc.collect()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Fresh numbers for each test and each run, the same ones for the same --seed."""
    return np.random.default_rng([request.config.getoption("--seed"), zlib.crc32(request.node.nodeid.encode())])


@pytest.fixture
def turn(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`turn(several, *places)` is one of several: by turns over the places of a test's parameters, by lot in each run.

    For what a test would otherwise be multiplied by and each time compile for: every run has all of it, and of what it
    can meet there other pairs than the last run.
    """
    lot: int = request.config.getoption("--seed")

    def one(several: Sequence[Any], *places: int) -> Any:
        return several[(lot + sum(places)) % len(several)]

    return one


def examples(count: int) -> Any:
    """So many random examples, few enough for a slow machine; a failure prints how to repeat it."""
    return settings(
        max_examples=count,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )


def load_script(path: str) -> ModuleType:
    """A script of the examples, by its path from there, as a module."""
    where = EXAMPLES / path
    spec = importlib.util.spec_from_file_location(f"example_{where.stem}", where)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


_LAST: dict[str, tuple[Any, Any]] = {}


def by_reference(function: Callable[..., T], case: Case, *given: Array) -> T:
    """What a function of the reference says of a case. The last answer of each is kept: a problem that is computed in
    several ways in turns, or with several upstream gradients, mostly spends its time there."""
    numbers = [x if isinstance(x, np.ndarray) else np.asarray(0) for x in case.options.values()]
    key = (
        *[(x.shape, x.dtype, zlib.crc32(np.ascontiguousarray(x))) for x in (*given, *case.arrays, *numbers)],
        {name: x for name, x in case.options.items() if not isinstance(x, np.ndarray)},
        [*case.options],
    )
    name = function.__name__
    if name not in _LAST or _LAST[name][0] != key:
        _LAST[name] = key, function(*given, *case.arrays, **case.options)
    found: T = _LAST[name][1]
    return found


class Backend:
    """Makes arrays of one framework on one device from float NumPy arrays, and reads them back as float64."""

    name: str
    module: str
    device = "cpu"
    dtypes: tuple[str, ...] = ("float32", "float16", "bfloat16")
    has_views = True
    has_negative_strides = False

    def __init__(self) -> None:
        self.xp: Any = pytest.importorskip(self.module, reason=f"needs {self.module}, which is not installed")

    def __str__(self) -> str:
        return self.name

    def array(self, x: Any, dtype: str) -> Any:
        """A new compact array of exactly this type."""
        raise NotImplementedError

    def numpy(self, x: Any) -> Array:
        """The values, widened without error."""
        raise NotImplementedError

    def dtype(self, x: Any) -> str:
        return str(x.dtype).removeprefix("torch.")

    def full(self, shape: tuple[int, ...], dtype: str) -> Any:
        return self.array(np.full(shape, np.nan, np.float32), dtype)

    def poison(self, like: tuple[Any, ...]) -> None:
        """Fill memory of these arrays' sizes with NaN and give it back, so that results are likely to be made there.

        What a kernel forgets to write then shows.
        """
        held = [self.full(tuple(x.shape), self.dtype(x)) for x in like for _ in range(3)]
        held += [self.full((3, *x.shape[:-1]), "float32") for x in like for _ in range(3)]
        self.synchronize()
        del held

    def synchronize(self) -> None:
        """Wait for the device."""

    def by_default(self) -> AbstractContextManager[Any]:
        """While this lasts, arrays whose device nobody names are made on this one, where the framework can be told."""
        return nullcontext()

    def arrays(self, case: Case) -> tuple[Any, ...]:
        """The inputs of a case in its types."""
        return tuple(self.array(x, dtype) for x, dtype in zip(case.arrays, case.dtype_of_inputs, strict=True))

    def mask_array(self, x: Array) -> Any:
        """An array that a mask reads: int32 or bool."""
        return self.xp.asarray(x)

    def options(self, case: Case) -> dict[str, Any]:
        """The options of a case, with arrays of this framework."""
        return {name: self.mask_array(x) if name in MASK_ARRAYS else x for name, x in case.options.items()}

    def judge(
        self,
        case: Case,
        grad: Array | None = None,
        *,
        wrt: tuple[str, ...] = INPUT_NAMES,
        arrays: tuple[Any, ...] | None = None,
        plain: bool = False,
        nan_may_spread: bool = False,
        unit: float | None = None,
        entropy: bool = False,
        **how: Any,
    ) -> tuple[Any, Any]:
        """Run a case forward, and backward where `grad` is given, in poisoned memory, and hold it against float64.

        `arrays` replaces the inputs by other arrays of the same values. `how` are options that change how a result is
        computed and not what it is; `entropy` asks for the teacher's too. Returns the rows and the gradients as they
        came.
        """
        inputs = self.arrays(case) if arrays is None else arrays
        options = {**self.options(case), **how}
        compute = "float64" if "float64" in case.dtypes else "float32"
        expected = by_reference(reference.forward, case)
        calibration = reference.plain(
            np.ones(expected.kl.shape) if grad is None else grad, *case.arrays, dtypes=case.dtypes, **case.options
        ) if plain else (None, None)  # fmt: skip
        self.poison(inputs)
        rows = streamkl_cupy.attention_kl_forward(*inputs, **options, return_entropy=entropy)
        check_rows("kl", self.numpy(rows.kl), expected, hard=case.hard, dtype=compute, plain=calibration[0], unit=unit)
        for name in ("teacher_lse", "student_lse"):
            lse = self.numpy(getattr(rows, name))
            check_lse(name, lse, getattr(expected, name), expected.largest, compute, unit)
        if entropy:
            of_entropy = expected._replace(kl=expected.entropy, condition=expected.entropy_condition)
            found = self.numpy(rows.teacher_entropy)
            check_rows("entropy", found, of_entropy, hard=case.hard, dtype=compute, unit=unit)
        assert {self.dtype(x) for x in rows if x is not None} == {compute}
        if grad is None:
            return rows, None
        wanted = by_reference(reference.backward, case, grad)
        upstream = self.array(grad, compute)
        self.poison(inputs)
        grads = streamkl_cupy.attention_kl_backward(upstream, *inputs, saved=rows, wrt=wrt, **options)
        assert [x is not None for x in grads] == [name in wrt for name in INPUT_NAMES]
        for x, given in zip(grads, inputs, strict=True):
            assert x is None or self.dtype(x) == self.dtype(given)
        check_gradients(
            tuple(None if x is None else self.numpy(x) for x in grads),
            wanted,
            case.dtypes,
            plain=calibration[1],
            hard=case.hard_gradients,
            nan_may_spread=nan_may_spread,
            unit=unit,
        )
        return rows, grads


def bfloat16_bits(x: Any) -> Array:
    return narrow(np.asarray(x, np.float32), np.dtype(np.uint16))


def from_bits(bits: Array) -> Array:
    return widen(bits, np.empty(bits.shape, np.float64))


def bfloat16() -> Any:
    return pytest.importorskip("ml_dtypes", reason="bfloat16 in NumPy arrays needs ml_dtypes").bfloat16


class NumPy(Backend):
    name = module = "numpy"
    dtypes = ("float32", "float16", "bfloat16", "float64")
    has_negative_strides = True

    def array(self, x: Any, dtype: str) -> Any:
        if dtype == "bfloat16":
            return bfloat16_bits(x).view(bfloat16())
        return np.array(x, dtype)

    def numpy(self, x: Any) -> Array:
        return np.asarray(x).astype(np.float64)


class CuPy(Backend):
    name = module = "cupy"
    device = "cuda"
    has_negative_strides = True

    def array(self, x: Any, dtype: str) -> Any:
        if dtype == "bfloat16":
            return self.xp.asarray(bfloat16_bits(x)).view(bfloat16())
        return self.xp.asarray(np.array(x, dtype))

    def numpy(self, x: Any) -> Array:
        if self.dtype(x) == "bfloat16":
            return from_bits(self.xp.ascontiguousarray(x).view(np.uint16).get())
        return np.asarray(x.get(), np.float64)

    def synchronize(self) -> None:
        self.xp.cuda.get_current_stream().synchronize()


class Torch(Backend):
    name = "torch-cpu"
    module = "torch"
    dtypes = ("float32", "float16", "bfloat16", "float64")

    def array(self, x: Any, dtype: str) -> Any:
        # Through float64, so that the rounding is the one of the cast below.
        return self.xp.from_numpy(np.array(x, np.float64)).to(getattr(self.xp, dtype)).to(self.device)

    def mask_array(self, x: Array) -> Any:
        return self.xp.from_numpy(np.array(x)).to(self.device)

    def numpy(self, x: Any) -> Array:
        return np.asarray(x.detach().to("cpu", self.xp.float64).numpy())


class TorchCuda(Torch):
    name = "torch-cuda"
    device = "cuda"
    dtypes = ("float32", "float16", "bfloat16")

    def __init__(self) -> None:
        super().__init__()
        if not self.xp.cuda.is_available():
            pytest.skip("needs torch with CUDA")

    def synchronize(self) -> None:
        self.xp.cuda.synchronize()


class Jax(Backend):
    name = "jax-cpu"
    module = "jax"
    has_views = False

    def __init__(self) -> None:
        super().__init__()
        try:
            self.place = self.xp.devices("cpu" if self.device == "cpu" else "gpu")[0]
        except RuntimeError as error:
            pytest.skip(f"needs JAX on {self.device}: {error}")
        self.jnp = importlib.import_module("jax.numpy")

    def array(self, x: Any, dtype: str) -> Any:
        host = bfloat16_bits(x).view(bfloat16()) if dtype == "bfloat16" else np.array(x, dtype)
        return self.xp.device_put(host, self.place)

    def mask_array(self, x: Array) -> Any:
        return self.xp.device_put(x, self.place)

    def numpy(self, x: Any) -> Array:
        return np.asarray(x).astype(np.float64)

    def synchronize(self) -> None:
        self.xp.block_until_ready(self.jnp.zeros(1))

    def by_default(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.xp.default_device(self.place)
        return context


class JaxCuda(Jax):
    name = "jax-cuda"
    device = "cuda"


_CPU: tuple[type[Backend], ...] = (NumPy, Torch, Jax)
_GPU: tuple[type[Backend], ...] = (CuPy, TorchCuda, JaxCuda)


@pytest.fixture(
    params=[*_CPU, *(pytest.param(kind, marks=pytest.mark.gpu) for kind in _GPU)],
    ids=[kind.name for kind in (*_CPU, *_GPU)],
)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """One framework on one device: numpy, torch-cpu, jax-cpu, and on a GPU cupy, torch-cuda, jax-cuda."""
    found: Backend = request.param()
    with found.by_default():
        yield found


@pytest.fixture(
    params=[NumPy, *(pytest.param(kind, marks=pytest.mark.gpu) for kind in (CuPy, TorchCuda))],
    ids=[kind.name for kind in (NumPy, CuPy, TorchCuda)],
)
def strided_backend(request: pytest.FixtureRequest) -> Backend:
    """The frameworks with views: numpy, and on a GPU cupy and torch-cuda."""
    found: Backend = request.param()
    return found


@pytest.fixture(params=[NumPy, pytest.param(CuPy, marks=pytest.mark.gpu)], ids=["numpy", "cupy"])
def core(request: pytest.FixtureRequest) -> Backend:
    """One framework per device, where the device's arithmetic is judged and not the framework: numpy and cupy."""
    found: Backend = request.param()
    return found


@pytest.fixture
def numpy_only() -> Backend:
    return NumPy()


@pytest.fixture
def cupy_only() -> Backend:
    return CuPy()

"""Ways of calling x functions: each operation from threads, pools, forks, compilers, transforms, hooks and other GPUs.

A new operation is one line in OPS, and is then called in every way; a new way is one function, and every operation is
called in it. Results are held against float64.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import gc
import importlib
import os
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import streamkl_cupy
from streamkl_cupy import call, patterns
from streamkl_cupy.ops.sparse_attention import ATTENTION_INPUTS
from streamkl_cupy.problem import INPUT_NAMES
from streamkl_cupy.testing import attention, indexer_reference, reference
from streamkl_cupy.testing.problems import make

SHAPE: dict[str, Any] = {"B": 1, "H": 2, "M": 64, "N": 64, "D_t": 64, "dtypes": "float16"}


@dataclass(frozen=True)
class Op:
    """One operation: a loss of its differentiable function, its explicit ones, and what they should give."""

    name: str
    inputs: tuple[str, ...]
    loss: Callable[..., Any]
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    """(rows of a forward, ones for each of them, arrays, options) -> gradients of the loss."""
    value_and_grad: Callable[..., Any]
    make: Callable[..., Any]
    """(seed, extents by name) -> arrays that are exact in float16, all of one shape where no extents are given."""
    expected: Callable[..., tuple[float, list[Any]]]
    """Sum of the values and its gradients, in float64."""
    beside: Callable[..., Any]
    """(arrays, weights of rows, what `prepared` made) -> a number of all that a differentiable call gives."""
    prepared: Callable[..., Any]
    """(arrays) -> an array that such a call reads besides."""
    at: int = 0
    """The first of two neighbours among the inputs that are differentiated alone."""
    scale: str = "scale"
    """An option that is a number."""
    lacks: tuple[str, ...] = ()
    """Options of the others that it does not have."""

    def __str__(self) -> str:
        return self.name

    def with_first(self, x: Any, changed: Any) -> tuple[Any, ...]:
        """The inputs with another one in the place `at`."""
        return (*x[: self.at], changed, *x[self.at + 1 :])


def expected_kl(arrays: Any, options: dict[str, Any]) -> tuple[float, list[Any]]:
    rows = reference.forward(*arrays, **options)
    return rows.kl.sum(), list(reference.backward(np.ones_like(rows.kl), *arrays, **options).value)


def kl_beside(x: Any, weight: Any, dense: Any) -> Any:
    rows = streamkl_cupy.attention_kl(*x, causal=True, row_weight=weight, return_lse=True, dense_teacher_lse=dense)
    return rows.kl.sum() + rows.teacher_mass.mean()


def single(x: Any) -> Any:
    return x.float() if hasattr(x, "float") else x.astype("float32")


def its_gpu(x: Any) -> Any:
    """CuPy's own functions want the GPU of an array to be current; those of others follow their arrays."""
    return x.device if type(x).__module__.partition(".")[0] == "cupy" else contextlib.nullcontext()


def squares(*x: Any, row_weight: Any = None, reduction: str = "none", **options: Any) -> Any:
    """A loss of attention's outputs, whose value does not cancel."""
    out = streamkl_cupy.sparse_attention(*x, **options)
    with its_gpu(out):
        rows = (single(out) ** 2).sum(-1)
        rows = rows if row_weight is None else rows * row_weight
        return rows if reduction == "none" else rows.mean() if reduction == "mean" else rows.sum()


def squares_backward(rows: Any, _: Any, *x: Any, **options: Any) -> Any:
    with its_gpu(rows.out):
        grad = rows.out * 2
    return streamkl_cupy.sparse_attention_backward(grad, *x, saved=rows, **options)


def squares_and_gradients(*x: Any, wrt: Any = None, reduction: str = "sum", **options: Any) -> tuple[Any, Any]:
    rows = streamkl_cupy.sparse_attention_forward(*x, **options)
    wanted = {} if wrt is None else {"wrt": wrt}
    grads = squares_backward(rows, None, *x, **wanted, **options)
    with its_gpu(rows.out):
        return (single(rows.out) ** 2).sum(), grads


def expected_squares(arrays: Any, options: dict[str, Any]) -> tuple[float, list[Any]]:
    out = attention.forward(*arrays, **options).out.value
    return (out**2).sum(), [g.value for g in attention.backward(2 * out, None, *arrays, **options)]


def attention_arrays(seed: int, **extents: int) -> Any:
    query, key, _, value = make(seed=seed, causal=True, **{**SHAPE, **extents}).arrays
    return query, key, value


def squares_beside(x: Any, weight: Any, bias: Any) -> Any:
    rows = streamkl_cupy.sparse_attention(*x, causal=True, return_lse=True)
    return (single(rows.out).sum(-1) * weight).sum() + (rows.lse * bias).mean()


def constant(x: Any) -> Any:
    """To differentiation; CuPy and NumPy know none."""
    if hasattr(x, "detach"):
        return x.detach()
    if type(x).__module__.partition(".")[0] in ("jax", "jaxlib"):
        return importlib.import_module("jax").lax.stop_gradient(x)
    return x


def indexed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the indexer of queries and keys alone, which the teacher has too; each head is a group."""

    def call(q: Any, k: Any, **options: Any) -> Any:
        options = {"index_scale": 0.1, "head_groups": q.shape[-3 if "cu_seqlens_q" not in options else -2], **options}
        with its_gpu(q):
            student = single(q), single(k)
        return function(constant(q), constant(k), *student, **options)

    return call


def indexed_backward(rows: Any, grad: Any, *x: Any, **options: Any) -> Any:
    back = functools.partial(streamkl_cupy.indexer_kl_backward, grad, saved=rows)
    return indexed(lambda *a, **own: back(*a, **own))(*x, **{"wrt": INDEXED, **options})[:2]


def indexed_value_and_grad(*x: Any, **options: Any) -> Any:
    value, grads = indexed(streamkl_cupy.indexer_kl_value_and_grad)(*x, **options)
    return value, grads[:2]


def expected_indexed(arrays: Any, options: dict[str, Any]) -> tuple[float, list[Any]]:
    q, k = arrays
    own = {"index_scale": 0.1, "head_groups": q.shape[1], **options}
    rows = indexer_reference.forward(q, k, q, k, **own)
    return rows.kl.sum(), list(indexer_reference.backward(np.ones_like(rows.kl), q, k, q, k, **own)[:2])


def indexed_beside(x: Any, weight: Any, lse: Any) -> Any:
    asked = {"row_weight": weight, "teacher_lse": lse, "return_stats": True}
    rows = indexed(streamkl_cupy.indexer_kl)(*x, causal=True, **asked)
    return rows.kl.sum() + rows.target_sum.mean() + rows.index_lse.mean()


INDEXED = ("index_q", "index_k")
OPS = [
    Op(
        "attention_kl",
        INPUT_NAMES,
        streamkl_cupy.attention_kl,
        streamkl_cupy.attention_kl_forward,
        lambda rows, grad, *x, **options: streamkl_cupy.attention_kl_backward(grad, *x, saved=rows, **options),
        streamkl_cupy.attention_kl_value_and_grad,
        lambda seed, **extents: make(seed=seed, causal=True, **{**SHAPE, **extents}).arrays,
        expected_kl,
        kl_beside,
        lambda *x: streamkl_cupy.attention_kl_forward(*x).teacher_lse,
        at=2,
        scale="student_scale",
    ),
    Op(
        "sparse_attention",
        ATTENTION_INPUTS,
        squares,
        streamkl_cupy.sparse_attention_forward,
        squares_backward,
        squares_and_gradients,
        attention_arrays,
        expected_squares,
        squares_beside,
        lambda *x: streamkl_cupy.sparse_attention_forward(*x).lse,
    ),
    Op(
        "indexer_kl",
        INDEXED,
        indexed(streamkl_cupy.indexer_kl),
        indexed(streamkl_cupy.indexer_kl_forward),
        indexed_backward,
        indexed_value_and_grad,
        lambda seed, **extents: attention_arrays(seed, **extents)[:2],
        expected_indexed,
        indexed_beside,
        lambda *x: indexed(streamkl_cupy.indexer_kl_forward)(*x).teacher_lse,
        scale="index_scale",
        lacks=("window", "block_mask"),
    ),
]
PATTERNED = [op for op in OPS if "block_mask" not in op.lacks]


@pytest.fixture(params=OPS, ids=str)
def op(request: pytest.FixtureRequest) -> Op:
    found: Op = request.param
    return found


@pytest.fixture(params=PATTERNED, ids=str)
def patterned(request: pytest.FixtureRequest) -> Op:
    found: Op = request.param
    return found


def close(got: Any, wanted: Any) -> None:
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert got.shape == wanted.shape
    assert np.linalg.norm(got - wanted) <= 2e-3 * np.linalg.norm(wanted) + 1e-6, np.abs(got - wanted).max()


def check(op: Op, backend: Any, value: Any, grads: Any, seed: int, **options: Any) -> None:
    wanted, wanted_grads = op.expected(op.make(seed), {"causal": True, **options})
    close(backend.numpy(value), wanted)
    for name, got, right in zip(op.inputs, grads, wanted_grads, strict=True):
        assert got is not None, name
        close(backend.numpy(got), right)


def explicit(op: Op, backend: Any, x: Any) -> tuple[Any, Any]:
    """All explicit functions, one after the other; the last one's value and gradients."""
    rows = op.forward(*x, causal=True)
    ones = backend.array(np.ones(rows[0].shape), "float32")
    first = op.backward(rows, ones, *x, causal=True, wrt=op.inputs)
    value, grads = op.value_and_grad(*x, causal=True, reduction="sum", wrt=op.inputs)
    for a, b in zip(first, grads, strict=True):
        close(backend.numpy(a), backend.numpy(b))
    return value, grads


def differentiated(op: Op, backend: Any, x: Any) -> tuple[Any, Any]:
    """The function that its framework differentiates; where none does, the explicit ones."""
    if backend.module == "torch":
        leaves = [t.detach().clone().requires_grad_() for t in x]
        value = op.loss(*leaves, causal=True, reduction="sum")
        value.backward()
        return value, [t.grad for t in leaves]
    if backend.module == "jax":
        argnums = tuple(range(len(x)))
        return backend.xp.value_and_grad(lambda *a: op.loss(*a, causal=True, reduction="sum"), argnums)(*x)  # type: ignore[no-any-return]
    return explicit(op, backend, x)


KINDS = [explicit, differentiated]
Call = Callable[[], tuple[Any, Any]]


# Threads


def in_thread(call: Call) -> tuple[Any, Any]:
    """As the first thing that a thread ever does."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def in_thread_after_main(call: Call) -> tuple[Any, Any]:
    call()
    return in_thread(call)


def in_threads_at_once(call: Call) -> tuple[Any, Any]:
    start = threading.Barrier(3)

    def one() -> tuple[Any, Any]:
        start.wait()
        return call()

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        return [future.result() for future in [pool.submit(one) for _ in range(3)]][-1]


def in_thread_of_thread(call: Call) -> tuple[Any, Any]:
    return in_thread(lambda: in_thread(call))


THREADS = [in_thread, in_thread_after_main, in_threads_at_once, in_thread_of_thread]


@pytest.mark.parametrize("way", THREADS)
@pytest.mark.parametrize("kind", KINDS)
def test_threads(op: Op, backend: Any, way: Any, kind: Any) -> None:
    x = [backend.array(a, "float16") for a in op.make(1)]
    backend.synchronize()
    check(op, backend, *way(lambda: kind(op, backend, x)), seed=1)


@pytest.mark.gpu
@pytest.mark.parametrize("first", ["warmup", "forward", "nothing"])
@pytest.mark.parametrize("framework", ["cupy", "torch", "jax"])
def test_first_thing_of_a_process(framework: str, first: str) -> None:
    """Nothing but this package has used the thread, and nothing at all torch's autograd thread."""
    pytest.importorskip(framework)
    program = f"""
        import sys, threading
        import numpy as np
        framework, first = {framework!r}, {first!r}
        import streamkl_cupy as s
        rng = np.random.default_rng()
        host = rng.standard_normal((4, 1, 2, 64, 64)).astype(np.float16)
        wanted, grads = s.attention_kl_value_and_grad(*host, causal=True, reduction="sum")
        if framework == "torch":
            import torch
            x = list(torch.from_numpy(host).cuda())
            back = lambda t: t.float().cpu().numpy()
        elif framework == "cupy":
            import cupy
            x = list(cupy.asarray(host))
            back = lambda t: t.get()
        else:
            import jax, jax.numpy as jnp
            x = list(jnp.asarray(host))
            back = np.asarray
        if first == "warmup":
            s.warmup(*x, causal=True)
        elif first == "forward":
            s.attention_kl_forward(*x, causal=True)
        def judge(value, dq, dk):
            for a, b in ((value, wanted), (dq, grads.student_q), (dk, grads.student_k)):
                a, b = np.asarray(back(a), float), np.asarray(b, float)
                assert np.linalg.norm(a - b) < 2e-3 * np.linalg.norm(b), (a, b)
        def explicit():
            value, found = s.attention_kl_value_and_grad(*x, causal=True, reduction="sum")
            judge(value, found.student_q, found.student_k)
        def differentiated():
            if framework == "torch":
                q, k = (t.clone().requires_grad_() for t in x[2:])
                loss = s.attention_kl(*x[:2], q, k, causal=True, reduction="sum")
                loss.backward()
                judge(loss.detach(), q.grad, k.grad)
            elif framework == "jax":
                f = lambda q, k: s.attention_kl(*x[:2], q, k, causal=True, reduction="sum")
                value, (dq, dk) = jax.jit(jax.value_and_grad(f, (0, 1)))(*x[2:])
                judge(value, dq, dk)
        differentiated()
        faults = []
        def safely(call):
            try:
                call()
            except BaseException as error:
                faults.append(error)
        for call in (explicit, differentiated):
            thread = threading.Thread(target=safely, args=(call,))
            thread.start()
            thread.join()
        assert not faults, faults
    """
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "call",
    [
        "attention_kl_forward(q, k, q, k)",
        "attention_kl_value_and_grad(q, k, q, k)",
        "attention_kl_forward(q, k, q, k, key_lengths=lengths)",
        "sparse_attention_forward(q, k, k)",
        "indexer_kl_forward(q, k, q, k, index_scale=1.0, head_groups=2)",
    ],
)
def test_arrays_that_wait_for_callbacks(call: str) -> None:
    """What JAX has not begun to compute comes after Python callbacks, as many as XLA has threads: who reads it has to
    let them go on."""
    pytest.importorskip("jax")
    program = f"""
        import faulthandler, os, threading
        faulthandler.dump_traceback_later(100, exit=True)
        import jax, jax.numpy as jnp
        import numpy as np
        import streamkl_cupy as s
        jax.config.update("jax_platforms", "cpu")
        gate = threading.Event()
        def passed(x):
            assert gate.wait(60)
            return x
        held = jax.jit(lambda x: jax.pure_callback(passed, jax.ShapeDtypeStruct(x.shape, x.dtype), x))
        slow = jax.jit(lambda x: x @ x @ x @ x)
        late = jax.jit(lambda x, zero: x + zero.astype(x.dtype))
        def made(zero):
            q, k = late(host[0], zero), late(host[1], zero)
            return q, k, late(np.full(1, 60, np.int32), zero)
        host = np.random.default_rng().standard_normal((2, 1, 2, 64, 64)).astype(np.float32)
        large = jnp.zeros((1000, 1000))
        gate.set()
        q, k, lengths = made(held(slow(large)[0, 0]))
        wanted = s.{call}
        gate.clear()
        first = slow(large)[0, 0]
        before = [held(first) for _ in range(4 * os.cpu_count())]
        q, k, lengths = made(before[-1])
        assert not q.is_ready()
        threading.Timer(0.2, gate.set).start()
        found = s.{call}
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(a, b)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


# A second GPU


@contextlib.contextmanager
def cupy_current(index: int) -> Iterator[None]:
    with importlib.import_module("cupy").cuda.Device(index):
        yield


@pytest.mark.gpu
@pytest.mark.parametrize("way", [lambda call: call(), *THREADS], ids=["here", *(way.__name__ for way in THREADS)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("framework", ["cupy", "torch", "jax"])
def test_second_gpu_while_the_first_is_current(op: Op, framework: str, kind: Any, way: Any) -> None:
    from conftest import CuPy, JaxCuda, TorchCuda

    cupy = pytest.importorskip("cupy")
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    cupy.cuda.runtime.setDevice(0)  # JAX leaves the GPU current that it has used last
    arrays = op.make(2)
    backend: Any = {"cupy": CuPy, "torch": TorchCuda, "jax": JaxCuda}[framework]()
    if framework == "cupy":
        with cupy_current(1):
            x = [backend.array(a, "float16") for a in arrays]
            backend.synchronize()

        def here() -> tuple[Any, Any]:
            value, grads = kind(op, OnSecond(backend), x)
            with cupy_current(1):
                return backend.numpy(value), [backend.numpy(g) for g in grads]

        value, grads = way(here)
        wanted, wanted_grads = op.expected(arrays, {"causal": True})
        close(value, wanted)
        for got, right in zip(grads, wanted_grads, strict=True):
            close(got, right)
        assert cupy.cuda.runtime.getDevice() == 0
        return
    backend.device = "cuda:1"
    if framework == "jax":
        backend.place = backend.xp.devices("gpu")[1]
    x = [backend.array(a, "float16") for a in arrays]
    check(op, backend, *way(lambda: kind(op, backend, x)), seed=2)
    assert framework == "jax" or cupy.cuda.runtime.getDevice() == 0


class OnSecond:
    """CuPy arrays made and read on the second GPU, while the first stays current."""

    module = "cupy"

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def array(self, x: Any, dtype: str) -> Any:
        with cupy_current(1):
            return self.backend.array(x, dtype)

    def numpy(self, x: Any) -> Any:
        with cupy_current(1):
            return self.backend.numpy(x)


@pytest.mark.gpu
def test_second_gpu_graph(op: Op) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    from conftest import TorchCuda

    backend: Any = TorchCuda()
    backend.device = "cuda:1"
    x = [backend.array(a, "float16") for a in op.make(3)]
    with torch.cuda.device(1):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            explicit(op, backend, x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            value, grads = op.value_and_grad(*x, causal=True, reduction="sum", wrt=op.inputs)
        graph.replay()
    check(op, backend, value, grads, seed=3)


# torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def torch_backend(request: pytest.FixtureRequest) -> Any:
    from conftest import Torch, TorchCuda

    return TorchCuda() if request.param == "cuda" else Torch()


@dataclass(frozen=True)
class Step:
    """One call among several of one program: leaves to differentiate, further arguments, and the options they are."""

    leaves: list[Any]
    others: tuple[Any, ...]


Program = Callable[..., Any]


def one_tensor_twice(op: Op, torch: Any, arrays: Any) -> tuple[Program, list[Step]]:
    def f(*a: Any) -> Any:
        return op.loss(*[x for x in a for _ in range(2)][: len(op.inputs)], reduction="sum")

    return f, [Step([a[0], a[-1]][: (len(op.inputs) + 1) // 2], ()) for a in arrays]


def views_of_one_storage(op: Op, torch: Any, arrays: Any) -> tuple[Program, list[Step]]:
    def f(both: Any) -> Any:
        views = (both[:, :2], both[:, 2:], both[:, 1:3], both[:, :2])
        return op.loss(*views[: len(op.inputs)], causal=True, reduction="sum")

    return f, [Step([torch.cat([a[0], a[1]], 1)], ()) for a in arrays]


def one_cu_seqlens(op: Op, torch: Any, arrays: Any) -> tuple[Program, list[Step]]:
    def f(*a: Any) -> Any:
        return op.loss(*a[:-1], cu_seqlens_q=a[-1], cu_seqlens_k=a[-1], causal=True, reduction="sum")

    bounds = [torch.tensor([0, 5 + i, 40, 64], dtype=torch.int32, device=a[0].device) for i, a in enumerate(arrays)]
    return f, [Step([x[0].transpose(0, 1).contiguous() for x in a], (b,)) for a, b in zip(arrays, bounds)]


def one_array_as_weight_and_mask(op: Op, torch: Any, arrays: Any) -> tuple[Program, list[Step]]:
    def f(*a: Any) -> Any:
        return op.loss(*a[:-1], row_weight=a[-1], key_mask=a[-1], reduction="mean")

    return f, [Step(list(a), (a[0][:, 0, :, 0] > -1,)) for a in arrays]


def annealed_scale(op: Op, torch: Any, arrays: Any) -> tuple[Program, list[Step]]:
    def f(*a: Any) -> Any:
        return op.loss(*a[:-1], **{op.scale: a[-1]}, reduction="sum")

    return f, [Step(list(arrays[i % len(arrays)]), (0.1 + 0.01 * i,)) for i in range(12)]


def moving_offset(op: Op, torch: Any, arrays: Any) -> tuple[Program, list[Step]]:
    def f(*a: Any) -> Any:
        return op.loss(*a[:-1], causal=True, q_offset=a[-1], reduction="sum")

    return f, [Step(list(arrays[i % len(arrays)]), (i - 3,)) for i in range(12)]


def growing_window(op: Op, torch: Any, arrays: Any) -> tuple[Program, list[Step]]:
    def f(*a: Any) -> Any:
        return op.loss(*a[:-1], window=(a[-1], a[-1] // 2), reduction="sum")

    return f, [Step(list(arrays[i % len(arrays)]), (i + 1,)) for i in range(12)]


def a_pattern_each_step(op: Op, torch: Any, arrays: Any) -> tuple[Program, list[Step]]:
    def f(*a: Any) -> Any:
        return op.loss(*a[:-1], block_mask=a[-1], reduction="sum")

    rng = np.random.default_rng()
    blocks = rng.random((12, 2, 4, 4)) < 0.5
    blocks[..., 0] = True
    made = [patterns.from_dense(b, queries=64, keys=64, block=16) for b in blocks]
    return f, [Step(list(arrays[i % len(arrays)]), (pattern,)) for i, pattern in enumerate(made)]


def log_sum_exps_and_weights(op: Op, torch: Any, arrays: Any) -> tuple[Program, list[Step]]:
    def f(*a: Any) -> Any:
        return op.beside(a[:-2], *a[-2:])

    weights = [torch.rand(64, device=a[0].device) for a in arrays]
    return f, [Step(list(a), (weight, op.prepared(*a))) for a, weight in zip(arrays, weights, strict=True)]


PROGRAMS = [
    one_tensor_twice,
    views_of_one_storage,
    one_cu_seqlens,
    one_array_as_weight_and_mask,
    annealed_scale,
    moving_offset,
    growing_window,
    a_pattern_each_step,
    log_sum_exps_and_weights,
]


TAKING = {growing_window: "window", a_pattern_each_step: "block_mask"}
"""Options that programs are about."""


def eager(torch: Any, f: Program, step: Step) -> Program:
    return f


def compiled(torch: Any, f: Program, step: Step, **how: Any) -> Program:
    return torch.compile(f, **{"backend": "aot_eager", "fullgraph": True, **how})  # type: ignore[no-any-return]


def checkpointed(torch: Any, f: Program, step: Step, reentrant: bool = False) -> Program:
    return functools.partial(torch.utils.checkpoint.checkpoint, f, use_reentrant=reentrant)


def checkpointed_and_compiled(torch: Any, f: Program, step: Step) -> Program:
    return compiled(torch, lambda *a: torch.utils.checkpoint.checkpoint(f, *a, use_reentrant=False), step)


def jit_traced(torch: Any, f: Program, step: Step) -> Program:
    if any(not isinstance(x, torch.Tensor) for x in step.others):
        pytest.skip("torch.jit.trace takes tensors only")
    return torch.jit.trace(f, (*step.leaves, *step.others))  # type: ignore[no-any-return]


def exported(torch: Any, f: Program, step: Step) -> Program:
    class Module(torch.nn.Module):  # type: ignore[misc,name-defined]
        def forward(self, *a: Any) -> Any:
            return f(*a)

    given = (*step.leaves, *step.others)
    if any(not isinstance(x, torch.Tensor) for x in step.others):
        fixed = step.others
        given = tuple(step.leaves)

        class Fixed(torch.nn.Module):  # type: ignore[misc,name-defined]
            def forward(self, *a: Any) -> Any:
                return f(*a, *fixed)

        program = torch.export.export(Fixed(), given, strict=False).module()
        return lambda *a: program(*a[: len(given)])
    return torch.export.export(Module(), given, strict=False).module()  # type: ignore[no-any-return]


def autocast(torch: Any, f: Program, step: Step) -> Program:
    def inside(*a: Any) -> Any:
        with torch.autocast(a[0].device.type, dtype=torch.bfloat16):
            return f(*a)

    return inside


def saved_tensors_elsewhere(torch: Any, f: Program, step: Step) -> Program:
    def inside(*a: Any) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return f(*a)

    return inside


def deterministic(torch: Any, f: Program, step: Step) -> Program:
    def inside(*a: Any) -> Any:
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            return f(*a)
        finally:
            torch.use_deterministic_algorithms(False)

    return inside


def no_grad_inside(torch: Any, f: Program, step: Step) -> Program:
    """The value under no_grad beside the one that is differentiated: neither disturbs the other."""

    def inside(*a: Any) -> Any:
        with torch.no_grad():
            before = f(*a)
        with torch.inference_mode():
            also = f(*a)
        value = f(*a)
        assert torch.equal(before, value.detach())
        assert torch.equal(also, value.detach())
        return value

    return inside


def in_a_thread(torch: Any, f: Program, step: Step) -> Program:
    def inside(*a: Any) -> Any:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(f, *a).result()

    return inside


WAYS: dict[str, Any] = {
    "eager": eager,
    "compile": compiled,
    "compile-default": functools.partial(compiled, fullgraph=False),
    "compile-dynamic": functools.partial(compiled, dynamic=True),
    "inductor": pytest.param(functools.partial(compiled, backend="inductor"), marks=pytest.mark.slow),
    "reduce-overhead": pytest.param(
        functools.partial(compiled, backend="inductor", mode="reduce-overhead"), marks=pytest.mark.slow
    ),
    "checkpoint": checkpointed,
    "checkpoint-reentrant": functools.partial(checkpointed, reentrant=True),
    "checkpoint-compile": checkpointed_and_compiled,
    "jit.trace": jit_traced,
    "export": exported,
    "autocast": autocast,
    "save_on_cpu": saved_tensors_elsewhere,
    "deterministic": deterministic,
    "no_grad": no_grad_inside,
    "thread": in_a_thread,
}


def torch_cases() -> list[Any]:
    """Every program in every way; of operations after the first what they may have of their own: each program as it is
    and compiled, and one that looks at all results in every way."""
    found = []
    for op in OPS:
        for name, way in WAYS.items():
            for program in PROGRAMS:
                if TAKING.get(program) in op.lacks:
                    continue
                if op is OPS[0] or name in ("eager", "compile") or program is log_sum_exps_and_weights:
                    values = way.values if hasattr(way, "marks") else (way,)
                    marks = getattr(way, "marks", ())
                    found.append(pytest.param(op, *values, program, marks=marks, id=f"{op}-{name}-{program.__name__}"))
    return found


@pytest.mark.filterwarnings("ignore")  # of compilers and tracers, different in every release
@pytest.mark.parametrize("op, way, program", torch_cases())
def test_torch(op: Op, torch_backend: Any, way: Any, program: Any) -> None:
    """Values and gradients of every program in every way are those of the plain call."""
    torch = torch_backend.xp
    importlib.import_module("torch.utils.checkpoint")
    torch.compiler.reset()
    arrays = [[torch_backend.array(a, "float16") for a in op.make(seed)] for seed in range(3)]
    f, steps = program(op, torch, arrays)
    if way is exported or way is jit_traced:
        steps = steps[:1]  # the rest would need other constants
    called = None
    for step in steps:
        wanted, wanted_grads = _value_and_grads(torch, f, step)
        called = called or way(torch, f, step)
        value, grads = _value_and_grads(torch, called, step)
        close(torch_backend.numpy(value), torch_backend.numpy(wanted))
        for got, right in zip(grads, wanted_grads, strict=True):
            close(torch_backend.numpy(got), torch_backend.numpy(right))


def _value_and_grads(torch: Any, f: Program, step: Step) -> tuple[Any, Any]:
    leaves = [x.detach().clone().requires_grad_() for x in step.leaves]
    value = f(*leaves, *step.others)
    value.backward()
    return value, [x.grad for x in leaves]


@pytest.mark.filterwarnings("ignore")
def test_changing_numbers_and_patterns_compile_twice(op: Op) -> None:
    """Once with constants, once with symbols."""
    torch = pytest.importorskip("torch")
    counter = importlib.import_module("torch._dynamo.testing").CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()
    x = [torch.from_numpy(a) for a in op.make(0)]

    def f(scale: Any, offset: Any, left: Any, pattern: Any) -> Any:
        own = {op.scale: scale, "window": (left, 0), "q_offset": offset, "block_mask": pattern}
        has = {name: value for name, value in own.items() if name not in op.lacks}
        return op.loss(*x, causal="window" in op.lacks, **has, reduction="sum")

    program = torch.compile(f, fullgraph=True, backend=counter)
    for i in range(6):
        blocks = np.random.default_rng(i).random((2, 4, 4)) < 0.5
        blocks[..., 0] = True
        pattern = patterns.from_dense(blocks, queries=64, keys=64, block=16)
        given = (0.1 + 0.01 * i, i, 3 * i + 40, pattern)
        close(program(*given), f(*given))
    assert counter.frame_count == 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_scale_that_stops_being_a_number_is_refused(op: Op, bad: float) -> None:
    """As it is outside of programs; a default must not take its place."""
    torch = pytest.importorskip("torch")
    torch.compiler.reset()
    x = [torch.from_numpy(a) for a in op.make(0)]
    program = torch.compile(
        lambda scale: op.loss(*x, **{op.scale: scale}, reduction="sum"), fullgraph=True, backend="aot_eager"
    )
    for scale in (0.1, 0.2, 0.3):
        close(program(scale), op.loss(*x, **{op.scale: scale}, reduction="sum"))
    # Looked at by the compiler, which wraps the error, or by the operator.
    with pytest.raises(Exception, match=rf"{op.scale}=(nan|inf) is not finite"):
        program(bad)


@pytest.mark.filterwarnings("ignore")
def test_explicit_functions_stay_out_of_compiled_programs(op: Op, torch_backend: Any) -> None:
    torch = torch_backend.xp
    torch.compiler.reset()
    x = [torch_backend.array(a, "float16") for a in op.make(4)]

    def f(*a: Any) -> Any:
        value, grads = explicit(op, torch_backend, a)
        return value * 2, [g * 2 for g in grads]

    value, grads = torch.compile(f, backend="aot_eager")(*x)
    check(op, torch_backend, value / 2, [g / 2 for g in grads], seed=4)
    with pytest.raises(Exception, match="memory that tracers do not have"):
        torch.compile(lambda *a: op.forward(*a)[0], backend="aot_eager", fullgraph=True)(*x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compile_it", [False, True])
def test_forward_mode_is_refused(op: Op, compile_it: bool) -> None:
    torch = pytest.importorskip("torch")
    torch.compiler.reset()
    ad = torch.autograd.forward_ad
    x = [torch.from_numpy(a) for a in op.make(0)]

    def f(q: Any) -> Any:
        return op.loss(*op.with_first(x, q))

    def along(q: Any) -> Any:
        return torch.func.jvp(f, (q,), (q,))

    def wrapped(g: Program) -> Program:
        return torch.compile(g, backend="aot_eager", fullgraph=True) if compile_it else g  # type: ignore[no-any-return]

    with pytest.raises(Exception, match="reverse-mode gradients only"):
        wrapped(along)(x[op.at])
    # From 2.14 on torch's compiler refuses such inputs itself.
    with ad.dual_level(), pytest.raises(Exception, match=r"reverse-mode gradients only|forward-mode AD tangent"):
        wrapped(f)(ad.make_dual(x[op.at], x[op.at]))


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_program_keeps_its_pattern_until_the_backward(patterned: Op) -> None:
    op, torch = patterned, pytest.importorskip("torch")
    torch.compiler.reset()
    x = [torch.from_numpy(a) for a in op.make(0)]
    program = torch.compile(
        lambda q, pattern: op.loss(*op.with_first(x, q), block_mask=pattern, reduction="sum"),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    q = x[op.at].clone().requires_grad_()
    pattern = patterns.local(16, queries=64, keys=64, block=16)
    alive = weakref.ref(pattern)
    loss = program(q, pattern)
    del pattern
    gc.collect()
    loss.backward()
    del loss
    again = x[op.at].clone().requires_grad_()
    pattern = patterns.local(16, queries=64, keys=64, block=16)
    op.loss(*op.with_first(x, again), block_mask=pattern, reduction="sum").backward()
    del pattern
    close(q.grad, again.grad)
    torch.compiler.reset()
    gc.collect()
    assert alive() is None


def test_distributed_tensors_are_refused_with_the_way_out(op: Op, process_group: Any) -> None:
    torch = process_group
    distributed = importlib.import_module("torch.distributed.tensor")
    mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh("cpu", (1,))
    x = [torch.from_numpy(a) for a in op.make(0)]
    spread = [distributed.distribute_tensor(t, mesh, [distributed.Shard(1)]) for t in x]
    for given in (op.with_first(x, spread[op.at].requires_grad_()), spread):
        with pytest.raises(TypeError, match=r"is a torch\.distributed.*DTensor, spread over devices.*local_map"):
            op.loss(*given)
    local_map = importlib.import_module("torch.distributed.tensor.experimental").local_map
    placements = [distributed.Shard(1)]
    rows = local_map(
        lambda *a: op.loss(*a, causal=True),
        out_placements=placements,
        in_placements=(placements,) * len(x),
        device_mesh=mesh,
    )(*spread)
    wanted, _ = op.expected(op.make(0), {"causal": True})
    close(rows.full_tensor().detach().sum(), wanted)


@pytest.fixture
def process_group(tmp_path: Any) -> Iterator[Any]:
    torch = pytest.importorskip("torch")
    distributed = importlib.import_module("torch.distributed")
    if not distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield torch
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("wrap", ["ddp", "fsdp"])
def test_distributed_training_wrappers(op: Op, process_group: Any, wrap: str) -> None:
    """Their hooks run the backward from threads and streams of their own."""
    torch = process_group
    x = [torch.from_numpy(a) for a in op.make(5)]

    class Student(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.eye(64))

        def forward(self, q: Any) -> Any:
            return op.loss(*op.with_first(x, q @ self.weight), causal=True, reduction="sum")

    student = Student()
    if wrap == "ddp":
        wrapped = torch.nn.parallel.DistributedDataParallel(student)
    else:
        fsdp = importlib.import_module("torch.distributed.fsdp")
        mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh("cpu", (1,))
        wrapped = fsdp.fully_shard(student, mesh=mesh)
    q = x[op.at].float()
    x[op.at + 1 :] = [t.float() for t in x[op.at + 1 :]]
    loss = wrapped(q)
    loss.backward()
    leaf = torch.eye(64, requires_grad=True)
    wanted = op.loss(*op.with_first(x, q @ leaf), causal=True, reduction="sum")
    wanted.backward()
    grad = student.weight.grad
    close(getattr(grad, "full_tensor", lambda: grad)(), leaf.grad)
    close(loss.detach(), wanted.detach())


# JAX


def jax_plain(jax: Any, f: Program, argnums: tuple[int, ...]) -> Program:
    return f


def jax_jit(jax: Any, f: Program, argnums: tuple[int, ...]) -> Program:
    return jax.jit(f)  # type: ignore[no-any-return]


def jax_checkpoint(jax: Any, f: Program, argnums: tuple[int, ...]) -> Program:
    return jax.checkpoint(f)  # type: ignore[no-any-return]


def jax_vmap(jax: Any, f: Program, argnums: tuple[int, ...]) -> Program:
    return lambda *x: jax.vmap(f)(*(a[None] for a in x))[0]


def jax_scan(jax: Any, f: Program, argnums: tuple[int, ...]) -> Program:
    return lambda *x: jax.lax.scan(lambda carry, a: (carry, f(*a)), 0, tuple(a[None] for a in x))[1][0]


def jax_thread(jax: Any, f: Program, argnums: tuple[int, ...]) -> Program:
    gradient = jax.jit(jax.value_and_grad(f, argnums))

    def inside(*x: Any) -> Any:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            return pool.submit(gradient, *x).result()

    inside.gives_gradients = True  # type: ignore[attr-defined]
    return inside


def jax_ahead_of_time(jax: Any, f: Program, argnums: tuple[int, ...]) -> Program:
    """Lowered and compiled before it is called."""
    gradient = jax.value_and_grad(f, argnums)

    def inside(*x: Any) -> Any:
        program = jax.jit(gradient).lower(*x).compile()
        return program(*x)

    inside.gives_gradients = True  # type: ignore[attr-defined]
    return inside


JAX_WAYS = [jax_plain, jax_jit, jax_checkpoint, jax_vmap, jax_scan, jax_thread, jax_ahead_of_time]


@pytest.fixture(params=["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def jax_backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    from conftest import Jax, JaxCuda

    backend: Any = JaxCuda() if request.param == "gpu" else Jax()
    with backend.xp.default_device(backend.place):
        yield backend


@pytest.mark.parametrize("way", JAX_WAYS)
@pytest.mark.parametrize("twice", [False, True])
def test_jax(op: Op, jax_backend: Any, way: Any, twice: bool) -> None:
    jax = jax_backend.xp
    arrays = op.make(6)
    x = [jax_backend.array(a, "float16") for a in arrays]
    if twice:  # one array in two places
        x[1], arrays = x[0], (arrays[0], arrays[0], *arrays[2:])

    def f(*a: Any) -> Any:
        return op.loss(*a, causal=True, reduction="sum")

    argnums = tuple(range(len(x)))
    called = way(jax, f, argnums)
    value, grads = called(*x) if hasattr(called, "gives_gradients") else jax.value_and_grad(called, argnums)(*x)
    wanted, wanted_grads = op.expected(arrays, {"causal": True})
    close(value, wanted)
    for got, right in zip(grads, wanted_grads, strict=True):
        close(got, right)


# Patterns and memory


def fresh_pattern(rng: Any) -> Any:
    blocks = rng.random((2, 4, 4)) < 0.5
    blocks[..., 0] = True
    return patterns.from_dense(blocks, queries=64, keys=64, block=16)


@pytest.mark.parametrize("kind", ["explicit", "differentiated"])
def test_patterns_end_with_their_owner(patterned: Op, backend: Any, rng: Any, kind: str) -> None:
    """A program that makes one for every step keeps none of them."""
    op = patterned
    x = [backend.array(a, "float16") for a in op.make(7)]
    alive, digests = [], set()
    for _ in range(5):
        pattern = fresh_pattern(rng)
        alive.append(weakref.ref(pattern))
        digests.add(pattern.digest)
        if kind == "explicit":
            op.value_and_grad(*x, block_mask=pattern)
        elif backend.module == "torch":
            leaves = [t.clone().requires_grad_() for t in x]
            op.loss(*leaves, block_mask=pattern, reduction="sum").backward()
            del leaves
        elif backend.module == "jax":
            backend.xp.jit(
                backend.xp.grad(lambda q, p=pattern: op.loss(*op.with_first(x, q), block_mask=p, reduction="sum"))
            )(x[op.at])
        else:
            op.loss(*x, block_mask=pattern)
    del pattern
    backend.synchronize()
    if backend.module == "jax" and kind == "explicit":
        backend.xp.clear_caches()  # what JAX has compiled outside of a function of the caller's
    gc.collect()
    assert [reference() for reference in alive] == [None] * 5
    # Other tests have patterns that live as long as their modules.
    assert not digests & {problem.mask.blocks for problem in call._runners}
    assert not digests & {checked.problem.mask.blocks for checked in call._checked.values()}
    assert not digests & {look.checked.problem.mask.blocks for looks in call._looks.values() for look in looks}


@pytest.mark.gpu
def test_memory_of_patterns_is_bounded(patterned: Op, rng: Any) -> None:
    op = patterned
    torch, cupy = pytest.importorskip("torch"), pytest.importorskip("cupy")
    x = [torch.randn(1, 16, 4096, 64, dtype=torch.bfloat16, device="cuda") for _ in op.inputs]
    used = []
    for step in range(24):
        blocks = rng.random((16, 64, 64)) < 0.2
        blocks[..., 0] = True
        pattern = patterns.from_dense(blocks, queries=4096, keys=4096, block=64)
        leaves = [t.clone().requires_grad_() for t in x]
        op.loss(*leaves, block_mask=pattern, reduction="sum").backward()
        if step >= 8:
            used.append(cupy.get_default_memory_pool().total_bytes())
    assert max(used) <= 2 * used[0]  # patterns differ in size


@pytest.mark.gpu
def test_a_pattern_that_ends_before_the_gpu_has_read_it(patterned: Op, rng: Any) -> None:
    op = patterned
    torch, cupy = pytest.importorskip("torch"), pytest.importorskip("cupy")
    x = [torch.randn(1, 2, 64, 64, dtype=torch.float16, device="cuda") for _ in op.inputs]
    stream = torch.cuda.Stream()
    for _ in range(10):
        pattern = fresh_pattern(rng)
        wanted = op.forward(*x, block_mask=pattern)[0]
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            got = op.forward(*x, block_mask=pattern)[0]
        del pattern
        gc.collect()
        # What was freed would be handed out here.
        garbage = [cupy.full(n, -1, np.int32) for n in (2, 8, 16, 32, 64, 128) for _ in range(8)]
        op.forward(*x, block_mask=fresh_pattern(rng))
        stream.synchronize()
        assert torch.equal(got, wanted)
        del garbage


# Host cost: what changes from call to call compiles nothing


@pytest.mark.gpu
@pytest.mark.parametrize("change", ["q_offset", "scale", "window", "length"])
def test_new_numbers_read_and_compile_nothing(
    op: Op, backend: Any, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend.device == "cpu":
        pytest.skip("nothing is compiled for the CPU")
    if change in op.lacks:
        pytest.skip(f"{op} has no {change}")
    from streamkl_cupy.compiler import nvrtc as compiler
    from streamkl_cupy.kernels import base

    def run(i: int) -> None:
        options: dict[str, Any] = {"causal": True}
        if change == "q_offset":
            options["q_offset"] = i
        elif change == "scale":
            options[op.scale] = 0.1 + 0.01 * i
        elif change == "window":
            options = {"window": (i + 8, 3)}
        rows = 64 + (i if change == "length" else 0)
        explicit_options = {**options, "reduction": "sum"}
        arrays = op.make(8, M=rows, N=rows + 64)
        op.value_and_grad(*(backend.array(a, "float16") for a in arrays), **explicit_options)

    for i in range(3):
        run(i)

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("sources were read or compiled again")

    monkeypatch.setattr(compiler, "build", refuse)
    monkeypatch.setattr(base, "flatten", refuse)
    for i in range(3, 8):
        run(i)

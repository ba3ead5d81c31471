"""JAX: every transform on attention_kl, and what a callback must not do, against the dense definition."""

from __future__ import annotations

import builtins
import functools
import os
from typing import Any

import numpy as np
import pytest

import streamkl_cupy
from streamkl_cupy.problem import INPUT_NAMES
from streamkl_cupy.testing import reference

# Read by JAX when its backends start, which is at the first array.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
front = pytest.importorskip("streamkl_cupy.jax")
autodiff = pytest.importorskip("streamkl_cupy.autodiff.jax")
attention_kl = front.attention_kl

PLATFORMS = ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)]
ALL = (0, 1, 2, 3)
TOLERANCE = {"float32": 2e-5, "float16": 1e-3, "bfloat16": 8e-3}


@pytest.fixture(autouse=True)
def cpu_by_default() -> Any:
    """Where there is a GPU, JAX would put everything on it; only the tests that ask for `platform` go there."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(params=PLATFORMS)
def platform(request: pytest.FixtureRequest, cpu_by_default: None) -> Any:
    """A platform with a JAX device, which is the default one for the test."""
    try:
        device = jax.devices(request.param)[0]
    except RuntimeError as error:
        pytest.skip(f"JAX has no {request.param} here: {error}")
    with jax.default_device(device):
        yield request.param


def operands(*, dtype: str = "float32", seed: int = 0, **extent: int) -> list[Any]:
    e = {"B": 2, "H": 4, "M": 5, "N": 7, "D_t": 8, "D_s": 16, "K_t": 4, "K_s": 2, **extent}
    shapes = (
        (e["B"], e["H"], e["M"], e["D_t"]),
        (e["B"], e["K_t"], e["N"], e["D_t"]),
        (e["B"], e["H"], e["M"], e["D_s"]),
        (e["B"], e["K_s"], e["N"], e["D_s"]),
    )
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(s), dtype) for s in shapes]


def dense_kl(inputs: Any, **options: Any) -> Any:
    return reference.forward(*map(np.asarray, inputs), **options).kl


def dense_grads(inputs: Any, row_grad: Any = None, **options: Any) -> Any:
    row_grad = np.ones(inputs[2].shape[:-1]) if row_grad is None else row_grad
    return reference.backward(row_grad, *map(np.asarray, inputs), **options).value


def close(actual: Any, expected: Any, tolerance: float = 2e-5) -> None:
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert a.shape == e.shape
    assert np.linalg.norm(a - e) <= tolerance * (np.linalg.norm(e) + 1e-3), np.abs(a - e).max()


def total(*inputs: Any, **options: Any) -> Any:
    return attention_kl(*inputs, reduction="sum", **options)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What the CPU backend was asked for, call by call: ("forward",), or the names of the gradients."""
    from streamkl_cupy import numpy_backend

    seen: list[tuple[str, ...]] = []
    runner = numpy_backend.Runner
    forward, backward = runner.forward, runner.backward

    def spy_forward(self: Any, *args: Any) -> None:
        seen.append(("forward",))
        forward(self, *args)

    def spy_backward(self: Any, inputs: Any, saved: Any, outputs: Any, *args: Any) -> None:
        seen.append(tuple(name for name, out in zip(INPUT_NAMES, outputs) if out is not None))
        backward(self, inputs, saved, outputs, *args)

    monkeypatch.setattr(runner, "forward", spy_forward)
    monkeypatch.setattr(runner, "backward", spy_backward)
    return seen


# Values and gradients


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.usefixtures("platform")
def test_value_and_gradients(dtype: str, jit: bool) -> None:
    x = operands(dtype=dtype, M=33, N=65)
    row_grad = np.random.default_rng(1).standard_normal((2, 4, 33)).astype(np.float32)
    rows = functools.partial(attention_kl, causal=True)

    def pulled(*a: Any) -> Any:
        kl, pull = jax.vjp(rows, *a)
        return kl, pull(jnp.asarray(row_grad))

    kl, grads = (jax.jit(pulled) if jit else pulled)(*x)
    assert kl.dtype == jnp.float32
    close(kl, dense_kl(x, causal=True), 1e-5)
    for g, e in zip(grads, dense_grads(x, row_grad, causal=True)):
        assert g.dtype == dtype
        close(g, e, TOLERANCE[dtype])


@pytest.mark.parametrize("argnums", [(2,), (3,), (0, 1), (2, 3), (1, 2), ALL])
def test_only_wanted_gradients_are_computed(argnums: tuple[int, ...], launches: list[tuple[str, ...]]) -> None:
    x = operands()
    names = tuple(INPUT_NAMES[i] for i in argnums)
    for gradient in (jax.grad(total, argnums), jax.jit(jax.grad(total, argnums)), jax.grad(jax.jit(total), argnums)):
        launches.clear()
        grads = jax.block_until_ready(gradient(*x))
        assert launches == [("forward",), names]
        for i, g in zip(argnums, grads):
            close(g, dense_grads(x)[i])


def test_wishes_of_one_caller_do_not_reach_another(launches: list[tuple[str, ...]]) -> None:
    """One traced function, differentiated by changing arguments, also inside scan: each time just those."""
    x = operands()
    expected = dense_grads(x)
    stacked = jnp.stack([x[2], x[2]])

    def scanned(qs: Any) -> Any:
        return jax.lax.scan(lambda c, q: (c + total(x[0], x[1], q, x[3]), None), 0.0, qs)[0]

    for argnums in (ALL, (3,), (2,), (0, 1), ALL, (2,)):
        for i, g in zip(argnums, jax.grad(total, argnums)(*x)):
            close(g, expected[i])
        for g in jax.grad(scanned)(stacked):
            close(g, expected[2])
    assert launches.count(("student_q",)) == 2 * 6 + 2


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.usefixtures("platform")
def test_row_weight_is_differentiable(reduction: str) -> None:
    x = operands(M=6, N=4)  # causal: the first two rows see no key
    weight = jnp.asarray(np.random.default_rng(1).random((2, 1, 6)), jnp.float32).at[..., 0].set(jnp.nan)

    def loss(w: Any, q: Any) -> Any:
        options = {"causal": True, "row_weight": w, "reduction": reduction}
        return attention_kl(x[0], x[1], q, x[3], **options).sum()

    def dense(w: Any, kl: Any) -> Any:
        used = jnp.where(jnp.arange(6) < 2, 0.0, jnp.broadcast_to(w, (2, 4, 6)))
        return (kl * used).sum() / (used.sum() if reduction == "mean" else 1)

    kl = jnp.asarray(dense_kl(x, causal=True), jnp.float32)
    weight_grad, row_grad = jax.grad(dense, (0, 1))(weight, kl)
    close(loss(weight, x[2]), dense(weight, kl))
    got = jax.grad(loss, (0, 1))(weight, x[2])
    close(got[0], weight_grad, 1e-4)
    close(got[1], dense_grads(x, np.asarray(row_grad), causal=True).student_q, 1e-4)


@pytest.mark.usefixtures("platform")
def test_log_sum_exps_carry_no_gradient() -> None:
    x = operands()

    def loss(q: Any) -> Any:
        rows = attention_kl(x[0], x[1], q, x[3], return_lse=True)
        return rows.kl.sum() + rows.student_lse.sum()

    close(jax.grad(loss)(x[2]), dense_grads(x).student_q)


@pytest.mark.parametrize("extent", [{"M": 0}, {"N": 0}, {"B": 0}])
@pytest.mark.usefixtures("platform")
def test_empty(extent: dict[str, int]) -> None:
    x = operands(**extent)
    rows = attention_kl(*x, return_lse=True)
    assert not rows.kl.any()
    assert jnp.isneginf(rows.teacher_lse).all()
    assert attention_kl(*x, reduction="mean") == 0
    for t, g in zip(x, jax.grad(total, ALL)(*x)):
        assert g.shape == t.shape
        assert not g.any()


@pytest.mark.usefixtures("platform")
def test_mean_over_no_mass_is_zero_with_zero_gradients() -> None:
    x = operands()
    value, grad = jax.value_and_grad(
        lambda q: attention_kl(x[0], x[1], q, x[3], row_weight=jnp.zeros(5), reduction="mean")
    )(x[2])
    assert value == 0
    assert not grad.any()


# Transforms


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize(
    "axes", [(0, 0, 0, 0), (1, 1, 1, 1), (None, None, 0, 0), (None, None, 1, None), (0, 1, None, 0)]
)
@pytest.mark.usefixtures("platform")
def test_vmap_equals_a_loop(rank: int, layout: str, axes: tuple[int | None, ...]) -> None:
    x = operands(D_t=4, D_s=4, K_t=4, K_s=4)
    if layout == "bnhd":
        x = [t.swapaxes(1, 2) for t in x]
    if rank < 4:
        x = [t[0] for t in x]
    if rank < 3:
        x = [t[:, 0] if layout == "bnhd" else t[0] for t in x]
    mapped = [t if a is None else jnp.stack([t, 2 * t, -t], a) for t, a in zip(x, axes)]
    call = functools.partial(attention_kl, layout=layout, causal=True)

    def loss(*a: Any) -> Any:
        return call(*a).sum()

    batched = jax.vmap(call, in_axes=axes)(*mapped)
    grads = jax.vmap(jax.grad(loss, (1, 2, 3)), in_axes=axes)(*mapped)
    shared = jax.grad(lambda k: jax.vmap(loss, in_axes=(*axes[:3], None))(*mapped[:3], k).sum())(x[3])
    summed = 0
    for i in range(3):
        one = [t if a is None else jnp.take(t, i, a) for t, a in zip(mapped, axes)]
        close(batched[i], call(*one))
        for g, e in zip(grads, jax.grad(loss, (1, 2, 3))(*one)):
            close(g[i], e)
        summed += jax.grad(loss, 3)(*one[:3], x[3])
    close(shared, summed)


def test_vmap_is_one_launch_where_strides_allow(launches: list[tuple[str, ...]]) -> None:
    x = operands(K_s=4)
    both = jax.vmap(jax.vmap(attention_kl))(*x)
    close(both, dense_kl(x))
    shared_teacher = jax.vmap(attention_kl, in_axes=(None, None, 0, 0))(x[0][0], x[1][0], x[2], x[3])
    close(shared_teacher[1], dense_kl([x[0][0], x[1][0], x[2][1], x[3][1]]))
    jax.block_until_ready((both, shared_teacher))
    assert launches == [("forward",)] * 2


@pytest.mark.usefixtures("platform")
def test_nested_vmap_with_unmapped_inputs() -> None:
    x = operands(K_t=4, K_s=4, D_t=4, D_s=4)
    teachers = [jnp.stack([t, t + 1, t - 1]) for t in x[:2]]
    inner = jax.vmap(attention_kl, in_axes=(None, None, 0, 0))
    outer = jax.vmap(inner, in_axes=(0, 0, None, None))
    students = [jnp.stack([s, 2 * s]) for s in x[2:]]
    got = outer(*teachers, *students)
    for i in range(3):
        for j in range(2):
            close(got[i, j], dense_kl([teachers[0][i], teachers[1][i], students[0][j], students[1][j]]))


@pytest.mark.usefixtures("platform")
def test_jacrev() -> None:
    x = operands(B=1, H=2, M=3, K_t=1, K_s=2)
    jacobian = jax.jacrev(lambda q: attention_kl(x[0], x[1], q, x[3]))(x[2])
    for h in range(2):
        for m in range(3):
            one = np.zeros((1, 2, 3))
            one[0, h, m] = 1
            close(jacobian[0, h, m], dense_grads(x, one).student_q)


@pytest.mark.usefixtures("platform")
def test_remat_and_loops() -> None:
    x = operands()
    expected = dense_grads(x)
    for g, e in zip(jax.grad(jax.checkpoint(total), ALL)(*x), expected):
        close(g, e)

    def looped(q: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda i, c: c + total(x[0], x[1], q, x[3]), 0.0)

    close(jax.jit(looped)(x[2]), 3 * dense_kl(x).sum())
    chosen = jax.jit(lambda flag: jax.lax.cond(flag, lambda: total(*x), lambda: 0.0))
    close(chosen(True), dense_kl(x).sum())


@pytest.mark.parametrize("shape", [(0, 2, 5, 8), (1, 2, 0, 8)])
def test_results_without_elements_lie_where_the_inputs_do(shape: tuple[int, ...]) -> None:
    device = jax.devices("cpu")[1]
    q = jax.device_put(np.ones(shape, np.float32), device)
    rows = streamkl_cupy.attention_kl_forward(q, q, q, q)
    grads = streamkl_cupy.attention_kl_backward(rows.kl, q, q, q, q, saved=rows)
    value, more = streamkl_cupy.attention_kl_value_and_grad(q, q, q, q)
    found = (*rows, grads.student_q, grads.student_k, value, more.student_k, attention_kl(q, q, q, q))
    assert {x.devices() == {device} for x in found} == {True}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis_type", ["Auto", "Explicit"])
def test_shard_map_over_two_devices(check_vma: bool, axis_type: str, launches: list[tuple[str, ...]]) -> None:
    devices = jax.devices("cpu")
    if len(devices) < 2:
        pytest.skip("JAX started with one CPU device before this test could ask for two")
    spec, whole = jax.sharding.PartitionSpec("b"), jax.sharding.PartitionSpec()
    kind = getattr(jax.sharding.AxisType, axis_type)
    mesh = jax.sharding.Mesh(np.array(devices[:2]), ("b",), axis_types=(kind,))
    x = operands()
    shared = x[3][:1]  # every device reads all of it, so its gradient is a sum over devices
    placed = [jax.device_put(t, jax.sharding.NamedSharding(mesh, spec)) for t in x[:3]]
    placed.append(jax.device_put(shared, jax.sharding.NamedSharding(mesh, whole)))
    sharded = jax.shard_map(
        attention_kl, mesh=mesh, in_specs=(spec, spec, spec, whole), out_specs=spec, check_vma=check_vma
    )
    full = [*x[:3], jnp.repeat(shared, 2, 0)]
    close(jax.jit(sharded)(*placed), dense_kl(full))
    grads = jax.jit(jax.grad(lambda *a: sharded(*a).sum(), ALL))(*placed)
    expected = list(dense_grads(full))
    expected[3] = expected[3].sum(0, keepdims=True)
    for g, e in zip(grads, expected):
        close(g, e)
    assert launches.count(("forward",)) == 4


@pytest.mark.gpu
def test_shard_map_over_gpus() -> None:
    devices = jax.devices("gpu")
    if len(devices) < 2:
        pytest.skip("needs two GPUs")
    spec = jax.sharding.PartitionSpec(None, "h")
    mesh = jax.sharding.Mesh(np.array(devices[:2]), ("h",), axis_types=(jax.sharding.AxisType.Auto,))
    x = [jax.device_put(t, jax.sharding.NamedSharding(mesh, spec)) for t in operands(M=64, N=64)]
    sharded = jax.shard_map(attention_kl, mesh=mesh, in_specs=spec, out_specs=spec)
    close(jax.jit(sharded)(*x), dense_kl(x))
    for g, e in zip(jax.jit(jax.grad(lambda *a: sharded(*a).sum(), ALL))(*x), dense_grads(x)):
        close(g, e)


# Refusals


def second_orders(loss: Any) -> list[Any]:
    return [
        jax.grad(lambda q: jax.grad(loss)(q).sum()),
        jax.jit(jax.grad(lambda q: jax.grad(loss)(q).sum() + (q**2).sum())),
        jax.jacrev(jax.jacrev(loss)),
    ]


@pytest.mark.parametrize("which", range(3))
def test_second_order_is_refused(which: int) -> None:
    x = operands()
    second = second_orders(lambda q: total(x[0], x[1], q, x[3]))[which]
    with pytest.raises(NotImplementedError, match="streamkl_cupy"):
        second(x[2])


def test_value_inside_value_and_grad_is_still_differentiable() -> None:
    x = operands()
    got = jax.grad(lambda q: jax.value_and_grad(lambda s: total(x[0], x[1], s, x[3]))(q)[0])(x[2])
    close(got, dense_grads(x).student_q)


def test_forward_mode_is_refused() -> None:
    x = operands()

    def loss(q: Any) -> Any:
        return total(x[0], x[1], q, x[3])

    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(loss, (x[2],), (x[2],))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.hessian(loss)(x[2])


def test_arguments_are_refused_by_name_while_tracing() -> None:
    x = operands()
    with pytest.raises(TypeError, match=r"student_k is a .*ndarray"):
        attention_kl(*x[:3], np.asarray(x[3]))
    with pytest.raises(ValueError, match="teacher_k"):
        jax.jit(attention_kl)(x[0], x[1][..., :3], *x[2:])
    with pytest.raises(TypeError, match="student_q has dtype int32"):
        attention_kl(x[0], x[1], x[2].astype(int), x[3])
    with pytest.raises(ValueError, match="row_weight: shape"):
        attention_kl(*x, row_weight=jnp.ones(3))
    with pytest.raises(ValueError, match="reduction="):
        attention_kl(*x, reduction="avg")
    with pytest.raises(TypeError, match="teacher_scale"):
        jax.jit(lambda c: attention_kl(*x, teacher_scale=c))(1.0)


def test_explicit_functions_refuse_tracers() -> None:
    x = operands()
    rows = front.attention_kl_forward(*x)
    for function in (
        front.attention_kl_forward,
        front.attention_kl_value_and_grad,
        lambda *a: front.attention_kl_backward(rows.kl, *a, saved=rows),
        streamkl_cupy.attention_kl_forward,
        streamkl_cupy.attention_kl_value_and_grad,
    ):
        with pytest.raises(TypeError, match="attention_kl"):
            jax.jit(function)(*x)


def test_errors_in_a_callback_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    from streamkl_cupy import numpy_backend

    def fail(*args: Any) -> None:
        raise RuntimeError("words of the backend")

    monkeypatch.setattr(numpy_backend.Runner, "forward", fail)
    with pytest.raises(Exception, match="words of the backend"):
        jax.block_until_ready(attention_kl(*operands()))


def test_jax_without_buffer_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "jax.experimental.buffer_callback":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"buffer_callback.*tested with JAX"):
        attention_kl(*operands(M=13))  # a shape of its own: a traced one needs no import any more


# The explicit functions, and what a call costs


@pytest.mark.usefixtures("platform")
def test_explicit_functions() -> None:
    x = operands()
    rows = streamkl_cupy.attention_kl_forward(*x)
    expected = reference.forward(*map(np.asarray, x))
    for a, e in zip(rows, expected):
        close(a, e)
    weight = jnp.arange(5.0)
    row_grad = np.broadcast_to(np.arange(5.0), (2, 4, 5))
    grads = streamkl_cupy.attention_kl_backward(
        jnp.asarray(row_grad, jnp.float32), *x, saved=rows, wrt=INPUT_NAMES[::-1]
    )
    for g, e in zip(grads, dense_grads(x, row_grad)):
        close(g, e)
    value, grads = streamkl_cupy.attention_kl_value_and_grad(
        *x, row_weight=weight, reduction="mean", wrt=("teacher_k",)
    )
    close(value, (expected.kl * row_grad).sum() / row_grad.sum())
    close(grads.teacher_k, dense_grads(x, row_grad / row_grad.sum()).teacher_k)
    assert grads.student_q is None


@pytest.mark.usefixtures("platform")
def test_results_stay_on_the_device_of_the_inputs() -> None:
    x = operands()
    for result in (*streamkl_cupy.attention_kl(*x, return_lse=True), *jax.grad(total, ALL)(*x)):
        assert result.devices() == x[0].devices()


def test_cpu_buffers_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    from streamkl_cupy import numpy_backend

    seen: list[Any] = []
    monkeypatch.setattr(numpy_backend.Runner, "forward", lambda self, inputs, *rest: seen.extend(v.ptr for v in inputs))
    x = operands(dtype="bfloat16")
    jax.block_until_ready(attention_kl(*x))
    assert seen == [t.unsafe_buffer_pointer() for t in x]


@pytest.mark.usefixtures("platform")
def test_calling_again_traces_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x = operands(M=11)
    traced: list[str] = []
    forward, backward = autodiff.forward, autodiff.backward
    monkeypatch.setattr(autodiff, "forward", lambda *a: traced.append("forward") or forward(*a))
    monkeypatch.setattr(autodiff, "backward", lambda *a: traced.append("backward") or backward(*a))
    calls = (
        lambda: attention_kl(*x, causal=True, teacher_scale=0.25),
        lambda: jax.grad(total, (2, 3))(*x),
        lambda: front.attention_kl_value_and_grad(*x),
    )
    for call in calls:
        jax.block_until_ready(call())
        traced.clear()
        for _ in range(3):
            jax.block_until_ready(call())
        assert not traced


@pytest.mark.gpu
def test_compiled_program_moves_nothing_to_the_host() -> None:
    with jax.default_device(jax.devices("gpu")[0]):
        x = operands(M=64, N=64)
        text = jax.jit(jax.grad(total, ALL)).lower(*x).compile().as_text()
    assert "xla_buffer_python_gpu_callback" in text
    assert not any(word in text for word in ("copy-start", "infeed", "outfeed", "S(5)"))


@pytest.mark.gpu
def test_callback_gets_the_stream_of_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    from streamkl_cupy import launch

    streams: list[int] = []
    forward = launch.Runner.forward

    def spy(self: Any, inputs: Any, outputs: Any, stream: int, *rest: Any) -> None:
        streams.append(stream)
        forward(self, inputs, outputs, stream, *rest)

    monkeypatch.setattr(launch.Runner, "forward", spy)
    with jax.default_device(jax.devices("gpu")[0]):
        x = operands(M=64, N=64)
        close(attention_kl(*x), dense_kl(x))
    assert len(streams) == 1
    assert streams[0] not in (0, 1, 2)


@pytest.mark.gpu
def test_kernels_are_ready_when_a_trace_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing compiles and loads, so that no callback does."""
    from streamkl_cupy import launch

    with jax.default_device(jax.devices("gpu")[0]):
        x = operands(M=37, N=41, D_t=24, D_s=40)
        gradient = jax.jit(jax.grad(total, ALL)).lower(*x).compile()
        monkeypatch.setattr(launch, "load", lambda *a, **k: pytest.fail("loaded a kernel in a callback"))
        for g, e in zip(gradient(*x), dense_grads(x)):
            close(g, e)


def test_a_deleted_array_is_named() -> None:
    x = [jnp.ones((3, 4)) for _ in range(4)]
    x[1].delete()
    with pytest.raises(ValueError, match="teacher_k is a deleted JAX array"):
        attention_kl(*x)

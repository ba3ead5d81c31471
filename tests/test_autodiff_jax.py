"""What differentiates by JAX, asked with an operation that is none of the package's: its means are times the
weights."""

from __future__ import annotations

import functools
import os
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from toy_operation import MEANS

from streamkl_cupy import numpy_backend, validate
from streamkl_cupy.arrays import host
from streamkl_cupy.call import KINDS, OF_SIDES, Call
from streamkl_cupy.numpy_backend.block import canonical
from streamkl_cupy.numpy_backend.elements import narrow, widen
from streamkl_cupy.ops import OPS, Op
from streamkl_cupy.options import NO_MASKS

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
autodiff = pytest.importorskip("streamkl_cupy.autodiff.jax")

# Checks and problems know of arrays with columns only.
WITH_COLUMNS = replace(MEANS, operands=MEANS.operands[:3])


class Chosen(NamedTuple):
    """Its options."""

    scale: float | None = None
    causal: bool = False
    q_offset: int | None = None
    window: tuple[int, int] | None = None
    block_mask: Any = None
    layout: str = "bhnd"
    precision: str = "highest"
    deterministic: bool | None = None


class Runner:
    """It in dense NumPy. Notes what it is asked for."""

    workspace_bytes = 0
    asked: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, problem: Any) -> None:
        self.problem = problem

    def backward_bytes(self, wrt: Any) -> int:
        return 0

    def _open(self, x: Any, trailing: int) -> Any:
        """(b, h, rows, ...) of a view, and float64 of its numbers; None where there is none."""
        if x is None:
            return None
        a = canonical(host(x), self.problem.layout, trailing)
        return widen(a, np.empty(a.shape))

    def _close(self, x: Any, values: Any, trailing: int) -> None:
        if x is not None:
            a = canonical(host(x), self.problem.layout, trailing)
            a[...] = narrow(values, a.dtype)

    def _read(self, inputs: Any) -> Any:
        q, k, v = (self._open(x, 1) for x in inputs[:3])
        w = self._open(inputs.weight, 0)
        w = np.ones(q.shape[:3]) if w is None else w
        group = q.shape[1] // k.shape[1]
        return q, np.repeat(k, group, 1), np.repeat(v, group, 1), w

    def _probabilities(self, q: Any, k: Any) -> Any:
        s = self.problem.distributions[0].scale * q @ k.swapaxes(-1, -2)
        top = s.max(-1, keepdims=True)
        e = np.exp(s - top)
        total = e.sum(-1, keepdims=True)
        return e / total, (top + np.log(total))[..., 0]

    def forward(self, inputs: Any, outputs: Any, *rest: Any) -> None:
        self.asked.append(("forward", inputs.weight is not None))
        q, k, v, w = self._read(inputs)
        p, lse = self._probabilities(q, k)
        self._close(outputs.lse, lse, 0)
        self._close(outputs.out, w[..., None] * (p @ v), 1)

    def backward(self, inputs: Any, saved: Any, outputs: Any, *rest: Any) -> None:
        self.asked.append((*(x for x in MEANS.names if getattr(outputs, x) is not None), saved.grad_lse is not None))
        q, k, v, w = self._read(inputs)
        p, _ = self._probabilities(q, k)
        s = self.problem.distributions[0].scale
        grad, by_lse = self._open(saved.grad, 1), self._open(saved.grad_lse, 0)
        p = np.exp(s * q @ k.swapaxes(-1, -2) - self._open(saved.lse, 0)[..., None])
        dp = w[..., None] * (grad @ v.swapaxes(-1, -2))
        ds = p * (dp - (p * dp).sum(-1, keepdims=True) + (0 if by_lse is None else by_lse[..., None]))
        dv = p.swapaxes(-1, -2) @ (w[..., None] * grad)
        heads = inputs.value.shape[-2 if self.problem.layout == "bnhd" else -3] if len(inputs.value.shape) > 2 else 1
        self._close(outputs.query, s * ds @ k, 1)
        self._close(outputs.value, dv.reshape(dv.shape[0], heads, -1, *dv.shape[2:]).sum(2), 1)
        self._close(outputs.weight, (grad * (p @ v)).sum(-1), 0)


@autodiff.differentiable
def _means(inputs: Any, masks: Any, *, config: Any) -> Any:
    return autodiff.rows(config, inputs, masks)


def means(query: Any, key: Any, value: Any, weight: Any = None, **options: Any) -> Any:
    """What a door has of it."""
    call = Call(MEANS, (query, key, value, weight), Chosen(**options), NO_MASKS)
    return _means(call.operands, call.masks, config=autodiff.checked(call))


def dense(query: Any, key: Any, value: Any, weight: Any = None, layout: str = "bhnd") -> Any:
    """The same by JAX's own functions, which differentiate themselves."""
    rank = query.ndim

    def swapped(x: Any, trailing: int) -> Any:
        return x.swapaxes(-1 - trailing, -2 - trailing) if layout == "bnhd" and rank > 2 else x

    q, k, v = (swapped(x, 1).astype(jnp.float32) for x in (query, key, value))
    if rank > 2:
        k, v = (jnp.repeat(x, q.shape[-3] // k.shape[-3], -3) for x in (k, v))
    s = q @ k.swapaxes(-1, -2) / query.shape[-1] ** 0.5
    out = jax.nn.softmax(s, axis=-1) @ v
    out = out if weight is None else out * swapped(weight, 0).astype(jnp.float32)[..., None]
    return MEANS.Results(lse=swapped(jax.nn.logsumexp(s, axis=-1), 0), out=swapped(out, 1).astype(query.dtype))


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The operation among those that there are, on the CPU; what its backend is asked for."""
    real = validate.to_problem

    def to_problem(op: Op, inputs: Any, chosen: Any, masks: Any = None) -> Any:
        assert op is MEANS
        return real(WITH_COLUMNS, inputs[:3], chosen, masks)

    seen: list[tuple[Any, ...]] = []
    monkeypatch.setitem(OPS, "means", MEANS)
    monkeypatch.setitem(KINDS, "means", OF_SIDES)
    monkeypatch.setattr(numpy_backend, "Runner", Runner)
    monkeypatch.setattr(Runner, "asked", seen)
    monkeypatch.setattr(validate, "to_problem", to_problem)
    with jax.default_device(jax.devices("cpu")[0]):
        yield seen


SHAPES = {"query": (2, 4, 5, 8), "key": (2, 2, 7, 8), "value": (2, 2, 7, 3), "weight": (2, 4, 5)}


def operands(rng: np.random.Generator, dtype: str = "float32") -> list[Any]:
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in SHAPES.values()]


def close(actual: Any, expected: Any, tolerance: float = 2e-5) -> None:
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    a, e = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert np.linalg.norm(a - e) <= tolerance * (np.linalg.norm(e) + 1e-3), np.abs(a - e).max()


def both(function: Any, by: tuple[Any, Any], *x: Any, **options: Any) -> tuple[Any, Any]:
    """A number that `out` and `lse` have a part in, as much as `by` says, None for no part; and both of them, with what
    the number's terms come to without their signs."""
    found = function(*x, **options)
    terms = [y.astype(jnp.float32) * w for y, w in zip((found.out, found.lse), by) if w is not None]
    return sum(t.sum() for t in terms), (found, sum(abs(t).sum() for t in terms))


def gradients(function: Any, by: tuple[Any, Any], argnums: tuple[int, ...], **options: Any) -> Any:
    """Of that number, by some operands; a function that gives ((number, (results, size)), gradients)."""
    return jax.value_and_grad(functools.partial(both, function, by, **options), argnums, has_aux=True)


def weighed(rng: np.random.Generator, *x: Any, **options: Any) -> tuple[Any, Any]:
    """Random weights of both results."""
    shapes = jax.eval_shape(functools.partial(dense, **options), *x)
    return tuple(jnp.asarray(rng.standard_normal(y.shape), "float32") for y in (shapes.out, shapes.lse))  # type: ignore[return-value]


def all_close(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    for a, e in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        close(a, e, tolerance)


def all_near(found: Any, expected: Any, tolerance: float = 2e-5) -> None:
    """The same of what `gradients` gives, whose number is a sum that may cancel: its roundings are of its terms."""
    ((number, rest), grads), ((right, (results, size)), wanted) = found, expected
    assert (number.shape, number.dtype) == (right.shape, right.dtype)
    assert (np.abs(np.asarray(number) - np.asarray(right)) <= tolerance * np.asarray(size)).all(), (number, right, size)
    all_close((rest, grads), ((results, size), wanted), tolerance)


@pytest.mark.parametrize(
    "dtype, parts, weight, jit",
    [
        ("float32", (True, True), True, True),
        ("float32", (True, False), True, False),
        ("float32", (False, True), False, True),
        ("bfloat16", (True, True), False, False),
    ],
)
def test_derivatives_of_two_results(
    dtype: str, parts: tuple[bool, bool], weight: bool, jit: bool, rng: np.random.Generator, asked: list[Any]
) -> None:
    x = operands(rng, dtype)[: 3 + weight]
    by_out, by_lse = (w if part else None for w, part in zip(weighed(rng, *x), parts))
    argnums = (0, 2, 3) if weight else (0, 2)
    found = gradients(means, (by_out, by_lse), argnums)
    all_near(
        (jax.jit(found) if jit else found)(*x),
        jax.jit(gradients(dense, (by_out, by_lse), argnums))(*x),
        2e-2 if dtype == "bfloat16" else 2e-5,
    )
    # A derivative of zeros is not read where the record says that it need not be.
    assert asked == [("forward", weight), (*(MEANS.names[i] for i in argnums), by_lse is not None)]


@pytest.mark.parametrize(
    "rank, layout, axes",
    [
        (4, "bhnd", (0, 0, 0, 0)),
        (4, "bnhd", (1, None, None, 0)),
        (3, "bhnd", (None, None, 0, None)),
        (3, "bnhd", (0, 1, None)),
        (2, "bhnd", (1, None, None, 0)),
        (2, "bnhd", (None, 0, 0)),
    ],
)
def test_vmap(rank: int, layout: str, axes: tuple[int | None, ...], rng: np.random.Generator) -> None:
    x = operands(rng)[: len(axes)]
    if layout == "bnhd":
        x = [t.swapaxes(1, 2) for t in x]
    first = {4: (), 3: (0,), 2: (0, slice(None), 0) if layout == "bnhd" else (0, 0)}[rank]
    x = [t[first] for t in x]
    mapped = [t if a is None else jnp.stack([t, 2 * t, -t], a) for t, a in zip(x, axes)]
    by = weighed(rng, *x, layout=layout)
    argnums = (0, 2, 3)[: len(axes) - 1]
    found, expected = (
        jax.jit(jax.vmap(gradients(f, by, argnums, layout=layout), in_axes=axes))(*mapped) for f in (means, dense)
    )
    all_near(found, expected)


def test_vmap_is_one_launch_where_strides_allow(rng: np.random.Generator, asked: list[Any]) -> None:
    x = [jnp.stack([t, -t]) for t in operands(rng)]
    jax.block_until_ready(jax.vmap(jax.vmap(means))(*x))
    assert asked == [("forward", True)]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("parts", ["both", "lse"])
def test_shard_map(parts: str, check_vma: bool, rng: np.random.Generator) -> None:
    devices = jax.devices("cpu")
    if len(devices) < 2:
        pytest.skip("JAX started with one CPU device before this test could ask for two")
    spec, whole = jax.sharding.PartitionSpec("b"), jax.sharding.PartitionSpec()
    mesh = jax.sharding.Mesh(np.array(devices[:2]), ("b",))
    x = operands(rng)
    by = tuple(w[:1] for w in weighed(rng, *x))
    by = (None, by[1]) if parts == "lse" else by
    x[2] = x[2][:1]  # every device reads all of it
    specs = (spec, spec, whole, spec)

    def total(*x: Any) -> Any:
        def part(*x: Any) -> Any:
            return both(means, by, *x)[0][None]

        return jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=check_vma)(*x).sum()

    def expected(query: Any, key: Any, value: Any, weight: Any) -> Any:
        return both(dense, by, query, key, jnp.repeat(value, 2, 0), weight)[0]

    placed = [jax.device_put(t, jax.sharding.NamedSharding(mesh, s)) for t, s in zip(x, specs)]
    all_close(*(jax.jit(jax.grad(f, (0, 2, 3)))(*y) for f, y in ((total, placed), (expected, x))))


def test_without_keys(rng: np.random.Generator, asked: list[Any]) -> None:
    query, key, value, weight = operands(rng, "float16")
    x = (query, key[..., :0, :], value[..., :0, :], weight)
    found = means(*x)
    assert (found.out.shape, found.out.dtype) == ((2, 4, 5, 3), "float16")
    assert not found.out.any()
    assert (found.lse.shape, found.lse.dtype) == ((2, 4, 5), "float32")
    assert jnp.isneginf(found.lse).all()
    _, grads = gradients(means, (1.0, None), (0, 2, 3))(*x)
    assert not any(g.any() for g in grads)
    assert asked == []


def test_explicit_functions(rng: np.random.Generator) -> None:
    x = operands(rng)
    by = weighed(rng, *x)
    call = Call(MEANS, tuple(x), Chosen(), NO_MASKS)
    found = autodiff.run_forward(call)
    all_close(found, jax.jit(dense)(*x))
    for by_lse in (by[1], None):
        grads = autodiff.run_backward(call, (by[0], found.lse, by_lse), ("weight", "query"))
        _, expected = jax.jit(gradients(dense, (by[0], by_lse), (0, 3)))(*x)
        all_close(grads, dict(zip(("query", "weight"), expected)))
    with pytest.raises(
        ValueError, match=r"grad_lse: got shape \(2, 4\) .*allowed is \(2, 4, 5\) in float32, as means_"
    ):
        autodiff.run_backward(call, (by[0], found.lse, by[1][..., 0]), ("query",))


def test_refusals_name_the_operation(rng: np.random.Generator) -> None:
    x = operands(rng)

    def loss(query: Any) -> Any:
        return both(means, (1.0, 1.0), query, *x[1:])[0]

    with pytest.raises(NotImplementedError, match=r"key .*is a constant of streamkl_cupy\.means; pass jax\.lax\.stop"):
        gradients(means, (1.0, None), (1,))(*x)
    with pytest.raises(NotImplementedError, match=r"streamkl_cupy\.means has first-order gradients only"):
        jax.grad(lambda q: jax.grad(loss)(q).sum())(x[0])
    with pytest.raises(TypeError, match=r"streamkl_cupy\.means has reverse-mode gradients only"):
        jax.jvp(loss, (x[0],), (x[0],))
    with pytest.raises(TypeError, match="value is None"):
        means(x[0], x[1], None)

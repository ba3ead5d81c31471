"""Sinks: a logit per head that takes mass and has no value, against the same with one more column of whole maps."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import Jax, Torch

import streamkl_cupy
from streamkl_cupy.problem import INPUT_NAMES
from streamkl_cupy.rules import sinks
from streamkl_cupy.rules.divergences import DIVERGENCES
from streamkl_cupy.rules.masks import MASKS
from streamkl_cupy.testing import reference
from streamkl_cupy.testing.problems import MASK_OPTIONS, Case, make, upstream

FIRST = {name: x.weighing.side for name, x in DIVERGENCES.items() if x.weighing}
"""Of those that sinks are built for, the side that its own terms weigh."""
BUILT = tuple(FIRST)
# Which sides have sinks: where that of the first distribution stands alone, the divergence is infinite.
MEANT = [(x, both) for x in BUILT for both in ((True, True), (FIRST[x] == 1, FIRST[x] == 0))]


class Dense(NamedTuple):
    """Rows and gradients of sum(weight * rows), with one more key that is the sink's."""

    value: Any
    lse: tuple[Any, Any]
    entropy: Any
    gradients: tuple[Any, ...]
    by_sinks: tuple[Any, Any]


def dense(case: Case, given: tuple[Any, Any], weight: Any, divergence: str) -> Dense:
    """All in float64, by the definitions of divergences; inputs of the canonical order."""
    tq, tk, sq, sk = (reference.exact(x) for x in case.arrays)
    B, H, M, N = (*tq.shape[:3], tk.shape[2])
    masks = {name: x for name, x in case.options.items() if name in reference.MASK_NAMES}
    seen = np.broadcast_to(reference.visible((B, H, M, N), masks), (B, H, M, N))
    there = seen.any(-1, keepdims=True)
    logits, visible = [], []
    for q, k, z in ((tq, tk, given[0]), (sq, sk, given[1])):
        x = np.einsum("bhmd,bhnd->bhmn", q, np.repeat(k, H // k.shape[1], axis=1)) / np.sqrt(q.shape[-1])
        column = np.full((B, H, M, 1), -1e5) if z is None else np.broadcast_to(z[:, None, None], (B, H, M, 1))
        logits.append(np.concatenate([x, column], -1))
        visible.append(np.concatenate([seen, there], -1))
    entry = DIVERGENCES[divergence]
    shown = visible[0]
    value = entry.value(*logits, shown)
    both = [np.where(shown, weight[..., None] * d, 0) for d in entry.logit_gradients(*logits, shown)]
    grads = []
    for d, q, k in zip(both, (tq, sq), (tk, sk), strict=True):
        c, group = 1 / np.sqrt(q.shape[-1]), H // k.shape[1]
        grads.append(c * d[..., :-1] @ np.repeat(k, group, axis=1))
        by_head = c * np.swapaxes(d[..., :-1], -1, -2) @ q
        grads.append(by_head.reshape(B, k.shape[1], group, *by_head.shape[2:]).sum(2))
    lse = tuple(
        np.where(there[..., 0], np.log(np.where(shown, np.exp(x), 0).sum(-1) + 1e-300), -np.inf) for x in logits
    )
    p = np.where(shown, np.exp(logits[0] - lse[0][..., None]), 0)
    entropy = -(p * np.log(np.maximum(p, 1e-300))).sum(-1)
    by_sinks = tuple(None if z is None else d[..., -1].sum((0, 2)) for z, d in zip(given, both, strict=True))
    return Dense(value, lse, entropy, tuple(grads), by_sinks)  # type: ignore[arg-type]


def some(rng: np.random.Generator, heads: int, which: tuple[bool, bool], dtype: str = "float32") -> tuple[Any, Any]:
    """Sinks around the sums of rows, one of which takes all and one nothing."""
    made = [reference.rounded(np.r_[60.0, -60.0, rng.normal(4, 2, heads - 2)], dtype) if has else None for has in which]
    return made[0], made[1]


def named(given: tuple[Any, Any], make_array: Any = np.asarray) -> dict[str, Any]:
    return {f"{side}_sink_logits": make_array(z) for side, z in zip(("teacher", "student"), given) if z is not None}


@pytest.mark.parametrize("divergence, which", MEANT)
def test_rows_and_gradients(core: Any, rng: Any, divergence: str, which: tuple[bool, bool]) -> None:
    double = core.name == "numpy" and bool(rng.integers(2))
    dtype = "float64" if double else "float32"
    mask = MASK_OPTIONS[str(rng.choice([x for x in MASKS if x != "packed"]))](rng, 2, 40, 70)
    case = make(B=2, H=4, M=40, N=70, D_t=32, student_key_heads=2, dtypes=dtype, seed=int(rng.integers(2**31)), **mask)
    given = some(rng, 4, which, dtype)
    weight = upstream(rng, (2, 4, 40)).astype(np.float64)
    expected = dense(case, given, weight, divergence)
    options = {**core.options(case), "divergence": divergence}
    options |= named(given, lambda z: core.array(z, dtype))
    arrays = core.arrays(case)
    core.poison(arrays)
    rows = streamkl_cupy.attention_kl(*arrays, **options, return_lse=True, return_entropy=True)
    bound = 1e-10 if double else 1e-5
    np.testing.assert_allclose(core.numpy(rows.kl), expected.value, rtol=bound, atol=bound)
    np.testing.assert_allclose(core.numpy(rows.teacher_entropy), expected.entropy, rtol=bound, atol=bound)
    for found, lse in zip((rows.teacher_lse, rows.student_lse), expected.lse, strict=True):
        np.testing.assert_allclose(core.numpy(found), lse, rtol=bound, atol=bound)
    explicit = streamkl_cupy.attention_kl_forward(*arrays, **options, return_entropy=True)
    np.testing.assert_array_equal(core.numpy(explicit.kl), core.numpy(rows.kl))
    loss, grads = streamkl_cupy.attention_kl_value_and_grad(
        *arrays, **options, row_weight=core.array(weight, dtype), reduction="sum", wrt=INPUT_NAMES
    )
    size = (np.abs(weight) * (1 + np.abs(expected.value))).sum()  # the sum itself may cancel
    np.testing.assert_allclose(core.numpy(loss), (weight * expected.value).sum(), rtol=0, atol=bound * size)
    for x, y in zip(grads, (*expected.gradients, *expected.by_sinks), strict=True):
        if y is None:
            assert x is None
        else:
            # Where rows see one key each, gradients by the teacher's inputs cancel altogether.
            assert np.linalg.norm(core.numpy(x) - y) <= 3 * bound * (np.linalg.norm(y) + 3)
    again = streamkl_cupy.attention_kl_backward(
        core.array(weight, dtype), *arrays, **options, saved=explicit, wrt=INPUT_NAMES
    )
    for x, y in zip(again, grads, strict=True):
        if x is not None:
            np.testing.assert_allclose(core.numpy(x), core.numpy(y), rtol=1e-4, atol=1e-5)


def test_keys_with_a_large_common_part(core: Any, rng: Any) -> None:
    """What kernels leave out of keys goes unnoticed only where the logit gradients of a row add up to 0."""
    case = make(H=2, M=33, N=64, D_t=32, seed=int(rng.integers(2**31)))
    arrays = [*case.arrays]
    for i in (1, 3):
        arrays[i] = reference.rounded(arrays[i] + 4 * rng.standard_normal((1, 1, 1, 32)), "float32")
    case = case._replace(arrays=tuple(arrays))
    # Where the sums of rows lie.
    given = tuple(reference.rounded(reference.forward(*arrays).teacher_lse.mean((0, 2)) + x, "float32") for x in (0, 1))
    weight = np.ones((1, 2, 33))
    expected = dense(case, given, weight, "kl")
    _, grads = streamkl_cupy.attention_kl_value_and_grad(
        *core.arrays(case), reduction="sum", wrt=INPUT_NAMES, **named(given, lambda z: core.array(z, "float32"))
    )
    for x, y in zip(grads, (*expected.gradients, *expected.by_sinks), strict=True):
        assert np.linalg.norm(core.numpy(x) - y) <= 1e-4 * np.linalg.norm(y)


@pytest.mark.parametrize("layout", ["bhnd", "bnhd", "packed", "no batch", "no heads"])
def test_a_logit_belongs_to_a_head(core: Any, rng: Any, layout: str) -> None:
    arrays = rng.standard_normal((4, 1, 3, 20, 16))
    given = some(rng, 3, (True, True))
    expected = streamkl_cupy.attention_kl(*arrays, **named(given), causal=True)
    options: dict[str, Any] = {"causal": True}
    if layout == "no batch":
        arrays, expected = arrays[:, 0], expected[0]
    elif layout == "no heads":
        arrays, expected, given = arrays[:, 0, 1], expected[0, 1], (given[0][1:2], given[1][1:2])
    elif layout != "bhnd":
        arrays, expected = arrays.swapaxes(2, 3), expected.swapaxes(1, 2)
        options["layout"] = "bnhd"
    if layout == "packed":
        arrays, expected = arrays[:, 0], expected[0]
        ends = core.mask_array(np.array([0, 20], np.int32))
        options = {"causal": True, "cu_seqlens_q": ends, "cu_seqlens_k": ends}
    inputs = [core.array(x, "float32") for x in arrays]
    made = named(given, lambda z: core.array(z, "float32"))
    rows = core.numpy(streamkl_cupy.attention_kl(*inputs, **options, **made))
    np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-5)
    _, grads = streamkl_cupy.attention_kl_value_and_grad(*inputs, **options, **made)
    assert grads.student_sink_logits.shape == given[1].shape


def test_frameworks_differentiate_by_sinks(backend: Any, rng: Any) -> None:
    arrays = rng.standard_normal((4, 2, 3, 9, 8)).astype(np.float32)
    both = some(rng, 3, (True, True))
    call = functools.partial(streamkl_cupy.attention_kl_value_and_grad, *arrays, causal=True, wrt=INPUT_NAMES)
    expected, wanted = call(**named(both))
    inputs = [backend.array(x, "float32") for x in arrays]
    given = [backend.array(z, "float32") for z in both]

    def loss(*x: Any) -> Any:
        return streamkl_cupy.attention_kl(
            *x[:4], causal=True, reduction="mean", teacher_sink_logits=x[4], student_sink_logits=x[5]
        )

    if isinstance(backend, Torch):
        x = [a.clone().requires_grad_() for a in (*inputs, *given)]
        compiled = backend.xp.compile(loss, backend="aot_eager", fullgraph=True)
        for run in (loss, compiled):
            value = run(*x)
            np.testing.assert_allclose(backend.numpy(value), expected, rtol=1e-5)
            for a, b in zip(backend.xp.autograd.grad(value, x), wanted, strict=True):
                np.testing.assert_allclose(backend.numpy(a), b, atol=1e-6)
        mapped = backend.xp.func.vmap(lambda *y: streamkl_cupy.attention_kl(*y, student_sink_logits=given[1]))(*inputs)
        whole = streamkl_cupy.attention_kl(*inputs, student_sink_logits=given[1])
        backend.xp.testing.assert_close(mapped, whole)
        first = backend.xp.autograd.grad(loss(*x), x[5], create_graph=True)[0]
        with pytest.raises(NotImplementedError, match="first-order gradients only"):
            backend.xp.autograd.grad(first.sum(), x[5])
    elif isinstance(backend, Jax):
        value, grads = backend.xp.jit(backend.xp.value_and_grad(loss, argnums=range(6)))(*inputs, *given)
        np.testing.assert_allclose(backend.numpy(value), expected, rtol=1e-5)
        for a, b in zip(grads, wanted, strict=True):
            np.testing.assert_allclose(backend.numpy(a), b, atol=1e-6)
        with pytest.raises(NotImplementedError, match="first-order gradients only"):
            backend.xp.grad(lambda z: backend.xp.grad(loss, argnums=5)(*inputs, given[0], z).sum())(given[1])
    else:
        np.testing.assert_allclose(backend.numpy(loss(*inputs, *given)), expected, rtol=1e-5)


def test_a_students_sink_beside_a_target(core: Any, rng: Any) -> None:
    p = np.exp(rng.standard_normal((2, 3, 7, 9)))
    p /= p.sum(-1, keepdims=True)
    q, k = rng.standard_normal((2, 3, 7, 8)), rng.standard_normal((2, 3, 9, 8))
    z = some(rng, 3, (False, True))[1]
    x = np.concatenate([q @ k.swapaxes(-1, -2) / np.sqrt(8), np.broadcast_to(z[:, None, None], (2, 3, 7, 1))], -1)
    log_q = x - np.log(np.exp(x).sum(-1, keepdims=True))
    arrays = [core.array(a, "float32") for a in (p, q, k)]
    loss, grads = streamkl_cupy.attention_kl_to_value_and_grad(
        *arrays, student_sink_logits=core.array(z, "float32"), reduction="sum"
    )
    np.testing.assert_allclose(core.numpy(loss), (p * (np.log(p) - log_q[..., :-1])).sum(), rtol=1e-5)
    np.testing.assert_allclose(core.numpy(grads.student_sink_logits), np.exp(log_q[..., -1]).sum((0, 2)), atol=1e-4)


def test_heads_without_a_sink_among_others(core: Any, rng: Any) -> None:
    case = make(H=3, M=9, N=20, D_t=16, causal=True, seed=int(rng.integers(2**31)))
    arrays = core.arrays(case)
    given = tuple(np.array([-np.inf, x, -np.inf], np.float32) for x in (1, 2))
    made = named(given, lambda z: core.array(z, "float32"))
    for divergence in BUILT:
        options = {"causal": True, "divergence": divergence, "reduction": "sum", "wrt": INPUT_NAMES}
        with_some, without = (streamkl_cupy.attention_kl_value_and_grad(*arrays, **options, **x)[1] for x in (made, {}))
        for x, y in zip(with_some[:4], without, strict=True):
            np.testing.assert_allclose(core.numpy(x)[:, ::2], core.numpy(y)[:, ::2], rtol=1e-5, atol=1e-6)
        for x in with_some[4:]:
            assert (core.numpy(x)[::2] == 0).all()
            assert core.numpy(x)[1] != 0


def test_nothing_is_lost_near_equality(rng: Any) -> None:
    """The value is a small rest of larger terms there, and its error a rounding of these."""
    lse, z = rng.normal(5, 3, 1000), rng.normal(5, 3, 1000)
    moved = lse + 1e-3 * rng.standard_normal(1000)
    rows = (np.zeros(1000), lse, moved)
    exact = sinks.with_sinks(np, rows, sinks.Sinks(z, z), "kl")[0]
    single = sinks.with_sinks(
        np, tuple(x.astype(np.float32) for x in rows), sinks.Sinks(*[z.astype(np.float32)] * 2), "kl"
    )[0]
    assert (exact >= -1e-15).all()
    assert exact.max() < 1e-5
    assert np.abs(single - exact).max() < 3e-7


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_what_does_not_fit(rng: Any, framework: str) -> None:
    made: Any = {"numpy": np.asarray, "torch": None, "jax": None}[framework]
    if made is None:
        xp = pytest.importorskip({"torch": "torch", "jax": "jax.numpy"}[framework])
        made = xp.asarray
    x = [made(a) for a in rng.standard_normal((4, 2, 3, 5, 8)).astype(np.float32)]
    z = made(np.zeros(3, np.float32))
    call = functools.partial(streamkl_cupy.attention_kl, *x)
    with pytest.raises(ValueError, match=r"teacher_sink_logits without student_sink_logits: .*infinite.*its sum over"):
        call(teacher_sink_logits=z)
    with pytest.raises(ValueError, match="student_sink_logits without teacher_sink_logits"):
        call(student_sink_logits=z, divergence="reverse_kl")
    with pytest.raises(NotImplementedError, match=r"student_sink_logits beside divergence='jsd'; built are .*kl"):
        call(student_sink_logits=z, divergence="jsd")
    with pytest.raises(ValueError, match=r"student_sink_logits: shape \(2,\), .* 3 query heads: expected \(3,\)"):
        call(student_sink_logits=z[:2])
    with pytest.raises(TypeError, match="student_sink_logits is a list"):
        call(student_sink_logits=[0.0] * 3)
    with pytest.raises(TypeError, match="student_sink_logits has dtype int"):
        call(student_sink_logits=made(np.zeros(3, np.int32)))
    with pytest.raises(NotImplementedError, match="dense_teacher_lse beside sinks"):
        call(student_sink_logits=z, return_lse=True, dense_teacher_lse=call())


def test_second_order_is_refused_by_the_operations_name(rng: Any) -> None:
    torch = pytest.importorskip("torch")
    q, k = (torch.tensor(rng.standard_normal((1, 2, 5, 8)), requires_grad=True) for _ in range(2))
    target = torch.softmax(torch.tensor(rng.standard_normal((1, 2, 5, 5))), -1)
    sinks = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    kl = streamkl_cupy.attention_kl_to(target, q, k, student_sink_logits=sinks)
    (grad,) = torch.autograd.grad(kl.sum(), sinks, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"streamkl_cupy\.attention_kl_to has first-order gradients only"):
        grad.sum().backward()

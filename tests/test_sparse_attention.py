"""Sparse attention: its definition, what merges its results, and every backend against it."""

from __future__ import annotations

import importlib
import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import streamkl_cupy
from streamkl_cupy.testing import attention as definition
from streamkl_cupy.testing.problems import lengths

Array = NDArray[Any]
NAMES = ("query", "key", "value")


def inputs(rng: np.random.Generator, M: int, N: int, dims: tuple[int, int] = (8, 6), heads: tuple[int, int] = (4, 2),
           B: int = 2) -> tuple[Array, Array, Array]:  # fmt: skip
    D, Dv = dims
    H, Hk = heads
    return tuple(rng.standard_normal(s) for s in ((B, H, M, D), (B, Hk, N, D), (B, Hk, N, Dv)))  # type: ignore[return-value]


# The definition


def scalar(x: tuple[Array, ...], grad: Array, grad_lse: Array, options: dict[str, Any]) -> float:
    rows = definition.forward(*x, **options)
    seen = np.isfinite(rows.lse)
    return float((grad * rows.out.value).sum() + (grad_lse * np.where(seen, rows.lse, 0)).sum())


@pytest.mark.parametrize("own", [{}, {"softcap": 0.7, "layout": "bnhd"}])
def test_the_definition_has_the_gradients_of_its_forward(own: dict[str, Any], rng: np.random.Generator) -> None:
    options = {"causal": True, "key_lengths": lengths(rng, 2, 14), "scale": -0.8, **own}
    x = inputs(rng, 9, 14)
    if "layout" in own:
        x = tuple(np.ascontiguousarray(a.swapaxes(1, 2)) for a in x)  # type: ignore[assignment]
    rows = definition.forward(*x, **options)
    grad, grad_lse = rng.standard_normal(rows.out.value.shape), rng.standard_normal(rows.lse.shape)
    found = definition.backward(grad, grad_lse, *x, **options)
    for i, name in enumerate(NAMES):
        for _ in range(8):
            at = tuple(int(rng.integers(0, n)) for n in x[i].shape)
            step = np.zeros_like(x[i])
            step[at] = 1e-5
            ends = [scalar((*x[:i], x[i] + s * step, *x[i + 1 :]), grad, grad_lse, options) for s in (1, -1)]
            assert abs((ends[0] - ends[1]) / 2e-5 - found[i].value[at]) < 1e-8, name


def test_the_definition_by_hand() -> None:
    q, k, v = np.ones((1, 1)), np.log([[4.0], [3], [2], [1]]), np.array([[1.0], [2], [3], [4]])
    rows = definition.forward(q, k, v, scale=1.0, key_mask=np.array([True, False, False, True]))
    assert rows.out.value.tolist() == [[pytest.approx(1.6)]]
    assert rows.lse.tolist() == [pytest.approx(math.log(5))]


def test_the_definition_keeps_nan_where_it_is_seen(rng: np.random.Generator) -> None:
    """Key 3 is hidden from all, key 5 from rows above the diagonal, row 2 sees nothing."""
    x = inputs(rng, 8, 8)
    clean = [a.copy() for a in x]
    options: dict[str, Any] = {
        "causal": True,
        "key_mask": np.arange(8)[None].repeat(2, 0) != 3,
        "query_mask": np.arange(8)[None].repeat(2, 0) != 2,
    }
    grad, grad_lse = rng.standard_normal((2, 4, 8, 6)), rng.standard_normal((2, 4, 8))
    x[1][:, :, 3] = x[2][:, :, 3] = x[0][:, :, 2] = np.nan
    hidden = grad.copy(), grad_lse.copy()
    hidden[0][:, :, 2], hidden[1][:, :, 2] = np.inf, np.nan
    for a, b in zip(
        definition.backward(*hidden, *x, **options), definition.backward(grad, grad_lse, *clean, **options)
    ):
        np.testing.assert_array_equal(a.value, b.value)
    x[2][:, :, 5, 1] = np.nan
    out = definition.forward(*x, **options).out.value
    assert np.isnan(out[:, :, 5:, 1]).all()
    assert np.isfinite(np.delete(out, 1, axis=-1)).all()
    assert np.isfinite(out[:, :, :5]).all()
    dq, dk, dv = (g.value for g in definition.backward(*hidden, *x, **options))
    assert np.isnan(dq[:, :, 5:]).all()
    assert np.isfinite(dq[:, :, :5]).all()
    assert np.isnan(np.delete(dk, 3, axis=2)).all()
    assert (dk[:, :, 3] == 0).all()
    assert np.isfinite(dv).all()


# merge_attention_states


def parts(rng: np.random.Generator, *, dtype: str = "float64") -> tuple[list[Array], list[Array], Any]:
    """Three parts of the keys of one problem, some of whose rows see none of a part or of any, and the whole."""
    q, k, v = inputs(rng, 12, 30)
    seen = rng.random((2, 30)) < 0.8
    seen[0, :10] = False
    options: dict[str, Any] = {"query_mask": rng.random((2, 12)) < 0.7}
    whole = definition.forward(q, k, v, key_mask=seen, **options)
    cut = [definition.forward(q, k[:, :, s], v[:, :, s], key_mask=seen[:, s], **options)
           for s in (slice(0, 10), slice(10, 17), slice(17, 30))]  # fmt: skip
    return [r.out.value.astype(dtype) for r in cut], [r.lse.astype(dtype) for r in cut], whole


def test_parts_merge_to_the_whole(backend: Any, rng: np.random.Generator) -> None:
    dtype = "float64" if "float64" in backend.dtypes else "float32"
    outs, lses, whole = parts(rng)
    empty = np.isneginf(lses[0])
    assert empty.any()
    assert not empty.all()
    outs[0][empty] = np.nan
    o, lse = ([backend.array(x, dtype) for x in xs] for xs in (outs, lses))
    tolerance = 1e-13 if dtype == "float64" else 2e-6
    # In any order and any nesting.
    nested = [streamkl_cupy.merge_attention_states(o[1:], lse[1:])]
    nested = [streamkl_cupy.merge_attention_states([nested[0].out, o[0]], [nested[0].lse, lse[0]])]
    for found in (streamkl_cupy.merge_attention_states(o, lse), *nested):
        got = backend.numpy(found.lse)
        np.testing.assert_array_equal(np.isneginf(got), np.isneginf(whole.lse))
        np.testing.assert_allclose(np.exp(got), np.exp(whole.lse), rtol=4 * tolerance)
        np.testing.assert_allclose(backend.numpy(found.out), whole.out.value, atol=tolerance, rtol=tolerance)
        assert (backend.numpy(found.out)[np.isneginf(whole.lse)] == 0).all()
    assert np.abs(sum(np.nan_to_num(x) for x in outs) / 3 - whole.out.value).max() > 0.1, "no mean would do"


def test_a_merge_keeps_sixteen_bit_outputs_and_sums_in_more(backend: Any, rng: np.random.Generator) -> None:
    outs, lses, whole = parts(rng)
    found = streamkl_cupy.merge_attention_states(
        [backend.array(x, "bfloat16") for x in outs], [backend.array(x, "float32") for x in lses]
    )
    assert backend.dtype(found.out) == "bfloat16"
    assert backend.dtype(found.lse) == "float32"
    error = np.linalg.norm(backend.numpy(found.out) - whole.out.value)
    assert error < 4e-3 * np.linalg.norm(whole.out.value)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_merge_is_differentiated(framework: str, rng: np.random.Generator) -> None:
    """Against differences; where a row has no key, an output of NaN has a gradient of 0 all the same."""
    xp = pytest.importorskip(framework)
    o, s, _ = parts(rng)
    empty = np.isneginf(s[0])
    grad, grad_lse = rng.standard_normal(o[0].shape), rng.standard_normal(s[0].shape)

    def value(outs: list[Array], lses: list[Array]) -> float:
        merged = streamkl_cupy.merge_attention_states(outs, lses)
        return float((grad * merged.out).sum() + (grad_lse * np.where(np.isfinite(merged.lse), merged.lse, 0)).sum())

    wanted = [np.zeros_like(o[0]), np.zeros_like(s[0])]
    for at in np.ndindex(o[0].shape) if o[0].size < 100 else [tuple(rng.integers(0, o[0].shape)) for _ in range(12)]:
        for which, place in ((o, at), (s, at[:-1])):
            ends = []
            for sign in (1, -1):
                moved = [x.copy() for x in which]
                moved[0][place] += sign * 1e-6
                ends.append(value(moved, s) if which is o else value(o, moved))
            wanted[which is s][place] = (ends[0] - ends[1]) / 2e-6
    o[0][empty] = np.nan
    single = framework == "jax"  # without 64 bits
    if framework == "torch":
        leaves = [[xp.from_numpy(x).requires_grad_() for x in xs] for xs in (o, s)]
        found = streamkl_cupy.merge_attention_states(*leaves)
        some = xp.isfinite(found.lse)
        loss = (found.out * xp.from_numpy(grad)).sum() + (found.lse[some] * xp.from_numpy(grad_lse)[some]).sum()
        loss.backward()
        got = [xs[0].grad.numpy() for xs in leaves]
    else:
        jnp = importlib.import_module("jax.numpy")

        def scalar(outs: Any, lses: Any) -> Any:
            found = streamkl_cupy.merge_attention_states(outs, lses)
            return (found.out * grad).sum() + jnp.where(jnp.isfinite(found.lse), found.lse * grad_lse, 0).sum()

        args = [[jnp.asarray(x, "float32") for x in xs] for xs in (o, s)]
        got = [np.asarray(xs[0]) for xs in xp.jit(xp.grad(scalar, (0, 1)))(*args)]
    assert (got[0][empty] == 0).all()
    assert (got[1][empty] == 0).all()
    for a, b in zip(got, wanted, strict=True):
        at = b != 0
        np.testing.assert_allclose(a[at], b[at], rtol=1e-3, atol=1e-5 if single else 1e-7)


def test_a_sink_is_a_part_without_values(rng: np.random.Generator) -> None:
    """A logit beside the keys takes of the weights and brings nothing."""
    q, k, v = inputs(rng, 5, 9, heads=(3, 3))
    sink = rng.standard_normal(3)
    rows = definition.forward(q, k, v)
    logits = np.broadcast_to(sink[:, None], rows.lse.shape)
    found = streamkl_cupy.merge_attention_states([rows.out.value, np.zeros_like(rows.out.value)], [rows.lse, logits])
    s = np.exp(q @ k.swapaxes(-1, -2) / math.sqrt(8))
    total = s.sum(axis=-1) + np.exp(logits)
    np.testing.assert_allclose(found.out, s @ v / total[..., None], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(found.lse, np.log(total), rtol=1e-12)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (lambda o, s: (o[0], s), TypeError, r"outs is .*; pass a list of arrays"),
        (lambda o, s: (o, s[:2]), ValueError, "outs has 3 arrays and lses 2"),
        (lambda o, s: ([], []), ValueError, "one at least"),
        (lambda o, s: ([*o[:2], 1.0], s), TypeError, r"outs\[2\] is a float; allowed are arrays"),
        (lambda o, s: ([*o[:2], o[2][:1]], s), ValueError, r"outs\[2\]: shape \(1, .* parts are of the same rows"),
        (lambda o, s: (o, [s[0], s[1], s[2].astype(np.float32)]), ValueError, r"lses\[2\]: .* dtype float32, but"),
        (lambda o, s: (o, [x[:, :2] for x in s]), ValueError, r"lses\[0\]: shape .* one value for each of its rows"),
        (lambda o, s: (o, [x.astype(np.float16) for x in s]), TypeError, r"lses\[0\] has dtype float16"),
    ],
    ids=["one array", "counts", "nothing", "a number", "rows", "types", "row shape", "half"],
)
def test_what_does_not_merge(change: Any, error: type[Exception], message: str, rng: np.random.Generator) -> None:
    outs, lses, _ = parts(rng)
    with pytest.raises(error, match=message):
        streamkl_cupy.merge_attention_states(*change(outs, lses))


def test_a_merge_takes_one_framework(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    outs, lses, _ = parts(rng)
    with pytest.raises(TypeError, match=r"outs\[0\] is a torch array, but outs\[1\] is a numpy array"):
        streamkl_cupy.merge_attention_states([torch.from_numpy(outs[0]), *outs[1:]], lses)

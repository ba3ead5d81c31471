"""Sparse attention: its definition, what merges its results, and every backend against it."""

from __future__ import annotations

import importlib
import inspect
import math
import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_signatures import of_checker

import streamkl_cupy
from streamkl_cupy import options as table
from streamkl_cupy import patterns
from streamkl_cupy.concurrency import threads
from streamkl_cupy.numpy_backend import attention as tiles
from streamkl_cupy.numpy_backend import plan as cut
from streamkl_cupy.ops import SPARSE_ATTENTION
from streamkl_cupy.options import MASK_ARRAYS
from streamkl_cupy.rules.masks.blocks import drawn_pattern
from streamkl_cupy.rules.masks.lengths import drawn_lengths
from streamkl_cupy.testing import attention as definition
from streamkl_cupy.testing.compare import check_gradient, check_lse
from streamkl_cupy.testing.problems import MASK_OPTIONS
from streamkl_cupy.testing.reference import MASK_NAMES, rounded, visible

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
    options = {"causal": True, "key_lengths": drawn_lengths(rng, 2, 14), "scale": -0.8, **own}
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


def test_what_errors_are_judged_by_pair_by_pair(rng: np.random.Generator) -> None:
    """The measures of outputs and gradients, summed up one product after the other."""
    q, k, v = inputs(rng, 3, 4, (2, 3), (2, 1), B=1)
    scale, cap = 0.7, 1.5
    options: dict[str, Any] = {"causal": True, "scale": scale, "softcap": cap}
    rows = definition.forward(q, k, v, **options)
    grad, grad_lse = rng.standard_normal((1, 2, 3, 3)), rng.standard_normal((1, 2, 3))
    found = definition.backward(grad, grad_lse, q, k, v, **options)
    out = {name: np.zeros((1, 2, 3, 3)) for name in ("magnitude", "noise", "sensitivity")}
    query, key = ({n: np.zeros_like(x) for n in out} for x in (q, k))
    value = {n: np.zeros_like(v) for n in out}
    for h, i in np.ndindex(2, 3):
        g, result = grad[0, h, i], rows.out.value[0, h, i]
        shared = ((g * result) ** 2).sum()
        rest = np.zeros(2)
        for j in range(i + 2):  # causal, aligned to the last key
            tanh = math.tanh(scale * float(q[0, h, i] @ k[0, 0, j]) / cap)
            slope, logit = 1 - tanh**2, cap * tanh
            p = math.exp(logit - rows.lse[0, h, i])
            size = max(scale * slope * float(np.abs(q[0, h, i]) @ np.abs(k[0, 0, j])), abs(logit))
            delta = (g * result).sum() - grad_lse[0, h, i]
            ds = scale * slope * p * ((g * v[0, 0, j]).sum() - delta)
            of_delta = (np.abs(g) * rows.out.magnitude[0, h, i]).sum() + abs(grad_lse[0, h, i])
            most = scale * slope * p * ((np.abs(g) * np.abs(v[0, 0, j])).sum() + of_delta)
            for into, at, terms, sizes in (
                (out, (0, h, i), p * v[0, 0, j], p * np.abs(v[0, 0, j])),
                (value, (0, 0, j), p * g, p * np.abs(g)),
                (query, (0, h, i), ds * k[0, 0, j], most * np.abs(k[0, 0, j])),
                (key, (0, 0, j), ds * q[0, h, i], most * np.abs(q[0, h, i])),
            ):
                into["magnitude"][at] += sizes
                into["noise"][at] += terms**2
                into["sensitivity"][at] += sizes * (1 + size)
            rest += scale * slope * p * k[0, 0, j]
            key["noise"][0, 0, j] += shared * (scale * slope * p * q[0, h, i]) ** 2
        query["noise"][0, h, i] += shared * rest**2
    for terms, wanted in ((rows.out, out), (found.query, query), (found.key, key), (found.value, value)):
        np.testing.assert_allclose(terms.magnitude, wanted["magnitude"], rtol=1e-12)
        np.testing.assert_allclose(terms.noise, np.sqrt(wanted["noise"]), rtol=1e-12)
        np.testing.assert_allclose(terms.sensitivity, wanted["sensitivity"], rtol=1e-12)


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


# Every backend against the definition


def options_of(backend: Any, options: dict[str, Any]) -> dict[str, Any]:
    return {name: backend.mask_array(x) if name in MASK_ARRAYS else x for name, x in options.items()}


def judge(
    backend: Any,
    x: tuple[Array, ...],
    options: dict[str, Any],
    dtype: str = "float32",
    *,
    rng: np.random.Generator,
    wrt: tuple[str, ...] = NAMES,
    by_lse: bool = True,
    hard: bool = False,
) -> tuple[Any, Any]:
    """Run a call forward and backward in poisoned memory, and hold it against float64 on the same rounded inputs."""
    x = tuple(rounded(a, dtype) for a in x)
    compute = "float64" if dtype == "float64" else "float32"
    given = options_of(backend, options)
    arrays = tuple(backend.array(a, dtype) for a in x)
    expected = definition.forward(*x, **options)
    backend.poison(arrays)
    found = streamkl_cupy.sparse_attention_forward(*arrays, **given)
    assert (backend.dtype(found.out), backend.dtype(found.lse)) == (dtype, compute)
    check_lse("lse", backend.numpy(found.lse), expected.lse, expected.largest, compute)
    check_gradient("out", backend.numpy(found.out), expected.out, dtype, hard=hard)
    grad = rounded(rng.standard_normal(expected.out.value.shape), dtype)
    grad_lse = rng.standard_normal(expected.lse.shape).astype(np.float32) if by_lse else None
    hidden = np.isneginf(expected.lse)
    grad[hidden] = np.inf
    if grad_lse is not None:
        grad_lse[hidden] = np.nan
    wanted = definition.backward(grad, grad_lse, *x, **options)
    upstream = backend.array(grad, dtype), None if grad_lse is None else backend.array(grad_lse, compute)
    backend.poison(arrays)
    grads = streamkl_cupy.sparse_attention_backward(
        upstream[0], *arrays, saved=found, grad_lse=upstream[1], wrt=wrt, **given
    )
    assert [g is not None for g in grads] == [name in wrt for name in NAMES]
    for name, g, a, terms in zip(NAMES, grads, arrays, wanted, strict=True):
        if g is not None:
            assert backend.dtype(g) == backend.dtype(a)
            check_gradient(f"gradient of {name}", backend.numpy(g), terms, dtype, hard=hard)
    return found, grads


def unseen(options: dict[str, Any], shape: tuple[int, ...], key_heads: int) -> tuple[Array, Array]:
    """Which keys (B, H_k, N) and which rows (B, H, M) have no pair that is seen."""
    B, H, _, N = shape
    mask = {k: v for k, v in options.items() if k in MASK_NAMES}
    seen = np.broadcast_to(visible(shape, mask), shape)
    return ~seen.any(axis=2).reshape(B, key_heads, H // key_heads, N).any(axis=2), ~seen.any(axis=3)


def with_nan(x: tuple[Array, ...], options: dict[str, Any]) -> tuple[Array, ...]:
    """NaN and Inf in keys and rows that have no pair, of inputs in canonical order."""
    q, k, v = (a.copy() for a in x)
    keys, rows = unseen(options, (*q.shape[:3], k.shape[2]), k.shape[1])
    k[keys], v[keys], q[rows] = np.nan, np.inf, np.nan
    return q, k, v


def draw(rng: np.random.Generator) -> tuple[tuple[Array, ...], dict[str, Any], str]:
    """Inputs and options of a random call: extents, groups, types, masks, patterns and scores; what no pair sees is
    NaN."""
    B, key_heads, group = (int(rng.integers(1, most)) for most in (4, 4, 4))
    H, M, N = key_heads * group, int(rng.integers(0, 70)), int(rng.integers(0, 90))
    dims = tuple(int(n) for n in rng.choice([1, 4, 8, 17, 32], 2))
    packed = rng.random() < 0.15
    B = 1 if packed else B
    names = [n for n in MASK_OPTIONS if n not in ("packed", "blocks") and rng.random() < (0.3 if not packed else 0)]
    options: dict[str, Any] = {}
    for name in [*names, *["packed"] * packed, *["causal"] * (packed and rng.random() < 0.5)]:
        options |= MASK_OPTIONS[name](rng, B, M, N)
    if options.get("causal") and rng.random() < 0.4:
        options["q_offset"] = int(rng.integers(-20, N + 20))
    if not packed and M and N and rng.random() < 0.7:
        options["block_mask"] = drawn_pattern(rng, H if rng.random() < 0.7 else 1, M, N)
    if rng.random() < 0.3:
        options["softcap"] = float(rng.uniform(0.5, 4))
    options["scale"] = float(rng.choice([-1, 1]) * rng.uniform(0.2, 0.3))  # a plan of its own, with the tiles of now
    x: tuple[Array, ...] = inputs(rng, M, N, dims, (H, key_heads), B)
    x = with_nan(x, options)
    if packed:
        x = tuple(np.ascontiguousarray(a[0].swapaxes(0, 1)) for a in x)
    elif rng.random() < 0.3:
        options["layout"] = "bnhd"
        x = tuple(np.ascontiguousarray(a.swapaxes(1, 2)) for a in x)
    return x, options, str(rng.choice(["float32", "float16", "bfloat16", "float64"]))


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 8 x 16, so that small problems have many."""
    for name, value in {"QUERY_TILE": 8, "KEY_TILE": 16, "BLOCK_ELEMENTS": 1024, "LONGEST_KEY_TILE": 64}.items():
        monkeypatch.setattr(cut, name, value)


@pytest.mark.usefixtures("small_tiles")
def test_random_calls(core: Any, rng: np.random.Generator) -> None:
    """A hundred of them; on a GPU few, where each is a compilation."""
    bfloat16 = pytest.importorskip("ml_dtypes") is not None
    for _ in range(100 if core.device == "cpu" else 10):
        x, options, dtype = draw(rng)
        dtype = dtype if dtype in core.dtypes and (bfloat16 or dtype != "bfloat16") else "float32"
        wrt = tuple(name for name in NAMES if rng.random() < 0.7) or ("value",)
        judge(core, x, options, dtype, rng=rng, wrt=wrt, by_lse=bool(rng.random() < 0.5))


@pytest.mark.parametrize(
    "heads, M, N, block, causal, offset",
    [((4, 2), 96, 96, 16, True, None), ((3, 3), 70, 70, 16, True, None), ((8, 2), 40, 112, 32, True, 72),
     ((2, 2), 64, 80, 16, False, None)],
    ids=["square", "ragged", "more keys", "not causal"],
)  # fmt: skip
def test_patterns_with_nothing_in_a_row_and_a_column(
    numpy_only: Any, rng: np.random.Generator, heads: tuple[int, int], M: int, N: int, block: int, causal: bool,
    offset: int | None,
) -> None:  # fmt: skip
    """Offsets that are no multiple of the block; NaN in what the emptied row and column have to themselves."""
    H, Hk = heads
    size: dict[str, Any] = {"queries": M, "keys": N, "block": block, "causal": causal}
    made = patterns.sharded(H, window=block, stride=5, key_heads=Hk, dense_heads=H // Hk, **size)
    listed = made.dense()
    listed[: H // Hk, 1] = False
    listed[: H // Hk, :, 0] = False
    options: dict[str, Any] = {"block_mask": patterns.from_dense(listed, **size), "causal": causal, "q_offset": offset}
    if offset is None:
        del options["q_offset"]
    x = with_nan(inputs(rng, M, N, (8, 6), heads, B=1), options)
    assert np.isnan(x[1]).any()
    assert np.isnan(x[0]).any()
    found, grads = judge(numpy_only, x, options, "float64", rng=rng)
    empty = np.isneginf(found.lse)
    assert empty.any()
    assert (found.out[empty] == 0).all()
    assert (grads.query[empty] == 0).all()
    assert (grads.key[np.isnan(x[1])] == 0).all()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("rise", [60.0, -60.0])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_logits_that_rise_or_fall_along_the_keys(core: Any, rng: np.random.Generator, rise: float, dtype: str) -> None:
    """Sums move with their reference at every tile, or underflow in later ones."""
    q, k, v = inputs(rng, 60, 150, (8, 8), (2, 1))
    q[..., 0], k[..., 0] = 1 + 0.2 * np.abs(q[..., 0]), np.linspace(0, rise, 150)
    judge(core, (q, k, v), {"scale": float(rng.uniform(0.9, 1.1)), "causal": True}, dtype, rng=rng, hard=True)


def test_heads_that_share_keys_add_up_their_gradients(core: Any, rng: np.random.Generator) -> None:
    x = inputs(rng, 24, 40, (16, 8), (6, 2), B=1)
    repeated = (x[0], *(np.repeat(a, 3, axis=1) for a in x[1:]))
    _, shared = judge(core, x, {"causal": True}, rng=np.random.default_rng(7))
    _, apart = judge(core, repeated, {"causal": True}, rng=np.random.default_rng(7))
    for got, one in zip(shared[1:], apart[1:]):
        wanted = core.numpy(one).reshape(1, 2, 3, 40, -1).sum(axis=2)
        np.testing.assert_allclose(core.numpy(got), wanted, rtol=1e-4, atol=1e-5)


def test_a_column_with_gaps_where_keys_end_before_the_pattern(core: Any, rng: np.random.Generator) -> None:
    """Query blocks 0, 5 and 9 visit key block 0; rows and keys end in the middle of tiles."""
    listed = np.zeros((1, 10, 7), bool)
    listed[0, [0, 5, 9], 0] = listed[0, :, 6] = listed[0, 3, 1:5] = True
    made = patterns.from_dense(listed, queries=10 * 16 - 5, keys=7 * 16 - 3, block=16)
    judge(core, inputs(rng, 155, 109, (16, 16), (2, 1), B=1), {"block_mask": made}, rng=rng)


def test_patterns_of_nothing_and_of_everything(core: Any, rng: np.random.Generator) -> None:
    x = inputs(rng, 64, 64, (16, 16), (2, 2), B=1)
    listed = np.ones((2, 4, 4), bool)
    everything = patterns.from_dense(listed, queries=64, block=16)
    plain, dense = ({}, {"block_mask": everything})
    for ours, other in zip(*(judge(core, x, o, rng=np.random.default_rng(3)) for o in (plain, dense))):
        for a, b in zip(ours, other):
            np.testing.assert_allclose(core.numpy(a), core.numpy(b), rtol=1e-5, atol=1e-5)
    listed[0, 2] = False  # a row of one head, which the other has whole
    judge(core, x, {"block_mask": patterns.from_dense(listed, queries=64, block=16)}, rng=rng)
    nothing = patterns.from_dense(np.zeros((1, 4, 4), bool), queries=64, block=16)
    found, grads = judge(core, tuple(np.full_like(a, np.nan) for a in x), {"block_mask": nothing}, rng=rng)
    assert np.isneginf(core.numpy(found.lse)).all()
    assert all((core.numpy(a) == 0).all() for a in (found.out, *grads))


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_attend_to(core: Any, rng: np.random.Generator, sizes: tuple[int, int]) -> None:
    judge(core, inputs(rng, *sizes), {}, rng=rng)


def test_values_that_are_no_numbers_stay_with_those_that_see_them(core: Any, rng: np.random.Generator) -> None:
    q, k, v = inputs(rng, 20, 20, (16, 16), (2, 2), B=1)
    v[0, 0, 11, 3] = np.nan
    arrays = [core.array(a, "float32") for a in (q, k, v)]
    found = streamkl_cupy.sparse_attention_forward(*arrays, causal=True)
    out = core.numpy(found.out)
    assert np.isnan(out[0, 0, 11:, 3]).all()
    assert np.isfinite(out[0, 0, :11]).all() or core.device != "cpu"
    assert np.isfinite(out[0, 1]).all()
    assert np.isfinite(core.numpy(found.lse)).all()
    ones = core.array(np.ones_like(q), "float32")
    dq, dk, dv = map(core.numpy, streamkl_cupy.sparse_attention_backward(ones, *arrays, saved=found, causal=True))
    assert np.isnan(dq[0, 0, 11:]).all()
    assert np.isnan(dk[0, 0]).all()
    assert np.isfinite(dv).all()
    assert np.isfinite(dq[0, 1]).all()
    k[0, 1, 4, 0] = np.nan
    found = streamkl_cupy.sparse_attention_forward(*(core.array(a, "float32") for a in (q, k, v)), causal=True)
    assert np.isnan(core.numpy(found.lse)[0, 1, 4:]).all()
    assert np.isnan(core.numpy(found.out)[0, 1, 4:]).all()


def test_keys_with_a_large_part_in_common(numpy_only: Any, rng: np.random.Generator) -> None:
    """It is taken from them, and gradients by the log-sum-exp have it all the same."""
    q, k, v = inputs(rng, 30, 50)
    _, grads = judge(numpy_only, (q, k + 30, v), {"causal": True, "q_offset": 3}, rng=rng)
    assert np.abs(grads.query).max() > 3


def test_parts_of_the_keys_are_the_whole_forward_and_backward(core: Any, rng: np.random.Generator) -> None:
    """As where the keys are spread over devices: rows that see one part only are among them."""
    q, k, v = inputs(rng, 40, 64, (16, 16), (4, 2), B=1)
    grad, grad_lse = rng.standard_normal((1, 4, 40, 16)), rng.standard_normal((1, 4, 40))
    array = core.array
    up, up_lse = array(grad, "float32"), array(grad_lse, "float32")
    whole = {"causal": True, "q_offset": 0}
    wanted, wanted_grads = definition.forward(q, k, v, **whole), definition.backward(grad, grad_lse, q, k, v, **whole)
    pieces = [
        ([array(a, "float32") for a in (q, k[:, :, s], v[:, :, s])], {"causal": True, "q_offset": -s.start})
        for s in (slice(0, 20), slice(20, 64))
    ]
    found = [streamkl_cupy.sparse_attention_forward(*x, **options) for x, options in pieces]
    merged = streamkl_cupy.merge_attention_states([f.out for f in found], [f.lse for f in found])
    np.testing.assert_allclose(core.numpy(merged.out), wanted.out.value, atol=1e-5)
    np.testing.assert_allclose(core.numpy(merged.lse), wanted.lse, atol=1e-5)
    grads = [
        streamkl_cupy.sparse_attention_backward(up, *x, saved=merged, grad_lse=up_lse, **options)
        for x, options in pieces
    ]
    got = (
        sum(core.numpy(g.query) for g in grads),
        *(np.concatenate([core.numpy(g[i]) for g in grads], axis=2) for i in (1, 2)),
    )
    for name, a, terms in zip(NAMES, got, wanted_grads):
        np.testing.assert_allclose(a, terms.value, atol=2e-5, err_msg=name)


def test_chunks_of_a_prompt_and_steps_of_a_decoder(core: Any, rng: np.random.Generator) -> None:
    """Rows of the pattern beside a cache that is filled so far, each as in the whole prompt."""
    q, k, v = (rounded(a, "float32") for a in inputs(rng, 200, 200, (16, 16), (4, 2), B=1))
    made = patterns.sharded(4, window=32, stride=2, queries=200, block=16, causal=True, key_heads=2)
    whole = definition.forward(q, k, v, causal=True, block_mask=made)
    for first, last in ((0, 96), (96, 190), (190, 191), (191, 192), (192, 200)):
        options = {"causal": True, "block_mask": made.rows(first, last, keys=last)}
        x = [core.array(a, "float32") for a in (q[:, :, first:last], k[:, :, :last], v[:, :, :last])]
        found = streamkl_cupy.sparse_attention_forward(*x, **options)
        np.testing.assert_allclose(core.numpy(found.out), whole.out.value[:, :, first:last], atol=1e-5)
        np.testing.assert_allclose(core.numpy(found.lse), whole.lse[:, :, first:last], atol=1e-5)


def test_caches_that_are_filled_differently(core: Any, rng: np.random.Generator) -> None:
    """One new row for each sequence; what lies behind a sequence's keys is whatever the cache held before."""
    q, k, v = inputs(rng, 1, 96, (16, 16), (8, 2), B=3)
    filled = np.array([96, 1, 40], np.int32)
    for b, n in enumerate(filled):
        k[b, :, n:] = v[b, :, n:] = np.nan
    judge(core, (q, k, v), {"key_lengths": filled}, "float16", rng=rng)


@pytest.mark.usefixtures("small_tiles")
def test_threads_change_no_bit(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of keys and values are sums over blocks, in one order whatever threads do."""
    monkeypatch.setattr(cut, "LEAST_SHARED_SCORES", 1)
    x = tuple(a.astype(np.float16) for a in inputs(rng, 70, 90, (16, 8), (4, 2)))
    options: dict[str, Any] = {"causal": True, "scale": float(rng.uniform(0.2, 0.3)), "softcap": 3.0}
    results = []
    for count in (1, 3, 3, 2):
        monkeypatch.setattr(threads, "available", lambda count=count: count)
        rows = streamkl_cupy.sparse_attention_forward(*x, **options)
        grads = streamkl_cupy.sparse_attention_backward(np.ones_like(rows.out), *x, saved=rows, **options)
        results.append((*rows, *grads))
    assert streamkl_cupy.sparse_attention_plan(*x, **options).threads == 2  # type: ignore[union-attr]
    for other in results[1:]:
        for one, another in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(one, another)


def test_the_judge_sees_planted_faults(
    numpy_only: Any, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients without delta, a tile of values that is left out, log-sum-exps in base 2."""
    x = inputs(rng, 30, 40)
    judge(numpy_only, x, {"causal": True}, rng=rng)
    of, finish, read = tiles.UpstreamRows.of, tiles.RowState.finish, tiles.Values.read
    faults: list[tuple[Any, str, Any, str]] = [
        (tiles.UpstreamRows, "of", lambda *a: of(*a)._replace(delta=np.zeros(a[2].shape)), "gradient of query"),
        (tiles.RowState, "finish", lambda *a: (finish(*a)[0], finish(*a)[1] / tiles.LN2), "lse"),
        (tiles.RowState, "finish", lambda *a: (0.99 * finish(*a)[0], finish(*a)[1]), "out"),
        (tiles.Values, "read", lambda self, tile: read(self, tile) * (np.arange(40)[tile.k] != 7)[:, None], "out"),
    ]
    for owner, name, fault, where in faults:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, staticmethod(fault) if name == "of" else fault)
            with pytest.raises(AssertionError, match=f"^{where}"):
                judge(numpy_only, x, {"causal": True}, rng=rng)


def test_explicit_functions_take_what_they_are_given_and_leave_it(backend: Any, rng: np.random.Generator) -> None:
    """Results are new each time, and equal calls give equal ones."""
    x = [backend.array(a, "float32") for a in inputs(rng, 9, 12)]
    before = [backend.numpy(a).copy() for a in x]
    first, second = (streamkl_cupy.sparse_attention_forward(*x, causal=True) for _ in range(2))
    ones = backend.array(np.ones(first.out.shape), "float32")
    grads = [streamkl_cupy.sparse_attention_backward(ones, *x, saved=first, causal=True) for _ in range(2)]
    for a, b in ((first.out, second.out), (first.lse, second.lse), *zip(*grads, strict=True)):
        np.testing.assert_array_equal(backend.numpy(a), backend.numpy(b))
        assert a is not b
    for a, b in zip(x, before, strict=True):
        np.testing.assert_array_equal(backend.numpy(a), b)
    assert isinstance(first, streamkl_cupy.AttentionForward)
    assert isinstance(grads[0], streamkl_cupy.AttentionGradients)


# Differentiation


def weighed(rows: Any, weights: tuple[Any, Any]) -> Any:
    """A loss on outputs and log-sum-exps of rows that all see a key."""
    return (rows.out * weights[0]).sum() + (rows.lse * weights[1]).sum()


def torch_ways() -> dict[str, Any]:
    def plain(torch: Any, f: Any, x: Any) -> Any:
        leaves = [t.clone().requires_grad_() for t in x]
        f(*leaves).backward()
        return [t.grad for t in leaves]

    def compiled(torch: Any, f: Any, x: Any) -> Any:
        torch.compiler.reset()
        return plain(torch, torch.compile(f, backend="aot_eager", fullgraph=True), x)

    def some(torch: Any, f: Any, x: Any) -> Any:
        value = x[2].clone().requires_grad_()
        f(x[0], x[1], value).backward()
        return [None, None, value.grad]

    def per_sample(torch: Any, f: Any, x: Any) -> Any:
        grads = torch.vmap(torch.func.grad(f, (0, 1, 2)))(*(t[None] for t in x))
        return [g[0] for g in grads]

    def checkpointed(torch: Any, f: Any, x: Any) -> Any:
        checkpoint = importlib.import_module("torch.utils.checkpoint").checkpoint
        return plain(torch, lambda *a: checkpoint(f, *a, use_reentrant=False), x)

    return {f.__name__: f for f in (plain, compiled, some, per_sample, checkpointed)}


def jax_ways() -> dict[str, Any]:
    def plain(jax: Any, f: Any, x: Any) -> Any:
        return jax.grad(f, (0, 1, 2))(*x)

    def jitted(jax: Any, f: Any, x: Any) -> Any:
        return jax.jit(jax.grad(f, (0, 1, 2)))(*x)

    def some(jax: Any, f: Any, x: Any) -> Any:
        return [None, None, jax.grad(f, 2)(*x)]

    def per_sample(jax: Any, f: Any, x: Any) -> Any:
        return [g[0] for g in jax.vmap(jax.grad(f, (0, 1, 2)))(*(a[None] for a in x))]

    return {f.__name__: f for f in (plain, jitted, some, per_sample)}


WAYS = [(module, name) for module, ways in (("torch", torch_ways()), ("jax", jax_ways())) for name in ways]


@pytest.mark.filterwarnings("ignore")  # of tracers, different in every release
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("module, way", WAYS)
def test_outputs_and_log_sum_exps_are_differentiated(
    module: str, way: str, device: str, rng: np.random.Generator
) -> None:
    import conftest

    kinds = {"torch": (conftest.Torch, conftest.TorchCuda), "jax": (conftest.Jax, conftest.JaxCuda)}[module]
    backend: Any = kinds[device == "cuda"]()
    x = tuple(rounded(a, "float32") for a in inputs(rng, 40, 40, (16, 16), (4, 2)))
    weights = rng.standard_normal((2, 4, 40, 16)), rng.standard_normal((2, 4, 40))
    made = patterns.sharded(4, window=16, stride=2, queries=40, block=16, causal=True, key_heads=2)
    given: dict[str, Any] = {"causal": True, "block_mask": made, "softcap": 3.0}
    lengths_of = np.array([40, 21], np.int32)
    wanted = definition.backward(*weights, *x, key_lengths=lengths_of, **given)
    with backend.by_default():
        given["key_lengths"] = backend.mask_array(lengths_of)
        constants = tuple(backend.array(w, "float32") for w in weights)

        def loss(*a: Any) -> Any:
            return weighed(streamkl_cupy.sparse_attention(*a, return_lse=True, **given), constants)

        ways = torch_ways() if module == "torch" else jax_ways()
        grads = ways[way](backend.xp, loss, [backend.array(a, "float32") for a in x])
        assert [g is None for g in grads] == [way == "some", way == "some", False]
        for name, g, terms in zip(NAMES, grads, wanted):
            if g is not None:
                check_gradient(f"gradient of {name}", backend.numpy(g), terms, "float32")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("module", ["torch", "jax"])
def test_second_order_and_forward_mode_are_refused(module: str, rng: np.random.Generator) -> None:
    xp = pytest.importorskip(module)
    make = xp.from_numpy if module == "torch" else importlib.import_module("jax.numpy").asarray
    q, k, v = (make(a.astype(np.float32)) for a in inputs(rng, 5, 6))

    def loss(a: Any) -> Any:
        return (streamkl_cupy.sparse_attention(a, k, v) ** 2).sum()

    transform = xp.func if module == "torch" else xp
    with pytest.raises((NotImplementedError, TypeError), match="sparse_attention has first-order gradients only"):
        transform.grad(lambda a: (transform.grad(loss)(a) ** 2).sum())(q)
    with pytest.raises((NotImplementedError, TypeError), match="sparse_attention has reverse-mode gradients only"):
        transform.jvp(loss, (q,), (q,))


@pytest.mark.gpu
def test_a_captured_graph_computes_what_inputs_hold_by_then(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    from conftest import TorchCuda

    backend: Any = TorchCuda()
    made = patterns.sharded(4, window=64, stride=2, queries=256, block=32, causal=True, key_heads=2)
    options: dict[str, Any] = {"causal": True, "block_mask": made}
    first, later = (tuple(rounded(a, "bfloat16") for a in inputs(rng, 256, 256, (64, 64), (4, 2))) for _ in range(2))
    x = [backend.array(a, "bfloat16") for a in first]
    grad = rounded(rng.standard_normal(first[0].shape), "bfloat16")
    upstream = backend.array(grad, "bfloat16")

    def step() -> tuple[Any, Any]:
        rows = streamkl_cupy.sparse_attention_forward(*x, **options)
        return rows, streamkl_cupy.sparse_attention_backward(upstream, *x, saved=rows, **options)

    with torch.cuda.stream(torch.cuda.Stream()):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        rows, grads = step()
    for a, b in zip(x, later, strict=True):
        a.copy_(backend.array(b, "bfloat16"))
    graph.replay()
    check_gradient("out", backend.numpy(rows.out), definition.forward(*later, **options).out, "bfloat16")
    for name, g, terms in zip(NAMES, grads, definition.backward(grad, None, *later, **options), strict=True):
        check_gradient(f"gradient of {name}", backend.numpy(g), terms, "bfloat16")


# Bad input


BAD: list[tuple[str, Any, type[Exception], str]] = [
    ("keys", lambda x: ((x[0], x[1], x[2][:, :, :5]), {}), ValueError, "value: 5 keys, but key has 12; both must"),
    ("heads", lambda x: ((x[0], x[1], x[2][:, :1]), {}), ValueError, "value: 1 heads, but key has 2"),
    ("batch", lambda x: ((x[0], x[1], x[2][:1]), {}), ValueError, "value: 1 batch entries, but .* has 2"),
    ("dims", lambda x: ((x[0], x[1][..., :5], x[2]), {}), ValueError, "key: 5 columns, but query has 8"),
    ("axes", lambda x: ((x[0], x[1], x[2][0]), {}), ValueError, r"value: shape .* has 3 axes, but query"),
    ("types", lambda x: ((x[0], x[1], x[2].astype(np.float64)), {}), TypeError, "value is float64, but query is float"),
    ("groups", lambda x: ((x[0][:, :3], x[1], x[2]), {}), ValueError, "key: 2 key heads do not divide the 3 query"),
    ("wide", lambda x: ((x[0], x[1], np.zeros((2, 2, 12, 300), np.float32)), {}), NotImplementedError,
     "value: head dim 300; built are 1 to 256"),
    ("no array", lambda x: ((x[0], x[1], None), {}), TypeError, "value is None, not an array"),
    ("scale", lambda x: (x, {"scale": math.inf}), ValueError, "scale=inf is not finite"),
    ("cap", lambda x: (x, {"softcap": 0.0}), ValueError, "softcap=0.0; allowed are positive"),
    ("layout", lambda x: (x, {"layout": "bhdn"}), ValueError, "layout"),
    ("heads of a pattern", lambda x: (x, {"block_mask": patterns.strided(2, [0, 1], queries=9, keys=12)}), ValueError,
     "block_mask is a pattern of 2 heads, but the inputs have 4 query heads"),
    ("rows of a pattern", lambda x: (x, {"block_mask": patterns.full(queries=8, keys=12)}), ValueError,
     "block_mask is a pattern for 8 query rows and 12 keys, but the inputs have 9 and 12"),
    ("no pattern", lambda x: (x, {"block_mask": np.ones((1, 1), bool)}), TypeError, "from_dense makes of"),
    ("lengths", lambda x: (x, {"key_lengths": np.array([3, 13], np.int32)}), ValueError, "key_lengths"),
    ("offset", lambda x: (x, {"q_offset": 3}), ValueError, "q_offset=3 moves the diagonal"),
    ("teacher", lambda x: (x, {"teacher_scale": 1.0}), TypeError, "no option 'teacher_scale'"),
    ("mask", lambda x: (x, {"attn_mask": None}), TypeError, "no option 'attn_mask': .*key_mask"),
    ("temperature", lambda x: (x, {"temperature": 2.0}), TypeError, r"divide the scale by it: scale=1 / \(T \* D"),
    ("sink", lambda x: (x, {"sinks": 2.0}), TypeError, "merge_attention_states"),
    ("four", lambda x: ((*x, x[0]), {}), TypeError, "takes 3 arguments by position, query, key, value, but 4 came. M"),
    ("two", lambda x: (x[:2], {}), TypeError, "needs query, key, value, but 2 came: value missing. It takes queries"),
]  # fmt: skip


@pytest.mark.parametrize("change, error, message", [case[1:] for case in BAD], ids=[case[0] for case in BAD])
@pytest.mark.parametrize(
    "function", ["sparse_attention", "sparse_attention_forward", "sparse_attention_backward", "sparse_attention_plan"]
)
def test_bad_input_is_named(
    function: str, change: Any, error: type[Exception], message: str, rng: np.random.Generator
) -> None:
    x = tuple(a.astype(np.float32) for a in inputs(rng, 9, 12))
    arrays, options = change(x)
    if function == "sparse_attention_plan" and ("key_lengths" in options or any(a is None for a in arrays)):
        pytest.skip("a plan reads no lengths, and takes anything with a shape")
    if function == "sparse_attention_backward":
        options["saved"] = streamkl_cupy.sparse_attention_forward(*x)
        arrays = (options["saved"].out, *arrays)
        message = message.replace("3 arguments by position, ", "4 arguments by position, grad, ").replace(". M", ".")
        message = message.replace("4 came", "5 came").replace("needs ", "needs grad, ").replace("2 came", "3 came")
        message = message.replace("It takes queries", "grad, the derivative of the loss by the outputs, comes first")
    with pytest.raises(error, match=message):
        getattr(streamkl_cupy, function)(*arrays, **options)


def test_saved_rows_of_another_call_are_named(rng: np.random.Generator) -> None:
    x = [a.astype(np.float32) for a in inputs(rng, 9, 12)]
    rows = streamkl_cupy.sparse_attention_forward(*x)
    grad = np.ones_like(rows.out)
    backward = streamkl_cupy.sparse_attention_backward
    for error, message, arguments, options in (
        (TypeError, "saved is missing; pass saved=forward", (grad, *x), {}),
        (TypeError, "saved is a tuple; allowed is what sparse_attention_forward", (grad, *x), {"saved": tuple(rows)}),
        (ValueError, r"grad: shape .*, but it is the derivative of out, which has \(2, 4, 9, 6\)",
         (grad[:, :2], *x), {"saved": rows}),
        (TypeError, "grad: dtype float64, but out of this call is float32", (grad.astype(float), *x), {"saved": rows}),
        (ValueError, "out: shape .*, but it is of the forward, which gave", (grad, *x),
         {"saved": rows._replace(out=rows.out[..., :3])}),
        (ValueError, "lse: shape .* one value per query row", (grad, *x), {"saved": rows._replace(lse=rows.lse[:1])}),
        (TypeError, "lse: dtype float64, but the rows of this call are float32", (grad, *x),
         {"saved": rows._replace(lse=rows.lse.astype(float))}),
        (ValueError, "grad_lse: shape .* one value per query row", (grad, *x), {"saved": rows, "grad_lse": grad}),
        (ValueError, "wrt names 'values'; allowed are", (grad, *x), {"saved": rows, "wrt": ("values",)}),
        (ValueError, "grad_lse: shape", (grad, *x), {"saved": rows, "grad_lse": rows.lse[:, :1]}),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            backward(*arguments, **options)


def test_what_a_function_returns_is_asked_for_by_a_flag(rng: np.random.Generator) -> None:
    x = [a.astype(np.float32) for a in inputs(rng, 9, 12)]
    rows = streamkl_cupy.sparse_attention(*x, return_lse=True)
    np.testing.assert_array_equal(rows.out, streamkl_cupy.sparse_attention(*x))
    with pytest.raises(TypeError, match="return_lse"):
        streamkl_cupy.sparse_attention(*x, return_lse=1)  # type: ignore[call-overload]


# Signatures


FUNCTIONS = [name for name in streamkl_cupy.__all__ if name.startswith("sparse_attention")]


def fronts() -> list[Any]:
    found = [pytest.param("streamkl_cupy", name, id=name) for name in FUNCTIONS]
    return [*found, *(pytest.param(f"streamkl_cupy.{x}", "sparse_attention", id=x) for x in ("torch", "jax"))]


@pytest.mark.parametrize("module, name", fronts())
def test_every_function_has_every_option(module: str, name: str) -> None:
    pytest.importorskip(module.rpartition(".")[2])
    function = getattr(importlib.import_module(module), name)
    parameters = inspect.signature(function).parameters
    shared = table.SHARED["sparse_attention"]
    given = {p.name: p.default for p in parameters.values() if p.kind is p.KEYWORD_ONLY and p.name in shared}
    defaults = table.AttentionOptions._field_defaults
    assert given == {**dict.fromkeys(MASK_ARRAYS), **defaults}
    assert [x for x in given if x in defaults] == list(defaults)
    assert [x for x in given if x in MASK_ARRAYS] == list(MASK_ARRAYS)
    parsed, masks = table.parse(SPARSE_ATTENTION, given)
    assert (parsed, masks) == (table.AttentionOptions(), table.NO_MASKS)
    if module == "streamkl_cupy":
        for option in given:
            assert re.search(rf"^ +{option}: \S", inspect.getdoc(function) or "", re.M), option
        assert of_checker("SharedByAttention") == {option: parameters[option].annotation for option in given}

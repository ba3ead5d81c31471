"""The public functions over the NumPy backend: values, results in the caller's framework, caches, purity."""

from __future__ import annotations

import doctest
import functools
import importlib
import inspect
import re
import threading
import time
from typing import Any

import numpy as np
import pytest
from conftest import check_looked_up

import streamkl_cupy
from streamkl_cupy import KLForward, KLGradients, arrays, call, frameworks
from streamkl_cupy.call import Call
from streamkl_cupy.ops import ATTENTION_KL
from streamkl_cupy.options import LossOptions, Options
from streamkl_cupy.problem import INPUT_NAMES
from streamkl_cupy.rules import reductions
from streamkl_cupy.testing import reference
from streamkl_cupy.testing.compare import check_gradients, check_lse, check_rows
from streamkl_cupy.testing.problems import make, upstream

FUNCTIONS = [x for name in streamkl_cupy.__all__ if inspect.isfunction(x := getattr(streamkl_cupy, name))]
LAYOUTS = ["bhnd", "bnhd"]


def case(**options: Any) -> Any:
    given = {"B": 2, "H": 4, "M": 7, "N": 9, "D_t": 8, "D_s": 16, "teacher_key_heads": 2, "seed": 1, **options}
    return make("gaussian", **given)


def to_framework(framework: str, x: Any) -> Any:
    if framework == "numpy":
        return x
    if framework == "cupy":
        return pytest.importorskip("cupy").asarray(x)
    if framework.startswith("torch"):
        x = pytest.importorskip("torch").from_numpy(np.array(x))
        return x.cuda() if framework == "torch on cuda" else x
    jax = pytest.importorskip("jax")
    return jax.device_put(x, jax.devices("cpu")[0])


def to_numpy(x: Any) -> Any:
    return np.asarray(x.get() if hasattr(x, "get") else x.cpu() if hasattr(x, "cpu") else x)


GPU = pytest.mark.gpu
FRAMEWORKS = ["numpy", "torch", "jax", pytest.param("cupy", marks=GPU), pytest.param("torch on cuda", marks=GPU)]


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [{}, {"causal": True}, {"causal": True, "q_offset": -3}])
def test_forward_and_backward(framework: str, layout: str, causal: Any) -> None:
    c = case(layout=layout, teacher_scale=-0.3, **causal)
    x = [to_framework(framework, a) for a in c.arrays]
    rows = streamkl_cupy.attention_kl_forward(*x, **c.options)
    expected = reference.forward(*c.arrays, **c.options)
    assert isinstance(rows, KLForward)
    assert all(type(r) is type(x[0]) and str(r.dtype).endswith("float32") for r in rows)
    check_rows("kl", to_numpy(rows.kl), expected)
    check_lse("teacher_lse", to_numpy(rows.teacher_lse), expected.teacher_lse, expected.largest)
    check_lse("student_lse", to_numpy(rows.student_lse), expected.student_lse, expected.largest)

    grad = upstream(np.random.default_rng(0), expected.kl.shape)
    grads = streamkl_cupy.attention_kl_backward(
        to_framework(framework, grad), *x, saved=rows, wrt=INPUT_NAMES, **c.options
    )
    assert isinstance(grads, KLGradients)
    wanted = reference.backward(grad, *c.arrays, **c.options)
    check_gradients(tuple(map(to_numpy, grads)), wanted, c.dtypes)


@pytest.mark.parametrize("rank", [2, 3])
def test_fewer_axes(rank: int) -> None:
    c = case(B=1, H=1 if rank == 2 else 4, teacher_key_heads=1 if rank == 2 else 2)
    x = [a[(0,) * (4 - rank)] for a in c.arrays]
    full, full_grads = streamkl_cupy.attention_kl_value_and_grad(*c.arrays)
    value, grads = streamkl_cupy.attention_kl_value_and_grad(*x)
    assert value == full
    for part, whole in zip(grads[2:], full_grads[2:], strict=True):
        np.testing.assert_array_equal(part, whole[(0,) * (4 - rank)])
    assert streamkl_cupy.attention_kl(*x).shape == x[0].shape[:-1]


def test_bfloat16_numpy() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    c = case(dtypes="bfloat16")
    x = [a.astype(ml_dtypes.bfloat16) for a in c.arrays]
    check_rows("kl", streamkl_cupy.attention_kl(*x), reference.forward(*c.arrays))
    _, grads = streamkl_cupy.attention_kl_value_and_grad(*x, reduction="sum", wrt=INPUT_NAMES)
    assert all(g.dtype == ml_dtypes.bfloat16 for g in grads)
    check_gradients(grads, reference.backward(np.ones((2, 4, 7)), *c.arrays), c.dtypes)


def test_float64_and_mixed_dtypes() -> None:
    c = case(dtypes="float64")
    rows = streamkl_cupy.attention_kl_forward(*c.arrays)
    assert rows.kl.dtype == np.float64
    check_rows("kl", rows.kl, reference.forward(*c.arrays), dtype="float64")
    mixed = [*c.arrays[:2], *(a.astype(np.float16) for a in c.arrays[2:])]
    value, grads = streamkl_cupy.attention_kl_value_and_grad(*mixed)
    assert (value.dtype, grads.student_q.dtype, grads.teacher_q) == (np.float64, np.float16, None)


def test_views_equal_their_compact_copies() -> None:
    rng = np.random.default_rng(2)
    q = rng.standard_normal((2, 7, 4, 16)).astype("f").transpose(0, 2, 1, 3)
    k = rng.standard_normal((2, 4, 9, 32)).astype("f")[:, :, ::-1, ::2]
    shared = np.broadcast_to(rng.standard_normal((2, 1, 9, 16)).astype("f"), (2, 4, 9, 16))
    shared.flags.writeable = False
    given = (q, k, q[:, ::-1], shared)
    value, grads = streamkl_cupy.attention_kl_value_and_grad(*given, causal=True, wrt=INPUT_NAMES)
    copies = [np.array(x, order="C") for x in given]
    expected, expected_grads = streamkl_cupy.attention_kl_value_and_grad(*copies, causal=True, wrt=INPUT_NAMES)
    assert value == expected
    for x, g, e in zip(given, grads, expected_grads, strict=True):
        assert g.shape == x.shape
        assert g.flags.c_contiguous
        np.testing.assert_array_equal(g, e)


def test_odd_strides_of_axes_of_one_share_a_runner() -> None:
    x = case(B=1).arrays
    odd = [np.lib.stride_tricks.as_strided(a, a.shape, (4, *a.strides[1:])) for a in x]
    np.testing.assert_array_equal(streamkl_cupy.attention_kl(*odd), streamkl_cupy.attention_kl(*x))
    first, second = (Call.of(ATTENTION_KL, tuple(given), {}).ready() for given in (x, odd))
    assert first.checked is second.checked


def test_empty_problems() -> None:
    for extents in ({"B": 0}, {"H": 0, "teacher_key_heads": 0}, {"M": 0}, {"N": 0}):
        shapes = {"B": 2, "H": 4, "M": 7, "N": 9, **extents}
        b, h, m, n = (shapes[key] for key in "BHMN")
        x = [np.ones((b, h, r, 8), np.float32) for r in (m, n, m, n)]
        rows = streamkl_cupy.attention_kl_forward(*x)
        np.testing.assert_array_equal(rows.kl, np.zeros((b, h, m)))
        np.testing.assert_array_equal(rows.student_lse, np.full((b, h, m), -np.inf))
        value, grads = streamkl_cupy.attention_kl_value_and_grad(*x, wrt=INPUT_NAMES)
        assert value == 0
        for g, a in zip(grads, x, strict=True):
            np.testing.assert_array_equal(g, np.zeros_like(a))


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weight", [None, (2, 4, 7), (7,), (4, 1), "mask"])
def test_reductions(framework: str, reduction: str, weight: Any) -> None:
    rng = np.random.default_rng(3)
    c = case(M=7, N=5, causal=True)  # the first two rows see no key
    if weight is None:
        w = None
    else:
        w = rng.random((7,)) > 0.4 if weight == "mask" else rng.standard_normal(weight).astype("f")
        w = np.broadcast_to(w, (2, 4, 7)).copy() if w.shape == (7,) and weight != "mask" else w
        if w.dtype == np.float32 and w.shape == (2, 4, 7):
            w[..., :2] = np.nan  # weights of rows without a key are never read
    x = [to_framework(framework, a) for a in c.arrays]
    given = None if w is None else to_framework(framework, w)
    expected = reference.forward(*c.arrays, causal=True)
    reduced = reference.reduce(expected.kl, expected.teacher_lse, None if w is None else np.nan_to_num(w), reduction)
    value = streamkl_cupy.attention_kl(*x, causal=True, row_weight=given, reduction=reduction)
    np.testing.assert_allclose(to_numpy(value), reduced, rtol=1e-5, atol=1e-6)
    if reduction == "none":
        return
    value, grads = streamkl_cupy.attention_kl_value_and_grad(
        *x, causal=True, row_weight=given, reduction=reduction, wrt=INPUT_NAMES
    )
    np.testing.assert_allclose(to_numpy(value), reduced, rtol=1e-5, atol=1e-6)
    seen = ~np.isneginf(expected.teacher_lse)
    g = np.where(seen, 1.0 if w is None else np.nan_to_num(w), 0.0)
    g = g / g.sum() if reduction == "mean" else g
    check_gradients(tuple(map(to_numpy, grads)), reference.backward(g, *c.arrays, causal=True), c.dtypes)


def test_zero_weight_is_zero() -> None:
    c = case()
    value, grads = streamkl_cupy.attention_kl_value_and_grad(*c.arrays, row_weight=np.zeros(7, "f"), wrt=INPUT_NAMES)
    assert value == 0
    assert all(not g.any() for g in grads)
    value, grads = streamkl_cupy.attention_kl_value_and_grad(*c.arrays, causal=True, q_offset=-7)
    assert value == 0
    assert not grads.student_q.any()


def row_gradient(xp: Any, lse: Any, weight: Any, reduction: str) -> Any:
    return reductions.value_and_gradient(xp, xp.zeros_like(lse), lse, weight, reduction)[1]


@pytest.mark.parametrize("module", ["numpy", "torch", "jax.numpy"])
def test_row_without_weight_may_be_nan(module: str) -> None:
    xp = pytest.importorskip(module)
    kl, lse, w = (xp.asarray(v, dtype=xp.float32) for v in ([1, np.nan, 3], [0, 0, 0], [1, 0, 3]))
    assert float(reductions.reduce_rows(xp, kl, lse, w, "mean")) == 2.5
    assert float(reductions.reduce_rows(xp, kl, lse, w, "sum")) == 10.0
    assert np.isnan(float(reductions.reduce_rows(xp, kl, lse, None, "sum")))
    assert row_gradient(xp, lse, w, "mean").tolist() == [0.25, 0.0, 0.75]
    assert reductions.reduce_rows(xp, kl, lse, w, "none").dtype == kl.dtype


@pytest.mark.parametrize("module", ["numpy", "torch", "jax.numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def test_rows_without_a_key_are_no_cause_for_warnings(module: str) -> None:
    """NumPy warns of what its `where` computes and does not take; nothing of that may reach a caller."""
    xp = pytest.importorskip(module)

    def array(values: list[float]) -> Any:
        return xp.asarray(values, dtype=xp.float32)

    empty, inf, nan = -np.inf, np.inf, np.nan
    with np.errstate(all="raise"):
        mass = reductions.teacher_mass(xp, array([empty, empty, empty, 0, nan, 0]), array([empty, 0, nan, 0, 0, nan]))
        assert [float(x) for x in mass[:4]] == [0, 0, 0, 1]
        assert np.isnan([float(x) for x in mass[4:]]).all()
        assert mass.dtype == xp.float32
        for lse, weights in (([empty] * 4, [0, 1, inf, nan]), ([empty, empty, 0, 0], [inf, nan, 0, 3])):
            seen = [w for x, w in zip(lse, weights) if x == 0]
            rows = xp.zeros_like(array(lse)), array(lse), array(weights)
            for reduction in ("none", "sum", "mean"):
                assert float(xp.sum(reductions.reduce_rows(xp, *rows, reduction))) == 0
            assert float(xp.sum(row_gradient(xp, *rows[1:], "sum"))) == sum(seen)
            assert float(xp.sum(row_gradient(xp, *rows[1:], "mean"))) == bool(seen)
        assert float(reductions.reduce_rows(xp, array([0, 2]), array([empty, 0]), None, "mean")) == 2


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_what_is_too_small_becomes_zero_without_a_word(dtype: str, rng: np.random.Generator) -> None:
    """Also where the caller has NumPy raise: underflow to 0 is the right answer."""
    tiny = np.finfo(dtype).tiny
    empty, low = np.full(1, -np.inf, dtype), -rng.uniform(800, 900, 3).astype(dtype)
    lse = np.concatenate([empty, low, rng.uniform(-3, 3, 3).astype(dtype)])
    kl = np.concatenate([np.zeros(1), rng.uniform(1, 2, 3) * tiny, rng.uniform(0, 1, 3)]).astype(dtype)
    # Weights of another type that this one does not hold: one too large where no key is seen, and one too small.
    weight = np.array([1e300, 1e-300, *rng.uniform(0, 1, 3) * tiny, 1, 2])
    few = rng.uniform(0, 1, 7) * tiny
    with np.errstate(all="ignore"):
        held = np.where(np.isneginf(lse), 0, weight).astype(dtype)
        product, share = held * kl, held / held.sum()
    with np.errstate(all="raise"):
        mass = reductions.teacher_mass(np, lse, np.full(7, 10, dtype))
        values = {name: reductions.reduce_rows(np, kl, lse, weight, name) for name in ("none", "sum", "mean")}
        grads = {name: row_gradient(np, lse, weight, name) for name in ("sum", "mean")}
        # Weights that are all denormal have a mean as any others.
        light = reductions.reduce_rows(np, kl, lse, few, "mean"), row_gradient(np, lse, few, "mean").sum()
    assert (mass[:4] == 0).all()
    np.testing.assert_allclose(mass[4:], np.exp(lse[4:].astype(np.float64) - 10), rtol=1e-3)
    np.testing.assert_array_equal(values["none"], product)
    assert float(values["sum"]) == pytest.approx(float(product.sum()))
    assert float(values["mean"]) == pytest.approx(float(product.sum() / held.sum()))
    np.testing.assert_array_equal(grads["sum"], held)
    np.testing.assert_array_equal(grads["mean"], share)
    assert 0 < light[0] < 1
    assert light[1] == pytest.approx(1)


def test_calls_under_errstate_raise(rng: np.random.Generator) -> None:
    """Values, log-sum-exps, explicit gradients and masses of rows that are empty, sharp or weigh nothing."""
    x = [rng.standard_normal((2, 9, 8)).astype(np.float32) for _ in INPUT_NAMES]
    x[0] *= 200  # all of the teacher on one key
    weight = np.where(rng.random((2, 9)) < 0.5, 0, 1e-40)
    options: dict[str, Any] = {"causal": True, "q_offset": -3}

    def everything() -> list[Any]:
        dense = streamkl_cupy.attention_kl_forward(*x).teacher_lse
        rows = streamkl_cupy.attention_kl_forward(*x, **options, dense_teacher_lse=dense)
        found = [*rows]
        for reduction in ("sum", "mean"):
            found.append(streamkl_cupy.attention_kl(*x, **options, reduction=reduction, row_weight=weight))
            value, grads = streamkl_cupy.attention_kl_value_and_grad(
                *x, **options, reduction=reduction, row_weight=weight
            )
            found += [value, *(g for g in grads if g is not None)]
        return found

    with np.errstate(all="raise"):
        loud = everything()
    with np.errstate(all="ignore"):
        quiet = everything()
    for a, b in zip(loud, quiet, strict=True):
        np.testing.assert_array_equal(a, b)
    assert (loud[3][:, :3] == 0).all()
    assert (loud[3] == 0).sum() > 2 * 3, "no mass has underflown"


def test_teacher_mass_of_rows_that_see_nothing_anyway(backend: Any) -> None:
    """Causal with more rows than keys: the first rows see nothing in the dense call either."""
    c = make(M=7, N=4, D_t=8)
    x = backend.arrays(c)
    dense = streamkl_cupy.attention_kl_forward(*x, causal=True).teacher_lse
    rows = streamkl_cupy.attention_kl_forward(*x, window=(0, 0), dense_teacher_lse=dense)
    mass = backend.numpy(rows.teacher_mass)[0, 0]
    assert (mass[:3] == 0).all()
    assert ((mass[3:] > 0) & (mass[3:] < 1 + 1e-5)).all()


@pytest.mark.parametrize("function", ["attention_kl", "attention_kl_forward"])
@pytest.mark.parametrize("framework", ["numpy", "torch", "torch with gradients", "jax"])
def test_dense_log_sum_exps_that_cannot_be(framework: str, function: str, rng: np.random.Generator) -> None:
    """Where values can be read, a mass above 1 shows a wrong base, or the rows of another call."""
    x = [to_framework(framework.partition(" ")[0], rng.standard_normal((2, 7, 8)).astype("f")) for _ in INPUT_NAMES]
    if framework == "torch with gradients":
        x[2].requires_grad_()
    options: dict[str, Any] = {} if function == "attention_kl_forward" else {"return_lse": True}
    call = functools.partial(getattr(streamkl_cupy, function), *x, causal=True, **options)
    dense = streamkl_cupy.attention_kl_forward(*x).teacher_lse
    mass = to_numpy(call(dense_teacher_lse=dense).teacher_mass)
    assert (mass[:, -1] > 1 - 1e-5).all()
    for far in (dense - 3, dense * 0 - np.inf):
        with pytest.raises(
            ValueError, match=r"dense_teacher_lse\[0, \d\] is .*above 1\. .*multiply one in base 2 by log\(2\)"
        ):
            call(dense_teacher_lse=far)
    # The scale of these keeps all log-sum-exps below 0, where one in base 2 is too small.
    cold = [100 * x[0], -abs(x[1]), *x[2:]]
    cold[0] = abs(cold[0])
    low = streamkl_cupy.attention_kl_forward(*cold).teacher_lse
    assert (to_numpy(low) < 0).all()
    with pytest.raises(ValueError, match="dense_teacher_lse"):
        getattr(streamkl_cupy, function)(*cold, dense_teacher_lse=low / 0.6931472, **options)
    # NaN and rows without keys say nothing, and nothing is looked at in between.
    call(dense_teacher_lse=dense * np.nan)


@pytest.mark.parametrize("function", ["attention_kl", "attention_kl_forward"])
@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
def test_dense_log_sum_exps_of_another_type(framework: str, function: str, rng: np.random.Generator) -> None:
    x = [to_framework(framework, rng.standard_normal((2, 7, 8)).astype("f")) for _ in INPUT_NAMES]
    options: dict[str, Any] = (
        {"causal": True} if function == "attention_kl_forward" else {"causal": True, "return_lse": True}
    )
    dense = streamkl_cupy.attention_kl_forward(*x).teacher_lse
    half = to_framework(framework, to_numpy(dense).astype(np.float16))
    call = functools.partial(getattr(streamkl_cupy, function), *x, **options)
    if (framework, function) == ("jax", "attention_kl"):  # whose arrays know how to meet
        found, expected = (call(dense_teacher_lse=y).teacher_mass for y in (half, dense))
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=3e-3)
    else:
        with pytest.raises(TypeError, match=r"dense_teacher_lse.*float32"):
            call(dense_teacher_lse=half)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_the_teachers_mass_is_a_constant(framework: str, rng: np.random.Generator) -> None:
    """As the log-sum-exps are: neither the inputs nor the dense log-sum-exps get a gradient from it."""
    x = [to_framework(framework, rng.standard_normal((2, 7, 8)).astype("f")) for _ in INPUT_NAMES]
    dense = streamkl_cupy.attention_kl_forward(*x).teacher_lse

    def mass(*y: Any) -> Any:
        options: dict[str, Any] = {"causal": True, "return_lse": True}
        return streamkl_cupy.attention_kl(*y[:4], **options, dense_teacher_lse=y[4]).teacher_mass

    if framework == "torch":
        given = [y.requires_grad_() for y in (*x, dense)]
        assert not mass(*given).requires_grad
    else:
        jax = pytest.importorskip("jax")
        grads = jax.grad(lambda *y: mass(*y).sum(), (0, 1, 2, 3, 4))(*x, dense)
        assert all((g == 0).all() for g in grads)


@pytest.mark.parametrize("weight, inputs", [("numpy", "jax"), ("torch", "numpy"), ("jax", "torch"), ("numpy", "torch")])
def test_a_row_weight_of_another_framework(weight: str, inputs: str, rng: np.random.Generator) -> None:
    x = [to_framework(inputs, rng.standard_normal((2, 7, 8)).astype("f")) for _ in INPUT_NAMES]
    other = to_framework(weight, np.ones((2, 7), "f"))
    for function in (streamkl_cupy.attention_kl, streamkl_cupy.attention_kl_value_and_grad):
        with pytest.raises(TypeError, match="row_weight is a"):
            function(*x, row_weight=other, reduction="sum")


@pytest.mark.filterwarnings("ignore")  # of the compiler's own making, and different in every release
def test_dense_log_sum_exps_while_tracing(rng: np.random.Generator) -> None:
    values = [rng.standard_normal((2, 7, 8)).astype("f") for _ in INPUT_NAMES]
    low = np.full((2, 7), -50, "f")

    def mass(*x: Any) -> Any:
        return streamkl_cupy.attention_kl(*x[:4], return_lse=True, dense_teacher_lse=x[4]).teacher_mass

    torch = pytest.importorskip("torch")
    given = [torch.from_numpy(x) for x in (*values, low)]
    assert (torch.compile(mass, backend="aot_eager", fullgraph=True)(*given) > 1).all()
    assert (torch.vmap(mass)(*given) > 1).all()
    jax = pytest.importorskip("jax")
    assert (jax.jit(mass)(*values, low) > 1).all()
    assert (jax.vmap(mass)(*map(jax.numpy.asarray, (*values, low))) > 1).all()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nan_in_padded_rows(framework: str, rng: np.random.Generator) -> None:
    """What the documentation of row_weight says of it, and the way out that it names."""
    values = [rng.standard_normal((2, 2, n, 8)).astype("f") for n in (5, 6, 5, 6)]
    values[2][0, 0, 3:] = np.nan
    weight = np.ones((2, 2, 5), "f")
    weight[0, :, 3:] = 0
    x, w = [to_framework(framework, a) for a in values], to_framework(framework, weight)
    value, grads = streamkl_cupy.attention_kl_value_and_grad(*x, row_weight=w, reduction="sum", wrt=INPUT_NAMES)
    assert np.isfinite(to_numpy(value))
    for name, g in zip(INPUT_NAMES, map(to_numpy, grads), strict=True):
        bad = np.zeros(g.shape, bool)
        bad[(0, 0, slice(3, None)) if name.endswith("q") else (0, 0)] = True
        if framework in ("numpy", "torch", "jax"):
            np.testing.assert_array_equal(np.isnan(g), bad)
        else:  # a tile may carry it to more rows of its head
            assert np.isnan(g[bad]).all()
        assert np.isfinite(g[1]).all()
        assert np.isfinite(g[0, 1]).all()
    packed = [
        np.concatenate([a[0, :, : 3 if n == 5 else 6], a[1]], 1).swapaxes(0, 1).copy()
        for a, n in zip(values, (5, 6, 5, 6))
    ]
    ends = {"cu_seqlens_q": np.array([0, 3, 8], "i4"), "cu_seqlens_k": np.array([0, 6, 12], "i4")}
    again, grads = streamkl_cupy.attention_kl_value_and_grad(
        *(to_framework(framework, a) for a in packed),
        **{name: to_framework(framework, a) for name, a in ends.items()},
        reduction="sum",
        wrt=INPUT_NAMES,
    )
    np.testing.assert_allclose(to_numpy(again), to_numpy(value), rtol=1e-5)
    assert all(np.isfinite(to_numpy(g)).all() for g in grads)


def test_zero_weight_still_has_a_derivative() -> None:
    torch = pytest.importorskip("torch")
    kl, lse = torch.tensor([1.0, 2.0]), torch.zeros(2)
    w = torch.tensor([1.0, 0.0], requires_grad=True)
    reductions.reduce_rows(torch, kl, lse, w, "sum").backward()
    assert w.grad.tolist() == [1.0, 2.0]


def test_return_lse() -> None:
    c = case()
    rows = streamkl_cupy.attention_kl_forward(*c.arrays)
    result = streamkl_cupy.attention_kl(*c.arrays, reduction="sum", return_lse=True)
    assert isinstance(result, KLForward)
    np.testing.assert_array_equal(result.kl, rows.kl.sum())
    np.testing.assert_array_equal(result.student_lse, rows.student_lse)


def test_explicit_functions_stay_out_of_autograd() -> None:
    torch = pytest.importorskip("torch")
    x = [torch.from_numpy(a.copy()).requires_grad_() for a in case().arrays]
    x[0] = torch.nn.Parameter(x[0])
    rows = streamkl_cupy.attention_kl_forward(*x)
    weight = torch.ones(7, requires_grad=True)
    value, grads = streamkl_cupy.attention_kl_value_and_grad(*x, row_weight=weight, wrt=INPUT_NAMES)
    again = streamkl_cupy.attention_kl_backward(rows.kl, *x, saved=rows)
    assert not any(t.requires_grad for t in (*rows, value, *grads, *again[2:]))
    assert all(t.grad is None for t in x)


def test_backward_is_pure_and_takes_expanded_grads() -> None:
    c = case()
    rows = streamkl_cupy.attention_kl_forward(*c.arrays)
    grad = np.broadcast_to(np.float32(0.5), (2, 4, 7))
    kept = [np.array(x) for x in (*c.arrays, *rows)]
    first, second = (streamkl_cupy.attention_kl_backward(grad, *c.arrays, saved=rows) for _ in range(2))
    for a, b in zip(first[2:], second[2:], strict=True):
        np.testing.assert_array_equal(a, b)
        assert a is not b
    for x, copy in zip((*c.arrays, *rows), kept, strict=True):
        np.testing.assert_array_equal(x, copy)
    assert first[:2] == (None, None)


def test_saved_by_name_only() -> None:
    """The values and the log-sum-exps are of one shape, so none of them may be taken by its place."""
    x = case().arrays
    rows = streamkl_cupy.attention_kl_forward(*x)
    whole = streamkl_cupy.attention_kl_backward(rows.kl, *x, saved=rows, wrt=INPUT_NAMES)
    parts = streamkl_cupy.attention_kl_backward(rows.kl, *x, **rows._asdict(), wrt=INPUT_NAMES)
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(a, b)
    dense = streamkl_cupy.attention_kl_forward(*x, dense_teacher_lse=rows.teacher_lse)
    assert streamkl_cupy.attention_kl_backward(rows.kl, *x, saved=dense).student_q is not None
    for positional in (rows, (*rows[1:], rows.kl)):
        with pytest.raises(TypeError):
            streamkl_cupy.attention_kl_backward(rows.kl, *x, *positional)
    with pytest.raises(
        TypeError, match=r"student_k missing\. grad, the derivative of the loss by each row's KL, comes first"
    ):
        streamkl_cupy.attention_kl_backward(*x, saved=rows)
    for given, text in (
        ({}, r"teacher_lse and student_lse came neither in saved= nor alone; pass saved=forward"),
        ({"student_lse": rows.kl}, r"teacher_lse came neither in saved="),
        ({"saved": rows, "kl": rows.kl}, r"saved came together with kl, which it holds already"),
        ({"saved": tuple(rows)}, r"saved is a tuple; allowed is what attention_kl_forward returns, whole"),
        ({"saved": rows.kl}, r"saved is a numpy.ndarray; allowed is what"),
        ({"saved": rows._replace(kl=rows.kl.sum())}, r"saved.kl is one number, a sum or a mean; pass the result"),
    ):
        with pytest.raises(TypeError, match=text):
            streamkl_cupy.attention_kl_backward(rows.kl, *x, **given)


def test_only_what_was_asked() -> None:
    c = case()
    _, every = streamkl_cupy.attention_kl_value_and_grad(*c.arrays, wrt=INPUT_NAMES)
    for name in INPUT_NAMES:
        _, grads = streamkl_cupy.attention_kl_value_and_grad(*c.arrays, wrt=[name])
        assert [f for f, g in grads._asdict().items() if g is not None] == [name]
        np.testing.assert_array_equal(getattr(grads, name), getattr(every, name))


class FakeRunner:
    """Counts instead of computing."""

    made = 0
    workspace_bytes = 0
    warmed: tuple[Any, ...] = ()

    def __init__(self, problem: Any) -> None:
        FakeRunner.made += 1
        time.sleep(0.001)
        self.plan = problem

    def warmup(self, wrt: Any) -> None:
        FakeRunner.warmed = wrt

    def backward_bytes(self, wrt: Any) -> int:
        return 0

    def forward(self, inputs: Any, outputs: Any, stream: int, workspace: int = 0, masks: Any = None) -> None:
        pass

    def backward(
        self, inputs: Any, saved: Any, outputs: Any, stream: int, workspace: int = 0, masks: Any = None
    ) -> None:
        pass


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeRunner]:
    FakeRunner.made, FakeRunner.warmed = 0, ()
    monkeypatch.setattr(call, "_looks", {})
    monkeypatch.setattr(call, "_checked", {})
    monkeypatch.setattr(call, "_runners", {})
    monkeypatch.setattr(call, "backend", lambda device: type("Backend", (), {"Runner": FakeRunner}))
    return FakeRunner


def test_runners_are_shared_by_what_matters(fake: type[FakeRunner]) -> None:
    x = case().arrays
    for _ in range(3):
        streamkl_cupy.attention_kl_forward(*x)
        streamkl_cupy.attention_kl_forward(*(a.copy() for a in x), student_scale=0.25)  # the default, spelt out
    assert fake.made == 1
    streamkl_cupy.attention_kl_forward(*x, causal=True)
    streamkl_cupy.attention_kl_forward(*x, causal=True, q_offset=2)
    assert fake.made == 2
    streamkl_cupy.attention_kl_forward(x[0], x[1], x[2].astype(np.float16), x[3].astype(np.float16))
    assert fake.made == 3


def test_caches_are_bounded(fake: type[FakeRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "LIMIT", 5)
    for m in range(1, 12):
        x = np.ones((m, 4), np.float32)
        streamkl_cupy.attention_kl_forward(x, x, x, x)
    assert len(call._checked) == len(call._runners) == 5


def test_threads_share_one_runner(fake: type[FakeRunner]) -> None:
    x = case().arrays
    start = threading.Barrier(8)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            start.wait()
            for _ in range(20):
                streamkl_cupy.attention_kl_forward(*x)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert fake.made == 1


def test_plan_and_warmup(fake: type[FakeRunner]) -> None:
    x = case().arrays
    problem: Any = streamkl_cupy.plan(*x)
    assert (problem.batch, str(problem.device)) == (2, "cpu")
    streamkl_cupy.warmup(*x, wrt=("teacher_q",))
    assert fake.warmed == ("teacher_q",)
    assert fake.made == 1


def test_plan_of_standins(fake: type[FakeRunner], monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = [type("Shape", (), {"shape": (2, 4, 7, 16), "dtype": "bfloat16"}) for _ in INPUT_NAMES]
    monkeypatch.setattr(frameworks, "current_gpu", lambda: None)
    problem: Any = streamkl_cupy.plan(*shapes)
    assert str(problem.device) == "cpu"
    monkeypatch.setattr(frameworks, "current_gpu", lambda: 1)
    problem = streamkl_cupy.plan(*shapes)
    assert str(problem.device) == "cuda:1"
    x = np.ones((2, 4, 7, 16), np.float32)
    problem = streamkl_cupy.plan(x, x, *(type("Shape", (), {"shape": x.shape, "dtype": "f4"}) for _ in "qk"))
    assert str(problem.device) == "cpu"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_plan_for_an_architecture(arch: str) -> None:
    x = np.ones((2, 4, 7, 16), np.float16)
    text = str(streamkl_cupy.plan(x, x, x, x, arch=arch))
    assert "cuda:0" in text
    assert "sm_" in text


def test_no_usable_gpu() -> None:
    """A GPU can be asked for by name only through arch; without one, stand-ins mean the CPU and arrays stay there."""
    if frameworks.current_gpu() is not None:
        pytest.skip("has a GPU")
    shapes = [type("Shape", (), {"shape": (2, 4, 7, 16), "dtype": "float32"}) for _ in INPUT_NAMES]
    assert "numpy" in str(streamkl_cupy.plan(*shapes))
    streamkl_cupy.warmup(*shapes)
    pytest.importorskip("cupy")
    there = call.outline(ATTENTION_KL, tuple(shapes), arrays.cuda(0))
    with pytest.raises(streamkl_cupy.DriverError, match="GPU 0 cannot be used"):
        call.prepare(ATTENTION_KL, there, Options())


def test_torch_tensors_go_to_the_torch_front_with_every_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    front = importlib.import_module("streamkl_cupy.torch")
    seen: list[Any] = []
    monkeypatch.setattr(front, "loss", lambda *given: seen.append(given) or "done")
    x = torch.ones(2, 3)
    assert streamkl_cupy.attention_kl(x, x, x, x, teacher_scale=0.5, reduction="mean") == "done"
    assert seen == [(ATTENTION_KL, (x, x, x, x), {"teacher_scale": 0.5}, LossOptions(reduction="mean"))]


def test_a_call_like_an_earlier_one_is_not_checked_again(
    fake: type[FakeRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    checked = []
    to_problem = call.validate.to_problem
    monkeypatch.setattr(call.validate, "to_problem", lambda *given: checked.append(1) or to_problem(*given))
    for _ in range(5):
        x = torch.ones(1, 3, 5, 8)
        rows = streamkl_cupy.attention_kl_forward(x, x, x, x, causal=True)
        streamkl_cupy.attention_kl_backward(rows.kl, x, x, x, x, saved=rows, causal=True)
        streamkl_cupy.attention_kl_value_and_grad(x, x, x, x, causal=True)
    assert len(checked) == 1


def test_docstrings() -> None:
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    for function in FUNCTIONS:
        for example in finder.find(function, globs={}):
            runner.run(example)
    assert runner.tries > 15
    assert not runner.failures
    for function in FUNCTIONS:
        text = inspect.getdoc(function) or ""
        assert "<" + "INPUTS>" not in text
        source = "" if function.__name__.startswith("merge") else "arXiv:2606.20005"
        source = "arXiv:2407.17678" if function.__name__.startswith("sparse") else source
        for part in (
            "Args:",
            "Returns:",
            "Raises:",
            "Example:",
            source,
            *inspect.signature(function).parameters,
        ):
            assert part in text, (function.__name__, part)


@pytest.mark.gpu
def test_cupy_streams() -> None:
    cupy = pytest.importorskip("cupy")
    c = case()
    x = [cupy.asarray(a) for a in c.arrays]
    expected = streamkl_cupy.attention_kl(*x)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        assert frameworks.stream_of(frameworks.describe("q", x[0])) == stream.ptr
        result = streamkl_cupy.attention_kl(*x, reduction="sum")
    stream.synchronize()
    assert type(result) is cupy.ndarray
    np.testing.assert_allclose(result.get(), expected.sum().get(), rtol=1e-5)


@pytest.mark.gpu
def test_torch_streams() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch has no CUDA")
    view = frameworks.describe("q", torch.ones(2, 3, device="cuda"))
    with torch.cuda.stream(torch.cuda.Stream()) as _:
        assert frameworks.stream_of(view) == torch.cuda.current_stream().cuda_stream != 0
    assert frameworks.stream_of(view) == torch.cuda.current_stream().cuda_stream


@pytest.mark.gpu
@pytest.mark.parametrize("framework", ["cupy", "torch on cuda"])
def test_a_call_like_one_before_is_looked_up_on_a_gpu(framework: str) -> None:
    c = case(B=1, H=1, M=1, N=1, teacher_key_heads=1)
    x = [to_framework(framework, a) for a in c.arrays]
    rows = streamkl_cupy.attention_kl_forward(*x)
    check_looked_up(lambda: streamkl_cupy.attention_kl_forward(*x), 44)
    grad = rows.kl + 1
    check_looked_up(lambda: streamkl_cupy.attention_kl_backward(grad, *x, saved=rows), 54)


def test_scales_that_float32_cannot_hold(rng: Any) -> None:
    x = rng.standard_normal((3, 4))
    for side in ("teacher", "student"):
        for scale in (1e300, -1e300, 2.1e38, -2.1e38):
            text = rf"{side}_scale={re.escape(str(scale))} is beyond what float32 arithmetic can hold"
            with pytest.raises(ValueError, match=text):
                streamkl_cupy.attention_kl_forward(*[x.astype(np.float32)] * 4, **{f"{side}_scale": scale})
        small = (x * 1e-38).astype(np.float32)
        for scale in (2e38, -2e38):
            rows = streamkl_cupy.attention_kl_forward(*[small] * 4, **{f"{side}_scale": scale})
            assert np.isfinite(rows.kl).all()
    for scale in (1e300, -1e300):
        rows = streamkl_cupy.attention_kl_forward(*[x * 1e-300] * 4, teacher_scale=scale, student_scale=scale)
        np.testing.assert_allclose(rows.kl, 0, atol=1e-12)
        assert (rows.teacher_lse != 0).all()


def test_wrt_holds_names(rng: Any) -> None:
    x = [rng.standard_normal((3, 4)).astype(np.float32)] * 4
    with pytest.raises(ValueError, match=r"wrt names array\(\[1, 2\]\); allowed are"):
        streamkl_cupy.attention_kl_value_and_grad(*x, wrt=(np.array([1, 2]),))


@pytest.mark.parametrize(
    "shape, error, text",
    [
        ((-1, 4), ValueError, r"teacher_q: shape \(-1, 4\) has a negative extent"),
        ((2.5, 4), TypeError, "objects with a shape of integers"),
        ("ab", TypeError, "objects with a shape of integers"),
    ],
)
def test_standins_of_no_shape(shape: Any, error: type[Exception], text: str) -> None:
    odd = type("Standin", (), {"shape": shape, "dtype": "float32"})()
    with pytest.raises(error, match=text):
        streamkl_cupy.plan(odd, odd, odd, odd, arch="sm_80")

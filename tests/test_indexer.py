"""`indexer_kl`: its definition, the cases of its semantics, tiles of every kind, the doors, and what it refuses."""

from __future__ import annotations

import ctypes
import inspect
import itertools
import math
import re
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_guests import Own

import streamkl_cupy
from streamkl_cupy import arrays, call, launch
from streamkl_cupy.compiler import nvrtc
from streamkl_cupy.errors import CaptureError
from streamkl_cupy.indexer import cuda, plan, problem, strips
from streamkl_cupy.kernels import (
    KERNELS,
    chosen,
    indexer_bits,
    indexer_gated_join,
    indexer_gathered_sm90,
    indexer_join,
    indexer_pack,
    indexer_rows,
    indexer_scan,
    indexer_stream_sm90,
    indexer_sum,
    indexer_tiles,
    indexer_units,
)
from streamkl_cupy.kernels.base import KernelText
from streamkl_cupy.kernels.gpus import GPUS, DeviceFacts
from streamkl_cupy.kernels.indexer import ENDINGS, IndexerShape, IndexerWork, RowCut
from streamkl_cupy.numpy_backend import indexer as backend
from streamkl_cupy.numpy_backend.elements import narrow, widen
from streamkl_cupy.ops import INDEXER_KL, INDEXER_TARGET
from streamkl_cupy.options import IndexOptions
from streamkl_cupy.problem import compact_strides
from streamkl_cupy.rules import row_keys
from streamkl_cupy.testing import indexer_reference as reference

Array = NDArray[Any]
NAMES = ("teacher_q", "teacher_k", "index_q", "index_k", "index_weights")
WRT = NAMES[2:]
LN3 = math.log(3)
TOLERANCE = {"float64": 1e-11, "float32": 4e-6, "float16": 4e-6, "bfloat16": 4e-6}
GRADIENT_TOLERANCE = {"float64": 1e-11, "float32": 1e-5, "float16": 5e-4, "bfloat16": 4e-3}


def rounded(x: Array, dtype: str) -> Array:
    """As the package takes it, bfloat16 as the type of ml_dtypes."""
    if dtype != "bfloat16":
        return x.astype(dtype)
    ml_dtypes = pytest.importorskip("ml_dtypes")
    return x.astype(ml_dtypes.bfloat16)


def make(rng: np.random.Generator, dtype: str = "float32", **sizes: int) -> tuple[Array, ...]:
    """Fresh inputs, weights of both signs among them."""
    n = {"B": 2, "H": 4, "K": 2, "I": 4, "J": 1, "M": 19, "N": 23, "T": 6, "D": 5} | sizes
    shapes = ("BHMT", "BKNT", "BIMD", "BJND", "BIM")
    return tuple(rounded(rng.standard_normal([n[x] for x in axes]), dtype) for axes in shapes)


def close(found: Any, expected: Array, tolerance: float) -> None:
    found = np.asarray(found).astype(np.float64).reshape(expected.shape)
    np.testing.assert_array_equal(np.isfinite(found), np.isfinite(expected))
    there = np.isfinite(expected)
    assert np.abs(found[there] - expected[there]).max(initial=0) <= tolerance * (
        1 + np.abs(expected[there]).max(initial=0)
    )


def near(found: Any, expected: Array, tolerance: float, doubt: float = 0.0) -> None:
    found = np.asarray(found).astype(np.float64).reshape(expected.shape)
    assert np.linalg.norm(found - expected) <= tolerance * max(np.linalg.norm(expected), 1e-30) + doubt


def in_doubt(grad: Array, *x: Any, **options: Any) -> dict[str, float]:
    """By how much gates can move each gradient whose scores float32 products may round to either side of 0."""
    by = 2**-20 * np.sqrt(x[2].shape[-1])

    def moved(by: float) -> Any:  # one more column adds `by` to every score
        q, k = (
            np.concatenate([a, np.full((*a.shape[:-1], 1), b)], axis=-1, dtype=np.float64)
            for a, b in zip(x[2:4], (1.0, by), strict=True)
        )
        return reference.backward(grad, x[0], x[1], q, k, x[4], **options)

    return {name: float(np.linalg.norm(a - b)) for name, a, b in zip(WRT, moved(by), moved(-by), strict=True)}


def check(x: tuple[Any, ...], rng: np.random.Generator, dtype: str = "float32", **options: Any) -> None:
    """Rows, log-sum-exps and gradients against the definition, on the same rounded inputs."""
    options = {"index_scale": 0.4, **options}
    saved = streamkl_cupy.indexer_kl_forward(*x, **options)
    definition = {name: np.asarray(x, np.float64) if name == "teacher_lse" else x for name, x in options.items()}
    rows = reference.forward(*x, **definition)
    for name in ("kl", "index_lse", "target_sum"):
        close(getattr(saved, name), getattr(rows, name), TOLERANCE[dtype])
    assert int(saved.weight_sum) == rows.active.sum()
    grad = rng.standard_normal(rows.kl.shape).astype(saved.kl.dtype)
    grad.flat[3] = 0
    wrt = WRT if x[4] is not None else WRT[:2]
    grads = streamkl_cupy.indexer_kl_backward(grad.reshape(saved.kl.shape), *x, saved=saved, wrt=wrt, **options)
    expected = reference.backward(grad, *x, **definition)
    doubt = in_doubt(grad, *x, **definition)
    for name in wrt:
        found = getattr(grads, name)
        assert found.dtype == x[NAMES.index(name)].dtype
        near(found, getattr(expected, name), GRADIENT_TOLERANCE[dtype], doubt[name])
    dead = np.repeat((grad == 0) | ~rows.active, x[2].shape[1] // grad.shape[1], axis=1)
    assert not np.asarray(grads.index_q)[dead].any()


@pytest.fixture(params=["whole", "tiles"])
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Tiles as they are, which small problems fill in part, and so small that these have many."""
    if request.param == "tiles":
        for name, value in {"QUERY_TILE": 8, "KEY_TILE": 4, "LONGEST_KEY_TILE": 6, "BLOCK_ELEMENTS": 64}.items():
            monkeypatch.setattr(backend, name, value)
    return str(request.param)


def settings(rng: np.random.Generator, M: int = 19, N: int = 23) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """(sizes, options) by name."""
    ids = rng.integers(-3, N + 5, (2, M, 9))
    return {
        "dense": ({}, {}),
        "causal": ({}, {"causal": True}),
        "causal, more rows": ({"N": N // 2}, {"causal": True}),
        "no gates": ({}, {"causal": True, "relu": False}),
        "no weights, scale below 0": ({}, {"causal": True, "index_scale": -0.7, "teacher_scale": 0.9}),
        "groups": ({"J": 2}, {"causal": True, "head_groups": 2}),
        "groups that share keys": ({"K": 4}, {"head_groups": 2, "causal": True}),
        "groups beside few key heads": ({"H": 8}, {"head_groups": 4}),
        "one group with an axis": ({"K": 1}, {"head_groups": 1}),
        "ids": ({}, {"causal": True, "topk_indices": ids}),
        "ids of groups": (
            {},
            {
                "head_groups": 2,
                "topk_indices": rng.integers(-1, N, (2, 2, M, 5)),
                "topk_length": rng.integers(-1, 7, (2, 2, M)).astype(np.int32),
            },
        ),
        "ids and lengths of all groups": (
            {},
            {"head_groups": 2, "topk_indices": ids.astype(np.int32), "topk_length": rng.integers(0, 9, (2, M))},
        ),
        "compressed keys": ({"N": M // 3 + 1}, {"causal": True, "compress_ratio": 3}),
        "compressed keys, offset": ({"N": M // 2}, {"causal": True, "compress_ratio": 2, "q_offset": 3}),
        "bounds": (
            {},
            {"key_start": rng.integers(-2, N // 2, (2, M)), "key_end": rng.integers(0, N + 9, (2, M)), "causal": True},
        ),
        "some keys": ({}, {"key_mask": rng.random((2, N)) < 0.6, "causal": True}),
    }


@pytest.mark.parametrize("name", list(settings(np.random.default_rng(0))))
@pytest.mark.parametrize("lse", ["made", "given"])
def test_against_the_definition(rng: np.random.Generator, tiles: str, name: str, lse: str) -> None:
    sizes, options = settings(rng)[name]
    dtype = "float64" if tiles == "tiles" else "float32"
    x = make(rng, dtype, **sizes)
    if name.startswith("no weights"):
        x = (*x[:4], None)
    if lse == "given":  # with mass that the rows do not see, and heads that count nothing
        plain = {k: v for k, v in options.items() if k not in ("relu", "index_scale")}
        found = streamkl_cupy.indexer_kl_forward(*x, index_scale=1.0, **plain).teacher_lse
        found = np.asarray(found + 3 * rng.random(found.shape), found.dtype)
        found[0, 0], found[1, :, 4], found[1, 1] = np.inf, -np.inf, np.inf
        options = {**options, "teacher_lse": found}
    check(x, rng, dtype, **options)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_dtypes_and_rotary_parts(rng: np.random.Generator, dtype: str) -> None:
    x = make(rng, dtype)
    ropes = {
        f"teacher_{side}_rope": rounded(rng.standard_normal(shape), dtype)
        for side, shape in (("q", (2, 4, 19, 3)), ("k", (2, 1, 23, 3)))
    }
    check(x, rng, dtype, causal=True, **ropes)
    # The same as one part that is joined.
    joined = [
        np.concatenate([x[i], np.broadcast_to(r, (*x[i].shape[:-1], 3))], axis=-1) for i, r in enumerate(ropes.values())
    ]
    whole = streamkl_cupy.indexer_kl(*joined, *x[2:], index_scale=0.4, causal=True)
    close(streamkl_cupy.indexer_kl(*x, index_scale=0.4, causal=True, **ropes), np.asarray(whole), 2e-6)


def test_layouts_and_batches(rng: np.random.Generator) -> None:
    x = make(rng, "float64", J=2)
    more = {
        "topk_indices": rng.integers(-1, 23, (2, 2, 19, 7)),
        "topk_length": rng.integers(0, 8, (2, 2, 19)),
        "teacher_lse": rng.standard_normal((2, 4, 19)),
    }
    options: dict[str, Any] = {"index_scale": 0.3, "head_groups": 2, "causal": True}
    expected = streamkl_cupy.indexer_kl_forward(*x, **more, **options)
    value, grads = streamkl_cupy.indexer_kl_value_and_grad(*x, **more, **options)

    def swap(a: Array) -> Array:
        return a.swapaxes(1, 2)

    other = {"layout": "bnhd", **options, **{name: swap(a) for name, a in more.items()}}
    rows = streamkl_cupy.indexer_kl_forward(*map(swap, x), **other)
    for name in ("kl", "index_lse", "target_sum"):
        np.testing.assert_allclose(swap(getattr(rows, name)), getattr(expected, name), rtol=1e-13)
    again, swapped = streamkl_cupy.indexer_kl_value_and_grad(*map(swap, x), **other)
    np.testing.assert_allclose(again, value, rtol=1e-13)
    for a, b in zip(swapped, grads, strict=True):
        np.testing.assert_allclose(swap(a), b, atol=1e-14)
    alone = streamkl_cupy.indexer_kl(*(a[1] for a in x), **{name: a[1] for name, a in more.items()}, **options)
    np.testing.assert_array_equal(alone, expected.kl[1])
    one_head = (*x[:3], x[3][:, 0], x[4])
    plain = streamkl_cupy.indexer_kl(*one_head, index_scale=0.3)
    np.testing.assert_array_equal(plain, streamkl_cupy.indexer_kl(*x[:3], x[3][:, :1], x[4], index_scale=0.3))


@pytest.mark.parametrize("relative", [False, True])
def test_packed_sequences(rng: np.random.Generator, tiles: str, relative: bool) -> None:
    x = make(rng, "float64", B=1)
    ends = np.array([[0, 5, 5, 12, 17], [0, 6, 9, 15, 20]], np.int32)
    options: dict[str, Any] = {"causal": True, "index_scale": 0.4, "topk_indices": rng.integers(-2, 24, (19, 9))}
    if relative:
        options |= {"topk_relative": True, "topk_indices": rng.integers(-2, 8, (19, 4))}
    packed = [a[0].swapaxes(0, 1) if a.ndim > 2 else a for a in x]
    kl = streamkl_cupy.indexer_kl(*packed, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1], **options)
    cut = {**options, "topk_indices": options["topk_indices"][None], "cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1]}
    expected = reference.forward(*x, **cut).kl[0, 0]
    close(kl, expected, 1e-12)
    assert not kl[17:].any()
    for i in range(4):  # and each of them alone
        (q0, q1), (k0, k1) = (row[i : i + 2] for row in ends)
        some = [a[:, :, q0:q1] if at in (0, 2, 4) else a[:, :, k0:k1] for at, a in enumerate(x)]
        own = options["topk_indices"][q0:q1] - (0 if relative else k0)
        alone = {**options, "topk_indices": np.maximum(own, -1)[None], "topk_relative": False}
        if q1 > q0:
            close(kl[q0:q1], streamkl_cupy.indexer_kl(*some, **alone)[0], 1e-12)


# The cases of the semantics, each with one column: teacher's queries are 1, its keys the scores.


def scores(teacher: Any, index_q: Any, index_k: Any, weights: Any) -> tuple[Array, ...]:
    teacher = np.asarray(teacher, np.float32)
    q = np.asarray(index_q, np.float32)[None, :, None, None]
    k = np.asarray(index_k, np.float32)[None, :, None]
    ones = np.ones((1, len(teacher), 1, 1), np.float32)
    return ones, teacher[None, :, :, None], q, k, np.asarray(weights, np.float32)[None, :, None]


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "A, mixture first": (
        ([[LN3, 0], [0, LN3]], [1], [LN3, 0], [1]),
        {},
        {"kl": 0.143841, "index_lse": math.log(4), "target_sum": 2, "q": 0.274653, "k": (0.25, 0), "w": 0.274653},
    ),
    "A, equal": (([[LN3, 0], [0, LN3]], [1], [0, 0], [1]), {}, {"kl": 0}),
    "B, gates": (
        ([[0, LN3]], [2, -1, 0], [1, 3], [0.5, 4, 7]),
        {},
        {
            "kl": 0.064593,
            "index_lse": 3.126928,
            "q": (0.130797, 0, 0),
            "k": (-0.130797, 0.130797),
            "w": (0.523188, 0, 0),
        },
    ),
    "B, no gates": (
        ([[0, LN3]], [2, -1, 0], [1, 3], [0.5, 4, 7]),
        {"relu": False},
        {
            "kl": 3.940141,
            "q": (-0.747527, -5.980219, -10.465383),
            "k": (-2.242582, 2.242582),
            "w": (-2.990110, 1.495055, 0),
        },
    ),
    "C, underflow": (([[0, 0]], [1], [0, 200], [-1]), {}, {"kl": 99.306853, "q": 100, "k": (0, 0.5), "w": -100}),
    "D, ids": (
        ([[0, 9, LN3, 9], [LN3, 9, LN3, 9]], [1], [1, 5, 0, 5], [LN3]),
        {"topk_indices": np.array([[[2, -1, 7, 0, 2]]])},
        {"kl": 0.312752, "target_sum": 2, "q": 0.411980, "k": (0.411980, 0, 0, 0), "w": 0.375},
    ),
    "F, groups": (
        ([[LN3, 0], [LN3, 0], [0, LN3], [0, 0]], [1, 2], [LN3, 0], [1, 1]),
        {"head_groups": 2},
        {
            "kl": (0, 0.817063),
            "index_lse": (1.386294, 2.302585),
            "q": (0, 0.576771),
            "k": (1.05, 0),
            "w": (0, 1.153543),
        },
    ),
}


def frameworks() -> list[Any]:
    def torch(x: Array) -> Any:
        return pytest.importorskip("torch").from_numpy(np.array(x))

    def jax(x: Array) -> Any:
        return pytest.importorskip("jax.numpy").asarray(x)

    return [pytest.param(make, id=name) for name, make in (("numpy", np.array), ("torch", torch), ("jax", jax))]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("to", frameworks())
def test_the_cases(name: str, to: Callable[[Array], Any]) -> None:
    given, more, expected = CASES[name]
    x = [to(a) for a in scores(*given)]
    options = {"teacher_scale": 1.0, "index_scale": 1.0}
    options |= {key: to(a) if isinstance(a, np.ndarray) else a for key, a in more.items()}
    rows = streamkl_cupy.indexer_kl_forward(*x, **options)
    value, grads = streamkl_cupy.indexer_kl_value_and_grad(*x, reduction="sum", **options)
    found = {**rows._asdict(), "q": grads.index_q, "k": grads.index_k, "w": grads.index_weights}
    assert {type(a) for a in (rows.kl, value, grads.index_k)} <= {type(x[0]), np.float32}
    for key, numbers in expected.items():
        close(np.asarray(found[key]).ravel(), np.atleast_1d(np.asarray(numbers, np.float64)), 2e-6)
    close(value, np.sum(expected["kl"]), 2e-6)


def test_rows_with_nothing(rng: np.random.Generator) -> None:
    """Case E: a row without keys, an ordinary one, and one in whose keys no head has mass."""
    ones = np.ones((1, 2, 3, 1), np.float32)
    keys = np.array([0, LN3], np.float32)[None, None, :, None].repeat(2, axis=1)
    x = (ones, keys, ones[:, :1], np.array([1, 2], np.float32)[None, :, None], ones[:, :1, :, 0])
    lse = np.full((1, 2, 3), math.log(4), np.float32)
    lse[..., 2] = np.inf
    options: dict[str, Any] = {"teacher_scale": 1.0, "index_scale": 1.0, "teacher_lse": lse}
    options["key_end"] = np.array([[0, 2, 2]])
    stats = streamkl_cupy.indexer_kl(*x, reduction="sum", return_stats=True, **options)
    close(stats.kl, np.array(0.000927), 2e-6)
    assert float(stats.weight_sum) == 1
    np.testing.assert_allclose(stats.target_sum[0], [0, 2, 0], rtol=1e-6)
    assert np.isneginf(stats.index_lse[0, 0])
    value, grads = streamkl_cupy.indexer_kl_value_and_grad(*x, **options)
    close(value, np.array(0.000927), 2e-6)
    close(grads.index_k.ravel(), np.array([0.018941, -0.018941]), 2e-6)
    assert not grads.index_q[0, 0, [0, 2]].any()
    assert not grads.index_weights[0, 0, [0, 2]].any()
    # Whatever lies in rows that do not count has no effect, on bits either; nor have their weights and gradients.
    poisoned = [a.copy() for a in x]
    for a in (poisoned[0], poisoned[2], poisoned[4]):
        a[:, :, 0] = a[:, :, 2] = np.nan
    weight = np.array([[np.nan, 1, np.inf]], np.float32)
    again, same = streamkl_cupy.indexer_kl_value_and_grad(*poisoned, row_weight=weight, **options)
    assert again == value
    for a, b in zip(same, grads, strict=True):
        np.testing.assert_array_equal(a, b)
    nothing = streamkl_cupy.indexer_kl_value_and_grad(*x, **{**options, "key_end": np.zeros((1, 3), np.int32)})
    assert nothing[0] == 0
    assert not any(a.any() for a in nothing[1])
    del rng


def test_small_masses_are_exact(rng: np.random.Generator) -> None:
    x = make(rng, "float64")
    saved = streamkl_cupy.indexer_kl_forward(*x, index_scale=0.4, causal=True)
    value, grads = streamkl_cupy.indexer_kl_value_and_grad(*x, index_scale=0.4, causal=True)
    far = streamkl_cupy.indexer_kl_value_and_grad(
        *x, index_scale=0.4, causal=True, teacher_lse=saved.teacher_lse + math.log(1e30)
    )
    np.testing.assert_allclose(far[0], value, rtol=1e-10)
    for a, b in zip(far[1], grads, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


def test_not_a_number_where_nobody_looks(rng: np.random.Generator, tiles: str) -> None:
    there = rng.random((2, 23)) < 0.5
    there[:, :3] = True
    clean = make(rng)
    options: dict[str, Any] = {"index_scale": 0.4, "key_mask": there, "causal": True}
    options["row_weight"] = weight = np.ones((2, 19), np.float32)
    weight[0, 7] = 0
    poisoned = [a.copy() for a in clean]
    poisoned[1].swapaxes(1, 2)[~there], poisoned[3].swapaxes(1, 2)[~there] = np.nan, np.inf
    value, grads = streamkl_cupy.indexer_kl_value_and_grad(*clean, **options)
    again, same = streamkl_cupy.indexer_kl_value_and_grad(*poisoned, **options)
    assert again == value
    for a, b in zip(same, grads, strict=True):
        np.testing.assert_array_equal(a, b)
    # A row of weight 0 has no gradient, and gives none, whatever it holds.
    poisoned[2][0, :, 7], poisoned[0][0, 1, 7] = np.nan, np.inf
    again, same = streamkl_cupy.indexer_kl_value_and_grad(*poisoned, **options)
    assert again == value
    assert not same.index_q[0, :, 7].any()
    for a, b in zip(same[1:], grads[1:], strict=True):
        np.testing.assert_array_equal(a[np.isfinite(a)], b[np.isfinite(a)])
        assert np.isfinite(a).all()


@pytest.mark.parametrize("operand", range(5))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_a_number_where_somebody_looks(rng: np.random.Generator, operand: int, bad: float) -> None:
    """It shows in the row, though gates, exponentials and log-sum-exps would hide an infinity, and nowhere else."""
    x = [a.copy() for a in make(rng, B=1)]
    at = {0: (0, 1, 9), 1: (0, 1, 4), 2: (0, 2, 9), 3: (0, 0, 4), 4: (0, 2, 9)}[operand]
    options: dict[str, Any] = {"index_scale": 0.4, "causal": True, "q_offset": 0}
    clean = streamkl_cupy.indexer_kl_forward(*x, **options)
    x[operand][at] = bad
    touched = np.zeros(19, np.bool_)
    touched[slice(9, 10) if operand in (0, 2, 4) else slice(4, None)] = True
    rows = streamkl_cupy.indexer_kl_forward(*x, **options)
    np.testing.assert_array_equal(np.isnan(rows.kl[0]), touched)
    np.testing.assert_array_equal(rows.kl[0, ~touched], clean.kl[0, ~touched])
    grads = streamkl_cupy.indexer_kl_backward(np.ones((1, 19), np.float32), *x, saved=rows, **options)
    np.testing.assert_array_equal(np.isnan(grads.index_q[0]).any(axis=(0, 2)), touched)
    seen = np.zeros(23, np.bool_)
    seen[: 10 if operand in (0, 2, 4) else 19] = True
    np.testing.assert_array_equal(np.isnan(grads.index_k[0, 0]).any(axis=-1), seen)


def test_identities(rng: np.random.Generator) -> None:
    x = make(rng, "float64", H=1, K=1, I=1)
    options = {"causal": True, "teacher_scale": 0.5}
    kl = streamkl_cupy.indexer_kl(*x[:4], index_scale=0.3, relu=False, **options)
    other = streamkl_cupy.attention_kl(*x[:2], x[2], x[3], student_scale=0.3, **options)
    np.testing.assert_allclose(kl, other[:, 0], atol=1e-13)
    # A map that is the teacher's own.
    q, k = np.abs(x[0]), np.abs(x[1])
    assert np.abs(streamkl_cupy.indexer_kl(q, k, q, k, index_scale=0.5, **options)).max() < 1e-12
    # A power of two that moves from the weights to the queries moves exponents alone.
    x = make(rng)
    moved = (*x[:2], x[2] * 8, x[3], x[4] / 8)
    grads, others = (streamkl_cupy.indexer_kl_value_and_grad(*a, index_scale=0.4)[1] for a in (x, moved))
    np.testing.assert_array_equal(grads.index_q, others.index_q * 8)
    np.testing.assert_array_equal(grads.index_k, others.index_k)
    # sum_h w_h dw_h = sum_h q_h . dq_h
    np.testing.assert_allclose(
        (x[4] * grads.index_weights).sum(axis=1), (x[2] * grads.index_q).sum(axis=(1, 3)), atol=1e-6
    )
    # The order of ids, and repeated ones, have no effect on bits.
    ids = rng.permuted(np.tile(np.arange(23), (2, 19, 1)), axis=-1)[..., :8]
    chosen = [
        streamkl_cupy.indexer_kl_value_and_grad(*x, index_scale=0.4, topk_indices=i)
        for i in (ids, np.concatenate([np.sort(ids), ids], axis=-1))
    ]
    assert chosen[0][0] == chosen[1][0]
    for a, b in zip(chosen[0][1], chosen[1][1], strict=True):
        np.testing.assert_array_equal(a, b)


def test_shards(rng: np.random.Generator, tiles: str) -> None:
    x = make(rng, "float64", K=2)
    options: dict[str, Any] = {"causal": True, "key_mask": rng.random((2, 23)) < 0.8}
    # Numbers of float32 are no less exact for their type.
    lse = (rng.standard_normal((2, 4, 19)) + 3).astype(np.float32)
    whole = streamkl_cupy.indexer_kl_value_and_grad(*x, index_scale=0.4, teacher_lse=lse, **options)
    heads = (slice(0, 2), slice(2, 4))
    parts = [
        streamkl_cupy.indexer_target(x[0][:, h], x[1][:, i : i + 1], teacher_lse=lse[:, h], **options)
        for i, h in enumerate(heads)
    ]
    np.testing.assert_allclose(
        parts[0], reference.target(x[0][:, :2], x[1][:, :1], teacher_lse=lse[:, :2], **options)[:, 0], atol=1e-14
    )
    shared = streamkl_cupy.indexer_kl_value_and_grad(None, None, *x[2:], target=sum(parts), index_scale=0.4, **options)
    np.testing.assert_allclose(shared[0], whole[0], rtol=1e-12)
    for a, b in zip(shared[1], whole[1], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-14)
    some = streamkl_cupy.indexer_target(x[0][:, :2], x[1][:, :1], teacher_lse=lse[:, :2], rows=(3, 14), **options)
    np.testing.assert_allclose(some, parts[0][:, 3:14], rtol=1e-12)
    # Rows that are shared: sums, weights and gradients of keys add up.
    found = []
    for rows in (slice(0, 7), slice(7, None)):
        mine = [a[:, :, rows] if i in (0, 2, 4) else a for i, a in enumerate(x)]
        more = {**options, "q_offset": 4 + rows.start, "teacher_lse": lse[:, :, rows], "index_scale": 0.4}
        stats = streamkl_cupy.indexer_kl(*mine, reduction="sum", return_stats=True, **more)
        _, grads = streamkl_cupy.indexer_kl_value_and_grad(*mine, reduction="sum", **more)
        found.append((stats.kl, stats.weight_sum, grads.index_k))
    total, weight, d_k = (a + b for a, b in zip(*found, strict=True))
    np.testing.assert_allclose(total / weight, whole[0], rtol=1e-12)
    np.testing.assert_allclose(d_k / weight, whole[1].index_k, atol=1e-14)


def test_threads_change_no_bits(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    x = make(rng, M=40, J=1)
    found = []
    for count in (1, 3):
        monkeypatch.setattr(backend, "threads_for", lambda *_, count=count: count)
        monkeypatch.setattr(backend, "QUERY_TILE", 8)
        found.append(streamkl_cupy.indexer_kl_value_and_grad(*x, index_scale=0.4, head_groups=2, causal=True))
    assert found[0][0] == found[1][0]
    for a, b in zip(found[0][1], found[1][1], strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("relu", [True, False])
def test_the_formula_that_recipes_have(rng: np.random.Generator, relu: bool) -> None:
    """As Megatron-LM and others write it, of softmaxes per head that are added up and normalised, by autograd."""
    torch = pytest.importorskip("torch")
    x = [torch.from_numpy(a) for a in make(rng, M=23)]
    for a in x[2:]:
        a.requires_grad_()
    q, k, index_q, index_k, w = x
    hidden = torch.ones(23, 23, dtype=torch.bool).triu(1)
    maps = (q @ k.repeat_interleave(2, dim=1).mT * 6**-0.5).masked_fill(hidden, -torch.inf).softmax(-1).sum(1)
    target = maps / maps.sum(-1, keepdim=True)
    s = index_q @ index_k.mT
    logits = 0.3 * ((s.relu() if relu else s) * w[..., None]).sum(1)
    log_q = logits.masked_fill(hidden, -torch.inf).log_softmax(-1)
    kl = torch.where(hidden, 0, target * (target.clamp(min=1e-30).log() - log_q)).sum(-1).mean()
    kl.backward()
    expected = [a.grad for a in x[2:]]
    for a in x[2:]:
        a.grad = None
    found = streamkl_cupy.indexer_kl(*x, index_scale=0.3, causal=True, relu=relu, reduction="mean")
    found.backward()
    assert (found - kl).abs() <= 1e-6
    for a, b in zip(x[2:], expected, strict=True):
        assert (a.grad - b).abs().max() <= 1e-6


# Doors.


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own decompositions use it
def test_torch(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    numbers = make(rng)
    x = [torch.from_numpy(a) for a in numbers]
    weight = torch.rand(2, 19)
    options: dict[str, Any] = {"index_scale": 0.3, "causal": True}
    value, grads = streamkl_cupy.indexer_kl_value_and_grad(*x, row_weight=weight, **options)
    expected = torch.cat([a.ravel() for a in grads])

    def loss(*student: Any, weight: Any = weight) -> Any:
        return streamkl_cupy.indexer_kl(*x[:2], *student, row_weight=weight, reduction="mean", **options)

    def check(found: Any) -> None:
        torch.testing.assert_close(torch.cat([a.ravel() for a in found]), expected, rtol=1e-6, atol=1e-8)

    student = [a.clone().requires_grad_() for a in x[2:]]
    learned = weight.clone().requires_grad_()
    found = loss(*student, weight=learned)
    *mine, d_weight = torch.autograd.grad(found, [*student, learned])
    torch.testing.assert_close(found.detach(), value)
    check(mine)
    rows = streamkl_cupy.indexer_kl(*x, **options)
    torch.testing.assert_close(d_weight, (rows - value) / weight.sum(), rtol=1e-5, atol=1e-7)
    check(torch.func.grad(loss, argnums=(0, 1, 2))(*x[2:]))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    check(torch.autograd.grad(compiled(*student), student))
    each = torch.vmap(lambda *a: streamkl_cupy.indexer_kl(*a, **options))(*x)
    torch.testing.assert_close(each, rows)
    (only,) = torch.autograd.grad(loss(x[2], x[3], student[2]), student[2:])
    torch.testing.assert_close(only, grads.index_weights)
    (first,) = torch.autograd.grad(loss(*student), student[:1], create_graph=True)
    with pytest.raises(NotImplementedError, match="first-order"):
        first.sum().backward()
    with pytest.raises(NotImplementedError, match=r"teacher_k requires a gradient.*constant.*detach"):
        streamkl_cupy.indexer_kl(x[0], x[1].clone().requires_grad_(), *x[2:], **options)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x[2], torch.ones_like(x[2]))
        with pytest.raises(NotImplementedError, match="reverse-mode"):
            loss(dual, *x[3:])


def test_torch_stats_of_both_kinds(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    x = [torch.from_numpy(a).to(torch.bfloat16).requires_grad_(i > 1) for i, a in enumerate(make(rng))]
    made = streamkl_cupy.indexer_kl(*x, index_scale=0.3, return_stats=True)
    given = streamkl_cupy.indexer_kl(*x, index_scale=0.3, return_stats=True, teacher_lse=made.teacher_lse)
    assert given.teacher_lse is made.teacher_lse
    assert made.kl.requires_grad
    assert not made.index_lse.requires_grad
    torch.testing.assert_close(given.kl, made.kl)
    target = streamkl_cupy.indexer_target(*x[:2])
    shared = streamkl_cupy.indexer_kl(None, None, *x[2:], index_scale=0.3, target=target, return_stats=True)
    assert shared.teacher_lse is None
    torch.testing.assert_close(shared.kl, made.kl, rtol=1e-5, atol=1e-6)
    shared.kl.sum().backward()
    expected = streamkl_cupy.indexer_kl_value_and_grad(*x, index_scale=0.3, reduction="sum")[1]
    assert x[2].grad.dtype == torch.bfloat16
    torch.testing.assert_close(x[2].grad, expected.index_q, rtol=2e-2, atol=1e-3)


def test_jax(rng: np.random.Generator) -> None:
    jax = pytest.importorskip("jax")
    numbers = make(rng)
    x = [jax.numpy.asarray(a) for a in numbers]
    weight = jax.numpy.asarray(rng.random((2, 19)).astype(np.float32))
    options: dict[str, Any] = {"index_scale": 0.3, "causal": True}
    value, grads = streamkl_cupy.indexer_kl_value_and_grad(*numbers, row_weight=np.asarray(weight), **options)

    def loss(*student: Any) -> Any:
        return streamkl_cupy.indexer_kl(*x[:2], *student, row_weight=weight, reduction="mean", **options)

    for transform in (lambda f: f, jax.jit, jax.checkpoint):
        found, mine = transform(jax.value_and_grad(loss, argnums=(0, 1, 2)))(*x[2:])
        # Where JAX has a GPU, logarithms of up to 3 are exact to 2^-22.
        np.testing.assert_allclose(found, value, rtol=1e-6, atol=2e-6)
        for a, b in zip(mine, grads, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6 * np.abs(b).max())
    rows = streamkl_cupy.indexer_kl(*numbers, **options)
    each = jax.vmap(lambda *a: streamkl_cupy.indexer_kl(*a, **options))(*x)
    np.testing.assert_allclose(each, rows, rtol=1e-6, atol=2e-6)
    stats = jax.jit(lambda *a: streamkl_cupy.indexer_kl(*a, return_stats=True, **options))(*x)
    np.testing.assert_allclose(stats.target_sum, np.full((2, 19), 4), rtol=1e-5)
    # One device is enough for the types of a mesh; the keys are what devices share.
    mesh = jax.sharding.Mesh(np.array(jax.devices("cpu")[:1]), ("b",))
    spec, whole = jax.sharding.PartitionSpec("b"), jax.sharding.PartitionSpec()
    mapped = jax.shard_map(
        lambda q, k, a, b, c: streamkl_cupy.indexer_kl(q, k, a, b[None].repeat(2, 0), c, **options),
        mesh=mesh,
        in_specs=(spec, spec, spec, whole, spec),
        out_specs=spec,
    )
    d_k = jax.grad(lambda k: mapped(*x[:3], k, x[4]).sum())(x[3][0])
    same = numbers[3][:1].repeat(2, 0)
    _, expected = streamkl_cupy.indexer_kl_value_and_grad(*numbers[:3], same, numbers[4], reduction="sum", **options)
    np.testing.assert_allclose(d_k, expected.index_k.sum(axis=0), rtol=1e-4, atol=1e-5)
    with pytest.raises(NotImplementedError, match=r"teacher_q is differentiated by.*constant.*stop_gradient"):
        jax.grad(lambda q: streamkl_cupy.indexer_kl(q, *x[1:], reduction="sum", **options))(x[0])
    with pytest.raises(NotImplementedError, match="first-order"):
        jax.grad(lambda q: jax.grad(lambda a: loss(a, *x[3:]))(q).sum())(x[2])
    with pytest.raises(TypeError, match="reverse-mode"):
        jax.jvp(lambda q: loss(q, *x[3:]), x[2:3], x[2:3])


def test_arrays_of_other_frameworks(rng: np.random.Generator) -> None:
    x = make(rng)
    value, grads = streamkl_cupy.indexer_kl_value_and_grad(*map(Own, x), index_scale=0.3, row_weight=Own(x[4][:, 0]))
    expected, others = streamkl_cupy.indexer_kl_value_and_grad(*x, index_scale=0.3, row_weight=x[4][:, 0])
    assert float(value.x) == expected
    for a, b in zip(grads, others, strict=True):
        assert isinstance(a, Own)
        np.testing.assert_array_equal(a.x, b)
    rows = streamkl_cupy.indexer_kl_forward(*map(Own, x), index_scale=0.3)
    again = streamkl_cupy.indexer_kl_backward(
        Own(np.ones((2, 19), np.float32)), *map(Own, x), index_scale=0.3, saved=rows
    )
    assert np.isfinite(again.index_k.x).all()
    with pytest.raises(TypeError, match="all arrays of a call come from one framework"):
        streamkl_cupy.indexer_kl(Own(x[0]), *x[1:], index_scale=0.3)


# What is refused.

Change = Callable[[dict[str, Any]], Any]
REFUSED: dict[str, tuple[Change, type[Exception], str]] = {
    "no scale": (lambda a: a.pop("index_scale"), TypeError, r"index_scale=1\.0 where.*index_q\.shape\[-1\] \*\* -0\.5"),
    "groups": (
        lambda a: a.update(head_groups=3),
        ValueError,
        r"head_groups=3 does not divide the 4 heads of teacher_q",
    ),
    "key heads": (
        lambda a: a.update(teacher_k=a["teacher_k"].repeat(3, 1)),
        ValueError,
        r"6 heads.*do not divide the 4",
    ),
    "index keys": (lambda a: a.update(index_k=a["index_k"].repeat(2, 1)), ValueError, r"index_k.*2 heads.*1, and one"),
    "rows": (lambda a: a.update(index_q=a["index_q"][:, :, 1:]), ValueError, r"18 query rows.*index_q|19 query rows"),
    "keys": (lambda a: a.update(index_k=a["index_k"][:, :, 1:]), ValueError, r"22 keys.*teacher_k"),
    "columns": (lambda a: a.update(index_k=a["index_k"][..., 1:]), ValueError, r"4 index columns.*index_q"),
    "swapped": (
        lambda a: a.update(teacher_lse=np.zeros((2, 19, 4), np.float32)),
        ValueError,
        r"teacher_lse.*in layout 'bhnd' its axes are \(batch entries, teacher heads, query rows\)",
    ),
    "axes": (lambda a: a.update(index_weights=a["index_weights"][0]), ValueError, r"2 axes; expected are 3"),
    "ids": (lambda a: a.update(topk_indices=np.zeros((2, 19, 3))), TypeError, r"topk_indices has dtype float64.*int64"),
    "weights": (lambda a: a.update(index_weights=np.ones((2, 4, 19), int)), TypeError, "index_weights has dtype int64"),
    "lse": (
        lambda a: a.update(teacher_lse=np.ones((2, 4, 19), np.float16)),
        TypeError,
        "teacher_lse has dtype float16",
    ),
    "mask": (lambda a: a.update(key_mask=np.ones((2, 23))), TypeError, "key_mask has dtype float64; allowed are bool"),
    "lengths": (lambda a: a.update(topk_length=np.ones((2, 19), int)), ValueError, "topk_length came without topk_ind"),
    "no ids": (lambda a: a.update(topk_indices=np.zeros((2, 19, 0), int)), ValueError, "names no keys"),
    "target": (lambda a: a.update(target=np.ones((2, 19, 23))), ValueError, "target came together with teacher_q"),
    "nothing": (lambda a: a.update(teacher_q=None, teacher_k=None), TypeError, "or a target in their place"),
    "offset": (lambda a: a.update(q_offset=1), ValueError, "q_offset=1 says where the diagonal"),
    "ratio": (lambda a: a.update(compress_ratio=4), ValueError, "compress_ratio=4 says where the diagonal"),
    "ratio 0": (lambda a: a.update(compress_ratio=0, causal=True), ValueError, "compress_ratio=0; allowed are 1"),
    "half": (lambda a: a.update(teacher_k=a["teacher_k"].astype(np.float16)), TypeError, "teacher_k is float16"),
    "rope": (
        lambda a: a.update(teacher_q_rope=a["teacher_q"]),
        ValueError,
        "teacher_q_rope came without teacher_k_rope",
    ),
    "packed": (
        lambda a: a.update(cu_seqlens_q=np.array([0, 19]), cu_seqlens_k=np.array([0, 23])),
        ValueError,
        r"index_q.*4 axes; allowed are 3, \(rows of all sequences",
    ),
    "reduction": (lambda a: a.update(reduction="total"), ValueError, "reduction='total'"),
    "weight": (lambda a: a.update(row_weight=np.ones(7)), ValueError, "row_weight"),
    "list": (lambda a: a.update(index_q=a["index_q"].tolist()), TypeError, "index_q is a list"),
    "dim": (
        lambda a: a.update({n: a[n].repeat(52, 3) for n in ("index_q", "index_k")}),
        NotImplementedError,
        "260 index",
    ),
    "word": (lambda a: a.update(topk=3), TypeError, r"indexer_kl\(\) has no option 'topk'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(rng: np.random.Generator, name: str) -> None:
    change, error, text = REFUSED[name]
    arguments: dict[str, Any] = {**dict(zip(NAMES, make(rng), strict=True)), "index_scale": 0.4}
    change(arguments)
    with pytest.raises(error, match=text):
        streamkl_cupy.indexer_kl(**arguments)


def test_refused_by_the_explicit_functions(rng: np.random.Generator) -> None:
    x = make(rng)
    saved = streamkl_cupy.indexer_kl_forward(*x, index_scale=0.4)
    grad = np.ones((2, 19), np.float32)
    back = streamkl_cupy.indexer_kl_backward
    with pytest.raises(NotImplementedError, match=r"wrt names 'teacher_q'.*attention_kl"):
        back(grad, *x, index_scale=0.4, saved=saved, wrt=("teacher_q",))
    with pytest.raises(ValueError, match="wrt names 'index_weights', but it is None"):
        back(grad, *x[:4], index_scale=0.4, saved=saved)
    with pytest.raises(TypeError, match="target_sum came neither in saved= nor alone"):
        back(grad, *x, index_scale=0.4, index_lse=saved.index_lse)
    with pytest.raises(ValueError, match=r"grad: shape \(2, 18\)"):
        back(grad[:, 1:], *x, index_scale=0.4, saved=saved)
    with pytest.raises(ValueError, match="leaves no scalar"):
        streamkl_cupy.indexer_kl_value_and_grad(*x, index_scale=0.4, reduction="none")
    with pytest.raises(ValueError, match=r"rows=\(3, 20\); allowed are rows of the 19"):
        streamkl_cupy.indexer_target(*x[:2], rows=(3, 20))


def test_what_no_gpu_computes(rng: np.random.Generator) -> None:
    views = {n: problem.standin(n, a, arrays.cuda(0)) for n, a in zip(NAMES, make(rng, "float64"), strict=True)}
    inputs = INDEXER_KL.Inputs(*map(views.get, INDEXER_KL.names))
    with pytest.raises(NotImplementedError, match="float64 on cuda:0"):
        problem.to_problem(INDEXER_KL, inputs, IndexOptions(0.3))


# Kernels, compiled without a GPU.

EVERY = frozenset(("TQ", "TK", "RQ", "RK", "SQ", "SK"))
SHAPES = [
    IndexerShape(teacher, student, weights, *dims, gated, bits, target, vectors)
    for teacher, student, weights, dims, gated, bits, target, vectors in (
        ("bfloat16", "bfloat16", "float32", (128, 0, 128), True, False, False, EVERY),
        ("bfloat16", "bfloat16", "bfloat16", (192, 64, 128), True, True, False, EVERY),
        ("float16", "bfloat16", "float16", (576, 0, 64), False, False, False, EVERY),
        ("bfloat16", "bfloat16", "float32", (128, 0, 128), False, True, False, EVERY),
        ("bfloat16", "bfloat16", "float32", (128, 0, 128), True, True, False, EVERY),
        ("bfloat16", "bfloat16", "bfloat16", (192, 0, 128), False, True, False, EVERY),
        ("float16", "float16", "float32", (64, 0, 72), True, False, False, EVERY),
        ("bfloat16", "bfloat16", "float32", (16, 0, 256), True, False, True, EVERY),
        ("float32", "float32", "float32", (77, 0, 41), True, True, False, frozenset()),
        ("float32", "bfloat16", "float32", (576, 16, 128), True, False, False, EVERY),
        ("bfloat16", "bfloat16", "float32", (128, 0, 128), True, True, False, EVERY),
        ("bfloat16", "bfloat16", "bfloat16", (192, 0, 128), False, True, False, EVERY),
        ("float32", "float32", "float32", (128, 0, 192), False, False, False, EVERY),
    )
]


def kernels_of(shape: IndexerShape, facts: DeviceFacts) -> list[KernelText]:
    """All that a call of the shape may run, of each task the first kernel that does it."""
    half = shape.student == "float16"  # whose gradients are of kept gates
    gradients = [task.kind for task in INDEXER_KL.gradients[:2]]
    work = [("indexer_score", IndexerWork(shape, x)) for x in ENDINGS if x != "list" and not (half and x == "strip")]
    work += [] if half else [(kind, IndexerWork(shape)) for kind in gradients]
    around = [indexer_sum.plan(shape, facts), indexer_scan.plan(shape, facts), indexer_pack.plan(shape, facts)]
    around += [x.plan(facts) for x in (indexer_rows, indexer_bits, indexer_units)]
    around.append(indexer_join.plan(RowCut(2), facts, lse=True))
    if not plan.why_no_gates(shape, facts):
        tiled = shape._replace(tiled=True)
        work += [(kind, IndexerWork(tiled)) for kind in gradients]
        work.append(("indexer_score", IndexerWork(tiled, "strip")))
        around += [
            indexer_gated_join.plan(tiled, facts.multiprocessors, facts),
            *(indexer_tiles.plan(tiled, weighted, facts) for weighted in (False, True)),
        ]
    # Whether heads of a group read several key heads, and rows that have many keys several tiles of a share.
    for ending, several in itertools.product(indexer_stream_sm90.STREAM_ENDINGS, (False, True)):
        mapped = shape._replace(maps=shape.vectors, tiled=ending == "strip" and not plan.why_no_gates(shape, facts))
        asked = IndexerWork(mapped, ending, several_keys=several, keys=32_768 if several else 780)
        if not indexer_stream_sm90.KERNEL.refuses(asked, facts):
            work.append(("indexer_score", asked))
    if shape.bits:
        few = IndexerWork(shape, keys=4096, heads=64, teacher_heads=128, chosen=1024)
        gathered = [("indexer_score", few._replace(ending=x)) for x in indexer_gathered_sm90.GATHERED_ENDINGS]
        work += [task for task in (*gathered, ("indexer_listed", few)) if KERNELS[task[0]][0].choice(task[1], facts)[0]]
    found = []
    for kind, asked in work:
        kernel, tile, _ = chosen(kind, asked, facts)
        found.append(kernel.plan(asked, tile, facts))
    return [*found, *around]


def check_compiles(kernels: list[KernelText], facts: DeviceFacts) -> None:
    pytest.importorskip("cupy", reason="needs CuPy and the NVRTC it brings")
    for kernel in kernels:
        assert kernel.smem_bytes <= facts.smem_per_block
        built = nvrtc.cached_build(kernel.text, kernel.arch)
        if built is None:
            built = nvrtc.build(kernel.text, kernel.arch)
            nvrtc.keep(kernel.text, kernel.arch, (), built)
        assert (built.spill_bytes, built.notes) == (0, ()), (kernel, built)


def test_some_kernels_compile(rng: np.random.Generator) -> None:
    """All of them are a matter of --slow."""
    facts = GPUS[str(rng.choice(["sm_80", "sm_90", "sm_120"]))]
    every = [kernel for shape in SHAPES[:-1] for kernel in kernels_of(shape, facts)]
    check_compiles([every[i] for i in rng.choice(len(every), 4, replace=False)], facts)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90", "sm_120"])
def test_every_kernel_compiles(arch: str) -> None:
    for shape in SHAPES if GPUS[arch].smem_per_block > 2**17 else SHAPES[:-1]:
        check_compiles(kernels_of(shape, GPUS[arch]), GPUS[arch])


def test_head_dims_that_no_tile_has_room_for() -> None:
    small = replace(GPUS["sm_86"], smem_per_block=65_536)
    with pytest.raises(NotImplementedError, match="index queries of 256 float32 columns need more shared memory"):
        chosen("indexer_query", IndexerWork(SHAPES[-1]._replace(index_dim=256)), small)
    with pytest.raises(NotImplementedError, match="rotary parts of 256 columns beside 64 need more"):
        chosen("indexer_score", IndexerWork(SHAPES[0]._replace(teacher_dim=64, rope_dim=256)), small)


class Standin:
    def __init__(self, *shape: int, dtype: str = "bfloat16") -> None:
        self.shape = shape
        self.dtype = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.dtype(dtype)


@pytest.mark.parametrize("chosen", [0, 2048])
def test_a_plan_says_what_memory_it_takes(chosen: int) -> None:
    """At 32k, of the largest models."""
    n = 32_768
    x = (Standin(1, 128, n, 192), Standin(1, 1, n, 192), Standin(1, 64, n, 128), Standin(1, n, 128), Standin(1, 64, n))
    ids = {"topk_indices": Standin(1, n, chosen, dtype="int64")} if chosen else {}
    found = streamkl_cupy.indexer_kl_plan(*x, index_scale=1.0, causal=True, arch="sm_90", **ids)
    assert isinstance(found, plan.IndexerPlan)
    assert max(found.workspace_bytes, found.backward_bytes) < 200e6
    text = str(found)
    streamed = ("stream_sm90", "gated_query_sm90", "gated_key_sm90", "queries are streamed", "shares for", "MiB")
    gathered = ("indexer_bits", "gathered_sm90", "listed_sm90", "their keys are gathered", "lists of 2048 keys", "MiB")
    assert all(name in text for name in (gathered if chosen else streamed))
    if chosen:
        # What rows add to a key has no order then.
        same = str(streamkl_cupy.indexer_kl_plan(*x, index_scale=1.0, deterministic=True, arch="sm_90", **ids))
        assert ("gathered_sm90" in same, "listed_sm90" in same, "gated_key_sm90" in same) == (True, False, True)
    only = streamkl_cupy.indexer_kl_plan(*x, index_scale=1.0, arch="sm_80", wrt=("index_weights",))
    assert "indexer_query_sm80" in str(only)
    assert "queries are not streamed: it needs compute capability 9.0" in str(only)
    assert "indexer_key_sm80" not in str(only)
    assert only.backward_bytes < found.backward_bytes
    half = [Standin(*a.shape, dtype="float16") for a in x]
    assert "gates are kept" in str(streamkl_cupy.indexer_kl_plan(*half, index_scale=1.0, arch="sm_90"))
    with pytest.raises(NotImplementedError, match="here they cannot: it needs compute capability"):
        streamkl_cupy.indexer_kl_plan(*half, index_scale=1.0, arch="sm_80")


@pytest.mark.parametrize("choices", [0, 60_000])
def test_strips_hold_all_that_rows_see(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, choices: int) -> None:
    """Whatever causal, offsets and compressed keys are: no kernel looks beyond a strip's keys."""
    monkeypatch.setattr(strips, "MOST_CHOICES", choices)
    monkeypatch.setattr(plan, "GATED_BYTES", 0)
    for _ in range(20):
        M, N, ratio = (int(x) for x in rng.integers(1, (3000, 3000, 5)))
        monkeypatch.setattr(plan, "LEAST_GATED_BYTES", least := int(rng.integers(1, 1 << 24)))
        x = (Standin(2, 4, M, 64), Standin(2, 1, N, 64), Standin(2, 8, M, 64), Standin(2, N, 64), Standin(2, 8, M))
        options: dict[str, Any] = {"causal": True, "compress_ratio": ratio} if rng.random() < 0.8 else {}
        if options and rng.random() < 0.5:
            options["q_offset"] = int(rng.integers(-M, N))
        found = streamkl_cupy.indexer_kl_plan(*x, index_scale=1.0, arch="sm_90", **options)
        assert isinstance(found, plan.IndexerPlan)
        assert not found.no_gates
        seen = row_keys.intervals(found.problem.rule, 2, M, N, {}).end.max(0)
        rows = 0
        for strip in found.strips:
            assert strip.first * 64 == rows
            rows += strip.tiles * 64
            assert seen[strip.first * 64 : rows].max() <= strip.keys
            assert strip.keys % 256 == 0
            tiles = [seen[i : i + 64].max() for i in range(strip.first * 64, min(rows, M), 64)]
            assert strip.pairs == sum(64 * 256 * -(-int(keys) // 256) for keys in tiles)
            assert strip.tiles == 1 or found.strip_bytes(strip.tiles, strip.pairs) <= least
        assert rows - 64 < M <= rows
        assert found.strips[-1].keys >= N
        assert found.backward_bytes >= found.strip_bytes(strip.tiles, strip.pairs)


def test_memory_on_the_cpu(rng: np.random.Generator) -> None:
    x = make(rng, B=1, H=16, K=1, M=64, N=4096, T=8, D=8)
    cut = streamkl_cupy.indexer_kl_plan(*x, index_scale=1.0)
    assert cut.scratch_bytes < 20e6
    streamkl_cupy.indexer_kl_warmup(*x, index_scale=1.0)
    tracemalloc.start()
    try:
        streamkl_cupy.indexer_kl_value_and_grad(*x, index_scale=1.0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 13e6, "16 heads of 64 x 4096 in float32 are 17 MB"


# Launches, with nobody to launch.


class Driver:
    """Notes what is launched: the kernel's name, its grid, and the bytes of its arguments."""

    def __init__(self) -> None:
        self.kernels: list[KernelText] = []
        self.seen: list[tuple[Any, ...]] = []
        self.context = 64

    def ctxGetCurrent(self) -> int:
        return self.context

    def load(self, kernel: KernelText, stream: int | None) -> int:
        self.kernels.append(kernel)
        return len(self.kernels) - 1

    def launch(self, handle: int, *rest: Any) -> None:
        *shape, _, parameters, _ = rest
        kernel = self.kernels[handle]
        address = ctypes.c_void_p.from_address(parameters).value
        assert address is not None
        self.seen.append((kernel.name, tuple(shape[:3]), ctypes.string_at(address, kernel.args.size)))

    def clear(self, address: int, value: int, size: int, stream: int) -> None:
        self.seen.append(("clear", address, size))


@pytest.mark.parametrize("name", ["strips", "target", "gathered"])
def test_a_call_like_one_before_launches_what_lies_ready(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    target, gathered = name == "target", name == "gathered"
    driver = Driver()
    pretended = SimpleNamespace(cuda=SimpleNamespace(driver=driver, runtime=driver))
    for module in (cuda, launch):
        monkeypatch.setattr(module, "import_cupy", lambda: pretended)
    monkeypatch.setattr(launch, "_primary_context", lambda index: driver.context)
    driver.launchKernel, driver.memsetAsync = driver.launch, driver.clear  # type: ignore[attr-defined]
    monkeypatch.setattr(cuda, "device_facts", lambda index: GPUS["sm_90" if gathered else "sm_80"])
    monkeypatch.setattr(cuda, "in_context", lambda index: nullcontext())
    monkeypatch.setattr(cuda.Runner, "loaded", lambda self, kernel, stream: driver.load(kernel, stream))
    n = {"B": 2, "H": 4, "K": 2, "I": 3, "J": 1, "M": 150, "N": 170, "T": 32, "D": 32, "G": 1, "C": 16}
    if gathered:
        n |= {"H": 70, "K": 1}
        monkeypatch.setattr(plan, "LIST_BYTES", 1)  # a row tile at a time
    op = INDEXER_TARGET if target else INDEXER_KL
    names = ("teacher_q", "teacher_k", "index_q", "index_k", "index_weights", "topk_indices", "key_mask")

    def view(spec: Any, at: int) -> arrays.ArrayView:
        shape = tuple(n[x] for x in spec.letters.replace("G", ""))
        dtype = {"integer": "int64", "bool": "bool", "number": "float32"}.get(spec.elements, "bfloat16")
        return arrays.ArrayView(spec.name, "", arrays.cuda(0), dtype, shape, compact_strides(shape), at << 40, None)

    inputs = op.Inputs(*(view(x, i) if x.name in names else None for i, x in enumerate(op.operands, start=1)))
    asked = problem.to_problem(op, inputs, IndexOptions(0.3, causal=True, rows=(3, 99) if target else None))
    runner = cuda.Runner(asked)
    with pytest.raises(ValueError, match=r"workspace: got none; this call needs \d+ bytes"):
        runner.forward(inputs, op.Results(*[None] * len(op.results)), 0)
    results = {
        name: arrays.ArrayView(name, "", arrays.cuda(0), dtype, shape, compact_strides(shape), 99 << 40, None)
        for name, (shape, dtype) in asked.results.items()
    }
    first = (1 << 50) + 64
    runner.forward(inputs, op.Results(**results), 0, first)
    seen, driver.seen = driver.seen, []
    assert {name for name, *_ in seen} - {"clear"} == {kernel.name for kernel in runner.plan.forward}
    assert any("gathered" in name for name, *_ in seen) == gathered
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_Call", lambda *given: pytest.fail("packed again"))
        runner.forward(inputs, op.Results(**results), 7, first)
    assert driver.seen == seen
    if target:
        return
    rows = op.Saved(*(results[name]._replace(name="grad") for name in ("kl", "index_lse", "target_sum", "made_lse")))
    for wrt in (WRT, ("index_weights",)):
        driver.seen = []
        room = runner.backward_bytes(wrt)
        out = op.Gradients(*(x if name in wrt else None for name, x in zip(op.names, inputs)))
        runner.backward(inputs, rows, out, 0, first)
        assert {name for name, *_ in driver.seen} - {"clear"} == {x.name for x in runner.plan_for(wrt).backward}
        cleared = [(address, size) for name, address, size in driver.seen if name == "clear"]
        assert cleared or (gathered and "index_k" not in wrt)
        assert all(first <= address and address + size <= first + room for address, size in cleared)


# On a GPU.


def on_gpu(x: Any, dtype: str) -> Any:
    """A torch tensor, of numbers as it rounds them."""
    torch = pytest.importorskip("torch")
    x = torch.from_numpy(np.array(x))
    return (x.to(getattr(torch, dtype)) if x.is_floating_point() else x).cuda()


def check_on_gpu(
    x: tuple[Any, ...], rng: np.random.Generator, dtype: str, *, any_order: tuple[str, ...] = (), **options: Any
) -> Any:
    """As `check`, with memory that was NaN before; everything twice, for equal bits but of `any_order`."""
    torch = pytest.importorskip("torch")
    options = {"index_scale": 0.4, **options}
    given = [None if a is None else on_gpu(a, "float32" if i == 4 else dtype) for i, a in enumerate(x)]
    exact = [None if a is None else a.double().cpu().numpy() for a in given]
    kept = {"teacher_lse": "float32"}
    there = {k: on_gpu(v, kept.get(k, dtype)) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    known = {
        k: v.double().cpu().numpy() if torch.is_tensor(v) and v.is_floating_point() else options[k]
        for k, v in there.items()
    }
    known.pop("deterministic", None)  # it changes no value
    if {kernel.family for kernel in KERNELS["indexer_score"]} == {"sm80"}:
        assert "_sm90" not in str(streamkl_cupy.indexer_kl_plan(*given, **there))
    rows = reference.forward(*exact, **known)
    grad = rng.standard_normal(rows.kl.shape).astype(np.float32)
    grad.flat[::7] = 0
    expected = reference.backward(grad, *exact, **known)
    wrt = WRT if x[4] is not None else WRT[:2]
    runs = []
    for _ in range(2):
        torch.full((1 << 24,), torch.nan, device="cuda")  # what results lie in next
        saved = streamkl_cupy.indexer_kl_forward(*given, **there)
        upstream = torch.from_numpy(grad).cuda().reshape(saved.kl.shape)
        runs.append((saved, streamkl_cupy.indexer_kl_backward(upstream, *given, saved=saved, wrt=wrt, **there)))
    (saved, grads), (again, same) = runs
    fixed = [name for name in wrt if name not in any_order]
    of_both = (*saved, *(getattr(grads, name) for name in fixed)), (*again, *(getattr(same, name) for name in fixed))
    for a, b in zip(*of_both, strict=True):
        assert a is b is None or torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))
    alone = wrt[int(rng.integers(len(wrt)))]  # what is not asked for changes no bits
    single = streamkl_cupy.indexer_kl_backward(upstream, *given, saved=saved, wrt=(alone,), **there)
    if alone in fixed:
        assert torch.equal(getattr(single, alone).nan_to_num(7.5), getattr(grads, alone).nan_to_num(7.5))
    for name in ("kl", "index_lse", "target_sum"):
        close(getattr(saved, name).cpu(), getattr(rows, name), 6e-6)
    # The gradient of a logit, its product with a weight, and the sum are rounded to bfloat16: where one pair makes most
    # of a gradient, they may all be off by half a unit.
    tolerance, doubt = 2e-5 if dtype == "float32" else 3 * 2**-9, in_doubt(grad, *exact, **known)
    for name in wrt:
        near(getattr(grads, name).double().cpu(), getattr(expected, name), tolerance, doubt[name])
    return saved


@pytest.fixture(params=["own", "own without gates", "own without streams", "portable"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An architecture's own kernels, where it has some, those that compute scores again, those whose blocks are one
    warpgroup, and the portable ones."""

    def forget() -> None:  # what is kept was planned for another family
        plan.make_plan.cache_clear()
        for kept in (call._runners, call._checked, call._looks):
            kept.clear()

    forget()
    unwanted: Callable[[Any], bool] = {
        "own": lambda kernel: False,
        "own without gates": lambda kernel: getattr(kernel, "keeps_gates", False),
        "own without streams": lambda kernel: getattr(kernel, "streams", False),
        "portable": lambda kernel: kernel.family == "sm90",
    }[request.param]
    for kind, kernels in KERNELS.items():
        monkeypatch.setitem(KERNELS, kind, tuple(x for x in kernels if not unwanted(x)))
    yield
    forget()


@pytest.mark.gpu
@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("name", list(settings(np.random.default_rng(0))))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_on_a_gpu(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, dtype: str, name: str) -> None:
    monkeypatch.setattr(plan, "BITS_BYTES", int(rng.integers(1, 1 << 16)))  # of some rows at a time
    sizes, options = settings(rng, 150, 170)[name]
    x = make(rng, **{"M": 150, "N": 170, "T": 72, "D": 40, **sizes})
    if name.startswith("no weights"):
        x = (*x[:4], None)
    saved = check_on_gpu(x, rng, dtype, **options)
    if dtype == "bfloat16":
        lse = saved.teacher_lse.cpu().numpy()
        lse = lse + 3 * rng.random(lse.shape, np.float32)
        lse[0, 0], lse[1, :, 4], lse[1, 1] = np.inf, -np.inf, np.inf
        check_on_gpu(x, rng, dtype, teacher_lse=lse, **options)


@pytest.mark.gpu
@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("dims", [(64, 32), (77, 41), (128, 128), (192, 72), (320, 256), (576, 128)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_head_dims_on_a_gpu(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, dtype: str, dims: tuple[int, int]
) -> None:
    monkeypatch.setattr(plan, "STRIP_BYTES", 1 << 16)  # several strips
    monkeypatch.setattr(plan, "GATED_BYTES", 0)
    monkeypatch.setattr(plan, "LEAST_GATED_BYTES", int(rng.integers(1, 1 << 19)))
    x = make(rng, T=dims[0], D=dims[1], M=210, N=140, I=3, K=1)
    ropes = {
        "teacher_q_rope": rng.standard_normal((2, 4, 210, 16)),
        "teacher_k_rope": rng.standard_normal((2, 1, 140, 16)),
    }
    check_on_gpu(x, rng, dtype, causal=True, **ropes)


@pytest.mark.gpu
@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("dims", [(64, 32), (128, 128), (192, 72), (200, 128)])
@pytest.mark.parametrize("heads", [(5, 1, 1), (4, 4, 2), (6, 2, 1), (6, 2, 3)])
def test_many_tiles_on_a_gpu(
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    dims: tuple[int, int],
    heads: tuple[int, int, int],
) -> None:
    """Shares of keys of several tiles, and strips that begin in the midst of tiles that lie together."""
    monkeypatch.setattr(plan, "STRIP_BYTES", 3 * 64 * 832 * 2 * 2)
    monkeypatch.setattr(plan, "GATED_BYTES", 0)
    monkeypatch.setattr(plan, "LEAST_GATED_BYTES", int(rng.integers(1, 1 << 21)))
    monkeypatch.setattr(indexer_stream_sm90, "MOST_STATES", int(rng.choice([2, 4, 128])))
    x = make(rng, T=dims[0], D=dims[1], M=290, N=780, H=heads[0], K=heads[1], I=int(rng.integers(1, 4)) * heads[2])
    groups = {"head_groups": heads[2]} if heads[2] > 1 else {}
    check_on_gpu(x, rng, "bfloat16", causal=True, q_offset=int(rng.integers(-60, 500)), **groups)


@pytest.mark.gpu
@pytest.mark.usefixtures("family")
def test_packed_sequences_on_a_gpu(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    x = make(rng, B=1, M=200, N=230)
    ends = np.array([[0, 70, 70, 150, 190], [0, 61, 90, 150, 201]], np.int32)
    options: dict[str, Any] = {"causal": True, "index_scale": 0.4, "topk_relative": True}
    ids = rng.integers(-2, 90, (200, 33))
    packed = [torch.from_numpy(a[0].swapaxes(0, 1) if a.ndim > 2 else a).cuda() for a in x]
    more = {"cu_seqlens_q": ends[0], "cu_seqlens_k": ends[1].astype(np.int64), "topk_indices": ids}
    there = {name: torch.from_numpy(a).cuda() for name, a in more.items()}
    value, grads = streamkl_cupy.indexer_kl_value_and_grad(*packed, reduction="sum", **there, **options)
    known = {**more, "topk_indices": ids[None], **options}
    rows = reference.forward(*x, **known)
    close(value.cpu(), np.asarray(rows.kl.sum()), 4e-6)
    expected = reference.backward(np.ones((1, 1, 200)), *x, **known)
    doubt = in_doubt(np.ones((1, 1, 200)), *x, **known)
    for found, name in zip(grads, WRT, strict=True):
        near(found.cpu().swapaxes(0, 1), getattr(expected, name)[0], 2e-5, doubt[name])
    target = streamkl_cupy.indexer_target(*packed[:2], rows=(17, 133), causal=True, topk_relative=True, **there)
    known.pop("index_scale")
    close(target.cpu(), reference.target(*x[:2], **known)[0, 0, 17:133], 1e-5)


@pytest.mark.gpu
@pytest.mark.usefixtures("family")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_not_a_number_on_a_gpu(rng: np.random.Generator, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    there = rng.random((2, 170)) < 0.5
    there[:, :3] = True
    clean = make(rng, M=150, N=170, T=64, D=32)
    poisoned = [a.copy() for a in clean]
    poisoned[1].swapaxes(1, 2)[~there], poisoned[3].swapaxes(1, 2)[~there] = np.nan, np.inf
    weight = np.ones((2, 150), np.float32)
    weight[0, 7] = 0
    options: dict[str, Any] = {"index_scale": 0.4, "causal": True}
    options |= {"key_mask": torch.from_numpy(there).cuda(), "row_weight": torch.from_numpy(weight).cuda()}
    poisoned[2][0, :, 7], poisoned[0][0, 1, 7] = np.nan, np.inf
    found = [
        streamkl_cupy.indexer_kl_value_and_grad(*(on_gpu(a, dtype) for a in x), **options) for x in (clean, poisoned)
    ]
    assert found[0][0] == found[1][0]
    for i, (a, b) in enumerate(zip(found[0][1], found[1][1], strict=True)):
        if i != 1:
            assert not b[0, :, 7].any()
        assert torch.equal(a, b)
    # Where somebody looks, it shows.
    for i, at in enumerate([(0, 1, 9), (0, 1, 4), (0, 2, 9), (0, 0, 4), (0, 2, 9)]):
        for bad in (np.nan, np.inf, -np.inf):
            x = [a.copy() for a in clean]
            x[i][at] = bad
            rows = streamkl_cupy.indexer_kl_forward(*(on_gpu(a, dtype) for a in x), index_scale=0.4)
            seen = rows.kl.isnan().cpu()
            assert seen[0, 9], (i, bad)
            assert int(seen.sum()) == (1 if i in (0, 2, 4) else 150), (i, bad)


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["causal", "groups", "rotary", "wide", "all heads"])
def test_gathered_keys_on_a_gpu(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, name: str, deterministic: bool
) -> None:
    monkeypatch.setattr(plan, "BITS_BYTES", int(rng.integers(1, 1 << 16)))  # of some rows at a time
    monkeypatch.setattr(plan, "LIST_BYTES", int(rng.integers(1, 1 << 19)))
    M, N, chosen = 150, 700, int(rng.integers(1, 200))
    n: dict[str, int] = {"H": int(rng.integers(65, 129)), "K": 1, "I": int(rng.integers(1, 65)), "T": 136, "D": 72}
    options: dict[str, Any] = {"topk_indices": rng.integers(-1, N, (2, M, chosen)), "relu": bool(rng.integers(2))}
    if name == "causal":
        options |= {"causal": True, "key_mask": rng.random((2, N)) < 0.7}
    elif name == "groups":
        n |= {"H": 2 * n["H"], "I": 2 * min(n["I"], 9), "J": 2, "K": 2}
        ids, lengths = rng.integers(-1, N, (2, 2, M, chosen)), rng.integers(-1, chosen + 2, (2, 2, M))
        options |= {"head_groups": 2, "topk_indices": ids, "topk_length": lengths}
    elif name == "rotary":
        n |= {"T": 192}
        ropes = rng.standard_normal((2, n["H"], M, 64)), rng.standard_normal((2, 1, N, 64))
        options |= dict(zip(("teacher_q_rope", "teacher_k_rope"), ropes, strict=True))
    elif name == "wide":
        n |= {"T": 576, "D": 128}
    else:
        n |= {"H": 128, "I": 64, "T": 64, "D": 32}
    x = make(rng, M=M, N=N, **n)
    operands = [on_gpu(a, "bfloat16") for a in x]
    there = {k: on_gpu(v, "bfloat16") if isinstance(v, np.ndarray) else v for k, v in options.items()}
    said = str(streamkl_cupy.indexer_kl_plan(*operands, index_scale=0.1, deterministic=deterministic, **there))
    assert ("indexer_gathered" in said, "indexer_listed" in said) == (True, not deterministic), said
    any_order = () if deterministic else ("index_k",)
    saved = check_on_gpu(
        x, rng, "bfloat16", any_order=any_order, index_scale=0.1, deterministic=deterministic, **options
    )
    lse = saved.teacher_lse.cpu().numpy()
    lse = lse + rng.random(lse.shape, np.float32)
    lse[0, 0], lse[1, :, 4], lse[1, 1] = np.inf, -np.inf, np.inf
    check_on_gpu(
        x, rng, "bfloat16", any_order=any_order, index_scale=0.1, deterministic=deterministic, teacher_lse=lse,
        **options,
    )  # fmt: skip


@pytest.mark.gpu
def test_autograd_and_cupy_on_a_gpu(rng: np.random.Generator) -> None:
    torch, cupy = pytest.importorskip("torch"), pytest.importorskip("cupy")
    x = make(rng, M=150, N=170)
    options: dict[str, Any] = {"index_scale": 0.4, "causal": True}
    value, grads = streamkl_cupy.indexer_kl_value_and_grad(*x, **options)
    there = [torch.from_numpy(a).cuda() for a in x]
    for a in there[2:]:
        a.requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        loss = streamkl_cupy.indexer_kl(*there, reduction="mean", **options)
        loss.backward()
    stream.synchronize()
    assert abs(loss.item() - float(value)) < 4e-6
    found, mine = streamkl_cupy.indexer_kl_value_and_grad(*map(cupy.asarray, x), **options)
    assert isinstance(found, cupy.ndarray)
    assert abs(float(found) - float(value)) < 4e-6
    doubt = in_doubt(np.full((2, 1, 150), 1 / 300), *x, **options)
    for a, b, c, d in zip(there[2:], mine, grads, doubt.values(), strict=True):
        near(a.grad.cpu(), c, 2e-5, d)
        near(cupy.asnumpy(b), c, 2e-5, d)
    half = [a.detach().half() for a in there]
    kl = streamkl_cupy.indexer_kl(*half, **options)
    close(kl.cpu(), reference.forward(*(a.double().cpu().numpy() for a in half), **options).kl, 6e-6)


@pytest.mark.gpu
def test_float16_gradients_on_a_gpu(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    x = make(rng, M=150, N=170, T=64, D=72, I=5)
    if torch.cuda.get_device_capability() == (9, 0):
        # Far below what float16 holds before they are multiplied by queries and keys, and then well within: of what it
        # holds with few bits, rounding alone would be more than is allowed.
        check_on_gpu((*x[:2], x[2] * 64, x[3] * 64, x[4] * 1e-4), rng, "float16", causal=True)
    else:
        with pytest.raises(NotImplementedError, match="Cast index_q and index_k"):
            streamkl_cupy.indexer_kl_value_and_grad(*(on_gpu(a, "float16") for a in x), index_scale=0.4)


@pytest.mark.gpu
def test_a_graph_is_captured_after_warmup_alone(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    first, second = make(rng, M=150, N=170), make(rng, M=150, N=170)
    there = [torch.from_numpy(a.copy()).cuda() for a in first]
    options: dict[str, Any] = {"index_scale": 0.4 + 0.01 * rng.random(), "causal": True}
    torch.cuda.synchronize()
    with pytest.raises(CaptureError, match="indexer_kl_warmup"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        # The product: torch warns of a graph without a node.
        streamkl_cupy.indexer_kl_value_and_grad(there[0] * 1, *there[1:], **options)
    streamkl_cupy.indexer_kl_warmup(*there, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value, grads = streamkl_cupy.indexer_kl_value_and_grad(*there, **options)
    for numbers in (second, first):
        for a, b in zip(there, numbers, strict=True):
            a.copy_(torch.from_numpy(b))
        graph.replay()
        expected, others = streamkl_cupy.indexer_kl_value_and_grad(*numbers, **options)
        assert abs(value.item() - float(expected)) < 4e-6
        doubt = in_doubt(np.full((2, 1, 150), 1 / 300), *numbers, **options)
        for a, b, d in zip(grads, others, doubt.values(), strict=True):
            near(a.cpu(), b, 2e-5, 2 * d)


@pytest.mark.gpu
@pytest.mark.parametrize("framework", ["jax", "guest"])
def test_jax_and_guests_on_a_gpu(rng: np.random.Generator, framework: str) -> None:
    xp = pytest.importorskip({"jax": "jax.numpy", "guest": "cupy"}[framework])
    x = make(rng, M=150, N=170)
    options: dict[str, Any] = {"index_scale": 0.4, "causal": True}
    there: list[Any] = [xp.asarray(a) if framework == "jax" else Own(xp.asarray(a)) for a in x]

    def number(a: Any) -> Any:
        return np.asarray(a if framework == "jax" else a.x.get(), np.float64)

    value, grads = streamkl_cupy.indexer_kl_value_and_grad(*x, **options)
    doubt = in_doubt(np.full((2, 1, 150), 1 / 300), *x, **options)
    ways = [lambda: streamkl_cupy.indexer_kl_value_and_grad(*there, **options)]
    if framework == "jax":
        jax = pytest.importorskip("jax")

        def loss(*student: Any) -> Any:
            return streamkl_cupy.indexer_kl(*there[:2], *student, reduction="mean", **options)

        both = jax.value_and_grad(loss, (0, 1, 2))
        ways += [lambda: both(*there[2:]), lambda: jax.jit(both)(*there[2:])]
    for way in ways:
        found, mine = way()
        assert abs(number(found) - float(value)) < 4e-6
        for b, c, d in zip(mine, grads, doubt.values(), strict=True):
            near(number(b), c, 2e-5, 2 * d)
    some = streamkl_cupy.indexer_target(*there[:2], causal=True, rows=(3, 140))
    close(number(some), streamkl_cupy.indexer_target(*x[:2], causal=True, rows=(3, 140)), 4e-6)
    stats = streamkl_cupy.indexer_kl(*there, index_scale=0.4, causal=True, return_stats=True)
    expected = streamkl_cupy.indexer_kl(*x, index_scale=0.4, causal=True, return_stats=True)
    for a, b in zip(stats[:4], expected, strict=False):
        close(number(a), b, 4e-6)


def test_bits_of_bfloat16_are_read_as_such(rng: np.random.Generator) -> None:
    x = make(rng, "bfloat16")
    wide = [widen(a.view(np.uint16), np.empty(a.shape, np.float32)) for a in x]
    np.testing.assert_array_equal(narrow(wide[0], np.dtype(np.uint16)), x[0].view(np.uint16))
    kl, expected = (streamkl_cupy.indexer_kl(*a, index_scale=0.3) for a in (x, wide))
    np.testing.assert_array_equal(kl, expected)


PUBLIC = (
    *("indexer_kl", "indexer_kl_forward", "indexer_kl_backward", "indexer_kl_value_and_grad"),
    *("indexer_target", "indexer_kl_plan", "indexer_kl_warmup"),
)


@pytest.mark.parametrize("name", PUBLIC)
def test_signatures_are_those_of_the_table(name: str) -> None:
    """And every option is documented."""
    function = getattr(streamkl_cupy, name)
    op = INDEXER_TARGET if name == "indexer_target" else INDEXER_KL
    given = inspect.signature(function).parameters
    student = ("index_scale", "relu", "deterministic")
    defaults = {n: x for n, x in IndexOptions._field_defaults.items() if n != "rows" or op is INDEXER_TARGET}
    for option, default in defaults.items():
        if op is INDEXER_TARGET and option in student:
            continue
        assert given[option].default == (inspect.Parameter.empty if option == "index_scale" else default), option
    assert {x.name for x in op.operands} <= set(given)
    for option in given:
        assert re.search(rf"^ +{option}: \S", inspect.getdoc(function) or "", re.M), option

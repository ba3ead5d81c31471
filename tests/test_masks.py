"""Every mask and combination of masks against the dense reference, on every backend, and what bad ones are told."""

from __future__ import annotations

import functools
import itertools
import zlib
from typing import Any

import numpy as np
import pytest
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import streamkl_cupy
from streamkl_cupy import numpy_backend, patterns
from streamkl_cupy.call import Call
from streamkl_cupy.ops import ATTENTION_KL
from streamkl_cupy.options import MASK_ARRAYS
from streamkl_cupy.problem import INPUT_NAMES
from streamkl_cupy.rules import masks
from streamkl_cupy.rules.masks import MASKS, Scene
from streamkl_cupy.rules.masks.blocks import drawn_pattern
from streamkl_cupy.testing import reference
from streamkl_cupy.testing.problems import MASK_OPTIONS, Case, cumulative, make, upstream

Array = NDArray[Any]

# Each part, and what combines with what: each word adds its options, `mask_options` says which.
KINDS = (
    *MASKS,
    "window causal",
    "window offset",
    "head blocks",
    "packed causal",
    "packed window",
    "packed offset",
    "lengths keys",
    "lengths query_lengths causal",
    "keys query_mask window",
    "blocks causal",
    "head blocks window causal",
    "head blocks lengths",
    "blocks keys",
    "head blocks keys lengths query_lengths query_mask window offset",
)


def mask_options(rng: np.random.Generator, kind: str, B: int, H: int, M: int, N: int) -> dict[str, Any]:
    """Random options of a kind, for inputs of these extents."""
    words, found = kind.split(), dict[str, Any]()
    for word in words:
        if word not in ("offset", "head"):
            found |= MASK_OPTIONS[word](rng, B, M, N)
    if "offset" in words:
        found.setdefault("causal", "window" not in words)
        found["q_offset"] = int(rng.integers(-M - 3, N + 3))
    if "head" in words:
        found["block_mask"] = drawn_pattern(rng, H, M, N)
    return found


def make_masked(rng: np.random.Generator, kind: str, name: str = "gaussian", **shape: Any) -> Case:
    """A random problem of a kind; `shape` overrides."""
    heads = [(1, 1, 1), (2, 2, 1), (4, 2, 4), (6, 3, 2)][int(rng.integers(4))]
    if "H" in shape:
        heads = shape["H"], 1, shape["H"]
    full = {
        "B": 1 if "packed" in kind else int(rng.integers(1, 4)),
        "H": heads[0],
        "teacher_key_heads": heads[1],
        "student_key_heads": heads[2],
        "M": int(rng.integers(1, 90)),
        "N": int(rng.integers(1, 200)),
        "D_t": 16,
        "D_s": 32,
        "seed": int(rng.integers(2**31)),
        "layout": str(rng.choice(["bhnd", "bnhd"])),
        **shape,
    }
    options = mask_options(rng, kind, full["B"], full["H"], full["M"], full["N"])
    return make(name, **full, **options)


def rows_of(case: Case) -> tuple[int, ...]:
    return case.arrays[0].shape[:-1]


# Against the dense reference


ANY = {
    "seed": st.integers(0, 2**32 - 1),
    "kind": st.sampled_from(KINDS),
    "name": st.sampled_from(["gaussian", "realistic", "near_equal", "rising"]),
    "dtypes": st.sampled_from(["float32", "float16", "bfloat16", ("bfloat16", "float32")]),
}


@examples(120)
@given(tiles=st.booleans(), **ANY)
def test_random_problems(numpy_only: Any, seed: int, kind: str, name: str, dtypes: Any, tiles: bool) -> None:
    rng = np.random.default_rng(seed)
    case = make_masked(rng, kind, name, dtypes=dtypes)
    # Tiles of 16 x 32 show what a problem of one tile hides; a scale of its own has the problem planned with them.
    small = (("QUERY_TILE", 16), ("KEY_TILE", 32), ("BLOCK_ELEMENTS", 1024), ("LONGEST_KEY_TILE", 64))
    with pytest.MonkeyPatch.context() as patch:
        if tiles:
            for key, value in small:
                patch.setattr(numpy_backend.plan, key, value)
            case = case._replace(options={"teacher_scale": float(rng.uniform(0.2, 0.3)), **case.options})
        numpy_only.judge(case, upstream(rng, rows_of(case)))


@pytest.mark.gpu
@pytest.mark.long
@examples(25)  # most of them compile kernels of their own
@given(**ANY)
def test_random_problems_on_a_gpu(cupy_only: Any, seed: int, kind: str, name: str, dtypes: Any) -> None:
    rng = np.random.default_rng(seed)
    case = make_masked(rng, kind, name, dtypes=dtypes)
    cupy_only.judge(case, upstream(rng, rows_of(case)))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_on_every_backend(backend: Any, rng: np.random.Generator, turn: Any, kind: str) -> None:
    # Kernels and traces cost a compilation each: NumPy and torch show all dtypes, CuPy two by turns, of which the other
    # frameworks of a GPU, which share its kernels, take the first.
    dtypes = backend.dtypes
    if backend.name not in ("numpy", "torch-cpu"):
        dtypes = [turn(dtypes, KINDS.index(kind), i) for i in range(2 if backend.name == "cupy" else 1)]
    for dtype in dtypes:
        case = make_masked(rng, kind, dtypes=dtype, H=4, M=75, N=150, D_s=16)
        backend.judge(case, upstream(rng, rows_of(case)))


@pytest.mark.parametrize(
    "kind", ["window causal", "lengths query_lengths", "keys query_mask", "head blocks", "packed causal"]
)
def test_several_tiles(core: Any, rng: np.random.Generator, kind: str) -> None:
    case = make_masked(
        rng, kind, H=2, M=700, N=1100, D_t=64, D_s=64, teacher_key_heads=1, student_key_heads=2, dtypes="bfloat16"
    )
    core.judge(case, upstream(rng, rows_of(case)))


@pytest.mark.parametrize("kind", ["lengths query_lengths", "keys query_mask", "packed window", "head blocks keys"])
def test_float64(numpy_only: Any, rng: np.random.Generator, kind: str) -> None:
    case = make_masked(rng, kind, dtypes="float64")
    numpy_only.judge(case, upstream(rng, rows_of(case)))


@pytest.mark.parametrize("kind", ["window", "lengths query_lengths", "keys query_mask"])
@pytest.mark.parametrize("rank", [2, 3])
def test_fewer_axes(backend: Any, rng: np.random.Generator, kind: str, rank: int) -> None:
    case = make_masked(rng, kind, B=1, H=1 if rank == 2 else 4, layout="bhnd")
    lead = (0,) * (4 - rank)
    options = dict(case.options)
    options |= {name: options[name][0] for name in ("key_mask", "query_mask") if name in options}
    a, b, c, d = (x[lead] for x in case.arrays)
    backend.judge(case._replace(arrays=(a, b, c, d), options=options), upstream(rng, a.shape[:-1]))


# What masked memory holds does not matter


@pytest.mark.parametrize(
    "kind",
    [
        "lengths window",
        "keys",
        "lengths keys",
        "window causal",
        "packed",
        "head blocks causal",
        "lengths query_lengths causal",
        "query_mask window",
        "head blocks keys query_mask",
    ],
)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_masked_memory_may_hold_anything(backend: Any, rng: np.random.Generator, kind: str, bad: float) -> None:
    case = make_masked(
        rng, kind, B=1, H=2, M=70, N=90, teacher_key_heads=1, student_key_heads=2, dtypes="float32", layout="bhnd"
    )
    masked_memory_does_not_matter(backend, rng, case, bad)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_keys_of_rows_that_are_not_there_may_hold_anything(backend: Any, rng: np.random.Generator, bad: float) -> None:
    """Keys at both ends are seen by nobody, because the rows that would see them are masked: those outside the span of
    the mask, and in a tile with others."""
    rows = np.ones((1, 70), np.bool_)
    rows[:, [*range(5), 30, *range(65, 70)]] = False
    case = make(B=1, H=2, M=70, N=70, student_key_heads=2, window=(2, 2), query_mask=rows)
    masked_memory_does_not_matter(backend, rng, case, bad)


def masked_memory_does_not_matter(backend: Any, rng: np.random.Generator, case: Case, bad: float) -> None:
    """The same results and gradients with it spoilt, of one batch entry with two heads."""
    mask = {k: v for k, v in case.options.items() if k not in ("layout", "teacher_scale", "student_scale")}
    packed = "cu_seqlens_q" in case.options
    M, N = (x.shape[0 if packed else -2] for x in case.arrays[:2])
    seen = np.broadcast_to(reference.visible((1, 2, M, N), mask), (1, 2, M, N))
    row_used, key_used = seen.any(axis=-1), seen.any(axis=2)
    spoilt = []
    for name, x in zip(INPUT_NAMES, case.arrays, strict=True):
        used = row_used if name.endswith("_q") else key_used
        heads = x.shape[1]  # the same axis in both layouts
        used = used.reshape(1, heads, 2 // heads, -1).any(axis=2)
        x = np.array(x)
        x[~(used[0].T if packed else used)] = bad
        spoilt.append(x)
    grad = upstream(rng, rows_of(case), "ones")
    grad_bad = np.where(row_used[0].T if packed else row_used, grad, np.nan).astype(np.float32)
    options = backend.options(case)
    outcomes = []
    for arrays, g in ((case.arrays, grad), (spoilt, grad_bad)):
        x = [backend.array(a, "float32") for a in arrays]
        rows = streamkl_cupy.attention_kl_forward(*x, **options)
        grads = streamkl_cupy.attention_kl_backward(
            backend.array(g, "float32"), *x, saved=rows, wrt=INPUT_NAMES, **options
        )
        outcomes.append([backend.numpy(y) for y in (*rows, *grads)])
    for clean, dirty in zip(*outcomes, strict=True):
        np.testing.assert_allclose(dirty, clean, rtol=1e-5, atol=1e-6)


def test_visible_nan_is_not_hidden(backend: Any, rng: np.random.Generator) -> None:
    case = make_masked(rng, "lengths", B=2, H=1, M=5, N=40, teacher_key_heads=1, student_key_heads=1, layout="bhnd")
    case.options["key_lengths"][:] = 20, 30
    case.arrays[1][:, :, 25] = np.nan
    kl = backend.numpy(streamkl_cupy.attention_kl(*backend.arrays(case), **backend.options(case)))
    assert np.isfinite(kl[0]).all()
    assert np.isnan(kl[1]).all()


@pytest.mark.parametrize("seen", [0, 63, 64, 127, 1000, 2047])
def test_one_key_among_many(core: Any, rng: np.random.Generator, seen: int) -> None:
    """All tiles but one are hidden: both distributions sit on one key."""
    key_mask = np.zeros((1, 2048), np.bool_)
    key_mask[0, seen] = True
    case = make(M=9, N=2048, D_t=16, seed=int(rng.integers(2**31)), key_mask=key_mask)
    rows, grads = core.judge(case, upstream(rng, (1, 1, 9)))
    np.testing.assert_allclose(core.numpy(rows.kl), 0, atol=1e-6)
    assert all(np.abs(core.numpy(x)).max() < 1e-5 for x in grads)


EMPTY: dict[str, dict[str, Any]] = {
    "lengths": {"key_lengths": np.array([0, 7], np.int32)},
    "keys": {"key_mask": np.zeros((2, 9), np.bool_)},
    "rows": {"query_lengths": np.array([0, 3], np.int32), "key_lengths": np.array([9, 7], np.int32)},
    "masked rows": {"query_mask": np.array([[False] * 5, [True, False, True, True, False]])},
    "window": {"window": (2, 0), "q_offset": 40},
    "blocks": {"block_mask": patterns.from_dense(np.zeros((1, 1, 1), bool), queries=5, keys=9, block=16)},
}


@pytest.mark.parametrize("name", EMPTY)
def test_empty_rows(backend: Any, name: str) -> None:
    case = make(B=2, H=2, M=5, N=9, D_t=8, **EMPTY[name])
    rows, grads = backend.judge(case, np.ones((2, 2, 5), np.float32))
    kl, lse = backend.numpy(rows.kl), backend.numpy(rows.teacher_lse)
    empty = np.isneginf(lse)
    assert empty[0].all()
    assert (kl[empty] == 0).all()
    for x in grads:
        assert (backend.numpy(x)[0] == 0).all()
    options = backend.options(case)
    mean = streamkl_cupy.attention_kl(*backend.arrays(case), reduction="mean", **options)
    assert float(backend.numpy(mean)) == pytest.approx(kl[~empty].mean() if (~empty).any() else 0, rel=1e-5)


@pytest.mark.parametrize("extent", ["B", "M", "N"])
@pytest.mark.parametrize(
    "kind", ["window", "lengths", "keys", "blocks", "packed", "lengths query_lengths keys query_mask window"]
)
def test_nothing_at_all(backend: Any, rng: np.random.Generator, kind: str, extent: str) -> None:
    if kind == "packed" and extent == "B":
        pytest.skip("packed inputs have no batch axis")
    case = make_masked(rng, kind, **{"B": 1, "M": 5, "N": 6, "H": 2, "layout": "bhnd", extent: 0})
    rows, grads = backend.judge(case, np.ones(rows_of(case), np.float32))
    assert (backend.numpy(rows.kl) == 0).all()
    assert all((backend.numpy(x) == 0).all() for x in grads)


def strided_masks(backend: Any, rng: np.random.Generator) -> list[tuple[Any, Array]]:
    """Views (B, N) that are not contiguous, with their values."""
    values = rng.random((4, 96)) < 0.6
    x = backend.mask_array(values)
    expand = x[1].expand(3, 96) if hasattr(x, "expand") else backend.xp.broadcast_to(x[1], (3, 96))
    found = [
        (x[:, :48], values[:, :48]),
        (x[:, 1::2], values[:, 1::2]),
        (x[::2], values[::2]),
        (x.T[3:50:9], values.T[3:50:9]),
        (expand, np.broadcast_to(values[1], (3, 96))),
    ]
    return [*found, (x[::-1, ::-1], values[::-1, ::-1])] if backend.has_negative_strides else found


def test_masks_of_keys_through_any_strides(backend: Any, rng: np.random.Generator) -> None:
    if not backend.has_views:
        pytest.skip("its arrays have no strides")
    for view, values in strided_masks(backend, rng):
        B, N = values.shape
        case = make(B=B, H=2, M=9, N=N, D_t=8, seed=int(rng.integers(2**31)), key_mask=np.ascontiguousarray(values))
        backend.judge(case, upstream(rng, rows_of(case)), key_mask=view)
        one = case._replace(arrays=tuple(x[0] for x in case.arrays), options={"key_mask": case.options["key_mask"][0]})
        backend.judge(one, upstream(rng, rows_of(one)), key_mask=view[0])


@pytest.mark.parametrize("name", MASK_ARRAYS)
def test_what_is_no_array_is_told_how_to_become_one(backend: Any, name: str) -> None:
    """The remedy, run as it stands, gives an array that the call takes."""
    packed = name.startswith("cu_seqlens")
    x = backend.arrays(make(B=2, H=1, M=4, N=4, D_t=8))
    x = [a[0].swapaxes(0, 1) for a in x] if packed else x
    values: Any = [[True] * 4] * 2 if name.endswith("mask") else [0, 4]
    bounds = backend.mask_array(np.array([0, 4], I32))
    others = {other: bounds for other in ("cu_seqlens_q", "cu_seqlens_k") if packed and other != name}
    rows = streamkl_cupy.attention_kl_forward(
        *x, **others, **{name: backend.mask_array(np.array(values, None if name.endswith("mask") else I32))}
    )
    for function, arguments in (
        (streamkl_cupy.attention_kl, x),
        (streamkl_cupy.attention_kl_forward, x),
        (functools.partial(streamkl_cupy.attention_kl_backward, saved=rows), (rows.kl, *x)),
        (streamkl_cupy.attention_kl_value_and_grad, x),
    ):
        with pytest.raises(TypeError, match=rf"{name} is a list; allowed is a {backend.module} array") as caught:
            function(*arguments, **{name: values}, **others)
        remedy = str(caught.value).partition("Make one: ")[2]
        names = {backend.module: backend.xp, "student_q": x[2], name: values}
        function(*arguments, **{name: eval(remedy, names)}, **others)


def test_contiguous_is_said_with_its_remedy(backend: Any) -> None:
    if not backend.has_views:
        pytest.skip("its arrays have no strides")
    x = backend.arrays(make(B=2, H=1, M=4, N=4, D_t=8))
    packed = [a[0].swapaxes(0, 1) for a in x]
    lengths, bounds, good = (backend.mask_array(np.array(v, I32)) for v in ([1, 9, 2, 9], [0, 9, 4, 9], [0, 4]))
    expand = lengths[:1].expand(2) if hasattr(lengths, "expand") else backend.xp.broadcast_to(lengths[:1], (2,))
    remedy = r"{0}\.contiguous\(\)" if backend.module == "torch" else rf"{backend.module}\.ascontiguousarray\({{0}}\)"
    for name, arrays, options in (
        ("key_lengths", x, {"key_lengths": lengths[::2]}),
        ("query_lengths", x, {"query_lengths": expand}),
        ("cu_seqlens_q", packed, {"cu_seqlens_q": bounds[::2], "cu_seqlens_k": good}),
        ("cu_seqlens_k", packed, {"cu_seqlens_k": bounds[::2], "cu_seqlens_q": good}),
    ):
        with pytest.raises(ValueError, match=rf"{name}: stride [02] .* contiguous array\. Pass {remedy.format(name)}$"):
            streamkl_cupy.attention_kl(*arrays, **options)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["lengths query_lengths causal", "query_mask", "packed causal", "head blocks"])
def test_reductions(backend: Any, rng: np.random.Generator, kind: str, reduction: str) -> None:
    case = make_masked(rng, kind, M=30, N=20)
    weight = rng.random(rows_of(case)).astype(np.float32)
    expected = reference.forward(*case.arrays, **case.options)
    total = reference.reduce(expected.kl, expected.teacher_lse, weight, reduction)
    x, options, w = backend.arrays(case), backend.options(case), backend.array(weight, "float32")
    got = streamkl_cupy.attention_kl(*x, row_weight=w, reduction=reduction, **options)
    assert float(backend.numpy(got)) == pytest.approx(float(total), rel=1e-4, abs=1e-6)
    value, grads = streamkl_cupy.attention_kl_value_and_grad(*x, row_weight=w, reduction=reduction, **options)
    assert float(backend.numpy(value)) == pytest.approx(float(total), rel=1e-4, abs=1e-6)
    seen = ~np.isneginf(expected.teacher_lse)
    mass = np.where(seen, weight, 0).sum() if reduction == "mean" else 1.0
    wanted = reference.backward(np.where(seen, weight, 0) / max(mass, 1e-30), *case.arrays, **case.options).value
    for name in ("student_q", "student_k"):
        found = backend.numpy(getattr(grads, name))
        np.testing.assert_allclose(found, getattr(wanted, name), rtol=2e-3, atol=2e-5)


# Masks that are the same


def same(case: Case, one: dict[str, Any], other: dict[str, Any]) -> None:
    """Two spellings give one problem, so one kernel."""
    first, second = (Call.of(ATTENTION_KL, tuple(case.arrays), o).problem() for o in (one, other))
    assert first.mask == second.mask, (one, other)


def test_spellings_of_the_same_mask() -> None:
    case = make(M=12, N=30)
    same(case, {"window": (-1, 0)}, {"causal": True})
    same(case, {"window": (None, 5)}, {"causal": True, "q_offset": 18 + 5})
    same(case, {"window": (None, None)}, {})
    same(case, {"window": (4, 9), "causal": True}, {"window": [4, 0]})
    same(case, {"window": (4, -1), "causal": True}, {"window": (np.int64(4), 0), "q_offset": 18})
    same(case, {"window": (None, 10**30)}, {"window": (-1, 10**6)})


@pytest.mark.parametrize("window", [(10**9, 10**9), (30, 30), (29, 29), (None, 10**9), (10**30, None)])
def test_windows_wider_than_the_sequence(backend: Any, window: Any) -> None:
    case = make(M=30, N=30, D_t=8)
    x = backend.arrays(case)
    wide = backend.numpy(streamkl_cupy.attention_kl(*x, window=window))
    np.testing.assert_allclose(wide, backend.numpy(streamkl_cupy.attention_kl(*x)), rtol=1e-6, atol=1e-7)
    causal = backend.numpy(streamkl_cupy.attention_kl(*x, window=window, causal=True))
    np.testing.assert_allclose(causal, backend.numpy(streamkl_cupy.attention_kl(*x, causal=True)), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("offset", [-(10**15), -500, 500, 10**15])
@pytest.mark.parametrize("window", [(3, 3), (490, 495), (10**12, 0), (0, 10**12)])
def test_far_offsets(core: Any, window: tuple[int, int], offset: int) -> None:
    core.judge(make(M=20, N=40, D_t=8, window=window, q_offset=offset), np.ones((1, 1, 20), np.float32))


@pytest.mark.parametrize(
    "window, offset, near",
    [
        ((2**62, None), 2**50, {}),
        ((2**41 + 1, None), 2**41, {"window": (1, None), "q_offset": 0}),
        ((None, 2**70), -(2**70), {"causal": True, "q_offset": 0}),
        ((2**41, 2), 2**41 + 1000, {"key_mask": False}),
        ((2, 2**41), -(2**41) - 1000, {"key_mask": False}),
    ],
)
def test_distances_beyond_64_bits(backend: Any, window: Any, offset: int, near: dict[str, Any]) -> None:
    """Where a window ends is an offset and a distance, which may both be far and their sum near."""
    x = backend.arrays(make(M=20, N=20, D_t=8))
    if "key_mask" in near:
        near = {"key_mask": backend.mask_array(np.zeros((1, 20), bool))}
    far = backend.numpy(streamkl_cupy.attention_kl(*x, window=window, q_offset=offset))
    np.testing.assert_array_equal(far, backend.numpy(streamkl_cupy.attention_kl(*x, **near)))


def test_packed_is_each_sequence_alone(backend: Any, rng: np.random.Generator) -> None:
    """With empty sequences, repeated entries, and rows and keys that belong to none."""
    q, k = [5, 0, 13, 1, 0, 7, 0], [9, 4, 2, 0, 0, 30, 0]
    bounds = cumulative(q), cumulative(k)
    case = make(
        H=4, M=sum(q) + 6, N=sum(k) + 3, D_t=16, D_s=8, teacher_key_heads=2, student_key_heads=1, seed=5,
        cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1], causal=True,
    )  # fmt: skip
    rows, grads = backend.judge(case, np.ones((sum(q) + 6, 4), np.float32))
    kl, lse = backend.numpy(rows.kl), backend.numpy(rows.teacher_lse)
    for (q0, q1), (k0, k1) in zip(*map(itertools.pairwise, bounds), strict=True):
        alone = [x[slice(q0, q1) if name.endswith("q") else slice(k0, k1)] for name, x in zip(INPUT_NAMES, case.arrays)]
        expected = streamkl_cupy.attention_kl(*alone, causal=True, layout="bnhd")
        np.testing.assert_allclose(kl[q0:q1], expected, rtol=1e-5, atol=1e-6)
    assert (kl[sum(q) :] == 0).all()
    assert np.isneginf(lse[sum(q) :]).all()
    for name, x in zip(INPUT_NAMES, grads, strict=True):
        assert (backend.numpy(x)[sum(q if name.endswith("q") else k) :] == 0).all()


def test_padded_and_packed_agree(core: Any, rng: np.random.Generator) -> None:
    """Value and gradients of the batch that everybody has, whatever lies behind the lengths of rows and of keys."""
    lengths = [11, 0, 40, 3]
    N, bounds = max(lengths), cumulative(lengths)
    packed = make(H=2, M=sum(lengths), N=sum(lengths), D_t=16, seed=3)
    arrays = [np.ascontiguousarray(x[0].swapaxes(0, 1)) for x in packed.arrays]
    padded = []
    for x in arrays:
        y = np.full((4, N, 2, 16), np.nan, np.float32)
        for b, (start, stop) in enumerate(itertools.pairwise(bounds)):
            y[b, : stop - start] = x[start:stop]
        padded.append(core.array(y, "float32"))
    ends, there = core.mask_array(np.array(lengths, np.int32)), np.arange(N) < np.array(lengths)[:, None]
    one = streamkl_cupy.attention_kl_value_and_grad(
        *(core.array(x, "float32") for x in arrays),
        cu_seqlens_q=core.mask_array(bounds),
        cu_seqlens_k=core.mask_array(bounds),
        reduction="mean",
        wrt=INPUT_NAMES,
    )
    for options in (
        {"key_lengths": ends, "query_lengths": ends},
        {"key_lengths": ends, "query_mask": core.mask_array(there)},
        {"key_mask": core.mask_array(there), "query_lengths": ends},
    ):
        other = streamkl_cupy.attention_kl_value_and_grad(
            *padded, layout="bnhd", reduction="mean", wrt=INPUT_NAMES, **options
        )
        assert float(core.numpy(other[0])) == pytest.approx(float(core.numpy(one[0])), rel=1e-5)
        for x, y in zip(one[1], other[1], strict=True):
            np.testing.assert_allclose(core.numpy(y)[there], core.numpy(x), rtol=1e-4, atol=1e-6)
            assert (core.numpy(y)[~there] == 0).all()


def test_chunks_of_queries(core: Any) -> None:
    """Rows in three calls with offsets of their own are the rows of one call; key gradients add up."""
    case = make(H=2, M=50, N=60, D_t=16, teacher_key_heads=1, seed=2, window=(20, 3))
    g = np.ones((1, 2, 50), np.float32)
    whole = streamkl_cupy.attention_kl_value_and_grad(*core.arrays(case), reduction="sum", window=(20, 3))
    total, keys = 0.0, 0.0
    for start, stop in [(0, 17), (17, 40), (40, 50)]:
        x = [core.array(a[:, :, start:stop] if i % 2 == 0 else a, "float32") for i, a in enumerate(case.arrays)]
        value, grads = streamkl_cupy.attention_kl_value_and_grad(
            *x, reduction="sum", window=(20, 3), q_offset=60 - 50 + start
        )
        total += float(core.numpy(value))
        keys = keys + core.numpy(grads.student_k)
    assert total == pytest.approx(float(core.numpy(whole[0])), rel=1e-5)
    np.testing.assert_allclose(keys, core.numpy(whole[1].student_k), rtol=1e-4, atol=1e-5)
    assert g.shape == (1, 2, 50)


def test_deterministic(core: Any, rng: np.random.Generator) -> None:
    case = make_masked(rng, "head blocks keys", M=80, N=150, H=4)
    x, options = core.arrays(case), core.options(case)
    results = [
        streamkl_cupy.attention_kl_value_and_grad(*x, wrt=INPUT_NAMES, deterministic=True, **options) for _ in range(3)
    ]
    for other in results[1:]:
        assert float(core.numpy(other[0])) == float(core.numpy(results[0][0]))
        for a, b in zip(other[1], results[0][1], strict=True):
            np.testing.assert_array_equal(core.numpy(a), core.numpy(b))


# The teacher's mass


def test_teacher_mass(backend: Any) -> None:
    key_mask = np.zeros((2, 12), np.bool_)
    key_mask[0, 3:7] = True
    case = make(B=2, H=2, M=5, N=12, D_t=8, key_mask=key_mask)
    x = backend.arrays(case)
    dense = streamkl_cupy.attention_kl_forward(*x)
    options = backend.options(case)
    del options["layout"]
    rows = streamkl_cupy.attention_kl_forward(*x, dense_teacher_lse=dense.teacher_lse, **options)
    assert rows._fields == ("kl", "teacher_lse", "student_lse", "teacher_mass")
    q, k = (a.astype(np.float64) for a in case.arrays[:2])
    p = np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(8))
    expected = p[..., 3:7].sum(-1) / p.sum(-1)
    mass = backend.numpy(rows.teacher_mass)
    np.testing.assert_allclose(mass[0], expected[0], rtol=1e-5)
    assert (mass[1] == 0).all()
    other = streamkl_cupy.attention_kl(*x, return_lse=True, dense_teacher_lse=dense.teacher_lse, **options)
    np.testing.assert_array_equal(backend.numpy(other.teacher_mass), mass)
    with pytest.raises(ValueError, match="return_lse=True"):
        streamkl_cupy.attention_kl(*x, dense_teacher_lse=dense.teacher_lse, **options)
    with pytest.raises(ValueError, match="dense_teacher_lse"):
        streamkl_cupy.attention_kl_forward(*x, dense_teacher_lse=dense.teacher_lse[:1], **options)


# The registry, against the definition


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "packed" not in kind])
def test_parts_say_what_the_reference_says(rng: np.random.Generator, kind: str) -> None:
    B, H, M, N = 2, 2, 40, 70
    for _ in range(20):
        options = mask_options(rng, kind, B, H, M, N)
        arrays = {name: options.pop(name) for name in MASK_ARRAYS if name in options}
        x = np.zeros((B, H, M, 4), np.float32), np.zeros((B, H, N, 4), np.float32)
        spec = Call.of(ATTENTION_KL, (*x, *x), {**options, **arrays}).problem().mask
        parts = masks.parts_of(spec)
        assert [part.name for part in parts] == [name for name in MASKS if name in spec.parts]
        scene = Scene(M, N, dict(spec.params), pattern=spec.pattern, heads=range(H), arrays=arrays)
        dense = np.broadcast_to(reference.visible((B, H, M, N), {**options, **arrays}), (B, H, M, N))
        found = np.broadcast_to(masks.visible(parts, scene, np.arange(M), np.arange(N)), dense.shape)
        np.testing.assert_array_equal(found, dense)
        for q0, q1 in [(0, M), (0, 0), (3, 7), (16, 32), (M - 1, M)]:
            k0, k1 = masks.key_range(parts, scene, q0, q1)
            assert 0 <= k0 <= k1 <= N
            inside = dense[:, :, q0:q1]
            assert not np.delete(inside, np.s_[k0:k1], axis=-1).any()
            if q0 == q1:
                continue
            some = masks.holes(parts, scene, q0, q1, k0, k1)
            if some is not None:
                assert some.shape == (k1 - k0,)
                assert not inside[..., k0:k1][..., ~some].any()
            # Stretches that begin and end beside the edges of what all rows see: a tile that is taken for full is read
            # without a look, and one that is not costs time.
            whole = inside.all(axis=(0, 1, 2))
            edges = np.flatnonzero(np.diff(whole)) + 1
            near = np.unique(np.clip([0, 5, N, *(edges[:6, None] + np.arange(-1, 2)).ravel()], 0, N)).tolist()
            for a, b in itertools.combinations(near, 2):
                assert masks.full(parts, scene, q0, q1, a, b) == whole[a:b].all()


def pairs_computed(**options: Any) -> int:
    """Pairs of row and key that the NumPy backend computes logits of, over batch entries and heads."""
    case = make(**options)
    ready = Call.of(ATTENTION_KL, tuple(case.arrays), case.options).ready()
    runner, seen = ready.checked.runner, ready.views.masks
    total = 0
    for segment in runner._segments(seen)[0]:
        for b, h in runner._groups(segment):
            for at in runner._cut(segment, b, h):
                rows = (at.b.stop - at.b.start) * (at.h.stop - at.h.start) * (at.q.stop - at.q.start)
                for tile in runner._blocks.tiles(segment, at):
                    count = tile.k.stop - tile.k.start if isinstance(tile.k, slice) else len(tile.k)
                    total += rows * count
    return total


def test_numpy_work_falls_with_what_is_masked(rng: np.random.Generator) -> None:
    size: dict[str, Any] = {"B": 2, "H": 4, "M": 2048, "N": 2048, "D_t": 8}
    dense = pairs_computed(**size)
    assert dense == 2 * 4 * 2048 * 2048
    assert pairs_computed(**size, causal=True) < 0.8 * dense
    assert pairs_computed(**size, window=(128, 0)) < 0.13 * dense
    assert pairs_computed(**size, key_lengths=np.array([300, 0], np.int32)) == 4 * 2048 * 300
    key_mask = rng.random((2, 2048)) < 0.1
    assert pairs_computed(**size, key_mask=key_mask) == 4 * 2048 * int(key_mask.sum())
    rows = np.array([300, 0], np.int32)
    assert pairs_computed(**size, query_lengths=rows) == dense * 512 // 4096
    assert pairs_computed(**size, query_mask=np.arange(2048) < rows[:, None]) == dense * 512 // 4096
    sparse = patterns.from_dense(rng.random((4, 32, 32)) < 0.125, queries=2048)
    assert pairs_computed(**size, block_mask=sparse) == int(sparse.dense().sum()) * 64 * 64 * 2
    bounds = cumulative([100, 900, 24, 1024])
    packed = pairs_computed(**{**size, "B": 1}, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    assert packed == 4 * (100**2 + 900**2 + 24**2 + 1024**2)


# Plans and warmup


def test_plan_and_warmup_take_masks(rng: np.random.Generator) -> None:
    case = make_masked(rng, KINDS[-1], M=40, N=60)
    streamkl_cupy.plan(*case.arrays, **case.options)
    streamkl_cupy.warmup(*case.arrays, **case.options)

    class Standin:
        def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
            self.shape, self.dtype = shape, dtype

    x = Standin((100, 2, 8), "float32")
    bounds = Standin((4,), "int32")
    streamkl_cupy.plan(x, x, x, x, cu_seqlens_q=bounds, cu_seqlens_k=bounds)
    with pytest.raises(TypeError, match="cu_seqlens_k has dtype int64; allowed is int32"):
        streamkl_cupy.plan(x, x, x, x, cu_seqlens_q=bounds, cu_seqlens_k=Standin((4,), "int64"))
    with pytest.raises(ValueError, match="cu_seqlens_k: 3 entries, but cu_seqlens_q has 4"):
        streamkl_cupy.warmup(x, x, x, x, cu_seqlens_q=bounds, cu_seqlens_k=Standin((3,), "int32"))


# Bad input

I32 = np.int32


def lengths(*values: int) -> dict[str, Any]:
    return {"key_lengths": np.array(values, I32)}


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"window": 5}, TypeError, r"window=5 is an int; allowed is a pair \(left, right\)"),
    ({"window": (1, 2, 3)}, ValueError, r"window=\(1, 2, 3\) has 3 entries; allowed is a pair"),
    ({"window": (1.5, 0)}, TypeError, "window's left=1.5 is a float; allowed is an integer"),
    ({"window": (1, True)}, TypeError, "window's right=True is a bool"),
    ({"window": (1, -2)}, ValueError, "right is -2; allowed are 0 and more, and -1 or None for no limit"),
    ({"q_offset": 3}, ValueError, "q_offset=3 moves the diagonal of causal and window, but there is neither"),
    (lengths(3, -1), ValueError, r"key_lengths\[1\] is -1; allowed are 0 to 9, the number of keys"),
    (lengths(10, 3), ValueError, r"key_lengths\[0\] is 10; allowed are 0 to 9"),
    (lengths(3), ValueError, r"key_lengths: shape \(1,\), but there is one length per batch entry: expected \(2,\)"),
    ({"key_lengths": [3, 4]}, TypeError, "key_lengths is a list; allowed is a numpy array of dtype int32"),
    ({"key_lengths": np.array([3, 4])}, TypeError, r"key_lengths has dtype int64; allowed is int32. Cast it: .*astype"),
    (
        {"key_lengths": np.zeros(4, I32)[::2]},
        ValueError,
        r"key_lengths: stride 2 between its 2 elements; allowed is 1, .* Pass numpy.ascontiguousarray\(key_lengths\)",
    ),
    (
        {"query_lengths": np.array([3, -1], I32)},
        ValueError,
        r"query_lengths\[1\] is -1; .* 0 to 7, the number of query r",
    ),
    ({"query_lengths": np.array([8, 1], I32)}, ValueError, r"query_lengths\[0\] is 8; allowed are 0 to 7"),
    ({"query_lengths": np.array([3], I32)}, ValueError, r"query_lengths: shape \(1,\), .* expected \(2,\)"),
    (
        {"query_lengths": np.array([3, 4])},
        TypeError,
        r"query_lengths has dtype int64; allowed is int32. Cast it: .*asty",
    ),
    ({"query_mask": np.ones((2, 9), bool)}, ValueError, r"query_mask: shape \(2, 9\), .*query row: expected \(2, 7\)"),
    ({"query_mask": np.ones((2, 7))}, TypeError, "query_mask has dtype float64; allowed is bool"),
    ({"key_mask": np.ones((2, 9))}, TypeError, "key_mask has dtype float64; allowed is bool"),
    ({"key_mask": np.ones(9, bool)}, ValueError, r"key_mask: shape \(9,\), .* expected \(2, 9\)"),
    ({"key_mask": np.ones((2, 1), bool)}, ValueError, r"expected \(2, 9\)"),
    (
        {"block_mask": np.ones((1, 1))},
        TypeError,
        r"block_mask is a numpy.ndarray; allowed is a .*BlockPattern.*from_dense",
    ),
    ({"block_mask": patterns.full(queries=7, keys=10)}, ValueError, "for 7 query rows and 10 keys, .* have 7 and 9"),
    (
        {"block_mask": patterns.from_dense(np.ones((3, 1, 1), bool), queries=7, keys=9)},
        ValueError,
        "block_mask is a pattern of 3 heads, but the inputs have 4 query heads; allowed are as many, and 1",
    ),
    ({"cu_seqlens_q": np.array([0, 7], I32)}, ValueError, "cu_seqlens_q came without cu_seqlens_k; .* need both"),
    ({"cu_seqlens_k": np.array([0, 7], I32)}, ValueError, "cu_seqlens_k came without cu_seqlens_q"),
    (
        {"cu_seqlens_q": np.array([0, 7], I32), "cu_seqlens_k": np.array([0, 9], I32)},
        ValueError,
        r"teacher_q: shape \(2, 4, 7, 8\) has 4 axes; with cu_seqlens_q and cu_seqlens_k allowed are 3",
    ),
]


@pytest.mark.parametrize("options, error, text", BAD)
def test_bad_options(options: dict[str, Any], error: type[Exception], text: str) -> None:
    case = make(B=2, H=4, M=7, N=9, D_t=8)
    for function in (streamkl_cupy.attention_kl, streamkl_cupy.attention_kl_value_and_grad):
        with pytest.raises(error, match=text):
            function(*case.arrays, **options)
    rows = np.ones((2, 4, 7), np.float32)
    with pytest.raises(error, match=text):
        streamkl_cupy.attention_kl_backward(rows, *case.arrays, teacher_lse=rows, student_lse=rows, **options)


PACKED_BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"cu_seqlens_q": np.array([1, 7], I32)}, ValueError, "cu_seqlens_q begins with 1; it must begin with 0"),
    (
        {"cu_seqlens_q": np.array([0, 5, 3], I32), "cu_seqlens_k": np.array([0, 5, 9], I32)},
        ValueError,
        "cu_seqlens_q falls from 5 to 3 at position 2",
    ),
    ({"cu_seqlens_k": np.array([0, 10], I32)}, ValueError, "cu_seqlens_k ends at 10, but there are 9 keys"),
    ({"cu_seqlens_q": np.array([0, 8], I32)}, ValueError, "cu_seqlens_q ends at 8, but there are 7 rows"),
    ({"cu_seqlens_q": np.array([0], I32)}, ValueError, r"cu_seqlens_q: shape \(1,\); allowed is \(S \+ 1,\)"),
    ({"cu_seqlens_q": np.array([[0, 7]], I32)}, ValueError, r"cu_seqlens_q: shape \(1, 2\)"),
    ({"cu_seqlens_q": np.array([0, 3, 7], I32)}, ValueError, "cu_seqlens_k: 2 entries, but cu_seqlens_q has 3"),
    ({"cu_seqlens_q": np.array([0, 7])}, TypeError, "cu_seqlens_q has dtype int64; allowed is int32"),
    ({"key_mask": np.ones(9, bool)}, NotImplementedError, "key_mask with cu_seqlens_q .*: packed sequences are built"),
    (lengths(9), NotImplementedError, "key_lengths with cu_seqlens_q"),
    (
        {"query_lengths": np.array([7], I32)},
        NotImplementedError,
        "query_lengths with cu_seqlens_q.* rows out of the pac",
    ),
    ({"query_mask": np.ones(7, bool)}, NotImplementedError, "query_mask with cu_seqlens_q"),
    ({"block_mask": patterns.full(queries=7, keys=9)}, NotImplementedError, "block_mask with cu_seqlens_q"),
]


@pytest.mark.parametrize("options, error, text", PACKED_BAD)
def test_bad_packed_options(options: dict[str, Any], error: type[Exception], text: str) -> None:
    good = {"cu_seqlens_q": np.array([0, 7], I32), "cu_seqlens_k": np.array([0, 9], I32)}
    case = make(H=4, M=7, N=9, D_t=8, **good)
    with pytest.raises(error, match=text):
        streamkl_cupy.attention_kl(*case.arrays, **{**good, **options})


def test_bad_values_leave_outputs_alone() -> None:
    case = make(B=1, H=1, M=3, N=4, D_t=8)
    ready = Call.of(ATTENTION_KL, tuple(case.arrays), {"key_lengths": np.array([9], I32)}).ready()
    inputs = ready.inputs
    from streamkl_cupy import frameworks

    outputs = ATTENTION_KL.Results(
        *frameworks.empty_rows(inputs.student_q, ATTENTION_KL.rows, ready.checked.row_shape, ready.checked.stat_dtype)
    )
    written = [view for view in outputs if view is not None]
    for view in written:
        view.array[...] = 7
    with pytest.raises(ValueError, match="key_lengths"):
        ready.checked.runner.forward(inputs, outputs, 0, 0, ready.views.masks)
    assert all((view.array == 7).all() for view in written)


@pytest.mark.gpu
def test_device_errors() -> None:
    cupy = pytest.importorskip("cupy")
    case = make(B=2, H=4, M=7, N=9, D_t=8)
    x = [cupy.asarray(a) for a in case.arrays]
    with pytest.raises(TypeError, match="key_lengths is a numpy array"):
        streamkl_cupy.attention_kl(*x, key_lengths=np.array([3, 4], I32))
    torch = pytest.importorskip("torch")
    x = [torch.from_numpy(a).cuda() for a in case.arrays]
    with pytest.raises(ValueError, match=r"key_lengths is on cpu; .* Move key_lengths first"):
        streamkl_cupy.attention_kl(*x, key_lengths=torch.tensor([3, 4], dtype=torch.int32))


@pytest.mark.gpu
def test_wrong_numbers_on_the_device_stay_in_bounds(rng: np.random.Generator) -> None:
    """Nobody reads them on the host; whatever they are, nothing outside the arrays is read or written."""
    cupy = pytest.importorskip("cupy")
    case = make(B=1, H=2, M=70, N=90, D_t=16)
    x = [cupy.asarray(a) for a in case.arrays]
    for values in ([-5], [10**9], [2**31 - 1]):
        got = streamkl_cupy.attention_kl(*x, key_lengths=cupy.asarray(np.array(values, I32)))
        clamped = np.clip(values, 0, 90).astype(I32)
        expected = streamkl_cupy.attention_kl(*x, key_lengths=cupy.asarray(clamped))
        cupy.testing.assert_allclose(got, expected, rtol=1e-6)
    flat = [cupy.ascontiguousarray(a[0].swapaxes(0, 1)) for a in x]
    for bad in ([0, 10**9, -7, 40], [50, 20, 70, 2**31 - 1], [-(2**31)] * 4):
        bounds = cupy.asarray(np.array(bad, I32))
        streamkl_cupy.attention_kl_value_and_grad(
            *flat, wrt=INPUT_NAMES, cu_seqlens_q=bounds, cu_seqlens_k=bounds, reduction="sum"
        )
    cupy.cuda.get_current_stream().synchronize()


# torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def torch_backend(request: pytest.FixtureRequest) -> Any:
    from conftest import Torch, TorchCuda

    return Torch() if request.param == "cpu" else TorchCuda()


TORCH_KINDS = [
    "window causal",
    "lengths query_lengths",
    "keys query_mask window",
    "head blocks lengths",
    "packed causal",
]


@pytest.mark.parametrize("kind", TORCH_KINDS)
def test_torch_autograd(torch_backend: Any, rng: np.random.Generator, kind: str) -> None:
    case = make_masked(rng, kind, M=20, N=30)
    x = [a.requires_grad_() for a in torch_backend.arrays(case)]
    grad = upstream(rng, rows_of(case))
    kl = streamkl_cupy.attention_kl(*x, **torch_backend.options(case))
    kl.backward(torch_backend.array(grad, "float32"))
    expected = reference.backward(grad, *case.arrays, **case.options).value
    for a, e in zip(x, expected, strict=True):
        np.testing.assert_allclose(torch_backend.numpy(a.grad), e, rtol=1e-3, atol=2e-5)


@pytest.mark.filterwarnings("ignore")  # of the compiler's own making, and different in every release
@pytest.mark.parametrize("kind", TORCH_KINDS)
def test_torch_compile(torch_backend: Any, rng: np.random.Generator, kind: str) -> None:
    torch = torch_backend.xp
    torch.compiler.reset()
    case = make_masked(rng, kind, M=20, N=30)
    tq, tk, sq, sk = torch_backend.arrays(case)
    options = torch_backend.options(case)
    held = {name: options.pop(name) for name in MASK_ARRAYS if name in options}

    def loss(sq: Any, sk: Any, held: dict[str, Any]) -> Any:
        return streamkl_cupy.attention_kl(tq, tk, sq, sk, reduction="mean", **held, **options)

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    results = []
    for function in (loss, compiled):
        s = [x.clone().requires_grad_() for x in (sq, sk)]
        value = function(*s, held)
        value.backward()
        results.append([torch_backend.numpy(y) for y in (value, *(x.grad for x in s))])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        changed = {name: x.clone() for name, x in held.items()}
        assert float(compiled(sq, sk, changed)) == pytest.approx(float(loss(sq, sk, changed)), rel=1e-5)


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("mapped", [True, False])
def test_torch_vmap(torch_backend: Any, rng: np.random.Generator, rank: int, mapped: bool) -> None:
    torch = torch_backend.xp
    V, B, H, M, N = 3, 2 if rank == 4 else 1, 1 if rank == 2 else 2, 6, 20
    lead = (V, B, H)[: rank - 1]

    def array(rows: int) -> Any:
        return torch_backend.array(rng.standard_normal((*lead, rows, 8)), "float32")

    x = [array(M), array(N), array(M), array(N)]
    many = (V, B) if mapped else (B,)
    shape = (*((V,) if mapped else ()), *((B,) if rank == 4 else ()))
    masks = {
        "key_lengths": torch_backend.mask_array(rng.integers(1, N + 1, many).astype(I32)),
        "query_lengths": torch_backend.mask_array(rng.integers(1, M + 1, many).astype(I32)),
        "key_mask": torch_backend.mask_array(rng.random((*shape, N)) < 0.8),
        "query_mask": torch_backend.mask_array(rng.random((*shape, M)) < 0.8),
    }

    def call(x: Any, held: Any) -> Any:
        return streamkl_cupy.attention_kl(*x, **held)

    got = torch.vmap(call, in_dims=(0, 0 if mapped else None))(x, masks)
    for v in range(V):
        held = {name: mask[v] if mapped else mask for name, mask in masks.items()}
        np.testing.assert_allclose(
            torch_backend.numpy(got[v]), torch_backend.numpy(call([a[v] for a in x], held)), rtol=1e-5, atol=1e-6
        )


def test_torch_vmap_of_gradients(torch_backend: Any, rng: np.random.Generator) -> None:
    torch = torch_backend.xp
    x = [torch_backend.array(rng.standard_normal((3, 2, 2, rows, 8)), "float32") for rows in (6, 20, 6, 20)]
    lengths = [torch_backend.mask_array(rng.integers(0, most + 1, (3, 2)).astype(I32)) for most in (20, 6)]
    key_mask, query_mask = (torch_backend.mask_array(rng.random((2, count)) < 0.8) for count in (20, 6))

    def loss(tq: Any, tk: Any, sq: Any, sk: Any, keys: Any, rows: Any) -> Any:
        return streamkl_cupy.attention_kl(
            tq, tk, sq, sk, key_lengths=keys, query_lengths=rows, key_mask=key_mask, query_mask=query_mask
        ).sum()

    gradient = torch.func.grad(loss, argnums=(0, 1, 2, 3))
    got = torch.vmap(gradient)(*x, *lengths)
    for v in range(3):
        for a, b in zip(got, gradient(*(y[v] for y in (*x, *lengths))), strict=True):
            np.testing.assert_allclose(torch_backend.numpy(a[v]), torch_backend.numpy(b), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mapped", ["everything", "inputs", "bounds", "keys"])
def test_torch_vmap_of_packed_is_a_loop(torch_backend: Any, rng: np.random.Generator, mapped: str) -> None:
    """Values and gradients, whatever is mapped and along whichever axis."""
    torch = torch_backend.xp
    axes = {"everything": (0, 0, 1), "inputs": (2, 0, None), "bounds": (None, None, 0), "keys": (None, 0, None)}[mapped]

    def given(axis: int | None, *shape: int) -> Any:
        full = shape if axis is None else (*shape[:axis], 3, *shape[axis:])
        return torch_backend.array(rng.standard_normal(full), "float32")

    q, k = [given(axes[0], 10, 2, 8) for _ in "ts"], [given(axes[1], 10, 2, 8) for _ in "ts"]
    all_bounds = np.array([[0, 4, 10], [0, 0, 10], [0, 3, 7]], I32)
    chosen = all_bounds[0] if axes[2] is None else np.moveaxis(all_bounds, 0, axes[2])
    bounds = torch_backend.mask_array(np.ascontiguousarray(chosen))

    def loss(sq: Any, sk: Any, tq: Any, tk: Any, bounds: Any) -> Any:
        return streamkl_cupy.attention_kl(tq, tk, sq, sk, cu_seqlens_q=bounds, cu_seqlens_k=bounds, causal=True).sum()

    def of(x: Any, axis: int | None, v: int) -> Any:
        return x if axis is None else x.select(axis, v).contiguous()

    call = torch.func.grad_and_value(loss, argnums=(0, 1, 2, 3))
    dims = (axes[0], axes[1], axes[0], axes[1], axes[2])
    everything = (q[1], k[1], q[0], k[0], bounds)
    grads, values = torch.vmap(call, in_dims=dims)(*everything)
    for v in range(3):
        wanted, value = call(*(of(x, axis, v) for x, axis in zip(everything, dims)))
        np.testing.assert_allclose(torch_backend.numpy(values[v]), torch_backend.numpy(value), rtol=1e-5, atol=1e-6)
        for a, b in zip(grads, wanted, strict=True):
            np.testing.assert_allclose(torch_backend.numpy(a[v]), torch_backend.numpy(b), rtol=1e-4, atol=1e-5)


def test_torch_vmap_of_packed_over_nothing(torch_backend: Any) -> None:
    x, bounds = torch_backend.xp.zeros(0, 5, 2, 8, device=torch_backend.device), cumulative([2, 3])
    bounds = torch_backend.mask_array(bounds)

    def value(x: Any) -> Any:
        return streamkl_cupy.attention_kl(x, x, x, x, cu_seqlens_q=bounds, cu_seqlens_k=bounds)

    def gradient(x: Any) -> Any:
        return torch_backend.xp.func.grad(lambda x: value(x).sum())(x)

    assert torch_backend.xp.vmap(value)(x).shape == (0, 5, 2)
    assert torch_backend.xp.vmap(gradient)(x).shape == x.shape


def test_torch_wants_tensors(torch_backend: Any) -> None:
    x = torch_backend.array(np.ones((2, 3, 4, 8)), "float32").requires_grad_()
    with pytest.raises(TypeError, match=r"key_lengths is a numpy.ndarray; allowed is a torch array"):
        streamkl_cupy.attention_kl(x, x, x, x, key_lengths=np.array([3, 4], I32))
    with pytest.raises(TypeError, match=r"key_lengths has dtype int64; .* key_lengths.to\(torch.int32\)"):
        streamkl_cupy.attention_kl(x, x, x, x, key_lengths=torch_backend.xp.tensor([3, 4], device=x.device))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["lengths query_lengths", "packed causal", "keys query_mask", "head blocks"])
def test_graph_capture(rng: np.random.Generator, kind: str) -> None:
    """Arrays of masks are read on the device: a captured call follows what is written into them later."""
    from conftest import TorchCuda

    backend = TorchCuda()
    torch = backend.xp
    cases = [make_masked(np.random.default_rng(zlib.crc32(kind.encode())), kind, M=70, N=90) for _ in range(2)]
    case = cases[0]
    x, options = backend.arrays(case), backend.options(case)
    streamkl_cupy.warmup(*x, **options)
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        streamkl_cupy.attention_kl_value_and_grad(*x, **options)
    side.synchronize()
    with torch.cuda.graph(graph):
        value, grads = streamkl_cupy.attention_kl_value_and_grad(*x, **options)
    for _ in range(2):
        for a in x:
            a.copy_(torch.randn_like(a))
        for name, held in options.items():
            if name.endswith("lengths"):
                held.random_(0, 70)
            if name in ("key_mask", "query_mask"):
                held.copy_(torch.rand(held.shape, device="cuda") < 0.5)
        graph.replay()
        expected, wanted = streamkl_cupy.attention_kl_value_and_grad(*x, **options)
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grads.student_q, wanted.student_q, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(grads.student_k, wanted.student_k, rtol=1e-3, atol=1e-5)


# JAX


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def jax_backend(request: pytest.FixtureRequest) -> Any:
    from conftest import Jax, JaxCuda

    return Jax() if request.param == "cpu" else JaxCuda()


@pytest.mark.parametrize("kind", ["window causal", KINDS[-1], "packed causal"])
def test_jax_grad_under_jit(jax_backend: Any, rng: np.random.Generator, kind: str) -> None:
    jax = jax_backend.xp
    case = make_masked(rng, kind, M=20, N=30)
    x, options = jax_backend.arrays(case), jax_backend.options(case)
    held = {name: options.pop(name) for name in MASK_ARRAYS if name in options}
    grad = upstream(rng, rows_of(case))

    @jax.jit
    def gradients(x: Any, held: Any) -> Any:
        return jax.grad(lambda x: (streamkl_cupy.attention_kl(*x, **held, **options) * grad).sum())(x)

    expected = reference.backward(grad, *case.arrays, **case.options).value
    for a, e in zip(gradients(x, held), expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), e, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("mapped", ["inputs", "masks", "both"])
def test_jax_vmap(jax_backend: Any, rng: np.random.Generator, rank: int, mapped: str) -> None:
    jax = jax_backend.xp
    V, B, H, M, N = 3, 2 if rank == 4 else 1, 1 if rank == 2 else 2, 6, 20
    lead = (B, H)[4 - rank :]
    first = {"inputs": ((V,), ()), "masks": ((), (V,)), "both": ((V,), (V,))}[mapped]
    x = [jax_backend.array(rng.standard_normal((*first[0], *lead, rows, 8)), "float32") for rows in (M, N, M, N)]
    shape = (*first[1], *((B,) if rank == 4 else ()))
    held = {
        "key_lengths": jax_backend.mask_array(rng.integers(1, N + 1, (*first[1], B)).astype(I32)),
        "query_lengths": jax_backend.mask_array(rng.integers(1, M + 1, (*first[1], B)).astype(I32)),
        "key_mask": jax_backend.mask_array(rng.random((*shape, N)) < 0.8),
        "query_mask": jax_backend.mask_array(rng.random((*shape, M)) < 0.8),
    }

    def call(x: Any, held: Any) -> Any:
        def total(x: Any) -> Any:
            kl = streamkl_cupy.attention_kl(*x, **held)
            return kl.sum(), kl

        (_, kl), grads = jax.value_and_grad(total, has_aux=True)(x)
        return kl, grads[2], grads[3]

    got = jax.vmap(call, in_axes=tuple(0 if axes else None for axes in first))(x, held)
    for v in range(V):
        one = call(
            [a[v] for a in x] if first[0] else x,
            {name: mask[v] for name, mask in held.items()} if first[1] else held,
        )
        for a, b in zip(got, one, strict=True):
            np.testing.assert_allclose(np.asarray(a[v]), np.asarray(b), rtol=1e-5, atol=1e-5)


def test_jax_vmap_of_packed_is_a_loop(jax_backend: Any, rng: np.random.Generator) -> None:
    jax = jax_backend.xp
    x = [jax_backend.array(rng.standard_normal((3, 10, 2, 8)), "float32") for _ in range(4)]
    bounds = jax_backend.mask_array(np.array([[0, 4, 10], [0, 0, 10], [0, 3, 7]], I32))

    def call(x: Any, bounds: Any) -> Any:
        return streamkl_cupy.attention_kl(*x, cu_seqlens_q=bounds, cu_seqlens_k=bounds)

    got = jax.vmap(call)(x, bounds)
    for v in range(3):
        np.testing.assert_allclose(
            np.asarray(got[v]), np.asarray(call([a[v] for a in x], bounds[v])), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("mapped", [False, True])
def test_jax_lends_a_workspace(monkeypatch: pytest.MonkeyPatch, mapped: bool) -> None:
    jax = pytest.importorskip("jax")
    runner, lent = numpy_backend.Runner, []
    forward, backward = runner.forward, runner.backward
    monkeypatch.setattr(runner, "workspace_bytes", 64)
    monkeypatch.setattr(runner, "backward_bytes", lambda self, wrt: 32 * len(wrt))
    monkeypatch.setattr(runner, "forward", lambda *args: lent.append(args[4]) or forward(*args))
    monkeypatch.setattr(runner, "backward", lambda *args: lent.append(args[5] * (args[7] >= 64)) or backward(*args))
    scale = 0.123 + mapped  # of its own, so that nothing is traced or planned yet
    x = jax.device_put(np.ones((2, 3, 5, 8), np.float32), jax.devices("cpu")[0])

    def total(q: Any) -> Any:
        return streamkl_cupy.attention_kl(q, x, q, x, teacher_scale=scale).sum()

    call = jax.grad(total)
    with jax.default_device(jax.devices("cpu")[0]):  # where traced calls are taken to run
        (jax.vmap(call)(jax.numpy.stack([x, x])) if mapped else call(x)).block_until_ready()
    assert len(lent) == 2 * (1 + mapped)  # what is not mapped has a batch of its own: vmap becomes a loop
    assert all(lent)


def test_jax_errors(jax_backend: Any) -> None:
    x = jax_backend.array(np.ones((2, 3, 4, 8)), "float32")
    with pytest.raises(TypeError, match=r"key_lengths is a numpy.ndarray; allowed is a jax array"):
        streamkl_cupy.attention_kl(x, x, x, x, key_lengths=np.array([3, 4], I32))
    if jax_backend.device == "cpu":
        bad = jax_backend.mask_array(np.array([3, 9], I32))
        with pytest.raises(ValueError, match=r"key_lengths\[1\] is 9; allowed are 0 to 4"):
            streamkl_cupy.attention_kl(x, x, x, x, key_lengths=bad)

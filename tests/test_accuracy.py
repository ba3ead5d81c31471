"""Forward and all four gradients against float64, over everything that changes the path through a kernel.

Each test runs on NumPy, and on CuPy where there is a GPU: the device's arithmetic is judged here, not the frameworks.
Memory that results may be made in is filled with NaN first. Bounds are those of `streamkl_cupy.testing.compare`.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import streamkl_cupy
from streamkl_cupy.problem import INPUT_NAMES, STUDENT
from streamkl_cupy.testing import reference
from streamkl_cupy.testing.compare import check_same_bits
from streamkl_cupy.testing.problems import RECIPES, make, upstream

DTYPES = ["bfloat16", "float16", "float32"]
HEAD_DIMS = [1, 3, 8, 16, 40, 64, 72, 80, 96, 128, 160, 192, 256]
UNLIKE = [(64, 128), (128, 64), (192, 128), (128, 192), (256, 64), (16, 256), (1, 96), (96, 3), (40, 72), (80, 160)]
PAIRS = [*((d, d) for d in HEAD_DIMS), *UNLIKE]
WIDE_TEACHERS = [(320, 64), (512, 128), (576, 128), (576, 256), (576, 40)]
RAGGED = [1, 5, 63, 64, 65, 127, 129, 200, 333, 1000]
OFFSETS = [None, 0, 37, -37, 250, 10**6, -(10**6)]


def seed_of(rng: np.random.Generator) -> int:
    return int(rng.integers(2**31))


def rows_of(case: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = case.arrays[0].shape[:-1]
    return shape


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D_t, D_s", PAIRS)
def test_head_dims(core: Any, rng: Any, turn: Any, dtype: str, D_t: int, D_s: int) -> None:
    """Causal and full; on a GPU, which compiles for each, one of them by turns."""
    both = False, True
    for causal in both if core.device == "cpu" else [turn(both, PAIRS.index((D_t, D_s)), DTYPES.index(dtype))]:
        case = make(H=2, M=129, N=200, D_t=D_t, D_s=D_s, dtypes=dtype, seed=seed_of(rng), causal=causal)
        core.judge(case, upstream(rng, rows_of(case)), plain=True)


def test_float16_gradients_of_a_mean_are_as_good_as_float16(core: Any, rng: Any) -> None:
    """Where it has few digits left, the error is that of rounding; sums, divided outside, have all digits."""
    case = make(H=4, M=512, N=256, D_t=32, dtypes="float16", seed=seed_of(rng))
    wanted = reference.backward(np.full(rows_of(case), 1 / 2048), *case.arrays).value

    def errors(x: Any, exact: Any) -> float:
        return float(np.linalg.norm(x - exact) / np.linalg.norm(exact))

    best: dict[str, list[float]] = {"mean": [], "sum": []}
    for reduction, rows in (("mean", 1), ("sum", 2048)):
        _, grads = streamkl_cupy.attention_kl_value_and_grad(*core.arrays(case), reduction=reduction, wrt=INPUT_NAMES)
        for name in INPUT_NAMES:
            exact = getattr(wanted, name)
            best[reduction].append(errors((exact * rows).astype(np.float16).astype(np.float64) / rows, exact))
            assert errors(core.numpy(getattr(grads, name)) / rows, exact) < np.hypot(best[reduction][-1], 5e-4), name
    assert max(best["mean"]) > 5e-4 > 1.5 * max(best["sum"])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D_t, D_s", WIDE_TEACHERS)
def test_wide_teachers(core: Any, rng: Any, dtype: str, D_t: int, D_s: int) -> None:
    case = make(H=4, M=70, N=150, D_t=D_t, D_s=D_s, teacher_key_heads=1, dtypes=dtype, seed=seed_of(rng), causal=True)
    core.judge(case, upstream(rng, rows_of(case)), wrt=STUDENT, plain=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("M", RAGGED)
def test_ragged_shapes(core: Any, rng: Any, turn: Any, dtype: str, M: int) -> None:
    # The reference is what takes time: the NumPy backend has fewer paths to walk than the kernels, of which all lengths
    # meet, causal or not by turns.
    pairs = [*itertools.product((1, 65, 333), (False, True))]
    if core.device == "cuda":
        place = DTYPES.index(dtype) + RAGGED.index(M)
        pairs = [(N, turn((False, True), place, i)) for i, N in enumerate(RAGGED)]
    for N, causal in pairs:
        case = make(H=2, M=M, N=N, D_t=64, D_s=32, dtypes=dtype, seed=seed_of(rng), causal=causal)
        try:
            core.judge(case, upstream(rng, rows_of(case)))
        except AssertionError as error:
            raise AssertionError(f"M={M}, N={N}, causal={causal}: {error}") from error


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("M, N", [(200, 200), (70, 300), (300, 70), (257, 129)])
def test_causal_offsets(core: Any, rng: Any, dtype: str, offset: int | None, M: int, N: int) -> None:
    case = make(B=2, H=2, M=M, N=N, D_t=64, dtypes=dtype, seed=seed_of(rng), causal=True, q_offset=offset)
    core.judge(case, upstream(rng, rows_of(case)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("H, teacher, student", [(4, 2, 4), (4, 1, 2), (6, 2, 3), (8, 1, 8), (8, 8, 1), (12, 3, 4)])
def test_grouped_heads(
    core: Any, rng: Any, dtype: str, causal: bool, layout: str, H: int, teacher: int, student: int
) -> None:
    case = make(
        B=2, H=H, M=75, N=141, D_t=64, D_s=40, teacher_key_heads=teacher, student_key_heads=student,
        dtypes=dtype, layout=layout, seed=seed_of(rng), causal=causal,
    )  # fmt: skip
    core.judge(case, upstream(rng, rows_of(case)))


@pytest.mark.parametrize("dtypes", [*itertools.permutations(DTYPES, 2)], ids="-".join)
@pytest.mark.parametrize("D_t, D_s", [(64, 64), (128, 80)])
def test_unlike_dtypes(core: Any, rng: Any, dtypes: tuple[str, str], D_t: int, D_s: int) -> None:
    case = make(H=4, M=100, N=171, D_t=D_t, D_s=D_s, teacher_key_heads=2, dtypes=dtypes, seed=seed_of(rng), causal=True)
    core.judge(case, upstream(rng, rows_of(case)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_named_problems(core: Any, rng: Any, name: str, dtype: str, causal: bool) -> None:
    for D_t, D_s in [(64, 64), (128, 128), (64, 128)] if core.device == "cuda" else [(64, 32)]:
        case = make(name, H=2, M=190, N=700, D_t=D_t, D_s=D_s, dtypes=dtype, seed=seed_of(rng), causal=causal)
        # Large logits take float16 gradients out of range; smaller upstream gradients keep them in it.
        core.judge(case, upstream(rng, rows_of(case)) * np.float32(1e-3 if name == "huge" else 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [64, 128])
def test_upstream_of_all_sizes(core: Any, rng: Any, dtype: str, D: int) -> None:
    """Rows from 1e-6 to 1e4 in one call, both signs and zeros: each row is judged by its own size."""
    case = make(H=2, M=300, N=260, D_t=D, dtypes=dtype, seed=seed_of(rng))
    core.judge(case, upstream(rng, rows_of(case), "wild"))
    for size in (1e4, 1e-6):
        core.judge(case, upstream(rng, rows_of(case)) * np.float32(size))
    _, grads = core.judge(case, np.zeros(rows_of(case), np.float32))
    assert all((core.numpy(x) == 0).all() for x in grads)


def test_float16_logit_gradients_do_not_underflow(core: Any, rng: Any) -> None:
    """Each of 2000 keys gets a logit gradient near 1e-7, below float16; their sum is well above it."""
    case = make("near_equal", M=64, N=2000, D_t=64, dtypes="float16", seed=seed_of(rng))
    core.judge(case, np.ones(rows_of(case), np.float32))


@pytest.mark.parametrize("wrt", [names for n in (1, 2, 3) for names in itertools.combinations(INPUT_NAMES, n)], ids=str)
def test_any_subset_of_gradients(core: Any, rng: Any, wrt: tuple[str, ...]) -> None:
    for dtype in DTYPES:
        case = make(H=4, M=90, N=130, D_t=64, teacher_key_heads=2, dtypes=dtype, seed=seed_of(rng), causal=True)
        core.judge(case, upstream(rng, rows_of(case)), wrt=wrt)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank, layout", [(2, "bhnd"), (3, "bhnd"), (3, "bnhd"), (4, "bnhd")])
def test_fewer_axes(core: Any, rng: Any, dtype: str, rank: int, layout: str) -> None:
    case = make(H=1 if rank == 2 else 4, M=77, N=99, D_t=32, dtypes=dtype, layout=layout, seed=seed_of(rng))
    a, b, c, d = (x.reshape(x.shape[4 - rank :]) if rank > 2 else x.reshape(-1, x.shape[-1]) for x in case.arrays)
    case = case._replace(arrays=(a, b, c, d))
    core.judge(case, upstream(rng, rows_of(case)))


def stepped(backend: Any, x: Any, dtype: str) -> Any:
    wide = np.full((*x.shape[:-1], 2 * x.shape[-1]), np.nan)
    wide[..., ::2] = x
    return backend.array(wide, dtype)[..., ::2]


def transposed(backend: Any, x: Any, dtype: str) -> Any:
    return backend.array(np.ascontiguousarray(x.swapaxes(0, 2)), dtype).swapaxes(0, 2)


def columns_first(backend: Any, x: Any, dtype: str) -> Any:
    return backend.array(np.ascontiguousarray(x.swapaxes(2, 3)), dtype).swapaxes(2, 3)


def unaligned(backend: Any, x: Any, dtype: str) -> Any:
    """Base and row distance are odd numbers of elements, in a buffer whose other elements are NaN."""
    wide = np.full((*x.shape[:-1], x.shape[-1] + 3), np.nan)
    wide[..., 1:-2] = x
    return backend.array(wide, dtype)[..., 1:-2]


def flipped(backend: Any, x: Any, dtype: str) -> Any:
    if not backend.has_negative_strides:
        pytest.skip(f"{backend.name} has no negative strides")
    return backend.array(x[:, :, ::-1, ::-1], dtype)[:, :, ::-1, ::-1]


def padded(backend: Any, x: Any, dtype: str) -> Any:
    """Rows aligned but far apart, heads not whole rows apart, NaN between them."""
    b, h, n, d = x.shape
    wide = np.full((b, h + 1, n + 3, d + 8), np.nan)
    wide[:, 1:, 2:-1, 8:] = x
    return backend.array(wide, dtype)[:, 1:, 2:-1, 8:]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", [stepped, transposed, columns_first, unaligned, flipped, padded])
@pytest.mark.parametrize("side", ["all", "teacher", "student", "keys"])
def test_strided_views(strided_backend: Any, rng: Any, dtype: str, view: Any, side: str) -> None:
    case = make(B=2, H=2, M=81, N=140, D_t=64, D_s=32, dtypes=dtype, seed=seed_of(rng), causal=True)
    arrays = tuple(
        view(strided_backend, x, dtype)
        if side == "all" or side in name or (side == "keys" and name.endswith("_k"))
        else strided_backend.array(x, dtype)
        for name, x in zip(INPUT_NAMES, case.arrays, strict=True)
    )
    _, grads = strided_backend.judge(case, upstream(rng, rows_of(case)), arrays=arrays)
    if strided_backend.module != "torch":
        assert all(x.flags.c_contiguous for x in grads)


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_upstream_and_saved_rows(strided_backend: Any, rng: Any, dtype: str) -> None:
    """A scalar loss hands back an expanded gradient; saved rows may be slices of something larger."""
    case = make(B=2, H=3, M=50, N=60, D_t=32, dtypes=dtype, seed=seed_of(rng))
    arrays = strided_backend.arrays(case)
    rows = streamkl_cupy.attention_kl_forward(*arrays, **case.options)
    xp = strided_backend.xp
    one = strided_backend.array(np.ones((1, 1, 1)), "float32")
    ones = one.expand(2, 3, 50) if strided_backend.module == "torch" else xp.broadcast_to(one, (2, 3, 50))
    pairs = [xp.stack([x, x * 0], -1)[..., 0] for x in (rows.teacher_lse, rows.student_lse, rows.kl)]
    apart = streamkl_cupy.KLForward(pairs[2], *pairs[:2])
    for g, saved in ((ones, apart), (ones + 0, rows)):
        grads = streamkl_cupy.attention_kl_backward(
            g, *arrays, saved=saved, wrt=INPUT_NAMES, deterministic=True, **case.options
        )
        if g is ones:
            first = grads
    for name, a, b in zip(INPUT_NAMES, first, grads, strict=True):
        check_same_bits(name, strided_backend.numpy(a), strided_backend.numpy(b))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("empty", ["B", "H", "M", "N", "MN"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_zero_sizes(core: Any, dtype: str, empty: str, causal: bool) -> None:
    shape = {"B": 2, "H": 2, "M": 5, "N": 7, **dict.fromkeys(empty, 0)}
    case = make(**shape, D_t=16, dtypes=dtype, causal=causal)
    rows, grads = core.judge(case, np.ones(rows_of(case), np.float32))
    assert rows.kl.shape == rows_of(case)
    assert all((core.numpy(x) == 0).all() for x in grads)
    assert (core.numpy(rows.teacher_lse) == -np.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("M, N, offset", [(100, 150, -30), (200, 90, None), (65, 300, 17), (130, 130, -1)])
@pytest.mark.parametrize("D", [16, 64, 128])
def test_invisible_memory_may_hold_anything(
    core: Any, rng: Any, dtype: str, bad: float, M: int, N: int, offset: int | None, D: int
) -> None:
    case = make(H=2, M=M, N=N, D_t=D, dtypes=dtype, seed=seed_of(rng), causal=True, q_offset=offset)
    shift = N - M if offset is None else offset
    unseen_rows, unseen_keys = max(-shift, 0), max(M + shift, 0)
    for q, k in (case.arrays[:2], case.arrays[2:]):
        q[:, :, :unseen_rows] = bad
        k[:, :, unseen_keys:] = bad
    assert unseen_rows or unseen_keys < N
    grad = upstream(rng, rows_of(case))
    grad[:, :, :unseen_rows] = bad
    rows, grads = core.judge(case, grad)
    assert np.isfinite(core.numpy(rows.kl)).all()
    assert all(np.isfinite(core.numpy(x)).all() for x in grads)
    for q, k in (grads[:2], grads[2:]):
        assert (core.numpy(q)[:, :, :unseen_rows] == 0).all()
        assert (core.numpy(k)[:, :, unseen_keys:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", INPUT_NAMES)
def test_visible_nan_and_inf_are_not_silent(core: Any, rng: Any, dtype: str, bad: float, name: str) -> None:
    """Row results are NaN in exactly the rows that see the bad number; gradients at least there."""
    case = make(H=2, M=150, N=150, D_t=64, dtypes=dtype, seed=seed_of(rng), causal=True)
    case.arrays[INPUT_NAMES.index(name)][0, 1, 70, 3] = bad
    rows = streamkl_cupy.attention_kl_forward(*core.arrays(case), **case.options)
    sees = np.zeros((1, 2, 150), bool)
    sees[0, 1, 70 : 71 if name.endswith("_q") else None] = True
    for x in rows:
        np.testing.assert_array_equal(np.isnan(core.numpy(x)), sees)
        assert np.isfinite(core.numpy(x)[~sees]).all()
    grads = streamkl_cupy.attention_kl_backward(
        core.array(np.ones((1, 2, 150)), "float32"), *core.arrays(case), saved=rows, wrt=INPUT_NAMES,
        **case.options,
    )  # fmt: skip
    keys = slice(None, 71 if name.endswith("_q") else None)  # that those rows see
    for x, reached in zip(grads, (sees, np.s_[0, 1, keys]) * 2, strict=True):
        x = core.numpy(x)
        assert np.isnan(x[reached]).any(axis=-1).all()
        assert np.isfinite(x[0, 0]).all(), "another head"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("D", [64, 128])
def test_results_repeat_bit_by_bit(core: Any, rng: Any, dtype: str, D: int) -> None:
    case = make(B=2, H=4, M=300, N=500, D_t=D, teacher_key_heads=2, dtypes=dtype, seed=seed_of(rng), causal=True)
    options = {**case.options, "deterministic": True}
    grad = upstream(rng, rows_of(case))
    first = core.judge(case, grad, deterministic=True)
    arrays = core.arrays(case)
    for _ in range(20 if core.device == "cuda" else 2):
        core.poison(arrays)
        rows = streamkl_cupy.attention_kl_forward(*arrays, **options)
        g = core.array(grad, "float32")
        grads = streamkl_cupy.attention_kl_backward(g, *arrays, saved=rows, wrt=INPUT_NAMES, **options)
        for a, b in zip((*first[0], *first[1]), (*rows, *grads), strict=True):
            check_same_bits("result", core.numpy(a), core.numpy(b))


@pytest.mark.parametrize("D_t, D_s", [(64, 64), (128, 128), (80, 40)])
@pytest.mark.parametrize("name", ["gaussian", "realistic", "near_equal"])
def test_high_precision_of_float32_keeps_sixteen_bits(core: Any, rng: Any, name: str, D_t: int, D_s: int) -> None:
    case = make(name, H=2, M=200, N=300, D_t=D_t, D_s=D_s, seed=seed_of(rng), causal=True)
    core.judge(case, upstream(rng, rows_of(case)), precision="high", unit=2.0**-16)


def test_float64_on_the_cpu(rng: Any, numpy_only: Any) -> None:
    for dtypes in (("float64", "float64"), ("float64", "bfloat16"), ("float32", "float64")):
        for name in RECIPES:
            case = make(name, H=4, M=150, N=600, D_t=32, D_s=16, dtypes=dtypes, student_key_heads=2, causal=True)
            numpy_only.judge(case, upstream(rng, rows_of(case)).astype(np.float64))


@pytest.mark.gpu
@pytest.mark.slow
def test_a_million_keys(rng: Any, cupy_only: Any) -> None:
    for name in ("gaussian", "rising", "spiky"):
        case = make(name, M=20, N=1_000_003, D_t=64, dtypes="bfloat16", seed=seed_of(rng))
        cupy_only.judge(case, upstream(rng, rows_of(case)))


@pytest.mark.gpu
@pytest.mark.slow
def test_strides_beyond_32_bits(rng: Any, cupy_only: Any) -> None:
    """Rows 2^26 elements apart: the last of 70 is 4.6e9 elements from the first."""
    cupy = cupy_only.xp
    case = make(M=40, N=70, D_t=32, dtypes="float16", seed=seed_of(rng), causal=True)
    arrays = list(cupy_only.arrays(case))
    base = cupy.empty(70 * 2**26, cupy.float16)
    far = cupy.lib.stride_tricks.as_strided(base, (1, 1, 70, 32), (0, 0, 2**27, 2))
    far[...] = arrays[1]
    arrays[1] = far
    cupy_only.judge(case, upstream(rng, rows_of(case)), arrays=tuple(arrays))

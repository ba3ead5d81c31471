"""Few queries on many keys, where query heads that share keys have their rows in one tile: right by float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import streamkl_cupy
from streamkl_cupy.kernels import gpus
from streamkl_cupy.problem import INPUT_NAMES
from streamkl_cupy.testing.compare import check_same_bits
from streamkl_cupy.testing.problems import make, upstream

pytestmark = pytest.mark.gpu

# Query heads, key heads of the teacher and of the student: groups of 1, 2, 3, 4, 8 and 32, alike and not.
HEADS = [
    (4, 4, 4),
    (4, 2, 2),
    (6, 2, 2),
    (6, 2, 1),
    (8, 2, 2),
    (8, 4, 1),
    (8, 1, 1),
    (12, 4, 3),
    (32, 1, 1),
    (32, 8, 1),
]


DIMS = [(8, 8), (64, 64), (128, 128), (72, 120), (64, 128), (128, 64), (192, 128), (256, 256)]


@pytest.fixture(autouse=True)
def hopper(cupy_only: Any) -> None:
    if gpus.device_facts(0).compute_capability != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")


def few(rng: Any, heads: tuple[int, int, int], M: int, N: int, D: tuple[int, int] = (64, 64), **options: Any) -> Any:
    H, teacher, student = heads
    return make(
        H=H, M=M, N=N, D_t=D[0], D_s=D[1], teacher_key_heads=teacher, student_key_heads=student,
        seed=int(rng.integers(1 << 30)), **options,
    )  # fmt: skip


def judged(cupy_only: Any, rng: Any, case: Any, packed: bool = True) -> None:
    inputs = cupy_only.arrays(case)
    plan = streamkl_cupy.plan(*inputs, **cupy_only.options(case))
    assert (plan.forward.schedule.packed_rows > 0) == packed, plan
    assert all(fused.main.schedule.packed_rows for fused in plan.fused) or plan.problem.queries >= 64, plan
    shape = case.arrays[0].shape[:-1]
    grad = upstream(rng, shape)
    # As they come from a mean over some rows and a sum over others.
    grad.ravel()[1::5] *= 1e-3
    cupy_only.judge(case, grad, arrays=inputs)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("M", [1, 3, 16, 20, 33, 64])
def test_rows_and_groups(cupy_only: Any, rng: Any, M: int, heads: tuple[int, int, int]) -> None:
    groups = [heads[0] // k for k in heads[1:]]
    for N, dtype, options in ((300, "bfloat16", {}), (777, "float16", {"causal": True})):
        case = few(rng, heads, M, N, B=2, dtypes=dtype, **options)
        judged(cupy_only, rng, case, packed=np.gcd(*groups) > 1)


@pytest.mark.parametrize("D", DIMS)
def test_head_dims(cupy_only: Any, rng: Any, turn: Any, D: tuple[int, int]) -> None:
    for i, (heads, M) in enumerate((((8, 2, 2), 16), ((8, 2, 1), 30), ((4, 1, 2), 50))):
        dtype = turn(("bfloat16", "float16"), DIMS.index(D), i)
        judged(cupy_only, rng, few(rng, heads, M, 500, D, B=2, dtypes=dtype, causal=True))


@pytest.mark.parametrize("heads", [(8, 2, 2), (16, 2, 4), (6, 2, 1)], ids=str)
@pytest.mark.parametrize("M", [5, 16, 40])
def test_masks(cupy_only: Any, rng: Any, M: int, heads: tuple[int, int, int]) -> None:
    N = 700
    for options in (
        {"causal": True, "q_offset": 300},
        {"causal": True, "q_offset": -4},
        {"window": (130, 0)},
        {"window": (3, 2), "q_offset": 200},
        {"key_lengths": np.asarray([0, 431], np.int32), "causal": True},
        {"query_lengths": np.asarray([M, M // 2], np.int32), "key_lengths": np.asarray([700, 431], np.int32)},
        {"query_mask": rng.random((2, M)) < 0.5, "window": (30, -1)},
        {"key_mask": rng.random((2, N)) < 0.5},
        {"key_mask": rng.random((2, N)) < 0.02, "window": (200, -1)},
    ):
        for dtype, D in (("bfloat16", (64, 128)), ("float16", (128, 128))):
            judged(cupy_only, rng, few(rng, heads, M, N, D, B=2, dtypes=dtype, **options))


def test_layouts_and_splits(cupy_only: Any, rng: Any) -> None:
    for layout, M, heads in (("bnhd", 16, (8, 2, 2)), ("bhnd", 16, (8, 2, 2)), ("bnhd", 7, (6, 2, 1))):
        case = few(rng, heads, M, 9000, (64, 64), B=2, dtypes="bfloat16", layout=layout)
        inputs = cupy_only.arrays(case)
        plan = streamkl_cupy.plan(*inputs, **case.options)
        assert plan.forward.schedule.packed_rows == 16
        assert plan.forward.schedule.splits > 1
        judged(cupy_only, rng, case)
        once, again = (streamkl_cupy.attention_kl_forward(*inputs, **case.options) for _ in range(2))
        for field in once._fields:
            check_same_bits(field, cupy_only.numpy(getattr(again, field)), cupy_only.numpy(getattr(once, field)))


def test_keys_that_no_row_sees_may_hold_anything(cupy_only: Any, rng: Any) -> None:
    case = few(rng, (8, 2, 2), 12, 500, (64, 64), dtypes="bfloat16", key_lengths=np.asarray([333], np.int32))
    arrays = tuple(x.copy() for x in case.arrays)
    for x, worst in zip(arrays[1::2], (np.nan, np.inf), strict=True):
        x[:, :, 333:] = worst
    judged(cupy_only, rng, case._replace(arrays=arrays))


def test_heads_that_read_other_keys_may_hold_anything(cupy_only: Any, rng: Any) -> None:
    """The box of a pack reaches over them where it has room for more heads than share its keys."""
    case = few(rng, (6, 2, 2), 12, 500, (64, 64), dtypes="bfloat16")
    arrays = tuple(x.copy() for x in case.arrays)
    for x in arrays[::2]:
        x[:, 3:] = np.nan
    grad = upstream(rng, case.arrays[0].shape[:-1])
    plan = streamkl_cupy.plan(*cupy_only.arrays(case))
    assert [fused.main.schedule.packed_rows for fused in plan.fused] == [16, 16]
    results = []
    for of_case in (case, case._replace(arrays=arrays)):
        inputs = cupy_only.arrays(of_case)
        rows = streamkl_cupy.attention_kl_forward(*inputs)
        grads = streamkl_cupy.attention_kl_backward(
            cupy_only.array(grad, "float32"), *inputs, saved=rows, wrt=INPUT_NAMES
        )
        results.append([cupy_only.numpy(x) for x in (rows.kl, *grads)])
    for clean, other in zip(*results, strict=True):
        share = clean.shape[1] // 2
        assert np.isfinite(clean).all()
        assert np.isnan(other[:, share:]).all()
        np.testing.assert_allclose(other[:, :share], clean[:, :share], rtol=2e-2, atol=1e-6)

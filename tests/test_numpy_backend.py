"""The CPU backend: tiles and blocks of every size, memory, speed against the plain way, and what callers rely on."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import streamkl_cupy
from streamkl_cupy.concurrency import threads
from streamkl_cupy.numpy_backend import NumPyPlan
from streamkl_cupy.numpy_backend import plan as cut
from streamkl_cupy.numpy_backend.elements import narrow, widen
from streamkl_cupy.problem import INPUT_NAMES
from streamkl_cupy.testing.problems import make, upstream

Array = NDArray[Any]


def plan_of(**options: Any) -> NumPyPlan:
    case = make(**options)
    found = streamkl_cupy.plan(*case.arrays, **case.options)
    assert isinstance(found, NumPyPlan)
    return found


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 8 x 16, so that small problems have many."""
    for name, value in {"QUERY_TILE": 8, "KEY_TILE": 16, "BLOCK_ELEMENTS": 1024, "LONGEST_KEY_TILE": 64}.items():
        monkeypatch.setattr(cut, name, value)


def fresh_scale(rng: np.random.Generator) -> float:
    """Plans are kept by problem. One whose scale no call has had yet is planned afresh, with the tiles of now."""
    return float(rng.uniform(0.2, 0.3))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["gaussian", "rising", "crossing", "near_equal"])
@pytest.mark.parametrize("offset", [None, -11, 13, "full"])
def test_many_tiles(numpy_only: Any, rng: Any, dtype: str, name: str, offset: Any) -> None:
    causal: dict[str, Any] = {} if offset == "full" else {"causal": True, "q_offset": offset}
    for shape in ({"M": 37, "N": 90}, {"M": 1, "N": 200}, {"M": 60, "N": 3}):
        case = make(
            name, B=3, H=4, D_t=4, D_s=6, teacher_key_heads=2, student_key_heads=4,
            dtypes=dtype, seed=int(rng.integers(1e6)), teacher_scale=fresh_scale(rng), **shape, **causal,
        )  # fmt: skip
        numpy_only.judge(case, upstream(rng, (3, 4, shape["M"])))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("groups", [(1, 1), (2, 3), (6, 1), (3, 6), (6, 6)])
@pytest.mark.parametrize("M", [2, 30])
def test_blocks_of_grouped_heads(numpy_only: Any, rng: Any, groups: tuple[int, int], M: int) -> None:
    """Blocks hold whole groups of both sides or a single head; key gradients add up either way."""
    case = make(
        B=2, H=6, M=M, N=21, D_t=4, teacher_key_heads=groups[0], student_key_heads=groups[1],
        dtypes="float16", seed=int(rng.integers(1e6)), teacher_scale=fresh_scale(rng),
    )  # fmt: skip
    numpy_only.judge(case, upstream(rng, (2, 6, M)))


def test_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "available", lambda: 1)
    big = plan_of(B=2, H=8, M=5000, N=4000, D_t=64)
    assert (big.batches, big.heads, big.queries, big.keys) == (1, 1, 1024, 512)
    assert big.blocks == 2 * 8 * 5
    assert str(big) == (
        "numpy float32: 80 blocks of 1 batch x 1 head x 1024 queries, 512 keys at a time, 7.5 MiB of scratch"
    )
    small = plan_of(B=40, H=6, M=16, N=16, D_t=8, teacher_key_heads=2, dtypes="float64")
    assert small.heads == 6
    assert small.batches > 1
    assert small.dtype == "float64"
    decode = plan_of(B=1, H=8, M=1, N=5000, D_t=64, teacher_key_heads=1)
    assert decode.keys == 2048
    assert decode.scratch_bytes < 4 * 2**20
    # Blocks hold whole groups of both sides, here of 3 and of 4 heads, or one head.
    assert plan_of(H=24, M=100, N=300, D_t=4, teacher_key_heads=8, student_key_heads=6).heads == 12
    assert plan_of(H=24, M=300, N=300, D_t=4, teacher_key_heads=8, student_key_heads=6).heads == 1


def test_warmup_does_nothing_and_wants_nothing() -> None:
    case = make(M=4, N=4, D_t=4)
    assert streamkl_cupy.warmup(*case.arrays) is None


@pytest.mark.slow
def test_memory_is_a_few_tiles() -> None:
    """The dense computation holds several 8000 x 8000 matrices, 256 MB each."""
    inputs = make(M=8000, N=8000, D_t=32).arrays
    for dtype in ("float32", "float16"):
        arrays = [x.astype(dtype) for x in inputs]
        tracemalloc.start()
        rows = streamkl_cupy.attention_kl_forward(*arrays)
        forward_peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        g = np.ones_like(rows.kl)
        streamkl_cupy.attention_kl_backward(g, *arrays, saved=rows, wrt=INPUT_NAMES)
        backward_peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        scratch = streamkl_cupy.plan(*arrays).scratch_bytes
        assert scratch < 9 * 2**20
        assert forward_peak < scratch + 2**20
        # The outputs themselves, and for 16-bit inputs the two key gradients in float32.
        gradients = 8000 * 32 * (4 * 4 if dtype == "float32" else 4 * 2 + 2 * 4)
        assert backward_peak < scratch + gradients + 2 * 2**20


def dense(tq: Array, tk: Array, sq: Array, sk: Array) -> Array:
    """The computation most people write, with the usual care for memory: in place where NumPy can."""
    logs = []
    for q, k in ((tq, tk), (sq, sk)):
        x = q @ k.T
        x *= np.float32(q.shape[-1] ** -0.5)
        x -= x.max(axis=-1, keepdims=True)
        x -= np.log(np.exp(x).sum(axis=-1, keepdims=True))
        logs.append(x)
    log_p, log_q = logs
    log_q -= log_p
    log_q *= np.exp(log_p, out=log_p)
    return -log_q.sum(axis=-1)


@pytest.mark.slow
def test_faster_than_dense() -> None:
    arrays = [x[0, 0] for x in make(M=4096, N=4096, D_t=64).arrays]

    def seconds(function: Any) -> float:
        start = time.perf_counter()
        function(*arrays)
        return time.perf_counter() - start

    np.testing.assert_allclose(streamkl_cupy.attention_kl(*arrays), dense(*arrays), atol=2e-5)
    # Interleaved, so that what else the machine does meets both alike.
    pairs = [(seconds(streamkl_cupy.attention_kl), seconds(dense)) for _ in range(7)]
    ours, plain = (min(times) for times in zip(*pairs, strict=True))
    assert ours < plain, f"{ours:.3f} s against {plain:.3f} s of the dense computation"


def test_no_warnings_and_error_state_is_left_alone() -> None:
    """Warnings are errors in these tests: infinities inside must stay inside, and the caller's settings stay."""
    case = make("huge", M=30, N=50, D_t=8)
    arrays = [x.copy() for x in case.arrays]
    arrays[1][0, 0, 7] = np.inf
    arrays[2][0, 0, 3] = np.nan
    before = np.geterr()
    with np.errstate(all="raise"):
        rows = streamkl_cupy.attention_kl_forward(*arrays, **case.options)
        streamkl_cupy.attention_kl_backward(np.ones_like(rows.kl), *arrays, saved=rows, wrt=INPUT_NAMES, **case.options)
    assert np.geterr() == before
    assert np.isnan(rows.kl).all()


def test_equal_inputs_are_exactly_zero() -> None:
    q, k = make("realistic", M=300, N=1200, D_t=32).arrays[:2]
    assert (streamkl_cupy.attention_kl(q, k, q, k) == 0).all()


def test_one_bit_changes_do_not_depend_on_other_rows() -> None:
    """A row's result depends on its own query and the keys, bit by bit, not on which other rows share the call."""
    arrays = make(M=2048, N=700, D_t=64, seed=3).arrays
    tq, tk, sq, sk = arrays
    whole = streamkl_cupy.attention_kl(*arrays)
    changed = tq.copy()
    changed[:, :, :1024] += 1
    np.testing.assert_array_equal(streamkl_cupy.attention_kl(changed, tk, sq, sk)[:, :, 1024:], whole[:, :, 1024:])


@pytest.mark.parametrize("out", ["float32", "float64"])
def test_widen_and_narrow_bfloat16(out: str, rng: np.random.Generator) -> None:
    bits = rng.integers(0, 2**16, 5000).astype(np.uint16)
    values = widen(bits, np.empty(5000, out))
    again = narrow(values, np.dtype(np.uint16))
    nan = np.isnan(values)
    np.testing.assert_array_equal(again[~nan], bits[~nan])
    assert np.isnan(widen(again, np.empty(5000, np.float32))[nan]).all()
    # Whatever bits a NaN has, those too that a rounding would carry over into infinity or the sign.
    odd = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0xFFC00000, 0x7FBFFFFF], np.uint32).view(np.float32)
    assert np.isnan(widen(narrow(odd, np.dtype(np.uint16)), np.empty(5, np.float32))).all()
    # Ties go to the even neighbour, and what is beyond the largest number to infinity.
    ties = np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8, -1 - 2.0**-8, 3.4e38], np.float32)
    expected = np.array([1, 1 + 2.0**-6, -1, np.inf], np.float32)
    np.testing.assert_array_equal(widen(narrow(ties, np.dtype(np.uint16)), np.empty(4, np.float32)), expected)


def test_plan_of_a_problem_is_pure() -> None:
    case = make(M=10, N=10, D_t=4)
    first, second = (streamkl_cupy.plan(*case.arrays) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)

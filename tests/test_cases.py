"""Bugs other projects have had, as small tests: each is about a kind of mistake, with numbers that show it.

With D = 1, a query of 1 and scale 1 the scores equal the keys, so keys are written as scores here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import streamkl_cupy
from streamkl_cupy.problem import INPUT_NAMES
from streamkl_cupy.testing import reference
from streamkl_cupy.testing.problems import make, upstream

Array = NDArray[Any]
DTYPES = ["float32", "float16", "bfloat16"]
LN3 = math.log(3)


class Result:
    """Rows, and gradients for an upstream gradient of `grad`, as float64 arrays without batch and head axes."""

    def __init__(
        self, backend: Any, dtype: str, teacher: list[float], student: list[float], rows: int, grad: Any, **options: Any
    ) -> None:
        q = np.ones((1, 1, rows, 1))
        keys = [np.array(x, np.float64).reshape(1, 1, -1, 1) for x in (teacher, student)]
        arrays = [backend.array(x, dtype) for x in (q, keys[0], q, keys[1])]
        options = {"teacher_scale": 1.0, "student_scale": 1.0, **options}
        found = streamkl_cupy.attention_kl_forward(*arrays, **options)
        upstream = backend.array(np.broadcast_to(np.asarray(grad, np.float64), (1, 1, rows)), "float32")
        grads = streamkl_cupy.attention_kl_backward(upstream, *arrays, saved=found, wrt=INPUT_NAMES, **options)
        self.kl, self.teacher_lse, self.student_lse = (backend.numpy(x)[0, 0] for x in found)
        self.teacher_q, self.teacher_k, self.student_q, self.student_k = (backend.numpy(x)[0, 0, :, 0] for x in grads)


def run(
    backend: Any,
    dtype: str,
    teacher: list[float],
    student: list[float],
    rows: int = 1,
    grad: Any = 1.0,
    **options: Any,
) -> Result:
    return Result(backend, dtype, teacher, student, rows, grad, **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_student_probability_underflows(backend: Any, dtype: str) -> None:
    """A clamp at 1e-10 would give 10.8; a log threshold in the backward would drop the -p."""
    r = run(backend, dtype, [0, 0], [0, -200])
    assert r.kl[0] == pytest.approx(100 - math.log(2), rel=1e-6)
    np.testing.assert_allclose(r.student_k, [0.5, -0.5], rtol=1e-5)
    np.testing.assert_allclose(r.student_q, [100], rtol=1e-5)
    far = run(backend, "float32", [0, 0], [0, -20000])
    assert far.kl[0] == pytest.approx(9999.306853, rel=1e-6)
    np.testing.assert_allclose(far.student_k, [0.5, -0.5], rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_entry_that_underflows_on_both_sides(backend: Any, dtype: str) -> None:
    """0 x -inf would turn the row into NaN."""
    both = run(backend, dtype, [0, 0, -300], [0, 0, -300])
    assert abs(both.kl[0]) < 1e-6
    np.testing.assert_allclose(both.student_k, [0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(both.teacher_k, [0, 0, 0], atol=1e-6)
    opposite = run(backend, dtype, [0, -300], [-300, 0])
    assert opposite.kl[0] == pytest.approx(300, rel=1e-6)
    np.testing.assert_allclose(opposite.student_k, [-1, 1], rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rises", [(300, 300), (300, -300), (-300, 300), (-300, -300), (0, 300), (300, 0)], ids=str)
def test_steep_rows(core: Any, rng: Any, dtype: str, rises: tuple[int, int]) -> None:
    """Logits that go from 0 to 300 nats over several tiles of keys: references have to follow them tile by tile."""
    case = make("gaussian", M=5, N=5000, D_t=8, D_s=4, dtypes=dtype, seed=int(rng.integers(1e6)))
    arrays = [x.copy() for x in case.arrays]
    for i, rise in zip((0, 2), rises, strict=True):
        arrays[i][..., 0] = 1
        arrays[i + 1][..., 0] = reference.rounded(np.linspace(0, rise, 5000), dtype)
    options = {**case.options, "teacher_scale": 1.0, "student_scale": 1.0}
    core.judge(
        case._replace(arrays=tuple(arrays), options=options, hard=True, hard_gradients=True), upstream(rng, (1, 1, 5))
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tile", [63, 64, 127, 4096, 8191])
def test_row_whose_first_visible_key_is_its_only_one(backend: Any, rng: Any, dtype: str, tile: int) -> None:
    """Row 0 sees key 0 alone, and earlier rows nothing, in whatever tile of rows that falls.

    The case of a single visible key in a late tile of keys needs a mask by key, which is not built.
    """
    rows, keys = tile + 2, 8192
    teacher, student = rng.integers(-4, 5, (2, keys)).astype(np.float64)
    r = run(backend, dtype, list(teacher), list(student), rows, causal=True, q_offset=-tile)
    assert (r.kl[:tile] == 0).all()
    assert np.isneginf(r.teacher_lse[:tile]).all()
    assert r.kl[tile] == 0
    assert r.teacher_lse[tile] == pytest.approx(teacher[0], abs=1e-6)
    assert r.student_lse[tile] == pytest.approx(student[0], abs=1e-6)
    assert (r.student_q[:tile] == 0).all()
    assert abs(r.student_q[tile]) < 1e-6
    expected = reference.forward(np.ones((2, 1)), teacher[:2, None], np.ones((2, 1)), student[:2, None], causal=True)
    assert r.kl[tile + 1] == pytest.approx(expected.kl[1], abs=1e-5)
    assert (r.student_k[2:] == 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_queries_than_keys(backend: Any, dtype: str) -> None:
    """Bottom-right aligned: row 0 is empty. Top-left alignment would give [0, 0.13, 0.13]."""
    exact_ln3 = float(reference.rounded(LN3, dtype))
    r = run(backend, dtype, [0, exact_ln3], [0, 0], rows=3, causal=True)
    p = 1 / (1 + math.exp(exact_ln3))
    kl = p * math.log(2 * p) + (1 - p) * math.log(2 * (1 - p))
    np.testing.assert_allclose(r.kl, [0, 0, kl], atol=1e-6)
    assert kl == pytest.approx(0.130812, abs=1e-3)
    assert r.teacher_lse[0] == r.student_lse[0] == -np.inf
    assert r.student_q[0] == r.teacher_q[0] == 0
    np.testing.assert_allclose(r.student_k, [0.5 - p, p - 0.5], rtol=5e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduction, expected", [("sum", 0.130812), ("mean", 0.065406)])
def test_mean_is_over_rows_that_see_a_key(backend: Any, dtype: str, reduction: str, expected: float) -> None:
    """The mean over all rows would be 0.0436."""
    q, teacher, student = np.ones((3, 1)), np.array([[0], [LN3]]), np.zeros((2, 1))
    arrays = [backend.array(x, dtype) for x in (q, teacher, q, student)]
    options: dict[str, Any] = {"teacher_scale": 1.0, "student_scale": 1.0, "causal": True}
    value = streamkl_cupy.attention_kl(*arrays, reduction=reduction, **options)
    assert float(backend.numpy(value)) == pytest.approx(expected, rel=1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_garbage_in_padding(backend: Any, rng: Any, dtype: str) -> None:
    """77 real rows and keys, padded to 128 with NaN: the same as without the padding.

    Real rows end where causality ends, at an offset that makes the padded rows empty and the padded keys unseen.
    """
    case = make(H=2, M=77, N=77, D_t=32, dtypes=dtype, seed=int(rng.integers(1e6)), causal=True)
    grad = upstream(rng, (1, 2, 77))
    rows, grads = backend.judge(case, grad)
    # Padding in front of the queries, behind the keys: row i + 51 sees keys up to i.
    arrays = [np.full((1, 2, 128, 32), np.nan) for _ in range(4)]
    for name, x, padded in zip(INPUT_NAMES, case.arrays, arrays, strict=True):
        padded[:, :, slice(51, None) if name.endswith("_q") else slice(77)] = x
    wide = case._replace(arrays=tuple(arrays), options={**case.options, "q_offset": -51})
    wide_grad = np.concatenate([np.full((1, 2, 51), np.nan), grad], axis=2).astype(np.float32)
    wide_rows, wide_grads = backend.judge(wide, wide_grad)
    np.testing.assert_allclose(backend.numpy(wide_rows.kl)[:, :, 51:], backend.numpy(rows.kl), atol=3e-6)
    for name, a, b in zip(INPUT_NAMES, wide_grads, grads, strict=True):
        a, b = backend.numpy(a), backend.numpy(b)
        a, rest = (a[:, :, 51:], a[:, :, :51]) if name.endswith("_q") else (a[:, :, :77], a[:, :, 77:])
        assert (rest == 0).all(), name
        assert np.linalg.norm(a - b) <= 8e-3 * np.linalg.norm(b), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_direction(backend: Any, dtype: str) -> None:
    """KL(teacher || student), not the other way round."""
    p = np.array([0.9, 0.1])
    keys = [float(x) for x in reference.rounded(np.log(p), dtype)]
    there, back = run(backend, dtype, keys, [0, 0]), run(backend, dtype, [0, 0], keys)
    tolerance = 1e-6 if dtype == "float32" else 3e-3
    assert there.kl[0] == pytest.approx(0.368064, abs=tolerance)
    assert back.kl[0] == pytest.approx(0.510826, abs=tolerance)
    np.testing.assert_allclose(there.student_k, [-0.4, 0.4], atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_and_averages(backend: Any, dtype: str) -> None:
    """Upstream weights [2, 0, 1, 0.5] are the weights of single-row gradients; weight 0 is exactly 0."""
    weights = [2.0, 0.0, 1.0, 0.5]
    options: dict[str, Any] = {"causal": True, "q_offset": 3}
    keys = ([0, 1, -1, 2, 0.5, 1], [1, 0, 0, -1, 2, -0.5])
    all_rows = run(backend, dtype, *keys, rows=4, grad=weights, **options)
    total = np.zeros(6)
    for i, w in enumerate(weights):
        one = run(backend, dtype, *keys, rows=1, causal=True, q_offset=3 + i)
        assert all_rows.kl[i] == pytest.approx(one.kl[0], abs=1e-6)
        assert all_rows.student_q[i] == pytest.approx(w * one.student_q[0], rel=1e-2, abs=1e-6)
        assert w != 0 or all_rows.student_q[i] == all_rows.teacher_q[i] == 0
        total += w * one.student_k
    np.testing.assert_allclose(all_rows.student_k, total, atol=2e-2 if dtype == "bfloat16" else 2e-3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_average_does_not_depend_on_packing(backend: Any, dtype: str) -> None:
    """One rank with 1 row and one with 3: the sums add up, the means do not."""
    case = make(M=4, N=6, D_t=8, dtypes=dtype, seed=2)
    arrays = backend.arrays(case)
    parts = [[x[:, :, rows] if i % 2 == 0 else x for i, x in enumerate(arrays)] for rows in (slice(0, 1), slice(1, 4))]
    total = sum(float(backend.numpy(streamkl_cupy.attention_kl(*part, reduction="sum"))) for part in parts)
    mean = float(backend.numpy(streamkl_cupy.attention_kl(*arrays, reduction="mean")))
    assert mean == pytest.approx(total / 4, rel=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_are_read_through_their_strides(strided_backend: Any, rng: Any, dtype: str) -> None:
    """Query transposed from (2, 5, 3, 8), teacher keys every other column of a wider array, student keys reversed."""
    case = make(B=2, H=3, M=5, N=7, D_t=8, dtypes=dtype, seed=int(rng.integers(1e6)))
    tq, tk, sq, sk = case.arrays
    make_array = strided_backend.array
    reverse = slice(None, None, -1) if strided_backend.has_negative_strides else slice(None)
    views = (
        make_array(np.ascontiguousarray(tq.swapaxes(1, 2)), dtype).swapaxes(1, 2),
        make_array(np.repeat(tk, 2, axis=-1), dtype)[..., ::2],
        make_array(np.ascontiguousarray(sq.swapaxes(0, 2)), dtype).swapaxes(0, 2),
        make_array(sk[:, :, reverse], dtype)[:, :, reverse],
    )
    assert [tuple(x.shape) for x in views] == [x.shape for x in case.arrays]
    _, grads = strided_backend.judge(case, upstream(rng, (2, 3, 5)), arrays=views)
    compact = [x.is_contiguous() if hasattr(x, "is_contiguous") else x.flags.c_contiguous for x in grads]
    assert all(compact)


@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast_heads(strided_backend: Any, dtype: str) -> None:
    """A key head expanded over query heads has stride 0: it is not copied, and its gradient is one per head.

    Those gradients add up to the one of the call with a single key head.
    """
    case = make(H=6, M=9, N=11, D_t=16, teacher_key_heads=1, student_key_heads=1, dtypes=dtype, seed=4)
    arrays = strided_backend.arrays(case)
    rows, _ = strided_backend.judge(case, arrays=arrays)

    def expanded(x: Any) -> Any:
        shape = (1, 6, *x.shape[2:])
        return x.expand(shape) if hasattr(x, "expand") else strided_backend.xp.broadcast_to(x, shape)

    tq, tk, sq, sk = arrays
    views = (tq, expanded(tk), sq, expanded(sk))
    found = streamkl_cupy.attention_kl_forward(*views)
    np.testing.assert_allclose(strided_backend.numpy(found.kl), strided_backend.numpy(rows.kl), atol=2e-6)
    per_head = streamkl_cupy.attention_kl_backward(
        strided_backend.array(np.ones((1, 6, 9)), "float32"), *views, saved=found, wrt=INPUT_NAMES
    )
    single = streamkl_cupy.attention_kl_backward(
        strided_backend.array(np.ones((1, 6, 9)), "float32"), *arrays, saved=found, wrt=INPUT_NAMES
    )
    for name in ("teacher_k", "student_k"):
        many, one = (strided_backend.numpy(getattr(g, name)) for g in (per_head, single))
        assert many.shape == (1, 6, 11, 16)
        assert one.shape == (1, 1, 11, 16)
        np.testing.assert_allclose(many.sum(axis=1, keepdims=True), one, rtol=2e-2, atol=2e-2 * np.abs(one).max())


def test_bfloat16_is_exact_input(backend: Any, rng: Any) -> None:
    """bfloat16 inputs give what float32 inputs of the same values give, and gradients come back as bfloat16."""
    case = make(H=2, M=33, N=45, D_t=64, dtypes="bfloat16", seed=int(rng.integers(1e6)))
    narrow = streamkl_cupy.attention_kl_forward(*backend.arrays(case))
    wide = streamkl_cupy.attention_kl_forward(*(backend.array(x, "float32") for x in case.arrays))
    np.testing.assert_allclose(backend.numpy(narrow.kl), backend.numpy(wide.kl), rtol=1e-5, atol=4e-6)
    assert backend.dtype(narrow.kl) == "float32"
    _, grads = backend.judge(case, upstream(rng, (1, 2, 33)))
    assert {backend.dtype(x) for x in grads} == {"bfloat16"}


@pytest.mark.parametrize("dtype", ["int32", "int8", "bool", "complex64"])
def test_types_that_are_refused(backend: Any, dtype: str) -> None:
    case = make(M=3, N=4, D_t=8)
    if backend.module == "torch":
        odd = backend.xp.zeros((1, 1, 3, 8), dtype=getattr(backend.xp, dtype), device=backend.device)
    elif backend.module == "jax":
        odd = backend.xp.device_put(np.zeros((1, 1, 3, 8), dtype), backend.place)
    else:
        odd = backend.xp.zeros((1, 1, 3, 8), dtype)
    _, tk, sq, sk = backend.arrays(case)
    with pytest.raises(TypeError, match="teacher_q"):
        streamkl_cupy.attention_kl(odd, tk, sq, sk)
    with pytest.raises(TypeError, match="teacher_q"):
        streamkl_cupy.attention_kl_forward(odd, tk, sq, sk)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind", ["float", "int", "numpy float32", "numpy float64", "numpy int", "0-d numpy", "0-d of the framework"]
)
def test_scale_of_any_number_type(backend: Any, dtype: str, kind: str) -> None:
    """A Python float passed as a double where a float is read arrives as 0 and gives KL 0."""
    value = 1.0 if "int" in kind else 0.5
    scale: Any = {
        "float": 0.5,
        "int": 1,
        "numpy float32": np.float32(0.5),
        "numpy float64": np.float64(0.5),
        "numpy int": np.int64(1),
        "0-d numpy": np.array(0.5),
    }.get(kind)
    if scale is None:
        scale = backend.array(np.array(0.5), "float32")
    r = run(backend, dtype, [0, 1], [0, 0], teacher_scale=scale)
    assert r.kl[0] == pytest.approx(0.030300 if value == 0.5 else 0.110944, abs=2e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_twice_is_the_same(backend: Any, rng: Any, dtype: str) -> None:
    """Saved values are read, never scaled in place."""
    case = make(H=2, M=20, N=30, D_t=16, dtypes=dtype, seed=1)
    arrays = backend.arrays(case)
    rows = streamkl_cupy.attention_kl_forward(*arrays)
    before = [backend.numpy(x) for x in (*arrays, *rows)]
    g = backend.array(upstream(rng, (1, 2, 20)), "float32")
    first, second = (
        streamkl_cupy.attention_kl_backward(g, *arrays, saved=rows, wrt=INPUT_NAMES, deterministic=True)
        for _ in range(2)
    )
    for a, b in zip(first, second, strict=True):
        np.testing.assert_array_equal(backend.numpy(a), backend.numpy(b))
    for a, b in zip(before, (*arrays, *rows), strict=True):
        np.testing.assert_array_equal(a, backend.numpy(b))

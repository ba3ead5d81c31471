"""The judge itself: the dense reference against closed forms, finite differences and its own other routes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from streamkl_cupy.rules.divergences import DIVERGENCES
from streamkl_cupy.testing import reference
from streamkl_cupy.testing.problems import RECIPES, make, upstream

Array = NDArray[Any]

MASKED: list[dict[str, Any]] = [{}, {"causal": True}, {"causal": True, "q_offset": -2}, {"causal": True, "q_offset": 9}]


def scores(*keys: float) -> Array:
    """Keys whose scores are these, for a query of 1 and a scale of 1 at D = 1."""
    return np.array(keys)[:, None]


ONE = np.ones((1, 1))


@pytest.mark.parametrize(
    "teacher, student, expected",
    [
        ([0, 0], [0, -200], 100 - math.log(2)),
        ([0, -300], [-300, 0], 300),
        ([math.log(0.9), math.log(0.1)], [0, 0], 0.9 * math.log(1.8) + 0.1 * math.log(0.2)),
        ([0, 0, -300], [0, 0, -300], 0),
        ([5], [-7], 0),
    ],
)
def test_closed_forms(teacher: list[float], student: list[float], expected: float) -> None:
    rows = reference.forward(ONE, scores(*teacher), ONE, scores(*student))
    assert rows.kl[0] == pytest.approx(expected, abs=1e-12)
    assert rows.teacher_lse[0] == pytest.approx(np.logaddexp.reduce(teacher), abs=1e-12)
    assert rows.student_lse[0] == pytest.approx(np.logaddexp.reduce(student), abs=1e-12)


def test_gradient_of_closed_forms() -> None:
    grads = reference.backward(np.ones(1), ONE, scores(0, 0), ONE, scores(0, -200)).value
    np.testing.assert_allclose(grads.student_q, [[100.0]])
    np.testing.assert_allclose(grads.student_k[:, 0], [0.5, -0.5])
    np.testing.assert_allclose(grads.teacher_k[:, 0], [-50, 50])


@pytest.mark.parametrize("divergence", sorted(DIVERGENCES))
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("options", MASKED)
def test_gradients_are_finite_differences(divergence: str, layout: str, options: dict[str, Any]) -> None:
    case = make(
        "gaussian", B=2, H=4, M=3, N=5, D_t=3, D_s=2, teacher_key_heads=2, student_key_heads=1,
        dtypes="float64", layout=layout, seed=3, teacher_scale=-0.7, student_scale=0.9, **options,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    shape = (2, 4, 3) if layout == "bhnd" else (2, 3, 4)
    grad = rng.standard_normal(shape)
    grads = reference.backward(grad, *case.arrays, divergence=divergence, **case.options).value

    def loss(arrays: list[Array]) -> float:
        return float((grad * reference.forward(*arrays, divergence=divergence, **case.options).kl).sum())

    step = 1e-5
    for i, x in enumerate(case.arrays):
        direction = rng.standard_normal(x.shape)
        moved = [[y + s * direction if j == i else y for j, y in enumerate(case.arrays)] for s in (step, -step)]
        slope = (loss(moved[0]) - loss(moved[1])) / (2 * step)
        assert float((grads[i] * direction).sum()) == pytest.approx(slope, rel=1e-7, abs=1e-8)


def test_causal_is_aligned_at_the_end() -> None:
    seen = reference.visible(1, 1, 3, 2, causal=True)
    assert seen[0, 0].tolist() == [[False, False], [True, False], [True, True]]


def test_empty_rows_and_invisible_memory() -> None:
    q, k = np.full((3, 1), np.nan), np.full((4, 1), np.nan)
    q[1:], k[:2] = 1, [[0], [math.log(3)]]
    options: dict[str, Any] = {"causal": True, "q_offset": -1, "teacher_scale": 1.0, "student_scale": 1.0}
    student_k = np.where(np.isnan(k), k, 0)
    rows = reference.forward(q, k, q, student_k, **options)
    np.testing.assert_allclose(rows.kl, [0, 0, 0.75 * math.log(1.5) + 0.25 * math.log(0.5)], atol=1e-15)
    assert rows.teacher_lse[0] == -np.inf
    grads = reference.backward(np.array([np.nan, 1, 1]), q, k, q, student_k, **options).value
    np.testing.assert_allclose(grads.student_k[:, 0], [0.25, -0.25, 0, 0], atol=1e-15)
    assert grads.student_q[0] == 0
    assert all(np.isfinite(x).all() for x in grads)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", range(4))
def test_visible_nan_reaches_its_rows_and_only_those(bad: float, which: int) -> None:
    case = make("gaussian", M=5, N=5, D_t=3, dtypes="float64", causal=True)
    case.arrays[which][0, 0, 3, 1] = bad
    rows = reference.forward(*case.arrays, **case.options)
    expected = [False, False, False, True, which % 2 == 1]
    assert np.isnan(rows.kl[0, 0]).tolist() == expected
    grads = reference.backward(np.ones((1, 1, 5)), *case.arrays, **case.options).value
    assert np.isnan(grads.student_q[0, 0]).all(axis=-1).tolist() == expected
    assert np.isfinite(grads.student_q[0, 0, ~np.array(expected)]).all()


def test_reductions() -> None:
    # Rows of two "ranks": [0.4] and [0.1, 0.1, 0.1]; the mean of means would be 0.25.
    kl, lse = np.array([0.4, 0.1, 0.1, 0.1, 7.0]), np.array([0, 0, 0, 0, -np.inf])
    assert reference.reduce(kl, lse, None, "mean") == pytest.approx(0.175)
    assert reference.reduce(kl, lse, None, "sum") == pytest.approx(0.7)
    assert reference.reduce(kl, lse, [2, 0, 1, 0.5, np.nan], "mean") == pytest.approx(0.95 / 3.5)
    assert reference.reduce(kl, lse, 0, "mean") == 0
    assert reference.reduce(kl, lse, 2, "none").tolist() == pytest.approx([0.8, 0.2, 0.2, 0.2, 0])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rounding_is_to_nearest_even(dtype: str, rng: np.random.Generator) -> None:
    types: dict[str, Any] = {"float32": np.float32, "float16": np.float16}
    if dtype == "bfloat16":
        types[dtype] = pytest.importorskip("ml_dtypes").bfloat16
    x = np.concatenate([rng.standard_normal(2000) * 10.0 ** rng.integers(-6, 5, 2000), [1 + 2**-8, 1 + 3 * 2**-8]])
    x = np.concatenate([x, [0, np.inf, -np.inf, np.nan, 1e-40]]).astype(np.float32)
    np.testing.assert_array_equal(reference.rounded(x, dtype), x.astype(types[dtype]).astype(np.float32))


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_problems_are_seeded_exact_and_what_they_say(name: str) -> None:
    shape: dict[str, Any] = {"B": 2, "H": 4, "M": 33, "N": 65, "D_t": 16, "D_s": 8, "student_key_heads": 2}
    case = make(name, **shape, dtypes=("bfloat16", "float16"), seed=5, causal=True)
    again = make(name, **shape, dtypes=("bfloat16", "float16"), seed=5, causal=True)
    assert all(np.array_equal(a, b) for a, b in zip(case.arrays, again.arrays, strict=True))
    assert [x.shape for x in case.arrays] == [(2, 4, 33, 16), (2, 4, 65, 16), (2, 4, 33, 8), (2, 2, 65, 8)]
    for x, dtype in zip(case.arrays, case.dtype_of_inputs, strict=True):
        assert np.array_equal(reference.rounded(x, dtype), x)
    rows = reference.forward(*case.arrays, **case.options)
    assert np.isfinite(rows.kl).all()
    assert rows.kl.max() > 1e-7


def test_problems_are_as_hard_as_they_claim() -> None:
    shape: dict[str, Any] = {"M": 50, "N": 400, "D_t": 32, "dtypes": "float64"}
    rows = {name: reference.forward(*make(name, **shape).arrays, **make(name, **shape).options) for name in RECIPES}
    assert rows["near_equal"].kl.max() < 1e-4
    assert rows["huge"].largest.max() > 8e3
    assert np.median(rows["spiky"].kl) > 20
    assert rows["crossing"].kl.min() > 10
    assert rows["zero_scale"].student_lse == pytest.approx(math.log(400))


def test_upstream_kinds() -> None:
    rng = np.random.default_rng(0)
    wild = upstream(rng, (400,), "wild")
    assert (wild == 0).sum() == 80
    assert np.abs(wild).max() > 1e3
    assert 0 < np.abs(wild[wild != 0]).min() < 1e-5
    assert (upstream(rng, (5,), "ones") == 1).all()
    assert (upstream(rng, (400,)) < 0).any()


@pytest.mark.parametrize("options", MASKED)
def test_plain_computation_is_near(options: dict[str, Any]) -> None:
    case = make("gaussian", H=2, M=20, N=30, student_key_heads=1, seed=2, **options)
    grad = upstream(np.random.default_rng(1), (1, 2, 20))
    kl, grads = reference.plain(grad, *case.arrays, **case.options)
    np.testing.assert_allclose(kl, reference.forward(*case.arrays, **case.options).kl, atol=1e-5)
    for a, e in zip(grads, reference.backward(grad, *case.arrays, **case.options).value, strict=True):
        np.testing.assert_allclose(a, e, atol=1e-5)

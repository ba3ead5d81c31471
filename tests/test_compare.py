"""The comparisons catch planted faults and name where they are; what they must let pass, they let pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from streamkl_cupy.testing import compare, reference
from streamkl_cupy.testing.problems import make, upstream

Array = NDArray[Any]
DTYPES = ["bfloat16", "float16", "float32"]


@pytest.fixture(scope="module")
def problem() -> tuple[Any, reference.Rows, Array, reference.Gradients]:
    case = make("gaussian", B=1, H=2, M=60, N=90, D_t=32, seed=9)
    rows = reference.forward(*case.arrays, **case.options)
    grad = upstream(np.random.default_rng(1), rows.kl.shape)
    return case, rows, grad, reference.backward(grad, *case.arrays, **case.options)


def check(actual: Array, gradients: reference.Gradients, dtype: str, i: int = 2, **options: Any) -> float:
    parts = (getattr(gradients, field)[i] for field in gradients._fields)
    return compare.check_gradient("gradient", actual, *parts, dtype, **options)


def faults(e: Array) -> dict[str, Array]:
    """Faults by name. Every fifth row has no upstream gradient, and so nothing to break."""
    zeroed, flipped, swapped, element = (e.copy() for _ in range(4))
    zeroed[0, 1, 7] = 0
    flipped[0, 0, 3] *= -1
    swapped[0, 0, [11, 12]] = swapped[0, 0, [12, 11]]
    element[0, 1, 21, 5] += 0.3 * np.linalg.norm(e[0, 1, 21])
    return {
        "zeroed row": zeroed,
        "sign flip of a row": flipped,
        "sign flip": -e,
        "bias of 1%": e * 1.01,
        "swapped rows": swapped,
        "missing scale": e * 32**0.5,
        "one element": element,
        "all zero": np.zeros_like(e),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("i", range(4))
@pytest.mark.parametrize("fault", sorted(faults(np.ones((1, 2, 30, 6)))))
def test_planted_faults_in_gradients(problem: Any, dtype: str, i: int, fault: str) -> None:
    gradients = problem[3]
    truth = reference.rounded(gradients.value[i], dtype)
    check(truth, gradients, dtype, i)
    broken = faults(truth.astype(np.float64))[fault]
    with pytest.raises(AssertionError, match=r"^gradient: .*(worst|rows are off|biased)"):
        check(broken, gradients, dtype, i)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_small_wrong_row_among_large_ones(problem: Any, dtype: str) -> None:
    case = problem[0]
    grad = np.full((1, 2, 60), 1e4)
    grad[0, 0, 5] = 1e-3
    gradients = reference.backward(grad, *case.arrays)
    broken = gradients.value.student_q.copy()
    broken[0, 0, 5] = 0
    with pytest.raises(AssertionError, match=r"1 of 120 rows are off; worst is row \(0, 0, 5\) with norm ratio 0 "):
        check(broken, gradients, dtype)


def test_bias_is_told_from_noise(problem: Any) -> None:
    e = problem[3].value.student_q
    rng = np.random.default_rng(0)
    check(e * (1 + 3e-3 * rng.standard_normal(e.shape)), problem[3], "bfloat16")
    with pytest.raises(AssertionError, match=r"biased by a factor 1\.003"):
        check(e * 1.003, problem[3], "bfloat16")


def test_places_of_nan_and_zero(problem: Any) -> None:
    gradients = problem[3]
    e = gradients.value.student_q
    spread = e.copy()
    spread[0, 1, 2, 3] = np.nan
    with pytest.raises(AssertionError, match=r"1 elements are not finite; worst at \(0, 1, 2, 3\): got nan"):
        check(spread, gradients, "float32")

    poisoned = gradients._replace(value=gradients.value._replace(student_q=spread))
    check(spread, poisoned, "float32")
    with pytest.raises(AssertionError, match=r"finite where NaN or Inf was visible; first at \(0, 1, 2, 3\)"):
        check(e, poisoned, "float32")
    wider = spread.copy()
    wider[0, 1, 2] = np.nan
    with pytest.raises(AssertionError, match="not finite"):
        check(wider, poisoned, "float32")
    check(wider, poisoned, "float32", nan_may_spread=True)

    row_without_upstream = e.copy()
    assert (e[0, 0, 0] == 0).all()
    row_without_upstream[0, 0, 0, 1] = 1e-30
    with pytest.raises(AssertionError, match=r"1 elements must be exactly 0; worst at \(0, 0, 0, 1\): got 1e-30"):
        check(row_without_upstream, gradients, "float32")


def test_float16_overflow_and_underflow_are_roundings() -> None:
    case = make("gaussian", M=40, N=50, seed=4)
    for size in (1e7, 1e-5):
        gradients = reference.backward(np.full((1, 1, 40), size), *case.arrays)
        e = reference.rounded(gradients.value.student_q, "float16")
        assert np.isinf(e).any() == (size > 1)
        check(e, gradients, "float16")
        with pytest.raises(AssertionError):
            check(-e, gradients, "float16")


def test_shapes(problem: Any) -> None:
    with pytest.raises(AssertionError, match=r"gradient: shape \(1, 60, 2, 32\), expected \(1, 2, 60, 32\)"):
        check(problem[3].value.student_q.swapaxes(1, 2), problem[3], "float32")
    with pytest.raises(AssertionError, match="shape"):
        compare.check_rows("kl", np.zeros(3), problem[1])


def test_check_gradients_names_the_input(problem: Any) -> None:
    gradients = problem[3]
    broken = gradients.value._replace(teacher_k=-gradients.value.teacher_k)
    with pytest.raises(AssertionError, match=r"^gradient of teacher_k: relative L2 error 2 exceeds .*cosine -1"):
        compare.check_gradients(broken, gradients, ("float32", "float32"))
    assert compare.check_gradients(gradients.value, gradients, ("float32", "float16")) == 0
    only = (None, None, gradients.value.student_q, None)
    assert compare.check_gradients(only, gradients, ("float32", "float32")) == 0


def test_rows(problem: Any) -> None:
    rows = problem[1]
    assert compare.check_rows("kl", rows.kl, rows) == 0
    off = rows.kl.copy()
    off[0, 1, 33] += 1e-5 * (1 + off[0, 1, 33])
    with pytest.raises(AssertionError, match=r"kl: 1 of 120 rows exceed .* worst at \(0, 1, 33\)"):
        compare.check_rows("kl", off, rows)
    assert 0 < compare.check_rows("kl", off, rows, hard=True) < 1
    off[0, 1, 33] = np.nan
    with pytest.raises(AssertionError, match=r"NaN or Inf differ in 1 of 120 places; worst at \(0, 1, 33\): got nan"):
        compare.check_rows("kl", off, rows)
    with pytest.raises(AssertionError, match="exceed"):
        compare.check_rows("kl", rows.kl + 1e-10, rows, dtype="float64")


def test_log_sum_exps() -> None:
    e, largest = np.array([1.0, -np.inf, 300.0]), np.array([1.0, 0.0, 300.0])
    assert compare.check_lse("lse", e + np.array([1e-6, 0, 1e-4]), e, largest) < 1
    with pytest.raises(AssertionError, match="exceed"):
        compare.check_lse("lse", e + np.array([1e-4, 0, 0]), e, largest)
    for empty in (np.inf, -1e30, np.nan):
        with pytest.raises(AssertionError, match="differ in 1 of 3 places"):
            compare.check_lse("lse", [1.0, empty, 300.0], e, largest)


def test_calibration_follows_the_plain_computation(problem: Any, rng: Any) -> None:
    e = problem[1].kl
    one = 1e-5 * rng.uniform(0.1, 1, e.shape)
    noise = one * rng.standard_normal(e.shape)
    noise /= np.sqrt((noise**2 / one**2).mean())
    # 3 roundings of a plain one allow 2 x 3 + 1, whoever's signs and places these are.
    for factor in (6.9, -6.9):
        compare.check_calibrated("kl", e + factor * noise[:, ::-1] * one / one[:, ::-1], e, e + 3 * noise, one)
    with pytest.raises(AssertionError, match=r"errors of 7\.1 roundings .* more than twice the 3 of a plain"):
        compare.check_calibrated("kl", e + 7.1 * noise, e, e + 3 * noise, one)
    single = e.copy()
    single[0, 1, 7] += 69 * one[0, 1, 7]
    compare.check_calibrated("kl", single, e, e + 3 * noise, one)
    single[0, 1, 7] += 2 * one[0, 1, 7]
    with pytest.raises(AssertionError, match=r"an error of 71 roundings where 7 are .* worst at \(0, 1, 7\)"):
        compare.check_calibrated("kl", single, e, e + 3 * noise, one)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("i", range(4))
def test_gradients_just_beyond_a_plain_computation(problem: Any, rng: Any, dtype: str, i: int) -> None:
    """Noise of the plain one's size passes; above twice that, and a rounding, it is caught, by whichever check."""
    case, _, grad, gradients = problem
    truth = gradients.value[i]
    plain = reference.plain(grad, *case.arrays, dtypes=(dtype, dtype), **case.options)[1][i]
    one = 2.0 ** {"bfloat16": -8, "float16": -11, "float32": -24}[dtype] * (np.abs(truth) + gradients.noise[i])
    one += 2.0**-24 * gradients.magnitude[i]
    noise = one * rng.standard_normal(truth.shape)
    counts = one > 0
    theirs = np.sqrt((((plain - truth)[counts] / one[counts]) ** 2).mean())
    check(truth + theirs * noise, gradients, dtype, i, plain=plain)
    with pytest.raises(AssertionError):
        check(truth + 1.2 * (2 * theirs + 1) * noise, gradients, dtype, i, plain=plain)


def test_rows_just_beyond_a_plain_computation(problem: Any, rng: Any) -> None:
    rows = problem[1]
    one = 2.0**-24 * (1 + rows.kl + rows.condition)
    compare.check_rows("kl", rows.kl + 0.9 * one * rng.choice([-1, 1], one.shape), rows, plain=rows.kl)
    with pytest.raises(AssertionError, match="roundings"):
        compare.check_rows("kl", rows.kl + 1.1 * one * rng.choice([-1, 1], one.shape), rows, plain=rows.kl)


def test_same_bits() -> None:
    a = np.array([1.0, np.nan, -0.0])
    compare.check_same_bits("x", a, [1.0, np.nan, 0.0])
    with pytest.raises(AssertionError, match=r"x: 1 of 3 elements differ; worst at \(0,\): got 1, expected 1\.0000"):
        compare.check_same_bits("x", a, [1 + 1e-7, np.nan, 0.0])


def test_nothing_to_compare() -> None:
    case = make("gaussian", M=0, N=5, D_t=4)
    rows = reference.forward(*case.arrays)
    assert compare.check_rows("kl", np.zeros((1, 1, 0)), rows, plain=np.zeros((1, 1, 0))) == 0
    gradients = reference.backward(np.zeros((1, 1, 0)), *case.arrays)
    assert compare.check_gradients(gradients.value, gradients, ("float16", "float16"), plain=gradients.value) == 0

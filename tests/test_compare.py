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
    return compare.check_gradient("gradient", actual, gradients.of(i), dtype, **options)


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
    with pytest.raises(AssertionError, match=r"^gradient of teacher_k: relative L2 error 2 exceeds .*cosine -1\)"):
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
    for one, other in ((a, [1.0, 2.0, 0.0]), ([1.0, 2.0, 0.0], a)):
        with pytest.raises(AssertionError, match=r"x: 1 of 3 elements differ; worst at \(1,\)"):
            compare.check_same_bits("x", one, other)


def test_nothing_to_compare() -> None:
    case = make("gaussian", M=0, N=5, D_t=4)
    rows = reference.forward(*case.arrays)
    assert compare.check_rows("kl", np.zeros((1, 1, 0)), rows, plain=np.zeros((1, 1, 0))) == 0
    gradients = reference.backward(np.zeros((1, 1, 0)), *case.arrays)
    assert compare.check_gradients(gradients.value, gradients, ("float16", "float16"), plain=gradients.value) == 0


# Every bound from both sides: what is just within passes and says how much of it was used, what is just beyond fails.

EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
BOUND = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 1e-5, "float64": 1e-12}
LEAST = {"bfloat16": 2.0**-134, "float16": 2.0**-25, "float32": 2.0**-150, "float64": 0.0}


def held(judge: Any, size: float, message: str) -> None:
    """`judge(x)` is given x times an error that uses `size` of its bound."""
    share = judge(0.99)
    assert share == pytest.approx(0.99 * size, rel=2e-3)
    with pytest.raises(AssertionError, match=message):
        judge(1.01)


@pytest.mark.parametrize(
    "options, relative, rounding",
    [
        ({}, 2e-6, 2.0**-24),
        ({"hard": True}, 1e-5, 2.0**-22),
        ({"unit": 1e-3}, 2e-6, 4e-3),
        ({"hard": True, "unit": 1e-3}, 1e-5, 4e-3),
        ({"dtype": "float64"}, 1e-13, 2.0**-49),
        ({"dtype": "float64", "hard": True}, 1e-13, 2.0**-49),
    ],
)
@pytest.mark.parametrize("kl, condition", [(0.0, 0.0), (37.0, 0.0), (0.0, 5e3), (3.0, 40.0)])
def test_bound_of_rows(
    rng: Any, options: dict[str, Any], relative: float, rounding: float, kl: float, condition: float
) -> None:
    e, at = np.full((2, 3, 7), kl), tuple(rng.integers((2, 3, 7)))
    rows = reference.Rows(e, e, e, e, np.full(e.shape, condition))
    sign = rng.choice([-1, 1])

    def judge(x: float) -> float:
        a = e.copy()
        a[at] += sign * x * (relative * (1 + kl) + rounding * condition)
        return compare.check_rows("kl", a, rows, **options)

    held(judge, 1, rf"1 of 42 rows exceed .* worst at \({at[0]}, {at[1]}, {at[2]}\)")


@pytest.mark.parametrize("options, bound", [({}, 2e-6), ({"unit": 1e-4}, 1.02e-4), ({"dtype": "float64"}, 1e-13)])
@pytest.mark.parametrize("largest", [0.0, 50.0])
def test_bound_of_log_sum_exps(options: dict[str, Any], bound: float, largest: float) -> None:
    e = np.array([-2.0, -np.inf, 0.5])

    def judge(x: float) -> float:
        off = np.array([0, 0, -x * bound * (1 + largest)])
        return compare.check_lse("lse", e + off, e, np.full(3, largest), **options)

    held(judge, 1, "1 of 3 rows exceed")


@pytest.mark.parametrize(
    "options, one", [({}, 2.0**-24), ({"dtype": "float64"}, 2.0**-53), ({"unit": 2.0**-20}, 2.0**-20)]
)
def test_calibrated_bound_of_rows(rng: Any, options: dict[str, Any], one: float) -> None:
    e = rng.uniform(0, 3, (4, 50))
    rows = reference.Rows(e, e, e, e, rng.uniform(5, 50, e.shape))
    roundings = one * (1 + e + rows.condition) * rng.choice([-1, 1], e.shape)
    compare.check_rows("kl", e + 0.97 * roundings, rows, plain=e, **options)
    with pytest.raises(AssertionError, match=r"errors of 1\.0\d roundings"):
        compare.check_rows("kl", e + 1.03 * roundings, rows, plain=e, **options)


def test_share_of_the_calibrated_bound() -> None:
    e, one = np.zeros(400), np.full(400, 1e-6)
    plain = np.resize([3e-6, -3e-6], 400)
    assert compare.check_calibrated("x", plain, e, plain, one) == pytest.approx(3 / 7)
    single = e.copy()
    single[5] = 35e-6
    assert compare.check_calibrated("x", single, e, plain, one) == pytest.approx(0.5)
    # Where there is no number, or no rounding to count in, nothing is judged.
    odd = single.copy()
    odd[:4] = np.nan, np.inf, 1, 1
    one[2:4] = 0
    assert compare.check_calibrated("x", odd, e, plain, one) == pytest.approx(0.5)
    assert compare.check_calibrated("x", odd[:4], e[:4], plain[:4], one[:4]) == 0


class Parts:
    """A gradient of 64 rows of length 1, with what it is made of."""

    def __init__(self, rng: np.random.Generator, rows: int = 64, size: float = 1e-12, noise: float = 0.0) -> None:
        e = rng.standard_normal((1, 2, rows // 2, 16))
        self.value = e / np.linalg.norm(e, axis=-1, keepdims=True)
        even = np.full(e.shape, 0.25)  # rows of length 1 too
        self.size, self.noise, self.rough = size * even, noise * even, 0 * even
        aside = rng.standard_normal(e.shape)
        aside -= (aside * self.value).sum(axis=-1, keepdims=True) * self.value
        self.aside = aside / np.linalg.norm(aside, axis=-1, keepdims=True)
        """Errors of length 1 in each row, without a component along the truth."""

    def check(self, error: Array, dtype: str, **options: Any) -> float:
        e = self.value
        terms = reference.Terms(e, self.size, self.noise, self.rough)
        return compare.check_gradient("x", e + error, terms, dtype, **options)


FEW = 1 + 1 / 64  # a bound of many roundings, and of 64 rows


@pytest.mark.parametrize("dtype", sorted(BOUND))
@pytest.mark.parametrize("noise", [0.0, 30.0])
def test_bound_of_a_gradient(rng: Any, dtype: str, noise: float) -> None:
    x = Parts(rng, noise=noise)
    allowed = FEW * BOUND[dtype] * max(1, noise)
    held(lambda share: x.check(share * allowed * x.aside, dtype), 1, "relative L2 error")


@pytest.mark.parametrize(
    "dtype, options, rounding, rough",
    [
        ("float32", {}, 2.0**-24, 0),
        ("float16", {}, 2.0**-24, 0),
        ("float64", {}, 2.0**-53, 0),
        ("float32", {"hard": True}, 2.0**-24, 4 * 2.0**-24),
        ("float64", {"hard": True}, 2.0**-53, 4 * 2.0**-53),
        ("float32", {"unit": 1e-4}, 1e-4, 4e-4),
        ("float32", {"unit": 1e-4, "hard": True}, 1e-4, 4e-4),
        ("float32", {"unit": 1e-9}, 2.0**-24, 4 * 2.0**-24),
    ],
)
def test_bound_of_terms_that_cancel(rng: Any, dtype: str, options: Any, rounding: float, rough: float) -> None:
    x = Parts(rng, size=1e5)
    x.rough = np.full(x.size.shape, 3e5 * 0.25)
    allowed = FEW * BOUND[dtype] + 5 * rounding * 1e5 + rough * 3e5
    held(lambda share: x.check(share * allowed * x.aside, dtype, **options), 1, "relative L2 error")
    # Nothing is left of the terms, as in rows with a single key.
    x.value = 0 * x.value
    allowed = 10 * rounding * 1e5 + rough * 3e5
    held(lambda share: x.check(share * allowed * x.aside, dtype, **options), 1, "relative L2 error")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_bound_near_zero(rng: Any, dtype: str) -> None:
    x = Parts(rng)
    x.value = 1e-3 * LEAST[dtype] * x.value
    x.size = np.abs(x.value)
    allowed = LEAST[dtype] * x.value.size**0.5 / 8
    held(lambda share: x.check(share * allowed * x.aside, dtype), 1, "relative L2 error")
    # Rounding to zero is no bias.
    x.check(-x.value, dtype)


@pytest.mark.parametrize("rows, few", [(2, 2), (16, 1 + 1 / 8), (1024, 1 + 1 / 512)])
def test_bound_of_few_roundings(rng: Any, rows: int, few: float) -> None:
    """Of `rows` rows half are large; how many roundings there are is how many of these."""
    x = Parts(rng, rows)
    x.value[:, 1] *= 1e-4
    norm = (rows // 2) ** 0.5
    error = few * 4e-3 * x.aside
    error[:, 1] *= 1e-5
    judged = held if rows > 2 else lambda judge, size, message: judge(0.99)
    judged(lambda share: x.check(share * error, "bfloat16"), 1, "relative L2 error")
    assert norm == pytest.approx(np.linalg.norm(x.value), rel=1e-6)


@pytest.mark.parametrize("dtype", sorted(BOUND))
@pytest.mark.parametrize("noise, size", [(0.0, 0.0), (0.7, 0.0), (0.0, 1e5)])
def test_bound_of_one_row(rng: Any, dtype: str, noise: float, size: float) -> None:
    x = Parts(rng, 4096, size or 1e-12, noise)
    row_allowed = (
        3 * BOUND[dtype] * (1 + noise) + 4 * 5 * EPSILON["float64" if dtype == "float64" else "float32"] * size
    )
    error = np.zeros(x.value.shape)
    error[0, 1, 77] = row_allowed * x.aside[0, 1, 77]
    assert 0 < x.check(0.99 * error, dtype) < 1
    with pytest.raises(AssertionError, match=r"1 of 4096 rows are off; worst is row \(0, 1, 77\)"):
        x.check(1.01 * error, dtype)


def test_the_row_furthest_beyond_its_bound_is_named(rng: Any) -> None:
    x = Parts(rng, 4096)
    x.value[0, 0, 9] *= 1e-3
    error = np.zeros(x.value.shape)
    error[0, 0, 5], error[0, 0, 9] = 0.02 * x.aside[0, 0, 5], 2e-3 * x.aside[0, 0, 9]
    with pytest.raises(
        AssertionError, match=r"2 of 4096 rows are off; worst is row \(0, 0, 9\) with norm ratio 2\.236"
    ):
        x.check(error, "bfloat16")


def test_rows_of_nan_lend_the_others_nothing(rng: Any) -> None:
    x = Parts(rng, size=1e4, noise=2.0)
    x.rough = x.size
    x.value[:, 1] = np.nan
    x.aside[:, 1] = 0
    few, blur = 1 + 1 / 32, 9 * 2.0**-24 * 1e4
    allowed = few * 1e-5 * 2 + blur
    held(lambda share: x.check(share * allowed * x.aside, "float32", hard=True), 1, "relative L2 error")
    error = few * 1e-5 * 3 * x.value
    x.size, x.noise, x.rough = 1e-9 * x.size, 0 * x.noise, 0 * x.rough
    with pytest.raises(AssertionError, match="relative L2"):
        x.check(error, "float32")


def test_bound_of_a_row_of_nothing(rng: Any) -> None:
    """Probabilities that float32 does not have are no fault of the row that is made of them."""
    x = Parts(rng, size=1.0)
    x.value[0, 1, 7] *= 1e-33
    x.size[0, 1, 7] = np.abs(x.value[0, 1, 7])
    error = np.zeros(x.value.shape)
    error[0, 1, 7] = 5e-30 * x.aside[0, 1, 7]
    x.check(0.99 * error, "float32")
    with pytest.raises(AssertionError, match="1 of 64 rows are off"):
        x.check(1.01 * error, "float32")


@pytest.mark.parametrize("rows, part", [(64, 0.25 + 1.5 / 8), (1024, 0.25 + 1.5 / 32)])
@pytest.mark.parametrize("sign", [-1, 1])
def test_bound_of_a_bias(rng: Any, rows: int, part: float, sign: int) -> None:
    x = Parts(rng, rows)
    for dtype, bound in BOUND.items():
        bias = sign * part * (1 + 1 / rows) * bound
        x.check(0.99 * bias * x.value, dtype)
        with pytest.raises(AssertionError, match="biased by a factor"):
            x.check(1.01 * bias * x.value, dtype)


@pytest.mark.parametrize("dtype", sorted(BOUND))
def test_calibrated_bound_of_a_gradient(rng: Any, dtype: str) -> None:
    x = Parts(rng, 4096, noise=1e-3, size=4096.0 if dtype == "float64" else 2.0**10 * EPSILON[dtype])
    blur = EPSILON["float64" if dtype == "float64" else "float32"] * x.size
    one = EPSILON[dtype] * (np.abs(x.value) + x.noise) + blur + LEAST[dtype]
    error = one * rng.choice([-1, 1], one.shape)
    x.check(0.99 * error, dtype, plain=x.value)
    with pytest.raises(AssertionError, match=r"errors of 1\.01 roundings"):
        x.check(1.01 * error, dtype, plain=x.value)


def test_exactly_zero_is_meant(rng: Any) -> None:
    x = Parts(rng, size=1.0)
    x.value[0, 0, 3], x.size[0, 0, 3] = 0, 0
    error = np.zeros(x.value.shape)
    for tiny in (0.9e-300, -0.9e-300):
        error[0, 0, 3, 2] = tiny
        x.check(error, "float32")
        with pytest.raises(AssertionError, match="1 elements must be exactly 0"):
            x.check(1.2 * error, "float32")


def test_nan_may_spread_only_from_nan_and_where_it_is_said(problem: Any) -> None:
    gradients = problem[3]
    e = gradients.value
    spread = [x.copy() for x in e]
    spread[2][0, 1, 2] = np.nan
    for options in ({}, {"nan_may_spread": True}):
        with pytest.raises(AssertionError, match=r"gradient of student_q: .* not finite"):
            compare.check_gradients(tuple(spread), gradients, ("float32", "float32"), **options)
    wanted = e.student_q.copy()
    wanted[0, 1, 2, 3] = np.nan
    poisoned = gradients._replace(value=e._replace(student_q=wanted))
    with pytest.raises(AssertionError, match=r"gradient of student_q: .* not finite"):
        compare.check_gradients(tuple(spread), poisoned, ("float32", "float32"))
    compare.check_gradients(tuple(spread), poisoned, ("float32", "float32"), nan_may_spread=True)
    spread[2][0, 1, 3] = np.inf
    with pytest.raises(AssertionError, match="not finite"):
        compare.check_gradients(tuple(spread), poisoned, ("float32", "float32"), nan_may_spread=True)


@pytest.mark.parametrize("sign", [-1, 1])
def test_infinity_of_float16_is_a_rounding_only_near_the_largest(rng: Any, sign: int) -> None:
    x = Parts(rng)
    x.value *= sign * 65504 * (1 - 4e-4) / x.value[0, 0, 0, 0]
    wanted = np.where(np.arange(16) == 0, x.value, x.value / np.abs(x.value))
    wanted[0, 1:] *= 1e-3
    wanted[:, :, 1:, 0] = 1
    x.value, x.size = wanted, np.abs(wanted)
    error = np.zeros(wanted.shape)
    error[0, 0, 0, 0] = sign * np.inf
    x.check(error, "float16")
    for other in (sign * np.inf, -sign * np.inf):
        x.value = wanted.copy()
        x.value[0, 0, 0, 0] *= 1 if other == -sign * np.inf else 1 - 2e-4
        error[0, 0, 0, 0] = other
        with pytest.raises(AssertionError, match="1 elements are not finite"):
            x.check(error, "float16")
    with pytest.raises(AssertionError, match="1 elements are not finite"):
        x.check(error, "float32")


def test_check_gradients_hands_on_what_it_is_told(problem: Any, rng: Any) -> None:
    """Each of the four gets its own parts and its own side's type, and all get every option."""
    case, _, grad, gradients = problem
    plain = reference.plain(grad, *case.arrays, **case.options)[1]
    for i, name in enumerate(reference.Grads._fields):
        off = list(gradients.value)
        off[i] = off[i] * (1 + 2e-3 * rng.choice([-1, 1], off[i].shape))
        types = ("bfloat16", "float32") if i < 2 else ("float32", "bfloat16")
        share = compare.check_gradients(tuple(off), gradients, types)
        parts = reference.Terms(*(getattr(gradients, field)[i] for field in gradients._fields))
        assert share == compare.check_gradient("x", off[i], parts, "bfloat16") > 0.3
        with pytest.raises(AssertionError, match=f"gradient of {name}: relative L2"):
            compare.check_gradients(tuple(off), gradients, types[::-1])
        compare.check_gradients(tuple(off), gradients, types[::-1], unit=1e-2)
        off[i] = gradients.value[i] * (1 + 3e-6 * rng.choice([-1, 1], off[i].shape))
        compare.check_gradients(tuple(off), gradients, ("float32", "float32"))
        with pytest.raises(AssertionError, match=f"gradient of {name}: errors of .* roundings"):
            compare.check_gradients(tuple(off), gradients, ("float32", "float32"), plain=plain)
    # Large logits are allowed for where they are said to be.
    huge = make("huge", M=30, N=40, D_t=16, seed=2)
    gradients = reference.backward(np.ones((1, 1, 30)), *huge.arrays, **huge.options)
    off = [x + 2 * 2.0**-24 * r * rng.choice([-1, 1], x.shape) for x, r in zip(gradients.value, gradients.sensitivity)]
    compare.check_gradients(tuple(off), gradients, ("float32", "float32"), hard=True)
    with pytest.raises(AssertionError):
        compare.check_gradients(tuple(off), gradients, ("float32", "float32"))

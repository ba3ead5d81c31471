"""Judging results: bounds that follow from the arithmetic, and messages that say where and how it went wrong.

Two kinds of bound. Absolute ones are the accuracy this package states. Calibrated ones count errors in roundings of
what a number is made of, and compare their root mean square with that of a plain same-precision computation on the same
data: at most twice it plus 1, and none more than ten times as much. The worst of so many errors is one draw, and twice
the worst of another draw is exceeded now and then; a mean square of hundreds is not. Gradients get checks that know how
gradients go wrong: a missing term leaves rows at zero, a wrong sign or swapped rows keep the norm, a wrong factor keeps
the direction.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .reference import Gradients, Grads, Rows, Terms, exact

Array = NDArray[Any]

ROW_BOUND = 2e-6
"""|KL - KL_64| <= ROW_BOUND (1 + KL) + 2^-24 `Rows.condition` on ordinary data, inputs of 16 or 32 bits."""
HARD_BOUND = 1e-5
"""|KL - KL_64| <= HARD_BOUND (1 + KL) + 2^-22 `Rows.condition` on any data."""
GRADIENT_BOUND = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 1e-5, "float64": 1e-12}
"""Relative L2 error of a gradient, by the type of its input."""
DOUBLE_ROW_BOUND = 1e-13
OUTLIER = 10
"""How far beyond the root mean square a single error may be: seen are 5 in 1,200 draws of gradients, 2 of rows."""

# Half the distance of neighbours next to zero: no result can be closer to a number below that.
_SUBNORMAL = {"bfloat16": 2.0**-134, "float16": 2.0**-25, "float32": 2.0**-150, "float64": 0.0}
_EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}


def check_rows(
    name: str,
    actual: ArrayLike,
    expected: Rows,
    *,
    hard: bool = False,
    dtype: str = "float32",
    plain: ArrayLike | None = None,
    unit: float | None = None,
) -> float:
    """Compare KL rows with the reference; AssertionError naming the worst row. Returns the share of the bound used.

    `hard` allows for what the rounding of large logits alone does. `dtype` is the type the forward computes in. `plain`
    adds the calibrated check. `unit` is the relative error of a product, where that is worse than `dtype`'s.
    """
    a, e = exact(actual), expected.kl
    _same_shape(name, a, e)
    _same_where(name, a, e)
    relative = DOUBLE_ROW_BOUND if dtype == "float64" else HARD_BOUND if hard else ROW_BOUND
    # The float64 reference is as wrong as a float64 result.
    rounding = (16 if dtype == "float64" else 4 if hard else 1) * _EPSILON[dtype]
    if unit is not None:
        rounding = 4 * unit
    bound = relative * (1 + np.abs(e)) + rounding * expected.condition
    error = _error(a, e)
    share = _within(name, error, bound, a, e)
    if plain is not None:
        check_calibrated(name, a, e, plain, max(_EPSILON[dtype], unit or 0) * (1 + np.abs(e) + expected.condition))
    return share


def check_lse(
    name: str,
    actual: ArrayLike,
    expected: ArrayLike,
    largest: ArrayLike,
    dtype: str = "float32",
    unit: float | None = None,
) -> float:
    """Compare log-sum-exps with the reference, -inf where it is -inf; `largest` is that of `reference.Rows`.

    `unit` is as in `check_rows`. Returns the share of the bound used.
    """
    a, e = exact(actual), exact(expected)
    _same_shape(name, a, e)
    _same_where(name, a, e)
    bound = DOUBLE_ROW_BOUND if dtype == "float64" else ROW_BOUND
    return _within(name, _error(a, e), (bound + (unit or 0)) * (1 + exact(largest)), a, e)


def check_calibrated(
    name: str, actual: ArrayLike, expected: ArrayLike, plain: ArrayLike, roundings: ArrayLike
) -> float:
    """Errors may be twice those of a plain computation, by their root mean squares, plus one rounding.

    `roundings` has what one rounding of all that an element is made of comes to; errors are counted in it, and none may
    be more than ten times the root mean square that is allowed. Returns the share of the bound used.
    """
    a, e, p, one = (exact(x) for x in (actual, expected, plain, roundings))
    counts = np.isfinite(a) & np.isfinite(e) & np.isfinite(p) & (one > 0)
    if not counts.any():
        return 0.0
    ours, theirs = (np.where(counts, _error(x, e) / np.where(counts, one, 1), 0) for x in (a, p))
    mean, plain_mean = (float(np.sqrt((x[counts] ** 2).mean())) for x in (ours, theirs))
    allowed = 2 * plain_mean + 1
    if mean > allowed:
        raise AssertionError(
            f"{name}: errors of {mean:.3g} roundings (root mean square), more than twice the {plain_mean:.3g} of a "
            f"plain computation and 1; {_worst(ours, a, e)}"
        )
    if ours.max() > OUTLIER * allowed:
        raise AssertionError(
            f"{name}: an error of {ours.max():.3g} roundings where {allowed:.3g} are allowed as root mean square, and "
            f"{OUTLIER} times that for one element; {_worst(ours, a, e)}"
        )
    return max(mean, float(ours.max()) / OUTLIER) / allowed


def check_gradient(
    name: str,
    actual: ArrayLike,
    expected: Terms,
    dtype: str,
    *,
    plain: ArrayLike | None = None,
    hard: bool = False,
    nan_may_spread: bool = False,
    unit: float | None = None,
) -> float:
    """Compare one gradient with the reference; AssertionError saying which check failed and where it is worst.

    Beside its value `expected` has what an element's error is relative to where terms cancel, and where the gradient
    must be exactly 0. `hard` allows for what the rounding of large logits alone does. `plain` adds the calibrated
    check. `nan_may_spread` allows NaN where the reference has none, once it has some. `unit` is as in `check_rows`.
    Returns the share of the L2 bound used.
    """
    a, e, size, noise, rough = (exact(x) for x in (actual, *expected))
    _same_shape(name, a, e)
    bound, tiny = GRADIENT_BOUND[dtype], _SUBNORMAL[dtype]
    epsilon = _EPSILON["float64" if dtype == "float64" else "float32"]
    if dtype == "float16":
        # Beyond the type's range infinity is the right rounding.
        a = np.where((np.abs(e) > 65504 * (1 - bound)) & (a == np.copysign(np.inf, e)), e, a)

    poisoned = np.isnan(e)
    silent = poisoned & np.isfinite(a)
    if silent.any():
        raise AssertionError(f"{name}: {silent.sum()} elements are finite where NaN or Inf was visible; {_at(silent)}")
    if nan_may_spread and poisoned.any():
        poisoned = poisoned | np.isnan(a)
    spread = ~poisoned & ~np.isfinite(a)
    if spread.any():
        raise AssertionError(f"{name}: {spread.sum()} elements are not finite; {_worst(spread, a, e)}")
    a, e, size, noise, rough = (np.where(poisoned, 0, x) for x in (a, e, size, noise, rough))
    # Below 1e-300 it is float64 that underflowed.
    wrong = (size == 0) & (np.abs(a) > 1e-300)
    if wrong.any():
        raise AssertionError(f"{name}: {wrong.sum()} elements must be exactly 0; {_worst(np.abs(a) * wrong, a, e)}")

    # What float32 arithmetic alone may do, element by element: five roundings of every term, and twice as many where
    # nothing else is left, as of rows with a single key: log-sum-exps are rounded on their way to base 2 and back.
    error, norm = _norm(a - e), _norm(e)
    epsilon = max(epsilon, unit or 0)
    blur = (5 if norm > 0 else 10) * epsilon * size + (4 * epsilon * rough if hard or unit else 0)
    # The bound is of many roundings together, about half of the worst that one can do. How many there are is the
    # participation ratio of rows: a few large ones are few, whatever the rest, and the elements of a row share the
    # roundings of its logit gradients, of which there may be one.
    many = norm**4 / max(float((np.linalg.norm(e, axis=-1) ** 4).sum()), 1e-300)
    few = 1 + 1 / max(many, 1)
    allowed = few * bound * max(norm, _norm(noise)) + _norm(blur) + tiny * float(e.size) ** 0.5
    if error > allowed:
        raise AssertionError(
            f"{name}: relative L2 error {error / max(norm, 1e-300):.3g} exceeds {allowed / max(norm, 1e-300):.3g} "
            f"(norm ratio {_ratio(a, e):.4g}, cosine {_cosine(a, e):.4g}); {_worst(_error(a, e), a, e)}"
        )
    # Rows are judged one by one, each by what it is made of: a small row that is wrong drowns in the norm of all.
    row_error, row_norm, row_noise, row_blur = (np.linalg.norm(x, axis=-1) for x in (a - e, e, noise, blur))
    row_allowed = 3 * bound * (row_norm + row_noise) + 4 * row_blur + 2 * tiny * float(e.shape[-1]) ** 0.5
    # A logit is rounded once however it is computed, and all of a small row that large terms cancel in may be of one.
    row_allowed += epsilon * np.linalg.norm(rough, axis=-1)
    # Probabilities below 2^-126 are 0 in float32, which matters to a row made of nothing else.
    row_allowed += 1e-30 * row_blur.max(initial=0) / epsilon
    bad = row_error > row_allowed
    if bad.any():
        at = np.unravel_index(int(np.where(bad, row_error / np.maximum(row_allowed, 1e-300), 0).argmax()), bad.shape)
        raise AssertionError(
            f"{name}: {bad.sum()} of {bad.size} rows are off; worst is row {_tuple(at)} with norm ratio "
            f"{_ratio(a[at], e[at]):.4g} and cosine {_cosine(a[at], e[at]):.4g} "
            f"(error {row_error[at]:.3g}, allowed {row_allowed[at]:.3g})"
        )
    # Roundings have no preferred sign: over many elements their component along the truth is far below their size.
    # Subnormal rounding does have a sign, that of the distance to 0.
    bias = float(((a - e) * e).sum()) / norm if norm > 0 else 0.0
    below = tiny * float(e.size) ** 0.5
    if abs(bias) > below + (allowed - below) * min(1.0, 0.25 + 1.5 / max(many, 1) ** 0.5):
        raise AssertionError(f"{name}: biased by a factor {1 + bias / norm:.6g}; {_worst(_error(a, e), a, e)}")
    if plain is not None:
        roundings = _EPSILON[dtype] * (np.abs(e) + noise) + blur / 5 + tiny
        check_calibrated(name, a, e, np.where(poisoned, 0, exact(plain)), roundings)
    return error / allowed if allowed > 0 else 0.0


def check_gradients(
    actual: tuple[Any, ...],
    expected: Gradients,
    dtypes: tuple[str, str],
    *,
    plain: Grads | None = None,
    hard: bool = False,
    nan_may_spread: bool = False,
    unit: float | None = None,
) -> float:
    """`check_gradient` for each of the four in `actual` that is not None. Returns the largest share."""
    shares = [0.0]
    for i, (name, x) in enumerate(zip(Grads._fields, actual, strict=True)):
        if x is not None:
            share = check_gradient(
                f"gradient of {name}",
                x,
                expected.of(i),
                dtypes[i // 2],
                plain=None if plain is None else plain[i],
                hard=hard,
                nan_may_spread=nan_may_spread,
                unit=unit,
            )
            shares.append(share)
    return max(shares)


def check_same_bits(name: str, actual: ArrayLike, expected: ArrayLike) -> None:
    """Bitwise equality as numbers go: equal values, NaN in the same places."""
    a, e = exact(actual), exact(expected)
    _same_shape(name, a, e)
    differ = ~((a == e) | (np.isnan(a) & np.isnan(e)))
    if differ.any():
        raise AssertionError(f"{name}: {differ.sum()} of {a.size} elements differ; {_worst(differ, a, e)}")


def _same_shape(name: str, a: Array, e: Array) -> None:
    if a.shape != e.shape:
        raise AssertionError(f"{name}: shape {a.shape}, expected {e.shape}")


def _same_where(name: str, a: Array, e: Array) -> None:
    differ = (np.isnan(a) != np.isnan(e)) | ((a != e) & (np.isinf(a) | np.isinf(e)))
    if differ.any():
        raise AssertionError(f"{name}: NaN or Inf differ in {differ.sum()} of {a.size} places; {_worst(differ, a, e)}")


def _error(a: Array, e: Array) -> Array:
    with np.errstate(invalid="ignore"):
        return np.where(np.isfinite(a) & np.isfinite(e), np.abs(a - e), 0.0)


def _within(name: str, error: Array, bound: Array, a: Array, e: Array) -> float:
    if not error.size:
        return 0.0
    with np.errstate(invalid="ignore"):
        share = np.where(np.isfinite(bound), error / bound, 0.0)
    if share.max() > 1:
        at = np.unravel_index(int(share.argmax()), share.shape)
        raise AssertionError(
            f"{name}: {(share > 1).sum()} of {error.size} rows exceed their bound, worst {share.max():.3g} times "
            f"(error {error[at]:.3g}, bound {bound[at]:.3g}); {_worst(share, a, e)}"
        )
    return float(share.max())


def _norm(x: Array) -> float:
    return float(np.linalg.norm(x))


def _ratio(a: Array, e: Array) -> float:
    return _norm(a) / max(_norm(e), 1e-300)


def _cosine(a: Array, e: Array) -> float:
    product = _norm(a) * _norm(e)
    return float((a * e).sum() / product) if product > 0 else 0.0


def _worst(badness: Array, a: Array, e: Array) -> str:
    at = np.unravel_index(int(np.argmax(badness)), badness.shape)
    return f"worst at {_tuple(at)}: got {a[at]:.9g}, expected {e[at]:.9g}"


def _at(where: Array) -> str:
    return f"first at {_tuple(np.argwhere(where)[0])}"


def _tuple(index: Any) -> tuple[int, ...]:
    return tuple(int(i) for i in index)

"""From values per row to the result: weights, sum, mean, and the gradient that these send back to each row.

Written once for every framework: `xp` is numpy, cupy, torch or jax.numpy, and nothing here breaks autograd or tracing.
A row without a key (log-sum-exp -inf) has no part in any of it, whatever its weight holds; so it is selected away, not
multiplied by zero. Where every row is known to see a key, no log-sum-exps are needed: `lse` may be None.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from math import prod
from typing import Any, TypeVar

import numpy as np

_F = TypeVar("_F", bound=Callable[..., Any])


def to_zero(function: _F) -> _F:
    """Let what is too small become 0 on NumPy too, whatever the caller's `numpy.errstate` does about it.

    That is the right answer, and what the other frameworks do. An overflow, or a NaN made of infinite weights, is not,
    and stays as loud as the caller wants it.
    """

    @wraps(function)
    def calm(xp: Any, *args: Any) -> Any:
        if xp is not np:
            return function(xp, *args)
        with np.errstate(under="ignore"):
            return function(xp, *args)

    return calm  # type: ignore[return-value]


@to_zero
def reduce_rows(xp: Any, kl: Any, lse: Any, weight: Any, reduction: str) -> Any:
    """Weighted rows, their sum, or sum(w KL) / sum(w) over rows that see a key; 0 where sum(w) is 0.

    `kl` and `lse` have the shape of the rows; `weight` broadcasts to it, None means 1.
    """
    if weight is None and (reduction != "mean" or lse is None):
        return _of_all(xp, kl, reduction)
    return _reduced(xp, kl, _row_weights(xp, kl, lse, weight), reduction)[0]


@to_zero
def value_and_gradient(xp: Any, kl: Any, lse: Any, weight: Any, reduction: str) -> tuple[Any, Any]:
    """`reduce_rows`, and its derivative by each row's value, to multiply what comes from above by: an array that
    broadcasts to the rows, a number, or None for 1.

    A row without a key may get any number: it has nothing to differentiate.
    """
    if weight is None and (reduction != "mean" or lse is None):
        return _of_all(xp, kl, reduction), 1 / prod(kl.shape) if reduction == "mean" else None
    if weight is None:
        empty = lse == -xp.inf
        seen = xp.sum(~empty, dtype=kl.dtype)
        rows = xp.where(seen == 0, 1.0, seen)
        return xp.sum(xp.where(empty, 0.0, kl)) / rows, 1.0 / rows
    w = _row_weights(xp, kl, lse, weight)
    value, mass = _reduced(xp, kl, w, reduction)
    return value, w if mass is None else xp.where(mass == 0, 0.0, w / xp.where(mass == 0, 1.0, mass))


def _of_all(xp: Any, kl: Any, reduction: str) -> Any:
    return kl if reduction == "none" else xp.sum(kl) if reduction == "sum" else xp.mean(kl)


def spread(xp: Any, value: Any, share: Any, shape: tuple[int, ...]) -> Any:
    """That derivative as one number for each row, in the dtype of the value."""
    if share is None or isinstance(share, float):
        share = xp.full_like(value, 1.0 if share is None else share)
    return xp.broadcast_to(share, shape)


@to_zero
def weight_sum(xp: Any, kl: Any, lse: Any, weight: Any) -> Any:
    """What a mean divides by: the weights of all rows that see a key."""
    return xp.sum(_row_weights(xp, kl, lse, weight))


@to_zero
def teacher_mass(xp: Any, lse: Any, dense_lse: Any) -> Any:
    """Share of the teacher's dense distribution on the keys a row sees; 0 where it sees none."""
    # Selected before the subtraction: -inf minus -inf is NaN, and NumPy warns of it even where it is not taken.
    return xp.exp(lse - xp.where(lse == -xp.inf, 0.0, dense_lse))


@to_zero
def target_mass(xp: Any, lse: Any) -> Any:
    """Share of a given distribution on the keys a row sees."""
    return xp.exp(lse)


def _reduced(xp: Any, kl: Any, w: Any, reduction: str) -> tuple[Any, Any]:
    """Rows of the weights `w` reduced, and the sum of these where the mean has divided by it."""
    # A row that weighs nothing must not spoil the rest when its own value is NaN; a plain product would keep
    # 0 * NaN. The product is left alone elsewhere, so that it still has its derivative for the weight.
    value = w * xp.where((w == 0) & (kl != kl), 0.0, kl)
    if reduction == "none":
        return value, None
    total = xp.sum(value)
    if reduction == "sum":
        return total, None
    mass = xp.sum(w)
    return xp.where(mass == 0, 0.0, total / xp.where(mass == 0, 1.0, mass)), mass


def _row_weights(xp: Any, kl: Any, lse: Any, weight: Any) -> Any:
    """Weights in the shape and dtype of the rows, exactly 0 where a row sees no key."""
    if lse is None:
        given = xp.broadcast_to(weight, kl.shape)
    elif weight is None:
        given = xp.where(lse == -xp.inf, xp.zeros_like(lse), 1.0)
    else:  # selected before the cast, in which the weight of such a row could overflow
        given = xp.where(lse == -xp.inf, 0, weight)
    return given.to(kl.dtype) if hasattr(given, "to") else given.astype(kl.dtype)

"""From values per row to the result: weights, sum, mean, and the gradient that these send back to each row.

Written once for every framework: `xp` is numpy, cupy, torch or jax.numpy, and nothing here breaks autograd or tracing.
A row without a key (log-sum-exp -inf) has no part in any of it, whatever its weight holds; so it is selected away, not
multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import numpy as np

_F = TypeVar("_F", bound=Callable[..., Any])


def _to_zero(function: _F) -> _F:
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


@_to_zero
def reduce_rows(xp: Any, kl: Any, lse: Any, weight: Any, reduction: str) -> Any:
    """Weighted rows, their sum, or sum(w KL) / sum(w) over rows that see a key; 0 where sum(w) is 0.

    `kl` and `lse` have the shape of the rows; `weight` broadcasts to it, None means 1.
    """
    if weight is None and reduction != "mean":
        return kl if reduction == "none" else xp.sum(kl)
    w = _row_weights(xp, lse, weight, kl.dtype)
    # A row that weighs nothing must not spoil the rest when its own value is NaN; a plain product would keep
    # 0 * NaN. The product is left alone elsewhere, so that it still has its derivative for the weight.
    value = w * xp.where((w == 0) & (kl != kl), 0.0, kl)
    if reduction == "none":
        return value
    total = xp.sum(value)
    if reduction == "sum":
        return total
    mass = xp.sum(w)
    return xp.where(mass == 0, 0.0, total / xp.where(mass == 0, 1.0, mass))


@_to_zero
def row_gradient(xp: Any, lse: Any, weight: Any, reduction: str) -> Any:
    """Derivative of the sum or mean by each row's value: what the backward takes as `grad`."""
    w = _row_weights(xp, lse, weight, lse.dtype)
    if reduction == "sum":
        return w
    mass = xp.sum(w)
    return xp.where(mass == 0, 0.0, w / xp.where(mass == 0, 1.0, mass))


@_to_zero
def teacher_mass(xp: Any, lse: Any, dense_lse: Any) -> Any:
    """Share of the teacher's dense distribution on the keys a row sees; 0 where it sees none."""
    # Selected before the subtraction: -inf minus -inf is NaN, and NumPy warns of it even where it is not taken.
    return xp.exp(lse - xp.where(lse == -xp.inf, 0.0, dense_lse))


def _row_weights(xp: Any, lse: Any, weight: Any, dtype: Any) -> Any:
    """Weights in the shape and dtype of the rows, exactly 0 where a row sees no key."""
    empty = lse == -xp.inf
    if weight is None:
        return xp.where(empty, xp.zeros_like(lse), 1.0)
    # Selected before the cast, in which the weight of such a row could overflow.
    given = xp.where(empty, 0, weight)
    return given.to(dtype) if hasattr(given, "to") else given.astype(dtype)

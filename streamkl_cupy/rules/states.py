"""Attention over parts of the keys, put together: outputs weighed by what their log-sum-exps say of each part.

Written once for every framework: `xp` is numpy, cupy, torch or jax.numpy, and nothing here breaks autograd or tracing.
A row that has no key in a part (log-sum-exp -inf) takes nothing of it, whatever its output there holds; so it is
selected away, not multiplied by zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from .reductions import to_zero


@to_zero
def merged(xp: Any, outs: Sequence[Any], lses: Sequence[Any]) -> tuple[Any, Any]:
    """(out, lse) over the keys of all parts: outs (..., D) in a type of their own, lses (...) in that of the sums."""
    top = reduce(xp.maximum, lses)
    reference = xp.where(top == -xp.inf, 0.0, top)
    weights = [xp.exp(x - reference) for x in lses]
    total = sum(weights[1:], weights[0])
    some = xp.where(total == 0, 1.0, total)
    out = sum(
        (w / some)[..., None] * xp.where((w == 0)[..., None], 0.0, _as(x, w.dtype)) for w, x in zip(weights, outs)
    )
    return _as(out, outs[0].dtype), xp.where(total == 0, -xp.inf, reference + xp.log(some))


def _as(x: Any, dtype: Any) -> Any:
    return x.to(dtype) if hasattr(x, "to") else x.astype(dtype)

"""From rows to what was asked for, the same for every framework; `xp` is numpy, torch or jax.numpy."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..rules import reductions
from .results import IndexerForward


class IndexLoss(NamedTuple):
    """What becomes of rows."""

    row_weight: Any = None
    reduction: str = "none"
    return_stats: bool = False


def inactive(xp: Any, target_sum: Any) -> Any:
    """What `reductions` takes for log-sum-exps: -inf for rows that do not count, for they see no key, or no head has
    mass in what they see."""
    return xp.where(target_sum == 0, -xp.inf, xp.zeros_like(target_sum))


def counted(xp: Any, target_sum: Any) -> Any:
    """How many rows have mass, in their dtype: in one step where there is one, for steps are a part of what a small
    call costs."""
    norm = getattr(xp.linalg, "vector_norm", None)
    return xp.sum(target_sum != 0, dtype=target_sum.dtype) if norm is None else norm(target_sum, ord=0)


def reduced(xp: Any, rows: tuple[Any, ...], given_lse: Any, asked: IndexLoss) -> Any:
    """The results of a forward as they were asked for, with the teacher's log-sum-exps, made or given."""
    kl, index_lse, target_sum, made_lse = rows
    teacher_lse = given_lse if made_lse is None else made_lse
    plain = asked.row_weight is None and asked.reduction == "none"
    marks = None if plain else inactive(xp, target_sum)
    value = kl if plain else reductions.reduce_rows(xp, kl, marks, asked.row_weight, asked.reduction)
    if not asked.return_stats:
        return value
    count = counted(xp, target_sum) if plain else reductions.weight_sum(xp, kl, marks, asked.row_weight)
    return IndexerForward(value, index_lse, target_sum, teacher_lse, count)

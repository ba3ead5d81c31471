"""The divergences by name: every module of this folder but `interface` and `sums` is one, as `DIVERGENCE`."""

from __future__ import annotations

from typing import Final

from ...problem import Problem
from ..registry import entries_of
from .interface import Divergence

DIVERGENCES: Final[dict[str, Divergence]] = entries_of(__name__, __path__, "DIVERGENCE", ("interface", "sums"))


def extra_rows(problem: Problem) -> dict[str, tuple[int, ...]]:
    """What a forward has of its rows beside the value and both log-sum-exps, and the axes that each has after them."""
    found: dict[str, tuple[int, ...]] = {"teacher_entropy": ()} if problem.entropy else {}
    moments = DIVERGENCES[problem.divergence].moments
    return found | ({"moments": (moments,)} if moments else {})

"""The scores by name: every module of this folder is one, and has it as `SCORE`, but `interface`, `softcap`, which
makes another of each, and `given`, which has what stands for one where there are no products."""

from __future__ import annotations

from functools import lru_cache
from typing import Final

from ...problem import Side
from ..registry import entries_of
from .given import GIVEN
from .interface import Score
from .softcap import capped

SCORES: Final[dict[str, Score]] = entries_of(__name__, __path__, "SCORE", ("given", "interface", "softcap"))


def score_of(side: Side) -> Score:
    """What dot products of a side mean, or what is given in their place."""
    return _score(side.score, side.softcap)


@lru_cache(maxsize=256)
def _score(name: str, softcap: float | None) -> Score:
    score = GIVEN.get(name) or SCORES[name]
    return score if softcap is None else capped(score, softcap)

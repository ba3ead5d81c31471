"""The scores by name: what the dot product of a query and a key means, a header under `cuda_src/scores/` each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Score:
    """From dot products to logits."""

    name: str
    header: str


SCORES: Final[dict[str, Score]] = {score.name: score for score in (Score("dot", "scores/dot.cuh"),)}

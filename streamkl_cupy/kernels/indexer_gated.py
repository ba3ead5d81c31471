"""Gradients of the indexer that multiply gates and gradients which the score kernels have left, on Hopper."""

from __future__ import annotations

from typing import NamedTuple

from .gpus import DeviceFacts
from .indexer import Grid, HopperIndexerKernel, IndexerWork, StripCut
from .indexer_gradient import uneven
from .indexer_score_sm90 import KERNEL as SCORES

MOST_COLUMNS = 128
"""Of the index head dim: a warpgroup's sums of two heads fill its registers."""
MOST_STAGES = 8
BARRIERS = 16
"""Bytes of those of a stage."""


class Tile(NamedTuple):
    """What shared memory has room for."""

    stages: int
    smem_bytes: int


class Gated(HopperIndexerKernel[Tile]):
    """One of either side."""

    keeps_gates = True

    def lacks(self, work: IndexerWork, facts: DeviceFacts) -> str:
        shape = work.shape
        if shape.student == "float32":
            return "it multiplies 16-bit elements"
        if shape.index_dim > MOST_COLUMNS or shape.index_dim % 8:
            return f"index head dims must be multiples of 8 up to {MOST_COLUMNS}"
        if reason := uneven(shape):
            return reason
        if SCORES.refuses(work._replace(ending="strip"), facts):
            return "the scores are the portable kernel's"
        return "" if shape.tiled else "the strip is not in tiles"

    def grid(self, strip: StripCut) -> Grid:
        """Blocks of a launch over a strip: each has as much of the work as the others."""
        return (strip.shares,)

    def stages(self, beside: int, stage: int, facts: DeviceFacts) -> Tile:
        """As many as there is memory for, where so many bytes are taken."""
        count = min((facts.smem_per_block - beside) // (stage + BARRIERS), MOST_STAGES)
        return Tile(count, beside + count * (stage + BARRIERS))

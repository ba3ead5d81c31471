"""Gradients of the indexer's queries and weights from gates, `kernels/indexer_gated_query_sm90.cu`.

Two warpgroups and a producer. With t = 64 * 128 * chunks, bytes: t for the queries of each head, and for each stage t
for keys, 8,192 of the strip and 512 for each head's gates; 16 for its barriers, and 1,024.
"""

from __future__ import annotations

from .base import KernelText
from .gpus import DeviceFacts
from .indexer import GRID, IndexerWork, tile_constants
from .indexer_gated import Gated, Tile
from .sm90 import ALIGNMENT, arrivals, chunks

GROUPS = 2
"""Warpgroups that multiply."""


def heads_of(heads: int) -> int:
    """Of a group's heads, those of a block: two to each warpgroup, where there are so many."""
    return GROUPS * (2 if heads > GROUPS else 1)


class GatedQuerySm90(Gated):
    """Queries stay, keys are streamed."""

    kind = "indexer_query"
    name = "indexer_gated_query"

    def choice(self, work: IndexerWork, facts: DeviceFacts) -> tuple[Tile | None, str]:
        if reason := self.refuses(work, facts):
            return None, reason
        rows, heads = GRID * 128 * chunks(work.shape.index_dim), heads_of(work.heads)
        stage = rows + 2 * GRID * GRID + (512 * heads if work.shape.gated else 0)
        return self.stages(ALIGNMENT + heads * rows, stage, facts), ""

    def plan(self, work: IndexerWork, tile: Tile, facts: DeviceFacts, reason: str = "") -> KernelText:
        constants = {
            **tile_constants(GRID, tile.stages, 1, 4),
            "SKL_HEADS": heads_of(work.heads) // GROUPS,
            **arrivals(),
        }
        return self.kernel(work.shape, facts, constants, tile.smem_bytes, 128 * (GROUPS + 1))


KERNEL = GatedQuerySm90()

"""Gradients of the indexer's queries and weights from gates, `kernels/indexer_gated_query_sm90.cu`.

Two warpgroups and a producer. With t = 64 * 128 * chunks, bytes: t for the queries of each head, and for each stage t
for keys, 8,192 of the strip and 512 for each head's gates; 16 for its barriers, and 1,024.
"""

from __future__ import annotations

from .gpus import DeviceFacts
from .indexer import GRID, IndexerKernel, IndexerShape, kernel, shape_constants, tile_constants
from .sm90 import ARRIVING_LANES
from .structs import INDEXER

GROUPS = 2
WARPS = 4 * GROUPS
"""That multiply."""
MOST_STAGES = 8


def heads_of(heads: int) -> int:
    """Of a group's heads, those of a block: two to each warpgroup, where there are so many."""
    return GROUPS * (2 if heads > GROUPS else 1)


def plan(shape: IndexerShape, facts: DeviceFacts, all_heads: int = 4) -> IndexerKernel:
    """With so many heads to a block; where `indexer_gated.refuses` says nothing."""
    tile = GRID * 128 * -(-shape.index_dim // 64)
    stage = tile + 2 * GRID * GRID + (512 * all_heads if shape.gated else 0)
    stages = min((facts.smem_per_block - 1024 - all_heads * tile) // (stage + 16), MOST_STAGES)
    smem = 1024 + all_heads * tile + stages * (stage + 16)
    constants = {
        **shape_constants(shape),
        **tile_constants(GRID, stages, 1, 4),
        "SKL_HEADS": all_heads // GROUPS,
        "SKL_ARRIVING_LANES": ARRIVING_LANES,
    }
    return kernel("indexer_gated_query_sm90", constants, INDEXER, 128 * (GROUPS + 1), smem)

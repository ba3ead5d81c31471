"""The gradient of the indexer's keys from gates, `kernels/indexer_gated_key_sm90.cu`.

Two warpgroups of 128 keys each and a producer. Bytes: twice 32,768 of the strip, and for each stage 64 * 128 * chunks
for queries, 2,048 for gates and 16 for barriers; 32 for more of these, and 1,024.
"""

from __future__ import annotations

from .gpus import DeviceFacts
from .indexer import GRID, IndexerKernel, IndexerShape, kernel, shape_constants, tile_constants
from .sm90 import ARRIVING_LANES
from .structs import INDEXER

KEY_BLOCK = 256
MOST_STAGES = 8


def plan(shape: IndexerShape, facts: DeviceFacts) -> IndexerKernel:
    """Where `indexer_gated.refuses` says nothing."""
    strip = 2 * GRID * KEY_BLOCK
    stage = GRID * 128 * -(-shape.index_dim // 64) + (8 * KEY_BLOCK if shape.gated else 0)
    stages = min((facts.smem_per_block - 1056 - 2 * strip) // (stage + 16), MOST_STAGES)
    smem = 1056 + 2 * strip + stages * (stage + 16)
    constants = {
        **shape_constants(shape),
        **tile_constants(GRID, stages, 1, 4),
        "SKL_ARRIVING_LANES": ARRIVING_LANES,
    }
    return kernel("indexer_gated_key_sm90", constants, INDEXER, 128 * 3, smem)

"""The gradient of the indexer's keys on Hopper, `kernels/indexer_key_sm90.cu`: a warpgroup to a block.

Bytes: 64 * 128 * chunks for the keys, twice as many for queries, with 1,024 for weights and 64 * 144 of the strip
each, and 1,024.
"""

from __future__ import annotations

from .gpus import DeviceFacts
from .indexer import GRID, IndexerKernel, IndexerShape, kernel, pitch, shape_constants, tile_constants
from .structs import INDEXER


def plan(shape: IndexerShape, facts: DeviceFacts) -> IndexerKernel | None:
    """The tile; None where the portable kernel has to serve."""
    if facts.compute_capability != (9, 0) or shape.student == "float32" or not {"SQ", "SK"} <= shape.vectors:
        return None
    rows = GRID * 128 * -(-shape.index_dim // 64)
    smem = 1024 + rows + 2 * (rows + 1024 + GRID * pitch(GRID, shape.student))
    blocks = 2 if shape.index_dim > 128 else 3 if 3 * (smem + 1024) <= facts.smem_per_block else 2
    constants = {**shape_constants(shape), **tile_constants(GRID, 2, blocks, 4)}
    return kernel("indexer_key_sm90", constants, INDEXER, smem_bytes=smem)

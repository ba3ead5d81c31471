"""The gradient of the indexer's keys, `kernels/indexer_key_sm80.cu`.

A block has its keys, and two buffers each for a tile of queries with their weights and for one of the strip:
64 * p(D) + 2 * (columns * (p(D) + 4) + columns * p(64)) bytes.
"""

from __future__ import annotations

from . import indexer_key_sm90
from .gpus import DeviceFacts
from .indexer import GRID, IndexerKernel, IndexerShape, kernel, pitch, shape_constants, tile_constants, too_large
from .indexer_query_sm80 import blocks_of, columns_of
from .structs import INDEXER


def plan(shape: IndexerShape, facts: DeviceFacts) -> IndexerKernel:
    """Hopper's own where it serves; else the largest tile that fits."""
    own = indexer_key_sm90.plan(shape, facts)
    if own is not None:
        return own
    row, unroll = pitch(shape.index_dim, shape.student), 2 if shape.student == "float32" else 4
    for columns in columns_of(shape):
        smem = GRID * row + 2 * (columns * (row + 4) + columns * pitch(GRID, shape.student))
        if smem <= facts.smem_per_block:
            constants = {**shape_constants(shape), **tile_constants(columns, 2, blocks_of(shape), unroll)}
            return kernel("indexer_key_sm80", constants, INDEXER, smem_bytes=smem)
    raise too_large(f"the gradient of index keys of {shape.index_dim} {shape.student} columns", facts)

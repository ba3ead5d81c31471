"""Gradients of the indexer's queries and weights, `kernels/indexer_query_sm80.cu`.

A block has its queries, and in each stage a tile of keys and one of the strip:
64 * p(D) + stages * (columns * p(D) + 64 * p(columns)) bytes.
"""

from __future__ import annotations

from . import indexer_query_sm90
from .gpus import DeviceFacts
from .indexer import GRID, IndexerKernel, IndexerShape, kernel, pitch, shape_constants, tile_constants, too_large
from .structs import INDEXER


def columns_of(shape: IndexerShape) -> tuple[int, ...]:
    """Of tiles, the best first: registers hold a row of sums, and of planes three."""
    if shape.student == "float32":
        return (32, 16) if shape.index_dim <= 128 else (16,)
    return (64, 32) if shape.index_dim <= 128 else (32,)


def blocks_of(shape: IndexerShape) -> int:
    """Blocks that a multiprocessor has registers for."""
    return 1 if shape.student == "float32" or shape.index_dim > 128 else 2


def plan(shape: IndexerShape, facts: DeviceFacts) -> IndexerKernel:
    """Hopper's own where it serves; else the largest tile that fits."""
    own = indexer_query_sm90.plan(shape, facts)
    if own is not None:
        return own
    row, unroll = pitch(shape.index_dim, shape.student), 2 if shape.student == "float32" else 4
    for stages in (2, 1):
        for columns in columns_of(shape):
            smem = GRID * row + stages * (columns * row + GRID * pitch(columns, shape.student))
            if smem <= facts.smem_per_block:
                constants = {**shape_constants(shape), **tile_constants(columns, stages, blocks_of(shape), unroll)}
                return kernel("indexer_query_sm80", constants, INDEXER, smem_bytes=smem)
    raise too_large(f"gradients of index queries of {shape.index_dim} {shape.student} columns", facts)

"""Sums of blocks that share a block of keys, added up, and at last rounded: `kernels/indexer_gated_join.cu`."""

from __future__ import annotations

from .indexer import IndexerKernel, IndexerShape, kernel, shape_constants, tile_constants
from .structs import INDEXER

THREADS = 256
PART_KEYS = 16
"""Keys of a block, of the 256 that the sums are of."""


def plan(shape: IndexerShape, shares: int) -> IndexerKernel:
    """By the type of the keys, for so many blocks that may share one of keys."""
    constants = {**shape_constants(shape), **tile_constants(64, 1, 1, 1), "SKL_THREADS": THREADS}
    return kernel(
        "indexer_gated_join", {**constants, "SKL_PART_KEYS": PART_KEYS, "SKL_SHARES": shares}, INDEXER, THREADS
    )

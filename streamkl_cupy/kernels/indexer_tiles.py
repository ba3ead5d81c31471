"""Queries times weights, and keys, in tiles as products of warpgroups read them: `kernels/indexer_tiles.cu`."""

from __future__ import annotations

from .indexer import IndexerKernel, IndexerShape, kernel, shape_constants, tile_constants
from .structs import INDEXER

THREADS = 256


def plan(shape: IndexerShape, weighted: bool) -> IndexerKernel:
    """A thread to a piece of 16 bytes."""
    constants = {**shape_constants(shape), **tile_constants(64, 1, 1, 1), "SKL_THREADS": THREADS}
    return kernel("indexer_tiles", {**constants, "SKL_WEIGHTED": int(weighted)}, INDEXER, THREADS)

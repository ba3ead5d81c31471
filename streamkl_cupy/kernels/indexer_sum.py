"""Sums of the key gradient that blocks have of their rows, added up and rounded: `kernels/indexer_sum.cu`."""

from __future__ import annotations

from .indexer import IndexerKernel, IndexerShape, kernel, shape_constants, tile_constants
from .structs import INDEXER

THREADS = 256


def plan(shape: IndexerShape) -> IndexerKernel:
    """A thread to an element."""
    constants = {**shape_constants(shape), **tile_constants(64, 1, 1, 1), "SKL_THREADS": THREADS}
    return kernel("indexer_sum", constants, INDEXER, THREADS)

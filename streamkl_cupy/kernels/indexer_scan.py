"""Whether the student's queries and keys are finite, `kernels/indexer_scan.cu`."""

from __future__ import annotations

from .indexer import IndexerKernel, IndexerShape, kernel, shape_constants, tile_constants
from .structs import INDEXER

THREADS = 256


def plan(shape: IndexerShape) -> IndexerKernel:
    """A warp to a row."""
    constants = {**shape_constants(shape), **tile_constants(64, 1, 1, 1), "SKL_THREADS": THREADS}
    return kernel("indexer_scan", constants, INDEXER, THREADS)

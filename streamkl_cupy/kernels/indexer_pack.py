"""What kernels read of rows, packed: `kernels/indexer_pack.cu`, a thread to a row."""

from __future__ import annotations

from .indexer import IndexerKernel, IndexerShape, kernel, shape_constants, tile_constants
from .structs import INDEXER_PACK

THREADS = 256


def plan(shape: IndexerShape) -> IndexerKernel:
    """By the type of the weights."""
    constants = {**shape_constants(shape), **tile_constants(64, 1, 1, 1), "SKL_THREADS": THREADS}
    return kernel("indexer_pack", constants, INDEXER_PACK, THREADS)

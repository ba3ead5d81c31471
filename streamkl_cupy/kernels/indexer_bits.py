"""Keys that a mask has and ids name, as bits: `kernels/indexer_bits.cu`, a warp to a row."""

from __future__ import annotations

from .indexer import IndexerKernel, kernel
from .structs import INDEXER_ROWS

THREADS = 256


def plan() -> IndexerKernel:
    """The same for all calls."""
    return kernel("indexer_bits", {"SKL_THREADS": THREADS}, INDEXER_ROWS, THREADS)

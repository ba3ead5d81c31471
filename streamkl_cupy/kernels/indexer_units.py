"""How the work of a strip is numbered: `kernels/indexer_units.cu`, a block for each gradient."""

from __future__ import annotations

from .indexer import IndexerKernel, kernel, tile_constants
from .structs import INDEXER

THREADS = 256


def plan() -> IndexerKernel:
    """The same for all calls."""
    return kernel(
        "indexer_units", {**tile_constants(64, 1, 1, 1), "SKL_BITS": 0, "SKL_THREADS": THREADS}, INDEXER, THREADS
    )

"""Which keys each row sees, `kernels/indexer_rows.cu`, a block to a tile of the strip's grid."""

from __future__ import annotations

from .indexer import GRID, IndexerKernel, kernel
from .structs import INDEXER_ROWS


def plan() -> IndexerKernel:
    """The same for all calls."""
    return kernel("indexer_rows", {"SKL_THREADS": GRID}, INDEXER_ROWS, GRID)

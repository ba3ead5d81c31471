"""Which keys each row sees, `kernels/indexer_rows.cu`, a block to a tile of the strip's grid."""

from __future__ import annotations

from .base import KernelText
from .gpus import DeviceFacts
from .indexer import GRID, Grid, beside
from .structs import INDEXER_ROWS


def plan(facts: DeviceFacts) -> KernelText:
    """The same for all calls."""
    return beside("indexer_rows", facts, GRID, {}, INDEXER_ROWS)


def grid(tiles: int, batch: int) -> Grid:
    """Blocks for so many row tiles."""
    return tiles, batch

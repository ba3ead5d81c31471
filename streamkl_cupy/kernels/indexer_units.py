"""How the work of a strip is numbered: `kernels/indexer_units.cu`, a block for each gradient and one for the strip."""

from __future__ import annotations

from .base import KernelText
from .gpus import DeviceFacts
from .indexer import GRID, Grid, beside, tile_constants

THREADS = 256
BLOCKS: Grid = (3,)


def plan(facts: DeviceFacts) -> KernelText:
    """The same for all calls."""
    return beside("indexer_units", facts, THREADS, {**tile_constants(GRID, 1, 1, 1), "SKL_BITS": 0})

"""What kernels read of rows, packed: `kernels/indexer_pack.cu`, a thread to a row."""

from __future__ import annotations

from .base import KernelText
from .gpus import DeviceFacts
from .indexer import SCORE, SLOTS, Grid, IndexerShape, beside
from .structs import INDEXER_PACK

THREADS = 256


def plan(shape: IndexerShape, facts: DeviceFacts) -> KernelText:
    """By the type of the weights."""
    return beside("indexer_pack", facts, THREADS, {"SKL_S_SCORE": SCORE.struct}, INDEXER_PACK, shape, SLOTS)


def grid(rows: int, vectors: int) -> Grid:
    """Blocks for so many vectors of so many rows."""
    return -(-rows // THREADS), vectors

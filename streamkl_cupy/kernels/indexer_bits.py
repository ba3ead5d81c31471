"""Keys that a mask has and ids name, as bits: `kernels/indexer_bits.cu`, a warp to a row."""

from __future__ import annotations

from .base import KernelText
from .gpus import DeviceFacts
from .indexer import Grid, beside
from .structs import INDEXER_ROWS

THREADS = 256


def plan(facts: DeviceFacts) -> KernelText:
    """The same for all calls."""
    return beside("indexer_bits", facts, THREADS, {}, INDEXER_ROWS)


def grid(rows: int, batch: int) -> Grid:
    """Blocks for so many rows of an entry."""
    return -(-rows // (THREADS // 32)), batch

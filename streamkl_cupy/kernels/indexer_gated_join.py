"""Sums of blocks that share a block of keys, added up, and at last rounded: `kernels/indexer_gated_join.cu`."""

from __future__ import annotations

from .base import KernelText
from .gpus import DeviceFacts
from .indexer import Grid, IndexerShape, beside
from .indexer_gated_key_sm90 import KEY_BLOCK

THREADS = 256
PART_KEYS = 16
"""Keys of a block, of those that sums are of."""


def plan(shape: IndexerShape, shares: int, facts: DeviceFacts) -> KernelText:
    """By the type of the keys, for so many blocks that may share one of keys."""
    constants = {"SKL_PART_KEYS": PART_KEYS, "SKL_SHARES": shares}
    return beside("indexer_gated_join", facts, THREADS, constants, shape=shape)


def grid(key_blocks: int) -> Grid:
    """Blocks for so many of keys, of all entries."""
    return key_blocks, KEY_BLOCK // PART_KEYS

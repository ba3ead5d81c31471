"""Sums of blocks that share a block of keys, added up, and at last rounded: `kernels/indexer_gated_join.cu`."""

from __future__ import annotations

from .base import KernelText
from .gpus import DeviceFacts
from .indexer import IndexerShape, beside

THREADS = 256
PART_KEYS = 16
"""Keys of a block, of the 256 that the sums are of."""


def plan(shape: IndexerShape, shares: int, facts: DeviceFacts) -> KernelText:
    """By the type of the keys, for so many blocks that may share one of keys."""
    constants = {"SKL_PART_KEYS": PART_KEYS, "SKL_SHARES": shares}
    return beside("indexer_gated_join", facts, THREADS, constants, shape=shape)

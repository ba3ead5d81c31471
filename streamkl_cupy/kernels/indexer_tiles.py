"""Queries times weights, and keys, in tiles as products of warpgroups read them: `kernels/indexer_tiles.cu`."""

from __future__ import annotations

from .base import KernelText
from .gpus import DeviceFacts
from .indexer import Grid, IndexerShape, beside

THREADS = 256


def plan(shape: IndexerShape, weighted: bool, facts: DeviceFacts) -> KernelText:
    """A thread to a piece of 16 bytes."""
    return beside("indexer_tiles", facts, THREADS, {"SKL_WEIGHTED": int(weighted)}, shape=shape)


def grid(tiles: int, heads: int) -> Grid:
    """Blocks for so many tiles of so many heads."""
    return tiles, heads

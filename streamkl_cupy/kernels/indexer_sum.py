"""Sums of the key gradient that blocks have of their rows, added up and rounded: `kernels/indexer_sum.cu`."""

from __future__ import annotations

from .base import KernelText
from .gpus import DeviceFacts
from .indexer import Grid, IndexerShape, beside

THREADS = 256


def plan(shape: IndexerShape, facts: DeviceFacts) -> KernelText:
    """A thread to an element."""
    return beside("indexer_sum", facts, THREADS, {}, shape=shape)


def grid(elements: int, entries: int) -> Grid:
    """Blocks for so many elements of so many heads of keys."""
    return -(-elements // THREADS), entries

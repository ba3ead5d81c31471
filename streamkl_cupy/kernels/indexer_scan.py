"""Whether the student's queries and keys are finite, `kernels/indexer_scan.cu`."""

from __future__ import annotations

from .base import KernelText
from .gpus import DeviceFacts
from .indexer import Grid, IndexerShape, beside

THREADS = 256


def plan(shape: IndexerShape, facts: DeviceFacts) -> KernelText:
    """A warp to a row."""
    return beside("indexer_scan", facts, THREADS, {}, shape=shape)


def grid(facts: DeviceFacts) -> Grid:
    """As many blocks as run at a time."""
    return (4 * facts.multiprocessors,)

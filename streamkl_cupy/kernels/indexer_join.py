"""States of rows joined over the splits of their keys, `kernels/indexer_join.cu`."""

from __future__ import annotations

from .base import KernelText
from .gpus import DeviceFacts
from .indexer import GRID, Grid, RowCut, beside

THREADS = 128
PARTS = 8
"""Threads to a row that may have many states."""


def plan(cut: RowCut, facts: DeviceFacts, lse: bool = False) -> KernelText:
    """For the rows of the student, or for the teacher's log-sum-exps."""
    constants = {
        "SKL_LSE": int(lse),
        "SKL_PARTS": parts(cut),
        "SKL_SPLIT_KEYS": cut.split_keys,
        "SKL_SPLIT_ROWS": cut.tiles * GRID,
        "SKL_GRID": GRID,
    }
    return beside("indexer_join", facts, THREADS, constants)


def parts(cut: RowCut) -> int:
    """Threads to a row."""
    return PARTS if cut.split_keys else 1


def grid(rows: int, entries: int, cut: RowCut) -> Grid:
    """Blocks for so many rows of so many entries."""
    return -(-rows // (THREADS // parts(cut))), entries

"""States of rows joined over the shares of their keys, `kernels/indexer_join.cu`."""

from __future__ import annotations

from .indexer import GRID, IndexerKernel, kernel
from .structs import INDEXER

THREADS = 128
PARTS = 8
"""Threads to a row that may have many states."""


def plan(lse: bool, share_keys: int = 0, tiles: int = 1) -> IndexerKernel:
    """For the rows of the student, or for the teacher's log-sum-exps. All rows have as many states as there are splits;
    or, of shares of so many keys, two for each share of the keys that so many tiles of rows see."""
    constants = {
        "SKL_LSE": int(lse),
        "SKL_THREADS": THREADS,
        "SKL_PARTS": PARTS if share_keys else 1,
        "SKL_SHARE_KEYS": share_keys,
        "SKL_SHARE_ROWS": tiles * GRID,
        "SKL_GRID": GRID,
    }
    return kernel("indexer_join", constants, INDEXER, THREADS)


def rows(join: IndexerKernel) -> int:
    """Of a block."""
    return THREADS // dict(join.constants)["SKL_PARTS"]

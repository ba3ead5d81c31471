"""States of rows joined over the shares of their keys, `kernels/indexer_join.cu`, a thread to a row."""

from __future__ import annotations

from .indexer import IndexerKernel, kernel
from .structs import INDEXER

THREADS = 128


def plan(lse: bool) -> IndexerKernel:
    """For the rows of the student, or for the teacher's log-sum-exps."""
    return kernel("indexer_join", {"SKL_LSE": int(lse), "SKL_THREADS": THREADS}, INDEXER, THREADS)

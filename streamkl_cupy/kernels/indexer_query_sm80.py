"""Gradients of the indexer's queries and weights, `kernels/indexer_query_sm80.cu`.

A block has its queries, and in each stage a tile of keys and one of the strip:
64 * p(D) + stages * (columns * p(D) + 64 * p(columns)) bytes.
"""

from __future__ import annotations

from .gpus import DeviceFacts
from .indexer import GRID, IndexerWork, pitch, too_large
from .indexer_gradient import OfQueries, Tile, columns_of, portable


class QuerySm80(OfQueries):
    """Any element type, strides and head dims."""

    def choice(self, work: IndexerWork, facts: DeviceFacts) -> tuple[Tile | None, str]:
        """The largest tile that fits."""
        shape = work.shape
        row = pitch(shape.index_dim, shape.student)
        for stages in (2, 1):
            for columns in columns_of(shape):
                smem = GRID * row + stages * (columns * row + GRID * pitch(columns, shape.student))
                if smem <= facts.smem_per_block:
                    return portable(shape, columns, stages, smem), ""
        return None, too_large(f"gradients of index queries of {shape.index_dim} {shape.student} columns", facts)


KERNEL = QuerySm80()

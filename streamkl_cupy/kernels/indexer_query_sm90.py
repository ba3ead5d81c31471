"""Gradients of the indexer's queries and weights on Hopper, `kernels/indexer_query_sm90.cu`: a warpgroup to a block.

Bytes: 64 * 128 * chunks for the queries, and for each stage as much for the keys and 64 * 144 of the strip, and 1,024.
"""

from __future__ import annotations

from .indexer_gradient import STAGES, HopperGradient, OfQueries
from .sm90 import ALIGNMENT


class QuerySm90(HopperGradient, OfQueries):
    """16-bit elements."""

    def smem_bytes(self, rows: int, strip: int) -> int:
        return ALIGNMENT + rows + STAGES * (rows + strip)


KERNEL = QuerySm90()

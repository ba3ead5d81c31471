"""The gradient of the indexer's keys on Hopper, `kernels/indexer_key_sm90.cu`: a warpgroup to a block.

Bytes: 64 * 128 * chunks for the keys, twice as many for queries, with 1,024 for weights and 64 * 144 of the strip
each, and 1,024.
"""

from __future__ import annotations

from .indexer_gradient import STAGES, HopperGradient, OfKeys
from .sm90 import ALIGNMENT

WEIGHTS = 1024
"""Bytes of those of a tile, which what follows begins behind on a line of the swizzle."""


class KeySm90(HopperGradient, OfKeys):
    """16-bit elements."""

    def smem_bytes(self, rows: int, strip: int) -> int:
        return ALIGNMENT + rows + STAGES * (rows + WEIGHTS + strip)


KERNEL = KeySm90()

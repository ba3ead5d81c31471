"""The gradient of the indexer's keys, `kernels/indexer_key_sm80.cu`.

A block has its keys, and two buffers each for a tile of queries with their weights and for one of the strip:
64 * p(D) + 2 * (columns * (p(D) + 4) + columns * p(64)) bytes.
"""

from __future__ import annotations

from .gpus import DeviceFacts
from .indexer import GRID, IndexerWork, pitch, too_large
from .indexer_gradient import OfKeys, Tile, columns_of, portable

STAGES = 2


class KeySm80(OfKeys):
    """Any element type, strides and head dims."""

    def choice(self, work: IndexerWork, facts: DeviceFacts) -> tuple[Tile | None, str]:
        """The largest tile that fits."""
        shape = work.shape
        row = pitch(shape.index_dim, shape.student)
        for columns in columns_of(shape):
            smem = GRID * row + STAGES * columns * (row + 4 + pitch(GRID, shape.student))
            if smem <= facts.smem_per_block:
                return portable(shape, columns, STAGES, smem), ""
        return None, too_large(f"the gradient of index keys of {shape.index_dim} {shape.student} columns", facts)


KERNEL = KeySm80()

"""The portable forward, `kernels/forward_sm80.cu`.

Shared memory besides (`sm80.py`): 4 bytes per element of a float32 key of both sides and 16 besides, for what all keys
have in common. Registers per thread that hold scores: warp_tiles * columns, both sides together. The limit is 255 per
thread and 65,536 per multiprocessor.
"""

from __future__ import annotations

from .base import TileRow, Work
from .sm80 import Portable, common_bytes
from .structs import Regions, split_states

_TABLE = (
    TileRow(4, 2, 64, 2, 2, 64, "32 rows per warp, two blocks per multiprocessor", unroll=4, max_turned=-1),
    TileRow(4, 2, 32, 2, 2, 128, "32 rows per warp halve the reads per product; two blocks fit", unroll=8),
    TileRow(2, 1, 64, 2, 2, 64, "few rows in all: more blocks, long tiles"),
    TileRow(2, 1, 32, 2, 2, 128, "few rows in all: more blocks"),
    TileRow(4, 1, 32, 2, 1, 576, "one strip per warp: room for long rows"),
    TileRow(2, 1, 16, 1, 1, 576, "fits 99 KiB at the largest head dims"),
)

# Beside a side that is given; then those of _TABLE.
_GIVEN = (
    TileRow(4, 2, 64, 2, 1, 128, "fewer waits for what is read: 0.91 ms where 32 columns take 1.20", 4, max_mask=1),
)

_FLOAT32 = (
    TileRow(4, 2, 32, 2, 1, 128, "operands are split at every read: 32 rows per warp share a split", unroll=2),
    TileRow(2, 1, 32, 2, 1, 128, "few rows in all, or 99 KiB", unroll=2),
    TileRow(4, 1, 16, 1, 1, 256, "one strip per warp: room for long rows", unroll=2),
    TileRow(1, 1, 16, 1, 1, 576, "the least a block can be", unroll=2),
)


class _Forward(Portable):
    kind = "forward"
    args = "forward"

    def table(self, work: Work) -> tuple[TileRow, ...]:
        if work.float32:
            return _FLOAT32
        return _GIVEN + _TABLE if work.given else _TABLE

    def smem_bytes(self, work: Work, tile: TileRow) -> int:
        return super().smem_bytes(work, tile) + common_bytes(*work.sides)

    def regions(self, work: Work, tile: TileRow) -> tuple[Regions, ...]:
        return (split_states(work.state_floats),)


KERNEL = _Forward()

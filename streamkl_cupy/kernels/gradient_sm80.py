"""The portable gradient of one input, `kernels/gradient_sm80.cu`.

Shared memory besides (`sm80.py`): 12 or 16 bytes per streamed query when the keys are stationary; otherwise, where the
differentiated side is float32, 4 bytes per element of a key and 16 besides, for what all keys have in common. Registers
per thread: warp_tiles * columns scores, both sides together, and warp_tiles * D / 2 of the output. The limit is 255 per
thread and 65,536 per multiprocessor.
"""

from __future__ import annotations

from .base import TileRow, Work
from .sm80 import Portable, common_bytes
from .structs import Regions

_TABLE = (
    TileRow(
        4, 2, 64, 2, 2, 64, "as the forward; unroll 4 spills, and sm_120 spills any", 3, before=(10, 0), max_mask=0
    ),
    TileRow(4, 2, 48, 2, 2, 64, "3 % slower on an H100", max_mask=0),
    TileRow(4, 2, 48, 2, 2, 64, "room for a mask's registers", unroll=3, max_mask=1),
    TileRow(4, 2, 48, 2, 2, 64, "a sparse mask's too; sm_120 spills", unroll=3, max_mask=2, before=(10, 0)),
    TileRow(4, 2, 32, 2, 2, 128, "as the forward; unroll 8 is 3 % faster and spills under a mask", 4, max_mask=0),
    TileRow(4, 2, 32, 2, 2, 128, "room for a mask's registers", 3, max_mask=1, before=(10, 0)),
    TileRow(
        4, 2, 32, 2, 2, 128, "the same; sm_120 spills beside a given side", 3, max_mask=1, since=(10, 0), max_given=-1
    ),
    TileRow(4, 2, 32, 2, 2, 128, "a sparse mask's too; sm_120 spills", 3, max_mask=2, max_vectors=3, before=(10, 0)),
    TileRow(4, 2, 16, 2, 2, 128, "room for a sparse mask's registers beside four row vectors", unroll=3, max_mask=2),
    TileRow(2, 1, 32, 2, 2, 128, "few rows in all: more blocks", unroll=2),
    TileRow(4, 1, 32, 2, 1, 576, "one strip per warp: room for long rows and outputs", unroll=1, max_mask=0),
    TileRow(4, 1, 32, 2, 1, 576, "the same beside a mask's registers", unroll=1, max_out=192),
    TileRow(4, 1, 16, 1, 1, 576, "the same in less shared memory", unroll=1),
    TileRow(2, 1, 16, 1, 1, 576, "fits 99 KiB at the largest head dims", unroll=1, max_mask=0),
    TileRow(2, 1, 16, 1, 1, 576, "the same beside a mask's registers", unroll=3),
)

_FLOAT32 = (
    TileRow(4, 2, 32, 2, 1, 64, "as the forward; sm_120 spills", 1, before=(10, 0), max_mask=1, max_given=-1),
    TileRow(8, 1, 32, 2, 1, 128, "eight warps hide splitting; one strip pays for it", 1, before=(10, 0), max_given=2),
    TileRow(8, 1, 32, 2, 1, 96, "the same; sm_100 spills beyond", unroll=1, since=(10, 0), max_given=2),
    TileRow(8, 1, 16, 2, 1, 128, "the same with room for registers", unroll=1, since=(10, 0), max_given=2),
    TileRow(2, 1, 16, 2, 1, 128, "few rows in all, or 99 KiB", unroll=1, max_given=2),
    TileRow(2, 1, 16, 1, 1, 256, "room for long rows", unroll=1),
    TileRow(1, 1, 16, 1, 1, 576, "the least a block can be", unroll=1),
)


class _Gradient(Portable):
    kind = "gradient"
    args = "gradient"

    def table(self, work: Work) -> tuple[TileRow, ...]:
        return _FLOAT32 if work.float32 else _TABLE

    def smem_bytes(self, work: Work, tile: TileRow) -> int:
        common = 0 if work.rows_are_keys else common_bytes(work.side)
        return super().smem_bytes(work, tile) + common

    def regions(self, work: Work, tile: TileRow) -> tuple[Regions, ...]:
        return ()


KERNEL = _Gradient()

"""The portable forward of attention, `kernels/attention_sm80.cu`.

Shared memory, bytes, with p(D) as in `sm80.py`:

    rows * p(D) + stages * columns * (p(D) + p(D_v))

Registers per thread: warp_tiles * columns / 2 scores, half as many of packed weights of 16 bits, and
warp_tiles * D_v / 2 of the output. The limit is 255 per thread and 65,536 per multiprocessor.
"""

from __future__ import annotations

from .base import TileRow, Work
from .combine import splits_of_last_rows
from .sm80 import Portable, pitch
from .structs import Regions, attention_states

_TABLE = (
    TileRow(4, 2, 64, 2, 2, 64, "32 rows per warp, two blocks per multiprocessor", unroll=4, max_out=64),
    TileRow(4, 2, 32, 2, 2, 128, "32 rows per warp halve the reads per product; two blocks fit", unroll=8, max_out=128),
    TileRow(4, 1, 64, 2, 2, 128, "few rows in all: more blocks", unroll=8, max_out=128),
    TileRow(2, 1, 32, 2, 2, 128, "still more of them", unroll=4, max_out=128),
    TileRow(4, 1, 32, 2, 1, 256, "one strip per warp: room for long rows"),
    TileRow(2, 1, 16, 1, 1, 256, "fits 99 KiB, and few rows", unroll=2),
)

_FLOAT32 = (
    TileRow(8, 1, 32, 2, 1, 128, "eight warps hide the splitting of operands", unroll=1, max_out=128),
    TileRow(4, 1, 32, 2, 1, 128, "few rows in all, or 99 KiB", unroll=1, max_out=128),
    TileRow(2, 1, 16, 1, 1, 256, "room for long rows", unroll=1),
    TileRow(1, 1, 16, 1, 1, 256, "the least a block can be", unroll=1),
)


class _Attention(Portable):
    kind = "attention"
    args = "forward"

    def table(self, work: Work) -> tuple[TileRow, ...]:
        return _FLOAT32 if work.float32 else _TABLE

    def smem_bytes(self, work: Work, tile: TileRow) -> int:
        p, p_v = pitch(work.side.q), pitch(work.problem.operand("value"))
        return tile.rows * p + tile.stages * tile.columns * (p + p_v)

    def most_splits(self, work: Work, tile: TileRow) -> int:
        return splits_of_last_rows(work.problem, tile.rows, tile.columns)

    def regions(self, work: Work, tile: TileRow) -> tuple[Regions, ...]:
        return (attention_states(work.out_dim),)


KERNEL = _Attention()

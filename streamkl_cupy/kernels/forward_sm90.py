"""The forward on Hopper, `kernels/forward_sm90.cu`.

Shared memory, bytes (`sm90.py`), with 64 keys to a tile:

    1024 + rows * (chunks(D_t) + chunks(D_s)) * 128 + stages * piece_chunks * 8192 + barriers

A teacher that is given has no rows there, and its pieces are boxes of 64 queries x 128 bytes of keys.

Registers: a consumer thread holds 64 scores (32 of each side) and its row states, and 4 for each step of resident rows
that it holds; the producer needs few. 128 * (groups * consumer + producer) must fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..rules.masks import parts_of
from .base import TileRow, Work
from .combine import splits_of_last_rows
from .gpus import DeviceFacts
from .sm90 import ALIGNMENT, COLUMNS, Hopper, held_steps, packed_rows, row_bytes
from .structs import Regions, split_states


@dataclass(frozen=True)
class _Row(TileRow):
    held: int = 0
    """Steps of 16 columns of the teacher's queries that are kept in registers."""
    piece_chunks: int = 1
    """Chunks of 64 columns that are copied at a time."""
    two_holes: bool = True
    """Whether there are registers for a mask with holes of keys and of rows."""


# 8 heads x 8192, TFLOP/s on an H100 with 0, 2, 3, 4 steps held: D = 64 333, 351, 352, 349; D = 128 573, 579, 588, 576.
_TABLE = (
    _Row(
        16,
        1,
        COLUMNS,
        12,
        1,
        64,
        "four warpgroups hide latency better than any explicit overlap of two or three",
        held=3,
        max_turned=1,
    ),
    _Row(
        16,
        1,
        COLUMNS,
        6,
        1,
        128,
        "the same; pieces of 128 columns halve the barriers",
        held=3,
        piece_chunks=2,
        max_turned=1,
    ),
    _Row(
        8,
        1,
        COLUMNS,
        6,
        2,
        64,
        "few rows to a head: two blocks per multiprocessor hide each other's start",
        max_turned=1,
        two_holes=False,
    ),
    _Row(8, 1, COLUMNS, 12, 1, 128, "few rows in all: twice the blocks"),
    _Row(4, 1, COLUMNS, 9, 2, 128, "few queries: two blocks per multiprocessor read while others compute"),
    _Row(16, 1, COLUMNS, 8, 1, 256, "320 columns of both sides together", max_turned=1),
    _Row(12, 1, COLUMNS, 10, 1, 256, "192 rows where 256 do not fit"),
    _Row(8, 1, COLUMNS, 8, 1, 576, "128 rows where 192 do not fit"),
    _Row(8, 1, COLUMNS, 6, 1, 576, "576 and 128 together"),
    _Row(4, 1, COLUMNS, 12, 1, 576, "the widest sides"),
)

# Beside a teacher that is given; a piece is a box of its numbers.
_GIVEN = (
    _Row(16, 1, COLUMNS, 20, 1, 128, "two tiles of numbers in flight", two_holes=False),
    _Row(8, 1, COLUMNS, 18, 1, 256, "few rows in all: twice the blocks"),
)

# (consumer, producer) registers per thread by (consumer warpgroups, blocks per multiprocessor).
_REGISTERS = {
    (4, 1): (112, 32),
    (3, 1): (152, 32),
    (2, 1): (224, 40),
    (1, 1): (240, 40),
    (2, 2): (104, 24),
    (1, 2): (208, 40),
}


# Of divergences with three terms, without the entropy.
LONG_STATE = 7


# A producer that looks for holes of keys and of rows needs more; beside lists the consumers do.
_TWO_HOLES_REGISTERS = _REGISTERS | {(4, 1): (104, 56)}


def _two_holes(work: Work) -> bool:
    """Whether a mask has holes of keys and of rows, and no list."""
    parts = parts_of(work.problem.mask)
    return sum(part.sparse for part in parts) > 1 and not any(part.listed for part in parts)


class _Forward(Hopper[_Row]):
    kind = "forward"
    args = "hopper_forward"
    takes_given = True

    def table(self, work: Work) -> tuple[_Row, ...]:
        return _GIVEN if work.given else _TABLE

    def smem_bytes(self, work: Work, tile: _Row) -> int:
        pieces = tile.stages * tile.piece_chunks * COLUMNS * 128
        return ALIGNMENT + tile.rows * row_bytes(work) + pieces + 8 * (2 * tile.stages + 1)

    def constants(self, work: Work, tile: _Row) -> dict[str, int]:
        registers = _TWO_HOLES_REGISTERS if _two_holes(work) else _REGISTERS
        consumer, producer = registers[tile.warps // 4, tile.min_blocks]
        return {
            **super().constants(work, tile),
            "SKL_PACKED_ROWS": work.packed_rows,
            "SKL_PIECE_CHUNKS": tile.piece_chunks,
            "SKL_HELD_STEPS": held_steps(work, tile.held),
            "SKL_MIN_BLOCKS": tile.min_blocks,
            "SKL_CONSUMER_REGISTERS": consumer,
            "SKL_PRODUCER_REGISTERS": producer,
        }

    def packed(self, work: Work) -> Work:
        return replace(work, packed_rows=packed_rows(work))

    def fitting(self, work: Work, facts: DeviceFacts) -> tuple[_Row, ...]:
        # Where registers are few, a long state leaves none to a mask, and the longest none to anything.
        rows = tuple(row for row in super().fitting(work, facts) if row.two_holes or not _two_holes(work))
        if work.state_floats > LONG_STATE:
            return tuple(row for row in rows if row.warps < 16 and row.min_blocks == 1)
        most = 1 if work.given else 2
        return tuple(row for row in rows if row.warps < 16 or work.mask_level <= most or not work.long_state)

    def most_splits(self, work: Work, tile: _Row) -> int:
        return splits_of_last_rows(work.problem, tile.rows, tile.columns)

    def regions(self, work: Work, tile: _Row) -> tuple[Regions, ...]:
        return (split_states(work.state_floats),)


KERNEL = _Forward()

"""The indexer's scores on Hopper where ids name few keys of each row, `kernels/indexer_gathered_sm90.cu`.

Shared memory, bytes, with the most keys K of a row, 64 to a tile:

    1024 + 8192 * (chunks(D) + stages) + 4 * round_up(K, 64) + 6,304 + 8 * (5 + 2 * stages) + 32

Without the student's scores (log-sum-exps) chunks(D) is 0. Registers: 256 * consumer + 128 * producer must fit.
"""

from __future__ import annotations

from typing import NamedTuple

from .base import PLANES, KernelText
from .gpus import DeviceFacts
from .indexer import (
    GRID,
    OPERANDS,
    UNEVEN,
    WARPS,
    Constants,
    Ending,
    Grid,
    HopperIndexerKernel,
    IndexerWork,
    RowCut,
    Scores,
    teacher_constants,
)
from .sm90 import ALIGNMENT, arrivals, chunks

GATHERED_ENDINGS: tuple[Ending, ...] = ("rows", "lse", "list")
"""That there are."""
COLUMNS = 64
"""Keys of a tile."""
HEADS = 2 * GRID
"""Of the teacher in a group, at most: 64 to a warpgroup."""
LEAST_HEADS = GRID + 1
"""Fewer leave a warpgroup without work."""
MOST_TEACHER_CHUNKS = 9
"""Of the teacher's columns, whose queries are held in registers."""
LEAST_SHARE = 2
"""Keys that there are, of each key that an id names: below, whole tiles of keys take less time than rows of some."""
PIECE = COLUMNS * 128
SUMS = 2 * 12 * COLUMNS * 4 + 2 * 4 * 16 + 4 * WARPS
ITEM_BYTES = 16
MOST_STAGES = 24
LAG = 12
"""Pieces that are on their way at a time: 96 KiB."""
THREADS = 3 * 128
REGISTERS = 216, 72
"""Of consumers and producer."""


class Tile(NamedTuple):
    """What shared memory has room for."""

    most_keys: int
    """Of a row, in its list."""
    stages: int
    smem_bytes: int


def most_keys(work: IndexerWork) -> int:
    """Of a row's list, in whole tiles."""
    return -(-min(work.chosen, work.keys) // COLUMNS) * COLUMNS


def role_constants(tile: Tile, lag: int) -> Constants:
    """What `kernels/indexer_gathered/roles.cuh` is compiled with, whose tiles are 64 heads and 64 keys."""
    consumer, producer = REGISTERS
    return {
        "SKL_ROWS": GRID,
        "SKL_COLUMNS": COLUMNS,
        "SKL_WARPS": WARPS,
        "SKL_COLUMN_WARPS": 1,
        "SKL_WARP_TILES": 1,
        "SKL_STAGES": tile.stages,
        "SKL_LAG": lag,
        "SKL_ROWS_ARE_QUERIES": 1,
        "SKL_PLANES": PLANES["highest"],
        **arrivals(),
        "SKL_MOST_KEYS": tile.most_keys,
        "SKL_CONSUMER_REGISTERS": consumer,
        "SKL_PRODUCER_REGISTERS": producer,
    }


class GatheredSm90(HopperIndexerKernel[Tile], Scores[Tile]):
    """16-bit elements that are read 16 bytes at a time."""

    name = "indexer_gathered"
    gathers = True

    def lacks(self, work: IndexerWork, facts: DeviceFacts) -> str:
        shape = work.shape
        read = {"SQ", "SK", "TQ", "TK", *(("RQ", "RK") if shape.rope_dim else ())}
        if not work.chosen:
            return "no ids name the keys of a row"
        if work.ending not in GATHERED_ENDINGS:
            return f"it has no ending for {work.ending}"
        if shape.target:
            return "it computes the teacher's heads, and their sum is given"
        if shape.float32:
            return "it multiplies 16-bit elements"
        if work.several_keys:
            return "heads of a group read several key heads"
        if work.keys < LEAST_SHARE * work.chosen:
            return f"ids name more than one in {LEAST_SHARE} keys"
        if not LEAST_HEADS <= work.teacher_heads <= HEADS:
            return (
                f"a group has {work.teacher_heads} heads of the teacher, and it is built for {LEAST_HEADS} to {HEADS}"
            )
        if work.heads > GRID:
            return f"a group has {work.heads} heads of the student, and it is built for {GRID}"
        if uneven := read - shape.vectors:
            return UNEVEN.format(", ".join(name for key, name in OPERANDS.items() if key in uneven))
        if any(dim % 8 for dim in (shape.teacher_dim, shape.rope_dim, shape.index_dim)):
            return "head dims must be multiples of 8"
        if shape.rope_dim and shape.teacher_dim % 64:
            return "rotary parts follow on whole chunks of 64 columns"
        if chunks(shape.teacher_dim) + chunks(shape.rope_dim) > MOST_TEACHER_CHUNKS:
            return f"registers suffice for {64 * MOST_TEACHER_CHUNKS} columns of the teacher"
        return ""

    def choice(self, work: IndexerWork, facts: DeviceFacts) -> tuple[Tile | None, str]:
        """As many stages as there is memory for."""
        if reason := self.refuses(work, facts):
            return None, reason
        most = most_keys(work)
        queries = 0 if work.ending == "lse" else chunks(work.shape.index_dim)
        rest = ALIGNMENT + PIECE * queries + 4 * most + SUMS + 8 * 5 + 2 * ITEM_BYTES
        stages = min((facts.smem_per_block - rest) // (PIECE + 16), MOST_STAGES)
        if stages < LAG + 2:
            return None, f"lists of {most} keys leave too little shared memory"
        return Tile(most, stages, rest + stages * (PIECE + 16)), ""

    def row_cut(self, work: IndexerWork, splits: int) -> RowCut:
        """A row is not split."""
        return RowCut(1)

    def grid(self, work: IndexerWork, tiles: int, splits: int, entries: int, facts: DeviceFacts) -> Grid:
        return min(tiles * GRID * entries, facts.multiprocessors), 1

    def plan(self, work: IndexerWork, tile: Tile, facts: DeviceFacts, reason: str = "") -> KernelText:
        constants = {**teacher_constants(work.shape, work.ending), **role_constants(tile, LAG)}
        return self.kernel(work.shape, facts, constants, tile.smem_bytes, THREADS)


KERNEL = GatheredSm90()

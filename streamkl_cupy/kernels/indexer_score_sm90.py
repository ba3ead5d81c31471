"""The indexer's score tile on Hopper, `kernels/indexer_score_sm90.cu`: a warpgroup to a block.

A block has two buffers each for 64 queries and 64 keys, in chunks of 64 columns:
4 * 64 * 128 * chunks + 1,024 bytes.
"""

from __future__ import annotations

from typing import NamedTuple

from .base import KernelText
from .gpus import DeviceFacts
from .indexer import (
    GRID,
    OPERANDS,
    UNEVEN,
    HopperIndexerKernel,
    IndexerWork,
    Scores,
    teacher_constants,
    tile_constants,
)
from .sm90 import ALIGNMENT, chunks

PARTS = 192
"""Columns at a time, at most."""


class Tile(NamedTuple):
    """Columns of a row at a time."""

    teacher_part: int
    index_part: int

    @property
    def smem_bytes(self) -> int:
        return 4 * GRID * 128 * chunks(max(self)) + ALIGNMENT


def _part(dim: int) -> int:
    padded = -(-dim // 16) * 16
    if padded <= PARTS:
        return padded
    equal = [part for part in range(64, PARTS + 1, 64) if dim % part == 0]
    return max(equal, default=128)


class ScoreSm90(HopperIndexerKernel[Tile], Scores[Tile]):
    """16-bit elements that are read 16 bytes at a time."""

    def lacks(self, work: IndexerWork, facts: DeviceFacts) -> str:
        shape = work.shape
        read = {"SQ", "SK", *(() if shape.target else ("TQ", "TK")), *(("RQ", "RK") if shape.rope_dim else ())}
        if shape.float32:
            return "it multiplies 16-bit elements"
        if uneven := read - shape.vectors:
            return UNEVEN.format(", ".join(name for key, name in OPERANDS.items() if key in uneven))
        return "rotary parts are wider than a part of the rows" if shape.rope_dim > _part(shape.teacher_dim) else ""

    def choice(self, work: IndexerWork, facts: DeviceFacts) -> tuple[Tile | None, str]:
        reason = self.refuses(work, facts)
        return (None, reason) if reason else (Tile(_part(work.shape.teacher_dim), _part(work.shape.index_dim)), "")

    def plan(self, work: IndexerWork, tile: Tile, facts: DeviceFacts, reason: str = "") -> KernelText:
        shape, smem = work.shape, tile.smem_bytes
        # Parts, and a target that is read, take registers of their own.
        whole = not shape.target and tile.teacher_part >= shape.teacher_dim and tile.index_part >= shape.index_dim
        constants = {
            **tile_constants(GRID, 2, 3 if whole and 3 * (smem + 1024) <= facts.smem_per_block else 2, 4),
            **teacher_constants(shape, work.ending),
            "SKL_COLUMN_WARPS": 1,
            "SKL_T_PART": tile.teacher_part,
            "SKL_S_PART": tile.index_part,
        }
        return self.kernel(work.shape, facts, constants, smem)


KERNEL = ScoreSm90()

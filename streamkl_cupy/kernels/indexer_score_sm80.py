"""The indexer's score tile, `kernels/indexer_score_sm80.cu`.

A block has two buffers for the queries of a step and two for its keys, of the longest row of either side:
2 * (64 + columns) * pitch bytes. Queries are what streams, so more columns mean less of it: where there is room, eight
warps have 128, each four of them half of these. Rows longer than a part are read part by part, and their keys then with
every head.
"""

from __future__ import annotations

from typing import NamedTuple

from .base import KernelText
from .gpus import DeviceFacts
from .indexer import (
    GRID,
    WARPS,
    IndexerWork,
    Scores,
    pitch,
    teacher_constants,
    tile_constants,
    too_large,
)

# Whole rows where they fit, so that keys stay for all heads that read them.
_PARTS = {"bfloat16": (192, 128, 64), "float16": (192, 128, 64), "float32": (64, 32)}
# (columns, warps that share rows). Operands of planes take registers of their own.
COLUMNS = {False: ((128, 2), (64, 1), (32, 1)), True: ((32, 1), (16, 1))}


class Tile(NamedTuple):
    """How scores are cut."""

    columns: int
    sharing: int
    """Warps that have the same rows."""
    teacher_part: int
    """Columns of a row at a time."""
    index_part: int
    smem_bytes: int


def _part(dim: int, most: int) -> int:
    """Columns of a part: all of them where they fit, else so many that parts are equal where they can be."""
    padded = -(-dim // 16) * 16
    if padded <= most:
        return padded
    equal = [part for part in range(16, most + 1, 16) if dim % part == 0 and part > most // 2]
    return max(equal, default=most)


class ScoreSm80(Scores[Tile]):
    """Any element type, strides and head dims."""

    def choice(self, work: IndexerWork, facts: DeviceFacts) -> tuple[Tile | None, str]:
        """The largest tile that fits."""
        shape = work.shape
        for columns, sharing in COLUMNS[shape.float32]:
            for most in _PARTS[shape.teacher]:
                teacher = max(_part(shape.teacher_dim, most), 16)
                index = _part(shape.index_dim, min(most, _PARTS[shape.student][0]))
                row = max(pitch(teacher, shape.teacher), pitch(index, shape.student))
                smem = 2 * (GRID + columns) * row
                if smem <= facts.smem_per_block and shape.rope_dim <= teacher:
                    return Tile(columns, sharing, teacher, index, smem), ""
        return None, too_large(f"rotary parts of {shape.rope_dim} columns beside {shape.teacher_dim}", facts)

    def plan(self, work: IndexerWork, tile: Tile, facts: DeviceFacts, reason: str = "") -> KernelText:
        shape = work.shape
        constants = {
            **tile_constants(tile.columns, 2, 1 if tile.sharing > 1 else 2, 2 if shape.float32 else 4),
            **teacher_constants(shape, work.ending),
            "SKL_COLUMN_WARPS": tile.sharing,
            "SKL_T_PART": tile.teacher_part,
            "SKL_S_PART": tile.index_part,
        }
        return self.kernel(work.shape, facts, constants, tile.smem_bytes, 32 * WARPS * tile.sharing)


KERNEL = ScoreSm80()

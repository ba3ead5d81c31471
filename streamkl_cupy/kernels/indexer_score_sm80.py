"""The indexer's score tile, `kernels/indexer_score_sm80.cu`.

A block has two buffers for the queries of a step and two for its keys, of the longest row of either side:
2 * (64 + columns) * pitch bytes. Queries are what streams, so more columns mean less of it: where there is room, eight
warps have 128, each four of them half of these. Rows longer than a part are read part by part, and their keys then with
every head.
"""

from __future__ import annotations

from typing import Literal

from . import indexer_score_sm90
from .gpus import DeviceFacts
from .indexer import (
    CODES,
    GRID,
    WARPS,
    IndexerKernel,
    IndexerShape,
    kernel,
    pitch,
    shape_constants,
    tile_constants,
    too_large,
)
from .structs import INDEXER

Ending = Literal["rows", "strip", "target", "lse"]
ENDINGS: tuple[Ending, ...] = ("rows", "strip", "target", "lse")
# Whole rows where they fit, so that keys stay for all heads that read them.
_PARTS = {"bfloat16": (192, 128, 64), "float16": (192, 128, 64), "float32": (64, 32)}
# (columns, warps that share rows). Operands of planes take registers of their own.
COLUMNS = {False: ((128, 2), (64, 1), (32, 1)), True: ((32, 1), (16, 1))}


def _part(dim: int, most: int) -> int:
    """Columns of a part: all of them where they fit, else so many that parts are equal where they can be."""
    padded = -(-dim // 16) * 16
    if padded <= most:
        return padded
    equal = [part for part in range(16, most + 1, 16) if dim % part == 0 and part > most // 2]
    return max(equal, default=most)


def plan(shape: IndexerShape, ending: Ending, facts: DeviceFacts) -> IndexerKernel:
    """Hopper's own where it serves; else the largest tile that fits."""
    own = indexer_score_sm90.plan(shape, ENDINGS.index(ending), facts)
    if own is not None:
        return own
    wide = "float32" in (shape.teacher, shape.student)
    for columns, sharing in COLUMNS[wide]:
        for teacher_most in _PARTS[shape.teacher]:
            teacher = max(_part(shape.teacher_dim, teacher_most), 16)
            index = _part(shape.index_dim, min(teacher_most, _PARTS[shape.student][0]))
            row = max(pitch(teacher, shape.teacher), pitch(index, shape.student))
            smem = 2 * (GRID + columns) * row
            if smem > facts.smem_per_block or shape.rope_dim > teacher:
                continue
            constants = {
                **shape_constants(shape),
                **tile_constants(columns, 2, 1 if sharing > 1 else 2, 2 if wide else 4),
                "SKL_COLUMN_WARPS": sharing,
                "SKL_T_ELEMENT": CODES[shape.teacher],
                "SKL_T_DIM": shape.teacher_dim,
                "SKL_T_PART": teacher,
                "SKL_R_DIM": shape.rope_dim,
                "SKL_S_PART": index,
                "SKL_ENDING": ENDINGS.index(ending),
                "SKL_TARGET": int(shape.target),
            }
            return kernel("indexer_score_sm80", constants, INDEXER, 32 * WARPS * sharing, smem)
    raise too_large(f"rotary parts of {shape.rope_dim} columns beside {shape.teacher_dim}", facts)

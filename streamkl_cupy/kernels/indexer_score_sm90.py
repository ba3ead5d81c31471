"""The indexer's score tile on Hopper, `kernels/indexer_score_sm90.cu`: a warpgroup to a block.

A block has two buffers each for 64 queries and 64 keys, in chunks of 64 columns:
4 * 64 * 128 * chunks + 1,024 bytes.
"""

from __future__ import annotations

from .gpus import DeviceFacts
from .indexer import CODES, GRID, IndexerKernel, IndexerShape, kernel, shape_constants, tile_constants
from .structs import INDEXER

PARTS = 192
"""Columns at a time, at most."""


def plan(shape: IndexerShape, ending: int, facts: DeviceFacts) -> IndexerKernel | None:
    """The tile; None where the portable kernel has to serve."""
    operands = {"SQ", "SK", *(() if shape.target else ("TQ", "TK")), *(("RQ", "RK") if shape.rope_dim else ())}
    if facts.compute_capability != (9, 0) or "float32" in (shape.teacher, shape.student):
        return None
    if not operands <= shape.vectors:
        return None
    teacher, student = _part(shape.teacher_dim), _part(shape.index_dim)
    if shape.rope_dim > teacher:
        return None
    chunks = -(-max(teacher, student) // 64)
    smem = 4 * GRID * 128 * chunks + 1024
    # Parts, and a target that is read, take registers of their own.
    whole = not shape.target and teacher >= shape.teacher_dim and student >= shape.index_dim
    blocks = 3 if whole and 3 * (smem + 1024) <= facts.smem_per_block else 2
    constants = {
        **shape_constants(shape),
        **tile_constants(GRID, 2, blocks, 4),
        "SKL_COLUMN_WARPS": 1,
        "SKL_T_ELEMENT": CODES[shape.teacher],
        "SKL_T_DIM": shape.teacher_dim,
        "SKL_T_PART": teacher,
        "SKL_R_DIM": shape.rope_dim,
        "SKL_S_PART": student,
        "SKL_ENDING": ending,
        "SKL_TARGET": int(shape.target),
    }
    return kernel("indexer_score_sm90", constants, INDEXER, smem_bytes=smem)


def _part(dim: int) -> int:
    padded = -(-dim // 16) * 16
    if padded <= PARTS:
        return padded
    equal = [part for part in range(64, PARTS + 1, 64) if dim % part == 0]
    return max(equal, default=128)

"""Ampere and newer: cp.async, ldmatrix, mma.sync. The portable kernels, the only ones every supported GPU can run.

With p(D) = round_up(D, 16) * element + 16 the padded length of one tile row, a block has

    rows * (p(D_t) + p(D_s)) + stages * columns * (p(D_t) + p(D_s))

bytes of shared memory, and what its kernel says besides. Of a side that is given, tiles have 32 bytes, whatever their
rows.
"""

from __future__ import annotations

from ..problem import Operand, Side
from .base import ELEMENT_BYTES, Kernel, TileRow, Work, vector_loads
from .gpus import DeviceFacts

GIVEN_BYTES = 32
"""A tile of a side that is given: where its rows are."""


class Portable(Kernel[TileRow]):
    """What both kernels have in common."""

    family = "sm80"

    def refuses(self, work: Work, facts: DeviceFacts) -> str:
        major, minor = facts.compute_capability
        if (major, minor) < (8, 0):
            return (
                f"GPU {facts.name or '?'} has compute capability {major}.{minor}; kernels are built for 8.0 (Ampere) "
                "and newer; use NumPy arrays to compute on the CPU"
            )
        if not self.fitting(work, facts):
            dims = dict.fromkeys(
                f"{x.dim} ({x.dtype})" for x in (*(side.q for side in work.sides), *work.problem.multiplied.values())
            )
            return (
                f"head dims {' and '.join(dims)} need more shared "
                f"memory than the {facts.smem_per_block} B of {facts.name or 'this GPU'}"
            )
        return ""

    def flag(self, facts: DeviceFacts) -> str:
        return facts.flag

    def smem_bytes(self, work: Work, tile: TileRow) -> int:
        def tiles(rows: int) -> int:
            return sum(GIVEN_BYTES if side.given else rows * pitch(side.q) for side in work.sides)

        vectors = 4 * tile.columns * work.row_vectors
        return tiles(tile.rows) + tile.stages * (tiles(tile.columns) + vectors)

    def threads(self, tile: TileRow) -> int:
        return tile.warps * 32

    def constants(self, work: Work, tile: TileRow) -> dict[str, int]:
        op = work.problem.operation
        loads = {}
        for x in op.operands:
            given = op.given(x.side)
            of = x.name.upper() if x.extra and not given else x.side[0].upper() + x.rows.upper()
            loads[f"SKL_{of}_VECTOR"] = int(vector_loads(work.problem.operand(x.name)))
            if given:
                loads[f"SKL_{x.side[0].upper()}K_VECTOR"] = 0  # keys have no columns
        return {**loads, "SKL_MIN_BLOCKS": tile.min_blocks, "SKL_UNROLL": tile.unroll}


def pitch(x: Operand) -> int:
    """Bytes from one row of an operand to the next, in a tile."""
    return -(-x.dim // 16) * 16 * ELEMENT_BYTES[x.dtype] + 16


def common_bytes(*sides: Side) -> int:
    """Shared memory for what all keys of these sides have in common, which float32 takes from them."""
    return sum(-(-side.dim // 16) * 64 + 16 for side in sides if side.dtype == "float32" and not side.given)

"""Hopper (compute capability 9.0): tensor-memory copies and warpgroup products, in sm_90a code.

Registers of a kernel's warpgroups must fit what a launch gets: 65,536 per multiprocessor, rounded down to a multiple of
8 per thread (64,512 with three warpgroups). With chunks(D) = ceil(D / 64), a row of an operand in shared memory takes
chunks(D) * 128 bytes, and a block 1024 bytes besides, for alignment.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

from ..ops import OperandSpec
from .base import ELEMENT_BYTES, Box, Kernel, TileRow, Work
from .gpus import DeviceFacts
from .tensor_maps import no_map

COLUMNS = 64
ALIGNMENT = 1024
# Query heads share a tile where one of a single head would be half empty at least. A strip of 16 rows has one head.
LEAST_PACKED_ROWS, MOST_PACKED_ROWS = 16, 64

GIVEN_ROWS = 64
"""Queries of a box of what a side has that is given, with 128 bytes of its keys."""

ARRIVING_LANES = 1
"""Lanes of a warp that arrive at a barrier: 1, or all 32 for checkers that take one lane's arrival for its own only."""

Row = TypeVar("Row", bound=TileRow)


def arrivals() -> dict[str, int]:
    """What is compiled in of arriving, as it is now."""
    return {"SKL_ARRIVING_LANES": ARRIVING_LANES}


class Hopper(Kernel[Row]):
    """What its kernels have in common."""

    family = "sm90"
    # Where they are streamed, fewer do not fill the pipeline: 1000 heads of 128 queries take 0.080 ms, of the portable
    # kernel 0.050 (D = 64).
    min_queries: ClassVar[int] = 256
    takes_given: ClassVar[bool] = False
    """Whether there are kernels beside a side that is given."""
    given_header = "tile/given_swizzled.cuh"

    def refuses(self, work: Work, facts: DeviceFacts) -> str:
        problem = work.problem
        if facts.compute_capability != (9, 0):
            return "it needs compute capability 9.0"
        if work.given and not self.takes_given:
            return "it computes both sides, and one is given"
        if work.float32:
            return "it multiplies 16-bit elements"
        if any(side.dim % 8 for side in work.sides):
            return "head dims must be multiples of 8"
        if 0 in (problem.batch, problem.heads, problem.queries, problem.keys):
            return "a tensor map cannot be empty"
        if work.rows_are_keys and not self.fills(work):
            return f"fewer than {self.min_queries} queries do not fill its pipeline"
        for name in problem.operation.names:
            if reason := no_map(problem.operand(name)):
                return f"{name}: {reason}"
        if reason := self.lacks(work):
            return reason
        return "" if self.fitting(work, facts) else "the head dims need more shared memory than there is"

    def fills(self, work: Work) -> bool:
        """Whether there are enough queries to stream."""
        return work.problem.queries >= self.min_queries * max(work.problem.sequences, 1)

    def lacks(self, work: Work) -> str:
        """What else of the work this kernel cannot do."""
        return ""

    def flag(self, facts: DeviceFacts) -> str:
        return f"{facts.flag}a"

    def threads(self, tile: Row) -> int:
        return tile.warps * 32 + 128

    def constants(self, work: Work, tile: Row) -> dict[str, int]:
        return arrivals()

    def boxes(self, work: Work, tile: Row) -> tuple[Box, ...]:
        op = work.problem.operation

        def box(x: OperandSpec) -> Box:
            if op.given(x.side):
                return Box(x.name, GIVEN_ROWS)
            rows = tile.rows if x.rows == work.task.stationary else tile.columns
            if work.packed_rows and x.rows == "q":
                return Box(x.name, work.packed_rows, rows // work.packed_rows)
            return Box(x.name, rows)

        return tuple(map(box, op.operands))


def chunks(dim: int) -> int:
    """Pieces of 64 columns, 128 bytes: the longest row that the swizzle of tensor maps allows."""
    return -(-dim // 64)


def given_bytes(work: Work, keys: int) -> int:
    """Of the boxes for so many keys, of the side that is given."""
    return sum(GIVEN_ROWS * keys * ELEMENT_BYTES[side.dtype] for side in work.sides if side.given)


def row_bytes(work: Work) -> int:
    """Of a row of both sides."""
    return 128 * sum(chunks(side.dim) for side in work.sides)


def packed_rows(work: Work) -> int:
    """Rows of a tile for each query head where several have theirs in one, those that read the same keys of both sides;
    0 where each has tiles of its own: there are no such heads, they have more queries than a warpgroup rows, or a mask
    lists other keys for each of them."""
    problem = work.problem
    rows = max(1 << (problem.queries - 1).bit_length(), LEAST_PACKED_ROWS)
    alone = work.sharing_heads == 1 or rows > MOST_PACKED_ROWS or work.given
    return 0 if alone or problem.sequences or problem.mask.blocks is not None else rows


def held_steps(work: Work, held: int) -> int:
    """Steps of the teacher's stationary rows that a tile row would keep in registers, as far as there are so many."""
    return min(held, -(-work.sides[0].dim // 16))

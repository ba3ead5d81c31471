"""Hopper (compute capability 9.0): tensor-memory copies and warpgroup products, in sm_90a code.

Shared memory of the forward, bytes, with chunks(D) = ceil(D / 64) and 64 keys to a tile:

    1024 (alignment) + rows * (chunks(D_t) + chunks(D_s)) * 128 + stages * piece_chunks * 8192 + barriers

and of a gradient, with terms = 12 or 16 bytes per streamed query (and those 16 per stage) when the keys are stationary

    1024 + (rows + stages * columns) * (chunks(D_t) + chunks(D_s)) * 128 + stages * (columns * terms + 16) + barriers

Registers: a consumer thread of the forward holds 64 scores (32 of each side) and its row states; one of a gradient
`columns` scores, the half of them packed, D / 2 sums of the output and 4 for each step of resident rows that it holds.
The producer needs few.
128 * (groups * consumer + producer) must fit what a launch gets: 65,536 registers per multiprocessor, rounded down to a
multiple of 8 per thread (64,512 with two consumers).
"""

from __future__ import annotations

from dataclasses import dataclass

from ..problem import INPUT_NAMES, Operand
from ..structs import (
    HOPPER_FORWARD,
    HOPPER_FUSED,
    HOPPER_GRADIENT,
    Regions,
    Struct,
    fused_workspace,
    shared_lists,
)
from . import ELEMENT_BYTES, DeviceFacts, Family, TileRow, Work, sm90_fused, vector_loads
from .sm90_fused import FusedRow

COLUMNS = 64
MAX_STRIDE_BYTES = 1 << 40
MIN_STREAMED_QUERIES = 256  # 1000 heads of 128 queries: 0.080 ms against 0.050 ms of the portable kernel (D = 64)


ARRIVING_LANES = 1
"""Lanes of a warp that arrive at a barrier: 1, or all 32 for checkers that take one lane's arrival for its own only."""


@dataclass(frozen=True)
class HopperRow(TileRow):
    """A row of a table."""

    held: int = 0
    """Steps of 16 columns of the teacher's stationary rows that are kept in registers."""
    ahead: bool = False
    """The next tile's scores are multiplied while this one is turned into gradients."""


# 8 heads x 8192, TFLOP/s on an H100 with 0, 2, 3, 4 steps held: D = 64 333, 351, 352, 349; D = 128 573, 579, 588, 576.
_FORWARD = (
    HopperRow(
        16,
        1,
        COLUMNS,
        12,
        1,
        64,
        "four warpgroups hide latency better than any explicit overlap of two or three",
        held=3,
    ),
    HopperRow(16, 1, COLUMNS, 6, 1, 128, "the same; pieces of 128 columns halve the barriers", held=3),
    HopperRow(8, 1, COLUMNS, 6, 2, 64, "few rows to a head: two blocks per multiprocessor hide each other's start"),
    HopperRow(8, 1, COLUMNS, 12, 1, 128, "few rows in all: twice the blocks"),
    HopperRow(16, 1, COLUMNS, 8, 1, 256, "320 columns of both sides together"),
    HopperRow(12, 1, COLUMNS, 10, 1, 256, "192 rows where 256 do not fit"),
    HopperRow(8, 1, COLUMNS, 8, 1, 576, "128 rows where 192 do not fit"),
    HopperRow(8, 1, COLUMNS, 6, 1, 576, "576 and 128 together"),
    HopperRow(4, 1, COLUMNS, 12, 1, 576, "the widest sides"),
)

# Both student gradients, 8 heads x 8192, TFLOP/s of the operation on an H100. D = 64: 321 as below, keys with nothing
# held in registers 314 (causal 300 and 284). D = 128: 435, dQ 2 % slower with nothing held. Earlier, where these tiles
# gave 301 and 412, D = 64: keys in 128 columns 285, both in 96 282, 64 with six stages 254, four warpgroups of 32
# columns 256, three of 64 241; D = 128: 80 columns 387, 64 with four stages 368, 112 with two stages 290, three
# warpgroups of 48 329.
_GRADIENT_Q = (
    HopperRow(8, 1, 128, 4, 1, 64, "wide tiles: resident rows are read once per 128 columns", held=2),
    HopperRow(8, 1, 96, 3, 1, 128, "the widest tile that leaves three stages", held=3),
    HopperRow(4, 1, 128, 4, 1, 64, "few rows in all: twice the blocks", max_mask=2),
    HopperRow(4, 1, 96, 3, 1, 128, "few rows in all: twice the blocks"),
    HopperRow(8, 1, 64, 3, 1, 192, "320 columns of both sides together"),
    HopperRow(8, 1, 48, 2, 1, 256, "two stages beside the widest rows"),
)

_GRADIENT_K = (
    HopperRow(8, 1, 64, 8, 1, 64, "the next scores meanwhile", max_mask=0, held=3, ahead=True),
    HopperRow(8, 1, 64, 8, 1, 64, "the same, and a mask's registers", max_mask=1, ahead=True),
    HopperRow(8, 1, 96, 3, 1, 128, "as for queries", max_mask=2),
    HopperRow(4, 1, 128, 4, 1, 64, "few rows in all: twice the blocks", max_mask=1),
    HopperRow(4, 1, 96, 3, 1, 128, "few rows in all: twice the blocks", max_mask=2),
    HopperRow(8, 1, 64, 3, 1, 128, "a mask's registers"),
    HopperRow(8, 1, 64, 3, 1, 192, "320 columns of both sides together", max_mask=2),
    HopperRow(4, 1, 64, 3, 1, 128, "few rows in all, and a mask's registers"),
    HopperRow(8, 1, 48, 2, 1, 256, "two stages beside the widest rows", max_mask=2),
    HopperRow(8, 1, 32, 3, 1, 256, "and a mask's registers"),
)

_TILES = {"forward": _FORWARD, "gradient_q": _GRADIENT_Q, "gradient_k": _GRADIENT_K}

# (consumer, producer) registers per thread by (consumer warpgroups, blocks per multiprocessor).
_REGISTERS = {
    "forward": {(4, 1): (112, 32), (3, 1): (152, 32), (2, 1): (224, 40), (1, 1): (240, 40), (2, 2): (104, 24)},
    "gradient_q": {(2, 1): (240, 24), (1, 1): (240, 40)},
    # A producer that asks every part of a long mask needs more, and more still one that fetches row vectors.
    "gradient_q, long mask": {(2, 1): (232, 40), (1, 1): (240, 40)},
    "gradient_k": {(2, 1): (224, 56), (1, 1): (240, 88)},
    "gradient_k, ahead": {(2, 1): (232, 40)},
}


def _role(work: Work) -> str:
    return work.kind if work.kind == "forward" else f"gradient_{'k' if work.rows_are_keys else 'q'}"


def _chunks(dim: int) -> int:
    return -(-dim // 64)


def _no_map(x: Operand) -> str:
    """Why a tensor map cannot describe an input; empty where it can."""
    if not vector_loads(x):
        return "its rows must start on 16-byte boundaries with adjacent elements"
    if any(stride < 0 or stride * ELEMENT_BYTES[x.dtype] >= MAX_STRIDE_BYTES for stride in x.strides[:3]):
        return "its strides must be positive and below 2^40 bytes"
    if x.rows > 1 and x.strides[2] < x.dim:
        return "its rows overlap"
    return ""


class _Hopper(Family):
    name = "sm90"

    def refuses(self, work: Work, facts: DeviceFacts) -> str:
        problem = work.problem
        if facts.compute_capability != (9, 0):
            return "it needs compute capability 9.0"
        if work.float32:
            return "it multiplies 16-bit elements"
        if any(side.dim % 8 for side in work.sides):
            return "head dims must be multiples of 8"
        if 0 in (problem.batch, problem.heads, problem.queries, problem.keys):
            return "a tensor map cannot be empty"
        if work.rows_are_keys and problem.queries < MIN_STREAMED_QUERIES * max(problem.sequences, 1):
            return f"fewer than {MIN_STREAMED_QUERIES} queries do not fill its pipeline"
        for name in INPUT_NAMES:
            if reason := _no_map(problem.operand(name)):
                return f"{name}: {reason}"
        if work.kind == "fused" and (reason := sm90_fused.refuses(work)):
            return reason
        return "" if self.fitting(work, facts) else "the head dims need more shared memory than there is"

    def flag(self, capability: tuple[int, int]) -> str:
        return "sm_90a"

    def entry(self, kind: str) -> tuple[str, str]:
        return f"kernels/{kind}_sm90.cu", f"streamkl_{kind}"

    def table(self, work: Work) -> tuple[TileRow, ...]:
        return sm90_fused.TABLE if work.kind == "fused" else _TILES[_role(work)]

    def smem_bytes(self, work: Work, tile: TileRow) -> int:
        if isinstance(tile, FusedRow):
            return sm90_fused.smem_bytes(work, tile)
        chunks = sum(_chunks(side.dim) for side in work.sides)
        rows = 1024 + tile.rows * chunks * 128
        if work.kind == "forward":
            return rows + tile.stages * self._piece_chunks(tile) * COLUMNS * 128 + 8 * (2 * tile.stages + 1)
        terms = 4 * work.row_vectors * tile.columns + 16 if work.rows_are_keys else 0
        return rows + tile.stages * (tile.columns * chunks * 128 + terms) + 8 * (2 * tile.stages + 2)

    def threads(self, tile: TileRow) -> int:
        return sm90_fused.THREADS if isinstance(tile, FusedRow) else tile.warps * 32 + 128

    def constants(self, work: Work, tile: TileRow) -> dict[str, int]:
        if isinstance(tile, FusedRow):
            return {"SKL_ARRIVING_LANES": ARRIVING_LANES, **sm90_fused.constants(work, tile)}
        role = _role(work)
        if role == "gradient_q" and work.mask_level > 2:
            role += ", long mask"
        assert isinstance(tile, HopperRow), tile
        if tile.ahead:
            role += ", ahead"
        # Masks with holes need the registers where sums of the output do too.
        held = tile.held if work.kind == "forward" or work.mask_level < 2 else 0
        consumer, producer = _REGISTERS[role][tile.warps // 4, tile.min_blocks]
        return {
            **(
                {"SKL_PIECE_CHUNKS": self._piece_chunks(tile)}
                if work.kind == "forward"
                else {"SKL_AHEAD": int(tile.ahead)}
            ),
            "SKL_HELD_STEPS": min(held, -(-work.problem.teacher.dim // 16)),
            "SKL_ARRIVING_LANES": ARRIVING_LANES,
            "SKL_MIN_BLOCKS": tile.min_blocks,
            "SKL_CONSUMER_REGISTERS": consumer,
            "SKL_PRODUCER_REGISTERS": producer,
        }

    def args(self, kind: str) -> Struct:
        return {"forward": HOPPER_FORWARD, "gradient": HOPPER_GRADIENT, "fused": HOPPER_FUSED}[kind]

    def regions(self, work: Work, tile: TileRow) -> tuple[Regions, ...]:
        if work.kind == "forward":
            return super().regions(work, tile)
        shares = shared_lists(tile.warps, tile.rows, work.out_dim)
        if work.kind == "gradient":
            return (shares,)
        return fused_workspace(COLUMNS, work.out_dim, work.row_vectors), shares

    def boxes(self, work: Work, tile: TileRow) -> tuple[tuple[str, int], ...]:
        return tuple(
            (name, tile.rows if name.endswith("_k") == work.rows_are_keys else tile.columns) for name in INPUT_NAMES
        )

    def shares_lists(self, work: Work) -> bool:
        return work.kind != "forward"

    def stays(self, work: Work) -> bool:
        return work.kind == "fused"

    def helpers(self, work: Work) -> tuple[int, int]:
        return sm90_fused.query_tiles(work), sm90_fused.HELPER_THREADS

    @staticmethod
    def _piece_chunks(tile: TileRow) -> int:
        return 2 if tile.max_dim == 128 and tile.stages == 6 else 1


FAMILY = _Hopper()

"""Ampere and newer: cp.async, ldmatrix, mma.sync. The portable family, and the only one every supported GPU can run.

Shared memory of a row, bytes, with p(D) = round_up(D, 16) * element + 16 the padded length of one tile row:

    forward    rows * (p(D_t) + p(D_s)) + stages * columns * (p(D_t) + p(D_s))
    gradient   the same, plus 12 or 16 bytes per streamed query when the keys are stationary
    float32    where the keys are streamed, 4 bytes more per element of a key and 16 besides, for what all keys have in
               common: of both sides in a forward, of its own in a gradient

Registers per thread that hold scores: warp_tiles * columns (both sides together); output of a gradient:
warp_tiles * D / 2. The limit is 255 per thread and 65,536 per multiprocessor.
"""

from __future__ import annotations

from ..problem import INPUT_NAMES
from ..structs import FORWARD, GRADIENT, Struct
from . import ELEMENT_BYTES, DeviceFacts, Family, TileRow, Work, vector_loads

_FORWARD = (
    TileRow(4, 2, 64, 2, 2, 64, "32 rows per warp, two blocks per multiprocessor", unroll=4),
    TileRow(4, 2, 32, 2, 2, 128, "32 rows per warp halve the reads per product; two blocks fit", unroll=8),
    TileRow(2, 1, 64, 2, 2, 64, "few rows in all: more blocks, long tiles"),
    TileRow(2, 1, 32, 2, 2, 128, "few rows in all: more blocks"),
    TileRow(4, 1, 32, 2, 1, 576, "one strip per warp: room for long rows"),
    TileRow(2, 1, 16, 1, 1, 576, "fits 99 KiB at the largest head dims"),
)

_FORWARD_F32 = (
    TileRow(4, 2, 32, 2, 1, 128, "operands are split at every read: 32 rows per warp share a split", unroll=2),
    TileRow(2, 1, 32, 2, 1, 128, "few rows in all, or 99 KiB", unroll=2),
    TileRow(4, 1, 16, 1, 1, 256, "one strip per warp: room for long rows", unroll=2),
    TileRow(1, 1, 16, 1, 1, 576, "the least a block can be", unroll=2),
)

_GRADIENT = (
    TileRow(
        4, 2, 64, 2, 2, 64, "as the forward; unroll 4 spills, and sm_120 spills any", 3, before=(10, 0), max_mask=0
    ),
    TileRow(4, 2, 48, 2, 2, 64, "3 % slower on an H100", max_mask=0),
    TileRow(4, 2, 48, 2, 2, 64, "room for a mask's registers", unroll=3, max_mask=1),
    TileRow(4, 2, 48, 2, 2, 64, "a sparse mask's too; sm_120 spills", unroll=3, max_mask=2, before=(10, 0)),
    TileRow(4, 2, 32, 2, 2, 128, "as the forward; unroll 8 is 3 % faster and spills under a mask", 4, max_mask=0),
    TileRow(4, 2, 32, 2, 2, 128, "room for a mask's registers", unroll=3, max_mask=1),
    TileRow(4, 2, 32, 2, 2, 128, "a sparse mask's too; sm_120 spills", 3, max_mask=2, max_vectors=3, before=(10, 0)),
    TileRow(4, 2, 16, 2, 2, 128, "room for a sparse mask's registers beside four row vectors", unroll=3, max_mask=2),
    TileRow(2, 1, 32, 2, 2, 128, "few rows in all: more blocks", unroll=2),
    TileRow(4, 1, 32, 2, 1, 576, "one strip per warp: room for long rows and outputs", unroll=1, max_mask=0),
    TileRow(4, 1, 32, 2, 1, 576, "the same beside a mask's registers", unroll=1, max_out=192),
    TileRow(4, 1, 16, 1, 1, 576, "the same in less shared memory", unroll=1),
    TileRow(2, 1, 16, 1, 1, 576, "fits 99 KiB at the largest head dims", unroll=1, max_mask=0),
    TileRow(2, 1, 16, 1, 1, 576, "the same beside a mask's registers", unroll=3),
)

_GRADIENT_F32 = (
    TileRow(4, 2, 32, 2, 1, 64, "as the forward; sm_120 spills", unroll=1, before=(10, 0), max_mask=1),
    TileRow(8, 1, 32, 2, 1, 128, "eight warps hide the splitting; one strip pays for the output", unroll=1),
    TileRow(2, 1, 16, 2, 1, 128, "few rows in all, or 99 KiB", unroll=1),
    TileRow(2, 1, 16, 1, 1, 256, "room for long rows", unroll=1),
    TileRow(1, 1, 16, 1, 1, 576, "the least a block can be", unroll=1),
)

_TILES = {
    ("forward", False): _FORWARD,
    ("forward", True): _FORWARD_F32,
    ("gradient", False): _GRADIENT,
    ("gradient", True): _GRADIENT_F32,
}


class _Portable(Family):
    name = "sm80"

    def refuses(self, work: Work, facts: DeviceFacts) -> str:
        major, minor = facts.compute_capability
        if (major, minor) < (8, 0):
            return (
                f"GPU {facts.name or '?'} has compute capability {major}.{minor}; kernels are built for 8.0 (Ampere) "
                "and newer; use NumPy arrays to compute on the CPU"
            )
        if work.kind == "fused":
            return "it computes one gradient at a time"
        if not self.fitting(work, facts):
            teacher, student = work.sides
            return (
                f"head dims {teacher.dim} ({teacher.dtype}) and {student.dim} ({student.dtype}) need more shared "
                f"memory than the {facts.smem_per_block} B of {facts.name or 'this GPU'}"
            )
        return ""

    def flag(self, capability: tuple[int, int]) -> str:
        return f"sm_{capability[0]}{capability[1]}"

    def entry(self, kind: str) -> tuple[str, str]:
        return f"kernels/{kind}_sm80.cu", f"streamkl_{kind}"

    def args(self, kind: str) -> Struct:
        return FORWARD if kind == "forward" else GRADIENT

    def table(self, work: Work) -> tuple[TileRow, ...]:
        return _TILES[work.kind, work.float32]

    def smem_bytes(self, work: Work, tile: TileRow) -> int:
        pitch = sum(-(-side.dim // 16) * 16 * ELEMENT_BYTES[side.dtype] + 16 for side in work.sides)
        centred = () if work.rows_are_keys else work.sides if work.kind == "forward" else (work.side,)
        common = sum(-(-side.dim // 16) * 64 + 16 for side in centred if side.dtype == "float32")
        return tile.rows * pitch + tile.stages * tile.columns * (pitch + 4 * work.row_vectors) + common

    def threads(self, tile: TileRow) -> int:
        return tile.warps * 32

    def constants(self, work: Work, tile: TileRow) -> dict[str, int]:
        loads = {
            f"SKL_{name[0].upper()}{name[-1].upper()}_VECTOR": int(vector_loads(work.problem.operand(name)))
            for name in INPUT_NAMES
        }
        return {**loads, "SKL_MIN_BLOCKS": tile.min_blocks, "SKL_UNROLL": tile.unroll}


FAMILY = _Portable()

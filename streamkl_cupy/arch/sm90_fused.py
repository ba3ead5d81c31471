"""The Hopper kernel that computes both gradients of one side in one pass: `kernels/fused_sm90.cu`.

Shared memory of a block, bytes, with chunks(D) = ceil(D / 64), `keys` of a block and 64 queries to a tile:

    1024 (alignment) + 128 * keys * (chunks(D_own) + chunks(D_other)) + 8192 * (stages * chunks(D_own)
        + other_stages * chunks(D_other)) + 16384 * (handovers + stagings) + stages * row_vectors * 256 + barriers

Registers per consumer thread: 64 scores and, for every 128 keys, round_up(D_own, 16) / 2 of their gradient and 8 of
the keys themselves; masks with holes, and an other side beyond 128, leave no room for these. Beyond D_own = 128
gradients do not fit, nor do 256 keys beyond D_own = 64.

Workspace, bytes, per query head: 4 * D_own + 4 * row_vectors for each query, and 4 for each 64 of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..masks import parts_of
from . import TileRow, Work

COLUMNS = 64
MAX_OUT = 128

# Threads of the consumers, of the warpgroup for the gradient of the queries, of the producer; registers of each.
THREADS = 256 + 128 + 128
CONSUMER_REGISTERS, QUERY_GRADIENT_REGISTERS, PRODUCER_REGISTERS = 192, 80, 40
HELPER_THREADS = 128
# Of 16 columns of a consumer's own keys, in registers. 8 heads x 8192, TFLOP/s on an H100 with 0, 1 and 2 of them:
# D = 64 416, 421, 423, causal 393, 397, 406; D = 128 565, 563, 570, causal 507, 521, 534.
HELD_STEPS = 2


@dataclass(frozen=True)
class FusedRow(TileRow):
    """A row of the table. `stages` queries' tiles of the own side are in flight and `other_stages` of the other one."""

    other_stages: int = 2
    handovers: int = 2
    """Tiles of score gradients between the consumers and the warpgroup that takes them."""
    stagings: int = 1
    """Buffers between that warpgroup and the copy engine."""


# Student, 8 heads x 8192, bf16, TFLOP/s of the operation on an H100. D = 64: 256 keys 403, causal 377; 128 keys 374 and
# 357. D = 128: 520 and 524 as below; 529 and 502 with a third handover in place of the second staging; 559 and 495 with
# a fourth stage in place of it. Runs differ by 3 %.
TABLE = (
    FusedRow(8, 2, COLUMNS, 5, 1, 64, "two tiles of keys: half the additions in memory", max_out=64, other_stages=5),
    FusedRow(8, 1, COLUMNS, 6, 1, 64, "one tile of keys: twice the blocks", max_out=64, other_stages=6, stagings=2),
    FusedRow(8, 1, COLUMNS, 4, 1, 128, "one side at most 64", max_out=MAX_OUT, other_stages=4, stagings=2),
    FusedRow(8, 1, COLUMNS, 3, 1, 128, "both sides wide", max_out=MAX_OUT, stagings=2),
    FusedRow(8, 1, COLUMNS, 2, 1, 192, "a long other side", max_out=MAX_OUT),
    FusedRow(8, 1, COLUMNS, 2, 1, 256, "256 and 128", max_out=MAX_OUT, handovers=1),
)


def refuses(work: Work) -> str:
    """Why the work must be done by a kernel per gradient; empty where it can be fused."""
    if work.out_dim > MAX_OUT:
        return f"registers hold gradients of head dims up to {MAX_OUT}"
    if sum(part.holes is not None for part in parts_of(work.problem.mask)) > 1:
        return "registers hold one mask with holes"
    return ""


def smem_bytes(work: Work, tile: FusedRow) -> int:
    """Dynamic shared memory of a block."""
    own, other = _chunks(work.side.dim), _chunks(work.other_side.dim)
    rings = tile.stages * own + tile.other_stages * other
    barriers = 8 * (3 + 2 * (tile.stages + tile.other_stages + tile.handovers))
    return (
        1024
        + tile.rows * 128 * (own + other)
        + COLUMNS * 128 * rings
        + 128 * tile.warps * 16 * tile.handovers
        + 16384 * tile.stagings
        + tile.stages * work.row_vectors * COLUMNS * 4
        + barriers
    )


def constants(work: Work, tile: FusedRow) -> dict[str, int]:
    """What is compiled in."""
    return {
        "SKL_OTHER_STAGES": tile.other_stages,
        "SKL_HANDOVERS": tile.handovers,
        "SKL_STAGINGS": tile.stagings,
        "SKL_HELD_STEPS": min(HELD_STEPS, -(-work.side.dim // 16)) if work.mask_level < 2 and work.dim <= 128 else 0,
        "SKL_CONSUMER_REGISTERS": CONSUMER_REGISTERS,
        "SKL_DQ_REGISTERS": QUERY_GRADIENT_REGISTERS,
        "SKL_PRODUCER_REGISTERS": PRODUCER_REGISTERS,
    }


def workspace_bytes(work: Work) -> int:
    """Sums of the queries' gradient in float32, and the row vectors as the kernel streams them."""
    entries = work.problem.batch * work.problem.heads * query_tiles(work)
    return 4 * entries * (COLUMNS * (work.side.dim + work.row_vectors) + 1)


def query_tiles(work: Work) -> int:
    """Tiles of queries, which are also the blocks per head of the kernels before and after.

    With packed sequences as many as any lengths need.
    """
    problem = work.problem
    if problem.sequences:
        return problem.queries // COLUMNS + problem.sequences + 1
    return -(-problem.queries // COLUMNS)


def _chunks(dim: int) -> int:
    return -(-dim // 64)

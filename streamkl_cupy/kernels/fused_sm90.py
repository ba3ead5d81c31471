"""Both gradients of one side in one pass on Hopper, `kernels/fused_sm90.cu`.

Shared memory of a block, bytes, with chunks(D) = ceil(D / 64), `keys` of a block and 64 queries to a tile:

    1024 (alignment) + 128 * keys * (chunks(D_grad) + kept) + 8192 * (stages * chunks(D_grad) + score_stages * unit)
        + 16384 * ds_stages + 2048 * staging_tiles * stagings + stages * row_vectors * 256 + barriers + work items

`kept` and `unit` are chunks(D_score) where whole tiles of the score side fit. By pieces `unit` is 1, `kept` are as many
chunks of its keys as fit, and stages take what is left. Where it is given, none is kept, a stage has the numbers of a
tile, 64 * keys * their bytes. Where a tile has all keys of a head, 8192 bytes take the place of the stagings, for a
query gradient that is written without sums.

Registers per consumer thread: 64 scores and, for every 128 keys, round_up(D_grad, 16) / 2 of their gradient and 8 of
the keys themselves; masks with holes, intervals beside four row vectors, a score side beyond 128 and shares of tiles
leave no room for these. Gradients of D_grad beyond 192 do not fit, nor do 256 keys beyond 64. Beyond 128 there is no
room for masks of more than bounds, shares, float16's powers of two, or pieces of more than 256 columns.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..rules.masks import Part, parts_of
from .base import MAX_GRID, Box, KernelPlan, TileRow, Work
from .gpus import GPUS, DeviceFacts
from .shares import side_by_side
from .sm90 import ALIGNMENT, COLUMNS, Hopper, chunks, given_bytes, packed_rows
from .structs import Regions, fused_workspace, partials, row_tiles
from .work_tiles import Schedule

MAX_OUT = 192

# Threads of the consumers, of the warpgroup for the gradient of the queries, of the producer.
THREADS = 256 + 128 + 128
HELPER_THREADS = 128
WARP = 32
_BLOCKS = GPUS["sm_90"].multiprocessors
WORK_ITEMS, WORK_ITEM_BYTES = (
    2,
    104,
)  # pipeline/work_tiles.cuh asserts both
# Of 16 columns of a consumer's own keys, in registers. 8 heads x 8192, TFLOP/s on an H100 with 0, 1 and 2 of them:
# D = 64 416, 421, 423, causal 393, 397, 406; D = 128 565, 563, 570, causal 507, 521, 534.
HELD_STEPS = 2
WHOLE_CHUNK = 8  # tiles of 8 columns, which are staged together where rows are written


@dataclass(frozen=True)
class _Row(TileRow):
    """`stages` queries' tiles of the grad side are in flight and `score_stages` of the score side."""

    score_stages: int = 2
    ds_stages: int = 2
    """Tiles of score gradients between the consumers and the warpgroup that takes them."""
    stagings: int = 1
    """Buffers between that warpgroup and the copy engine."""
    staging_tiles: int = 8
    """Of 8 columns, in one of these."""
    registers: tuple[int, int, int] = (192, 80, 40)
    """Per thread of the consumers, of that warpgroup, of the producer: 2, 1, 1 of them are 512 at most."""
    early: bool = False
    """Consumers wait for the next copies before their turn at products, which takes registers."""
    wide: bool = False
    """That warpgroup multiplies all columns at once, and reads the score gradients once."""
    pieces: bool = False
    """The score side's queries come in pieces of 64 columns, of which at least `score_stages` are in flight, and of its
    keys as many columns stay as there is room for; the others come with the queries, 64 keys to a piece."""
    direct: bool = False
    """A tile has all keys of a head: one product makes the gradient of a tile of queries, and that warpgroup writes it.
    There are no sums to clear, to add to and to convert, nor an order of them."""

    @property
    def totals(self) -> bool:
        # Where blocks add to the queries' gradient in any order, so may they to the keys'.
        return not self.direct


_LONG_SUMS = (208, 64, 32)  # where a consumer sums more than 128 columns

# Student, 8 heads x 8192, bf16, ms on an H100, one run per line; runs differ by 3 %, and the compiler's order of
# instructions does as much as what is named here:
#   D = 64, 256 keys, early 0.611 to 0.643, causal 0.321 to 0.327; late, blocks that do not stay 0.642 and 0.334
#   D = 128, early and wide 0.922, causal 0.507; early 0.985, 0.511; wide 0.951, 0.520; neither 0.969, 0.502
# Before these, TFLOP/s: D = 64 128 keys 374 where 256 had 403; D = 128 a third dS stage in place of the second staging
# 529 and 502, a fourth stage in place of it 559 and 495, where the row as it is had 520 and 524.
_TABLE = (
    _Row(
        8,
        2,
        COLUMNS,
        5,
        1,
        64,
        "two tiles of keys: half the additions in memory",
        max_out=64,
        score_stages=5,
        early=True,
        max_mask=1,
    ),
    _Row(8, 2, COLUMNS, 5, 1, 64, "the same, and a mask's registers", max_out=64, score_stages=5, max_turned=-1),
    _Row(
        8,
        1,
        COLUMNS,
        6,
        1,
        64,
        "one tile of keys: twice the blocks",
        max_out=64,
        score_stages=6,
        stagings=2,
        early=True,
        max_mask=1,
    ),
    _Row(8, 1, COLUMNS, 6, 1, 64, "the same, and a mask's registers", max_out=64, score_stages=4, stagings=2),
    _Row(8, 1, COLUMNS, 4, 1, 128, "one side at most 64", max_out=128, score_stages=4, stagings=2, max_turned=-1),
    _Row(
        8,
        1,
        COLUMNS,
        3,
        1,
        128,
        "both sides wide",
        max_out=128,
        stagings=2,
        registers=(184, 96, 40),
        early=True,
        wide=True,
        max_mask=0,
    ),
    _Row(8, 1, COLUMNS, 3, 1, 128, "the same, and a mask's registers", max_out=128, stagings=2),
    _Row(8, 1, COLUMNS, 2, 1, 192, "a long score side", max_out=128),
    _Row(8, 1, COLUMNS, 2, 1, 256, "256 and 128", max_out=128, ds_stages=1),
    _Row(
        8,
        1,
        COLUMNS,
        1,
        1,
        576,
        "a score side of any width, by pieces",
        max_out=128,
        score_stages=6,
        ds_stages=1,
        staging_tiles=4,
        pieces=True,
    ),
    _Row(
        8,
        1,
        COLUMNS,
        2,
        1,
        256,
        "keys' gradients beyond 128",
        score_stages=4,
        ds_stages=1,
        pieces=True,
        registers=_LONG_SUMS,
        max_mask=0,
        shareable=False,
    ),
)


# Beside a teacher that is given: stages of the score side's ring have its numbers.
_GIVEN = (
    _Row(8, 1, COLUMNS, 4, 1, 64, "as far ahead as there is room", max_out=64, score_stages=3, stagings=2),
    _Row(8, 1, COLUMNS, 3, 1, 128, "two tiles of float32 in flight", max_out=128, stagings=2),
)


class _Fused(Hopper[_Row]):
    kind = "fused"
    args = "hopper_fused"
    takes_given = True
    shares_tiles = True
    persistent = True
    min_queries = 64
    # Sums are read and written, and share the cache with what comes next: causal, D = 128, two heads of 8192 rows
    # (17 MB) side by side take 0.52 ms, eight of them 0.56.
    l2_budget = 20 << 20

    def choice(self, work: Work, facts: DeviceFacts) -> tuple[_Row | None, str]:
        tile, reason = super().choice(work, facts)
        if tile and work.problem.deterministic and not tile.direct:
            return None, "deterministic=True, and one pass adds its sums in no fixed order"
        if tile and not tile.shareable and self.few_tiles(work, tile, self.schedule(work, tile, facts), facts):
            return None, f"registers hold no shares of few row tiles beside a gradient of {work.out_dim} columns"
        return tile, reason

    def packed(self, work: Work) -> Work:
        rows = packed_rows(work)
        # Else rows of one head fill half of a tile, or those of all that share its keys do not; or registers are few.
        worth = 2 * rows <= COLUMNS and 2 * min(work.sharing_heads, COLUMNS // max(rows, 1)) * rows >= COLUMNS
        return replace(work, packed_rows=rows if worth and work.mask_level < 2 else 0)

    def fills(self, work: Work) -> bool:
        return super().fills(work) or self.packed(work).packed_rows > 0

    def lacks(self, work: Work) -> str:
        if work.out_dim > MAX_OUT:
            return f"registers hold gradients of head dims up to {MAX_OUT}"
        spare = work.row_vectors < 4 and not (work.turned or work.given) and work.side.dtype == "bfloat16"
        if not _holds(parts_of(work.problem.mask), spare):
            return "registers hold one mask with holes"
        if work.out_dim > 128 and work.mask_level:
            return f"registers hold no such mask beside a gradient of {work.out_dim} columns"
        if work.out_dim > 128 and work.side.dtype == "float16":
            return f"registers hold no powers of two of float16 beside a gradient of {work.out_dim} columns"
        if work.out_dim > 128 and work.dim > 256:
            return f"registers hold no pieces of {work.dim} columns beside a gradient of {work.out_dim}"
        if _entries(work) > MAX_GRID:
            return f"{_entries(work)} blocks before and after exceed the grid limit of {MAX_GRID}"
        return ""

    def table(self, work: Work) -> tuple[_Row, ...]:
        table = _GIVEN if work.given else _TABLE
        return tuple(x for row in table for x in (replace(row, direct=True), row))

    def fitting(self, work: Work, facts: DeviceFacts) -> tuple[_Row, ...]:
        fitting = super().fitting(work, facts)
        if self.packed(work).packed_rows:  # which takes registers as a mask does
            return tuple(row for row in fitting if not row.direct and row.max_mask > 0)
        # What is written at once goes through a buffer of 16-bit numbers, and takes registers.
        direct = "q" not in work.problem.wide_gradients and work.out_dim <= 128
        return tuple(row for row in fitting if not row.direct or (direct and work.problem.keys <= row.rows))

    def threads(self, tile: _Row) -> int:
        return THREADS

    def smem_bytes(self, work: Work, tile: _Row) -> int:
        kept, stages = _score_side(work, tile)
        return _own_bytes(work, tile) + _score_bytes(work, tile, kept, stages)

    def boxes(self, work: Work, tile: _Row) -> tuple[Box, ...]:
        if _score_side(work, tile)[0] == chunks(work.score_side.dim):
            return super().boxes(work, tile)
        specs = work.problem.operation.operand
        return tuple(
            x._replace(rows=COLUMNS) if specs[x.name].rows == "k" and specs[x.name].side != work.task.side else x
            for x in super().boxes(work, tile)
        )

    def constants(self, work: Work, tile: _Row) -> dict[str, int]:
        hold = work.dim <= 128 and work.level + (work.row_vectors > 3) < 2 and not tile.shared
        kept, score_stages = _score_side(work, tile)
        registers = consumer, query_gradient, producer = _registers(work, tile)
        # Where registers are divided unusually, or blocks share tiles, they are all in use, and a mask wants some, as a
        # long one does anywhere. To write dQ takes some too.
        masked = bool(work.problem.mask.parts) or work.turned
        read_again = masked and (tile.shared or registers != _Row.registers or work.level > 2)
        wide = tile.wide and not (masked and tile.direct)
        return {
            **super().constants(work, tile),
            "SKL_PACKED_ROWS": work.packed_rows,
            "SKL_SHORT_TANH": 1,
            "SKL_PIECES": int(tile.pieces),
            "SKL_KEPT_CHUNKS": kept,
            "SKL_SCORE_STAGES": score_stages,
            "SKL_DS_STAGES": tile.ds_stages,
            "SKL_STAGINGS": 1 if tile.direct else tile.stagings,
            "SKL_DIRECT": int(tile.direct),
            "SKL_HELPER_THREADS": _helper_threads(tile),
            "SKL_STAGING_TILES": WHOLE_CHUNK if tile.direct else tile.staging_tiles,
            "SKL_WORK_ITEMS": WORK_ITEMS,
            "SKL_WORK_ITEM_BYTES": WORK_ITEM_BYTES,
            "SKL_HELD_STEPS": min(HELD_STEPS, -(-work.side.dim // 16)) if hold else 0,
            "SKL_READ_AGAIN": int(read_again),
            "SKL_CARRY": int(_carries(work, tile)),
            "SKL_EARLY_WAITS": int(tile.early),
            "SKL_WIDE_CHUNKS": chunks(work.out_dim) if wide else 1,
            "SKL_CONSUMER_REGISTERS": consumer,
            "SKL_DQ_REGISTERS": query_gradient,
            "SKL_PRODUCER_REGISTERS": producer,
        }

    def regions(self, work: Work, tile: _Row) -> tuple[Regions, ...]:
        return _workspace(work, tile), partials(tile.warps, tile.rows, work.out_dim)

    def streamed_bytes(self, work: Work) -> int:
        return super().streamed_bytes(work) + work.sums_bytes

    def head_group(self, work: Work, least: int = 1) -> int:
        # Without a mask all tiles are as long as any: one head after the other keeps most of its sums in the cache.
        if not work.problem.mask.parts:
            return 1
        # As the shortest tiles of a group end the longest of the next start, if there are as many as blocks.
        return super().head_group(work, max(least, round(_BLOCKS * 128 / work.problem.keys)))

    def schedule(self, work: Work, tile: _Row, facts: DeviceFacts) -> Schedule:
        found = super().schedule(work, tile, facts)
        parts = parts_of(work.problem.mask)
        ramp = any(part.last_key for part in parts) and not work.problem.sequences
        if not ramp or any(part.listed for part in parts):
            return found  # tiles are as long as any, or lists are cut to be
        together = side_by_side(found.tiles, work.pairs, found.head_group, facts.multiprocessors)
        return replace(found, head_group=together)

    def plans(self, work: Work, tile: _Row, facts: DeviceFacts, reason: str = "") -> tuple[KernelPlan, ...]:
        """What prepares the workspace, the pass, and, if it has sums, what makes them the gradient of the queries."""
        work = self.packed(work)
        main = self.plan(work, tile, facts, reason)

        def helper(does: str) -> KernelPlan:
            symbol = f"{main.symbol}_{does}"
            return replace(main, symbol=symbol, smem_bytes=0, blocks=_entries(work), threads=_helper_threads(tile))

        return (helper("prepare"), main) if tile.direct else (helper("prepare"), main, helper("finish"))

    def workspace_bytes(self, work: Work, tile: _Row) -> int:
        return _workspace(work, tile).bytes(_entries(self.packed(work)))


def _own_bytes(work: Work, tile: _Row) -> int:
    """Shared memory of all but the score side."""
    return (
        ALIGNMENT
        + 128 * chunks(work.side.dim) * (tile.rows + tile.stages * COLUMNS)
        + 128 * tile.warps * 16 * tile.ds_stages
        + (8192 if tile.direct else 2048 * tile.staging_tiles * tile.stagings)
        + tile.stages * work.row_vectors * COLUMNS * 4
        + 8 * (4 + 2 * (tile.stages + tile.ds_stages) + 2 * WORK_ITEMS)
        + WORK_ITEMS * WORK_ITEM_BYTES
    )


def _score_bytes(work: Work, tile: _Row, kept: int, stages: int) -> int:
    """Shared memory of the score side, of whose keys so many chunks stay."""
    stage = COLUMNS * 128 * (1 if tile.pieces else chunks(work.score_side.dim)) + given_bytes(work, tile.rows)
    return tile.rows * 128 * kept + stages * (stage + 2 * 8)


def _score_side(work: Work, tile: _Row) -> tuple[int, int]:
    """How many chunks of the score side's keys stay, and how many stages its ring has."""
    kept, stages = chunks(work.score_side.dim), tile.score_stages
    if tile.pieces:
        room = GPUS["sm_90"].smem_per_block - _own_bytes(work, tile)
        while kept > 2 and _score_bytes(work, tile, kept, stages) > room:
            kept -= 1
        while _score_bytes(work, tile, kept, stages + 1) <= room:
            stages += 1
    return kept, stages


def _carries(work: Work, tile: _Row) -> bool:
    """Whether the step behind a partial tile starts before that is done with: registers hold it where blocks share
    tiles, and no keys of their own."""
    return tile.shared and not (tile.pieces or tile.direct or work.packed_rows or work.turned)


def _helper_threads(tile: _Row) -> int:
    # Row statistics are a warp's work, sums to clear and to convert are more.
    return WARP if tile.direct else HELPER_THREADS


def _workspace(work: Work, tile: _Row) -> Regions:
    return fused_workspace(COLUMNS, work.out_dim, work.row_vectors, tile.direct)


def _entries(work: Work) -> int:
    """Tiles of queries in all, which are also the blocks of the kernels before and after."""
    problem = work.problem
    if work.packed_rows:
        return problem.batch * work.side.k.heads * work.streamed_heads(COLUMNS)
    return problem.batch * problem.heads * row_tiles(problem.queries, COLUMNS, problem.sequences)


def _holds(parts: tuple[Part, ...], spare: bool) -> bool:
    """Whether registers hold a mask: two parts with holes only where some are to spare, one of them picks rows and
    there is no window."""
    sparse = [part for part in parts if part.sparse]
    picks = any(part.picks_queries for part in sparse)
    beside = any(part.registers for part in parts if not part.sparse)
    return len(sparse) < 2 or (len(sparse) == 2 and picks and not beside and spare)


def _registers(work: Work, tile: _Row) -> tuple[int, int, int]:
    if work.turned and tile.registers == _Row.registers and not tile.pieces:
        return (208, 64, 32) if work.row_vectors > 3 else (200, 72, 40)  # dots are turned by the consumers
    if work.given and work.mask_level > 1:
        return 208, 64, 32  # consumers say where the numbers of a pair are, and which pairs are visible
    teacher, narrow = work.row_vectors > 3, work.side.dtype == "float16"
    # Beside the sums of two tiles: packed rows say whose they are, and a step is carried over the start of the next.
    if tile.warp_tiles == 2 and work.packed_rows and teacher and not narrow:
        return 208, 64, 32
    if tile.warp_tiles == 2 and _carries(work, tile) and (teacher or (work.level > 1 and not narrow)):
        return 200, 72, 40
    holes = work.level > 1 and teacher and tile.warp_tiles == 1
    # A narrow type hands its gradients over as they are made; the other keeps them, beside four row vectors and a mask.
    return (208, 64, 32) if holes and work.out_dim <= 96 and not narrow else tile.registers


KERNEL = _Fused()

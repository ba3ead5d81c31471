"""All gradients of attention in one pass on Hopper, `kernels/attention_fused_sm90.cu`.

Shared memory of a block, bytes (`sm90.py`), with 128 keys, or two times 64 beside a pattern (`gathered.py`), and 64
queries to a tile; a row has chunks(D) + chunks(D_v) chunks of 128 bytes, a stage 528 for statistics of queries and
which they are, and each of `EXCHANGES` buffers the gradients of a tile's logits:

    1024 + 128 * row + stages * (64 * row + 528) + EXCHANGES * 16384 + barriers

Registers: a consumer thread holds 64 scores of both products together, which are half of the gradient of queries later,
and half as many of each other output as that has columns; the producer needs few.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .base import MAX_GRID, Box, KernelPlan, TileRow, Work
from .gathered import gathered
from .gpus import DeviceFacts
from .sm90 import ALIGNMENT, COLUMNS, Hopper, chunks
from .structs import ATTENTION_ROWS, Regions, attention_sums, row_tiles
from .work_tiles import Schedule, balance

HELPER_THREADS = 128
"""Of the kernels before and after."""
EXCHANGES = 3
"""Buffers for gradients of logits: one that is written, one that is read, and one so that nobody waits."""
HALF = 64
"""Keys of a warpgroup, which lie anywhere."""
WITHOUT_PATTERNS = False
"""Whether it is planned there. By 64 keys at a time, 16 heads x 8192, causal, it took 1.63 ms where a pass for queries
and one for keys and values take 1.41 (H200); by 128 it has not been timed."""
MOST_OUT = 128
MOST_BESIDE = 192
"""Columns of the gradients of keys and values together, where something takes registers beside them."""
MOST_MASK = 2
"""Of `Work.mask_level`."""


@dataclass(frozen=True)
class _Row(TileRow):
    registers: tuple[int, int] = (240, 24)
    """Of a consumer's thread, and of the producer's."""


_TABLE = (
    _Row(8, 1, COLUMNS, 6, 1, 64, "as many tiles under way as fit", max_out=64, pairs=True),
    _Row(8, 1, COLUMNS, 3, 1, 128, "the same for longer rows", max_out=128, pairs=True),
)


class _Fused(Hopper[_Row]):
    kind = "attention_fused"
    args = "hopper_fused"
    persistent = True

    def choice(self, work: Work, facts: DeviceFacts) -> tuple[_Row | None, str]:
        if work.problem.deterministic:
            return None, "deterministic=True, and one pass adds its sums in no fixed order"
        return super().choice(work, facts)

    def table(self, work: Work) -> tuple[_Row, ...]:
        return _TABLE

    def lacks(self, work: Work) -> str:
        if work.problem.mask.blocks is None and not WITHOUT_PATTERNS:
            return "without a pattern a pass for queries and one for keys and values are faster"
        if work.problem.operand("value").dim % 8:
            return "columns of values must be a multiple of 8"
        if max(work.dim, work.out_dim) > MOST_OUT:
            return f"registers hold gradients of at most {MOST_OUT} columns"
        if work.mask_level > MOST_MASK:
            return "gradients leave no registers for masks with several holes"
        both = work.side.dim + work.problem.operand("value").dim
        if both > MOST_BESIDE and (work.side.dtype == "float16" or work.problem.sequences):
            beside = "powers of two of float16" if work.side.dtype == "float16" else "segments of packed sequences"
            return f"registers hold no {beside} beside gradients of more than {MOST_BESIDE} columns"
        if work.turned and work.mask_level > 1 and work.problem.mask.blocks is None:
            return "registers hold no bits of a mask beside logits that are more than products"
        if _entries(work) > MAX_GRID:
            return f"{_entries(work)} blocks before and after exceed the grid limit of {MAX_GRID}"
        return ""

    def smem_bytes(self, work: Work, tile: _Row) -> int:
        row = 128 * (chunks(work.side.dim) + chunks(work.problem.operand("value").dim))
        exchanged = EXCHANGES * tile.rows * tile.columns * 2
        barriers = 8 * (2 * tile.stages + 2 * EXCHANGES + 2) + 12 * EXCHANGES + 64
        return ALIGNMENT + row * tile.rows + tile.stages * (tile.columns * (row + 8) + 16) + exchanged + barriers

    def constants(self, work: Work, tile: _Row) -> dict[str, int]:
        consumer, producer = tile.registers
        return {
            **super().constants(work, tile),
            "SKL_GRADIENT_OF_SCORES": 1,
            "SKL_GRADIENT_OF_VALUES": 1,
            "SKL_EXCHANGES": EXCHANGES,
            "SKL_HELPER_THREADS": HELPER_THREADS,
            "SKL_CONSUMER_REGISTERS": consumer,
            "SKL_PRODUCER_REGISTERS": producer,
        }

    def boxes(self, work: Work, tile: _Row) -> tuple[Box, ...]:
        """The operands, of keys a half at a time, and the upstream gradient, which goes with the queries."""
        return (*(x._replace(rows=HALF) for x in super().boxes(work, tile)), Box("grad", tile.columns))

    def regions(self, work: Work, tile: _Row) -> tuple[Regions, ...]:
        return ATTENTION_ROWS, _sums(work)

    def schedule(self, work: Work, tile: _Row, facts: DeviceFacts) -> Schedule:
        pattern = work.problem.mask.pattern
        if pattern is None:
            return super().schedule(work, tile, facts)
        lists = gathered(pattern, work.group).lists()
        _, together = balance(lists, work.pairs, facts.multiprocessors, False)
        return Schedule(
            tiles=lists.lengths.shape[1],
            head_group=min(self.head_group(work, min(together, work.pairs)), max(work.pairs, 1)),
            group=work.group,
        )

    def streamed_bytes(self, work: Work) -> int:
        """Queries and what goes with them, and the sums of their gradient."""
        value = work.problem.operand("value").dim
        return super().streamed_bytes(work) + work.problem.queries * (2 * value + 4 * work.side.dim)

    def plans(self, work: Work, tile: _Row, facts: DeviceFacts, reason: str = "") -> tuple[KernelPlan, ...]:
        """What clears the sums of the gradient of the queries, the pass, and what makes them that gradient."""
        main = self.plan(work, tile, facts, reason)

        def helper(does: str) -> KernelPlan:
            symbol = f"{main.symbol}_{does}"
            return replace(main, symbol=symbol, smem_bytes=0, blocks=_entries(work), threads=HELPER_THREADS)

        return helper("prepare"), main, helper("finish")

    def workspace_bytes(self, work: Work, tile: _Row) -> int:
        return _sums(work).bytes(_entries(work))


def _sums(work: Work) -> Regions:
    return attention_sums(COLUMNS, work.side.dim)


def _entries(work: Work) -> int:
    """Tiles of queries in all, which are also the blocks of the kernels before and after."""
    problem = work.problem
    return problem.batch * problem.heads * row_tiles(problem.queries, COLUMNS, problem.sequences)


KERNEL = _Fused()

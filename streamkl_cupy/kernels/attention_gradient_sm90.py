"""Gradients of attention on Hopper, `kernels/attention_gradient_sm90.cu`: of queries, keys, values, or of keys and
values in one pass.

Shared memory, bytes (`sm90.py`), with 64 streamed rows to a tile; a row has chunks(D) + chunks(D_v) chunks of 128
bytes, but for chunks(D) of a resident one where only values are differentiated, and a stage 512 for the statistics of
queries:

    1024 + rows * row + stages * (64 * row + statistics) + barriers

Registers: a consumer thread holds 64 scores of both products together, which become half as many packed ones, and half
as many of each output as that has columns; the producer needs few.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .attention_gradient_sm80 import is_scored
from .base import Box, TileRow, Work
from .sm90 import ALIGNMENT, COLUMNS, Hopper, chunks
from .structs import ATTENTION_ROWS, Regions


@dataclass(frozen=True)
class _Row(TileRow):
    registers: tuple[int, int] = (232, 40)
    """Of a consumer's thread, and of the producer's."""
    turns: bool = False
    """All warpgroups have the same 64 rows, and take the streamed tiles in turns."""

    @property
    def rows(self) -> int:
        return 64 if self.turns else super().rows


MOST_BESIDE_BOTH = 2
"""Of `Work.mask_level`."""

_QUERIES = (
    _Row(12, 1, COLUMNS, 6, 1, 64, "three warpgroups hide each other's latency", registers=(160, 32), max_out=64),
    _Row(12, 1, COLUMNS, 3, 1, 128, "the same for longer rows", registers=(160, 32), max_out=128, max_mask=1),
    _Row(8, 1, COLUMNS, 4, 1, 128, "few rows in all, or a mask's registers", max_out=128),
    _Row(8, 1, COLUMNS, 2, 1, 192, "room for longer rows", max_out=192),
)
_KEYS = (
    _Row(8, 1, COLUMNS, 4, 1, 128, "two warpgroups, whose registers hold two outputs", max_out=128),
    _Row(8, 1, COLUMNS, 5, 1, 128, "few rows in all", max_out=128, turns=True),
)
_LISTED_KEYS = (
    _Row(8, 1, COLUMNS, 5, 1, 128, "neighbouring blocks of a pattern have other lists", max_out=128, turns=True),
)
_LISTED_BOTH = (replace(_LISTED_KEYS[0], registers=(240, 24)),)


class _Gradient(Hopper[_Row]):
    kind = "attention_gradient"
    args = "hopper_gradient"

    def table(self, work: Work) -> tuple[_Row, ...]:
        if not work.rows_are_keys:
            return _QUERIES
        if work.problem.mask.blocks is None:
            return _KEYS
        return _LISTED_BOTH if len(work.task.outputs) > 1 else _LISTED_KEYS

    def smem_bytes(self, work: Work, tile: _Row) -> int:
        scored, valued = chunks(work.side.dim), chunks(work.problem.operand("value").dim)
        resident = scored + (valued if is_scored(work) else 0)
        statistics = 8 * tile.columns if work.rows_are_keys else 0
        stage = 128 * tile.columns * (scored + valued) + statistics
        return ALIGNMENT + 128 * tile.rows * resident + tile.stages * stage + 8 * (2 * tile.stages + 1)

    def lacks(self, work: Work) -> str:
        if work.problem.operand("value").dim % 8:
            return "columns of values must be a multiple of 8"
        if not any(work.dim <= row.max_dim and work.out_dim <= row.max_out for row in self.table(work)):
            return "registers hold gradients of fewer columns"
        if len(work.task.outputs) > 1 and work.mask_level > MOST_BESIDE_BOTH:
            return "two gradients leave no registers for masks with several holes"
        return ""

    def constants(self, work: Work, tile: _Row) -> dict[str, int]:
        consumer, producer = tile.registers
        return {
            **super().constants(work, tile),
            "SKL_GRADIENT_OF_SCORES": int(is_scored(work)),
            "SKL_GRADIENT_OF_VALUES": int("value" in work.task.results),
            "SKL_TURNS": int(tile.turns),
            "SKL_MIN_BLOCKS": tile.min_blocks,
            "SKL_CONSUMER_REGISTERS": consumer,
            "SKL_PRODUCER_REGISTERS": producer,
        }

    def boxes(self, work: Work, tile: _Row) -> tuple[Box, ...]:
        """The operands, and the upstream gradient, which goes with the queries."""
        boxes = super().boxes(work, tile)
        return (*boxes, Box("grad", boxes[0].rows))

    def regions(self, work: Work, tile: _Row) -> tuple[Regions, ...]:
        return (ATTENTION_ROWS,)


KERNEL = _Gradient()

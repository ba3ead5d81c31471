"""The forward of attention on Hopper, `kernels/attention_sm90.cu`.

Shared memory, bytes (`sm90.py`): a piece of the ring is a tile of keys or of their values

    1024 + rows * chunks(D) * 128 + stages * columns * max(chunks(D), chunks(D_v)) * 128 + barriers

Registers: a consumer thread holds columns / 2 scores, half as many packed weights and D_v / 2 of the output; the
producer needs few.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..problem import MaskSpec
from .base import TileRow, Work
from .combine import splits_of_last_rows
from .sm90 import ALIGNMENT, Hopper, chunks, packed_rows
from .structs import Regions, attention_states
from .work_tiles import same_lists


@dataclass(frozen=True)
class _Row(TileRow):
    registers: tuple[int, int] = (224, 40)
    """Of a consumer's thread, and of the producer's."""


LEAST_ROWS = 64
"""Of a tile."""
MOST_COLUMNS = 128
"""Of values: of those, one product."""

_TABLE = (
    _Row(16, 1, 64, 12, 1, 64, "four warpgroups hide each other's latency", registers=(112, 32), max_out=64),
    _Row(12, 1, 64, 10, 1, 128, "three, where the output takes more registers", registers=(160, 32), max_out=128),
    _Row(8, 1, 64, 8, 1, 128, "few rows in all, or to a head", max_out=128),
    _Row(4, 1, 64, 8, 1, 128, "few queries", registers=(240, 40), max_out=128),
    _Row(8, 1, 64, 4, 1, 256, "longer rows of queries", max_out=128),
)


class _Attention(Hopper[_Row]):
    kind = "attention"
    args = "hopper_forward"

    def table(self, work: Work) -> tuple[_Row, ...]:
        return _TABLE

    def smem_bytes(self, work: Work, tile: _Row) -> int:
        wide = chunks(work.side.dim)
        piece = tile.columns * 128 * max(wide, chunks(work.out_dim))
        return ALIGNMENT + tile.rows * 128 * wide + tile.stages * piece + 8 * (2 * tile.stages + 1)

    def lacks(self, work: Work) -> str:
        if work.out_dim % 8:
            return "columns of values must be a multiple of 8"
        return f"values have more than {MOST_COLUMNS} columns" if work.out_dim > MOST_COLUMNS else ""

    def constants(self, work: Work, tile: _Row) -> dict[str, int]:
        consumer, producer = tile.registers
        return {
            **super().constants(work, tile),
            "SKL_PACKED_ROWS": work.packed_rows,
            "SKL_MIN_BLOCKS": tile.min_blocks,
            "SKL_CONSUMER_REGISTERS": consumer,
            "SKL_PRODUCER_REGISTERS": producer,
        }

    def packed(self, work: Work) -> Work:
        return replace(work, packed_rows=_packed_rows(work))

    def most_splits(self, work: Work, tile: _Row) -> int:
        return splits_of_last_rows(work.problem, tile.rows, tile.columns)

    def regions(self, work: Work, tile: _Row) -> tuple[Regions, ...]:
        return (attention_states(work.out_dim),)


def _packed_rows(work: Work) -> int:
    """As `packed_rows` has it; with a pattern, where the heads that read the same keys have one list, and lie in one
    tile."""
    pattern = work.problem.mask.pattern
    if pattern is None:
        return packed_rows(work)
    rows = packed_rows(replace(work, problem=replace(work.problem, mask=MaskSpec())))
    return rows if rows * work.sharing_heads <= LEAST_ROWS and same_lists(pattern, work.sharing_heads) else 0


KERNEL = _Attention()

"""The gradient of one input on Hopper, `kernels/gradient_sm90.cu`.

Shared memory, bytes (`sm90.py`), with stats = 12 or 16 bytes per streamed query (and those 16 per stage) when the keys
are stationary:

    1024 + (rows + stages * columns) * (chunks(D_t) + chunks(D_s)) * 128 + stages * (columns * stats + 16) + barriers
        + what the block works on, where it may be a share of a row tile

Registers: a consumer thread holds `columns` scores, the half of them packed, D / 2 sums of the output and 4 for each
step of resident rows that it holds. 128 * (groups * consumer + producer) must fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..rules import divergences
from .base import TileRow, Work
from .sm90 import ALIGNMENT, Hopper, held_steps, row_bytes
from .structs import Regions, partials

TASK_BYTES = 88  # the kernel asserts it


@dataclass(frozen=True)
class _Row(TileRow):
    held: int = 0
    """Steps of 16 columns of the teacher's stationary rows that are kept in registers."""
    ahead: bool = False
    """The next tile's scores are multiplied while this one is turned into gradients."""


# Both student gradients, 8 heads x 8192, TFLOP/s of the operation on an H100. D = 64: 321 as below, keys with nothing
# held in registers 314 (causal 300 and 284). D = 128: 435, dQ 2 % slower with nothing held. Earlier, where these tiles
# gave 301 and 412, D = 64: keys in 128 columns 285, both in 96 282, 64 with six stages 254, four warpgroups of 32
# columns 256, three of 64 241; D = 128: 80 columns 387, 64 with four stages 368, 112 with two stages 290, three
# warpgroups of 48 329.
_QUERIES = (
    _Row(8, 1, 128, 4, 1, 64, "wide tiles: resident rows are read once per 128 columns", held=2, max_turned=-1),
    _Row(8, 1, 96, 3, 1, 128, "the widest tile that leaves three stages", held=3),
    _Row(4, 1, 128, 4, 1, 64, "few rows in all: twice the blocks", max_mask=2),
    _Row(4, 1, 96, 3, 1, 128, "few rows in all: twice the blocks", max_turned=1),
    _Row(8, 1, 64, 3, 1, 192, "320 columns of both sides together"),
    _Row(8, 1, 48, 2, 1, 256, "two stages beside the widest rows", shareable=False),
)

_KEYS = (
    _Row(8, 1, 64, 8, 1, 64, "the next scores meanwhile", max_mask=0, held=3, ahead=True),
    _Row(8, 1, 64, 8, 1, 64, "the same, and a mask's registers", max_mask=1, ahead=True),
    _Row(8, 1, 96, 3, 1, 128, "as for queries", max_mask=2, shared_columns=80),
    _Row(4, 1, 128, 4, 1, 64, "few rows in all: twice the blocks", max_mask=1, shared_columns=112),
    _Row(4, 1, 96, 3, 1, 128, "few rows in all: twice the blocks", max_mask=2, shared_columns=80),
    _Row(8, 1, 64, 3, 1, 128, "a mask's registers"),
    _Row(8, 1, 64, 3, 1, 192, "320 columns of both sides together", max_mask=2),
    _Row(4, 1, 64, 3, 1, 128, "few rows in all, and a mask's registers"),
    _Row(8, 1, 48, 2, 1, 256, "two stages beside the widest rows", max_mask=2),
    _Row(8, 1, 32, 3, 1, 256, "and a mask's registers"),
)

# Gradients of a student whose teacher is wider than any gradient. The teacher's logits are summed in two halves, which
# takes `columns` / 2 registers more.
_WIDE = (
    _Row(8, 1, 64, 2, 1, 576, "128 rows where they fit", max_out=128),
    _Row(8, 1, 48, 2, 1, 576, "128 rows where they fit", max_out=128),
    _Row(4, 1, 48, 2, 1, 576, "64 rows beside two stages", max_out=128),
    _Row(4, 1, 32, 2, 1, 576, "the widest sides"),
)

# (consumer, producer) registers per thread by consumer warpgroups.
_QUERY_REGISTERS = {2: (240, 24), 1: (240, 40)}
# A producer that asks every part of a long mask needs more, and more still one that fetches row vectors; but where
# queries are streamed, consumers ask more than it does.
_LONG_MASK_REGISTERS = {2: (232, 40), 1: (240, 40)}
_KEY_REGISTERS = {2: (224, 56), 1: (240, 88)}
_LONG_MASK_KEY_REGISTERS = {2: (232, 40), 1: (240, 88)}
_AHEAD_REGISTERS = {2: (232, 40)}


class _Gradient(Hopper[_Row]):
    kind = "gradient"
    args = "hopper_gradient"
    shares_tiles = True

    def table(self, work: Work) -> tuple[_Row, ...]:
        if work.dim > 256:
            return _WIDE
        return _KEYS if work.rows_are_keys else _QUERIES

    def smem_bytes(self, work: Work, tile: _Row) -> int:
        stats = 4 * work.row_vectors * tile.columns + 16 if work.rows_are_keys else 0
        listed = work.problem.mask.blocks is not None
        task_bytes = TASK_BYTES if tile.shared or (listed and work.rows_are_keys) else 0
        tiles = (tile.rows + tile.stages * tile.columns) * row_bytes(work)
        return ALIGNMENT + tiles + tile.stages * stats + 8 * (2 * tile.stages + 2) + task_bytes

    def constants(self, work: Work, tile: _Row) -> dict[str, int]:
        consumer, producer = _registers(work, tile)[tile.warps // 4]
        return {
            **super().constants(work, tile),
            "SKL_AHEAD": int(tile.ahead),
            "SKL_SHORT_TANH": 1,
            "SKL_TASK_BYTES": TASK_BYTES,
            # Masks with holes need the registers where sums of the output do too, and so do shares of tiles.
            "SKL_HELD_STEPS": held_steps(work, tile.held if work.level < 2 and not tile.shared else 0),
            "SKL_MIN_BLOCKS": tile.min_blocks,
            "SKL_CONSUMER_REGISTERS": consumer,
            "SKL_PRODUCER_REGISTERS": producer,
        }

    def shared_columns(self, work: Work, tile: _Row) -> int:
        columns = super().shared_columns(work, tile)
        # What is read of rows beside their sums takes registers too.
        heavy = work.rows_are_keys and work.dim > 64 and divergences.of(work.problem).moments
        return min(columns, 64) if heavy else columns

    def regions(self, work: Work, tile: _Row) -> tuple[Regions, ...]:
        return (partials(tile.warps, tile.rows, work.out_dim),)


def _registers(work: Work, tile: _Row) -> dict[int, tuple[int, int]]:
    if work.rows_are_keys:
        beside = _LONG_MASK_KEY_REGISTERS if work.level > 2 else _KEY_REGISTERS
        return _AHEAD_REGISTERS if tile.ahead else beside
    return _LONG_MASK_REGISTERS if work.level > 2 else _QUERY_REGISTERS


KERNEL = _Gradient()

"""Gradients of the indexer on Hopper where ids name few keys of each row, `kernels/indexer_listed_sm90.cu`.

Shared memory, bytes, with t = 8192 * chunks(D) for 64 keys or heads and the most keys K of a row:

    1024 + t + 16,384 + 512 * (8 * ceil(D / 16) + 2) + 4 * round_up(K, 64) + 88 + stages * (t + 272)
"""

from __future__ import annotations

from .base import KernelText
from .gpus import DeviceFacts
from .indexer import GRID, WARPS, Grid, HopperIndexerKernel, IndexerWork
from .indexer_gathered_sm90 import COLUMNS, ITEM_BYTES, THREADS, Tile, most_keys, role_constants
from .indexer_gathered_sm90 import KERNEL as SCORES
from .sm90 import ALIGNMENT, chunks

MOST_COLUMNS = 128
"""Of the index head dim: a warpgroup's sums of queries and of keys fill its registers."""
MOST_STAGES = 8
LAG = 4
"""Tiles that are on their way at a time."""


class ListedSm90(HopperIndexerKernel[Tile]):
    """What `indexer_gathered_sm90` leaves gradients of logits for, in bfloat16."""

    kind = "indexer_listed"

    def lacks(self, work: IndexerWork, facts: DeviceFacts) -> str:
        if reason := SCORES.choice(work._replace(ending="list"), facts)[1]:
            return reason
        if work.shape.student != "bfloat16":
            return "it multiplies factors of gradients in bfloat16"
        if work.shape.index_dim > MOST_COLUMNS:
            return f"registers suffice for {MOST_COLUMNS} columns of the student"
        return ""

    def choice(self, work: IndexerWork, facts: DeviceFacts) -> tuple[Tile | None, str]:
        """As many stages as there is memory for, an even number."""
        if reason := self.refuses(work, facts):
            return None, reason
        most, dim = most_keys(work), work.shape.index_dim
        tile = COLUMNS * 128 * chunks(dim)
        sums = 128 * 4 * (4 * 2 * -(-dim // 16) + 2)
        rest = ALIGNMENT + tile + 2 * GRID * 128 + sums + 4 * most + 4 * WARPS + 8 * 5 + 2 * ITEM_BYTES
        stages = min((facts.smem_per_block - rest) // (tile + 4 * COLUMNS + 16) // 2 * 2, MOST_STAGES)
        if stages < LAG + 2:
            return None, f"lists of {most} keys leave too little shared memory"
        return Tile(most, stages, rest + stages * (tile + 4 * COLUMNS + 16)), ""

    def grid(self, rows: int, facts: DeviceFacts) -> Grid:
        """Blocks of a launch over so many rows of all entries."""
        return (min(rows, facts.multiprocessors),)

    def plan(self, work: IndexerWork, tile: Tile, facts: DeviceFacts, reason: str = "") -> KernelText:
        return self.kernel(work.shape, facts, role_constants(tile, LAG), tile.smem_bytes, THREADS)


KERNEL = ListedSm90()

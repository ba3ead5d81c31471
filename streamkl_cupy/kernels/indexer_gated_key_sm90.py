"""The gradient of the indexer's keys from gates, `kernels/indexer_gated_key_sm90.cu`.

Two warpgroups of 128 keys each and a producer. Bytes: twice 32,768 of the strip, and for each stage 64 * 128 * chunks
for queries, 2,048 for gates and 16 for barriers; 32 for more of these, and 1,024.
"""

from __future__ import annotations

from .base import KernelText
from .gpus import DeviceFacts
from .indexer import GRID, IndexerWork, tile_constants
from .indexer_gated import Gated, Tile
from .sm90 import ALIGNMENT, arrivals, chunks

KEY_BLOCK = 256
THREADS = 3 * 128


class GatedKeySm90(Gated):
    """Keys stay, queries are streamed."""

    kind = "indexer_key"
    name = "indexer_gated_key"

    def choice(self, work: IndexerWork, facts: DeviceFacts) -> tuple[Tile | None, str]:
        if reason := self.refuses(work, facts):
            return None, reason
        stage = GRID * 128 * chunks(work.shape.index_dim) + (8 * KEY_BLOCK if work.shape.gated else 0)
        return self.stages(ALIGNMENT + 32 + 2 * 2 * GRID * KEY_BLOCK, stage, facts), ""

    def plan(self, work: IndexerWork, tile: Tile, facts: DeviceFacts, reason: str = "") -> KernelText:
        constants = {
            **tile_constants(GRID, tile.stages, 1, 4),
            **arrivals(),
        }
        return self.kernel(work.shape, facts, constants, tile.smem_bytes, THREADS)


KERNEL = GatedKeySm90()

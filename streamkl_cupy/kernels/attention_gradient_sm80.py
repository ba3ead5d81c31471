"""The portable gradients of attention, `kernels/attention_gradient_sm80.cu`: of queries, of keys, of values, or of keys
and values in one pass, where registers hold both.

Shared memory, bytes, with p(D) as in `sm80.py`:

    rows * (p(D) + p(D_v)) + stages * columns * (p(D) + p(D_v))

without the rows' p(D_v) where only values are differentiated, and 8 bytes per streamed query where keys are stationary.
Registers per thread: warp_tiles * columns / 2 of both products each, and warp_tiles / 2 for each column of the outputs.
The limit is 255 per thread and 65,536 per multiprocessor.
"""

from __future__ import annotations

from .base import TileRow, Work
from .gpus import DeviceFacts
from .sm80 import Portable, pitch
from .structs import ATTENTION_ROWS, Regions

MOST_OF_BOTH = 128  # half as many of float32, whose operands are planes

# Times are of 16 heads x 8192 rows on an H200, causal, in bfloat16.
_QUERIES = (
    TileRow(4, 2, 32, 2, 2, 64, "32 rows per warp, two blocks per multiprocessor", unroll=3, max_out=64),
    TileRow(4, 2, 32, 2, 1, 128, "1.16 ms where one strip takes 1.69", unroll=2, max_out=128, before=(10, 0)),
    TileRow(8, 1, 32, 2, 1, 128, "eight warps, one strip each: room for a mask", unroll=2, max_out=128),
    TileRow(4, 1, 32, 2, 2, 128, "few rows in all, or 99 KiB", unroll=1, max_out=128),
    TileRow(4, 1, 16, 1, 1, 256, "room for long rows and outputs", unroll=1),
    TileRow(2, 1, 16, 1, 1, 256, "fits 99 KiB", unroll=1),
)
_KEYS = (
    TileRow(4, 2, 32, 2, 2, 64, "32 rows per warp, two blocks per multiprocessor", unroll=2, max_out=64),
    TileRow(8, 1, 32, 2, 1, 128, "eight warps, one strip each: room for a mask", unroll=1, max_out=128),
    TileRow(4, 1, 32, 2, 2, 128, "few rows in all, or 99 KiB", unroll=1, max_out=128),
    TileRow(4, 1, 16, 1, 1, 256, "room for long rows and outputs", unroll=1),
    TileRow(2, 1, 16, 1, 1, 256, "fits 99 KiB", unroll=1),
)
_BOTH = (
    TileRow(4, 1, 64, 2, 2, 64, "0.99 ms where 32 columns take 1.19", unroll=2, max_out=64, max_mask=2),
    TileRow(8, 1, 32, 2, 1, 64, "eight warps, one strip each: room for two outputs", unroll=2, max_out=64),
    TileRow(4, 1, 32, 2, 2, 64, "few rows in all", unroll=2, max_out=64),
    TileRow(8, 1, 16, 2, 1, 128, "the same for longer rows", unroll=2, max_out=128),
    TileRow(4, 1, 16, 2, 2, 128, "few rows in all, or 99 KiB", unroll=1, max_out=128),
)

_FLOAT32 = (
    TileRow(4, 1, 16, 2, 1, 64, "one strip per warp pays for the output", unroll=1, max_out=64),
    TileRow(4, 1, 16, 1, 1, 128, "room for long rows", unroll=1, max_out=128),
    TileRow(2, 1, 16, 1, 1, 128, "fits 99 KiB", unroll=1, max_out=128),
    TileRow(1, 1, 16, 1, 1, 256, "the least a block can be", unroll=1),
)


class _Gradient(Portable):
    kind = "attention_gradient"
    args = "gradient"

    def table(self, work: Work) -> tuple[TileRow, ...]:
        if work.float32:
            return _FLOAT32
        if not work.rows_are_keys:
            return _QUERIES
        return _BOTH if len(work.task.outputs) > 1 else _KEYS

    def refuses(self, work: Work, facts: DeviceFacts) -> str:
        most = MOST_OF_BOTH // (2 if work.float32 else 1)
        if len(work.task.outputs) > 1 and max(work.dim, work.out_dim) > most:
            return f"registers hold gradients of keys and of values up to {most} columns each"
        return super().refuses(work, facts)

    def smem_bytes(self, work: Work, tile: TileRow) -> int:
        p, p_v = pitch(work.side.q), pitch(work.problem.operand("value"))
        streamed = p + p_v + (8 if work.rows_are_keys else 0)
        return tile.rows * (p + (p_v if is_scored(work) else 0)) + tile.stages * tile.columns * streamed

    def constants(self, work: Work, tile: TileRow) -> dict[str, int]:
        return {
            **super().constants(work, tile),
            "SKL_GRADIENT_OF_SCORES": int(is_scored(work)),
            "SKL_GRADIENT_OF_VALUES": int("value" in work.task.results),
        }

    def regions(self, work: Work, tile: TileRow) -> tuple[Regions, ...]:
        return (ATTENTION_ROWS,)


def is_scored(work: Work) -> bool:
    """Whether gradients of logits are asked for: of queries or keys."""
    return work.task.results != ("value",)


KERNEL = _Gradient()

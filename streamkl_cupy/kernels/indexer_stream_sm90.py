"""The indexer's score tile on Hopper with queries of heads streamed past keys, `kernels/indexer_stream_sm90.cu`.

Shared memory, bytes, with 64 rows and 256 keys to a tile; where the teacher's keys stream they lie in the stages:

    1024 + 32768 * (chunks(D_t) + chunks(D)) + stages * piece * 8192 + 8 * (8 + 2 * stages) + 80
    1024 + 32768 * chunks(D) + stages * (8192 + 32768) + 8 * (8 + 2 * stages) + 80

where a piece has as many chunks as divide those of either side.

Registers: 256 * consumer + 128 * producer must fit.
"""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from ..ops import INDEXER_KL
from .base import PLANES, Box, KernelText
from .gpus import DeviceFacts
from .indexer import (
    GRID,
    OPERANDS,
    WARPS,
    Ending,
    Grid,
    HopperIndexerKernel,
    IndexerWork,
    RowCut,
    Scores,
    teacher_constants,
)
from .sm90 import ALIGNMENT, arrivals, chunks
from .structs import HOPPER_INDEXER, INDEXER_MAPS

STREAM_ENDINGS: tuple[Ending, ...] = ("rows", "strip")
"""That there are."""
ITEM_BYTES = 40
COLUMNS = 256
"""Keys of a tile, of both warpgroups."""
MOST_STATES = 128
"""Of a row, one of each half of a split of its keys: 2 KiB."""
THREADS = 3 * 128


class TileRow(NamedTuple):
    """How keys are read."""

    columns: int
    stream: bool = False
    """Whether the teacher's keys come with the queries that read them, a chunk of columns at a time."""
    cluster: int = 1
    """Blocks that have keys in common."""


class Tile(NamedTuple):
    """The same with what shared memory has room for."""

    row: TileRow
    stages: int
    smem_bytes: int


_TABLE = {False: TileRow(COLUMNS), True: TileRow(COLUMNS, True, 2)}
"""By whether heads of a group read several key heads."""
MOST_STAGES = 16
LEAST_HEADS = 2
"""Whose queries have room in the ring."""
MOST_STREAMED_COLUMNS = 192
"""Of the teacher, where its keys stream."""
REGISTERS = {1: (232, 40), 2: (224, 56)}
"""Of consumers and producer, by the blocks of a cluster."""


def piece_chunks(work: IndexerWork) -> int:
    """Chunks of columns of a head's queries that come at once."""
    return 1 if work.several_keys else gcd(chunks(work.shape.teacher_dim), chunks(work.shape.index_dim))


class StreamSm90(HopperIndexerKernel[Tile], Scores[Tile]):
    """16-bit elements that tensor maps can describe."""

    name = "indexer_stream"
    streams = True

    def lacks(self, work: IndexerWork, facts: DeviceFacts) -> str:
        shape = work.shape
        if work.ending not in STREAM_ENDINGS:
            return f"it has no ending for {work.ending}"
        if shape.target:
            return "it computes the teacher's heads, and their sum is given"
        if shape.float32:
            return "it multiplies 16-bit elements"
        if shape.rope_dim:
            return "it has no rotary parts"
        if shape.teacher_dim % 8 or shape.index_dim % 8:
            return "head dims must be multiples of 8"
        if work.several_keys and shape.bits and (work.ending == "rows" or not shape.gated):
            return "registers beside several key heads do not suffice for bits of keys"
        if work.several_keys and shape.teacher_dim > MOST_STREAMED_COLUMNS:
            return f"registers beside several key heads suffice for {MOST_STREAMED_COLUMNS} columns of the teacher"
        if missing := {key for key, name in OPERANDS.items() if name in INDEXER_MAPS} - shape.maps:
            return f"tensor maps cannot describe {', '.join(sorted(missing))}"
        return ""

    def choice(self, work: IndexerWork, facts: DeviceFacts) -> tuple[Tile | None, str]:
        """As many stages as there is memory for."""
        if reason := self.refuses(work, facts):
            return None, reason
        teacher, student = chunks(work.shape.teacher_dim), chunks(work.shape.index_dim)
        row = _TABLE[work.several_keys]
        keys = row.columns * 128 * (student if row.stream else teacher + student)
        at_once = piece_chunks(work)
        piece = 128 * (GRID * at_once + row.columns * row.stream)
        least = 2 if row.stream else LEAST_HEADS * max(teacher, student) // at_once
        for stages in range(MOST_STAGES, least - 1, -1):
            smem = ALIGNMENT + keys + stages * piece + 8 * (8 + 2 * stages) + 2 * ITEM_BYTES
            if smem <= facts.smem_per_block:
                return Tile(row, stages, smem), ""
        return None, "the head dims need more shared memory than there is"

    def row_cut(self, work: IndexerWork, splits: int) -> RowCut:
        """Two states of each split, a tile of keys or so many that a row has no more states than it may."""
        tiles = -(-work.keys // COLUMNS)
        keys = COLUMNS * max(-(-2 * tiles // MOST_STATES), 1)
        return RowCut(2 * -(-work.keys // keys), keys, _TABLE[work.several_keys].cluster)

    def grid(self, work: IndexerWork, tiles: int, splits: int, entries: int, facts: DeviceFacts) -> Grid:
        cut = self.row_cut(work, splits)
        together = cut.tiles
        # Tiles of a launch may begin or end in the midst of those of a cluster.
        clusters = ((tiles + together - 1) // together + (together > 1)) * entries * (cut.states // 2)
        return together * min(clusters, facts.multiprocessors // together), 1

    def plan(self, work: IndexerWork, tile: Tile, facts: DeviceFacts, reason: str = "") -> KernelText:
        row, stages, smem = tile
        consumer, producer = REGISTERS[row.cluster]
        constants = {
            **teacher_constants(work.shape, work.ending),
            "SKL_ROWS": GRID,
            "SKL_COLUMNS": row.columns,
            "SKL_WARPS": WARPS,
            "SKL_COLUMN_WARPS": 2,
            "SKL_WARP_TILES": 1,
            "SKL_STAGES": stages,
            "SKL_ROWS_ARE_QUERIES": 1,
            "SKL_PLANES": PLANES["highest"],
            **arrivals(),
            "SKL_KEYS_STREAM": int(row.stream),
            "SKL_CLUSTER": row.cluster,
            "SKL_SPLIT_KEYS": self.row_cut(work, 1).split_keys,
            "SKL_PIECE_CHUNKS": piece_chunks(work),
            "SKL_CONSUMER_REGISTERS": consumer,
            "SKL_PRODUCER_REGISTERS": producer,
        }
        at_once = {"q": GRID, "k": row.columns // max(row.cluster, 2)}
        boxes = tuple(Box(name, at_once[INDEXER_KL.operand[name].rows]) for name in INDEXER_MAPS)
        return self.kernel(work.shape, facts, constants, smem, THREADS, HOPPER_INDEXER, boxes)


KERNEL = StreamSm90()

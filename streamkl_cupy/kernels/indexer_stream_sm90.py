"""The indexer's score tile on Hopper with queries of heads streamed past keys, `kernels/indexer_stream_sm90.cu`.

Shared memory, bytes, with 64 rows and 256 keys to a tile; where the teacher's keys stream they lie in the stages:

    1024 + 32768 * (chunks(D_t) + chunks(D)) + stages * 8192 + 8 * (8 + 2 * stages) + 80
    1024 + 32768 * chunks(D) + stages * (8192 + 32768) + 8 * (8 + 2 * stages) + 80

Registers: 256 * consumer + 128 * producer must fit.
"""

from __future__ import annotations

from typing import NamedTuple

from .base import Box
from .gpus import DeviceFacts
from .indexer import CODES, GRID, WARPS, IndexerKernel, IndexerShape, shape_constants
from .sm90 import ALIGNMENT, ARRIVING_LANES, chunks
from .structs import HOPPER_INDEXER, INDEXER_MAPS

ENDINGS = ("rows", "strip")
"""That there are."""
ITEM_BYTES = 40
COLUMNS = 256
"""Keys of a tile, of both warpgroups."""
MOST_STATES = 128
"""Of a row, one of each half of a share of its keys: 2 KiB."""


class Tile(NamedTuple):
    """How keys are read."""

    columns: int
    stream: bool = False
    """Whether the teacher's keys come with the queries that read them, a chunk of columns at a time."""
    cluster: int = 1
    """Blocks that have keys in common."""


_TABLE = {False: (Tile(COLUMNS),), True: (Tile(COLUMNS, True, 2),)}
"""By whether heads of a group read several key heads."""
MOST_STAGES = 16
LEAST_HEADS = 2
"""Whose queries have room in the ring."""
REGISTERS = {1: (232, 40), 2: (224, 56)}
"""Of consumers and producer, by the blocks of a cluster."""


def lacks(shape: IndexerShape, ending: str, several: bool, facts: DeviceFacts) -> str:
    """Why another kernel has to serve; empty where this one does."""
    if facts.compute_capability != (9, 0):
        return "it needs compute capability 9.0"
    if ending not in ENDINGS:
        return f"it has no ending for {ending}"
    if shape.target:
        return "it computes the teacher's heads, and their sum is given"
    if "float32" in (shape.teacher, shape.student):
        return "it multiplies 16-bit elements"
    if shape.rope_dim:
        return "it has no rotary parts"
    if shape.teacher_dim % 8 or shape.index_dim % 8:
        return "head dims must be multiples of 8"
    if several and shape.bits and ending == "rows":
        return "registers beside several key heads do not suffice for bits of keys"
    if missing := {"TQ", "TK", "SQ", "SK"} - shape.maps:
        return f"tensor maps cannot describe {', '.join(sorted(missing))}"
    return "" if _fitting(shape, several, facts) else "the head dims need more shared memory than there is"


def _fitting(shape: IndexerShape, several: bool, facts: DeviceFacts) -> tuple[Tile, int, int] | None:
    """The best tile, its stages and its shared memory."""
    teacher, student = chunks(shape.teacher_dim), chunks(shape.index_dim)
    for tile in _TABLE[several]:
        keys = tile.columns * 128 * (student if tile.stream else teacher + student)
        piece = 128 * (GRID + tile.columns) if tile.stream else 128 * GRID
        least = 2 if tile.stream else LEAST_HEADS * max(teacher, student)
        for stages in range(MOST_STAGES, least - 1, -1):
            smem = ALIGNMENT + keys + stages * piece + 8 * (8 + 2 * stages) + 2 * ITEM_BYTES
            if smem <= facts.smem_per_block:
                return tile, stages, smem
    return None


def share_keys(keys: int) -> int:
    """Keys of a share: a tile, or so many tiles that a row has no more states than it may."""
    tiles = -(-keys // COLUMNS)
    return COLUMNS * max(-(-2 * tiles // MOST_STATES), 1)


def tiles_together(several: bool) -> int:
    """Row tiles that have their shares of keys in common."""
    return _TABLE[several][0].cluster


def states(keys: int) -> int:
    """Of a row: one of each half of a share."""
    return 2 * -(-keys // share_keys(keys))


def plan(shape: IndexerShape, ending: str, several: bool, keys: int, facts: DeviceFacts) -> IndexerKernel:
    """For so many keys, where it lacks nothing; `several`: heads of a group read more than one key head."""
    found = _fitting(shape, several, facts)
    assert found is not None
    tile, stages, smem = found
    consumer, producer = REGISTERS[tile.cluster]
    constants = {
        **shape_constants(shape),
        "SKL_ROWS": GRID,
        "SKL_COLUMNS": tile.columns,
        "SKL_WARPS": WARPS,
        "SKL_COLUMN_WARPS": 2,
        "SKL_WARP_TILES": 1,
        "SKL_STAGES": stages,
        "SKL_ROWS_ARE_QUERIES": 1,
        "SKL_PLANES": 3,
        "SKL_ARRIVING_LANES": ARRIVING_LANES,
        "SKL_KEYS_STREAM": int(tile.stream),
        "SKL_CLUSTER": tile.cluster,
        "SKL_SHARE_KEYS": share_keys(keys),
        "SKL_CONSUMER_REGISTERS": consumer,
        "SKL_PRODUCER_REGISTERS": producer,
        "SKL_T_ELEMENT": CODES[shape.teacher],
        "SKL_T_DIM": shape.teacher_dim,
        "SKL_R_DIM": shape.rope_dim,
        "SKL_ENDING": ENDINGS.index(ending),
        "SKL_TARGET": 0,
        "SKL_SMEM_BYTES": smem,
    }
    keys_at_once = tile.columns // max(tile.cluster, 2)
    boxes = tuple(Box(name, keys_at_once if name.endswith("_k") else GRID) for name in INDEXER_MAPS)
    return IndexerKernel("indexer_stream_sm90", tuple(sorted(constants.items())), HOPPER_INDEXER, 384, smem, boxes)

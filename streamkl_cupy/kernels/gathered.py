"""Two units of keys to a block, wherever they lie: the lists of queries that a pattern has for them, put together.

Neighbours of a sharded pattern have different lists, one a stripe's and the other a few rows of the diagonal; two
stripes have nearly the same one. So units are paired by how long their lists are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .work_tiles import Lists

if TYPE_CHECKING:
    from ..patterns import BlockPattern

UNIT = 64
"""Keys of a unit, and queries of a tile."""
UNITS = 2
"""Of a block."""
BITS = (UNIT // 16) ** 2
"""Of a unit's part of an entry, whose subtiles are 16 x 16."""


class Gathered(NamedTuple):
    """Lists of tiles of queries for blocks of two units.

    units: (key heads of the pattern, tiles, UNITS) int32, numbers of units; one of them may lie behind the last key.
    offsets, entries: As `BlockPattern.tile_lists` has them, for each head of the pattern.
    """

    units: NDArray[np.int32]
    offsets: NDArray[np.int32]
    entries: NDArray[np.uint32]

    def lists(self) -> Lists:
        """How long they are, of the heads of a block together."""
        lengths = np.diff(self.offsets, axis=1).astype(np.int64)
        group = len(lengths) // len(self.units)
        together = np.repeat(lengths.reshape(-1, group, lengths.shape[1]).sum(axis=1), group, axis=0)
        return Lists(together, np.zeros_like(together), together)


# By digest, then by heads of a block.
_made: dict[str, dict[int, Gathered]] = {}


def _leave(digest: str) -> None:
    _made.pop(digest, None)


def gathered(pattern: BlockPattern, group: int) -> Gathered:
    """Lists of a pattern whose heads are read by blocks `group` at a time, neighbours, or whose only head is."""
    from ..patterns.pattern import when_gone

    when_gone(_leave)
    made = _made.setdefault(pattern.digest, {})
    return made.get(group) or made.setdefault(group, _gather(pattern, group))


def _gather(pattern: BlockPattern, group: int) -> Gathered:
    offsets, entries = pattern.tile_lists(UNIT, UNIT, True)
    heads, count = offsets.shape[0], offsets.shape[1] - 1
    key_heads = 1 if heads == 1 else heads // group
    lengths = np.diff(offsets, axis=1).reshape(key_heads, heads // key_heads, count).sum(axis=1)
    tiles = -(-count // UNITS)
    order = np.full((key_heads, tiles * UNITS), count, np.int64)
    order[:, :count] = np.argsort(-lengths, axis=1, kind="stable")
    position = np.empty((key_heads, count + 1), np.int64)
    np.put_along_axis(position, order, np.arange(tiles * UNITS), axis=1)
    # Of each entry, by the tile of its unit in the new order and the tile of queries.
    head, unit = np.divmod(np.repeat(np.arange(heads * count), np.diff(offsets, axis=1).ravel()), max(count, 1))
    tile, half = np.divmod(position[head // (heads // key_heads), unit], UNITS)
    streamed = -(-pattern.queries // UNIT)
    key = (head * tiles + tile) * streamed + entries[:, 0]
    by_key = np.argsort(key, kind="stable")
    found, first = np.unique(key[by_key], return_index=True)
    made = np.zeros((len(found), 4), np.uint32)
    made[:, 0] = found % max(streamed, 1)
    if len(found):
        bits = (entries[:, 2] & np.uint32((1 << BITS) - 1)) << (BITS * half).astype(np.uint32)
        made[:, 2] = np.bitwise_or.reduceat(bits[by_key], first)
    starts = np.searchsorted(found, np.arange(heads * tiles + 1) * streamed).astype(np.int32)
    per_head = np.concatenate([starts[:-1].reshape(heads, tiles), starts[tiles::tiles, None]], axis=1)
    return Gathered(order.reshape(key_heads, tiles, UNITS).astype(np.int32), per_head, made)

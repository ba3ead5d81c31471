"""From a pattern's blocks to what a kernel walks: for each of its row tiles the list of tiles to visit, with bits.

Block sizes are the user's and tile sizes the kernel's, so neither need divide the other. Both are multiples of 16: a
16 x 16 sub-block lies in exactly one block and in exactly one tile, and one bit says whether it is visible.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

UNIT = 16
MAX_PAIRS = 64 * UNIT * UNIT
CELLS = 1 << 22
"""Cells of the scratch matrices at a time: some tens of MiB whatever the size of the problem."""
_A = TypeVar("_A", bound=np.generic)


def frozen(array: NDArray[_A]) -> NDArray[_A]:
    """The values in memory that stays as it is: it belongs to a bytes object, so that no flag makes it writeable."""
    return np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)


class TileLists(NamedTuple):
    """The tiles that each row tile visits, per head of the pattern; read-only arrays.

    A row tile is a kernel's stationary tile, of queries or of keys; the tiles in its list are streamed past it.

    Attributes:
        offsets: (P, row_tiles + 1) int32. Row tile t of head p owns entries[offsets[p, t] : offsets[p, t + 1]].
        entries: (n, 4) uint32: tile, 0, and the 64 bits of its sub-blocks, low word first. Tiles ascend within a row
            tile. Bit (r // 16) * (columns // 16) + c // 16 is set where the sub-block of stationary row r and streamed
            column c is visible or lies beyond the matrix, so that a tile whose bits are all set needs no look at the
            pattern.
    """

    offsets: NDArray[np.int32]
    entries: NDArray[np.uint32]


class Axis(NamedTuple):
    """One axis of the matrix, cut into blocks by the pattern and into tiles by the kernel."""

    size: int
    block: int
    tile: int

    @property
    def tiles(self) -> int:
        return -(-self.size // self.tile)

    @property
    def overlap(self) -> int:
        """The most tiles that a block touches."""
        return (self.block + self.tile - 2 * UNIT) // self.tile + 1

    def pieces(self, prefix: NDArray[np.uint64], step: int) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Which tile the block touches in the step-th place, and the bits of the tile's units that it covers there.

        `prefix[u]` has the bits of a tile's first u units. Both results are indexed by block. Where a block touches
        fewer tiles, the bits are 0.
        """
        first = np.arange(-(-self.size // self.block), dtype=np.int64) * self.block
        last = np.minimum(first + self.block, self.size)
        tile = first // self.tile + step
        start = np.maximum(first - tile * self.tile, 0)
        # The last block is cut at the end of the matrix, by whole units: their rest is nobody else's.
        stop = np.clip(-(-(last - tile * self.tile) // UNIT) * UNIT, 0, self.tile)
        bits = np.where(start < stop, prefix[stop // UNIT] - prefix[np.minimum(start, stop) // UNIT], 0)
        return tile, bits.astype(np.uint64)

    def beyond(self, prefix: NDArray[np.uint64]) -> np.uint64:
        """The bits of the units of the last tile that lie beyond the matrix."""
        inside = -(-(self.size - (self.tiles - 1) * self.tile) // UNIT)
        return np.uint64(prefix[-1] - prefix[inside])


def tile_lists(offsets: NDArray[np.int32], blocks: NDArray[np.int32], rows: Axis, columns: Axis) -> TileLists:
    """Tile lists from compressed rows: `offsets` (P, row blocks + 1) into `blocks`, the column block of each entry."""
    heads = len(offsets)
    wide = columns.tile // UNIT
    # A rectangle of sub-blocks has the bits (units of its rows) * (units of its columns): row unit r is bit r * wide.
    by_row = _prefix(rows.tile // UNIT, wide)
    by_column = _prefix(wide, 1)
    row_pieces = [rows.pieces(by_row, step) for step in range(rows.overlap)]
    column_pieces = [columns.pieces(by_column, step) for step in range(columns.overlap)]
    counts = np.zeros((heads, rows.tiles), np.int64)
    found: list[NDArray[np.uint32]] = []
    at_once = max(CELLS // max(columns.tiles, 1), 1)
    for head in range(heads):
        for first in range(0, rows.tiles, at_once):
            last = min(first + at_once, rows.tiles)
            bits = np.zeros((last - first, columns.tiles), np.uint64)
            # The row blocks that touch these row tiles are neighbours, and so are their entries.
            low, high = first * rows.tile // rows.block, -(-min(last * rows.tile, rows.size) // rows.block)
            row = np.repeat(np.arange(low, high), np.diff(offsets[head, low : high + 1]))
            column = blocks[offsets[head, low] : offsets[head, high]]
            for row_tile, row_bits in row_pieces:
                inside = (row_tile >= first) & (row_tile < last) & (row_bits != 0)
                for column_tile, column_bits in column_pieces:
                    _scatter(bits, row, column, row_tile - first, row_bits * inside, column_tile, column_bits)
            visited = bits != 0
            counts[head, first:last] = visited.sum(axis=1)
            if last == rows.tiles:
                bits[-1] |= rows.beyond(by_row) * by_column[-1]
            if columns.tiles:
                bits[:, -1] |= by_row[-1] * columns.beyond(by_column)
            entries = np.zeros((int(counts[head, first:last].sum()), 4), np.uint32)
            entries[:, 0] = np.nonzero(visited)[1]
            words = bits[visited]
            entries[:, 2] = words & np.uint64(0xFFFFFFFF)
            entries[:, 3] = words >> np.uint64(32)
            found.append(entries)
    ends = np.cumsum(counts).reshape(counts.shape)
    starts = np.concatenate([(ends - counts), ends[:, -1:]], axis=1) if rows.tiles else np.zeros((heads, 1))
    return TileLists(
        frozen(starts.astype(np.int32)),
        frozen(np.concatenate(found) if found else np.zeros((0, 4), np.uint32)),
    )


def _prefix(units: int, stride: int) -> NDArray[np.uint64]:
    """[u]: the sum of 2^(i stride) over i < u."""
    total = [0]
    for unit in range(units):
        total.append(total[-1] + (1 << unit * stride))
    return np.array(total, np.uint64)


def _scatter(
    bits: NDArray[np.uint64],
    row: NDArray[np.int64],
    column: NDArray[np.int32],
    row_tile: NDArray[np.int64],
    row_bits: NDArray[np.uint64],
    column_tile: NDArray[np.int64],
    column_bits: NDArray[np.uint64],
) -> None:
    """Set the bits that the entries (row, column) have in one of the tiles they touch."""
    if not row_bits.any() or not column_bits.any():
        return
    kept = (row_bits[row] != 0) & (column_bits[column] != 0)
    if not kept.all():
        row, column = row[kept], column[kept]
    cell = row_tile[row] * bits.shape[1] + column_tile[column]
    value = row_bits[row] * column_bits[column]
    flat = bits.reshape(-1)
    # No two entries share a sub-block, so a sum is a union; in halves, because sums of float64 are exact to 53 bits.
    for shift in (0, 32):
        half = (value >> np.uint64(shift)) & np.uint64(0xFFFFFFFF)
        if half.any():
            flat |= np.bincount(cell, half, minlength=flat.size).astype(np.uint64) << np.uint64(shift)

"""Which block works on what: the row tiles of a pattern's lists, the longest first, very long ones in shares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ..patterns import BlockPattern

NO_LIMIT = 2**31 - 1
# Of an entry: `WorkTile` of masks/interface.cuh, which blocks.cuh asserts to be as many ints.
FIELDS = ("tile", "share", "shares", "partial_slot", "begin", "end")
# A block needs about ten microseconds to start and to end, in which it could walk so many tiles.
TILES_TO_START = 6
MIN_TILES_IN_LIST = 32  # or starts would be much of it


@dataclass(frozen=True)
class Schedule:
    """How the work of a launch is cut."""

    tiles: int = 1
    """Work tiles, row tiles or shares of them, per head of the launch."""
    head_group: int = 1
    """Heads that run side by side."""
    splits: int = 1
    """Blocks over which the streamed rows of one row tile go, at most."""
    group: int = 1
    """Query heads that a block works through."""
    longest: int = 0
    """Tiles of a pattern's list that one block walks, about; 0 where no list is shared."""
    partial_slots: int = 0
    """Slots for the sums of blocks that share a row tile, per batch entry and head of the launch."""
    arrivals_bytes: int = 0
    partial_bytes: int = 0
    """What these take, with the counters of who has come; those come first, and are zero before a launch."""
    totals: bool = False
    """Whether shares are added to one sum of their tile, in any order, which is zero before a launch too."""
    share_steps: int = 0
    """Of all shares, which blocks then take in turns; 0: each tile has as many shares."""
    packed_rows: int = 0
    """Rows of a query head in tiles that several share; 0: none does."""
    heads_together: int = 1
    """Query heads that share them, one after the other."""

    @property
    def cleared_bytes(self) -> int:
        """Of what shares leave for one another, which is zero before a launch."""
        return self.partial_bytes if self.totals else self.arrivals_bytes


class Lists(NamedTuple):
    """What is known of a pattern's tile lists without making them; all are (P, row tiles) int64.

    lengths: About how many tiles are in a list; of rows of several blocks, what the longest of these visits.
    first, stop: All of them lie in [first, stop).
    """

    lengths: NDArray[np.int64]
    first: NDArray[np.int64]
    stop: NDArray[np.int64]


class WorkTiles(NamedTuple):
    """What the blocks of a launch work on, per head of the pattern.

    entries: (P, n, FIELDS) int32, from long to short: the row tile, which share of its list, of how many, the first of
        the slots for the partial sums of these, and which streamed tiles, from and to. Heads with fewer work tiles than
        others end in some of 0 shares. Slots count from `slots` times the head of the launch
        on, and one that needs fewer than `slots` leaves some to others.
    slots: Per head of the launch.
    """

    entries: NDArray[np.int32]
    slots: int


def survey(pattern: BlockPattern, rows: int, columns: int, by_keys: bool, group: int) -> Lists:
    """What `pattern.tile_lists(rows, columns, by_keys)` will be like.

    `group` neighbouring heads have their lists walked by one block, one after the other; each of them gets what they
    have together.
    """
    offsets, blocks, size, block, width = (
        (pattern.column_offsets, pattern.query_blocks, pattern.keys, pattern.key_block, pattern.query_block)
        if by_keys
        else (pattern.row_offsets, pattern.key_blocks, pattern.queries, pattern.query_block, pattern.key_block)
    )
    begin, end = offsets[:, :-1], offsets[:, 1:]
    counts = (end - begin).astype(np.int64)
    listed = np.append(blocks, 0).astype(np.int64)  # where a list is empty, what is read is not used
    start = np.arange(0, size, rows)
    low, last = start // block, (np.minimum(start + rows, size) - 1) // block
    # The row blocks of a row tile, one after the other; of fewer than the most, the last one again.
    steps = [np.minimum(low + step, last) for step in range(int((last - low).max(initial=0)) + 1)]

    def of_tiles(values: NDArray[np.int64], reduce: np.ufunc) -> NDArray[np.int64]:
        found: NDArray[np.int64] = reduce.reduce([values[:, at] for at in steps])
        return found

    def of_groups(values: NDArray[np.int64], reduce: np.ufunc) -> NDArray[np.int64]:
        if len(values) == 1:
            return values * group if reduce is np.add else values
        apart = values.reshape(len(values) // group, group, len(start))
        return np.repeat(reduce.reduce(apart, axis=1), group, axis=0)

    lengths = of_tiles(-(-counts * width // columns), np.maximum)
    first = of_tiles(np.where(counts > 0, listed[begin] * width // columns, NO_LIMIT), np.minimum)
    stop = of_tiles(np.where(counts > 0, -(-(listed[end - 1] + 1) * width // columns), 0), np.maximum)
    return Lists(of_groups(lengths, np.add), of_groups(first, np.minimum), of_groups(stop, np.maximum))


def same_lists(pattern: BlockPattern, group: int) -> bool:
    """Whether `group` neighbouring heads read the same blocks, for all such groups."""
    if pattern.heads == 1:
        return True
    offsets, blocks = pattern.row_offsets, pattern.key_blocks
    counts = np.diff(offsets, axis=1)
    for first in range(0, pattern.heads, group):
        mine = blocks[offsets[first, 0] : offsets[first, -1]]
        for head in range(first + 1, first + group):
            theirs = blocks[offsets[head, 0] : offsets[head, -1]]
            if not (np.array_equal(counts[first], counts[head]) and np.array_equal(mine, theirs)):
                return False
    return True


def balance(lists: Lists, pairs: int, multiprocessors: int, sharing: bool) -> tuple[int, int]:
    """How many tiles one block takes at most, about, 0 for any number; and how many heads run side by side.

    No block takes more than half of what each multiprocessor has to do in all, and so many heads run side by side that
    what they have to do takes as long as the longest of it: with more, their sums do not stay in the cache.

    Args:
        lists: As `survey` has them.
        pairs: Heads of all batch entries of a launch.
        multiprocessors: Of the GPU.
        sharing: Whether several blocks can walk one list.
    """
    lengths = lists.lengths
    average = max(-(-int(lengths.sum()) * pairs // (len(lengths) * multiprocessors)), 1)
    longest = max(-(-average // 2), MIN_TILES_IN_LIST) if sharing else 0
    most = int(lengths.max(initial=0))
    return longest, -(-pairs * (min(most, longest) if longest else most) // average)


def cut(lists: Lists, longest: int = 0, group: int = 1) -> WorkTiles:
    """Work tiles from what the lists are like.

    Longer lists are cut where all others are, so that blocks that run side by side stream the same rows; scattered ones
    at every second of these tiles, every fourth and so on, or their shares would have next to nothing.

    Args:
        lists: As `survey` has them.
        longest: Tiles that one block takes, about; 0 cuts no list.
        group: Heads whose lists one block walks.
    """
    lengths, first, stop = lists
    long = (lengths > longest) & (longest > 0)
    sparse = np.where(long, np.maximum(stop - first, 1) * group / np.maximum(lengths, 1), 1)
    piece = max(-(-longest // group), 1) << np.floor(np.log2(np.maximum(sparse, 1))).astype(np.int64)
    low = np.where(long, first // piece, 0)
    shares = np.where(long, -(-stop // piece), 1) - low
    entries = np.zeros((len(lengths), int(shares.sum(axis=1).max(initial=0)), len(FIELDS)), np.int32)
    partial = np.where(shares > 1, shares, 0)
    needed = partial.sum(axis=1)
    # Of a launch's heads, each of which has the slots of one head of its group.
    apart = needed[::group] if len(needed) > 1 else needed
    slots = -(-int(apart.sum()) // len(apart))
    starts = np.repeat(np.cumsum(apart) - apart - slots * np.arange(len(apart)), group if len(needed) > 1 else 1)
    for head, count in enumerate(shares):
        tile = np.repeat(np.arange(len(count)), count)
        share = np.arange(len(tile)) - np.repeat(np.cumsum(count) - count, count)
        slot = starts[head] + np.cumsum(partial[head]) - partial[head]
        begin = np.where(count[tile] > 1, (low[head][tile] + share) * piece[head][tile], 0)
        end = np.where(count[tile] > 1, begin + piece[head][tile], NO_LIMIT)
        span = np.maximum(stop[head] - first[head], 1)[tile]
        overlap = np.minimum(end, stop[head][tile]) - np.maximum(begin, first[head][tile])
        length = lengths[head][tile] * np.where(count[tile] > 1, overlap / span, 1)
        made = np.stack([tile, share, count[tile], slot[tile], begin, end], axis=1)
        entries[head, : len(made)] = made[np.lexsort((begin, -length))]
    entries.setflags(write=False)
    return WorkTiles(entries, slots)

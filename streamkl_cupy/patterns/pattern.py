"""`BlockPattern`: which blocks of keys each block of queries visits, per head, as a frozen value."""

from __future__ import annotations

import hashlib
import math
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import FrozenInstanceError, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..arguments import a_kind_of, flag, integer
from ..concurrency.locks import ForkLock
from .drawing import draw
from .tiles import CELLS, MAX_PAIRS, UNIT, Axis, TileLists, frozen, tile_lists

Rows = NDArray[np.bool_]
FlatBlocks = NDArray[np.int64]
"""Blocks as numbers row * Nb + column, ascending."""
LARGEST = 2**31 - 1
MAX_BLOCK = 128
_H = TypeVar("_H", bound=Hashable)


class Coverage(NamedTuple):
    """How much of their context some heads see together; 1 is all of it.

    fraction: Listed by at least one of the heads, of all blocks of the context.
    per_query_block: (query blocks,) float64, the same for each query block; 1 where there is no context to see.
    """

    fraction: float
    per_query_block: NDArray[np.float64]


class _Kept:
    """What a pattern keeps beside its value, and so beside the fields of the dataclass."""

    key: NDArray[np.int64]
    """The digest as two numbers, for programs that can be handed arrays only."""
    _lists: dict[tuple[int, int, bool], TileLists]
    _lock: ForkLock


# Frozen by its own hand: torch.compile would make every field of a frozen dataclass a condition of its programs, and
# compile anew for each pattern. As it is, it finds `key`, and takes that for an input.
@dataclass(init=False, eq=False, repr=False)
class BlockPattern(_Kept):
    """Which key blocks each query block visits, for each head or for all of them: a frozen, hashable value.

    Pair (i, j) of query row i and key j of head h is visible iff key block j // key_block is listed for query block
    i // query_block of head h, or of head 0 where the pattern has one head for all. The functions of
    `streamkl_cupy.patterns` make patterns; `a | b` and `a & b` combine them. Two patterns are equal if their contents
    are. A pattern lives in host memory; kernels get a copy of what they need once per device, not once per call.

    Args:
        row_offsets: (P, Mb + 1) integers: the blocks of query block r of head p are
            key_blocks[row_offsets[p, r] : row_offsets[p, r + 1]]. Head p begins where head p - 1 ends.
        key_blocks: (n,) integers, numbers of key blocks; each at most once per query block, in any order.
        queries: M, rows of the problem.
        keys: N, keys of the problem.
        query_block: Rows of a query block, a multiple of 16 from 16 to 128. The last block may reach beyond M.
        key_block: The same for keys.
        diagonal: The pattern is causal: row i may see keys j <= i + diagonal, and no block beyond that is listed.
            None if it is not. It is what `density` and `coverage` compare with; a call still needs causal=True.

    Attributes:
        row_offsets, key_blocks: As above, int32, blocks ascending (compressed rows, for the forward and dQ).
        column_offsets: (P, Nb + 1) int32, the same by key block (compressed columns, for dK).
        query_blocks: (n,) int32, numbers of query blocks.
        digest: Fingerprint of the contents.

    Raises:
        TypeError: indices or sizes that are not integers.
        ValueError: duplicate or out-of-range blocks, offsets that do not fit, block sizes that are not built.

    Example:
        >>> from streamkl_cupy import patterns
        >>> pattern = patterns.local(48, queries=64, block=16, causal=True) | patterns.sinks(1, queries=64, block=16)
        >>> pattern.key_blocks[pattern.row_offsets[0, 3] :].tolist()  # of the last query block
        [0, 1, 2, 3]
    """

    row_offsets: NDArray[np.int32]
    key_blocks: NDArray[np.int32]
    queries: int
    keys: int
    query_block: int = 64
    key_block: int = 64
    diagonal: int | None = None
    column_offsets: NDArray[np.int32] = field(init=False)
    query_blocks: NDArray[np.int32] = field(init=False)
    digest: str = field(init=False)

    def __init__(
        self,
        row_offsets: Any,
        key_blocks: Any,
        queries: int,
        keys: int,
        query_block: int = 64,
        key_block: int = 64,
        diagonal: int | None = None,
    ) -> None:
        grid = Grid.checked(queries, keys, (query_block, key_block), diagonal)
        offsets, blocks = _checked_rows(row_offsets, key_blocks, grid)
        column_offsets, query_blocks = _by_column(offsets, blocks, grid)
        header = ("rows", len(offsets), *grid)
        content = hashlib.blake2b(repr(header).encode(), digest_size=16)
        for array in (offsets, blocks):
            content.update(array.tobytes())
        digest = content.hexdigest()
        values = {
            **grid._asdict(),
            "row_offsets": frozen(offsets),
            "key_blocks": frozen(blocks),
            "column_offsets": frozen(column_offsets),
            "query_blocks": frozen(query_blocks),
            "digest": digest,
            "key": np.frombuffer(bytearray.fromhex(digest), np.int64),  # writeable, as torch wants its arrays
            "_lists": {},
            "_lock": ForkLock(),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        _register(self)

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise FrozenInstanceError(f"a BlockPattern is frozen: {name} cannot be set or deleted; make another pattern")

    def __delattr__(self, name: str) -> NoReturn:
        self.__setattr__(name, None)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockPattern):
            return NotImplemented
        return self is other or self.digest == other.digest

    def __repr__(self) -> str:
        sizes = f"heads={self.heads}, queries={self.queries}, keys={self.keys}, diagonal={self.diagonal}"
        blocks = f"query_block={self.query_block}, key_block={self.key_block}, blocks={len(self.key_blocks)}"
        return f"BlockPattern({sizes}, {blocks}, density={self.density:.4g})"

    def __reduce__(self) -> tuple[Any, ...]:
        # The lock cannot travel, and what arrives is checked like any other pattern.
        return BlockPattern, (self.row_offsets, self.key_blocks, *self.grid)

    @property
    def heads(self) -> int:
        """P, the heads of the pattern; 1 serves any number of heads."""
        return len(self.row_offsets)

    @property
    def density(self) -> float:
        """Listed blocks, of those that a dense pattern lists (a dense causal one where there is a diagonal)."""
        reach = int(self.grid.reach().sum()) * self.heads
        return len(self.key_blocks) / reach if reach else 0.0

    @property
    def grid(self) -> Grid:
        """The block matrix without what is listed in it."""
        return Grid(self.queries, self.keys, self.query_block, self.key_block, self.diagonal)

    def dense(self) -> Rows:
        """The block matrix, (P, Mb, Nb) bool: True where query block r of head p visits key block c.

        Example:
            >>> from streamkl_cupy import patterns
            >>> patterns.strided(2, 1, queries=32, keys=64, block=16).dense().astype(int).tolist()
            [[[0, 1, 0, 1], [0, 1, 0, 1]]]
        """
        rows = self.grid.row_blocks
        return np.stack([self.dense_rows(head, 0, rows) for head in range(self.heads)])

    def dense_rows(self, head: int, first: int, last: int) -> Rows:
        """Query blocks [first, last) of one head as rows of the block matrix, (n, Nb) bool: a part of `dense`.

        Args:
            head: Query head; a pattern of one head answers for all.
            first: The first query block, 0 to Mb.
            last: The query block after the last one, `first` to Mb.

        Raises:
            TypeError: numbers that are not integers.
            ValueError: numbers that are out of range, with the range.

        Example:
            >>> from streamkl_cupy import patterns
            >>> patterns.full(queries=64, block=16, causal=True).dense_rows(0, 2, 4).astype(int).tolist()
            [[1, 1, 1, 0], [1, 1, 1, 1]]
        """
        head, grid = self._head(head), self.grid
        first = ranged("first", first, 0, grid.row_blocks)
        last = ranged("last", last, first, grid.row_blocks)
        lines = np.zeros((last - first, grid.column_blocks), np.bool_)
        offsets = self.row_offsets[head, first : last + 1]
        row = np.repeat(np.arange(last - first), np.diff(offsets))
        lines[row, self.key_blocks[offsets[0] : offsets[-1]]] = True
        return lines

    def visible(self, rows: Any, keys: Any, head: int = 0) -> Rows:
        """Whether the pattern lets query rows see keys: integer arrays that broadcast, as (m, 1) and (n,) do.

        Args:
            rows: Query rows, integers from 0 to M - 1.
            keys: Keys, integers from 0 to N - 1.
            head: Query head; a pattern of one head answers for all.

        Returns:
            bool, in the shape that rows and keys broadcast to.

        Raises:
            TypeError: rows, keys or a head that are not integers.
            ValueError: rows, keys or a head that the pattern does not have; shapes that do not broadcast.

        Example:
            >>> import numpy as np
            >>> from streamkl_cupy import patterns
            >>> pattern = patterns.sinks(1, queries=32, block=16)
            >>> pattern.visible(np.array([[0], [31]]), np.array([15, 16])).tolist()
            [[True, False], [True, False]]
        """
        row = _within("rows", rows, self.queries) // self.query_block
        column = _within("keys", keys, self.keys) // self.key_block
        head = self._head(head)
        try:
            shape = np.broadcast_shapes(row.shape, column.shape)
        except ValueError as cause:
            raise ValueError(
                f"rows has shape {row.shape} and keys {column.shape}, which do not broadcast; pass (m, 1) and (n,) for "
                f"every pair, or equal shapes for one pair each"
            ) from cause
        if 0 in shape:
            return np.zeros(shape, np.bool_)
        # Searched for, so that rows and keys far apart cost no more than close ones.
        listed = flat_blocks(self, head, int(row.min()), int(row.max()) + 1)
        wanted = row * self.grid.column_blocks + column
        at = np.searchsorted(listed, wanted)
        seen: Rows = np.append(listed, -1)[at] == wanted
        return seen

    def select(self, heads: int | Iterable[int]) -> BlockPattern:
        """The pattern of some of its heads, in the order given: a shard of them on one GPU of several.

        Args:
            heads: Number of a head, or numbers of several.

        Raises:
            TypeError, ValueError: heads that the pattern does not have, or none.

        Example:
            >>> from streamkl_cupy import patterns
            >>> patterns.strided(4, [0, 1, 2, 3], queries=256).select([1, 3]).coverage().fraction
            0.5
        """
        chosen = self._chosen(heads)
        counts = np.diff(self.row_offsets, axis=1)[chosen]
        lines = [self.key_blocks[self.row_offsets[p, 0] : self.row_offsets[p, -1]] for p in chosen]
        return BlockPattern(_offsets(counts), np.concatenate(lines), *self.grid)

    def rows(self, first: int, last: int, keys: int | None = None) -> BlockPattern:
        """The pattern of the query rows [first, last): a chunk of a prompt, or the rows that are new in a cache.

        A call with it says q_offset=first + N - M, of the whole pattern's M and N, or leaves it out where the rows are
        the last ones of the keys.

        Args:
            first: The first row, 0 to M. Where the rows lie in several query blocks, a multiple of 16 from the start
                of one: these are cut smaller then, so that they begin with the rows.
            last: The row after the last one, `first` to M.
            keys: The first keys alone, as a cache has them that is filled so far; default all.

        Raises:
            TypeError: numbers that are not integers.
            ValueError: numbers that are out of range, with the range; rows that blocks cannot begin with.

        Example:
            >>> from streamkl_cupy import patterns
            >>> pattern = patterns.local(16, queries=96, block=32, causal=True)
            >>> pattern.rows(64, 96) == patterns.local(16, queries=32, keys=96, block=32, causal=True)
            True
            >>> pattern.rows(40, 41, keys=41).dense()[0].astype(int).tolist()  # one step of a decoder
            [[1, 1]]
        """
        first = ranged("first", first, 0, self.queries)
        last = ranged("last", last, first, self.queries)
        keys = self.keys if keys is None else ranged("keys", keys, 0, self.keys)
        size, before = self.query_block, -first % self.query_block
        block = size if last - first <= before else math.gcd(size, before)
        if block % UNIT:
            raise ValueError(
                f"rows {first} to {last} begin {first % size} rows into a query block of {size} and go beyond it; "
                f"allowed are multiples of {UNIT} there, so that blocks can begin with the rows. Begin at "
                f"{first // UNIT * UNIT}, or take the first {before} rows by themselves"
            )
        diagonal = None if self.diagonal is None else self.diagonal + first
        grid = Grid.checked(last - first, keys, (block, self.key_block), diagonal)
        lines = (first + np.arange(grid.row_blocks, dtype=np.int64) * block) // size

        def listed(head: int) -> FlatBlocks:
            start, stop = self.row_offsets[head, lines], self.row_offsets[head, lines + 1]
            counts = (stop - start).astype(np.int64)
            row = np.repeat(np.arange(len(lines), dtype=np.int64), counts)
            column = self.key_blocks[np.arange(len(row)) + np.repeat(start - np.cumsum(counts) + counts, counts)]
            inside = column < grid.column_blocks
            return grid.inside(row[inside] * grid.column_blocks + column[inside])

        return build(grid, range(self.heads), listed)

    def beside(self, *others: BlockPattern) -> BlockPattern:
        """The heads of several patterns one after the other, as `select` takes them apart.

        So every entry of a batch can have a pattern of its own: the entries become heads of one, and so do the inputs'.

        Args:
            others: Patterns for the same queries, keys and blocks. Diagonals that differ leave none.

        Raises:
            TypeError: what is no pattern.
            ValueError: patterns for other sizes.

        Example:
            >>> from streamkl_cupy import patterns
            >>> pattern = patterns.strided(4, [0, 1, 2, 3], queries=256)
            >>> pattern.select([0, 1]).beside(pattern.select(2), pattern.select(3)) == pattern
            True
        """
        for other in others:
            if not isinstance(other, BlockPattern):
                raise TypeError(f"beside takes patterns, and {a_kind_of(other)} came")
            self._refuse_other_sizes(other, "pattern.beside(pattern)")
        everything = (self, *others)
        diagonal = self.diagonal if all(x.diagonal == self.diagonal for x in others) else None
        counts = np.concatenate([np.diff(x.row_offsets, axis=1) for x in everything])
        blocks = np.concatenate([x.key_blocks for x in everything])
        fits(len(blocks))
        return BlockPattern(_offsets(counts), blocks, *self.grid._replace(diagonal=diagonal))

    def coverage(self, heads: int | Iterable[int] | None = None) -> Coverage:
        """What some heads see together, of their context: all keys, or those up to the diagonal of a causal pattern.

        A sparse head that sees an eighth of the context is by design; eight of them that see the same eighth, or that
        see half of it together, lose the rest for the layer.

        Args:
            heads: Numbers of heads, such as those on one GPU; default all.

        Returns:
            `Coverage`: the fraction of blocks that at least one of the heads lists, in all and per query block.

        Raises:
            TypeError, ValueError: heads that the pattern does not have, or none.

        Example:
            >>> from streamkl_cupy import patterns
            >>> pattern = patterns.strided(4, [0, 1, 2, 3], queries=256, block=16)
            >>> pattern.coverage().fraction, pattern.coverage(heads=[0, 2]).fraction
            (1.0, 0.5)
        """
        chosen = self._chosen(range(self.heads) if heads is None else heads)
        reach = self.grid.reach()
        seen = np.zeros_like(reach)
        for flat in union_of(self, chosen):
            np.add.at(seen, flat // self.grid.column_blocks, 1)
        total = int(reach.sum())
        rows = np.where(reach > 0, seen / np.maximum(reach, 1), 1.0)
        return Coverage(int(seen.sum()) / total if total else 1.0, frozen(rows))

    def kv_budget(self) -> NDArray[np.int64]:
        """Most key blocks that a decoder has to keep at a time, (P,) per head of the pattern: those that exist, which
        the row or a later one lists. The heads of a key head share a cache, which has what any of them needs.

        Example:
            >>> from streamkl_cupy import patterns
            >>> size = {"queries": 1024, "causal": True}
            >>> patterns.local(128, **size).kv_budget().tolist(), patterns.full(**size).kv_budget().tolist()
            ([3], [16])
        """
        most = np.zeros(self.heads, np.int64)
        for head in range(self.heads):
            first, last, _ = self._life(head)
            change = np.zeros(self.grid.row_blocks + 1, np.int64)
            np.add.at(change, first, 1)
            np.add.at(change, last + 1, -1)
            most[head] = change.cumsum().max()
        return frozen(most)

    def is_cache_monotone(self) -> bool:
        """Whether a key block that a row leaves out is never listed again, so that a decoder may drop it there.

        True of a band, and of stripes at the same places for all rows; false where farther ranges have strides that
        bring back what nearer ones left out.

        Example:
            >>> from streamkl_cupy import patterns
            >>> size = {"queries": 1024, "causal": True}
            >>> (patterns.local(128, **size) | patterns.strided(4, **size)).is_cache_monotone()
            True
            >>> patterns.sharded(12, window=0, stride=[(256, 3), (None, 4)], **size).is_cache_monotone()
            False
        """
        return all((last - first + 1 == counts).all() for first, last, counts in map(self._life, range(self.heads)))

    def _life(self, head: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Of each key block that a head lists at all: the first query block that may see it, the last one that lists
        it, and how many do."""
        offsets = self.column_offsets[head].astype(np.int64)
        counts = np.diff(offsets)
        some = np.flatnonzero(counts)
        first = np.searchsorted(self.grid.reach(), some, side="right")
        return first, self.query_blocks[offsets[some + 1] - 1].astype(np.int64), counts[some]

    def __or__(self, other: BlockPattern) -> BlockPattern:
        """Blocks that either pattern lists."""
        return self._combined(other, "|", any_of)

    def __and__(self, other: BlockPattern) -> BlockPattern:
        """Blocks that both patterns list."""
        return self._combined(other, "&", both_of)

    def tile_lists(self, rows: int, columns: int, by_keys: bool = False) -> TileLists:
        """What a kernel with tiles of this shape walks; computed once per shape and kept.

        Args:
            rows: Extent of the stationary tile, a multiple of 16.
            columns: Extent of the streamed tile, a multiple of 16; rows * columns is at most 16384.
            by_keys: False: stationary rows are queries and streamed ones keys. True: the other way round.

        Raises:
            TypeError: extents that are not integers, by_keys that is not bool.
            ValueError: extents that no tile has, with those allowed.

        Example:
            >>> from streamkl_cupy import patterns
            >>> lists = patterns.local(0, queries=128, block=16).tile_lists(64, 64)
            >>> lists.offsets.tolist(), lists.entries[:, 0].tolist(), hex(lists.entries[0, 2])
            ([[0, 1, 2]], [0, 1], '0x8421')
        """
        rows, columns = ranged("rows", rows, UNIT), ranged("columns", columns, UNIT)
        if rows % UNIT or columns % UNIT or rows * columns > MAX_PAIRS:
            raise ValueError(
                f"tiles of {rows} x {columns}; allowed are multiples of {UNIT} with a product up to {MAX_PAIRS}"
            )
        key = (rows, columns, flag("by_keys", by_keys))
        with self._lock():
            if key not in self._lists:
                queries, keys = (self.queries, self.query_block), (self.keys, self.key_block)
                if by_keys:
                    lists = tile_lists(
                        self.column_offsets, self.query_blocks, Axis(*keys, rows), Axis(*queries, columns)
                    )
                else:
                    lists = tile_lists(self.row_offsets, self.key_blocks, Axis(*queries, rows), Axis(*keys, columns))
                self._lists[key] = lists
            return self._lists[key]

    def plot(self, heads: Iterable[int] | None = None, *, columns: int = 4) -> Any:
        """Draw heads of the pattern, and last what they see together, as a matplotlib `Figure`.

        Args:
            heads: Numbers of the heads to draw; default the first 15.
            columns: Pictures per line.

        Raises:
            ImportError: matplotlib is not installed.
            TypeError, ValueError: heads that the pattern does not have.

        Example:
            >>> from streamkl_cupy import patterns
            >>> figure = patterns.strided(4, [0, 1, 2, 3], queries=256, block=16).plot()
            >>> figure.savefig("pattern.png")  # doctest: +SKIP
        """
        chosen = self._chosen(range(min(self.heads, 15)) if heads is None else heads)
        columns = ranged("columns", columns, 1)
        listed = {f"head {head}": union_of(self, [head]) for head in chosen}
        covered = self.coverage(chosen).fraction
        # Rounded down: 99.96 % must not read as all.
        listed[f"together: {int(covered * 1000) / 10:g}% of the context"] = union_of(self, chosen)
        blocks = self.grid.row_blocks, self.grid.column_blocks
        return draw(listed, blocks, (self.queries, self.keys), self.diagonal, columns)

    def _head(self, head: Any) -> int:
        """The head of the pattern that answers for a query head."""
        number = ranged("head", head, 0, self.heads - 1 if self.heads > 1 else LARGEST)
        return number if self.heads > 1 else 0

    def _chosen(self, heads: int | Iterable[int]) -> list[int]:
        """Checked numbers of heads."""
        several = isinstance(heads, Iterable) and getattr(heads, "ndim", 1) > 0
        if isinstance(heads, (str, bytes)) or not (several or hasattr(heads, "__index__")):
            raise TypeError(f"heads is {a_kind_of(heads)}; allowed are the number of a head and several of them")
        given: Iterable[Any] = heads if several else [heads]  # type: ignore[assignment]
        chosen = [ranged("heads", h, 0, self.heads - 1) for h in given]
        if not chosen:
            raise ValueError(f"heads is empty; name at least one of the {self.heads} heads of the pattern")
        return chosen

    def _refuse_other_sizes(self, other: BlockPattern, what: str) -> None:
        for name in ("queries", "keys", "query_block", "key_block"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(
                    f"{what}: {name} is {getattr(self, name)} on the left and {getattr(other, name)} "
                    f"on the right; make both for the same queries, keys and blocks"
                )

    def _combined(
        self, other: BlockPattern, sign: str, rule: Callable[[FlatBlocks, FlatBlocks], FlatBlocks]
    ) -> BlockPattern:
        if not isinstance(other, BlockPattern):
            return NotImplemented
        self._refuse_other_sizes(other, f"pattern {sign} pattern")
        if self.heads != other.heads and 1 not in (self.heads, other.heads):
            raise ValueError(
                f"pattern {sign} pattern: {self.heads} heads on the left and {other.heads} on the right; both have the "
                f"same number, or one of them has 1, which serves all"
            )
        diagonals = [d for d in (self.diagonal, other.diagonal) if d is not None]
        if sign == "|":
            diagonal = max(diagonals) if len(diagonals) == 2 else None
        else:
            diagonal = min(diagonals) if diagonals else None

        def both(head: int) -> FlatBlocks:
            left, right = (flat_blocks(x, head if x.heads > 1 else 0) for x in (self, other))
            return rule(left, right)

        return build(self.grid._replace(diagonal=diagonal), range(max(self.heads, other.heads)), both)


# Equal patterns may come and go in any order, so all that are alive are kept track of, not the first or the last one.
_alive: dict[str, list[weakref.ref[BlockPattern]]] = {}
_mourners: list[Callable[[str], None]] = []
_alive_lock = ForkLock()  # re-entered where a collection inside the lock ends the life of a pattern


def _register(pattern: BlockPattern) -> None:
    digest = pattern.digest

    def forget(reference: weakref.ref[BlockPattern], ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if ending():  # modules are being taken apart
            return
        with _alive_lock():
            _alive[digest].remove(reference)
            gone = not _alive[digest]
            if gone:
                del _alive[digest]
        for mourner in tuple(_mourners) if gone else ():
            mourner(digest)

    with _alive_lock():
        _alive.setdefault(digest, []).append(weakref.ref(pattern, forget))


def when_gone(mourner: Callable[[str], None]) -> None:
    """Have a function called with the digest of every pattern of which the last one is gone, wherever that happens."""
    if mourner not in _mourners:
        _mourners.append(mourner)


def pattern_of(digest: str) -> BlockPattern:
    """A pattern that is alive, by its digest: for operators of frameworks, which can be handed a string only.

    Raises:
        RuntimeError: no such pattern is alive.
    """
    with _alive_lock():
        found = [pattern for reference in _alive.get(digest, ()) if (pattern := reference()) is not None]
    if not found:
        raise RuntimeError("the block_mask of a compiled program no longer exists; keep the BlockPattern alive with it")
    return found[0]


class Grid(NamedTuple):
    """The block matrix of a pattern without what is listed in it."""

    queries: int
    keys: int
    query_block: int
    key_block: int
    diagonal: int | None

    @classmethod
    def checked(cls, queries: Any, keys: Any, block: Any, diagonal: Any) -> Grid:
        """Plain integers within their limits; `block` is one size or a pair."""
        queries, keys = ranged("queries", queries, 0), ranged("keys", keys, 0)
        pair = tuple(block) if isinstance(block, (tuple, list)) else (block, block)
        if len(pair) != 2:
            raise ValueError(f"block={block!r}; allowed are one size, and a pair (query_block, key_block)")
        query_block, key_block = (integer(name, x) for name, x in zip(("query_block", "key_block"), pair))
        for name, size in (("query_block", query_block), ("key_block", key_block)):
            if size % UNIT or not UNIT <= size <= MAX_BLOCK:
                raise ValueError(f"{name}={size}; allowed are multiples of {UNIT} from {UNIT} to {MAX_BLOCK}")
        if diagonal is not None:
            # Beyond these ends nothing changes any more, so that equal patterns are equal.
            diagonal = max(-queries, min(integer("diagonal", diagonal), keys))
        return cls(queries, keys, query_block, key_block, diagonal)

    @property
    def row_blocks(self) -> int:
        return -(-self.queries // self.query_block)

    @property
    def column_blocks(self) -> int:
        return -(-self.keys // self.key_block)

    def reach(self) -> NDArray[np.int64]:
        """(query blocks,): how many key blocks, from the first on, the rows of a query block may see at all."""
        if self.diagonal is None:
            return np.full(self.row_blocks, self.column_blocks, np.int64)
        last = np.minimum((np.arange(self.row_blocks, dtype=np.int64) + 1) * self.query_block, self.queries)
        seen = np.clip(last + self.diagonal, 0, self.keys)
        blocks: NDArray[np.int64] = (seen + self.key_block - 1) // self.key_block
        return blocks

    def inside(self, flat: FlatBlocks) -> FlatBlocks:
        """Without the blocks that no row may see."""
        if self.diagonal is None:
            return flat
        row, column = np.divmod(flat, max(self.column_blocks, 1))
        return flat[column < self.reach()[row]]


def flat_blocks(pattern: BlockPattern, head: int, first: int = 0, last: int | None = None) -> FlatBlocks:
    """What the query blocks [first, last) of a head list, all of them by default."""
    offsets = pattern.row_offsets[head, first : None if last is None else last + 1]
    row = np.repeat(np.arange(first, first + len(offsets) - 1, dtype=np.int64), np.diff(offsets))
    flat: FlatBlocks = row * pattern.grid.column_blocks + pattern.key_blocks[offsets[0] : offsets[-1]]
    return flat


def union_of(pattern: BlockPattern, heads: list[int]) -> Iterator[FlatBlocks]:
    """What any of the heads lists, each block once, as many query blocks at a time as scratch memory should hold."""
    listed = np.cumsum(np.sum([np.diff(pattern.row_offsets[head]) for head in heads], axis=0, dtype=np.int64))
    total = int(listed[-1]) if len(listed) else 0
    cuts = np.searchsorted(listed, np.arange(CELLS, total, CELLS), side="right")
    for first, last in pairwise(np.unique([0, *cuts, len(listed)]).tolist()):
        yield any_of(*(flat_blocks(pattern, head, first, last) for head in heads))


def any_of(*flat: FlatBlocks) -> FlatBlocks:
    """What at least one lists, each block once."""
    if len(flat) == 1:
        return flat[0]
    together = _merged(flat)
    return together[np.diff(together, prepend=-1) > 0]


def both_of(*flat: FlatBlocks) -> FlatBlocks:
    """What both of two list."""
    together = _merged(flat)
    twice: FlatBlocks = together[1:][np.diff(together) == 0]
    return twice


def _merged(flat: Sequence[FlatBlocks]) -> FlatBlocks:
    # NumPy's stable sort merges what is in order already, twenty times faster than its default sorts it.
    return np.sort(np.concatenate(flat), kind="stable")


def build(grid: Grid, heads: Sequence[_H], flat: Callable[[_H], FlatBlocks]) -> BlockPattern:
    """A pattern of what `flat(head)` lists for each of `heads`; equal ones are computed once."""
    columns = max(grid.column_blocks, 1)
    done: dict[_H, tuple[NDArray[np.int64], NDArray[np.int32]]] = {}
    total = 0
    for head in heads:
        if head not in done:
            row, column = np.divmod(flat(head), columns)
            done[head] = np.bincount(row, minlength=grid.row_blocks), column.astype(np.int32)
        total += len(done[head][1])
        fits(total)
    counts = np.stack([done[head][0] for head in heads])
    return BlockPattern(_offsets(counts), np.concatenate([done[head][1] for head in heads]), *grid)


def fits(listed: int) -> None:
    """Refuse more blocks than a pattern can list; asked before memory is taken for them."""
    if listed > LARGEST:
        raise ValueError(f"{listed} listed blocks do not fit into 32-bit offsets, {LARGEST} do; use larger blocks")


def _offsets(counts: NDArray[Any]) -> NDArray[np.int64]:
    """(P, Mb) entries per query block -> (P, Mb + 1) offsets."""
    ends = np.cumsum(counts, dtype=np.int64).reshape(counts.shape)
    last = counts.sum(axis=1, dtype=np.int64).cumsum()
    return np.concatenate([ends - counts, last[:, None]], axis=1)


def host_array(name: str, values: Any) -> NDArray[Any]:
    """The values as NumPy reads them."""
    try:
        return np.asarray(values)
    except Exception as cause:
        raise TypeError(
            f"{name} is {a_kind_of(values)} that NumPy cannot read; pass an array in host memory"
        ) from cause


def integers(name: str, values: Any) -> NDArray[Any]:
    """A host array of integers."""
    array = host_array(name, values)
    if array.size == 0 and not isinstance(values, np.ndarray):
        array = array.astype(np.int64)  # an empty list has no integers to tell its type by
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} has dtype {array.dtype}; allowed are integers")
    return array


def _checked_rows(row_offsets: Any, key_blocks: Any, grid: Grid) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Compressed rows, checked and with ascending blocks, in arrays of their own."""
    offsets, blocks = integers("row_offsets", row_offsets), integers("key_blocks", key_blocks)
    if offsets.ndim == 1:
        offsets = offsets[None]
    if offsets.ndim != 2 or offsets.shape[1] != grid.row_blocks + 1 or not len(offsets):
        raise ValueError(
            f"row_offsets has shape {np.shape(row_offsets)}; {grid.queries} queries in blocks of {grid.query_block} "
            f"need (P, {grid.row_blocks + 1}) with P = 1 or the number of heads"
        )
    if blocks.ndim != 1:
        raise ValueError(f"key_blocks has shape {blocks.shape}; allowed is one axis")
    fits(len(blocks))
    offsets = offsets.astype(np.int64)
    if offsets[0, 0] != 0 or offsets[-1, -1] != len(blocks):
        raise ValueError(
            f"row_offsets runs from {offsets[0, 0]} to {offsets[-1, -1]}; it must start at 0 and end at the "
            f"{len(blocks)} entries of key_blocks"
        )
    if (offsets[1:, 0] != offsets[:-1, -1]).any():
        head = int(np.argmax(offsets[1:, 0] != offsets[:-1, -1])) + 1
        raise ValueError(
            f"row_offsets: head {head} begins at {offsets[head, 0]}, but head {head - 1} ends at "
            f"{offsets[head - 1, -1]}; the heads follow each other in key_blocks"
        )
    counts = np.diff(offsets, axis=1)
    if (counts < 0).any():
        head, row = np.argwhere(counts < 0)[0]
        raise ValueError(f"row_offsets of head {head} falls after query block {row}; it must not decrease")
    line = np.repeat(np.arange(counts.size), counts.reshape(-1))
    beyond = (blocks < 0) | (blocks >= grid.column_blocks)
    if beyond.any():
        where = int(np.argmax(beyond))
        raise ValueError(
            f"key_blocks[{where}] is {blocks[where]}; {grid.keys} keys in blocks of {grid.key_block} have the blocks 0 "
            f"to {grid.column_blocks - 1}"
        )
    # One number per entry, ascending in a list that is in order.
    flat = line * max(grid.column_blocks, 1) + blocks.astype(np.int64)
    steps = np.diff(flat)
    if (steps < 0).any():
        flat = np.sort(flat)
        steps = np.diff(flat)
    if not steps.all():
        head, rest = divmod(int(flat[int(np.argmin(steps != 0))]), max(grid.row_blocks * grid.column_blocks, 1))
        row, column = divmod(rest, grid.column_blocks)
        raise ValueError(f"key_blocks lists block {column} twice for query block {row} of head {head}; list it once")
    blocks = (flat - line * max(grid.column_blocks, 1)).astype(np.int32)
    outside = blocks >= grid.reach()[line % max(grid.row_blocks, 1)]
    if outside.any():
        where = int(np.argmax(outside))
        head, row = divmod(int(line[where]), grid.row_blocks)
        raise ValueError(
            f"key_blocks lists block {blocks[where]} for query block {row} of head {head}, but no row of that may "
            f"see it with diagonal={grid.diagonal}; leave it out, or pass diagonal=None"
        )
    return offsets.astype(np.int32), blocks


def _by_column(
    offsets: NDArray[np.int32], blocks: NDArray[np.int32], grid: Grid
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Compressed rows to compressed columns: offsets (P, Nb + 1) and the query block of each entry."""
    # NumPy sorts 16-bit integers by radix, many times faster than wider ones.
    small = np.uint16 if grid.column_blocks <= 1 << 16 else np.int32
    counts = np.zeros((len(offsets), grid.column_blocks), np.int64)
    rows = np.empty(len(blocks), np.int32)
    for head, line in enumerate(offsets):
        own = slice(line[0], line[-1])
        row = np.repeat(np.arange(grid.row_blocks, dtype=np.int32), np.diff(line))
        rows[own] = row[np.argsort(blocks[own].astype(small), kind="stable")]
        counts[head] = np.bincount(blocks[own], minlength=grid.column_blocks)
    return _offsets(counts).astype(np.int32), rows


def _within(name: str, values: Any, size: int) -> NDArray[np.int64]:
    """A host array of integers from 0 to size - 1."""
    array = integers(name, values)
    beyond = (array < 0) | (array >= size)
    if beyond.any():
        allowed = f"allowed are integers from 0 to {size - 1}" if size else f"the pattern has no {name}"
        raise ValueError(f"{name} holds {array[beyond][0]}; {allowed}")
    return array.astype(np.int64)


def ranged(name: str, value: Any, low: int, high: int = LARGEST) -> int:
    """A plain integer within limits."""
    number = integer(name, value)
    if not low <= number <= high:
        raise ValueError(f"{name}={number}; allowed are integers from {low} to {high}")
    return number

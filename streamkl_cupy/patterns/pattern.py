"""`BlockPattern`: which blocks of keys each block of queries visits, per head, as a frozen value."""

from __future__ import annotations

import hashlib
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..adapters import kind_of
from .tiles import CELLS, MAX_PAIRS, UNIT, Axis, TileLists, tile_lists

Rows = NDArray[np.bool_]
LARGEST = 2**31 - 1
MAX_BLOCK = 128


class Coverage(NamedTuple):
    """How much of their context some heads see together; 1 is all of it.

    fraction: Listed by at least one of the heads, of all blocks of the context.
    per_query_block: (query blocks,) float64, the same for each query block; 1 where there is no context to see.
    """

    fraction: float
    per_query_block: NDArray[np.float64]


@dataclass(frozen=True, eq=False, repr=False)
class BlockPattern:
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

    row_offsets: NDArray[Any]
    key_blocks: NDArray[Any]
    queries: int
    keys: int
    query_block: int = 64
    key_block: int = 64
    diagonal: int | None = None
    column_offsets: NDArray[np.int32] = field(init=False)
    query_blocks: NDArray[np.int32] = field(init=False)
    digest: str = field(init=False)
    _hash: int = field(init=False)
    _lists: dict[tuple[int, int, bool], TileLists] = field(init=False)
    _lock: threading.Lock = field(init=False)

    def __post_init__(self) -> None:
        grid = Grid.checked(self.queries, self.keys, (self.query_block, self.key_block), self.diagonal)
        offsets, blocks = _checked_rows(self.row_offsets, self.key_blocks, grid)
        column_offsets, query_blocks = _by_column(offsets, blocks, grid)
        header = ("rows", len(offsets), *grid)
        content = hashlib.blake2b(repr(header).encode(), digest_size=16)
        for array in (offsets, blocks):
            content.update(array.tobytes())
        digest = content.hexdigest()
        for array in (offsets, blocks, column_offsets, query_blocks):
            array.flags.writeable = False
        values = {
            **grid._asdict(),
            "row_offsets": offsets,
            "key_blocks": blocks,
            "column_offsets": column_offsets,
            "query_blocks": query_blocks,
            "digest": digest,
            "_hash": hash(digest),
            "_lists": {},
            "_lock": threading.Lock(),
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)
        _register(self)

    def __hash__(self) -> int:
        return self._hash

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
        return BlockPattern, (self.row_offsets, self.key_blocks, *self._grid)

    @property
    def heads(self) -> int:
        """P: the heads of the pattern; 1 serves any number of heads."""
        return len(self.row_offsets)

    @property
    def density(self) -> float:
        """Listed blocks, of those that a dense pattern lists (a dense causal one where there is a diagonal)."""
        reach = int(self._grid.reach().sum()) * self.heads
        return len(self.key_blocks) / reach if reach else 0.0

    @property
    def _grid(self) -> Grid:
        return Grid(self.queries, self.keys, self.query_block, self.key_block, self.diagonal)

    def dense(self) -> Rows:
        """The block matrix, (P, Mb, Nb) bool: True where query block r of head p visits key block c.

        Example:
            >>> from streamkl_cupy import patterns
            >>> patterns.strided(2, 1, queries=32, keys=64, block=16).dense().astype(int).tolist()
            [[[0, 1, 0, 1], [0, 1, 0, 1]]]
        """
        rows = self._grid.row_blocks
        return np.stack([self._dense_rows(head, 0, rows) for head in range(self.heads)])

    def visible(self, rows: Any, keys: Any, head: int = 0) -> Rows:
        """Whether the pattern lets query rows see keys: integer arrays that broadcast, as (m, 1) and (n,) do.

        Args:
            rows: Query rows, 0 to M - 1.
            keys: Keys, 0 to N - 1.
            head: Query head; a pattern of one head answers for all.

        Example:
            >>> import numpy as np
            >>> from streamkl_cupy import patterns
            >>> pattern = patterns.sinks(1, queries=32, block=16)
            >>> pattern.visible(np.array([[0], [31]]), np.array([15, 16])).tolist()
            [[True, False], [True, False]]
        """
        row, column = np.asarray(rows) // self.query_block, np.asarray(keys) // self.key_block
        if not row.size or not column.size:
            return np.zeros(np.broadcast_shapes(row.shape, column.shape), np.bool_)
        first = int(row.min())
        lines = self._dense_rows(head if self.heads > 1 else 0, first, int(row.max()) + 1)
        seen: Rows = lines[row - first, column]
        return seen

    def select(self, heads: int | Iterable[int]) -> BlockPattern:
        """The pattern of some of its heads, in the order given: a shard of them on one GPU of several.

        Example:
            >>> from streamkl_cupy import patterns
            >>> patterns.strided(4, [0, 1, 2, 3], queries=256).select([1, 3]).coverage().fraction
            0.5
        """
        chosen = self._chosen(heads)
        counts = np.diff(self.row_offsets, axis=1)[chosen]
        lines = [self.key_blocks[self.row_offsets[p, 0] : self.row_offsets[p, -1]] for p in chosen]
        return BlockPattern(_offsets(counts), np.concatenate(lines), *self._grid)

    def coverage(self, heads: int | Iterable[int] | None = None) -> Coverage:
        """What some heads see together, of their context: all keys, or those up to the diagonal of a causal pattern.

        A sparse head that sees an eighth of the context is by design; eight of them that see the same eighth, or that
        see half of it together, lose the rest for the layer.

        Args:
            heads: Numbers of heads, such as those on one GPU; default all.

        Returns:
            `Coverage`: the fraction of blocks that at least one of the heads lists, in all and per query block.

        Example:
            >>> from streamkl_cupy import patterns
            >>> pattern = patterns.strided(4, [0, 1, 2, 3], queries=256, block=16)
            >>> pattern.coverage().fraction, pattern.coverage(heads=[0, 2]).fraction
            (1.0, 0.5)
        """
        chosen = self._chosen(range(self.heads) if heads is None else heads)
        reach = self._grid.reach()
        seen = np.zeros_like(reach)
        for first, last in self._grid.chunks():
            union = np.zeros((last - first, self._grid.column_blocks), np.bool_)
            for head in chosen:
                union |= self._dense_rows(head, first, last)
            seen[first:last] = union.sum(axis=1)
        total = int(reach.sum())
        rows = np.where(reach > 0, seen / np.maximum(reach, 1), 1.0)
        rows.flags.writeable = False
        return Coverage(int(seen.sum()) / total if total else 1.0, rows)

    def __or__(self, other: BlockPattern) -> BlockPattern:
        """Blocks that either pattern lists."""
        return self._combined(other, "|", np.logical_or)

    def __and__(self, other: BlockPattern) -> BlockPattern:
        """Blocks that both patterns list."""
        return self._combined(other, "&", np.logical_and)

    def tile_lists(self, rows: int, columns: int, by_keys: bool = False) -> TileLists:
        """What a kernel with tiles of this shape walks; computed once per shape and kept.

        Args:
            rows: Extent of the stationary tile, a multiple of 16.
            columns: Extent of the streamed tile, a multiple of 16; rows * columns is at most 16384.
            by_keys: False: stationary rows are queries and streamed ones keys. True: the other way round.

        Example:
            >>> from streamkl_cupy import patterns
            >>> lists = patterns.local(0, queries=128, block=16).tile_lists(64, 64)
            >>> lists.offsets.tolist(), lists.entries[:, 0].tolist(), hex(lists.entries[0, 2])
            ([[0, 1, 2]], [0, 1], '0x8421')
        """
        rows, columns = integer("rows", rows, UNIT), integer("columns", columns, UNIT)
        if rows % UNIT or columns % UNIT or rows * columns > MAX_PAIRS:
            raise ValueError(
                f"tiles of {rows} x {columns}; allowed are multiples of {UNIT} with a product up to {MAX_PAIRS}"
            )
        key = (rows, columns, bool(by_keys))
        with self._lock:
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

        Example:
            >>> from streamkl_cupy import patterns
            >>> figure = patterns.strided(4, [0, 1, 2, 3], queries=256, block=16).plot()
            >>> figure.savefig("pattern.png")  # doctest: +SKIP
        """
        from .drawing import draw

        chosen = self._chosen(range(min(self.heads, 15)) if heads is None else heads)
        return draw(self, chosen, integer("columns", columns, 1))

    def _chosen(self, heads: int | Iterable[int]) -> list[int]:
        """Checked numbers of heads."""
        if isinstance(heads, (str, bytes)) or not (isinstance(heads, Iterable) or hasattr(heads, "__index__")):
            raise TypeError(f"heads is a {kind_of(heads)}; allowed are the number of a head and several of them")
        chosen = [integer("heads", h, 0, self.heads - 1) for h in (heads if isinstance(heads, Iterable) else [heads])]
        if not chosen:
            raise ValueError(f"heads is empty; name at least one of the {self.heads} heads of the pattern")
        return chosen

    def _dense_rows(self, head: int, first: int, last: int) -> Rows:
        """Query blocks [first, last) of one head as rows of the block matrix."""
        offsets = self.row_offsets[head, first : last + 1]
        lines = np.zeros((last - first, self._grid.column_blocks), np.bool_)
        row = np.repeat(np.arange(last - first), np.diff(offsets))
        lines[row, self.key_blocks[offsets[0] : offsets[-1]]] = True
        return lines

    def _combined(self, other: BlockPattern, sign: str, rule: Callable[[Rows, Rows], Rows]) -> BlockPattern:
        if not isinstance(other, BlockPattern):
            return NotImplemented
        for name in ("queries", "keys", "query_block", "key_block"):
            if getattr(self, name) != getattr(other, name):
                raise ValueError(
                    f"pattern {sign} pattern: {name} is {getattr(self, name)} on the left and {getattr(other, name)} "
                    f"on the right; make both for the same queries, keys and blocks"
                )
        if self.heads != other.heads and 1 not in (self.heads, other.heads):
            raise ValueError(
                f"pattern {sign} pattern: {self.heads} heads on the left and {other.heads} on the right; both have the "
                f"same number, or one of them has 1, which serves all"
            )
        diagonals = [d for d in (self.diagonal, other.diagonal) if d is not None]
        if rule is np.logical_or:
            diagonal = max(diagonals) if len(diagonals) == 2 else None
        else:
            diagonal = min(diagonals) if diagonals else None

        def lines(head: int, first: int, last: int) -> Rows:
            left, right = (x._dense_rows(head if x.heads > 1 else 0, first, last) for x in (self, other))
            return rule(left, right)

        return build(self._grid._replace(diagonal=diagonal), range(max(self.heads, other.heads)), lines)


# Equal patterns may come and go in any order, so all that are alive are kept track of, not the first or the last one.
_alive: dict[str, list[weakref.ref[BlockPattern]]] = {}
_alive_lock = threading.RLock()  # re-entered where a collection inside the lock ends the life of a pattern


def _register(pattern: BlockPattern) -> None:
    digest = pattern.digest

    def forget(reference: weakref.ref[BlockPattern]) -> None:
        with _alive_lock:
            _alive[digest].remove(reference)
            if not _alive[digest]:
                del _alive[digest]

    with _alive_lock:
        _alive.setdefault(digest, []).append(weakref.ref(pattern, forget))


def pattern_of(digest: str) -> BlockPattern:
    """A pattern that is alive, by its digest: for operators of frameworks, which can be handed a string only.

    Raises:
        RuntimeError: no such pattern is alive.
    """
    with _alive_lock:
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
        queries, keys = integer("queries", queries, 0), integer("keys", keys, 0)
        pair = tuple(block) if isinstance(block, (tuple, list)) else (block, block)
        if len(pair) != 2:
            raise ValueError(f"block={block!r}; allowed are one size, and a pair (query_block, key_block)")
        query_block, key_block = (integer(name, x, 1) for name, x in zip(("query_block", "key_block"), pair))
        for name, size in (("query_block", query_block), ("key_block", key_block)):
            if size % UNIT or size > MAX_BLOCK:
                raise ValueError(f"{name}={size}; allowed are multiples of {UNIT} from {UNIT} to {MAX_BLOCK}")
        if diagonal is not None:
            # Beyond these ends nothing changes any more, so that equal patterns are equal.
            diagonal = max(-queries, min(integer("diagonal", diagonal, -LARGEST), keys))
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

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Ranges of query blocks, as large as scratch memory should be."""
        step = max(CELLS // max(self.column_blocks, 1), 1)
        for first in range(0, self.row_blocks, step):
            yield first, min(first + step, self.row_blocks)


def build(grid: Grid, heads: Sequence[Any], lines: Callable[[Any, int, int], Rows]) -> BlockPattern:
    """A pattern from `lines(head, first, last)`, rows of its block matrix; equal entries of `heads` are computed once.

    Row by row, because the whole block matrix of many heads and a long context may not fit in memory.
    """
    columns = np.arange(grid.column_blocks)
    reach = grid.reach()[:, None]
    done: dict[Any, tuple[NDArray[np.int64], NDArray[np.int32]]] = {}
    for head in heads:
        if head in done:
            continue
        counts, blocks = [np.zeros(0, np.int64)], [np.zeros(0, np.int32)]
        for first, last in grid.chunks():
            seen = lines(head, first, last) & (columns < reach[first:last])
            counts.append(seen.sum(axis=1))
            blocks.append(np.nonzero(seen)[1].astype(np.int32))
        done[head] = np.concatenate(counts), np.concatenate(blocks)
    counts_of_heads = np.stack([done[head][0] for head in heads])
    return BlockPattern(_offsets(counts_of_heads), np.concatenate([done[head][1] for head in heads]), *grid)


def _offsets(counts: NDArray[Any]) -> NDArray[np.int64]:
    """(P, Mb) entries per query block -> (P, Mb + 1) offsets."""
    ends = np.cumsum(counts, dtype=np.int64).reshape(counts.shape)
    last = counts.sum(axis=1, dtype=np.int64).cumsum()
    return np.concatenate([ends - counts, last[:, None]], axis=1)


def integers(name: str, values: Any) -> NDArray[Any]:
    """A host array of integers."""
    try:
        array = np.asarray(values)
    except Exception as cause:
        raise TypeError(
            f"{name} is a {kind_of(values)} that NumPy cannot read; pass an array in host memory"
        ) from cause
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
    if len(blocks) > LARGEST:
        raise ValueError(f"{len(blocks)} listed blocks do not fit into 32-bit offsets; use larger blocks")
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
    place = line * max(grid.column_blocks, 1) + blocks.astype(np.int64)
    steps = np.diff(place)
    if (steps < 0).any():
        place = np.sort(place)
        steps = np.diff(place)
    if not steps.all():
        head, rest = divmod(int(place[int(np.argmin(steps != 0))]), max(grid.row_blocks * grid.column_blocks, 1))
        row, column = divmod(rest, grid.column_blocks)
        raise ValueError(f"key_blocks lists block {column} twice for query block {row} of head {head}; list it once")
    blocks = (place - line * max(grid.column_blocks, 1)).astype(np.int32)
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


def integer(name: str, value: Any, low: int, high: int = LARGEST) -> int:
    """A plain integer within limits."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r} is a {kind_of(value)}; allowed is an integer")
    try:
        number = operator.index(value)
    except TypeError as cause:
        raise TypeError(f"{name}={value!r} is a {kind_of(value)}; allowed is an integer") from cause
    if not low <= number <= high:
        limits = f"from {low} to {high}" if high != LARGEST else f"from {low}"
        raise ValueError(f"{name}={number}; allowed are integers {limits}")
    return number

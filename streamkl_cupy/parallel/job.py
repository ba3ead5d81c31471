"""A sharded call without its arrays: who holds what, and the calls of the plain operation that are made of it.

A program that all ranks run: collectives outside, and what a rank computes by itself inside of `here`, which is given
its number. Shards travel as long as the longest of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

from ..call import Call
from ..results import KLForwardRows
from ..rules.divergences import DIVERGENCES
from ..rules.divergences.interface import Divergence, Merging
from .blocks import Whole
from .engine import NAMES, QUERIES, Engine, call_of
from .libraries import Library, at
from .ranks import Pending, Ranks
from .shards import Run, Runs, in_order, length, part_of, starts_of
from .states import merging_of

_T = TypeVar("_T")

STRATEGIES = ("a2a", "all_gather", "all_gather_queries", "p2p")
MERGING = ("all_gather_queries", "p2p")
"""Those that merge states of rows."""
SUMMED = {"a2a": "", "all_gather": "k", "all_gather_queries": "q", "p2p": "qk"}
"""Whose gradients are sums over ranks, of queries "q" and of keys "k"."""

NOBODY = 2**40
"""Beyond all positions."""


class Axes(NamedTuple):
    """Where in the arrays of a call its rows and heads are."""

    rows: int
    heads: int | None

    @classmethod
    def of(cls, rank: int, layout: str, packed: bool) -> Axes:
        if rank == 2:
            return cls(0, None)
        tokens_first = packed or layout == "bnhd"
        return cls(rank - 3, rank - 2) if tokens_first else cls(rank - 2, rank - 3)


class Piece(NamedTuple):
    """A call of the plain operation on a part of shards."""

    call: Call
    """Without its operands."""
    rows: slice
    """Of the shard of rows."""
    keys: slice


@dataclass(frozen=True)
class Job:
    """One call of all ranks, without its arrays."""

    ranks: Ranks
    engine: Engine
    library: Library
    whole: Whole
    rows: tuple[Runs, ...]
    keys: tuple[Runs, ...]
    axes: Axes
    strategy: str
    groups: int = 1
    """In how many steps the key heads go, so that one is on its way while another is computed."""
    early: bool = False
    """Whether gathered keys are used shard by shard, the rank's own first, while others are on their way."""

    def pieces(self, rank: int, like: Any) -> list[tuple[Piece, Runs, Runs]]:
        """All that a rank computes, of the arrays that it has then: whole ones, but for its own shards, of which `like`
        has queries. With each the rows and keys of which it is a piece."""
        rows, keys = whole_runs(self.rows), whole_runs(self.keys)
        if self.strategy == "p2p" or self.early:
            held = [(rank - step) % self.ranks.size for step in range(self.ranks.size)]
            pairs = [(self.rows[rank], self.keys[holder]) for holder in held]
            if self.early:
                parts = own_parts(like.shape[self.axes.rows], math.prod(like.shape[:-1]) // self.groups)
                pairs[:1] = [(part_of(self.rows[rank], x), self.keys[rank]) for x in parts]
        elif self.strategy == "all_gather":
            pairs = [(self.rows[rank], keys)]
        elif self.strategy == "all_gather_queries":
            pairs = [(rows, self.keys[rank])]
        else:
            pairs = [(rows, keys)]
        return [(piece, *pair) for pair in pairs for piece in self.calls(*pair)]

    def stand_ins(self, rank: int, inputs: Sequence[Any]) -> Iterator[Call]:
        """The calls of the plain operation that a rank makes, with stand-ins for arrays."""
        heads = self.axes.heads
        part = self
        if self.strategy == "a2a" and heads is not None:
            part = some_heads(self, inputs[2].shape[heads], rank)
        pieces = [piece for piece, _, _ in part.pieces(rank, inputs[2])]
        if self.early:  # a backward takes all rows over the own keys at once
            pieces += part.calls(part.rows[rank], part.keys[rank])
        for piece in pieces:
            rows, keys = (x.stop - x.start for x in (piece.rows, piece.keys))
            shapes = [list(self.extended(x, rows if i in QUERIES else keys)) for i, x in enumerate(inputs)]
            for shape in shapes:
                if heads is not None:
                    shape[heads] //= self.ranks.size if self.strategy == "a2a" else self.groups
            arrays = [SimpleNamespace(shape=tuple(shape), dtype=x.dtype) for shape, x in zip(shapes, inputs)]
            yield piece.call._replace(operands=tuple(arrays))

    @property
    def some_keys(self) -> bool:
        """Whether its calls have some of the keys of their rows."""
        return self.early or self.strategy in MERGING

    @property
    def moments(self) -> int:
        """How many moments its calls leave of a row."""
        return self.divergence.state_floats if self.some_keys else self.divergence.moments

    @property
    def divergence(self) -> Divergence:
        """What its rows are of."""
        return DIVERGENCES[self.whole.options.divergence]

    @property
    def merging(self) -> Merging:
        """How states of its rows merge."""
        return merging_of(self.whole.options.divergence)

    @cached_property
    def _known(self) -> dict[Any, Any]:
        return {}

    def known(self, name: Any, make: Callable[[], _T]) -> _T:
        """What is made of the job alone, once; but where there are masks, whose parts are arrays of one call, anew."""
        if name in self._known:
            found: _T = self._known[name]
            return found
        found = make()
        if not self.whole.masks:
            self._known[name] = found
        return found

    def calls(self, rows: Runs, keys: Runs) -> tuple[Piece, ...]:
        """All that there is to compute of a shard of rows and a shard of keys."""
        return self.known((rows, keys), lambda: tuple(self._calls(rows, keys)))

    def _calls(self, rows: Runs, keys: Runs) -> Iterator[Piece]:
        wide = ("qk" if self.early else SUMMED[self.strategy]) if self.ranks.size > 1 else ""
        # Where a rank's own keys have all rows their gradients are exact as they are, if no two calls have a key.
        by_runs = self.strategy == "all_gather_queries"
        for row_slice, key_slice, options in self.whole.cut(rows, keys, by_runs):
            yield Piece(call_of((), options, self.some_keys, wide), row_slice, key_slice)

    def seen(self, rank: int, holder: int, tight: bool = False) -> slice | None:
        """The part of a shard of keys that travels to a rank: what its rows see, or, but for `tight`, all where that is
        half of it or more. The same on both, which know of masks what is no array."""

        def found() -> slice | None:
            whole, all_of_it = replace(self.whole, masks={}), length(self.keys[holder])
            parts = [keys for _, keys, _ in whole.cut(self.rows[rank], self.keys[holder])]
            if not parts:
                return None
            part = slice(min(x.start for x in parts), max(x.stop for x in parts))
            return part if tight or 2 * (part.stop - part.start) < all_of_it else slice(0, all_of_it)

        return self.known(("seen", rank, holder, tight), found)

    @cached_property
    def cut(self) -> Callable[[Any, slice], Any]:
        """(array, where) -> some rows or keys of it."""
        return partial(self.library.cut, self.axes.rows)

    def arrays(self, inputs: Sequence[Any], call: Piece) -> tuple[Any, ...]:
        """The operands of a call."""
        q_t, k_t, q_s, k_s = inputs
        cut, rows, keys = self.cut, call.rows, call.keys
        return cut(q_t, rows), cut(k_t, keys), cut(q_s, rows), cut(k_s, keys)

    def padded(self, x: Any, owners: tuple[Runs, ...]) -> Any:
        """A shard as long as the longest."""
        axis, longest = self.axes.rows, max(map(length, owners))
        if x.shape[axis] == longest:
            return x
        out = self.library.full(x, self.extended(x, longest), x.dtype)
        return self.library.put(out, at(axis, slice(0, x.shape[axis])), x)

    def gather(self, xs: Sequence[Any], owners: tuple[Runs, ...]) -> Callable[[], list[Any]]:
        """Start to bring all shards of arrays together, in the order of positions."""
        axis = self.axes.rows
        if self.ranks.size == 1:
            return lambda: [in_order(self.library, [x], axis, owners) for x in xs]
        pending = [self.ranks.all_gather(self.padded(x, owners)) for x in xs]
        return lambda: [in_order(self.library, x(), axis, owners) for x in pending]

    def sent(self, x: Any, owners: tuple[Runs, ...], axis: int) -> Any:
        """Of an array in the order of positions, every rank's shard: (size, ...)."""
        longest = max(map(length, owners))
        parts = []
        for runs in owners:
            pieces = [x[at(axis, slice(*run))] for run in runs]
            if (missing := longest - length(runs)) > 0:
                pieces.append(self.library.full(x, (*x.shape[:axis], missing, *x.shape[axis + 1 :]), x.dtype))
            parts.append(self.library.joined(pieces, axis))
        return self.library.stacked(parts)

    def summed(self, x: Any) -> Pending:
        """Start to add up what every rank has for this one; of (size, ...)."""
        return self.ranks.reduce_scatter(x) if self.ranks.size > 1 else ready(x[0])

    def own(self, x: Any, owners: tuple[Runs, ...], like: Any) -> Any:
        """Without the padding, in the dtype of the input."""
        if min(map(length, owners)) < max(map(length, owners)):  # so the ranks know their numbers
            x = self.ranks.here(lambda rank: x[at(self.axes.rows, slice(0, length(owners[rank])))])
        return self.library.cast(x, like.dtype)

    # Row results of several calls as those of a shard.

    def rows_of(self, found: Sequence[tuple[slice, KLForwardRows[Any]]], inputs: Sequence[Any]) -> KLForwardRows[Any]:
        """Together, with what a row without keys has where nothing was computed."""
        like = inputs[2]
        shape, whole = like.shape[:-1], slice(0, like.shape[self.axes.rows])
        if len(found) == 1 and found[0][0] == whole:
            return found[0][1]
        dtype = _stat_dtype(inputs)
        moments = self.moments
        empty = [(shape, 0.0), (shape, float("-inf")), (shape, float("-inf"))]
        if moments:
            empty.append(((*shape, moments), 0.0))
        outs = [self.library.full(like, extents, dtype, value) for extents, value in empty]
        for i, x in enumerate(self.merging.unseen if self.some_keys else ()):
            if x:
                outs[3] = self.library.put(outs[3], (..., i), x)
        for where, rows in found:
            there = [x for x in rows if x is not None]
            outs = [self.library.put(out, at(self.axes.rows, where), x) for out, x in zip(outs, there, strict=True)]
        return KLForwardRows(outs[0], outs[1], outs[2], moments=outs[3] if moments else None)

    def as_call(self, inputs: Sequence[Any], piece: Piece) -> Call:
        """A call of the plain operation."""
        op, _, options, masks = piece.call
        return Call(op, self.arrays(inputs, piece), options, masks)

    def computed(self, calls: Iterable[Piece], inputs: Sequence[Any]) -> KLForwardRows[Any]:
        """The row results of a shard of rows."""
        return self.rows_of([(c.rows, self.engine.forward(self.as_call(inputs, c))) for c in calls], inputs)

    def layers(self, rows: Runs, keys: Runs) -> list[list[Piece]]:
        """The calls of two shards, such that those of a layer have no row twice; one layer at least."""
        return self.known(("layers", rows, keys), lambda: self._layers(rows, keys))

    def _layers(self, rows: Runs, keys: Runs) -> list[list[Piece]]:
        found: list[list[Piece]] = [[]]
        for piece in self.calls(rows, keys):
            for layer in found:
                if all(piece.rows.stop <= x.rows.start or x.rows.stop <= piece.rows.start for x in layer):
                    layer.append(piece)
                    break
            else:
                found.append([piece])
        return found

    def gradients(
        self, saved: Sequence[Any], inputs: Sequence[Any], runs: tuple[Runs, Runs], totals: Mapping[int, Total]
    ) -> dict[int, Any]:
        """What a shard of keys and a shard of rows contribute to each other's gradients, call by call, the largest
        first: each is added to its total and let go. `saved` is grad, and what a backward reads of rows."""
        wrt = tuple(NAMES[k] for k in totals)
        for call in sorted(self.calls(*runs), key=lambda call: call.keys.start - call.keys.stop):
            rows = tuple(None if x is None else self.cut(x, call.rows) for x in saved)
            grads = self.engine.backward(rows, self.as_call(inputs, call), wrt)
            for k, total in totals.items():
                total.add(call.rows if k in QUERIES else call.keys, grads[k])
            del grads
        return {k: total.result() for k, total in totals.items()}

    def total(self, like: Any, exact: bool = False) -> Total:
        """Of gradients like an array; `exact` says that no two of them overlap, so that the dtype may stay as it is."""
        size = like.shape[self.axes.rows]
        dtype = like.dtype if exact else self.sum_dtype(like)
        return Total(self, like, tuple(like.shape), dtype, ((), (0, size), 0), whole=exact or self.ranks.size == 1)

    def scattered(self, like: Any) -> Total:
        """Of gradients of all keys, as every rank's shard of it: (size, ...)."""
        longest = max(map(length, self.keys))
        destinations = [
            ((rank,), run, start)
            for rank, runs in enumerate(self.keys)
            for run, start in zip((*runs, _beyond(runs, longest)), (*starts_of(runs), length(runs)))
        ]
        shape = (self.ranks.size, *self.extended(like, longest))
        return Total(self, like, shape, self.sum_dtype(like), *destinations)

    @staticmethod
    def sum_dtype(x: Any) -> str:
        """In which gradients like an array are added up."""
        return "float64" if "float64" in str(x.dtype) else "float32"

    def extended(self, x: Any, size: int) -> tuple[int, ...]:
        """The shape of an array with so many rows or keys."""
        return (*x.shape[: self.axes.rows], size, *x.shape[self.axes.rows + 1 :])


Destination = tuple[tuple[int, ...], Run, int]
"""Where a run of positions has its place: the first indices, the run, and where along the axis it begins there."""


class Total:
    """A sum of gradients of parts of rows or keys, each added where it belongs. The first is copied, and only what it
    leaves is cleared."""

    def __init__(
        self, job: Job, like: Any, shape: tuple[int, ...], dtype: Any, *destinations: Destination, whole: bool = False
    ) -> None:
        """`whole`: one part that is all of it may be the total itself."""
        self._job, self._like, self._shape, self._dtype, self._destinations, self._whole = (
            job,
            like,
            shape,
            dtype,
            destinations,
            whole,
        )
        self._out: Any = None

    def add(self, where: slice, x: Any) -> None:
        """A part of it."""
        library, first = self._job.library, self._out is None
        if first and self._whole and x.shape == self._shape:
            self._out = x
            return
        out = library.empty(self._like, self._shape, self._dtype) if first else self._out
        for prefix, (low, high), start in self._destinations:
            begin, end = max(where.start, low), min(where.stop, high)
            if begin >= end:
                begin = end = low
            if begin < end:
                part = self._job.cut(x, slice(begin - where.start, end - where.start))
                out = (library.put if first else library.add)(
                    out, self._index(prefix, start + begin - low, end - begin), part
                )
            if first:
                for stop, gap in ((low, begin - low), (end, high - end)):
                    if gap:
                        out = library.put(out, self._index(prefix, start + stop - low, gap), 0)
        self._out = out

    def result(self) -> Any:
        """All of it; zeros where nothing was added."""
        return self._job.library.full(self._like, self._shape, self._dtype) if self._out is None else self._out

    def _index(self, prefix: tuple[int, ...], start: int, count: int) -> tuple[Any, ...]:
        return (*prefix, *at(self._job.axes.rows, slice(start, start + count)))


LEAST = 1 << 17
"""Of so many rows, those of all heads, each half is enough for all multiprocessors."""


def own_parts(rows: int, of_all_heads: int) -> list[slice]:
    """A rank's rows, in the order in which they are computed over its own keys where others' are on their way."""
    if of_all_heads < LEAST:
        return [slice(0, rows)]
    return [slice(rows // 2, rows), slice(0, rows // 2)]


def _beyond(runs: Runs, longest: int) -> Run:
    """A run of as many positions as a shard is shorter than the longest, which nobody owns."""
    return (NOBODY, NOBODY + longest - length(runs))


def ready(x: Any) -> Pending:
    return lambda: x


def named(wrt: Sequence[str]) -> list[int]:
    """Which of the arrays are differentiated by."""
    return [k for k in range(len(NAMES)) if NAMES[k] in wrt]


def saved_rows(grad: Any, rows: KLForwardRows[Any]) -> list[Any]:
    """What a backward reads, in the order of the operation's record."""
    return [grad, rows.teacher_lse, rows.student_lse, rows.kl, rows.moments]


def _stat_dtype(inputs: Sequence[Any]) -> str:
    return "float64" if any("float64" in str(x.dtype) for x in inputs) else "float32"


def whole_runs(owners: tuple[Runs, ...]) -> Runs:
    total = sum(map(length, owners))
    return ((0, total),) if total else ()


def parts_of(job: Job, inputs: Sequence[Any]) -> list[tuple[Job, list[Any]]]:
    """The job by groups of key heads, with the arrays of each."""
    axis = job.axes.heads
    if job.groups == 1 or axis is None:
        return [(job, list(inputs))]
    heads, found = inputs[2].shape[axis], []
    for group in range(job.groups):
        part = [heads_of(x, axis, group, job.groups) for x in inputs]
        first, last = (heads * i // job.groups for i in (group, group + 1))
        found.append((replace(job, whole=job.whole.of_heads(first, last)), part))
    return found


def heads_of(x: Any, axis: int, group: int, groups: int) -> Any:
    each = x.shape[axis] // groups
    return x[at(axis, slice(group * each, (group + 1) * each))]


def some_heads(job: Job, heads: int, rank: int) -> Job:
    """The job of the heads that a rank has."""
    if job.ranks.size == 1:
        return job
    each = heads // job.ranks.size
    return replace(job, whole=job.whole.of_heads(rank * each, (rank + 1) * each))

"""Four ways to bring rows and keys together, one mathematics.

Each is a forward that leaves the results of the rank's own rows, and a backward that leaves the gradients of its own
shards, in a program that all ranks run: collectives outside, and what a rank computes by itself inside of `here`, which
is given its number. Shards travel as long as the longest of them.

    a2a                 rows and keys of whole heads: everything is exchanged so that each rank has all of some heads
    all_gather          own rows, all keys: keys are gathered, and gradients of keys summed and scattered
    all_gather_queries  all rows, own keys: queries are gathered, row states merged, gradients of queries scattered
    p2p                 own rows, keys that come around a ring shard by shard, with their gradients on the way back
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

from ..call import Call
from ..results import KLForwardRows
from ..rules.divergences import DIVERGENCES
from .blocks import Block, Whole
from .engine import KEYS, NAMES, QUERIES, Engine, call_of
from .library import Library, at
from .ranks import Pending, Ranks
from .shards import Run, Runs, in_order, length, starts_of
from .states import KLState, finish_kl_state, merge_kl_states, state_of_rows

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

    block: Block
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

    def pieces(self, rank: int) -> list[Piece]:
        """All that a rank computes, of the arrays that it has then: whole ones, but for its own shards."""
        rows, keys = _whole(self.rows), _whole(self.keys)
        if self.strategy == "all_gather":
            return list(self.calls(self.rows[rank], keys))
        if self.strategy == "all_gather_queries":
            return list(self.calls(rows, self.keys[rank]))
        if self.strategy == "p2p":
            held = [(rank - step) % self.ranks.size for step in range(self.ranks.size)]
            return [piece for holder in held for piece in self.calls(self.rows[rank], self.keys[holder])]
        return list(self.calls(rows, keys))

    def stand_ins(self, rank: int, inputs: Sequence[Any]) -> Iterator[Call]:
        """The calls of the plain operation that a rank makes, with stand-ins for arrays."""
        heads = self.axes.heads
        part = self
        if self.strategy == "a2a" and heads is not None:
            part = _some_heads(self, inputs[2].shape[heads], rank)
        for piece in part.pieces(rank):
            rows, keys = (x[1] - x[0] for x in (piece.block.rows, piece.block.keys))
            shapes = [list(self.extended(x, rows if i in QUERIES else keys)) for i, x in enumerate(inputs)]
            for shape in shapes:
                if heads is not None:
                    shape[heads] //= self.ranks.size if self.strategy == "a2a" else self.groups
            arrays = [SimpleNamespace(shape=tuple(shape), dtype=x.dtype) for shape, x in zip(shapes, inputs)]
            yield self.call_of(tuple(arrays), piece)

    @property
    def some_keys(self) -> bool:
        """Whether its calls have some of the keys of their rows."""
        return self.strategy in MERGING

    @property
    def moments(self) -> int:
        """How many moments its calls leave of a row."""
        divergence = DIVERGENCES[self.whole.options.divergence]
        return divergence.state_floats if self.some_keys else divergence.moments

    def calls(self, rows: Runs, keys: Runs) -> Iterator[Piece]:
        """All that there is to compute of a shard of rows and a shard of keys."""
        for row_run, row_start in zip(rows, starts_of(rows)):
            for key_run, key_start in zip(keys, starts_of(keys)):
                for block in self.whole.blocks(row_run, key_run):
                    yield Piece(block, _moved(block.rows, row_run, row_start), _moved(block.keys, key_run, key_start))

    def cut(self, x: Any, where: slice) -> Any:
        """Some rows or keys of an array."""
        return x if where == slice(0, x.shape[self.axes.rows]) else x[at(self.axes.rows, where)]

    def cut_rows(self, rows: KLForwardRows[Any], where: slice) -> KLForwardRows[Any]:
        """The same of row results."""
        return KLForwardRows(*(None if x is None else self.cut(x, where) for x in rows))

    def arrays(self, inputs: Sequence[Any], call: Piece) -> tuple[Any, ...]:
        """The operands of a call."""
        return tuple(self.cut(x, call.rows if i in QUERIES else call.keys) for i, x in enumerate(inputs))

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
        if (direct := self.ranks.gather_in_order(xs, axis, owners)) is not None:
            return direct
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
        return self.ranks.reduce_scatter(x) if self.ranks.size > 1 else _ready(x[0])

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
        for where, rows in found:
            there = [x for x in rows if x is not None]
            outs = [self.library.put(out, at(self.axes.rows, where), x) for out, x in zip(outs, there, strict=True)]
        return KLForwardRows(outs[0], outs[1], outs[2], moments=outs[3] if moments else None)

    def as_call(self, inputs: Sequence[Any], call: Piece) -> Call:
        """A call of the plain operation."""
        return self.call_of(self.arrays(inputs, call), call)

    def call_of(self, arrays: tuple[Any, ...], piece: Piece) -> Call:
        """A call of the plain operation with these arrays."""
        wide = SUMMED[self.strategy] if self.ranks.size > 1 else ""
        return call_of(arrays, piece.block.options, self.some_keys, wide)

    def computed(self, calls: Iterable[Piece], inputs: Sequence[Any]) -> KLForwardRows[Any]:
        """The row results of a shard of rows."""
        return self.rows_of([(c.rows, self.engine.forward(self.as_call(inputs, c))) for c in calls], inputs)

    def state(self, inputs: Sequence[Any], rows: Runs, keys: Runs) -> KLState:
        """What a shard of keys contributes to a shard of rows."""
        states = []
        for run, start in zip(keys, starts_of(keys)):
            here = [
                x if i in QUERIES else self.cut(x, slice(start, start + run[1] - run[0])) for i, x in enumerate(inputs)
            ]
            calls = list(self.calls(rows, (run,)))
            if calls:
                states.append(state_of_rows(self.computed(calls, here)))
        if not states:
            return state_of_rows(self.rows_of([], inputs))
        return states[0] if len(states) == 1 else merge_kl_states(*states)

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
        dtype = like.dtype if exact else _sum_dtype(like)
        return Total(self, like, tuple(like.shape), dtype, ((), (0, size), 0), whole=exact or self.ranks.size == 1)

    def scattered(self, like: Any) -> Total:
        """Of gradients of all keys, as every rank's shard of it: (size, ...)."""
        longest = max(map(length, self.keys))
        places = [
            ((rank,), run, start)
            for rank, runs in enumerate(self.keys)
            for run, start in zip((*runs, _beyond(runs, longest)), (*starts_of(runs), length(runs)))
        ]
        shape = (self.ranks.size, *self.extended(like, longest))
        return Total(self, like, shape, _sum_dtype(like), *places)

    def extended(self, x: Any, size: int) -> tuple[int, ...]:
        """The shape of an array with so many rows or keys."""
        return (*x.shape[: self.axes.rows], size, *x.shape[self.axes.rows + 1 :])


Place = tuple[tuple[int, ...], Run, int]
"""Where a run of positions has its place: the first indices, the run, and where along the axis it begins there."""


class Total:
    """A sum of gradients of parts of rows or keys, each added where it belongs. The first is copied, and only what it
    leaves is cleared."""

    def __init__(
        self, job: Job, like: Any, shape: tuple[int, ...], dtype: Any, *places: Place, whole: bool = False
    ) -> None:
        """`whole`: one part that is all of it may be the total itself."""
        self._job, self._like, self._shape, self._dtype, self._places, self._whole = (
            job,
            like,
            shape,
            dtype,
            places,
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
        for prefix, (low, high), start in self._places:
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


def _beyond(runs: Runs, longest: int) -> Run:
    """A run of as many positions as a shard is shorter than the longest, which nobody owns."""
    return (NOBODY, NOBODY + longest - length(runs))


def _ready(x: Any) -> Pending:
    return lambda: x


def _moved(where: Run, run: Run, start: int) -> slice:
    return slice(start + where[0] - run[0], start + where[1] - run[0])


def _wanted(wrt: Sequence[str]) -> list[int]:
    """Which of the arrays are differentiated by."""
    return [k for k in range(len(NAMES)) if NAMES[k] in wrt]


def _saved(grad: Any, rows: KLForwardRows[Any]) -> list[Any]:
    """What a backward reads, in the order of the operation's record."""
    return [grad, rows.teacher_lse, rows.student_lse, rows.kl, rows.moments]


def _stat_dtype(inputs: Sequence[Any]) -> str:
    return "float64" if any("float64" in str(x.dtype) for x in inputs) else "float32"


def _sum_dtype(x: Any) -> str:
    return "float64" if "float64" in str(x.dtype) else "float32"


def _whole(owners: tuple[Runs, ...]) -> Runs:
    total = sum(map(length, owners))
    return ((0, total),) if total else ()


class Strategy(NamedTuple):
    """A forward and its backward. The forward returns what it has gathered too, a flat tuple; where the backward is
    given None in its place, that is gathered again."""

    forward: Callable[[Job, Sequence[Any]], tuple[KLForwardRows[Any], Any]]
    backward: Callable[[Job, Any, Sequence[Any], KLForwardRows[Any], Any, tuple[str, ...]], tuple[Any, ...]]


# Own rows, all keys.


def _groups(job: Job, inputs: Sequence[Any]) -> list[tuple[Job, list[Any]]]:
    """The job by groups of key heads, with the arrays of each."""
    axis = job.axes.heads
    if job.groups == 1 or axis is None:
        return [(job, list(inputs))]
    heads, found = inputs[2].shape[axis], []
    for group in range(job.groups):
        part = [_heads(x, axis, group, job.groups) for x in inputs]
        first, last = (heads * i // job.groups for i in (group, group + 1))
        found.append((replace(job, whole=job.whole.of_heads(first, last)), part))
    return found


def _heads(x: Any, axis: int, group: int, groups: int) -> Any:
    each = x.shape[axis] // groups
    return x[at(axis, slice(group * each, (group + 1) * each))]


def _gathered(parts: list[tuple[Job, list[Any]]], kept: Any) -> Iterator[tuple[Job, list[Any]]]:
    """Each group with all its keys; those of the next are on their way meanwhile."""
    if kept is not None:
        for i, (job, inputs) in enumerate(parts):
            yield job, [inputs[0], kept[2 * i], inputs[2], kept[2 * i + 1]]
        return

    def start(i: int) -> Callable[[], list[Any]]:
        job, inputs = parts[i]
        return job.gather([inputs[k] for k in KEYS], job.keys)

    pending = start(0)
    for i, (job, inputs) in enumerate(parts):
        now, pending = pending, start(i + 1) if i + 1 < len(parts) else pending
        teacher_k, student_k = now()
        yield job, [inputs[0], teacher_k, inputs[2], student_k]


def _all_gather_forward(job: Job, inputs: Sequence[Any]) -> tuple[KLForwardRows[Any], Any]:
    kept: list[Any] = []
    found = []
    for part, arrays in _gathered(_groups(job, inputs), None):
        kept += [arrays[1], arrays[3]]

        def rows(rank: int, part: Job = part, arrays: list[Any] = arrays) -> KLForwardRows[Any]:
            return part.computed(part.calls(job.rows[rank], _whole(job.keys)), arrays)

        found.append(job.ranks.here(rows))
    if len(found) == 1:
        return found[0], tuple(kept)
    assert job.axes.heads is not None
    joined = [None if x[0] is None else job.library.joined(x, job.axes.heads) for x in zip(*found)]
    return KLForwardRows(*joined), tuple(kept)


def _all_gather_backward(
    job: Job, grad: Any, inputs: Sequence[Any], results: KLForwardRows[Any], kept: Any, wrt: tuple[str, ...]
) -> tuple[Any, ...]:
    heads, parts, alone = job.axes.heads, _groups(job, inputs), job.ranks.size == 1
    wanted, saved = _wanted(wrt), _saved(grad, results)
    done: list[dict[int, Pending]] = []
    for i, (part, arrays) in enumerate(_gathered(parts, kept)):
        some = saved
        if heads is not None and len(parts) > 1:
            some = [None if x is None else _heads(x, heads, i, len(parts)) for x in saved]

        def compute(rank: int, part: Job = part, arrays: list[Any] = arrays, some: list[Any] = some) -> dict[int, Any]:
            totals = {
                k: part.total(arrays[k], exact=True) if k in QUERIES or alone else part.scattered(arrays[k])
                for k in wanted
            }
            found = part.gradients(some, arrays, (job.rows[rank], _whole(job.keys)), totals)
            return {k: part.sent(x, job.keys, job.axes.rows) if k in KEYS and alone else x for k, x in found.items()}

        grads = job.ranks.here(compute)
        done.append({k: job.summed(x) if k in KEYS else _ready(x) for k, x in grads.items()})
    outs: list[Any] = [None] * 4
    for k in done[0]:
        pieces = [x[k]() for x in done]
        if k in KEYS:
            pieces = [job.own(x, job.keys, inputs[k]) for x in pieces]
        outs[k] = pieces[0] if heads is None else job.library.joined(pieces, heads)
    return tuple(outs)


# All rows, own keys.


def _queries(job: Job, inputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(job.gather([inputs[i] for i in QUERIES], job.rows)())


def _queries_forward(job: Job, inputs: Sequence[Any]) -> tuple[KLForwardRows[Any], Any]:
    queries = _queries(job, inputs)
    arrays = [queries[0], inputs[1], queries[1], inputs[3]]
    rows = _whole(job.rows)

    def partial(rank: int) -> Any:
        state = job.state(arrays, rows, job.keys[rank])
        return job.sent(job.library.stacked(state), job.rows, job.axes.rows + 1)

    mine = job.ranks.all_to_all(job.ranks.here(partial)) if job.ranks.size > 1 else job.ranks.here(partial)
    merged = merge_kl_states(*(KLState(*mine[i]) for i in range(job.ranks.size)))
    own = KLState(*(job.own(x, job.rows, x) for x in merged))
    return KLForwardRows(*finish_kl_state(own)), queries


def _queries_backward(
    job: Job, grad: Any, inputs: Sequence[Any], results: KLForwardRows[Any], kept: Any, wrt: tuple[str, ...]
) -> tuple[Any, ...]:
    if kept is None:
        kept = _queries(job, inputs)
    arrays = [kept[0], inputs[1], kept[1], inputs[3]]
    vectors = [job.library.cast(x, results.kl.dtype) for x in _saved(grad, results)[:4]]
    saved = [*job.gather(vectors, job.rows)(), None]

    def compute(rank: int) -> dict[int, Any]:
        totals = {k: job.total(arrays[k], exact=k in KEYS) for k in _wanted(wrt)}
        found = job.gradients(saved, arrays, (_whole(job.rows), job.keys[rank]), totals)
        return {k: job.sent(x, job.rows, job.axes.rows) if k in QUERIES else x for k, x in found.items()}

    found = job.ranks.here(compute)
    pending = {k: job.summed(x) for k, x in found.items() if k in QUERIES}
    outs: list[Any] = [None] * 4
    for k, x in found.items():
        outs[k] = job.own(pending[k](), job.rows, inputs[k]) if k in QUERIES else x
    return tuple(outs)


# Own rows, keys around a ring.


def _ring_forward(job: Job, inputs: Sequence[Any]) -> tuple[KLForwardRows[Any], Any]:
    held = tuple(job.padded(inputs[k], job.keys) for k in KEYS)
    state: KLState | None = None
    for step in range(job.ranks.size):
        coming = job.ranks.shift(held) if step + 1 < job.ranks.size else None

        def partial(rank: int, step: int = step, held: Any = held, before: Any = state) -> KLState:
            holder = (rank - step) % job.ranks.size
            found = job.state([inputs[0], held[0], inputs[2], held[1]], job.rows[rank], job.keys[holder])
            return found if before is None else merge_kl_states(before, found)

        state = job.ranks.here(partial)
        held = coming() if coming else held
    assert state is not None
    return KLForwardRows(*finish_kl_state(state)), None


def _ring_backward(
    job: Job, grad: Any, inputs: Sequence[Any], results: KLForwardRows[Any], kept: Any, wrt: tuple[str, ...]
) -> tuple[Any, ...]:
    size, axis = job.ranks.size, job.axes.rows
    held = tuple(job.padded(inputs[k], job.keys) for k in KEYS)
    wanted = _wanted(wrt)
    keys = [k for k in wanted if k in KEYS]
    sums: dict[int, Any] = {}
    for step in range(size):
        coming = job.ranks.shift(held) if step + 1 < size else None

        def compute(rank: int, step: int = step, held: Any = held, sums: Any = sums) -> dict[int, Any]:
            arrays = [inputs[0], held[0], inputs[2], held[1]]
            totals = {k: job.total(arrays[k]) for k in wanted}
            for k, x in sums.items():
                totals[k].add(slice(0, x.shape[axis]), x)
            runs = job.rows[rank], job.keys[(rank - step) % size]
            return job.gradients(_saved(grad, results), arrays, runs, totals)

        sums = job.ranks.here(compute)
        if size > 1 and keys:  # at the end of the round they are at home
            back = job.ranks.shift(tuple(sums[k] for k in keys))()
            sums = {**sums, **dict(zip(keys, back, strict=True))}
        held = coming() if coming else held
    outs: list[Any] = [None] * 4
    for k in wanted:
        cut = job.own(sums[k], job.keys, inputs[k]) if k in KEYS else sums[k]
        outs[k] = job.library.cast(cut, inputs[k].dtype)
    return tuple(outs)


# Whole heads.


def _to_heads(job: Job, x: Any, owners: tuple[Runs, ...]) -> Any:
    """All positions of this rank's heads, of all heads of its positions."""
    size, heads = job.ranks.size, job.axes.heads
    if size == 1 or heads is None:
        return in_order(job.library, [x], job.axes.rows, owners)
    x = job.padded(x, owners)
    found = job.ranks.all_to_all(job.library.stacked([_heads(x, heads, i, size) for i in range(size)]))
    return in_order(job.library, found, job.axes.rows, owners)


def _to_rows(job: Job, x: Any, owners: tuple[Runs, ...]) -> Any:
    """The way back."""
    heads = job.axes.heads
    parts = job.sent(x, owners, job.axes.rows)
    if job.ranks.size == 1 or heads is None:
        return job.own(parts[0], owners, x)
    found = job.ranks.all_to_all(parts)
    return job.own(job.library.joined([found[i] for i in range(job.ranks.size)], heads), owners, x)


def _some_heads(job: Job, heads: int, rank: int) -> Job:
    """The job of the heads that a rank has."""
    if job.ranks.size == 1:
        return job
    each = heads // job.ranks.size
    return replace(job, whole=job.whole.of_heads(rank * each, (rank + 1) * each))


def _a2a_forward(job: Job, inputs: Sequence[Any]) -> tuple[KLForwardRows[Any], Any]:
    arrays = [_to_heads(job, x, job.rows if i in QUERIES else job.keys) for i, x in enumerate(inputs)]
    heads = 0 if job.axes.heads is None else inputs[2].shape[job.axes.heads]

    def compute(rank: int) -> KLForwardRows[Any]:
        part = _some_heads(job, heads, rank)
        return part.computed(part.calls(_whole(job.rows), _whole(job.keys)), arrays)

    rows = job.ranks.here(compute)
    results = KLForwardRows(*(None if x is None else _to_rows(job, x, job.rows) for x in rows))
    return results, (*arrays, *rows)


def _a2a_backward(
    job: Job, grad: Any, inputs: Sequence[Any], results: KLForwardRows[Any], kept: Any, wrt: tuple[str, ...]
) -> tuple[Any, ...]:
    if kept is None:
        arrays = [_to_heads(job, x, job.rows if i in QUERIES else job.keys) for i, x in enumerate(inputs)]
        kept = (*arrays, *(None if x is None else _to_heads(job, x, job.rows) for x in results))
    arrays, rows = list(kept[:4]), KLForwardRows(*kept[4:])
    whole_grad = _to_heads(job, grad, job.rows)
    heads = 0 if job.axes.heads is None else inputs[2].shape[job.axes.heads]

    def compute(rank: int) -> dict[int, Any]:
        part = _some_heads(job, heads, rank)
        totals = {k: part.total(arrays[k], exact=True) for k in _wanted(wrt)}
        return part.gradients(_saved(whole_grad, rows), arrays, (_whole(job.rows), _whole(job.keys)), totals)

    grads = job.ranks.here(compute)
    outs: list[Any] = [None] * 4
    for k, x in grads.items():
        outs[k] = _to_rows(job, x, job.rows if k in QUERIES else job.keys)
    return tuple(outs)


TABLE = {
    "a2a": Strategy(_a2a_forward, _a2a_backward),
    "all_gather": Strategy(_all_gather_forward, _all_gather_backward),
    "all_gather_queries": Strategy(_queries_forward, _queries_backward),
    "p2p": Strategy(_ring_forward, _ring_backward),
}

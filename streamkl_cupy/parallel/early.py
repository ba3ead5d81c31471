"""Keys gathered shard by shard: what needs nobody else's is computed first, while others are on their way.

Forward, a rank computes the states of its rows over its own keys, starts to send these and to receive those of others
when some of that is under way, and joins what each shard adds when it has come. Backward it is the other way round:
first the gradients of the keys of others, each sent home as soon as it is there, at last those of the rank's own, to
which what has come from others is added in a fixed order. Of keys that no row of a rank sees nothing travels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..results import KLForwardRows
from .engine import KEYS, NAMES, QUERIES
from .job import Job, Piece, heads_of, named, own_parts, parts_of, saved_rows
from .joining import joined, over
from .libraries import at
from .libraries.base import Part
from .ranks import Starting
from .shards import part_of

Arriving = Callable[[], list[Any]]
"""Teacher and student keys of a rank, or nothing where no row sees them; call for them, and to let go what was sent."""


class Step(NamedTuple):
    """What a rank brings and gives in one of size - 1 steps."""

    source: int
    """Whose keys it brings."""
    target: int
    """Who brings its own."""
    theirs: slice | None
    """What its rows see of the source's keys."""
    mine: slice | None
    """What the target's rows see of its own."""
    returned: slice | None
    """Of what it brings, that whose gradients go back."""
    added: slice | None
    """Of its own keys, those whose gradients come from the target."""
    pieces: tuple[Piece, ...]
    """Its calls on what it brings."""


def steps(job: Job) -> tuple[Step, ...]:
    """Of this rank, in their order."""

    def found() -> Iterator[Step]:
        rank, size = job.ranks.rank, job.ranks.size
        for i in range(1, size):
            source, target = (rank - i) % size, (rank + i) % size
            theirs = job.seen(rank, source)
            first = 0 if theirs is None else theirs.start
            pieces = [
                x._replace(keys=slice(x.keys.start - first, x.keys.stop - first))
                for x in job.calls(job.rows[rank], job.keys[source])
            ]
            back = job.seen(rank, source, tight=True)
            if back is not None:
                back = slice(back.start - first, back.stop - first)
            added = job.seen(target, rank, tight=True)
            yield Step(source, target, theirs, job.seen(target, rank), back, added, tuple(pieces))

    return job.known("steps", lambda: tuple(found()))


def _ready(job: Job, keys: Sequence[Any]) -> list[Callable[[], Arriving]]:
    """What the rank's rows see of the others' keys, ready to be brought; call to start."""
    found: list[Callable[[], Arriving]] = []
    for step in steps(job):
        room, sent = {}, {}
        if step.theirs is not None:
            count = step.theirs.stop - step.theirs.start
            room[step.source] = [job.library.empty(x, job.extended(x, count), x.dtype) for x in keys]
        if step.mine is not None:
            sent[step.target] = [job.cut(x, step.mine) for x in keys]
        found.append(partial(_started, job.ranks.post(sent, room), step.source))
    return found


def _started(start: Starting, source: int) -> Arriving:
    arrived = start()
    return lambda: arrived().get(source, [])


def _begun(job: Job, inputs: Sequence[Any]) -> list[Arriving]:
    return [start() for start in _ready(job, [inputs[k] for k in KEYS])]


def _there(keys: list[Any]) -> Arriving:
    return lambda: keys


def _own(job: Job, arrays: Sequence[Any], where: slice) -> KLForwardRows[Any]:
    """Some of the rank's rows over its own keys."""
    rank = job.ranks.rank
    here = [job.cut(x, where) if k in QUERIES else x for k, x in enumerate(arrays)]
    return over(job, here, part_of(job.rows[rank], where), job.keys[rank])


def _beside(job: Job, parts: dict[int, KLForwardRows[Any]]) -> KLForwardRows[Any]:
    """Parts of rows as one, by where they begin."""
    rows = zip(*(parts[first] for first in sorted(parts)))
    return KLForwardRows(*(None if x[0] is None else job.library.joined(x, job.axes.rows) for x in rows))


def forward(job: Job, inputs: Sequence[Any]) -> tuple[KLForwardRows[Any], Any]:
    """Rows over all keys, and the keys of others.

    On a GPU what is launched first runs while the host still asks a transport to start, and a transport gets to
    multiprocessors when no block of a kernel is left to be started, or when none runs. So it is asked after the later
    half of the own rows, which have the longer work under a causal mask, for none of which it waits, and before the
    others: it gets in between, and beside them.
    """
    parts = parts_of(job, inputs)
    kept: list[Any] = []
    found = []

    def ready_of(i: int) -> list[Callable[[], Arriving]]:
        return _ready(parts[i][0], [parts[i][1][k] for k in KEYS]) if i < len(parts) else []

    ready = ready_of(0)
    coming: list[Arriving] = []
    for i, (part, arrays) in enumerate(parts):
        shape = arrays[2].shape
        first, *others = own_parts(shape[part.axes.rows], math.prod(shape[:-1]))
        more = ready_of(i + 1)
        own = {first.start: _own(part, arrays, first)}
        now = coming or [start() for start in ready]
        coming = [start() for start in more]
        own |= {x.start: _own(part, arrays, x) for x in others}
        rows = _beside(part, own)
        del own
        for step, arrive in zip(steps(part), now):
            if keys := arrive():
                kept += keys
                here = (arrays[0], keys[0], arrays[2], keys[1])
                for piece in step.pieces:
                    rows = joined(part, rows, part.engine.forward(part.as_call(here, piece)), piece.rows)
        found.append(KLForwardRows(rows.kl, rows.teacher_lse, rows.student_lse))
        del rows  # with the states, before the next group
    if len(found) == 1:
        return found[0], tuple(kept)
    assert job.axes.heads is not None
    heads = [job.library.joined(x, job.axes.heads) for x in zip(*(x[:3] for x in found))]
    return KLForwardRows(*heads), tuple(kept)


class Sums:
    """Sums of gradients of parts of rows or keys. Parts that are alike are added up as they come, and others to what is
    all of it, or to zeros, in the order in which they came first."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._parts: dict[tuple[int, int], Any] = {}

    def add(self, where: slice, x: Any) -> None:
        """A part, which becomes the sum's own."""
        key, library = (where.start, where.stop), self._job.library
        before = self._parts.get(key)
        self._parts[key] = x if before is None else library.add(before, (), x)

    def total(self, like: Any, size: int, first: int = 0) -> tuple[Any, list[tuple[tuple[Any, ...], Any]]]:
        """`size` rows or keys of arrays like one, from the first on, which are all, and what is to be added to them."""
        job, parts = self._job, self._parts
        whole = parts.get((first, first + size))
        rest = [(at(job.axes.rows, slice(i - first, j - first)), x) for (i, j), x in parts.items() if x is not whole]
        if whole is None:
            whole = job.library.full(like, job.extended(like, size), job.sum_dtype(like))
        return whole, rest


def backward(
    job: Job, grad: Any, inputs: Sequence[Any], results: KLForwardRows[Any], kept: Any, wrt: tuple[str, ...]
) -> tuple[Any, ...]:
    """Gradients of the rank's shards."""
    heads, parts, wanted = job.axes.heads, parts_of(job, inputs), named(wrt)
    saved, left = saved_rows(grad, results), None if kept is None else list(kept)
    found = []
    coming = [] if left is not None else _begun(*parts[0])
    for i, (part, arrays) in enumerate(parts):
        now = coming if left is None else _kept(part, left)
        if left is None and i + 1 < len(parts):
            coming = _begun(*parts[i + 1])
        some = saved
        if heads is not None and len(parts) > 1:
            some = [None if x is None else heads_of(x, heads, i, len(parts)) for x in saved]
        found.append(_gradients(part, some, arrays, now, wanted))
    outs: list[Any] = [None] * len(NAMES)
    for k in wanted:
        pieces = [x[k] for x in found]
        outs[k] = pieces[0] if heads is None else job.library.joined(pieces, heads)
    return tuple(outs)


def _kept(job: Job, left: list[Any]) -> list[Arriving]:
    """What a forward has brought, in its order."""
    return [_there([left.pop(0) for _ in KEYS] if step.theirs is not None else []) for step in steps(job)]


def _gradients(
    job: Job,
    saved: Sequence[Any],
    arrays: Sequence[Any],
    coming: Sequence[Arriving],
    wanted: Sequence[int],
) -> dict[int, Any]:
    rank, axis, library = job.ranks.rank, job.axes.rows, job.library
    wrt, keys = tuple(NAMES[k] for k in wanted), [k for k in wanted if k in KEYS]
    sums = {k: Sums(job) for k in wanted}

    def launch(piece: Piece, operands: Sequence[Any], sums: dict[int, Sums]) -> None:
        rows = tuple(None if x is None else job.cut(x, piece.rows) for x in saved)
        grads = job.engine.backward(rows, job.as_call(operands, piece), wrt)
        for k in wanted:
            sums[k].add(piece.rows if k in QUERIES else piece.keys, grads[k])

    posted = []
    for step, arrive in zip(steps(job), coming):
        sent, room = {}, {}
        if found := arrive():
            here = sums | {k: Sums(job) for k in keys}
            for piece in step.pieces:
                launch(piece, (arrays[0], found[0], arrays[2], found[1]), here)
            if keys:
                sent[step.source] = [_part(job, here[k], arrays[k], step.returned) for k in keys]
        if keys and step.added is not None:
            like, count = [arrays[k] for k in keys], step.added.stop - step.added.start
            room[step.target] = [library.empty(x, job.extended(x, count), job.sum_dtype(x)) for x in like]
        if keys:
            posted.append((step, job.ranks.post(sent, room)()))
    for piece in job.calls(job.rows[rank], job.keys[rank]):
        launch(piece, arrays, sums)

    def settled(k: int, more: Iterable[Part] = ()) -> Any:
        whole, parts = sums[k].total(arrays[k], arrays[k].shape[axis])
        return library.added_up(whole, [*parts, *more], arrays[k].dtype)

    grads = {k: settled(k) for k in wanted if k in QUERIES}  # which wait for nobody
    arrived = [(step.added, dict(zip(keys, post().get(step.target, [])))) for step, post in posted]
    for k in keys:
        grads[k] = settled(k, [(at(axis, part), xs[k]) for part, xs in arrived if part is not None])
    return grads


def _part(job: Job, sums: Sums, like: Any, where: slice | None) -> Any:
    """A part of sums in float32, to be sent."""
    assert where is not None
    whole, parts = sums.total(like, where.stop - where.start, where.start)
    return job.library.added_up(whole, parts, whole.dtype)

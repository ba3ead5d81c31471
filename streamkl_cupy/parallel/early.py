"""Keys gathered shard by shard: what needs nobody else's is computed first, while others are on their way.

Forward, a rank starts to send its keys and to receive those of others, computes the state of its rows over its own keys
meanwhile, and joins what each shard adds when it has come. Backward it is the other way round: first the gradients of
the keys of others, each sent home as soon as it is there, at last those of the rank's own, to which what has come from
others is added in a fixed order. Of keys that no row of a rank sees nothing travels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..results import KLForwardRows
from .engine import KEYS, NAMES, QUERIES
from .job import Job, heads_of, named, parts_of, saved_rows
from .joining import joined
from .library import at
from .ranks import Fork

Arriving = Callable[[], list[Any]]
"""Teacher and student keys of a rank, or nothing where no row sees them; call for them, and to let go what was sent."""


def _steps(job: Job) -> Iterator[tuple[int, int]]:
    """By steps, whose keys a rank brings, and who brings its own."""
    rank, size = job.ranks.rank, job.ranks.size
    for step in range(1, size):
        yield (rank - step) % size, (rank + step) % size


def _start(job: Job, keys: Sequence[Any]) -> list[tuple[int, Arriving]]:
    """Start to bring what the rank's rows see of the others' keys."""
    rank, coming = job.ranks.rank, []
    for source, target in _steps(job):
        theirs, mine = job.seen(rank, source), job.seen(target, rank)
        room = []
        if theirs is not None:
            room = [job.library.empty(x, job.extended(x, theirs.stop - theirs.start), x.dtype) for x in keys]
        sent = [] if mine is None else [job.cut(x, mine) for x in keys]
        arrived = job.ranks.post({target: sent} if sent else {}, {source: room} if room else {})
        coming.append((source, _of(arrived, source)))
    return coming


def _of(arrived: Callable[[], dict[int, list[Any]]], source: int) -> Arriving:
    return lambda: arrived().get(source, [])


def _there(keys: list[Any]) -> Arriving:
    return lambda: keys


def forward(job: Job, inputs: Sequence[Any]) -> tuple[KLForwardRows[Any], Any]:
    """Rows over all keys, and the keys of others."""
    rank, parts = job.ranks.rank, parts_of(job, inputs)
    kept: list[Any] = []
    found = []
    coming = _start(parts[0][0], [parts[0][1][k] for k in KEYS])
    for i, (part, arrays) in enumerate(parts):
        now = coming
        if i + 1 < len(parts):
            coming = _start(parts[i + 1][0], [parts[i + 1][1][k] for k in KEYS])
        fork = job.ranks.fork(arrays[0])
        first, *others = part.layers(part.rows[rank], part.keys[rank])
        rows = part.computed(first, arrays)
        # Of each layer and shard what it adds to which rows: nobody waits for anybody before all are launched.
        more = [(x.rows, part.engine.forward(part.as_call(arrays, x))) for x in itertools.chain(*others)]
        for (source, arrive), lane in zip(now, itertools.cycle((fork, Fork()))):
            with lane:
                if not (keys := arrive()):
                    continue
                kept += keys
                for piece, operands in _pieces(part, arrays, source, keys):
                    more.append((piece.rows, part.engine.forward(piece.call._replace(operands=operands))))
        fork.join()
        for where, some in more:
            rows = joined(part, rows, some, where)
        found.append(KLForwardRows(rows.kl, rows.teacher_lse, rows.student_lse))
    if len(found) == 1:
        return found[0], tuple(kept)
    assert job.axes.heads is not None
    heads = [job.library.joined(x, job.axes.heads) for x in zip(*(x[:3] for x in found))]
    return KLForwardRows(*heads), tuple(kept)


def _pieces(job: Job, arrays: Sequence[Any], source: int, keys: Sequence[Any]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The calls on the rank's rows and on what has come of a shard of keys, with their operands."""
    rank = job.ranks.rank
    there = job.seen(rank, source)
    assert there is not None
    for piece in job.calls(job.rows[rank], job.keys[source]):
        moved = piece._replace(keys=slice(piece.keys.start - there.start, piece.keys.stop - there.start))
        yield moved, job.arrays([arrays[0], keys[0], arrays[2], keys[1]], moved)


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

    def total(self, like: Any, size: int, *others: Sums) -> tuple[Any, list[tuple[tuple[Any, ...], Any]]]:
        """All of it, and of the others: `size` rows or keys of arrays like one, and what is to be added to parts."""
        job, parts = self._job, [x for sums in (self, *others) for x in sums._parts.items()]
        whole = next((x for key, x in parts if key == (0, size)), None)
        rest = [(at(job.axes.rows, slice(*key)), x) for key, x in parts if x is not whole]
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
    coming = [] if left is not None else _start(parts[0][0], [parts[0][1][k] for k in KEYS])
    for i, (part, arrays) in enumerate(parts):
        now = coming if left is None else _kept(part, left)
        if left is None and i + 1 < len(parts):
            coming = _start(parts[i + 1][0], [parts[i + 1][1][k] for k in KEYS])
        some = saved
        if heads is not None and len(parts) > 1:
            some = [None if x is None else heads_of(x, heads, i, len(parts)) for x in saved]
        found.append(_gradients(part, some, arrays, dict(now), wanted))
    outs: list[Any] = [None] * len(NAMES)
    for k in wanted:
        pieces = [x[k] for x in found]
        outs[k] = pieces[0] if heads is None else job.library.joined(pieces, heads)
    return tuple(outs)


def _kept(job: Job, left: list[Any]) -> list[tuple[int, Arriving]]:
    """What a forward has brought, in its order."""
    found = []
    for source, _ in _steps(job):
        seen = job.seen(job.ranks.rank, source) is not None
        found.append((source, _there([left.pop(0) for _ in KEYS] if seen else [])))
    return found


def _gradients(
    job: Job,
    saved: Sequence[Any],
    arrays: Sequence[Any],
    coming: dict[int, Arriving],
    wanted: Sequence[int],
) -> dict[int, Any]:
    rank, axis, library = job.ranks.rank, job.axes.rows, job.library
    wrt, keys = tuple(NAMES[k] for k in wanted), [k for k in wanted if k in KEYS]
    fork = job.ranks.fork(arrays[0])
    # Launches take turns on two lanes, each with sums of its own, and the last of them is that of the own keys.
    lanes = [(Fork(), {k: Sums(job) for k in wanted}), (fork, {k: Sums(job) for k in wanted})]

    def launch(piece: Any, operands: tuple[Any, ...], sums: dict[int, Sums]) -> None:
        rows = tuple(None if x is None else job.cut(x, piece.rows) for x in saved)
        grads = job.engine.backward(rows, piece.call._replace(operands=operands), wrt)
        for k in wanted:
            sums[k].add(piece.rows if k in QUERIES else piece.keys, grads[k])

    posted = []
    for source, target in _steps(job):
        mine, sent, room = job.seen(target, rank), [], []
        lane, sums = lanes[0]
        with lane:
            if found := coming[source]():
                here = sums | {k: Sums(job) for k in keys}
                for piece, operands in _pieces(job, arrays, source, found):
                    launch(piece, operands, here)
                sent = [_sum(job, here[k], arrays[k], found[0].shape[axis]) for k in keys]
                lanes.reverse()
            if mine is not None:
                like = [arrays[k] for k in keys]
                room = [library.empty(x, job.extended(x, mine.stop - mine.start), job.sum_dtype(x)) for x in like]
            if keys:
                post = job.ranks.post({source: sent} if sent else {}, {target: room} if room else {})
                posted.append((target, mine, post))
    lane, sums = lanes[0]
    with lane:
        for piece in job.calls(job.rows[rank], job.keys[rank]):
            launch(piece, job.arrays(arrays, piece), sums)
    fork.join()
    arrived = [(mine, dict(zip(keys, post().get(target, [])))) for target, mine, post in posted]
    grads = {}
    for k in wanted:
        whole, parts = sums[k].total(arrays[k], arrays[k].shape[axis], lanes[1][1][k])
        if k in KEYS:
            parts += [(at(axis, mine), xs[k]) for mine, xs in arrived if mine is not None]
        grads[k] = library.settled(whole, parts, arrays[k].dtype)
    return grads


def _sum(job: Job, sums: Sums, like: Any, size: int) -> Any:
    """In float32, to be sent."""
    whole, parts = sums.total(like, size)
    return job.library.settled(whole, parts, whole.dtype)

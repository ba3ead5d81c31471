"""Four ways to bring rows and keys together, one mathematics.

Each is a forward that leaves the results of the rank's own rows, and a backward that leaves the gradients of its own
shards.

    a2a                 rows and keys of whole heads: everything is exchanged so that each rank has all of some heads
    all_gather          own rows, all keys: keys are gathered, and gradients of keys summed and scattered
    all_gather_queries  all rows, own keys: queries are gathered, row states merged, gradients of queries scattered
    p2p                 own rows, keys that come around a ring shard by shard, with their gradients on the way back
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from ..results import KLForwardRows
from .early import backward as early_backward
from .early import forward as early_forward
from .engine import KEYS, QUERIES
from .job import Job, heads_of, named, parts_of, ready, saved_rows, some_heads, whole_runs
from .joining import merged, over, states
from .ranks import Pending
from .shards import Runs, in_order


class Strategy(NamedTuple):
    """A forward and its backward. The forward returns what it has gathered too, a flat tuple; where the backward is
    given None in its place, that is gathered again."""

    forward: Callable[[Job, Sequence[Any]], tuple[KLForwardRows[Any], Any]]
    backward: Callable[[Job, Any, Sequence[Any], KLForwardRows[Any], Any, tuple[str, ...]], tuple[Any, ...]]


# Own rows, all keys.


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
    if job.early:
        return early_forward(job, inputs)
    kept: list[Any] = []
    found = []
    for part, arrays in _gathered(parts_of(job, inputs), None):
        kept += [arrays[1], arrays[3]]

        def rows(rank: int, part: Job = part, arrays: list[Any] = arrays) -> KLForwardRows[Any]:
            return part.computed(part.calls(job.rows[rank], whole_runs(job.keys)), arrays)

        found.append(job.ranks.here(rows))
    if len(found) == 1:
        return found[0], tuple(kept)
    assert job.axes.heads is not None
    joined = [None if x[0] is None else job.library.joined(x, job.axes.heads) for x in zip(*found)]
    return KLForwardRows(*joined), tuple(kept)


def _all_gather_backward(
    job: Job, grad: Any, inputs: Sequence[Any], results: KLForwardRows[Any], kept: Any, wrt: tuple[str, ...]
) -> tuple[Any, ...]:
    if job.early:
        return early_backward(job, grad, inputs, results, kept, wrt)
    heads, parts, alone = job.axes.heads, parts_of(job, inputs), job.ranks.size == 1
    wanted, saved = named(wrt), saved_rows(grad, results)
    done: list[dict[int, Pending]] = []
    for i, (part, arrays) in enumerate(_gathered(parts, kept)):
        some = saved
        if heads is not None and len(parts) > 1:
            some = [None if x is None else heads_of(x, heads, i, len(parts)) for x in saved]

        def compute(rank: int, part: Job = part, arrays: list[Any] = arrays, some: list[Any] = some) -> dict[int, Any]:
            totals = {
                k: part.total(arrays[k], exact=True) if k in QUERIES or alone else part.scattered(arrays[k])
                for k in wanted
            }
            found = part.gradients(some, arrays, (job.rows[rank], whole_runs(job.keys)), totals)
            return {k: part.sent(x, job.keys, job.axes.rows) if k in KEYS and alone else x for k, x in found.items()}

        grads = job.ranks.here(compute)
        done.append({k: job.summed(x) if k in KEYS else ready(x) for k, x in grads.items()})
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
    rows = whole_runs(job.rows)

    def partial(rank: int) -> Any:
        found = states(job, over(job, arrays, rows, job.keys[rank]))
        return job.sent(found, job.rows, job.axes.rows)

    mine = job.ranks.here(partial)
    if job.ranks.size > 1:
        mine = job.ranks.all_to_all(mine)
    return merged(job, [mine[i] for i in range(job.ranks.size)], job.rows), queries


def _queries_backward(
    job: Job, grad: Any, inputs: Sequence[Any], results: KLForwardRows[Any], kept: Any, wrt: tuple[str, ...]
) -> tuple[Any, ...]:
    if kept is None:
        kept = _queries(job, inputs)
    arrays = [kept[0], inputs[1], kept[1], inputs[3]]
    vectors = [job.library.cast(x, results.kl.dtype) for x in saved_rows(grad, results)[:4]]
    saved = [*job.gather(vectors, job.rows)(), None]

    def compute(rank: int) -> dict[int, Any]:
        totals = {k: job.total(arrays[k], exact=k in KEYS) for k in named(wrt)}
        found = job.gradients(saved, arrays, (whole_runs(job.rows), job.keys[rank]), totals)
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
    rows: KLForwardRows[Any] | None = None
    for step in range(job.ranks.size):
        coming = job.ranks.shift(held) if step + 1 < job.ranks.size else None

        def further(rank: int, step: int = step, held: Any = held, before: Any = rows) -> KLForwardRows[Any]:
            arrays = [inputs[0], held[0], inputs[2], held[1]]
            return over(job, arrays, job.rows[rank], job.keys[(rank - step) % job.ranks.size], before)

        rows = job.ranks.here(further)
        held = coming() if coming else held
    assert rows is not None
    return KLForwardRows(rows.kl, rows.teacher_lse, rows.student_lse), None


def _ring_backward(
    job: Job, grad: Any, inputs: Sequence[Any], results: KLForwardRows[Any], kept: Any, wrt: tuple[str, ...]
) -> tuple[Any, ...]:
    size, axis = job.ranks.size, job.axes.rows
    held = tuple(job.padded(inputs[k], job.keys) for k in KEYS)
    wanted = named(wrt)
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
            return job.gradients(saved_rows(grad, results), arrays, runs, totals)

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
    found = job.ranks.all_to_all(job.library.stacked([heads_of(x, heads, i, size) for i in range(size)]))
    return in_order(job.library, found, job.axes.rows, owners)


def _to_rows(job: Job, x: Any, owners: tuple[Runs, ...]) -> Any:
    """The way back."""
    heads = job.axes.heads
    parts = job.sent(x, owners, job.axes.rows)
    if job.ranks.size == 1 or heads is None:
        return job.own(parts[0], owners, x)
    found = job.ranks.all_to_all(parts)
    return job.own(job.library.joined([found[i] for i in range(job.ranks.size)], heads), owners, x)


def _a2a_forward(job: Job, inputs: Sequence[Any]) -> tuple[KLForwardRows[Any], Any]:
    arrays = [_to_heads(job, x, job.rows if i in QUERIES else job.keys) for i, x in enumerate(inputs)]
    heads = 0 if job.axes.heads is None else inputs[2].shape[job.axes.heads]

    def compute(rank: int) -> KLForwardRows[Any]:
        part = some_heads(job, heads, rank)
        return part.computed(part.calls(whole_runs(job.rows), whole_runs(job.keys)), arrays)

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
        part = some_heads(job, heads, rank)
        totals = {k: part.total(arrays[k], exact=True) for k in named(wrt)}
        return part.gradients(
            saved_rows(whole_grad, rows), arrays, (whole_runs(job.rows), whole_runs(job.keys)), totals
        )

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

"""Whole arrays of everybody's shards, and sums over ranks of arrays of that size, of which everybody gets a shard."""

from __future__ import annotations

from typing import Any

from .libraries import at, library_named, library_of
from .ranks import Ranks
from .shards import Runs, in_order, length


def gathered(ranks: Ranks, x: Any, axis: int, owners: tuple[Runs, ...]) -> Any:
    """The whole array."""
    library, longest = library_named(library_of("x", x)), max(map(length, owners))
    if x.shape[axis] < longest:
        out = library.full(x, (*x.shape[:axis], longest, *x.shape[axis + 1 :]), x.dtype)
        x = library.put(out, at(axis, slice(0, x.shape[axis])), x)
    return in_order(library, ranks.all_gather(x)(), axis, owners)


def scattered(ranks: Ranks, grad: Any, axis: int, owners: tuple[Runs, ...]) -> Any:
    """This rank's part of the sum over ranks of gradients of the whole array."""
    library, longest = library_named(library_of("grad", grad)), max(map(length, owners))
    wide = library.cast(grad, "float64" if "float64" in str(grad.dtype) else "float32")
    shape = (ranks.size, *grad.shape[:axis], longest, *grad.shape[axis + 1 :])
    sent = library.full(grad, shape, wide.dtype)
    for rank, runs in enumerate(owners):
        start = 0
        for first, last in runs:
            where = at(axis, slice(start, start + last - first))
            sent = library.put(sent, (rank, *where), wide[at(axis, slice(first, last))])
            start += last - first
    found = ranks.reduce_scatter(sent)()
    return library.cast(found[at(axis, slice(0, length(owners[ranks.rank])))], grad.dtype)

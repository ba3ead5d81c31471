"""Who owns which positions of a sequence: runs of positions, in the order in which a shard holds them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arguments import a_kind_of, listed
from .libraries import Library, at, library_named, library_of

Run = tuple[int, int]
Runs = tuple[Run, ...]
"""Of one rank: half-open, in the order of its shard, no two that could be one."""
OWNERSHIPS = ("zigzag", "contiguous")


@dataclass(frozen=True)
class Ownership:
    """Which positions each rank holds, where rows and keys are owned differently or by no rule.

    Args:
        rows: Of each rank, the positions of its query rows as integers, in the order in which it holds them.
        keys: The same of its keys. Default: as the rows.

    Raises:
        ValueError: positions that overlap or leave gaps.

    Example:
        >>> from streamkl_cupy.parallel import Ownership
        >>> Ownership(rows=[[0, 3], [1, 2]], keys=[[0, 1, 2, 3], []])
        Ownership(rows=(((0, 1), (3, 4)), ((1, 3),)), keys=(((0, 4),), ()))
    """

    rows: tuple[Runs, ...]
    keys: tuple[Runs, ...]

    def __init__(self, rows: Sequence[Any], keys: Sequence[Any] | None = None) -> None:
        mine = _runs_of_all("rows", rows)
        object.__setattr__(self, "rows", mine)
        object.__setattr__(self, "keys", mine if keys is None else _runs_of_all("keys", keys))
        if len(self.rows) != len(self.keys):
            raise ValueError(f"rows of {len(self.rows)} ranks, but keys of {len(self.keys)}; both name every rank once")


def positions(total: int, size: int, ownership: Any = "zigzag") -> list[np.ndarray[Any, Any]]:
    """The positions that each rank holds, in the order of its shard.

    Args:
        total: Positions of the whole sequence.
        size: How many ranks there are.
        ownership: "zigzag", chunks r and 2 * size - 1 - r of 2 * size for rank r, so that causal work is the same for
            all; "contiguous", chunk r of size. Where `total` is not divisible the first chunks are one longer. An
            `Ownership` or a sequence of positions for every rank are themselves.

    Returns:
        An int64 array for each rank: `x[..., positions(n, p)[r], :]` is rank r's shard.

    Example:
        >>> from streamkl_cupy.parallel import positions
        >>> [x.tolist() for x in positions(8, 2)]
        [[0, 1, 6, 7], [2, 3, 4, 5]]
    """
    return [
        np.concatenate([np.arange(*run) for run in runs] or [np.arange(0)]) for runs in owned(total, size, ownership)
    ]


def shard(x: Any, axis: int, rank: int, size: int, ownership: Any = "zigzag") -> Any:
    """The part of an array along an axis of positions that a rank holds; a copy, but where it is one piece.

    Args:
        x: The whole array, of NumPy, CuPy, PyTorch or JAX.
        axis: Its axis of positions.
        rank: Whose part.
        size: How many ranks there are.
        ownership: As for `positions`.

    Example:
        >>> import numpy as np
        >>> from streamkl_cupy.parallel import shard, unshard
        >>> x = np.arange(8)
        >>> parts = [shard(x, 0, rank, 2) for rank in range(2)]
        >>> parts[0].tolist(), unshard(parts, 0).tolist()
        ([0, 1, 6, 7], [0, 1, 2, 3, 4, 5, 6, 7])
    """
    axis %= x.ndim
    runs = owned(x.shape[axis], size, ownership)[rank]
    library = library_named(library_of("x", x))
    return library.joined([x[at(axis, slice(*run))] for run in runs] or [x[at(axis, slice(0, 0))]], axis)


def unshard(parts: Sequence[Any], axis: int, ownership: Any = "zigzag") -> Any:
    """The whole array of the parts of all ranks, in the order of ranks: what `shard` undoes.

    Args:
        parts: Of each rank, arrays of one library.
        axis: Their axis of positions.
        ownership: As for `positions`.
    """
    axis %= parts[0].ndim
    library = library_named(library_of("parts", parts[0]))
    total = sum(x.shape[axis] for x in parts)
    return in_order(library, parts, axis, owned(total, len(parts), ownership))


def in_order(library: Library, parts: Sequence[Any], axis: int, owners: tuple[Runs, ...]) -> Any:
    """Shards, which may be longer than what they hold, as one array in the order of positions."""
    pieces = sorted((run, rank, start) for rank, runs in enumerate(owners) for run, start in zip(runs, starts_of(runs)))
    found = [parts[rank][at(axis, slice(start, start + run[1] - run[0]))] for run, rank, start in pieces]
    return library.joined(found or [parts[0][at(axis, slice(0, 0))]], axis)


def part_of(runs: Runs, where: slice) -> Runs:
    """The runs of a part of a shard."""
    cut = ((max(where.start - i, 0), where.stop - i, run) for i, run in zip(starts_of(runs), runs))
    found = ((first + i, min(first + j, last)) for i, j, (first, last) in cut)
    return tuple((first, last) for first, last in found if first < last)


def starts_of(runs: Runs) -> list[int]:
    """Where in a shard each of its runs begins."""
    return [0, *itertools.accumulate(stop - start for start, stop in runs)][: len(runs)]


def within(runs: Runs, part: slice) -> Runs:
    """The positions of a part of a shard."""
    found = []
    for (first, last), start in zip(runs, starts_of(runs)):
        low, high = max(part.start, start), min(part.stop, start + last - first)
        if low < high:
            found.append((first + low - start, first + high - start))
    return tuple(found)


def length(runs: Runs) -> int:
    """Positions of a shard."""
    return sum(stop - start for start, stop in runs)


@functools.lru_cache(maxsize=256)
def _by_rule(total: int, size: int, rule: str) -> tuple[Runs, ...]:
    count = size if rule == "contiguous" else 2 * size
    each, more = divmod(total, count)
    ends = [0, *itertools.accumulate(each + (i < more) for i in range(count))]
    chunks = list(itertools.pairwise(ends))
    if rule == "contiguous":
        return tuple(joined_runs([chunk]) for chunk in chunks)
    return tuple(joined_runs([chunks[r], chunks[count - 1 - r]]) for r in range(size))


def owned(total: int, size: int, ownership: Any) -> tuple[Runs, ...]:
    """The runs of each rank, of a rule, an `Ownership` (of its rows) or positions."""
    if isinstance(ownership, str):
        if ownership not in OWNERSHIPS:
            raise ValueError(
                f"ownership={ownership!r}; allowed are {listed(OWNERSHIPS)}, an Ownership, and the "
                f"positions of every rank"
            )
        return _by_rule(total, size, ownership)
    runs = ownership.rows if isinstance(ownership, Ownership) else _runs_of_all("ownership", ownership)
    check_owned("ownership", runs, total, size)
    return runs


def check_owned(name: str, runs: tuple[Runs, ...], total: int, size: int) -> None:
    """Refuse positions of another number of ranks or of another sequence."""
    if len(runs) != size:
        raise ValueError(
            f"{name} names the positions of {len(runs)} ranks, but there are {size}; give each rank its own"
        )
    if (count := sum(map(length, runs))) != total:
        raise ValueError(f"{name} names {count} positions, but shards hold {total}; every position is owned once")


def joined_runs(runs: Sequence[Run]) -> Runs:
    """Without empty ones, and without ends that touch."""
    found: list[Run] = []
    for start, stop in runs:
        if start == stop:
            continue
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def _runs_of_all(name: str, ranks: Any) -> tuple[Runs, ...]:
    """Positions of each rank as runs, which together hold each position once."""
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Sequence):
        raise TypeError(
            f"{name} is {a_kind_of(ranks)}; allowed is a sequence with the positions of every rank, each a sequence or "
            f"array of integers"
        )
    found = []
    for rank, given in enumerate(ranks):
        x = np.asarray(given)
        if x.size == 0:
            x = x.astype(np.int64)
        if x.ndim != 1 or x.dtype.kind not in "iu":
            raise TypeError(
                f"{name}[{rank}] has shape {x.shape} and dtype {x.dtype}; allowed are the positions of rank {rank}, "
                f"one integer each"
            )
        x = x.astype(np.int64)
        cuts = np.flatnonzero(np.diff(x) != 1) + 1
        found.append(tuple((int(part[0]), int(part[-1]) + 1) for part in np.split(x, cuts) if part.size))
    last = 0
    for (start, stop), rank in sorted((run, rank) for rank, runs in enumerate(found) for run in runs):
        if start != last:
            what = f"position {start} is owned twice" if start < last else f"position {last} is owned by no rank"
            raise ValueError(f"{name}: {what} (rank {rank}); the positions of all ranks are 0, 1, 2, ... each once")
        last = stop
    return tuple(found)

"""What strategies ask of a transport, and the one that ranks in threads of one process have."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from .libraries import library_named, library_of

_T = TypeVar("_T")
_R = TypeVar("_R", bound="Known")
Pending = Callable[[], Any]
"""What has been started: call it for the result, which is ordered on the caller's stream then."""
Arriving = Callable[[], dict[int, list[Any]]]
"""The same of what ranks send, by rank."""
Starting = Callable[[], Arriving]
"""What is ready to be moved: call it to start."""


class Ranks(Protocol):
    """One rank's view of all of them. Every rank calls the same things in the same order, with arrays of one shape."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def key(self) -> Any:
        """Something hashable that tells this group from others."""
        ...

    @property
    def jobs(self) -> dict[Any, Any]:
        """Jobs of calls before, by how these looked."""
        ...

    def all_gather(self, x: Any) -> Pending:
        """(size, *shape) of everybody's arrays."""
        ...

    def reduce_scatter(self, x: Any) -> Pending:
        """Of (size, *shape), the sum over ranks of part `rank`."""
        ...

    def all_to_all(self, x: Any) -> Any:
        """Of (size, *shape), part i to rank i: (size, *shape) of what came, in the order of ranks."""
        ...

    def all_reduce(self, x: Any) -> Any:
        """The sum over ranks."""
        ...

    def shift(self, xs: tuple[Any, ...]) -> Callable[[], tuple[Any, ...]]:
        """Arrays to the next rank, around a ring; those of the rank before."""
        ...

    @property
    def posts(self) -> bool:
        """Whether there is `post`."""
        ...

    def post(self, sent: Mapping[int, Sequence[Any]], room: Mapping[int, Sequence[Any]]) -> Starting:
        """Make ready to send arrays to some ranks, and to receive what they send into the arrays of `room`. What is
        asked of a GPU between this and the start need not be done before anything moves. All ranks post as often and
        start in the same order, some of them nothing."""
        ...

    def exchange(self, numbers: Sequence[int], like: Any) -> list[list[int]]:
        """Equally many small integers of every rank, in host memory; `like` says which device is meant."""
        ...

    def check(self, name: str, x: Any) -> None:
        """Raise where arrays like this one cannot be moved."""
        ...

    def here(self, compute: Callable[[int], _T]) -> _T:
        """The result of what this rank computes, given its number."""
        ...


class Known:
    """What ranks have in common that know their number before they run."""

    posts = True

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.jobs: dict[Any, Any] = {}

    def check(self, name: str, x: Any) -> None:
        pass

    def here(self, compute: Callable[[int], _T]) -> _T:
        return compute(self.rank)


GROUPS = 16


def known_ranks(known: dict[Any, _R], group: Any, make: Callable[[Any], _R]) -> _R:
    """The ranks of a group, with the jobs that they have agreed on, while it is one of the last there were."""
    found = known.get(group)
    if found is None:
        while len(known) >= GROUPS:
            known.pop(next(iter(known)), None)
        found = known[group] = make(group)
    return found


class LocalWorld:
    """Several ranks in threads of this process: to try and to test, on one device, what several would do.

    Args:
        size: How many ranks there are.

    Example:
        >>> import numpy as np
        >>> from streamkl_cupy.parallel import LocalWorld, attention_kl, shard
        >>> x = np.random.default_rng().normal(size=(2, 8, 4))
        >>> def step(rank):
        ...     mine = shard(x, 1, rank.rank, rank.size)
        ...     return attention_kl(mine, mine, mine, mine, group=rank, causal=True, reduction="sum")
        >>> [round(abs(float(total)), 6) for total in LocalWorld(2).run(step)]
        [0.0, 0.0]
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"size={size}; allowed is one rank and more")
        self.size = size
        self._slots: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)

    def run(self, function: Callable[[LocalRank], _T]) -> list[_T]:
        """Call the function with each rank, side by side; the results in the order of ranks.

        Where one raises, the others do not wait for it, and its error is raised here.
        """
        results: list[Any] = [None] * self.size
        errors: list[BaseException | None] = [None] * self.size
        self._barrier.reset()

        def work(rank: int) -> None:
            try:
                results[rank] = function(LocalRank(self, rank))
            except BaseException as error:
                errors[rank] = error
                self._barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(self.size)]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        except BaseException:
            # The system gives no more threads, or Ctrl-C: those there are do not wait for the others either.
            self._barrier.abort()
            raise
        found = [error for error in errors if error is not None]
        for error in sorted(found, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return results

    def swap(self, rank: int, x: Any) -> list[Any]:
        """What every rank gives."""
        self._slots[rank] = x
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found


class LocalRank(Known):
    """One rank of a `LocalWorld`."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        super().__init__(rank, world.size)
        self._world = world
        self.key = (id(world), rank)

    def all_gather(self, x: Any) -> Pending:
        found = library_named(library_of("x", x)).stacked(self._world.swap(self.rank, x))
        return lambda: found

    def reduce_scatter(self, x: Any) -> Pending:
        total = self._total([part[self.rank] for part in self._world.swap(self.rank, x)])
        # Nobody may write into what others still read.
        self._world.swap(self.rank, None)
        return lambda: total

    def all_to_all(self, x: Any) -> Any:
        return library_named(library_of("x", x)).stacked([part[self.rank] for part in self._world.swap(self.rank, x)])

    def all_reduce(self, x: Any) -> Any:
        return self._total(self._world.swap(self.rank, x))

    def shift(self, xs: tuple[Any, ...]) -> Callable[[], tuple[Any, ...]]:
        found = self._world.swap(self.rank, xs)[self.rank - 1]
        return lambda: found

    def post(self, sent: Mapping[int, Sequence[Any]], room: Mapping[int, Sequence[Any]]) -> Starting:
        def start() -> Arriving:
            given = self._world.swap(self.rank, sent)
            found = {
                source: [_taken(x, into) for x, into in zip(given[source][self.rank], xs)]
                for source, xs in room.items()
            }
            # Nobody may write into what others still read.
            self._world.swap(self.rank, None)
            return lambda: found

        return start

    def exchange(self, numbers: Sequence[int], like: Any) -> list[list[int]]:
        return [list(x) for x in self._world.swap(self.rank, list(numbers))]

    @staticmethod
    def _total(parts: list[Any]) -> Any:
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


def _taken(x: Any, into: Any) -> Any:
    """What has been sent, in the room for it."""
    return library_named(library_of("x", x)).put(into, (...,), x)

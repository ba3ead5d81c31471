"""Communicators that are handed in: mpi4py's, for NumPy's arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .ranks import Known, Pending


class MpiRanks(Known):
    """An mpi4py communicator, for arrays in host memory."""

    def __init__(self, communicator: Any) -> None:
        super().__init__(communicator.Get_rank(), communicator.Get_size())
        self._communicator = communicator
        self.key = ("mpi", communicator.py2f())

    def all_gather(self, x: Any) -> Pending:
        x = np.ascontiguousarray(x)
        out = np.empty((self.size, *x.shape), x.dtype)
        self._communicator.Allgather(_bytes(x), _bytes(out))
        return lambda: out

    def reduce_scatter(self, x: Any) -> Pending:
        x = np.ascontiguousarray(x)
        out = np.empty(x.shape[1:], x.dtype)
        self._communicator.Reduce_scatter_block(x, out)
        return lambda: out

    def all_to_all(self, x: Any) -> Any:
        x = np.ascontiguousarray(x)
        out = np.empty_like(x)
        self._communicator.Alltoall(_bytes(x), _bytes(out))
        return out

    def all_reduce(self, x: Any) -> Any:
        x = np.ascontiguousarray(x)
        out = np.empty_like(x)
        self._communicator.Allreduce(x, out)
        return out

    def shift(self, xs: tuple[Any, ...]) -> Callable[[], tuple[Any, ...]]:
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        sent = [np.ascontiguousarray(x) for x in xs]
        out = tuple(np.empty_like(x) for x in sent)
        for x, y in zip(sent, out):
            self._communicator.Sendrecv(_bytes(x), after, 0, _bytes(y), before, 0)
        return lambda: out

    def post(
        self, sent: Mapping[int, Sequence[Any]], room: Mapping[int, Sequence[Any]]
    ) -> Callable[[], dict[int, list[Any]]]:
        found = {source: list(xs) for source, xs in room.items()}
        arrays = {to: [np.ascontiguousarray(x) for x in xs] for to, xs in sent.items()}
        under_way = [self._communicator.Irecv(_bytes(x), source) for source, xs in found.items() for x in xs]
        under_way += [self._communicator.Isend(_bytes(x), to) for to, xs in arrays.items() for x in xs]

        def wait() -> dict[int, list[Any]]:
            while under_way:
                under_way.pop().Wait()
            arrays.clear()  # not before they have gone
            return found

        return wait

    def exchange(self, numbers: Sequence[int], like: Any) -> list[list[int]]:
        return [list(x) for x in self._communicator.allgather(list(numbers))]

    def check(self, name: str, x: Any) -> None:
        if not isinstance(x, np.ndarray):
            raise TypeError(
                f"{name} is {type(x).__name__}; with an mpi4py communicator allowed are NumPy arrays: those of a "
                f"GPU would have to pass through host memory"
            )


def _bytes(x: Any) -> Any:
    """The memory of a contiguous array."""
    return x.reshape(-1).view("uint8")

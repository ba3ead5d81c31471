"""Communicators that are handed in: `cupyx.distributed` over NCCL for CuPy's arrays, mpi4py for NumPy's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .ranks import Arriving, Known, Pending, Starting

_numbers = itertools.count()


class NcclRanks(Known):
    """`cupyx.distributed.NCCLBackend`, on the current stream. NCCL is told of bytes where it knows no such numbers."""

    def __init__(self, communicator: Any, cupy: Any) -> None:
        super().__init__(communicator.rank, communicator._n_devices)
        self._communicator, self._cupy = communicator, cupy
        self.key = ("nccl", next(_numbers))

    def all_gather(self, x: Any) -> Pending:
        x = self._cupy.ascontiguousarray(x)
        out = self._cupy.empty((self.size, *x.shape), x.dtype)
        if x.size:
            self._communicator.all_gather(_bytes(x), _bytes(out), x.nbytes)
        return lambda: out

    def reduce_scatter(self, x: Any) -> Pending:
        x = self._cupy.ascontiguousarray(x)
        out = self._cupy.empty(x.shape[1:], x.dtype)
        if out.size:
            self._communicator.reduce_scatter(x.ravel(), out.ravel(), out.size)
        return lambda: out

    def all_to_all(self, x: Any) -> Any:
        x = self._cupy.ascontiguousarray(x)
        out = self._cupy.empty_like(x)
        if x.size:
            self._communicator.all_to_all(*(_bytes(y).reshape(self.size, -1) for y in (x, out)))
        return out

    def all_reduce(self, x: Any) -> Any:
        x = self._cupy.ascontiguousarray(x)
        out = self._cupy.empty_like(x)
        self._communicator.all_reduce(x.ravel(), out.ravel())
        return out

    def shift(self, xs: tuple[Any, ...]) -> Callable[[], tuple[Any, ...]]:
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        arrived = self.post({after: xs}, {before: [self._cupy.empty(x.shape, x.dtype) for x in xs]})()
        return lambda: tuple(arrived()[before])

    def post(self, sent: Mapping[int, Sequence[Any]], room: Mapping[int, Sequence[Any]]) -> Starting:
        found = {source: list(xs) for source, xs in room.items()}
        away = {to: [self._cupy.ascontiguousarray(x) for x in xs] for to, xs in sent.items()}
        nccl = self._cupy.cuda.nccl

        def start() -> Arriving:
            nccl.groupStart()
            for to, xs in away.items():
                for x in xs:
                    if x.size:
                        self._communicator.send(_bytes(x), to)
            for source, xs in found.items():
                for x in xs:
                    if x.size:
                        self._communicator.recv(_bytes(x), source)
            nccl.groupEnd()
            return lambda: found

        return start

    def exchange(self, numbers: Sequence[int], like: Any) -> list[list[int]]:
        found: list[list[int]] = self.all_gather(self._cupy.asarray(numbers, "int64"))().tolist()
        return found

    def check(self, name: str, x: Any) -> None:
        if not hasattr(x, "__cuda_array_interface__"):
            raise TypeError(f"{name} is {type(x).__name__}; a communicator of cupyx.distributed moves CuPy arrays")


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

    def post(self, sent: Mapping[int, Sequence[Any]], room: Mapping[int, Sequence[Any]]) -> Starting:
        found = {source: list(xs) for source, xs in room.items()}
        arrays = {to: [np.ascontiguousarray(x) for x in xs] for to, xs in sent.items()}
        under_way: list[Any] = []

        def start() -> Arriving:
            under_way.extend(self._communicator.Irecv(_bytes(x), source) for source, xs in found.items() for x in xs)
            under_way.extend(self._communicator.Isend(_bytes(x), to) for to, xs in arrays.items() for x in xs)
            return wait

        def wait() -> dict[int, list[Any]]:
            while under_way:
                under_way.pop().Wait()
            arrays.clear()  # not before they have gone
            return found

        return start

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

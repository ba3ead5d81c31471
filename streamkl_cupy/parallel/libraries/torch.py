"""PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .base import Library, Part


class Torch(Library):
    """Tensors of any device."""

    name = "torch"
    autograd = True
    groups = True

    def on_gpu(self, x: Any) -> bool:
        return bool(x.is_cuda)

    def full(self, like: Any, shape: Sequence[int], dtype: Any, value: float = 0.0) -> Any:
        return self.xp.full(tuple(shape), value, dtype=self.dtypes.get(dtype, dtype), device=like.device)

    def empty(self, like: Any, shape: Sequence[int], dtype: Any) -> Any:
        return self.xp.empty(tuple(shape), dtype=self.dtypes.get(dtype, dtype), device=like.device)

    def made(self, x: Any, like: Any) -> Any:
        return self.xp.asarray(x, device=like.device)

    def cut(self, axis: int, x: Any, where: slice) -> Any:
        size = where.stop - where.start
        return x if size == x.shape[axis] else x.narrow(axis, where.start, size)

    def cast(self, x: Any, dtype: Any) -> Any:
        return x.to(self.dtypes.get(dtype, dtype))

    def add(self, out: Any, index: tuple[Any, ...], x: Any) -> Any:
        out[index] += x
        return out

    def added_up(self, x: Any, parts: Sequence[Part], dtype: Any) -> Any:
        if not parts or x.dtype == dtype:
            return super().added_up(x, parts, dtype)
        # The last one is added and rounded in one pass, and what it leaves in another.
        *first, (index, last) = parts
        for place, part in first:
            x[place] += part
        out = self.xp.empty(x.shape, dtype=dtype, device=x.device)
        *before, where = index
        for rest in (slice(0, where.start), slice(where.stop, x.shape[len(before)])):
            if rest.start < rest.stop:
                place = (*before, rest)
                out[place] = x[place]
        self.xp.add(x[index], last, out=out[index])
        return out


LIBRARY = Torch

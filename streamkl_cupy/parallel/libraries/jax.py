"""JAX."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from .base import Library


class JAX(Library):
    """Values of programs, and arrays outside of them."""

    name = "jax"
    module = "jax.numpy"
    programs = True

    def empty(self, like: Any, shape: Sequence[int], dtype: Any) -> Any:
        return self.full(like, shape, dtype)

    def put(self, out: Any, index: tuple[Any, ...], x: Any) -> Any:
        # Not `out.at[index].set(x)`, a scatter: XLA's partitioner (jaxlib 0.11.2) crashes on one in a branch.
        cut = index.index(...) if ... in index else len(index)
        every = (slice(None),) * (out.ndim - len(index) + (cut < len(index)))
        index = (*index[:cut], *every, *index[cut + 1 :])
        whole = [slice(i, i + 1) if isinstance(i, int) else i for i in index]
        starts, stops, _ = zip(*(i.indices(n) for i, n in zip(whole, out.shape, strict=True)))
        sizes = tuple(stop - start for start, stop in zip(starts, stops))
        kept = tuple(n for i, n in zip(index, sizes) if not isinstance(i, int))
        part = self.xp.broadcast_to(self.xp.asarray(x, out.dtype), kept).reshape(sizes)
        return sys.modules["jax"].lax.dynamic_update_slice(out, part, starts)

    def add(self, out: Any, index: tuple[Any, ...], x: Any) -> Any:
        return self.put(out, index, out[index] + x.astype(out.dtype))


LIBRARY = JAX

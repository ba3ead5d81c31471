"""JAX."""

from __future__ import annotations

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
        return out.at[index].set(x.astype(out.dtype) if hasattr(x, "astype") else x)

    def add(self, out: Any, index: tuple[Any, ...], x: Any) -> Any:
        return out.at[index].add(x.astype(out.dtype))


LIBRARY = JAX

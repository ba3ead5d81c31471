"""The few functions on arrays that strategies need, the same for every library: none of theirs spell them alike."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

LIBRARIES = ("numpy", "cupy", "torch", "jax")


def library_of(name: str, x: Any) -> str:
    """The library of an array, by where its type lives; tracers and subclasses too."""
    return library_of_type(name, type(x))


def library_of_type(name: str, given: type) -> str:
    """The same by the type itself."""
    for kind in given.__mro__:
        root = kind.__module__.partition(".")[0].replace("jaxlib", "jax")
        if root in LIBRARIES:
            return root
    raise TypeError(
        f"{name} is {given.__name__}; allowed are arrays of {', '.join(LIBRARIES)}: sharded calls are built for these"
    )


class Library:
    """Arrays of one library. Functions that write return what they have written to, as JAX has values only."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.xp: Any = sys.modules["jax.numpy" if name == "jax" else name]

    def full(self, like: Any, shape: Sequence[int], dtype: Any, value: float = 0.0) -> Any:
        """A new array on the device of `like`; `dtype` is a name or one of the library's own."""
        kind = getattr(self.xp, dtype) if isinstance(dtype, str) else dtype
        if self.name == "torch":
            return self.xp.full(tuple(shape), value, dtype=kind, device=like.device)
        return self.xp.full(tuple(shape), value, kind)

    def empty(self, like: Any, shape: Sequence[int], dtype: Any) -> Any:
        """The same, of which everything is still to be written."""
        if self.name == "jax":
            return self.full(like, shape, dtype)
        kind = getattr(self.xp, dtype) if isinstance(dtype, str) else dtype
        if self.name == "torch":
            return self.xp.empty(tuple(shape), dtype=kind, device=like.device)
        return self.xp.empty(tuple(shape), kind)

    def joined(self, parts: Sequence[Any], axis: int) -> Any:
        """Along an axis; one part is itself."""
        return parts[0] if len(parts) == 1 else self.xp.concatenate(tuple(parts), axis)

    def stacked(self, parts: Sequence[Any]) -> Any:
        """Along a new first axis."""
        return self.xp.stack(tuple(parts))

    def cast(self, x: Any, dtype: Any) -> Any:
        """The array in another dtype, by name or one of the library's own."""
        kind = getattr(self.xp, dtype) if isinstance(dtype, str) else dtype
        if self.name == "torch":
            return x.to(kind)
        return x if x.dtype == kind else x.astype(kind)

    def put(self, out: Any, index: tuple[Any, ...], x: Any) -> Any:
        """Write a part."""
        if self.name == "jax":
            return out.at[index].set(x.astype(out.dtype) if hasattr(x, "astype") else x)
        out[index] = x
        return out

    def add(self, out: Any, index: tuple[Any, ...], x: Any) -> Any:
        """Add to a part, in the dtype of what is added to."""
        if self.name == "jax":
            return out.at[index].add(x.astype(out.dtype))
        out[index] += x if self.name == "torch" else self.cast(x, out.dtype)
        return out

    def settled(self, x: Any, parts: Sequence[tuple[tuple[Any, ...], Any]], dtype: Any) -> Any:
        """What parts add to an array of sums, in their order, rounded once; the array may be written to."""
        if self.name != "torch" or not parts or x.dtype == dtype:
            for index, part in parts:
                x = self.add(x, index, part)
            return self.cast(x, dtype)
        *first, (index, last) = parts
        for at_, part in first:
            x[at_] += part
        whole = last.shape == x.shape
        out = self.xp.empty(x.shape, dtype=dtype, device=x.device) if whole else x.to(dtype)
        self.xp.add(x[index], last, out=out[index])
        return out

    def made(self, x: Any, like: Any) -> Any:
        """An array of NumPy's as one on the device of `like`."""
        return self.xp.asarray(x, device=like.device) if self.name == "torch" else self.xp.asarray(x)


def at(axis: int, where: slice | int) -> tuple[Any, ...]:
    """An index of one axis, from the front."""
    return (*(slice(None),) * axis, where)

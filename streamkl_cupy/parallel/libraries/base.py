"""What a library must answer: as NumPy does, unless it does otherwise."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, ClassVar

Part = tuple[tuple[Any, ...], Any]
"""An index, and what belongs there."""


class Library:
    """Arrays of one library. Functions that write return what they have written to, as some have values only."""

    name: ClassVar[str]
    module: ClassVar[str] = ""
    """Where its functions are, unless that is its name."""
    autograd: ClassVar[bool] = False
    """Whether it differentiates what runs."""
    groups: ClassVar[bool] = False
    """Whether it has process groups of its own."""
    programs: ClassVar[bool] = False
    """Whether calls are part of programs that it compiles: no kernel is launched on memory, and nothing is posted."""

    def __init__(self) -> None:
        self.xp: Any = sys.modules[self.module or self.name]
        self.dtypes = {name: getattr(self.xp, name) for name in ("float32", "float64")}
        """By name; whoever has a dtype of the library's own gives that."""

    def on_gpu(self, x: Any) -> bool:
        """Whether kernels can be launched on it."""
        return False

    def full(self, like: Any, shape: Sequence[int], dtype: Any, value: float = 0.0) -> Any:
        """A new array on the device of `like`."""
        return self.xp.full(tuple(shape), value, self.dtypes.get(dtype, dtype))

    def empty(self, like: Any, shape: Sequence[int], dtype: Any) -> Any:
        """The same, of which everything is still to be written."""
        return self.xp.empty(tuple(shape), self.dtypes.get(dtype, dtype))

    def made(self, x: Any, like: Any) -> Any:
        """An array of NumPy's as one on the device of `like`."""
        return self.xp.asarray(x)

    def joined(self, parts: Sequence[Any], axis: int) -> Any:
        """Along an axis; one part is itself."""
        return parts[0] if len(parts) == 1 else self.xp.concatenate(tuple(parts), axis)

    def stacked(self, parts: Sequence[Any]) -> Any:
        """Along a new first axis."""
        return self.xp.stack(tuple(parts))

    def cut(self, axis: int, x: Any, where: slice) -> Any:
        """A part along an axis; all of it is itself."""
        return x if where.stop - where.start == x.shape[axis] else x[at(axis, where)]

    def cast(self, x: Any, dtype: Any) -> Any:
        """The array in another dtype."""
        kind = self.dtypes.get(dtype, dtype)
        return x if x.dtype == kind else x.astype(kind)

    def put(self, out: Any, index: tuple[Any, ...], x: Any) -> Any:
        """Write a part."""
        out[index] = x
        return out

    def add(self, out: Any, index: tuple[Any, ...], x: Any) -> Any:
        """Add to a part, in the dtype of what is added to."""
        out[index] += self.cast(x, out.dtype)
        return out

    def added_up(self, x: Any, parts: Sequence[Part], dtype: Any) -> Any:
        """What parts add to an array of sums, in their order, rounded once; the array may be written to."""
        for index, part in parts:
            x = self.add(x, index, part)
        return self.cast(x, dtype)


def at(axis: int, where: slice | int) -> tuple[Any, ...]:
    """An index of one axis, from the front."""
    return (*(slice(None),) * axis, where)

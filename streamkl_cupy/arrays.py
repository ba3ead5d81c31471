"""Arrays as kernels see them: addresses, shapes, strides and devices, whichever framework they come from."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .problem import Device, compact_strides

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
MASK_ITEMSIZE = {"int32": 4, "int64": 8, "bool": 1}
SIZES = {**ITEMSIZE, **MASK_ITEMSIZE}
CPU = Device("cpu")


class ArrayView(NamedTuple):
    """One array as a kernel sees it. `strides` count elements; `array` keeps the memory alive."""

    name: str
    framework: str
    device: Device
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    ptr: int
    array: Any

    def at(self, ptr: int, array: Any) -> ArrayView:
        """The view of another array that looks like this one."""
        return view_of((*self[:6], ptr, array))


view_of: Callable[[tuple[Any, ...]], ArrayView] = partial(tuple.__new__, ArrayView)
"""A view of its fields in their order, in a third of the time: what calls make several of."""


MaskArrays: TypeAlias = dict[str, ArrayView]
"""What masks read from memory, by name in the order of `MASK_ARRAYS`; what a call does not have is not in it."""

# Tuples of views with the names that the record of an operation gives them (`Op.Inputs` and so on).
Inputs: TypeAlias = Any
"""The operands of a call."""
Results: TypeAlias = Any
"""What a forward writes; None for what the call does not have."""
Saved: TypeAlias = Any
"""What a backward reads besides the operands; None for what its gradients do not read."""
Gradients: TypeAlias = Any
"""What a backward writes; None for what was not asked."""


@lru_cache(maxsize=16)
def cuda(index: int) -> Device:
    """The one Device object of a GPU, so that comparing cache keys is mostly an identity test."""
    return Device("cuda", index)


@lru_cache(maxsize=4096)
def compact(shape: tuple[int, ...], size: int) -> tuple[tuple[int, ...], int]:
    """Strides of a compact array, and its bytes with elements of a size."""
    return compact_strides(shape), prod(shape) * size


@lru_cache(maxsize=4096)
def in_elements(
    shape: tuple[int, ...], strides: tuple[int, ...], unit: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Plain shape, and strides in elements of a size of `unit`; None where they are not whole elements.

    An axis of extent 1 may carry any stride. It gets the one that continues the axes inside it, so that it neither
    breaks an alignment rule nor makes a second cache entry. Without elements no stride means anything.
    """
    if 0 in shape:
        return tuple(shape), compact_strides(tuple(shape))
    found = [0] * len(shape)
    inner = 1
    for axis in range(len(shape) - 1, -1, -1):
        if shape[axis] == 1:
            found[axis] = inner
        else:
            found[axis], odd = divmod(strides[axis], unit)
            if odd:
                return None
        inner = found[axis] * shape[axis]
    return tuple(shape), tuple(found)


class _Memory:
    """Lends memory to NumPy by address, and keeps its owner."""

    def __init__(self, view: ArrayView) -> None:
        size = SIZES[view.dtype]
        self.owner = view.array
        self.__array_interface__ = {
            "version": 3,
            "data": (view.ptr, False),
            "shape": view.shape,
            "strides": tuple(s * size for s in view.strides),
            "typestr": np.dtype("uint16" if view.dtype == "bfloat16" else view.dtype).str,
        }


def host(view: ArrayView) -> NDArray[Any]:
    """A CPU view as a NumPy array over the same memory; bfloat16 comes as the uint16 of its bits."""
    return np.asarray(_Memory(view))

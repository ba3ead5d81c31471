"""NumPy, and what CuPy and JAX share with it."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from ..arrays import CPU, MASK_ITEMSIZE, ArrayView, in_elements
from ..problem import Device
from .base import Framework, refused_dtype

# numpy dtype object -> our name. bfloat16 joins when the first array of it arrives: only ml_dtypes defines it; until
# then it is made as its bits. Types of foreign byte order compare unequal to these, so they are refused like any other.
NAMES: dict[Any, str] = {np.dtype(name): name for name in ("float16", "float32", "float64")}
MASK_NAMES: dict[Any, str] = {np.dtype(name): name for name in MASK_ITEMSIZE}
TYPES: dict[str, Any] = {**{name: dtype for dtype, name in NAMES.items()}, "bfloat16": np.dtype(np.uint16)}


def name_of(name: str, dtype: Any, mask: bool) -> str:
    """Our name of a dtype that an array of the name may have."""
    known = (MASK_NAMES if mask else NAMES).get(dtype)
    if known is not None:
        return known
    if getattr(dtype, "name", "") == "bfloat16" and dtype.itemsize == 2:
        TYPES["bfloat16"] = dtype
        return NAMES.setdefault(dtype, "bfloat16")
    raise TypeError(f"{name} {refused_dtype(dtype, f'{name}.astype(np.float32)')}")


class NumPy(Framework):
    """NumPy arrays, subclasses other than masked ones included."""

    name = "numpy"
    array = "ndarray"
    prevails: ClassVar[int] = 0

    def read(self, name: str, x: Any, mask: bool = False) -> ArrayView:
        return self.view(name, x, CPU, mask)

    def read_subclass(self, name: str, x: Any, mask: bool = False) -> ArrayView:
        if isinstance(x, np.ma.MaskedArray):
            raise TypeError(
                f"{name} is a masked array, whose mask would be lost; pass {name}.filled(value) or {name}.data"
            )
        return self.read(name, x, mask)

    def types(self) -> tuple[type, ...]:
        return (np.ndarray,)

    def view(self, name: str, x: Any, device: Device, mask: bool = False) -> ArrayView:
        """The part that NumPy and CuPy share: strides in bytes."""
        dtype = name_of(name, x.dtype, mask)
        ptr, size = self.address(x), x.dtype.itemsize
        layout = in_elements(x.shape, x.strides, size)
        if layout is None or (ptr % size and x.size):
            raise ValueError(
                f"{name}: its address and byte strides {x.strides} must be whole multiples of the {size}-byte {dtype} "
                f"element; pass an aligned copy, {self.name}.array({name}, order='C')"
            )
        return ArrayView(name, self.name, device, dtype, layout[0], layout[1], ptr, x)

    def allocate(self, like: ArrayView, shape: tuple[int, ...], dtype: str) -> Any:
        return np.empty(shape, TYPES[dtype])

    def address(self, x: Any) -> int:
        return int(x.__array_interface__["data"][0])

    def namespace(self, device: Device) -> Any:
        return np

    def convert(self, name: str, source: str) -> str:
        return f"np.asarray({name})"

    def mask_array(self, name: str, dtype: str) -> str:
        return f'{self.name}.asarray({name}, dtype="{dtype}")'


FRAMEWORK = NumPy

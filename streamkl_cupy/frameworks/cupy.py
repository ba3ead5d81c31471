"""CuPy."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import prod
from typing import Any, ClassVar

from ..arrays import ITEMSIZE, ArrayView, cuda, in_elements
from ..errors import install
from ..problem import Device
from .numpy import NAMES, TYPES, NumPy


def cupy_module() -> Any:
    """CuPy, or an ImportError that says how to get it."""
    try:
        return importlib.import_module("cupy")
    except ImportError as cause:
        raise ImportError(f"CUDA arrays need CuPy, which cannot be imported: {install.cuda()}") from cause


class CuPy(NumPy):
    """CuPy arrays."""

    name = "cupy"
    prevails: ClassVar[int] = 2

    def __init__(self, module: Any) -> None:
        self.cupy = module

    def read(self, name: str, x: Any, mask: bool = False) -> ArrayView:
        # The short way for what is as it should be; the shared way knows how to complain.
        data, dtype = x.data, NAMES.get(x.dtype)
        device = cuda(data.device_id)
        if dtype is None:
            return self.view(name, x, device, mask)
        ptr, size = data.ptr, ITEMSIZE[dtype]
        layout = in_elements(x.shape, x.strides, size)
        if layout is None or ptr % size:
            return self.view(name, x, device)
        return ArrayView(name, "cupy", device, dtype, layout[0], layout[1], ptr, x)

    def read_subclass(self, name: str, x: Any, mask: bool = False) -> ArrayView:
        return self.read(name, x, mask)

    def alike(self, arrays: Sequence[Any]) -> Callable[..., bool]:
        looks = self._looks(arrays)
        kinds = {self.cupy.ndarray}
        return lambda *others: kinds.issuperset(map(type, others)) and self._looks(others) == looks

    def _looks(self, arrays: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [(x.shape, x.strides, x.dtype, x.data.device_id) for x in arrays]

    def addresses(self, arrays: Sequence[Any]) -> list[int]:
        return [x.data.ptr for x in arrays]

    def types(self) -> tuple[type, ...]:
        return (self.cupy.ndarray,)

    def allocate(self, like: ArrayView, shape: tuple[int, ...], dtype: str) -> Any:
        # CuPy allocates on the current device, from that device's current stream.
        with self.cupy.cuda.Device(like.device.index):
            return self.cupy.empty(shape, TYPES[dtype])

    def allocate_planes(self, like: ArrayView, count: int, shape: tuple[int, ...], dtype: str) -> tuple[int, Any]:
        # From the memory up, because indexing an array costs the host more than all of this.
        make, kind = self.cupy.ndarray, TYPES[dtype]
        step = prod(shape) * ITEMSIZE[dtype]
        with self.cupy.cuda.Device(like.device.index):
            memory = self.cupy.cuda.alloc(count * step)
            return int(memory.ptr), tuple(make(shape, kind, memory + i * step) for i in range(count))

    def address(self, x: Any) -> int:
        return int(x.data.ptr)

    def stream(self, device: Device) -> int:
        return int(self.cupy.cuda.get_current_stream(device.index).ptr)

    def on_device(self, device: Device) -> AbstractContextManager[Any]:
        return self.cupy.cuda.Device(device.index)  # type: ignore[no-any-return]

    def namespace(self, device: Device) -> Any:
        return self.cupy

    def convert(self, name: str, source: str) -> str:
        return f"cupy.asarray({name})"

    def to_numpy(self, name: str) -> str:
        return f"cupy.asnumpy({name})"


FRAMEWORK = CuPy

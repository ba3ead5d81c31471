"""What a framework must answer: how its arrays are read, allocated and ordered on a stream, and what helps its callers.

One module of this folder per framework. A framework is looked up through `sys.modules`, never imported: whoever holds
an array of it has done that already.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import numpy as np

from ..arrays import ITEMSIZE, ArrayView, compact, view_of
from ..problem import Device

Reader = Callable[..., ArrayView]


class Framework:
    """A framework whose arrays come and go as they are."""

    name: str
    """That of its module, too."""
    array: ClassVar[str] = ""
    """The name of its class of arrays."""
    prevails: ClassVar[int] = 1
    """Of two frameworks in one call, convert to the one with the higher number: it has gradients, or a GPU."""

    def __init__(self, module: Any) -> None:
        """Of a module that has been imported."""

    def read(self, name: str, x: Any, mask: bool = False) -> ArrayView:
        """View `x` without a copy, or raise naming `name`; with `mask` its elements are those of masks."""
        raise NotImplementedError

    def read_subclass(self, name: str, x: Any, mask: bool = False) -> ArrayView:
        """The same of an array whose type is not exactly one of `types`."""
        return self.read(name, x, mask)

    def types(self) -> tuple[type, ...]:
        """Exact types that `read` can be called with at once."""
        return ()

    def is_standin(self, x: Any) -> bool:
        """Whether `x` has a shape and a dtype but no memory."""
        return False

    # How a call like one before is known again, which costs less than reading its arrays.

    def alike(self, arrays: Sequence[Any]) -> Callable[..., bool] | None:
        """Whether as many others look like these in all that `read` tells but addresses; None: it has to be asked.

        The first of these others has one of `types`; whatever the rest is, the answer is no error.
        """
        return None

    def addresses(self, arrays: Sequence[Any]) -> list[int]:
        """Of arrays that are `alike` some that have been read."""
        return list(map(self.address, arrays))

    # Where results are made. `like` is an array of the call.

    def computes(self, device: Device) -> Framework:
        """What makes results beside arrays of a device, and computes on them."""
        return self

    def allocate(self, like: ArrayView, shape: tuple[int, ...], dtype: str) -> Any:
        """A compact array on `like`'s device, ordered on the current stream."""
        raise NotImplementedError

    def address(self, x: Any) -> int:
        """Address of an array that `allocate` made."""
        raise NotImplementedError

    def allocate_planes(self, like: ArrayView, count: int, shape: tuple[int, ...], dtype: str) -> tuple[int, Any]:
        """`count` arrays of a shape one after the other in one allocation, and the address of the first."""
        whole = self.allocate(like, (count, *shape), dtype)
        return self.address(whole), tuple(whole[i] for i in range(count))

    def empty(self, like: ArrayView, shape: tuple[int, ...], dtype: str) -> ArrayView:
        """View of a new array."""
        array = self.allocate(like, shape, dtype)
        strides, _ = compact(shape, 0)
        return view_of((like.name, self.name, like.device, dtype, shape, strides, self.address(array), array))

    def empty_rows(
        self, like: ArrayView, names: tuple[str, ...], shape: tuple[int, ...], dtype: str
    ) -> list[ArrayView]:
        """Row arrays of these names in one allocation, which costs the host more than all the rest of a call."""
        ptr, planes = self.allocate_planes(like, len(names), shape, dtype)
        strides, step = compact(shape, ITEMSIZE[dtype])
        framework, device = self.name, like.device
        views = []
        for name, x in zip(names, planes):
            views.append(view_of((name, framework, device, dtype, shape, strides, ptr, x)))
            ptr += step
        return views

    def stream(self, device: Device) -> int:
        """Handle of the current stream of a GPU."""
        raise NotImplementedError

    def on_device(self, device: Device) -> AbstractContextManager[Any]:
        """Make a GPU current for the functions of `namespace` that do not follow their arrays."""
        return nullcontext()

    def namespace(self, device: Device) -> Any:
        """The module with the functions that compute on results."""
        raise NotImplementedError

    def deterministic(self) -> bool:
        """Whether the framework has been asked for equal bits from run to run, by a switch of its own."""
        return False

    def detached(self, x: Any) -> Any:
        """The array without what the framework's differentiation knows of it."""
        return x

    def check_no_gradient_wanted(self, given: Iterable[tuple[str, Any]]) -> None:
        """Refuse arrays that the framework's differentiation would take for constants of a result without gradient."""

    def values(self, name: str, x: Any) -> Any:
        """The array as `namespace` computes with it, of any dtype."""
        return x

    def give(self, result: Any, like: Any) -> Any:
        """A result in the type of the caller's array `like`."""
        return result

    # What helps its callers: expressions to write in place of `name`.

    def convert(self, name: str, source: str) -> str:
        """Makes an array of another framework one of this."""
        return f"{self.name}'s from_dlpack({name})"

    def to_numpy(self, name: str) -> str:
        """Makes a NumPy array of one of this framework."""
        return f"np.asarray({name})"

    def mask_array(self, name: str, dtype: str) -> str:
        """Makes an array that a mask can read of anything else."""
        return f"{self.name}.asarray({name}, dtype={self.name}.{dtype})"

    def contiguous(self, name: str, device: Device) -> str:
        """Makes a contiguous copy."""
        return f"{self.name}.ascontiguousarray({name})"


DOORS: dict[str, Callable[[], Any]] = {}
"""By framework, what gives the module of this package that runs calls in the framework's own programs; whoever is above
both adds it. Kernels are launched on the memory of all others."""
FRAMEWORKS: dict[str, Framework] = {}
"""Those whose arrays have come, by name."""
QUICK: dict[type, Framework] = {}
"""Exact type -> its framework, where this knows what is `alike`."""
READERS: dict[type, tuple[str, Reader]] = {}
"""Exact type -> (framework, reader). Subclasses are looked at anew each time: they are rare, and may be short-lived."""


def known(name: str) -> Framework:
    """The framework that a module of this folder is for; its own module has been imported."""
    if name not in FRAMEWORKS:
        kind = importlib.import_module(f"{__package__}.{name}").FRAMEWORK
        framework = FRAMEWORKS.setdefault(name, kind(sys.modules[name]))
        READERS.update((exact, (name, framework.read)) for exact in framework.types())
        if kind.alike is not Framework.alike:
            QUICK.update((exact, framework) for exact in framework.types())
    return FRAMEWORKS[name]


def refused_dtype(dtype: Any, remedy: str) -> str:
    """The rest of a sentence that begins with the argument's name."""
    return (
        f"has dtype {dtype}; allowed are bfloat16, float16, float32 and, on the CPU, float64, in native byte order. "
        f"Convert it, for example {remedy}"
    )


def dtype_label(dtype: Any) -> str:
    """The name of a dtype of any framework: "float32" of numpy.float32, torch.float32, <dtype: 'float32'>."""
    if isinstance(dtype, np.dtype):
        return str(dtype)  # with a foreign byte order
    name = getattr(dtype, "name", None)
    # Paddle's names are those of an enumeration in capitals.
    return name if isinstance(name, str) and name.islower() else str(dtype).rpartition(".")[2]

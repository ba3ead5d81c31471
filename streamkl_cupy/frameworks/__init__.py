"""Arrays in and out: any framework's array as a view that a kernel takes, without a copy and without importing it.

Every module of this folder but `base` and `dlpack` is a framework, and has its class as `FRAMEWORK`. Arrays of all
others come and go through DLPack.
"""

from __future__ import annotations

import importlib
import operator
import sys
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar, cast

import numpy as np

from ..arguments import a_kind_of
from ..arrays import ITEMSIZE, ArrayView
from ..options import MASK_ARRAYS
from ..problem import Device, compact_strides
from ..rules.registry import entries_of
from .base import DOORS, FRAMEWORKS, READERS, Framework, Reader, dtype_label, known, refused_dtype
from .cupy import cupy_module

_R = TypeVar("_R")

OWN: Final[dict[str, type[Framework]]] = entries_of(__name__, __path__, "FRAMEWORK", ("base", "dlpack"))
"""The frameworks with a module here; all others are guests."""


class _NoArray(Framework):
    """Whatever lends no memory: stand-ins where these are welcome, an error elsewhere."""

    name = "no array"

    def read(self, name: str, x: Any, mask: bool = False) -> ArrayView:
        raise TypeError(f"{name} {_no_array(name, x)}")

    def is_standin(self, x: Any) -> bool:
        return True


FRAMEWORKS["no array"] = _NoArray(None)
known("numpy")


def reader_for(name: str, x: Any) -> tuple[str, Reader]:
    """Framework and reader of an array whose exact type is not in READERS yet."""
    for framework, kind in OWN.items():
        # An empty tuple, which nothing is an instance of, where the module is absent or half imported.
        if isinstance(x, getattr(sys.modules.get(framework), kind.array, ())):
            found = known(framework)
            return READERS.get(type(x)) or (framework, found.read_subclass)
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        guest: Framework = importlib.import_module(".dlpack", __name__).guest_for(name, x)
        return (guest.name, guest.read)
    return ("no array", FRAMEWORKS["no array"].read)


def describe(name: str, x: Any) -> ArrayView:
    """Read an array of any framework, without a copy; TypeError or ValueError naming `name` where that cannot be."""
    return (READERS.get(type(x)) or reader_for(name, x))[1](name, x)


def is_torchs(x: Any) -> bool:
    """Whether torch's door is the one for it: by names of modules, which torch.compile can trace, and of all ancestors,
    since subclasses of tensors and parameters live in modules of their own."""
    for kind in type(x).__mro__:  # noqa: SIM110  # a generator would be one more function in every call
        if kind.__module__.partition(".")[0] == "torch":
            return True
    return False


def compiling() -> bool:
    """Whether torch is making a program of what runs; torch.compile can trace it."""
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    return compiler is not None and bool(compiler.is_compiling())


def framework_of(name: str, x: Any) -> str:
    """The framework `describe` would report, without reading the array; tracers are fine, what is no array is not."""
    framework = _kind(name, x)
    return describe(name, x).framework if framework == "no array" else framework


def _kind(name: str, x: Any) -> str:
    return (READERS.get(type(x)) or reader_for(name, x))[0]


def describe_mask(name: str, x: Any, framework: str = "numpy") -> ArrayView:
    """Read an array that a mask reads, of the one dtype that it may have; `framework` is that of the inputs."""
    _check_mask_dtype(name, x, framework)
    return FRAMEWORKS[_kind(name, x)].read(name, x, True)


def no_mask_array(name: str, x: Any, framework: str) -> TypeError:
    """The error about something else in the place of an array that a mask reads."""
    dtype = MASK_ARRAYS[name]
    return TypeError(
        f"{name} is {a_kind_of(x)}; allowed is a {framework} array of dtype {dtype}, as the inputs are {framework} "
        f"arrays. Make one: {known(framework).mask_array(name, dtype)}"
    )


def _check_mask_dtype(name: str, x: Any, framework: str = "numpy") -> None:
    wanted, dtype = MASK_ARRAYS[name], getattr(x, "dtype", None)
    if dtype is None:
        raise no_mask_array(name, x, framework)
    label = dtype_label(dtype)
    if label != wanted:
        # A stand-in has no framework, but its dtype has.
        way = f"{name}.to(torch.{wanted})" if str(dtype).startswith("torch.") else f'{name}.astype("{wanted}")'
        raise TypeError(f"{name} has dtype {label}; allowed is {wanted}. Cast it: {way}")


def conversion(name: str, framework: str, target: str) -> str:
    """An expression that makes the array of a name, which is `framework`'s, one of `target`'s."""
    if target == "numpy" and framework in FRAMEWORKS:
        return FRAMEWORKS[framework].to_numpy(name)
    return known(target).convert(name, framework)


def is_standin(name: str, x: Any) -> bool:
    """Whether there is a shape and a dtype at most, and no memory to say which device is meant."""
    return FRAMEWORKS[_kind(name, x)].is_standin(x)


def standin(name: str, x: Any, device: Device) -> ArrayView:
    """View something with a shape and a dtype as the compact, aligned array it stands for."""
    try:
        shape, dtype = tuple(operator.index(n) for n in x.shape), x.dtype
    except (AttributeError, TypeError) as cause:
        raise TypeError(
            f"{name} is {a_kind_of(x)}; allowed are arrays, and objects with a shape of integers and a dtype"
        ) from cause
    if any(n < 0 for n in shape):
        raise ValueError(f"{name}: shape {shape} has a negative extent; allowed are 0 and more")
    try:
        label = np.dtype(dtype).name
    except TypeError:
        label = dtype_label(dtype)
    if name in MASK_ARRAYS:
        _check_mask_dtype(name, x)
    elif label not in ITEMSIZE:
        raise TypeError(f"{name} {refused_dtype(label, 'to float32')}")
    return ArrayView(name, "standin", device, label, shape, compact_strides(shape), 0, x)


def empty(like: ArrayView, shape: tuple[int, ...], dtype: str) -> ArrayView:
    """A compact array of `like`'s framework on `like`'s device, ordered on the caller's current stream."""
    return FRAMEWORKS[like.framework].empty(like, shape, dtype)


def empty_rows(like: ArrayView, names: tuple[str, ...], shape: tuple[int, ...], dtype: str) -> list[ArrayView]:
    """Row arrays of these names, likewise."""
    return FRAMEWORKS[like.framework].empty_rows(like, names, shape, dtype)


def door(framework: str) -> Any:
    """The module that runs calls with a framework's arrays in its own programs; None where kernels are launched on its
    memory."""
    found = DOORS.get(framework)
    return None if found is None else found()


def stream_of(view: ArrayView) -> int:
    """Handle of the caller's current stream on the view's device; 0 on the CPU."""
    device = view.device
    return 0 if device.kind == "cpu" else FRAMEWORKS[view.framework].stream(device)


def on_device(view: ArrayView) -> AbstractContextManager[Any]:
    """Make the view's GPU current for CuPy's own functions; the other frameworks follow their arrays."""
    return FRAMEWORKS[view.framework].on_device(view.device)


def namespace(view: ArrayView) -> Any:
    """The module that computes on results beside this array: numpy, cupy, torch or jax.numpy."""
    return FRAMEWORKS[view.framework].namespace(view.device)


def given_back(view: ArrayView, like: Any, results: _R) -> _R:
    """A result, or a NamedTuple of results, in the caller's own type; `view` is that of `like`, an array of the call.

    Until here those of a guest are NumPy's or CuPy's.
    """
    if view.framework in OWN:
        return results
    give, kind = FRAMEWORKS[view.framework].give, cast(Any, type(results))
    if isinstance(results, tuple):
        return kind(*(None if x is None else give(x, like) for x in results))  # type: ignore[no-any-return]
    return give(results, like)  # type: ignore[no-any-return]


def hold(views: tuple[ArrayView | None, ...]) -> None:
    """Keep memory of guests until the GPU has read it; what frameworks of our own lend needs nothing."""
    lent = [v for v in views if v is not None and v.framework not in OWN and v.device.kind == "cuda"]
    if lent:
        importlib.import_module(".dlpack", __name__).hold(lent)


def current_gpu() -> int | None:
    """Ordinal of the current GPU; None where there is no usable one."""
    try:
        runtime = cupy_module().cuda
    except ImportError:
        return None
    return int(runtime.runtime.getDevice()) if runtime.is_available() else None


def _no_array(name: str, x: Any) -> str:
    """The rest of a sentence about what is no array, most telling cause first."""
    if x is None:
        return "is None, not an array; it is needed in every call"
    root = type(x).__module__.partition(".")[0]
    if root == "tensorflow":
        return (
            f"is {a_kind_of(x)}, which has no memory to read. Of a tf.Variable pass tf.convert_to_tensor({name}); "
            f"inside tf.function call through tf.py_function; sparse and ragged tensors must be made dense"
        )
    if hasattr(x, "__cuda_array_interface__"):
        return (
            f"is {a_kind_of(x)}, which has a __cuda_array_interface__ and no __dlpack__, so nothing could make results "
            f"of its type. Convert it, without a copy: cupy.asarray({name}) or torch.as_tensor({name}, device='cuda')"
        )
    return (
        f"is {a_kind_of(x)}, not an array; allowed are NumPy, CuPy, torch and JAX arrays, and those of other "
        f"frameworks with DLPack. Convert it first, for example np.asarray({name}, dtype=np.float32)"
    )

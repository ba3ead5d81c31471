"""Arrays in and out: what any framework's array looks like to a kernel, without a copy and without importing it."""

from __future__ import annotations

import importlib
import operator
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from math import prod
from types import ModuleType
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from .adapters import (
    ADAPTERS,
    CPU,
    ITEMSIZE,
    MASK_ITEMSIZE,
    OWN,
    READERS,
    ArrayView,
    adapter_for,
    cuda,
    cupy_module,
    dtype_label,
    refused_dtype,
)
from .arguments import a_kind_of
from .locks import ForkLock
from .options import MASK_ARRAYS
from .problem import Device, compact_strides

__all__ = [
    "CPU",
    "ITEMSIZE",
    "OWN",
    "ArrayView",
    "Gradients",
    "Inputs",
    "MaskArrays",
    "RowStats",
    "Saved",
    "cuda",
    "cupy_module",
    "describe",
    "empty",
    "host",
    "namespace",
]


_R = TypeVar("_R")


class Inputs(NamedTuple):
    """The four operands of every call."""

    teacher_q: ArrayView
    teacher_k: ArrayView
    student_q: ArrayView
    student_k: ArrayView


class MaskArrays(NamedTuple):
    """What masks read from memory; None for what a call does not have."""

    key_lengths: ArrayView | None = None
    cu_seqlens_q: ArrayView | None = None
    cu_seqlens_k: ArrayView | None = None
    key_mask: ArrayView | None = None


class RowStats(NamedTuple):
    """What the forward writes: one value per query row each."""

    kl: ArrayView
    teacher_lse: ArrayView
    student_lse: ArrayView


class Saved(NamedTuple):
    """What the backward reads besides the operands; `kl` only for teacher gradients."""

    grad: ArrayView
    teacher_lse: ArrayView
    student_lse: ArrayView
    kl: ArrayView | None


class Gradients(NamedTuple):
    """What the backward writes; None for what was not asked."""

    teacher_q: ArrayView | None
    teacher_k: ArrayView | None
    student_q: ArrayView | None
    student_k: ArrayView | None


MASK_REMEDIES = {
    "numpy": 'numpy.asarray({name}, dtype="{dtype}")',
    "cupy": 'cupy.asarray({name}, dtype="{dtype}")',
    "torch": "torch.as_tensor({name}, dtype=torch.{dtype}, device=student_q.device)",
    "jax": 'jax.numpy.asarray({name}, dtype="{dtype}")',
    "tensorflow": 'tf.convert_to_tensor({name}, dtype="{dtype}")',
    "paddle": 'paddle.to_tensor({name}, dtype="{dtype}")',
}
SIZES = {**ITEMSIZE, **MASK_ITEMSIZE}


def describe(name: str, x: Any) -> ArrayView:
    """Read an array of any framework, without a copy; TypeError or ValueError naming `name` where that cannot be."""
    return (READERS.get(type(x)) or adapter_for(name, x))[1](name, x)


def describe_mask(name: str, x: Any, framework: str = "numpy") -> ArrayView:
    """Read an array that a mask reads, of the one dtype that it may have; `framework` is that of the inputs."""
    _check_mask_dtype(name, x, framework)
    return ADAPTERS[_kind(name, x)].read(name, x, True)


def no_mask_array(name: str, x: Any, framework: str) -> TypeError:
    """The error about something else in the place of an array that a mask reads."""
    dtype = MASK_ARRAYS[name]
    remedy = MASK_REMEDIES.get(framework, "{framework}.asarray({name}, dtype={framework}.{dtype})")
    remedy = remedy.format(name=name, dtype=dtype, framework=framework)
    return TypeError(
        f"{name} is {a_kind_of(x)}; allowed is a {framework} array of dtype {dtype}, as the inputs are {framework} "
        f"arrays. Make one: {remedy}"
    )


def _check_mask_dtype(name: str, x: Any, framework: str = "numpy") -> None:
    wanted, dtype = MASK_ARRAYS[name], getattr(x, "dtype", None)
    if dtype is None:
        raise no_mask_array(name, x, framework)
    label = dtype_label(dtype)
    if label != wanted:
        way = f"{name}.to(torch.{wanted})" if str(dtype).startswith("torch.") else f'{name}.astype("{wanted}")'
        raise TypeError(f"{name} has dtype {label}; allowed is {wanted}. Cast it: {way}")


def framework_of(name: str, x: Any) -> str:
    """The framework `describe` would report, without reading the array; tracers are fine, what is no array is not."""
    framework = _kind(name, x)
    return describe(name, x).framework if framework == "no array" else framework


def _kind(name: str, x: Any) -> str:
    return (READERS.get(type(x)) or adapter_for(name, x))[0]


def native(view: ArrayView) -> str:
    """The framework that computes for this one: for a guest NumPy or CuPy."""
    if view.framework in OWN:
        return view.framework
    return "numpy" if view.device.kind == "cpu" else "cupy"


def is_standin(name: str, x: Any) -> bool:
    """Whether there is a shape and a dtype at most, and no memory to say which device is meant."""
    return ADAPTERS[_kind(name, x)].is_standin(x)


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
    framework = native(like)
    adapter = ADAPTERS[framework]
    array = adapter.allocate(like, shape, dtype)
    strides, _ = _compact(shape, 0)
    return ArrayView(like.name, framework, like.device, dtype, shape, strides, adapter.address(array), array)


def empty_rows(like: ArrayView, shape: tuple[int, ...], dtype: str) -> RowStats:
    """The three row arrays in one allocation, which costs the host more than all the rest of a call."""
    framework = native(like)
    adapter = ADAPTERS[framework]
    ptr, (kl, teacher_lse, student_lse) = adapter.allocate_planes(like, 3, shape, dtype)
    strides, step = _compact(shape, ITEMSIZE[dtype])
    device = like.device
    return RowStats(
        ArrayView("kl", framework, device, dtype, shape, strides, ptr, kl),
        ArrayView("teacher_lse", framework, device, dtype, shape, strides, ptr + step, teacher_lse),
        ArrayView("student_lse", framework, device, dtype, shape, strides, ptr + 2 * step, student_lse),
    )


@lru_cache(maxsize=4096)
def _compact(shape: tuple[int, ...], size: int) -> tuple[tuple[int, ...], int]:
    return compact_strides(shape), prod(shape) * size


def stream_of(view: ArrayView) -> int:
    """Handle of the caller's current stream on the view's device; 0 on the CPU."""
    if view.device.kind == "cpu":
        return 0
    return ADAPTERS[native(view)].stream(view.device.index)


def on_device(view: ArrayView) -> AbstractContextManager[Any]:
    """Make the view's GPU current for CuPy's own functions; the other frameworks follow their arrays."""
    if native(view) == "cupy":
        return cupy_module().cuda.Device(view.device.index)  # type: ignore[no-any-return]
    return nullcontext()


def given_back(view: ArrayView, like: Any, results: _R) -> _R:
    """A result, or a NamedTuple of results, in the caller's own type; `view` is that of `like`, an array of the call.

    Until here those of a guest are NumPy's or CuPy's.
    """
    if view.framework in OWN:
        return results
    give, kind = _guest(view).give, cast(Any, type(results))
    if isinstance(results, tuple):
        return kind(*(None if x is None else give(x, like) for x in results))  # type: ignore[no-any-return]
    return give(results, like)  # type: ignore[no-any-return]


def computable(view: ArrayView, x: Any) -> Any:
    """The array as the library that computes for it takes it, in whatever dtype it has."""
    return x if view.framework in OWN else _guest(view).values(view.name, x)


def _guest(view: ArrayView) -> Any:
    return ADAPTERS[view.framework]


_lent: list[tuple[Any, list[ArrayView]]] = []
_lent_lock = ForkLock()


def hold(views: tuple[ArrayView | None, ...]) -> None:
    """Keep memory of guests until the GPU has read it.

    torch, CuPy and XLA order the reuse of their memory after work on the stream; of others nothing is known.
    """
    borrowed = [v for v in views if v is not None and v.framework not in OWN and v.device.kind == "cuda"]
    if not borrowed:
        return
    cupy = cupy_module()
    with on_device(borrowed[0]):
        event = cupy.cuda.Event(disable_timing=True)
        event.record(cupy.cuda.get_current_stream())
    with _lent_lock():
        _lent[:] = [entry for entry in _lent if not entry[0].done]
        _lent.append((event, borrowed))


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


def namespace(framework: str) -> ModuleType:
    """The module with the framework's array functions: numpy, cupy, torch or jax.numpy."""
    return importlib.import_module("jax.numpy" if framework == "jax" else framework)


def current_gpu() -> int | None:
    """Ordinal of the current GPU; None where there is no usable one."""
    try:
        runtime = cupy_module().cuda
    except ImportError:
        return None
    return int(runtime.runtime.getDevice()) if runtime.is_available() else None

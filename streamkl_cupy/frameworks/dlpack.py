"""Guests: arrays of frameworks that have no module here, read and handed back through DLPack alone.

NumPy or CuPy computes for them. A result goes back through the framework's own ``from_dlpack``, so whoever gives an
array of a framework gets arrays of that framework; a producer whose framework nobody can tell is refused, because its
results would come in another type without a word.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..arguments import a_kind_of, kind_of
from ..arrays import ArrayView
from ..concurrency.locks import ForkLock
from ..numpy_backend.elements import widen
from ..problem import Device
from .base import FRAMEWORKS, Framework, dtype_label, known
from .cupy import cupy_module

ON_CPU, ON_CUDA = (1, 3), (2, 13)  # DLPack's devices: CPU and CUDA pinned; CUDA and CUDA managed
UNSIGNED, BFLOAT = 1, 4  # DLPack's type codes

pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)
_name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(("PyCapsule_GetName", ctypes.pythonapi))
# Where the type code lies in the struct of a capsule: the versioned one has 32 bytes in front of the tensor.
_TYPE_CODE = {b"dltensor": 20, b"dltensor_versioned": 52}


class _Declared:
    """A DLPack producer whose elements are declared to be of another kind of the same size.

    NumPy knows no bfloat16 through DLPack, so its bits travel as uint16. The struct is of this one export.
    """

    def __init__(self, x: Any, code: int) -> None:
        self.x, self.code = x, code

    def __dlpack__(self, **options: Any) -> Any:
        capsule = self.x.__dlpack__(**options)
        name = _name_of(capsule)
        ctypes.c_uint8.from_address(pointer_of(capsule, name) + _TYPE_CODE[name]).value = self.code
        return capsule

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


class Guest(Framework):
    """A framework that takes what DLPack brings: through `__array_namespace__`, or a `from_dlpack` of its module."""

    way_out = "a custom gradient of your framework"
    """Inside which the explicit functions may be called."""

    def __init__(self, name: str, from_dlpack: Callable[[Any], Any]) -> None:
        self.name, self.from_dlpack = name, from_dlpack

    def read(self, name: str, x: Any, mask: bool = False) -> ArrayView:
        array, dtype = self._imported(name, x)
        as_bits = dtype == "bfloat16" and isinstance(array, np.ndarray)
        if as_bits:
            array = array.view(np.float16)  # of the same size, which is what the reader asks
        view = known("numpy" if isinstance(array, np.ndarray) else "cupy").read(name, array, mask)
        return view._replace(framework=self.name, dtype=dtype if as_bits else view.dtype)

    def values(self, name: str, x: Any) -> Any:
        """The array as NumPy or CuPy computes with it, of any dtype; bfloat16 on the CPU is widened to float32."""
        array, dtype = self._imported(name, x)
        if dtype == "bfloat16" and isinstance(array, np.ndarray):
            return widen(array, np.empty(array.shape, np.float32))
        return array

    def give(self, array: Any, like: Any) -> Any:
        """A result in the framework's own type; `like` is an array that the caller gave."""
        if isinstance(array, (np.ndarray, np.generic)):
            array = np.ascontiguousarray(array).reshape(np.shape(array))  # which makes one axis of none
            bits = array.dtype == np.uint16 or dtype_label(array.dtype) == "bfloat16"
            return self._taken(_Declared(array.view(np.uint16), BFLOAT) if bits else array, like)
        # CuPy's pool would hand memory that the caller drops to the next array at once, while streams that CuPy does
        # not know still read it. Memory of its own goes back by cudaFree, which waits for all of them.
        cupy = cupy_module()
        with cupy.cuda.Device(array.device.id):
            memory = cupy.cuda.MemoryPointer(cupy.cuda.Memory(max(array.nbytes, 1)), 0)
            own = cupy.ndarray(array.shape, array.dtype, memory)
            own[...] = array
            return self._taken(own, like)

    # NumPy or CuPy computes.

    def computes(self, device: Device) -> Framework:
        return known("numpy" if device.kind == "cpu" else "cupy")

    def empty(self, like: ArrayView, shape: tuple[int, ...], dtype: str) -> ArrayView:
        return self.computes(like.device).empty(like, shape, dtype)

    def empty_rows(
        self, like: ArrayView, names: tuple[str, ...], shape: tuple[int, ...], dtype: str
    ) -> list[ArrayView]:
        return self.computes(like.device).empty_rows(like, names, shape, dtype)

    def stream(self, device: Device) -> int:
        return self.computes(device).stream(device)

    def on_device(self, device: Device) -> AbstractContextManager[Any]:
        return self.computes(device).on_device(device)

    def namespace(self, device: Device) -> Any:
        return self.computes(device).namespace(device)

    def contiguous(self, name: str, device: Device) -> str:
        return self.computes(device).contiguous(name, device)

    def check_no_gradient_wanted(self, given: Iterable[tuple[str, Any]]) -> None:
        for name, x in given:
            wish = self.gradient_wish(x)
            if wish is not None:
                raise TypeError(
                    f"{name} {wish}, but operations are differentiable in torch and JAX only, and its gradient would "
                    f"silently be missing. Call attention_kl_value_and_grad, or the functions that end in _forward and "
                    f"_backward, inside {self.way_out}; where no gradient is wanted, give arrays that ask "
                    f"for none"
                )

    def gradient_wish(self, x: Any) -> str | None:
        """How the framework says that it expects a gradient for `x` of what is computed now; None where it does not."""
        if getattr(x, "requires_grad", False) is True:
            return "has requires_grad=True"
        return None

    def lent(self, x: Any) -> Any:
        """The producer that `x` is to be imported from."""
        return x

    def _taken(self, producer: Any, like: Any) -> Any:
        result = self.from_dlpack(producer)
        # Where a framework has several names for one device, the caller's array says which is meant.
        device = getattr(like, "device", None)
        if hasattr(result, "to_device") and result.device != device:
            result = result.to_device(device)
        return result

    def _imported(self, name: str, x: Any) -> tuple[Any, str]:
        """A NumPy or CuPy array over the memory, and what its elements are; bfloat16 on the CPU comes as uint16."""
        dtype = dtype_label(getattr(x, "dtype", ""))
        try:
            producer = self.lent(x)
            kind, index = producer.__dlpack_device__()
            if int(kind) in ON_CPU:
                return np.from_dlpack(_Declared(producer, UNSIGNED) if dtype == "bfloat16" else producer), dtype
        except Exception as cause:
            # Foreign code fails in many ways, each with words of its own; ours say for which argument.
            raise _unreadable(name, x, cause) from cause
        if int(kind) not in ON_CUDA:
            raise TypeError(f"{name} is on DLPack device ({int(kind)}, {index}); allowed are CUDA and CPU arrays")
        cupy = cupy_module()
        try:
            return cupy.from_dlpack(producer), dtype
        except Exception as cause:
            raise _unreadable(name, x, cause) from cause


class _WithoutStream:
    """An export that takes no stream: TensorFlow waits for its own before it exports."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__()

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


class TensorFlow(Guest):
    """Eager TensorFlow tensors."""

    way_out = "tf.custom_gradient"

    def __init__(self, tensorflow: Any) -> None:
        super().__init__("tensorflow", tensorflow.experimental.dlpack.from_dlpack)
        self.tensorflow = tensorflow

    def lent(self, x: Any) -> Any:
        return _WithoutStream(x)

    def give(self, array: Any, like: Any) -> Any:
        if not isinstance(array, (np.ndarray, np.generic)):
            return super().give(array, like)
        # Its kernels take memory that came by DLPack for aligned to 64 bytes and crash where it is not; a copy is.
        tf = self.tensorflow
        with tf.device("CPU"):
            if array.dtype == np.uint16:
                return tf.bitcast(tf.convert_to_tensor(array), tf.bfloat16)
            return tf.convert_to_tensor(array)

    def _taken(self, producer: Any, like: Any) -> Any:
        # It takes bare capsules, which can name no stream.
        cupy_module().cuda.get_current_stream().synchronize()
        return self.from_dlpack(producer.__dlpack__())

    def gradient_wish(self, x: Any) -> str | None:
        # TensorFlow has no public question for these. Where the names are gone, nothing can be told, and a tape that
        # watches gets None as before.
        record = sys.modules.get("tensorflow.python.eager.record")
        if record is not None and record.should_record_backprop([x]):
            return "is watched by a tf.GradientTape"
        forward = sys.modules.get("tensorflow.python.eager.forwardprop_util")
        if forward is not None and forward.pack_tangents([x]).tangents:
            return "is watched by a tf.autodiff.ForwardAccumulator"
        return None

    def convert(self, name: str, source: str) -> str:
        return f"tf.convert_to_tensor({name})"

    def mask_array(self, name: str, dtype: str) -> str:
        return f'tf.convert_to_tensor({name}, dtype="{dtype}")'


class Paddle(Guest):
    """PaddlePaddle tensors in dynamic mode."""

    way_out = "paddle.autograd.PyLayer"

    def __init__(self, paddle: Any) -> None:
        super().__init__("paddle", paddle.from_dlpack if hasattr(paddle, "from_dlpack") else _paddle_utils(paddle))
        self.is_grad_enabled = paddle.is_grad_enabled

    def lent(self, x: Any) -> Any:
        # What needs a gradient exports nothing; the detached one is the same memory.
        return x if x.stop_gradient else x.detach()

    def gradient_wish(self, x: Any) -> str | None:
        return "has stop_gradient=False" if not x.stop_gradient and self.is_grad_enabled() else None

    def convert(self, name: str, source: str) -> str:
        return f"paddle.to_tensor({name})"

    def mask_array(self, name: str, dtype: str) -> str:
        return f'paddle.to_tensor({name}, dtype="{dtype}")'


def _paddle_utils(paddle: Any) -> Any:
    return paddle.utils.dlpack.from_dlpack


# Exact type -> its framework.
_known: WeakKeyDictionary[type, Guest] = WeakKeyDictionary()


def guest_for(name: str, x: Any) -> Guest:
    """The framework of a DLPack producer, or the refusal of one whose framework could not take its results."""
    guest = _known.get(type(x))
    if guest is None:
        guest = _found(name, x)
        # One name is one framework, in texts and where the arrays of a call are compared.
        while (known := FRAMEWORKS.get(guest.name, guest)) is not guest:
            if isinstance(known, Guest) and known.from_dlpack == guest.from_dlpack:
                guest = known
            else:
                guest.name += "'"
        FRAMEWORKS[guest.name] = _known[type(x)] = guest
    return guest


def _found(name: str, x: Any) -> Guest:
    root = type(x).__module__.partition(".")[0]
    if root in ("tensorflow", "paddle"):
        return (TensorFlow if root == "tensorflow" else Paddle)(sys.modules[root])
    namespace = x.__array_namespace__() if hasattr(x, "__array_namespace__") else _module_of(type(x))
    if not hasattr(namespace, "from_dlpack"):
        raise TypeError(
            f"{name} is {a_kind_of(x)}, which has neither an __array_namespace__ nor a module with a from_dlpack, so "
            f"nothing could make results of its type. {_advice(name, x)}"
        )
    guest = Guest(getattr(namespace, "__name__", root), namespace.from_dlpack)
    try:
        back = type(guest.from_dlpack(x))
    except Exception as cause:
        raise _unreadable(name, x, cause) from cause
    if back is object or not isinstance(x, back):
        raise TypeError(
            f"{name} is {a_kind_of(x)}, but its framework's from_dlpack makes a {back.__module__}.{back.__qualname__}, "
            f"so results would be of another type. {_advice(name, x)}"
        )
    return guest


def _module_of(kind: type) -> Any:
    """The innermost of the modules around a type that has a from_dlpack; None where there is none."""
    path = kind.__module__
    while path and not hasattr(sys.modules.get(path), "from_dlpack"):
        path = path.rpartition(".")[0]
    return sys.modules[path] if path else None


_lent: list[tuple[Any, list[ArrayView]]] = []
_lent_lock = ForkLock()


def hold(views: list[ArrayView]) -> None:
    """Keep memory of guests on a GPU until it has read it.

    torch, CuPy and XLA order the reuse of their memory after work on the stream; of others nothing is known.
    """
    cupy = cupy_module()
    with cupy.cuda.Device(views[0].device.index):
        event = cupy.cuda.Event(disable_timing=True)
        event.record(cupy.cuda.get_current_stream())
    with _lent_lock():
        _lent[:] = [entry for entry in _lent if not entry[0].done]
        _lent.append((event, views))


def _advice(name: str, x: Any) -> str:
    try:
        kind = int(x.__dlpack_device__()[0])
    except Exception:
        kind = ON_CPU[0]
    ways = (f"np.from_dlpack({name})",) if kind in ON_CPU else (f"cupy.from_dlpack({name})",)
    return f"Convert it, without a copy: {' or '.join((*ways, f'torch.from_dlpack({name})'))}"


def _unreadable(name: str, x: Any, cause: Exception) -> TypeError:
    return TypeError(
        f"{name}: this {kind_of(x)} could not be read through DLPack: {cause}. Pass a live, dense array of a plain "
        f"dtype, or one of another framework, such as np.asarray({name})"
    )

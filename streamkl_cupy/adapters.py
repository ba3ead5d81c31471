"""One adapter per framework: how its arrays are read, allocated and ordered on a stream.

A framework is looked up through `sys.modules`, never imported: whoever holds an array of it has done that already.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from . import install
from .arguments import a_kind_of, with_article
from .problem import Device, compact_strides

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
MASK_ITEMSIZE = {"int32": 4, "bool": 1}
CPU = Device("cpu")
_XLA_DETERMINISTIC = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")

# The frameworks with adapters here; all others are guests.
OWN = frozenset({"numpy", "cupy", "torch", "jax"})

# numpy dtype object -> our name. bfloat16 joins when the first array of it arrives: only ml_dtypes defines it; until
# then it is made as its bits. Types of foreign byte order compare unequal to these, so they are refused like any other.
_NUMPY_NAMES: dict[Any, str] = {np.dtype(name): name for name in ("float16", "float32", "float64")}
_MASK_NAMES: dict[Any, str] = {np.dtype(name): name for name in MASK_ITEMSIZE}
_NUMPY_TYPES: dict[str, Any] = {
    **{name: dtype for dtype, name in _NUMPY_NAMES.items()},
    "bfloat16": np.dtype(np.uint16),
}


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


Reader = Callable[..., ArrayView]


@lru_cache(maxsize=16)
def cuda(index: int) -> Device:
    """The one Device object of a GPU, so that comparing cache keys is mostly an identity test."""
    return Device("cuda", index)


@lru_cache(maxsize=4096)
def settle(
    shape: tuple[int, ...], strides: tuple[int, ...], unit: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Plain shape, and strides in elements of a size of `unit`; None where they are not whole elements.

    An axis of extent 1 may carry any stride. It gets the one that continues the axes inside it, so that it neither
    breaks an alignment rule nor makes a second cache entry. Without elements no stride means anything.
    """
    if 0 in shape:
        return tuple(shape), compact_strides(tuple(shape))
    settled = [0] * len(shape)
    inner = 1
    for axis in range(len(shape) - 1, -1, -1):
        if shape[axis] == 1:
            settled[axis] = inner
        else:
            settled[axis], odd = divmod(strides[axis], unit)
            if odd:
                return None
        inner = settled[axis] * shape[axis]
    return tuple(shape), tuple(settled)


class Adapter:
    """What a framework must answer. `allocate` and `stream` are asked only where results are made by it."""

    name: str

    def read(self, name: str, x: Any, mask: bool = False) -> ArrayView:
        """View `x` without a copy, or raise naming `name`; with `mask` its elements are those of masks."""
        raise NotImplementedError

    def is_standin(self, x: Any) -> bool:
        """Whether `x` has a shape and a dtype but no memory."""
        return False

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

    def stream(self, index: int) -> int:
        """Handle of the current stream of GPU `index`."""
        raise NotImplementedError

    def deterministic(self) -> bool:
        """Whether the framework has been asked for equal bits from run to run, by a switch of its own."""
        return False


class NumPy(Adapter):
    """NumPy arrays, subclasses other than masked ones included."""

    name = "numpy"

    def read(self, name: str, x: Any, mask: bool = False) -> ArrayView:
        return self.view(name, x, CPU, mask)

    def view(self, name: str, x: Any, device: Device, mask: bool = False) -> ArrayView:
        """The part that NumPy and CuPy share: strides in bytes."""
        dtype = _numpy_name(name, x.dtype, mask)
        ptr, size = self.address(x), x.dtype.itemsize
        layout = settle(x.shape, x.strides, size)
        if layout is None or (ptr % size and x.size):
            raise ValueError(
                f"{name}: its address and byte strides {x.strides} must be whole multiples of the {size}-byte {dtype} "
                f"element; pass an aligned copy, {self.name}.array({name}, order='C')"
            )
        return ArrayView(name, self.name, device, dtype, layout[0], layout[1], ptr, x)

    def allocate(self, like: ArrayView, shape: tuple[int, ...], dtype: str) -> Any:
        return np.empty(shape, _NUMPY_TYPES[dtype])

    def address(self, x: Any) -> int:
        return int(x.__array_interface__["data"][0])


class CuPy(NumPy):
    """CuPy arrays."""

    name = "cupy"

    def __init__(self, cupy: Any) -> None:
        self.cupy = cupy

    def read(self, name: str, x: Any, mask: bool = False) -> ArrayView:
        # The short way for what is as it should be; the shared way knows how to complain.
        data, dtype = x.data, _NUMPY_NAMES.get(x.dtype)
        device = cuda(data.device_id)
        if dtype is None:
            return self.view(name, x, device, mask)
        ptr, size = data.ptr, ITEMSIZE[dtype]
        layout = settle(x.shape, x.strides, size)
        if layout is None or ptr % size:
            return self.view(name, x, device)
        return ArrayView(name, "cupy", device, dtype, layout[0], layout[1], ptr, x)

    def allocate(self, like: ArrayView, shape: tuple[int, ...], dtype: str) -> Any:
        # CuPy allocates on the current device, from that device's current stream.
        with self.cupy.cuda.Device(like.device.index):
            return self.cupy.empty(shape, _NUMPY_TYPES[dtype])

    def allocate_planes(self, like: ArrayView, count: int, shape: tuple[int, ...], dtype: str) -> tuple[int, Any]:
        # From the memory up, because indexing an array costs the host more than all of this.
        make, kind = self.cupy.ndarray, _NUMPY_TYPES[dtype]
        step = prod(shape) * ITEMSIZE[dtype]
        with self.cupy.cuda.Device(like.device.index):
            memory = self.cupy.cuda.alloc(count * step)
            return int(memory.ptr), tuple(make(shape, kind, memory + i * step) for i in range(count))

    def address(self, x: Any) -> int:
        return int(x.data.ptr)

    def stream(self, index: int) -> int:
        return int(self.cupy.cuda.get_current_stream(index).ptr)


class Torch(Adapter):
    """torch tensors, through attributes only.

    The DLPack export of torch costs ten times more, refuses requires_grad and tensors off the current device, and loses
    the negative bit.
    """

    name = "torch"

    def __init__(self, torch: Any) -> None:
        self.torch = torch
        self.types = {name: getattr(torch, name) for name in ITEMSIZE}
        self.names = {dtype: name for name, dtype in self.types.items()}
        self.mask_names = {getattr(torch, name): name for name in MASK_ITEMSIZE}
        self.devices: dict[Any, Device] = {torch.device("cpu"): CPU}
        # The public way builds a Stream object, 8 us; the private one returns the handle.
        self.raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        # Asked in every call; the public function is a wrapper around this one.
        self.switch = getattr(torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled)

    def read(self, name: str, x: Any, mask: bool = False) -> ArrayView:
        try:
            layout = settle(x.shape, x.stride(), 1)
            ptr = x.data_ptr()
            device = self.devices.get(x.device) or self._device(x.device)
            dtype = (self.mask_names if mask else self.names)[x.dtype]
            plain = not x.is_neg()
        except Exception as cause:
            # Odd tensors fail in many ways, each with words of its own; ours say which oddity it is.
            raise TypeError(f"{name} {self._complaint(name, x, mask)}") from cause
        if layout is None or not plain or (ptr == 0 and 0 not in layout[0]):
            raise TypeError(f"{name} {self._complaint(name, x, mask)}")
        return ArrayView(name, "torch", device, dtype, layout[0], layout[1], ptr, x)

    def read_subclass(self, name: str, x: Any, mask: bool = False) -> ArrayView:
        """A subclass that answers operators itself may well lend an address that is not its value's."""
        if self.is_standin(x):
            raise TypeError(f"{name} {self._complaint(name, x, mask)}")
        return self.read(name, x, mask)

    def is_standin(self, x: Any) -> bool:
        """Meta tensors, and subclasses that answer operators themselves (FakeTensor, DTensor, wrappers)."""
        return bool(x.is_meta) or type(x).__torch_dispatch__ is not self.torch.Tensor.__torch_dispatch__

    def _device(self, device: Any) -> Device:
        if device.type != "cuda":
            raise ValueError(f"device {device}")
        return self.devices.setdefault(device, cuda(device.index))

    def _complaint(self, name: str, x: Any, mask: bool) -> str:
        """Why `read` failed, most telling cause first."""
        torch, kind = self.torch, type(x).__name__
        if torch._C._functorch.is_functorch_wrapped_tensor(x) or torch._is_functional_tensor(x):
            return (
                "is a tensor inside a torch.func transform (vmap, grad, jvp, functionalize), which has no memory to "
                "read; the explicit functions work on plain tensors, call streamkl_cupy.attention_kl there"
            )
        if x.is_nested or x.layout is not torch.strided:
            return f"is not a dense tensor (layout {x.layout}, nested {x.is_nested}); pass a padded or dense one"
        if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return (
                f"is {with_article(kind)}, which has no memory of its own; outside torch.compile give plain tensors "
                f"(of a distributed or wrapped tensor, its local one)"
            )
        if x.is_meta:
            return "is on the meta device, which holds no numbers; give a CUDA or CPU tensor (plan and warmup take it)"
        if x.is_quantized:
            return f"is quantized ({x.dtype}); pass {name}.dequantize()"
        if x.dtype not in (self.mask_names if mask else self.names):
            return refused_dtype(x.dtype, f"{name}.to(torch.float32)")
        if x.device.type not in ("cuda", "cpu"):
            return f"is on device {x.device}; allowed are CUDA and CPU tensors"
        if x.is_neg():
            return f"has its negative bit set, so its memory holds the opposite sign; pass {name}.resolve_neg()"
        return f"is {with_article(kind)} whose memory cannot be read; pass {name}.clone()"

    def allocate(self, like: ArrayView, shape: tuple[int, ...], dtype: str) -> Any:
        return self.torch.empty(shape, dtype=self.types[dtype], device=like.array.device)

    def address(self, x: Any) -> int:
        return int(x.data_ptr())

    def allocate_planes(self, like: ArrayView, count: int, shape: tuple[int, ...], dtype: str) -> tuple[int, Any]:
        whole = self.allocate(like, (count, *shape), dtype)
        return whole.data_ptr(), whole.unbind(0)

    def stream(self, index: int) -> int:
        if self.raw_stream is not None:
            return int(self.raw_stream(index))
        return int(self.torch.cuda.current_stream(index).cuda_stream)

    def deterministic(self) -> bool:
        # With warn_only too: that is for operators which have no such way.
        return bool(self.switch())


class JAX(Adapter):
    """JAX arrays, read only: XLA makes its results itself."""

    name = "jax"

    def __init__(self, jax: Any) -> None:
        self.tracer = jax.core.Tracer

    def read(self, name: str, x: Any, mask: bool = False) -> ArrayView:
        if isinstance(x, self.tracer):
            raise TypeError(
                f"{name} is a JAX tracer, which holds no numbers; inside jit, grad, vmap or scan call "
                f"streamkl_cupy.attention_kl instead of the explicit functions"
            )
        if x.is_deleted():
            raise ValueError(f"{name} is a deleted JAX array (donated, or delete() was called); pass a live one")
        dtype = _numpy_name(name, x.dtype, mask)
        places = x.devices()
        if len(places) != 1:
            raise ValueError(
                f"{name} is spread over {len(places)} devices; call attention_kl inside jax.shard_map, where each "
                f"device sees its own part"
            )
        (place,) = places
        if place.platform not in ("cpu", "gpu", "cuda"):
            raise TypeError(f"{name} is on JAX platform {place.platform!r}; allowed are CUDA and CPU arrays")
        # The index inside this process is the one CUDA knows; `id` counts over all hosts.
        device = CPU if place.platform == "cpu" else cuda(place.local_hardware_id)
        shape = tuple(x.shape)
        return ArrayView(name, "jax", device, dtype, shape, compact_strides(shape), x.unsafe_buffer_pointer(), x)

    def is_standin(self, x: Any) -> bool:
        return isinstance(x, self.tracer)

    def deterministic(self) -> bool:
        return xla_deterministic()


class NoArray(Adapter):
    """Whatever lends no memory: stand-ins where these are welcome, an error elsewhere."""

    name = "no array"

    def read(self, name: str, x: Any, mask: bool = False) -> ArrayView:
        raise TypeError(f"{name} {_no_array(name, x)}")

    def is_standin(self, x: Any) -> bool:
        return True


ADAPTERS: dict[str, Adapter] = {"numpy": NumPy(), "no array": NoArray()}
# Exact type -> (framework, reader). Subclasses are looked at anew each time: they are rare, and may be short-lived.
READERS: dict[type, tuple[str, Reader]] = {np.ndarray: ("numpy", ADAPTERS["numpy"].read)}


def adapter_for(name: str, x: Any) -> tuple[str, Reader]:
    """Framework and reader of an array whose exact type is not in READERS yet."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask would be lost; pass {name}.filled(value) or {name}.data")
    if isinstance(x, np.ndarray):
        return READERS[np.ndarray]
    if isinstance(x, _attribute("torch", "Tensor")):
        torch = sys.modules["torch"]
        adapter = Torch(torch) if "torch" not in ADAPTERS else ADAPTERS["torch"]
        ADAPTERS["torch"] = adapter
        READERS[torch.Tensor] = READERS[torch.nn.Parameter] = ("torch", adapter.read)
        return READERS.get(type(x)) or ("torch", getattr(adapter, "read_subclass", adapter.read))
    if isinstance(x, _attribute("cupy", "ndarray")):
        cupy = sys.modules["cupy"]
        return READERS.setdefault(cupy.ndarray, ("cupy", ADAPTERS.setdefault("cupy", CuPy(cupy)).read))
    if isinstance(x, _attribute("jax", "Array")):
        return ("jax", ADAPTERS.setdefault("jax", JAX(sys.modules["jax"])).read)
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        adapter = importlib.import_module(".guests", __package__).guest_for(name, x)
        return (adapter.name, adapter.read)
    return ("no array", ADAPTERS["no array"].read)


def cupy_module() -> Any:
    """CuPy, or an ImportError that says how to get it."""
    try:
        return importlib.import_module("cupy")
    except ImportError as cause:
        raise ImportError(f"CUDA arrays need CuPy, which cannot be imported: {install.cuda()}") from cause


def refused_dtype(dtype: Any, remedy: str) -> str:
    """The rest of a sentence that begins with the argument's name."""
    return (
        f"has dtype {dtype}; allowed are bfloat16, float16, float32 and, on the CPU, float64, in native byte order. "
        f"Convert it, for example {remedy}"
    )


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


def dtype_label(dtype: Any) -> str:
    """The name of a dtype of any framework: "float32" of numpy.float32, torch.float32, <dtype: 'float32'>."""
    if isinstance(dtype, np.dtype):
        return str(dtype)  # with a foreign byte order
    name = getattr(dtype, "name", None)
    # Paddle's names are those of an enumeration in capitals.
    return name if isinstance(name, str) and name.islower() else str(dtype).rpartition(".")[2]


def xla_deterministic() -> bool:
    """Whether XLA's flags ask for equal bits from run to run; it tells nobody, but reads them where this does."""
    flags = [flag.partition("=") for flag in os.environ.get("XLA_FLAGS", "").split()]
    # The last one of a name counts.
    values = {name: value.strip("\"'").lower() not in ("false", "0") for name, _, value in flags}
    return any(values.get(name, False) for name in _XLA_DETERMINISTIC)


def _attribute(module: str, name: str) -> Any:
    """A class of a module that may be absent or half imported; an empty tuple, which nothing is an instance of."""
    return getattr(sys.modules.get(module), name, ())


def _numpy_name(name: str, dtype: Any, mask: bool) -> str:
    known = (_MASK_NAMES if mask else _NUMPY_NAMES).get(dtype)
    if known is not None:
        return known
    if getattr(dtype, "name", "") == "bfloat16" and dtype.itemsize == 2:
        _NUMPY_TYPES["bfloat16"] = dtype
        return _NUMPY_NAMES.setdefault(dtype, "bfloat16")
    raise TypeError(f"{name} {refused_dtype(dtype, f'{name}.astype(np.float32)')}")

"""PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from ..arguments import with_article
from ..arrays import CPU, ITEMSIZE, MASK_ITEMSIZE, ArrayView, compact, cuda, in_elements
from ..problem import Device
from .base import Framework, refused_dtype


class Torch(Framework):
    """torch tensors, through attributes only.

    The DLPack export of torch costs ten times more, refuses requires_grad and tensors off the current device, and loses
    the negative bit.
    """

    name = "torch"
    array = "Tensor"
    prevails: ClassVar[int] = 3

    def __init__(self, module: Any) -> None:
        self.torch = torch = module
        self.dtypes = {name: getattr(torch, name) for name in ITEMSIZE}
        self.names = {dtype: name for name, dtype in self.dtypes.items()}
        self.mask_names = {getattr(torch, name): name for name in MASK_ITEMSIZE}
        self.devices: dict[Any, Device] = {torch.device("cpu"): CPU}
        # The public way builds a Stream object, 8 us; the private one returns the handle.
        self.raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        # What torch's own compiled programs make tensors by, at a third of the cost; done without where it is gone.
        fast = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
        self.guards = getattr(fast, "TensorGuards", None)
        self.part = getattr(fast, "_reinterpret_tensor", None)
        self.empty_on_cpu = getattr(fast, "_empty_strided_cpu", None)
        self.empty_on_current_gpu = getattr(fast, "_empty_strided_cuda", None)
        self.current_gpu = getattr(torch._C, "_cuda_getDevice", lambda: None)
        self.dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
        # Asked in every call, so functions of torch's own stand for methods. This one is true with warn_only too, which
        # is for operators that have no such way; the public function is a wrapper around it.
        switch = getattr(torch._C, "_get_deterministic_algorithms", torch.are_deterministic_algorithms_enabled)
        self.deterministic = switch  # type: ignore[method-assign]
        self.address = torch.Tensor.data_ptr  # type: ignore[method-assign]

    def read(self, name: str, x: Any, mask: bool = False) -> ArrayView:
        try:
            layout = in_elements(x.shape, x.stride(), 1)
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

    def alike(self, arrays: Sequence[Any]) -> Callable[..., bool]:
        # Guards refuse a tensor that stands in two places, as keys that are values too.
        if self.guards is not None and len({*map(id, arrays)}) == len(arrays):
            shapes, strides = [list(x.shape) for x in arrays], [list(x.stride()) for x in arrays]
            guards = self.guards(*arrays, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)
            return guards.check  # type: ignore[no-any-return]
        looks = self._looks(arrays)

        def alike(*others: Any) -> bool:
            try:
                return self._looks(others) == looks
            except Exception:
                return False  # odd tensors raise here and there; `read` knows how to complain

        return alike

    def _looks(self, arrays: Sequence[Any]) -> list[tuple[Any, ...]]:
        return [(type(x), x.shape, x.stride(), x.dtype, x.device, x.is_neg()) for x in arrays]

    def types(self) -> tuple[type, ...]:
        return (self.torch.Tensor, self.torch.nn.Parameter)

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
                "read; the explicit functions work on plain tensors: call attention_kl, sparse_attention or indexer_kl"
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
        device, kind = like.device, self.dtypes[dtype]
        if device.kind == "cpu":
            make = self.empty_on_cpu
        else:
            make = self.empty_on_current_gpu if self.current_gpu() == device.index else None
        if make is None or self.dispatch_modes():
            found = next(x for x, known in self.devices.items() if known == device)
            return self.torch.empty(shape, dtype=kind, device=found)
        return make(shape, compact(shape, 0)[0], kind)

    def allocate_planes(self, like: ArrayView, count: int, shape: tuple[int, ...], dtype: str) -> tuple[int, Any]:
        whole, part = self.allocate(like, (count, *shape), dtype), self.part
        # To autograd these are tensors of their own: one that is changed in place leaves the others as they are.
        if part is None or self.dispatch_modes():
            return whole.data_ptr(), [plane.data for plane in whole.unbind(0)]
        strides, size = compact(shape, 1)
        return whole.data_ptr(), [part(whole, shape, strides, i * size) for i in range(count)]

    def stream(self, device: Device) -> int:
        if self.raw_stream is not None:
            return int(self.raw_stream(device.index))
        return int(self.torch.cuda.current_stream(device.index).cuda_stream)

    def namespace(self, device: Device) -> Any:
        return self.torch

    def detached(self, x: Any) -> Any:
        return x.detach()

    def convert(self, name: str, source: str) -> str:
        # Those of NumPy may be on another device than the call.
        if source in ("numpy", "cupy"):
            return f"torch.as_tensor({name}, device=student_q.device)"
        return f"torch.from_dlpack({name})"

    def to_numpy(self, name: str) -> str:
        return f"{name}.numpy(force=True)"

    def mask_array(self, name: str, dtype: str) -> str:
        return f"torch.as_tensor({name}, dtype=torch.{dtype}, device=student_q.device)"

    def contiguous(self, name: str, device: Device) -> str:
        return f"{name}.contiguous()"


FRAMEWORK = Torch

"""JAX."""

from __future__ import annotations

import importlib
import os
from typing import Any, ClassVar

from ..arrays import CPU, ArrayView, cuda
from ..problem import Device, compact_strides
from .base import Framework
from .numpy import name_of

_XLA_DETERMINISTIC = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")


def xla_deterministic() -> bool:
    """Whether XLA's flags ask for equal bits from run to run; it tells nobody, but reads them where this does."""
    flags = [flag.partition("=") for flag in os.environ.get("XLA_FLAGS", "").split()]
    # The last one of a name counts.
    values = {name: value.strip("\"'").lower() not in ("false", "0") for name, _, value in flags}
    return any(values.get(name, False) for name in _XLA_DETERMINISTIC)


def _address(x: Any, device: Device) -> int:
    """Where the elements of an array on the CPU lie, once they are there.

    An array that XLA has not begun to compute has no memory yet, and to ask for its address waits for that while it
    holds Python's lock, which callbacks in front of it need: both would wait for ever. `block_until_ready` lets go of
    the lock. On a GPU nobody reads there: XLA hands its buffers to the callback, which asks them.
    """
    if device.kind != "cpu":
        return 0
    return int(x.block_until_ready().unsafe_buffer_pointer())


class JAX(Framework):
    """JAX arrays, read only: XLA makes its results itself."""

    name = "jax"
    array = "Array"
    prevails: ClassVar[int] = 3

    def __init__(self, module: Any) -> None:
        self.tracer = module.core.Tracer

    def read(self, name: str, x: Any, mask: bool = False) -> ArrayView:
        if isinstance(x, self.tracer):
            raise TypeError(
                f"{name} is a JAX tracer, which holds no numbers; inside jit, grad, vmap or scan call "
                f"attention_kl, sparse_attention or indexer_kl, not the explicit functions"
            )
        if x.is_deleted():
            raise ValueError(f"{name} is a deleted JAX array (donated, or delete() was called); pass a live one")
        dtype = name_of(name, x.dtype, mask)
        devices = x.devices()
        if len(devices) != 1:
            raise ValueError(
                f"{name} is spread over {len(devices)} devices; call inside jax.shard_map, where each device sees "
                f"its own part"
            )
        (own,) = devices
        if own.platform not in ("cpu", "gpu", "cuda"):
            raise TypeError(f"{name} is on JAX platform {own.platform!r}; allowed are CUDA and CPU arrays")
        # The index inside this process is the one CUDA knows; `id` counts over all hosts.
        device = CPU if own.platform == "cpu" else cuda(own.local_hardware_id)
        shape = tuple(x.shape)
        return ArrayView(name, "jax", device, dtype, shape, compact_strides(shape), _address(x, device), x)

    def is_standin(self, x: Any) -> bool:
        return isinstance(x, self.tracer)

    def deterministic(self) -> bool:
        return xla_deterministic()

    def namespace(self, device: Device) -> Any:
        return importlib.import_module("jax.numpy")

    def convert(self, name: str, source: str) -> str:
        return f"jax.numpy.asarray({name})"

    def mask_array(self, name: str, dtype: str) -> str:
        return f'jax.numpy.asarray({name}, dtype="{dtype}")'


FRAMEWORK = JAX

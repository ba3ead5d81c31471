"""Kernels: a file for each of `cuda_src/kernels`, all of them answering the questions of `base.py`."""

from __future__ import annotations

from typing import Any

from . import forward_sm80, forward_sm90, fused_sm90, gradient_sm80, gradient_sm90
from .base import Kernel

KERNELS: dict[str, tuple[Kernel[Any], ...]] = {
    "forward": (forward_sm90.KERNEL, forward_sm80.KERNEL),
    "gradient": (gradient_sm90.KERNEL, gradient_sm80.KERNEL),
    "fused": (fused_sm90.KERNEL,),
}
"""By kind of task, the most capable first; the last forward and gradient run on every supported GPU."""

"""Kernels: a file for each of `cuda_src/kernels`, all of them answering the questions of `base.py`."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

from ..ops import ATTENTION_KL, ATTENTION_KL_TO, SPARSE_ATTENTION
from . import (
    attention_combine,
    attention_fused_sm90,
    attention_gradient_sm80,
    attention_gradient_sm90,
    attention_rows,
    attention_sm80,
    attention_sm90,
    combine,
    forward_sm80,
    forward_sm90,
    fused_sm90,
    gradient_sm80,
    gradient_sm90,
    saved_rows,
)
from .base import Kernel

KERNELS: dict[str, tuple[Kernel[Any], ...]] = {
    "forward": (forward_sm90.KERNEL, forward_sm80.KERNEL),
    "gradient": (gradient_sm90.KERNEL, gradient_sm80.KERNEL),
    "fused": (fused_sm90.KERNEL,),
    "attention": (attention_sm90.KERNEL, attention_sm80.KERNEL),
    "attention_gradient": (attention_gradient_sm90.KERNEL, attention_gradient_sm80.KERNEL),
    "attention_fused": (attention_fused_sm90.KERNEL,),
}
"""By kind of task, the most capable first; the last forward and gradients run on every supported GPU."""

JOINS: Final[dict[str, ModuleType]] = {
    ATTENTION_KL.name: combine,
    ATTENTION_KL_TO.name: combine,
    SPARSE_ATTENTION.name: attention_combine,
}
"""By operation, what joins the splits of its forward."""
SAVED_ROWS: Final[dict[str, ModuleType]] = {
    ATTENTION_KL.name: saved_rows,
    ATTENTION_KL_TO.name: saved_rows,
    SPARSE_ATTENTION.name: attention_rows,
}
"""By operation, what makes of saved rows those that its gradients read."""

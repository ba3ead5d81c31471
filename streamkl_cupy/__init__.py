"""KL divergence between two attention distributions, forward and backward, without the N x N matrix.

One primitive over arrays of NumPy, CuPy, PyTorch, JAX and other DLPack producers; see `attention_kl`.
"""

from .api import (
    KLForward,
    KLGradients,
    attention_kl,
    attention_kl_backward,
    attention_kl_forward,
    attention_kl_value_and_grad,
    plan,
    warmup,
)
from .errors import CaptureError, CompilerError, DriverError, StreamKLError

__all__ = [
    "CaptureError",
    "CompilerError",
    "DriverError",
    "KLForward",
    "KLGradients",
    "StreamKLError",
    "attention_kl",
    "attention_kl_backward",
    "attention_kl_forward",
    "attention_kl_value_and_grad",
    "plan",
    "warmup",
]
__version__ = "0.1.0"

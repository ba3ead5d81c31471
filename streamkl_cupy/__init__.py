"""KL divergence between two attention distributions, forward and backward, without the N x N matrix.

One primitive over arrays of NumPy, CuPy, PyTorch, JAX and of other frameworks with DLPack; see `attention_kl`.
"""

from typing import TYPE_CHECKING, Any

from .api import (
    KLEntropy,
    KLForward,
    KLForwardMass,
    KLForwardRows,
    KLGradients,
    KLSinkGradients,
    attention_kl,
    attention_kl_backward,
    attention_kl_forward,
    attention_kl_value_and_grad,
    plan,
    warmup,
)
from .attention import (
    AttentionForward,
    AttentionGradients,
    merge_attention_states,
    sparse_attention,
    sparse_attention_backward,
    sparse_attention_forward,
    sparse_attention_plan,
    sparse_attention_warmup,
)
from .errors import CaptureError, CompilerError, DriverError, StreamKLError
from .frameworks.base import DOORS
from .indexer.api import (
    IndexerForward,
    IndexerGradients,
    indexer_kl,
    indexer_kl_backward,
    indexer_kl_forward,
    indexer_kl_plan,
    indexer_kl_value_and_grad,
    indexer_kl_warmup,
    indexer_target,
)
from .targets import attention_kl_to, attention_kl_to_plan, attention_kl_to_value_and_grad, attention_kl_to_warmup

__all__ = [
    "AttentionForward",
    "AttentionGradients",
    "CaptureError",
    "CompilerError",
    "DriverError",
    "IndexerForward",
    "IndexerGradients",
    "KLEntropy",
    "KLForward",
    "KLForwardMass",
    "KLForwardRows",
    "KLGradients",
    "KLSinkGradients",
    "StreamKLError",
    "attention_kl",
    "attention_kl_backward",
    "attention_kl_forward",
    "attention_kl_to",
    "attention_kl_to_plan",
    "attention_kl_to_value_and_grad",
    "attention_kl_to_warmup",
    "attention_kl_value_and_grad",
    "indexer_kl",
    "indexer_kl_backward",
    "indexer_kl_forward",
    "indexer_kl_plan",
    "indexer_kl_value_and_grad",
    "indexer_kl_warmup",
    "indexer_target",
    "merge_attention_states",
    "parallel",
    "patterns",
    "plan",
    "sparse_attention",
    "sparse_attention_backward",
    "sparse_attention_forward",
    "sparse_attention_plan",
    "sparse_attention_warmup",
    "warmup",
]
__version__ = "0.2.0"

if TYPE_CHECKING:
    from . import parallel, patterns


def _jax() -> Any:
    # Imported when JAX arrays come, since it imports JAX.
    from . import jax

    return jax


DOORS["jax"] = _jax


def __getattr__(name: str) -> Any:
    """`streamkl_cupy.patterns` and `parallel`, imported by those who use them: every other import of the package is
    spared their time."""
    if name not in ("parallel", "patterns"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return import_module(f".{name}", __name__)

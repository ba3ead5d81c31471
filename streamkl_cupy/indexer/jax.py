"""JAX: `indexer_kl`, and what becomes of its rows; `autodiff/jax.py` is how."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .. import arrays, frameworks, validate
from ..autodiff import jax as autodiff
from ..call import Call
from ..rules import reductions
from .losses import IndexLoss, inactive, reduced
from .results import IndexerForward, IndexerGradients


def loss(call: Call, asked: IndexLoss) -> Any:
    """`indexer_kl` of a call with JAX arrays."""
    config, weight = autodiff.checked(call), asked.row_weight
    if weight is not None and not isinstance(weight, jax.Array):
        raise validate.not_of("jax", "row_weight", weight)
    return _loss(call.operands, call.masks, weight, config=config, asked=asked._replace(row_weight=None))


@autodiff.differentiable
def _loss(
    inputs: tuple[Any, ...], masks: tuple[Any, ...], weight: Any, *, config: autodiff.Config, asked: IndexLoss
) -> Any:
    found = autodiff.rows(config, inputs, masks)
    if weight is not None:
        like = frameworks.standin(config.op.like, found.kl, arrays.CPU)._replace(framework="jax")
        validate.row_weight(weight, found.kl.shape, like)
    given = inputs[config.op.names.index("teacher_lse")]
    return reduced(jnp, tuple(found), given, asked._replace(row_weight=weight))


# The explicit functions, of calls whose arrays have been read.


def forward(call: Call) -> IndexerForward:
    """What the explicit function gives back of a forward."""
    given = call.operands[call.op.names.index("teacher_lse")]
    stats: IndexerForward = reduced(jnp, tuple(autodiff.run_forward(call)), given, IndexLoss(return_stats=True))
    return stats


def value_and_grad(call: Call, weight: Any, reduction: str, wrt: tuple[str, ...]) -> tuple[Any, IndexerGradients]:
    """A loss over all rows and its gradients."""
    kl, index_lse, target_sum, made_lse = autodiff.run_forward(call)
    value, share = reductions.value_and_gradient(jnp, kl, inactive(jnp, target_sum), weight, reduction)
    grad = reductions.spread(jnp, value, share, kl.shape)
    return value, backward(call, (grad, index_lse, target_sum, made_lse), wrt)


def backward(call: Call, saved: tuple[Any, ...], wrt: tuple[str, ...]) -> IndexerGradients:
    """Gradients from what the record says that a backward reads."""
    return IndexerGradients(**autodiff.run_backward(call, saved, wrt))


def target(call: Call) -> Any:
    """What the teacher's heads add up to."""
    return autodiff.run_forward(call).target

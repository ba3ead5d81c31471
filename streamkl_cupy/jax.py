"""JAX: operations under grad, jit, vmap, scan, remat and shard_map, and the explicit functions on JAX arrays.

What differentiates is in ``autodiff/jax.py``; here is what becomes of the rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from . import arrays, frameworks, validate
from .advice.signatures import public
from .api import attention_kl_backward, attention_kl_forward, attention_kl_value_and_grad
from .arguments import flag
from .attention import sparse_attention_backward, sparse_attention_forward
from .autodiff import jax as autodiff
from .call import Call
from .ops import ATTENTION_KL, SPARSE_ATTENTION, Op
from .options import MASK_ARRAYS, LossOptions, with_sunk
from .results import AttentionForward, AttentionGradients, KLEntropy, KLGradients, KLSinkGradients, rows_of
from .rules import masks, reductions, sinks
from .rules.sinks import Sinks

if TYPE_CHECKING:
    from .arrays import Results
    from .patterns import BlockPattern

__all__ = [
    "attention_kl",
    "attention_kl_backward",
    "attention_kl_forward",
    "attention_kl_value_and_grad",
    "sparse_attention",
    "sparse_attention_backward",
    "sparse_attention_forward",
]


def _loss(
    operands: tuple[Any, ...],
    given: dict[str, Any],
    *,
    op: Op = ATTENTION_KL,
    return_entropy: bool = False,
    **own: Any,
) -> Any:
    if return_entropy is not False:
        given = {**given, "return_entropy": return_entropy}
    asked = LossOptions(**own)
    call = Call.of(op, operands, with_sunk(given, asked))
    validate.loss(asked)
    return loss(call, asked)


@public(_loss)
def attention_kl(
    teacher_q: jax.Array,
    teacher_k: jax.Array,
    student_q: jax.Array,
    student_k: jax.Array,
    *,
    teacher_scale: float | None = None,
    student_scale: float | None = None,
    teacher_score: str = "dot",
    student_score: str = "dot",
    teacher_softcap: float | None = None,
    student_softcap: float | None = None,
    causal: bool = False,
    q_offset: int | None = None,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: jax.Array | None = None,
    query_lengths: jax.Array | None = None,
    cu_seqlens_q: jax.Array | None = None,
    cu_seqlens_k: jax.Array | None = None,
    key_mask: jax.Array | None = None,
    query_mask: jax.Array | None = None,
    block_mask: BlockPattern | None = None,
    divergence: str = "kl",
    jsd_beta: float | None = None,
    smoothing: float | None = None,
    row_weight: Any = None,
    reduction: str = "none",
    layout: str = "bhnd",
    precision: str = "highest",
    return_lse: bool = False,
    dense_teacher_lse: jax.Array | None = None,
    return_entropy: bool = False,
    deterministic: bool | None = None,
    teacher_sink_logits: jax.Array | None = None,
    student_sink_logits: jax.Array | None = None,
) -> Any:
    """KL divergence from a teacher's to a student's attention rows, differentiable by JAX.

    The arguments, results and accuracy are those of :func:`streamkl_cupy.attention_kl`, which comes here when it is
    given JAX arrays. Gradients of first order reach the four inputs, sinks and ``row_weight``; only those that are
    asked for are computed. The log-sum-exps carry no gradient. Second order raises NotImplementedError, forward mode
    TypeError.

    Works under ``jit``, ``grad``, ``vmap``, ``lax.scan``, ``checkpoint`` and ``shard_map``. Everything after the four
    arrays is static except ``row_weight``, sinks and the arrays of masks. ``vmap`` becomes one larger batch; packed
    sequences have none, so there it becomes a loop. Under plain ``jit`` on sharded arrays XLA gathers them and every
    device does all the work: use ``shard_map`` over the batch or head axis.
    Under a transform the arrays are taken to be on JAX's default device. A `block_mask` is part of the program: another
    one means another compilation, and JAX keeps what it has compiled, patterns included, for as long as the jitted
    function of the caller, or for calls outside of one until `jax.clear_caches()`.

    Example:
        >>> import jax
        >>> from streamkl_cupy.jax import attention_kl
        >>> q, k = jax.random.normal(jax.random.key(0), (2, 2, 4, 8, 16))
        >>> grad = jax.grad(lambda s: attention_kl(q, k, s, k, causal=True, reduction="mean"))(q)
        >>> bool(abs(grad).max() < 1e-5)  # student equals teacher: a stationary point
        True
    """


def loss(call: Call, asked: LossOptions) -> Any:
    """`attention_kl` of a call with JAX arrays, its other arguments checked."""
    config = autodiff.checked(call)
    given = _sinks(call, asked)
    value, rows = _value(call.operands, call.masks, asked.row_weight, given, config=config, reduction=asked.reduction)
    if asked.return_lse:
        return _with_mass(call.op, value, rows, asked.dense_teacher_lse)
    return KLEntropy(value, rows.teacher_entropy) if config.options.return_entropy else value


def forward(call: Call, asked: LossOptions) -> Any:
    """Row values and log-sum-exps."""
    rows, given = autodiff.run_forward(call), _sinks(call, asked)
    if given is not None:
        rows = autodiff.with_sinks(autodiff.config_of(call), rows, _spread(given, rows.kl))
    return _with_mass(call.op, rows.kl, rows, asked.dense_teacher_lse)


def backward(call: Call, saved: tuple[Any, ...], wrt: tuple[str, ...]) -> KLGradients:
    """Gradients from grad, the two log-sum-exps and maybe the values and moments of rows."""
    return KLGradients(**autodiff.run_backward(call, saved, wrt))


def value_and_grad(call: Call, asked: LossOptions, wrt: tuple[str, ...]) -> tuple[Any, KLGradients | KLSinkGradients]:
    """Loss and gradients."""
    config, wrt, given = autodiff.config_of(call), autodiff.in_order(call.op, wrt), _sinks(call, asked)
    value, grads, by_sinks = _value_and_grad(
        call.operands, call.masks, asked.row_weight, given, config=config, reduction=asked.reduction, wrt=wrt
    )
    return value, KLGradients(**grads) if by_sinks is None else KLSinkGradients(*KLGradients(**grads), *by_sinks)


def _sinks(call: Call, asked: LossOptions) -> Sinks | None:
    """Sinks' logits, checked, as they broadcast to the rows; None where there are none."""
    if not call.options.sunk or not validate.sinks(asked.sinks, call.options, asked):
        return None
    rows = call.operands[call.op.at].shape[:-1]
    last = call.options.layout == "bnhd" or masks.packing([n for n, x in zip(MASK_ARRAYS, call.masks) if x is not None])
    found: list[Any] = [None, None]
    for i, z in enumerate(asked.sinks):
        if z is not None:
            name = f"{Sinks._fields[i]}_sink_logits"
            if not isinstance(z, jax.Array):
                raise validate.not_of("jax", name, z)
            found[i] = z.reshape(validate.sink_shape(name, z, rows, bool(last)))
    return Sinks(*found)


def _spread(given: Sinks, rows: Any) -> Sinks:
    return Sinks(*[None if z is None else sinks.spread(jnp, z, rows) for z in given])


@autodiff.differentiable
def _value(
    inputs: tuple[Any, ...],
    masks: tuple[Any, ...],
    row_weight: Any,
    given: Sinks | None,
    *,
    config: autodiff.Config,
    reduction: str,
) -> tuple[Any, Results]:
    spread = None if given is None else _spread(given, autodiff.like_rows(config, inputs))
    rows = autodiff.rows(config, inputs, masks, spread)
    _check_weight(row_weight, rows.kl)
    return reductions.reduce_rows(jnp, rows.kl, rows.teacher_lse, row_weight, reduction), rows._replace(kl=None)


@autodiff.entry
def _value_and_grad(
    inputs: tuple[Any, ...],
    masks: tuple[Any, ...],
    row_weight: Any,
    given: Sinks | None,
    *,
    config: autodiff.Config,
    reduction: str,
    wrt: tuple[str, ...],
) -> tuple[Any, dict[str, Any], Sinks | None]:
    rows = autodiff.forward(config, inputs, masks)
    spread = None if given is None else _spread(given, rows.kl)
    if spread is not None:
        rows = autodiff.with_sinks(config, rows, spread)
    _check_weight(row_weight, rows.kl)
    value, share = reductions.value_and_gradient(jnp, rows.kl, rows.teacher_lse, row_weight, reduction)
    grad = reductions.spread(jnp, value, share, rows.kl.shape)
    saved = config.op.Saved(grad, rows.teacher_lse, rows.student_lse, rows.kl, rows.moments)
    grads, by_sinks = autodiff.backward(config, wrt, inputs, masks, autodiff.needed(config, wrt, saved)), None
    if spread is not None and given is not None:
        each = autodiff.by_sinks(config, grad, rows, spread)
        by_sinks = Sinks(*[None if z is None else sinks.summed(jnp, x, z) for x, z in zip(each, given)])
    return value, grads, by_sinks


def _with_mass(op: Op, value: Any, rows: Results, dense: Any) -> Any:
    _, teacher_lse, student_lse, *others = rows
    if dense is None:
        mass = reductions.target_mass(jnp, teacher_lse) if op.given("teacher") else None
        return rows_of(value, teacher_lse, student_lse, mass, *others)
    if not isinstance(dense, jax.Array):
        raise validate.not_of("jax", "dense_teacher_lse", dense)
    # JAX's arrays of two dtypes know how to meet.
    validate.one_per_row("dense_teacher_lse", dense, teacher_lse.shape, dense.dtype)
    traced = any(isinstance(x, jax.core.Tracer) for x in (dense, teacher_lse))
    if not traced and autodiff.platform_of(dense) == "cpu":
        validate.dense_lse(np.asarray(teacher_lse), np.asarray(dense))
    mass = reductions.teacher_mass(jnp, teacher_lse, jax.lax.stop_gradient(dense))
    return rows_of(value, teacher_lse, student_lse, mass, *others)


def _check_weight(weight: Any, rows: Any) -> None:
    if weight is not None:
        like = frameworks.standin(ATTENTION_KL.like, rows, arrays.CPU)._replace(framework="jax")
        validate.row_weight(weight, rows.shape, like)


def _attend(operands: tuple[Any, ...], given: dict[str, Any], return_lse: bool) -> Any:
    flag("return_lse", return_lse)
    return attend(Call.of(SPARSE_ATTENTION, operands, given), return_lse)


@public(_attend, op=SPARSE_ATTENTION)
def sparse_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = False,
    q_offset: int | None = None,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: jax.Array | None = None,
    query_lengths: jax.Array | None = None,
    cu_seqlens_q: jax.Array | None = None,
    cu_seqlens_k: jax.Array | None = None,
    key_mask: jax.Array | None = None,
    query_mask: jax.Array | None = None,
    block_mask: BlockPattern | None = None,
    layout: str = "bhnd",
    precision: str = "highest",
    return_lse: bool = False,
    deterministic: bool | None = None,
) -> Any:
    """Attention whose heads each see a part of the context, differentiable by JAX.

    The arguments, results and accuracy are those of :func:`streamkl_cupy.sparse_attention`, which comes here when it is
    given JAX arrays. Gradients of first order reach the three inputs, from outputs and log-sum-exps; only those that
    are asked for are computed. For transforms, second order and patterns it is as `attention_kl`: everything after the
    three arrays is static but the arrays of masks, and a `block_mask` is part of the program.

    Example:
        >>> import jax
        >>> from streamkl_cupy.jax import sparse_attention
        >>> q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 4, 8, 16))
        >>> grad = jax.grad(lambda v: sparse_attention(q, k, v, causal=True).sum())(v)
        >>> bool(abs(grad.sum(axis=-2)[..., 0] - 8).max() < 1e-4)  # each row's weights add up to 1
        True
    """


def attend(call: Call, return_lse: bool) -> Any:
    """`sparse_attention` of a call with JAX arrays."""
    rows = _attention(call.operands, call.masks, config=autodiff.checked(call))
    return AttentionForward(rows.out, rows.lse) if return_lse else rows.out


@autodiff.differentiable
def _attention(inputs: tuple[Any, ...], masks: tuple[Any, ...], *, config: autodiff.Config) -> Results:
    return autodiff.rows(config, inputs, masks)


def attention_forward(call: Call) -> AttentionForward[Any]:
    """Outputs and log-sum-exps."""
    rows = autodiff.run_forward(call)
    return AttentionForward(rows.out, rows.lse)


def attention_backward(call: Call, saved: tuple[Any, ...], wrt: tuple[str, ...]) -> AttentionGradients[Any]:
    """Gradients from what the record says that a backward reads."""
    return AttentionGradients(**autodiff.run_backward(call, saved, wrt))

"""PyTorch: the differentiable functions, and what becomes of the rows of each; `autodiff/torch.py` is how."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from . import validate
from .advice.signatures import public
from .arguments import flag
from .autodiff import torch as autodiff
from .call import Call
from .ops import ATTENTION_KL, ATTENTION_KL_TO, SPARSE_ATTENTION, Op
from .options import LossOptions, with_sunk
from .results import AttentionForward, KLEntropy, rows_of
from .rules import reductions, states
from .rules.sinks import Sinks

if TYPE_CHECKING:
    from .patterns import BlockPattern

__all__ = ["attention_kl", "sparse_attention"]

autodiff.register(ATTENTION_KL)
autodiff.register(ATTENTION_KL_TO)


def loss(op: Op, inputs: tuple[Any, ...], given: dict[str, Any], asked: LossOptions) -> Any:
    """`attention_kl` or `attention_kl_to` of arrays and options by name."""
    validate.loss(asked)
    call, traced = autodiff.asked(op, inputs, with_sunk(given, asked))
    if call.options.sunk and validate.sinks(asked.sinks, call.options, asked):
        rows = autodiff.results(call, traced, _spread(call, asked.sinks))
        return _reduced(op, autodiff.there(call, rows), asked)
    if not traced and autodiff.unwatched((*inputs, *call.masks)):
        return _launched(call, asked)
    rows = autodiff.results(call, traced)
    return _reduced(op, autodiff.there(call, rows), asked)


def _launched(call: Call, asked: LossOptions) -> Any:
    """The same where nothing but autograd looks on."""
    ready, weight = call.ready(), asked.row_weight
    if weight is not None:
        _check_weight(weight, call.operands[call.op.at], ready.checked.row_shape)
    if not autodiff.differentiated(call.operands):
        return _reduced(call.op, autodiff.tensors(ready.forward()), asked)
    # Weights that are differentiated too, or looked on, are torch's own matter.
    apart = weight is not None and not autodiff.plain((weight,))
    inside = LossOptions(return_lse=True) if apart else asked
    alone = not inside.return_lse and not call.options.return_entropy
    names = _VALUE if alone else call.op.results
    found = autodiff.step(call, ready, names, functools.partial(_reduction, inside), inside.reduction != "none")
    if apart:
        return _reduced(call.op, found, asked)
    return found if alone else _results(call.op, found, asked)


_VALUE = ATTENTION_KL.rows[:1]


def _reduction(asked: LossOptions, rows: Sequence[Any], every_row_sees: bool) -> tuple[Any, Any]:
    """The value, and its derivative by each row's."""
    lse = None if every_row_sees else rows[1]
    return reductions.value_and_gradient(torch, rows[0], lse, asked.row_weight, asked.reduction)


def _reduced(op: Op, rows: tuple[Any, ...], asked: LossOptions) -> Any:
    """What was asked for of the rows, by torch's own functions."""
    kl, teacher_lse, *others = rows
    weight = asked.row_weight
    if weight is not None:
        _check_weight(weight, kl, kl.shape)
    value = reductions.reduce_rows(torch, kl, teacher_lse, weight, asked.reduction)
    return _results(op, (value, teacher_lse, *others), asked)


def _results(op: Op, rows: tuple[Any, ...], asked: LossOptions) -> Any:
    """The value, and of the rows what was asked for beside it."""
    value, teacher_lse, student_lse, entropy, moments = rows
    if not asked.return_lse:
        return value if entropy is None else KLEntropy(value, entropy)
    dense: Any = asked.dense_teacher_lse
    if dense is None:
        mass = reductions.target_mass(torch, teacher_lse) if op.given("teacher") else None
        return rows_of(value, teacher_lse, student_lse, mass, entropy, moments)
    _check_given("dense_teacher_lse", dense, teacher_lse)
    validate.one_per_row("dense_teacher_lse", dense, teacher_lse.shape, teacher_lse.dtype)
    dense = dense.detach()
    if teacher_lse.device.type == "cpu" and not autodiff.traced() and autodiff.unwatched((teacher_lse, dense)):
        validate.dense_lse(teacher_lse.numpy(), dense.numpy(force=True))
    mass = reductions.teacher_mass(torch, teacher_lse, dense)
    return rows_of(value, teacher_lse, student_lse, mass, entropy, moments)


def _spread(call: Call, given: Sinks) -> Sinks:
    """Sinks' logits, one for each row."""
    like = call.operands[call.op.at]
    rows = like.new_empty(
        0, dtype=torch.float64 if any(x.dtype == torch.float64 for x in call.operands) else torch.float32
    )
    last = call.options.layout == "bnhd" or autodiff.packed(call)
    found: list[Any] = [None, None]
    for i, (side, z) in enumerate(zip(Sinks._fields, given)):
        if z is not None:
            name = f"{side}_sink_logits"
            _check_given(name, z, like)
            shape = validate.sink_shape(name, z, like.shape[:-1], last)
            found[i] = z.to(rows.dtype).reshape(shape).expand(like.shape[:-1])
    return Sinks(*found)


def _check_weight(weight: Any, rows: Tensor, row_shape: Sequence[int]) -> None:
    _check_given("row_weight", weight, rows)
    validate.weights(weight, row_shape)  # type: ignore[arg-type]


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
    return loss(op, operands, given, LossOptions(**own))


@public(_loss)
def attention_kl(
    teacher_q: Tensor,
    teacher_k: Tensor,
    student_q: Tensor,
    student_k: Tensor,
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
    key_lengths: Tensor | None = None,
    query_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    block_mask: BlockPattern | None = None,
    divergence: str = "kl",
    jsd_beta: float | None = None,
    smoothing: float | None = None,
    row_weight: Any = None,
    reduction: str = "none",
    layout: str = "bhnd",
    precision: str = "highest",
    return_lse: bool = False,
    dense_teacher_lse: Tensor | None = None,
    return_entropy: bool = False,
    deterministic: bool | None = None,
    teacher_sink_logits: Tensor | None = None,
    student_sink_logits: Tensor | None = None,
) -> Any:
    """KL divergence from a teacher's to a student's attention rows, differentiable by PyTorch.

    The arguments, results and accuracy are those of :func:`streamkl_cupy.attention_kl`, which comes here when it is
    given torch tensors. Gradients of first order reach the four inputs, sinks and ``row_weight``, under autograd,
    ``torch.func``, ``torch.vmap``, ``torch.compile(fullgraph=True)`` and checkpointing; only those that are asked for
    are computed. The log-sum-exps and entropies are constants to autograd. Autocast does not touch the inputs, and the
    loss is float32. Second order and forward mode raise NotImplementedError.

    ``torch.vmap`` becomes one larger batch; packed sequences have none, so there it becomes a loop. Where only some
    inputs are mapped and these have a batch axis of their own, the others are repeated in memory to that size.

    Example:
        >>> import torch
        >>> from streamkl_cupy.torch import attention_kl
        >>> q, k = torch.randn(2, 4, 8, 16), torch.randn(2, 4, 8, 16)
        >>> student = q.clone().requires_grad_()
        >>> attention_kl(q, k, student, k, causal=True, reduction="mean").backward()
        >>> bool(student.grad.abs().max() < 1e-5)  # student equals teacher: a stationary point
        True
    """


def _check_given(name: str, x: Any, rows: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise validate.not_of("torch", name, x)
    validate.same_device("student_q", rows.device, name, x.device)


@functools.partial(
    torch.compiler.disable,
    reason="it computes on memory that tracers do not have; attention_kl, sparse_attention, indexer_kl can be compiled",
)
def outside_programs(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an explicit function from code that torch.compile compiles, which is interrupted there."""
    return function(*args, **kwargs)


autodiff.register(SPARSE_ATTENTION)


def attend(operands: tuple[Any, ...], given: dict[str, Any], return_lse: bool) -> Any:
    """`sparse_attention` of tensors and options by name."""
    flag("return_lse", return_lse)
    call, traced = autodiff.asked(SPARSE_ATTENTION, operands, given)
    lse: Any
    out: Any
    if traced or not autodiff.unwatched((*operands, *call.masks)):
        lse, out = autodiff.results(call, traced)
    elif autodiff.differentiated(operands):
        found = autodiff.step(call, call.ready(), ("lse", "out") if return_lse else ("out",))
        lse, out = found if return_lse else (None, found)
    else:
        lse, out = autodiff.tensors(call.ready().forward())
    return AttentionForward(out, lse) if return_lse else out


@public(attend, op=SPARSE_ATTENTION)
def sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    causal: bool = False,
    q_offset: int | None = None,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Tensor | None = None,
    query_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    key_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    block_mask: BlockPattern | None = None,
    layout: str = "bhnd",
    precision: str = "highest",
    return_lse: bool = False,
    deterministic: bool | None = None,
) -> Any:
    """Attention whose heads each see a part of the context, differentiable by PyTorch.

    The arguments, results and accuracy are those of :func:`streamkl_cupy.sparse_attention`, which comes here when it is
    given torch tensors. Gradients of first order reach the three inputs, from outputs and log-sum-exps, under autograd,
    ``torch.func``, ``torch.vmap``, ``torch.compile(fullgraph=True)`` and checkpointing; only those that are asked for
    are computed. Autocast does not touch the inputs. Second order and forward mode raise NotImplementedError.

    Example:
        >>> import torch
        >>> from streamkl_cupy.torch import sparse_attention
        >>> q, k, v = torch.randn(3, 2, 4, 8, 16)
        >>> v.requires_grad_()  # doctest: +ELLIPSIS
        tensor(...)
        >>> sparse_attention(q, k, v, causal=True).sum().backward()
        >>> bool((v.grad.sum(-2)[..., 0] - 8).abs().max() < 1e-4)  # each row's weights add up to 1
        True
    """


def merged(outs: tuple[Any, ...], lses: tuple[Any, ...]) -> tuple[Any, Any]:
    """Attention over several sets of keys as one, by torch's own functions."""
    for i, x in enumerate((*outs, *lses)):
        if x.device != outs[0].device:
            name = f"outs[{i}]" if i < len(outs) else f"lses[{i - len(outs)}]"
            validate.same_device("outs[0]", outs[0].device, name, x.device)
    return states.merged(torch, outs, lses)

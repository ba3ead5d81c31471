"""PyTorch: `indexer_kl` under autograd, `torch.func` and `torch.compile`.

As for `attention_kl`: two opaque custom operators, which know their derivative, and an `autograd.Function` around them,
which is what `torch.func` can take. The backward cannot be differentiated again, and says so.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from .. import validate
from ..ops.indexer_kl import ARRAYS, SPECS, WRT
from .call import IndexCall, Ready, Rows
from .losses import IndexLoss, reduced
from .options import NAMES, IndexOptions
from .problem import TEACHER_IS_CONSTANT, callers_axes

_SCHEMAS = {
    "index_scale": "float",
    "teacher_scale": "float?",
    "relu": "bool",
    "head_groups": "SymInt?",
    "causal": "bool",
    "q_offset": "SymInt?",
    "compress_ratio": "SymInt",
    "topk_relative": "bool",
    "layout": "str",
    "deterministic": "bool?",
}
_SCHEMA = ", ".join(
    (
        *(f"Tensor? {spec.name}" for spec in ARRAYS),
        *(f"{_SCHEMAS[name]} {name}" for name in IndexOptions._fields),
    )
)
_SAVED = ("grad", "index_lse", "target_sum", "made_lse")
_SAVED_SCHEMA = "Tensor grad, Tensor index_lse, Tensor target_sum, Tensor? made_lse, bool[] wanted"
_ARRAYS = len(ARRAYS)
_AT = tuple(NAMES.index(name) for name in WRT)
_CONSTANT = tuple(i for i, spec in enumerate(ARRAYS) if spec.kind in ("teacher", "row number"))

_NO_SECOND_ORDER = (
    "streamkl_cupy.indexer_kl has first-order gradients only: its backward cannot be differentiated again. "
    "Drop create_graph=True (or the outer torch.func transform)."
)
_NO_FORWARD_MODE = (
    "streamkl_cupy.indexer_kl has reverse-mode gradients only: it cannot propagate a forward-mode tangent "
    "(torch.func.jvp, jacfwd, hessian, torch.autograd.forward_ad). Use torch.func.grad, vjp or jacrev."
)


def loss(call: IndexCall, asked: IndexLoss) -> Any:
    """`indexer_kl` of a call with torch tensors."""
    for name, x in call.named.items():
        if not isinstance(x, Tensor):
            raise validate.not_of("torch", name, x)
    if torch.is_grad_enabled():
        for i in _CONSTANT:
            x = call.arrays[i]
            if x is not None and x.requires_grad:
                raise NotImplementedError(f"{NAMES[i]} requires a gradient: {TEACHER_IS_CONSTANT}")
    args = (*call.arrays, *call.options)
    if torch.compiler.is_compiling():
        kl, index_lse, target_sum, made = _forward_op(*args)
    else:
        kl, index_lse, target_sum, made = _IndexerKL.apply(*args)  # type: ignore[no-untyped-call]
    named = call.named
    lse = named.get("teacher_lse") if "teacher_lse" in named or "teacher_q" not in named else made
    if asked.row_weight is not None:
        if not isinstance(asked.row_weight, Tensor):
            raise validate.not_of("torch", "row_weight", asked.row_weight)
        validate.same_device("index_q", kl.device, "row_weight", asked.row_weight.device)
        validate.weights(asked.row_weight, kl.shape)
    return reduced(torch, (kl, index_lse, target_sum, lse), asked)


def _call(args: tuple[Any, ...]) -> IndexCall:
    """The arguments of the forward operator by name."""
    return IndexCall(tuple(args[:_ARRAYS]), IndexOptions(*args[_ARRAYS:]))


def _launch_forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ready = _call(args).ready()
    kl, index_lse, target_sum, lse = ready.forward()
    return kl, index_lse, target_sum, lse if ready.makes_lse else kl.new_empty(0)


def _launch_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the wanted inputs; of the others an empty tensor, as batching fallbacks want a fixed count."""
    grad, index_lse, target_sum, made, wanted = args[: len(_SAVED) + 1]
    call = _call(args[len(_SAVED) + 1 :])
    ready: Ready = call.ready()
    lse = made if ready.makes_lse else call.named.get("teacher_lse")
    # Zeros without memory, and expanded ones, are gradients too.
    grad = grad.to(index_lse.dtype).expand(index_lse.shape).contiguous().resolve_neg()
    wrt = tuple(name for name, w in zip(WRT, wanted, strict=True) if w)
    grads = ready.backward(grad, Rows(None, index_lse, target_sum, lse), wrt)
    a, b, c = (grads[name] if name in grads else index_lse.new_empty(0) for name in WRT)
    return a, b, c


def _fake_forward(*args: Any) -> Any:
    call = _call(args)
    named, options = call.named, call.options
    index_q = named["index_q"]
    layout = "bnhd" if "cu_seqlens_q" in named else options.layout
    batched = index_q.dim() == 4
    sizes = dict(zip(callers_axes("BIMD", layout, batched), index_q.shape, strict=True))
    if options.head_groups is not None:
        sizes["G"] = options.head_groups
    axes = callers_axes("BGM" if "G" in sizes else "BM", layout, batched)
    wide = any(x.dtype == torch.float64 for name, x in named.items() if SPECS[name].kind in ("teacher", "index"))
    dtype = torch.float64 if wide else torch.float32
    rows = [index_q.new_empty([sizes[letter] for letter in axes], dtype=dtype) for _ in range(3)]
    made = "teacher_q" in named and "teacher_lse" not in named
    lse = index_q.new_empty(named["teacher_q"].shape[:-1] if made else (0,), dtype=dtype)
    return (*rows, lse)


def _fake_backward(*args: Any) -> Any:
    wanted, call = args[len(_SAVED)], _call(args[len(_SAVED) + 1 :])
    rows = args[1]
    return tuple(
        call.arrays[i].new_empty(call.arrays[i].shape) if w else rows.new_empty(0)
        for i, w in zip(_AT, wanted, strict=True)
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """What the backward needs of a forward."""
    _, index_lse, target_sum, made = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(index_lse, target_sum, made, *inputs[:_ARRAYS])
    ctx.options = tuple(inputs[_ARRAYS:])


def _differentiate(ctx: Any, grad: Tensor | None, backward: Any) -> tuple[Tensor | None, ...]:
    """Gradients by every argument of a forward, computed by `backward`."""
    wanted = [bool(ctx.needs_input_grad[i]) for i in _AT]
    found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
    if grad is None or not any(wanted):
        return tuple(found)
    index_lse, target_sum, made, *arrays = ctx.saved_tensors
    grads = backward(grad, index_lse, target_sum, made, wanted, *arrays, *ctx.options)
    for i, w, x in zip(_AT, wanted, grads, strict=True):
        found[i] = x if w else None
    return tuple(found)


def _refuse_second_order(ctx: Any, *grads: Any) -> NoReturn:
    raise NotImplementedError(_NO_SECOND_ORDER)


class _IndexerKL(torch.autograd.Function):
    """The forward with its first-order gradient, as transforms take it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        rows: tuple[Tensor, ...] = _forward_op(*args)
        return rows

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        _keep(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_others: None) -> tuple[Tensor | None, ...]:
        return _differentiate(ctx, grad, _IndexerKLBackward.apply)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise NotImplementedError(_NO_FORWARD_MODE)


class _IndexerKLBackward(torch.autograd.Function):
    """The backward operator, which nothing may differentiate."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        grads: tuple[Tensor, ...] = _backward_op(*args)
        return grads

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        _refuse_second_order(ctx, *grads)


def _looped(op: Any, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    """`torch.vmap` as one call for each entry."""

    def entry(x: Any, dim: Any, i: int) -> Any:
        if not isinstance(dim, int):  # a list has a list of dims, all None
            return x
        if info.batch_size == 0:
            return x.new_zeros(x.shape[:dim] + x.shape[dim + 1 :])
        return x.select(dim, i)

    # Of no entries, the results have the shapes of one.
    calls = [op(*(entry(x, dim, i) for x, dim in zip(args, in_dims))) for i in range(max(info.batch_size, 1))]
    results = tuple(torch.stack(parts)[: info.batch_size] for parts in zip(*calls))
    return results, (0,) * len(results)


def _operators() -> tuple[Any, Any]:
    """The forward and the backward operator, with all that torch wants to know of them."""
    forward = torch.library.custom_op(
        "streamkl::indexer_kl_forward",
        _launch_forward,
        mutates_args=(),
        schema=f"({_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    )
    backward = torch.library.custom_op(
        "streamkl::indexer_kl_backward",
        _launch_backward,
        mutates_args=(),
        schema=f"({_SAVED_SCHEMA}, {_SCHEMA}) -> (Tensor, Tensor, Tensor)",
    )
    forward.register_autograd(lambda ctx, grad, *_others: _differentiate(ctx, grad, backward), setup_context=_keep)
    backward.register_autograd(_refuse_second_order, setup_context=lambda ctx, inputs, output: None)
    forward.register_fake(_fake_forward)
    backward.register_fake(_fake_backward)
    for op in (forward, backward):
        op.register_vmap(lambda info, in_dims, *args, op=op: _looped(op, info, in_dims, *args))
    return forward, backward


_forward_op, _backward_op = _operators()

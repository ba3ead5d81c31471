"""PyTorch: ``attention_kl`` under autograd, ``torch.func``, ``torch.compile`` and CUDA-graph capture.

Three layers. Two opaque custom operators launch the kernels, so that tracers see one node each. An
``autograd.Function`` around the forward operator gives first-order gradients under autograd and ``torch.func`` alike;
its backward runs a second Function whose own backward refuses, because a silently missing second-order term is worse
than an error. A forward that nothing traces or transforms skips the operator, and one that nothing differentiates
skips the Function as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import api, arrays, calls, reduce, validate
from .adapters import a_kind_of
from .arrays import RowStats, Saved
from .problem import INPUT_NAMES, MASK_ARRAYS, Options
from .signatures import answered

if TYPE_CHECKING:
    from .patterns import BlockPattern

__all__ = ["attention_kl"]

_INPUTS = ", ".join(f"Tensor {name}" for name in INPUT_NAMES)
_MASKS = ", ".join(f"Tensor? {name}" for name in MASK_ARRAYS)
# Those of `Options`, with the digest of the pattern in place of the pattern.
_OPTIONS = (
    "float? teacher_scale, float? student_scale, bool causal, SymInt? q_offset, str layout, str precision, "
    "bool? deterministic, SymInt[]? window, str? block_mask"
)
_NO_SECOND_ORDER = (
    "streamkl_cupy.attention_kl has first-order gradients only: its backward cannot be differentiated again. "
    "Drop create_graph=True (or the outer torch.func transform), or use a dense attention KL where second-order "
    "terms are needed."
)
_NO_FORWARD_MODE = (
    "streamkl_cupy.attention_kl has reverse-mode gradients only: it cannot propagate a forward-mode tangent "
    "(torch.func.jvp, jacfwd, hessian, torch.autograd.forward_ad). Use torch.func.grad, vjp or jacrev."
)


@answered()
def attention_kl(
    teacher_q: Tensor,
    teacher_k: Tensor,
    student_q: Tensor,
    student_k: Tensor,
    *,
    teacher_scale: float | None = None,
    student_scale: float | None = None,
    causal: bool = False,
    q_offset: int | None = None,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    key_mask: Tensor | None = None,
    block_mask: BlockPattern | None = None,
    row_weight: Any = None,
    reduction: str = "none",
    layout: str = "bhnd",
    precision: str = "highest",
    return_lse: bool = False,
    dense_teacher_lse: Tensor | None = None,
    deterministic: bool | None = None,
) -> Any:
    """KL divergence from a teacher's to a student's attention rows, differentiable by PyTorch.

    The arguments, results and accuracy are those of :func:`streamkl_cupy.attention_kl`, which comes here when it is
    given torch tensors. Gradients of first order reach the four inputs and ``row_weight``, under autograd,
    ``torch.func``, ``torch.vmap``, ``torch.compile(fullgraph=True)`` and checkpointing; only those that are asked for
    are computed. The log-sum-exps are constants to autograd. Autocast does not touch the inputs, and the loss is
    float32. Second order and forward mode raise NotImplementedError.

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
    inputs = (teacher_q, teacher_k, student_q, student_k)
    for name, x in zip(INPUT_NAMES, inputs):
        if not isinstance(x, Tensor):
            raise validate.not_of("torch", name, x)
    if reduction != "none":
        validate.choice("reduction", reduction, validate.REDUCTIONS)
    options = validate.options(
        teacher_scale, student_scale, causal, q_offset, layout, precision, deterministic, window, block_mask
    )
    masks = (key_lengths, cu_seqlens_q, cu_seqlens_k, key_mask)
    for name, mask in zip(MASK_ARRAYS, masks):
        if mask is not None and not isinstance(mask, Tensor):
            raise arrays.no_mask_array(name, mask, "torch")
    if _plain(inputs) and (key_mask is None or type(key_mask) is Tensor):
        views, seen = calls.view_inputs(*inputs), calls.view_masks(*masks)
        ready = calls.prepare(views, options, seen)
        kl, teacher_lse, student_lse = (view.array for view in calls.forward(views, ready, seen))
    else:
        function = _AttentionKL if torch.compiler.is_compiling() else _EagerAttentionKL
        digest = None if block_mask is None else block_mask.digest
        kl, teacher_lse, student_lse = function.apply(*inputs, *masks, *options[:-1], digest)  # type: ignore[no-untyped-call]
    if row_weight is not None:
        _check_weight(row_weight, kl)
    value = reduce.reduce_rows(torch, kl, teacher_lse, row_weight, reduction)
    if dense_teacher_lse is None:
        return api.KLForward(value, teacher_lse, student_lse) if return_lse else value
    if not return_lse:
        raise ValueError("dense_teacher_lse gives the teacher's mass beside the log-sum-exps: pass return_lse=True too")
    _check_dense(dense_teacher_lse, teacher_lse)
    dense = dense_teacher_lse.detach()
    if teacher_lse.device.type == "cpu" and _plain((teacher_lse, dense)):
        validate.dense_lse(teacher_lse.numpy(), dense.numpy(force=True))
    mass = reduce.teacher_mass(torch, teacher_lse, dense)
    return api.KLForwardMass(value, teacher_lse, student_lse, mass)


def _check_dense(dense: Any, rows: Tensor) -> None:
    """`validate.row_array` in words that torch.compile can trace."""
    if not isinstance(dense, Tensor) or dense.dtype != rows.dtype or dense.device != rows.device:
        raise TypeError(
            f"dense_teacher_lse is {a_kind_of(dense)}; allowed is a {rows.dtype} torch tensor on {rows.device}, the "
            f"teacher_lse of the dense call"
        )
    if dense.shape != rows.shape:
        raise ValueError(
            f"dense_teacher_lse: shape {tuple(dense.shape)}, but there is one value per query row: expected "
            f"{tuple(rows.shape)}"
        )


def _check_weight(weight: Any, rows: Tensor) -> None:
    """`validate.row_weight` in words that torch.compile can trace."""
    if not isinstance(weight, Tensor) or weight.is_complex():
        raise TypeError(
            f"row_weight is {a_kind_of(weight)}; allowed is a torch tensor of real numbers or bool, such as "
            f"torch.as_tensor(row_weight, device=student_q.device)"
        )
    if weight.device != rows.device:
        raise ValueError(f"row_weight is on {weight.device}, but the inputs are on {rows.device}; move it first")
    shape, full = tuple(weight.shape), tuple(rows.shape)
    if len(shape) > len(full) or not all(n == 1 or n == m for n, m in zip(reversed(shape), reversed(full))):
        raise ValueError(f"row_weight: shape {shape} does not broadcast to the rows {full}")


# torch has no public question for these two. Where a name is gone, the call takes the autograd.Function, which is right
# in every context and only slower.
_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)


def _plain(inputs: Sequence[Tensor]) -> bool:
    """Whether nothing differentiates, transforms or traces this call, so that it may skip the dispatcher."""
    if torch.compiler.is_compiling() or _transforms_active() or _dispatch_modes():
        return False
    if getattr(forward_ad, "_current_level", 0) >= 0:
        return False
    recording = torch.is_grad_enabled()
    for x in inputs:
        if (type(x) is not Tensor and type(x) is not torch.nn.Parameter) or (recording and x.requires_grad):
            return False
    return True


class _AttentionKL(torch.autograd.Function):
    """The forward operator with its first-order gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(  # spelled out: torch.compile counts the parameters to tell whether a ctx comes first
        teacher_q: Tensor,
        teacher_k: Tensor,
        student_q: Tensor,
        student_k: Tensor,
        key_lengths: Tensor | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        key_mask: Tensor | None,
        teacher_scale: float | None,
        student_scale: float | None,
        causal: bool,
        q_offset: int | None,
        layout: str,
        precision: str,
        deterministic: bool | None,
        window: tuple[int, int] | None,
        block_mask: str | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        options = (
            teacher_scale, student_scale, causal, q_offset, layout, precision, deterministic, window, block_mask
        )  # fmt: skip
        arrays = (teacher_q, teacher_k, student_q, student_k, key_lengths, cu_seqlens_q, cu_seqlens_k, key_mask)
        launch: Any = _launch_forward if _plain((teacher_q, teacher_k, student_q, student_k)) else _forward_op
        rows: tuple[Tensor, Tensor, Tensor] = launch(*arrays, *options)
        return rows

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        kl, teacher_lse, student_lse = output
        ctx.mark_non_differentiable(teacher_lse, student_lse)
        ctx.set_materialize_grads(False)
        # Only the teacher's gradient reads kl; otherwise the caller may scale it in place.
        saved_kl = kl if ctx.needs_input_grad[0] or ctx.needs_input_grad[1] else None
        ctx.save_for_backward(*inputs[:4], teacher_lse, student_lse, saved_kl, *inputs[4:8])
        ctx.options = inputs[8:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_lse_grads: None) -> tuple[Tensor | None, ...]:
        wanted = list(ctx.needs_input_grad[:4])
        unused = (None,) * (4 + len(ctx.options))
        if grad is None or not any(wanted):
            return (None, None, None, None, *unused)
        grads = _AttentionKLBackward.apply(grad, *ctx.saved_tensors, wanted, *ctx.options)  # type: ignore[no-untyped-call]
        return (*(g if w else None for g, w in zip(grads, wanted)), *unused)


# torch binds the arguments at every call; a signature that lies ready saves it the work of making one each time.
_AttentionKL.forward.__signature__ = inspect.signature(_AttentionKL.forward)  # type: ignore[attr-defined]


class _EagerAttentionKL(_AttentionKL):
    """Adds our words to the refusal of forward mode; torch.compile does not trace a Function that has a jvp."""

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _AttentionKL.setup_context(ctx, inputs, output)
        # Operators are handed a pattern's digest; what keeps the pattern until the backward is the graph.
        ctx.pattern = None if inputs[-1] is None else _pattern_of(inputs[-1])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise NotImplementedError(_NO_FORWARD_MODE)


class _AttentionKLBackward(torch.autograd.Function):
    """The backward operator, which nothing may differentiate."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad: Tensor,
        teacher_q: Tensor,
        teacher_k: Tensor,
        student_q: Tensor,
        student_k: Tensor,
        teacher_lse: Tensor,
        student_lse: Tensor,
        kl: Tensor | None,
        key_lengths: Tensor | None,
        cu_seqlens_q: Tensor | None,
        cu_seqlens_k: Tensor | None,
        key_mask: Tensor | None,
        wanted: Sequence[bool],
        teacher_scale: float | None,
        student_scale: float | None,
        causal: bool,
        q_offset: int | None,
        layout: str,
        precision: str,
        deterministic: bool | None,
        window: tuple[int, int] | None,
        block_mask: str | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        options = (
            teacher_scale, student_scale, causal, q_offset, layout, precision, deterministic, window, block_mask
        )  # fmt: skip
        masks = (key_lengths, cu_seqlens_q, cu_seqlens_k, key_mask)
        # Always the operator: is_grads_batched hands over batched tensors that nothing here could recognise.
        grads: tuple[Tensor, Tensor, Tensor, Tensor] = _backward_op(
            grad, teacher_q, teacher_k, student_q, student_k, teacher_lse, student_lse, kl, *masks, wanted, *options
        )
        return grads

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise NotImplementedError(_NO_SECOND_ORDER)


def _launch_forward(
    teacher_q: Tensor,
    teacher_k: Tensor,
    student_q: Tensor,
    student_k: Tensor,
    key_lengths: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    key_mask: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = calls.view_inputs(teacher_q, teacher_k, student_q, student_k)
    masks = calls.view_masks(key_lengths, cu_seqlens_q, cu_seqlens_k, key_mask)
    ready = calls.prepare(inputs, _unpacked(options), masks)
    # Three allocations, where the direct path makes one: operator outputs must not share memory.
    rows = RowStats(*(arrays.empty(inputs.student_q, ready.row_shape, ready.stat_dtype) for _ in range(3)))
    calls.launch_forward(inputs, ready, rows, masks)
    return rows.kl.array, rows.teacher_lse.array, rows.student_lse.array


def _launch_backward(
    grad: Tensor,
    teacher_q: Tensor,
    teacher_k: Tensor,
    student_q: Tensor,
    student_k: Tensor,
    teacher_lse: Tensor,
    student_lse: Tensor,
    kl: Tensor | None,
    key_lengths: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    key_mask: Tensor | None,
    wanted: Sequence[bool],
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the wanted inputs; of the others an empty tensor, as batching fallbacks want a fixed count."""
    wrt = tuple(name for name, w in zip(INPUT_NAMES, wanted) if w)
    inputs = calls.view_inputs(teacher_q, teacher_k, student_q, student_k)
    masks = calls.view_masks(key_lengths, cu_seqlens_q, cu_seqlens_k, key_mask)
    ready = calls.prepare(inputs, _unpacked(options), masks)
    validate.gradients_built(ready.problem, wrt)
    saved = Saved(
        arrays.describe("grad", grad),
        arrays.describe("teacher_lse", teacher_lse),
        arrays.describe("student_lse", student_lse),
        None if kl is None else arrays.describe("kl", kl),
    )
    grads = calls.backward(inputs, ready, saved, wrt, masks)
    a, b, c, d = (student_q.new_empty(0) if g is None else g for g in grads)
    return a, b, c, d


def _pattern_of(digest: str) -> Any:
    # Imported here, because most programs have none.
    from .patterns.pattern import pattern_of

    return pattern_of(digest)


def _unpacked(options: tuple[Any, ...]) -> Options:
    """Options as the operators take them: a schema knows lists for tuples, and no patterns."""
    window, digest = options[7:]
    pattern = None if digest is None else _pattern_of(digest)
    return Options(*options)._replace(window=None if window is None else tuple(window), block_mask=pattern)


_forward_op = torch.library.custom_op(
    "streamkl::attention_kl_forward",
    _launch_forward,
    mutates_args=(),
    schema=f"({_INPUTS}, {_MASKS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)
_backward_op = torch.library.custom_op(
    "streamkl::attention_kl_backward",
    _launch_backward,
    mutates_args=(),
    schema=f"(Tensor grad, {_INPUTS}, Tensor teacher_lse, Tensor student_lse, Tensor? kl, {_MASKS}, bool[] wanted, "
    f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
)


@_forward_op.register_fake
def _(teacher_q: Tensor, teacher_k: Tensor, student_q: Tensor, student_k: Tensor, *options: Any) -> Any:
    wide = torch.float64 in (teacher_q.dtype, student_q.dtype)
    dtype = torch.float64 if wide else torch.float32
    return tuple(student_q.new_empty(student_q.shape[:-1], dtype=dtype) for _ in range(3))


@_backward_op.register_fake
def _(grad: Tensor, *args: Any) -> Any:
    inputs, wanted = args[:4], args[11]
    return tuple(x.new_empty(x.shape) if w else args[2].new_empty(0) for x, w in zip(inputs, wanted))


@_forward_op.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    if args[5] is not None:
        return _looped(_forward_op, info.batch_size, in_dims, args)
    folded = _Fold(info.batch_size, args[2], in_dims[2], layout=args[12])
    inputs = [folded.fold(x, d) for x, d in zip(args[:4], in_dims)]
    masks = [folded.fold_mask(*x) for x in zip(MASK_ARRAYS, args[4:8], in_dims[4:8])]
    rows = _forward_op(*inputs, *masks, *args[8:])
    return tuple(folded.unfold(x) for x in rows), (0, 0, 0)


@_backward_op.register_vmap
def _(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    if args[9] is not None:
        return _looped(_backward_op, info.batch_size, in_dims, args)
    folded = _Fold(info.batch_size, args[3], in_dims[3], layout=args[17])
    grad, *rest = args[:8]
    inputs = [folded.fold(x, d) for x, d in zip(rest[:4], in_dims[1:5])]
    saved = [None if x is None else folded.fold(x, d) for x, d in zip(rest[4:], in_dims[5:8])]
    masks = [folded.fold_mask(*x) for x in zip(MASK_ARRAYS, args[8:12], in_dims[8:12])]
    wanted = args[12]
    grads = _backward_op(folded.fold(grad, in_dims[0]), *inputs, *saved, *masks, *args[12:])
    out_dims = tuple(0 if w else None for w in wanted)
    return tuple(folded.unfold(g) if w else g for g, w in zip(grads, wanted)), out_dims


def _looped(op: Any, size: int, in_dims: tuple[Any, ...], args: tuple[Any, ...]) -> tuple[Any, Any]:
    """One call per entry, for packed sequences: these have no batch axis that the entries could become."""

    def entry(x: Any, dim: Any, i: int) -> Any:
        if not isinstance(dim, int):  # a list has a list of dims, all None
            return x
        if size == 0:
            return x.new_zeros(x.shape[:dim] + x.shape[dim + 1 :])
        part = x.select(dim, i)
        return part.contiguous() if part.dtype == torch.int32 else part  # bounds are read as they lie

    # Of no entries, the results have the shapes of one.
    calls = [op(*(entry(x, dim, i) for x, dim in zip(args, in_dims))) for i in range(max(size, 1))]
    results = tuple(torch.stack(parts)[:size] for parts in zip(*calls))
    return results, (0,) * len(results)


class _Fold:
    """Makes the axis that vmap adds part of the batch axis, and takes it out of the results again."""

    def __init__(self, size: int, example: Tensor, dim: int | None, layout: str) -> None:
        self.size = size
        self.rank = example.dim() - (dim is not None)
        self.head_axis = 2 if layout == "bnhd" else 1
        shape = [n for axis, n in enumerate(example.shape) if axis != dim]
        self.batch = shape[0] if self.rank == 4 else 1

    def fold(self, x: Tensor, dim: int | None) -> Tensor:
        """An operand or a row array: what comes before its rows is the same in both."""
        x = x.expand(self.size, *x.shape) if dim is None else x.movedim(dim, 0)
        if self.rank == 2:
            return x.unsqueeze(self.head_axis)
        return x.flatten(0, 1) if self.rank == 4 else x

    def fold_mask(self, name: str, x: Tensor | None, dim: int | None) -> Tensor | None:
        """An array of a mask, whose first axis is the batch axis where there is one."""
        if x is None:
            return None
        x = x.expand(self.size, *x.shape) if dim is None else x.movedim(dim, 0)
        if name == "key_mask":  # read through any strides
            return x.flatten(0, 1) if self.rank == 4 else x
        # Of inputs without a batch axis, key_lengths has one nevertheless, of extent 1.
        return x.flatten(0, 1).contiguous()

    def unfold(self, x: Tensor) -> Tensor:
        if self.rank == 2:
            return x.squeeze(self.head_axis)
        return x.view(self.size, self.batch, *x.shape[1:]) if self.rank == 4 else x

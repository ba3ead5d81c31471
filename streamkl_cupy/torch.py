"""PyTorch: ``attention_kl`` under autograd, ``torch.func``, ``torch.compile`` and CUDA-graph capture.

Two opaque custom operators launch the kernels, and know their derivative: tracers see one node each, may find one
tensor in several places, and let numbers and patterns change from call to call. Where nothing traces, an
``autograd.Function`` does the same at less cost, and under ``torch.func``, which an operator's derivative does not
support. Either way the backward cannot be differentiated again and says so, because a silently missing second-order
term is worse than an error. A forward that nothing traces, transforms or differentiates skips all of this.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import api, arrays, calls, reduce, validate
from .arguments import a_kind_of, choice
from .arrays import RowStats, Saved
from .problem import INPUT_NAMES, MASK_ARRAYS, Options
from .signatures import answered

if TYPE_CHECKING:
    from .patterns import BlockPattern

__all__ = ["attention_kl"]

_INPUTS = ", ".join(f"Tensor {name}" for name in INPUT_NAMES)
_MASKS = ", ".join(f"Tensor? {name}" for name in MASK_ARRAYS)
# Those of `Options`, with the key of the pattern in place of the pattern; and both scales again, where a tracer holds
# one as a symbol: (2,) float64 on the CPU, which count for a side that has a scale at all.
_OPTIONS = (
    "float? teacher_scale, float? student_scale, bool causal, SymInt? q_offset, str layout, str precision, "
    "bool? deterministic, SymInt[]? window, Tensor? block_mask, Tensor? scales=None"
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
        choice("reduction", reduction, validate.REDUCTIONS)
    masks = (key_lengths, cu_seqlens_q, cu_seqlens_k, key_mask)
    for mask_name, mask in zip(MASK_ARRAYS, masks):
        if mask is not None and not isinstance(mask, Tensor):
            raise arrays.no_mask_array(mask_name, mask, "torch")
    # Symbols of a tracer are no numbers to look at; the operator looks when it runs.
    traced = _traced()
    scales = (None, None) if traced else (teacher_scale, student_scale)
    options = validate.options(*scales, causal, q_offset, layout, precision, deterministic, window, block_mask)
    if traced:
        kl, teacher_lse, student_lse = _in_graph(
            torch.compiler.is_dynamo_compiling(),
            *inputs,
            *masks,
            teacher_scale,
            student_scale,
            *options[2:-1],
            _key(block_mask),
        )
    elif _plain(inputs) and (key_mask is None or type(key_mask) is Tensor):
        views, seen = calls.view_inputs(*inputs), calls.view_masks(*masks)
        ready = calls.prepare(views, options, seen)
        kl, teacher_lse, student_lse = (view.array for view in calls.forward(views, ready, seen))
    else:
        for kind, given in zip((*INPUT_NAMES, *MASK_ARRAYS), (*inputs, *masks)):
            _refuse_distributed(kind, given)
        kl, teacher_lse, student_lse = _AttentionKL.apply(*inputs, *masks, *options[:-1], _key(block_mask))  # type: ignore[no-untyped-call]
    if row_weight is not None:
        _check_weight(row_weight, kl)
    value = reduce.reduce_rows(torch, kl, teacher_lse, row_weight, reduction)
    if dense_teacher_lse is None:
        return api.KLForward(value, teacher_lse, student_lse) if return_lse else value
    if not return_lse:
        raise ValueError("dense_teacher_lse gives the teacher's mass beside the log-sum-exps: pass return_lse=True too")
    _check_dense(dense_teacher_lse, teacher_lse)
    dense = dense_teacher_lse.detach()
    if not traced and teacher_lse.device.type == "cpu" and _plain((teacher_lse, dense)):
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


def _key(pattern: BlockPattern | None) -> Tensor | None:
    """What operators are handed of a pattern."""
    return None if pattern is None else torch.from_numpy(pattern.key)


def _refuse_distributed(name: str, x: Any) -> None:
    if type(x).__module__.startswith("torch.distributed."):
        raise TypeError(
            f"{name} is {a_kind_of(x)}, spread over devices; rows and heads are independent, so give each device its "
            f"own part: wrap the call in torch.distributed.tensor.experimental.local_map with batch or heads sharded "
            f"alike in all inputs, or pass {name}.to_local()"
        )


def _traced() -> bool:
    """Whether this call is being written down, by torch.compile, torch.export or torch.jit.trace."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _in_graph(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The operator, with floats that are symbols as a tensor: an operator's float is a constant of the program, and a
    scale that changes from step to step would mean another program for each step.

    One function of the graph, because the tracer of Python code does not tell a symbol from a number.
    """
    dynamo, *arrays, teacher_scale, student_scale, causal, q_offset, layout, precision, deterministic, window, key = (
        args
    )
    if dynamo and key is not None and torch.compiler.is_exporting():
        raise NotImplementedError(
            "block_mask under torch.export.export(strict=True), which makes of the pattern a constant that holds no "
            "numbers; pass strict=False"
        )
    scales = (teacher_scale, student_scale)
    if any(isinstance(scale, torch.SymFloat) for scale in scales):
        one = torch.ones((), dtype=torch.float64)
        packed = torch.stack([one * (1.0 if scale is None else scale) for scale in scales])
        scales = (None if teacher_scale is None else 1.0, None if student_scale is None else 1.0)
    else:
        packed = None
        scales = validate.options(*scales)[:2]
    if getattr(forward_ad, "_current_level", -1) >= 0:  # programs are compiled anew for each level
        raise NotImplementedError(_NO_FORWARD_MODE)
    options = (*scales, causal, q_offset, layout, precision, deterministic, window, key, packed)
    forward: Any = _forward_op if key is None and packed is None else _forward_on_host
    if _transforms_active():  # which do not support the derivative of an operator
        forward = _AttentionKL.apply
    rows: tuple[Tensor, Tensor, Tensor] = forward(*arrays, *options)
    return rows


@functools.partial(
    torch.compiler.disable,
    reason="it computes on memory that tracers do not have; streamkl_cupy.attention_kl can be compiled",
)
def outside_programs(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an explicit function from code that torch.compile compiles, which is interrupted there."""
    return function(*args, **kwargs)


# torch has no public question for these two. Where a name is gone, the call takes the autograd.Function, which is right
# in every context and only slower.
_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)


def _plain(inputs: Sequence[Tensor]) -> bool:
    """Whether nothing differentiates, transforms or traces this call, so that it may skip the dispatcher."""
    if _transforms_active() or _dispatch_modes():
        return False
    if getattr(forward_ad, "_current_level", 0) >= 0:
        return False
    recording = torch.is_grad_enabled()
    for x in inputs:
        if (type(x) is not Tensor and type(x) is not torch.nn.Parameter) or (recording and x.requires_grad):
            return False
    return True


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """What the backward of a forward reads, kept by the graph: the arrays, the saved rows, the options."""
    kl, teacher_lse, student_lse = output
    ctx.mark_non_differentiable(teacher_lse, student_lse)
    ctx.set_materialize_grads(False)
    # Only the teacher's gradient reads kl; otherwise the caller may scale it in place.
    saved_kl = kl if ctx.needs_input_grad[0] or ctx.needs_input_grad[1] else None
    # The last options are tensors too.
    ctx.save_for_backward(*inputs[:4], teacher_lse, student_lse, saved_kl, *inputs[4:8], *inputs[16:])
    ctx.options = inputs[8:16]


def _differentiate(ctx: Any, grad: Tensor | None, backward: Any) -> tuple[Tensor | None, ...]:
    """Gradients by every argument of a forward, computed by `backward`."""
    wanted = list(ctx.needs_input_grad[:4])
    nothing = (None,) * len(ctx.needs_input_grad)
    if grad is None or not any(wanted):
        return nothing
    saved = ctx.saved_tensors
    grads = backward(grad, *saved[:11], wanted, *ctx.options, *saved[11:])
    return (*(g if w else None for g, w in zip(grads, wanted)), *nothing[4:])


def _refuse_second_order(ctx: Any, *grads: Any) -> NoReturn:
    raise NotImplementedError(_NO_SECOND_ORDER)


class _AttentionKL(torch.autograd.Function):
    """The forward with its first-order gradient, where nothing traces."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
        launch: Any = _launch_forward if _plain(args[:4]) else _forward_op
        rows: tuple[Tensor, Tensor, Tensor] = launch(*args)
        return rows

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
        _setup_context(ctx, inputs, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_lse_grads: None) -> tuple[Tensor | None, ...]:
        return _differentiate(ctx, grad, _AttentionKLBackward.apply)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise NotImplementedError(_NO_FORWARD_MODE)


# torch binds the arguments at every call; a signature that lies ready saves it the work of making one each time.
_AttentionKL.forward.__signature__ = inspect.signature(_AttentionKL.forward)  # type: ignore[attr-defined]


class _AttentionKLBackward(torch.autograd.Function):
    """The backward operator, which nothing may differentiate."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        # Always the operator: is_grads_batched hands over batched tensors that nothing here could recognise.
        grads: tuple[Tensor, Tensor, Tensor, Tensor] = _backward_op(*args)
        return grads

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        _refuse_second_order(ctx, *grads)


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
    chosen = _unpacked(*options)
    ready = calls.prepare(inputs, chosen, masks)
    # Three allocations, where the direct path makes one: operator outputs must not share memory.
    rows = RowStats(*(arrays.empty(inputs.student_q, ready.row_shape, ready.stat_dtype) for _ in range(3)))
    calls.launch_forward(inputs, ready, rows, masks)
    if chosen.block_mask is not None:
        # What a backward reads keeps the pattern, of which operators know the key only.
        rows.student_lse.array._streamkl_block_mask = chosen.block_mask
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
    ready = calls.prepare(inputs, _unpacked(*options), masks)
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


def _unpacked(
    teacher_scale: float | None,
    student_scale: float | None,
    causal: bool,
    q_offset: int | None,
    layout: str,
    precision: str,
    deterministic: bool | None,
    window: Sequence[int] | None,
    block_mask: Tensor | None,
    scales: Tensor | None = None,
) -> Options:
    """Options as the operators take them: a schema knows lists for tuples, and no patterns."""
    if scales is not None:  # numbers that nobody has looked at yet
        read = (None if given is None else x for given, x in zip((teacher_scale, student_scale), scales.tolist()))
        teacher_scale, student_scale = validate.options(*read)[:2]
    pair = None if window is None else (window[0], window[1])
    pattern = None
    if block_mask is not None:
        # Imported here, because most programs have none.
        from .patterns.pattern import pattern_of

        pattern = pattern_of(block_mask.numpy().tobytes().hex())
    return Options(teacher_scale, student_scale, causal, q_offset, layout, precision, deterministic, pair, pattern)


def _fake_forward(teacher_q: Tensor, teacher_k: Tensor, student_q: Tensor, student_k: Tensor, *options: Any) -> Any:
    wide = torch.float64 in (teacher_q.dtype, student_q.dtype)
    dtype = torch.float64 if wide else torch.float32
    return tuple(student_q.new_empty(student_q.shape[:-1], dtype=dtype) for _ in range(3))


def _fake_backward(grad: Tensor, *args: Any) -> Any:
    inputs, wanted = args[:4], args[11]
    return tuple(x.new_empty(x.shape) if w else args[2].new_empty(0) for x, w in zip(inputs, wanted))


def _forward_of_batches(op: Any, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    if args[5] is not None:
        return _looped(op, info.batch_size, in_dims, args)
    folded = _Fold(info.batch_size, args[2], in_dims[2], layout=args[12])
    inputs = [folded.fold(x, d) for x, d in zip(args[:4], in_dims)]
    masks = [folded.fold_mask(*x) for x in zip(MASK_ARRAYS, args[4:8], in_dims[4:8])]
    rows = op(*inputs, *masks, *args[8:])
    return tuple(folded.unfold(x) for x in rows), (0, 0, 0)


def _backward_of_batches(op: Any, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    if args[9] is not None:
        return _looped(op, info.batch_size, in_dims, args)
    folded = _Fold(info.batch_size, args[3], in_dims[3], layout=args[17])
    grad, *rest = args[:8]
    inputs = [folded.fold(x, d) for x, d in zip(rest[:4], in_dims[1:5])]
    saved = [None if x is None else folded.fold(x, d) for x, d in zip(rest[4:], in_dims[5:8])]
    masks = [folded.fold_mask(*x) for x in zip(MASK_ARRAYS, args[8:12], in_dims[8:12])]
    wanted = args[12]
    grads = op(folded.fold(grad, in_dims[0]), *inputs, *saved, *masks, *args[12:])
    out_dims = tuple(0 if w else None for w in wanted)
    return tuple(folded.unfold(g) if w else g for g, w in zip(grads, wanted)), out_dims


def _saves_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    pass


def _operators(suffix: str = "", tags: Sequence[Any] = ()) -> tuple[Any, Any]:
    """The forward and the backward operator, with all that torch wants to know of them."""
    forward = torch.library.custom_op(
        f"streamkl::attention_kl_forward{suffix}",
        _launch_forward,
        mutates_args=(),
        schema=f"({_INPUTS}, {_MASKS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
        tags=tags,
    )
    backward = torch.library.custom_op(
        f"streamkl::attention_kl_backward{suffix}",
        _launch_backward,
        mutates_args=(),
        schema=f"(Tensor grad, {_INPUTS}, Tensor teacher_lse, Tensor student_lse, Tensor? kl, {_MASKS}, bool[] wanted, "
        f"{_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
        tags=tags,
    )
    forward.register_autograd(
        lambda ctx, grad, *_lse_grads: _differentiate(ctx, grad, backward), setup_context=_setup_context
    )
    backward.register_autograd(_refuse_second_order, setup_context=_saves_nothing)
    forward.register_fake(_fake_forward)
    backward.register_fake(_fake_backward)
    forward.register_vmap(functools.partial(_forward_of_batches, forward))
    backward.register_vmap(functools.partial(_backward_of_batches, backward))
    return forward, backward


_forward_op, _backward_op = _operators()
# Scales and patterns that come as arrays are read by the host at each call, which a replayed CUDA graph leaves out.
_forward_on_host, _ = _operators("_on_host", tags=(torch.Tag.cudagraph_unsafe,))


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

"""PyTorch: ``attention_kl`` under autograd, ``torch.func``, ``torch.compile`` and CUDA-graph capture.

Two opaque custom operators launch the kernels, and know their derivative: tracers see one node each, may find one
tensor in several places, and let numbers and patterns change from call to call. ``torch.func`` does not support the
derivative of an operator, so an ``autograd.Function`` around them, ``_AttentionKL``, is what it takes. Where nothing
but autograd looks on, ``_Step`` launches without the dispatcher and has the reduction inside; its backward goes the
long way again where somebody looks on by then. In all of them the backward cannot be differentiated again and says so,
because a silently missing second-order term is worse than an error. A forward that nothing differentiates either skips
all of this.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import frameworks, validate
from .advice.signatures import public
from .arguments import a_kind_of
from .arrays import Results
from .call import Call, SavedArrays
from .ops import ATTENTION_KL
from .options import MASK_ARRAYS, NO_MASKS, TABLES, LossOptions, Options
from .results import KLEntropy, rows_of
from .rules import masks as rules
from .rules import reductions
from .rules.divergences import DIVERGENCES

if TYPE_CHECKING:
    from .patterns import BlockPattern

__all__ = ["attention_kl"]

_NAMES = ATTENTION_KL.names
_TABLE = TABLES[ATTENTION_KL.name]

_NO_SECOND_ORDER = (
    "streamkl_cupy.attention_kl has first-order gradients only: its backward cannot be differentiated again. "
    "Drop create_graph=True (or the outer torch.func transform), or use a dense attention KL where second-order "
    "terms are needed."
)
_NO_FORWARD_MODE = (
    "streamkl_cupy.attention_kl has reverse-mode gradients only: it cannot propagate a forward-mode tangent "
    "(torch.func.jvp, jacfwd, hessian, torch.autograd.forward_ad). Use torch.func.grad, vjp or jacrev."
)


def loss(inputs: tuple[Any, ...], given: dict[str, Any], asked: LossOptions) -> Any:
    """`attention_kl` of arrays and options by name."""
    for name, x in zip(_NAMES, inputs):
        if not isinstance(x, Tensor):
            raise validate.not_of("torch", name, x)
    validate.loss(asked)
    traced = _traced()
    call = Call.of(ATTENTION_KL, inputs, given, symbols=traced)
    masks = call.masks
    if traced or masks is not NO_MASKS:  # not every version's tracer knows `is` of tuples
        for name, x in zip(MASK_ARRAYS, masks):
            if x is not None and not isinstance(x, Tensor):
                raise frameworks.no_mask_array(name, x, "torch")
    if not traced and _unwatched((*inputs, *masks)):
        return _launched(call, asked)
    if traced:
        dynamo = torch.compiler.is_dynamo_compiling()
        rows = _in_graph(dynamo, *inputs, *masks, *_with_key(call.options))
    else:
        for name, x in zip((*_NAMES, *MASK_ARRAYS), (*inputs, *masks)):
            if type(x) is not Tensor and x is not None:
                _refuse_distributed(name, x)
        rows = _AttentionKL.apply(*inputs, *masks, call.options, None)  # type: ignore[no-untyped-call]
    return _reduced(_there(call.options, rows), asked)


def _launched(call: Call, asked: LossOptions) -> Any:
    """The same where nothing but autograd looks on."""
    ready, weight = call.ready(), asked.row_weight
    like = call.operands[call.op.at]
    if weight is not None:
        _check_weight(weight, like, ready.checked.row_shape)
    if not _differentiated(call.operands):
        return _reduced(_tensors(ready.forward()), asked)
    # Weights that are differentiated too, or looked on, are torch's own matter.
    apart = weight is not None and not _plain((weight,))
    inside = LossOptions(return_lse=True) if apart else asked
    found: Any = _Step.apply(*call.operands, ready, call, inside)  # type: ignore[no-untyped-call]
    if apart:
        return _reduced(found, asked)
    return _results(found, asked) if isinstance(found, tuple) else found


_Rows = tuple[Tensor, Tensor, Tensor, "Tensor | None", "Tensor | None"]
"""Values, both log-sum-exps, and of entropies and moments what there is."""


def _tensors(rows: Results) -> _Rows:
    kl, teacher_lse, student_lse, entropy, moments = rows
    return (
        kl.array,
        teacher_lse.array,
        student_lse.array,
        None if entropy is None else entropy.array,
        None if moments is None else moments.array,
    )


def _there(options: Options, rows: Sequence[Tensor]) -> _Rows:
    """Rows as an operator gives them, with None for those that the call does not have."""
    kl, teacher_lse, student_lse, entropy, moments = rows
    has_moments = DIVERGENCES[options.divergence].moments > 0
    return kl, teacher_lse, student_lse, entropy if options.return_entropy else None, moments if has_moments else None


def _reduced(rows: _Rows, asked: LossOptions) -> Any:
    """What was asked for of the rows, by torch's own functions."""
    kl, teacher_lse, *others = rows
    weight = asked.row_weight
    if weight is not None:
        _check_weight(weight, kl, kl.shape)
    value = reductions.reduce_rows(torch, kl, teacher_lse, weight, asked.reduction)
    return _results((value, teacher_lse, *others), asked)


def _results(rows: tuple[Any, ...], asked: LossOptions) -> Any:
    """The value, and of the rows what was asked for beside it."""
    value, teacher_lse, student_lse, entropy, moments = rows
    if not asked.return_lse:
        return value if entropy is None else KLEntropy(value, entropy)
    dense: Any = asked.dense_teacher_lse
    if dense is None:
        return rows_of(value, teacher_lse, student_lse, None, entropy, moments)
    _check_given("dense_teacher_lse", dense, teacher_lse)
    validate.one_per_row("dense_teacher_lse", dense, teacher_lse.shape, teacher_lse.dtype)
    dense = dense.detach()
    if not _traced() and teacher_lse.device.type == "cpu" and _unwatched((teacher_lse, dense)):
        validate.dense_lse(teacher_lse.numpy(), dense.numpy(force=True))
    mass = reductions.teacher_mass(torch, teacher_lse, dense)
    return rows_of(value, teacher_lse, student_lse, mass, entropy, moments)


def _check_weight(weight: Any, rows: Tensor, row_shape: Sequence[int]) -> None:
    _check_given("row_weight", weight, rows)
    validate.weights(weight, row_shape)  # type: ignore[arg-type]


def _loss(operands: tuple[Any, ...], given: dict[str, Any], *, return_entropy: bool = False, **own: Any) -> Any:
    if return_entropy is not False:
        given = {**given, "return_entropy": return_entropy}
    return loss(operands, given, LossOptions(**own))


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
) -> Any:
    """KL divergence from a teacher's to a student's attention rows, differentiable by PyTorch.

    The arguments, results and accuracy are those of :func:`streamkl_cupy.attention_kl`, which comes here when it is
    given torch tensors. Gradients of first order reach the four inputs and ``row_weight``, under autograd,
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


def _with_key(options: Options) -> Any:
    """Options as operators take them: with a tensor that names the pattern, where there is one."""
    pattern = options.block_mask
    if pattern is None or isinstance(pattern, Tensor):
        return options
    key: Any = torch.from_numpy(pattern.key)
    return options._replace(block_mask=key)


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
def _in_graph(*args: Any) -> tuple[Tensor, ...]:
    """The operator, with floats that are symbols as a tensor: an operator's float is a constant of the program, and a
    scale or a cap that changes from step to step would mean another program for each step.

    One function of the graph, because the tracer of Python code does not tell a symbol from a number.
    """
    dynamo, call = args[0], _call(args[1:])
    options, packed = call.options, None
    if dynamo and options.block_mask is not None and torch.compiler.is_exporting():
        raise NotImplementedError(
            "block_mask under torch.export.export(strict=True), which makes of the pattern a constant that holds no "
            "numbers; pass strict=False"
        )
    numbers = [getattr(options, name) for name in _SYMBOLS]
    if any(isinstance(x, torch.SymFloat) for x in numbers):
        one = torch.ones((), dtype=torch.float64)
        packed = torch.stack([one * (1.0 if x is None else x) for x in numbers])
        numbers = [None if x is None else 1.0 for x in numbers]
    options = _with_numbers(options, numbers)
    if getattr(forward_ad, "_current_level", -1) >= 0:  # programs are compiled anew for each level
        raise NotImplementedError(_NO_FORWARD_MODE)
    arrays = (*call.operands, *call.masks)
    rows: tuple[Tensor, ...]
    if _transforms_active():  # which do not support the derivative of an operator
        rows = _AttentionKL.apply(*arrays, options, packed)  # type: ignore[no-untyped-call]
    else:
        forward = _forward_op if options.block_mask is None and packed is None else _forward_on_host
        rows = forward(*arrays, *options, packed)
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


def _unwatched(tensors: Sequence[Tensor | None]) -> bool:
    """Whether nothing transforms or traces a call with these, so that it may skip the dispatcher; autograd may."""
    if _transforms_active() or _dispatch_modes() or getattr(forward_ad, "_current_level", 0) >= 0:
        return False
    return _KINDS.issuperset(map(type, tensors))


_KINDS = frozenset({Tensor, torch.nn.Parameter, type(None)})


def _plain(inputs: Sequence[Tensor]) -> bool:
    """The same, and nothing differentiates it."""
    return _unwatched(inputs) and not _differentiated(inputs)


def _differentiated(inputs: Sequence[Tensor]) -> bool:
    """Whether autograd records a call with these."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def _as_it_lies(grad: Tensor) -> bool:
    """Whether a gradient from above is what its memory holds: is_grads_batched hands over tensors that nothing else
    tells from others, and some have a bit that stands for a sign or for zeros."""
    return not (_legacy_batched(grad) or grad.is_neg() or grad._is_zerotensor())


_legacy_batched = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda x: True)


# Where the arguments of the operators begin that are not inputs: arrays of masks, options, and what is beyond them. In
# front of these the backward operator takes what is saved, and which gradients are wanted.
_MASKS = len(_NAMES)
_OPTIONS = _MASKS + len(MASK_ARRAYS)
_NUMBERS = _OPTIONS + len(_TABLE)
# Options that a tracer may hold as symbols.
_SYMBOLS = tuple(name for name, row in _TABLE.items() if row.symbol)
_SAVED = len((*ATTENTION_KL.Saved._fields, "wanted"))
_ROWS = len(ATTENTION_KL.results)
_SCHEMA = ", ".join(
    (
        *(f"Tensor {name}" for name in _NAMES),
        *(f"Tensor? {name}" for name in MASK_ARRAYS),
        *(f"{row.schema} {name}" for name, row in _TABLE.items()),
        "Tensor? numbers=None",
    )
)
_SAVED_SCHEMA = "Tensor grad, Tensor teacher_lse, Tensor student_lse, Tensor? kl, Tensor? moments, bool[] wanted"


def _call(args: tuple[Any, ...]) -> Call:
    """The arguments of the forward operator by name. A schema knows lists for tuples, and no patterns: options have
    these until they are `_unpacked`."""
    return Call(ATTENTION_KL, args[:_MASKS], Options._make(args[_OPTIONS:_NUMBERS]), args[_MASKS:_OPTIONS])


def _numbers(args: tuple[Any, ...]) -> Any:
    """The options of `_SYMBOLS` again, where a tracer holds one as a symbol: float64 on the CPU, which count for those
    that there are."""
    return args[_NUMBERS] if len(args) > _NUMBERS else None


def _flat(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments that end in options and numbers, as an operator takes them."""
    *arrays, options, numbers = args
    flat = (*arrays, *_with_key(options))
    return flat if numbers is None else (*flat, numbers)  # an argument that is left out costs nothing


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Keep what the backward of a forward reads: the arrays, the saved rows, the options."""
    *arrays, options, numbers = inputs
    kl, teacher_lse, student_lse, _, moments = _there(options, output)
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    # Where no gradient reads kl, the caller may scale it in place.
    saved_kl = kl if _reads_value(options.divergence, ctx.needs_input_grad[:_MASKS]) else None
    # Tensors among the options are kept as such.
    key = options.block_mask if isinstance(options.block_mask, Tensor) else None
    ctx.options = options if key is None else options._replace(block_mask=None)
    ctx.save_for_backward(teacher_lse, student_lse, saved_kl, moments, *arrays, key, numbers)


def _differentiate(ctx: Any, grad: Tensor | None, backward: Any) -> tuple[Tensor | None, ...]:
    """Gradients by every argument of a forward, computed by `backward`."""
    wanted = list(ctx.needs_input_grad[:_MASKS])
    nothing = (None,) * len(ctx.needs_input_grad)
    if grad is None or not any(wanted):
        return nothing
    *saved, key, numbers = ctx.saved_tensors
    options = ctx.options if key is None else ctx.options._replace(block_mask=key)
    rows, arrays = saved[:4], saved[4:]
    grads = backward(grad, *rows, wanted, *arrays, options, numbers)
    return (*(g if w else None for g, w in zip(grads, wanted)), *nothing[_MASKS:])


@functools.lru_cache(maxsize=16)
def _names(wanted: tuple[bool, ...]) -> tuple[str, ...]:
    return tuple(name for name, w in zip(_NAMES, wanted) if w)


@functools.lru_cache(maxsize=256)
def _reads_value(divergence: str, wanted: tuple[bool, ...]) -> bool:
    return bool(validate.reads_value(ATTENTION_KL, divergence, _names(wanted)))


def _refuse_second_order(ctx: Any, *grads: Any) -> NoReturn:
    raise NotImplementedError(_NO_SECOND_ORDER)


class _Step(torch.autograd.Function):
    """The forward, its reduction and their first-order gradient, where nothing but autograd looks on.

    Of old style, with one method for the forward: torch binds signatures for the other at every call.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        *inputs, ready, call, asked = args
        kl, teacher_lse, student_lse, entropy, moments = _tensors(ready.forward())
        lse = None if ready.checked.every_row_sees else teacher_lse
        value, share = reductions.value_and_gradient(torch, kl, lse, asked.row_weight, asked.reduction)
        ctx.set_materialize_grads(False)
        ctx.options, ctx.share = call.options, share if isinstance(share, float) else None
        ctx.save_for_backward(
            teacher_lse,
            student_lse,
            # Where no gradient reads kl, the caller may scale it in place.
            kl if _reads_value(call.options.divergence, ctx.needs_input_grad[:_MASKS]) else None,
            moments,
            share if ctx.share is None else None,
            *inputs,
            *(() if call.masks is NO_MASKS else call.masks),
        )
        if not asked.return_lse and entropy is None:
            return value
        ctx.mark_non_differentiable(*[x for x in (teacher_lse, student_lse, entropy, moments) if x is not None])
        return value, teacher_lse, student_lse, entropy, moments

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_lse_grads: None) -> tuple[Tensor | None, ...]:
        nothing = (None,) * len(ctx.needs_input_grad)
        if grad is None:
            return nothing
        teacher_lse, student_lse, kl, moments, share, *arrays = ctx.saved_tensors
        share = share if ctx.share is None else ctx.share
        rows = (grad if share is None else grad * share, teacher_lse, student_lse, kl, moments)
        inputs, masks = tuple(arrays[:_MASKS]), tuple(arrays[_MASKS:]) or NO_MASKS
        wanted = ctx.needs_input_grad[:_MASKS]
        if torch.is_grad_enabled() or not (_unwatched((*rows, *arrays)) and _as_it_lies(rows[0])):
            # Zeros without memory, times a number, have the type of the number.
            whole = rows[0].to(teacher_lse.dtype).expand(teacher_lse.shape)
            grads = _AttentionKLBackward.apply(whole, *rows[1:], list(wanted), *inputs, *masks, ctx.options, None)  # type: ignore[no-untyped-call]
            return (*(g if w else None for g, w in zip(grads, wanted)), *nothing[_MASKS:])
        ready = Call(ATTENTION_KL, inputs, ctx.options, masks).ready(SavedArrays(rows, alike=True))
        return (*ready.backward(_names(wanted)), *nothing[_MASKS:])


class _AttentionKL(torch.autograd.Function):
    """The forward with its first-order gradient, as transforms take it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        rows: tuple[Tensor, ...]
        if _plain(args[:_MASKS]):
            *_, options, _ = args
            rows = _launch(Call(ATTENTION_KL, args[:_MASKS], options, args[_MASKS:_OPTIONS]))
        else:
            rows = _forward_op(*_flat(args))
        return rows

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _keep(ctx, inputs, output)

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
        grads: tuple[Tensor, Tensor, Tensor, Tensor] = _backward_op(*_flat(args))
        return grads

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        _refuse_second_order(ctx, *grads)


def _launch_forward(*args: Any) -> tuple[Tensor, ...]:
    return _launch(_unpacked(args))


def _launch(call: Call) -> tuple[Tensor, ...]:
    """All rows that an operator gives, empty where the call does not have them."""
    ready = call.ready()
    # An allocation each, where the direct path makes one for all rows: operator outputs must not share memory.
    rows = ready.empty_results()
    ready.launch(rows)
    if call.options.block_mask is not None:
        # What a backward reads keeps the pattern, of which operators know the key only.
        rows.student_lse.array._streamkl_block_mask = call.options.block_mask
    return tuple([rows.kl.array.new_empty(0) if x is None else x for x in _tensors(rows)])


def _launch_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the wanted inputs; of the others an empty tensor, as batching fallbacks want a fixed count."""
    *saved, wanted = args[:_SAVED]
    wrt = _names(tuple(wanted))
    call = _unpacked(args[_SAVED:])
    ready = call.ready(SavedArrays(tuple(saved)))
    a, b, c, d = (call.operands[call.op.at].new_empty(0) if g is None else g for g in ready.backward(wrt))
    return a, b, c, d


def _unpacked(args: tuple[Any, ...]) -> Call:
    """The call that the forward operator is asked for, with options as all others have them."""
    call, numbers = _call(args), _numbers(args)
    options: Any = call.options
    window, key = options.window, options.block_mask
    if numbers is None and window is None and key is None:
        return call
    if numbers is not None:  # that nobody has looked at yet
        given = [getattr(options, name) for name in _SYMBOLS]
        options = _with_numbers(options, [None if x is None else y for x, y in zip(given, numbers.tolist())])
    pattern = None
    if key is not None:
        # Imported here, because most programs have none.
        from .patterns.pattern import pattern_of

        pattern = pattern_of(key.numpy().tobytes().hex())
    options = options._replace(window=window and (window[0], window[1]), block_mask=pattern)
    return call._replace(options=options)


def _with_numbers(options: Options, numbers: Sequence[Any]) -> Options:
    """The options with those of `_SYMBOLS` that are checked now."""
    checked: dict[str, Any] = {n: None if x is None else _TABLE[n].check(n, x) for n, x in zip(_SYMBOLS, numbers)}
    return options._replace(**checked)


def _fake_forward(*args: Any) -> Any:
    call = _call(args)
    teacher_q, _, student_q, _ = call.operands
    wide = torch.float64 in (teacher_q.dtype, student_q.dtype)
    dtype = torch.float64 if wide else torch.float32
    shape, moments = student_q.shape[:-1], DIVERGENCES[call.options.divergence].moments
    shapes: list[Any] = [shape] * 3 + [shape if call.options.return_entropy else (0,)]
    shapes.append((*shape, moments) if moments else (0,))
    return tuple(student_q.new_empty(shape, dtype=dtype) for shape in shapes)


def _fake_backward(*args: Any) -> Any:
    wanted, inputs = args[_SAVED - 1], _call(args[_SAVED:]).operands
    return tuple(x.new_empty(x.shape) if w else inputs[2].new_empty(0) for x, w in zip(inputs, wanted))


def _forward_of_batches(op: Any, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    call, dims = _call(args), _call(in_dims)
    if _packed(call):
        return _looped(op, info.batch_size, in_dims, args)
    folded = _Fold(info.batch_size, call, dims)
    rows = op(*folded.arguments(call, dims), _numbers(args))
    there = [x is not None for x in _there(call.options, rows)]
    return (
        tuple(folded.unfold(x) if has else x for x, has in zip(rows, there)),
        tuple(0 if has else None for has in there),
    )


def _backward_of_batches(op: Any, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
    *rows, wanted = args[:_SAVED]
    call, dims = _call(args[_SAVED:]), _call(in_dims[_SAVED:])
    if _packed(call):
        return _looped(op, info.batch_size, in_dims, args)
    folded = _Fold(info.batch_size, call, dims)
    saved = [None if x is None else folded.fold(x, d) for x, d in zip(rows, in_dims)]
    grads = op(*saved, wanted, *folded.arguments(call, dims), _numbers(args[_SAVED:]))
    out_dims = tuple(0 if w else None for w in wanted)
    return tuple(folded.unfold(g) if w else g for g, w in zip(grads, wanted)), out_dims


def _packed(call: Call) -> bool:
    """Whether there are packed sequences, which have no batch axis that vmap's could become part of."""
    return rules.packing([name for name, x in zip(MASK_ARRAYS, call.masks) if x is not None]) is not None


def _saves_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    pass


def _operators(suffix: str = "", tags: Sequence[Any] = ()) -> tuple[Any, Any]:
    """The forward and the backward operator, with all that torch wants to know of them."""
    forward = torch.library.custom_op(
        f"streamkl::attention_kl_forward{suffix}",
        _launch_forward,
        mutates_args=(),
        schema=f"({_SCHEMA}) -> ({', '.join(['Tensor'] * _ROWS)})",
        tags=tags,
    )
    backward = torch.library.custom_op(
        f"streamkl::attention_kl_backward{suffix}",
        _launch_backward,
        mutates_args=(),
        schema=f"({_SAVED_SCHEMA}, {_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
        tags=tags,
    )
    forward.register_autograd(
        lambda ctx, grad, *_lse_grads: _differentiate(ctx, grad, lambda *args: backward(*_flat(args))),
        setup_context=lambda ctx, inputs, output: _keep(
            ctx, (*inputs[:_OPTIONS], _call(inputs).options, _numbers(inputs)), output
        ),
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

    def __init__(self, size: int, call: Call, dims: Call) -> None:
        example, dim = call.operands[call.op.at], dims.operands[dims.op.at]
        self.size = size
        self.rank = example.dim() - (dim is not None)
        self.head_axis = 2 if call.options.layout == "bnhd" else 1
        shape = [n for axis, n in enumerate(example.shape) if axis != dim]
        self.batch = shape[0] if self.rank == 4 else 1

    def arguments(self, call: Call, dims: Call) -> tuple[Any, ...]:
        """Those of the forward operator, but for the numbers."""
        inputs = [self.fold(x, d) for x, d in zip(call.operands, dims.operands)]
        masks = [self.fold_mask(*x) for x in zip(MASK_ARRAYS, call.masks, dims.masks)]
        return (*inputs, *masks, *call.options)

    def fold(self, x: Tensor, dim: Any) -> Tensor:
        """An operand or a row array: what comes before its rows is the same in both."""
        x = x.expand(self.size, *x.shape) if dim is None else x.movedim(dim, 0)
        if self.rank == 2:
            return x.unsqueeze(self.head_axis)
        return x.flatten(0, 1) if self.rank == 4 else x

    def fold_mask(self, name: str, x: Tensor | None, dim: Any) -> Tensor | None:
        """An array of a mask, whose first axis is the batch axis where there is one."""
        if x is None:
            return None
        x = x.expand(self.size, *x.shape) if dim is None else x.movedim(dim, 0)
        # Of inputs without a batch axis some have one nevertheless, of extent 1.
        array = rules.ARRAYS[name]
        x = x.flatten(0, 1) if x.dim() > array.axes + 1 else x
        return x if array.bits else x.contiguous()  # read through any strides, or as they lie

    def unfold(self, x: Tensor) -> Tensor:
        if self.rank == 2:
            return x.squeeze(self.head_axis)
        return x.view(self.size, self.batch, *x.shape[1:]) if self.rank == 4 else x

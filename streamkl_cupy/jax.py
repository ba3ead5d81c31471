"""JAX: ``attention_kl`` under grad, jit, vmap, scan, remat and shard_map, and the explicit functions on JAX arrays.

XLA owns the memory, the stream and the order of things, so every call, an eager one too, is a jitted
``jax.experimental.buffer_callback``: XLA hands the callback its buffers and its stream, the callback launches and
returns. The gradient is a ``custom_vjp`` whose backward is itself a ``custom_vjp`` that refuses to be differentiated.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from . import arrays, frameworks, validate
from .advice.signatures import public
from .api import attention_kl_backward, attention_kl_forward, attention_kl_value_and_grad
from .call import Call, prepare, runner_for
from .frameworks.dlpack import pointer_of
from .frameworks.jax import xla_deterministic
from .ops import ATTENTION_KL
from .options import MASK_ARRAYS, LossOptions, Options
from .problem import Device, Problem, compact_strides
from .results import KLEntropy, KLGradients, rows_of
from .rules import masks as rules
from .rules import reductions
from .rules.divergences import extra_rows

if TYPE_CHECKING:
    from .patterns import BlockPattern

__all__ = ["attention_kl", "attention_kl_backward", "attention_kl_forward", "attention_kl_value_and_grad"]

_NAMES = ATTENTION_KL.names
TESTED_JAX = "0.8 to 0.11"

_NO_SECOND_ORDER = (
    "streamkl_cupy.attention_kl has first-order gradients only: its backward cannot be differentiated again. "
    "Use a dense attention KL where second-order terms are needed."
)
_NO_FORWARD_MODE = (
    "streamkl_cupy.attention_kl has reverse-mode gradients only: it cannot propagate a forward-mode tangent (jax.jvp, "
    "jacfwd, linearize, hessian). Use jax.grad, vjp or jacrev."
)


# The arrays of masks in the order of MASK_ARRAYS; an absent one is None, which JAX takes for an empty tree.
_Masks = tuple[Any, ...]
_Result: Any = jax.ShapeDtypeStruct  # not annotated in JAX


class _Config(NamedTuple):
    """What a trace depends on beside shapes and dtypes."""

    options: Options
    platform: str


def _config(call: Call) -> _Config:
    options = call.options
    if options.deterministic is None:
        options = options._replace(deterministic=xla_deterministic())
    return _Config(options, _platform(call.operands[0]))


def _loss(operands: tuple[Any, ...], given: dict[str, Any], *, return_entropy: bool = False, **own: Any) -> Any:
    if return_entropy is not False:
        given = {**given, "return_entropy": return_entropy}
    call, asked = Call.of(ATTENTION_KL, operands, given), LossOptions(**own)
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
) -> Any:
    """KL divergence from a teacher's to a student's attention rows, differentiable by JAX.

    The arguments, results and accuracy are those of :func:`streamkl_cupy.attention_kl`, which comes here when it is
    given JAX arrays. Gradients of first order reach the four inputs and ``row_weight``; only those that are asked for
    are computed. The log-sum-exps carry no gradient. Second order raises NotImplementedError, forward mode TypeError.

    Works under ``jit``, ``grad``, ``vmap``, ``lax.scan``, ``checkpoint`` and ``shard_map``. Everything after the four
    arrays is static except ``row_weight`` and the arrays of masks. ``vmap`` becomes one larger batch; packed sequences
    have none, so there it becomes a loop. Under plain ``jit`` on sharded arrays XLA gathers them and every device
    does all the work: use ``shard_map`` over the batch or head axis.
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
    _check_inputs(call)
    config = _config(call)
    _check_masks(config, call)
    # JAX keeps a jitted function's programs, and with them their patterns. Inside a program of the caller's, its own
    # function does: what is written into that is gone with it.
    entry = _value if config.options.block_mask is not None and _staged() else _attention_kl
    try:
        rows = entry(call.operands, call.masks, asked.row_weight, config=config, reduction=asked.reduction)
    except TypeError as error:
        if "custom_vjp" not in str(error):
            raise
        raise TypeError(_NO_FORWARD_MODE) from error
    if asked.return_lse:
        return _with_mass(rows, asked.dense_teacher_lse)
    return KLEntropy(rows[0], rows[3]) if config.options.return_entropy else rows[0]


# The explicit functions, of calls whose arrays have been read: none is a tracer.


def forward(call: Call, dense_teacher_lse: Any) -> Any:
    """Row values and log-sum-exps."""
    config = _config(call)
    _check_masks(config, call)
    return _with_mass(_forward_entry(call.operands, call.masks, config=config), dense_teacher_lse)


def backward(call: Call, saved: tuple[Any, ...], wrt: tuple[str, ...]) -> KLGradients:
    """Gradients from grad, the two log-sum-exps and maybe the values and moments of rows."""
    config = _config(call)
    _check_masks(config, call)
    saved = _read(config, wrt, *saved)
    return KLGradients(**_backward_entry(call.operands, call.masks, saved, config=config, wrt=_in_order(wrt)))


def value_and_grad(call: Call, row_weight: Any, reduction: str, wrt: tuple[str, ...]) -> tuple[Any, KLGradients]:
    """Loss and gradients."""
    config = _config(call)
    _check_masks(config, call)
    value, grads = _value_and_grad(
        call.operands, call.masks, row_weight, config=config, reduction=reduction, wrt=_in_order(wrt)
    )
    return value, KLGradients(**grads)


# The jitted entries. Static arguments are hashable values, so calling again with the same ones neither traces nor
# compiles again; a callback made anew per call would cost 10 ms each time.


def _value(
    inputs: tuple[Any, ...], masks: _Masks, row_weight: Any, *, config: _Config, reduction: str
) -> tuple[Any, ...]:
    inputs, masks = _varying_alike(inputs, masks)
    kl, *others = _rows(config, *inputs, masks)
    # Stopped, so that a loss on the log-sum-exps has gradient zero by declaration, as with torch.
    teacher_lse, *others = jax.lax.stop_gradient(others)
    _check_weight(row_weight, kl)
    value = reductions.reduce_rows(jnp, kl, teacher_lse, row_weight, reduction)
    return (value, teacher_lse, *others)


# Nothing is computed from arrays of no elements, but they say on which device an empty result lies.
_jitted = functools.partial(jax.jit, keep_unused=True)
_attention_kl = _jitted(_value, static_argnames=("config", "reduction"))


@functools.partial(_jitted, static_argnames=("config",))
def _forward_entry(inputs: tuple[Any, ...], masks: _Masks, *, config: _Config) -> tuple[Any, ...]:
    return _forward(config, inputs, masks)


@functools.partial(_jitted, static_argnames=("config", "wrt"))
def _backward_entry(
    inputs: tuple[Any, ...], masks: _Masks, saved: tuple[Any, ...], *, config: _Config, wrt: tuple[str, ...]
) -> dict[str, Any]:
    return _backward(config, wrt, inputs, masks, saved)


@functools.partial(_jitted, static_argnames=("config", "reduction", "wrt"))
def _value_and_grad(
    inputs: tuple[Any, ...],
    masks: _Masks,
    row_weight: Any,
    *,
    config: _Config,
    reduction: str,
    wrt: tuple[str, ...],
) -> tuple[Any, dict[str, Any]]:
    kl, teacher_lse, student_lse, _, moments = _forward(config, inputs, masks)
    _check_weight(row_weight, kl)
    value, share = reductions.value_and_gradient(jnp, kl, teacher_lse, row_weight, reduction)
    row_grad = reductions.spread(jnp, value, share, kl.shape)
    saved = _read(config, wrt, row_grad, teacher_lse, student_lse, kl, moments)
    return value, _backward(config, wrt, inputs, masks, saved)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(config: _Config, *arrays: Any) -> tuple[Any, ...]:
    *inputs, masks = arrays
    return _forward(config, tuple(inputs), masks)


def _rows_fwd(config: _Config, *arrays: Any) -> tuple[tuple[Any, ...], Any]:
    *primals, masks = arrays
    inputs, masks = tuple(p.value for p in primals), tuple(None if m is None else m.value for m in masks)
    stats = _rows(config, *inputs, masks)  # itself, not _forward: an outer transform may differentiate this value too
    # Which gradients are wanted must reach the backward as static knowledge. It travels as the extent of an array
    # without elements; not in the tree of the residuals, which JAX keeps from whichever trace of a jitted caller came
    # last, so that a backward would see the wishes of another one.
    wanted = sum(1 << i for i, p in enumerate(primals) if p.perturbed)
    return stats, (inputs, masks, stats, jnp.zeros((wanted, 0), bool))


def _rows_bwd(config: _Config, residuals: Any, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    inputs, masks, (kl, teacher_lse, student_lse, _, moments), wanted = residuals
    wrt = tuple(name for i, name in enumerate(_NAMES) if wanted.shape[0] >> i & 1)
    grad = cotangents[0]
    if not wrt or isinstance(grad, SymbolicZero):
        return (None, None, None, None, None)
    grads = _backward_once(config, wrt, inputs, masks, _read(config, wrt, grad, teacher_lse, student_lse, kl, moments))
    return (*(grads.get(name) for name in _NAMES), None)


_rows.defvjp(_rows_fwd, _rows_bwd, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _backward_once(
    config: _Config, wrt: tuple[str, ...], inputs: tuple[Any, ...], masks: _Masks, saved: tuple[Any, ...]
) -> dict[str, Any]:
    return _backward(config, wrt, inputs, masks, saved)


def _backward_once_fwd(
    config: _Config, wrt: tuple[str, ...], inputs: Any, masks: _Masks, saved: Any
) -> tuple[dict[str, Any], None]:
    return _backward(config, wrt, inputs, masks, saved), None


def _backward_once_bwd(config: _Config, wrt: tuple[str, ...], residuals: None, cotangents: Any) -> NoReturn:
    raise NotImplementedError(_NO_SECOND_ORDER)


_backward_once.defvjp(_backward_once_fwd, _backward_once_bwd)


def _read(
    config: _Config, wrt: tuple[str, ...], grad: Any, teacher_lse: Any, student_lse: Any, kl: Any, moments: Any
) -> tuple[Any, ...]:
    """What these gradients read of the rows, with None for what they do not."""
    return (
        grad,
        teacher_lse,
        student_lse,
        kl if validate.reads_value(ATTENTION_KL, config.options.divergence, wrt) else None,
        moments,
    )


def _forward(config: _Config, inputs: tuple[Any, ...], masks: _Masks) -> tuple[Any, ...]:
    """Trace a forward launch: kl, the two log-sum-exps, and entropies and moments or None."""
    problem = _check(config, inputs, masks, ())
    shape, dtype = problem.row_shape, problem.stat_dtype
    given = _given(masks)
    like = (*inputs, *given.values())
    extra = {name: (*shape, *axes) for name, axes in extra_rows(problem).items()}
    if 0 in shape or not problem.keys:  # XLA calls no callback for an empty result
        nothing = jnp.full(shape, -jnp.inf, dtype)
        rows = (jnp.zeros(shape, dtype), nothing, nothing, *(jnp.zeros(x, dtype) for x in extra.values()))
    else:
        callback = _forward_callback(config.options, len(shape), tuple(given), tuple(extra))
        results = (*[_Result(shape, dtype)] * 3, *(_Result(x, dtype) for x in extra.values()))
        everything = (*results, *_workspace(runner_for(problem).workspace_bytes))
        launch = _buffer_callback()(callback, everything, vmap_method=_vmap_method(problem))
        rows = launch(*inputs, *given.values())[: len(results)]
    marked = _marked(rows, like)
    others = dict(zip(extra, marked[3:], strict=True))
    return (*marked[:3], *(others.get(name) for name in ATTENTION_KL.results[3:]))


def _backward(
    config: _Config, wrt: tuple[str, ...], inputs: tuple[Any, ...], masks: _Masks, saved: tuple[Any, ...]
) -> dict[str, Any]:
    """Trace a backward launch: the gradients named in `wrt`. `saved` is what `_read` leaves."""
    problem = _check(config, inputs, masks, wrt)
    extra = extra_rows(problem)
    rows = {name: x for name, x in zip(ATTENTION_KL.Saved._fields, saved, strict=True) if x is not None}
    for name, x in rows.items():
        shape = (*problem.row_shape, *extra.get(name, ()))
        if x.shape != shape or x.dtype != problem.stat_dtype:
            raise ValueError(
                f"{name}: got shape {x.shape} and dtype {x.dtype}; allowed is {shape} in {problem.stat_dtype}, as "
                f"attention_kl_forward returned it"
            )
    given = _given(masks)
    operands = (*inputs, *given.values(), *rows.values())
    results = tuple(_Result(x.shape, x.dtype) for name, x in zip(_NAMES, inputs) if name in wrt)
    if 0 in problem.row_shape or not problem.keys:
        grads = tuple(jnp.zeros(x.shape, x.dtype) for x in results)
    else:
        callback = _backward_callback(config.options, wrt, len(problem.row_shape), tuple(given), tuple(rows))
        everything = (*results, *_workspace(runner_for(problem).backward_bytes(wrt)))
        grads = _buffer_callback()(callback, everything, vmap_method=_vmap_method(problem))(*operands)[: len(results)]
    return dict(zip((name for name in _NAMES if name in wrt), _marked(grads, operands), strict=True))


def _given(masks: _Masks) -> dict[str, Any]:
    return {name: x for name, x in zip(MASK_ARRAYS, masks, strict=True) if x is not None}


def _workspace(size: int) -> tuple[Any, ...]:
    """One more result where kernels need memory of their own, which is XLA's like all the rest; nobody looks at it."""
    return (_Result((size // 4,), "float32"),) if size else ()


def _vmap_method(problem: Problem) -> str:
    """How vmap gets its results: mostly as one larger batch, which packed sequences do not have."""
    return "sequential" if problem.sequences else "expand_dims"


# Inside shard_map, types say along which mesh axes a value varies. A callback's results come without that mark, and a
# custom gradient must vary as its input does. So all inputs are made to vary alike first; the transpose of that, a sum
# over the devices for an input that they share, is JAX's own.


def _varying_alike(inputs: tuple[Any, ...], masks: _Masks) -> tuple[tuple[Any, ...], _Masks]:
    given = _given(masks)
    marked = _marked((*inputs, *given.values()), (*inputs, *given.values()))
    named = dict(zip(given, marked[len(inputs) :], strict=True))
    return marked[: len(inputs)], tuple(named.get(name) for name in MASK_ARRAYS)


def _marked(values: Iterable[Any], like: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values, declared to vary along every mesh axis that any of `like` varies along."""
    axes = frozenset[Any]().union(*map(_mesh_axes, like))
    missing = [(x, tuple(axes - _mesh_axes(x))) for x in values]
    return tuple(jax.lax.pcast(x, names, to="varying") if names else x for x, names in missing)


def _mesh_axes(x: Any) -> frozenset[Any]:
    aval: Any = jax.typeof(x)
    varying: frozenset[Any] = aval.manual_axis_type.varying if hasattr(aval, "manual_axis_type") else aval.vma  # < 0.10
    return varying


# The functions that XLA calls with its buffers: one object per configuration, as it is part of XLA's cache key, and for
# as long as a program has it. Options hold the pattern of a mask, so a longer life would keep every pattern there was.
_callbacks: weakref.WeakValueDictionary[tuple[Any, ...], Callable[..., None]] = weakref.WeakValueDictionary()


def _kept_by_programs(make: Callable[..., Callable[..., None]]) -> Callable[..., Callable[..., None]]:
    @functools.wraps(make)
    def kept(*configuration: Any) -> Callable[..., None]:
        key = (make.__name__, *configuration)
        found = _callbacks.get(key)
        return _callbacks.setdefault(key, make(*configuration)) if found is None else found

    return kept


@_kept_by_programs
def _forward_callback(
    options: Options, lead: int, masked: tuple[str, ...], extra: tuple[str, ...]
) -> Callable[..., None]:
    """Launches a forward. `masked` names the arrays of the mask, which come after the inputs, `extra` the results that
    come after the three of every row."""
    names = (*ATTENTION_KL.rows, *extra)

    def callback(ctx: Any, out: Sequence[Any], *buffers: Any) -> None:
        inputs, masks = buffers[:4], buffers[4:]
        results = out[: len(names)]
        views = [_view(name, buffer) for name, buffer in zip((*_NAMES, *names), (*inputs, *results), strict=True)]
        mask_views = {name: _view(name, buffer) for name, buffer in zip(masked, masks, strict=True)}
        stream = ctx.stream if views[0].device.kind == "cuda" else 0
        for part, seen in _unfold(views, mask_views, lead, options.layout):
            given = ATTENTION_KL.Inputs(*part[:4])
            ready = prepare(ATTENTION_KL, given, options, seen)
            # vmap may bring other launches than were planned.
            workspace, room = _lent(out[len(names) :])
            if room < ready.workspace_bytes:
                workspace = 0
            rows = ATTENTION_KL.Results(**dict(zip(names, part[4:], strict=True)))
            ready.runner.forward(given, rows, stream, workspace, seen)

    return callback


@_kept_by_programs
def _backward_callback(
    options: Options, wrt: tuple[str, ...], lead: int, masked: tuple[str, ...], rows: tuple[str, ...]
) -> Callable[..., None]:
    """Launches a backward. `rows` names what is read of the rows, which comes after the arrays of the mask."""

    def callback(ctx: Any, out: Sequence[Any], *buffers: Any) -> None:
        after = 4 + len(masked)
        operands = (*buffers[:4], *buffers[after:])
        views = [_view(name, buffer) for name, buffer in zip((*_NAMES, *rows), operands, strict=True)]
        views += [_view(name, buffer) for name, buffer in zip(wrt, out)]
        mask_views = {name: _view(name, buffer) for name, buffer in zip(masked, buffers[4:after], strict=True)}
        stream = ctx.stream if views[0].device.kind == "cuda" else 0
        count = len(operands)
        for part, seen in _unfold(views, mask_views, lead, options.layout):
            found = dict(zip(rows, part[4:count], strict=True))
            grad, teacher_lse, student_lse = part[4:7]
            saved = ATTENTION_KL.Saved(grad, teacher_lse, student_lse, found.get("kl"), found.get("moments"))
            wanted = dict(zip(wrt, part[count:], strict=True))
            outputs = ATTENTION_KL.Gradients(*(wanted.get(name) for name in _NAMES))
            inputs = ATTENTION_KL.Inputs(*part[:4])
            runner = prepare(ATTENTION_KL, inputs, options, seen).runner
            # vmap may bring other launches than were planned; what there is serves as far as it goes.
            workspace, room = _lent(out[len(wrt) :])
            runner.backward(inputs, saved, outputs, stream, workspace, seen, room)

    return callback


def _lent(workspace: Sequence[Any]) -> tuple[int, int]:
    """Where the workspace lies and how many bytes it has; zeros where there is none."""
    return (_pointer(workspace[0]), 4 * math.prod(workspace[0].shape)) if workspace else (0, 0)


def _view(name: str, buffer: Any) -> arrays.ArrayView:
    kind, index = buffer.__dlpack_device__()
    device = arrays.CPU if kind == _DLPACK_CPU else arrays.cuda(index)
    shape = buffer.shape
    return arrays.ArrayView(
        name, "jax", device, _dtype_name(buffer.dtype), shape, compact_strides(shape), _pointer(buffer), buffer
    )


_dtype_name: Callable[[Any], str] = functools.cache(lambda dtype: str(dtype.name))  # NumPy builds the name every time
_DLPACK_CPU = 1


def _pointer(buffer: Any) -> int:
    """Address of an XLA buffer.

    DLPack is the buffer's only way out that knows bfloat16, and the address is the first word of that struct. The
    capsule is borrowed: it frees its own struct, and the memory is XLA's anyway.
    """
    capsule = buffer.__dlpack__()
    return ctypes.c_void_p.from_address(pointer_of(capsule, b"dltensor")).value or 0


def _unfold(
    views: list[arrays.ArrayView], masks: dict[str, arrays.ArrayView], lead: int, layout: str
) -> Iterator[tuple[list[arrays.ArrayView], arrays.MaskArrays | None]]:
    """Calls of at most four axes that together do what vmap asked for.

    vmap puts axes in front of all arrays, of extent 1 where an array is not mapped. They become part of the batch axis
    when every array has one stride for the merged axis, which needs no copy; else the outer ones become a loop.
    `lead` is the number of axes of an unmapped array before its columns: (batch,) (head,) row.
    """
    mapped = len(views[0].shape) - (lead + 1)
    if not mapped:
        yield views, masks or None
        return
    outer = tuple(max(extents) for extents in zip(*(view.shape[:mapped] for view in (*views, *masks.values()))))
    # Strides of the axes to merge: those of vmap, and the batch axis where there is one.
    batch = 1 if lead == 3 else 0
    extents = outer + views[0].shape[mapped : mapped + batch]

    def steps_of(view: arrays.ArrayView) -> tuple[int, ...]:
        return tuple(0 if n == 1 else s for n, s in zip(view.shape[: mapped + batch], view.strides))

    steps = [steps_of(view) for view in views]
    # Arrays of masks are merged where their entries lie one after the other, as kernels read key_lengths. The batch
    # axis that this has without the inputs having one is of extent 1.
    rests = {name: view.shape[len(view.shape) - rules.ARRAYS[name].axes :] for name, view in masks.items()}
    mask_steps = {name: steps_of(view) for name, view in masks.items()}
    looped = 0
    while not (
        all(_is_one_axis(extents[looped:], step[looped:]) for step in steps)
        and all(_is_compact(extents[looped:], mask_steps[name][looped:], math.prod(rests[name])) for name in masks)
    ):
        looped += 1
    merged = math.prod(extents[looped:])
    for index in itertools.product(*map(range, outer[:looped])):
        part = []
        for view, step in zip(views, steps):
            stride = next((s for n, s in zip(extents[looped:][::-1], step[looped:][::-1]) if n > 1), 0)
            rest, strides = view.shape[mapped + batch :], view.strides[mapped + batch :]
            if lead == 1:  # no head axis: one head
                at = 1 if layout == "bnhd" else 0
                rest, strides = (*rest[:at], 1, *rest[at:]), (*strides[:at], 0, *strides[at:])
            part.append(_shifted(view, index, step)._replace(shape=(merged, *rest), strides=(stride, *strides)))
        seen = {}
        for name, view in masks.items():
            shape = (merged, *rests[name])
            moved = _shifted(view, index, mask_steps[name])
            seen[name] = moved._replace(shape=shape, strides=compact_strides(shape))
        yield part, seen or None


def _shifted(view: arrays.ArrayView, index: tuple[int, ...], step: tuple[int, ...]) -> arrays.ArrayView:
    """The view that begins at an index of its first axes."""
    offset = sum(i * s for i, s in zip(index, step))
    return view._replace(ptr=view.ptr + offset * arrays.SIZES[view.dtype])


def _is_compact(extents: tuple[int, ...], strides: tuple[int, ...], unit: int) -> bool:
    """Whether entries of `unit` elements along all of these axes lie one after the other."""
    for n, stride in zip(extents[::-1], strides[::-1], strict=True):
        if n > 1 and stride != unit:
            return False
        unit *= n
    return True


def _is_one_axis(extents: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether a single stride, that of the innermost, walks all of these axes."""
    real = [(n, s) for n, s in zip(extents, strides, strict=True) if n > 1]
    return all(outer == n * inner for (_, outer), (n, inner) in itertools.pairwise(real))


def _check_inputs(call: Call) -> None:
    for name, x in zip(_NAMES, call.operands):
        if not isinstance(x, jax.Array):
            raise validate.not_of("jax", name, x)
        if not isinstance(x, jax.core.Tracer) and x.is_deleted():
            raise ValueError(f"{name} is a deleted JAX array (donated, or delete() was called); pass a live one")


def _check_masks(config: _Config, call: Call) -> None:
    """Check arrays of masks, and their values where that can be done at once: an error inside XLA reads badly."""
    for name, x in _given(call.masks).items():
        if not isinstance(x, jax.Array):
            raise frameworks.no_mask_array(name, x, "jax")
    known = {n: x for n, x in _given(call.masks).items() if not isinstance(x, jax.core.Tracer)}
    if known and config.platform == "cpu":
        views, seen = _standins(call.operands, call.masks, arrays.CPU)
        problem = validate.to_problem(ATTENTION_KL, views, config.options, seen)
        rules.check_values(problem, {name: np.asarray(x) for name, x in known.items()})


def _with_mass(rows: tuple[Any, ...], dense: Any) -> Any:
    kl, teacher_lse, student_lse, *others = rows
    if dense is None:
        return rows_of(kl, teacher_lse, student_lse, None, *others)
    if not isinstance(dense, jax.Array):
        raise validate.not_of("jax", "dense_teacher_lse", dense)
    # JAX's arrays of two dtypes know how to meet.
    validate.one_per_row("dense_teacher_lse", dense, teacher_lse.shape, dense.dtype)
    traced = any(isinstance(x, jax.core.Tracer) for x in (dense, teacher_lse))
    if not traced and _platform(dense) == "cpu":
        validate.dense_lse(np.asarray(teacher_lse), np.asarray(dense))
    mass = reductions.teacher_mass(jnp, teacher_lse, jax.lax.stop_gradient(dense))
    return rows_of(kl, teacher_lse, student_lse, mass, *others)


def _staged() -> bool:
    """Whether operations are being written into a program at this moment: constants then come as tracers too."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def _in_order(wrt: tuple[str, ...]) -> tuple[str, ...]:
    """In the order of the arguments, so that two spellings share one trace."""
    return tuple(name for name in _NAMES if name in wrt)


def _platform(x: jax.Array) -> str:
    """Where the call will run: known of a concrete array, of a tracer only what JAX defaults to."""
    if not isinstance(x, jax.core.Tracer):
        return str(next(iter(x.devices())).platform)
    device: Any = getattr(jax.config, "jax_default_device", None)
    if device is None:
        return jax.default_backend()
    return str(device if isinstance(device, str) else device.platform)


def _buffer_callback() -> Any:
    try:
        from jax.experimental.buffer_callback import buffer_callback
    except ImportError as cause:
        raise ImportError(
            f"streamkl_cupy on JAX arrays needs jax.experimental.buffer_callback, which JAX {jax.__version__} does not "
            f"have; tested with JAX {TESTED_JAX}"
        ) from cause
    return buffer_callback


def _standins(inputs: tuple[Any, ...], masks: _Masks, device: Device) -> tuple[arrays.Inputs, arrays.MaskArrays | None]:
    views = ATTENTION_KL.Inputs(*(frameworks.standin(name, x, device) for name, x in zip(_NAMES, inputs, strict=True)))
    seen = {name: frameworks.standin(name, x, device) for name, x in _given(masks).items()}
    return views, seen or None


def _check(config: _Config, inputs: tuple[Any, ...], masks: _Masks, wrt: tuple[str, ...]) -> Problem:
    """Refuse at trace time what the callback would refuse, and compile there what it would compile."""
    if config.platform not in ("cpu", "gpu"):
        raise NotImplementedError(f"JAX platform {config.platform!r}: built are the CPU and CUDA GPUs")
    on_gpu = config.platform == "gpu"
    device = arrays.cuda(frameworks.current_gpu() or 0) if on_gpu else arrays.CPU
    views, seen = _standins(inputs, masks, device)
    problem = validate.to_problem(ATTENTION_KL, views, config.options, seen)
    validate.gradients_built(problem, wrt)
    if on_gpu:
        runner_for(problem).warmup(wrt)
    return problem


def _check_weight(weight: Any, rows: Any) -> None:
    if weight is not None:
        like = frameworks.standin("student_q", rows, arrays.CPU)._replace(framework="jax")
        validate.row_weight(weight, rows.shape, like)

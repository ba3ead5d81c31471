"""JAX's differentiation of an operation, whichever it is: what is the same for all of them.

XLA owns the memory, the stream and the order of things, so every call, an eager one too, is a jitted
``jax.experimental.buffer_callback``: XLA hands the callback its buffers and its stream, the callback launches and
returns. The gradient is a ``custom_vjp`` whose backward is itself a ``custom_vjp`` that refuses to be differentiated.

All of this goes by the operation's record, which says of its results which are differentiable and of its backward what
it reads. An operation brings its public signature and what becomes of its rows. For attention, with the results `out`
and `lse`, that is this in the door, ``jax.py``::

    @autodiff.differentiable
    def _attention(inputs, masks, *, config):  # what is given by name is static
        return autodiff.rows(config, inputs, masks)  # the record's `Results`

    def attend(call, return_lse):
        rows = _attention(call.operands, call.masks, config=autodiff.checked(call))
        return AttentionForward(rows.out, rows.lse) if return_lse else rows.out

    def attention_forward(call):
        rows = autodiff.run_forward(call)
        return AttentionForward(rows.out, rows.lse)

    def attention_backward(call, saved, wrt):  # what is saved in the record's order, None for what is not
        return AttentionGradients(**autodiff.run_backward(call, saved, wrt))

An operation that reduces its rows does so inside of its own entry, as that of `attention_kl` does, so that what weighs
them is differentiated by JAX. What the record says, and what follows: results that `saved` has a derivative of, under
another name than theirs, are differentiable, all others constants. A derivative that is zero is None where it is
optional, zeros where not. Operands without a task in `gradients` are constants, and an error where they are
differentiated by. Operands that are `optional` may be None. `log_sum_exps` are -inf where there is no key. Of the
options this asks for `layout`, `block_mask` and `deterministic`, which every operation has. Under vmap an array has a
batch axis where the operands have one, and where these have no head axis it has none either.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from .. import arrays, frameworks, validate
from ..arrays import Results, Saved
from ..call import KINDS, Call, prepare, runner_for
from ..frameworks.dlpack import pointer_of
from ..frameworks.jax import xla_deterministic
from ..ops import Op
from ..options import MASK_ARRAYS, NO_MASKS
from ..problem import Device, Problem, compact_strides
from ..rules import masks as rules
from ..rules import sinks
from ..rules.sinks import Sinks

TESTED_JAX = "0.8 to 0.11"

_NO_SECOND_ORDER = (
    "streamkl_cupy.{op} has first-order gradients only: its backward cannot be differentiated again. "
    "Compute it densely where second-order terms are needed."
)
_NO_FORWARD_MODE = (
    "streamkl_cupy.{op} has reverse-mode gradients only: it cannot propagate a forward-mode tangent (jax.jvp, "
    "jacfwd, linearize, hessian). Use jax.grad, vjp or jacrev."
)

# The operands of a call in the order of its record, and the arrays of masks in that of MASK_ARRAYS; an absent one is
# None, which JAX takes for an empty tree.
_Operands = tuple[Any, ...]
_Masks = tuple[Any, ...]
_Result: Any = jax.ShapeDtypeStruct  # not annotated in JAX


class Config(NamedTuple):
    """What a trace depends on beside shapes and dtypes."""

    op: Op
    options: Any
    platform: str


def checked(call: Call) -> Config:
    """The same of a call whose operands nobody has looked at yet."""
    for spec, x in zip(call.op.operands, call.operands, strict=True):
        if x is None and spec.optional:
            continue
        if not isinstance(x, jax.Array):
            raise validate.not_of("jax", spec.name, x)
        if not isinstance(x, jax.core.Tracer) and x.is_deleted():
            raise ValueError(f"{spec.name} is a deleted JAX array (donated, or delete() was called); pass a live one")
    return config_of(call)


def config_of(call: Call) -> Config:
    """What the trace of a call depends on, its arrays of masks checked."""
    op, operands, options, masks = call
    if options.deterministic is None:
        options = options._replace(deterministic=xla_deterministic())
    config = Config(op, options, platform_of(operands[op.at]))
    if masks is not NO_MASKS:
        _check_masks(config, operands, masks)
    return config


# The jitted entries. Static arguments are hashable values, so calling again with the same ones neither traces nor
# compiles again; a callback made anew per call would cost 10 ms each time.


def entry(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function of arrays to be jitted; what it takes by name alone is static."""
    static = [p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY]
    # Nothing is computed from arrays of no elements, but they say on which device an empty result lies.
    jitted: Callable[..., Any] = jax.jit(function, keep_unused=True, static_argnames=static)
    return jitted


def differentiable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function of arrays, and of a `config` by name, to be an entry that JAX may differentiate."""
    jitted = entry(function)

    @functools.wraps(function)
    def call(*args: Any, config: Config, **static: Any) -> Any:
        # JAX keeps a jitted function's programs, and with them their patterns. Inside a program of the caller's, its
        # own function does: what is written into that is gone with it.
        run = function if config.options.block_mask is not None and _staged() else jitted
        try:
            return run(*args, config=config, **static)
        except TypeError as error:
            if "custom_vjp" not in str(error):
                raise
            raise TypeError(_NO_FORWARD_MODE.format(op=config.op.name)) from error

    return call


# The explicit functions, of calls whose arrays have been read: none is a tracer.


def run_forward(call: Call) -> Results:
    """Results of a call, not differentiable."""
    return _forward_entry(call.operands, call.masks, config=config_of(call))


def run_backward(call: Call, saved: tuple[Any, ...], wrt: tuple[str, ...]) -> dict[str, Any]:
    """Gradients by name, from what the record says that a backward reads, in its order; None for what there is not."""
    config = config_of(call)
    read = needed(config, wrt, call.op.Saved(*saved))
    wrt = in_order(call.op, wrt)
    grads: dict[str, Any] = _backward_entry(call.operands, call.masks, read, config=config, wrt=wrt)
    return grads


@entry
def _forward_entry(inputs: _Operands, masks: _Masks, *, config: Config) -> Results:
    return forward(config, inputs, masks)


@entry
def _backward_entry(
    inputs: _Operands, masks: _Masks, saved: Saved, *, config: Config, wrt: tuple[str, ...]
) -> dict[str, Any]:
    return backward(config, wrt, inputs, masks, saved)


# What is traced: differentiable results, and both halves alone.


def rows(config: Config, inputs: _Operands, masks: _Masks, given: Sinks | None = None) -> Results:
    """Trace a differentiable forward. What is not differentiable is a constant, by declaration, as with torch: a loss
    on it has gradient zero. With sinks' logits, one for each row, rows are those with sinks."""
    op = config.op
    if given is None or given == Sinks():
        found = _rows(config, *_varying_alike(inputs, masks))
    else:
        alike = _varying_alike(inputs, masks)
        found = _sunk(config, *alike, Sinks(*(z if z is None else marked((z,), alike[0])[0] for z in given)))
    constant = (name not in op.differentiable for name in op.results)
    return op.Results(*(jax.lax.stop_gradient(x) if c else x for x, c in zip(found, constant, strict=True)))


def like_rows(config: Config, inputs: _Operands) -> Any:
    """The shape and type of rows."""
    like = inputs[config.op.at]
    wide = any(x is not None and x.dtype == "float64" for x in inputs)
    return _Result(like.shape[:-1], "float64" if wide else "float32")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(config: Config, inputs: _Operands, masks: _Masks) -> Results:
    return forward(config, inputs, masks)


def _rows_fwd(config: Config, inputs: _Operands, masks: _Masks) -> tuple[Results, Any]:
    primals = inputs
    inputs, masks = (tuple(None if x is None else x.value for x in y) for y in (inputs, masks))
    found = _rows(config, inputs, masks)  # itself, not forward: an outer transform may differentiate this value too
    # Which gradients are wanted must reach the backward as static knowledge. It travels as the extent of an array
    # without elements; not in the tree of the residuals, which JAX keeps from whichever trace of a jitted caller came
    # last, so that a backward would see the wishes of another one.
    wanted = sum(1 << i for i, p in enumerate(primals) if p is not None and p.perturbed)
    return found, (inputs, masks, found, jnp.zeros((wanted, 0), bool))


def _rows_bwd(config: Config, residuals: Any, cotangents: Results) -> tuple[Any, None]:
    op = config.op
    inputs, masks, found, wanted = residuals
    wrt = tuple(name for i, name in enumerate(op.names) if wanted.shape[0] >> i & 1)
    if not wrt or all(isinstance(getattr(cotangents, name), SymbolicZero) for name in op.differentiable):
        return ((None,) * len(inputs), None)
    saved = needed(config, wrt, _saved(op, found, cotangents))
    grads = _backward_once(config, wrt, inputs, masks, saved)
    return (tuple(grads.get(name) for name in op.names), None)


_rows.defvjp(_rows_fwd, _rows_bwd, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sunk(config: Config, inputs: _Operands, masks: _Masks, given: Sinks) -> Results:
    return with_sinks(config, forward(config, inputs, masks), given)


def with_sinks(config: Config, found: Results, given: Sinks) -> Results:
    """Rows with sinks, from those without."""
    lse, entropy = found.teacher_lse, found.teacher_entropy
    if entropy is not None and given.teacher is not None:
        entropy = sinks.entropy_with_sink(jnp, entropy, lse, given.teacher)
    kl, teacher_lse, student_lse = sinks.with_sinks(
        jnp, (found.kl, lse, found.student_lse), given, config.options.divergence
    )
    return found._replace(kl=kl, teacher_lse=teacher_lse, student_lse=student_lse, teacher_entropy=entropy)


def _sunk_fwd(config: Config, inputs: _Operands, masks: _Masks, given: Sinks) -> tuple[Results, Any]:
    primals = inputs
    inputs, masks = (tuple(None if x is None else x.value for x in y) for y in (inputs, masks))
    values = Sinks(*(None if z is None else z.value for z in given))
    found = _sunk(config, inputs, masks, values)
    wanted = sum(1 << i for i, p in enumerate(primals) if p is not None and p.perturbed)
    return found, (inputs, masks, found, jnp.zeros((wanted, 0), bool), values)


def _sunk_bwd(config: Config, residuals: Any, cotangents: Results) -> tuple[Any, None, Sinks]:
    *residuals, given = residuals
    found = residuals[2]
    if isinstance(cotangents.kl, SymbolicZero):
        return ((None,) * len(residuals[0]), None, Sinks())
    by_inputs, _ = _rows_bwd(config, tuple(residuals), cotangents)
    return (by_inputs, None, by_sinks(config, cotangents.kl, found, given))


_sunk.defvjp(_sunk_fwd, _sunk_bwd, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def by_sinks(config: Config, grad: Any, found: Results, given: Sinks) -> Sinks:
    """Derivatives by sinks' logits, one for each row, which nothing may differentiate."""
    of_rows = (found.kl, found.teacher_lse, found.student_lse)
    return sinks.gradients(jnp, grad, of_rows, given, config.options.divergence)


def _by_sinks_fwd(config: Config, grad: Any, found: Results, given: Sinks) -> tuple[Sinks, None]:
    return by_sinks(config, grad, found, given), None


def _by_sinks_bwd(config: Config, residuals: None, cotangents: Any) -> NoReturn:
    raise NotImplementedError(_NO_SECOND_ORDER.format(op=config.op.name))


by_sinks.defvjp(_by_sinks_fwd, _by_sinks_bwd)


def _saved(op: Op, found: Results, cotangents: Results) -> Saved:
    """Results and their derivatives, as a backward reads them. A derivative of zeros is left out where it may be."""

    def one(name: str, like: str, optional: bool) -> Any:
        result, derivative = getattr(found, like), getattr(cotangents, like)
        if name == like:
            return result
        if not isinstance(derivative, SymbolicZero):
            return derivative
        return None if optional else marked((jnp.zeros(result.shape, result.dtype),), (result,))[0]

    return op.Saved(*(one(spec.name, spec.like, spec.optional) for spec in op.saved))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _backward_once(
    config: Config, wrt: tuple[str, ...], inputs: _Operands, masks: _Masks, saved: Saved
) -> dict[str, Any]:
    return backward(config, wrt, inputs, masks, saved)


def _backward_once_fwd(
    config: Config, wrt: tuple[str, ...], inputs: _Operands, masks: _Masks, saved: Saved
) -> tuple[dict[str, Any], None]:
    return backward(config, wrt, inputs, masks, saved), None


def _backward_once_bwd(config: Config, wrt: tuple[str, ...], residuals: None, cotangents: Any) -> NoReturn:
    raise NotImplementedError(_NO_SECOND_ORDER.format(op=config.op.name))


_backward_once.defvjp(_backward_once_fwd, _backward_once_bwd)


def needed(config: Config, wrt: tuple[str, ...], saved: Saved) -> Saved:
    """What these gradients read of it, with None for what they do not."""
    op = config.op
    if "divergence" not in op.rules or validate.reads_value(op, config.options.divergence, wrt):
        return saved
    return saved._replace(**{op.rows[0]: None})


def forward(config: Config, inputs: _Operands, masks: _Masks) -> Results:
    """Trace a forward launch; None for results that the call does not have."""
    op = config.op
    problem = _check(config, inputs, masks, ())
    operands, masked = _given(op.names, inputs), _given(MASK_ARRAYS, masks)
    like = (*operands.values(), *masked.values())
    results = {name: _Result(shape, dtype) for name, (shape, dtype) in KINDS[problem.op].results(problem).items()}
    if _nothing(problem):
        found = tuple(jnp.full(x.shape, op.empty[name], x.dtype) for name, x in results.items())
    else:
        arrange = _Arrangement(op, config.options, problem.rank, tuple(operands), tuple(masked))
        callback = _forward_callback(arrange, tuple(results))
        everything = (*results.values(), *_workspace(runner_for(problem).workspace_bytes))
        found = _buffer_callback()(callback, everything, vmap_method=_vmap_method(problem))(*like)[: len(results)]
    return op.Results(**dict(zip(results, marked(found, like), strict=True)))


def backward(config: Config, wrt: tuple[str, ...], inputs: _Operands, masks: _Masks, saved: Saved) -> dict[str, Any]:
    """Trace a backward launch: the gradients named in `wrt`. `saved` is what `needed` leaves."""
    op = config.op
    for name in wrt:
        if name not in [task.name for task in op.gradients]:
            raise NotImplementedError(
                f"{name} is differentiated by, but is a constant of streamkl_cupy.{op.name}; pass "
                f"jax.lax.stop_gradient({name})"
            )
    problem = _check(config, inputs, masks, wrt)
    shapes = KINDS[problem.op].results(problem)
    read = {spec.name: (x, *shapes[spec.like]) for spec, x in zip(op.saved, saved, strict=True) if x is not None}
    for name, (x, shape, dtype) in read.items():
        if x.shape != shape or x.dtype != dtype:
            raise ValueError(
                f"{name}: got shape {x.shape} and dtype {x.dtype}; allowed is {shape} in {dtype}, as "
                f"{op.name}_forward returned it"
            )
    operands, masked = _given(op.names, inputs), _given(MASK_ARRAYS, masks)
    like = (*operands.values(), *masked.values(), *(x for x, *_ in read.values()))
    wide = problem.wide_gradients
    results = {
        name: _Result(x.shape, problem.gradient_dtype(name) if wide else x.dtype)
        for name, x in operands.items()
        if name in wrt
    }
    if _nothing(problem):
        grads = tuple(jnp.zeros(x.shape, x.dtype) for x in results.values())
    else:
        arrange = _Arrangement(op, config.options, problem.rank, tuple(operands), tuple(masked))
        callback = _backward_callback(arrange, tuple(read), tuple(results))
        everything = (*results.values(), *_workspace(runner_for(problem).backward_bytes(wrt)))
        grads = _buffer_callback()(callback, everything, vmap_method=_vmap_method(problem))(*like)[: len(results)]
    return dict(zip(results, marked(grads, like), strict=True))


def _nothing(problem: Problem) -> bool:
    """Whether there is nothing to compute; XLA calls no callback for an empty result."""
    return 0 in problem.row_shape or not problem.keys


def _given(names: Iterable[str], found: tuple[Any, ...]) -> dict[str, Any]:
    return {name: x for name, x in zip(names, found, strict=True) if x is not None}


def _workspace(size: int) -> tuple[Any, ...]:
    """One more result where kernels need memory of their own, which is XLA's like all the rest; nobody looks at it."""
    return (_Result((size // 4,), "float32"),) if size else ()


def _vmap_method(problem: Problem) -> str:
    """How vmap gets its results: mostly as one larger batch, which packed sequences do not have."""
    return "sequential" if problem.sequences or not problem.operation.one_batch else "expand_dims"


# Inside shard_map, types say along which mesh axes a value varies. A callback's results come without that mark, and a
# custom gradient must vary as its input does. So all inputs are made to vary alike first; the transpose of that, a sum
# over the devices for an input that they share, is JAX's own.


def _varying_alike(inputs: _Operands, masks: _Masks) -> tuple[_Operands, _Masks]:
    given = tuple(x for x in (*inputs, *masks) if x is not None)
    marks = iter(marked(given, given))
    alike = tuple(None if x is None else next(marks) for x in (*inputs, *masks))
    return alike[: len(inputs)], alike[len(inputs) :]


def marked(values: Iterable[Any], like: tuple[Any, ...]) -> tuple[Any, ...]:
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


class _Arrangement(NamedTuple):
    """How a callback is called: which arrays of which call, of how many axes where vmap adds none."""

    op: Op
    options: Any
    rank: int
    """Of operands with columns."""
    operands: tuple[str, ...]
    masked: tuple[str, ...]
    """Arrays of the mask, which come after the operands."""

    def views(
        self, buffers: Sequence[Any], more: tuple[str, ...], out: Sequence[Any]
    ) -> tuple[list[arrays.ArrayView], arrays.MaskArrays]:
        """Those of the operands, then of `more`, which names what comes after the mask's arrays and what is written.
        Beside them those of the mask."""
        first = len(self.operands)
        last = first + len(self.masked)
        views = list(map(_view, (*self.operands, *more), (*buffers[:first], *buffers[last:], *out)))
        return views, {name: _view(name, buffer) for name, buffer in zip(self.masked, buffers[first:last], strict=True)}


def _filled(kind: Any, names: tuple[str, ...]) -> Callable[[Sequence[Any]], Any]:
    """What makes of views of these names one of the record's tuples, with None for all others."""
    order = [names.index(name) if name in names else None for name in kind._fields]
    return lambda views: kind(*[None if i is None else views[i] for i in order])


@_kept_by_programs
def _forward_callback(arrangement: _Arrangement, results: tuple[str, ...]) -> Callable[..., None]:
    """Launches a forward."""
    op, options, _, operands, _ = arrangement
    first, count = len(operands), len(results)
    inputs_of, outputs_of = _filled(op.Inputs, operands), _filled(op.Results, results)

    def callback(ctx: Any, out: Sequence[Any], *buffers: Any) -> None:
        views, masks = arrangement.views(buffers, results, out[:count])
        stream = ctx.stream if views[0].device.kind == "cuda" else 0
        for part, seen in _calls(arrangement, views, masks):
            inputs = inputs_of(part)
            ready = prepare(op, inputs, options, seen)
            # vmap may bring other launches than were planned.
            workspace, room = _lent(out[count:])
            if room < ready.workspace_bytes:
                workspace = 0
            ready.runner.forward(inputs, outputs_of(part[first:]), stream, workspace, seen)

    return callback


@_kept_by_programs
def _backward_callback(arrangement: _Arrangement, read: tuple[str, ...], wrt: tuple[str, ...]) -> Callable[..., None]:
    """Launches a backward. `read` names what it reads beside operands and masks, which comes after them."""
    op, options, _, operands, _ = arrangement
    first, count = len(operands), len(wrt)
    last = first + len(read)
    inputs_of, saved_of, outputs_of = _filled(op.Inputs, operands), _filled(op.Saved, read), _filled(op.Gradients, wrt)

    def callback(ctx: Any, out: Sequence[Any], *buffers: Any) -> None:
        views, masks = arrangement.views(buffers, (*read, *wrt), out[:count])
        stream = ctx.stream if views[0].device.kind == "cuda" else 0
        for part, seen in _calls(arrangement, views, masks):
            inputs = inputs_of(part)
            runner = prepare(op, inputs, options, seen).runner
            # vmap may bring other launches than were planned; what there is serves as far as it goes.
            workspace, room = _lent(out[count:])
            saved, outputs = saved_of(part[first:last]), outputs_of(part[last:])
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


def _calls(
    of: _Arrangement, views: list[arrays.ArrayView], masks: dict[str, arrays.ArrayView]
) -> Iterable[tuple[list[arrays.ArrayView], arrays.MaskArrays | None]]:
    """What to launch for these; one at a time where nothing can become a larger batch."""
    return _unfold(views, masks, of.rank - 1, of.options.layout) if of.op.one_batch else ((views, masks or None),)


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


def _check_masks(config: Config, operands: _Operands, masks: _Masks) -> None:
    """Check arrays of masks, and their values where that can be done at once: an error inside XLA reads badly."""
    given = _given(MASK_ARRAYS, masks)
    for name, x in given.items():
        if not isinstance(x, jax.Array):
            raise frameworks.no_mask_array(name, x, "jax")
    known = {name: x for name, x in given.items() if not isinstance(x, jax.core.Tracer)}
    if known and config.platform == "cpu":
        views, seen = _standins(config.op, operands, masks, arrays.CPU)
        problem = KINDS[config.op.name].to_problem(config.op, views, config.options, seen)
        rules.check_values(problem, {name: np.asarray(x) for name, x in known.items()})


def _standins(
    op: Op, inputs: _Operands, masks: _Masks, device: Device
) -> tuple[arrays.Inputs, arrays.MaskArrays | None]:
    standin = KINDS[op.name].standin

    def seen(names: Iterable[str], found: tuple[Any, ...]) -> dict[str, arrays.ArrayView]:
        return {name: standin(name, x, device) for name, x in _given(names, found).items()}

    views = seen(op.names, inputs)
    return op.Inputs(*map(views.get, op.names)), seen(MASK_ARRAYS, masks) or None


def _check(config: Config, inputs: _Operands, masks: _Masks, wrt: tuple[str, ...]) -> Problem:
    """Refuse at trace time what the callback would refuse, and compile there what it would compile."""
    if config.platform not in ("cpu", "gpu"):
        raise NotImplementedError(f"JAX platform {config.platform!r}: built are the CPU and CUDA GPUs")
    on_gpu = config.platform == "gpu"
    device = arrays.cuda(frameworks.current_gpu() or 0) if on_gpu else arrays.CPU
    views, seen = _standins(config.op, inputs, masks, device)
    problem: Problem = KINDS[config.op.name].to_problem(config.op, views, config.options, seen)
    KINDS[problem.op].gradients_built(problem, wrt)
    if on_gpu:
        runner_for(problem).warmup(wrt)
    return problem


def in_order(op: Op, wrt: tuple[str, ...]) -> tuple[str, ...]:
    """In the order of the arguments, so that two spellings share one trace."""
    return tuple(name for name in op.names if name in wrt)


def _staged() -> bool:
    """Whether operations are being written into a program at this moment: constants then come as tracers too."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def platform_of(x: jax.Array) -> str:
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

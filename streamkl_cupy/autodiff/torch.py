"""PyTorch: an operation under autograd, ``torch.func``, ``torch.compile`` and CUDA-graph capture.

Two opaque custom operators launch the kernels, and know their derivative: tracers see one node each, may find one
tensor in several places, and let numbers and patterns change from call to call. ``torch.func`` does not support the
derivative of an operator, so an ``autograd.Function`` around them, ``_Transformed``, is what it takes. Where nothing
but autograd looks on, ``_Step`` launches without the dispatcher and has the reduction inside; its backward goes the
long way again where somebody looks on by then. In all of them the backward cannot be differentiated again and says so,
because a silently missing second-order term is worse than an error. A forward that nothing differentiates either skips
all of this.

All of it follows from the record of the operation and the table of its options. The door of an operation registers it
once, when it is imported, and writes its public function; of an operation with one result of a row and one of columns,
`out` and `lse`, all that there is:

    register(SPARSE_ATTENTION)

    def attend(operands, given, return_lse):
        call, traced = asked(SPARSE_ATTENTION, operands, given)
        if traced or not unwatched((*operands, *call.masks)):
            lse, out = results(call, traced)
        elif differentiated(operands):
            found = step(call, call.ready(), ("lse", "out") if return_lse else ("out",))
            lse, out = found if return_lse else (None, found)
        else:
            lse, out = tensors(call.ready().forward())
        return AttentionForward(out, lse) if return_lse else out

An operation whose first row result is reduced gives `step` the reduction too, and applies torch's own functions to the
`results` that come the long way: `streamkl_cupy/torch.py` is the example. What the record says, and what follows:
`saved` is what the backward operator takes, in this order: a result, or the derivative of one where its name is another
than the result's. Derivatives that are optional are None where nothing comes from above; the others are zeros there,
like the result that they are of, which is therefore saved too where there are several.
Operands without a task in `gradients` are constants, and an error where they require a gradient. Operands that are
`optional` may be None. Results that a call does not have come empty out of `results`; `there` makes None of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import frameworks, validate
from ..arguments import a_kind_of
from ..arrays import Results
from ..call import Call, Look, Ready, SavedArrays
from ..frameworks.base import known
from ..ops import Op
from ..options import MASK_ARRAYS, NO_MASKS, OPTIONS, TABLES, further_results
from ..rules import masks as rules
from ..rules import sinks
from ..rules.sinks import Sinks


def asked(op: Op, operands: tuple[Any, ...], given: Mapping[str, Any]) -> tuple[Call, bool]:
    """The call of tensors and of options by name, and whether a tracer writes it down."""
    for name, x in zip(op.names, operands):
        if not isinstance(x, Tensor) and not (x is None and op.operand[name].optional):
            raise validate.not_of("torch", name, x)
    written = traced()
    call = Call.of(op, operands, given, symbols=written)
    masks = call.masks
    if written or masks is not NO_MASKS:  # not every version's tracer knows `is` of tuples
        for name, x in zip(MASK_ARRAYS, masks):
            if x is not None and not isinstance(x, Tensor):
                raise frameworks.no_mask_array(name, x, "torch")
    return call, written


def results(call: Call, written: bool, given: Sinks | None = None) -> tuple[Tensor, ...]:
    """All results of a call that somebody looks on, in the order of the record; empty what the call does not have.

    With sinks' logits, one for each row, rows are those with sinks, and differentiable by these too.
    """
    found: tuple[Tensor, ...]
    of_sinks = () if given is None else tuple(given)
    if written:
        dynamo = torch.compiler.is_dynamo_compiling()
        arguments = (dynamo, *call.operands, *call.masks, *_with_key(call.options))
        found = (
            _in_graph(call.op.name, *arguments)
            if given is None
            else _in_graph_sunk(call.op.name, *of_sinks, *arguments)
        )
    elif given is not None:
        found = _Sunk.apply(*call.operands, *call.masks, call.options, None, call.op.name, *of_sinks)  # type: ignore[no-untyped-call]
    else:
        for name, x in zip((*call.op.names, *MASK_ARRAYS), (*call.operands, *call.masks)):
            if type(x) is not Tensor and x is not None:
                _refuse_distributed(name, x)
        found = _Transformed.apply(*call.operands, *call.masks, call.options, None, call.op.name)  # type: ignore[no-untyped-call]
    return found


def there(call: Call, found: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Results as an operator gives them, with None for those that the call does not have."""
    always, further = len(call.op.rows) + len(call.op.vectors), _operators[call.op.name].further(call)
    return (
        *found[:always],
        *[x if name in further else None for name, x in zip(call.op.results[always:], found[always:])],
    )


def tensors(found: Results) -> tuple[Any, ...]:
    """The tensors of views, None for what there is not."""
    return tuple([None if x is None else x.array for x in found])


Reduction = Callable[[Sequence[Any], bool], "tuple[Tensor, Tensor | float | None]"]
"""(results, whether every row is known to see a key) -> what takes the place of the first, and its derivative by each
row, which broadcasts to the rows; None for 1."""


def step(
    call: Call, ready: Any, names: tuple[str, ...], reduction: Reduction | None = None, to_number: bool = False
) -> Any:
    """Results of a call by name, in their order, that autograd differentiates and nothing else looks on; one of one
    name comes alone. With a reduction its value stands for the first row result; `to_number` says that it is another
    tensor than the rows."""
    of = _operators[call.op.name]
    way = of.ways.get((names, to_number)) or of.way(names, to_number)
    # One argument for all that is no tensor: each costs something in both directions.
    return _apply_step(*call.operands, (call, ready, way, reduction))


def unwatched(given: Sequence[Tensor | None]) -> bool:
    """Whether nothing transforms or traces a call with these, so that it may skip the dispatcher; autograd may."""
    if _transforms_active() or _dispatch_modes() or getattr(forward_ad, "_current_level", 0) >= 0:
        return False
    return _KINDS.issuperset(map(type, given))


_KINDS = frozenset({Tensor, torch.nn.Parameter, type(None)})

# torch has no public question for these two. Where a name is gone, the call takes the autograd.Function, which is right
# in every context and only slower.
_transforms_active = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)


def differentiated(given: Sequence[Tensor | None]) -> bool:
    """Whether autograd records a call with these."""
    return torch.is_grad_enabled() and bool([x for x in given if x is not None and x.requires_grad])


def plain(given: Sequence[Tensor | None]) -> bool:
    """Whether nothing looks on and nothing differentiates."""
    return unwatched(given) and not differentiated(given)


def traced() -> bool:
    """Whether this call is being written down, by torch.compile, torch.export or torch.jit.trace."""
    # The second one is asked without the function around it, which scripts need.
    return torch.compiler.is_compiling() or torch._C._is_tracing()


def _with_key(options: Any) -> Any:
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


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _in_graph(name: str, dynamo: bool, *args: Any) -> tuple[Tensor, ...]:
    """The operator, with floats that are symbols as a tensor: an operator's float is a constant of the program, and a
    scale or a cap that changes from step to step would mean another program for each step.

    One function of the graph, because the tracer of Python code does not tell a symbol from a number.
    """
    of = _operators[name]
    arrays, options, packed = _packed_numbers(of, dynamo, of.call(args))
    found: tuple[Tensor, ...]
    if _transforms_active():  # which do not support the derivative of an operator
        found = _Transformed.apply(*arrays, options, packed, name)  # type: ignore[no-untyped-call]
    else:
        forward = of.forward if options.block_mask is None and packed is None else of.forward_on_host
        found = forward(*arrays, *options, packed)
    return found


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def _in_graph_sunk(
    name: str, teacher: Tensor | None, student: Tensor | None, dynamo: bool, *args: Any
) -> tuple[Tensor, ...]:
    """The same with sinks, as a function around the operators."""
    of = _operators[name]
    arrays, options, packed = _packed_numbers(of, dynamo, of.call(args))
    found: tuple[Tensor, ...] = _Sunk.apply(*arrays, options, packed, name, teacher, student)  # type: ignore[no-untyped-call]
    return found


def _packed_numbers(of: _Operators, dynamo: bool, call: Call) -> tuple[tuple[Any, ...], Any, Tensor | None]:
    """Arrays and options of a call that is written down, and as a tensor the numbers that are symbols."""
    options, packed = call.options, None
    if dynamo and options.block_mask is not None and torch.compiler.is_exporting():
        raise NotImplementedError(
            "block_mask under torch.export.export(strict=True), which makes of the pattern a constant that holds no "
            "numbers; pass strict=False"
        )
    numbers = [getattr(options, symbol) for symbol in of.symbols]
    if any(isinstance(x, torch.SymFloat) for x in numbers):
        one = torch.ones((), dtype=torch.float64)
        packed = torch.stack([one * (1.0 if x is None else x) for x in numbers])
        numbers = [None if x is None else 1.0 for x in numbers]
    options = of.with_numbers(options, numbers)
    if getattr(forward_ad, "_current_level", -1) >= 0:  # programs are compiled anew for each level
        raise NotImplementedError(of.no_forward_mode)
    return (*call.operands, *call.masks), options, packed


def _flat(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments that end in options and numbers, as an operator takes them."""
    *arrays, options, numbers = args
    flat = (*arrays, *_with_key(options))
    return flat if numbers is None else (*flat, numbers)  # an argument that is left out costs nothing


class _Way(NamedTuple):
    """Which results a caller gets of a step."""

    of: _Operators
    indices: tuple[int, ...]
    """Among the results."""
    constants: tuple[int, ...]
    """Those of them that nothing differentiates."""
    given: tuple[int | None, ...]
    """Where what comes from above has the derivatives, in the order of the record; None for those it does not have."""
    number: bool
    """Whether that is a number made of the first row result, and forwards have row results only."""


class _Operators:
    """The custom operators of one operation, with all that torch wants to know of them."""

    def __init__(
        self,
        op: Op,
        row_shape: Callable[[Call], Sequence[int]],
        further: Callable[[Call], dict[str, Sequence[int]]],
    ) -> None:
        self.op, self.row_shape, self.further = op, row_shape, further
        self.options, self.table = OPTIONS[op.name], TABLES[op.name]
        # Options that a tracer may hold as symbols.
        self.symbols = tuple(name for name, row in self.table.items() if row.symbol)
        # Where the arguments of the operators begin that are not operands: arrays of masks, options, and what is beyond
        # them. In front of these the backward operator takes what is saved, and which gradients are wanted.
        self.at_masks = len(op.names)
        self.at_options = self.at_masks + len(MASK_ARRAYS)
        self.at_numbers = self.at_options + len(self.table)
        self.before = len(op.saved) + 1
        # Of what is saved: the results that derivatives are of, and those that are saved themselves.
        self.differentiable = tuple(map(op.results.index, op.differentiable))
        kept = [x.name for x in op.saved if x.name == x.like]
        self.kept = tuple(map(op.results.index, kept))
        # Where among first the ones and then the others the backward finds what it reads, and where zeros come from.
        both = [*(x.name for x in op.saved if x.name != x.like), *kept]
        self.order = itemgetter(*(both.index(x.name) for x in op.saved))
        self.derivatives = tuple(i for i, x in enumerate(op.saved) if x.name != x.like)
        self.zeros = tuple(
            (i, kept.index(x.like))
            for i, x in enumerate(op.saved)
            if x.name != x.like and not x.optional and len(self.differentiable) > 1
        )
        # Among the results that are saved: the value, where only some gradients read it, and one that always is, with
        # the shape and type of rows.
        always = [x.name for x in op.saved if x.name == x.like and not x.optional]
        self.value = kept.index(op.rows[0]) if "divergence" in op.rules and op.rows[0] in kept else None
        self.like_rows = next(kept.index(name) for name in always if name in op.rows)
        self.owner = op.results.index(always[0])
        # The derivative of the value.
        self.reduced = next((i for i, x in enumerate(op.saved) if x.name != x.like == op.rows[0]), None)
        self.ways: dict[tuple[tuple[str, ...], bool], _Way] = {}
        by = {task.name for task in op.gradients}
        self.constants = tuple(i for i, name in enumerate(op.names) if name not in by)
        self.columns = {name: [x.dim for x in op.operands].index(letter) for name, letter in op.vectors}
        # Operands whose type says that of rows.
        self.typed = tuple(i for i, x in enumerate(op.operands) if x.elements in ("", *op.sides))
        self.no_second_order = (
            f"streamkl_cupy.{op.name} has first-order gradients only: its backward cannot be differentiated again. "
            f"Drop create_graph=True (or the outer torch.func transform), or compute it densely, by torch's own "
            f"functions, where second-order terms are needed."
        )
        self.no_forward_mode = (
            f"streamkl_cupy.{op.name} has reverse-mode gradients only: it cannot propagate a forward-mode tangent "
            f"(torch.func.jvp, jacfwd, hessian, torch.autograd.forward_ad). Use torch.func.grad, vjp or jacrev."
        )
        self.forward, self.backward = self._defined()
        # Scales and patterns that come as arrays are read by the host at each call, which a replayed CUDA graph leaves
        # out.
        self.forward_on_host, _ = self._defined("_on_host", tags=(torch.Tag.cudagraph_unsafe,))

    def _defined(self, suffix: str = "", tags: Sequence[Any] = ()) -> tuple[Any, Any]:
        """The forward and the backward operator."""
        op = self.op
        arguments = ", ".join(
            (
                *(f"Tensor{'?' * x.optional} {x.name}" for x in op.operands),
                *(f"Tensor? {name}" for name in MASK_ARRAYS),
                *(f"{row.schema} {name}" for name, row in self.table.items()),
                "Tensor? numbers=None",
            )
        )
        saved = ", ".join(f"Tensor{'?' * x.optional} {x.name}" for x in op.saved)
        forward = torch.library.custom_op(
            f"streamkl::{op.name}_forward{suffix}",
            self.launch_forward,
            mutates_args=(),
            schema=f"({arguments}) -> ({', '.join(['Tensor'] * len(op.results))})",
            tags=tags,
        )
        backward = torch.library.custom_op(
            f"streamkl::{op.name}_backward{suffix}",
            self.launch_backward,
            mutates_args=(),
            schema=f"({saved}, bool[] wanted, {arguments}) -> ({', '.join(['Tensor'] * self.at_masks)})",
            tags=tags,
        )
        forward.register_autograd(
            lambda ctx, *grads: self.differentiate(ctx, grads, lambda *args: backward(*_flat(args))),
            setup_context=lambda ctx, inputs, output: self.keep(
                ctx, (*inputs[: self.at_options], self.call(inputs).options, self.numbers(inputs)), output
            ),
        )
        backward.register_autograd(self.refuse_second_order, setup_context=_saves_nothing)
        forward.register_fake(self.fake_forward)
        backward.register_fake(self.fake_backward)
        forward.register_vmap(functools.partial(self.forward_of_batches, forward))
        backward.register_vmap(functools.partial(self.backward_of_batches, backward))
        return forward, backward

    # Arguments

    def call(self, args: tuple[Any, ...]) -> Call:
        """The arguments of the forward operator by name. A schema knows lists for tuples, and no patterns: options have
        these until they are `unpacked`."""
        options = self.options._make(args[self.at_options : self.at_numbers])
        return Call(self.op, args[: self.at_masks], options, args[self.at_masks : self.at_options])

    def numbers(self, args: tuple[Any, ...]) -> Any:
        """The options of `symbols` again, where a tracer holds one as a symbol: float64 on the CPU, which count for
        those that there are."""
        return args[self.at_numbers] if len(args) > self.at_numbers else None

    def unpacked(self, args: tuple[Any, ...]) -> Call:
        """The call that the forward operator is asked for, with options as all others have them."""
        call, numbers = self.call(args), self.numbers(args)
        options: Any = call.options
        window, key = options.window, options.block_mask
        if numbers is None and window is None and key is None:
            return call
        if numbers is not None:  # that nobody has looked at yet
            given = [getattr(options, name) for name in self.symbols]
            options = self.with_numbers(options, [None if x is None else y for x, y in zip(given, numbers.tolist())])
        pattern = None
        if key is not None:
            # Imported here, because most programs have none.
            from ..patterns.pattern import pattern_of

            pattern = pattern_of(key.numpy().tobytes().hex())
        if window is not None or key is not None:
            options = options._replace(window=window and (window[0], window[1]), block_mask=pattern)
        return call._replace(options=options)

    def with_numbers(self, options: Any, numbers: Sequence[Any]) -> Any:
        """The options with those of `symbols` that are checked now."""
        checked: dict[str, Any] = {
            n: None if x is None else self.table[n].check(n, x) for n, x in zip(self.symbols, numbers)
        }
        return options._replace(**checked)

    # What a forward leaves for its backward

    def saved(self, options: Any, wanted: tuple[bool, ...]) -> tuple[int | None, ...]:
        """Which results these gradients read, in the order of the record, with None for what they do not."""
        return _saved(self.op, options.divergence if self.value is not None else "", wanted)

    def read(self, given: list[Any], kept: Sequence[Any]) -> list[Any]:
        """What the backward reads, of the derivatives and of the results that were saved."""
        both = (*given, *kept[: len(self.kept)])
        rows = [*self.order(both)]
        for i, at in self.zeros:
            if rows[i] is None:
                rows[i] = torch.zeros_like(kept[at])
        return rows

    def way(self, names: tuple[str, ...], to_number: bool) -> _Way:
        """How these results come."""
        indices = tuple(map(self.op.results.index, names))
        self.ways[names, to_number] = way = _Way(
            self,
            indices,
            tuple(i for i in indices if i not in self.differentiable),
            tuple(indices.index(i) if i in indices else None for i in self.differentiable),
            to_number and indices == (0,) and not self.op.vectors,
        )
        return way

    def keep(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keep what the backward of a forward reads: the saved results, the arrays, the options."""
        *arrays, options, numbers = inputs
        ctx.mark_non_differentiable(*[x for i, x in enumerate(output) if i not in self.differentiable])
        ctx.set_materialize_grads(False)
        call = Call(self.op, tuple(arrays[: self.at_masks]), options, tuple(arrays[self.at_masks :]))
        rows = there(call, output)
        saved = self.saved(options, ctx.needs_input_grad[: self.at_masks])
        # Tensors among the options are kept as such.
        key = options.block_mask if isinstance(options.block_mask, Tensor) else None
        ctx.options = options if key is None else options._replace(block_mask=None)
        ctx.save_for_backward(*[None if i is None else rows[i] for i in saved], *arrays, key, numbers)

    def differentiate(self, ctx: Any, grads: Sequence[Any], backward: Any) -> tuple[Tensor | None, ...]:
        """Gradients by every argument of a forward, computed by `backward`."""
        wanted = list(ctx.needs_input_grad[: self.at_masks])
        nothing = (None,) * len(ctx.needs_input_grad)
        given = [grads[i] for i in self.differentiable]
        if not any(wanted) or all(x is None for x in given):
            return nothing
        *saved, key, numbers = ctx.saved_tensors
        options = ctx.options if key is None else ctx.options._replace(block_mask=key)
        rows = self.read(given, saved)
        found = backward(*rows, wanted, *saved[len(self.kept) :], options, numbers)
        return (*(g if w else None for g, w in zip(found, wanted)), *nothing[self.at_masks :])

    def refuse_second_order(self, ctx: Any, *grads: Any) -> NoReturn:
        raise NotImplementedError(self.no_second_order)

    # What the operators do, on arrays and on those without memory

    def launch_forward(self, *args: Any) -> tuple[Tensor, ...]:
        return self.launch(self.unpacked(args))

    def launch(self, call: Call) -> tuple[Tensor, ...]:
        """All results that an operator gives, empty where the call does not have them."""
        ready = call.ready()
        # An allocation each, where the direct path makes one for all rows: operator outputs must not share memory.
        views = ready.empty_results()
        ready.launch(views)
        found = tensors(views)
        if call.options.block_mask is not None:
            # What a backward reads keeps the pattern, of which operators know the key only: its memory does, because
            # autograd keeps a differentiable result as another tensor.
            found[self.owner].untyped_storage()._streamkl_block_mask = call.options.block_mask
        return tuple([found[0].new_empty(0) if x is None else x for x in found])

    def launch_backward(self, *args: Any) -> tuple[Tensor, ...]:
        """Gradients of the wanted operands; of the others an empty tensor, as batching fallbacks want a fixed count."""
        *saved, wanted = args[: self.before]
        call = self.unpacked(args[self.before :])
        ready = call.ready(SavedArrays(tuple(saved)))
        like = call.operands[self.op.at]
        found = ready.backward(_names(self.op, tuple(wanted)))
        return tuple([like.new_empty(0) if g is None else g for g in found])

    def fake_forward(self, *args: Any) -> tuple[Tensor, ...]:
        call, op = self.call(args), self.op
        operands = call.operands
        like, shape = operands[op.at], tuple(self.row_shape(call))
        wide = any(operands[i] is not None and operands[i].dtype == torch.float64 for i in self.typed)
        dtype = torch.float64 if wide else torch.float32
        rows = {name: like.new_empty(shape, dtype=dtype) for name in op.rows}
        vectors = {n: like.new_empty((*shape, operands[i].shape[-1])) for n, i in self.columns.items()}
        others = {name: like.new_empty(x, dtype=dtype) for name, x in self.further(call).items()}
        found = {**rows, **vectors, **others}
        return tuple([found[n] if n in found else like.new_empty(0, dtype=dtype) for n in op.results])

    def fake_backward(self, *args: Any) -> tuple[Tensor, ...]:
        wanted, operands = args[self.before - 1], self.call(args[self.before :]).operands
        like = operands[self.op.at]
        return tuple([x.new_empty(x.shape) if w else like.new_empty(0) for x, w in zip(operands, wanted)])

    # Under vmap

    def forward_of_batches(self, op: Any, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        call, dims = self.call(args), self.call(in_dims)
        if packed(call) or not self.op.one_batch:
            return _looped(op, info.batch_size, in_dims, args)
        folded = _Fold(info.batch_size, call, dims)
        arguments = folded.arguments(call, dims)
        found = op(*arguments, self.numbers(args))
        has = [x is not None for x in there(self.call(arguments), found)]
        return (
            tuple(folded.unfold(x) if h else x for x, h in zip(found, has)),
            tuple(0 if h else None for h in has),
        )

    def backward_of_batches(self, op: Any, info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        *rows, wanted = args[: self.before]
        args = args[self.before :]
        call, dims = self.call(args), self.call(in_dims[self.before :])
        if packed(call) or not self.op.one_batch:
            return _looped(op, info.batch_size, in_dims, (*rows, wanted, *args))
        folded = _Fold(info.batch_size, call, dims)
        saved = [folded.fold(x, d) for x, d in zip(rows, in_dims)]
        grads = op(*saved, wanted, *folded.arguments(call, dims), self.numbers(args))
        out_dims = tuple(0 if w else None for w in wanted)
        return tuple(folded.unfold(g) if w else g for g, w in zip(grads, wanted)), out_dims


_operators: dict[str, _Operators] = {}


def _rows_of_like(call: Call) -> Sequence[int]:
    shape: Sequence[int] = call.operands[call.op.at].shape[:-1]
    return shape


def _further_by_options(call: Call) -> dict[str, Sequence[int]]:
    rows = tuple(_operators[call.op.name].row_shape(call))
    return {name: (*rows, *axes) for name, axes in further_results(call.op, call.options).items()}


def register(
    op: Op,
    row_shape: Callable[[Call], Sequence[int]] = _rows_of_like,
    further: Callable[[Call], dict[str, Sequence[int]]] = _further_by_options,
) -> None:
    """Make the custom operators of an operation: `streamkl::<name>_forward` and so on.

    `row_shape` says the shape of row results, without reading memory, where it is another than that of the rows of the
    operand `like`; `further` those of the results that not every call has, where options do not say which it has.
    """
    _operators[op.name] = _Operators(op, row_shape, further)


@functools.lru_cache(maxsize=64)
def _names(op: Op, wanted: tuple[bool, ...]) -> tuple[str, ...]:
    return tuple(name for name, w in zip(op.names, wanted) if w)


@functools.lru_cache(maxsize=256)
def _saved(op: Op, divergence: str, wanted: tuple[bool, ...]) -> tuple[int | None, ...]:
    """What `_Operators.saved` says, or an error about gradients that the operation does not have."""
    of = _operators[op.name]
    for i in of.constants:
        if wanted[i]:
            name = op.names[i]
            raise NotImplementedError(
                f"{name} requires a gradient, but is a constant of streamkl_cupy.{op.name}; pass {name}.detach()"
            )
    # Where no gradient reads the value, the caller may scale it in place.
    read = not divergence or validate.reads_value(op, divergence, _names(op, wanted))
    return tuple(i if read or at != of.value else None for at, i in enumerate(of.kept))


def _saves_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    pass


def _as_they_lie(rows: Sequence[Any], of: _Operators) -> bool:
    """Whether the derivatives among what a backward reads are what their memory holds: is_grads_batched hands over
    tensors that nothing else tells from others, and some have a bit that stands for a sign or for zeros."""
    return all(_lies_as_it_is(x) for x in (rows[i] for i in of.derivatives) if x is not None)


def _lies_as_it_is(x: Any) -> bool:
    return not (_legacy_batched(x) or x.is_neg() or x._is_zerotensor())


_deterministic = known("torch").deterministic
_legacy_batched = getattr(torch._C._functorch, "is_legacy_batchedtensor", lambda x: True)


class _Step(torch.autograd.Function):
    """The forward, its reduction and their first-order gradient, where nothing but autograd looks on.

    Of old style, with one method for the forward: torch binds signatures for the other at every call.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        *operands, (call, ready, way, reduction) = args
        of = way.of
        wanted = ctx.needs_input_grad[: of.at_masks]
        read = of.saved(call.options, wanted)
        found: Any
        saved: list[Any]
        share = None
        # Where the caller gets a number, nobody but the backward sees rows: they stay together.
        whole = way.number and not ready.checked.further
        if whole:
            rows = ready.forward_whole()
            saved, found = [rows], [rows]
        else:
            rows = found = [None if x is None else x.array for x in ready.forward()]
            saved = [None if i is None else found[i] for i in read]
        if reduction is not None:
            found[0], share = reduction(rows, ready.checked.every_row_sees)
        ctx.set_materialize_grads(False)
        number = share if isinstance(share, float) else None
        ctx.way = way, call.options, number, whole, ready.look if whole else None
        ctx.save_for_backward(
            *saved,
            share if number is None else None,
            *operands,
            *(() if call.masks is NO_MASKS else call.masks),
        )
        if len(way.indices) == 1:
            return found[way.indices[0]]
        ctx.mark_non_differentiable(*[found[i] for i in way.constants if found[i] is not None])
        return tuple([found[i] for i in way.indices])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        way, options, number, whole, look = ctx.way
        of, indices = way.of, way.given
        needed = ctx.needs_input_grad
        wanted, nothing = needed[: of.at_masks], (None,) * len(needed)
        given = [None if i is None else grads[i] for i in indices]
        if not [x for x in given if x is not None]:
            return nothing
        kept = ctx.saved_tensors
        at = 1 if whole else len(of.kept)
        share, arrays = kept[at] if number is None else number, kept[at + 1 :]
        direct = not torch.is_grad_enabled() and unwatched((*given, *kept))
        if whole:
            like = kept[0]
            grad = given[0] if share is None else given[0] * share
            if direct and _lies_as_it_is(grad):
                ready = _after(look, of, options, arrays, (grad, like))
                return (*ready.backward(_names(of.op, wanted)), *nothing[of.at_masks :])
            results = like.unbind(0)
            like = results[0]
            found = dict(enumerate(results))
            rows = of.read([grad], [None if i is None else found.get(i) for i in of.saved(options, wanted)])
            direct = False
        else:
            rows = of.read(given, kept)
            if share is not None:
                rows[of.reduced] = rows[of.reduced] * share
            like = kept[of.like_rows]
        operands, masks = arrays[: of.at_masks], arrays[of.at_masks :] or NO_MASKS
        if direct and _as_they_lie(rows, of):
            ready = Call(of.op, operands, options, masks).ready(SavedArrays(tuple(rows), alike=True))
            return (*ready.backward(_names(of.op, wanted)), *nothing[of.at_masks :])
        if of.reduced is not None and rows[of.reduced] is not None:
            # Zeros without memory, times a number, have the type of the number.
            rows[of.reduced] = rows[of.reduced].to(like.dtype).expand(like.shape)
        found = _Once.apply(*rows, list(wanted), *operands, *masks, options, None, of.op.name)  # type: ignore[no-untyped-call]
        return (*(g if w else None for g, w in zip(found, wanted)), *nothing[of.at_masks :])


def _after(look: Look | None, of: _Operators, options: Any, arrays: Sequence[Any], rows: tuple[Any, Any]) -> Ready:
    """The backward of a forward that looked so, from its operands and masks, the derivative of the value and all rows.
    The forward's look knows that of such backwards, of which no more than the arrays is looked at then."""
    # What torch has been asked for in the meantime is not the forward's.
    deterministic = options.deterministic is None and _deterministic()
    if look is not None and (known := look.later.get(deterministic)) is not None:
        given: tuple[Any, ...] = (*arrays, *rows)
        if of.op.optional or len(arrays) > of.at_masks:
            given = tuple([x for x in given if x is not None])
        ready = known.ready(given)
        if ready is not None:
            return ready
    operands, masks = tuple(arrays[: of.at_masks]), tuple(arrays[of.at_masks :]) or NO_MASKS
    ready = Call(of.op, operands, options, masks).ready(SavedArrays(rows, True, True))
    if look is not None and ready.look is not None:
        look.later[deterministic] = ready.look
    return ready


# What `apply` does besides is for transforms and for signatures, of which there are none here.
_apply_step: Any = super(torch.autograd.Function, _Step).apply


class _Transformed(torch.autograd.Function):
    """The forward with its first-order gradient, as transforms take it. Its last argument names the operation."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        of = _operators[args[-1]]
        found: tuple[Tensor, ...]
        if plain(args[: of.at_masks]):
            *_, options, _, _ = args
            found = of.launch(Call(of.op, args[: of.at_masks], options, args[of.at_masks : of.at_options]))
        else:
            found = of.forward(*_flat(args[:-1]))
        return found

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.of = _operators[inputs[-1]]
        ctx.of.keep(ctx, inputs[:-1], output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        of = ctx.of

        def once(*args: Any) -> Any:
            return _Once.apply(*args, of.op.name)  # type: ignore[no-untyped-call]

        found: tuple[Tensor | None, ...] = of.differentiate(ctx, grads, once)
        return found

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise NotImplementedError(ctx.of.no_forward_mode)


# torch binds the arguments at every call; a signature that lies ready saves it the work of making one each time.
_Transformed.forward.__signature__ = inspect.signature(_Transformed.forward)  # type: ignore[attr-defined]


class _Sunk(torch.autograd.Function):
    """`_Transformed` with sinks, whose logits come last, one for each row, or None. What gradients read are the rows
    with sinks, so the backward is the operator's."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        *rest, teacher, student = args
        of = _operators[rest[-1]]
        kl, teacher_lse, student_lse, entropy, *others = _Transformed.forward(*rest)
        options = rest[-3]
        if options.return_entropy and teacher is not None:
            entropy = sinks.entropy_with_sink(torch, entropy, teacher_lse, teacher)
        rows = sinks.with_sinks(torch, (kl, teacher_lse, student_lse), Sinks(teacher, student), options.divergence)
        assert of.op.results[:4] == ("kl", "teacher_lse", "student_lse", "teacher_entropy")
        return (*rows, entropy, *others)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *arrays, options, numbers, name, teacher, student = inputs
        of = ctx.of = _operators[name]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        key = options.block_mask if isinstance(options.block_mask, Tensor) else None
        ctx.options = options if key is None else options._replace(block_mask=None)
        ctx.save_for_backward(*output[:3], teacher, student, *arrays, key, numbers)
        of.saved(options, tuple(ctx.needs_input_grad[: of.at_masks]))  # or an error about a constant

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        of, grad = ctx.of, grads[0]
        needed = ctx.needs_input_grad
        if grad is None:
            return (None,) * len(needed)
        kl, teacher_lse, student_lse, teacher, student, *arrays, key, numbers = ctx.saved_tensors
        options = ctx.options if key is None else ctx.options._replace(block_mask=key)
        wanted = list(needed[: of.at_masks])
        found: tuple[Any, ...] = (None,) * len(wanted)
        if any(wanted):
            value = kl if 0 in of.saved(options, tuple(wanted)) else None
            saved = (grad, teacher_lse, student_lse, value, None)
            found = _Once.apply(*saved, wanted, *arrays, options, numbers, of.op.name)  # type: ignore[no-untyped-call]
        by_sinks = _SinksOnce.apply(  # type: ignore[no-untyped-call]
            grad, kl, teacher_lse, student_lse, teacher, student, options.divergence, of.op.name
        )
        nothing = (None,) * (len(needed) - len(wanted) - 2)
        return (*(g if w else None for g, w in zip(found, wanted)), *nothing, *by_sinks)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise NotImplementedError(ctx.of.no_forward_mode)


class _SinksOnce(torch.autograd.Function):
    """Derivatives by sinks' logits, which nothing may differentiate: what they are made of is as good as constant.
    The last argument names the operation."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Any, ...]:
        grad, *rows, teacher, student, divergence, _ = args
        return tuple(sinks.gradients(torch, grad, tuple(rows), Sinks(teacher, student), divergence))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.of = _operators[inputs[-1]]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise NotImplementedError(ctx.of.no_second_order)


class _Once(torch.autograd.Function):
    """The backward operator, which nothing may differentiate. Its last argument names the operation."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*args: Any) -> tuple[Tensor, ...]:
        # Always the operator: is_grads_batched hands over batched tensors that nothing here could recognise.
        grads: tuple[Tensor, ...] = _operators[args[-1]].backward(*_flat(args[:-1]))
        return grads

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.of = _operators[inputs[-1]]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        raise NotImplementedError(ctx.of.no_second_order)


def packed(call: Call) -> bool:
    """Whether there are packed sequences, which have no batch axis that vmap's could become part of."""
    return rules.packing([name for name, x in zip(MASK_ARRAYS, call.masks) if x is not None]) is not None


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
    found = tuple(torch.stack(parts)[:size] for parts in zip(*calls))
    return found, (0,) * len(found)


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
        operands = [self.fold(x, d) for x, d in zip(call.operands, dims.operands)]
        masks = [self.fold_mask(*x) for x in zip(MASK_ARRAYS, call.masks, dims.masks)]
        return (*operands, *masks, *call.options)

    def fold(self, x: Tensor | None, dim: Any) -> Tensor | None:
        """An operand, a result or a derivative: what comes before its rows is the same in all."""
        if x is None:
            return None
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

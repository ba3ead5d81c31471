"""A call, parsed once, and its checked form, kept so that the next one like it is a lookup."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from operator import is_, or_
from typing import Any, Final, NamedTuple, Protocol, cast

from . import arrays, frameworks, numpy_backend, validate
from .advice import hints
from .arrays import ITEMSIZE, ArrayView, Gradients, Inputs, MaskArrays, Results, Saved, compact, view_of
from .concurrency import locks
from .concurrency.locks import ForkLock
from .errors import DriverError
from .frameworks import describe
from .frameworks.base import FRAMEWORKS, QUICK, Framework, known
from .frameworks.cupy import cupy_module
from .ops import OPS, Op, SavedSpec
from .options import MASK_ARRAYS, NO_MASKS, Options, parse
from .problem import AnyProblem, Device, Problem
from .rules.divergences import extra_rows
from .rules.masks import every_row_sees


class Runner(Protocol):
    """A Problem made ready for one device; may be called from any thread, with other arrays of the same problem.

    Streams are handles, workspaces addresses; a backend without them is given 0.
    """

    problem: Problem
    workspace_bytes: int
    """Of a forward."""

    @property
    def plan(self) -> Any:
        """What a call would run, printable."""

    def warmup(self, wrt: tuple[str, ...] = ()) -> None:
        """Leave nothing for a first call to do."""

    def backward_bytes(self, wrt: tuple[str, ...]) -> int:
        """Bytes of workspace for these gradients."""

    def forward(
        self, inputs: Inputs, outputs: Results, stream: int, workspace: int = 0, masks: MaskArrays | None = None
    ) -> None:
        """Write every element of the outputs."""

    def backward(
        self,
        inputs: Inputs,
        saved: Saved,
        outputs: Gradients,
        stream: int,
        workspace: int = 0,
        masks: MaskArrays | None = None,
        room: int | None = None,
    ) -> None:
        """Write every gradient that has an output; `room` are the bytes of the workspace, all that is asked for unless
        given."""


class Launcher(Runner, Protocol):
    """A Runner of a GPU, which keeps what it has launched."""

    def again(self, key: tuple[Any, ...], stream: int) -> bool:
        """Run what has been run with this key; False where nothing has."""

    def forward(
        self,
        inputs: Inputs,
        outputs: Results,
        stream: int,
        workspace: int = 0,
        masks: MaskArrays | None = None,
        key: tuple[Any, ...] | None = None,
    ) -> None:
        """A key stands for all addresses, and for what else may differ between calls of a problem."""

    def backward(
        self,
        inputs: Inputs,
        saved: Saved,
        outputs: Gradients,
        stream: int,
        workspace: int = 0,
        masks: MaskArrays | None = None,
        room: int | None = None,
        key: tuple[Any, ...] | None = None,
    ) -> None:
        """Likewise."""


class Call(NamedTuple):
    """What a caller asks for: operands and arrays of masks as they came, tracers and stand-ins too, options checked."""

    op: Op
    operands: tuple[Any, ...]
    options: Options
    masks: tuple[Any, ...]

    @classmethod
    def of(cls, op: Op, operands: tuple[Any, ...], given: Mapping[str, Any], symbols: bool = False) -> Call:
        """The call with options that were given by name; see `options.parse`."""
        return cls(op, operands, *parse(op, given, symbols))

    def ready(self, rows: SavedArrays | None = None) -> Ready:
        """Read the arrays, and the rows that a backward reads, and find what runs them, or raise what is wrong."""
        framework = QUICK.get(type(self.operands[self.op.at]))
        if framework is None:
            return self._read(rows)
        return _recalled(framework, self, rows) or _noted(framework, self, rows, self._read(rows))

    def _read(self, rows: SavedArrays | None) -> Ready:
        op, operands, options, given = self
        views = None if rows is None else rows.views(op)
        inputs = KINDS[op.name].read(op, operands)
        like = inputs[op.at]
        masks = view_masks(given, like.framework)
        checked = prepare(op, inputs, options, masks)
        if rows is None or views is None:
            return Ready(checked, Views(inputs, masks))
        if rows.alike and not views[0].shape:
            whole = checked.row_shape
            views[0] = views[0]._replace(shape=whole, strides=(0,) * len(whole))
        for spec, view in zip(op.saved, views):
            if view is not None:
                validate.saved_array(view, spec.like, *checked.results[spec.like], like)
        return Ready(checked, Views(inputs, masks, op.Saved(*views)))

    def problem(self, device: Device | None = None) -> Problem:
        """The problem of arrays or stand-ins, as a call with them would have it, or would on `device`."""
        kind = KINDS[self.op.name]
        inputs = kind.outline(self.op, self.operands, device)
        like = inputs[self.op.at]
        options = self.options
        if options.deterministic is None:
            options = options._replace(deterministic=as_framework_says(like))
        problem: Problem = kind.to_problem(self.op, inputs, options, outline_masks(self.masks, like, device))
        return problem


class SavedArrays(NamedTuple):
    """What a backward reads besides the operands, as it came."""

    arrays: tuple[Any, ...]
    """In the order of the operation's record, None for what its gradients do not read."""
    alike: bool = False
    """Whether a first one without axes is that of every row."""
    whole: bool = False
    """Whether the last one is all row results of the forward, one after the other as the record has them, and those
    before it are the derivatives."""

    def views(self, op: Op) -> list[Any]:
        """Read them."""
        if not self.whole:
            return [
                None if x is None else describe(spec.name, x) for spec, x in zip(op.saved, self.arrays, strict=True)
            ]
        *derivatives, rows = self.arrays
        given, whole = iter(derivatives), describe(op.rows[0], rows)
        step = whole.strides[0] * ITEMSIZE[whole.dtype]

        def row(name: str) -> ArrayView:
            at = whole.ptr + op.rows.index(name) * step
            return whole._replace(name=name, shape=whole.shape[1:], strides=whole.strides[1:], ptr=at)

        return [
            describe(x.name, next(given)) if x.name != x.like else row(x.name) if x.name in op.rows else None
            for x in op.saved
        ]


class Checked(NamedTuple):
    """All that a call is but its arrays: what runs it, and what its results look like."""

    runner: Runner
    problem: Problem
    op: Op
    at: int
    """Which of the inputs has the call's framework, device and stream."""
    memory: Framework
    """What makes results: the call's framework, or what computes for it."""
    row_shape: tuple[int, ...]
    stat_dtype: str
    workspace_bytes: int
    every_row_sees: bool
    """Whether each row is known to see a key."""
    results: dict[str, tuple[tuple[int, ...], str]]
    """Shape and type of what a forward writes."""
    further: dict[str, tuple[tuple[int, ...], str]]
    """Those that are not the rows which every call has."""
    gradients: dict[str, tuple[tuple[int, ...], str] | None]
    """Shape and type of what a backward writes, by operand; None for operands that the call does not have."""
    gradient_bytes: dict[tuple[str, ...], int]
    """Workspace of the backwards that there have been."""

    def backward_bytes(self, wrt: tuple[str, ...]) -> int:
        """Bytes of workspace for these gradients, or the error that says why there are none."""
        size = self.gradient_bytes.get(wrt)
        if size is None:
            KINDS[self.op.name].gradients_built(self.problem, wrt)
            size = self.gradient_bytes[wrt] = self.runner.backward_bytes(wrt)
        return size


class Views(NamedTuple):
    """The arrays of a call as kernels see them."""

    inputs: Inputs
    masks: MaskArrays | None
    saved: Saved | None = None
    """The rows that its backward reads."""


class Ready:
    """A checked call with its arrays. Of a call on a GPU that looks like one before only their addresses are known,
    until somebody asks for more."""

    __slots__ = ("_addresses", "_arrays", "_views", "checked", "like", "look")

    def __init__(
        self,
        checked: Checked,
        views: Views | None,
        look: Look | None = None,
        arrays: tuple[Any, ...] = (),
        addresses: Sequence[int] = (),
    ) -> None:
        self.checked, self._views, self.look = checked, views, look
        self._arrays, self._addresses = arrays, addresses
        known = views if look is None else look.views
        assert known is not None
        # An array of the call's framework, device and stream; whose memory it is does not matter.
        self.like: ArrayView = known.inputs[checked.at]

    @property
    def views(self) -> Views:
        """All that is known of the arrays."""
        found = self._views
        if found is None:
            assert self.look is not None
            found = self._views = self.look.views_of(self._arrays, self._addresses)
        return found

    @property
    def inputs(self) -> Inputs:
        """The operands."""
        return self.views.inputs

    def with_saved(self, saved: Saved) -> Ready:
        """The same beside rows that a backward reads."""
        return Ready(self.checked, self.views._replace(saved=saved))

    def forward(self) -> Results:
        """Allocate results and launch."""
        checked, like = self.checked, self.like
        op = checked.op
        rows = frameworks.empty_rows(like, op.rows, checked.row_shape, checked.stat_dtype)
        outputs = op.Results(*rows, **self._empty(checked.further)) if checked.further else op.Results(*rows)
        self._launch(checked.workspace_bytes, [x and x.ptr for x in outputs], lambda: outputs)
        if like.framework not in frameworks.OWN:
            frameworks.hold((*self.inputs, *(self.views.masks or {}).values()))
        return outputs

    def forward_whole(self) -> Any:
        """The same of an operation with row results only: one array of all, whose first axis counts them."""
        checked, like = self.checked, self.like
        rows, shape, dtype = checked.op.rows, checked.row_shape, checked.stat_dtype
        whole = checked.memory.allocate(like, (len(rows), *shape), dtype)
        first = checked.memory.address(whole)

        def outputs() -> Results:
            strides, step = compact(shape, ITEMSIZE[dtype])
            view = like._replace(dtype=dtype, shape=shape, strides=strides, array=whole)
            return checked.op.Results(*[view._replace(name=x, ptr=first + i * step) for i, x in enumerate(rows)])

        self._launch(checked.workspace_bytes, (first,), outputs)
        return whole

    def empty_results(self) -> Results:
        """Memory for results, an allocation for each."""
        return self.checked.op.Results(**self._empty(self.checked.results))

    def _empty(self, results: dict[str, tuple[tuple[int, ...], str]]) -> dict[str, ArrayView]:
        return {n: frameworks.empty(self.like, shape, dtype)._replace(name=n) for n, (shape, dtype) in results.items()}

    def launch(self, outputs: Results) -> None:
        """Launch into `outputs`, with the workspace that the plan asks for, from the caller's allocator."""
        self._launch(self.checked.workspace_bytes, [x and x.ptr for x in outputs], lambda: outputs)

    def _launch(
        self, size: int, results: Iterable[int | None], outputs: Callable[[], Any], backward: bool = False
    ) -> None:
        """Run the forward or the backward with so many bytes of workspace, under a key where the call looks like one
        before; or what has been launched for these addresses again. `results` are those of the outputs."""
        like, look, framework = self.like, self.look, self.checked.memory
        workspace = 0
        if size:
            memory = framework.allocate(like, (size // 4,), "float32")
            workspace = framework.address(memory)
        stream = framework.stream(like.device) if like.device.kind == "cuda" else 0
        how: dict[str, Any] = {}
        if look is not None and look.on_gpu:
            how["key"] = key = (look.number, workspace, *self._addresses, *results)
            if look.runner.again(key, stream):
                return
        runner, (inputs, masks, saved) = self.checked.runner, self.views
        if backward:
            runner.backward(inputs, cast("Saved", saved), outputs(), stream, workspace, masks, **how)
        else:
            runner.forward(inputs, outputs(), stream, workspace, masks, **how)

    def backward(self, wrt: tuple[str, ...]) -> tuple[Any, ...]:
        """Allocate the gradients named in `wrt` and launch; None for the others."""
        checked, like = self.checked, self.like
        size = checked.gradient_bytes.get(wrt)
        if size is None:
            size = checked.backward_bytes(wrt)
        framework, described = checked.memory, checked.gradients
        found = [
            framework.allocate(like, *of) if of is not None and name in wrt else None for name, of in described.items()
        ]
        addresses = [None if x is None else framework.address(x) for x in found]

        def outputs() -> Gradients:
            def view(x: Any, shape: tuple[int, ...], dtype: str) -> ArrayView:
                strides, _ = compact(shape, 0)
                return view_of((like.name, framework.name, like.device, dtype, shape, strides, framework.address(x), x))

            return checked.op.Gradients(
                *[None if x is None or of is None else view(x, *of) for x, of in zip(found, described.values())]
            )

        self._launch(size, addresses, outputs, backward=True)
        if like.framework not in frameworks.OWN:
            inputs, masks, saved = self.views
            frameworks.hold((*inputs, *(saved or ()), *(masks or {}).values()))
        return tuple(found)


class Kind(NamedTuple):
    """How calls of an operation are read, checked and run, where operands are more than queries and keys of sides. A
    room above brings it (`KINDS`); all else about a call goes by the record and by what its problem says of itself."""

    read: Callable[[Op, tuple[Any, ...]], Inputs]
    outline: Callable[[Op, tuple[Any, ...], Device | None], Inputs]
    """The same of arrays or stand-ins, as if on a device where one is given."""
    standin: Callable[[str, Any, Device], ArrayView]
    """View something with a shape and a dtype as the compact array of a name that it stands for."""
    to_problem: Callable[..., Any]
    """(op, inputs, options, masks) -> a frozen problem, or an error that says what to do."""
    results: Callable[[Any], dict[str, tuple[tuple[int, ...], str]]]
    """Shape and type of what a forward of a problem writes, in the order of the record."""
    gradients_built: Callable[[Any, tuple[str, ...]], None]
    """Refuse gradients that nothing computes."""
    backend: Callable[[Device], Any]
    """The module whose `Runner` serves a device."""
    every_row_sees: Callable[[Any], bool] = lambda problem: False
    """Whether each row of a problem is known to see a key."""
    look: Callable[..., None] = lambda inputs, options, problem: None
    """Warn of what a checked call may have got wrong."""


LIMIT = 1024
# From what a call looks like to its checked form, and from the problem to its runner: calls that differ only in what
# does not matter share one. Reads take no lock, because a single dictionary operation is safe in every thread.
_checked: dict[Any, Checked] = {}
_runners: dict[AnyProblem, Runner] = {}
_building = ForkLock()
_cuda_generation: int | None = None
"""`locks.forks` of the process that used CUDA first."""


class Look:
    """How a call that has been checked looks, and what it came to without its arrays."""

    __slots__ = ("address", "alike", "checked", "later", "number", "on_gpu", "operands", "runner", "views", "whole")
    _numbers = itertools.count()

    def __init__(self, framework: Framework, alike: Callable[..., bool], ready: Ready, whole: int | None) -> None:
        """Of a call whose arrays are alike; `whole` is the address of all rows where `SavedArrays` has them so."""
        self.alike, self.checked, self.whole = alike, ready.checked, whole is not None
        self.number = next(self._numbers)
        self.address = framework.address
        inputs, masks, saved = ready.views
        self.operands = len(inputs) - inputs.count(None)
        self.on_gpu = ready.like.device.kind == "cuda"
        self.runner = cast("Launcher", ready.checked.runner)
        self.later: dict[Any, Look] = {}
        """The looks of backwards that came after such calls, by what they ask for."""

        def bare(view: ArrayView | None) -> Any:
            return view and view.at(0, None)

        def saved_as(spec: SavedSpec, view: ArrayView | None) -> Any:
            if view is None or whole is None or spec.name != spec.like:
                return bare(view)
            return view.at(view.ptr - whole, None)  # where it lies among all rows

        op = self.checked.op
        self.views = Views(
            op.Inputs(*map(bare, inputs)),
            None if masks is None else {name: bare(view) for name, view in masks.items()},
            None if saved is None else op.Saved(*map(saved_as, op.saved, saved)),
        )

    def ready(self, arrays: tuple[Any, ...]) -> Ready | None:
        """A call with these arrays, in the order of views; None where it does not look so."""
        if not self.alike(*arrays):
            return None
        addresses = list(map(self.address, arrays))
        # What has no memory, or does not begin where most arrays do, is looked at anew.
        if not all(addresses) or reduce(or_, addresses[: self.operands]) & 15:
            return None
        if not self.on_gpu:
            return Ready(self.checked, self.views_of(arrays, addresses), self)
        if locks.forks != _cuda_generation:
            _check_fork()
        return Ready(self.checked, None, self, arrays, addresses)

    def views_of(self, arrays: Sequence[Any], addresses: Sequence[int]) -> Views:
        """The same with arrays again: the operands, those of the mask, the saved rows."""
        inputs, masks, saved = self.views
        op, rest = self.checked.op, iter(zip(addresses, arrays))
        inputs = op.Inputs(*[view and view.at(*next(rest)) for view in inputs])
        if masks is not None:
            masks = {name: view.at(*next(rest)) for name, view in masks.items()}
        if saved is not None:
            apart = [not self.whole or x.name != x.like for x in op.saved]
            saved = op.Saved(
                *[
                    view and (view.at(*next(rest)) if alone else view.at(addresses[-1] + view.ptr, arrays[-1]))
                    for view, alone in zip(saved, apart)
                ]
            )
        return Views(inputs, masks, saved)


# Calls that have been checked, by options and the shape of the operand `like` which all are; of each the last looks.
_looks: dict[Any, tuple[Look, ...]] = {}
LOOKS = 8


def _recalled(framework: Framework, call: Call, rows: SavedArrays | None) -> Ready | None:
    """A call that looks like one before, without reading its arrays again; None where none is known."""
    found = _looks.get(_look_key(framework, call, rows))
    if found is not None:
        alone = rows is None and call.masks is NO_MASKS and not call.op.optional
        arrays = call.operands if alone else _arrays(call, rows)
        for look in found:
            ready = look.ready(arrays)
            if ready is not None:
                return ready
    return None


def _noted(framework: Framework, call: Call, rows: SavedArrays | None, ready: Ready) -> Ready:
    """Remember how a call looks that has been read."""
    inputs, masks, saved = ready.views
    views = (*inputs, *(masks or {}).values(), *(saved or ()))
    if all(view is None or view.framework == framework.name for view in views) and not any(
        view is not None and view.ptr & 15 for view in inputs
    ):
        arrays = _arrays(call, rows)
        alike = framework.alike(arrays)
        key = _look_key(framework, call, rows)
        if alike is not None:
            whole = framework.address(arrays[-1]) if rows is not None and rows.whole else None
            looks = (*_looks.get(key, ()), Look(framework, alike, ready, whole))[-LOOKS:]
            _remember(_looks, key, looks, ready.checked.problem)
    return ready


def _look_key(framework: Framework, call: Call, rows: SavedArrays | None) -> Any:
    """What is known of a call without looking at its arrays, but for one shape."""
    op, operands, options, masks = call
    deterministic = framework.deterministic() if options.deterministic is None else None
    given = masks if masks is NO_MASKS else tuple([x is not None for x in masks])
    if op.optional:
        given = (given, *[x is not None for x in operands])
    saved = None if rows is None else (tuple([x is None for x in rows.arrays]), *rows[1:])
    named = options if options.block_mask is None else _named(options)
    return (op, operands[op.at].shape, named, deterministic, given, saved, framework.name)


def _arrays(call: Call, rows: SavedArrays | None) -> tuple[Any, ...]:
    """Those of a call, in the order of views."""
    masks = () if call.masks is NO_MASKS else tuple([x for x in call.masks if x is not None])
    operands = call.operands
    if call.op.optional:
        operands = tuple([x for x in operands if x is not None])
    if rows is None:
        return (*operands, *masks)
    return (*operands, *masks, *[x for x in rows.arrays if x is not None])


# Keys are kept longer than patterns: they have the digest in its place.
def _named(options: Options) -> Any:
    pattern = options.block_mask
    return options if pattern is None else options._replace(block_mask=pattern.digest)  # type: ignore[arg-type]


def prepare(op: Op, inputs: Inputs, options: Options, masks: MaskArrays | None = None) -> Checked:
    """The checked form of a call, or the error that says what is wrong with it."""
    like = inputs[op.at]
    if like.device.kind == "cuda" and locks.forks != _cuda_generation:
        _check_fork()
    deterministic = options.deterministic
    if deterministic is None:
        deterministic = as_framework_says(like)
    # view[1:6] is framework, device, dtype, shape and strides; the address matters by its alignment only.
    key: Any = (
        op,
        *[view and view[1:6] for view in inputs],
        *[view and view.ptr & 15 for view in inputs],
        _named(options),
        deterministic,
    )
    if masks is not None:
        key = (key, *((name, view[1:6]) for name, view in masks.items()))
    checked = _checked.get(key)
    if checked is None:
        kind = KINDS[op.name]
        problem = kind.to_problem(op, inputs, options._replace(deterministic=deterministic), masks)
        kind.look(inputs, options, problem)
        runner = runner_for(problem)
        results = kind.results(problem)
        checked = Checked(
            runner,
            problem,
            op,
            op.at,
            known(like.framework).computes(like.device),
            problem.row_shape,
            problem.stat_dtype,
            runner.workspace_bytes,
            kind.every_row_sees(problem),
            results,
            {name: x for name, x in results.items() if name not in op.rows},
            {
                name: x and (x.shape, problem.gradient_dtype(name) if problem.wide_gradients else x.dtype)
                for name, x in zip(op.names, inputs)
            },
            {},
        )
        _remember(_checked, key, checked, problem)
    return checked


def as_framework_says(like: ArrayView) -> bool:
    """What `deterministic=None` means beside arrays like this one: whatever their framework has been asked for."""
    framework = FRAMEWORKS.get(like.framework)
    return framework is not None and framework.deterministic()


def runner_for(problem: AnyProblem) -> Runner:
    """The one Runner of a problem."""
    runner = _runners.get(problem)
    if runner is None:
        with _building():
            runner = _runners.get(problem) or KINDS[problem.op].backend(problem.device).Runner(problem)
            _remember(_runners, problem, runner, problem)
    return runner


def _remember(cache: dict[Any, Any], key: Any, value: Any, problem: AnyProblem) -> None:
    """Bounded, oldest out first: a program with ever new shapes must not grow for ever."""
    with _building():
        for oldest in list(cache)[: max(len(cache) - LIMIT + 1, 0)]:  # a copy, since `_forget` waits for nobody
            cache.pop(oldest, None)
        cache[key] = value
    if problem.mask.blocks is not None:
        from .patterns.pattern import when_gone

        when_gone(_forget)


def _forget(digest: str) -> None:
    """Drop what is kept for a pattern that is gone: a program that makes one for every step holds no more than its own.

    Takes no lock, because a pattern can end inside any other function: copying and popping are single operations.
    """
    for problem in list(_runners):
        if problem.mask.blocks == digest:
            _runners.pop(problem, None)
    for key, checked in list(_checked.items()):
        if checked.problem.mask.blocks == digest:
            _checked.pop(key, None)
    for look, kept in list(_looks.items()):
        if kept[0].checked.problem.mask.blocks == digest:
            _looks.pop(look, None)


def backend(device: Device) -> Any:
    """The module whose Runner serves a device."""
    if device.kind == "cpu":
        return numpy_backend
    check_gpu_usable()
    return importlib.import_module(".launch", __package__)


def check_gpu_usable() -> None:
    """Refuse GPUs where CuPy is missing, or this process cannot use them."""
    _check_fork()
    cupy_module()


def _check_fork() -> None:
    """Note who uses CUDA first, and refuse children forked after that: CUDA does not work there, or hangs."""
    global _cuda_generation
    if _cuda_generation is None:
        _cuda_generation = locks.forks
    elif _cuda_generation != locks.forks:
        raise DriverError(
            "CUDA arrays in a process that was forked after its parent had used CUDA, where CUDA does not work; start "
            'such processes with multiprocessing.get_context("spawn"), or use CUDA in the children only'
        )


_is_none = partial(is_, None)


def view_masks(given: tuple[Any, ...], framework: str) -> MaskArrays | None:
    """Describe what a mask reads, beside inputs of a framework; None where there is nothing."""
    if given is NO_MASKS or all(map(_is_none, given)):
        return None
    return {n: frameworks.describe_mask(n, x, framework) for n, x in zip(MASK_ARRAYS, given) if x is not None}


def outline(op: Op, given: tuple[Any, ...], device: Device | None = None) -> Inputs:
    """Views of arrays or stand-ins, as if on `device` where one is given.

    Stand-ins are where the arrays among them are, else on the current GPU, else on the CPU.
    """
    views = {n: describe(n, x) for n, x in zip(op.names, given, strict=True) if not frameworks.is_standin(n, x)}
    framework = "stand-in"
    if views:
        like = next(iter(views.values()))
        framework, own = like.framework, like.device
    else:
        gpu = None if device else frameworks.current_gpu()
        own = arrays.CPU if gpu is None else arrays.cuda(gpu)
    for name, x in zip(op.names, given, strict=True):
        view = views.get(name) or frameworks.standin(name, x, own)._replace(framework=framework)
        views[name] = view if device is None else view._replace(device=device)
    return op.Inputs(**views)


def outline_masks(given: tuple[Any, ...], like: ArrayView, device: Device | None = None) -> MaskArrays | None:
    """Views of a mask's arrays or stand-ins, beside inputs that `outline` has viewed as `like`.

    Stand-ins, and arrays beside nothing else or on a `device` that is only meant, are where the inputs are.
    """
    if all(map(_is_none, given)):
        return None
    views: MaskArrays = {}
    for name, x in zip(MASK_ARRAYS, given, strict=True):
        if x is None:
            continue
        real = hasattr(x, "dtype") and not frameworks.is_standin(name, x)
        view = frameworks.describe_mask(name, x) if real else frameworks.standin(name, x, like.device)
        if not real or device is not None or like.framework == "stand-in":
            view = view._replace(framework=like.framework, device=like.device)
        views[name] = view
    return views


def _results_of_sides(problem: Problem) -> dict[str, tuple[tuple[int, ...], str]]:
    op, shape, dtype = problem.operation, problem.row_shape, problem.stat_dtype
    rows = dict.fromkeys(op.rows, (shape, dtype))
    vectors = {name: ((*shape, problem.columns(letter)), problem.operand(op.like).dtype) for name, letter in op.vectors}
    return rows | vectors | {name: ((*shape, *axes), dtype) for name, axes in extra_rows(problem).items()}


# Looked up where they are called, as all else is.
OF_SIDES = Kind(
    lambda op, operands: op.Inputs(*map(describe, op.names, operands)),
    outline,
    frameworks.standin,
    lambda *given: validate.to_problem(*given),
    _results_of_sides,
    validate.gradients_built,
    lambda device: backend(device),
    every_row_sees,
    lambda *given: hints.look(*given),
)
KINDS: Final[dict[str, Kind]] = dict.fromkeys(OPS, OF_SIDES)
"""By the names of operations. A room above that has a kind of its own puts it here."""

"""Running a Plan: kernels loaded once, arguments packed, launches put on the caller's stream.

A kernel takes one struct by value. Strides, extents and scales of a Problem never change, so they are packed once into
a template; a call copies it and fills in the pointers. The copy goes to the driver's launch directly: converting
arguments one by one, as CuPy's kernel objects must, costs the host more than the launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from math import inf, prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from .compiler.nvrtc import import_cupy, load
from .errors import CaptureError, DriverError
from .kernels.base import ELEMENT_BYTES, Box, KernelPlan, Work
from .kernels.gpus import device_facts
from .kernels.mask_bits import PackedMask
from .kernels.structs import MASK_WORDS, TENSOR_MAP, Value
from .kernels.tensor_maps import encode
from .planning import Plan, Step, make_plan
from .problem import Operand, Problem, canonical_strides
from .rules.divergences import extra_rows
from .rules.masks import parts_of
from .rules.scores import score_of

if TYPE_CHECKING:
    from .arrays import ArrayView, Gradients, Inputs, MaskArrays, Results, Saved
    from .kernels.tile_lists import Lists
    from .ops import Task

_AXES = ("batch", "head", "row", "column")
# Of a tensor, what a call says of it.
_WHERE = ("pointer", *_AXES)
_NOWHERE = (0,) * len(_WHERE)
NO_ROWS: Mapping[str, tuple[int, ...]] = MappingProxyType({})


@lru_cache(maxsize=64)
def _primary_context(index: int) -> int:
    """Handle of a GPU's primary context, the one that every framework works in; it is made if need be.

    Asked in a thread of its own, because the question changes what is current.
    """
    cuda = import_cupy().cuda

    def ask() -> int:
        cuda.runtime.setDevice(index)
        return int(cuda.driver.ctxGetCurrent())

    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(ask).result()
        except cuda.runtime.CUDARuntimeError as error:
            raise DriverError(f"GPU {index} cannot be used: {error}") from error


def _make_current(driver: Any, context: int) -> int | None:
    """Make the context of the arrays' GPU current; what was, if that is another, is to be `_put_back`.

    Launches, modules and tensor maps are the driver's, which knows no default GPU: a thread that has never used
    CUDA has no context at all, though the runtime names a current GPU there. What was is put back through the
    driver too, because the runtime would make a context on a GPU that the program may not use.
    """
    before: int = driver.ctxGetCurrent()
    if before == context:
        return None
    driver.ctxSetCurrent(context)
    return before


def _put_back(driver: Any, before: int | None) -> None:
    if before is not None:
        driver.ctxSetCurrent(before)


class Command(NamedTuple):
    """One call of the driver or the runtime, which is `function(*first, stream, *last)`."""

    function: Callable[..., Any]
    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    memory: Any = None
    """What the arguments point to."""


class _Kernel:
    """Kernels that run one after the other on the same arguments, mostly one: loaded, with their launch shapes and the
    constant part of the arguments."""

    __slots__ = ("_launch", "_lists", "_maps", "_operands", "_rows", "_steps", "_template", "_type", "_words", "masked")

    def __init__(self, problem: Problem, *plans: KernelPlan, copies: tuple[tuple[str, int, Operand], ...] = ()) -> None:
        """`copies` are what tensor maps are of besides operands, as a `Step` has them."""
        plan, op = plans[0], problem.operation
        # What tensor maps are of by name: operands, after these copies.
        mapped = {name: problem.operand(name) for name in op.names} | {name: x for name, _, x in copies}
        numbers = {name: i for i, name in enumerate(mapped)}
        fields = dict(zip(op.names, op.fields, strict=True))
        self._launch = import_cupy().cuda.driver.launchKernel
        self._steps = tuple(
            (
                load(plan.text, step.symbol, step.arch, smem_bytes=step.smem_bytes).handle,
                (step.blocks, 1, 1, step.threads, 1, 1, step.smem_bytes),
            )
            for step in plans
        )
        args = plan.args
        self._maps = tuple(
            (
                8 * args.words[f"{fields.get(box.name, box.name)}.words"],
                numbers[box.name],
                _Maps(mapped[box.name], problem.batch, box),
            )
            for box in plan.boxes
        )
        self._lists = _tile_lists(problem, plan)
        self._template = template(problem, plan, self._lists)
        self._type = ctypes.c_uint64 * (args.size // 8)
        # Of a tensor, its address.
        self._words = {name.removesuffix(".pointer"): word for name, word in args.words.items()}
        self.masked = "mask" in self._words
        """Whether it reads arrays of the mask."""
        if self.masked:
            mask = self._words["mask"]
            self._words |= {name: mask + i for i, name in _mask_words(problem)[1]}
        self._operands = tuple(self._words[field] for field in fields.values() if field in self._words)
        # Of what a backward reads of rows, by field: the words of its address and of as many strides as it has.
        self._rows = {
            name: tuple([args.words[f"{name}.{x}"] for x in _WHERE if f"{name}.{x}" in args])
            for name in op.saved_fields
        }

    def commands(
        self,
        inputs: tuple[int, ...],
        others: Iterable[tuple[str, int]],
        rows: Iterable[tuple[str, tuple[int, ...]]] = (),
        copies: tuple[int, ...] = (),
    ) -> Iterator[Command]:
        """The launches on these arguments.

        Args:
            inputs: addresses of the operands.
            others: (field, or array of the mask; what it is in this call) of everything else.
            rows: (field, address and strides) of what a backward reads of rows.
            copies: addresses of the copies.
        """
        packed = self._type.from_buffer_copy(self._template)
        address = ctypes.addressof(packed)
        if self._maps:
            mapped = inputs + copies
            for offset, number, maps in self._maps:
                ctypes.memmove(address + offset, maps[mapped[number]], TENSOR_MAP.size)
        for name, where in rows:
            for word, value in zip(self._rows[name], where):
                packed[word] = value
        for word, pointer in zip(self._operands, inputs):
            packed[word] = pointer
        words = self._words
        for name, value in others:
            packed[words[name]] = value
        parameters = ctypes.c_void_p(address)
        for handle, shape in self._steps:
            yield Command(self._launch, (handle, *shape), (ctypes.addressof(parameters), 0), (packed, parameters))
        if self._lists:
            yield Command(self._lists.used_on)


class _Maps(dict[int, bytes]):
    """Tensor maps of one operand by address."""

    LIMIT = 256

    def __init__(self, operand: Operand, batch: int, box: Box) -> None:
        super().__init__()
        self._shape = (operand, batch, box)

    def __missing__(self, pointer: int) -> bytes:
        if len(self) >= self.LIMIT:
            self.clear()
        return self.setdefault(pointer, encode(pointer, *self._shape))


class Packed(dict[tuple[Any, ...], tuple[Command, ...]]):
    """What a call runs, by all that differs between calls of a problem: addresses, mostly. A training loop comes back
    to the same ones, and then launches what lies ready; a bound keeps odd programs small."""

    LIMIT = 256

    def keep(self, key: tuple[Any, ...], commands: Iterable[Command]) -> tuple[Command, ...]:
        """Keep commands, and give them back."""
        if len(self) >= self.LIMIT:
            self.clear()
        return self.setdefault(key, tuple(commands))


class Request(NamedTuple):
    """What a call runs: loaded kernels with their steps, and the results that no kernel writes."""

    launches: tuple[tuple[_Kernel, Step], ...]
    bits: tuple[_Kernel, ...]
    """Pack arrays of the mask first, in the plan's order."""
    zeros: tuple[str, ...] = ()
    workspace: bool = True
    """Whether it may work in the workspace that a call gives it; else what needs one raises."""


class Launches:
    """What a Runner of a GPU has launched and may launch `again`, in the context of its GPU."""

    def __init__(self, index: int) -> None:
        cupy = import_cupy()
        self._runtime, self._driver = cupy.cuda.runtime, cupy.cuda.driver
        self._context = _primary_context(index)
        self._kept = Packed()

    def again(self, key: tuple[Any, ...], stream: int) -> bool:
        """Launch what a forward or a backward with this key has launched; False where none is known."""
        commands = self._kept.get(key)
        if commands is None:
            return False
        if self._driver.ctxGetCurrent() != self._context:
            self._launch(key, stream, lambda: commands)
            return True
        for function, first, last, _ in commands:
            function(*first, stream, *last)
        return True

    def _launch(self, key: tuple[Any, ...], stream: int, commands: Callable[[], Iterable[Command]]) -> None:
        """Launch what is known by the key, or what these commands are, which are kept, in the arrays' context."""
        before = _make_current(self._driver, self._context)
        try:
            for function, first, last, _ in self._kept.get(key) or self._kept.keep(key, commands()):
                function(*first, stream, *last)
        finally:
            _put_back(self._driver, before)


class Runner(Launches):
    """A Problem made ready for one GPU. Thread-safe: calls share nothing that they change."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.device.index)
        self.problem = problem
        op = problem.operation
        self._names = op.names
        # Of what a backward reads of rows: field, and what stands for one that is not there.
        self._saved = tuple((field, spec.instead) for field, spec in zip(op.saved_fields, op.saved, strict=True))
        self.plan: Plan = make_plan(problem, device_facts(problem.device.index))
        self.workspace_bytes = self.plan.workspace_bytes
        self._kernels: dict[tuple[KernelPlan, ...], _Kernel] = {}
        # By what is wanted and the room for it.
        self._requests: dict[object, Request] = {}
        self._mask_arrays = tuple(array.name for part in parts_of(problem.mask) for array in part.arrays)

    def warmup(self, wrt: tuple[str, ...] = ()) -> None:
        """Compile, load and configure the forward and the gradients `wrt`; nothing is left for a first call to do."""
        before = _make_current(self._driver, self._context)
        try:
            for workspace in (True, False):
                self._forward(workspace, None)
            for room in (None, 0):
                self._backward(wrt, room, None)
        finally:
            _put_back(self._driver, before)

    def backward_bytes(self, wrt: tuple[str, ...]) -> int:
        """Bytes of workspace for these gradients."""
        return self.plan.backward_bytes(wrt)

    def forward(
        self,
        inputs: Inputs,
        outputs: Results,
        stream: int,
        workspace: int = 0,
        masks: MaskArrays | None = None,
        key: tuple[Any, ...] | None = None,
    ) -> None:
        """Launch the forward; every element of the outputs is written.

        `workspace` is the address of `plan.workspace_bytes` bytes; without them the keys are not split, and no
        mask can be packed. `masks` has the arrays that the problem's mask names. `key` is what to know the call by in
        `again`; made of its arrays where none is given.
        """
        if key is None:
            key = (workspace, masks and _mask_key(masks), *map(address_of, inputs), *map(address_of, outputs))

        def commands() -> Iterator[Command]:
            request = self._requests.get(bool(workspace)) or self._forward(bool(workspace), stream)
            return self._commands(request, inputs, outputs, workspace, masks)

        self._launch(key, stream, commands)

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
        """Launch the gradients that `outputs` has room for; every element of them is written.

        `workspace` is the address of `room` bytes, `backward_bytes(wrt)` unless given. With less than these,
        no row tile is shared, with still less each gradient has its own kernel, and with none no mask can be packed.
        """
        if key is None:
            rows = tuple([None if x is None else (x.ptr, x.strides) for x in saved])
            key = (
                (workspace, room),
                masks and _mask_key(masks),
                rows,
                *map(address_of, inputs),
                *map(address_of, outputs),
            )

        def commands() -> Iterator[Command]:
            size = room if workspace else 0
            wrt = tuple(name for name, out in zip(self._names, outputs, strict=True) if out is not None)
            request = self._requests.get((wrt, size)) or self._backward(wrt, size, stream)
            return self._commands(request, inputs, outputs, workspace, masks, self._read_rows(saved))

        self._launch(key, stream, commands)

    def _commands(
        self,
        request: Request,
        inputs: Inputs,
        outputs: Results | Gradients,
        workspace: int,
        masks: MaskArrays | None,
        rows: Mapping[str, tuple[int, ...]] = NO_ROWS,
    ) -> Iterator[Command]:
        """What the request runs on these arrays, in order; `rows` are those that a backward reads, by field."""
        if not request.workspace:
            workspace = 0
        addresses = tuple([x.ptr for x in inputs])
        read: list[tuple[str, int]] = []
        if masks is not None and request.launches:
            for packed, packer in zip(self.plan.mask_bits, request.bits):
                yield from self._pack_bits(packed, packer, masks, workspace)
            bits = {packed.array: workspace + packed.offset for packed in self.plan.mask_bits}
            read = [(name, bits.get(name) or masks[name].ptr) for name in self._mask_arrays]
        for kernel, step in request.launches:
            if step.placed and not workspace:
                raise ValueError("workspace: got none; these gradients need what backward_bytes says")
            fields = [(field, getattr(outputs, name).ptr) for field, name in step.outputs]
            fields += [(field, workspace + offset) for field, offset in step.placed]
            if kernel.masked:
                fields += read
            if step.cleared:
                offset, size = step.cleared
                yield Command(self._runtime.memsetAsync, (workspace + offset, 0, size))
            given = [(field, rows[field]) for field in step.reads]
            copies = tuple([workspace + offset for _, offset, _ in step.copies])
            yield from kernel.commands(addresses, fields, given, copies)
        for name in request.zeros:
            out = getattr(outputs, name)
            yield Command(self._runtime.memsetAsync, (out.ptr, 0, ELEMENT_BYTES[out.dtype] * prod(out.shape)))

    def _read_rows(self, saved: Saved) -> dict[str, tuple[int, ...]]:
        """What a backward reads of rows, by field: address and strides, in the order of `_WHERE`."""
        found, lead, layout = {}, self.problem.rank - 1, self.problem.layout
        for (field, instead), x in zip(self._saved, saved, strict=True):
            if x is None and instead:
                x = getattr(saved, instead)
            if x is None:
                found[field] = _NOWHERE
                continue
            axes = len(x.strides)
            strides = canonical_strides(x.strides, axes, layout, axes - lead)
            found[field] = (x.ptr, *strides, *(0,) * (len(_AXES) - len(strides)))
        return found

    def _pack_bits(self, packed: PackedMask, kernel: _Kernel, masks: MaskArrays, workspace: int) -> Iterator[Command]:
        """Have an array packed to bits at its place in the workspace."""
        mask = masks[packed.array]
        if 0 in mask.shape:
            return
        if not workspace:
            raise ValueError(
                f"workspace: got none; a {packed.array} needs the bytes that workspace_bytes and backward_bytes say"
            )
        batch = mask.strides[0] if len(mask.strides) > 1 else 0
        fields = (
            ("bytes", mask.ptr),
            ("words", workspace + packed.offset),
            ("batch", batch),
            ("column", mask.strides[-1]),
            ("count", mask.shape[-1]),
        )
        yield from kernel.commands((), fields)

    def _forward(self, workspace: bool, stream: int | None) -> Request:
        steps = self.plan.forward_steps(workspace)
        return self._requests.setdefault(workspace, self._loaded(steps, stream))

    def _backward(self, wrt: tuple[str, ...], room: int | None, stream: int | None) -> Request:
        size = inf if room is None else room
        loaded = self._loaded(self.plan.backward_steps(wrt, size), stream)
        found = loaded._replace(zeros=self.plan.zeros(wrt), workspace=self.plan.works_in(size))
        return self._requests.setdefault((wrt, room), found)

    def _loaded(self, steps: tuple[Step, ...], stream: int | None) -> Request:
        """All kernels before any launch: what cannot be built must fail before anything is written."""
        launches = tuple((self._kernel(step.kernels, stream, step.copies), step) for step in steps)
        return Request(launches, tuple(self._kernel((x.kernel,), stream) for x in self.plan.mask_bits))

    def _kernel(
        self,
        plans: tuple[KernelPlan, ...],
        stream: int | None,
        copies: tuple[tuple[str, int, Operand], ...] = (),
    ) -> _Kernel:
        """Loaded kernels; `stream`, unless None, is where they are about to run."""
        found = self._kernels.get(plans)
        if found:
            return found
        if stream is not None:
            refuse_in_capture(stream, plans[0].name, "warmup")
        return self._kernels.setdefault(plans, _Kernel(self.problem, *plans, copies=copies))


def refuse_in_capture(stream: int, kernel: str, warmup: str) -> None:
    """Refuse to load a kernel for a stream that a CUDA graph captures; what to call before is of the public names."""
    if import_cupy().cuda.runtime.streamIsCapturing(stream):
        raise CaptureError(
            f"the {kernel} kernel of this problem is not loaded, and loading cannot be captured into a CUDA graph: "
            f"call streamkl_cupy.{warmup}(...) with the same arrays and options before the capture"
        )


def address_of(view: ArrayView | None) -> int:
    """Of an array of a call; 0 where there is none."""
    return 0 if view is None else view.ptr


def _mask_key(masks: MaskArrays) -> tuple[Any, ...]:
    """What a call may differ by in the arrays of its mask."""
    return tuple([(x.ptr, x.shape, x.strides) for x in masks.values()])


def _mask_words(problem: Problem, lists: Sequence[int] = ()) -> tuple[list[int], list[tuple[int, str]]]:
    """What kernels read of the mask: per part integers, zeros for arrays, and `lists` where it has such; and the arrays
    by word."""
    words: list[int] = []
    arrays: list[tuple[int, str]] = []
    for part in parts_of(problem.mask):
        words += [problem.mask[name] for name in part.params]
        for array in part.arrays:
            arrays.append((len(words), array.name))
            words.append(0)
        pattern = problem.mask.pattern
        if part.listed and pattern is not None:
            words += [*lists, pattern.heads]
    return words + [0] * (MASK_WORDS - len(words)), arrays


def _tile_lists(problem: Problem, plan: KernelPlan) -> Lists | None:
    """What the kernel walks of the pattern, in the current GPU's memory; None where there is no pattern."""
    pattern = problem.mask.pattern
    tile = plan.tile
    if pattern is None or tile is None:
        return None
    # Imported here, because most calls have none.
    from .kernels.tile_lists import lists_for

    by_keys, schedule = plan.task.stationary == "k", plan.schedule
    cut = (schedule.group, schedule.longest, tile.pairs)
    return lists_for(pattern, problem.device.index, tile.rows, tile.columns, by_keys, *cut)


def template(problem: Problem, plan: KernelPlan, lists: Lists | None = None) -> bytes:
    """The arguments of a kernel with zeros for what a call fills in; `lists` are those of the mask's pattern."""
    task, schedule = plan.task, plan.schedule
    numbers: dict[str, Value] = {
        "n.batch": problem.batch,
        "heads": problem.heads,
        "queries": problem.queries,
        "keys": problem.keys,
        "tiles": schedule.tiles,
        "head_group": schedule.head_group,
        "splits": schedule.splits,
        "sequences": problem.sequences,
        "mask": _mask_words(problem, lists.pointers if lists else ())[0],
        "entries": problem.batch,
        "out_scale": Work(problem, task).side.scale,
        "partial_slots": schedule.partial_slots,
        "heads_together": schedule.heads_together,
        "units": lists.units if lists else 0,
        "units_alike": int(problem.mask.pattern is not None and problem.mask.pattern.heads == 1),
        "share_steps": schedule.share_steps,
        # Of an array that is packed to bits.
        **dict.fromkeys(("batch", "column", "count"), 0),
    }
    for name, side in problem.sides.items():
        # Of the only side there is, without its name.
        of = f"{name}_" if len(problem.sides) > 1 else ""
        numbers[f"{of}group"] = max(side.group, 1)
        # What joins splits has the same arguments whatever a score reads: it asks for none of these.
        of_score = {"scale": 0.0, **score_of(side).numbers(side.scale)}
        numbers |= {f"{of}numbers.{x}": value for x, value in of_score.items()}
    strides: dict[str, tuple[int, ...]] = {x: problem.operand(x).strides for x in problem.operation.names}
    for name, side in problem.sides.items():
        if side.given:
            strides |= {f"{name}_q": side.q.strides, f"{name}_k": side.k.strides}
    strides |= _gradient_strides(problem, task) if task.side else _result_strides(problem)
    numbers |= {f"{name}.{axis}": step for name, steps in strides.items() for axis, step in zip(_AXES, steps)}
    return plan.args.pack({name: value for name, value in numbers.items() if name in plan.args})


def _result_strides(problem: Problem) -> dict[str, tuple[int, ...]]:
    """By field, those of what a forward writes, all of it compact; of what it does not, some too."""
    op, rows, more = problem.operation, problem.row_strides(), extra_rows(problem)
    found = {field: rows for field, _ in op.forward.outputs} | {field: rows for _, field, _ in op.asked_rows}
    found |= {name: problem.compact_vector_strides(letter) for name, letter in op.vectors}
    return found | {name: tuple(x * prod(more.get(name, (0,))) for x in rows) for name in op.ruled_rows}


def _gradient_strides(problem: Problem, task: Task) -> dict[str, tuple[int, ...]]:
    """By field, those of what a backward writes, all of it compact, and of what kernels have made of rows; what it
    does not write, and rows that come as a call has them, have some too."""
    op, heads, rows = problem.operation, problem.heads, problem.queries
    found = dict.fromkeys(op.saved_fields, (heads * rows, rows, 1, 1))
    return found | {
        field: problem.compact_input_strides(name) for x in (*op.gradients, task) for field, name in x.outputs
    }


@contextmanager
def in_context(index: int) -> Iterator[None]:
    """Make a GPU's primary context current, for launches of the driver's, and afterwards again whatever was."""
    driver = import_cupy().cuda.driver
    before = _make_current(driver, _primary_context(index))
    try:
        yield
    finally:
        _put_back(driver, before)

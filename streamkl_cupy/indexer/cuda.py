"""Running the steps of an indexer's plan: kernels loaded, arguments packed, launches recorded.

What is launched in which order, and what it reads, says `steps.py`.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from typing import Any

from ..arrays import ITEMSIZE, ArrayView, Gradients, Inputs, MaskArrays, Results, Saved
from ..compiler.nvrtc import import_cupy, load
from ..kernels.base import Box, KernelText
from ..kernels.gpus import device_facts
from ..kernels.structs import TENSOR_MAP, Struct, Value
from ..kernels.tensor_maps import encode
from ..launch import Command, Launches, address_of, in_context, refuse_in_capture
from .plan import IndexerPlan, make_plan, start_of
from .problem import IndexProblem
from .steps import AXES, Array, Clear, Fields, Step, backward_steps, forward_steps


class Runner(Launches):
    """An IndexProblem made ready for one GPU. Thread-safe: calls share nothing that they change."""

    def __init__(self, problem: IndexProblem) -> None:
        super().__init__(problem.device.index)
        self.problem = problem
        self.index = problem.device.index
        self.facts = device_facts(self.index)
        self.launch = import_cupy().cuda.driver.launchKernel
        self.runtime = import_cupy().cuda.runtime
        self._plans: dict[tuple[str, ...], IndexerPlan] = {}
        self._handles: dict[KernelText, int] = {}
        # Of a forward, by (), and of gradients.
        self._steps: dict[tuple[str, ...], tuple[Step | Clear, ...]] = {}

    @property
    def plan(self) -> IndexerPlan:
        """What a forward runs."""
        return self.plan_for(())

    def plan_for(self, wrt: tuple[str, ...]) -> IndexerPlan:
        """The same with the gradients `wrt`."""
        return self._plans.get(wrt) or self._plans.setdefault(wrt, make_plan(self.problem, self.facts, wrt))

    @property
    def workspace_bytes(self) -> int:
        """Of a forward."""
        return self.plan.workspace_bytes

    def backward_bytes(self, wrt: tuple[str, ...]) -> int:
        """Bytes of workspace for these gradients."""
        return self.plan_for(wrt).backward_bytes

    def warmup(self, wrt: tuple[str, ...] = ()) -> None:
        """Compile and load all kernels of a plan."""
        plan = self.plan_for(wrt)
        with in_context(self.index):
            for kernel in dict.fromkeys((*plan.forward, *plan.backward)):
                self.loaded(kernel, None)

    def forward(
        self,
        inputs: Inputs,
        outputs: Results,
        stream: int,
        workspace: int = 0,
        masks: MaskArrays | None = None,
        key: tuple[Any, ...] | None = None,
    ) -> None:
        """Launch the forward; every element of the outputs is written."""
        if key is None:
            key = (workspace, None, *map(address_of, inputs), *map(address_of, outputs))

        def commands() -> Iterable[Command]:
            call = _Call(self, {"inputs": inputs, "outputs": outputs}, stream, workspace, self.workspace_bytes)
            return call.commands(self._steps_for((), forward_steps))

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
        """Launch the gradients that `outputs` has room for; every element of them is written."""
        if key is None:
            rows = tuple([None if x is None else (x.ptr, x.strides) for x in saved])
            key = ((workspace, rows), *map(address_of, inputs), *map(address_of, outputs))

        def commands() -> Iterable[Command]:
            wrt = tuple(name for name, out in zip(outputs._fields, outputs) if out is not None)
            arrays = {"inputs": inputs, "outputs": outputs, "saved": saved}
            call = _Call(self, arrays, stream, workspace, self.backward_bytes(wrt))
            return call.commands(self._steps_for(wrt, backward_steps))

        self._launch(key, stream, commands)

    def _steps_for(
        self, wrt: tuple[str, ...], steps: Callable[[IndexerPlan], Iterator[Step | Clear]]
    ) -> tuple[Step | Clear, ...]:
        return self._steps.get(wrt) or self._steps.setdefault(wrt, tuple(steps(self.plan_for(wrt))))

    def loaded(self, kernel: KernelText, stream: int | None) -> int:
        """The handle; `stream`, unless None, is where the kernel is about to run."""
        handle = self._handles.get(kernel)
        if handle is None:
            if stream is not None:
                refuse_in_capture(stream, kernel.name, "indexer_kl_warmup")
            loaded = load(kernel.text, kernel.symbol, kernel.arch, smem_bytes=kernel.smem_bytes)
            handle = self._handles[kernel] = loaded.handle
        return handle


class _Call:
    """A call with its arrays."""

    def __init__(self, runner: Runner, arrays: Mapping[str, Any], stream: int, workspace: int, room: int) -> None:
        if room and not workspace:
            raise ValueError(f"workspace: got none; this call needs {room} bytes")
        self.runner, self.problem, self.stream = runner, runner.problem, stream
        self.arrays = arrays
        self.workspace = start_of(workspace)
        # Steps in a row have mostly the same fields, and nearly all the same tensors.
        self._last: tuple[Struct, Fields, Any] | None = None
        self._tensors: dict[int, dict[str, Value]] = {}

    def commands(self, steps: Iterable[Step | Clear]) -> Iterator[Command]:
        """What the steps run, in order."""
        for step in steps:
            if isinstance(step, Clear):
                yield Command(self.runner.runtime.memsetAsync, self._cleared(step))
            else:
                yield self._launch(step)

    def _cleared(self, step: Clear) -> tuple[int, int, int]:
        if step.place is not None:
            return self.workspace + step.place.at, 0, step.place.bytes
        out: ArrayView = getattr(self.arrays["outputs"], step.output)
        return out.ptr, 0, ITEMSIZE[out.dtype] * prod(out.shape)

    def _launch(self, step: Step) -> Command:
        kernel, handle = step.kernel, self.runner.loaded(step.kernel, self.stream)
        last = self._last
        if last and last[0] is kernel.args and last[1] is step.fields and not kernel.boxes:
            packed = last[2]
        else:
            values = self._values(step.fields)
            values |= {f"{box.name}.words": self._map(box) for box in kernel.boxes}
            packed = _packed(kernel.args, values)
        if not kernel.boxes:
            self._last = kernel.args, step.fields, packed
        parameters = ctypes.c_void_p(ctypes.addressof(packed))
        x, y, z = (*step.grid, 1, 1)[:3]
        shape = (x, y, z, kernel.threads, 1, 1, kernel.smem_bytes)
        end = (ctypes.addressof(parameters), 0)
        return Command(self.runner.launch, (handle, *shape), end, (packed, parameters))

    def _values(self, fields: Fields) -> dict[str, Value]:
        """Fields as they are packed."""
        tensors = self._tensors.get(id(fields.arrays))
        if tensors is None:
            tensors = self._tensors[id(fields.arrays)] = {}
            for name, array in fields.arrays.items():
                tensors |= self._tensor(name, array)
        start = self.workspace
        return {**fields.numbers, **tensors, **{name: (start + at) % 2**64 for name, at in fields.placed.items()}}

    def _tensor(self, name: str, array: Array) -> dict[str, Value]:
        """Strides and address of an array; zeros where it is not there."""
        view: ArrayView | None = getattr(self.arrays[array.of], array.name, None)
        if not array.axes:
            return {name: 0 if view is None else view.ptr}
        strides: dict[str, int] = {}
        address = 0
        if view is not None:
            strides = self.problem.strides(array.axes.replace("-", ""), view)
            address = view.ptr - ITEMSIZE.get(view.dtype, 0) * strides.get("M", 0) * array.first_row
        found: dict[str, Value] = {f"{name}.{axis}": strides.get(x, 0) for axis, x in zip(AXES, array.axes)}
        return found | {f"{name}.pointer": address % 2**64}

    def _map(self, box: Box) -> tuple[int, ...]:
        view = getattr(self.arrays["inputs"], box.name)
        return _WORDS.unpack(encode(view.ptr, self.problem.operand(box.name), self.problem["B"], box))


_WORDS = struct.Struct(f"={TENSOR_MAP.size // 8}Q")


def _packed(args: Struct, values: Mapping[str, Value]) -> Any:
    data = args.pack({name: value for name, value in values.items() if name in args})
    return (ctypes.c_char * len(data)).from_buffer_copy(data)

"""Running a Plan: kernels loaded once, arguments packed, launches put on the caller's stream.

A kernel takes one struct by value. Strides, extents and scales of a Problem never change, so they are packed once into
a template; a call copies it and fills in the pointers. The copy goes to the driver's launch directly: converting
arguments one by one, as CuPy's kernel objects must, costs the host more than the launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from math import inf, prod
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from .arch import ELEMENT_BYTES, SIDES, DeviceFacts
from .compile import import_cupy, load
from .errors import CaptureError, DriverError
from .planning import KernelPlan, Plan, make_plan
from .problem import INPUT_NAMES, Operand, Problem, canonical_strides
from .rules.masks import parts_of
from .structs import KEY_BITS, MASK_WORDS, OUT_ROWS, SAVED_ROWS, TENSOR3, TENSOR_MAP, Value
from .tensor_maps import encode

if TYPE_CHECKING:
    from .arrays import Gradients, Inputs, MaskArrays, RowStats, Saved
    from .pattern_memory import Lists

LOG2E = 1.4426950408889634
UNSPLIT = "unsplit forward"

# Values of a row as results and saved rows name them.
_VIEWS = {"value": "kl"}
_out_rows = attrgetter(*(_VIEWS.get(name, name) for name in OUT_ROWS))
_saved_rows = attrgetter(*(_VIEWS.get(name, name) for name in SAVED_ROWS))
_OUT_POINTERS = tuple(f"{name}.pointer" for name in OUT_ROWS)
_AXES = ("batch", "head", "row", "column")


@lru_cache(maxsize=64)
def device_facts(index: int) -> DeviceFacts:
    """Facts of an installed GPU.

    Raises:
        CompilerError: there is no CuPy.
        DriverError: there is no driver or no such GPU.
    """
    cupy = import_cupy()
    runtime = cupy.cuda.runtime
    try:
        properties = runtime.getDeviceProperties(index)
        smem_per_block = runtime.deviceGetAttribute(runtime.cudaDevAttrMaxSharedMemoryPerBlockOptin, index)
    except runtime.CUDARuntimeError as error:
        raise DriverError(
            f"GPU {index} cannot be used: {error}. Check nvidia-smi for a driver and a device, "
            "or pass NumPy arrays to compute on the CPU"
        ) from error
    return DeviceFacts(
        compute_capability=(properties["major"], properties["minor"]),
        smem_per_block=smem_per_block,
        multiprocessors=properties["multiProcessorCount"],
        name=properties["name"].decode(),
    )


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


class _Current:
    """Makes a context current, and afterwards again whatever was.

    Launches, modules and tensor maps are the driver's, which knows no default GPU: a thread that has never used CUDA
    has no context at all, though the runtime names a current GPU there. What was is put back through the driver too,
    because the runtime would make a context on a GPU that the program may not use.
    """

    __slots__ = ("_before", "_context", "_driver")

    def __init__(self, driver: Any, context: int) -> None:
        self._driver, self._context = driver, context

    def __enter__(self) -> None:
        self._before = self._driver.ctxGetCurrent()
        if self._before != self._context:
            self._driver.ctxSetCurrent(self._context)

    def __exit__(self, *error: object) -> None:
        if self._before != self._context:
            self._driver.ctxSetCurrent(self._before)


class _Kernel:
    """Kernels that run one after the other on the same arguments, mostly one: loaded, with their launch shapes and the
    constant part of the arguments."""

    __slots__ = ("_launch", "_lists", "_maps", "_operands", "_rows", "_steps", "_template", "_type", "_words", "plan")

    def __init__(self, problem: Problem, *plans: KernelPlan) -> None:
        self.plan = plan = plans[0]
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
            (8 * args.words[f"{name}.words"], INPUT_NAMES.index(name), _Maps(problem.operand(name), problem.batch, box))
            for name, box in plan.boxes
        )
        self._lists = _tile_lists(problem, plan)
        self._template = template(problem, plan, self._lists.pointers if self._lists else ())
        self._type = ctypes.c_uint64 * (args.size // 8)
        self._words = dict(args.words)
        if args is not KEY_BITS:
            mask = args.words["mask"]
            self._words |= {name: mask + i for i, name in _mask_words(problem)[1]}
        self._operands = tuple(
            self._words[f"{name}.pointer"] for name in INPUT_NAMES if f"{name}.pointer" in self._words
        )
        self._rows = 8 * self._words.get(f"{SAVED_ROWS[0]}.pointer", 0)

    def __call__(
        self, inputs: tuple[int, ...], others: Iterable[tuple[str, int]], stream: int, rows: bytes = b""
    ) -> None:
        """Launch.

        Args:
            inputs: addresses of the four operands.
            others: (field, or array of the mask; what it is in this call) of everything else.
            stream: handle of the stream.
            rows: packed row vectors in place of the template's.
        """
        packed = self._type.from_buffer_copy(self._template)
        address = ctypes.addressof(packed)
        for offset, operand, maps in self._maps:
            ctypes.memmove(address + offset, maps[inputs[operand]], TENSOR_MAP.size)
        if rows:
            ctypes.memmove(address + self._rows, rows, len(rows))
        for word, pointer in zip(self._operands, inputs):
            packed[word] = pointer
        words = self._words
        for name, value in others:
            packed[words[name]] = value
        parameters = ctypes.c_void_p(address)
        for handle, shape in self._steps:
            self._launch(handle, *shape, stream, ctypes.addressof(parameters), 0)
        if self._lists:
            self._lists.used_on(stream)


class _Maps(dict[int, bytes]):
    """Tensor maps of one operand by address. A training loop reuses few addresses; a bound keeps odd programs small."""

    LIMIT = 256

    def __init__(self, operand: Operand, batch: int, box_rows: int) -> None:
        super().__init__()
        self._shape = (operand, batch, box_rows)

    def __missing__(self, pointer: int) -> bytes:
        if len(self) >= self.LIMIT:
            self.clear()
        return self.setdefault(pointer, encode(pointer, *self._shape))


class Runner:
    """A Problem made ready for one GPU. Thread-safe: calls share nothing that they change."""

    def __init__(self, problem: Problem) -> None:
        cupy = import_cupy()
        self._runtime, self._driver = cupy.cuda.runtime, cupy.cuda.driver
        self._context = _primary_context(problem.device.index)
        self.problem = problem
        self.plan: Plan = make_plan(problem, device_facts(problem.device.index))
        self.workspace_bytes = self.plan.workspace_bytes
        self._kernels: dict[str, _Kernel] = {}
        arrays = [array for part in parts_of(problem.mask) for array in part.arrays]
        self._mask_arrays = tuple(array.name for array in arrays)
        self._bits = next((array.name for array in arrays if array.bits), "")
        self._empty_rows = 0 in (problem.batch, problem.heads, problem.queries)

    def warmup(self, wrt: tuple[str, ...] = ()) -> None:
        """Compile, load and configure the forward and the gradients `wrt`; nothing is left for a first call to do."""
        with _Current(self._driver, self._context):
            split = (UNSPLIT, "combine") if self.plan.combine else ()
            fused = [fused.side for fused in self.plan.fused if all(x in wrt for x in fused.names)]
            bits = ("key_bits",) if self.plan.key_bits else ()
            for name in (*bits, "forward", *split, *fused, *wrt):
                self._kernel(name, None)

    def backward_bytes(self, wrt: tuple[str, ...]) -> int:
        """Bytes of workspace for these gradients."""
        return self.plan.backward_bytes(wrt)

    def forward(
        self, inputs: Inputs, outputs: RowStats, stream: int, workspace: int = 0, masks: MaskArrays | None = None
    ) -> None:
        """Launch the forward; every element of the outputs is written.

        `workspace` is the address of `plan.workspace_bytes` bytes; without them the keys are not split, and a mask of
        keys cannot be. `masks` has the arrays that the problem's mask names.
        """
        if self._empty_rows:
            return
        name = "forward" if workspace or not self.plan.combine else UNSPLIT
        with _Current(self._driver, self._context):
            kernel = self._kernels.get(name) or self._kernel(name, stream)
            combine = None
            if workspace and self.plan.combine:
                combine = self._kernels.get("combine") or self._kernel("combine", stream)
            pointers = [(name, x.ptr) for name, x in zip(_OUT_POINTERS, _out_rows(outputs))]
            if masks is not None:
                self._pack_bits(masks, workspace, stream)
                pointers += self._mask_pointers(masks, workspace)
            if combine is None:
                kernel(_addresses(inputs), pointers, stream)
            else:
                pointers.append(("workspace", workspace + self.plan.mask_bytes))
                kernel(_addresses(inputs), pointers, stream)
                combine(_addresses(inputs), pointers, stream)

    def _pack_bits(self, masks: MaskArrays, workspace: int, stream: int) -> None:
        """Have a mask of keys packed to bits at the start of the workspace, if there is one."""
        mask = getattr(masks, self._bits, None)
        if mask is None or 0 in mask.shape:
            return
        if not workspace:
            raise ValueError(
                f"workspace: got none; a {self._bits} needs the bytes that workspace_bytes and backward_bytes say"
            )
        kernel = self._kernels.get("key_bits") or self._kernel("key_bits", stream)
        batch = mask.strides[0] if len(mask.strides) > 1 else 0
        kernel((), (("keys", mask.ptr), ("words", workspace), ("batch", batch), ("column", mask.strides[-1])), stream)

    def _mask_pointers(self, masks: MaskArrays | None, workspace: int) -> list[tuple[str, int]]:
        """Where kernels find what the mask reads; keys as bits, from the start of the workspace."""
        if masks is None:
            return []
        return [(name, workspace if name == self._bits else getattr(masks, name).ptr) for name in self._mask_arrays]

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
        """Launch the gradients that `outputs` has room for; every element of them is written.

        `workspace` is the address of `room` bytes, `backward_bytes(wrt)` unless given. With less than these, blocks
        share no lists, with still less each gradient has its own kernel, and with none a mask of keys cannot be.
        """
        problem = self.problem
        wanted = {name: out for name, out in zip(INPUT_NAMES, outputs, strict=True) if out is not None}
        with _Current(self._driver, self._context):
            # All kernels first: what cannot be built must fail before anything is written.
            launches: list[tuple[_Kernel, list[tuple[str, int]], int]] = []
            left = inf if room is None else room - self.plan.mask_bytes
            memory = workspace + self.plan.mask_bytes if workspace and left >= 0 else 0
            for fused in self.plan.fused if memory else ():
                q, k = fused.names
                share_bytes = fused.kernels[1].share_bytes
                sums = fused.workspace_bytes - share_bytes
                if q in wanted and k in wanted and sums <= left:
                    kernel = self._kernels.get(fused.side) or self._kernel(fused.side, stream)
                    pointers = [
                        ("out.pointer", wanted.pop(k).ptr),
                        ("out_q.pointer", wanted.pop(q).ptr),
                        ("workspace", memory),
                    ]
                    launches.append((kernel, pointers, memory + sums if sums + share_bytes <= left else 0))
            for name, out in wanted.items():
                kernel = self._kernels.get(name) or self._kernel(name, stream)
                if 0 not in out.shape and problem.heads:
                    launches.append(
                        (kernel, [("out.pointer", out.ptr)], memory if kernel.plan.share_bytes <= left else 0)
                    )
            rows = _row_vectors(problem, saved)
            if masks is not None and problem.heads:
                self._pack_bits(masks, memory and workspace, stream)
            for kernel, pointers, shares in launches:
                pointers += self._mask_pointers(masks, workspace)
                pointers += self._share_pointers(kernel.plan, shares, stream)
                kernel(_addresses(inputs), pointers, stream, rows)
            for out in wanted.values():
                if problem.heads == 0 and 0 not in out.shape:
                    self._runtime.memsetAsync(out.ptr, 0, ELEMENT_BYTES[out.dtype] * prod(out.shape), stream)

    def _share_pointers(self, plan: KernelPlan, memory: int, stream: int) -> list[tuple[str, int]]:
        """Where blocks share lists, if any do and there is memory for it; the counters are cleared."""
        if not (plan.share_bytes and memory):
            return []
        self._runtime.memsetAsync(memory, 0, plan.arrivals_bytes, stream)
        return [("share_arrivals", memory), ("share_sums", memory + plan.arrivals_bytes)]

    def _kernel_plans(self, name: str) -> tuple[KernelPlan, ...]:
        forward = self.plan.forward
        if name == UNSPLIT:
            return (replace(forward, splits=1, blocks=forward.blocks // forward.splits),)
        if name == "combine" and self.plan.combine:
            return (self.plan.combine,)
        if name == "key_bits" and self.plan.key_bits:
            return (self.plan.key_bits,)
        for fused in self.plan.fused:
            if name == fused.side:
                return fused.kernels
        return (forward if name == "forward" else self.plan.gradient(name),)

    def _kernel(self, name: str, stream: int | None) -> _Kernel:
        plans = self._kernel_plans(name)
        if stream is not None and self._runtime.streamIsCapturing(stream):
            raise CaptureError(
                f"the {name} kernel of this problem is not loaded, and loading cannot be captured into a CUDA graph: "
                "call streamkl_cupy.warmup(...) with the same arrays and options before the capture"
            )
        return self._kernels.setdefault(name, _Kernel(self.problem, *plans))


def _addresses(inputs: Inputs) -> tuple[int, ...]:
    return (inputs[0].ptr, inputs[1].ptr, inputs[2].ptr, inputs[3].ptr)


def _mask_words(problem: Problem, lists: Sequence[int] = ()) -> tuple[list[int], list[tuple[int, str]]]:
    """What kernels read of the mask: per part integers, zeros for arrays, and `lists` last; and the arrays by word."""
    words: list[int] = []
    arrays: list[tuple[int, str]] = []
    for part in parts_of(problem.mask):
        words += [problem.mask[name] for name in part.params]
        for array in part.arrays:
            arrays.append((len(words), array.name))
            words.append(0)
    # The part that has a pattern is the last of the registry.
    pattern = problem.mask.pattern
    words += [] if pattern is None else [*lists, pattern.heads]
    return words + [0] * (MASK_WORDS - len(words)), arrays


def _tile_lists(problem: Problem, plan: KernelPlan) -> Lists | None:
    """What the kernel walks of the pattern, in the current GPU's memory; None where there is no pattern."""
    pattern = problem.mask.pattern
    if pattern is None or plan.name in ("combine", "key_bits"):
        return None
    # Imported here, because most calls have none.
    from .pattern_memory import lists_for

    by_keys = not dict(plan.constants)["SKL_ROWS_ARE_QUERIES"]
    tile = plan.tile
    return lists_for(pattern, problem.device.index, tile.rows, tile.columns, by_keys, plan.group, plan.longest)


def template(problem: Problem, plan: KernelPlan, lists: Sequence[int] = ()) -> bytes:
    """The arguments of a kernel with zeros for what a call fills in; `lists` are those of the mask's pattern."""
    if plan.args is KEY_BITS:
        return KEY_BITS.pack({"batch": 0, "column": 0, "entries": problem.batch, "count": problem.keys})
    side = problem.teacher if plan.name.startswith("teacher") else problem.student
    numbers: dict[str, Value] = {
        "n.batch": problem.batch,
        "heads": problem.heads,
        "queries": problem.queries,
        "keys": problem.keys,
        "teacher_group": max(problem.teacher.group, 1),
        "student_group": max(problem.student.group, 1),
        "tiles": plan.tiles,
        "head_group": plan.head_group,
        "splits": plan.splits,
        "sequences": problem.sequences,
        "mask": _mask_words(problem, lists)[0],
        "teacher_scale": problem.teacher.scale * LOG2E,
        "student_scale": problem.student.scale * LOG2E,
        "out_scale": side.scale,
        "share_slots": plan.share_slots,
    }
    out = {"out": f"{plan.name}_k", "out_q": f"{plan.name}_q"} if plan.name in SIDES else {"out": plan.name}
    strides: dict[str, tuple[int, ...]] = {name: problem.operand(name).strides for name in INPUT_NAMES}
    strides |= dict.fromkeys((*OUT_ROWS, *SAVED_ROWS), problem.row_strides())
    strides |= {name: problem.compact_input_strides(x) for name, x in out.items() if x in INPUT_NAMES}
    numbers |= {f"{name}.{axis}": step for name, steps in strides.items() for axis, step in zip(_AXES, steps)}
    return plan.args.pack({name: value for name, value in numbers.items() if name in plan.args})


def _row_vectors(problem: Problem, saved: Saved) -> bytes:
    """Upstream gradient, log-sum-exps and value as the kernel's row vectors; an absent value is never read."""
    absent = saved.teacher_lse
    return b"".join(
        TENSOR3.packer.pack(y.ptr, *canonical_strides(y.strides, problem.rank - 1, problem.layout, trailing=0))
        for y in (x or absent for x in _saved_rows(saved))
    )

"""Running a Plan: kernels loaded once, arguments packed, launches put on the caller's stream.

A kernel takes one struct by value. Strides, extents and scales of a Problem never change, so they are packed once into
a template; a call copies it and fills in the pointers. The copy goes to the driver's launch directly: converting
arguments one by one, as CuPy's kernel objects must, costs the host more than the launch.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import lru_cache
from math import inf, prod
from typing import TYPE_CHECKING, Any

from .arch import ELEMENT_BYTES, MASK_WORDS, SIDES, DeviceFacts
from .compile import import_cupy, load
from .errors import CaptureError, DriverError
from .masks import parts_of
from .planning import KernelPlan, Plan, make_plan
from .problem import INPUT_NAMES, Operand, Problem, canonical_strides
from .source import flatten
from .tensor_maps import MAP_BYTES, encode

if TYPE_CHECKING:
    from .arrays import ArrayView, Gradients, Inputs, MaskArrays, RowStats, Saved
    from .pattern_memory import Lists

LOG2E = 1.4426950408889634
UNSPLIT = "unsplit forward"

# The structs of cuda_src/common/args.cuh, field by field.
_TENSOR4 = struct.Struct("=Q4q")
_TENSOR3 = struct.Struct("=Q3q")
_EXTENTS = struct.Struct(f"=10i{MASK_WORDS}q")
_FORWARD_TAIL = struct.Struct("=2fQ")
_GRADIENT_TAIL = struct.Struct("=3fi2Q")
_KEY_BITS = struct.Struct("=2Q2q2i")

# Where pointers lie in the structs, counted in 8-byte words.
_OPERANDS = tuple(i * _TENSOR4.size // 8 for i in range(4))
_ROWS = tuple((4 * _TENSOR4.size + i * _TENSOR3.size) // 8 for i in range(4))
_OUT = (4 * _TENSOR4.size + 4 * _TENSOR3.size) // 8
_OUT_Q = _OUT + (_TENSOR4.size + _EXTENTS.size + _GRADIENT_TAIL.size) // 8
_FUSED_WORKSPACE = _OUT_Q + _TENSOR4.size // 8
_SHARES = _OUT_Q - 2  # the counters, then the sums
_MASK = {
    "forward": (4 * _TENSOR4.size + 3 * _TENSOR3.size + _EXTENTS.size) // 8 - MASK_WORDS,
    "gradient": (5 * _TENSOR4.size + 4 * _TENSOR3.size + _EXTENTS.size) // 8 - MASK_WORDS,
}
_WORKSPACE = (4 * _TENSOR4.size + 3 * _TENSOR3.size + _EXTENTS.size + _FORWARD_TAIL.size) // 8 - 1


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


@lru_cache(maxsize=1024)
def _text(entry: str, constants: tuple[tuple[str, Any], ...], slots: tuple[tuple[str, Any], ...]) -> str:
    """The CUDA text of a kernel, read and put together once: other offsets, lengths and scales run the same one."""
    return flatten(entry, dict(constants), dict(slots))


class _Kernel:
    """Kernels that run one after the other on the same arguments, mostly one: loaded, with their launch shapes and the
    constant part of the arguments."""

    __slots__ = ("_base", "_launch", "_lists", "_maps", "_steps", "_template", "_type", "mask_words", "plan")

    def __init__(self, problem: Problem, *plans: KernelPlan) -> None:
        self.plan = plan = plans[0]
        text = _text(plan.entry, plan.constants, plan.slots)
        self._launch = import_cupy().cuda.driver.launchKernel
        self._steps = tuple(
            (
                load(text, step.symbol, step.arch, smem_bytes=step.smem_bytes).handle,
                (step.blocks, 1, 1, step.threads, 1, 1, step.smem_bytes),
            )
            for step in plans
        )
        self._maps = tuple(_Maps(problem.operand(name), problem.batch, box) for name, box in plan.boxes)
        self._base = len(self._maps) * MAP_BYTES
        self._lists = _tile_lists(problem, plan)
        lists = self._lists.pointers if self._lists else ()
        first = _MASK["forward" if plan.name in ("forward", "combine") else "gradient"]
        # (word of the struct, name) of what the mask reads from memory
        self.mask_words = tuple((first + i, name) for i, name in _mask_words(problem)[1])
        self._template = (bytes(self._base) + _template(problem, plan, lists)).ljust(plan.args_bytes, b"\0")
        self._type = ctypes.c_uint64 * (plan.args_bytes // 8)

    def __call__(
        self, inputs: tuple[int, ...], others: Iterable[tuple[int, int]], stream: int, rows: bytes = b""
    ) -> None:
        """Launch.

        Args:
            inputs: addresses of the four operands.
            others: (word of the struct, address) of every other array.
            stream: handle of the stream.
            rows: packed row vectors in place of the template's.
        """
        packed = self._type.from_buffer_copy(self._template)
        base = self._base
        if base:
            address = ctypes.addressof(packed)
            for i, maps in enumerate(self._maps):
                ctypes.memmove(address + i * MAP_BYTES, maps[inputs[i]], MAP_BYTES)
        if rows:
            ctypes.memmove(ctypes.byref(packed, base + 8 * _ROWS[0]), rows, len(rows))
        base //= 8
        for word, pointer in zip(_OPERANDS, inputs):
            packed[base + word] = pointer
        for word, pointer in others:
            packed[base + word] = pointer
        parameters = ctypes.c_void_p(ctypes.addressof(packed))
        for handle, shape in self._steps:
            self._launch(handle, *shape, stream, ctypes.addressof(parameters), 0)
        if self._lists:
            self._lists.used_on(stream)


class _KeyBits:
    """Packs a mask of keys at the start of a workspace."""

    __slots__ = ("_launch", "_shape", "_sizes", "_type")

    def __init__(self, problem: Problem, plan: KernelPlan) -> None:
        text = _text(plan.entry, plan.constants, plan.slots)
        self._launch = import_cupy().cuda.driver.launchKernel
        kernel = load(text, plan.symbol, plan.arch).handle
        self._shape = (kernel, plan.blocks, 1, 1, plan.threads, 1, 1, 0)
        self._sizes = (problem.batch, problem.keys)
        self._type = ctypes.c_uint64 * (plan.args_bytes // 8)

    def __call__(self, mask: ArrayView, workspace: int, stream: int) -> None:
        if 0 in self._sizes:
            return
        if not workspace:
            raise ValueError(
                "workspace: got none; a key_mask needs the bytes that workspace_bytes and backward_bytes say"
            )
        batch = mask.strides[0] if len(mask.strides) > 1 else 0
        packed = self._type.from_buffer_copy(_KEY_BITS.pack(mask.ptr, workspace, batch, mask.strides[-1], *self._sizes))
        parameters = ctypes.c_void_p(ctypes.addressof(packed))
        self._launch(*self._shape, stream, ctypes.addressof(parameters), 0)


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
        self._kernels: dict[str, Any] = {}
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
            pointers = [(word, x.ptr) for word, x in zip(_ROWS, outputs)]
            if masks is not None:
                self._pack_bits(masks, workspace, stream)
                pointers += _mask_pointers(kernel, masks, workspace)
            if combine is None:
                kernel(_addresses(inputs), pointers, stream)
            else:
                pointers.append((_WORKSPACE, workspace + self.plan.mask_bytes))
                kernel(_addresses(inputs), pointers, stream)
                combine(_addresses(inputs), pointers, stream)

    def _pack_bits(self, masks: MaskArrays, workspace: int, stream: int) -> None:
        if self.plan.key_bits:
            (self._kernels.get("key_bits") or self._kernel("key_bits", stream))(masks.key_mask, workspace, stream)

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
            launches: list[tuple[_Kernel, list[tuple[int, int]], int]] = []
            left = inf if room is None else room - self.plan.mask_bytes
            memory = workspace + self.plan.mask_bytes if workspace and left >= 0 else 0
            for fused in self.plan.fused if memory else ():
                q, k = fused.names
                share_bytes = fused.kernels[1].share_bytes
                sums = fused.workspace_bytes - share_bytes
                if q in wanted and k in wanted and sums <= left:
                    kernel = self._kernels.get(fused.side) or self._kernel(fused.side, stream)
                    pointers = [(_OUT, wanted.pop(k).ptr), (_OUT_Q, wanted.pop(q).ptr), (_FUSED_WORKSPACE, memory)]
                    launches.append((kernel, pointers, memory + sums if sums + share_bytes <= left else 0))
            for name, out in wanted.items():
                kernel = self._kernels.get(name) or self._kernel(name, stream)
                if 0 not in out.shape and problem.heads:
                    launches.append((kernel, [(_OUT, out.ptr)], memory if kernel.plan.share_bytes <= left else 0))
            rows = _row_vectors(problem, saved)
            if masks is not None and problem.heads:
                self._pack_bits(masks, memory and workspace, stream)
            for kernel, pointers, shares in launches:
                pointers += _mask_pointers(kernel, masks, workspace)
                pointers += self._share_pointers(kernel.plan, shares, stream)
                kernel(_addresses(inputs), pointers, stream, rows)
            for out in wanted.values():
                if problem.heads == 0 and 0 not in out.shape:
                    self._runtime.memsetAsync(out.ptr, 0, ELEMENT_BYTES[out.dtype] * prod(out.shape), stream)

    def _share_pointers(self, plan: KernelPlan, memory: int, stream: int) -> list[tuple[int, int]]:
        """Where blocks share lists, if any do and there is memory for it; the counters are cleared."""
        if not (plan.share_bytes and memory):
            return []
        self._runtime.memsetAsync(memory, 0, plan.arrivals_bytes, stream)
        return [(_SHARES, memory), (_SHARES + 1, memory + plan.arrivals_bytes)]

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

    def _kernel(self, name: str, stream: int | None) -> Any:
        plans = self._kernel_plans(name)
        if stream is not None and self._runtime.streamIsCapturing(stream):
            raise CaptureError(
                f"the {name} kernel of this problem is not loaded, and loading cannot be captured into a CUDA graph: "
                "call streamkl_cupy.warmup(...) with the same arrays and options before the capture"
            )
        kernel = _KeyBits(self.problem, *plans) if name == "key_bits" else _Kernel(self.problem, *plans)
        return self._kernels.setdefault(name, kernel)


def _addresses(inputs: Inputs) -> tuple[int, ...]:
    return (inputs[0].ptr, inputs[1].ptr, inputs[2].ptr, inputs[3].ptr)


def _mask_words(problem: Problem, lists: Sequence[int] = ()) -> tuple[list[int], list[tuple[int, str]]]:
    """What kernels read of the mask: per part integers, zeros for arrays, and `lists` last; and the arrays by word."""
    words: list[int] = []
    arrays: list[tuple[int, str]] = []
    for part in parts_of(problem.mask):
        words += [problem.mask[name] for name in part.params]
        for name in part.arrays:
            arrays.append((len(words), name))
            words.append(0)
    # The part that has a pattern is the last of the registry.
    pattern = problem.mask.pattern
    return words + ([] if pattern is None else [*lists, pattern.heads]), arrays


def _mask_pointers(kernel: _Kernel, masks: MaskArrays | None, workspace: int) -> list[tuple[int, int]]:
    """Where the kernel finds what the mask reads; keys as bits, from the start of the workspace."""
    if masks is None:
        return []
    return [(word, workspace if name == "key_mask" else getattr(masks, name).ptr) for word, name in kernel.mask_words]


def _tile_lists(problem: Problem, plan: KernelPlan) -> Lists | None:
    """What the kernel walks of the pattern, in the current GPU's memory; None where there is no pattern."""
    pattern = problem.mask.pattern
    if pattern is None or plan.name == "combine":
        return None
    # Imported here, because most calls have none.
    from .pattern_memory import lists_for

    by_keys = not dict(plan.constants)["SKL_ROWS_ARE_QUERIES"]
    tile = plan.tile
    return lists_for(pattern, problem.device.index, tile.rows, tile.columns, by_keys, plan.group, plan.longest)


def _template(problem: Problem, plan: KernelPlan, lists: Sequence[int] = ()) -> bytes:
    """The argument struct of a kernel with every pointer of a call zero; `lists` are those of the mask's pattern."""
    mask, _ = _mask_words(problem, lists)
    operands = b"".join(_TENSOR4.pack(0, *problem.operand(name).strides) for name in INPUT_NAMES)
    extents = _EXTENTS.pack(
        problem.batch,
        problem.heads,
        problem.queries,
        problem.keys,
        max(problem.teacher.group, 1),
        max(problem.student.group, 1),
        plan.tiles,
        plan.head_group,
        plan.splits,
        problem.sequences,
        *mask,
        *[0] * (MASK_WORDS - len(mask)),
    )
    scales = (problem.teacher.scale * LOG2E, problem.student.scale * LOG2E)
    rows = _TENSOR3.pack(0, *problem.row_strides())
    if plan.name in ("forward", "combine"):
        return operands + rows * 3 + extents + _FORWARD_TAIL.pack(*scales, 0)
    side = problem.teacher if plan.name.startswith("teacher") else problem.student
    out, *out_q = (
        _TENSOR4.pack(0, *problem.compact_input_strides(name))
        for name in ((f"{plan.name}_k", f"{plan.name}_q") if plan.name in SIDES else (plan.name,))
    )
    gradient = operands + rows * 4 + out + extents + _GRADIENT_TAIL.pack(*scales, side.scale, plan.share_slots, 0, 0)
    return gradient + out_q[0] + bytes(8) if out_q else gradient


def _row_vectors(problem: Problem, saved: Saved) -> bytes:
    """Upstream gradient, log-sum-exps and value as the kernel's four row vectors; an absent value is never read."""
    absent = saved.teacher_lse
    return b"".join(
        _TENSOR3.pack(x.ptr, *canonical_strides(x.strides, problem.rank - 1, problem.layout, trailing=0))
        for x in (saved.grad, saved.teacher_lse, saved.student_lse, saved.kl or absent)
    )

"""From described arrays to a launch: the checked form of a call, kept so that the next one like it is a lookup."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from . import arrays, hints, numpy_backend, validate
from .adapters import ADAPTERS
from .arrays import ArrayView, Gradients, Inputs, MaskArrays, RowStats, Saved, describe
from .errors import DriverError
from .locks import ForkLock, generation
from .problem import INPUT_NAMES, MASK_ARRAYS, Device, Options, Problem


class Ready(NamedTuple):
    """A checked call, with what its results look like."""

    runner: Any
    problem: Problem
    row_shape: tuple[int, ...]
    stat_dtype: str
    workspace_bytes: int


LIMIT = 1024
# From what a call looks like to its checked form, and from the problem to its runner: calls that differ only in what
# does not matter share one. Reads take no lock, because a single dictionary operation is safe in every thread.
_ready: dict[Any, Ready] = {}
_runners: dict[Problem, Any] = {}
_building = ForkLock()
_cuda_generation: int | None = None
"""`locks.generation` of the process that used CUDA first."""


def prepare(inputs: Inputs, chosen: Options, masks: MaskArrays | None = None) -> Ready:
    """The checked form of a call, or the error that says what is wrong with it."""
    a, b, c, d = inputs
    if d.device.kind == "cuda" and generation() != _cuda_generation:
        _check_fork()
    deterministic = chosen.deterministic
    if deterministic is None:
        deterministic = as_framework_says(c)
    # view[1:6] is framework, device, dtype, shape and strides; the address matters by its alignment only.
    pattern = chosen.block_mask
    named = chosen if pattern is None else (pattern.digest, *chosen[:-1])
    odd = (a.ptr | b.ptr | c.ptr | d.ptr) & 15
    if odd:
        odd = (a.ptr & 15) | (b.ptr & 15) << 4 | (c.ptr & 15) << 8 | (d.ptr & 15) << 12
    key: Any = (a[1:6], b[1:6], c[1:6], d[1:6], odd, named, deterministic)
    if masks is not None:
        key = (key, *(None if view is None else view[1:6] for view in masks))
    ready = _ready.get(key)
    if ready is None:
        problem = validate.to_problem(inputs, chosen._replace(deterministic=deterministic), masks)
        hints.look(inputs, chosen, problem)
        runner = runner_for(problem)
        ready = Ready(runner, problem, problem.row_shape, problem.stat_dtype, runner.workspace_bytes)
        _remember(_ready, key, ready, problem)
    return ready


def as_framework_says(like: ArrayView) -> bool:
    """What `deterministic=None` means beside arrays like this one: whatever their framework has been asked for."""
    adapter = ADAPTERS.get(like.framework)
    return adapter is not None and adapter.deterministic()


def outlined(inputs: Inputs, chosen: Options, masks: MaskArrays | None) -> Problem:
    """The problem of arrays or stand-ins that `outline` has viewed, as a call with them would have it."""
    if chosen.deterministic is None:
        chosen = chosen._replace(deterministic=as_framework_says(inputs.student_q))
    return validate.to_problem(inputs, chosen, masks)


def runner_for(problem: Problem) -> Any:
    """The one Runner of a problem."""
    runner = _runners.get(problem)
    if runner is None:
        with _building():
            runner = _runners.get(problem) or backend(problem.device).Runner(problem)
            _remember(_runners, problem, runner, problem)
    return runner


def _remember(cache: dict[Any, Any], key: Any, value: Any, problem: Problem) -> None:
    """Bounded, oldest out first: a program with ever new shapes must not grow for ever."""
    with _building():
        while len(cache) >= LIMIT:
            cache.pop(next(iter(cache)), None)
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
    for key, ready in list(_ready.items()):
        if ready.problem.mask.blocks == digest:
            _ready.pop(key, None)


def backend(device: Device) -> Any:
    """The module whose Runner serves a device."""
    if device.kind == "cpu":
        return numpy_backend
    _check_fork()
    arrays.cupy_module()
    return importlib.import_module(".launch", __package__)


def _check_fork() -> None:
    """Note who uses CUDA first, and refuse children forked after that: CUDA does not work there, or hangs."""
    global _cuda_generation
    if _cuda_generation is None:
        _cuda_generation = generation()
    elif _cuda_generation != generation():
        raise DriverError(
            "CUDA arrays in a process that was forked after its parent had used CUDA, where CUDA does not work; start "
            'such processes with multiprocessing.get_context("spawn"), or use CUDA in the children only'
        )


def view_inputs(teacher_q: Any, teacher_k: Any, student_q: Any, student_k: Any) -> Inputs:
    """Describe the four operands."""
    return Inputs(
        describe("teacher_q", teacher_q),
        describe("teacher_k", teacher_k),
        describe("student_q", student_q),
        describe("student_k", student_k),
    )


def view_masks(
    key_lengths: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    key_mask: Any = None,
    framework: str = "numpy",
) -> MaskArrays | None:
    """Describe what a mask reads, beside inputs of a framework; None where there is nothing."""
    if key_lengths is None and cu_seqlens_q is None and cu_seqlens_k is None and key_mask is None:
        return None
    given = (key_lengths, cu_seqlens_q, cu_seqlens_k, key_mask)
    return MaskArrays(
        *(
            None if x is None else arrays.describe_mask(name, x, framework)
            for name, x in zip(MASK_ARRAYS, given, strict=True)
        )
    )


def outline(given: tuple[Any, ...], device: Device | None = None) -> Inputs:
    """Views of arrays or stand-ins, as if on `device` where one is given.

    Stand-ins are where the arrays among the four are, else on the current GPU, else on the CPU.
    """
    views = {n: describe(n, x) for n, x in zip(INPUT_NAMES, given, strict=True) if not arrays.is_standin(n, x)}
    framework = "stand-in"
    if views:
        like = next(iter(views.values()))
        framework, place = like.framework, like.device
    else:
        gpu = None if device else arrays.current_gpu()
        place = arrays.CPU if gpu is None else arrays.cuda(gpu)
    for name, x in zip(INPUT_NAMES, given, strict=True):
        view = views.get(name) or arrays.standin(name, x, place)._replace(framework=framework)
        views[name] = view if device is None else view._replace(device=device)
    return Inputs(**views)


def outline_masks(given: tuple[Any, ...], like: ArrayView, device: Device | None = None) -> MaskArrays | None:
    """Views of a mask's arrays or stand-ins, beside inputs that `outline` has viewed as `like`.

    Stand-ins, and arrays beside nothing else or on a `device` that is only meant, are where the inputs are.
    """
    if all(x is None for x in given):
        return None
    views: list[ArrayView | None] = []
    for name, x in zip(MASK_ARRAYS, given, strict=True):
        if x is None:
            views.append(None)
            continue
        real = hasattr(x, "dtype") and not arrays.is_standin(name, x)
        view = arrays.describe_mask(name, x) if real else arrays.standin(name, x, like.device)
        if not real or device is not None or like.framework == "stand-in":
            view = view._replace(framework=like.framework, device=like.device)
        views.append(view)
    return MaskArrays(*views)


def forward(inputs: Inputs, ready: Ready, masks: MaskArrays | None = None) -> RowStats:
    """Allocate row results and launch."""
    like = inputs.student_q
    outputs = arrays.empty_rows(like, ready.row_shape, ready.stat_dtype)
    launch_forward(inputs, ready, outputs, masks)
    if like.framework not in arrays.OWN:
        arrays.hold((*inputs, *(masks or ())))
    return outputs


def launch_forward(inputs: Inputs, ready: Ready, outputs: RowStats, masks: MaskArrays | None = None) -> None:
    """Launch into `outputs`, with the workspace that the plan asks for, from the caller's allocator."""
    like = inputs.student_q
    stream = arrays.stream_of(like)
    if ready.workspace_bytes:
        workspace = arrays.empty(like, (ready.workspace_bytes // 4,), "float32")
        ready.runner.forward(inputs, outputs, stream, workspace.ptr, masks)
    else:
        ready.runner.forward(inputs, outputs, stream, 0, masks)


def backward(
    inputs: Inputs, ready: Ready, saved: Saved, wrt: tuple[str, ...], masks: MaskArrays | None = None
) -> tuple[Any, ...]:
    """Allocate the gradients named in `wrt` and launch; None for the others."""
    outputs: list[ArrayView | None] = [
        arrays.empty(view, view.shape, view.dtype) if view.name in wrt else None for view in inputs
    ]
    like = inputs.student_q
    stream = arrays.stream_of(like)
    if size := ready.runner.backward_bytes(wrt):
        workspace = arrays.empty(like, (size // 4,), "float32")
        ready.runner.backward(inputs, saved, Gradients(*outputs), stream, workspace.ptr, masks)
    else:
        ready.runner.backward(inputs, saved, Gradients(*outputs), stream, 0, masks)
    arrays.hold((*inputs, *saved, *(masks or ())))
    return tuple(None if out is None else out.array for out in outputs)

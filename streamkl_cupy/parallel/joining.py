"""What some keys have left of rows, joined by what others add: one kernel on a GPU, states that merge elsewhere."""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Sequence
from typing import Any

from ..compiler.nvrtc import import_cupy, load
from ..errors import CaptureError
from ..frameworks import describe, stream_of
from ..frameworks.base import FRAMEWORKS
from ..kernels import join_states
from ..kernels.gpus import device_facts
from ..kernels.structs import JOIN_STATES
from ..launch import in_context
from ..results import KLForwardRows
from ..rules.divergences.interface import Divergence
from .job import Job
from .libraries import at
from .shards import Runs
from .states import numbers_of


def over(
    job: Job, inputs: Sequence[Any], rows: Runs, keys: Runs, before: KLForwardRows[Any] | None = None
) -> KLForwardRows[Any]:
    """Results and states of a shard of rows over a shard of keys, and over those that they have seen before."""
    first, *others = job.layers(rows, keys)
    found = job.computed(first, inputs) if before is None else before
    for piece in itertools.chain(*(others if before is None else (first, *others))):
        found = joined(job, found, job.engine.forward(job.as_call(inputs, piece)), piece.rows)
    return found


def joined(job: Job, rows: KLForwardRows[Any], some: KLForwardRows[Any], where: slice) -> KLForwardRows[Any]:
    """Results and states of rows, some of which have seen further keys, written over what they were."""
    if job.library.on_gpu(rows.moments):
        _launch(job, rows, some, where)
        return rows
    axis, xp, merging = job.axes.rows, job.library.xp, job.merging
    part = KLForwardRows(*(None if x is None else job.cut(x, where) for x in rows))
    state = merging.merge(xp, (numbers_of(part), numbers_of(some)))
    new = (*merging.finish(xp, state), xp.stack(state, -1))
    old = (rows.kl, rows.teacher_lse, rows.student_lse, rows.moments)
    found = [job.library.put(x, at(axis, where), y) for x, y in zip(old, new, strict=True)]
    return KLForwardRows(found[0], found[1], found[2], moments=found[3])


def states(job: Job, rows: KLForwardRows[Any]) -> Any:
    """The states of rows, the numbers of each side by side, for `merged`."""
    return rows.moments if job.library.on_gpu(rows.moments) else job.library.xp.stack(numbers_of(rows), -1)


def merged(job: Job, given: Sequence[Any], owners: tuple[Runs, ...]) -> KLForwardRows[Any]:
    """Results of this rank's rows, of which there are several states over different keys, in their order; where shards
    are as long as the longest, without what they do not hold."""
    first, *others = given
    if not job.library.on_gpu(first):
        own = [job.own(x, owners, x) for x in given]
        numbers = [tuple(x[..., i] for i in range(x.shape[-1])) for x in own]
        xp, merging = job.library.xp, job.merging
        return KLForwardRows(*merging.finish(xp, merging.merge(xp, numbers)))
    shape = first.shape[:-1]
    kl, teacher_lse, student_lse = (job.library.full(first, shape, first.dtype) for _ in range(3))
    rows = KLForwardRows(kl, teacher_lse, student_lse, moments=first)
    for x in others:
        joined(job, rows, KLForwardRows(None, None, None, moments=x), slice(0, shape[job.axes.rows]))
    return KLForwardRows(*(job.own(x, owners, x) for x in (kl, teacher_lse, student_lse)))


def warmup(index: int, divergence: Divergence) -> None:
    """Compile and load the kernel for a GPU."""
    with in_context(index):
        _handle(index, divergence, None)


_handles: dict[tuple[int, str], int] = {}
"""By GPU and divergence."""


def _handle(index: int, divergence: Divergence, stream: int | None) -> int:
    """Of the kernel; `stream`, unless None, is where it is about to run."""
    key = index, divergence.name
    if key not in _handles:
        if stream is not None and import_cupy().cuda.runtime.streamIsCapturing(stream):
            raise CaptureError(
                "the kernel that joins rows is not loaded, and loading cannot be captured into a CUDA graph: call "
                "streamkl_cupy.parallel.warmup(...) with the same arrays and options before the capture"
            )
        plan = join_states.plan(divergence, device_facts(index))
        _handles[key] = load(plan.text, plan.symbol, plan.arch).handle
    return _handles[key]


def _launch(job: Job, rows: KLForwardRows[Any], some: KLForwardRows[Any], where: slice) -> None:
    like = describe("kl", rows.kl)
    shape, axis, index = rows.kl.shape, job.axes.rows, like.device.index
    entries, each = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
    count = (where.stop - where.start) * each
    if not entries * count:
        return
    arrays = {
        "value": rows.kl,
        "teacher_lse": rows.teacher_lse,
        "student_lse": rows.student_lse,
        "states": rows.moments,
        "others": some.moments,
    }
    pointers = dict(zip(arrays, FRAMEWORKS[like.framework].addresses(tuple(arrays.values())), strict=True))
    extents = {"entries": entries, "count": count, "pitch": shape[axis] * each, "first": where.start * each}
    data = JOIN_STATES.pack({**extents, **pointers})
    packed = (ctypes.c_char * len(data)).from_buffer_copy(data)
    parameters = ctypes.c_void_p(ctypes.addressof(packed))
    stream, cupy = stream_of(like), import_cupy()
    with in_context(index):
        handle = _handle(index, job.divergence, stream)
        grid = -(-entries * count // join_states.THREADS)
        block = join_states.THREADS
        cupy.cuda.driver.launchKernel(handle, grid, 1, 1, block, 1, 1, 0, stream, ctypes.addressof(parameters), 0)

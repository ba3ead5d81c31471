"""The public functions of sharded calls.

Each parses its call, has the ranks agree on a job, and runs a strategy; what becomes of the rows is the same for all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..arguments import a_kind_of, choice
from ..call import runner_for
from ..frameworks import compiling, describe, is_standin
from ..ops import ATTENTION_KL
from ..problem import STUDENT
from ..results import KLForward, KLForwardRows, KLGradients
from ..rules import reductions
from ..validate import wanted
from .engine import Engine, Launching, call_of
from .groups import ranks_of
from .job import Job
from .joining import warmup as warm_joining
from .libraries import LIBRARIES, library_of
from .ranks import LocalRank
from .setup import (
    Asked,
    Plain,
    asked_of,
    job_of,
    kept_job,
    named_ownership,
    plain,
    planned,
    refuse_not_built,
)
from .shards import length, within
from .states import OF, KLState, numbers_of
from .strategies import TABLE
from .traffic import ShardingPlan, traffic

_LAUNCHING = Launching()


def attention_kl(
    teacher_q: Any,
    teacher_k: Any,
    student_q: Any,
    student_k: Any,
    *,
    group: Any = None,
    axis_name: str | None = None,
    strategy: str = "auto",
    ownership: Any = "zigzag",
    head_groups: int | None = None,
    keep_gathered: bool = True,
    row_weight: Any = None,
    reduction: str = "none",
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """`streamkl_cupy.attention_kl` of a sequence that several ranks hold, called by all of them with their shards.

    Gradients follow the sum convention: with one loss on every rank, which `reduction` makes of all rows, each rank's
    gradients are those of its own shards. Nothing is to be divided or multiplied by the number of ranks; a trainer that
    averages gradients over these ranks must multiply by it.

    Args:
        teacher_q: This rank's query rows, otherwise as in `streamkl_cupy.attention_kl`.
        teacher_k: This rank's keys. All four have the positions that `ownership` says, in its order.
        student_q: Likewise.
        student_k: Likewise.
        group: Who the ranks are. With PyTorch a process group, a dimension of a DeviceMesh, or None for all processes;
            with CuPy a communicator of `cupyx.distributed`, with NumPy one of mpi4py; a rank of `LocalWorld` with any.
        axis_name: With JAX, inside of `jax.shard_map`: the axis of the mesh along which the ranks are.
        strategy: "all_gather": keys are gathered, each rank has its own rows. "a2a": everything is exchanged for whole
            heads and back; as many ranks as divide the key heads. "all_gather_queries": queries are gathered, each rank
            has its own keys, and states of rows merge. "p2p": keys go around a ring, and states merge. "auto" is
            "all_gather", or "all_gather_queries" where queries and states are fewer bytes than keys.
        ownership: "zigzag": of 2p chunks rank r has chunks r and 2p - 1 - r, so causal work is even; "contiguous": of p
            chunks rank r has chunk r. Or an `Ownership`, or the positions of every rank.
        head_groups: In how many steps keys are gathered, by heads, so that one step is on its way while another is
            computed. Default 1.
        keep_gathered: Keep what was gathered for the backward; else it is gathered again.
        row_weight: Of this rank's rows.
        reduction: "none" for this rank's rows; "sum" and "mean" are of the rows of all ranks, equal on every rank.
        return_lse: Also return both log-sum-exps of this rank's rows, over all keys.
        **options: Those of `streamkl_cupy.attention_kl`, the same on every rank. Masks, offsets, windows, lengths and
            patterns are in positions of the whole sequence.

    Returns:
        As `streamkl_cupy.attention_kl`.

    Raises:
        TypeError, ValueError, NotImplementedError: as there, on every rank.
        RuntimeError: another rank could not call.
    """
    kept = _outside_programs(attention_kl)
    if kept is not None:
        return kept(
            teacher_q,
            teacher_k,
            student_q,
            student_k,
            group=group,
            axis_name=axis_name,
            strategy=strategy,
            ownership=ownership,
            head_groups=head_groups,
            keep_gathered=keep_gathered,
            row_weight=row_weight,
            reduction=reduction,
            return_lse=return_lse,
            **options,
        )
    inputs = (teacher_q, teacher_k, student_q, student_k)
    library = library_of("student_q", student_q)
    asked = Asked(strategy, ownership, head_groups, (), reduction, keep_gathered, asked_of(row_weight))
    if LIBRARIES[library].programs and not isinstance(group, LocalRank):
        return _in_shard_map(inputs, plain("attention_kl", options), asked, axis_name, (row_weight, return_lse))
    ranks = ranks_of(group, library)
    if LIBRARIES[library].autograd:
        from .torch import rows, total, wanted_by_autograd

        asked = asked._replace(wrt=wanted_by_autograd(inputs))
        job = kept_job("attention_kl", ranks, _LAUNCHING, inputs, options, asked)
        kl, teacher_lse, student_lse = rows(job, inputs, keep_gathered)
        add: Callable[[Any], Any] = functools.partial(total, ranks)
    else:
        job = kept_job("attention_kl", ranks, _engine(library), inputs, options, asked)
        found, _ = TABLE[job.strategy].forward(job, inputs)
        kl, teacher_lse, student_lse = found[:3]
        add = ranks.all_reduce
    value = reduced(job, kl, teacher_lse, row_weight, reduction, add)
    return KLForward(value, teacher_lse, student_lse) if return_lse else value


def _in_shard_map(inputs: tuple[Any, ...], call: Plain, asked: Asked, axis: str | None, loss: tuple[Any, bool]) -> Any:
    """The same of JAX arrays."""
    from .jax import Static, axis_size, rows, total

    if not isinstance(axis, str):
        raise TypeError(
            f"axis_name is {a_kind_of(axis)}; JAX arrays are called inside of jax.shard_map, with the name of the axis "
            f'of its mesh along which the ranks are: axis_name="cp"'
        )
    weight, return_lse = loss
    asked = asked._replace(ownership=named_ownership(asked.ownership))
    static = Static(axis, axis_size(axis), call.options, tuple(call.given.items()), asked)
    kl, teacher_lse, student_lse = rows(static, inputs, dict(call.masks))
    job = static.job(inputs, ())
    value = reduced(job, kl, teacher_lse, weight, asked.reduction, functools.partial(total, axis))
    return KLForward(value, teacher_lse, student_lse) if return_lse else value


def attention_kl_forward(
    teacher_q: Any,
    teacher_k: Any,
    student_q: Any,
    student_k: Any,
    *,
    group: Any = None,
    strategy: str = "auto",
    ownership: Any = "zigzag",
    head_groups: int | None = None,
    **options: Any,
) -> Any:
    """`streamkl_cupy.attention_kl_forward` of this rank's rows over the keys of all ranks, outside every autograd.

    Args:
        teacher_q: As in `streamkl_cupy.parallel.attention_kl`, as is all else.
        teacher_k: Likewise.
        student_q: Likewise.
        student_k: Likewise.
        group: Likewise.
        strategy: Likewise.
        ownership: Likewise.
        head_groups: Likewise.
        **options: Likewise.

    Returns:
        As `streamkl_cupy.attention_kl_forward`, of this rank's rows.
    """
    inputs = (teacher_q, teacher_k, student_q, student_k)
    library = library_of("student_q", student_q)
    ranks, asked = ranks_of(group, library), Asked(strategy, ownership, head_groups)
    job = kept_job("attention_kl_forward", ranks, _engine(library), inputs, options, asked)
    rows, _ = TABLE[job.strategy].forward(job, inputs)
    return rows if rows.moments is not None else KLForward(*rows[:3])


def attention_kl_backward(
    grad: Any,
    teacher_q: Any,
    teacher_k: Any,
    student_q: Any,
    student_k: Any,
    *,
    saved: Any,
    wrt: Any = STUDENT,
    group: Any = None,
    strategy: str = "auto",
    ownership: Any = "zigzag",
    head_groups: int | None = None,
    **options: Any,
) -> KLGradients[Any]:
    """`streamkl_cupy.attention_kl_backward` of this rank's shards, outside every autograd.

    Args:
        grad: Derivative of the loss by this rank's rows. A rank whose rows count for nothing gives zeros: its keys may
            count for others.
        teacher_q: As in `streamkl_cupy.parallel.attention_kl`, as is all else.
        teacher_k: Likewise.
        student_q: Likewise.
        student_k: Likewise.
        saved: What `streamkl_cupy.parallel.attention_kl_forward` returned on this rank.
        wrt: Names of the inputs to differentiate by, the same on every rank.
        group: Likewise.
        strategy: Likewise.
        ownership: Likewise.
        head_groups: Likewise.
        **options: Likewise.

    Returns:
        `KLGradients` of this rank's shards, None where `wrt` does not ask.
    """
    inputs = (teacher_q, teacher_k, student_q, student_k)
    library = library_of("student_q", student_q)
    ranks, asked = ranks_of(group, library), Asked(strategy, ownership, head_groups, wrt)
    job = kept_job("attention_kl_backward", ranks, _engine(library), inputs, options, asked)
    rows = KLForwardRows(saved.kl, saved.teacher_lse, saved.student_lse, moments=getattr(saved, "moments", None))
    return KLGradients(*TABLE[job.strategy].backward(job, grad, inputs, rows, None, wrt))


def attention_kl_value_and_grad(
    teacher_q: Any,
    teacher_k: Any,
    student_q: Any,
    student_k: Any,
    *,
    row_weight: Any = None,
    reduction: str = "mean",
    wrt: Any = STUDENT,
    group: Any = None,
    strategy: str = "auto",
    ownership: Any = "zigzag",
    head_groups: int | None = None,
    **options: Any,
) -> tuple[Any, KLGradients[Any]]:
    """`streamkl_cupy.attention_kl_value_and_grad` of the rows of all ranks, outside every autograd.

    Args:
        teacher_q: As in `streamkl_cupy.parallel.attention_kl`, as is all else.
        teacher_k: Likewise.
        student_q: Likewise.
        student_k: Likewise.
        row_weight: Likewise.
        reduction: "mean" or "sum", of the rows of all ranks.
        wrt: Names of the inputs to differentiate by, the same on every rank.
        group: Likewise.
        strategy: Likewise.
        ownership: Likewise.
        head_groups: Likewise.
        **options: Likewise.

    Returns:
        The loss, equal on every rank, and `KLGradients` of this rank's shards.
    """
    choice("reduction", reduction, ("sum", "mean"))
    inputs = (teacher_q, teacher_k, student_q, student_k)
    library = library_of("student_q", student_q)
    asked = Asked(strategy, ownership, head_groups, wrt, reduction, weight=asked_of(row_weight))
    ranks = ranks_of(group, library)
    job = kept_job("attention_kl_value_and_grad", ranks, _engine(library), inputs, options, asked)
    rows, kept = TABLE[job.strategy].forward(job, inputs)
    xp = job.library.xp
    value = reduced(job, rows.kl, rows.teacher_lse, row_weight, reduction, ranks.all_reduce)
    one = xp.ones_like(rows.kl)
    share = reductions.reduce_rows(xp, one, rows.teacher_lse, one if row_weight is None else row_weight, "none")
    if reduction == "mean":
        mass = ranks.all_reduce(share.sum())
        share = xp.where(mass == 0, 0.0, share / xp.where(mass == 0, 1.0, mass))
    return value, KLGradients(*TABLE[job.strategy].backward(job, share, inputs, rows, kept, wrt))


def warmup(
    teacher_q: Any,
    teacher_k: Any,
    student_q: Any,
    student_k: Any,
    *,
    wrt: Any = STUDENT,
    group: Any = None,
    strategy: str = "auto",
    ownership: Any = "zigzag",
    head_groups: int | None = None,
    **options: Any,
) -> None:
    """Have the ranks agree on a call, and compile and load all that this rank needs for it; launch nothing.

    All ranks call it together, before a CUDA graph is captured or a loop is timed. They forget what they agreed on
    before: ranks that were called with other shapes or options than others are told here in any case.

    Args:
        teacher_q: As in `streamkl_cupy.parallel.attention_kl`, as is all else.
        teacher_k: Likewise.
        student_q: Likewise.
        student_k: Likewise.
        wrt: Names of the inputs to differentiate by, the same on every rank.
        group: Likewise.
        strategy: Likewise.
        ownership: Likewise.
        head_groups: Likewise.
        **options: Likewise.
    """
    inputs = (teacher_q, teacher_k, student_q, student_k)
    library = library_of("student_q", student_q)
    ranks, asked = ranks_of(group, library), Asked(strategy, ownership, head_groups, wrt)
    job = job_of(ranks, _engine(library), inputs, lambda: plain("warmup", options), asked, anew=True)
    device = describe("student_q", student_q).device
    for blocks in job.stand_ins(ranks.rank, inputs):
        runner_for(blocks.problem(device)).warmup(wrt)
    if job.some_keys and device.kind == "cuda":
        warm_joining(device.index, job.divergence)


def plan(
    teacher_q: Any,
    teacher_k: Any,
    student_q: Any,
    student_k: Any,
    *,
    size: int,
    rank: int = 0,
    wrt: Any = STUDENT,
    strategy: str = "auto",
    ownership: Any = "zigzag",
    head_groups: int | None = None,
    **options: Any,
) -> ShardingPlan:
    """What a rank of a sharded call would do: strategy, bytes, buffers, launches. Prints itself; asks nobody.

    Args:
        teacher_q: A shard as in `streamkl_cupy.parallel.attention_kl`, or anything with its shape and dtype; all ranks
            hold as much.
        teacher_k: Likewise.
        student_q: Likewise.
        student_k: Likewise.
        size: How many ranks there are.
        rank: Whose launches.
        wrt: Names of the inputs to differentiate by.
        strategy: As in `streamkl_cupy.parallel.attention_kl`, as is all else.
        ownership: Likewise.
        head_groups: Likewise.
        **options: Likewise.

    Returns:
        `ShardingPlan`; `print` it.

    Example:
        >>> import numpy as np
        >>> from streamkl_cupy import parallel
        >>> q, k = np.empty((1, 32, 65536, 128), np.float16), np.empty((1, 8, 65536, 128), np.float16)
        >>> print(parallel.plan(q, k, q, k, size=2, causal=True))
        rank 0 of 2: all_gather (keys are 268,435,456 bytes to receive, queries and states of rows 1,115,684,864)
          receives 268,435,456 B for rows, 268,435,456 B for gradients of student_q, student_k
          holds 268,435,456 B of what is gathered, 2,952,790,016 B of gradients in float32 beside shards and gradients
          rows 98,304 to 131,072 x keys 0 to 32,768 and 98,304 to 131,072
          rows 0 to 32,768 x keys 0 to 32,768
          rows 98,304 to 131,072 x keys 32,768 to 98,304
    """
    inputs = (teacher_q, teacher_k, student_q, student_k)
    call, wrt = plain("plan", options), wanted(ATTENTION_KL, wrt)
    job, why = planned(rank, size, inputs, call, Asked(strategy, ownership, head_groups, wrt))
    longest = (max(map(length, job.rows)), max(map(length, job.keys)))
    pieces = job.pieces(rank, inputs[2])
    blocks = tuple((within(rows, x.rows), within(keys, x.keys)) for x, rows, keys in pieces)
    kind = "early" if job.early else job.strategy
    moved = traffic(kind, inputs, longest, size, job.axes.rows, wrt, job.groups, job.divergence.state_floats)
    if kind == "all_gather" and moved.sums:  # what a launch leaves, and the sums that are sent
        each = moved.sums // (2 * size * longest[1])
        most = max((x.keys.stop - x.keys.start for x, _, _ in pieces), default=0)
        moved = replace(moved, sums=each * (most + size * longest[1]))
    if not is_standin("student_q", student_q) and (device := describe("student_q", student_q).device).kind == "cuda":
        asked = [runner_for(x.problem(device)).backward_bytes(wrt) for x in job.stand_ins(rank, inputs)]
        moved = replace(moved, workspace=max(asked, default=0))
    return ShardingPlan(rank, size, job.strategy, why, job.groups, moved, wrt, blocks)


def attention_kl_state(teacher_q: Any, teacher_k: Any, student_q: Any, student_k: Any, **options: Any) -> KLState:
    """What these keys contribute to each row, as a state that merges with those of other keys.

    For any other transport: `finish_kl_state(merge_kl_states(*states))` of states over disjoint keys is what
    `attention_kl_forward` gives over all of them.

    Args:
        teacher_q: As in `streamkl_cupy.attention_kl_forward`, as is all else.
        teacher_k: Some of the keys.
        student_q: Likewise.
        student_k: Likewise.
        **options: Likewise; offsets and masks are those of these keys. `divergence` is "kl".

    Returns:
        `KLState`.
    """
    divergence = options.get("divergence", OF)
    if divergence != OF:
        raise NotImplementedError(f"divergence={divergence!r} has no states that merge; built are those of {OF}")
    refuse_not_built(options)
    arrays = (teacher_q, teacher_k, student_q, student_k)
    engine = _engine(library_of("student_q", student_q))
    return KLState(*numbers_of(engine.forward(call_of(arrays, options, True))))


def reduced(job: Job, kl: Any, lse: Any, weight: Any, reduction: str, add: Callable[[Any], Any]) -> Any:
    """Rows of all ranks reduced; `add` is the sum over ranks."""
    xp = job.library.xp
    if reduction == "none" or job.ranks.size == 1:
        return reductions.reduce_rows(xp, kl, lse, weight, reduction)
    total = reductions.reduce_rows(xp, kl, lse, weight, "sum")
    if reduction == "sum":
        return add(total)
    # Of rows without a key the weight is 0, whatever it holds, and that of a row without weight 1.
    one = xp.ones_like(kl)
    mass = reductions.reduce_rows(xp, one, lse, one if weight is None else weight, "sum")
    value, mass = add(xp.stack([total, mass]))
    return xp.where(mass == 0, 0.0, value / xp.where(mass == 0, 1.0, mass))


def _engine(library: str) -> Engine:
    """What computes a block of arrays of a library."""
    if not LIBRARIES[library].programs:
        return _LAUNCHING
    from .jax import Traced

    return Traced()


def _outside_programs(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """What calls the function outside of a program that torch compiles, which is interrupted there."""
    if not compiling():
        return None
    from ..torch import outside_programs

    return lambda *args, **kwargs: outside_programs(function, *args, **kwargs)

"""From a Problem and facts about a GPU to a frozen Plan. Pure: no CuPy, no device, no environment.

A Plan names, for each kernel a call may launch, the source file, the constants and hooks compiled into it, and its
launch shape, and for each request which of them run and where in the workspace they work. It prints itself completely,
so a bug report that holds `print(plan(...))` explains itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

import numpy as np

from .kernels import JOINS, SAVED_ROWS, choose, chosen, combine, mask_bits
from .kernels.base import Candidate, KernelPlan, MadeRows, TileRow, Work, shared
from .kernels.gpus import DeviceFacts
from .kernels.gpus import facts_for_arch as facts_for_arch
from .kernels.mask_bits import PackedMask
from .kernels.structs import split_states
from .problem import Operand, Problem, Side, counted
from .rules import divergences
from .rules.scores import score_of

MAX_ROWS = 2**30


@dataclass(frozen=True)
class Step:
    """Kernels that run one after the other on the same arguments, and what a call fills in besides its operands."""

    kernels: tuple[KernelPlan, ...]
    outputs: tuple[tuple[str, str], ...]
    """(field of the arguments, name of the result)."""
    reads: tuple[str, ...] = ()
    """Fields of what the forward saved, and of derivatives, that are as a backward was given them."""
    placed: tuple[tuple[str, int], ...] = ()
    """(field of the arguments, where in the call's workspace that is, bytes)."""
    cleared: tuple[int, int] | None = None
    """Where in the workspace how many bytes are zero before it runs."""
    copies: tuple[tuple[str, int, Operand], ...] = ()
    """What it copies by tensor maps and is no operand: (name of the box, where in the workspace, what lies there)."""


@dataclass(frozen=True)
class FusedPlan:
    """Several gradients of one side in one pass over the scores. Its sums, where it has any, have no fixed order."""

    side: str
    kernels: tuple[KernelPlan, ...]
    """What prepares the workspace, the pass, what makes sums the gradient of the queries where there are sums: same
    arguments. Or the pass alone."""
    workspace_bytes: int
    """Of the pass, and after that what blocks need that share a row tile."""

    @property
    def main(self) -> KernelPlan:
        """The pass."""
        return self.kernels[min(len(self.kernels) - 1, 1)]

    @property
    def names(self) -> tuple[str, ...]:
        """The inputs whose gradients it computes."""
        return self.main.task.results

    def __str__(self) -> str:
        many = {2: "both"}.get(len(self.names), "all")
        return f"{many} gradients of the {self.main}, workspace {self.workspace_bytes} B"


@dataclass(frozen=True)
class Plan:
    """Everything a call would run on a GPU."""

    problem: Problem
    forward: KernelPlan
    gradients: tuple[tuple[str, KernelPlan], ...]
    combine: KernelPlan | None = None
    """Joins the splits of a forward whose keys are split."""
    workspace_bytes: int = 0
    """What a forward works in: the mask's bytes and the partial states of split keys; without it, it runs unsplit."""
    mask_bits: tuple[PackedMask, ...] = ()
    """Arrays of the mask that are packed to bits before any other kernel runs. These are the first bytes of every
    workspace, without which such a mask cannot be."""
    fused: tuple[FusedPlan, ...] = ()
    """What computes several gradients of a side when all of them are wanted, there is room for its workspace and equal
    bits from run to run are not asked for, the most gradients first; what none of them does has its own kernel."""
    unfused: tuple[tuple[str, str], ...] = ()
    """Sides that have no such pass, and why."""

    saved_rows: tuple[MadeRows, ...] = ()
    """What makes of the rows that the forward saved those that the gradients of a side read, where these are not the
    same; in the workspace after the mask's bits."""

    @property
    def mask_bytes(self) -> int:
        """Of all packed arrays."""
        return sum(x.bytes for x in self.mask_bits)

    @property
    def gradient_start(self) -> int:
        """Where in its workspace a backward has room for the rest, and what it needs at least."""
        return self.mask_bytes + sum(made.bytes for made in self.saved_rows)

    def works_in(self, room: float) -> bool:
        """Whether a backward can work in so many bytes: with fewer than `gradient_start` it has no workspace at all."""
        return room >= self.gradient_start

    @property
    def passes(self) -> tuple[tuple[KernelPlan, KernelPlan | None], ...]:
        """The forward and what joins its splits, once for each pass that the divergence needs."""
        later = divergences.of(self.problem).later_floats

        def again(kernel: KernelPlan, number: int, floats: int) -> KernelPlan:
            constants = {**dict(kernel.constants), "SKL_PASS": number}
            return replace(kernel, constants=tuple(sorted(constants.items())), regions=(split_states(floats),))

        first, join = self.forward, self.combine
        rest = [(again(first, i, x), join and again(join, i, x)) for i, x in enumerate(later, start=1)]
        return ((first, join), *rest)

    def forward_steps(self, workspace: bool) -> tuple[Step, ...]:
        """What a forward runs, with `workspace_bytes` of workspace or without any, after the mask's bits."""
        problem = self.problem
        if 0 in (problem.batch, problem.heads, problem.queries):
            return ()
        outputs = self.forward.task.outputs
        outputs += tuple((field, row) for asks, field, row in problem.operation.asked_rows if getattr(problem, asks))
        outputs += (("moments", "moments"),) if divergences.moments_of(problem) else ()
        steps = []
        for forward, join in self.passes:
            if join is None:
                steps.append(Step((forward,), outputs))
            elif not workspace:
                whole = replace(forward.schedule, splits=1)
                blocks = forward.blocks // forward.schedule.splits
                steps.append(Step((replace(forward, schedule=whole, blocks=blocks),), outputs))
            else:
                steps += [Step((x,), outputs, placed=(("workspace", self.mask_bytes),)) for x in (forward, join)]
        return tuple(steps)

    def backward_steps(self, wrt: Collection[str], room: float = inf) -> tuple[Step, ...]:
        """What a backward for these inputs runs in `room` bytes of workspace, after the mask's bits.

        With less than `backward_bytes(wrt)` no row tile is shared, with still less each gradient has its own kernel.

        Raises:
            NotImplementedError: a gradient that cannot be computed is among them.
        """
        op, start = self.problem.operation, self.gradient_start
        left = room - start
        wanted = [name for name in op.names if name in wrt]
        steps = []
        # Of each side, what its kernels read of rows.
        read: dict[str, Step] = {}
        at = self.mask_bytes
        for made in self.saved_rows:
            if op.on((made.side,), tuple(wanted)):
                steps.append(Step((made.kernel,), (), op.saved_fields, _placed(made.written, at)))
                as_given = tuple(x for x in op.saved_fields if x not in dict(made.read))
                copies = tuple((name, at + offset, x) for name, offset, x in made.copies)
                read[made.side] = Step((), (), as_given, _placed(made.read, at), copies=copies)
            at += made.bytes
        all_as_given = Step((), (), op.saved_fields)

        def add(kernels: tuple[KernelPlan, ...], main: KernelPlan, sums: int = 0) -> None:
            schedule, of_rows = main.schedule, read.get(main.task.side, all_as_given)
            placed, cleared = of_rows.placed, None
            if sums:
                placed += (("workspace", start),)
            if schedule.partial_bytes and sums + schedule.partial_bytes <= left:
                arrivals = start + sums
                cleared = (arrivals, schedule.cleared_bytes)
                placed += (("partial_arrivals", arrivals), ("partial_sums", arrivals + schedule.arrivals_bytes))
            steps.append(replace(of_rows, kernels=kernels, outputs=main.task.outputs, placed=placed, cleared=cleared))

        for fused in self.fused:
            sums = fused.workspace_bytes - fused.main.schedule.partial_bytes
            if sums <= left and all(name in wanted for name in fused.names):
                if fused.main.blocks:
                    add(fused.kernels, fused.main, sums)
                wanted = [name for name in wanted if name not in fused.names]
        for name in wanted:
            kernel = self.gradient(name)
            if self.problem.heads and 0 not in self.problem.input_shape(name):
                add((kernel,), kernel)
        return tuple(steps)

    def zeros(self, wrt: Collection[str]) -> tuple[str, ...]:
        """Those of these gradients that no step writes, since no query head adds to them: a backward clears them."""
        if self.problem.heads:
            return ()
        return tuple(name for name in wrt if 0 not in self.problem.input_shape(name))

    def backward_bytes(self, wrt: Collection[str]) -> int:
        """Workspace of a backward for these inputs; without it each gradient is computed by its own kernel, and no
        row tile is shared."""
        fused = [f for f in self.fused if all(x in wrt for x in f.names)]
        done = [name for f in fused for name in f.names]
        alone = [kernel.schedule.partial_bytes for name, kernel in self.gradients if name in wrt and name not in done]
        return self.gradient_start + max([*(f.workspace_bytes for f in fused), *alone], default=0)

    def gradient(self, name: str) -> KernelPlan:
        for key, kernel in self.gradients:
            if key == name:
                return kernel
        side = self.problem.operation.operand[name].side
        raise NotImplementedError(
            f"wrt {name!r}: gradients to this side are {no_gradients(self.problem, side)}; built of "
            f"this call are {[key for key, _ in self.gradients]}"
        )

    def _instead(self, side: str) -> str:
        """What a side has in place of a pass that it does not have."""
        return "no pass for all gradients" if side in [x.side for x in self.fused] else "a kernel per gradient"

    def __str__(self) -> str:
        p = self.problem
        title = p.op.replace("_", " ").replace("kl", "KL")
        lines = [
            f"{title} on {p.device}: B={p.batch} H={p.heads} M={p.queries} N={p.keys}, mask {p.mask.name}"
            + (f", {counted(p.sequences, 'sequence')}" if p.sequences else "")
            + (f", {p.divergence}" if p.divergence != Problem.divergence else "")
            + "".join(f", {name} {x:g}" for name, x in p.parameters)
            + (", entropy" if p.entropy else "")
            + (", some keys" if p.some_keys else "")
            + (f", wide gradients {p.wide_gradients}" if p.wide_gradients else "")
            + (", sinks" if p.sunk else ""),
            *(
                f"  {name}: given, {side.dtype}, {counted(side.q.heads, 'head')}"
                if side.given
                else f"  {name}: D={side.dim} {side.dtype}, {counted(side.k.heads, 'key head')}, scale {side.scale:.6g}"
                + (f", score {side.score}" if side.score != Side.score else "")
                + (f", softcap {side.softcap:g}" if side.softcap is not None else "")
                for name, side in p.sides.items()
            ),
            *(f"  {name}: D={p.operand(name).dim}" for name in p.operation.names if p.operation.operand[name].extra),
            f"  workspace {self.workspace_bytes} B",
            *(f"  {packed}" for packed in self.mask_bits),
            f"  {self.forward}",
            *([f"  {self.combine}"] if self.combine else []),
            *(f"  pass {i} by the same kernels" for i, _ in enumerate(divergences.of(p).later_floats, start=2)),
            *(f"  gradients of the {made}" for made in self.saved_rows),
            *(f"  {fused}" for fused in self.fused),
            *(f"  {side}: {self._instead(side)} ({why})" for side, why in self.unfused),
            *(f"  {kernel}" for _, kernel in self.gradients),
            *(f"  {side}: no gradients ({why})" for side in p.operation.sides if (why := no_gradients(p, side))),
        ]
        return "\n".join(lines)


def _placed(fields: tuple[tuple[str, int], ...], start: int) -> tuple[tuple[str, int], ...]:
    return tuple((field, start + offset) for field, offset in fields)


@lru_cache(maxsize=1024)
def make_plan(problem: Problem, facts: DeviceFacts) -> Plan:
    """The Plan of a problem on a GPU.

    Raises:
        NotImplementedError: nothing here runs on that GPU, or the launch would be larger than a grid can be.
    """
    if max(problem.queries, problem.keys) > MAX_ROWS:
        raise NotImplementedError(
            f"M={problem.queries}, N={problem.keys}: kernels count rows up to {MAX_ROWS}; split the call"
        )
    plan = _shared(_unsplit_plan(_without_numbers(problem), facts), problem, facts)
    forward = plan.forward
    assert forward.tile
    rows = problem.batch * problem.heads * problem.queries
    visited = _key_tiles(problem, forward.tile)
    splits = combine.splits(forward.blocks, visited, facts, forward.tile.min_blocks)
    if splits == 1:
        return replace(plan, problem=problem)
    forward = replace(forward, blocks=forward.blocks * splits, schedule=replace(forward.schedule, splits=splits))
    states = max(kernel.regions[0].bytes(splits * rows) for kernel, _ in replace(plan, forward=forward).passes)
    return replace(
        plan,
        problem=problem,
        forward=forward,
        combine=JOINS[problem.op].plan(Work(problem, forward.task), forward, facts),
        workspace_bytes=plan.mask_bytes + states,
    )


def no_gradients(problem: Problem, name: str) -> str:
    """What gradients of a side are built for, where those of this one are not; empty where they are."""
    side = problem.side(name)
    if side.given:
        return f"none: the {name} is given, a constant"
    slope = score_of(side).largest_slope
    if side.dim > (most := problem.operation.max_gradient_dim):
        return f"built for head dims up to {most} on CUDA, but the {name}'s is {side.dim}"
    if "divergence" not in problem.operation.rules:
        return ""  # its gradients of float16 are scaled as they turn out
    if side.dtype == "float16" and slope > 1:
        return (
            f"built in float16 on CUDA for scores with slopes of at most 1, which keep them in its range, but those of "
            f"{side.score!r} reach {slope:g}; bfloat16 and float32 have the range"
        )
    if side.dtype == "float16" and not divergences.of(problem).narrow:
        return (
            f"built for bfloat16 and float32 on CUDA where {problem.divergence!r} has {dict(problem.parameters)}: "
            f"their size hangs on how many keys a row sees, and float16 has not the range"
        )
    return ""


def _shared(plan: Plan, problem: Problem, facts: DeviceFacts) -> Plan:
    """The plan with few row tiles of its gradients shared by blocks, as the mask's numbers have it."""

    def share(kernel: KernelPlan) -> KernelPlan:
        return shared(kernel, Work(problem, kernel.task), facts)

    def share_pass(whole: FusedPlan) -> FusedPlan:
        main = share(whole.main)
        kernels = tuple(main if x is whole.main else replace(x, schedule=main.schedule) for x in whole.kernels)
        more = main.schedule.partial_bytes - whole.main.schedule.partial_bytes
        return replace(whole, kernels=kernels, workspace_bytes=whole.workspace_bytes + more)

    return replace(
        plan,
        gradients=tuple((name, share(kernel)) for name, kernel in plan.gradients),
        fused=tuple(share_pass(x) for x in plan.fused),
    )


def _without_numbers(problem: Problem) -> Problem:
    """The problem with its scales, its caps and the integers of its mask left open: what changes from step to step in a
    loop over chunks or temperatures, and decides no more than over how many blocks the keys go."""
    mask = problem.mask
    return replace(
        problem,
        mask=replace(mask, params=tuple((name, 0) for name, _ in mask.params)),
        distributions=tuple(map(_without_factors, problem.distributions)),
    )


def _without_factors(side: Side) -> Side:
    return replace(side, scale=0.0, softcap=None if side.softcap is None else 1.0)


@lru_cache(maxsize=1024)
def _unsplit_plan(problem: Problem, facts: DeviceFacts) -> Plan:
    """The plan of a problem without its numbers, its keys not split."""
    op = problem.operation
    sides = [side for side in op.sides if not no_gradients(problem, side)]
    packed = mask_bits.plan(problem, facts)
    passes = [(task, *_fused(Work(problem, task), facts)) for task in op.fused if task.side in sides]
    gradients = tuple((task.name, _alone(Work(problem, task), facts)) for task in op.gradients if task.side in sides)
    fused = tuple(found for _, found, _ in passes if found is not None)
    readers = [*(x.main for x in fused), *(kernel for _, kernel in gradients)]
    return Plan(
        problem=problem,
        saved_rows=SAVED_ROWS[problem.op].plan(problem, sides, facts, readers),
        forward=_alone(Work(problem, op.forward), facts),
        gradients=gradients,
        workspace_bytes=sum(x.bytes for x in packed),
        mask_bits=packed,
        fused=fused,
        unfused=tuple((task.side, reason) for task, found, reason in passes if found is None),
    )


def _joined(refusals: Mapping[Candidate[Work, TileRow], str]) -> str:
    return "; ".join(f"not {kernel.family}: {reason}" for kernel, reason in refusals.items())


def _alone(work: Work, facts: DeviceFacts) -> KernelPlan:
    """A forward or the gradient of one input, which every supported GPU can do."""
    kernel, tile, refusals = chosen(work.task.kind, work, facts)
    plan: KernelPlan = kernel.plan(work, tile, facts, _joined(refusals))
    return plan


def _fused(work: Work, facts: DeviceFacts) -> tuple[FusedPlan | None, str]:
    """Both gradients of a side in one pass, where a kernel can, and why more capable kernels, or all, cannot."""
    found, refusals = choose(work.task.kind, work, facts)
    reason = _joined(refusals)
    if found is None:
        return None, reason
    kernel, tile = found
    side = work.task.side
    kernels = kernel.plans(work, tile, facts, reason)
    partial_bytes = max(x.schedule.partial_bytes for x in kernels)
    return FusedPlan(side, kernels, kernel.workspace_bytes(work, tile) + partial_bytes), reason


def _key_tiles(problem: Problem, tile: TileRow) -> int:
    """Key tiles that the longest row tile visits, as far as is known here."""
    visited = combine.key_tiles(problem, tile.rows, tile.columns)
    pattern = problem.mask.pattern
    if pattern is None:
        return visited
    return min(visited, int(np.diff(pattern.tile_lists(tile.rows, tile.columns).offsets).max(initial=0)))

"""The same tile streaming on the CPU, in NumPy: the embedded default for arrays that live there.

What is here, all operations with queries, keys and masks have in common; each has its blocks, forward and
backward, in a module of its own (`blocks.py` says what these are).

A block is some query rows of some heads; it walks over the key axis in tiles small enough for the cache, so no M x N
matrix ever exists. Per tile the work is two BLAS products and about ten in-place passes. Logits are held in base 2
(the factor log2(e) rides on the scale), because exp2 is the cheapest exponential NumPy has. The scale is applied to the
products, not to the queries: products of 16-bit numbers are exact in float32, those of scaled ones are not.

What a dot product means, the score says (`rules/scores/`); which keys a row sees, the parts of the mask
(`rules/masks/`).

A vector added to all keys of a head changes no probability, but it is rounded with every logit, and a query gradient
gets it as often as its logit gradients fail to add up to 0. Where keys share a large part, `common_part` finds it and
the block takes it from its keys as it reads them.

Blocks are independent, and threads of the call share them (`concurrency/threads.py`). Only key gradients are sums over
blocks: each block adds its part to a tile of keys after the blocks before it, so sums have one order whatever the
threads do.

Memory beyond inputs and outputs is one block's scratch for each thread (below 10 MB for D = 64; the plan says how
much). Key gradients of 16-bit inputs are summed in float32 before they are rounded, which adds the float32 key
gradients of one group of heads, and with threads those of at most two groups for each.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from ..arrays import ArrayView, Gradients, Inputs, MaskArrays, Results, Saved, host
from ..concurrency.threads import Team, Turn
from ..ops import ATTENTION_KL, ATTENTION_KL_TO, SPARSE_ATTENTION
from ..problem import Problem
from ..rules import masks as rules
from .attention import AttentionBlocks
from .attention_kl import KLBlocks
from .block import Array, Block, Scratch, Segment, canonical, rows_at, slices
from .blocks import BackwardTask, Blocks, ForwardTask, Group
from .elements import narrow
from .given import GivenBlocks
from .plan import LEAST_SHARED_PRODUCT, NumPyPlan, head_group, make_plan, threads_for

_Task = TypeVar("_Task")

BLOCKS: dict[str, type[Blocks]] = {
    ATTENTION_KL.name: KLBlocks,
    ATTENTION_KL_TO.name: GivenBlocks,
    SPARSE_ATTENTION.name: AttentionBlocks,
}


class Runner:
    """Runs one problem on CPU arrays; may be kept, and called again with other arrays of the same problem."""

    workspace_bytes = 0  # scratch is its own

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._plans: dict[int, NumPyPlan] = {}
        self._dtype = np.dtype(problem.stat_dtype)
        self._blocks: Blocks = BLOCKS[problem.op](problem)
        self._scores = problem.batch * problem.heads * problem.queries * problem.keys

    @property
    def plan(self) -> NumPyPlan:
        """How a call would run with as many threads as there are now."""
        return self._planned(threads_for(self._scores))

    def _planned(self, count: int) -> NumPyPlan:
        plan = self._plans.get(count)
        return plan or self._plans.setdefault(count, make_plan(self.problem, threads=count))

    def warmup(self, wrt: Sequence[str] = ()) -> None:
        """Nothing to compile or load here."""

    def backward_bytes(self, wrt: Sequence[str]) -> int:
        """Of a workspace from the caller: none."""
        return 0

    def forward(
        self, inputs: Inputs, outputs: Results, stream: int = 0, workspace: int = 0, masks: MaskArrays | None = None
    ) -> None:
        """Write every element of the outputs.

        Raises:
            ValueError: lengths or sequence bounds that do not fit; nothing has been written then.
        """
        op = self.problem.operation
        segments, count = self._segments(masks)
        views = self._views(inputs)
        given = [(self._rows(x), empty) for x, empty in zip(outputs, op.empty.values(), strict=True) if x is not None]
        rows = [x for x, _ in given]
        if self.problem.sequences:  # rows after the last sequence
            for out, empty in given:
                out[...] = empty

        def tasks() -> Iterator[ForwardTask]:
            for segment in segments:
                here, out_rows = rows_at(op, views, segment), [x[:, :, segment.q] for x in rows]
                for b, h in self._groups(segment):
                    for at in self._cut(segment, b, h):
                        yield ForwardTask(segment, at, here, out_rows)

        def work(team: Team[ForwardTask]) -> None:
            scratch = scratches.pop()
            for task in team:
                found = self._blocks.forward(task.views, task.segment, task.at, scratch, team)
                for out, x in zip(task.outputs, [x for x in found if x is not None], strict=True):
                    out[task.at] = x if x.dtype == out.dtype else narrow(x, out.dtype)

        if isinstance(self._blocks, GivenBlocks):
            self._team(segments, tasks(), count).run(self._looking(self._blocks, self._scratches(segments, count)))
        scratches = self._scratches(segments, count)
        self._team(segments, tasks(), count).run(work)

    @staticmethod
    def _looking(blocks: GivenBlocks, scratches: list[Scratch]) -> Callable[[Team[ForwardTask]], None]:
        """What looks at operands whose values may be wrong, before anything is written."""

        def look(team: Team[ForwardTask]) -> None:
            scratch = scratches.pop()
            for task in team:
                blocks.check(task.views, task.segment, task.at, scratch)

        return look

    def backward(
        self,
        inputs: Inputs,
        saved: Saved,
        outputs: Gradients,
        stream: int = 0,
        workspace: int = 0,
        masks: MaskArrays | None = None,
        room: int | None = None,
    ) -> None:
        """Write every gradient that has an output, reading the logits once for all of them.

        Raises:
            ValueError: lengths or sequence bounds that do not fit; nothing has been written then.
        """
        op = self.problem.operation
        segments, count = self._segments(masks)
        views, grads = self._views(inputs), self._views(outputs)
        rows = {name: self._rows(x) for name, x in zip(op.Saved._fields, saved, strict=True) if x is not None}
        for x in grads.values():
            x[...] = 0

        def groups() -> Iterator[Group]:
            for segment in segments:
                here, grads_here = rows_at(op, views, segment), rows_at(op, grads, segment)
                rows_here = {name: x[:, :, segment.q] for name, x in rows.items()}
                for b, h in self._groups(segment):
                    keys = {
                        x.name: grads_here[x.name][b, slice(h.start // side.group, h.stop // side.group)]
                        for x, side in ((x, self.problem.side(x.side)) for x in op.operands if x.rows == "k")
                        if x.name in grads_here
                    }
                    blocks = deque(self._cut(segment, b, h))
                    yield Group(segment, here, rows_here, grads_here, keys, h.start, blocks)

        def tasks() -> Iterator[BackwardTask]:
            # As many groups side by side as there are threads, so that these seldom meet in the same keys. Of each its
            # last rows first: under a causal mask they are the most work.
            waiting = groups()
            while window := deque(itertools.islice(waiting, count)):
                while window:
                    group = window.popleft()
                    yield group.task(team, self._dtype)
                    if group.blocks:
                        window.append(group)

        def work(team: Team[BackwardTask]) -> None:
            scratch = scratches.pop()
            for task in team:
                self._blocks.backward(task, scratch, team)
                task.turn.reach(Turn.DONE)
                task.group.done(team)

        scratches = self._scratches(segments, count)
        team = self._team(segments, tasks(), count)
        team.run(work)

    def _team(self, segments: list[Segment], tasks: Iterator[_Task], count: int) -> Team[_Task]:
        return Team(tasks, count, any(segment.plan.product > LEAST_SHARED_PRODUCT for segment in segments))

    def _scratches(self, segments: list[Segment], count: int) -> list[Scratch]:
        # Of several sequences, the largest that any of them needs.
        sizes = segments[0].plan.buffers if segments else {}
        for plan in {segment.plan for segment in segments[1:]}:
            sizes = {name: max(size, plan.buffers[name]) for name, size in sizes.items()}
        return [Scratch(sizes, self._dtype) for _ in range(count)]

    def _views(self, arrays: Inputs | Gradients) -> dict[str, Array]:
        layout = self.problem.layout
        return {
            name: canonical(host(x), layout, 1)
            for name, x in zip(self.problem.operation.names, arrays, strict=True)
            if x is not None
        }

    def _rows(self, x: ArrayView) -> Array:
        return canonical(host(x), self.problem.layout, len(x.shape) - len(self.problem.row_shape))

    def _segments(self, masks: MaskArrays | None) -> tuple[list[Segment], int]:
        """The sequences, or the whole, with the mask's values checked, and how many threads share them."""
        p = self.problem
        values = {name: host(x) for name, x in (masks or {}).items()}
        rules.check_values(p, values)
        params = dict(p.mask.params)
        packing = rules.packing(values)
        if packing is None:
            scene = rules.Scene(p.queries, p.keys, params, rules.by_entry(values), p.mask.pattern)
            plan = self.plan
            return [Segment(slice(0, p.queries), slice(0, p.keys), scene, plan)], plan.threads
        scenes = [
            (x, rules.Scene(x.q.stop - x.q.start, x.k.stop - x.k.start, x.params))
            for x in packing.segments(values, params)
        ]
        scores = sum(scene.queries * scene.keys for _, scene in scenes)
        count = threads_for(p.heads * scores, scores / max(len(scenes), 1))
        each = -(-count // max(len(scenes), 1))
        plans = {(M, N): make_plan(p, M, N, each) for M, N in {(scene.queries, scene.keys) for _, scene in scenes}}
        segments = [Segment(x.q, x.k, scene, plans[scene.queries, scene.keys]) for x, scene in scenes]
        return segments, max(min(count, sum(segment.plan.blocks for segment in segments)), 1)

    def _groups(self, segment: Segment) -> Iterator[tuple[slice, slice]]:
        """Batches and heads that share nothing with others: whole key heads of both sides."""
        p = self.problem
        if p.batch * p.heads * segment.scene.queries > 0:
            for b in slices(p.batch, segment.plan.batches):
                for h in slices(p.heads, max(segment.plan.heads, head_group(p))):
                    yield b, h

    def _cut(self, segment: Segment, b: slice, h: slice) -> Iterator[Block]:
        for heads in slices(h.stop, segment.plan.heads, h.start):
            for q in slices(segment.scene.queries, segment.plan.queries):
                yield Block(b, heads, q)

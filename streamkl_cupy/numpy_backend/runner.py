"""The same tile streaming on the CPU, in NumPy: the embedded default for arrays that live there.

A block is some query rows of some heads; it walks over the key axis in tiles small enough for the cache, so no M x N
matrix ever exists. Per tile the work is two BLAS products and about ten in-place passes. Logits are held in base 2
(the factor log2(e) rides on the scale), because exp2 is the cheapest exponential NumPy has. The scale is applied to the
products, not to the queries: products of 16-bit numbers are exact in float32, those of scaled ones are not.

What a dot product means, the score says (`rules/scores/`); what is summed of a row's logits, and what their derivatives
are, the divergence (`rules/divergences/`); which keys a row sees, the parts of the mask (`rules/masks/`).

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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..arrays import ArrayView, Gradients, Inputs, MaskArrays, Results, Saved, host
from ..concurrency.threads import Team, Turn
from ..problem import Problem
from ..rules import divergences
from ..rules import masks as rules
from ..rules.divergences.interface import RowResults, RowState
from ..rules.scores.interface import LOG2E
from .block import Array, Block, Half, Scratch, Segment, Tile, Totals, canonical, rows_at, slices
from .elements import narrow
from .plan import LEAST_SHARED_PRODUCT, NumPyPlan, head_group, make_plan, threads_for

_Task = TypeVar("_Task")


class _ForwardTask(NamedTuple):
    """One block of the forward, with what it reads and where its rows go."""

    segment: Segment
    at: Block
    views: dict[str, Array]
    outputs: list[Array]


class _BackwardTask(NamedTuple):
    """One block of the backward, with its turn at the key gradients of its group."""

    group: _Group
    at: Block
    turn: Turn


@dataclass
class _Group:
    """Blocks of the backward that add to the same key gradients, and these."""

    segment: Segment
    views: dict[str, Array]
    rows: dict[str, Array]
    grads: dict[str, Array]
    keys: dict[str, Array]
    first_head: int
    blocks: deque[Block]

    def __post_init__(self) -> None:
        self.unfinished = len(self.blocks)
        self._turn: Turn | None = None

    def task(self, team: Team[Any], dtype: np.dtype[Any]) -> _BackwardTask:
        """The next block; the first one brings the sums."""
        if self._turn is None:
            self.totals = Totals(self.keys, dtype)
        self._turn = Turn(team, self._turn)
        return _BackwardTask(self, self.blocks.pop(), self._turn)

    def done(self, team: Team[Any]) -> None:
        """A block is finished; the last one rounds the sums and lets go of them."""
        with team.lock:
            self.unfinished -= 1
            last = self.unfinished == 0
        if last:
            self.totals.store()
            del self.totals


def _wants(side: str, grads: dict[str, Array]) -> bool:
    return f"{side}_q" in grads or f"{side}_k" in grads


class Runner:
    """Runs one problem on CPU arrays; may be kept, and called again with other arrays of the same problem."""

    workspace_bytes = 0  # scratch is its own

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._plans: dict[int, NumPyPlan] = {}
        self._dtype = np.dtype(problem.stat_dtype)
        self._divergence = divergences.of(problem)
        self._mask = rules.parts_of(problem.mask)
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
        """Write KL and both log-sum-exps of every row.

        Raises:
            ValueError: lengths or sequence bounds that do not fit; nothing has been written then.
        """
        op = self.problem.operation
        segments, count = self._segments(masks)
        views = self._views(inputs)
        rows = [self._rows(name, x) for name, x in zip(op.results, outputs, strict=True) if x is not None]
        if self.problem.sequences:  # rows after the last sequence
            for out, empty in zip(rows, (0, -np.inf, -np.inf, *(0 for _ in rows[3:])), strict=True):
                out[...] = empty

        def tasks() -> Iterator[_ForwardTask]:
            for segment in segments:
                here, out_rows = rows_at(op, views, segment), [x[:, :, segment.q] for x in rows]
                for b, h in self._groups(segment):
                    for at in self._blocks(segment, b, h):
                        yield _ForwardTask(segment, at, here, out_rows)

        def work(team: Team[_ForwardTask]) -> None:
            scratch = scratches.pop()
            for task in team:
                found = self._block_forward(task.views, task.segment, task.at, scratch, team)
                for out, x in zip(task.outputs, [x for x in found if x is not None], strict=True):
                    out[task.at] = x

        scratches = self._scratches(segments, count)
        self._team(segments, tasks(), count).run(work)

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
        rows = {name: self._rows(name, x) for name, x in zip(op.Saved._fields, saved, strict=True) if x is not None}
        for x in grads.values():
            x[...] = 0

        def groups() -> Iterator[_Group]:
            for segment in segments:
                here, grads_here = rows_at(op, views, segment), rows_at(op, grads, segment)
                rows_here = {name: x[:, :, segment.q] for name, x in rows.items()}
                for b, h in self._groups(segment):
                    keys = {
                        name: grads_here[name][b, slice(h.start // side.group, h.stop // side.group)]
                        for name, side in [(f"{side}_k", x) for side, x in self.problem.sides.items()]
                        if name in grads_here
                    }
                    blocks = deque(self._blocks(segment, b, h))
                    yield _Group(segment, here, rows_here, grads_here, keys, h.start, blocks)

        def tasks() -> Iterator[_BackwardTask]:
            # As many groups side by side as there are threads, so that these seldom meet in the same keys. Of each its
            # last rows first: under a causal mask they are the most work.
            waiting = groups()
            while window := deque(itertools.islice(waiting, count)):
                while window:
                    group = window.popleft()
                    yield group.task(team, self._dtype)
                    if group.blocks:
                        window.append(group)

        def work(team: Team[_BackwardTask]) -> None:
            scratch = scratches.pop()
            for task in team:
                self._block_backward(task, scratch, team)
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

    def _rows(self, name: str, x: ArrayView) -> Array:
        return canonical(host(x), self.problem.layout, name == "moments")

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

    def _blocks(self, segment: Segment, b: slice, h: slice) -> Iterator[Block]:
        for heads in slices(h.stop, segment.plan.heads, h.start):
            for q in slices(segment.scene.queries, segment.plan.queries):
                yield Block(b, heads, q)

    def _tiles(self, segment: Segment, at: Block) -> Iterator[Tile]:
        """The keys that any row of the block may see: stretches of them, or where the mask has holes, picked ones."""
        q0, q1, step = at.q.start, at.q.stop, segment.plan.keys
        if not self._mask:
            for k in slices(segment.scene.keys, step):
                yield Tile(k, None)
            return
        scene = segment.scene._replace(
            arrays={name: x[at.b] for name, x in segment.scene.arrays.items()}, heads=range(at.h.start, at.h.stop)
        )
        k0, k1 = rules.key_range(self._mask, scene, q0, q1)
        some = rules.holes(self._mask, scene, q0, q1, k0, k1)
        if some is None or some.all():
            for k in slices(k1, step, k0):
                if rules.full(self._mask, scene, q0, q1, k.start, k.stop):
                    yield Tile(k, None)
                else:
                    yield Tile(k, rules.visible(self._mask, scene, np.arange(q0, q1), np.arange(k.start, k.stop)))
            return
        picked = k0 + np.flatnonzero(some)
        for part in slices(len(picked), step):
            keys = picked[part]
            visible = rules.visible(self._mask, scene, np.arange(q0, q1), keys)
            yield Tile(keys, None if visible.all() else visible)

    def _halves(self, views: dict[str, Array], at: Block, scratch: Scratch) -> tuple[Half, Half]:
        p = self.problem
        teacher, student = (Half(name, side, views, at, scratch) for name, side in p.sides.items())
        return teacher, student

    def _block_forward(
        self, views: dict[str, Array], segment: Segment, at: Block, scratch: Scratch, team: Team[Any]
    ) -> RowResults:
        teacher, student = self._halves(views, at, scratch)
        state: RowState = self._divergence.row_state(teacher.q.shape[:3], self._dtype, self.problem.entropy)
        for later in (None, *self._divergence.later_states):
            state = state if later is None else later(state)
            for tile in self._tiles(segment, at):
                team.pause()
                state.absorb(teacher.logits(tile), student.logits(tile), tile.visible, scratch)
        return state.finish(teacher.offset, student.offset)

    def _block_backward(self, task: _BackwardTask, scratch: Scratch, team: Team[Any]) -> None:
        group, at, divergence = task.group, task.at, self._divergence
        views, grads, segment = group.views, group.grads, group.segment
        halves = self._halves(views, at, scratch)
        wanted = _wants("teacher", grads), _wants("student", grads)
        saved = {name: x[at].astype(self._dtype) for name, x in group.rows.items()}
        value: Array | float = 0.0
        if any(want and half.name in divergence.needs_value for half, want in zip(halves, wanted, strict=True)):
            if "kl" not in saved:
                saved["kl"] = self._block_forward(views, segment, at, scratch, team).value
            value = saved["kl"][..., None] * LOG2E
        if "moments" in saved:
            value = saved["moments"][..., None, :]
        # -inf marks a row without keys: not a number to subtract, and the row weighs nothing whatever memory holds.
        empty = np.isneginf(saved["teacher_lse"])
        lses: list[Array] = []
        # Upstream gradient and both factors weigh whole rows, so they multiply the m x D side of each product, not the
        # m x n one.
        weight = {
            half.name: np.where(empty, 0, saved["grad"]) * half.factor * factor
            for half, factor in zip(halves, divergence.factors, strict=True)
        }
        dq = {half.name: np.zeros(half.q.shape, self._dtype) for half in halves if f"{half.name}_q" in grads}
        weighted_q = {half.name: half.weighted(weight[half.name]) for half in halves if f"{half.name}_k" in grads}
        for tile in self._tiles(segment, at):
            team.pause()
            x, y = (half.logits(tile, want) for half, want in zip(halves, wanted, strict=True))
            # What the logits lack is known with the first tile.
            lses = lses or [
                np.where(empty, 0, saved[f"{half.name}_lse"] * LOG2E - half.offset)[..., None] for half in halves
            ]
            x -= lses[0]
            y -= lses[1]
            both = divergence.tile_gradients(x, y, value, wanted, tile.visible, scratch)
            for half, d_logits in zip(halves, both, strict=True):
                if d_logits is None:
                    continue
                if half.slopes is not None:
                    d_logits *= half.slopes
                half.clean(d_logits, tile)
                if half.name in dq:
                    half.add_dq(dq[half.name], d_logits)
                if half.name in weighted_q:
                    heads = slice(half.key_heads.start - group.first_head // half.group, None)
                    total = group.totals[f"{half.name}_k"][:, heads][:, : half.keys.shape[1]]
                    half.add_dk(total, tile, d_logits, weighted_q[half.name], task.turn)
            task.turn.reach(tile.end)
        for half in halves:
            if half.name in dq:
                out = grads[f"{half.name}_q"]
                out[at] = narrow(dq[half.name] * weight[half.name][..., None], out.dtype)

"""Divergences on the CPU: blocks whose tiles have logits of both distributions.

What is summed of a row's logits, and what their derivatives are, the divergence says (`rules/divergences/`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..concurrency.threads import Team
from ..problem import Problem
from ..rules import divergences
from ..rules.divergences.interface import RowResults, RowState
from ..rules.divergences.sums import Sums
from ..rules.scores.interface import LOG2E
from .block import Array, Block, Scratch, Segment
from .blocks import BackwardTask, Blocks
from .elements import narrow


def _wants(side: str, grads: dict[str, Array]) -> bool:
    return f"{side}_q" in grads or f"{side}_k" in grads


class KLBlocks(Blocks):
    """Of `attention_kl`."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._divergence = divergences.of(problem)

    def forward(
        self, views: dict[str, Array], segment: Segment, at: Block, scratch: Scratch, team: Team[Any]
    ) -> RowResults:
        teacher, student = self.halves(views, at, scratch)
        state: RowState = self._divergence.row_state(teacher.q.shape[:3], self.dtype, self.problem.entropy)
        for later in (None, *self._divergence.later_states):
            state = state if later is None else later(state)
            for tile in self.tiles(segment, at):
                team.pause()
                state.absorb(teacher.logits(tile), student.logits(tile), tile.visible, scratch)
        results = state.finish(teacher.offset, student.offset)
        if self.problem.some_keys:
            assert isinstance(state, Sums), "states of rows that merge are of one pass"
            results = results._replace(moments=state.numbers())
        return results

    def backward(self, task: BackwardTask, scratch: Scratch, team: Team[Any]) -> None:
        group, at, divergence = task.group, task.at, self._divergence
        views, grads, segment = group.views, group.grads, group.segment
        halves = self.halves(views, at, scratch)
        if self.problem.sunk:
            for half in halves:
                half.leave_keys()
        wanted = _wants("teacher", grads), _wants("student", grads)
        saved = {name: x[at].astype(self.dtype) for name, x in group.rows.items()}
        value: Array | float = 0.0
        if any(want and half.name in divergence.needs_value for half, want in zip(halves, wanted, strict=True)):
            if "kl" not in saved:
                saved["kl"] = self.forward(views, segment, at, scratch, team).value
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
        dq = {half.name: np.zeros(half.q.shape, self.dtype) for half in halves if f"{half.name}_q" in grads}
        weighted_q = {half.name: half.weighted(weight[half.name]) for half in halves if f"{half.name}_k" in grads}
        for tile in self.tiles(segment, at):
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

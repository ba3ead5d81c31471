"""What operations on the CPU have in common below threads: blocks of rows, the tiles of keys that they walk, and what
blocks that add to the same keys share. Each operation has its blocks, forward and backward, in a module of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..concurrency.threads import Team, Turn
from ..problem import Problem
from ..rules import masks as rules
from .block import Array, Block, Half, Scratch, Segment, Tile, Totals, slices


class ForwardTask(NamedTuple):
    """One block of the forward, with what it reads and where its rows go."""

    segment: Segment
    at: Block
    views: dict[str, Array]
    outputs: list[Array]


class BackwardTask(NamedTuple):
    """One block of the backward, with its turn at the key gradients of its group."""

    group: Group
    at: Block
    turn: Turn


@dataclass
class Group:
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

    def task(self, team: Team[Any], dtype: np.dtype[Any]) -> BackwardTask:
        """The next block; the first one brings the sums."""
        if self._turn is None:
            self.totals = Totals(self.keys, dtype)
        self._turn = Turn(team, self._turn)
        return BackwardTask(self, self.blocks.pop(), self._turn)

    def done(self, team: Team[Any]) -> None:
        """A block is finished; the last one rounds the sums and lets go of them."""
        with team.lock:
            self.unfinished -= 1
            last = self.unfinished == 0
        if last:
            self.totals.store()
            del self.totals


class Blocks(ABC):
    """The blocks of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.dtype = np.dtype(problem.stat_dtype)
        self._mask = rules.parts_of(problem.mask)

    @abstractmethod
    def forward(
        self, views: dict[str, Array], segment: Segment, at: Block, scratch: Scratch, team: Team[Any]
    ) -> tuple[Array | None, ...]:
        """Results of the rows of a block, in the order of the operation's record; None for what the call has not."""

    @abstractmethod
    def backward(self, task: BackwardTask, scratch: Scratch, team: Team[Any]) -> None:
        """Write gradients by the queries of a block, and add those by keys to the totals of its group in its turn."""

    def tiles(self, segment: Segment, at: Block) -> Iterator[Tile]:
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

    def halves(self, views: dict[str, Array], at: Block, scratch: Scratch) -> list[Half]:
        """Queries and keys of each side, inside a block."""
        op, all_keys = self.problem.operation, not self.problem.some_keys
        return [
            Half(name, side, (views[op.pair(name)[0].name], views[op.pair(name)[1].name]), at, scratch, all_keys)
            for name, side in self.problem.sides.items()
        ]

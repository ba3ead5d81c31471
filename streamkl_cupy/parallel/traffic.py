"""What a strategy moves and holds, counted before anything is moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ..arrays import ITEMSIZE
from .engine import KEYS, NAMES, QUERIES
from .shards import Runs


@dataclass(frozen=True)
class Traffic:
    """Bytes of one rank, the largest: what it receives from others, and what it holds beside shards and gradients."""

    forward: int
    """Received for rows."""
    backward: int
    """Received for gradients, of what has been kept."""
    gathered: int
    """Held: what was gathered, or exchanged."""
    sums: int
    """Held in a backward: gradients in float32 on their way."""
    workspace: int = 0
    """Held in a backward: what kernels ask for, of arrays on a GPU; 0 of others."""


@dataclass(frozen=True)
class ShardingPlan:
    """What a rank of a sharded call would do."""

    rank: int
    size: int
    strategy: str
    why: str
    """Why it is that strategy."""
    head_groups: int
    traffic: Traffic
    wrt: tuple[str, ...]
    blocks: tuple[tuple[Runs, Runs], ...]
    """Rows and keys of each launch, in positions of the whole sequence."""

    def __str__(self) -> str:
        moved = self.traffic
        groups = f", keys in {self.head_groups} steps" if self.head_groups > 1 else ""
        lines = [
            f"rank {self.rank} of {self.size}: {self.strategy} ({self.why}){groups}",
            f"  receives {moved.forward:,} B for rows, {moved.backward:,} B for gradients of {', '.join(self.wrt)}",
            f"  holds {moved.gathered:,} B of what is gathered, {moved.sums:,} B of gradients in float32 beside shards "
            f"and gradients" + (f", {moved.workspace:,} B of workspaces" if moved.workspace else ""),
            *(f"  rows {_spelled(q)} x keys {_spelled(k)}" for q, k in self.blocks),
        ]
        return "\n".join(lines)


def _spelled(runs: Runs) -> str:
    return " and ".join(f"{first:,} to {last:,}" for first, last in runs)


def itemsize(x: Any) -> int:
    """Of an element, by the name of its dtype."""
    return ITEMSIZE[str(x.dtype).rpartition(".")[2]]


def traffic(
    strategy: str,
    inputs: Sequence[Any],
    longest: tuple[int, int],
    size: int,
    axis: int,
    wrt: Sequence[str],
    groups: int = 1,
    floats: int = 0,
) -> Traffic:
    """Of shards as long as the longest: `longest` rows and keys, whose key heads go in so many groups, and states of
    rows so many numbers. A strategy "early" is "all_gather" shard by shard."""
    if size == 1:
        return Traffic(0, 0, 0, 0)

    def elements(i: int) -> int:
        """Of a shard."""
        shape = tuple(inputs[i].shape)
        return prod((*shape[:axis], longest[i in KEYS], *shape[axis + 1 :]))

    others = size - 1
    q, k = (sum(elements(i) * itemsize(inputs[i]) for i in side) for side in (QUERIES, KEYS))
    q_sums, k_sums = (4 * sum(elements(i) for i in side if NAMES[i] in wrt) for side in (QUERIES, KEYS))
    rows = elements(2) // inputs[2].shape[-1] if inputs[2].shape[-1] else 0
    if strategy == "early":
        # Sums of keys that are the rank's own, sent and received. Of queries those of a call and of calls before,
        # and with several others, of whom half have keys for half of the rows, those of these.
        sums = (2 * others + 1) * k_sums + (2 if size == 2 else 3) * q_sums
        return Traffic(others * k, others * k_sums, others * k, sums // groups)
    if strategy == "all_gather":
        return Traffic(others * k, others * k_sums, size * k, 2 * size * k_sums)
    if strategy == "all_gather_queries":
        states = 4 * floats * rows
        return Traffic(others * (q + states), others * (16 * rows + q_sums), size * (q + 2 * states), 2 * size * q_sums)
    if strategy == "p2p":
        return Traffic(others * k, others * k + size * k_sums, 2 * k, 3 * k_sums + q_sums)
    wanted = sum(elements(i) * itemsize(inputs[i]) for i in range(4) if NAMES[i] in wrt)
    share = others / size
    return Traffic(int(share * (q + k + 12 * rows)), int(share * (4 * rows + wanted)), 2 * (q + k), 2 * wanted)

"""What an operation says of itself: its operands and what they are to it, its row results, its gradients, its rules.

Whoever handles operands asks this record which of them is whose: nothing takes their names apart.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple


class OperandSpec(NamedTuple):
    """One array that an operation computes from, and differentiates by."""

    name: str
    side: str
    """The distribution that it belongs to."""
    rows: Literal["q", "k"]
    """Whether its rows are queries or keys, as kernels name them."""
    max_dim: int
    """Of its rows, on any device."""


class Task(NamedTuple):
    """One kernel's part of an operation."""

    kind: str
    """As `KERNELS` lists them: "forward"; "gradient" of one input; "fused", both gradients of a side. Or a kernel that
    goes with these: "combine", "key_bits"."""
    side: str = ""
    """The side that is differentiated."""
    stationary: str = "q"
    """The operand whose rows stay with a block, "q" or "k", while the other's are streamed; of a gradient the one that
    it is of."""
    outputs: tuple[tuple[str, str], ...] = ()
    """What it writes: (field of the kernel's arguments, name of the result)."""

    @property
    def name(self) -> str:
        """What the task makes, for people and as a key."""
        if self.side and len(self.outputs) == 1:
            return self.results[0]
        return self.side or self.kind

    @property
    def results(self) -> tuple[str, ...]:
        """Names of what it writes."""
        return tuple([name for _, name in self.outputs])


@dataclass(frozen=True, eq=False)
class Op:
    """An operation. There is one object of each."""

    name: str
    operands: tuple[OperandSpec, ...]
    like: str
    """The operand whose framework, device and stream are the call's."""
    rows: tuple[str, ...]
    """Results of a forward, one value for each query row."""
    saved: tuple[str, ...]
    """What a backward reads of each row: the derivative of the first of `rows`, and what the forward left."""
    wrt: tuple[str, ...]
    """Operands by which it is differentiated where nothing is said."""
    forward: Task
    gradients: tuple[Task, ...]
    """Each of one operand, in their order."""
    fused: tuple[Task, ...]
    """Each of several operands in one pass, which is preferred where all of them are wanted."""
    max_gradient_dim: int
    """Of the rows of what is differentiated on a GPU."""
    rules: tuple[str, ...]
    """Which rules its kernels include: "mask", "divergence", "score"."""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Those of the operands."""
        return tuple(x.name for x in self.operands)

    @cached_property
    def at(self) -> int:
        """Where among the operands `like` is."""
        return self.names.index(self.like)

    @cached_property
    def sides(self) -> tuple[str, ...]:
        """Each once, in the order of its operands."""
        return tuple(dict.fromkeys(x.side for x in self.operands))

    @cached_property
    def operand(self) -> dict[str, OperandSpec]:
        """Operands by name."""
        return {x.name: x for x in self.operands}

    def side(self, side: str) -> tuple[OperandSpec, ...]:
        """The operands of a side."""
        return tuple(x for x in self.operands if x.side == side)

    def on(self, sides: Collection[str], names: Collection[str]) -> tuple[str, ...]:
        """Those of the names, in their order, whose operands belong to one of the sides."""
        return tuple(name for name in names if self.operand[name].side in sides)

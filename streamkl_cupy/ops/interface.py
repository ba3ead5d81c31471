"""What an operation says of itself: its operands and what they are to it, its row results, its gradients, its rules.

Whoever handles operands asks this record which of them is whose: nothing takes their names apart.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any, Literal, NamedTuple

Elements = Literal["", "teacher", "index", "number", "row number", "bool", "integer"]


class OperandSpec(NamedTuple):
    """One array that an operation computes from, and differentiates by."""

    name: str
    side: str
    """The distribution that it belongs to; empty where it belongs to none."""
    rows: Literal["q", "k", ""]
    """Whether its rows are queries or keys, as kernels name them; empty where it has neither rows nor a batch."""
    heads: str
    """A letter for how many it has; operands with one letter have equally many. Those of keys divide those of the
    queries of their side. Empty where it has no axis of them."""
    dim: str
    """The same of its columns."""
    max_dim: int = 0
    """Most columns, on any device."""
    extra: bool = False
    """Whether it is another array of its side than the queries and keys whose products are the logits."""
    optional: bool = False
    """Whether there are calls without it, in which it is None."""
    one_for_all: bool = False
    """Whether one head may stand for all."""
    elements: Elements = ""
    """What they are, where not all operands of a side have one type, which is that of numbers with columns."""
    may_lack: str = ""
    """The letter of an axis that may be left out where its extent is 1."""

    @property
    def axes(self) -> tuple[str, str, str, str]:
        """Batch, heads, rows and columns by letter, empty those that there are not."""
        return ("B" if self.rows else "", self.heads, {"q": "M", "k": "N", "": ""}[self.rows], self.dim)

    @property
    def letters(self) -> str:
        """Those of the axes that there are."""
        return "".join(self.axes)


class Task(NamedTuple):
    """One kernel's part of an operation."""

    kind: str
    """As `KERNELS` lists them: "forward"; "gradient" of one input; "fused", both gradients of a side. Or a kernel that
    goes with these: "combine", "mask_bits", "saved_rows"."""
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


class SavedSpec(NamedTuple):
    """One array that a backward reads besides the operands."""

    name: str
    like: str
    """The result of the forward whose shape and type it has: the one that it is, or is the derivative of."""
    optional: bool = False
    """Whether there are backwards that do not read it."""
    field: str = ""
    """What kernels' arguments call it, unless that is its name."""
    instead: str = ""
    """What kernels are given in place of one that a backward does not read; empty: nothing, address 0."""


@dataclass(frozen=True, eq=False)
class Op:
    """An operation. There is one object of each."""

    name: str
    operands: tuple[OperandSpec, ...]
    like: str
    """The operand whose framework, device and stream are the call's."""
    rows: tuple[str, ...]
    """Results of a forward, one value for each query row; the first is what reductions take."""
    log_sum_exps: tuple[str, ...]
    """Which of the results are those: -inf for a row without a key, which has 0 in all others."""
    saved: tuple[SavedSpec, ...]
    """What a backward reads: derivatives of results, and what the forward left. What is optional comes last."""
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
    asked_rows: tuple[tuple[str, str, str], ...] = ()
    """Further results of a forward: (field of the problem that asks for it, of the kernel's arguments, result)."""
    ruled_rows: tuple[str, ...] = ()
    """Results that only some of the rules' entries have, with axes of their own after the row's, or only some calls."""
    vectors: tuple[tuple[str, str], ...] = ()
    """Results with columns for each query row, in the type of the operands: (name, the letter of these columns)."""
    problem_fields: tuple[tuple[str, str], ...] = ()
    """Options that a field of the problem of its own has, since others than kernels ask for it: (option, field)."""
    one_batch: bool = True
    """Whether all arrays of a call begin with the batch, or none does, so that an axis which vmap adds becomes a part
    of that; otherwise it becomes a loop."""

    # The arrays of a call are tuples of these types: views, addresses or arrays, None for what there is not.

    @cached_property
    def Inputs(self) -> Any:
        """A tuple with a field for each operand."""
        return namedtuple("Inputs", self.names)

    @cached_property
    def Gradients(self) -> Any:
        """A tuple with a field for the gradient of each operand."""
        return namedtuple("Gradients", self.names)

    @cached_property
    def Results(self) -> Any:
        """A tuple with a field for each result of a forward; those that not every call has are None by default."""
        optional = len(self.asked_rows) + len(self.ruled_rows)
        return namedtuple("Results", self.results, defaults=(None,) * optional)

    @cached_property
    def Saved(self) -> Any:
        """A tuple with a field for each array that a backward reads."""
        optional = sum(x.optional for x in self.saved)
        return namedtuple("Saved", [x.name for x in self.saved], defaults=(None,) * optional)

    @cached_property
    def results(self) -> tuple[str, ...]:
        """Names of all that a forward may give: those that every call has come first."""
        always = (*self.rows, *(name for name, _ in self.vectors))
        return (*always, *(name for _, _, name in self.asked_rows), *self.ruled_rows)

    @cached_property
    def empty(self) -> dict[str, float]:
        """What a row without a key has of each result."""
        return {name: -inf if name in self.log_sum_exps else 0.0 for name in self.results}

    @cached_property
    def differentiable(self) -> tuple[str, ...]:
        """Results whose derivatives a backward reads."""
        return tuple(x.like for x in self.saved if x.name != x.like)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Those of the operands."""
        return tuple(x.name for x in self.operands)

    @cached_property
    def optional(self) -> bool:
        """Whether there are calls without some of its operands."""
        return any(x.optional for x in self.operands)

    @cached_property
    def at(self) -> int:
        """Where among the operands `like` is."""
        return self.names.index(self.like)

    @cached_property
    def sides(self) -> tuple[str, ...]:
        """Each once, in the order of its operands."""
        return tuple(dict.fromkeys(x.side for x in self.operands))

    @cached_property
    def alike(self) -> tuple[tuple[OperandSpec, int, OperandSpec], ...]:
        """(operand, axis, operand): what has an axis in common with which before it, of its own side where one has."""
        found = []
        for i, x in enumerate(self.operands):
            before = sorted(self.operands[:i], key=lambda other: other.side != x.side)
            for axis in (3, 0, 1, 2):
                other = next((other for other in before if x.axes[axis] in other.axes), None)
                found += [(x, axis, other)] if other else []
        return tuple(found)

    @cached_property
    def operand(self) -> dict[str, OperandSpec]:
        """Operands by name."""
        return {x.name: x for x in self.operands}

    def side(self, side: str) -> tuple[OperandSpec, ...]:
        """The operands of a side."""
        return tuple(x for x in self.operands if x.side == side)

    def pair(self, side: str) -> tuple[OperandSpec, OperandSpec]:
        """The queries and the keys of a side, whose products are its logits."""
        q, k = sorted((x for x in self.side(side) if not x.extra), key=lambda x: "qk".index(x.rows))
        return q, k

    def given(self, side: str) -> OperandSpec | None:
        """The operand that has a number for each pair of a query and a key, of a side that has this in their place."""
        first, *others = self.side(side)
        return first if first.extra and not others else None

    @cached_property
    def saved_fields(self) -> tuple[str, ...]:
        """What kernels' arguments call the arrays that a backward reads besides the operands."""
        return tuple(x.field or x.name for x in self.saved)

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """What kernels' arguments call the operands. What is given has the place of its side's queries."""
        return tuple(f"{x.side}_q" if self.given(x.side) else x.name for x in self.operands)

    @cached_property
    def by(self) -> tuple[str, ...]:
        """Operands that it can be differentiated by."""
        return tuple(name for task in self.gradients for name in task.results)

    @cached_property
    def given_sides(self) -> tuple[str, ...]:
        """Sides whose logits are an operand, not products."""
        return tuple(side for side in self.sides if self.given(side))

    def option(self, side: str, what: str) -> str:
        """The option that says something of a side; of the only one it needs no name."""
        return f"{side}_{what}" if len(self.sides) > 1 else what

    def on(self, sides: Collection[str], names: Collection[str]) -> tuple[str, ...]:
        """Those of the names, in their order, whose operands belong to one of the sides."""
        return tuple(name for name in names if self.operand[name].side in sides)

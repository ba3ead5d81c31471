"""What a call asks for, as frozen values: no arrays, no pointers, no frameworks.

One alphabet throughout: B batch, H heads, M query rows, N keys, D head dim. Whatever the caller's layout and
number of axes, everything here is in the canonical order (batch, head, row, column), strides counted in elements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from .ops import ATTENTION_KL, OPS, Op
from .ops.attention_kl import INPUT_NAMES as INPUT_NAMES
from .ops.attention_kl import STUDENT as STUDENT
from .ops.attention_kl import InputName as InputName
from .ops.attention_kl import Wrt as Wrt

if TYPE_CHECKING:
    from .patterns import BlockPattern

HEADS = "HKIJLG"
"""Letters that records have for heads, and for groups of these."""


def counted(number: int, one: str, many: str = "") -> str:
    """A number with its noun: 1 block, 2 blocks."""
    return f"{number} {one if number == 1 else many or one + 's'}"


class Device(NamedTuple):
    """Where the arrays live: kind "cpu" or "cuda", and the ordinal of the GPU. A tuple: every call hashes it."""

    kind: str
    index: int = 0  # type: ignore[assignment]  # shadows a method of tuple that nobody wants here

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


@dataclass(frozen=True)
class Operand:
    """One input array: its extents, element type, strides in elements and whether its base is 16-byte aligned."""

    heads: int
    rows: int
    dim: int
    dtype: str
    strides: tuple[int, int, int, int]
    aligned: bool


@dataclass(frozen=True)
class Side:
    """One distribution: queries, keys, the factor on their product and what becomes of that."""

    q: Operand
    k: Operand
    scale: float
    score: str = "dot"
    """What dot products mean, by its name in the registry."""
    softcap: float | None = None
    """Within what logits are softly kept; None: within nothing."""

    @property
    def dim(self) -> int:
        return self.q.dim

    @property
    def given(self) -> bool:
        """Whether its logits are not products but read, one for each pair. Then queries and keys have no columns, and
        their strides say what each adds to the address of a pair."""
        return self.dim == 0

    @property
    def dtype(self) -> str:
        return self.q.dtype

    @property
    def group(self) -> int:
        """Query heads that read one key head."""
        return self.q.heads // max(self.k.heads, 1)


@dataclass(frozen=True)
class MaskSpec:
    """A mask: parts of the registry by name, in its order, with their integers by name. Without parts it hides nothing.

    A pair is visible where every part lets it pass.
    """

    parts: tuple[str, ...] = ()
    params: tuple[tuple[str, int], ...] = ()
    blocks: BlockPattern | str | None = None
    """The block pattern, or its digest: the mask of a call has the digest, because problems are kept for as long as
    they may be useful, and patterns for as long as their owners keep them."""

    @property
    def pattern(self) -> BlockPattern | None:
        """The block pattern, if there is one; whoever asks during a call finds it alive."""
        if not isinstance(self.blocks, str):
            return self.blocks
        from .patterns.pattern import pattern_of

        return pattern_of(self.blocks)

    def __getitem__(self, key: str) -> int:
        return dict(self.params)[key]

    @property
    def name(self) -> str:
        """For people: "none", "causal", "window+lengths"."""
        return "+".join(self.parts) or "none"


@dataclass(frozen=True, kw_only=True)
class AnyProblem(ABC):
    """A validated call of any operation, without arrays. Hashable: it is the key under which plans and kernels are
    kept. What else a problem says is up to the kind of its operation."""

    op: str
    """The operation, by its name among `OPS`."""
    device: Device
    layout: str = "bhnd"
    rank: int = 4
    """Axes of operands with columns."""
    mask: MaskSpec = MaskSpec()
    """Parts that hide pairs; an operation may have other ways to say what rows see."""
    sequences: int = 0
    """Sequences that lie one after the other in rows and keys; 0: all is one. Then batch is 1, and queries and keys
    count all of them."""
    deterministic: bool = False
    wide_gradients: str = ""
    """Of queries "q", of keys "k": whose gradients are float32 beside 16-bit operands, for others to be added to."""

    @property
    def operation(self) -> Op:
        """The record of the operation."""
        return OPS[self.op]

    @property
    @abstractmethod
    def dtypes(self) -> tuple[str, ...]:
        """Element types of what products are of."""

    @property
    @abstractmethod
    def row_shape(self) -> tuple[int, ...]:
        """Shape of row results in the caller's layout."""

    @abstractmethod
    def operand(self, name: str) -> Operand:
        """An input with columns by its name, such as "student_k"."""

    @property
    def stat_dtype(self) -> str:
        """Element type of row results: float64 where an input is, float32 otherwise."""
        return "float64" if "float64" in self.dtypes else "float32"

    def gradient_dtype(self, name: str) -> str:
        """Element type of the gradient of an operand."""
        dtype = self.operand(name).dtype
        wide = self.operation.operand[name].rows in self.wide_gradients
        return "float32" if wide and dtype != "float64" else dtype

    def callers_axes(self, axes: str) -> str:
        """Axes of a record's operand as the caller's arrays have them."""
        return callers_axes(axes, self.layout, self.rank)


@dataclass(frozen=True)
class Problem(AnyProblem):
    """One whose operands are queries and keys of sides."""

    batch: int
    heads: int
    queries: int
    keys: int
    distributions: tuple[Side, ...]
    """In the order of the operation's sides."""
    divergence: str = "kl"
    """By its name in the registry."""
    parameters: tuple[tuple[str, float], ...] = ()
    """Its numbers by name, those that were given."""
    entropy: bool = False
    """Whether the teacher's entropy is a result of the forward."""
    some_keys: bool = False
    """Whether its rows see keys besides those of the call. Then a forward leaves the states of rows as their moments,
    and a backward, which reads what rows have of all their keys, takes nothing from keys on the strength of logit
    gradients that add up to 0."""
    sunk: bool = False
    """Whether sinks take mass of rows, so that the logit gradients of a row do not add up to 0."""
    op: str = field(default=ATTENTION_KL.name, kw_only=True)
    extras: tuple[Operand, ...] = ()
    """Operands beside queries and keys, in the operation's order."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Options that only those read who compute it, by name; those that have their defaults are left out."""

    def setting(self, option: str, default: Any) -> Any:
        """What an option of `settings` says."""
        return dict(self.settings).get(option, default)

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(side.dtype for side in self.distributions)

    @property
    def open_rows(self) -> bool:
        """Whether rows have mass besides their keys, in others or in sinks, so that their logit gradients do not add up
        to 0."""
        return self.some_keys or self.sunk

    def operand(self, name: str) -> Operand:
        op = self.operation
        spec = op.operand[name]
        if spec.extra:
            return self.extras[[x.name for x in op.operands if x.extra].index(name)]
        return getattr(self.side(spec.side), spec.rows)  # type: ignore[no-any-return]

    @property
    def multiplied(self) -> dict[str, Operand]:
        """Of `extras` those that tiles are multiplied by, by name: no side that is given."""
        op = self.operation
        extras = zip([x for x in op.operands if x.extra], self.extras, strict=True)
        return {spec.name: x for spec, x in extras if not op.given(spec.side)}

    def columns(self, letter: str) -> int:
        """Columns that the operation calls by a letter."""
        return next(self.operand(x.name).dim for x in self.operation.operands if x.dim == letter)

    def side(self, name: str) -> Side:
        """A side by its name."""
        return self.distributions[self.operation.sides.index(name)]

    @property
    def sides(self) -> dict[str, Side]:
        """All of them, in the order of the operation's operands."""
        return dict(zip(self.operation.sides, self.distributions, strict=True))

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of row results in the caller's layout: (B, H, M) or (B, M, H), fewer axes as given."""
        return self._callers_order((self.batch, self.heads, self.queries))

    def row_strides(self) -> tuple[int, ...]:
        """Canonical (batch, head, row) strides of a compact array of `row_shape`."""
        return canonical_strides(compact_strides(self.row_shape), self.rank - 1, self.layout, trailing=0)

    def input_shape(self, name: str) -> tuple[int, ...]:
        """Shape of an input, and so of its gradient, in the caller's layout."""
        x = self.operand(name)
        return (*self._callers_order((self.batch, x.heads, x.rows)), x.dim)

    def compact_input_strides(self, name: str) -> tuple[int, ...]:
        """Canonical strides of a compact array of `input_shape(name)`."""
        return canonical_strides(compact_strides(self.input_shape(name)), self.rank, self.layout, trailing=1)

    def compact_vector_strides(self, letter: str) -> tuple[int, ...]:
        """Canonical strides of a compact array with so many columns for each query row."""
        shape = (*self.row_shape, self.columns(letter))
        return canonical_strides(compact_strides(shape), self.rank, self.layout, trailing=1)

    def _callers_order(self, bhr: tuple[int, int, int]) -> tuple[int, ...]:
        sizes = dict(zip("BHM", bhr))
        return tuple([sizes[axis] for axis in _kept_axes("BHM", self.layout, self.rank)])


def callers_axes(axes: str, layout: str, rank: int) -> str:
    """Axes of a record in the order that a caller has them in whose operands with columns have so many; such arrays are
    without a batch where they have 3, and without heads where they have 2."""
    if rank < 4:
        axes = axes.replace("B", "")
    at = next((i for i, letter in enumerate(axes) if letter in HEADS), None)
    if at is None:
        return axes
    if rank < 3:
        return axes[:at] + axes[at + 1 :]
    return axes[:at] + axes[at + 1 : at + 2] + axes[at] + axes[at + 2 :] if layout == "bnhd" else axes


# Asked several times in every call; the function itself is traced too.
_kept_axes = lru_cache(maxsize=16)(callers_axes)


def compact_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Row-major strides in elements."""
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


@lru_cache(maxsize=4096)
def canonical_strides(strides: tuple[int, ...], rank: int, layout: str, trailing: int) -> tuple[int, ...]:
    """A caller's strides in the order (batch, head, row[, column]); absent axes get 0."""
    lead = rank - trailing
    b = strides[0] if lead == 3 else 0
    if lead == 1:
        h, r = 0, strides[0]
    else:
        h, r = strides[lead - 2 : lead] if layout == "bhnd" else strides[lead - 2 : lead][::-1]
    return (b, h, r, *strides[lead : lead + trailing])

"""What a part of a mask must offer on the host, beside its header.

A mask lets a pair of row and key pass where all its parts do. Everything else asks the parts: callers' options and
arrays become parts or errors, kernels get their headers, integers and arrays in the registry's order, the NumPy backend
asks what to skip and what to hide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...problem import MaskSpec

if TYPE_CHECKING:
    from ...patterns import BlockPattern

Range = tuple[int, int]
Shape = tuple[int, ...]
Bools = NDArray[np.bool_]
Indices = NDArray[Any]


class Chosen(Protocol):
    """The static options that masks are made of, checked each for itself."""

    @property
    def causal(self) -> bool: ...
    @property
    def q_offset(self) -> int | None: ...
    @property
    def window(self) -> tuple[int, int] | None: ...
    @property
    def block_mask(self) -> BlockPattern | None: ...


class Extents(NamedTuple):
    """Those of a call; `rank` is the number of axes of its inputs."""

    batch: int
    heads: int
    queries: int
    keys: int
    rank: int = 4


class Asked(NamedTuple):
    """What a call asks for, once its inputs have been looked at."""

    options: Chosen
    shapes: Mapping[str, Shape]
    """Of the arrays that were given, by name."""
    extents: Extents
    sequences: int
    """Sequences that lie one after the other in rows and keys; 0: all is one."""


class Scene(NamedTuple):
    """What a mask is asked about: some heads of some batch entries, or of one packed sequence, with its values.

    Rows and keys are counted from the start of the entry or sequence.
    """

    queries: int
    keys: int
    params: Mapping[str, int]
    """The integers of all parts; `q_offset` is the sequence's own."""
    arrays: Mapping[str, Indices] = {}
    """What parts read, by name: (b, ...), of the entries asked about. Absent when a call is planned."""
    pattern: Any = None
    """A `BlockPattern`."""
    heads: range = range(1)
    """Query heads."""


class Segment(NamedTuple):
    """Rows and keys that belong together, as slices of those of a call, and the integers of their mask."""

    q: slice
    k: slice
    params: Mapping[str, int]


@dataclass(frozen=True)
class MaskArray:
    """An array that a part reads, an option of every call."""

    name: str
    dtype: str
    """The one that it must have."""
    axes: int
    """Beside that of the batch."""
    misfit: Callable[[Shape, Extents], str]
    """What is wrong with a shape, to follow it in a sentence; empty where it fits."""
    check_values: Callable[[NDArray[Any], Extents], None]
    """Raise where values are wrong that can be read: kernels on a GPU clamp them instead."""
    per_entry: bool = True
    """Whether batch entries have values of their own."""
    of: Literal["", "keys", "queries"] = ""
    """Of which positions it says something, where that is cut with them."""
    cut: Callable[[Any, int, int], Any] = lambda x, start, stop: x
    """(array of any library, start, stop) -> what it says of the positions [start, stop), counted from there."""
    bits: bool = False
    """Whether kernels get one bit for each position, packed first by a small kernel, so that it may have any strides;
    others are read as they lie."""


class Cutting(NamedTuple):
    """Some rows and some keys of a call, which are to be a call of their own."""

    options: Chosen
    """Of the whole call."""
    extents: Extents
    """Likewise."""
    q: Range
    k: Range
    heads: Range | None = None
    """Some of the query heads; None: all."""


@dataclass(frozen=True)
class Packing:
    """Of a part that has sequences lie one after the other in the inputs."""

    layout: str
    bounds: tuple[str, str]
    """The arrays that say where sequences begin and end, of rows and of keys."""
    check: Callable[[Chosen, Mapping[str, Shape], Mapping[str, Shape]], None]
    """(options, shapes of masks' arrays, shapes of inputs): raise what does not go with it."""
    sequences: Callable[[Mapping[str, Shape]], int]
    """How many there are, from the shapes of masks' arrays."""
    segments: Callable[[Mapping[str, Indices], Mapping[str, int]], list[Segment]]
    """(values of masks' arrays, integers of the mask) -> the sequences."""


LIST_WORDS = 4
"""The addresses of a pattern's three lists, and for how many heads these are."""


@dataclass(frozen=True)
class Part:
    """One rule for which keys a query row may see.

    Functions of a scene answer for all its batch entries and heads together. Ranges are half open and may reach beyond
    the matrix; they may be wider than what is really visible, never narrower: they decide which tiles are skipped.
    """

    name: str
    header: str
    struct: str
    params: tuple[str, ...]
    arrays: tuple[MaskArray, ...]
    asked: Callable[[Asked], Mapping[str, int] | None]
    """Its integers where a call asks for it; None where not. Of a name that two parts have the first one's counts."""
    visible: Callable[[Scene, Indices, Indices], Bools | bool]
    """(scene, rows, keys) -> what passes, to broadcast to (b, h, m, n); rows are (m, 1) and keys (n,)."""
    key_range: Callable[[Scene, int, int], Range]
    """(scene, q0, q1) -> keys that any of the rows [q0, q1) may see; of any values where the scene has none."""
    full: Callable[[Scene, int, int, int, int], bool]
    """(scene, q0, q1, k0, k1) -> whether every row of [q0, q1) sees every key of [k0, k1)."""
    definition: Callable[[Mapping[str, Any], int, int], Bools]
    """(options and arrays that a call gives, rows, keys) -> what passes of these, inside a sequence, to broadcast to
    (b, h, m, n). It is said of options, not of what `asked` makes of them, so that each can be held against the other;
    only asked where one of its own is given."""
    drawn: Callable[[np.random.Generator, Extents], dict[str, Any]]
    """Random options and arrays that ask for it, of calls with these extents: tests run for every part."""
    holes: Callable[[Scene, int, int, int, int], Bools] | None = None
    """(scene, q0, q1, k0, k1) -> (k1 - k0,) whether any of the rows may see the key; None: what `key_range` says."""
    sparse: bool = False
    """Whether rows and keys inside the intervals may still see nothing."""
    registers: int = 1
    """How many a kernel needs for it: 0 a bound, 1 an interval or segments, 2 pairs apart."""
    knows_queries: bool = False
    """Whether rows of one tile see other keys. Of such parts a mask has one at most: with two, a key could pass each of
    them for some row and be hidden from all. A list is none: it says the same of 16 x 16 pairs."""
    picks_queries: bool = False
    """Whether some rows are there and others are not: nothing is asked in a loop where rows are stationary."""
    shortens: bool = False
    """Whether it hides the last rows or keys, for which kernels need no register: their segment ends earlier."""
    listed: bool = False
    """Whether kernels walk a list of tiles that it has made. Only the last part of the registry can be that."""
    check: Callable[[Asked], None] | None = None
    """Raise what is wrong with what was asked for, if that concerns the part."""
    tallest: Callable[[MaskSpec, int], int] | None = None
    """(mask, rows) -> rows of a block beyond which the NumPy backend would mostly compute what is hidden."""
    options: tuple[str, ...] = ()
    """The static options that ask for it, in positions of the whole call."""
    narrowed: Callable[[Cutting], Cutting] | None = None
    """Without rows and keys at the ends that see nothing of the others, or which cannot be cut off."""
    cut: Callable[[Cutting], Mapping[str, Any]] | None = None
    """The options that say the same in a call of these rows and keys alone."""
    last_key: Callable[[Chosen, Extents], int] | None = None
    """Where row i sees all keys up to i + so many, and no others; None: where it may not be so."""
    from_ends: Callable[[Chosen], bool] = lambda options: True
    """Whether packed sequences each have it anew, so that some of them mean the same without the others."""
    cut_once: bool = False
    """Whether it is cut for all keys of some rows at once: each time more costs the host too much."""
    packing: Packing | None = None
    beside: tuple[str, ...] = ()
    """Parts that it is compiled together with ahead of time, for it seldom comes alone."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of all options that ask for it."""
        return (*self.options, *(array.name for array in self.arrays))

    @property
    def words(self) -> int:
        """How many words of a kernel's arguments it takes: its integers, the addresses of its arrays and of lists."""
        return len(self.params) + len(self.arrays) + LIST_WORDS * self.listed

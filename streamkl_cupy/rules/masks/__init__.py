"""The parts of masks by name, each a module of this folder, as its `PART`; what all of a mask say together."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import reduce
from operator import and_
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ...problem import MaskSpec, Problem
from ..registry import entries_of
from .diagonal import up_to
from .interface import Asked, Bools, Cutting, Extents, Indices, MaskArray, Packing, Part, Range, Scene, Segment

__all__ = [
    "ARRAYS",
    "MASKS",
    "Asked",
    "Cutting",
    "Extents",
    "MaskArray",
    "Packing",
    "Part",
    "Scene",
    "Segment",
    "by_entry",
    "check",
    "check_values",
    "differs_by_entry",
    "every_row_sees",
    "full",
    "holes",
    "key_range",
    "most_words",
    "packing",
    "parts_of",
    "registers",
    "spec_of",
    "together",
    "up_to",
    "visible",
]


def _place(part: Part) -> tuple[bool | str, ...]:
    """Where a part stands in a mask, which is the order of a kernel's words and, of parts with an integer of one name,
    whose counts: static options before what arrays say, what ends or begins a segment before what is asked inside,
    and a part that kernels have lists of last."""
    return part.listed, bool(part.arrays), not part.shortens, part.packing is None, part.name


MASKS: Final[dict[str, Part]] = {
    part.name: part
    for part in sorted(entries_of(__name__, __path__, "PART", ("diagonal", "interface")).values(), key=_place)
}
ARRAYS: Final[dict[str, MaskArray]] = {array.name: array for part in MASKS.values() for array in part.arrays}


def spec_of(asked: Asked) -> MaskSpec:
    """The mask that a call asks for; what is the same mask becomes the same parts."""
    parts, params = [], dict[str, int]()
    for part in MASKS.values():
        found = part.asked(asked)
        if found is not None:
            parts.append(part.name)
            params = {**params, **found, **params}
    pattern = asked.options.block_mask
    return MaskSpec(tuple(parts), tuple(params.items()), None if pattern is None else pattern.digest)


def check(asked: Asked) -> None:
    """Raise what is wrong with what was asked for, beyond the shape of each array."""
    for part in MASKS.values():
        if part.check is not None:
            part.check(asked)


def check_values(problem: Problem, values: Mapping[str, NDArray[Any]]) -> None:
    """Check what arrays hold, where that can be read: kernels on a GPU clamp it instead."""
    extents = Extents(problem.batch, problem.heads, problem.queries, problem.keys, problem.rank)
    for name, array in ARRAYS.items():
        if name in values:
            array.check_values(values[name], extents)


def packing(given: Collection[str]) -> Packing | None:
    """What has sequences lie one after the other, of a call with these arrays of masks."""
    for part in MASKS.values():
        if part.packing is not None and any(array.name in given for array in part.arrays):
            return part.packing
    return None


def parts_of(mask: MaskSpec) -> tuple[Part, ...]:
    """The registry's entries for a mask."""
    return tuple(MASKS[name] for name in mask.parts)


def visible(parts: tuple[Part, ...], scene: Scene, rows: Indices, keys: Indices) -> Bools:
    """Which rows see which keys, to broadcast to (b, h, m, n)."""
    seen = reduce(and_, (part.visible(scene, rows[:, None], keys) for part in parts), True)
    return np.ones((len(rows), len(keys)), np.bool_) if seen is True else np.asarray(seen)


def key_range(parts: tuple[Part, ...], scene: Scene, q0: int, q1: int) -> Range:
    """Keys that any of the rows [q0, q1) may see, inside the matrix; (0, 0) where there are none."""
    if q0 >= q1:
        return 0, 0
    ranges = [(0, scene.keys), *(part.key_range(scene, q0, q1) for part in parts)]
    start, stop = max(r[0] for r in ranges), min(r[1] for r in ranges)
    return (start, stop) if start < stop else (0, 0)


def full(parts: tuple[Part, ...], scene: Scene, q0: int, q1: int, k0: int, k1: int) -> bool:
    """Whether every row of [q0, q1) sees every key of [k0, k1)."""
    return all(part.full(scene, q0, q1, k0, k1) for part in parts)


def every_row_sees(problem: Problem) -> bool:
    """Whether there are rows, and each is known to see a key, the first one, whatever the mask reads from memory."""
    parts = parts_of(problem.mask)
    if not problem.batch * problem.heads * problem.queries * problem.keys:
        return False
    if problem.mask.blocks is not None or any(part.arrays for part in parts):
        return False
    return full(parts, Scene(problem.queries, problem.keys, dict(problem.mask.params)), 0, problem.queries, 0, 1)


def holes(parts: tuple[Part, ...], scene: Scene, q0: int, q1: int, k0: int, k1: int) -> Bools | None:
    """Which keys of [k0, k1) any of the rows may see, (k1 - k0,); None where no part has holes."""
    found = [part.holes(scene, q0, q1, k0, k1) for part in parts if part.holes]
    return reduce(and_, found) if found else None


def registers(parts: tuple[Part, ...], rows_are_keys: bool) -> int:
    """How many registers a mask takes, by what is stationary: 0 a bound, 1 an interval or segments, 2 pairs apart, 3
    all of that."""
    taking = [part for part in parts if not part.shortens and (rows_are_keys or not part.picks_queries)]
    if len(taking) > 2 or sum(part.sparse for part in taking) > 1:
        return 3
    # What shortens the stationary side has bounds of its own there.
    ending = [part for part in parts if part.shortens and not rows_are_keys]
    return max([len(taking) - 1, 0, *(part.registers for part in (*taking, *ending))])


def together() -> tuple[str, ...]:
    """The names of as many parts as a mask can have: of those that know queries the last."""
    few = [part.name for part in MASKS.values() if part.knows_queries][:-1]
    return tuple(part.name for part in MASKS.values() if part.packing is None and part.name not in few)


def most_words() -> int:
    """How many words of a kernel's arguments a mask takes at most."""
    packed = [(*part.beside, part.name) for part in MASKS.values() if part.packing is not None]
    return max(sum(MASKS[name].words for name in names) for names in (together(), *packed))


def differs_by_entry(parts: tuple[Part, ...]) -> bool:
    """Whether batch entries of a call see other keys."""
    return any(array.per_entry for part in parts for array in part.arrays)


def by_entry(values: Mapping[str, Indices]) -> dict[str, Indices]:
    """Values of arrays with a batch axis each."""
    return {name: x if x.ndim > ARRAYS[name].axes else x[None] for name, x in values.items()}

"""The parts of masks by name: parameters, the rule, and which tiles of the score matrix need a visit.

A mask lets a pair of row and key pass where all its parts do. A part is one header under `cuda_src/masks/` and one
entry here. Everything else asks the entry: kernels get the header, its integers and its arrays in the registry's order;
the NumPy backend asks the functions below what to skip and what to hide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .problem import MaskSpec

Range = tuple[int, int]
Bools = NDArray[np.bool_]
Indices = NDArray[Any]


class Scene(NamedTuple):
    """What a mask is asked about: some heads of some batch entries, or of one packed sequence, with its values.

    Rows and keys are counted from the start of the entry or sequence.
    """

    queries: int
    keys: int
    params: Mapping[str, int]
    """The integers of all parts; `q_offset` is the sequence's own."""
    key_lengths: Indices = np.zeros(0, np.int32)
    """(b,), of the entries asked about; only where a part reads it, like all that follows."""
    key_mask: Bools = np.zeros((0, 0), np.bool_)
    """(b, N)"""
    pattern: Any = None
    """A `BlockPattern`."""
    heads: range = range(1)
    """Query heads."""


@dataclass(frozen=True)
class Part:
    """One rule for which keys a query row may see.

    Functions answer for all batch entries and heads of a scene together. Ranges are half open and may reach beyond the
    matrix; they may be wider than what is really visible, never narrower: they decide which tiles are skipped.
    """

    name: str
    header: str
    struct: str
    params: tuple[str, ...]
    arrays: tuple[str, ...]
    doc: str
    visible: Callable[[Scene, Indices, Indices], Bools | bool]
    """(scene, rows, keys) -> what passes, to broadcast to (b, h, m, n); rows are (m, 1) and keys (n,)."""
    key_range: Callable[[Scene, int, int], Range]
    """(scene, q0, q1) -> keys that any of the rows [q0, q1) may see."""
    full: Callable[[Scene, int, int, int, int], bool]
    """(scene, q0, q1, k0, k1) -> whether every row of [q0, q1) sees every key of [k0, k1)."""
    holes: Callable[[Scene, int, int, int, int], Bools] | None = None
    """(scene, q0, q1, k0, k1) -> (k1 - k0,) whether any of the rows may see the key; None: what `key_range` says."""


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


def holes(parts: tuple[Part, ...], scene: Scene, q0: int, q1: int, k0: int, k1: int) -> Bools | None:
    """Which keys of [k0, k1) any of the rows may see, (k1 - k0,); None where no part has holes."""
    found = [part.holes(scene, q0, q1, k0, k1) for part in parts if part.holes]
    return reduce(and_, found) if found else None


def _window_edges(scene: Scene) -> Range:
    """Row i sees the keys [i + first, i + last]."""
    left, right, offset = (scene.params[name] for name in ("left", "right", "q_offset"))
    return -scene.queries if left < 0 else offset - left, scene.keys if right < 0 else offset + right


def _see_window(scene: Scene, rows: Indices, keys: Indices) -> Bools:
    first, last = _window_edges(scene)
    distance = keys - rows
    seen: Bools = (distance >= first) & (distance <= last)
    return seen


def _window_keys(scene: Scene, q0: int, q1: int) -> Range:
    first, last = _window_edges(scene)
    return q0 + first, q1 + last


def _window_full(scene: Scene, q0: int, q1: int, k0: int, k1: int) -> bool:
    first, last = _window_edges(scene)
    return k0 - (q1 - 1) >= first and k1 - 1 - q0 <= last


def _see_lengths(scene: Scene, rows: Indices, keys: Indices) -> Bools:
    seen: Bools = keys < scene.key_lengths[:, None, None, None]
    return seen


def _blocks_between(q0: int, q1: int, size: int) -> Indices:
    """The first row of every block that has rows of [q0, q1)."""
    return np.arange(q0 // size, -(-q1 // size)) * size


def _listed(scene: Scene, rows: Indices, keys: Indices) -> Bools:
    """(1, h, rows, keys), h is 1 where one head of the pattern serves all; the rows ascend."""
    pattern = scene.pattern
    heads = scene.heads if pattern.heads > 1 else range(1)
    row, column = rows // pattern.query_block, keys // pattern.key_block
    first, last = (int(row[0]), int(row[-1]) + 1) if len(row) else (0, 0)
    lines = np.stack([pattern.dense_rows(head, first, last) for head in heads])
    return lines[None, :, (row - first)[:, None], column]


def _listed_blocks(scene: Scene, q0: int, q1: int, k0: int, k1: int) -> Bools:
    pattern = scene.pattern
    return _listed(scene, _blocks_between(q0, q1, pattern.query_block), _blocks_between(k0, k1, pattern.key_block))


def _block_holes(scene: Scene, q0: int, q1: int, k0: int, k1: int) -> Bools:
    size = scene.pattern.key_block
    listed = _listed_blocks(scene, q0, q1, k0, k1).any(axis=(0, 1, 2))
    return np.repeat(listed, size)[k0 - k0 // size * size :][: k1 - k0]


MASKS: dict[str, Part] = {
    part.name: part
    for part in (
        Part(
            name="causal",
            header="masks/causal.cuh",
            struct="Causal",
            params=("q_offset",),
            arrays=(),
            doc="row i sees keys j <= i + q_offset; unless given, N - M: the last row sees the last key",
            visible=lambda scene, rows, keys: keys - rows <= scene.params["q_offset"],
            key_range=lambda scene, q0, q1: (0, q1 + scene.params["q_offset"]),
            full=lambda scene, q0, q1, k0, k1: k1 - 1 <= q0 + scene.params["q_offset"],
        ),
        Part(
            name="window",
            header="masks/window.cuh",
            struct="Window",
            params=("left", "right", "q_offset"),
            arrays=(),
            doc="row i sees keys i + q_offset - left <= j <= i + q_offset + right; -1 is no limit on that side",
            visible=_see_window,
            key_range=_window_keys,
            full=_window_full,
        ),
        Part(
            name="lengths",
            header="masks/key_lengths.cuh",
            struct="KeyLengths",
            params=(),
            arrays=("key_lengths",),
            doc="batch entry b has the keys j < key_lengths[b]",
            visible=_see_lengths,
            key_range=lambda scene, q0, q1: (0, int(scene.key_lengths.max(initial=0))),
            full=lambda scene, q0, q1, k0, k1: k1 <= scene.key_lengths.min(initial=k1),
        ),
        Part(
            name="packed",
            header="masks/packed.cuh",
            struct="Packed",
            params=("q_offset_given",),
            arrays=("cu_seqlens_q", "cu_seqlens_k"),
            doc="sequences lie one after the other, each seeing its own keys; a scene is inside one of them",
            visible=lambda scene, rows, keys: True,
            key_range=lambda scene, q0, q1: (0, scene.keys),
            full=lambda scene, q0, q1, k0, k1: True,
        ),
        Part(
            name="keys",
            header="masks/key_bits.cuh",
            struct="KeyBits",
            params=(),
            arrays=("key_mask",),
            doc="batch entry b has the keys with key_mask[b, j]",
            visible=lambda scene, rows, keys: scene.key_mask[:, None, None, keys],
            key_range=lambda scene, q0, q1: (0, scene.keys),
            full=lambda scene, q0, q1, k0, k1: bool(scene.key_mask[:, k0:k1].all()),
            holes=lambda scene, q0, q1, k0, k1: np.logical_or.reduce(scene.key_mask[:, k0:k1], axis=0),
        ),
        Part(
            name="blocks",
            header="masks/blocks.cuh",
            struct="Blocks",
            params=(),
            arrays=(),
            doc="head h sees the blocks that a BlockPattern lists for it",
            visible=lambda scene, rows, keys: _listed(scene, rows.ravel(), keys),
            key_range=lambda scene, q0, q1: (0, scene.keys),
            full=lambda scene, q0, q1, k0, k1: bool(_listed_blocks(scene, q0, q1, k0, k1).all()),
            holes=_block_holes,
        ),
    )
}

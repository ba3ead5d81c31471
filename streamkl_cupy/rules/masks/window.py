"""Row i sees keys i + q_offset - left <= j <= i + q_offset + right; -1 is no limit on that side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ...problem import MaskSpec
from .diagonal import OPTIONS, band_of, cut, distances, from_ends, narrowed
from .interface import Asked, Bools, Extents, Indices, Part, Range, Scene

LEAST_ROWS = 128  # of a block


def _asked(asked: Asked) -> Mapping[str, int] | None:
    band = band_of(asked)
    return None if band.one_sided else {"left": band.left, "right": band.right, "q_offset": band.offset}


def _edges(scene: Scene) -> Range:
    """Row i sees the keys [i + first, i + last]."""
    left, right, offset = (scene.params[name] for name in ("left", "right", "q_offset"))
    return -scene.queries if left < 0 else offset - left, scene.keys if right < 0 else offset + right


def _visible(scene: Scene, rows: Indices, keys: Indices) -> Bools:
    first, last = _edges(scene)
    distance = keys - rows
    seen: Bools = (distance >= first) & (distance <= last)
    return seen


def _key_range(scene: Scene, q0: int, q1: int) -> Range:
    first, last = _edges(scene)
    return q0 + first, q1 + last


def _full(scene: Scene, q0: int, q1: int, k0: int, k1: int) -> bool:
    first, last = _edges(scene)
    return k0 - (q1 - 1) >= first and k1 - 1 - q0 <= last


def _tallest(mask: MaskSpec, rows: int) -> int:
    left, right = mask["left"], mask["right"]
    return rows if left < 0 or right < 0 else max((left + right) // 2, LEAST_ROWS)


def _definition(options: Mapping[str, Any], rows: int, keys: int) -> Bools:
    distance = distances(options, rows, keys)
    left, right = (np.inf if x in (None, -1) else x for x in options.get("window") or (None, None))
    seen: Bools = (distance >= -left) & (distance <= right)
    return seen


def _drawn(rng: np.random.Generator, extents: Extents) -> dict[str, Any]:
    def side(kind: int) -> int | None:
        return (None, -1, 0, 1, 17, extents.queries, 10**6, int(rng.integers(extents.keys + 1)))[kind]

    return {"window": tuple(map(side, rng.integers(0, 8, 2)))}


PART = Part(
    name="window",
    header="masks/window.cuh",
    struct="Window",
    params=("left", "right", "q_offset"),
    arrays=(),
    asked=_asked,
    visible=_visible,
    key_range=_key_range,
    full=_full,
    definition=_definition,
    drawn=_drawn,
    knows_queries=True,
    tallest=_tallest,
    options=OPTIONS,
    narrowed=narrowed,
    cut=cut,
    from_ends=from_ends,
)

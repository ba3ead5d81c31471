"""Row i sees keys j <= i + q_offset; unless given, N - M: the last row sees the last key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .diagonal import OPTIONS, band_of, cut, distances, from_ends, last_key, narrowed
from .interface import Asked, Bools, Part

# Rows of a block: below this many its products are short, and threads would share more of them.
LEAST_ROWS = 256


def _asked(asked: Asked) -> Mapping[str, int] | None:
    band, extents = band_of(asked), asked.extents
    if not band.one_sided or band.right < 0:
        return None
    # Beyond these ends nothing changes any more, and 32-bit kernel arithmetic is safe.
    return {"q_offset": 0 if band.own else max(-extents.queries, min(band.offset + band.right, extents.keys))}


def _definition(options: Mapping[str, Any], rows: int, keys: int) -> Bools:
    seen: Bools = (distances(options, rows, keys) <= 0) | (not options.get("causal"))
    return seen


PART = Part(
    name="causal",
    header="masks/causal.cuh",
    struct="Causal",
    params=("q_offset",),
    arrays=(),
    asked=_asked,
    visible=lambda scene, rows, keys: keys - rows <= scene.params["q_offset"],
    key_range=lambda scene, q0, q1: (0, q1 + scene.params["q_offset"]),
    full=lambda scene, q0, q1, k0, k1: k1 - 1 <= q0 + scene.params["q_offset"],
    definition=_definition,
    drawn=lambda rng, extents: {"causal": True},
    registers=0,
    knows_queries=True,
    tallest=lambda mask, rows: max(rows // 16, LEAST_ROWS),
    options=OPTIONS,
    narrowed=narrowed,
    cut=cut,
    last_key=last_key,
    from_ends=from_ends,
)

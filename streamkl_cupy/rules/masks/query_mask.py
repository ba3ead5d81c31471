"""Batch entry b has the rows with query_mask[b, i]; the others see nothing."""

from __future__ import annotations

from .causal import LEAST_ROWS
from .interface import Extents, MaskArray, Part, Range, Scene, Shape
from .keys import cut


def _misfit(shape: Shape, extents: Extents) -> str:
    expected = (extents.batch, extents.queries) if extents.rank == 4 else (extents.queries,)
    return "" if shape == expected else f", but there is one value per batch entry and query row: expected {expected}"


def _key_range(scene: Scene, q0: int, q1: int) -> Range:
    mask = scene.arrays.get("query_mask")
    return 0, scene.keys if mask is None or mask[:, q0:q1].any() else 0


PART = Part(
    name="query_mask",
    header="masks/query_mask.cuh",
    struct="QueryBits",
    params=(),
    arrays=(
        MaskArray("query_mask", "bool", 1, _misfit, lambda values, extents: None, of="queries", cut=cut, bits=True),
    ),
    asked=lambda asked: {} if "query_mask" in asked.shapes else None,
    visible=lambda scene, rows, keys: scene.arrays["query_mask"][:, None, rows],
    key_range=_key_range,
    full=lambda scene, q0, q1, k0, k1: bool(scene.arrays["query_mask"][:, q0:q1].all()),
    sparse=True,
    picks_queries=True,
    registers=2,
    tallest=lambda mask, rows: LEAST_ROWS,
    beside=("causal", "lengths"),
)

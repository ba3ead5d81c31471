"""Batch entry b has the rows with query_mask[b, i]; the others see nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .causal import LEAST_ROWS
from .interface import Bools, Extents, MaskArray, Part, Range, Scene, Shape
from .keys import cut, drawn_values


def _misfit(shape: Shape, extents: Extents) -> str:
    expected = (extents.batch, extents.queries) if extents.rank == 4 else (extents.queries,)
    return "" if shape == expected else f", but there is one value per batch entry and query row: expected {expected}"


def _key_range(scene: Scene, q0: int, q1: int) -> Range:
    mask = scene.arrays.get("query_mask")
    return 0, scene.keys if mask is None or mask[:, q0:q1].any() else 0


def _definition(options: Mapping[str, Any], rows: int, keys: int) -> Bools:
    return np.atleast_2d(np.asarray(options["query_mask"]))[:, None, :, None]


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
    definition=_definition,
    drawn=lambda rng, extents: {"query_mask": drawn_values(rng, extents.batch, extents.queries)},
    sparse=True,
    picks_queries=True,
    registers=2,
    tallest=lambda mask, rows: LEAST_ROWS,
    beside=("causal", "lengths"),
)

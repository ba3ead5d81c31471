"""Batch entry b has the rows i < query_lengths[b]; those behind them see nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .causal import LEAST_ROWS
from .interface import Bools, Indices, MaskArray, Part, Range, Scene
from .lengths import check_lengths, cut, drawn_lengths, misfit


def _visible(scene: Scene, rows: Indices, keys: Indices) -> Bools:
    seen: Bools = rows < scene.arrays["query_lengths"][:, None, None, None]
    return seen


def _definition(options: Mapping[str, Any], rows: int, keys: int) -> Bools:
    seen: Bools = np.arange(rows)[:, None] < np.asarray(options["query_lengths"])[:, None, None, None]
    return seen


def _key_range(scene: Scene, q0: int, q1: int) -> Range:
    lengths = scene.arrays.get("query_lengths")
    return 0, scene.keys if lengths is None or q0 < lengths.max(initial=0) else 0


PART = Part(
    name="query_lengths",
    header="masks/query_lengths.cuh",
    struct="QueryLengths",
    params=(),
    arrays=(
        MaskArray(
            "query_lengths",
            "int32",
            0,
            misfit,
            lambda lengths, extents: check_lengths("query_lengths", lengths, extents.queries, "query rows"),
            of="queries",
            cut=cut,
        ),
    ),
    asked=lambda asked: {} if "query_lengths" in asked.shapes else None,
    visible=_visible,
    key_range=_key_range,
    full=lambda scene, q0, q1, k0, k1: bool(q1 <= scene.arrays["query_lengths"].min(initial=q1)),
    definition=_definition,
    drawn=lambda rng, extents: {"query_lengths": drawn_lengths(rng, extents.batch, extents.queries)},
    registers=2,
    shortens=True,
    tallest=lambda mask, rows: LEAST_ROWS,
    beside=("causal", "lengths"),
)

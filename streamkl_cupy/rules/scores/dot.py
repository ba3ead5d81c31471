"""The logit is the scaled dot product."""

from __future__ import annotations

import numpy as np

from .interface import LOG2E, Array, Score


def tile_logits(dots: Array, scale: float, slopes: Array | None) -> Array:
    """In place."""
    return np.multiply(dots, scale * LOG2E, out=dots)


SCORE = Score(
    name="dot",
    header="scores/dot.cuh",
    struct="Dot",
    formula="scale * dot",
    numbers=lambda scale: {"scale": scale * LOG2E},
    factor=lambda scale: scale,
    largest_slope=1.0,
    linear=True,
    tile_logits=tile_logits,
    pair_logits=lambda dots, scale: dots * scale,
    pair_slopes=lambda dots, scale: 1.0,
)

"""The logit is the scaled dot product."""

from __future__ import annotations

import numpy as np

from .interface import Array, Meaning, Score


def tile_logits(dots: Array, scale: float) -> Array:
    """In place."""
    return np.multiply(dots, scale, out=dots)


SCALED = Meaning(
    formula="scale * dot",
    factor=lambda scale: scale,
    largest_slope=1.0,
    tile_logits=tile_logits,
    tile_slopes=None,
    pair_logits=lambda dots, scale: dots * scale,
    pair_slopes=lambda dots, scale: 1.0,
)

SCORE = Score("dot", "scores/dot.cuh", SCALED, SCALED)

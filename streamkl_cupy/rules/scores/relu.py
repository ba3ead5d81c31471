"""The logit is the scaled dot product where that is positive, else 0."""

from __future__ import annotations

import numpy as np

from .interface import LOG2E, Array, Score


def tile_logits(dots: Array, scale: float, slopes: Array | None) -> Array:
    """In place; -Inf, which an input can only have as such, is no number."""
    np.multiply(dots, scale * LOG2E, out=dots)
    if slopes is not None:
        np.greater(dots, 0, out=slopes)
    np.copyto(dots, np.nan, where=np.isneginf(dots))
    return np.maximum(dots, 0, out=dots)


def pair_logits(dots: Array, scale: float) -> Array:
    """Natural ones."""
    x = dots * scale
    return np.where(np.isneginf(x), np.nan, np.maximum(x, 0)).astype(dots.dtype)


SCORE = Score(
    name="relu",
    header="scores/relu.cuh",
    struct="Relu",
    formula="maximum(0, scale * dot)",
    numbers=lambda scale: {"scale": scale * LOG2E},
    factor=lambda scale: scale,
    largest_slope=1.0,
    linear=False,
    tile_logits=tile_logits,
    pair_logits=pair_logits,
    pair_slopes=lambda dots, scale: (dots * scale > 0).astype(dots.dtype),
)

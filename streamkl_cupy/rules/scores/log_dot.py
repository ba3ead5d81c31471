"""The logit is the logarithm of the scaled dot product: a row is what linear attention has of non-negative features,
each product over the sum of all.

A product below the smallest normal float32 counts as that and moves nothing. So a pair whose product is 0 or negative
has next to no mass, 2^-126 over the sum; a KL whose other side has mass there stays a number, 87 nats times that mass
and more; and gradients are those of just this function.
"""

from __future__ import annotations

import numpy as np

from .interface import Array, Score

LEAST = 2.0**-126


def tile_logits(dots: Array, scale: float, slopes: Array | None) -> Array:
    """In place."""
    np.multiply(dots, scale, out=dots)
    if slopes is not None:
        slopes[...] = pair_slopes(dots, 1.0)
    np.maximum(dots, LEAST, out=dots)
    return np.log2(dots, out=dots)


def pair_logits(dots: Array, scale: float) -> Array:
    """Natural ones."""
    return np.log(np.maximum(dots * scale, LEAST))


def pair_slopes(dots: Array, scale: float) -> Array:
    """1 / scaled product; 0 where that counts for more than it is."""
    x = dots * scale
    return np.where(x > LEAST, 1 / np.maximum(x, LEAST), 0).astype(dots.dtype)


SCORE = Score(
    name="log_dot",
    header="scores/log_dot.cuh",
    struct="LogDot",
    formula="log(maximum(scale * dot, 2**-126))",
    numbers=lambda scale: {"scale": scale},
    factor=lambda scale: scale,
    largest_slope=1 / LEAST,
    linear=False,
    tile_logits=tile_logits,
    pair_logits=pair_logits,
    pair_slopes=pair_slopes,
    positive=True,
    proportional=False,
)

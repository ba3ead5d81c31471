"""The logit is the logarithm of the dot product, and of the scale: a row is what linear attention has of non-negative
features, each product over the sum of all.

A product below the smallest normal float32 counts as that and moves nothing. So a pair whose product is 0 or negative
has next to no mass, 2^-126 over the sum; a KL whose other side has mass there stays a number, 87 nats times that mass
and more; and gradients are those of just this function.
"""

from __future__ import annotations

import math

import numpy as np

from .interface import Array, Score

LEAST = 2.0**-126


def tile_logits(dots: Array, scale: float, slopes: Array | None) -> Array:
    """In place."""
    if slopes is not None:
        slopes[...] = pair_slopes(dots, scale)
    np.copyto(dots, np.nan, where=np.isneginf(dots))
    np.maximum(dots, LEAST, out=dots)
    np.log2(dots, out=dots)
    return np.add(dots, math.log2(scale), out=dots)


def pair_logits(dots: Array, scale: float) -> Array:
    """Natural ones."""
    x = np.where(np.isneginf(dots), np.nan, np.maximum(dots, LEAST)).astype(dots.dtype)  # no number is -Inf
    return np.asarray(np.log(x) + math.log(scale))


def pair_slopes(dots: Array, scale: float) -> Array:
    """1 / product; 0 where that counts for more than it is."""
    return np.where(dots > LEAST, 1 / np.maximum(dots, LEAST), 0).astype(dots.dtype)


SCORE = Score(
    name="log_dot",
    header="scores/log_dot.cuh",
    struct="LogDot",
    formula="log(scale * maximum(dot, 2**-126))",
    numbers=lambda scale: {"offset": math.log2(scale)},
    factor=lambda scale: 1.0,
    largest_slope=1 / LEAST,
    linear=False,
    tile_logits=tile_logits,
    pair_logits=pair_logits,
    pair_slopes=pair_slopes,
    positive=True,
    proportional=False,
)

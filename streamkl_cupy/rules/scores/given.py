"""What stands for a score where a side is given: its probabilities, or their logarithms.

A probability of 0 is a logit that no sum notices, and yet a number: 0 times it is 0, as p log p is where p vanishes.
Where the divergence is infinite for it, it is infinite instead, and makes the row NaN like any infinite input.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from .interface import LOG2E, Array, Score

ZERO = -2e30
"""The logit of a probability of 0; `kMasked` on the device."""


def _tile_logits(x: Array, scale: float, slopes: Array | None) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.log2(x, out=x)


def _tile_log_logits(x: Array, scale: float, slopes: Array | None) -> Array:
    return np.multiply(x, LOG2E, out=x)


def _pair_logits(x: Array, scale: float) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.log(x))


PROBABILITY: Final = Score(
    name="probability",
    header="scores/given.cuh",
    struct="Probability",
    formula="log(target)",
    numbers=lambda scale: {"scale": scale * LOG2E},
    factor=lambda scale: 1.0,
    largest_slope=1.0,
    linear=False,
    tile_logits=_tile_logits,
    pair_logits=_pair_logits,
    pair_slopes=lambda x, scale: 1.0,
    proportional=False,
)
LOG_PROBABILITY: Final = Score(
    name="log_probability",
    header="scores/given.cuh",
    struct="LogProbability",
    formula="target",
    numbers=lambda scale: {"scale": scale * LOG2E},
    factor=lambda scale: 1.0,
    largest_slope=1.0,
    linear=False,
    tile_logits=_tile_log_logits,
    pair_logits=lambda x, scale: x,
    pair_slopes=lambda x, scale: 1.0,
    proportional=False,
)
GIVEN: Final = {score.name: score for score in (PROBABILITY, LOG_PROBABILITY)}

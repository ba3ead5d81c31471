"""Logits of another score, softly kept within a cap: cap tanh(logit / cap), of scores whose logits are proportional to
the scale."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from .interface import LOG2E, Array, Score

LN2 = math.log(2.0)


def capped(score: Score, cap: float) -> Score:
    """The score under a cap."""

    def numbers(scale: float) -> dict[str, float]:
        return {**score.numbers(scale / cap * LN2), "cap": cap * LOG2E}

    def tile_logits(dots: Array, scale: float, slopes: Array | None) -> Array:
        if slopes is not None:
            slopes[...] = 1  # where the score is linear, that is what they are
        x = score.tile_logits(dots, scale / cap * LN2, slopes)
        if slopes is not None:
            slopes *= _slope(x)
        return np.multiply(_tanh(x), cap * LOG2E, out=x)

    def pair_slopes(dots: Array, scale: float) -> Array:
        return _slope(score.pair_logits(dots, scale / cap)) * score.pair_slopes(dots, scale)

    return replace(
        score,
        cap_header="scores/softcap.cuh",
        struct=f"Softcap<{score.struct}>",
        formula=f"softcap * tanh({score.formula} / softcap)",
        numbers=numbers,
        linear=False,
        tile_logits=tile_logits,
        pair_logits=lambda dots, scale: _tanh(score.pair_logits(dots, scale / cap)) * cap,
        pair_slopes=pair_slopes,
    )


def _tanh(x: Array) -> Array:
    """Of what is no number, and of Inf, none."""
    return np.where(np.isfinite(x), np.tanh(x), x.dtype.type(np.nan))


def _slope(x: Array) -> Array:
    """1 - tanh^2 in exponentials of one sign, which do not cancel."""
    fall = np.exp(-2 * np.abs(x))
    return np.asarray(4 * fall / (1 + fall) ** 2)

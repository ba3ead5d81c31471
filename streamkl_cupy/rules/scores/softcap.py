"""Logits of another score, softly kept within a cap: cap tanh(logit / cap), of scores whose logits are proportional to
the scale."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from .interface import LOG2E, Array, Score

LN2 = math.log(2.0)

# tanh(x) = x * (c[0] + c[1] x^2 + ...) for |x| up to LARGEST, by least relative error: 3.2e-8 and 1.1e-6.
LARGEST = 0.55
FINE = (0.999999968, -0.33332795, 0.133188769, -0.0525893195, 0.0163154431)
SHORT = (0.99999888, -0.333213873, 0.131312314, -0.0426959987)
LEAST_FLOAT = 2.0**-126


def capped(score: Score, cap: float) -> Score:
    """The score under a cap."""

    def numbers(scale: float) -> dict[str, float]:
        # Without its scale another score keeps the sign, unless it is linear: then tanh has it.
        sign = 1.0 if score.linear else math.copysign(1.0, scale)
        inner = sign * scale / cap

        def scaled(letter: str, coefficients: tuple[float, ...]) -> dict[str, float]:
            return {f"{letter}{2 * i + 1}": c * inner ** (2 * i + 1) for i, c in enumerate(coefficients)}

        polynomials = scaled("p", FINE) | scaled("r", SHORT)
        # Where float32 does not hold the coefficients, all arguments are taken for large ones.
        held = min(map(abs, polynomials.values())) >= LEAST_FLOAT
        return {
            **score.numbers(sign * LN2),
            **polynomials,
            "inner": inner,
            "odd": LARGEST / abs(inner) if held else 0.0,
            "cap": cap * LOG2E,
        }

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

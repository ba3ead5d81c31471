"""The Jensen-Shannon divergence beta KL(P || M) + (1 - beta) KL(Q || M), M = beta P + (1 - beta) Q, of smoothed maps
(1 - s) P + s / n over the n keys that a row sees, where `smoothing` is s.

Two passes: the log-sum-exps, and with these a sum over keys that nothing rescales. The logarithms are of P / M and
Q / M: bounded on one side, and on the other growing as logits differ, beside a probability that vanishes. The moments
of a row are a = sum P log2(P / M), sum Q log2(Q / M) and n; by a logit of P, with P' the smoothed one,

    dv/dT_j = beta (1 - s) P_j (log(P'_j / M'_j) - ln2 a)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from .interface import Array, Divergence, Parameter, RowResults, Scratch, Terms
from .sums import LN2, Sums


class LogSumExps(Sums):
    """Row state of the first pass, which also counts keys."""

    own = ()

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], entropy: bool = False) -> None:
        super().__init__(shape, dtype, entropy)
        self.keys = np.zeros(shape, dtype)

    def absorb(self, u: Array, v: Array, visible: Array | None, scratch: Scratch) -> None:
        """Add a tile of keys: base-2 logits, which are overwritten."""
        self.keys += u.shape[-1] if visible is None else np.broadcast_to(visible, u.shape).sum(axis=-1)
        super().absorb(u, v, visible, scratch)

    @staticmethod
    def value(xp: Any, l_t: Any, l_s: Any, *terms: Any) -> Any:
        return 0 * (l_t + l_s)


def log_ratios(x: Array, y: Array, beta: float) -> tuple[Array, Array]:
    """log2(P / M) and log2(Q / M) from log2 P and log2 Q."""
    d = y - x
    e = np.exp2(-np.abs(d))
    mean = np.log2(np.where(d > 0, (1 - beta) + beta * e, beta + (1 - beta) * e))
    return -np.maximum(d, 0) - mean, np.minimum(d, 0) - mean


def smoothed_ratios(p: Array, q: Array, beta: float) -> tuple[Array, Array]:
    """The same from positive multiples of P and Q."""
    return -np.log2(beta + (1 - beta) * (q / p)), -np.log2((1 - beta) + beta * (p / q))


class Mixture:
    """Row state of the second pass: what the first one found, and sums that are relative to nothing."""

    def __init__(self, first: LogSumExps, beta: float, smoothing: float) -> None:
        self.first, self.beta, self.smoothing = first, beta, smoothing
        dtype = first.l_t.dtype.type
        self.seen = first.seen
        with np.errstate(all="ignore"):
            self.log_t = np.where(first.seen, np.log2(first.l_t), dtype(0))
            self.log_s = np.where(first.seen, np.log2(first.l_s), dtype(0))
        self.of_t, self.of_s, self.of_smoothed = np.zeros((3, *first.seen.shape), first.l_t.dtype)

    def absorb(self, u: Array, v: Array, visible: Array | None, scratch: Scratch) -> None:
        """Add a tile of keys: base-2 logits, which are overwritten."""
        # One after the other: their sum would be rounded at the size of logits.
        u -= self.first.r_t[..., None]
        v -= self.first.r_s[..., None]
        u -= self.log_t[..., None]
        v -= self.log_s[..., None]
        p, q = np.exp2(u), np.exp2(v)
        if self.smoothing > 0:
            floor = self.smoothing / (1 - self.smoothing)
            n = self.first.keys[..., None]
            more_p, more_q = n * p + floor, n * q + floor
            of_t, of_s = smoothed_ratios(more_p, more_q, self.beta)
            of_t, of_s = of_t + 0 * u, of_s + 0 * v  # an infinite logit must not be silent
            values = self.beta * more_p * of_t + (1 - self.beta) * more_q * of_s
        else:
            of_t, of_s = log_ratios(u, v, self.beta)
            values = None
        for name, x in (("of_t", p * of_t), ("of_s", q * of_s), ("of_smoothed", values)):
            if x is not None:
                if visible is not None:
                    np.copyto(x, 0, where=~visible)
                setattr(self, name, getattr(self, name) + x.sum(axis=-1))

    def finish(self, teacher_offset: Array | float, student_offset: Array | float) -> RowResults:
        """Results of rows whose logits lack so much in base 2."""
        rows = self.first.finish(teacher_offset, student_offset)
        if self.smoothing > 0:
            value = LN2 * (1 - self.smoothing) * self.of_smoothed / self.first.keys
        else:
            value = LN2 * (self.beta * self.of_t + (1 - self.beta) * self.of_s)
        bad = self.seen & ~np.isfinite(value + rows.value)

        def or_nan(x: Array, empty: float) -> Array:
            return np.where(bad, np.nan, np.where(self.seen, x, empty))

        numbers = (self.of_t, self.of_s, self.first.keys, self.log_t, self.log_s)
        moments = np.stack([np.where(bad, np.nan, x) for x in numbers], axis=-1)
        return RowResults(
            or_nan(value, 0.0),
            or_nan(rows.teacher_lse, -np.inf),
            or_nan(rows.student_lse, -np.inf),
            None if rows.teacher_entropy is None else or_nan(rows.teacher_entropy, 0.0),
            moments,
        )


def tile_gradients(
    beta: float,
    smoothing: float,
    x: Array,
    y: Array,
    value: Any,
    wanted: tuple[bool, bool],
    visible: Array | None,
    scratch: Scratch,
) -> tuple[Array | None, Array | None]:
    """From log2 P, log2 Q and the row's moments: P (log2(P' / M') - a) and the same of Q, of the wanted ones."""
    of_t, of_s, n = (value[..., i] for i in range(3))
    p, q = np.exp2(x), np.exp2(y)
    if smoothing > 0:
        floor = smoothing / (1 - smoothing)
        ratios = smoothed_ratios(n * p + floor, n * q + floor, beta)
    else:
        ratios = log_ratios(x, y, beta)
    found: list[Array | None] = [None, None]
    for i, (weight, ratio, sums) in enumerate(((p, ratios[0], of_t), (q, ratios[1], of_s))):
        if wanted[i]:
            ratio = np.asarray(ratio - sums)
            if visible is not None:
                np.copyto(ratio, 0, where=~visible)
            ratio *= weight
            found[i] = ratio
    return found[0], found[1]


class _Smoothed:
    """Whole rows, smoothed: the maps, and both logarithms of their ratios to the mixture."""

    def __init__(self, rows: Terms, beta: float, smoothing: float) -> None:
        visible = (rows.p > 0) | (rows.log_p != 0)
        n = np.maximum(visible.sum(axis=-1, keepdims=True), 1)
        self.p, self.q = (np.where(visible, (1 - smoothing) * x + smoothing / n, 0) for x in (rows.p, rows.q))
        with np.errstate(all="ignore"):
            if smoothing > 0:
                log_p, log_q = (np.where(visible, np.log(x), 0) for x in (self.p, self.q))
            else:
                log_p, log_q = rows.log_p, rows.log_q
            of_p, of_q = log_ratios(log_p / LN2, log_q / LN2, beta)
        # Where the difference is not finite, a logit was not.
        self.of_p, self.of_q = (LN2 * np.where(visible, x, 0) for x in (of_p, of_q))


def _values(beta: float, smoothing: float, rows: Terms) -> Array:
    x = _Smoothed(rows, beta, smoothing)
    return np.asarray((beta * x.p * x.of_p + (1 - beta) * x.q * x.of_q).sum(axis=-1))


def _gradients(beta: float, smoothing: float, rows: Terms, value: Array) -> tuple[Array, Array]:
    x = _Smoothed(rows, beta, smoothing)
    a, b = ((p * of).sum(axis=-1, keepdims=True) for p, of in ((rows.p, x.of_p), (rows.q, x.of_q)))
    kept = 1 - smoothing
    return beta * kept * rows.p * (x.of_p - a), (1 - beta) * kept * rows.q * (x.of_q - b)


def _magnitudes(beta: float, smoothing: float, rows: Terms, value: Array) -> tuple[Array, Array]:
    x = _Smoothed(rows, beta, smoothing)
    a, b = (np.abs(p * of).sum(axis=-1, keepdims=True) for p, of in ((rows.p, x.of_p), (rows.q, x.of_q)))
    kept = 1 - smoothing
    return (
        beta * kept * rows.p * (1 + np.abs(x.of_p) + a),
        (1 - beta) * kept * rows.q * (1 + np.abs(x.of_q) + b),
    )


def _beta(value: float) -> str:
    if value in (0, 1):
        other = (
            '"kl", KL(P || Q), which is the limit of its value by beta'
            if value == 0
            else ('"reverse_kl", KL(Q || P), which is the limit of its value by 1 - beta')
        )
        return f"is an end, where the divergence is 0 whatever the maps are; meant is {other}"
    return "" if 0 < value < 1 else "is not in between; allowed are numbers above 0 and below 1"


def _smoothing(value: float) -> str:
    return "" if 0 <= value < 1 else "is out of range; allowed are 0 and more, and less than 1"


def bound(parameters: Mapping[str, float]) -> Divergence:
    """The divergence with these parameters."""
    beta, smoothing = parameters["jsd_beta"], parameters["smoothing"]
    both = (beta, smoothing)
    return Divergence(
        name="jsd",
        header="divergences/jsd.cuh",
        formula="jsd_beta * sum(P * log(P / M)) + (1 - jsd_beta) * sum(Q * log(Q / M)), M = jsd_beta * P + "
        "(1 - jsd_beta) * Q",
        needs_value=(),
        state_floats=5,
        row_state=LogSumExps,
        later_floats=(3,),
        later_states=(lambda first: Mixture(first, beta, smoothing),),
        tile_gradients=partial(tile_gradients, beta, smoothing),
        factors=(LN2 * beta * (1 - smoothing), LN2 * (1 - beta) * (1 - smoothing)),
        tile_buffers=(),
        row_values=partial(_values, *both),
        row_gradients=partial(_gradients, *both),
        row_magnitudes=partial(_magnitudes, *both),
        moments=5,
        parameters={"jsd_beta": Parameter(0.5, _beta), "smoothing": Parameter(0.0, _smoothing)},
        bind=bound,
        constants={"SKL_JSD_BETA": beta, "SKL_SMOOTHING": smoothing},
        narrow=smoothing == 0,
    )


DIVERGENCE = bound({"jsd_beta": 0.5, "smoothing": 0.0})

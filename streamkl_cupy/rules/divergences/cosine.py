"""1 - cos of the angle between two maps, cos = pq / sqrt(pp qq). It cancels where both point alike: the error is a
rounding of 1."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import overlap
from .interface import Array, Divergence, Scratch, Terms


class Rows(overlap.Rows):
    """Row state of one block."""

    @staticmethod
    def value(xp: Any, l_t: Any, l_s: Any, *terms: Any) -> Any:
        pp, pq, qq = terms  # what they are relative to cancels
        return 1 - pq / (xp.sqrt(pp) * xp.sqrt(qq))


def tile_gradients(
    x: Array, y: Array, value: Any, wanted: tuple[bool, bool], visible: Array | None, scratch: Scratch
) -> tuple[Array | None, Array | None]:
    """From log2 P, log2 Q and the row's moments: p (cos p - q) and q (cos q - p), with p = P / sqrt(pp) and
    q = Q / sqrt(qq), of the wanted ones."""
    pp, pq, qq = (value[..., i] for i in range(3))
    length_p, length_q = (np.where(x == 0, 1, np.sqrt(x)) for x in (pp, qq))  # of a row without keys 0
    cos = pq / (length_p * length_q)
    p, q = np.exp2(x, out=x), np.exp2(y, out=y)
    p /= length_p
    q /= length_q
    d_p = d_q = None
    if wanted[0]:
        d_p = np.multiply(p, cos, out=scratch("term0", x.shape))
        d_p -= q
        d_p *= p
    if wanted[1]:
        d_q = np.multiply(q, cos, out=scratch("term1", x.shape))
        d_q -= p
        d_q *= q
    return d_p, d_q


def _turned(rows: Terms) -> tuple[Array, Array, Array]:
    """P and Q by their lengths, and the cosine; of rows without keys all are 0."""
    pp, pq, qq = overlap.overlaps(rows.p, rows.q)
    length_p, length_q = (np.where(x == 0, 1, np.sqrt(x)) for x in (pp, qq))
    return rows.p / length_p, rows.q / length_q, pq / (length_p * length_q)


def row_values(rows: Terms) -> Array:
    """1 - cos, as half the squared distance of the directions, which does not cancel."""
    p, q, _ = _turned(rows)
    return np.asarray(((p - q) ** 2).sum(axis=-1) / 2)


def row_gradients(rows: Terms, value: Array) -> tuple[Array, Array]:
    """By the logits of P and of Q."""
    p, q, cos = _turned(rows)
    return p * (cos * p - q), q * (cos * q - p)


def row_magnitudes(rows: Terms, value: Array) -> tuple[Array, Array]:
    """Of the terms of `row_gradients`."""
    p, q, cos = _turned(rows)
    return p * (cos * p + q), q * (cos * q + p)


DIVERGENCE = Divergence(
    name="cosine",
    header="divergences/cosine.cuh",
    formula="1 - sum(P * Q) / sqrt(sum(P * P) * sum(Q * Q))",
    needs_value=(),
    state_floats=7,
    row_state=Rows,
    tile_gradients=tile_gradients,
    factors=(1.0, 1.0),
    tile_buffers=("term0", "term1"),
    row_values=row_values,
    row_gradients=row_gradients,
    row_magnitudes=row_magnitudes,
    moments=3,
)

"""The squared error of two maps, sum (P - Q)^2 = pp - 2 pq + qq. It cancels where both are nearly equal: the error is a
rounding of pp + qq."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import overlap
from .interface import Array, Divergence, Scratch, Terms


class Rows(overlap.Rows):
    """Row state of one block."""

    @staticmethod
    def value(xp: Any, l_t: Any, l_s: Any, *terms: Any) -> Any:
        pp, pq, qq = overlap.Rows.moments(l_t, l_s, *terms)
        return (pp - pq) + (qq - pq)


def tile_gradients(
    x: Array, y: Array, value: Any, wanted: tuple[bool, bool], visible: Array | None, scratch: Scratch
) -> tuple[Array | None, Array | None]:
    """From log2 P, log2 Q and the row's moments: P (P - Q - (pp - pq)) and Q (Q - P - (qq - pq)), of those wanted."""
    pp, pq, qq = (value[..., i] for i in range(3))
    p, q = np.exp2(x, out=x), np.exp2(y, out=y)
    d_p = d_q = None
    if wanted[0]:
        d_p = np.subtract(p, q, out=scratch("term0", x.shape))
        d_p -= pp - pq
        d_p *= p
    if wanted[1]:
        d_q = np.subtract(q, p, out=scratch("term1", x.shape))
        d_q -= qq - pq
        d_q *= q
    return d_p, d_q


def row_gradients(rows: Terms, value: Array) -> tuple[Array, Array]:
    """By the logits of P and of Q."""
    p, q = rows.p, rows.q
    pp, pq, qq = overlap.overlaps(p, q)
    return 2 * p * (p - q - (pp - pq)), 2 * q * (q - p - (qq - pq))


def row_magnitudes(rows: Terms, value: Array) -> tuple[Array, Array]:
    """Of the terms of `row_gradients`."""
    p, q = rows.p, rows.q
    pp, pq, qq = overlap.overlaps(p, q)
    return 2 * p * (p + q + pp + pq), 2 * q * (p + q + qq + pq)


DIVERGENCE = Divergence(
    name="squared_error",
    header="divergences/squared_error.cuh",
    formula="sum((P - Q) ** 2)",
    needs_value=(),
    state_floats=7,
    row_state=Rows,
    tile_gradients=tile_gradients,
    factors=(2.0, 2.0),
    tile_buffers=("term0", "term1"),
    row_values=lambda rows: np.asarray(((rows.p - rows.q) ** 2).sum(axis=-1)),
    row_gradients=row_gradients,
    row_magnitudes=row_magnitudes,
    moments=3,
)

"""KL(P || Q), the divergence of the student from the teacher.

Of tiles, with the sums of `sums.py`:

    A = sum 2^u (u - v)     KL = ln2 (A / l_t + log2(l_s / l_t))
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .interface import Array, Divergence, Scratch, Terms, Weighing
from .sums import LN2, Sums, Term, merging, relative_gradients


class Rows(Sums):
    """Row state of one block."""

    own = (
        Term(
            "p", lambda u, v, out: np.subtract(u, v, out=out), lambda x, m: m.shrink_t * (x - (m.d_t - m.d_s) * m.l_t)
        ),
    )

    @staticmethod
    def value(xp: Any, l_t: Any, l_s: Any, *terms: Any) -> Any:
        return LN2 * (terms[0] / l_t + xp.log2(l_s / l_t))


def tile_gradients(
    x: Array, y: Array, value: Array | float, wanted: tuple[bool, bool], visible: Array | None, scratch: Scratch
) -> tuple[Array | None, Array | None]:
    """From log2 P, log2 Q and the row's value: P (x - y - value) and Q - P, of the wanted ones."""

    def by_p(out: Array) -> None:
        np.subtract(x, y, out=out)
        out -= value

    return relative_gradients(by_p, x, y, wanted, visible, scratch)


def row_values(rows: Terms) -> Array:
    """sum P (log P - log Q)"""
    return np.asarray((rows.p * (rows.log_p - rows.log_q)).sum(axis=-1))


def row_gradients(rows: Terms, value: Array) -> tuple[Array, Array]:
    """By the logits of P and of Q."""
    return rows.p * (rows.log_p - rows.log_q - value), rows.q - rows.p


def row_magnitudes(rows: Terms, value: Array) -> tuple[Array, Array]:
    """Of the terms of `row_gradients`."""
    return rows.p * (1 + np.abs(rows.log_p - rows.log_q) + np.abs(value)), rows.p + rows.q


DIVERGENCE = Divergence(
    name="kl",
    header="divergences/kl.cuh",
    formula="sum(P * (log(P) - log(Q)))",
    needs_value=("teacher",),
    state_floats=5,
    row_state=Rows,
    tile_gradients=tile_gradients,
    factors=(LN2, 1.0),
    tile_buffers=("term0",),
    row_values=row_values,
    row_gradients=row_gradients,
    row_magnitudes=row_magnitudes,
    weighing=Weighing(0),
    merging=merging(Rows),
)

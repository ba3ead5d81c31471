"""The cross-entropy H(P, Q) = KL(P || Q) + H(P), which never is 0: to the student it is what KL is.

Of tiles, with the sums of `sums.py`:

    C = sum 2^u v     H(P, Q) = ln2 (log2 l_s - C / l_t)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .interface import Array, Divergence, Scratch, Terms, Weighing
from .sums import LN2, Sums, Term, relative_gradients


def _student(u: Array, v: Array, out: Array) -> None:
    """v, and NaN beside an infinite u, whose weight may be 0."""
    np.multiply(u, 0, out=out)
    out += v


class Rows(Sums):
    """Row state of one block."""

    own = (Term("p", _student, lambda x, m: m.shrink_t * (x - m.d_s * m.l_t)),)

    @staticmethod
    def value(xp: Any, l_t: Any, l_s: Any, *terms: Any) -> Any:
        return LN2 * (xp.log2(l_s) - terms[0] / l_t)


def tile_gradients(
    x: Array, y: Array, value: Array | float, wanted: tuple[bool, bool], visible: Array | None, scratch: Scratch
) -> tuple[Array | None, Array | None]:
    """From log2 P, log2 Q and the row's value: P (-y - value) and Q - P, of the wanted ones."""

    def by_p(out: Array) -> None:
        np.subtract(-value, y, out=out)

    return relative_gradients(by_p, x, y, wanted, visible, scratch)


def row_gradients(rows: Terms, value: Array) -> tuple[Array, Array]:
    """By the logits of P and of Q."""
    return rows.p * (-rows.log_q - value), rows.q - rows.p


def row_magnitudes(rows: Terms, value: Array) -> tuple[Array, Array]:
    """Of the terms of `row_gradients`."""
    return rows.p * (1 + np.abs(rows.log_q) + np.abs(value)), rows.p + rows.q


DIVERGENCE = Divergence(
    name="cross_entropy",
    header="divergences/cross_entropy.cuh",
    formula="-sum(P * log(Q))",
    needs_value=("teacher",),
    state_floats=5,
    row_state=Rows,
    tile_gradients=tile_gradients,
    factors=(LN2, 1.0),
    tile_buffers=("term0",),
    row_values=lambda rows: np.asarray(-(rows.p * rows.log_q).sum(axis=-1)),
    row_gradients=row_gradients,
    row_magnitudes=row_magnitudes,
    weighing=Weighing(0, crossed=True),
)

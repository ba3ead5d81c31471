"""KL(Q || P), the divergence of the teacher from the student: `kl` with the sides swapped."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import kl
from .interface import Array, Divergence, Scratch, Terms, Weighing
from .sums import LN2, Sums, Term


class Rows(Sums):
    """Row state of one block; the student's distribution is the one that weighs."""

    own = (
        Term(
            "q", lambda u, v, out: np.subtract(v, u, out=out), lambda x, m: m.shrink_s * (x - (m.d_s - m.d_t) * m.l_s)
        ),
    )

    @staticmethod
    def value(xp: Any, l_t: Any, l_s: Any, *terms: Any) -> Any:
        return LN2 * (terms[0] / l_s + xp.log2(l_t / l_s))


def _swapped(rows: Terms) -> Terms:
    return Terms(rows.q, rows.p, rows.log_q, rows.log_p)


def tile_gradients(
    x: Array, y: Array, value: Array | float, wanted: tuple[bool, bool], visible: Array | None, scratch: Scratch
) -> tuple[Array | None, Array | None]:
    """From log2 P, log2 Q and the row's value: P - Q and Q (y - x - value), of the wanted ones."""
    return kl.tile_gradients(y, x, value, wanted[::-1], visible, scratch)[::-1]


def row_gradients(rows: Terms, value: Array) -> tuple[Array, Array]:
    """By the logits of P and of Q."""
    return kl.row_gradients(_swapped(rows), value)[::-1]


def row_magnitudes(rows: Terms, value: Array) -> tuple[Array, Array]:
    """Of the terms of `row_gradients`."""
    return kl.row_magnitudes(_swapped(rows), value)[::-1]


DIVERGENCE = Divergence(
    name="reverse_kl",
    header="divergences/reverse_kl.cuh",
    formula="sum(Q * (log(Q) - log(P)))",
    needs_value=("student",),
    state_floats=5,
    row_state=Rows,
    tile_gradients=tile_gradients,
    factors=(1.0, LN2),
    tile_buffers=("term0",),
    row_values=lambda rows: kl.row_values(_swapped(rows)),
    row_gradients=row_gradients,
    row_magnitudes=row_magnitudes,
    zeros=False,
    weighing=Weighing(1),
)

"""KL(P || Q), the divergence of the student from the teacher.

Row state of tiles, with references r (a logit each row has seen), u = T - r_p and v = S - r_q, all in base 2:

    l_p = sum 2^u     l_q = sum 2^v     A = sum 2^u (u - v)     KL = ln2 (A / l_p + log2(l_q / l_p))
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .interface import Array, Divergence, Scratch, Terms

LN2 = math.log(2.0)

# A reference is replaced only when a logit exceeds it by this much (base 2), so most tiles move no row state. The
# sums stay far from the float32 limit, and the last subtraction cancels at most this much.
REFERENCE_SLACK = 8.0


class Rows:
    """Row state of one block: references, sums, and which rows have seen a key at all."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.r_p, self.r_q, self.l_p, self.l_q, self.A = np.zeros((5, *shape), dtype)
        self.seen = np.zeros(shape, np.bool_)

    def absorb(self, u: Array, v: Array, visible: Array | None, scratch: Scratch) -> None:
        """Add a tile of keys: base-2 logits of P and of Q, which are overwritten."""
        seen = np.asarray(visible is None or visible.any(axis=-1))
        self._move(u.max(axis=-1), v.max(axis=-1), seen)
        u -= self.r_p[..., None]
        v -= self.r_q[..., None]
        difference = np.subtract(u, v, out=scratch("difference", u.shape))
        if visible is not None:
            np.copyto(difference, 0, where=~visible)
        np.exp2(u, out=u)
        np.exp2(v, out=v)
        # A product with a column of ones is BLAS's way to sum rows, twice as fast as sum().
        ones = np.ones((u.shape[3], 1), u.dtype)
        self.A += np.vecdot(u, difference)
        self.l_p += np.matmul(u, ones)[..., 0]
        self.l_q += np.matmul(v, ones)[..., 0]

    def _move(self, top_p: Array, top_q: Array, seen: Array) -> None:
        """Move the references to a tile's largest logits where they lag too far behind or do not exist yet."""
        fresh = seen & ~self.seen
        # A NaN never compares larger; it reaches the sums through the logits themselves.
        move_p = fresh | (top_p > self.r_p + REFERENCE_SLACK)
        move_q = fresh | (top_q > self.r_q + REFERENCE_SLACK)
        if move_p.any() or move_q.any():
            d_p, d_q = np.where(move_p, top_p - self.r_p, 0), np.where(move_q, top_q - self.r_q, 0)
            self.r_p += d_p
            self.r_q += d_q
            self.A = np.where(self.seen, np.exp2(-d_p) * (self.A - (d_p - d_q) * self.l_p), 0)
            self.l_p = np.where(self.seen, np.exp2(-d_p) * self.l_p, 0)
            self.l_q = np.where(self.seen, np.exp2(-d_q) * self.l_q, 0)
        self.seen |= seen

    def finish(self, offset_p: Array | float, offset_q: Array | float) -> tuple[Array, Array, Array]:
        """Value in nats and the natural log-sum-exps of P and of Q, of logits that lack so much in base 2."""
        value = LN2 * (self.A / self.l_p + np.log2(self.l_q / self.l_p))
        lse_p, lse_q = LN2 * self.r_p + np.log(self.l_p), LN2 * self.r_q + np.log(self.l_q)
        lse_p, lse_q = lse_p + LN2 * offset_p, lse_q + LN2 * offset_q
        fine = np.isfinite(value) & np.isfinite(lse_p) & np.isfinite(lse_q)

        def settled(x: Array, empty: float) -> Array:
            return np.where(self.seen, np.where(fine, x, np.nan), empty)

        return settled(value, 0.0), settled(lse_p, -np.inf), settled(lse_q, -np.inf)


def tile_gradients(
    x: Array, y: Array, value: Array | float, wanted: tuple[bool, bool], visible: Array | None, scratch: Scratch
) -> tuple[Array | None, Array | None]:
    """From log2 P, log2 Q and the row's value: P (x - y - value) and Q - P, of the wanted ones."""
    d_p = d_q = None
    if wanted[0]:
        d_p = np.subtract(x, y, out=scratch("difference", x.shape))
        d_p -= value
        if visible is not None:
            np.copyto(d_p, 0, where=~visible)
    np.exp2(x, out=x)
    if d_p is not None:
        d_p *= x
    if wanted[1]:
        d_q = np.exp2(y, out=y)
        d_q -= x
    return d_p, d_q


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
    tile_buffers=("difference",),
    row_values=row_values,
    row_gradients=row_gradients,
    row_magnitudes=row_magnitudes,
)

"""Sums over the keys of a row that divergences have in common, as NumPy streams them.

With references r (a logit each row has seen), u = T - r_t and v = S - r_s, all in base 2:

    l_t = sum 2^u     l_s = sum 2^v     and the terms of a divergence, each a sum of its own that knows how it moves

When references move by (d_t, d_s), l_t <- 2^-d_t l_t and l_s <- 2^-d_s l_s. `cuda_src/divergences/softmax_sums.cuh` has
the same for kernels.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from .interface import Array, Merging, Numbers, RowResults, Scratch

LN2 = math.log(2.0)

# A reference is replaced only when a logit exceeds it by this much (base 2), so most tiles move no row state. The
# sums stay far from the float32 limit, and the last subtraction cancels at most this much.
REFERENCE_SLACK = 8.0


class Moves(NamedTuple):
    """How far references move, the factors on the sums that follow from it, and these before they move."""

    d_t: Array
    d_s: Array
    shrink_t: Array
    shrink_s: Array
    l_t: Array
    l_s: Array


class Term(NamedTuple):
    """One sum beside l_t and l_s: of 2^u or 2^v (`weight` "p" or "q") times something linear in u and v, or times
    another of the two."""

    weight: str
    linear: Callable[[Array, Array, Array], Any] | None
    """(u, v, out)"""
    move: Callable[[Array, Moves], Array]
    """(the sum, moves) -> the sum after the references have moved."""
    other: str = ""
    """The other weight, where nothing is linear."""


TEACHER_ENTROPY = Term("p", lambda u, v, out: np.copyto(out, u), lambda x, m: m.shrink_t * (x - m.d_t * m.l_t))


class Sums(ABC):
    """Row state of one block: references, sums, and which rows have seen a key at all."""

    own: ClassVar[tuple[Term, ...]]

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], entropy: bool = False) -> None:
        self.entropy = entropy
        self._terms = (*self.own, TEACHER_ENTROPY) if entropy else self.own
        self.r_t, self.r_s, self.l_t, self.l_s, *self.terms = np.zeros((4 + len(self._terms), *shape), dtype)
        self.seen = np.zeros(shape, np.bool_)

    def absorb(self, u: Array, v: Array, visible: Array | None, scratch: Scratch) -> None:
        """Add a tile of keys: base-2 logits, which are overwritten."""
        seen = np.asarray(visible is None or visible.any(axis=-1))
        self._move(u.max(axis=-1), v.max(axis=-1), seen)
        u -= self.r_t[..., None]
        v -= self.r_s[..., None]
        factors: list[Array | None] = []
        for i, term in enumerate(self._terms):
            if term.linear is None:
                factors.append(None)
                continue
            factor = scratch(f"term{i}" if i < len(self.own) else "entropy", u.shape)
            term.linear(u, v, factor)
            if visible is not None:
                np.copyto(factor, 0, where=~visible)
            factors.append(factor)
        np.exp2(u, out=u)
        np.exp2(v, out=v)
        # A product with a column of ones is BLAS's way to sum rows, twice as fast as sum().
        ones = np.ones((u.shape[3], 1), u.dtype)
        weights = {"p": u, "q": v}
        for i, (term, own) in enumerate(zip(self._terms, factors, strict=True)):
            self.terms[i] += np.vecdot(weights[term.weight], weights[term.other] if own is None else own)
        self.l_t += np.matmul(u, ones)[..., 0]
        self.l_s += np.matmul(v, ones)[..., 0]

    def _move(self, top_t: Array, top_s: Array, seen: Array) -> None:
        """Move the references to a tile's largest logits where they lag too far behind or do not exist yet."""
        fresh = seen & ~self.seen
        # A NaN never compares larger; it reaches the sums through the logits themselves.
        move_t = fresh | (top_t > self.r_t + REFERENCE_SLACK)
        move_s = fresh | (top_s > self.r_s + REFERENCE_SLACK)
        if move_t.any() or move_s.any():
            d_t, d_s = np.where(move_t, top_t - self.r_t, 0), np.where(move_s, top_s - self.r_s, 0)
            moves = Moves(d_t, d_s, np.exp2(-d_t), np.exp2(-d_s), self.l_t, self.l_s)
            self.r_t += d_t
            self.r_s += d_s
            for i, term in enumerate(self._terms):
                self.terms[i] = np.where(self.seen, term.move(self.terms[i], moves), 0)
            self.l_t = np.where(self.seen, moves.shrink_t * self.l_t, 0)
            self.l_s = np.where(self.seen, moves.shrink_s * self.l_s, 0)
        self.seen |= seen

    def numbers(self) -> Array:
        """The state itself, (..., k): references, sums and terms, as kernels store it."""
        return np.stack([self.r_t, self.r_s, self.l_t, self.l_s, *self.terms], axis=-1)

    @staticmethod
    @abstractmethod
    def value(xp: Any, l_t: Any, l_s: Any, *terms: Any) -> Any:
        """Of the sums of rows that have seen a key, nats, with the functions of any array library."""

    def finish(self, teacher_offset: Array | float, student_offset: Array | float) -> RowResults:
        """Results of rows whose logits lack so much in base 2."""
        value = self.value(np, self.l_t, self.l_s, *self.terms[: len(self.own)])
        lse_t, lse_s = LN2 * self.r_t + np.log(self.l_t), LN2 * self.r_s + np.log(self.l_s)
        lse_t, lse_s = lse_t + LN2 * teacher_offset, lse_s + LN2 * student_offset
        fine = np.isfinite(value) & np.isfinite(lse_t) & np.isfinite(lse_s)

        def or_nan(x: Array, empty: float) -> Array:
            return np.where(self.seen, np.where(fine, x, np.nan), empty)

        entropy = None
        if self.entropy:
            entropy = or_nan(LN2 * (np.log2(self.l_t) - self.terms[-1] / self.l_t), 0.0)
        return RowResults(or_nan(value, 0.0), or_nan(lse_t, -np.inf), or_nan(lse_s, -np.inf), entropy)


UNSEEN = -1e30
"""A reference of logits before any key, in memory."""


def merging(rows: type[Sums]) -> Merging:
    """Of states that are references, sums and the terms of a row state.

    What is empty is told apart before anything is subtracted: differences of infinities are NaN.
    """
    unseen = (UNSEEN, UNSEEN, *(0.0,) * (2 + len(rows.own)))
    return Merging(unseen, functools.partial(_merged, rows.own), functools.partial(_finished, rows.value))


def _merged(own: tuple[Term, ...], xp: Any, states: Sequence[Numbers]) -> Numbers:
    top_t, top_s = (functools.reduce(xp.maximum, [x[side] for x in states]) for side in (0, 1))
    to_t, to_s = xp.where(top_t == -math.inf, 0.0, top_t), xp.where(top_s == -math.inf, 0.0, top_s)
    sums: list[Any] = []
    for r_t, r_s, l_t, l_s, *terms in states:
        empty = r_t == -math.inf
        d_t, d_s = to_t - xp.where(empty, to_t, r_t), to_s - xp.where(empty, to_s, r_s)
        moves = Moves(d_t, d_s, xp.exp2(-d_t), xp.exp2(-d_s), l_t, l_s)
        moved = [moves.shrink_t * l_t, moves.shrink_s * l_s, *(x.move(y, moves) for x, y in zip(own, terms))]
        sums = [x + y for x, y in zip(sums, moved)] if sums else moved
    return (top_t, top_s, *sums)


def _finished(value: Callable[..., Any], xp: Any, state: Numbers) -> tuple[Any, Any, Any]:
    """0 and -inf for a row without keys, NaN where an input was not finite."""
    r_t, r_s, l_t, l_s, *terms = state
    empty = r_t == -math.inf
    sum_t, sum_s = xp.where(empty, 1.0, l_t), xp.where(empty, 1.0, l_s)
    found = value(xp, sum_t, sum_s, *terms)
    lse_t, lse_s = (LN2 * (xp.where(empty, 0.0, r) + xp.log2(x)) for r, x in ((r_t, sum_t), (r_s, sum_s)))
    fine = xp.isfinite(found) & xp.isfinite(lse_t) & xp.isfinite(lse_s)

    def or_nan(x: Any, nothing: float) -> Any:
        return xp.where(empty, nothing, xp.where(fine, x, math.nan))

    return or_nan(found, 0.0), or_nan(lse_t, -math.inf), or_nan(lse_s, -math.inf)


def relative_gradients(
    by_p: Callable[[Array], None],
    x: Array,
    y: Array,
    wanted: tuple[bool, bool],
    visible: Array | None,
    scratch: Scratch,
) -> tuple[Array | None, Array | None]:
    """From log2 P and log2 Q: P times what `by_p` writes, before either is raised, and Q - P, of the wanted ones."""
    d_p = d_q = None
    if wanted[0]:
        d_p = scratch("term0", x.shape)
        by_p(d_p)
        if visible is not None:
            np.copyto(d_p, 0, where=~visible)
    np.exp2(x, out=x)
    if d_p is not None:
        d_p *= x
    if wanted[1]:
        d_q = np.exp2(y, out=y)
        d_q -= x
    return d_p, d_q

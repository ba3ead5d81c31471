"""What divergences have in common that compare P and Q by their products, the row's moments pp, pq and qq:

pp = sum P^2     pq = sum P Q     qq = sum Q^2
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .interface import Array, RowResults, Scratch
from .sums import Sums, Term


class Rows(Sums):
    """Row state of one block."""

    own = (
        Term("p", None, lambda x, m: m.shrink_t**2 * x, "p"),
        Term("p", None, lambda x, m: m.shrink_t * m.shrink_s * x, "q"),
        Term("q", None, lambda x, m: m.shrink_s**2 * x, "q"),
    )

    def absorb(self, u: Array, v: Array, visible: Array | None, scratch: Scratch) -> None:
        """Add a tile of keys: base-2 logits, which are overwritten."""
        # A logit of -inf that is visible has no weight, and must not be silent.
        bad = np.isneginf(u) | np.isneginf(v)
        if visible is not None:
            bad &= visible
        super().absorb(u, v, visible, scratch)
        self.terms[1] = np.where(bad.any(axis=-1), np.nan, self.terms[1])

    @staticmethod
    def moments(l_t: Any, l_s: Any, *terms: Any) -> tuple[Any, Any, Any]:
        """Of sums and terms."""
        pp, pq, qq = terms
        return pp / l_t**2, pq / (l_t * l_s), qq / l_s**2

    def finish(self, teacher_offset: Array | float, student_offset: Array | float) -> RowResults:
        """Results of rows whose logits lack so much in base 2."""
        rows = super().finish(teacher_offset, student_offset)
        fine = np.isfinite(rows.teacher_lse)[..., None]
        moments = np.where(
            fine, np.stack(self.moments(self.l_t, self.l_s, *self.terms[:3]), axis=-1), rows.value[..., None]
        )  # 0, or NaN
        return rows._replace(moments=moments)


def overlaps(p: Array, q: Array) -> tuple[Any, Any, Any]:
    """Moments of whole rows, (..., M, 1)."""
    pp, pq, qq = ((x * y).sum(axis=-1, keepdims=True) for x, y in ((p, p), (p, q), (q, q)))
    return pp, pq, qq

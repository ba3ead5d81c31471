"""The divergences by name: device header, saved row statistics, formula, and a dense float64 definition.

A divergence is one header under `cuda_src/divergences/` and one entry here. The dense functions are the definition
the kernels are judged by: they take whole logit matrices, so they are for tests, not for work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Logits = NDArray[np.float64]
Visible = NDArray[np.bool_]


@dataclass(frozen=True)
class Divergence:
    """One function of two distributions over the same keys, one value per query row."""

    name: str
    header: str
    formula: str
    statistics: tuple[str, ...]
    """Per-row results of the forward that every backward reads."""
    needs_value: tuple[str, ...]
    """Sides whose gradients read the row's value besides, as `LogitGradient<side>::kNeedsValue` says on the device."""
    state_floats: int
    """Size of a row's partial state in memory, where several blocks share a row's keys."""
    value: Callable[[Logits, Logits, Visible], NDArray[np.float64]]
    """(T, S, visible) (..., M, N) -> (..., M) in nats; 0 for a row that sees no key."""
    logit_gradients: Callable[[Logits, Logits, Visible], tuple[Logits, Logits]]
    """(T, S, visible) -> (dT, dS), the derivatives of each row's value; exactly 0 where not visible."""
    logit_magnitudes: Callable[[Logits, Logits, Visible], tuple[Logits, Logits]]
    """Like `logit_gradients`, every term by its magnitude: what rounding errors of dT and dS are proportional to."""


def _split_log_sum_exp(logits: NDArray[Any], visible: Visible) -> tuple[Logits, Logits]:
    """The largest visible logit of each row, and how far its log-sum-exp is above that."""
    x = np.where(visible, logits, -np.inf).astype(np.float64)
    top = x.max(axis=-1, keepdims=True, initial=-np.inf)
    # A row of -inf would make inf - inf: shift it by 0 instead, its sum of exponentials is 0 either way.
    shift = np.where(np.isneginf(top), 0.0, top)
    with np.errstate(divide="ignore", invalid="ignore"):
        return shift, np.log(np.exp(x - shift).sum(axis=-1, keepdims=True))


def log_sum_exp(logits: NDArray[Any], visible: Visible) -> NDArray[np.float64]:
    """Natural log-sum-exp over the visible keys of each row, (..., M, N) -> (..., M); -inf for a row that sees none."""
    shift, above = _split_log_sum_exp(logits, visible)
    return np.asarray((shift + above)[..., 0])


def log_softmax(logits: NDArray[Any], visible: Visible) -> Logits:
    """Natural log-probabilities over the visible keys, 0 where not visible so that sums may run over whole rows."""
    # Subtracted one after the other: with logits of 1e4 their sum is rounded too coarsely for sum P to be 1.
    shift, above = _split_log_sum_exp(logits, visible)
    with np.errstate(invalid="ignore"):
        return np.where(visible, logits - shift - above, 0.0)


def _poison(rows: NDArray[Any], teacher: Logits, student: Logits, visible: Visible) -> NDArray[Any]:
    """NaN in exactly the rows that see a logit which is not finite: a NaN or Inf input must not be silent."""
    bad = (visible & ~(np.isfinite(teacher) & np.isfinite(student))).any(axis=-1)
    return np.where(bad.reshape(bad.shape + (1,) * (rows.ndim - bad.ndim)), np.nan, rows)


def _kl(teacher: Logits, student: Logits, visible: Visible) -> NDArray[np.float64]:
    log_p, log_q = log_softmax(teacher, visible), log_softmax(student, visible)
    with np.errstate(invalid="ignore", over="ignore"):
        rows = (np.where(visible, np.exp(log_p), 0.0) * (log_p - log_q)).sum(axis=-1)
    return _poison(rows, teacher, student, visible)


def _kl_terms(teacher: Logits, student: Logits, visible: Visible) -> tuple[Logits, Logits, Logits, Logits]:
    """P, Q, log P - log Q, and the row's KL with an axis to broadcast along."""
    log_p, log_q = log_softmax(teacher, visible), log_softmax(student, visible)
    with np.errstate(invalid="ignore", over="ignore"):
        p, q = np.where(visible, np.exp(log_p), 0.0), np.where(visible, np.exp(log_q), 0.0)
        ratio = log_p - log_q
        return p, q, ratio, (p * ratio).sum(axis=-1, keepdims=True)


def _kl_gradients(teacher: Logits, student: Logits, visible: Visible) -> tuple[Logits, Logits]:
    p, q, ratio, row = _kl_terms(teacher, student, visible)
    with np.errstate(invalid="ignore", over="ignore"):
        both = p * (ratio - row), q - p
    d_teacher, d_student = (np.where(visible, _poison(d, teacher, student, visible), 0.0) for d in both)
    return d_teacher, d_student


def _kl_magnitudes(teacher: Logits, student: Logits, visible: Visible) -> tuple[Logits, Logits]:
    p, q, ratio, row = _kl_terms(teacher, student, visible)
    with np.errstate(invalid="ignore", over="ignore"):
        return p * (1 + np.abs(ratio) + np.abs(row)), p + q


DIVERGENCES: dict[str, Divergence] = {
    divergence.name: divergence
    for divergence in (
        Divergence(
            name="kl",
            header="divergences/kl.cuh",
            formula="KL_row = sum_j P_j (log P_j - log Q_j);  dS = Q - P;  dT = P ((log P - log Q) - KL_row)",
            statistics=("teacher_lse", "student_lse"),
            needs_value=("teacher",),
            state_floats=5,
            value=_kl,
            logit_gradients=_kl_gradients,
            logit_magnitudes=_kl_magnitudes,
        ),
    )
}

"""The definition in dense float64 NumPy: rows, log-sum-exps and all four gradients, for every mask and rule.

Nothing here is fast or small: one head's M x N matrices exist in float64. Inputs are taken as they are, already rounded
to their own type, and widened without error. `plain` is the other yardstick: the same formulas in the precision a
straightforward implementation would use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..numpy_backend.elements import narrow, widen
from ..problem import Side
from ..rules.divergences import PARAMETERS, bound, given_parameters
from ..rules.divergences.interface import Divergence, log_softmax, log_sum_exp, terms_of
from ..rules.masks import MASKS, packing
from ..rules.scores import SCORES
from ..rules.scores.interface import Score
from ..rules.scores.softcap import capped

Array = NDArray[Any]


class Rows(NamedTuple):
    """Forward results, each shaped like the inputs without their last axis and with the query heads."""

    kl: Array
    teacher_lse: Array
    student_lse: Array
    largest: Array
    """Largest size behind a visible logit of the row, of either side; of a scaled product scale x sum |q_d k_d|."""
    condition: Array
    """How much KL moves when every product behind every logit moves by its own size: on hard data logits cannot be
    had better than to a rounding of those, and this times that rounding is what any method is off by."""
    entropy: Any = None
    """Of the teacher."""
    entropy_condition: Any = None
    """Its `condition`."""


class Grads(NamedTuple):
    """One array per input, in the inputs' shapes."""

    teacher_q: Array
    teacher_k: Array
    student_q: Array
    student_k: Array


class Terms(NamedTuple):
    """One gradient, with the measures of `Gradients`."""

    value: Array
    magnitude: Array
    noise: Array
    sensitivity: Array


class Gradients(NamedTuple):
    """The gradients, and measures of what each element is a sum of."""

    value: Grads
    magnitude: Grads
    """Sum of the magnitudes of all terms; where it is 0 the gradient is exactly 0."""
    noise: Grads
    """Root of the sum of squares of dLogit x operand: the error if each dLogit is off by a random relative 1."""
    sensitivity: Grads
    """`magnitude` with each term times the size of the logits it comes from, like `Rows.condition`."""

    def of(self, i: int) -> Terms:
        """That of one input."""
        return Terms(*[measure[i] for measure in self])


def exact(x: ArrayLike) -> Array:
    """Any floating NumPy array, bfloat16 of ml_dtypes included, as float64 without a change of value."""
    return np.asarray(x).astype(np.float64)


def rounded(x: ArrayLike, dtype: str) -> Array:
    """`x` rounded to nearest in the named type, returned as float32 (float64 for "float64")."""
    x = np.asarray(x, np.float64)
    if dtype == "float64":
        return x
    if dtype == "bfloat16":
        return widen(narrow(x, np.dtype(np.uint16)), np.empty(x.shape, np.float32))
    with np.errstate(over="ignore"):
        return x.astype(dtype).astype(np.float32)


def _taken(options: dict[str, Any]) -> Divergence:
    """The divergence that options name, with its numbers, which are taken out of them."""
    numbers = given_parameters({name: options.pop(name, None) for name in PARAMETERS})
    return bound(options.pop("divergence", "kl"), numbers)


def forward_to(
    target: ArrayLike,
    student_q: ArrayLike,
    student_k: ArrayLike,
    *,
    log_target: bool = False,
    **options: Any,
) -> Rows:
    """`forward` with a target in place of the teacher."""
    entry = _taken(options)
    return _forward(_To(target, (student_q, student_k), log_target, entry.zeros, **options), entry)


def backward_to(
    grad: ArrayLike,
    target: ArrayLike,
    student_q: ArrayLike,
    student_k: ArrayLike,
    *,
    log_target: bool = False,
    **options: Any,
) -> Gradients:
    """`backward` with a target in place of the teacher, of which there are no gradients: 0 stands for them."""
    entry = _taken(options)
    return _backward(grad, _To(target, (student_q, student_k), log_target, entry.zeros, **options), entry)


def forward(
    teacher_q: ArrayLike,
    teacher_k: ArrayLike,
    student_q: ArrayLike,
    student_k: ArrayLike,
    **options: Any,
) -> Rows:
    """Dense float64 forward. `options` are those of `attention_kl` that change the value of a row."""
    entry = _taken(options)
    return _forward(_Call((teacher_q, teacher_k, student_q, student_k), **options), entry)


def _forward(call: _Call, entry: Divergence) -> Rows:
    out = Rows(*(np.empty(call.row_shape) for _ in Rows._fields))
    for index, _, teacher, student in call.heads():
        visible = call.visible[index]
        d_teacher, d_student = entry.logit_gradients(teacher.logits, student.logits, visible)
        sizes = teacher.sizes, student.sizes
        with np.errstate(invalid="ignore"):
            condition = np.abs(d_teacher) * sizes[0] + np.abs(d_student) * sizes[1]
        value = entry.value(teacher.logits, student.logits, visible)
        # A row that saw NaN or Inf has no log-sum-exp either, so that a backward from it is NaN on both sides.
        lse_t, lse_s = (np.where(np.isnan(value), np.nan, log_sum_exp(x.logits, visible)) for x in (teacher, student))
        results = (
            value,
            lse_t,
            lse_s,
            np.where(visible, np.maximum(*sizes), 0).max(axis=-1, initial=0),
            np.where(visible, condition, 0).sum(axis=-1),
            *_entropy(teacher.logits, sizes[0], visible, value),
        )
        for array, x in zip(out, results, strict=True):
            array[index] = x
    return Rows(*(call.callers_rows(x) for x in out))


def _entropy(logits: Array, sizes: Array, visible: Array, value: Array) -> tuple[Array, Array]:
    """The entropy of each row and its condition; NaN where the value is."""
    with np.errstate(invalid="ignore"):
        log_p = log_softmax(logits, visible)
        p = np.where(visible, np.exp(log_p), 0)
        entropy = -(p * log_p).sum(axis=-1)
        condition = np.where(visible, np.abs(p * (log_p + entropy[:, None])) * sizes, 0).sum(axis=-1)
    return np.where(np.isnan(value), np.nan, entropy), condition


def backward(
    grad: ArrayLike,
    teacher_q: ArrayLike,
    teacher_k: ArrayLike,
    student_q: ArrayLike,
    student_k: ArrayLike,
    **options: Any,
) -> Gradients:
    """Dense float64 gradients of sum(grad * rows), `grad` shaped like the rows.

    NaN and Inf in inputs reach the gradients of the rows that see them and of the keys those rows see, no others.
    """
    entry = _taken(options)
    return _backward(grad, _Call((teacher_q, teacher_k, student_q, student_k), **options), entry)


def _backward(grad: ArrayLike, call: _Call, entry: Divergence) -> Gradients:
    upstream = call.canonical_rows(exact(grad))
    value, magnitude, noise, sensitivity = (call.zeros() for _ in Gradients._fields)
    for index, keys, teacher, student in call.heads():
        visible = call.visible[index]
        signed = entry.logit_gradients(teacher.logits, student.logits, visible)
        terms = entry.logit_magnitudes(teacher.logits, student.logits, visible)
        weight = np.where(visible.any(axis=-1), upstream[index], 0)[:, None]
        with np.errstate(invalid="ignore", over="ignore"):
            for side, half, d, size, key in zip((0, 2), (teacher, student), signed, terms, keys, strict=True):
                if half.given:
                    continue
                d, size = (np.where(visible, weight * (half.factor * half.slopes) * x, 0) for x in (d, size))
                for into, dx, q, k in (
                    (value, d, half.q, half.k),
                    (magnitude, np.abs(size), np.abs(half.q), np.abs(half.k)),
                    (noise, d**2, half.q**2, half.k**2),
                    (sensitivity, np.abs(size) * (1 + teacher.sizes + student.sizes), np.abs(half.q), np.abs(half.k)),
                ):
                    into[side][index] = dx @ k
                    into[side + 1][key] += dx.T @ q
    noise = [np.sqrt(x) for x in noise]
    return Gradients(*(call.callers_inputs(x) for x in (value, magnitude, noise, sensitivity)))


# The options that hide keys.
MASK_NAMES: Final = tuple(dict.fromkeys(name for part in MASKS.values() for name in part.names))


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in options.items() if x is not None}


def visible(shape: tuple[int, ...], options: Mapping[str, Any]) -> Array:
    """The dense boolean mask that the options of `attention_kl` stand for, to broadcast to `shape`, (B, H, M, N).

    It is what the parts of masks have as their definition, which says anew what they say for tiles, so that each can be
    held against the other. M and N of packed sequences count all of them.
    """
    if unknown := options.keys() - set(MASK_NAMES):
        raise TypeError(f"{min(unknown)} is no option of masks; those are {', '.join(MASK_NAMES)}")
    given = _given(options)
    parts = [part for part in MASKS.values() if not given.keys().isdisjoint(part.names)]
    M, N = shape[2:]

    def within(m: int, n: int) -> Array:
        seen = np.ones((1, 1, m, n), np.bool_)
        for part in parts:
            seen = seen & part.definition(given, m, n)
        return seen

    packed = packing(given)
    if packed is None:
        return within(M, N)
    seen = np.zeros((1, 1, M, N), np.bool_)
    for (q0, q1), (k0, k1) in zip(*(pairwise(np.asarray(given[name]).tolist()) for name in packed.bounds)):
        seen[:, :, q0:q1, k0:k1] = within(q1 - q0, k1 - k0)
    return seen


def reduce(kl: Array, teacher_lse: Array, row_weight: ArrayLike | None, reduction: str) -> Array:
    """The `reduction` of `attention_kl` over rows: "none", "sum", or "mean" over rows that see a key."""
    seen = ~np.isneginf(teacher_lse)
    weight = np.where(seen, np.broadcast_to(1.0 if row_weight is None else exact(row_weight), kl.shape), 0.0)
    weighted = np.where(seen, kl * weight, 0.0)
    if reduction == "none":
        return weighted
    total = weighted.sum()
    if reduction == "sum":
        return np.asarray(total)
    return np.asarray(total / weight.sum() if weight.sum() != 0 else 0.0)


def plain(
    grad: ArrayLike,
    *inputs: Array,
    dtypes: tuple[str, str] = ("float32", "float32"),
    **options: Any,
) -> tuple[Array, Grads]:
    """Rows and gradients as a straightforward program in the inputs' own precision gets them, to calibrate by.

    Logits, softmax and logarithm in float32; the gradients from log-sum-exps kept in float32, as a recomputing backward
    has them. Logit gradients are rounded to the type of their side before the second products, as matrix units need it,
    and gradients once more at the end. `dtypes` are the teacher's and the student's.
    """
    entry = _taken(options)
    call = _Call(inputs, **options)
    upstream = call.canonical_rows(exact(grad)).astype(np.float32)
    rows, value = np.empty(call.row_shape, np.float32), call.zeros()
    for index, keys, teacher, student in call.heads(np.float32):
        visible = call.visible[index]
        fresh, again = (
            terms_of(log(teacher.logits, visible), log(student.logits, visible), visible)
            for log in (_log_softmax, _from_saved)
        )
        rows[index] = entry.row_values(fresh)
        d_logits = entry.row_gradients(again, rows[index][:, None])
        for side, half, d, key, dtype in zip((0, 2), (teacher, student), d_logits, keys, dtypes, strict=True):
            d = rounded(upstream[index][:, None] * np.where(visible, d * half.slopes, 0), dtype)
            value[side][index] = half.factor * (d @ half.k)
            value[side + 1][key] += half.factor * (d.T @ half.q)
    types = (dtypes[0], dtypes[0], dtypes[1], dtypes[1])
    grads = call.callers_inputs(value)
    return call.callers_rows(rows), Grads(*(rounded(x, dtype) for x, dtype in zip(grads, types, strict=True)))


def _log_softmax(logits: Array, visible: Array) -> Array:
    """In the logits' own precision, where the registry's is float64 throughout; 0 where not visible."""
    with np.errstate(invalid="ignore", divide="ignore"):
        top = np.where(visible, logits, -np.inf).max(axis=-1, keepdims=True, initial=-np.inf)
        shifted = np.where(visible, logits - np.where(np.isfinite(top), top, 0), -np.inf)
        return np.where(visible, shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)), 0).astype(logits.dtype)


def _from_saved(logits: Array, visible: Array) -> Array:
    """Log-probabilities from a log-sum-exp that was rounded to float32; 0 where not visible."""
    lse = log_sum_exp(logits, visible).astype(np.float32)[:, None]
    return np.where(visible, logits - np.where(np.isneginf(lse), 0, lse), 0).astype(np.float32)


class _Half(NamedTuple):
    """One distribution of one head. `q` and `k` are for gradient products: rows with NaN or Inf are 0 in them, for
    0 x NaN would leave the row that sees it; the logits, and so the logit gradients, still have it."""

    q: Array
    k: Array
    logits: Array
    factor: float
    slopes: Array | float
    """With the factor: derivatives of the logits by their dot products."""
    sizes: Array
    """How far each logit moves when every product behind it moves by its own size, and not less than itself."""
    given: bool = False
    """Whether the logits are an input, and `q` and `k` nothing."""


def finite_rows(x: Array) -> Array:
    """With 0 in rows that hold NaN or Inf."""
    return np.where(np.isfinite(x).all(axis=-1, keepdims=True), x, 0)


class Numbers(NamedTuple):
    """What becomes of the dot products of a side."""

    scale: float | None = None
    score: str = Side.score
    softcap: float | None = None

    @classmethod
    def taken(cls, options: dict[str, Any], prefix: str = "") -> Numbers:
        """Those whose options begin so, which the options then lack."""
        names = {name: f"{prefix}{name}" for name in cls._fields}
        return cls(**{name: options.pop(option) for name, option in names.items() if option in options})

    def factor(self, dim: int) -> float:
        """The scale, or what stands for it."""
        if self.scale is not None:
            return float(self.scale)
        return 1.0 if SCORES[self.score].positive else 1 / math.sqrt(dim)

    def rule(self) -> Score:
        """The score, under its cap."""
        return SCORES[self.score] if self.softcap is None else capped(SCORES[self.score], self.softcap)


class Order:
    """Canonical order (batch, head, row, column), and the way back to the caller's."""

    def __init__(self, first: Array, layout: str, options: Mapping[str, Any]) -> None:
        packed = packing(_given(options)) is not None
        self._swap = (layout == "bnhd" and first.ndim > 2) or packed
        self._rank = first.ndim

    def canonical(self, x: Array, trailing: int) -> Array:
        """Of an input (`trailing` 1) or of rows (0)."""
        lead = x.ndim - trailing
        if self._swap:
            x = x.swapaxes(lead - 2, lead - 1)
        return x[(None,) * (3 - lead)]

    def callers(self, x: Array) -> Array:
        """An array of four or three axes again in those that the caller has."""
        x = x.swapaxes(1, 2) if self._swap else x
        return x.reshape(x.shape[4 - self._rank :])


class _Call(Order):
    """The four inputs in canonical order (batch, head, row, column), and the way back to the caller's."""

    def __init__(self, inputs: tuple[ArrayLike, ...], *, layout: str = "bhnd", **options: Any) -> None:
        arrays = [np.asarray(x) for x in inputs]
        numbers = [Numbers.taken(options, f"{side}_") for side in ("teacher", "student")]
        super().__init__(arrays[0], layout, options)
        self._inputs = [self.canonical(exact(x), 1) for x in arrays]
        self._shapes = [x.shape for x in self._inputs]
        self.row_shape = self._inputs[0].shape[:3]
        dims = arrays[0].shape[-1], arrays[2].shape[-1]
        self._scales = tuple(x.factor(dim) for x, dim in zip(numbers, dims, strict=True))
        self._scores = tuple(x.rule() for x in numbers)
        shape = (*self.row_shape, self._shapes[1][2])
        self.visible = np.broadcast_to(visible(shape, options), shape)

    def canonical_rows(self, x: Array) -> Array:
        return self.canonical(x, 0)

    def callers_rows(self, x: Array) -> Array:
        return self.callers(x)

    def callers_inputs(self, arrays: list[Array]) -> Grads:
        return Grads(*(self.callers(x) for x in arrays))

    def zeros(self) -> list[Array]:
        return [np.zeros(shape) for shape in self._shapes]

    def heads(self, dtype: Any = np.float64) -> Iterator[tuple[tuple[int, int], list[tuple[int, int]], _Half, _Half]]:
        """Each (batch, head) with the key head it reads on either side, and both halves."""
        batch, heads = self.row_shape[:2]
        for b in range(batch):
            for h in range(heads):
                keys, halves = [], []
                for side, scale, score in zip((0, 2), self._scales, self._scores, strict=True):
                    key = b, h * self._shapes[side + 1][1] // heads
                    q, k = self._inputs[side][b, h].astype(dtype), self._inputs[side + 1][key].astype(dtype)
                    with np.errstate(invalid="ignore", over="ignore"):
                        dots = q @ k.T
                        logits, slopes = score.pair_logits(dots, scale), score.pair_slopes(dots, scale)
                        factor = score.factor(scale)
                        sizes = np.maximum(np.abs(factor * slopes) * (np.abs(q) @ np.abs(k).T), np.abs(logits))
                    keys.append(key)
                    halves.append(_Half(finite_rows(q), finite_rows(k), logits, factor, slopes, sizes))
                yield (b, h), keys, halves[0], halves[1]


class _To(_Call):
    """A call whose teacher is given: logarithms of a target's probabilities are its logits."""

    ZERO = -1e5
    """The logit of a probability of 0: its exponential is 0, and 0 times it too."""

    def __init__(
        self, target: ArrayLike, student: tuple[ArrayLike, ArrayLike], log_target: bool, zeros: bool, **options: Any
    ) -> None:
        q, k = student
        super().__init__((q, k, q, k), **options)
        x = self.canonical(exact(target), 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            logits = x if log_target else np.log(x)
        if zeros:
            logits = np.where(logits < self.ZERO, self.ZERO, logits)
        self._logits = np.broadcast_to(logits, self.visible.shape)

    def heads(self, dtype: Any = np.float64) -> Iterator[tuple[tuple[int, int], list[tuple[int, int]], _Half, _Half]]:
        """As those of a call, with the target's logits for the teacher's."""
        for index, keys, teacher, student in super().heads(dtype):
            logits = self._logits[index].astype(dtype)
            sizes = np.where(logits <= self.ZERO, 0, np.abs(logits))
            yield index, keys, teacher._replace(logits=logits, sizes=sizes, given=True), student

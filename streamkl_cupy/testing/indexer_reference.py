"""The definition of `indexer_kl` in dense float64 NumPy: rows, targets and gradients.

Nothing here is fast or small: the M x N matrices of every head exist in float64. Inputs are taken as they are, already
rounded to their own type, and in the order (batch, heads, rows, columns) alone. What hides keys is said anew, so
that it and the rules of rows can be held against each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .reference import exact

Array = NDArray[Any]


class Rows(NamedTuple):
    """Forward results (B, G, M), but for `teacher_lse`."""

    kl: Array
    index_lse: Array
    target_sum: Array
    teacher_lse: Array
    """(B, H, M), given or made; -inf where a row sees no key."""
    active: Array
    """Rows that count: they see a key, and their heads have mass there."""


class Grads(NamedTuple):
    """In the shapes of the inputs; `index_weights` is (B, HI, M) where none came too."""

    index_q: Array
    index_k: Array
    index_weights: Array


class Keys(NamedTuple):
    """Which keys a row sees, by the options of `indexer_kl`."""

    causal: bool = False
    q_offset: int | None = None
    compress_ratio: int = 1
    key_start: ArrayLike | None = None
    key_end: ArrayLike | None = None
    key_mask: ArrayLike | None = None
    topk_indices: ArrayLike | None = None
    topk_length: ArrayLike | None = None
    topk_relative: bool = False
    cu_seqlens_q: ArrayLike | None = None
    cu_seqlens_k: ArrayLike | None = None


def visible(shape: tuple[int, int, int, int], keys: Keys) -> Array:
    """(B, G, M, N), whether row i of a group sees key j: every condition that is given holds."""
    M, N = shape[2:]
    bounds = (
        [np.asarray(x).tolist() for x in (keys.cu_seqlens_q, keys.cu_seqlens_k)]
        if keys.cu_seqlens_q is not None and keys.cu_seqlens_k is not None
        else [[0, M], [0, N]]
    )
    seen = np.zeros(shape, np.bool_)
    for (q0, q1), (k0, k1) in zip(*map(pairwise, bounds), strict=True):
        for i in range(q0, q1):
            end = k1 - k0
            if keys.causal:
                offset = end * keys.compress_ratio - (q1 - q0) if keys.q_offset is None else keys.q_offset
                end = min(end, max((i - q0 + offset + 1) // keys.compress_ratio, 0))
            seen[:, :, i, k0 : k0 + end] = True
    j = np.arange(N)
    if keys.key_start is not None:
        seen &= j >= np.asarray(keys.key_start)[:, None, :, None]
    if keys.key_end is not None:
        seen &= j < np.asarray(keys.key_end)[:, None, :, None]
    if keys.key_mask is not None:
        seen &= np.asarray(keys.key_mask)[:, None, None, :]
    if keys.topk_indices is not None:
        seen &= _chosen(shape, keys, bounds)
    return seen


def _chosen(shape: tuple[int, int, int, int], keys: Keys, bounds: list[list[int]]) -> Array:
    """(B, G, M, N), the keys that ids name."""
    batch, groups, M, N = shape
    ids = np.asarray(keys.topk_indices)
    ids = np.broadcast_to(ids if ids.ndim == 4 else ids[:, None], (batch, groups, M, ids.shape[-1]))
    length = np.asarray(ids.shape[-1] if keys.topk_length is None else keys.topk_length)
    length = np.broadcast_to(length[:, None] if length.ndim == 2 else length, ids.shape[:3])
    starts = np.zeros(M, np.int64)
    if keys.topk_relative:
        for (q0, q1), k0 in zip(pairwise(bounds[0]), bounds[1][:-1], strict=True):
            starts[q0:q1] = k0
    chosen = np.zeros(shape, np.bool_)
    for b, g, i in np.ndindex(batch, groups, M):
        for key in ids[b, g, i, : max(length[b, g, i], 0)].tolist():
            if key >= 0 and key + starts[i] < N:
                chosen[b, g, i, key + starts[i]] = True
    return chosen


class _At(NamedTuple):
    """One group of heads of one batch entry."""

    b: int
    g: int
    heads: slice
    """Of the teacher."""
    index_heads: slice
    key: int
    """The head of index_k."""


class _Part(NamedTuple):
    """What a group is made of; matrices are (M, N), lists of them (heads, M, N)."""

    at: _At
    visible: Array
    lse: Array
    """(heads, M)."""
    t: Array
    scores: Array
    """Of the index heads, before ReLU."""
    active: Array
    kl: Array
    index_lse: Array
    target: Array
    """P."""
    predicted: Array
    """Q."""


class _Given(NamedTuple):
    """The inputs and options of `indexer_kl`, but for those of `Keys`."""

    teacher_q: ArrayLike | None
    teacher_k: ArrayLike | None
    index_q: ArrayLike
    index_k: ArrayLike
    index_weights: ArrayLike | None = None
    index_scale: float = 1.0
    teacher_scale: float | None = None
    teacher_lse: ArrayLike | None = None
    teacher_q_rope: ArrayLike | None = None
    teacher_k_rope: ArrayLike | None = None
    target: ArrayLike | None = None
    relu: bool = True
    head_groups: int | None = None


class _Call:
    """The inputs in float64, with what the options say of them."""

    def __init__(self, *inputs: ArrayLike | None, **options: Any) -> None:
        keys = {name: options.pop(name) for name in Keys._fields if name in options}
        given = _Given(*inputs, **options)  # type: ignore[arg-type]
        self.index_q, self.index_k = exact(given.index_q), exact(given.index_k)
        batch, heads, queries, _ = self.index_q.shape
        self.weights = np.ones((batch, heads, queries)) if given.index_weights is None else exact(given.index_weights)
        self.index_scale, self.relu = given.index_scale, given.relu
        self.groups = given.head_groups or 1
        self.teacher = None
        if given.teacher_q is not None and given.teacher_k is not None:
            pairs = [(exact(given.teacher_q), exact(given.teacher_k))]
            if given.teacher_q_rope is not None and given.teacher_k_rope is not None:
                pairs.append((exact(given.teacher_q_rope), exact(given.teacher_k_rope)))
            self.teacher = pairs
            dim = sum(q.shape[-1] for q, _ in pairs)
            self.teacher_scale = 1 / math.sqrt(dim) if given.teacher_scale is None else given.teacher_scale
        self.lse = None if given.teacher_lse is None else exact(given.teacher_lse)
        self.target = None if given.target is None else exact(given.target)
        self.shape = (batch, self.groups, queries, self.index_k.shape[2])
        self.visible = visible(self.shape, Keys(**keys))

    def teacher_sum(self, b: int, heads: slice, seen: Array) -> tuple[Array, Array, Array]:
        """t, the log-sum-exps of its heads, and where a head that counts saw what is not finite."""
        assert self.teacher is not None
        t, bad, lses = np.zeros(seen.shape), np.zeros(seen.shape, np.bool_), []
        for h in range(heads.start, heads.stop):
            logits = np.zeros(seen.shape)
            for q, k in self.teacher:
                logits += q[b, h] @ k[b, h * k.shape[1] // q.shape[1]].T
            logits *= self.teacher_scale
            shown = np.where(seen, logits, -np.inf)
            if self.lse is not None:
                lse = self.lse[b, h]
            else:
                top = shown.max(axis=-1, initial=-np.inf)
                top = np.where(np.isfinite(top), top, 0.0)
                lse = top + np.log(np.exp(shown - top[:, None]).sum(axis=-1))
                lse[(seen & ~np.isfinite(logits)).any(axis=-1)] = np.nan
            counts = ~np.isinf(lse)[:, None]
            t += np.where(seen & counts, np.exp(logits - np.where(counts[:, 0], lse, 0.0)[:, None]), 0.0)
            bad |= seen & counts & ~np.isfinite(logits)
            lses.append(lse)
        return t, np.stack(lses), bad

    def parts(self) -> Iterator[_Part]:
        batch, groups, _, _ = self.shape
        heads = 0 if self.teacher is None else self.teacher[0][0].shape[1]
        index_heads, index_keys = self.index_q.shape[1], self.index_k.shape[1]
        for b, g in np.ndindex(batch, groups):
            seen = self.visible[b, g]
            own = slice(g * heads // groups, (g + 1) * heads // groups)
            own_index = slice(g * index_heads // groups, (g + 1) * index_heads // groups)
            at = _At(b, g, own, own_index, g if index_keys > 1 else 0)
            with np.errstate(all="ignore"):
                if self.target is not None:
                    t, lse, bad = np.where(seen, self.target[b, g], 0.0), np.zeros((0, len(seen))), np.zeros_like(seen)
                else:
                    t, lse, bad = self.teacher_sum(b, own, seen)
                scores = self.index_q[b, own_index] @ self.index_k[b, at.key].T
                weights = self.weights[b, own_index]
                a = np.maximum(scores, 0) if self.relu else scores
                logits = self.index_scale * (weights[..., None] * a).sum(axis=0)
                bad |= seen & ~(np.isfinite(scores).all(axis=0) & np.isfinite(logits))
                t = np.where(bad.any(axis=-1, keepdims=True) & seen, np.nan, t)
                yield _part(at, seen, lse, t, scores, logits)


def _part(at: _At, seen: Array, lse: Array, t: Array, scores: Array, logits: Array) -> _Part:
    shown = np.where(seen, logits, -np.inf)
    top = shown.max(axis=-1, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    index_lse = top + np.log(np.exp(shown - top[:, None]).sum(axis=-1))
    mass = t.sum(axis=-1)
    active = seen.any(axis=-1) & ~(mass == 0)
    P = t / np.where(active, mass, 1.0)[:, None]
    log_q = np.where(seen, logits - np.where(active, index_lse, 0.0)[:, None], 0.0)
    terms = np.where(P == 0, 0.0, P * (np.log(np.where(P == 0, 1.0, P)) - log_q))
    kl = np.where(active, terms.sum(axis=-1), 0.0)
    # A row that saw NaN or Inf has no log-sum-exp either.
    index_lse = np.where(np.isnan(kl), np.nan, index_lse)
    Q = np.where(seen, np.exp(log_q), 0.0)
    return _Part(at, seen, lse, t, scores, active, kl, index_lse, P, Q)


def forward(*inputs: ArrayLike | None, **options: Any) -> Rows:
    """Dense float64 rows of the inputs and options of `indexer_kl`."""
    call = _Call(*inputs, **options)
    kl, index_lse, target_sum = (np.empty(call.shape[:3]) for _ in range(3))
    active = np.empty(call.shape[:3], np.bool_)
    heads = 0 if call.teacher is None else call.teacher[0][0].shape[1]
    teacher_lse = np.empty((call.shape[0], heads, call.shape[2]))
    for part in call.parts():
        b, g, heads, _, _ = part.at
        at = b, g
        kl[at], index_lse[at], target_sum[at] = part.kl, part.index_lse, part.t.sum(axis=-1)
        active[at] = part.active
        if len(part.lse):
            teacher_lse[b, heads] = part.lse
    return Rows(kl, index_lse, target_sum, teacher_lse, active)


def backward(grad: ArrayLike, *inputs: ArrayLike | None, **options: Any) -> Grads:
    """Dense float64 gradients of sum(grad * kl), `grad` (B, G, M); rows of a `grad` of 0 have none, NaN or not."""
    call = _Call(*inputs, **options)
    upstream = exact(grad)
    d_q, d_k, d_w = np.zeros_like(call.index_q), np.zeros_like(call.index_k), np.zeros_like(call.weights)
    for part in call.parts():
        b, group, _, heads, key = part.at
        g = np.where(part.active, upstream[b, group], 0.0)
        with np.errstate(all="ignore"):
            d_logits = call.index_scale * np.where(
                part.visible & (g != 0)[:, None], g[:, None] * (part.predicted - part.target), 0.0
            )
            k = _finite_rows(call.index_k[b, key])
            for n, h in enumerate(range(heads.start, heads.stop)):
                closed = (part.scores[n] <= 0) & ~np.isnan(d_logits) if call.relu else False
                gated = np.where(closed, 0.0, d_logits)
                weight = np.where(g != 0, call.weights[b, h], 0.0)
                d_q[b, h] = weight[:, None] * (gated @ k)
                d_w[b, h] = np.where(gated == 0, 0.0, gated * part.scores[n]).sum(axis=-1)
                weighted = np.where(gated == 0, 0.0, gated * weight[:, None])
                d_k[b, key] += weighted.T @ _finite_rows(call.index_q[b, h])
    return Grads(d_q, d_k, d_w)


def target(teacher_q: ArrayLike, teacher_k: ArrayLike, **options: Any) -> Array:
    """(B, G, M, N): the teacher summed over the heads of a group, not normalised; 0 where a key is not seen."""
    index = np.zeros((*np.shape(teacher_q)[:1], options.get("head_groups") or 1, np.shape(teacher_q)[2], 1))
    index_k = np.zeros((len(index), 1, np.shape(teacher_k)[2], 1))
    call = _Call(teacher_q, teacher_k, index, index_k, index_scale=1.0, **options)
    t = np.empty(call.shape)
    for part in call.parts():
        t[part.at.b, part.at.g] = part.t
    return t


def _finite_rows(x: Array) -> Array:
    return np.where(np.isfinite(x).all(axis=-1, keepdims=True), x, 0.0)

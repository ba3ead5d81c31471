"""The definition of `sparse_attention` in dense float64 NumPy: outputs, log-sum-exps, and all gradients.

For a row i over the keys j that it sees, with logits s_ij = scale q_i . k_j under a cap where there is one,

    P = exp(s - lse)    out_i = sum_j P_ij v_j    lse_i = log sum_j exp(s_ij)

and backward, from derivatives dO by the outputs and dL by the log-sum-exps,

    dV = P^T dO    dS = P (dO V^T - (dO . out - dL))    dQ = scale dS K    dK = scale dS^T Q

Every result comes with the measures of `reference.Gradients`, outputs too: they are sums of products as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..rules.divergences.interface import log_softmax, log_sum_exp
from .reference import Numbers, Order, Terms, exact, finite_rows, visible

Array = NDArray[Any]


class Rows(NamedTuple):
    """Forward results."""

    out: Terms
    lse: Array
    largest: Array
    """Largest size behind a visible logit of the row, as in `reference.Rows`."""


class Gradients(NamedTuple):
    """One per input, in the inputs' shapes."""

    query: Terms
    key: Terms
    value: Terms


def forward(query: ArrayLike, key: ArrayLike, value: ArrayLike, **options: Any) -> Rows:
    """Dense float64 forward. `options` are those of `sparse_attention` that change a result."""
    call = _Call((query, key, value), **options)
    width = call.inputs[2].shape[-1]
    terms = [np.zeros((*call.row_shape, width)) for _ in Terms._fields]
    lse, largest = np.zeros((2, *call.row_shape))
    for x in call.heads():
        found = (
            _product(x.p, x.v, x.seen),
            x.p @ np.abs(finite_rows(x.v)),
            np.sqrt(x.p**2 @ finite_rows(x.v) ** 2),
            (x.p * (1 + x.sizes)) @ np.abs(finite_rows(x.v)),
        )
        for into, one in zip(terms, found, strict=True):
            into[x.at] = one
        lse[x.at], largest[x.at] = x.lse, np.where(x.seen, x.sizes, 0).max(axis=-1, initial=0)
    return Rows(Terms(*map(call.callers, terms)), call.callers(lse), call.callers(largest))


def backward(
    grad: ArrayLike, grad_lse: ArrayLike | None, query: ArrayLike, key: ArrayLike, value: ArrayLike, **options: Any
) -> Gradients:
    """Dense float64 gradients of sum(grad * out) + sum(grad_lse * lse) over rows that see a key.

    NaN and Inf reach what the rows that see them move, and nothing else. Outputs count as rounded to the values' type
    for the noise that they bring into their product with `grad`.
    """
    call = _Call((query, key, value), **options)
    upstream = call.canonical(exact(grad), 1)
    by_lse = np.zeros(call.row_shape) if grad_lse is None else call.canonical(exact(grad_lse), 0)
    total = {name: [np.zeros(x.shape) for _ in Terms._fields] for name, x in zip(Gradients._fields, call.inputs)}
    for x in call.heads():
        some = np.asarray(x.seen.any(axis=-1))
        given = np.where(some[:, None], upstream[x.at], 0)
        fine, by_row = finite_rows(given), np.where(some, by_lse[x.at], 0)
        q, k, v = finite_rows(x.q), finite_rows(x.k), finite_rows(x.v)
        out = _product(x.p, x.v, x.seen)
        with np.errstate(invalid="ignore", over="ignore"):
            delta = (given * out).sum(axis=-1) - by_row
            delta = np.where(np.isfinite(delta), delta, np.nan)[:, None]
            ds = np.where(x.seen, x.p * (fine @ v.T - delta) * x.slopes, 0)
            size = np.abs(fine) @ np.abs(v).T + (np.abs(fine) * (x.p @ np.abs(v))).sum(axis=-1, keepdims=True)
            size = np.where(x.seen, x.p * np.abs(x.slopes) * (size + np.abs(by_row)[:, None]), 0)
            # Of the rounded output one error goes into a whole row.
            shared = ((fine * np.where(np.isfinite(out), out, 0)) ** 2).sum(axis=-1, keepdims=True)
            weight = np.where(x.seen, x.p * x.slopes, 0)
            rough = 1 + x.sizes
            found = {
                "query": (
                    ds @ k, size @ np.abs(k), np.sqrt(ds**2 @ k**2 + shared * (weight @ k) ** 2),
                    (size * rough) @ np.abs(k),
                ),
                "key": (
                    ds.T @ q, size.T @ np.abs(q), (ds**2 + shared * weight**2).T @ q**2, (size * rough).T @ np.abs(q)
                ),
                "value": (
                    _product(x.p.T, given, x.seen.T), x.p.T @ np.abs(fine), (x.p**2).T @ fine**2,
                    (x.p * rough).T @ np.abs(fine),
                ),
            }  # fmt: skip
        scaled = {"query": call.factor, "key": call.factor, "value": 1.0}
        for name, terms in found.items():
            index = x.at if name == "query" else x.key_at
            for i, (into, one) in enumerate(zip(total[name], terms, strict=True)):
                # Those of keys and values are summed as squares over heads.
                factor = scaled[name] if i == 0 else abs(scaled[name])
                into[index] += one * (factor**2 if i == 2 and name != "query" else factor)
    for name in ("key", "value"):
        total[name][2] = np.sqrt(total[name][2])
    return Gradients(**{name: Terms(*map(call.callers, terms)) for name, terms in total.items()})


class _Head(NamedTuple):
    """One query head, with the key head that it reads."""

    at: tuple[int, int]
    key_at: tuple[int, int]
    q: Array
    k: Array
    v: Array
    seen: Array
    p: Array
    """0 where not visible."""
    lse: Array
    slopes: Array | float
    sizes: Array
    """How far each logit moves when every product behind it moves by its own size, and not less than itself."""


class _Call(Order):
    def __init__(self, inputs: tuple[ArrayLike, ...], *, layout: str = "bhnd", **options: Any) -> None:
        arrays = [np.asarray(x) for x in inputs]
        numbers = Numbers.taken(options)
        super().__init__(arrays[0], layout, options)
        self.inputs = [self.canonical(exact(x), 1) for x in arrays]
        self.row_shape = self.inputs[0].shape[:3]
        self._scale, self._score = numbers.factor(arrays[0].shape[-1]), numbers.rule()
        self.factor = self._score.factor(self._scale)
        shape = (*self.row_shape, self.inputs[1].shape[2])
        self._visible = np.broadcast_to(visible(shape, options), shape)

    def heads(self) -> Iterator[_Head]:
        batch, heads = self.row_shape[:2]
        for b in range(batch):
            for h in range(heads):
                key_at = b, h * self.inputs[1].shape[1] // heads
                q, k, v, seen = (
                    self.inputs[0][b, h],
                    self.inputs[1][key_at],
                    self.inputs[2][key_at],
                    self._visible[b, h],
                )
                with np.errstate(invalid="ignore", over="ignore"):
                    dots = q @ k.T
                    logits = self._score.pair_logits(dots, self._scale)
                    slopes = self._score.pair_slopes(dots, self._scale)
                    sizes = np.maximum(np.abs(self.factor * slopes) * (np.abs(q) @ np.abs(k).T), np.abs(logits))
                    p = np.where(seen, np.exp(log_softmax(logits, seen)), 0)
                    lse = log_sum_exp(logits, seen)
                    # No number, and no weights, where a logit is none or positive infinity, or all are negative ones.
                    bad = (seen & (np.isnan(logits) | np.isposinf(logits))).any(axis=-1)
                    bad |= seen.any(axis=-1) & np.isneginf(lse)
                p, lse = np.where(seen & bad[:, None], np.nan, p), np.where(bad, np.nan, lse)
                yield _Head((b, h), key_at, q, k, v, seen, p, lse, slopes, sizes)


def _product(weights: Array, x: Array, seen: Array) -> Array:
    """weights @ x, where what is not a number reaches those that see it and no others."""
    with np.errstate(invalid="ignore"):
        result = weights @ np.where(np.isfinite(x), x, 0)
        return np.where(seen.astype(np.float64) @ ~np.isfinite(x) > 0, np.nan, result)

"""Attention on the CPU: softmax-weighted sums of values over the same tiles of keys, and their gradients.

With r a logit that each row has seen, in base 2 as all logits are here,

    l = sum 2^(x - r)     a = sum 2^(x - r) v     out = a / l     lse = ln2 (r + log2 l)

and backward, with delta = grad . out - grad_lse of each row,

    P = 2^(x - lse)     dV = P^T grad     dX = P (grad V^T - delta)

A pair that is not visible has P = 0, which keeps nothing out of a product where the other factor is NaN: values and
upstream rows that are not finite are 0 in products, and the pairs that do see them become NaN.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..concurrency.threads import Team
from ..rules.divergences.sums import LN2, REFERENCE_SLACK
from .block import Array, Block, Half, Scratch, Segment, Tile, not_finite, poison
from .blocks import BackwardTask, Blocks
from .elements import narrow, widen


class Values:
    """The values of one block, a tile at a time."""

    def __init__(self, values: Array, dtype: np.dtype[np.floating], scratch: Scratch) -> None:
        """Those of the block's key heads, (b, hk, N, D_v)."""
        self._all, self._dtype, self._scratch = values, dtype, scratch
        self.bad: Array | None = None
        """(b, hk, n): which of the last tile are not finite."""

    def read(self, tile: Tile) -> Array:
        """The values of a tile, (b, hk, n, D_v), with 0 for those that are not finite."""
        v: Array = self._all[:, :, tile.k]
        if v.dtype != self._dtype or v.strides[-1] != v.itemsize or v.strides[-2] < v.itemsize * v.shape[-1]:
            v = widen(v, self._scratch("value", v.shape))
        self.bad = not_finite(v)
        return v if self.bad is None else np.where(self.bad[..., None], v.dtype.type(0), v)


class RowState:
    """Partial sums of the rows of one block over the keys seen so far."""

    def __init__(self, shape: tuple[int, ...], width: int, dtype: np.dtype[np.floating]) -> None:
        self.reference, self.total = np.zeros((2, *shape), dtype)
        self.sums = np.zeros((*shape, width), dtype)
        self.seen = np.zeros(shape, np.bool_)

    def absorb(self, logits: Array, values: Values, tile: Tile, scratch: Scratch) -> None:
        """Add a tile of keys: base-2 logits, which are overwritten."""
        v = values.read(tile)
        self._move(logits.max(axis=-1), np.asarray(tile.visible is None or tile.visible.any(axis=-1)))
        logits -= self.reference[..., None]
        p = np.exp2(logits, out=logits)
        self.total += p.sum(axis=-1)
        if values.bad is not None:
            poison(p, np.repeat(values.bad, p.shape[1] // v.shape[1], axis=1)[:, :, None, :], tile.visible)
        product = scratch("product", self.sums.shape)
        np.matmul(fold(p, v.shape[1]), v, out=fold(product, v.shape[1]))
        self.sums += product

    def _move(self, top: Array, seen: Array) -> None:
        """Move the references to a tile's largest logits where they lag too far behind or do not exist yet."""
        # A NaN never compares larger; it reaches the sums through the logits themselves.
        move = (seen & ~self.seen) | (top > self.reference + REFERENCE_SLACK)
        if move.any():
            step = np.where(move, top - self.reference, 0)
            shrink = np.where(self.seen, np.exp2(-step), 0)
            self.reference += step
            self.total = np.where(self.seen, shrink * self.total, 0)
            self.sums = np.where(self.seen[..., None], shrink[..., None] * self.sums, 0)
        self.seen |= seen

    def finish(self, offset: Array | float) -> tuple[Array, Array]:
        """(out, lse) of rows whose logits lack so much in base 2: 0 and -inf for a row without keys."""
        lse = LN2 * (self.reference + offset) + np.log(self.total)
        # Infinite logits leave no weights.
        lse = np.where(self.seen, np.where(np.isfinite(lse), lse, np.nan), -np.inf)
        total = np.where(np.isnan(lse), np.nan, np.where(self.seen, self.total, 1))
        return self.sums / total[..., None], lse


class UpstreamRows(NamedTuple):
    """What a block's backward reads of its rows."""

    grad: Array
    """(b, h, m, D_v), by the outputs; 0 in rows that are not finite or see no key."""
    bad: Array | None
    """(b, h, m): which rows with a key are not finite."""
    delta: Array
    """(b, h, m): grad . out - grad_lse."""
    by_lse: Array | float
    """(b, h, m): grad_lse, what a row's derivatives by its logits add up to."""
    lse: Array
    """(b, h, m), natural logarithms; 0 for a row without keys."""
    empty: Array
    """(b, h, m): which rows have no key."""

    @classmethod
    def of(cls, grad: Array, out: Array, lse: Array, by_lse: Array | None) -> UpstreamRows:
        """Of arrays of the working type; those of rows without keys may hold anything."""
        empty = np.isneginf(lse)
        grad = np.where(empty[..., None], 0, grad)
        given = 0.0 if by_lse is None else np.where(empty, 0, by_lse)
        delta = np.vecdot(grad, np.where(empty[..., None], 0, out)) - given
        bad = not_finite(grad)
        if bad is not None:
            grad = np.where(bad[..., None], grad.dtype.type(0), grad)
        return cls(grad, bad, delta, given, np.where(empty, 0, lse), empty)


class TileGradients(NamedTuple):
    """Of one tile."""

    values: Array | None
    """(b, hk, n, D_v)."""
    logits: Array | None
    """(b, h, m, n), clean of what no pair sees."""


def tile_gradients(
    half: Half, values: Values, rows: UpstreamRows, tile: Tile, wanted: tuple[bool, bool], scratch: Scratch
) -> TileGradients:
    """Gradients by a tile's values and by its logits, those that are wanted."""
    by_values, by_logits = wanted
    p = half.logits(tile, by_logits)
    p -= (rows.lse / LN2 - half.offset)[..., None]
    np.exp2(p, out=p)
    if tile.visible is not None:
        np.copyto(p, 0, where=~tile.visible)  # a row whose log-sum-exp is NaN has that everywhere
    d_logits = d_values = None
    if by_logits:
        v = values.read(tile)
        d_logits = scratch("d_logits", p.shape)
        np.matmul(fold(rows.grad, v.shape[1]), v.swapaxes(-1, -2), out=fold(d_logits, v.shape[1]))
        d_logits -= rows.delta[..., None]
        d_logits *= p
        if tile.visible is not None:
            np.copyto(d_logits, 0, where=~tile.visible)
        if half.slopes is not None:
            d_logits *= half.slopes
        half.clean(d_logits, tile)
    if by_values:
        if rows.bad is not None:
            poison(p, rows.bad[..., None], tile.visible)
        heads = half.keys.shape[1]
        d_values = scratch("value", (*half.keys.shape[:3], rows.grad.shape[-1]))
        np.matmul(fold(p, heads).swapaxes(-1, -2), fold(rows.grad, heads), out=d_values)
    return TileGradients(d_values, d_logits)


def fold(x: Array, key_heads: int) -> Array:
    """(b, h, m, x) -> (b, hk, h / hk * m, x): the query heads of one key head become more rows of it."""
    b, h, m, width = x.shape
    return x.reshape(b, key_heads, h // key_heads * m, width)


class AttentionBlocks(Blocks):
    """Of `sparse_attention`."""

    def forward(
        self, views: dict[str, Array], segment: Segment, at: Block, scratch: Scratch, team: Team[Any]
    ) -> tuple[Array | None, ...]:
        (half,) = self.halves(views, at, scratch)
        values = self._values(views, at, half, scratch)
        state = RowState(half.q.shape[:3], views["value"].shape[-1], self.dtype)
        for tile in self.tiles(segment, at):
            team.pause()
            state.absorb(half.logits(tile), values, tile, scratch)
        out, lse = state.finish(half.offset)
        return lse, out

    def backward(self, task: BackwardTask, scratch: Scratch, team: Team[Any]) -> None:
        group, at = task.group, task.at
        views, grads = group.views, group.grads
        (half,) = self.halves(views, at, scratch)
        values = self._values(views, at, half, scratch)
        saved = {name: widen(x[at], np.empty(x[at].shape, self.dtype)) for name, x in group.rows.items()}
        rows = UpstreamRows.of(saved["grad"], saved["out"], saved["lse"], saved.get("grad_lse"))
        # The scale weighs whole rows; rows without keys weigh nothing whatever memory holds.
        weight = np.where(rows.empty, self.dtype.type(0), self.dtype.type(half.factor))
        wanted = "value" in grads, "query" in grads or "key" in grads
        dq = np.zeros(half.q.shape, self.dtype) if "query" in grads else None
        weighted_q = half.weighted(weight) if "key" in grads else None
        heads = slice(half.key_heads.start - group.first_head // half.group, None)
        for tile in self.tiles(group.segment, at):
            team.pause()
            found = tile_gradients(half, values, rows, tile, wanted, scratch)
            if dq is not None and found.logits is not None:
                half.add_dq(dq, found.logits)
            if weighted_q is not None and found.logits is not None:
                total = group.totals["key"][:, heads][:, : half.keys.shape[1]]
                half.add_dk(total, tile, found.logits, weighted_q, task.turn)
            if found.values is not None:
                task.turn.wait(tile.end)
                group.totals["value"][:, heads][:, : half.keys.shape[1], tile.k] += found.values
            task.turn.reach(tile.end)
        if dq is not None:
            dq += half.lacking(rows.by_lse)
            out = grads["query"]
            out[at] = narrow(dq * weight[..., None], out.dtype)

    def _values(self, views: dict[str, Array], at: Block, half: Half, scratch: Scratch) -> Values:
        return Values(views["value"][at.b, half.key_heads], self.dtype, scratch)

"""What the threads of a call work on: a block of rows, and tiles of keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..concurrency.threads import Turn
from ..ops import Op
from ..problem import Side
from ..rules.masks import Scene
from ..rules.scores import score_of
from .elements import narrow, widen
from .plan import NumPyPlan

Array = NDArray[Any]

# Keys that are looked at for a common part, at fractions i x the golden ratio of the tile, so that special keys at
# equal distances are not more than a few of them. cuda_src/tile/common_part.cuh has the same rule.
SAMPLED_KEYS = 8
SAMPLED_AT = np.arange(SAMPLED_KEYS) * 0x9E3779B9 % 2**32


def common_part(sample: Array) -> Array | None:
    """A vector near all keys of a head, (..., 1, D), from a few of them (..., SAMPLED_KEYS, D); 0 where there is none.

    None where no head has one, which is the usual case. It is their median where that is longer than the distance
    between the second smallest and the second largest, so one or two outliers, NaN included, decide nothing, and more
    of them leave the keys as they are.
    """
    ordered = np.sort(sample, axis=-2)  # NaN last
    middle, spread = ordered[..., 3, :], ordered[..., 6, :] - ordered[..., 1, :]
    large = np.vecdot(middle, middle) > np.vecdot(spread, spread)
    return np.where(large[..., None], middle, sample.dtype.type(0))[..., None, :] if large.any() else None


def slices(stop: int, step: int, start: int = 0) -> Iterator[slice]:
    for i in range(start, stop, step):
        yield slice(i, min(i + step, stop))


def canonical(x: Array, layout: str, trailing: int) -> Array:
    """A view in the order (batch, head, row[, column]) of an array in the caller's order."""
    lead = x.ndim - trailing
    if lead > 1 and layout == "bnhd":
        x = x.swapaxes(lead - 2, lead - 1)
    return x[(None,) * (3 - lead)]


def not_finite(x: Array) -> Array | None:
    """(..., r, D) -> (..., r), which rows hold NaN or Inf; None, at the price of one sum, if there are none."""
    if np.isfinite(x.sum()):
        return None
    bad: Array = np.asarray(~np.isfinite(x).all(axis=-1))
    return bad if bad.any() else None


def poison(x: Array, bad: Array, visible: Array | None) -> None:
    """NaN in the pairs (b, h, m, n) that see what is bad."""
    np.copyto(x, np.nan, where=bad if visible is None else bad & visible)


def rows_at(op: Op, views: dict[str, Array], segment: Segment) -> dict[str, Array]:
    """The rows of a segment of each operand or gradient, and of one that is given its columns too."""

    def cut(name: str, x: Array) -> Array:
        if op.given(op.operand[name].side):
            return x[:, :, segment.q, segment.k]
        return x[:, :, segment.q if op.operand[name].rows == "q" else segment.k]

    return {name: cut(name, x) for name, x in views.items()}


class Scratch:
    """Buffers by name, handed out again and again in whatever shape a ragged tile needs.

    They are parts of one array, with the elements that `sizes` gives each. A thread that lives for one call gets that
    from the caller, whose memory is there already: fresh pages of its own would cost a short call a third of its time.
    """

    def __init__(self, sizes: dict[str, int], dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._sizes = sizes
        self._room: Array = np.empty(sum(sizes.values()), dtype)
        self._buffers: dict[str, Array] = {}

    def __call__(self, name: str, shape: tuple[int, ...]) -> Array:
        buffer = self._buffers.get(name)
        if buffer is None:
            size = self._sizes[name]
            buffer, self._room = self._room[:size], self._room[size:]
            self._buffers[name] = buffer
        return buffer[: math.prod(shape)].reshape(shape)


class Block(NamedTuple):
    """The rows of one block, as slices of the (batch, head, row) axes."""

    b: slice
    h: slice
    q: slice


class Tile(NamedTuple):
    """Some keys, and which rows see them, to broadcast to (b, h, m, n): None where every row sees every key."""

    k: slice | Array
    visible: Array | None

    @property
    def end(self) -> int:
        """The key after the last one."""
        return int(self.k.stop if isinstance(self.k, slice) else self.k[-1] + 1)


class Segment(NamedTuple):
    """The rows and keys of one packed sequence, or all of them, and how they are cut into blocks."""

    q: slice
    k: slice
    scene: Scene
    plan: NumPyPlan


class Half:
    """One distribution inside one block: b batches, h query heads on hk key heads, m rows of width D."""

    def __init__(
        self, name: str, side: Side, pair: tuple[Array, Array], at: Block, scratch: Scratch, all_keys: bool = True
    ) -> None:
        """Of all its queries and keys, (batch, head, row, column); `all_keys`: whether these are all of the rows'."""
        q, k = pair
        self.name, self.group, self.scratch = name, side.group, scratch
        self.score, self.scale = score_of(side), side.scale
        self.factor = self.score.factor(side.scale)
        self.key_heads = slice(at.h.start // side.group, (at.h.stop - 1) // side.group + 1)
        self._all_keys = k[at.b, self.key_heads]
        rows = q[at.b, at.h, at.q]
        self.q = widen(rows, scratch(f"{name}_q", rows.shape))
        self.keys = self.q
        self.common: Array | None = None
        self.offset: Array | float = 0.0
        """What a row's logits lack in base 2, (b, h, m): the query times the common part of the keys."""
        self._looked = not all_keys  # logit gradients add up to 0 over all keys of a row only
        self.bad_rows = not_finite(self.q)
        self.slopes: Array | None = None
        """What gradients of the tile's logits are multiplied by to be those of dot products; None for 1."""

    def _fold(self, x: Array) -> Array:
        """(b, h, m, x) -> (b, hk, h / hk * m, x): the query heads of one key head become more rows of it."""
        b, hk = self._all_keys.shape[:2]
        return x.reshape(b, hk, x.shape[1] // hk * x.shape[2], x.shape[3])

    def logits(self, tile: Tile, differentiated: bool = False) -> Array:
        """Read a tile of keys and return its base-2 logits (b, h, m, n) less `offset`, -inf where not visible; where
        they are differentiated, find their `slopes`."""
        k: Array = self._all_keys[:, :, tile.k]
        # BLAS takes rows at any distance, as long as a row itself is dense and of the working type.
        if k.dtype != self.q.dtype or k.strides[-1] != k.itemsize or k.strides[-2] < k.itemsize * k.shape[-1]:
            k = widen(k, self.scratch(f"{self.name}_k", k.shape))
        if not self._looked:
            self._look(k, tile)
        if self.common is not None:
            k = np.subtract(k, self.common, out=self.scratch(f"{self.name}_k", k.shape))
        self.keys = k
        out = self.scratch(f"{self.name}_logits", (*self.q.shape[:3], k.shape[2]))
        np.matmul(self._fold(self.q), k.swapaxes(-1, -2), out=self._fold(out))
        self.slopes = self._slopes(out.shape) if differentiated else None
        out = self.score.tile_logits(out, self.scale, self.slopes)
        if tile.visible is not None:
            np.copyto(out, -np.inf, where=~tile.visible)
            if self.slopes is not None:
                np.copyto(self.slopes, 0, where=~tile.visible)
        return out

    def _slopes(self, shape: tuple[int, ...]) -> Array | None:
        return None if self.score.linear else self.scratch(f"{self.name}_slopes", shape)

    def leave_keys(self) -> None:
        """Take nothing that they have in common from the keys: where the logit gradients of a row do not add up to 0,
        the gradient of its query has that in it."""
        self._looked = True

    def _look(self, keys: Array, tile: Tile) -> None:
        """Find what the keys of the block have in common, from those of its first tile that any row sees."""
        self._looked = True
        if not self.score.linear:
            return
        if tile.visible is None:
            sample = SAMPLED_AT * keys.shape[2] >> 32
        else:
            lead = tuple(range(tile.visible.ndim - 1))
            seen = np.flatnonzero(np.broadcast_to(tile.visible.any(axis=lead), keys.shape[2]))
            if not len(seen):
                return
            sample = seen[SAMPLED_AT * len(seen) >> 32]
        self.common = common_part(keys[:, :, sample])
        if self.common is not None:
            rows = np.matmul(self._fold(self.q), self.common.swapaxes(-1, -2))
            self.offset = self.score.tile_logits(rows.reshape(self.q.shape[:3]), self.scale, None)

    def clean(self, d_logits: Array, tile: Tile) -> None:
        """Keep NaN and Inf of the inputs where they belong before `d_logits` meets the inputs again.

        In a product 0 x NaN is NaN, so a key that no row sees would still reach every row. Such operand rows become
        0 here, and the pairs that do see them become NaN.
        """
        bad_keys = not_finite(self.keys)
        if self.bad_rows is None and bad_keys is None:
            return
        bad: Array = np.zeros(d_logits.shape, np.bool_)
        if self.bad_rows is not None:
            bad |= self.bad_rows[..., None]
        if bad_keys is not None:
            bad |= np.repeat(bad_keys, self.q.shape[1] // self.keys.shape[1], axis=1)[:, :, None, :]
            self.keys = np.where(bad_keys[..., None], 0, self.keys)
        d_logits[bad if tile.visible is None else bad & tile.visible] = np.nan

    def weighted(self, weight: Array) -> Array:
        """The query rows times `weight` (b, h, m): what d_logits^T is multiplied by in a key gradient."""
        out = np.multiply(self.q, weight[..., None], out=self.scratch(f"{self.name}_qw", self.q.shape))
        if self.bad_rows is not None:
            out[self.bad_rows] = 0
        return out

    def add_dq(self, total: Array, d_logits: Array) -> None:
        """total (b, h, m, D) += d_logits K."""
        product = self.scratch("product", total.shape)
        np.matmul(self._fold(d_logits), self.keys, out=self._fold(product))
        total += product

    def lacking(self, sums: Array | float) -> Array | float:
        """What `add_dq` lacks where gradients of a row's logits add up to `sums` (b, h, m), and not to 0: that much of
        the common part of the keys."""
        if self.common is None or isinstance(sums, float):
            return 0.0
        common = np.repeat(self.common, sums.shape[1] // self.common.shape[1], axis=1)
        return np.asarray(sums[..., None] * common)

    def add_dk(self, total: Array, tile: Tile, d_logits: Array, weighted_q: Array, turn: Turn) -> None:
        """total (b, hk, N, D) += d_logits^T weighted_q at the keys of the tile, when it is the block's turn."""
        product = self.scratch("product", self.keys.shape)
        np.matmul(self._fold(d_logits).swapaxes(-1, -2), self._fold(weighted_q), out=product)
        turn.wait(tile.end)
        total[:, :, tile.k] += product


class Totals:
    """Sums of one or more gradients: in the outputs themselves where these have the working type, else beside them."""

    def __init__(self, outputs: dict[str, Array], dtype: np.dtype[Any]) -> None:
        self._outputs = outputs
        self._sums = {name: x if x.dtype == dtype else np.zeros(x.shape, dtype) for name, x in outputs.items()}

    def __getitem__(self, name: str) -> Array:
        return self._sums[name]

    def store(self) -> None:
        """Round into the outputs what was summed beside them."""
        for name, x in self._outputs.items():
            if self._sums[name] is not x:
                x[...] = narrow(self._sums[name], x.dtype)

"""A distribution that is given, where others are computed: probabilities or their logarithms, read a tile at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

from ..problem import Side
from ..rules.scores import score_of
from ..rules.scores.given import LOG_PROBABILITY, ZERO
from .attention_kl import KLBlocks
from .block import Array, Block, Half, Scratch, Segment, Tile, slices
from .elements import widen

SLACK = 1e-2
"""What a row's probabilities may differ from 1 by, and have on keys that it does not see, beside what rounding does."""


class GivenHalf(Half):
    """One given distribution inside one block, which has no gradients: its logits are read."""

    def __init__(self, name: str, side: Side, target: Array, at: Block, scratch: Scratch, zeros: bool) -> None:
        self.name, self.group, self.scratch = name, side.group, scratch
        self.score, self.factor, self.offset, self.slopes = score_of(side), 1.0, 0.0, None
        self._zero = ZERO if zeros else -np.inf
        self._all = target[at.b, at.h if target.shape[1] > 1 else slice(0, 1), at.q]
        self._start = at.b.start, at.h.start, at.q.start
        self._rounding = {np.uint16: 2.0**-8, np.float16: 2.0**-11}.get(self._all.dtype.type, 0.0)
        shape = self._all.shape
        # Without columns, as the queries of such a side are.
        self.q = np.empty((shape[0], at.h.stop - at.h.start, shape[2], 0), scratch.dtype)

    def logits(self, tile: Tile, differentiated: bool = False) -> Array:
        """Read a tile and return base-2 logits (b, h, m, n), -inf where not visible."""
        x = self._all[..., tile.k]
        out = self.scratch(f"{self.name}_logits", (*self.q.shape[:3], x.shape[3]))
        out = self.score.tile_logits(widen(x, out), 1.0, None)
        np.copyto(out, self._zero, where=out < ZERO)
        if tile.visible is not None:
            np.copyto(out, -np.inf, where=~tile.visible)
        return out

    @np.errstate(over="ignore", invalid="ignore")
    def check(self, tiles: Iterable[Tile], keys: int, step: int) -> None:
        """Raise what no distribution is: of rows that see a key, in `tiles`, all of their `keys` are looked at.

        Raises:
            ValueError: a negative probability, a sum other than 1, or mass on keys that the row does not see. NaN
                passes, for it shows in the results.
        """
        kept, seen = np.zeros(self.q.shape[:3], self.q.dtype), np.zeros(self.q.shape[:3], np.bool_)
        for tile in tiles:
            x = self._probabilities(tile.k)
            if tile.visible is None:
                seen[...] = True
            else:
                seen |= tile.visible.any(axis=-1)
                x = np.where(tile.visible, x, 0)
            if (x < 0).any():
                self._refuse(
                    np.asarray((x < 0).any(axis=-1)),
                    f"holds {x[x < 0][0]:.6g} in",
                    "; a probability is 0 or more: for logarithms pass log_target=True",
                )
            kept += x.sum(axis=-1)
        total = np.zeros_like(kept)
        for k in slices(keys, step):
            total += self._probabilities(k).sum(axis=-1)
        lost = total - kept
        slack = SLACK + self._rounding * (math.log(max(keys, 1)) if self.score is LOG_PROBABILITY else 1)
        if (bad := seen & (lost > slack)).any():
            self._refuse(
                bad,
                f"has a mass of {lost[bad][0]:.3g} on keys hidden from",
                ": set it to 0 there and divide the row by what is left, or let the row see these keys",
            )
        off = np.where(np.isfinite(total), total, kept) - 1
        if (bad := seen & (np.abs(off) > slack)).any():
            what, way = (
                (
                    "has exponentials that sum",
                    "subtract the logarithm of that, and pass probabilities without log_target",
                )
                if self.score is LOG_PROBABILITY
                else ("sums", "divide it by its sum, and pass logarithms with log_target=True")
            )
            self._refuse(bad, f"{what} to {1 + off[bad][0]:.6g} in", f"; probabilities of a row sum to 1: {way}")

    def _probabilities(self, k: slice | Array) -> Array:
        x = self._all[..., k]
        x = widen(x, self.scratch(f"{self.name}_logits", x.shape))
        return np.exp(x, out=x) if self.score is LOG_PROBABILITY else x

    def _refuse(self, rows: Array, what: str, remedy: str) -> None:
        b, h, q = (int(start + i) for start, i in zip(self._start, np.argwhere(rows)[0], strict=True))
        raise ValueError(f"target {what} row {q} of batch entry {b}, head {h}{remedy}")


class GivenBlocks(KLBlocks):
    """Of `attention_kl_to`."""

    def halves(self, views: dict[str, Array], at: Block, scratch: Scratch) -> list[Half]:
        """The target, and queries and keys of the student, inside a block."""
        op, zeros = self.problem.operation, self._divergence.zeros

        def half(name: str, side: Side) -> Half:
            if given := op.given(name):
                return GivenHalf(name, side, views[given.name], at, scratch, zeros)
            q, k = op.pair(name)
            return Half(name, side, (views[q.name], views[k.name]), at, scratch)

        return [half(name, side) for name, side in self.problem.sides.items()]

    def check(self, views: dict[str, Array], segment: Segment, at: Block, scratch: Scratch) -> None:
        """Raise what is no distribution."""
        for half in self.halves(views, at, scratch):
            if isinstance(half, GivenHalf):
                half.check(self.tiles(segment, at), segment.scene.keys, segment.plan.keys)

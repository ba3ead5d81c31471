"""The indexer's KL on the CPU: blocks of rows, tiles of keys, and inside a tile the heads of both sides.

Of the teacher a tile has t = sum_h exp(T_h - lse_h), complete with its last head, so there is no running maximum; of
the student I = sum_h w_h a(q_h k), whose maximum runs. Nothing of a head outlives it. The backward makes a tile's t and
I once more, and Q - P of them is every head's logit gradient: gated by the products that it comes from, the same that
the forward has seen, it meets the keys, and the weight is a factor of whole rows. What the gated sum of keys has along
the query itself is the gradient of the weight.

Without ReLU the heads are one, sum_h w_h q_h, and every gradient comes of that one's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..concurrency.threads import Team, Turn
from ..rules import row_keys
from ..rules.row_keys import Intervals
from ..rules.scores.interface import LOG2E
from .block import Array, Scratch, slices
from .elements import narrow, widen
from .plan import BLOCK_ELEMENTS, KEY_TILE, LONGEST_KEY_TILE, NumPyPlan, threads_for

QUERY_TILE = 256
"""Heads of a tile are computed a few at a time; taller blocks would leave room for fewer."""


class Operands(NamedTuple):
    """Arrays as (batch, head, row, column), rows as (batch, head, row); uint16 are the bits of bfloat16."""

    teacher: tuple[tuple[Array, Array], ...]
    """Queries and keys whose products add up to one logit; none beside a target."""
    index_q: Array
    index_k: Array
    weights: Array | None
    teacher_lse: Array | None
    """(B, H, M), natural."""
    target: Array | None
    """(B, G, M, N)."""


class Numbers(NamedTuple):
    """What is static of a call."""

    groups: int
    teacher_scale: float
    index_scale: float
    relu: bool
    dtype: str
    """That sums are in, float32 or float64."""


class Keys(NamedTuple):
    """Which keys rows see."""

    intervals: Intervals
    mask: Array | None
    """(B, N)."""
    ids: Array | None
    """(B, 1 or G, M, K)."""
    lengths: Array | None
    """(B, 1 or G, M)."""


class RowOutputs(NamedTuple):
    """Where a forward writes, (B, G, M)."""

    kl: Array
    index_lse: Array
    target_sum: Array


class SavedRows(NamedTuple):
    """What a backward reads, (B, G, M) each."""

    grad: Array
    index_lse: Array
    target_sum: Array


class IndexGradients(NamedTuple):
    """Where a backward writes; None for what is not wanted."""

    index_q: Array | None
    index_k: Array | None
    weights: Array | None


class _At(NamedTuple):
    """The rows of a block: a batch entry, a group, and queries."""

    b: int
    g: int
    q: slice


class _Tile(NamedTuple):
    """Some keys, and which rows see them (m, n); None where every row sees every key."""

    k: slice | Array
    visible: Array | None

    @property
    def end(self) -> int:
        """The key after the last one."""
        return int(self.k.stop if isinstance(self.k, slice) else self.k[-1] + 1)


def make_plan(operands: Operands, numbers: Numbers, threads: int = 1) -> NumPyPlan:
    """Cut a call into blocks of rows, tiles of keys, and heads that are computed at once."""
    batch, index_heads, queries, index_dim = operands.index_q.shape
    keys = operands.index_k.shape[2]
    heads = max([index_heads, *(q.shape[1] for q, _ in operands.teacher)]) // numbers.groups
    rows = batch * numbers.groups
    m = max(min(queries, QUERY_TILE, -(-queries * rows // max(2 * threads, 1)) if threads > 1 else QUERY_TILE), 1)
    n = max(min(keys, max(KEY_TILE, min(BLOCK_ELEMENTS // m, LONGEST_KEY_TILE))), 1)
    h = max(min(heads, BLOCK_ELEMENTS // (m * n)), 1)
    widths = [index_dim, *(q.shape[3] for q, _ in operands.teacher)]
    buffers = dict.fromkeys(("mass", "logits", "terms"), m * n)
    buffers |= dict.fromkeys(("products", "more"), h * m * n)
    buffers |= {"rows": h * m * max(widths), "keys": n * max(widths), "index_keys": n * index_dim}
    scratch = sum(buffers.values()) * np.dtype(numbers.dtype).itemsize
    blocks = rows * -(-queries // m)
    product = h * m * n * max(widths)
    return NumPyPlan(numbers.dtype, 1, h, m, n, blocks, scratch, product, max(min(threads, blocks), 1), buffers)


def _wide(x: Array, scratch: Scratch, name: str) -> Array:
    """`x` in the type of sums; itself where it has that and dense rows."""
    if x.dtype == scratch.dtype and x.strides[-1] == x.itemsize:
        return x
    return widen(x, scratch(name, x.shape))


def _product(q: Array, k: Array, out: Array) -> Array:
    """(h, m, D) (n, D) -> (h, m, n)."""
    h, m, d = q.shape
    if q.flags.c_contiguous:
        np.matmul(q.reshape(h * m, d), k.T, out=out.reshape(h * m, len(k)))
    else:
        np.matmul(q, k.T, out=out)
    return out


class _Block:
    """One block of rows: what its tiles of keys are made of."""

    def __init__(self, run: Run, at: _At, scratch: Scratch) -> None:
        self.run, self.at, self.scratch = run, at, scratch
        ops, numbers = run.operands, run.numbers
        self.m = at.q.stop - at.q.start
        heads = ops.index_q.shape[1] // numbers.groups
        self.heads = slice(at.g * heads, (at.g + 1) * heads)
        """Of the student."""
        self.index_q = ops.index_q[at.b, self.heads, at.q]
        self.key_head = at.g if ops.index_k.shape[1] > 1 else 0
        self.weights = np.ones((heads, self.m), scratch.dtype)
        if ops.weights is not None:
            widen(ops.weights[at.b, self.heads, at.q], self.weights)
        self.one = None if numbers.relu else self._one_head()
        self.lse2: Array | None = None
        """Of the teacher's heads, base 2, +inf where a head counts nothing; (H / G, m)."""

    def _one_head(self) -> Array:
        """(m, D): without ReLU all heads are this one."""
        total = np.zeros(self.index_q.shape[1:], self.scratch.dtype)
        for h, weight in enumerate(self.weights):
            total += weight[:, None] * _wide(self.index_q[h], self.scratch, "rows")
        return total

    def tiles(self) -> Iterator[_Tile]:
        """The keys that any row may see: stretches of them, or picked ones where not all of these are there."""
        run, at = self.run, self.at
        start, end = (x[at.b, at.q] for x in run.keys.intervals[:2])
        some = start < end
        if not some.any():
            return
        k0, k1 = int(start[some].min()), int(end.max())
        whole = (int(start.max()), int(end.min())) if some.all() else (k1, k1)
        there = self._picked(k0, k1)
        if there is None:
            for k in slices(k1, run.plan.keys, k0):
                full = whole[0] <= k.start and k.stop <= whole[1]
                keys = np.arange(k.start, k.stop)
                yield _Tile(k, None if full else (start[:, None] <= keys) & (keys < end[:, None]))
            return
        picked = k0 + np.flatnonzero(there.any(axis=0))
        for part in slices(len(picked), run.plan.keys):
            keys = picked[part]
            seen = there[:, keys - k0] & (start[:, None] <= keys) & (keys < end[:, None])
            yield _Tile(keys, None if seen.all() else seen)

    def _picked(self, k0: int, k1: int) -> Array | None:
        """(1 or m, k1 - k0), which of the keys bits and ids leave; None where these say nothing."""
        keys, at = self.run.keys, self.at
        there = None if keys.mask is None else keys.mask[at.b, None, k0:k1]
        if keys.ids is not None:
            g = min(at.g, keys.ids.shape[1] - 1)
            lengths = None if keys.lengths is None else keys.lengths[at.b, min(at.g, keys.lengths.shape[1] - 1), at.q]
            base = keys.intervals.base[at.b, at.q]
            named = row_keys.chosen(keys.ids[at.b, g, at.q], lengths, base, self.run.operands.index_k.shape[2])
            there = named[:, k0:k1] if there is None else there & named[:, k0:k1]
        return None if there is None or there.all() else there

    def prepare(self, lses: Array | None) -> None:
        """Take the teacher's log-sum-exps (H / G, m), or make them: one more pass over its keys."""
        if not self.run.operands.teacher:
            return
        found = self._log_sum_exps() if lses is None else lses
        found = found.astype(self.scratch.dtype, copy=False)
        self.lse2 = np.where(np.isinf(found), np.inf, found * LOG2E)
        if lses is None:
            self.natural_lse = found

    def _log_sum_exps(self) -> Array:
        heads = self.run.operands.teacher[0][0].shape[1] // self.run.numbers.groups
        top = np.full((heads, self.m), -np.inf)
        total = np.zeros((heads, self.m))
        for tile in self.tiles():
            for h, x, odd in self._teacher_logits(tile):
                if odd:  # one that is infinite could be one that weighs nothing
                    np.copyto(x, np.nan, where=~np.isfinite(x))
                if tile.visible is not None:
                    np.copyto(x, -np.inf, where=~tile.visible)
                higher = np.maximum(top[h], x.max(axis=-1))
                shift = np.where(np.isinf(higher), 0, higher).astype(x.dtype)
                x -= shift[..., None]
                np.exp2(x, out=x)
                total[h] *= np.exp2(top[h] - shift)
                total[h] += x.sum(axis=-1)
                top[h] = higher
        return np.asarray((top + np.log2(total)) / LOG2E)

    def _teacher_logits(self, tile: _Tile) -> Iterator[tuple[slice, Array, bool]]:
        """Base-2 logits (h, m, n) of some heads at a time, and whether NaN or Inf lies behind them."""
        run, at = self.run, self.at
        pairs = run.operands.teacher
        heads = pairs[0][0].shape[1]
        own = heads // run.numbers.groups
        # As many as share their keys in all pairs.
        alike = min(heads // k.shape[1] for _, k in pairs)
        start, end = at.g * own, (at.g + 1) * own
        while start < end:
            stop = min(end, start + run.plan.heads, (start // alike + 1) * alike)
            yield slice(start - at.g * own, stop - at.g * own), *self._summed(tile, slice(start, stop))
            start = stop

    def _summed(self, tile: _Tile, heads: slice) -> tuple[Array, bool]:
        run, at, scratch = self.run, self.at, self.scratch
        total, odd = None, False
        for q, k in run.operands.teacher:
            keys = _wide(k[at.b, heads.start * k.shape[1] // q.shape[1], tile.k], scratch, "keys")
            rows = _wide(q[at.b, heads, at.q], scratch, "rows")
            odd = odd or not (np.isfinite(keys.sum()) and np.isfinite(rows.sum()))
            name = "products" if total is None else "more"
            x = _product(rows, keys, scratch(name, (*rows.shape[:2], len(keys))))
            total = x if total is None else np.add(total, x, out=total)
        assert total is not None
        total *= run.numbers.teacher_scale * LOG2E
        return total, odd

    def masses(self, tile: _Tile) -> Array:
        """t (m, n), 0 where not visible; NaN where a head that counts saw what is not finite."""
        run, at, scratch = self.run, self.at, self.scratch
        shape = (self.m, len(range(tile.k.start, tile.k.stop)) if isinstance(tile.k, slice) else len(tile.k))
        t = scratch("mass", shape)
        if self.lse2 is None:
            assert run.operands.target is not None
            widen(run.operands.target[at.b, at.g, at.q][:, tile.k], t)
        else:
            t[...] = 0
            for heads, x, odd in self._teacher_logits(tile):
                lse2 = self.lse2[heads, :, None]
                bad = odd and ~np.isfinite(x)
                x -= lse2
                np.exp2(x, out=x)
                if odd:  # heads that count nothing select: their product may be NaN
                    x[bad] = np.nan
                    np.copyto(x, 0, where=np.isposinf(lse2))
                t += x.sum(axis=0)
        if tile.visible is not None:
            np.copyto(t, 0, where=~tile.visible)
        return t

    def index_keys(self, tile: _Tile) -> Array:
        """(n, D)."""
        keys = self.run.operands.index_k[self.at.b, self.key_head, tile.k]
        return _wide(keys, self.scratch, "index_keys")

    def index_heads(self, keys: Array) -> Iterator[tuple[slice, Array, Array]]:
        """(heads, their rows, their products (h, m, n))."""
        for h in slices(len(self.weights), self.run.plan.heads):
            rows = _wide(self.index_q[h], self.scratch, "rows")
            yield h, rows, _product(rows, keys, self.scratch("products", (*rows.shape[:2], len(keys))))

    def logits(self, tile: _Tile, keys: Array) -> Array:
        """I (m, n) in base 2, -inf where not visible; NaN where what lies behind it is not finite."""
        scratch, scale = self.scratch, self.run.numbers.index_scale * LOG2E
        total = scratch("logits", (self.m, len(keys)))
        if self.one is not None:
            np.matmul(self.one, keys.T, out=total)
        else:
            total[...] = 0
            for h, _, s in self.index_heads(keys):
                if not np.isfinite(s.sum()):  # which ReLU could hide
                    np.copyto(s, np.nan, where=~np.isfinite(s))
                np.maximum(s, 0, out=s)
                s *= self.weights[h, :, None]
                total += s.sum(axis=0)
        total *= scale
        if not np.isfinite(total.sum()):
            np.copyto(total, np.nan, where=~np.isfinite(total))
        if tile.visible is not None:
            np.copyto(total, -np.inf, where=~tile.visible)
        return total

    def forward(self, team: Team[Any]) -> tuple[Array, Array, Array]:
        """kl, index_lse and target_sum (m,)."""
        state = _RowState(self.m)
        for tile in self.tiles():
            team.pause()
            state.absorb(self.masses(tile), self.logits(tile, self.index_keys(tile)), self.scratch)
        return state.finish()


class _RowState:
    """Sums of rows over the keys so far: the student's reference r and sum l, the teacher's mass Z, and
    A = sum t (log2 t - (I - r)). Where r moves by d, l becomes 2^-d l and A becomes A + d Z."""

    def __init__(self, rows: int) -> None:
        self.r = np.full(rows, -np.inf)
        self.l, self.Z, self.A = (np.zeros(rows) for _ in range(3))

    def absorb(self, t: Array, logits: Array, scratch: Scratch) -> None:
        """Add a tile; both are overwritten."""
        r = np.maximum(self.r, logits.max(axis=-1))
        reference = np.where(np.isneginf(r), 0, r)
        moved = np.where(np.isneginf(self.r), 0, reference - self.r)
        self.l *= np.exp2(-moved)
        self.A += moved * self.Z
        self.r = r
        logits -= reference.astype(logits.dtype)[:, None]
        terms = scratch("terms", t.shape)
        np.log2(t, out=terms)
        terms -= logits
        terms *= t
        np.copyto(terms, 0, where=t == 0)
        self.A += terms.sum(axis=-1)
        self.Z += t.sum(axis=-1)
        self.l += np.exp2(logits, out=logits).sum(axis=-1)

    def finish(self) -> tuple[Array, Array, Array]:
        """In nats; a row that no head has mass in, or that sees no key, has a KL of 0."""
        active = self.Z != 0
        mass = np.where(active, self.Z, 1)
        kl = np.where(active, (self.A / mass + np.log2(np.where(active, self.l, 1) / mass)) / LOG2E, 0)
        lse = (self.r + np.log2(self.l)) / LOG2E
        return kl, np.where(np.isnan(kl), np.nan, lse), self.Z


class _Task(NamedTuple):
    """One block, with its turn at the sums that it shares with others."""

    at: _At
    turn: Turn | None


class Run:
    """A call with its arrays; what it needs is made for it and gone with it."""

    def __init__(self, operands: Operands, numbers: Numbers, keys: Keys) -> None:
        self.operands, self.numbers, self.keys = operands, numbers, keys
        batch, index_heads, queries, _ = operands.index_q.shape
        heads = index_heads + sum(q.shape[1] for q, _ in operands.teacher[:1])
        count = threads_for(batch * heads * queries * operands.index_k.shape[2])
        self.plan = make_plan(operands, numbers, count)

    def forward(self, outputs: RowOutputs, teacher_lse: Array | None) -> None:
        """Write the rows; and the teacher's log-sum-exps where none were given and there is room for them."""
        given = self.operands.teacher_lse

        def work(team: Team[_Task]) -> None:
            scratch = self._scratch()
            for task in team:
                at = task.at
                block = _Block(self, at, scratch)
                heads = self._teacher_heads(at)
                block.prepare(None if given is None else given[at.b, heads, at.q])
                for out, x in zip(outputs, block.forward(team), strict=True):
                    out[at.b, at.g, at.q] = x
                if teacher_lse is not None and given is None:
                    teacher_lse[at.b, heads, at.q] = np.where(
                        np.isnan(outputs.kl[at.b, at.g, at.q]), np.nan, block.natural_lse
                    )

        self._team(_Task(at, None) for at in self._blocks()).run(work)

    def target(self, output: Array, first_row: int) -> None:
        """Write t (B, G, R, N) of R rows from the first on, 0 where a key is not seen."""
        given = self.operands.teacher_lse
        output[...] = 0
        rows = range(first_row, first_row + output.shape[2])

        def work(team: Team[_Task]) -> None:
            scratch = self._scratch()
            for task in team:
                at = task.at
                block = _Block(self, at, scratch)
                block.prepare(None if given is None else given[at.b, self._teacher_heads(at), at.q])
                here = output[at.b, at.g, at.q.start - first_row : at.q.stop - first_row]
                for tile in block.tiles():
                    team.pause()
                    here[:, tile.k] = block.masses(tile)

        self._team(_Task(at, None) for at in self._blocks(rows=rows)).run(work)

    def backward(self, saved: SavedRows, outputs: IndexGradients) -> None:
        """Write the gradients that are wanted, reading both sides once for all of them."""
        dtype = np.dtype(self.numbers.dtype)
        for x in outputs:
            if x is not None:
                x[...] = 0
        # Sums over blocks, in the output itself where that has their type.
        key_sums = outputs.index_k
        if key_sums is not None and key_sums.dtype != dtype:
            key_sums = np.zeros(key_sums.shape, dtype)

        def tasks() -> Iterator[_Task]:
            before: dict[tuple[int, int], Turn] = {}
            for at in self._blocks(last_first=True):
                key = at.b, at.g if self.operands.index_k.shape[1] > 1 else 0
                before[key] = Turn(team, before.get(key))
                yield _Task(at, before[key])

        def work(team: Team[_Task]) -> None:
            scratch = self._scratch()
            for task in team:
                assert task.turn is not None
                self._block_backward(task, saved, outputs, key_sums, scratch, team)
                task.turn.reach(Turn.DONE)

        team = self._team(tasks())
        team.run(work)
        if outputs.index_k is not None and key_sums is not None and key_sums is not outputs.index_k:
            outputs.index_k[...] = narrow(key_sums, outputs.index_k.dtype)

    def _block_backward(
        self,
        task: _Task,
        saved: SavedRows,
        outputs: IndexGradients,
        key_sums: Array | None,
        scratch: Scratch,
        team: Team[Any],
    ) -> None:
        at, dtype, given = task.at, scratch.dtype, self.operands.teacher_lse
        here = (at.b, at.g, at.q)
        grad, index_lse, mass = (x[here].astype(dtype) for x in saved)
        # Rows that no head has mass in, and those that weigh nothing, have exactly no gradient whatever memory holds.
        live = (mass != 0) & (grad != 0) & ~np.isneginf(index_lse)
        if not live.any():
            return
        block = _Block(self, at, scratch)
        block.prepare(None if given is None else given[at.b, self._teacher_heads(at), at.q])
        factor = np.where(live, grad, 0) * self.numbers.index_scale
        bad = ~np.isfinite(factor)
        factor[bad] = 1
        mass, lse2 = np.where(live, mass, 1)[:, None], np.where(live, index_lse, 0)[:, None] * dtype.type(LOG2E)
        heads, dim = (len(block.weights), block.index_q.shape[-1])
        sums = np.zeros((heads if block.one is None else 1, block.m, dim), dtype)
        # What the transposed gradient of logits meets, with all that is a factor of whole rows.
        weights = np.where(live & np.isfinite(block.weights), block.weights, 0)
        for tile in block.tiles():
            team.pause()
            keys = block.index_keys(tile)
            clean = _finite(keys)
            t, d_logits = block.masses(tile), block.logits(tile, keys)
            d_logits -= lse2
            np.exp2(d_logits, out=d_logits)
            t /= mass
            d_logits -= t
            d_logits[~live] = 0
            d_logits[bad] = np.nan
            if tile.visible is not None:  # a row that is NaN is so where it looks
                np.copyto(d_logits, 0, where=~tile.visible)
            # No gate hides a row that is NaN.
            poisoned = np.isnan(d_logits) if np.isnan(d_logits.sum()) else None
            found = np.zeros((len(keys), dim), dtype)
            if block.one is not None:
                sums[0] += d_logits @ clean
                found += d_logits.T @ (_finite(block.one) * factor[:, None])
            else:
                for h, rows, s in block.index_heads(keys):
                    closed = s <= 0
                    if poisoned is not None:
                        closed &= ~poisoned
                    gated = np.where(closed, dtype.type(0), d_logits)
                    sums[h] += gated @ clean
                    if key_sums is not None:
                        weighted = _finite(rows) * (factor * weights[h])[..., None]
                        found += gated.reshape(-1, len(keys)).T @ weighted.reshape(-1, dim)
            if key_sums is not None:
                assert task.turn is not None
                task.turn.wait(tile.end)
                key_sums[at.b, block.key_head][tile.k] += found
                task.turn.reach(tile.end)
        along = np.zeros((heads, block.m), dtype)
        for i in range(heads):
            own = sums[0 if block.one is not None else i]
            along[i] = np.where(live, (_wide(block.index_q[i], scratch, "rows") * own).sum(axis=-1), 0) * factor
            if outputs.index_q is not None:
                out = outputs.index_q[at.b, block.heads.start + i, at.q]
                out[...] = narrow(own * (factor * weights[i])[:, None], out.dtype)
        if outputs.weights is not None:
            out = outputs.weights[at.b, block.heads, at.q]
            out[...] = narrow(along, out.dtype)

    def _teacher_heads(self, at: _At) -> slice:
        if not self.operands.teacher:
            return slice(0, 0)
        own = self.operands.teacher[0][0].shape[1] // self.numbers.groups
        return slice(at.g * own, (at.g + 1) * own)

    def _blocks(self, last_first: bool = False, rows: range | None = None) -> Iterator[_At]:
        batch, _, queries, _ = self.operands.index_q.shape
        some = range(queries) if rows is None else rows
        cut = list(slices(some.stop, self.plan.queries, some.start))
        for b in range(batch):
            for g in range(self.numbers.groups):
                for q in reversed(cut) if last_first else cut:
                    yield _At(b, g, q)

    def _scratch(self) -> Scratch:
        return Scratch(self.plan.buffers, np.dtype(self.numbers.dtype))

    def _team(self, tasks: Iterator[_Task]) -> Team[_Task]:
        return Team(tasks, self.plan.threads, True)


def _finite(x: Array) -> Array:
    """Rows with NaN or Inf as 0: the gradients that see them are NaN already, and others must not see them."""
    if np.isfinite(x.sum()):
        return x
    return np.where(np.isfinite(x).all(axis=-1, keepdims=True), x, 0)

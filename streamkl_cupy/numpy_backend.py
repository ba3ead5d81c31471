"""The same tile streaming on the CPU, in NumPy: the embedded default for arrays that live there.

A block is some query rows of some heads; it walks over the key axis in tiles small enough for the cache, so no M x N
matrix ever exists. Per tile the work is two BLAS products and about ten in-place passes. Logits are held in base 2
(the factor log2(e) rides on the scale), because exp2 is the cheapest exponential NumPy has. The scale is applied to the
products, not to the queries: products of 16-bit numbers are exact in float32, those of scaled ones are not.

Row state, with references r (a logit each row has seen), u = T - r_t and v = S - r_s:

    l_t = sum 2^u     l_s = sum 2^v     A = sum 2^u (u - v)     KL = ln2 (A / l_t + log2(l_s / l_t))

A vector added to all keys of a head changes no probability, but it is rounded with every logit, and a query gradient
gets it as often as its logit gradients fail to add up to 0. Where keys share a large part, `common_part` finds it and
the block takes it from its keys as it reads them.

Blocks are independent, and threads of the call share them (`threads.py`). Only key gradients are sums over blocks: each
block adds its part to a tile of keys after the blocks before it, so sums have one order whatever the threads do.

Memory beyond inputs and outputs is one block's scratch for each thread (below 10 MB for D = 64; the plan says how
much). Key gradients of 16-bit inputs are summed in float32 before they are rounded, which adds the float32 key
gradients of one group of heads, and with threads those of at most two groups for each.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from . import masks as rules
from . import threads, validate
from .arrays import ArrayView, Gradients, Inputs, MaskArrays, RowStats, Saved, host
from .masks import Scene
from .problem import INPUT_NAMES, MASK_ARRAYS, Problem, Side, counted
from .threads import Team, Turn

Array = NDArray[Any]
LN2 = math.log(2.0)
LOG2E = 1.0 / LN2

# Measured at N = 4096, D = 64, float32 on one Zen 4 core: 79 ms for the forward with 1024 x 512, 83 with 512 x 512, 88
# with 256 x 512 and 96 with 128 x 512. Taller still would waste work under a causal mask, where a block computes about
# half of its diagonal tiles in vain: there it is 75, 58, 54 and 57 ms.
QUERY_TILE, KEY_TILE = 1024, 512
BLOCK_ELEMENTS = QUERY_TILE * KEY_TILE
LONGEST_KEY_TILE = 2048
SHORTEST_QUERY_TILE = 128

# For threads, blocks get shorter until there are a few for each, because whoever has the last one is waited for.
BLOCKS_PER_THREAD = 2
SHARED_QUERY_TILE, LEAST_QUERY_TILE = 256, 16
# Threads for less than this, 3 ms on one core, cost more than they save. Short sequences are mostly Python's work,
# which threads cannot share.
LEAST_SHARED_SCORES, LEAST_SHARED_SEQUENCE = 1 << 19, 1 << 14
# OpenBLAS shares products of more multiplications than this between its threads.
LEAST_SHARED_PRODUCT = 1 << 18

# A reference is replaced only when a logit exceeds it by this much (base 2), so most tiles move no row state. The
# sums stay far from the float32 limit, and the last subtraction cancels at most this much.
REFERENCE_SLACK = 8.0

# Keys that are looked at for a common part, at fractions i x the golden ratio of the tile, so that special keys at
# equal distances are not more than a few of them. cuda_src/tile/common_part.cuh has the same rule.
SAMPLED_KEYS = 8
SAMPLED_AT = np.arange(SAMPLED_KEYS) * 0x9E3779B9 % 2**32


@dataclass(frozen=True)
class NumPyPlan:
    """How a problem is cut on the CPU: a block is `batches` x `heads` x `queries` rows and takes `keys` at a time.

    `scratch_bytes` are those of each of the `threads`.
    """

    dtype: str
    batches: int
    heads: int
    queries: int
    keys: int
    blocks: int
    scratch_bytes: int
    product: int
    """Multiplications of the largest product that BLAS is given."""
    threads: int = 1
    buffers: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    """Elements of each scratch buffer."""

    def __str__(self) -> str:
        return (
            f"numpy {self.dtype}: {counted(self.blocks, 'block')} of {counted(self.batches, 'batch', 'batches')} x "
            f"{counted(self.heads, 'head')} x {counted(self.queries, 'query', 'queries')}, "
            f"{counted(self.keys, 'key')} at a time, {self.scratch_bytes / 2**20:.1f} MiB of scratch"
            + (f" for each of {self.threads} threads" if self.threads > 1 else "")
        )


def make_plan(problem: Problem, queries: int | None = None, keys: int | None = None, threads: int = 1) -> NumPyPlan:
    """Cut a problem into blocks of about `BLOCK_ELEMENTS` scores; small heads are taken several at a time.

    `queries` and `keys` are those of one packed sequence; without them they are taken as one. There are blocks for so
    many threads as far as rows and heads allow.
    """
    M, N = problem.queries if queries is None else queries, problem.keys if keys is None else keys
    m = max(min(M, _tallest(problem, M), _shared(problem.batch * problem.heads, M, threads)), 1)
    n = max(min(N, max(KEY_TILE, min(BLOCK_ELEMENTS // m, LONGEST_KEY_TILE))), 1)
    width = problem.teacher.dim + problem.student.dim
    heads = batches = 1
    alike = problem.mask.pattern is None or problem.mask.pattern.heads == 1
    if problem.heads > 0 and alike:
        # Whole groups of both sides, so that a block's query heads fold onto its key heads. Keys count too: with few
        # query rows it is they that fill the cache.
        unit = _group(problem)
        room = BLOCK_ELEMENTS // max(m * n, n * width, 1)
        if threads > 1:
            room = min(room, -(-problem.batch * problem.heads // (BLOCKS_PER_THREAD * threads)))
        heads = min(problem.heads, max(room // unit * unit, 1))
        if heads == problem.heads and not {"lengths", "keys"} & set(problem.mask.parts):
            batches = max(min(problem.batch, room // heads), 1)
    blocks = -(-problem.batch // batches) * -(-problem.heads // heads) * -(-M // m)
    buffers = _buffers(problem, batches * heads, m, n)
    scratch = sum(buffers.values())
    product = max(min(heads, x.group) * m * n * x.dim for x in (problem.teacher, problem.student))
    itemsize = np.dtype(problem.stat_dtype).itemsize
    threads = max(min(threads, blocks), 1)
    return NumPyPlan(problem.stat_dtype, batches, heads, m, n, blocks, scratch * itemsize, product, threads, buffers)


def _buffers(problem: Problem, heads: int, m: int, n: int) -> dict[str, int]:
    """Elements of each buffer that a block of `heads` heads, all batch entries counted, needs at most."""
    sizes = dict.fromkeys(("u", "v", "difference"), heads * m * n)
    for name, dim in (("teacher", problem.teacher.dim), ("student", problem.student.dim)):
        sizes[f"{name}_q"] = sizes[f"{name}_qw"] = heads * m * dim
        sizes[f"{name}_k"] = heads * n * dim
    sizes["product"] = heads * max(m, n) * max(problem.teacher.dim, problem.student.dim)
    return sizes


def _shared(heads: int, rows: int, threads: int) -> int:
    """The most rows of a block with which all threads have work."""
    if threads == 1 or heads == 0:
        return QUERY_TILE
    m = max(-(-rows // -(-BLOCKS_PER_THREAD * threads // heads)), SHARED_QUERY_TILE)
    if heads * -(-rows // m) < threads:
        m = max(-(-rows // -(-threads // heads)), LEAST_QUERY_TILE)
    return -(-m // 16) * 16


def _tallest(problem: Problem, rows: int) -> int:
    """Rows of a block beyond which it would mostly compute pairs that the mask hides."""
    tallest, mask = QUERY_TILE, problem.mask
    if "causal" in mask.parts:
        tallest = min(tallest, max(rows // 16, SHARED_QUERY_TILE))
    if "window" in mask.parts and mask["left"] >= 0 and mask["right"] >= 0:
        tallest = max((mask["left"] + mask["right"]) // 2, SHORTEST_QUERY_TILE)
    if mask.pattern is not None:
        tallest = min(tallest, mask.pattern.query_block)
    return tallest


def widen(x: Array, out: Array) -> Array:
    """Copy `x` into the float32 or float64 array `out`; uint16 holds bfloat16 bits."""
    if x.dtype != np.uint16:
        np.copyto(out, x)
    elif out.dtype == np.float32:
        np.left_shift(x, 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        with np.errstate(invalid="ignore"):  # signalling NaN
            np.copyto(out, np.left_shift(x, 16, dtype=np.uint32).view(np.float32))
    return out


def narrow(x: Array, dtype: np.dtype[Any]) -> Array:
    """`x` rounded to nearest even in `dtype`; uint16 stands for bfloat16 bits."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype != np.uint16:
            return x.astype(dtype)
        bits = x.astype(np.float32).view(np.uint32)
    # Adding the last kept bit to half a unit rounds ties to even. A NaN must not be carried over into infinity.
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


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


def _group(problem: Problem) -> int:
    return math.lcm(problem.teacher.group, problem.student.group)


def _slices(stop: int, step: int, start: int = 0) -> Iterator[slice]:
    for i in range(start, stop, step):
        yield slice(i, min(i + step, stop))


def _canonical(x: Array, layout: str, trailing: int) -> Array:
    """A view in the order (batch, head, row[, column]) of an array in the caller's order."""
    lead = x.ndim - trailing
    if lead > 1 and layout == "bnhd":
        x = x.swapaxes(lead - 2, lead - 1)
    return x[(None,) * (3 - lead)]


def _not_finite(x: Array) -> Array | None:
    """(..., r, D) -> (..., r), which rows hold NaN or Inf; None, at the price of one sum, if there are none."""
    if np.isfinite(x.sum()):
        return None
    bad: Array = np.asarray(~np.isfinite(x).all(axis=-1))
    return bad if bad.any() else None


def _at(views: dict[str, Array], place: _Place) -> dict[str, Array]:
    """The rows of a place of each operand or gradient."""
    return {name: x[:, :, place.q if name.endswith("_q") else place.k] for name, x in views.items()}


class _Scratch:
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


class _Block(NamedTuple):
    """The rows of one block, as slices of the (batch, head, row) axes."""

    b: slice
    h: slice
    q: slice


class _Tile(NamedTuple):
    """Some keys, and which rows see them, to broadcast to (b, h, m, n): None where every row sees every key."""

    k: slice | Array
    visible: Array | None

    @property
    def end(self) -> int:
        """The key after the last one."""
        return int(self.k.stop if isinstance(self.k, slice) else self.k[-1] + 1)


class _Place(NamedTuple):
    """The rows and keys of one packed sequence, or all of them, and how they are cut into blocks."""

    q: slice
    k: slice
    scene: Scene
    plan: NumPyPlan


class _Half:
    """One of the two distributions inside one block: b batches, h query heads on hk key heads, m rows of width D."""

    def __init__(self, name: str, side: Side, views: dict[str, Array], at: _Block, scratch: _Scratch) -> None:
        self.name, self.scale, self.group, self.scratch = name, side.scale, side.group, scratch
        self.key_heads = slice(at.h.start // side.group, (at.h.stop - 1) // side.group + 1)
        self._all_keys = views[f"{name}_k"][at.b, self.key_heads]
        rows = views[f"{name}_q"][at.b, at.h, at.q]
        self.q = widen(rows, scratch(f"{name}_q", rows.shape))
        self.keys = self.q
        self.common: Array | None = None
        self.offset: Array | float = 0.0
        """What a row's logits lack in base 2, (b, h, m): the query times the common part of the keys."""
        self._looked = False
        self.bad_rows = _not_finite(self.q)

    def _fold(self, x: Array) -> Array:
        """(b, h, m, x) -> (b, hk, h / hk * m, x): the query heads of one key head become more rows of it."""
        b, hk = self._all_keys.shape[:2]
        return x.reshape(b, hk, x.shape[1] // hk * x.shape[2], x.shape[3])

    def logits(self, tile: _Tile, buffer: str) -> Array:
        """Read a tile of keys and return its base-2 logits (b, h, m, n) less `offset`, -inf where not visible."""
        k: Array = self._all_keys[:, :, tile.k]
        # BLAS takes rows at any distance, as long as a row itself is dense and of the working type.
        if k.dtype != self.q.dtype or k.strides[-1] != k.itemsize or k.strides[-2] < k.itemsize * k.shape[-1]:
            k = widen(k, self.scratch(f"{self.name}_k", k.shape))
        if not self._looked:
            self._look(k, tile)
        if self.common is not None:
            k = np.subtract(k, self.common, out=self.scratch(f"{self.name}_k", k.shape))
        self.keys = k
        out = self.scratch(buffer, (*self.q.shape[:3], k.shape[2]))
        np.matmul(self._fold(self.q), k.swapaxes(-1, -2), out=self._fold(out))
        out *= self.scale * LOG2E
        if tile.visible is not None:
            np.copyto(out, -np.inf, where=~tile.visible)
        return out

    def _look(self, keys: Array, tile: _Tile) -> None:
        """Find what the keys of the block have in common, from those of its first tile that any row sees."""
        self._looked = True
        if tile.visible is None:
            sample = SAMPLED_AT * keys.shape[2] >> 32
        else:
            seen = np.flatnonzero(tile.visible.any(axis=tuple(range(tile.visible.ndim - 1))))
            if not len(seen):
                return
            sample = seen[SAMPLED_AT * len(seen) >> 32]
        self.common = common_part(keys[:, :, sample])
        if self.common is not None:
            rows = np.matmul(self._fold(self.q), self.common.swapaxes(-1, -2))
            self.offset = self.scale * LOG2E * rows.reshape(self.q.shape[:3])

    def clean(self, d_logits: Array, tile: _Tile) -> None:
        """Keep NaN and Inf of the inputs where they belong before `d_logits` meets the inputs again.

        In a product 0 x NaN is NaN, so a key that no row sees would still reach every row. Such operand rows become
        0 here, and the pairs that do see them become NaN.
        """
        bad_keys = _not_finite(self.keys)
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

    def add_dk(self, total: Array, tile: _Tile, d_logits: Array, weighted_q: Array, turn: Turn) -> None:
        """total (b, hk, N, D) += d_logits^T weighted_q at the keys of the tile, when it is the block's turn."""
        product = self.scratch("product", self.keys.shape)
        np.matmul(self._fold(d_logits).swapaxes(-1, -2), self._fold(weighted_q), out=product)
        turn.wait(tile.end)
        total[:, :, tile.k] += product


class _State:
    """Row state of one block: references, sums, and which rows have seen a key at all."""

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self.r_t, self.r_s, self.l_t, self.l_s, self.A = np.zeros((5, *shape), dtype)
        self.seen = np.zeros(shape, np.bool_)

    def move(self, top_t: Array, top_s: Array, seen: Array) -> None:
        """Move the references to a tile's largest logits where they lag too far behind or do not exist yet."""
        fresh = seen & ~self.seen
        # A NaN never compares larger; it reaches the sums through the logits themselves.
        move_t = fresh | (top_t > self.r_t + REFERENCE_SLACK)
        move_s = fresh | (top_s > self.r_s + REFERENCE_SLACK)
        if move_t.any() or move_s.any():
            d_t, d_s = np.where(move_t, top_t - self.r_t, 0), np.where(move_s, top_s - self.r_s, 0)
            self.r_t += d_t
            self.r_s += d_s
            self.A = np.where(self.seen, np.exp2(-d_t) * (self.A - (d_t - d_s) * self.l_t), 0)
            self.l_t = np.where(self.seen, np.exp2(-d_t) * self.l_t, 0)
            self.l_s = np.where(self.seen, np.exp2(-d_s) * self.l_s, 0)
        self.seen |= seen

    def finish(self, offset_t: Array | float, offset_s: Array | float) -> tuple[Array, Array, Array]:
        """KL in nats and both natural log-sum-exps, of logits that lack so much in base 2.

        All three are NaN for a row that saw NaN or Inf on either side: KL could be infinite and a log-sum-exp finite,
        and a backward from that would be silent.
        """
        kl = LN2 * (self.A / self.l_t + np.log2(self.l_s / self.l_t))
        lse_t, lse_s = LN2 * self.r_t + np.log(self.l_t), LN2 * self.r_s + np.log(self.l_s)
        lse_t, lse_s = lse_t + LN2 * offset_t, lse_s + LN2 * offset_s
        fine = np.isfinite(kl) & np.isfinite(lse_t) & np.isfinite(lse_s)

        def settled(x: Array, empty: float) -> Array:
            return np.where(self.seen, np.where(fine, x, np.nan), empty)

        return settled(kl, 0.0), settled(lse_t, -np.inf), settled(lse_s, -np.inf)


class _Totals:
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


_Task = TypeVar("_Task")


class _ForwardTask(NamedTuple):
    """One block of the forward, with what it reads and where its rows go."""

    place: _Place
    at: _Block
    views: dict[str, Array]
    outputs: list[Array]


class _BackwardTask(NamedTuple):
    """One block of the backward, with its turn at the key gradients of its group."""

    group: _Group
    at: _Block
    turn: Turn


@dataclass
class _Group:
    """Blocks of the backward that add to the same key gradients, and these."""

    place: _Place
    views: dict[str, Array]
    rows: dict[str, Array]
    grads: dict[str, Array]
    keys: dict[str, Array]
    first_head: int
    blocks: deque[_Block]

    def __post_init__(self) -> None:
        self.unfinished = len(self.blocks)
        self._turn: Turn | None = None

    def task(self, team: Team[Any], dtype: np.dtype[Any]) -> _BackwardTask:
        """The next block; the first one brings the sums."""
        if self._turn is None:
            self.totals = _Totals(self.keys, dtype)
        self._turn = Turn(team, self._turn)
        return _BackwardTask(self, self.blocks.pop(), self._turn)

    def done(self, team: Team[Any]) -> None:
        """A block is finished; the last one rounds the sums and lets go of them."""
        with team.lock:
            self.unfinished -= 1
            last = self.unfinished == 0
        if last:
            self.totals.store()
            del self.totals


def _threads(scores: int) -> int:
    """Threads that so many pairs of rows and keys are worth."""
    return threads.available() if scores >= LEAST_SHARED_SCORES else 1


class Runner:
    """Runs one problem on CPU arrays; may be kept, and called again with other arrays of the same problem."""

    workspace_bytes = 0  # scratch is its own

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._plans: dict[int, NumPyPlan] = {}
        self._dtype = np.dtype(problem.stat_dtype)
        self._mask = rules.parts_of(problem.mask)
        self._scores = problem.batch * problem.heads * problem.queries * problem.keys

    @property
    def plan(self) -> NumPyPlan:
        """How a call would run with as many threads as there are now."""
        return self._planned(_threads(self._scores))

    def _planned(self, count: int) -> NumPyPlan:
        plan = self._plans.get(count)
        return plan or self._plans.setdefault(count, make_plan(self.problem, threads=count))

    def warmup(self, wrt: Sequence[str] = ()) -> None:
        """Nothing to compile or load here."""

    def backward_bytes(self, wrt: Sequence[str]) -> int:
        """Of a workspace from the caller: none."""
        return 0

    def forward(
        self, inputs: Inputs, outputs: RowStats, stream: int = 0, workspace: int = 0, masks: MaskArrays | None = None
    ) -> None:
        """Write KL and both log-sum-exps of every row.

        Raises:
            ValueError: lengths or sequence bounds that do not fit; nothing has been written then.
        """
        places, count = self._places(masks)
        views = self._views(inputs)
        rows = [self._rows(x) for x in outputs]
        if self.problem.sequences:  # rows after the last sequence
            for out, empty in zip(rows, (0, -np.inf, -np.inf), strict=True):
                out[...] = empty

        def tasks() -> Iterator[_ForwardTask]:
            for place in places:
                here, out_rows = _at(views, place), [x[:, :, place.q] for x in rows]
                for b, h in self._groups(place):
                    for at in self._blocks(place, b, h):
                        yield _ForwardTask(place, at, here, out_rows)

        def work(team: Team[_ForwardTask]) -> None:
            scratch = scratches.pop()
            for task in team:
                found = self._block_forward(task.views, task.place, task.at, scratch, team)
                for out, x in zip(task.outputs, found, strict=True):
                    out[task.at] = x

        scratches = self._scratches(places, count)
        self._team(places, tasks(), count).run(work)

    def backward(
        self,
        inputs: Inputs,
        saved: Saved,
        outputs: Gradients,
        stream: int = 0,
        workspace: int = 0,
        masks: MaskArrays | None = None,
        room: int | None = None,
    ) -> None:
        """Write every gradient that has an output, reading the logits once for all of them.

        Raises:
            ValueError: lengths or sequence bounds that do not fit; nothing has been written then.
        """
        places, count = self._places(masks)
        views, grads = self._views(inputs), self._views(outputs)
        rows = {name: self._rows(x) for name, x in zip(Saved._fields, saved, strict=True) if x is not None}
        for x in grads.values():
            x[...] = 0

        def groups() -> Iterator[_Group]:
            for place in places:
                here, grads_here = _at(views, place), _at(grads, place)
                rows_here = {name: x[:, :, place.q] for name, x in rows.items()}
                for b, h in self._groups(place):
                    keys = {
                        name: grads_here[name][b, slice(h.start // side.group, h.stop // side.group)]
                        for name, side in (("teacher_k", self.problem.teacher), ("student_k", self.problem.student))
                        if name in grads_here
                    }
                    blocks = deque(self._blocks(place, b, h))
                    yield _Group(place, here, rows_here, grads_here, keys, h.start, blocks)

        def tasks() -> Iterator[_BackwardTask]:
            # As many groups side by side as there are threads, so that these seldom meet in the same keys. Of each its
            # last rows first: under a causal mask they are the most work.
            waiting = groups()
            while window := deque(itertools.islice(waiting, count)):
                while window:
                    group = window.popleft()
                    yield group.task(team, self._dtype)
                    if group.blocks:
                        window.append(group)

        def work(team: Team[_BackwardTask]) -> None:
            scratch = scratches.pop()
            for task in team:
                self._block_backward(task, scratch, team)
                task.turn.reach(Turn.DONE)
                task.group.done(team)

        scratches = self._scratches(places, count)
        team = self._team(places, tasks(), count)
        team.run(work)

    def _team(self, places: list[_Place], tasks: Iterator[_Task], count: int) -> Team[_Task]:
        return Team(tasks, count, any(place.plan.product > LEAST_SHARED_PRODUCT for place in places))

    def _scratches(self, places: list[_Place], count: int) -> list[_Scratch]:
        # Of several sequences, the largest that any of them needs.
        sizes = places[0].plan.buffers if places else {}
        for plan in {place.plan for place in places[1:]}:
            sizes = {name: max(size, plan.buffers[name]) for name, size in sizes.items()}
        return [_Scratch(sizes, self._dtype) for _ in range(count)]

    def _views(self, arrays: Inputs | Gradients) -> dict[str, Array]:
        layout = self.problem.layout
        return {
            name: _canonical(host(x), layout, 1) for name, x in zip(INPUT_NAMES, arrays, strict=True) if x is not None
        }

    def _rows(self, x: ArrayView) -> Array:
        return _canonical(host(x), self.problem.layout, 0)

    def _places(self, masks: MaskArrays | None) -> tuple[list[_Place], int]:
        """The sequences, or the whole, with the mask's values checked, and how many threads share them."""
        p = self.problem
        values = {name: host(x) for name, x in zip(MASK_ARRAYS, masks or (), strict=False) if x is not None}
        validate.mask_values(p, values)
        params = dict(p.mask.params)
        if not p.sequences:
            scene = Scene(
                p.queries,
                p.keys,
                params,
                values.get("key_lengths", np.zeros(0, np.int32)),
                np.atleast_2d(values.get("key_mask", np.zeros((0, 0), np.bool_))),
                p.mask.pattern,
            )
            plan = self.plan
            return [_Place(slice(0, p.queries), slice(0, p.keys), scene, plan)], plan.threads
        q_ends, k_ends = (list(itertools.pairwise(values[name].tolist())) for name in ("cu_seqlens_q", "cu_seqlens_k"))
        sizes = [(q[1] - q[0], k[1] - k[0]) for q, k in zip(q_ends, k_ends, strict=True)]
        scores = sum(M * N for M, N in sizes)
        count = _threads(p.heads * scores) if scores >= LEAST_SHARED_SEQUENCE * len(sizes) else 1
        each = -(-count // max(len(sizes), 1))
        plans = {(M, N): make_plan(p, M, N, each) for M, N in set(sizes)}
        places = []
        for q, k, (M, N) in zip(q_ends, k_ends, sizes, strict=True):
            own = params if params["q_offset_given"] else {**params, "q_offset": N - M}
            places.append(_Place(slice(*q), slice(*k), Scene(M, N, own), plans[M, N]))
        return places, max(min(count, sum(place.plan.blocks for place in places)), 1)

    def _groups(self, place: _Place) -> Iterator[tuple[slice, slice]]:
        """Batches and heads that share nothing with others: whole key heads of both sides."""
        p = self.problem
        if p.batch * p.heads * place.scene.queries > 0:
            for b in _slices(p.batch, place.plan.batches):
                for h in _slices(p.heads, max(place.plan.heads, _group(p))):
                    yield b, h

    def _blocks(self, place: _Place, b: slice, h: slice) -> Iterator[_Block]:
        for heads in _slices(h.stop, place.plan.heads, h.start):
            for q in _slices(place.scene.queries, place.plan.queries):
                yield _Block(b, heads, q)

    def _tiles(self, place: _Place, at: _Block) -> Iterator[_Tile]:
        """The keys that any row of the block may see: stretches of them, or where the mask has holes, picked ones."""
        q0, q1, step = at.q.start, at.q.stop, place.plan.keys
        if not self._mask:
            for k in _slices(place.scene.keys, step):
                yield _Tile(k, None)
            return
        scene = place.scene._replace(
            key_lengths=place.scene.key_lengths[at.b],
            key_mask=place.scene.key_mask[at.b],
            heads=range(at.h.start, at.h.stop),
        )
        k0, k1 = rules.key_range(self._mask, scene, q0, q1)
        some = rules.holes(self._mask, scene, q0, q1, k0, k1)
        if some is None or some.all():
            for k in _slices(k1, step, k0):
                if rules.full(self._mask, scene, q0, q1, k.start, k.stop):
                    yield _Tile(k, None)
                else:
                    yield _Tile(k, rules.visible(self._mask, scene, np.arange(q0, q1), np.arange(k.start, k.stop)))
            return
        picked = k0 + np.flatnonzero(some)
        for part in _slices(len(picked), step):
            keys = picked[part]
            visible = rules.visible(self._mask, scene, np.arange(q0, q1), keys)
            yield _Tile(keys, None if visible.all() else visible)

    def _halves(self, views: dict[str, Array], at: _Block, scratch: _Scratch) -> tuple[_Half, _Half]:
        p = self.problem
        return _Half("teacher", p.teacher, views, at, scratch), _Half("student", p.student, views, at, scratch)

    def _block_forward(
        self, views: dict[str, Array], place: _Place, at: _Block, scratch: _Scratch, team: Team[Any]
    ) -> tuple[Array, Array, Array]:
        teacher, student = self._halves(views, at, scratch)
        state = _State(teacher.q.shape[:3], self._dtype)
        for tile in self._tiles(place, at):
            team.pause()
            u, v = teacher.logits(tile, "u"), student.logits(tile, "v")
            state.move(u.max(axis=-1), v.max(axis=-1), np.asarray(tile.visible is None or tile.visible.any(axis=-1)))
            u -= state.r_t[..., None]
            v -= state.r_s[..., None]
            difference = np.subtract(u, v, out=scratch("difference", u.shape))
            if tile.visible is not None:
                np.copyto(difference, 0, where=~tile.visible)
            np.exp2(u, out=u)
            np.exp2(v, out=v)
            # A product with a column of ones is BLAS's way to sum rows, twice as fast as sum().
            ones = np.ones((u.shape[3], 1), self._dtype)
            state.A += np.vecdot(u, difference)
            state.l_t += np.matmul(u, ones)[..., 0]
            state.l_s += np.matmul(v, ones)[..., 0]
        return state.finish(teacher.offset, student.offset)

    def _block_backward(self, task: _BackwardTask, scratch: _Scratch, team: Team[Any]) -> None:
        group, at = task.group, task.at
        views, grads, place = group.views, group.grads, group.place
        halves = self._halves(views, at, scratch)
        teacher, student = halves
        wanted = [half for half in halves if f"{half.name}_q" in grads or f"{half.name}_k" in grads]
        saved = {name: x[at].astype(self._dtype) for name, x in group.rows.items()}
        if teacher in wanted and "kl" not in saved:
            saved["kl"] = self._block_forward(views, place, at, scratch, team)[0]
        # -inf marks a row without keys: not a number to subtract, and the row weighs nothing whatever memory holds.
        empty = np.isneginf(saved["teacher_lse"])
        kl = saved["kl"][..., None] * LOG2E if teacher in wanted else None
        lses: list[Array] = []
        # Upstream gradient and scale weigh whole rows, so they multiply the m x D side of each product, not the m x n
        # one. The teacher's logit gradient below is in base 2, which is one more factor.
        weight = {half.name: np.where(empty, 0, saved["grad"]) * half.scale for half in wanted}
        if teacher in wanted:
            weight["teacher"] *= LN2
        dq = {half.name: np.zeros(half.q.shape, self._dtype) for half in wanted if f"{half.name}_q" in grads}
        weighted_q = {half.name: half.weighted(weight[half.name]) for half in wanted if f"{half.name}_k" in grads}
        for tile in self._tiles(place, at):
            team.pause()
            u, v = teacher.logits(tile, "u"), student.logits(tile, "v")
            # What the logits lack is known with the first tile.
            lses = lses or [
                np.where(empty, 0, saved[f"{half.name}_lse"] * LOG2E - half.offset)[..., None] for half in halves
            ]
            u -= lses[0]
            v -= lses[1]
            d_logits = {"student": v}
            if kl is not None:
                d_logits["teacher"] = d = np.subtract(u, v, out=scratch("difference", u.shape))
                d -= kl
                if tile.visible is not None:
                    np.copyto(d, 0, where=~tile.visible)
            np.exp2(u, out=u)
            if kl is not None:
                d_logits["teacher"] *= u
            if student in wanted:
                np.exp2(v, out=v)
                v -= u
            for half in wanted:
                half.clean(d_logits[half.name], tile)
                if half.name in dq:
                    half.add_dq(dq[half.name], d_logits[half.name])
                if half.name in weighted_q:
                    heads = slice(half.key_heads.start - group.first_head // half.group, None)
                    total = group.totals[f"{half.name}_k"][:, heads][:, : half.keys.shape[1]]
                    half.add_dk(total, tile, d_logits[half.name], weighted_q[half.name], task.turn)
            task.turn.reach(tile.end)
        for half in wanted:
            if half.name in dq:
                out = grads[f"{half.name}_q"]
                out[at] = narrow(dq[half.name] * weight[half.name][..., None], out.dtype)

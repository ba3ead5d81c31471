"""What masks save: windows, packed batches and sharded patterns beside the dense operation, in one run on one GPU.

Time should fall as the work does. Each masked case is timed in turns with the dense operation of its size, and its
share of the dense time stands beside its share of the tiles that the kernels visit. FlexAttention's forward, another
operation with as many products, shows what the same mask saves there.

    python examples/benchmarks/masks.py --out examples/benchmarks --name masks_h100
    python examples/benchmarks/masks.py --sizes 16k --groups sharded --block 64 --no-flex
    python examples/benchmarks/masks.py --device cpu
"""

from __future__ import annotations

import argparse
import importlib
import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import streamkl_cupy as streamkl
from streamkl_cupy import frameworks, patterns
from streamkl_cupy.arrays import ITEMSIZE
from streamkl_cupy.cli import bench, catalogue, environment, exit_code, report, timings
from streamkl_cupy.cli.cases import home_of, numpy_type, to_float64, torch_missing
from streamkl_cupy.cli.values import positive, results, seconds, whole
from streamkl_cupy.errors import StreamKLError, install
from streamkl_cupy.ops import ATTENTION_KL
from streamkl_cupy.patterns.families import MOST_HEADS
from streamkl_cupy.patterns.pattern import MAX_BLOCK, UNIT
from streamkl_cupy.planning import MAX_ROWS
from streamkl_cupy.testing.timing import Call, DeviceTimer, HostTimer, Timer, Variant, measure

EPILOG = """\
examples:
  python examples/benchmarks/masks.py --out examples/benchmarks --name masks_h100
  python examples/benchmarks/masks.py --sizes 16k --groups sharded --block 64 --no-flex
  python examples/benchmarks/masks.py --device cpu        the same on NumPy arrays, small, to try the script

Passes: forward; backward, the student's two gradients; deterministic, the same with deterministic=True; flex, the
forward of FlexAttention, beside its own dense forward.

Columns: "of dense" is the time over that of the dense operation (of the same padded batch for padded cases), "pairs"
the share of row and key pairs that are visible, "tiles" the share of tiles that the kernels visit, of as many queries
and keys as "tile" says; "time/tiles" is "of dense" over "tiles"; what takes longer than 1.25 x tiles x dense is listed
at the end. "extra MiB" is the peak beyond the inputs, what a backward has saved included; "pattern MiB" is what
a pattern keeps on the GPU. Before it is timed, every result is compared with float64 in random rows and keys.

Exit code: 0 all of this package ran and was right, 1 not all, 2 wrong arguments or nothing to run on.
"""

PASSES = ("forward", "backward", "deterministic")
GROUPS = ("window", "packed", "sharded")
OURS, FLEX = "streamkl_cupy", "FlexAttention"
MAX_DIM = ATTENTION_KL.max_gradient_dim
LIMIT = 1.25
MOST_SETS = 32
SHARES = (8, 16)
# Sizes, type, window, block, seconds per variant.
DEFAULTS: dict[str, Any] = {
    "cuda": ((16384, 65536), "bfloat16", 1024, 128, 0.08),
    "cpu": ((1024,), "float32", 128, 32, 0.02),
}
Array = np.ndarray[Any, Any]


class Standin(NamedTuple):
    """What planning needs to know of an array."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Case:
    """One problem with as many keys as rows, and its mask."""

    title: str
    base: str
    """Title of the dense case that it is compared with."""
    batch: int
    heads: int
    rows: int
    dim: int
    dtype: str
    causal: bool = False
    window: tuple[int, int] | None = None
    lengths: tuple[int, ...] = ()
    """Keys of each batch entry; of each sequence if packed."""
    packed: bool = False
    rows_end: bool = False
    """Whether the rows of each batch entry end where its keys do."""
    pattern: patterns.BlockPattern | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of every input."""
        if self.packed:
            return self.rows, self.heads, self.dim
        return self.batch, self.heads, self.rows, self.dim

    @cached_property
    def mask_arrays(self) -> dict[str, Array]:
        """Array options, on the host."""
        if self.packed:
            ends = np.array((0, *np.cumsum(self.lengths)), np.int32)
            return {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        ends = np.array(self.lengths, np.int32)
        return {} if not self.lengths else {"key_lengths": ends, **({"query_lengths": ends} if self.rows_end else {})}

    @property
    def options(self) -> dict[str, Any]:
        """The other options."""
        return {"causal": self.causal, "window": self.window, "block_mask": self.pattern}

    @property
    def edges(self) -> tuple[int, int]:
        """Row i sees keys from i - left to i + right, as far as causal and window say."""
        left, right = self.window or (self.rows, self.rows)
        return left, min(right, 0) if self.causal else right

    @property
    def scenes(self) -> Iterator[tuple[int, int]]:
        """Rows and keys of every batch entry or sequence."""
        for length in self.lengths or (self.rows,) * self.batch:
            yield length if self.packed or self.rows_end else self.rows, length

    def visible(self, head: int, rows: Array, keys: Array) -> Array:
        """(rows, keys) bool inside one entry or sequence, by the definition of each mask."""
        left, right = self.edges
        distance = keys - rows[:, None]
        seen: Array = (distance >= -left) & (distance <= right)
        if self.pattern is not None:
            p = self.pattern
            seen &= p.dense()[head][(rows // p.query_block)[:, None], keys // p.key_block]
        return seen

    def pairs(self) -> float:
        """The share of visible pairs, of all heads."""
        if self.pattern is None:
            return self.tiles(1, 1)
        p = self.pattern
        size = p.query_block
        rows = np.repeat(np.tile(np.arange(p.row_offsets.shape[1] - 1), p.heads), np.diff(p.row_offsets).ravel())
        # Sizes are multiples of a block, so that the diagonal halves exactly the blocks that it crosses.
        crossed = int((rows == p.key_blocks).sum()) if self.causal else 0
        seen = len(p.key_blocks) * size**2 - crossed * size * (size - 1) // 2
        return seen / (p.heads * self.rows**2)

    def tiles(self, rows: int, columns: int, by_keys: bool = False) -> float:
        """The share of tiles that are visited; `by_keys`: their `rows` are keys and their `columns` queries."""
        if by_keys and self.pattern is None:
            rows, columns = columns, rows
        everything = -(-self.rows // rows) * -(-self.rows // columns)
        if self.pattern is not None:
            entries = self.pattern.tile_lists(rows, columns, by_keys).entries
            return len(entries) / (self.pattern.heads * everything)
        left, right = self.edges
        visited = 0
        for queries, keys in self.scenes:
            first = np.arange(0, queries, rows)
            last = np.minimum(first + rows, queries) - 1
            start, stop = np.maximum(first - left, 0), np.minimum(last + right + 1, keys)
            visited += int(np.where(start < stop, -(-stop // columns) - start // columns, 0).sum())
        return visited / (self.batch * everything)

    def __str__(self) -> str:
        return f"N={self.rows} {self.title}"


@dataclass(kw_only=True)
class Row(timings.CaseRow):
    """One line of the CSV."""

    size: int
    density: float | None = None
    of_dense: float | None = None
    pairs: float | None = None
    tiles: float | None = None
    time_over_tiles: float | None = None
    over_us: float | None = None
    tile: str = ""
    peak_bytes: int | None = None
    driver_bytes: int | None = None
    pattern_bytes: int | None = None
    input_bytes: int | None = None


FIELDS = timings.columns(Row, "size")


def cases_of(group: str, size: int, heads: int, options: argparse.Namespace) -> list[Case]:
    """The cases that are timed in turns, what they are compared with first."""
    dense = Case("dense", "dense", 1, heads, size, options.dim, options.dtype)
    reach = options.window
    if group == "window":
        return [
            dense,
            replace(dense, title="causal", causal=True),
            replace(dense, title=f"window ({reach}, 0) causal", causal=True, window=(reach, 0)),
            replace(dense, title=f"window ({reach}, {reach})", window=(reach, reach)),
        ]
    if group == "packed":
        lengths = uneven(size, options.seed)
        padded = replace(dense, title="padded, no mask", base="padded, no mask", batch=len(lengths), rows=max(lengths))
        return [
            dense,
            replace(dense, title=f"packed, {len(lengths)} sequences", lengths=lengths, packed=True),
            padded,
            replace(padded, title="padded, key_lengths", lengths=lengths),
            replace(padded, title="padded, both lengths", lengths=lengths, rows_end=True),
        ]
    return [
        dense,
        *(
            replace(dense, title=f"sharded 1/{share}{' causal' * causal}", causal=causal, pattern=pattern)
            for causal in (False, True)
            for share in SHARES
            for pattern in [sharded(share, size, heads, options.block, causal)]
        ),
    ]


def uneven(total: int, seed: int) -> tuple[int, ...]:
    """Lengths of sequences: log-uniform from 1/64 to 1/4 of their sum."""
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while (room := total - sum(lengths)) > 0:
        lengths.append(min(max(round(total * math.exp(rng.uniform(math.log(1 / 64), math.log(1 / 4)))), 1), room))
    return tuple(lengths)


def sharded(share: int, size: int, heads: int, block: int, causal: bool) -> patterns.BlockPattern:
    """Some heads of a layer that see about 1 / share of their context each and all of it together.

    Half of what a head sees are stripes, so the layer has twice `share` heads; these are spread evenly over it.
    """
    stride = 2 * share
    layer = stride * -(-heads // stride)
    whole = patterns.sharded(layer, window=size // (4 * share), stride=stride, queries=size, block=block, causal=causal)
    return whole.select([i * layer // heads for i in range(heads)])


def kernels_of(plan: Any, name: str) -> list[Any]:
    """The kernels that walk over tiles in a pass; none on the CPU."""
    if not hasattr(plan, "gradients"):
        return []
    if name == "forward":
        return [plan.forward]
    fused = [fused.main for fused in plan.fused if fused.side == "student"]
    return fused or [plan.gradient("student_q"), plan.gradient("student_k")]


def plan_of(case: Case, name: str) -> Any:
    """What a pass would run, without an array of it."""
    x = Standin(case.shape, case.dtype)
    deterministic = True if name == "deterministic" else None
    return streamkl.plan(x, x, x, x, **case.options, **case.mask_arrays, deterministic=deterministic)


def walks(case: Case, name: str, block: int) -> list[tuple[int, int, bool]]:
    """(rows, columns, rows are keys) of the tiles of a pass. The NumPy backend is not made of such: blocks count."""
    tiles = [
        (kernel.tile.rows, kernel.tile.columns, not dict(kernel.constants)["SKL_ROWS_ARE_QUERIES"])
        for kernel in kernels_of(plan_of(case, name), name)
    ]
    return tiles or [(block, block, False)]


def describe(row: Row, case: Case, block: int) -> None:
    """Fill in what is known before a case runs.

    Raises:
        NotImplementedError: no kernel runs it.
    """
    row.input_bytes = 4 * math.prod(case.shape) * ITEMSIZE[case.dtype]
    row.pairs = case.pairs()
    tiles = [(block, block, False)] if row.peer == FLEX else walks(case, row.pass_, block)
    # Kernels of one pass do about as much work per tile each.
    row.tiles = sum(case.tiles(*tile) for tile in tiles) / len(tiles)
    row.tile = ", ".join(f"{columns}x{rows}" if by_keys else f"{rows}x{columns}" for rows, columns, by_keys in tiles)
    if case.pattern is not None:
        row.density = case.pattern.density
        if row.peer == OURS:
            lists = [case.pattern.tile_lists(*tile) for tile in tiles]
            row.pattern_bytes = sum(array.nbytes for each in lists for array in each)


def random_inputs(case: Case, home: str) -> tuple[Any, ...]:
    """Four fresh normal inputs."""
    if home == "torch":
        torch = importlib.import_module("torch")
        kind = getattr(torch, case.dtype)
        return tuple(torch.randn(case.shape, device="cuda").to(kind) for _ in range(4))
    rng = np.random.default_rng()
    return tuple(rng.standard_normal(case.shape, np.float32).astype(numpy_type(case.dtype)) for _ in range(4))


def placed(case: Case, home: str) -> dict[str, Any]:
    """Options of a call, arrays where the inputs are."""
    found = case.mask_arrays
    if home == "torch":
        torch = importlib.import_module("torch")
        found = {key: torch.from_numpy(value).cuda() for key, value in found.items()}
    return {**case.options, **found}


class Ours:
    """This package."""

    def __init__(self, case: Case, options: dict[str, Any]) -> None:
        self.case, self.options = case, options
        self._expected: Expected | None = None

    def prepare(self, name: str, given: Sequence[Any]) -> Call:
        """A call of a pass, with what it needs computed before."""
        options = self.options
        if name == "forward":
            return lambda: streamkl.attention_kl_forward(*given, **options)
        rows = streamkl.attention_kl_forward(*given, **options)
        deterministic = True if name == "deterministic" else None
        # Any values will do as upstream gradients; the row values are at hand, random and of the right type.
        return lambda: streamkl.attention_kl_backward(
            rows.kl, *given, saved=rows, **options, deterministic=deterministic
        )

    def verify(self, name: str, given: Sequence[Any]) -> str:
        """What is wrong in a few random rows and keys, against float64; empty where nothing is."""
        e = self._expected = self._expected or Expected(self.case, given, self.options)
        if name == "forward":
            error = float(np.abs(e.kl[e.rows] - e.want_kl).max() / (1 + e.want_kl.max()))
            return "" if error < 1e-5 else f"KL {e.where}, rows {e.rows.tolist()} is off by {error:.1e} of 1 + KL"
        grads = self.prepare(name, given)()
        error = distance(e.own(grads.student_q, e.queries)[e.rows], e.want_q)
        if not error < 1e-2:
            return f"gradient to student_q {e.where}, rows {e.rows.tolist()} is off by {error:.1e}"
        error = distance(e.own(grads.student_k, e.keys)[e.columns], e.want_k)
        return (
            "" if error < 1e-2 else f"gradient to student_k {e.where}, keys {e.columns.tolist()} is off by {error:.1e}"
        )


class Expected:
    """Float64 results of a few random rows and keys of one head of a batch entry or sequence."""

    def __init__(self, case: Case, given: Sequence[Any], options: dict[str, Any]) -> None:
        rng = np.random.default_rng()
        scenes = list(case.scenes)
        self.case, self.head, self.entry = case, int(rng.integers(case.heads)), int(rng.integers(len(scenes)))
        self.queries, self.keys = scenes[self.entry]
        self._first = sum(length for length, _ in scenes[: self.entry])
        self.where = f"of head {self.head}, entry {self.entry}"
        self.rows, self.columns = rng.integers(self.queries, size=4), rng.integers(self.keys, size=2)
        found = streamkl.attention_kl_forward(*given, **options)
        self.kl, *lse = (self.own(x, self.queries) for x in found)
        tq, tk, sq, sk = (self.own(x, size) for x, size in zip(given, (self.queries, self.keys) * 2))
        scale = case.dim**-0.5

        seen = case.visible(self.head, self.rows, np.arange(self.keys))
        p, q = (softmax(a[self.rows] @ b.T * scale, seen) for a, b in ((tq, tk), (sq, sk)))
        with np.errstate(divide="ignore", invalid="ignore"):
            self.want_kl = np.where(p > 0, p * np.log(p / q), 0).sum(-1)
        self.want_q = self.kl[self.rows, None] * ((q - p) @ sk) * scale
        # A key's gradient is a sum over all rows; what normalises them is the forward's, checked by its few rows.
        seen = case.visible(self.head, np.arange(self.queries), self.columns)
        p, q = (
            np.where(seen, np.exp(a @ b[self.columns].T * scale - log[:, None]), 0)
            for a, b, log in ((tq, tk, lse[0]), (sq, sk, lse[1]))
        )
        self.want_k = (self.kl[:, None] * (q - p)).T @ sq * scale

    def own(self, x: Any, size: int) -> Array:
        """What of an input or result belongs to the head and entry or sequence."""
        rows = slice(self._first, self._first + size)
        return to_float64(x[rows, self.head] if self.case.packed else x[self.entry, self.head, :size])


def softmax(logits: Array, seen: Array) -> Array:
    """Over the keys that are seen."""
    logits = np.where(seen, logits, -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True))


def distance(found: Array, want: Array) -> float:
    """Relative L2."""
    return float(np.linalg.norm(found - want)) / max(float(np.linalg.norm(want)), 1e-300)


class Flex:
    """FlexAttention's forward: student queries and keys, with the teacher's keys for values."""

    _compiled: Any = None

    def __init__(self, case: Case, block: int, device: str = "cuda") -> None:
        self.case, self.block = case, block
        torch = importlib.import_module("torch")
        flex = importlib.import_module("torch.nn.attention.flex_attention")
        if Flex._compiled is None:
            config: Any = importlib.import_module("torch._dynamo.config")
            # Beyond the limit the uncompiled function would run, which writes the score matrix out.
            config.recompile_limit = 64
            config.fail_on_recompile_limit_hit = True
            Flex._compiled = torch.compile(flex.flex_attention, dynamic=False)
        self._no_grad = torch.no_grad
        self._mask = self._block_mask(torch, flex, device) if case.title != case.base else None
        # Tiles of the kernel must divide blocks.
        self._tiles = {"kernel_options": {"BLOCK_M": 64, "BLOCK_N": 64}} if block < 128 else {}

    def blocks(self) -> tuple[Array, Array]:
        """(heads, query blocks, key blocks) bool: blocks with a visible pair, and those where all pairs are."""
        case, size = self.case, self.block
        first = np.arange(0, case.rows, size)
        low, high = first - first[:, None] - (size - 1), first - first[:, None] + (size - 1)
        left, right = case.edges
        some, every = (low <= right) & (high >= -left), (high <= right) & (low >= -left)
        listed = np.ones((case.heads, 1, 1), bool) if case.pattern is None else case.pattern.dense()
        return listed & some, listed & every

    def _block_mask(self, torch: Any, flex: Any, device: str) -> Any:
        """From the blocks: create_block_mask would evaluate every pair, gigabytes of them."""
        some, every = self.blocks()
        left, right = self.case.edges
        # As tensors, so that other numbers need no other kernel.
        low, high = torch.tensor(-left, device=device), torch.tensor(right, device=device)

        def visible(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return (key - query >= low) & (key - query <= high)

        def lists(listed: Array) -> tuple[Any, Any]:
            counts, order = listed.sum(-1), np.argsort(~listed, axis=-1, kind="stable")
            return tuple(torch.from_numpy(x.astype(np.int32))[None].to(device) for x in (counts, order))

        return flex.BlockMask.from_kv_blocks(
            *lists(some & ~every),
            *lists(every),
            BLOCK_SIZE=self.block,
            mask_mod=visible,
            seq_lengths=(self.case.rows, self.case.rows),
            compute_q_blocks=False,
        )

    def prepare(self, name: str, given: Sequence[Any]) -> Call:
        """A call."""
        teacher_k, student_q, student_k = given[1:]

        def call() -> Any:
            with self._no_grad():
                return Flex._compiled(student_q, student_k, teacher_k, block_mask=self._mask, **self._tiles)

        return call

    def verify(self, name: str, given: Sequence[Any]) -> str:
        """As for this package."""
        case, rng = self.case, np.random.default_rng()
        head, rows = int(rng.integers(case.heads)), rng.integers(case.rows, size=4)
        v, q, k = (to_float64(x[0, head]) for x in given[1:])
        p = softmax(q[rows] @ k.T * case.dim**-0.5, case.visible(head, rows, np.arange(case.rows)))
        error = distance(to_float64(self.prepare(name, given)()[0, head])[rows], p @ v)
        return "" if error < 2e-2 else f"result of head {head}, rows {rows.tolist()} is off by {error:.1e}"


def variant(title: str, contestant: Ours | Flex, name: str, sets: Sequence[Any]) -> Variant:
    """Something to measure, with as many sets of inputs as there are, in turn."""
    return Variant(title, lambda index: contestant.prepare(name, sets[index % len(sets)]))


class Bench:
    """A run: its options, what it has found so far, and where that goes."""

    def __init__(self, options: argparse.Namespace, timer: Timer) -> None:
        self.options, self.timer = options, timer
        self.home = home_of(options.device)
        self.base = options.base
        self.rows: list[Row] = []
        self.samples: dict[str, list[float]] = {}
        self.about = bench.environment_of(options.device, self.home)
        self.about["command"] = self.about["command"].replace("-m streamkl_cupy", "examples/benchmarks/masks.py", 1)
        self._began = time.perf_counter()

    def say(self, what: str) -> None:
        """A line of progress, there at once even in a pipe: if a case hangs, it is the one that was named last."""
        print(f"{time.perf_counter() - self._began:6.1f} s  {what}", flush=True)

    def compile(self, cases: Sequence[Case]) -> None:
        """All kernels into the cache, a process per core. What fails here fails again in its row, which tells."""
        found: dict[Any, catalogue.Entry] = {}
        for case in cases:
            for name in PASSES:
                try:
                    kernels = kernels_of(plan_of(case, name), name)
                except Exception as error:
                    self.say(f"{case}, {name} has no plan: {timings.brief(error)}")
                    continue
                for kernel in kernels:
                    text = kernel.entry, kernel.constants, kernel.slots, kernel.arch
                    found.setdefault(text, catalogue.Entry(f"{case} {kernel.name}", kernel))
        if not found:
            return
        with report.Progress(len(found), "kernel") as bar:
            for _ in catalogue.build(list(found.values()), store=True):
                bar.step()
        self.say(f"{len(found)} kernels compiled")

    def run(self, group: str, size: int, cases: Sequence[Case]) -> None:
        """Check and time the cases of a group, then write all that is known."""
        rows: list[Row] = []
        ready: list[tuple[Row, Variant]] = []
        try:
            sets: dict[tuple[int, ...], list[Any]] = {}
            for case in cases:
                self._check(case, group, size, sets, rows, ready)
            self._time(ready)
        except Exception as error:
            # What is beyond one variant, such as a GPU that answers no more.
            self.say(f"N={size} {group} ended early: {timings.brief(error)}")
            for row in rows:
                if row.status == "ok" and row.ms_median is None:
                    row.status, row.note = "failed", f"the group ended early: {timings.brief(error)}"
        compare(rows)
        self.rows += rows
        self.write()
        show(f"{group}, N={size}, H={cases[0].heads}, D={self.options.dim}, {cases[0].dtype}", rows)

    def _check(
        self,
        case: Case,
        group: str,
        size: int,
        sets: dict[tuple[int, ...], list[Any]],
        rows: list[Row],
        ready: list[tuple[Row, Variant]],
    ) -> None:
        """Rows of a case, and what of it can be timed because it is right. Cases of one shape share their inputs."""
        contestants = [(OURS, name) for name in PASSES]
        if not self.options.no_flex and case.batch == 1 and not case.lengths:
            contestants.append((FLEX, "forward"))
        made: dict[str, Ours | Flex] = {}
        for peer, name in contestants:
            row = Row(
                group,
                case.title,
                peer,
                name,
                case.base,
                case.batch,
                case.heads,
                case.rows,
                case.dim,
                case.dtype,
                size=size,
            )
            rows.append(row)
            if peer == FLEX and self.options.device == "cpu":
                row.status, row.note = "missing", "it is timed on GPUs"
                continue
            self.say(f"{case}: {peer} {name}")
            try:
                describe(row, case, self.options.block)
                given = sets[case.shape] = sets.get(case.shape) or self._inputs(case)
                if peer not in made:
                    made[peer] = Ours(case, placed(case, self.home)) if peer == OURS else Flex(case, self.options.block)
                contestant = made[peer]
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    wrong = contestant.verify(name, given[0])
            except Exception as error:
                row.failed(error)
                continue
            if wrong:
                row.status, row.note = "wrong", f"{wrong} against float64"
                continue
            ready.append((row, variant(f"{case}: {peer} {name}", contestant, name, given)))

    def _inputs(self, case: Case) -> list[tuple[Any, ...]]:
        """As many sets of inputs as overflow the cache."""
        size = 4 * math.prod(case.shape) * ITEMSIZE[case.dtype]
        count = min(MOST_SETS, math.ceil(self.timer.cold_bytes / size) + 1) if self.timer.cold_bytes else 1
        return [random_inputs(case, self.home) for _ in range(count)]

    def _time(self, ready: Sequence[tuple[Row, Variant]]) -> None:
        options = self.options
        with report.Progress(len(ready) * (options.rounds + 1), "turn") as bar:
            outcomes = measure(
                [variant for _, variant in ready],
                self.timer,
                sets=MOST_SETS,
                rounds=options.rounds,
                seconds=options.seconds,
                warmup=options.seconds / 2,
                before=lambda variant: bar.step(variant.title),
            )
        for (row, variant), outcome in zip(ready, outcomes):
            self.samples[f"{row.group}: {variant.title}"] = [round(x, 6) for x in outcome.samples]
            row.timed(outcome)
            if outcome.memory is not None:
                row.peak_bytes, row.driver_bytes = outcome.memory
        self.say(f"{len(ready)} timed")

    def write(self) -> None:
        """CSV and JSON of all rows so far."""
        timings.write(self.base, FIELDS, self.rows, self.about, self.samples)


def compare(rows: Sequence[Row]) -> None:
    """Times of a group beside those of its dense cases."""
    times = {(row.case, row.peer, row.pass_): row.ms_median for row in rows if row.status == "ok"}
    for row in rows:
        base = times.get((row.base, row.peer, row.pass_))
        if row.ms_median is None or not base or row.case == row.base or not row.tiles:
            continue
        row.of_dense = row.ms_median / base
        row.time_over_tiles = row.of_dense / row.tiles
        row.over_us = max(row.ms_median - LIMIT * row.tiles * base, 0.0) * 1e3
        padded = times.get(("padded, key_lengths", row.peer, row.pass_))
        if row.case.startswith("packed") and padded:
            row.note = f"{row.ms_median / padded:.2f} of padded"
        elif row.density is not None:
            row.note = f"density {row.density:.4f}"


COLUMNS = (
    "<case",
    "<pass",
    "ms",
    "of dense",
    "pairs",
    "tiles",
    "time/tiles",
    "tile",
    "extra MiB",
    "pattern MiB",
    "<",
)


def show(title: str, rows: Sequence[Row]) -> None:
    """Print the table of a group."""

    def number(value: float | None, form: str, scale: float = 1.0) -> str:
        return "" if value is None else format(value * scale, form)

    cells = [
        (
            "" if before and before.case == row.case else row.case,
            "flex" if row.peer == FLEX else row.pass_,
            number(row.ms_median, ".3f"),
            number(row.of_dense, ".3f"),
            number(row.pairs, ".4f"),
            number(row.tiles, ".4f"),
            number(row.time_over_tiles, ".2f"),
            row.tile,
            number(row.peak_bytes, ".1f", 2.0**-20),
            number(row.pattern_bytes, ".2f", 2.0**-20),
            row.note if row.status == "ok" else row.status,
        )
        for before, row in zip((None, *rows), rows)
    ]
    report.table(title, COLUMNS, cells)
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.status != "ok":
            reasons.setdefault(f"{row.peer} {row.status}: {row.note}", []).append(f"{row.case} {row.pass_}")
    for reason, places in reasons.items():
        print(f"{reason} ({'; '.join(places)})")
    sys.stdout.flush()


def summary(rows: Sequence[Row]) -> list[str]:
    """Where this package takes longer than the tiles it visits allow."""
    ours = [row for row in rows if row.peer == OURS and row.time_over_tiles is not None]
    slow = [row for row in ours if row.over_us]
    return [
        f"{len(ours) - len(slow)} of {len(ours)} masked times are within {LIMIT} x tiles x dense",
        *(
            f"  N={row.size} {row.case} {row.pass_}: time/tiles {row.time_over_tiles:.2f}, {row.over_us:.0f} us over"
            for row in slow
        ),
    ]


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="masks.py",
        description="Time masked attention KL beside the dense operation: windows, packed batches, sharded patterns.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="(%(default)s)")
    parser.add_argument("--sizes", nargs="+", type=positive, metavar="N", help="rows and keys (16384 65536; CPU 1024)")
    parser.add_argument("--heads", type=whole(1, MOST_HEADS), metavar="H", help="(8 up to 32k, 4 beyond; CPU 2)")
    parser.add_argument(
        "--dim",
        type=whole(1, MAX_DIM),
        default=128,
        metavar="D",
        help="head dim of both sides (%(default)s)",
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], help="(bfloat16; CPU float32)")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=GROUPS, help="cases (all)")
    parser.add_argument("--window", type=positive, metavar="W", help="keys on a side (1024; CPU 128)")
    parser.add_argument(
        "--block",
        type=whole(UNIT, MAX_BLOCK, step=UNIT),
        metavar="B",
        help="of patterns, in rows and keys (128; CPU 32)",
    )
    parser.add_argument("--no-flex", action="store_true", help="leave FlexAttention and its compilations out")
    parser.add_argument("--seed", type=whole(0, 2**31 - 1), default=0, help="of the packed lengths (%(default)s)")
    parser.add_argument("--seconds", type=seconds, help="of timing per variant (0.08; CPU 0.02)")
    parser.add_argument("--rounds", type=positive, default=6, help="turns of each variant (%(default)s)")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("streamkl-bench"), help="results (%(default)s)")
    parser.add_argument("--name", default="masks", help="base name of the result files (%(default)s)")
    return parser


def prepared(options: argparse.Namespace) -> Timer:
    """Defaults filled in and everything checked that a run needs; its timer.

    Raises:
        ValueError: an option that cannot be, or results that cannot be written.
        StreamKLError: nothing to run on.
        ImportError: torch is missing, or on the CPU the package of a type.
    """
    sizes, dtype, window, block, time_of_each = DEFAULTS[options.device]
    options.sizes = options.sizes or sizes
    options.dtype = options.dtype or dtype
    options.window = options.window or window
    options.block = options.block or block
    options.seconds = options.seconds or time_of_each
    if odd := [size for size in options.sizes if size % options.block or size < 64]:
        raise ValueError(f"--sizes {odd[0]}: give multiples of --block {options.block} from 64")
    if large := [size for size in options.sizes if size > MAX_ROWS]:
        raise ValueError(f"--sizes {large[0]}: kernels count rows up to {MAX_ROWS}")
    if options.device == "cpu":
        numpy_type(options.dtype)
        timer: Timer = HostTimer()
    else:
        if frameworks.current_gpu() is None:
            raise StreamKLError("no usable GPU: python -m streamkl_cupy doctor says why; --device cpu tries the script")
        if reason := torch_missing():
            raise ImportError(f"{reason}; inputs and FlexAttention are torch's: {install.command('torch')}")
        timer = DeviceTimer()
    options.base = results(options.out, options.name)
    return timer


def run(options: argparse.Namespace) -> int:
    """Do it; the exit code."""
    timer = prepared(options)
    it = Bench(options, timer)
    print(f"{it.about['card']}, driver {it.about.get('driver', '-')}")
    plans = []
    for size in options.sizes:
        heads = options.heads or (2 if options.device == "cpu" else 8 if size <= 32768 else 4)
        plans += [(group, size, cases_of(group, size, heads, options)) for group in options.groups]
    it.compile([case for _, _, cases in plans for case in cases])
    for group, size, cases in plans:
        it.run(group, size, cases)
        timer.release()
    if options.device == "cuda":
        it.about["clocks under load"] = under_load()
        it.write()
    ours = [row for row in it.rows if row.peer == OURS]
    print("\n".join([*summary(it.rows), f"wrote {it.base}.csv, {it.base}.json"]))
    return 1 if any(row.status != "ok" for row in ours) else 0


def under_load() -> dict[str, str]:
    """Clocks, power and temperature of the GPU at work."""
    torch = importlib.import_module("torch")
    x = torch.randn(8192, 8192, device="cuda").bfloat16()
    return environment.clocks(lambda: x @ x)


def main() -> int:
    """Read the command line and run; errors are one line."""
    options = arguments().parse_args()
    return exit_code("masks.py", lambda: run(options))


if __name__ == "__main__":
    sys.exit(main())

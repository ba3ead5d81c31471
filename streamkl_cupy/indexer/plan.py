"""How a call of the indexer runs on a GPU: how it is cut, by which kernels, in how much memory.

Pure: for any GPU, here or not. Shapes and the GPU alone decide, so equal calls have equal bits.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, Literal, NamedTuple

from ..arrays import ITEMSIZE, ArrayView
from ..kernels import (
    choose,
    chosen,
    indexer_bits,
    indexer_gated_join,
    indexer_gated_key_sm90,
    indexer_gated_query_sm90,
    indexer_gathered_sm90,
    indexer_join,
    indexer_pack,
    indexer_rows,
    indexer_scan,
    indexer_sum,
    indexer_tiles,
    indexer_units,
)
from ..kernels.base import KernelText
from ..kernels.gpus import GPUS, DeviceFacts
from ..kernels.indexer import GRID, OPERANDS, Ending, Grid, IndexerShape, IndexerWork, RowCut, StripCut
from ..kernels.structs import INDEXER_LINE, INDEXER_ROW_REGIONS, Regions, indexer_gradients, indexer_strip
from ..kernels.tensor_maps import no_map
from ..ops import INDEXER_KL
from ..ops.indexer_kl import WRT
from ..problem import counted
from .problem import IndexProblem
from .strips import Strip, cut_strips

STRIP_BYTES = 32 << 20
"""Of gradients of logits at a time: they are read once for every head, and should stay in the L2 cache."""
GATED_BYTES = 190_000_000
"""Of a backward's workspace where gates are kept: its strips take what the rest leaves of it."""
LEAST_GATED_BYTES = 64 << 20
"""Of these strips, whatever the rest takes."""
BLOCKS_PER_MULTIPROCESSOR = 6
"""Into so many the work is cut, for the last ones to end together."""
LIST_BYTES = 64 << 20
"""Of gradients in the order of lists, and of the bits that lists are made of, at a time."""
BITS_BYTES = 32 << 20
"""Of the bits of chosen keys at a time, in a forward; a backward has those of a strip."""
MOST_SPLITS = 64
ROW_REGIONS = ("lse2", "weights", "row_keys", "tile_keys", "bases", "bits")
"""What every request has in its workspace of rows."""
SPARE_LINES = 4
"""Of a workspace, which begins anywhere and its regions on a line."""

Way = Literal["lists", "gates", "strips"]
"""How a backward goes: by lists of the keys that ids name; strip by strip with the gates that scores have kept; or with
gates computed again."""


class Cut(NamedTuple):
    """How the work of a call is cut."""

    grid_tiles: int
    strip_tiles: int
    """Of rows that a strip has."""
    splits: int
    """Blocks over which the keys of a row tile go, in a forward; and in a strip."""
    lse_splits: int
    strip_splits: int
    shares: int
    """Blocks over which the rows of a key tile go."""


def shape_of(problem: IndexProblem) -> IndexerShape:
    """What kernels are compiled for."""
    views = problem.views
    index = views.get("index_q")
    teacher = views.get("teacher_q", index)
    assert teacher is not None
    weights = views.get("index_weights")
    sizes = dict(problem.sizes)
    return IndexerShape(
        teacher=teacher.dtype,
        student=teacher.dtype if index is None else index.dtype,
        weights="float32" if weights is None else weights.dtype,
        teacher_dim=sizes.get("T", 16),
        rope_dim=sizes.get("R", 0),
        index_dim=sizes.get("D", 16),
        gated=problem.relu,
        bits="key_mask" in views or "topk_indices" in views,
        target="target" in views,
        vectors=frozenset(key for key, name in OPERANDS.items() if name not in views or _by_vectors(views[name])),
        maps=frozenset(key for key, name in OPERANDS.items() if name in views and _has_map(problem, views[name])),
    )


def _by_vectors(view: ArrayView) -> bool:
    """Whether rows can be read 16 bytes at a time."""
    per_chunk = 16 // ITEMSIZE[view.dtype]
    return view.ptr % 16 == 0 and view.strides[-1] == 1 and all(x % per_chunk == 0 for x in view.strides[:-1])


def _has_map(problem: IndexProblem, view: ArrayView) -> bool:
    """Whether a tensor map can describe it."""
    return 0 not in view.shape and view.dtype != "float32" and not no_map(problem.operand(view.name))


def why_no_gates(shape: IndexerShape, facts: DeviceFacts) -> str:
    """Why no kernels multiply gates that scores have left; empty where some do."""
    work = IndexerWork(shape._replace(tiled=True))
    for task in INDEXER_KL.gradients:
        found, refusals = choose(task.kind, work, facts)
        if found is None or not found[0].keeps_gates:
            return next(iter(refusals.values()), "no kernel does that")
    return ""


def cut(problem: IndexProblem, facts: DeviceFacts) -> Cut:
    """How the work is cut, by shapes and the GPU."""
    entries, wanted = problem["B"] * problem.groups, BLOCKS_PER_MULTIPROCESSOR * facts.multiprocessors
    grid, keys = -(-problem["M"] // GRID), -(-problem["N"] // GRID)
    # float32 strips have half as many rows.
    strip = max(STRIP_BYTES // max(entries * GRID * keys * GRID * 2, 1), 1)
    strip = min(-(-grid // -(-grid // strip)), grid) if grid else 0

    def splits(rows: int, entries: int = entries) -> int:
        return max(min(-(-wanted // max(rows * entries, 1)), keys, MOST_SPLITS), 1)

    blocks = keys * problem["B"] * dict(problem.sizes).get("J", 1)
    shares = max(min(-(-wanted // max(blocks, 1)), strip, 16), 1)
    lse_splits = splits(grid, problem["B"] * dict(problem.sizes).get("H", 1))
    return Cut(grid, strip, splits(grid), lse_splits, splits(strip), shares)


class Chosen(NamedTuple):
    """A kernel that does a task, by its work."""

    kernel: Any
    """One of `KERNELS`."""
    work: IndexerWork
    text: KernelText
    refusals: dict[Any, str]
    """Why more capable ones do not."""


@dataclass(frozen=True)
class IndexerPlan:
    """A call on a GPU; `print` it."""

    problem: IndexProblem
    shape: IndexerShape
    facts: DeviceFacts
    cut: Cut
    bit_groups: int
    """Groups with bits of their own."""
    wrt: tuple[str, ...]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Extents by letter, also of what is not there."""
        return {"J": 1, "I": self.problem.groups, "H": 0, "K": 1, "L": 1, "D": 16, **dict(self.problem.sizes)}

    @property
    def makes_lse(self) -> bool:
        """Whether a forward makes the teacher's log-sum-exps."""
        return self.problem.makes_lse

    @property
    def several_keys(self) -> bool:
        """Whether the teacher's heads of a group read more than one key head."""
        heads, keys = self.sizes["H"], self.sizes["K"]
        return heads > 0 and (heads // keys) % (heads // self.problem.groups) != 0

    def work(self, shape: IndexerShape, ending: Ending = "rows") -> IndexerWork:
        """What is asked of a kernel of scores or of gradients."""
        n, groups = self.sizes, self.problem.groups
        heads, teacher_heads, chosen = n["I"] // groups, n["H"] // groups, n.get("C", 0)
        return IndexerWork(shape, ending, self.several_keys, n["N"], heads, teacher_heads, chosen)

    def chosen(self, kind: str, work: IndexerWork) -> Chosen:
        """The kernel that does a task."""
        kernel, tile, refusals = chosen(kind, work, self.facts)
        return Chosen(kernel, work, kernel.plan(work, tile, self.facts), refusals)

    @cached_property
    def _scores(self) -> dict[Ending, Chosen]:
        return {}

    def score(self, ending: Ending) -> Chosen:
        """The kernel of score tiles."""
        found = self._scores.get(ending)
        if found is None:
            work = self.work(self.strip_shape if ending == "strip" else self.shape, ending)
            found = self._scores[ending] = self.chosen("indexer_score", work)
        return found

    def score_grid(self, ending: Ending, tiles: int, splits: int) -> Grid:
        """Blocks of a launch over so many row tiles."""
        kernel, work, *_ = self.score(ending)
        entries = self.problem["B"] * (self.sizes["H"] if ending == "lse" else self.problem.groups)
        grid: Grid = kernel.grid(work, tiles, splits, entries, self.facts)
        return grid

    @cached_property
    def row_cut(self) -> RowCut:
        """The states that a forward joins of each row."""
        kernel, work, *_ = self.score("rows")
        cut: RowCut = kernel.row_cut(work, self.cut.splits)
        return cut

    @cached_property
    def lse_cut(self) -> RowCut:
        """The same of the teacher's log-sum-exps."""
        kernel, work, *_ = self.score("lse")
        cut: RowCut = kernel.row_cut(work, self.cut.lse_splits)
        return cut

    @cached_property
    def no_gates(self) -> str:
        """Why a backward does not keep gates; empty where it does."""
        if 0 in (self.problem["B"], self.problem["M"], self.problem["N"]):
            return "there is nothing to keep"
        return why_no_gates(self.shape, self.facts)

    @cached_property
    def no_lists(self) -> str:
        """Why a backward does not go by lists of keys; empty where it does."""
        if self.problem.deterministic:
            return "what rows add to a key they add in no fixed order, and deterministic is True"
        found, refusals = choose("indexer_listed", self.work(self.shape), self.facts)
        return "" if found else next(iter(refusals.values()), "no kernel does that")

    @cached_property
    def way(self) -> Way:
        """How a backward goes."""
        if not self.no_lists:
            return "lists"
        return "strips" if self.no_gates else "gates"

    @cached_property
    def listed(self) -> Chosen:
        """The kernel of all gradients, where these go by lists."""
        return self.chosen("indexer_listed", self.work(self.shape))

    @cached_property
    def list_tiles(self) -> int:
        """Row tiles that it has lists of at a time."""
        each = 4 * GRID * self.problem["B"] * (self.bit_groups * self.words + self.problem.groups * self.list_keys)
        return min(max(LIST_BYTES // max(each, 1), 1), self.cut.grid_tiles)

    @cached_property
    def list_keys(self) -> int:
        """Of a row, at most, in whole tiles."""
        return indexer_gathered_sm90.most_keys(self.work(self.shape))

    @cached_property
    def strip_shape(self) -> IndexerShape:
        """What the kernels of a backward are compiled for."""
        return self.shape._replace(tiled=self.way == "gates")

    @cached_property
    def query(self) -> Chosen:
        """The kernel of the gradients to queries and weights."""
        return self.chosen("indexer_query", self.work(self.strip_shape))

    @cached_property
    def block_heads(self) -> int:
        """Heads of a group that a block of that kernel has, where gates are kept."""
        return indexer_gated_query_sm90.heads_of(self.sizes["I"] // self.problem.groups)

    @cached_property
    def head_blocks(self) -> int:
        """Blocks over which they go."""
        return -(-(self.sizes["I"] // self.problem.groups) // self.block_heads)

    @cached_property
    def key(self) -> Chosen:
        """The kernel of the gradient to keys."""
        return self.chosen("indexer_key", self.work(self.strip_shape))

    def strip_cut(self, strip: Strip) -> StripCut:
        """What the kernels of gradients have of a strip."""
        n = self.sizes
        return StripCut(strip.tiles, n["B"] * n["I"], strip.keys // GRID, n["B"] * n["J"], self.shares)

    @cached_property
    def strips(self) -> tuple[Strip, ...]:
        """Of a backward: where gates are kept, of as many rows as memory allows."""
        p, c = self.problem, self.cut
        if self.way != "gates":
            keys, step = -(-p["N"] // GRID) * GRID, max(c.strip_tiles, 1)
            firsts = range(0, c.grid_tiles, step)
            return tuple(Strip(i, min(step, c.grid_tiles - i), keys, 0, c.strip_splits) for i in firsts)
        rest = total(self.gated_sizes(WRT, self.counts(0), 0))
        room, heads = max(GATED_BYTES - rest, LEAST_GATED_BYTES), (self.sizes["H"] + self.sizes["I"]) // p.groups

        bits = INDEXER_ROW_REGIONS.only(("bits",))

        def asked(tiles: int, pairs: int) -> int:
            return self.strip_bytes(tiles, pairs) + bits.bytes(self.counts(tiles))

        # Straight lines, asked for often.
        least, tile, pair = asked(0, 0), asked(1, 0), asked(0, GRID**2)

        def size(tiles: int, pairs: int) -> int:
            return least + tiles * (tile - least) + pairs // GRID**2 * (pair - least)

        found = cut_strips(p, self.facts.multiprocessors, heads, size, room)
        wanted = BLOCKS_PER_MULTIPROCESSOR * self.facts.multiprocessors

        def splits(tiles: int) -> int:
            return min(-(-wanted // (tiles * p["B"] * p.groups)), -(-p["N"] // GRID), MOST_SPLITS)

        return tuple(Strip(*strip, splits(strip[1])) for strip in found)

    @cached_property
    def shares(self) -> int:
        """Blocks over which the work of a gradient goes; without gates, the rows of a key tile."""
        return {"lists": 1, "gates": self.facts.multiprocessors, "strips": self.cut.shares}[self.way]

    @cached_property
    def rows(self) -> KernelText:
        """What finds out which keys rows see."""
        return indexer_rows.plan(self.facts)

    @cached_property
    def bits(self) -> KernelText:
        """What makes bits of those, where rows see keys by bits."""
        return indexer_bits.plan(self.facts)

    @cached_property
    def pack(self) -> KernelText:
        """What packs what is read of rows."""
        return indexer_pack.plan(self.shape, self.facts)

    @property
    def before(self) -> tuple[KernelText, ...]:
        """What every request runs first."""
        return (self.rows, *((self.bits,) if self.shape.bits else ()), self.pack)

    @cached_property
    def join(self) -> KernelText:
        """What joins the states of rows."""
        return indexer_join.plan(self.row_cut, self.facts)

    @cached_property
    def lse_join(self) -> KernelText:
        """The same of the teacher's log-sum-exps."""
        return indexer_join.plan(self.lse_cut, self.facts, lse=True)

    @cached_property
    def forward(self) -> tuple[KernelText, ...]:
        """All kernels of a forward, or of a target."""
        join = (self.lse_join,) if self.makes_lse and self.lse_cut.states > 1 else ()
        lse = (self.score("lse").text, *join) if self.makes_lse else ()
        if self.problem.operation.rows == ("target",):
            return (*self.before, *lse, self.score("target").text)
        return (*self.before, *lse, self.score("rows").text, self.join)

    @cached_property
    def backward(self) -> tuple[KernelText, ...]:
        """All kernels of the gradients `wrt`."""
        if not self.wrt:
            return ()
        if self.way == "lists":
            sums = (self.key_sum,) if "index_k" in self.wrt else ()
            return (*self.before, self.score("list").text, self.listed.text, *sums)
        query = [self.query.text] if self.by_query(self.wrt) else []
        key = [self.key.text, self.key_sum] if "index_k" in self.wrt else []
        if self.way == "strips":
            before = [self.scan]
        else:
            before = [self.units, *([self.key_tiling] if query else []), *([self.query_tiling] if key else [])]
        return (*self.before, *before, self.score("strip").text, *query, *key)

    @cached_property
    def scan(self) -> KernelText:
        """What looks whether operands are finite, where gates are not kept."""
        return indexer_scan.plan(self.shape, self.facts)

    @cached_property
    def units(self) -> KernelText:
        """What numbers the work of a strip."""
        return indexer_units.plan(self.facts)

    @cached_property
    def key_tiling(self) -> KernelText:
        """What makes tiles of keys."""
        return indexer_tiles.plan(self.strip_shape, False, self.facts)

    @cached_property
    def query_tiling(self) -> KernelText:
        """What makes tiles of queries times their weights."""
        return indexer_tiles.plan(self.strip_shape, True, self.facts)

    @cached_property
    def key_sum(self) -> KernelText:
        """What adds up the sums of blocks that share keys."""
        if self.way != "gates":
            return indexer_sum.plan(self.shape, self.facts)
        return indexer_gated_join.plan(self.strip_shape, self.shares, self.facts)

    @staticmethod
    def by_query(wrt: Collection[str]) -> bool:
        """Whether any of these comes of the kernel where queries are stationary."""
        return "index_q" in wrt or "index_weights" in wrt

    @property
    def streams(self) -> str:
        """Whether queries are streamed past keys, in words, and why not."""
        found = self.score("rows")
        if found.kernel.streams:
            return "streamed"
        if found.kernel.gathers:
            return "not streamed: their keys are gathered"
        reason = next((why for kernel, why in found.refusals.items() if kernel.streams), "no kernel does that")
        return f"not streamed: {reason}"

    @property
    def words(self) -> int:
        """Of the bits of a row."""
        return -(-self.problem["N"] // 32)

    @cached_property
    def bit_tiles(self) -> int:
        """Row tiles whose bits a forward has at a time."""
        if "topk_indices" not in self.problem.given:
            return self.cut.grid_tiles
        each = 4 * self.problem["B"] * self.bit_groups * GRID * self.words
        return min(max(BITS_BYTES // max(each, 1), 1), self.cut.grid_tiles)

    def counts(self, tiles: int) -> dict[str, int]:
        """Of what regions of a workspace have entries, with bits and gradients of so many row tiles at a time."""
        n, block = self.sizes, indexer_gated_key_sm90.KEY_BLOCK
        lse = self.lse_cut.states * n["H"] if self.makes_lse and self.lse_cut.states > 1 else 0
        key_tiles = -(-n["N"] // GRID)
        return {
            **n,
            "G": self.problem.groups,
            "row_tiles": self.cut.grid_tiles,
            "bit_rows": self.bit_groups * tiles * GRID if "topk_indices" in self.problem.given else 1,
            "words": self.words if self.shape.bits else 0,
            "row_states": max(self.row_cut.states * self.problem.groups, lse),
            "strip_tiles": tiles * key_tiles,
            "key_tiles": key_tiles,
            "key_shares": self.shares if self.way == "strips" else 1,
            "listed_rows": tiles * GRID,
            "listed_keys": self.list_keys,
            "shares": self.shares,
            # What blocks leave for others, of one gradient after the other.
            "share_rows": max(GRID * self.block_heads, block),
            "row_tile_ends": n["B"] * tiles + 1,
            "key_block_ends": n["B"] * n["J"] * -(-n["N"] // block) + 1,
        }

    def forward_sizes(self) -> dict[str, int]:
        """Bytes of the regions of a forward's workspace, or of a target's."""
        made = self.makes_lse and "made_lse" not in self.problem.operation.ruled_rows
        names = (*ROW_REGIONS, "states", *(("made_lse",) if made else ()))
        return INDEXER_ROW_REGIONS.only(names).sizes(self.counts(self.bit_tiles))

    def backward_sizes(self) -> dict[str, int]:
        """Bytes of the regions of a backward's workspace; where gates are kept, `strips` has what strips have one after
        the other."""
        if self.way == "lists":
            counts, names = self.counts(self.list_tiles), ("listed", *(("key_sums",) if "index_k" in self.wrt else ()))
            regions = self.gradient_regions.only(names).sizes(counts)
            return {**INDEXER_ROW_REGIONS.only((*ROW_REGIONS, "row_stats")).sizes(counts), **regions}
        counts = self.counts(max((strip.tiles for strip in self.strips), default=0))
        if self.way == "gates":
            strips = max((self.strip_bytes(strip.tiles, strip.pairs) for strip in self.strips), default=0)
            return self.gated_sizes(self.wrt, counts, strips)
        names = ("broken", *(("key_sums",) if "index_k" in self.wrt else ()))
        return {
            **INDEXER_ROW_REGIONS.only((*ROW_REGIONS, "row_stats")).sizes(counts),
            **self.strip_regions.only(("strip",)).sizes(counts),
            **self.gradient_regions.only(names).sizes(counts),
        }

    def gated_sizes(self, wrt: Collection[str], counts: dict[str, int], strips: int) -> dict[str, int]:
        """The same where gates are kept, for any gradients."""
        names = ["strip_widths", "partials"]
        names += ["key_tiles", "items", "kept_flags"] if self.by_query(wrt) else []
        names += ["key_sums", "units"] if "index_k" in wrt else []
        return {
            **INDEXER_ROW_REGIONS.only((*ROW_REGIONS, "row_stats")).sizes(counts),
            "strips": strips,
            **self.gradient_regions.only(names).sizes(counts),
        }

    @cached_property
    def strip_regions(self) -> Regions:
        """What score kernels leave for gradients."""
        return indexer_strip(self.sizes["D"], ITEMSIZE[self.shape.student])

    @cached_property
    def gradient_regions(self) -> Regions:
        """What gradients work in besides."""
        return indexer_gradients(self.sizes["D"])

    def strip_sizes(self, tiles: int, pairs: int) -> dict[str, int]:
        """Bytes of what there is of a strip of so many row tiles and pairs, where gates are kept."""
        names = ("strip", *(("gates",) if self.shape.gated else ()), "weighted_queries")
        counts = {**self.sizes, "G": self.problem.groups, "strip_tiles": pairs // GRID**2, "strip_row_tiles": tiles}
        return self.strip_regions.only(names).sizes(counts)

    def strip_bytes(self, tiles: int, pairs: int) -> int:
        """Of all of that."""
        return sum(self.strip_sizes(tiles, pairs).values())

    @property
    def workspace_bytes(self) -> int:
        """Of a forward."""
        return total(self.forward_sizes())

    @property
    def backward_bytes(self) -> int:
        """Of a workspace of the gradients `wrt`."""
        return total(self.backward_sizes()) if self.wrt else 0

    @property
    def _in_parts(self) -> str:
        """How the work of a backward is cut, in words."""
        if self.way == "lists":
            return f"lists of {self.list_keys} keys"
        least, most = (f([strip.tiles * GRID for strip in self.strips], default=0) for f in (min, max))
        rows = f"{least} to {most} rows" if least < most else counted(most, "row")
        return f"{counted(len(self.strips), 'strip')} of {rows}, shares for {counted(self.shares, 'block')}"

    def __str__(self) -> str:
        p, n, streams = self.problem, self.sizes, self.streams
        teacher = f"H={n['H']} of {self.shape.teacher}" if n["H"] else "target given"
        lines = [
            f"indexer KL on {self.facts.name or p.device}: B={p['B']} M={p['M']} N={p['N']}, teacher {teacher}, "
            f"indexer HI={n['I']} of {self.shape.student}, {counted(p.groups, 'group')}",
            f"  forward, {self.workspace_bytes / 2**20:.1f} MiB of workspace, "
            f"{counted(self.row_cut.states, 'state')} to a row",
            f"    queries are {streams}",
            *(f"    {kernel}" for kernel in self.forward),
        ]
        if self.wrt:
            way = {
                "lists": "keys of lists are gathered, as scores left gradients",
                "gates": "gates are kept",
                "strips": f"gates are not kept: {self.no_gates}",
            }[self.way]
            memory = f"{self.backward_bytes / 2**20:.1f} MiB of workspace"
            lines += [
                f"  backward to {', '.join(self.wrt)}, {memory}, {self._in_parts}",
                f"    {way}",
                *(f"    {kernel}" for kernel in self.backward),
            ]
        return "\n".join(lines)


class Place(NamedTuple):
    """Of a region of a workspace."""

    at: int
    bytes: int


def start_of(workspace: int) -> int:
    """Where in a workspace at an address the first region lies."""
    return -(-workspace // INDEXER_LINE) * INDEXER_LINE


def places(sizes: dict[str, int], start: int) -> dict[str, Place]:
    """Where regions lie from the first one on, one after the other."""
    starts = accumulate(sizes.values(), initial=start_of(start))
    return {name: Place(at, size) for (name, size), at in zip(sizes.items(), starts)}


def total(sizes: dict[str, int]) -> int:
    """Bytes of a workspace with these regions."""
    return sum(sizes.values()) + SPARE_LINES * INDEXER_LINE


@lru_cache(maxsize=256)
def make_plan(problem: IndexProblem, facts: DeviceFacts, wrt: tuple[str, ...] = ()) -> IndexerPlan:
    """How a call runs on a GPU.

    Raises:
        NotImplementedError: a GPU that no kernel is for.
    """
    major, minor = facts.compute_capability
    if (major, minor) < (8, 0):
        raise NotImplementedError(
            f"GPU {facts.name or '?'} has compute capability {major}.{minor}; kernels are built for 8.0 (Ampere) and "
            f"newer; use arrays on the CPU"
        )
    _check_gradients(problem, facts, wrt)
    return IndexerPlan(problem, shape_of(problem), facts, cut(problem, facts), _bit_groups(problem), wrt)


def gradients_built(problem: IndexProblem, wrt: tuple[str, ...]) -> None:
    """Refuse gradients that no kernel computes on any GPU."""
    if problem.device.kind == "cuda":
        _check_gradients(problem, GPUS["sm_90"], wrt)


def _check_gradients(problem: IndexProblem, facts: DeviceFacts, wrt: tuple[str, ...]) -> None:
    if not wrt or problem.views["index_q"].dtype != "float16":
        return
    if reason := why_no_gates(shape_of(problem), facts):
        raise NotImplementedError(
            "gradients of an indexer in float16 on a GPU are built where the gates of its scores can be kept, and here "
            f"they cannot: {reason}. Cast index_q and index_k to bfloat16 or float32"
        )


def _bit_groups(problem: IndexProblem) -> int:
    ids, lengths = problem.views.get("topk_indices"), problem.views.get("topk_length")
    if ids is None:
        return 1
    grouped = "G" in problem.axes_of("BGMC", ids)
    grouped = grouped or (lengths is not None and "G" in problem.axes_of("BGM", lengths))
    return problem.groups if grouped else 1

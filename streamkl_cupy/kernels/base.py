"""What all kernels have in common: the work that is asked of one, the ways to cut it, and the plan of a launch.

A kernel is a pair of files with one name: `cuda_src/kernels/` has its text, the file here what it refuses and why, its
tiles in order of preference, their shared memory and registers, its arguments and what it leaves in workspaces.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import PurePosixPath
from typing import ClassVar, Generic, NamedTuple, TypeVar

from ..compiler.source import flatten
from ..ops import Task
from ..problem import Operand, Problem, Side, counted
from ..rules import divergences
from ..rules.masks import parts_of, registers
from ..rules.scores import score_of
from .gpus import DeviceFacts
from .shares import LEAST_STEPS, number, shapes_of, steps_of, turn
from .structs import ARGS, Args, AttentionArgs, Regions, Struct, partials, row_tiles
from .work_tiles import Schedule, balance, cut, survey

# Of most divergences: two references, two sums, and one more.
SHORT_STATE = 5

# Elements as common/config.cuh names them.
ELEMENT_CODES = {"bfloat16": "kBf16", "float16": "kF16", "float32": "kF32"}
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
PLANES = {"highest": 3, "high": 2}

MAX_GRID = 2**31 - 1
# Streamed tiles of a row tile that make it count as one more: so many that its sums cost nothing, and so many that more
# blocks are worth them.
STEPS_WORTH_SHARING = (128, 16)


@dataclass(frozen=True)
class Work:
    """A task of a problem."""

    problem: Problem
    task: Task
    packed_rows: int = 0
    """Rows that each query head has in tiles which several share, those that read the same keys of both sides; 0: every
    tile belongs to one head."""

    @property
    def rows_are_keys(self) -> bool:
        """Whether the stationary operand is the keys and the queries are streamed."""
        return self.task.stationary == "k"

    @property
    def side(self) -> Side:
        """The side that is differentiated."""
        return self.problem.side(self.task.side) if self.task.side else self.problem.distributions[-1]

    @property
    def other_side(self) -> Side:
        """The side whose scores are only recomputed."""
        return next(side for name, side in self.problem.sides.items() if name != self.task.side)

    @property
    def sharing_heads(self) -> int:
        """Query heads, one after the other, that read the same keys of both sides."""
        return math.gcd(*(max(side.group, 1) for side in self.sides))

    @property
    def heads_together(self) -> int:
        """Query heads whose rows lie in the same tiles."""
        return self.sharing_heads if self.packed_rows else 1

    @property
    def heads(self) -> int:
        """Those of the launch; of query heads that are packed, so many of them together count as one."""
        return self.side.k.heads if self.rows_are_keys else self.problem.heads // self.heads_together

    @property
    def pairs(self) -> int:
        """Heads of all batch entries."""
        return self.problem.batch * self.heads

    @property
    def rows(self) -> int:
        if self.rows_are_keys:
            return self.problem.keys
        return self.heads_together * self.packed_rows or self.problem.queries

    @property
    def typical_rows(self) -> int:
        """Rows of a sequence, where several lie one after the other and are taken to be equally long."""
        return -(-self.rows // max(self.problem.sequences, 1))

    @property
    def group(self) -> int:
        """Query heads whose gradients a block sums."""
        return max(self.problem.heads // max(self.heads, 1), 1)

    def streamed_heads(self, columns: int) -> int:
        """The same, or packs of those in tiles of so many streamed rows."""
        if not self.packed_rows:
            return self.group
        return self.group // self.sharing_heads * -(-self.sharing_heads * self.packed_rows // columns)

    @property
    def streamed_bytes(self) -> int:
        """Of the rows of a query head that are streamed."""
        rows = self.problem.queries if self.rows_are_keys else self.problem.keys
        return rows * sum(side.dim * ELEMENT_BYTES[side.dtype] for side in self.sides)

    @property
    def sums_bytes(self) -> int:
        """Of what a query head's queries have as sums while all keys add to their gradient."""
        return 4 * self.problem.queries * self.out_dim

    @property
    def streamed_rows(self) -> int:
        """Rows that are streamed past the stationary ones of a sequence, of all heads of a block."""
        rows = self.problem.queries if self.rows_are_keys else self.problem.keys
        return self.group * -(-rows // max(self.problem.sequences, 1))

    @property
    def out_dim(self) -> int:
        """Columns of the widest result that a row has: of gradients, or of a forward."""
        if self.task.side:
            return max(self.problem.operand(name).dim for name in self.task.results)
        return max((self.problem.columns(letter) for _, letter in self.problem.operation.vectors), default=2)

    @property
    def row_vectors(self) -> int:
        """Statistics that travel with each streamed query: two log-sum-exps, the upstream gradient, the value."""
        if not self.rows_are_keys:
            return 0
        divergence = divergences.of(self.problem)
        return 3 + (self.task.side in divergence.needs_value or divergence.moments > 0)

    @property
    def state_floats(self) -> int:
        """Size of a row's partial state in memory, where several blocks share a row's keys."""
        return divergences.of(self.problem).state_floats + self.problem.entropy

    @property
    def long_state(self) -> bool:
        """Whether a pass keeps more of a row than most divergences do."""
        return self.state_floats > SHORT_STATE or bool(divergences.of(self.problem).later_floats)

    @property
    def turned(self) -> bool:
        """Whether logits are more than scaled products: dots become them in place first, which takes registers. A side
        that is given has those that its product would take."""
        return not all(score_of(side).linear for side in self.sides if not side.given)

    @property
    def mask_level(self) -> int:
        """How many registers a mask takes: 0 a bound, 1 an interval or segments, 2 pairs apart, 3 all of that."""
        return registers(parts_of(self.problem.mask), self.rows_are_keys)

    @property
    def level(self) -> int:
        """The same of a mask and of dots that are turned, which take as many as any mask; addresses of a side that is
        given take as many as an interval, and beside one all there are."""
        beside = (1, 3, 3, 3) if self.given else (0, 1, 2, 3)
        # Which of the stationary rows are there is no matter of the loop, and yet the least of tables spills beside it.
        picked = not self.rows_are_keys and any(part.picks_queries for part in parts_of(self.problem.mask))
        return 3 if self.turned else max(beside[self.mask_level], int(picked))

    @property
    def given(self) -> bool:
        """Whether a side is."""
        return any(side.given for side in self.sides)

    @property
    def sides(self) -> tuple[Side, ...]:
        return self.problem.distributions

    @property
    def float32(self) -> bool:
        """Whether a product is one of float32 operands."""
        return "float32" in [side.dtype for side in self.sides if not side.given]

    @property
    def dim(self) -> int:
        return max(side.dim for side in self.sides)


@dataclass(frozen=True)
class TileRow:
    """One way to cut a kernel's work: a row of its table, with the reason it is there.

    `rows` of the stationary operand belong to a block of `warps` computing warps, each with `warp_tiles` strips of 16;
    `columns` rows of the other operand are streamed at a time, `stages` buffers in flight, and the kernel is compiled
    to leave room for `min_blocks` blocks per multiprocessor. `unroll` steps of 16 along the head dim are unrolled. The
    row applies to head dims up to `max_dim` on both sides and `max_out` on the differentiated one, to masks up to
    `max_mask` of `Work.level`, where dots are turned beside masks up to `max_turned`, where a side is given beside
    those up to `max_given`, to at most `max_vectors` row vectors, on GPUs as new as `since` and older than `before`.
    """

    warps: int
    warp_tiles: int
    columns: int
    stages: int
    min_blocks: int
    max_dim: int
    reason: str
    unroll: int = 4
    max_out: int = 256
    since: tuple[int, int] = (0, 0)
    before: tuple[int, int] = (99, 0)
    max_mask: int = 3
    max_vectors: int = 4
    max_turned: int = 3
    max_given: int = 3
    shareable: bool = True
    """Whether there are registers for several blocks having one row tile."""
    shared: bool = False
    """Compiled so that several blocks can have one row tile."""
    shared_columns: int = 0
    """Columns then, if sharing needs registers that wider tiles take."""
    pairs: bool = False
    """Beside a pattern a block's rows are two units of keys whose lists are alike, wherever they lie."""

    @property
    def totals(self) -> bool:
        """Whether blocks that share a row tile add to one sum of it, in any order."""
        return False

    @property
    def rows(self) -> int:
        return self.warps * self.warp_tiles * 16


class Box(NamedTuple):
    """What one copy of a tensor map brings of an input, 64 columns wide."""

    name: str
    rows: int
    heads: int = 1


@dataclass(frozen=True, kw_only=True)
class KernelText:
    """What to compile of a kernel, and what every launch of it knows."""

    entry: str
    symbol: str
    arch: str
    constants: tuple[tuple[str, int | float | str], ...]
    slots: tuple[tuple[str, str | tuple[str, ...]], ...] = ()
    args: Struct
    regions: tuple[Regions, ...] = ()
    """What lies in workspaces that it reads or writes."""
    threads: int
    smem_bytes: int = 0
    boxes: tuple[Box, ...] = ()
    """Inputs read through tensor maps."""

    @property
    def name(self) -> str:
        """Its file, as "forward_sm90"."""
        return PurePosixPath(self.entry).stem

    @property
    def text(self) -> str:
        """The CUDA text, read and put together once: other offsets, lengths and scales run the same one."""
        return _text(self.entry, self.constants, self.slots, self.args, self.regions)

    def __str__(self) -> str:
        return f"{self.name}: {self.threads} threads, {self.smem_bytes} B of shared memory"


@dataclass(frozen=True, kw_only=True)
class KernelPlan(KernelText):
    """One kernel with its launch."""

    task: Task
    blocks: int
    schedule: Schedule
    tile: TileRow | None = None
    family: str = ""
    """The architecture whose instructions it needs."""
    reason: str = ""
    """Why kernels of more capable families do not run it; empty where the first one does."""
    most_blocks: int = 0
    """Where a block takes one work tile after the other, as many as run at a time; 0: each has its own."""

    @property
    def name(self) -> str:
        """What it makes."""
        return self.task.name

    def __str__(self) -> str:
        t, s = self.tile, self.schedule
        shape = [f"{counted(self.blocks, 'block')} x {counted(self.threads, 'thread')}"]
        if t:
            shape.append(f"{counted(t.rows, 'row')} x {counted(t.columns, 'column')}")
            shape.append(f"{counted(t.stages, 'stage')}, {self.smem_bytes} B shared")
        if s.packed_rows:
            rows = (t.columns if self.task.stationary == "k" else t.rows) if t else s.heads_together * s.packed_rows
            heads = min(rows // s.packed_rows, s.heads_together)
            shape.append(f"{counted(heads, 'head')} packed into {counted(heads * s.packed_rows, 'row')}")
        if s.splits > 1 and s.partial_bytes:
            each = f" in turns of {counted(s.share_steps, 'step')}" if s.share_steps else ""
            shape.append(f"row tiles shared by up to {s.splits} blocks{each}, partial sums {s.partial_bytes} B")
        elif s.splits > 1:
            shape.append(f"keys split over {s.splits} blocks")
        elif s.partial_bytes:
            shape.append(f"lists of more than {counted(s.longest, 'tile')} shared, partial sums {s.partial_bytes} B")
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.name}: {self.entry} for {self.arch}, {', '.join(shape)}{reason}"


@dataclass(frozen=True)
class MadeRows:
    """What the gradients of a side read of each row in place of what the forward saved, and the kernel that makes it.
    Offsets are counted from where its part of a workspace begins, in bytes."""

    side: str
    kernel: KernelPlan
    bytes: int
    written: tuple[tuple[str, int], ...]
    """Where the kernel writes: (field of its arguments, offset)."""
    read: tuple[tuple[str, int], ...]
    """Where gradients find it: (field of their arguments, offset)."""
    copies: tuple[tuple[str, int, Operand], ...] = ()
    """What they copy by tensor maps and is no operand: (name of the box, offset, what lies there)."""

    def __str__(self) -> str:
        return str(self.kernel)


@lru_cache(maxsize=1024)
def _text(
    entry: str,
    constants: tuple[tuple[str, int | float | str], ...],
    slots: tuple[tuple[str, str | tuple[str, ...]], ...],
    args: Struct,
    regions: tuple[Regions, ...],
) -> str:
    prologue = "\n".join([args.text, *(x.text for x in regions)])
    return flatten(entry, dict(constants), dict(slots), prologue=prologue)


WorkType = TypeVar("WorkType")
Tile = TypeVar("Tile")


class Candidate(ABC, Generic[WorkType, Tile]):
    """A kernel that can do tasks of a kind, and is listed for it."""

    kind: ClassVar[str]
    """Of its tasks."""
    family: ClassVar[str]
    name: ClassVar[str] = ""
    """Of its file without the family, where the kind is not that."""

    @property
    def stem(self) -> str:
        """Of its files."""
        return f"{self.name or self.kind}_{self.family}"

    @property
    def symbol(self) -> str:
        """Of its function."""
        return f"streamkl_{self.name or self.kind}"

    @abstractmethod
    def flag(self, facts: DeviceFacts) -> str:
        """The NVRTC architecture."""

    @abstractmethod
    def choice(self, work: WorkType, facts: DeviceFacts) -> tuple[Tile | None, str]:
        """The tile that does the work best, or None and why this kernel does not do it on that GPU."""

    @abstractmethod
    def plan(self, work: WorkType, tile: Tile, facts: DeviceFacts, reason: str = "") -> KernelText:
        """The kernel with a tile of its `choice`; `reason` says why nothing more capable does the work."""


Row = TypeVar("Row", bound=TileRow)


class Kernel(Candidate[Work, Row], Generic[Row]):
    """A kernel that walks tiles of scores, for one architecture and the newer ones that have its instructions."""

    args: ClassVar[str]
    """Of the arguments, by the name that `structs.Args` has for them."""
    given_header: ClassVar[str] = "tile/given.cuh"
    """What stands for tiles of a side that is given."""
    shares_tiles: ClassVar[bool] = False
    """Whether blocks can share the streamed rows of one row tile, be it a list or not."""
    persistent: ClassVar[bool] = False
    """Whether a block takes one work tile after the other, so that a launch needs few blocks."""
    # Streamed operands of heads that run side by side should stay in the L2 cache, which is 40 MB and more on the GPUs
    # that have long rows to stream. On smaller caches the order costs nothing but the locality it would have had.
    l2_budget: ClassVar[int] = 32 << 20

    def __init__(self) -> None:
        self._fitting: dict[object, tuple[Row, ...]] = {}

    @abstractmethod
    def refuses(self, work: Work, facts: DeviceFacts) -> str:
        """Why this kernel cannot do the work on that GPU; empty where it can."""

    @abstractmethod
    def table(self, work: Work) -> tuple[Row, ...]:
        """Tile rows in order of preference."""

    @abstractmethod
    def smem_bytes(self, work: Work, tile: Row) -> int:
        """Dynamic shared memory of a block."""

    @abstractmethod
    def threads(self, tile: Row) -> int:
        """Threads of a block."""

    @abstractmethod
    def constants(self, work: Work, tile: Row) -> dict[str, int]:
        """What is compiled in beyond what every kernel needs."""

    @abstractmethod
    def regions(self, work: Work, tile: Row) -> tuple[Regions, ...]:
        """What lies in workspaces that it reads or writes."""

    def boxes(self, work: Work, tile: Row) -> tuple[Box, ...]:
        """Inputs that are read through tensor maps."""
        return ()

    def packed(self, work: Work) -> Work:
        """The work with the rows of several query heads in one tile, where that is better."""
        return work

    def most_splits(self, work: Work, tile: Row) -> int:
        """Over how many blocks the streamed rows of a row tile may go, as far as the choice of a tile counts on it."""
        return 1

    def streamed_bytes(self, work: Work) -> int:
        """What a head's blocks read, and add to, over and over."""
        return work.streamed_bytes

    def head_group(self, work: Work, least: int = 1) -> int:
        """How many heads run side by side: those whose streamed operands fit the L2 budget together."""
        heads = max(1, work.pairs)
        most = max(least, min(heads, self.l2_budget // max(self.streamed_bytes(work), 1)), 1)
        # Groups of one size: eight heads as five and three take 0.49 ms where four and four take 0.36 (causal, D = 64).
        return -(-heads // -(-heads // most))

    def fitting(self, work: Work, facts: DeviceFacts) -> tuple[Row, ...]:
        """The rows of the table that this work and this GPU allow, whatever the extents: found once for all of them."""
        asked = work.problem
        rules = (asked.mask.parts, asked.divergence, work.turned)
        dims = tuple((side.dim, side.dtype) for side in work.sides), tuple(x.dim for x in asked.multiplied.values())
        key = (asked.op, work.task, dims, rules, facts)
        found = self._fitting.get(key)
        return found or self._fitting.setdefault(key, self._fits(work, facts))

    def _fits(self, work: Work, facts: DeviceFacts) -> tuple[Row, ...]:
        return tuple(
            row
            for row in self.table(work)
            if work.dim <= row.max_dim
            and work.out_dim <= row.max_out
            and work.level <= row.max_mask
            and (work.mask_level <= row.max_turned or not work.turned)
            and (work.mask_level <= row.max_given or not work.given)
            and work.row_vectors <= row.max_vectors
            and row.since <= facts.compute_capability < row.before
            and self.smem_bytes(work, row) <= facts.smem_per_block
        )

    def tile(self, work: Work, facts: DeviceFacts) -> Row:
        """The first fitting row that wastes no half of a tile and keeps the GPU busy; else the one with the most
        blocks, of these the one with the least rows.

        Where blocks can share a row tile, very long ones count as several, and where that is not enough, long ones.
        """
        fitting = self.fitting(work, facts)

        def blocks(row: Row, steps: int = 0) -> int:
            several = max(work.streamed_rows // row.columns // steps, 1) if steps else self.most_splits(work, row)
            return work.pairs * -(-work.rows // row.rows) * several

        for steps in STEPS_WORTH_SHARING if self.shares_tiles and work.problem.mask.blocks is None else (0,):
            for row in fitting:
                if blocks(row, steps) * 5 >= facts.multiprocessors * 4 and row.rows < 2 * max(work.typical_rows, 16):
                    return row
        return max(fitting, key=lambda row: (blocks(row), -row.rows, -fitting.index(row)))

    def choice(self, work: Work, facts: DeviceFacts) -> tuple[Row | None, str]:
        """The tile that does the work best, or None and why this kernel does not do it on that GPU."""
        reason = self.refuses(work, facts)
        return (None, reason) if reason else (self.tile(self.packed(work), facts), "")

    def plan(self, work: Work, tile: Row, facts: DeviceFacts, reason: str = "") -> KernelPlan:
        """The launch of work by tiles of its `choice`; `reason` says why nothing more capable does it.

        Raises:
            NotImplementedError: it would be larger than a grid can be.
        """
        work = self.packed(work)
        problem, task = work.problem, work.task
        schedule = self.schedule(work, tile, facts)
        if self.shares_tiles and tile.shareable and self.few_tiles(work, tile, schedule, facts):
            tile = replace(tile, shared=True, columns=self.shared_columns(work, tile))
        blocks = work.pairs * schedule.tiles
        if blocks > MAX_GRID:
            raise NotImplementedError(
                f"{task.name}: {blocks} blocks (batch {problem.batch} x heads {work.heads} x row tiles "
                f"{schedule.tiles}) exceed the grid limit of {MAX_GRID}; split the batch over several calls"
            )
        most_blocks = facts.multiprocessors * tile.min_blocks if self.persistent else 0
        smem_bytes = self.smem_bytes(work, tile)
        parts, scores = parts_of(problem.mask), [score_of(side) for side in work.sides]
        constants: dict[str, int | float | str] = {
            **{f"SKL_{name[0].upper()}_{x}": y for name, side in problem.sides.items() for x, y in _of_side(side)},
            **{f"SKL_{name.upper()}_DIM": x.dim for name, x in problem.multiplied.items()},
            # One text for both precisions where no float32 is involved.
            "SKL_PLANES": PLANES[problem.setting("precision", "highest") if work.float32 else "highest"],
            "SKL_ROWS": tile.rows,
            "SKL_COLUMNS": tile.columns,
            "SKL_WARPS": tile.warps,
            "SKL_WARP_TILES": tile.warp_tiles,
            "SKL_STAGES": tile.stages,
            "SKL_SMEM_BYTES": smem_bytes,
            "SKL_ROWS_ARE_QUERIES": int(not work.rows_are_keys),
            "SKL_MASK_PARTS": ", ".join(part.struct for part in parts),
            **self.constants(work, tile),
        }
        if self.shares_tiles:
            constants["SKL_SHARED"] = int(tile.shared)
            constants["SKL_LEAST_STEPS"] = LEAST_STEPS
        divergence = divergences.of(problem)
        constants |= divergence.constants
        if problem.entropy and not task.side:
            constants["SKL_ENTROPY"] = 1
        if (problem.open_rows and work.float32) if task.side else problem.some_keys:
            constants["SKL_SOME_KEYS"] = 1
        if problem.wide_gradients and task.side and work.side.dtype != "float32":
            constants["SKL_WIDE"] = int(task.stationary in problem.wide_gradients)
            if len(task.results) > 1:
                constants["SKL_WIDE_QUERIES"] = int("q" in problem.wide_gradients)
        if work.given:
            constants["SKL_ZEROS"] = int(divergence.zeros)
        of_scores = dict.fromkeys(path for score in scores for path in score.headers)
        together = ("scores/all.cuh",) if len(scores) > 1 else ()
        headers: dict[str, str | tuple[str, ...]] = {
            "divergence": divergence.header,
            "score": (*([self.given_header] if work.given else []), *of_scores, *together),
            "mask": (*(part.header for part in parts), "masks/all.cuh"),
        }
        if task.side:
            constants["SKL_GRAD_SIDE"] = problem.operation.sides.index(task.side)
        return KernelPlan(
            task=task,
            entry=f"kernels/{self.stem}.cu",
            symbol=self.symbol,
            arch=self.flag(facts),
            constants=tuple(sorted(constants.items())),
            slots=tuple((rule, headers[rule]) for rule in problem.operation.rules),
            args=getattr(args_for(problem), self.args),
            regions=self.regions(work, tile),
            blocks=_blocks(blocks, most_blocks),
            most_blocks=most_blocks,
            threads=self.threads(tile),
            smem_bytes=smem_bytes,
            tile=tile,
            boxes=self.boxes(work, tile),
            schedule=schedule,
            family=self.family,
            reason=reason,
        )

    def shared_columns(self, work: Work, tile: Row) -> int:
        """Streamed rows of a tile that blocks share."""
        return tile.shared_columns or tile.columns

    def few_tiles(self, work: Work, tile: Row, schedule: Schedule, facts: DeviceFacts) -> bool:
        """Whether several blocks for one row tile may help, whatever numbers the mask has, between all rows seeing all
        and a triangle."""
        if work.problem.mask.blocks is not None or work.pairs * schedule.tiles == 0:
            return False
        copies = work.pairs * max(work.problem.sequences, 1)
        return any(
            number(work.streamed_heads(tile.columns) * steps, copies, facts.multiprocessors) > 1
            for steps in shapes_of(work.problem, tile.rows, tile.columns, work.rows_are_keys)
        )

    def plans(self, work: Work, tile: Row, facts: DeviceFacts, reason: str = "") -> tuple[KernelPlan, ...]:
        """All kernels of the work, one after the other with the same arguments; mostly one."""
        return (self.plan(work, tile, facts, reason),)

    def workspace_bytes(self, work: Work, tile: Row) -> int:
        """Global memory without which the work cannot be done."""
        return 0

    def schedule(self, work: Work, tile: Row, facts: DeviceFacts) -> Schedule:
        """Which of the work's tiles a block has."""
        problem = work.problem
        pattern = problem.mask.pattern
        if pattern is None:
            # The lengths of sequences are not known here.
            tiles = row_tiles(work.rows, tile.rows, problem.sequences)
            return Schedule(
                tiles, self.head_group(work), packed_rows=work.packed_rows, heads_together=work.heads_together
            )
        group = work.group
        lists = survey(pattern, tile.rows, tile.columns, work.rows_are_keys, group)
        longest, together = balance(lists, work.pairs, facts.multiprocessors, self.shares_tiles)
        entries, slots = cut(lists, longest, group)
        schedule = Schedule(
            tiles=entries.shape[1],
            head_group=min(self.head_group(work, min(together, work.pairs)), max(work.pairs, 1)),
            group=group,
            longest=longest,
            packed_rows=work.packed_rows,
            heads_together=work.heads_together,
        )
        return _with_slots(schedule, slots, work, tile)


def shared(plan: KernelPlan, work: Work, facts: DeviceFacts) -> KernelPlan:
    """The launch with its row tiles shared by several blocks each, where they are few; `work` has its numbers."""
    problem, tile, whole = work.problem, plan.tile, plan.schedule
    assert tile
    if not tile.shared:
        return plan
    packed = replace(work, packed_rows=whole.packed_rows)
    steps = packed.streamed_heads(tile.columns) * steps_of(problem, tile.rows, tile.columns, work.rows_are_keys)
    shares, size = number(steps, work.pairs * max(problem.sequences, 1), facts.multiprocessors), 0
    if tile.totals:
        bytes_of_all = work.pairs * work.group * (work.streamed_bytes + work.sums_bytes)
        size = turn(steps, work.pairs, bytes_of_all, facts.multiprocessors)
        shares = -(-int(steps.max(initial=0)) // size) if size else shares
    if shares == 1:
        return plan
    whole = replace(whole, splits=shares, totals=tile.totals, share_steps=size)
    schedule = _with_slots(whole, whole.tiles * (1 if tile.totals else shares), work, tile)
    return replace(plan, schedule=schedule, blocks=_blocks(work.pairs * whole.tiles * shares, plan.most_blocks))


def _blocks(work_tiles: int, most: int) -> int:
    return min(work_tiles, most) if most else work_tiles


def _with_slots(schedule: Schedule, slots: int, work: Work, tile: TileRow) -> Schedule:
    """The schedule with memory for the sums of blocks that share row tiles, in so many slots of a head."""
    sizes = partials(tile.warps, tile.rows, work.out_dim).sizes(work.pairs * slots)
    return replace(schedule, partial_slots=slots, arrivals_bytes=sizes["arrivals"], partial_bytes=sum(sizes.values()))


def _of_side(side: Side) -> tuple[tuple[str, int | str], ...]:
    return (("ELEMENT", ELEMENT_CODES[side.dtype]), ("DIM", side.dim), ("SCORE", score_of(side).struct))


def args_for(problem: Problem) -> Args | AttentionArgs:
    """The arguments of kernels, by what the scores of the problem read."""
    numbers = [tuple(score_of(side).numbers(1.0)) for side in problem.distributions]
    found: Args | AttentionArgs = ARGS[problem.op](*numbers)
    return found


def vector_loads(x: Operand) -> bool:
    """Whether every row of an input starts on a 16-byte boundary and its elements are adjacent."""
    per_chunk = 16 // ELEMENT_BYTES[x.dtype]
    return x.aligned and x.strides[3] == 1 and all(stride % per_chunk == 0 for stride in x.strides[:3])

"""From a Problem and facts about a GPU to a frozen Plan. Pure: no CuPy, no device, no environment.

A Plan names, for each kernel a call may launch, the source file, the constants and hooks compiled into it, and its
launch shape. It prints itself completely, so a bug report that holds `print(plan(...))` explains itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from .arch import (
    ELEMENT_BYTES,
    ELEMENT_CODES,
    PLANES,
    SIDES,
    DeviceFacts,
    Family,
    TileRow,
    Work,
    families,
)
from .portions import portions, survey
from .problem import INPUT_NAMES, Problem, counted
from .rules.divergences import DIVERGENCES
from .rules.masks import Scene, key_range, parts_of
from .rules.scores import SCORES
from .source import flatten
from .structs import FORWARD, KEY_BITS, Regions, Struct, key_words, row_tiles, shared_lists

if TYPE_CHECKING:
    from .patterns import BlockPattern

MAX_DIM = 256
MAX_TEACHER_DIM = 576
MAX_GRID = 2**31 - 1
MAX_ROWS = 2**30
# Splitting costs a workspace and a second launch: below this many key tiles an unsplit block is done sooner.
MIN_TILES_TO_SPLIT = 64
MIN_TILES_PER_SHARE = 8
# A block needs about ten microseconds to start and to end, in which it could walk six tiles.
MIN_TILES_IN_LIST = 32

# Streamed operands of heads that run side by side should stay in the L2 cache, which is 40 MB and more on the GPUs that
# have long rows to stream. On smaller caches the order costs nothing but the locality it would have had.
L2_BUDGET = 32 << 20
# Sums are read and written, and share the cache with what comes next: causal, D = 128, two heads of 8192 rows (17 MB)
# side by side take 0.52 ms, eight of them 0.56.
FUSED_L2_BUDGET = 20 << 20


@dataclass(frozen=True)
class KernelPlan:
    """One kernel: what to compile and how to launch it."""

    name: str
    family: str
    reason: str
    """Why the more capable families do not run it; empty where the first one does."""
    entry: str
    symbol: str
    arch: str
    constants: tuple[tuple[str, int | str], ...]
    slots: tuple[tuple[str, str | tuple[str, ...]], ...]
    tile: TileRow
    smem_bytes: int
    tiles: int
    """Row tiles, or portions of them, per head of the launch."""
    blocks: int
    head_group: int
    """Heads that run side by side."""
    threads: int
    args: Struct
    regions: tuple[Regions, ...]
    """What lies in workspaces that it reads or writes."""
    boxes: tuple[tuple[str, int], ...]
    """Inputs read through tensor maps, with the rows of a box."""
    splits: int = 1
    """Blocks that share the streamed rows of one row tile."""
    group: int = 1
    """Query heads that a block works through."""
    longest: int = 0
    """Tiles of a pattern's list that one block walks, about; 0 where blocks share no lists."""
    share_slots: int = 0
    """Places for the sums of shared lists, per batch entry and head of the launch."""
    arrivals_bytes: int = 0
    share_bytes: int = 0
    """What these take, with the counters of who has come; those come first, and are zero before a launch."""

    @property
    def text(self) -> str:
        """The CUDA text, read and put together once: other offsets, lengths and scales run the same one."""
        return _text(self.entry, self.constants, self.slots, self.args, self.regions)

    def __str__(self) -> str:
        t = self.tile
        return (
            f"{self.name}: {self.entry} for {self.arch}, {counted(self.blocks, 'block')} x "
            f"{counted(self.threads, 'thread')}, {counted(t.rows, 'row')} x {counted(t.columns, 'column')}, "
            f"{counted(t.stages, 'stage')}, {self.smem_bytes} B shared"
            + (f", keys split over {self.splits} blocks" if self.splits > 1 else "")
            + (
                f", lists of more than {self.longest} tiles shared, sums {self.share_bytes} B"
                if self.share_bytes
                else ""
            )
            + (f" ({self.reason})" if self.reason else "")
        )


@lru_cache(maxsize=1024)
def _text(
    entry: str,
    constants: tuple[tuple[str, int | str], ...],
    slots: tuple[tuple[str, str | tuple[str, ...]], ...],
    args: Struct,
    regions: tuple[Regions, ...],
) -> str:
    prologue = "\n".join([args.text, *(x.text for x in regions)])
    return flatten(entry, dict(constants), dict(slots), prologue=prologue)


@dataclass(frozen=True)
class FusedPlan:
    """Both gradients of one side in one pass over the scores. Its sums have no fixed order."""

    side: str
    kernels: tuple[KernelPlan, KernelPlan, KernelPlan]
    """What prepares the workspace, the pass, what makes sums the gradient of the queries: same arguments."""
    workspace_bytes: int
    """Of the sums, and after them what shared lists need."""
    names: tuple[str, str]
    """The two inputs."""

    def __str__(self) -> str:
        return f"both gradients of the {self.kernels[1]}, workspace {self.workspace_bytes} B"


@dataclass(frozen=True)
class Plan:
    """Everything a call would run on a GPU."""

    problem: Problem
    forward: KernelPlan
    gradients: tuple[tuple[str, KernelPlan], ...]
    combine: KernelPlan | None = None
    """Joins the shares of a forward whose keys are split."""
    workspace_bytes: int = 0
    """What a forward works in: the mask's bytes and the partial states of split keys; without it, it runs unsplit."""
    key_bits: KernelPlan | None = None
    """Packs a mask of keys to bits before any other kernel runs."""
    mask_bytes: int = 0
    """Where those bits lie: the first bytes of every workspace, without which such a mask cannot be."""
    fused: tuple[FusedPlan, ...] = ()
    """What computes both gradients of a side when both are wanted, there is room for its workspace and equal bits from
    run to run are not asked for; otherwise each has its own kernel."""
    unfused: tuple[tuple[str, str], ...] = ()
    """Sides that have no such pass, and why."""

    def backward_bytes(self, wrt: Collection[str]) -> int:
        """Workspace of a backward for these inputs; without it each gradient is computed by its own kernel, and blocks
        share no lists."""
        fused = [f for f in self.fused if all(x in wrt for x in f.names)]
        done = [name for f in fused for name in f.names]
        alone = [kernel.share_bytes for name, kernel in self.gradients if name in wrt and name not in done]
        return self.mask_bytes + max([*(f.workspace_bytes for f in fused), *alone], default=0)

    def gradient(self, name: str) -> KernelPlan:
        for key, kernel in self.gradients:
            if key == name:
                return kernel
        raise NotImplementedError(
            f"wrt {name!r}: gradients to the teacher need a head dim of at most {MAX_DIM}, "
            f"this one has {self.problem.operand(name).dim}; built are {[key for key, _ in self.gradients]}"
        )

    def __str__(self) -> str:
        p = self.problem
        lines = [
            f"attention KL on {p.device}: B={p.batch} H={p.heads} M={p.queries} N={p.keys}, mask {p.mask.name}"
            + (f", {counted(p.sequences, 'sequence')}" if p.sequences else ""),
            *(
                f"  {name}: D={side.dim} {side.dtype}, {counted(side.k.heads, 'key head')}, scale {side.scale:.6g}"
                for name, side in (("teacher", p.teacher), ("student", p.student))
            ),
            f"  workspace {self.workspace_bytes} B",
            *([f"  {self.key_bits}"] if self.key_bits else []),
            f"  {self.forward}",
            *([f"  {self.combine}"] if self.combine else []),
            *(f"  {fused}" for fused in self.fused),
            *(f"  {side}: a kernel per gradient ({why})" for side, why in self.unfused),
            *(f"  {kernel}" for _, kernel in self.gradients),
        ]
        return "\n".join(lines)


def facts_for_arch(arch: str) -> DeviceFacts:
    """Facts of a typical GPU of an architecture such as "sm_80", for planning where there is none."""
    typical = {
        "sm_80": DeviceFacts((8, 0), 166_912, 108, "sm_80"),
        "sm_86": DeviceFacts((8, 6), 101_376, 84, "sm_86"),
        "sm_89": DeviceFacts((8, 9), 101_376, 128, "sm_89"),
        "sm_90": DeviceFacts((9, 0), 232_448, 132, "sm_90"),
        "sm_100": DeviceFacts((10, 0), 232_448, 148, "sm_100"),
        "sm_120": DeviceFacts((12, 0), 101_376, 170, "sm_120"),
    }
    try:
        return typical[arch]
    except KeyError:
        raise ValueError(f"arch: {arch!r} is not known; known are {', '.join(typical)}") from None


@lru_cache(maxsize=1024)
def make_plan(problem: Problem, facts: DeviceFacts) -> Plan:
    """The Plan of a problem on a GPU.

    Raises:
        NotImplementedError: nothing here runs on that GPU, or the launch would be larger than a grid can be.
    """
    if max(problem.queries, problem.keys) > MAX_ROWS:
        raise NotImplementedError(
            f"M={problem.queries}, N={problem.keys}: kernels count rows up to {MAX_ROWS}; split the call"
        )
    plan = _unsplit_plan(_without_numbers(problem), facts)
    forward = plan.forward
    rows = problem.batch * problem.heads * problem.queries
    (states,) = forward.regions
    busy = problem.batch * problem.heads * -(-problem.queries // forward.tile.rows)
    splits = _splits(busy, _key_tiles(problem, forward.tile), facts)
    if splits == 1:
        return replace(plan, problem=problem)
    forward = replace(forward, blocks=forward.blocks * splits, splits=splits)
    return replace(
        plan,
        problem=problem,
        forward=forward,
        combine=_combine(Work(problem, "forward"), forward, rows),
        workspace_bytes=plan.mask_bytes + states.bytes(splits * rows),
    )


def _without_numbers(problem: Problem) -> Problem:
    """The problem with its scales and the integers of its mask left open: what changes from step to step in a loop over
    chunks or temperatures, and decides no more than into how many shares the keys go."""
    mask = problem.mask
    return replace(
        problem,
        teacher=replace(problem.teacher, scale=0.0),
        student=replace(problem.student, scale=0.0),
        mask=replace(mask, params=tuple((name, 0) for name, _ in mask.params)),
    )


@lru_cache(maxsize=1024)
def _unsplit_plan(problem: Problem, facts: DeviceFacts) -> Plan:
    """The plan of a problem without its numbers, its keys not split."""
    wanted = [name for name in INPUT_NAMES if problem.operand(name).dim <= MAX_DIM]
    bits = _key_bits(problem, facts)
    # What follows the bits starts on a line of its own.
    mask_bytes = -(-problem.batch * key_words(problem.keys) * 4 // 128) * 128 if bits else 0
    passes = {side: _fused(Work(problem, side), facts) for side in SIDES}
    return Plan(
        problem=problem,
        forward=_kernel(Work(problem, "forward"), facts),
        gradients=tuple((name, _kernel(Work(problem, name), facts)) for name in wanted),
        workspace_bytes=mask_bytes,
        key_bits=bits,
        mask_bytes=mask_bytes,
        fused=tuple(x for x in passes.values() if isinstance(x, FusedPlan)),
        unfused=tuple((side, x) for side, x in passes.items() if isinstance(x, str)),
    )


def _fused(work: Work, facts: DeviceFacts) -> FusedPlan | str:
    """Both gradients of a side in one pass, where a family can and the order of sums may vary; else why not."""
    if work.problem.deterministic:
        return "deterministic=True: one pass adds its sums in no fixed order"
    family, refusals = _family(work, facts)
    if family is None:
        return _joined(refusals)
    main = _kernel(work, facts)
    tiles, threads = family.helpers(work)
    blocks = work.problem.batch * work.problem.heads * tiles
    if blocks > MAX_GRID:
        return f"{blocks} blocks before and after exceed the grid limit of {MAX_GRID}"

    def helper(does: str) -> KernelPlan:
        return replace(main, symbol=f"{main.symbol}_{does}", smem_bytes=0, blocks=blocks, threads=threads)

    return FusedPlan(
        work.name,
        (helper("prepare"), main, helper("finish")),
        -(-main.regions[0].bytes(blocks) // 128) * 128 + main.share_bytes,
        (f"{work.name}_q", f"{work.name}_k"),
    )


def _family(work: Work, facts: DeviceFacts) -> tuple[Family | None, dict[str, str]]:
    """The first family that does the work, if any, and why those before it do not, by name."""
    refusals: dict[str, str] = {}
    for family in families():
        reason = family.refuses(work, facts)
        if not reason:
            return family, refusals
        refusals[family.name] = reason
    return None, refusals


def _joined(refusals: dict[str, str]) -> str:
    return "; ".join(f"not {name}: {reason}" for name, reason in refusals.items())


def _kernel(work: Work, facts: DeviceFacts) -> KernelPlan:
    problem, kind = work.problem, work.kind
    family, refusals = _family(work, facts)
    if family is None:
        raise NotImplementedError(list(refusals.values())[-1])
    tile = _tile(family, work, facts)
    # The lengths of sequences are not known here.
    tiles = row_tiles(work.rows, tile.rows, problem.sequences)
    pairs = problem.batch * work.heads
    schedule = {"head_group": _head_group(work)}
    if problem.mask.pattern is not None:
        tiles, schedule = _portions(problem.mask.pattern, family, work, tile, facts)
    blocks = pairs * tiles
    if blocks > MAX_GRID:
        raise NotImplementedError(
            f"{work.name}: {blocks} blocks (batch {problem.batch} x heads {work.heads} x row tiles {tiles}) exceed the "
            f"grid limit of {MAX_GRID}; split the batch over several calls"
        )
    entry, symbol = family.entry(kind)
    smem_bytes = family.smem_bytes(work, tile)
    parts = parts_of(problem.mask)
    constants: dict[str, int | str] = {
        "SKL_T_ELEMENT": ELEMENT_CODES[problem.teacher.dtype],
        "SKL_S_ELEMENT": ELEMENT_CODES[problem.student.dtype],
        "SKL_T_DIM": problem.teacher.dim,
        "SKL_S_DIM": problem.student.dim,
        # One text for both precisions where no float32 is involved.
        "SKL_PLANES": PLANES[problem.precision if work.float32 else "highest"],
        "SKL_ROWS": tile.rows,
        "SKL_COLUMNS": tile.columns,
        "SKL_WARPS": tile.warps,
        "SKL_WARP_TILES": tile.warp_tiles,
        "SKL_STAGES": tile.stages,
        "SKL_SMEM_BYTES": smem_bytes,
        "SKL_ROWS_ARE_QUERIES": int(not work.rows_are_keys),
        "SKL_MASK_PARTS": ", ".join(part.struct for part in parts),
        **family.constants(work, tile),
    }
    if kind != "forward":
        constants["SKL_GRAD_SIDE"] = int(work.name.startswith("student"))
    return KernelPlan(
        name=work.name,
        family=family.name,
        reason=_joined(refusals),
        entry=entry,
        symbol=symbol,
        arch=family.flag(facts.compute_capability),
        constants=tuple(sorted(constants.items())),
        slots=(
            ("divergence", DIVERGENCES[problem.divergence].header),
            ("score", SCORES["dot"].header),
            ("mask", (*(part.header for part in parts), "masks/all.cuh")),
        ),
        tile=tile,
        smem_bytes=smem_bytes,
        tiles=tiles,
        blocks=min(blocks, facts.multiprocessors * tile.min_blocks) if family.stays(work) else blocks,
        **schedule,
        threads=family.threads(tile),
        args=family.args(kind),
        regions=family.regions(work, tile),
        boxes=family.boxes(work, tile),
    )


def _portions(
    pattern: BlockPattern, family: Family, work: Work, tile: TileRow, facts: DeviceFacts
) -> tuple[int, dict[str, int]]:
    """Portions per head that a pattern's lists make, and what a kernel's plan says of them.

    No block takes more than half of what each multiprocessor has to do in all, and so many heads run side by side that
    what they have to do takes as long as the longest of it: with more, their sums do not stay in the cache.
    """
    problem = work.problem
    pairs, group = problem.batch * work.heads, max(problem.heads // max(work.heads, 1), 1)
    lists = survey(pattern, tile.rows, tile.columns, work.rows_are_keys, group)
    lengths = lists.lengths
    average = max(-(-int(lengths.sum()) * pairs // (len(lengths) * facts.multiprocessors)), 1)
    longest = max(-(-average // 2), MIN_TILES_IN_LIST) if family.shares_lists(work) else 0
    entries, slots = portions(lists, longest, group)
    most = int(lengths.max(initial=0))
    together = -(-pairs * (min(most, longest) if longest else most) // average)
    sizes = shared_lists(tile.warps, tile.rows, work.out_dim).sizes(pairs * slots)
    return entries.shape[1], {
        "head_group": min(_head_group(work, min(together, pairs)), max(pairs, 1)),
        "group": group,
        "longest": longest,
        "share_slots": slots,
        "arrivals_bytes": sizes["arrivals"],
        "share_bytes": sum(sizes.values()),
    }


def _key_tiles(problem: Problem, tile: TileRow) -> int:
    """Key tiles that the longest row tile visits, as far as is known here: sequences count as equally long."""
    mask, shares = problem.mask, max(problem.sequences, 1)
    queries, keys = -(-problem.queries // shares), -(-problem.keys // shares)
    params = dict(mask.params)
    if not params.get("q_offset_given", 1):
        params["q_offset"] = keys - queries
    scene = Scene(queries, keys, params)
    ranges = (
        key_range(parts_of(mask), scene, q0, min(q0 + tile.rows, queries))
        for q0 in {0, queries // 2, max(queries - tile.rows, 0)}
    )
    visited = max(-(-stop // tile.columns) - start // tile.columns for start, stop in ranges)
    if mask.pattern is None:
        return visited
    listed = np.diff(mask.pattern.tile_lists(tile.rows, tile.columns).offsets).max(initial=0)
    return min(visited, int(listed))


def _splits(blocks: int, key_tiles: int, facts: DeviceFacts) -> int:
    """Into how many shares the keys go: the fewest that fill the GPU's last wave nearly as well as any number would."""
    most = min(key_tiles // MIN_TILES_PER_SHARE, -(-2 * facts.multiprocessors // max(blocks, 1)))
    if blocks == 0 or blocks * 5 >= facts.multiprocessors * 4 or key_tiles < MIN_TILES_TO_SPLIT:
        return 1

    def filled(shares: int) -> float:
        waves = blocks * shares / facts.multiprocessors
        return waves / math.ceil(waves)

    best = max(filled(shares) for shares in range(1, most + 1))
    return next(shares for shares in range(1, most + 1) if filled(shares) >= 0.85 * best)


def _combine(work: Work, forward: KernelPlan, rows: int) -> KernelPlan:
    """The kernel that joins the shares of `forward`, a thread to a row."""
    threads = 128
    arch = forward.arch.rstrip("a")
    # Only float32 keys have parts in common taken from them, and log-sum-exps to give those back to.
    constants = {"SKL_HAS_OFFSETS": int(work.float32), "SKL_THREADS": threads}
    return replace(
        forward,
        name="combine",
        reason="",
        entry="kernels/combine.cu",
        symbol="streamkl_combine",
        arch=arch,
        constants=tuple(sorted(constants.items())),
        slots=(("divergence", DIVERGENCES[work.problem.divergence].header),),
        smem_bytes=0,
        blocks=-(-rows // threads),
        threads=threads,
        args=FORWARD,
        boxes=(),
    )


def _key_bits(problem: Problem, facts: DeviceFacts) -> KernelPlan | None:
    """The kernel that packs a mask of keys, a warp to a word; None where there is none."""
    if not any(array.bits for part in parts_of(problem.mask) for array in part.arrays):
        return None
    threads = 256
    major, minor = facts.compute_capability
    constants = {"SKL_THREADS": threads}
    return KernelPlan(
        name="key_bits",
        family="any",
        reason="",
        entry="kernels/key_bits.cu",
        symbol="streamkl_key_bits",
        arch=f"sm_{major}{minor}",
        constants=tuple(sorted(constants.items())),
        slots=(),
        tile=TileRow(threads // 32, 1, 32, 1, 1, MAX_TEACHER_DIM, "a warp packs a word of 32 keys"),
        smem_bytes=0,
        tiles=1,
        blocks=-(-problem.batch * key_words(problem.keys) * 32 // threads),
        head_group=1,
        threads=threads,
        args=KEY_BITS,
        regions=(),
        boxes=(),
    )


def _head_group(work: Work, least: int = 1) -> int:
    """How many heads run side by side: those whose streamed operands, and sums, fit the L2 budget together."""
    problem = work.problem
    if work.kind == "fused" and not problem.mask.parts:
        return 1  # all tiles are as long as any: one head after the other keeps most of its sums in the cache
    rows = problem.queries if work.rows_are_keys else problem.keys
    row_bytes = sum(side.dim * ELEMENT_BYTES[side.dtype] for side in work.sides)
    budget = L2_BUDGET
    if work.kind == "fused":
        row_bytes += 4 * work.out_dim
        budget = FUSED_L2_BUDGET
    heads = max(1, problem.batch * problem.heads)
    most = max(least, min(heads, budget // max(rows * row_bytes, 1)), 1)
    # Groups of one size: eight heads as five and three take 0.49 ms where four and four take 0.36 (causal, D = 64).
    return -(-heads // -(-heads // most))


def _tile(family: Family, work: Work, facts: DeviceFacts) -> TileRow:
    """The first fitting row that wastes no half of a tile and keeps the GPU busy; else the one with the most blocks, of
    these the one with the least rows."""
    fitting = family.fitting(work, facts)
    pairs = work.problem.batch * work.heads

    def blocks(row: TileRow) -> int:
        return pairs * -(-work.rows // row.rows)

    for row in fitting:
        if blocks(row) * 5 >= facts.multiprocessors * 4 and row.rows < 2 * max(work.typical_rows, 16):
            return row
    return max(fitting, key=lambda row: (blocks(row), -row.rows, -fitting.index(row)))

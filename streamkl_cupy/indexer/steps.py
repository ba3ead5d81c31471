"""What a call of the indexer launches, in order, and what each launch reads and writes.

A forward is the rows' intervals, what is packed of rows, where they are wanted the teacher's log-sum-exps, one pass of
score tiles whose keys are split over blocks, and a join. A backward goes over strips of rows: the gradients of their
logits once, then the kernels that multiply by them. As pure as the plan that it is of: arrays are named, and what lies
in the workspace is counted from its start.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ..kernels import (
    indexer_bits,
    indexer_gated_join,
    indexer_gated_key_sm90,
    indexer_join,
    indexer_pack,
    indexer_rows,
    indexer_scan,
    indexer_sum,
    indexer_tiles,
    indexer_units,
)
from ..kernels.base import KernelText
from ..kernels.indexer import GRID, SCORE
from ..kernels.structs import Value
from ..problem import compact_strides
from .plan import IndexerPlan, Place, places
from .strips import Strip

AXES = ("batch", "head", "row", "column")
"""The strides of a tensor in the arguments of kernels."""


class Array(NamedTuple):
    """An array of the call, if it is there."""

    name: str
    axes: str
    """Letters of those that the kernel counts as batch, head, row and column, "-" for none."""
    of: Literal["inputs", "outputs", "saved"] = "inputs"
    first_row: int = 0
    """That it begins with; kernels count rows from the first of the call."""


@dataclass(frozen=True, eq=False)
class Fields:
    """Fields of a kernel's arguments: numbers, what lies in the workspace, by its offset there, and tensors."""

    numbers: Mapping[str, Value] = field(default_factory=dict)
    placed: Mapping[str, int] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)

    def __or__(self, more: Fields) -> Fields:
        # What stays the same is the same object, which is told once for all steps that have it.
        arrays = {**self.arrays, **more.arrays} if more.arrays else self.arrays
        return Fields({**self.numbers, **more.numbers}, {**self.placed, **more.placed}, arrays)


class Step(NamedTuple):
    """A launch. Steps that have the same fields have the same object."""

    kernel: KernelText
    grid: tuple[int, ...]
    fields: Fields


class Clear(NamedTuple):
    """A part of the workspace, or a result, that is zeros before others add to it."""

    place: Place | None = None
    output: str = ""


Shown = Generator[Step | Clear, None, Fields]
"""Steps, and what launches behind them read."""


def forward_steps(plan: IndexerPlan) -> Iterator[Step | Clear]:
    """Of a forward, or of a target."""
    steps = _target(plan) if plan.problem.operation.rows == ("target",) else _forward(plan)
    yield from _busy(steps)


def backward_steps(plan: IndexerPlan) -> Iterator[Step | Clear]:
    """Of the plan's gradients, strip by strip."""
    yield from _busy(_backward(plan))


def _busy(steps: Iterator[Step | Clear]) -> Iterator[Step | Clear]:
    """But for launches that have nothing to do."""
    return (step for step in steps if isinstance(step, Clear) or 0 not in step.grid)


def _forward(plan: IndexerPlan) -> Iterator[Step | Clear]:
    p, cut, room = plan.problem, plan.row_cut, places(plan.forward_sizes(), 0)
    rows = _row_fields(plan, room)
    yield Step(plan.rows, indexer_rows.grid(plan.cut.grid_tiles, p["B"]), rows)
    fields = _score_fields(plan, room)
    lse = Array("teacher_lse", "BHM")
    if plan.makes_lse:
        lse = Array("made_lse", "BHM", "outputs")
        yield from _make_lse(plan, fields | Fields(arrays={"out_lse": lse}), rows, room)
    yield _pack(plan, room, Fields(arrays={"teacher_lse": lse}))
    fields |= Fields({"splits": cut.states}, {"states": room["states"].at})
    for tiles in _row_tiles(plan, plan.bit_tiles):
        bits = yield from _bits(plan, rows, room, tiles)
        yield Step(plan.score("rows").text, plan.score_grid("rows", len(tiles), plan.cut.splits), fields | bits)
    results = {"out_value": "kl", "out_mass": "target_sum", "out_lse": "index_lse"}
    fields |= Fields(arrays={name: Array(result, "BGM", "outputs") for name, result in results.items()})
    yield Step(plan.join, indexer_join.grid(p["M"], p["B"] * p.groups, cut), fields)


def _make_lse(plan: IndexerPlan, fields: Fields, rows: Fields, room: Mapping[str, Place]) -> Iterator[Step | Clear]:
    """The teacher's log-sum-exps."""
    splits = plan.lse_cut.states
    fields |= Fields({"splits": splits}, {"states": room["states"].at})
    for tiles in _row_tiles(plan, plan.bit_tiles):
        bits = yield from _bits(plan, rows, room, tiles)
        yield Step(plan.score("lse").text, plan.score_grid("lse", len(tiles), splits), fields | bits)
    if splits > 1:
        grid = indexer_join.grid(plan.problem["M"], plan.problem["B"] * plan.sizes["H"], plan.lse_cut)
        yield Step(plan.lse_join, grid, fields)


def _target(plan: IndexerPlan) -> Iterator[Step | Clear]:
    """(B, G, R, N) of R rows."""
    p, room = plan.problem, places(plan.forward_sizes(), 0)
    first_row, end_row = p.rows or (0, p["M"])
    first, end = first_row // GRID, -(-end_row // GRID)
    yield Clear(output="target")
    rows = _row_fields(plan, room)
    yield Step(plan.rows, indexer_rows.grid(plan.cut.grid_tiles, p["B"]), rows)
    fields, lse = _score_fields(plan, room), Fields(arrays={"teacher_lse": Array("teacher_lse", "BHM")})
    if plan.makes_lse:
        shape, at = p.shape("BHM"), room["made_lse"].at
        letters = p.callers_axes("BHM")
        steps = dict(zip(letters, (0 if n == 1 else x for n, x in zip(shape, compact_strides(shape)))))

        def made(name: str) -> Fields:
            strides = {f"{name}.{axis}": steps.get(letter, 0) for axis, letter in zip(AXES, "BHM")}
            return Fields(strides, {f"{name}.pointer": at})

        yield from _make_lse(plan, fields | made("out_lse"), rows, room)
        lse = made("teacher_lse")
    yield _pack(plan, room, lse)
    fields |= Fields(
        {"first_row": first_row, "end_row": end_row},
        arrays={"target": Array("target", "BGMN", "outputs", first_row)},
    )
    score = plan.score("target").text
    for tiles in _row_tiles(plan, plan.bit_tiles):
        some = range(max(tiles.start, first), min(tiles.stop, end))
        if some:
            bits = yield from _bits(plan, rows, room, some)
            yield Step(score, plan.score_grid("target", len(some), plan.cut.splits), fields | bits)


def _backward(plan: IndexerPlan) -> Iterator[Step | Clear]:
    p, room = plan.problem, places(plan.backward_sizes(), 0)
    rows = _row_fields(plan, room)
    yield Step(plan.rows, indexer_rows.grid(plan.cut.grid_tiles, p["B"]), rows)
    lse = Array("made_lse", "BHM", "saved") if plan.makes_lse else Array("teacher_lse", "BHM")
    saved = {"grad": "grad", "index_lse": "index_lse", "mass": "target_sum"}
    arrays = {"teacher_lse": lse, **{name: Array(of, "BGM", "saved") for name, of in saved.items()}}
    yield _pack(plan, room, Fields(placed={"row_stats": room["row_stats"].at}, arrays=arrays))
    fields = _score_fields(plan, room) | Fields(
        {"shares": plan.shares},
        {name: place.at for name, place in room.items()},
        {
            "out_q": Array("index_q", "BIMD", "outputs"),
            "out_weights": Array("index_weights", "BIM", "outputs"),
            "out_k": Array("index_k", "BJND", "outputs"),
        },
    )
    gradients = {"lists": _lists, "gates": _gated_strips, "strips": _strips}[plan.way]
    yield from gradients(plan, fields, rows, room)


def _lists(plan: IndexerPlan, fields: Fields, rows: Fields, room: Mapping[str, Place]) -> Iterator[Step | Clear]:
    """Some rows at a time: the gradients of the logits of keys that ids name, then all that multiplies by them."""
    p, n, by_key = plan.problem, plan.sizes, "index_k" in plan.wrt
    if by_key:
        yield Clear(room["key_sums"])
    for tiles in _row_tiles(plan, plan.list_tiles):
        here = fields | (yield from _bits(plan, rows, room, tiles))
        yield Step(plan.score("list").text, plan.score_grid("list", len(tiles), 1), here)
        grid = plan.listed.kernel.grid(len(tiles) * GRID * p["B"] * p.groups, plan.facts)
        yield Step(plan.listed.text, grid, here)
    if by_key:
        yield Step(plan.key_sum, indexer_sum.grid(p["N"] * n["D"], p["B"] * n["J"]), fields)


def _of_strip(plan: IndexerPlan, strip: Strip, fields: Fields, rows: Fields, room: Mapping[str, Place]) -> Shown:
    """What the kernels of a strip read."""
    bits = yield from _bits(plan, rows, room, range(strip.first, strip.first + strip.tiles))
    where = {"strip_rows": strip.tiles * GRID, "strip_pitch": strip.keys, "splits": strip.splits}
    return fields | bits | Fields(where)


def _strips(plan: IndexerPlan, fields: Fields, rows: Fields, room: Mapping[str, Place]) -> Iterator[Step | Clear]:
    """Strip by strip: the gradients of logits, then the kernels that compute scores again and multiply by them."""
    p, n, by_key = plan.problem, plan.sizes, "index_k" in plan.wrt
    yield Clear(room["broken"])
    yield Step(plan.scan, indexer_scan.grid(plan.facts), fields)
    for strip in plan.strips:
        here = yield from _of_strip(plan, strip, fields, rows, room)
        yield Step(plan.score("strip").text, plan.score_grid("strip", strip.tiles, strip.splits), here)
        if plan.by_query(plan.wrt):
            yield Step(plan.query.text, plan.query.kernel.grid(plan.strip_cut(strip)), here)
        if by_key:
            yield Step(plan.key.text, plan.key.kernel.grid(plan.strip_cut(strip)), here)
    if by_key:
        if plan.cut.grid_tiles == 0:
            yield Clear(room["key_sums"])
        yield Step(plan.key_sum, indexer_sum.grid(p["N"] * n["D"], p["B"] * n["J"]), fields)


def _gated_strips(plan: IndexerPlan, fields: Fields, rows: Fields, room: Mapping[str, Place]) -> Iterator[Step | Clear]:
    """Strip by strip: the gradients of logits and all gates, then the kernels that multiply by them."""
    batch, n = plan.problem["B"], plan.sizes
    by_query, by_key = plan.by_query(plan.wrt), "index_k" in plan.wrt
    if by_query:
        yield Step(plan.key_tiling, indexer_tiles.grid(-(-n["N"] // GRID), batch * n["J"]), fields)
        yield Clear(room["kept_flags"])
    if by_key:
        yield Clear(room["key_sums"])
    fields |= Fields(placed={"kept_sums": room["partials"].at})
    for number, strip in enumerate(plan.strips):
        blocks = strip.keys // indexer_gated_key_sm90.KEY_BLOCK
        strips = places(plan.strip_sizes(strip.tiles, strip.pairs), room["strips"].at)
        of_strip = Fields(
            {"strip_number": number, "key_blocks": blocks, "head_blocks": plan.head_blocks},
            {name: place.at for name, place in strips.items()},
        )
        here = yield from _of_strip(plan, strip, fields | of_strip, rows, room)
        yield Step(plan.units, indexer_units.BLOCKS, here)
        yield Step(plan.score("strip").text, plan.score_grid("strip", strip.tiles, strip.splits), here)
        if by_query:
            yield Step(plan.query.text, plan.query.kernel.grid(plan.strip_cut(strip)), here)
        if by_key:
            yield Step(plan.query_tiling, indexer_tiles.grid(strip.tiles, batch * n["I"]), here)
            yield Step(plan.key.text, plan.key.kernel.grid(plan.strip_cut(strip)), here)
            yield Step(plan.key_sum, indexer_gated_join.grid(batch * n["J"] * blocks), here)


def _row_tiles(plan: IndexerPlan, step: int) -> Iterator[range]:
    """Row tiles, some at a time."""
    for first in range(0, plan.cut.grid_tiles, max(step, 1)):
        yield range(first, min(first + step, plan.cut.grid_tiles))


def _bits(plan: IndexerPlan, rows: Fields, room: Mapping[str, Place], tiles: range) -> Shown:
    """Make the bits of the rows of some tiles; what a launch for these reads."""
    where = Fields({"first_tile": tiles.start, "tiles": len(tiles)})
    if not plan.shape.bits:
        return where
    p, words = plan.problem, plan.words
    chosen = "topk_indices" in p.views
    first, count = (tiles.start * GRID, min(tiles.stop * GRID, p["M"]) - tiles.start * GRID) if chosen else (0, 1)
    grid = indexer_bits.grid(plan.bit_groups * count, p["B"])
    yield Step(plan.bits, grid, rows | Fields({"first_row": first, "bit_rows": count}))
    return where | Fields(
        {
            "bits_batch": plan.bit_groups * count * words,
            "bits_group": count * words if plan.bit_groups > 1 else 0,
            "bits_row": words if chosen else 0,
        },
        # Kernels count rows from the first of the call.
        {"bits": room["bits"].at - 4 * words * first},
    )


def _pack(plan: IndexerPlan, room: Mapping[str, Place], read: Fields) -> Step:
    """What is packed of rows, of these arrays."""
    p, n = plan.problem, plan.sizes
    has_lse = plan.makes_lse or "teacher_lse" in p.views
    vectors = p["B"] * ((n["H"] if has_lse else 0) + n["I"] + (p.groups if "grad" in read.arrays else 0))
    tensors = {"teacher_lse": "BHM", **dict.fromkeys(("grad", "index_lse", "mass"), "BGM")}
    fields = Fields(
        {
            **{f"{name}.{axis}": 0 for name in tensors for axis in AXES[:3]},
            "entries": p["B"],
            "groups": p.groups,
            "queries": p["M"],
            "teacher_heads": n["H"],
            "index_heads": n["I"],
            "index_scale": p.index_scale,
        },
        {name: room[name].at for name in ("lse2", "weights")},
        {"in_weights": Array("index_weights", "BIM")},
    )
    return Step(plan.pack, indexer_pack.grid(p["M"], vectors), fields | read)


_WIDE = {
    "q": "cu_seqlens_q",
    "k": "cu_seqlens_k",
    "start": "key_start",
    "end": "key_end",
    "counts": "topk_length",
    "ids": "topk_indices",
}
"""Integers that may have 64 bits."""


def _row_fields(plan: IndexerPlan, room: Mapping[str, Place]) -> Fields:
    """What the kernels read that say which keys rows see."""
    p, rule = plan.problem, plan.problem.rule
    return Fields(
        {
            "q_offset": rule.q_offset or 0,
            "chosen": plan.sizes.get("C", 0),
            "queries": p["M"],
            "keys": p["N"],
            "sequences": p.sequences,
            "diagonal": int(rule.causal),
            "offset_given": int(rule.q_offset is not None),
            "ratio": min(rule.compress_ratio, 2**31 - 1),
            "relative": int(rule.topk_relative),
            "bit_groups": plan.bit_groups,
            "first_row": 0,
            "bit_rows": 1,
            **{f"wide_{x}": int(name in p.views and p.views[name].dtype == "int64") for x, name in _WIDE.items()},
        },
        {name: room[name].at for name in ("row_keys", "tile_keys", "bases", "bits")},
        {
            "key_start": Array("key_start", "B-M"),
            "key_end": Array("key_end", "B-M"),
            "mask": Array("key_mask", "B-N"),
            "counts": Array("topk_length", "BGM"),
            "ids": Array("topk_indices", "BGMC"),
            "cu_seqlens_q": Array("cu_seqlens_q", ""),
            "cu_seqlens_k": Array("cu_seqlens_k", ""),
        },
    )


def _score_fields(plan: IndexerPlan, room: Mapping[str, Place]) -> Fields:
    """What kernels of score tiles read, and those of their products, before a launch says more."""
    p, n = plan.problem, plan.sizes
    results = {
        "out_q": AXES,
        "out_k": AXES,
        **dict.fromkeys(("out_value", "out_lse", "out_mass", "out_weights"), AXES[:3]),
    }
    nothing = ("bits_batch", "bits_group", "bits_row", "first_tile", "strip_rows", "strip_pitch", "first_row")
    return Fields(
        {
            **{f"{name}.{axis}": 0 for name, axes in results.items() for axis in axes},
            **dict.fromkeys((*nothing, "strip_number", "key_blocks", "head_blocks"), 0),
            "entries": p["B"],
            "groups": p.groups,
            "queries": p["M"],
            "keys": p["N"],
            "teacher_heads": n["H"] // p.groups,
            "teacher_group": max(n["H"] // n["K"], 1),
            "rope_group": max(n["H"] // n["L"], 1),
            "index_heads": n["I"] // p.groups,
            "index_key_heads": n["J"],
            "tiles": plan.cut.grid_tiles,
            "grid_tiles": plan.cut.grid_tiles,
            "splits": plan.cut.splits,
            "shares": plan.cut.shares,
            "end_row": p["M"],
            **{f"teacher_numbers.{name}": x for name, x in SCORE.numbers(p.teacher_scale).items()},
            **{f"student_numbers.{name}": x for name, x in SCORE.numbers(p.index_scale).items()},
        },
        {name: room[name].at for name in ("lse2", "weights", "row_keys", "tile_keys", "bits")},
        {
            "teacher_q": Array("teacher_q", "BHMT"),
            "teacher_k": Array("teacher_k", "BKNT"),
            "rope_q": Array("teacher_q_rope", "BHMR"),
            "rope_k": Array("teacher_k_rope", "BLNR"),
            "index_q": Array("index_q", "BIMD"),
            "index_k": Array("index_k", "BJND"),
            "target": Array("target", "BGMN"),
        },
    )

"""The indexer's kernels on a GPU: how a call is cut, what lies in its workspace, and its launches.

A forward is the rows' intervals, what is packed of rows, where they are wanted the teacher's log-sum-exps, one pass of
score tiles whose keys are split over blocks, and a join. A backward goes over strips of rows: the gradients of their
logits once, then the kernels that multiply by them. How many rows, splits and shares there are hangs on shapes and the
GPU alone, so equal calls have equal bits.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

from ..arrays import ArrayView, Gradients, Inputs, MaskArrays, Results, Saved
from ..compiler.nvrtc import import_cupy, load
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
from ..kernels.base import Box, KernelText
from ..kernels.gpus import device_facts
from ..kernels.indexer import GRID, SCORE
from ..kernels.structs import INDEXER, TENSOR_MAP, Struct, Value
from ..kernels.tensor_maps import encode
from ..launch import Command, Launches, address_of, in_context, refuse_in_capture
from ..problem import compact_strides
from .plan import IndexerPlan, Place, make_plan, places
from .problem import IndexProblem, Views
from .strips import Strip


class Runner(Launches):
    """An IndexProblem made ready for one GPU. Thread-safe: calls share nothing that they change."""

    def __init__(self, problem: IndexProblem) -> None:
        super().__init__(problem.device.index)
        self.problem = problem
        self.index = problem.device.index
        self.facts = device_facts(self.index)
        self.launch = import_cupy().cuda.driver.launchKernel
        self.runtime = import_cupy().cuda.runtime
        self._plans: dict[tuple[str, ...], IndexerPlan] = {}
        self._handles: dict[KernelText, int] = {}

    @property
    def plan(self) -> IndexerPlan:
        """What a forward runs."""
        return self.plan_for(())

    def plan_for(self, wrt: tuple[str, ...]) -> IndexerPlan:
        """The same with the gradients `wrt`."""
        return self._plans.get(wrt) or self._plans.setdefault(wrt, make_plan(self.problem, self.facts, wrt))

    @property
    def workspace_bytes(self) -> int:
        """Of a forward."""
        return self.plan.workspace_bytes

    def backward_bytes(self, wrt: tuple[str, ...]) -> int:
        """Bytes of workspace for these gradients."""
        return self.plan_for(wrt).backward_bytes

    def warmup(self, wrt: tuple[str, ...] = ()) -> None:
        """Compile and load all kernels of a plan."""
        plan = self.plan_for(wrt)
        with in_context(self.index):
            for kernel in dict.fromkeys((*plan.forward, *plan.backward)):
                self.loaded(kernel, None)

    def forward(
        self,
        inputs: Inputs,
        outputs: Results,
        stream: int,
        workspace: int = 0,
        masks: MaskArrays | None = None,
        key: tuple[Any, ...] | None = None,
    ) -> None:
        """Launch the forward; every element of the outputs is written."""
        if key is None:
            key = (workspace, None, *map(address_of, inputs), *map(address_of, outputs))

        def commands() -> Iterable[Command]:
            call = _Call(self, inputs, stream, workspace, self.workspace_bytes)
            request = call.target if self.problem.operation.rows == ("target",) else call.forward
            return request(outputs)

        self._launch(key, stream, commands)

    def backward(
        self,
        inputs: Inputs,
        saved: Saved,
        outputs: Gradients,
        stream: int,
        workspace: int = 0,
        masks: MaskArrays | None = None,
        room: int | None = None,
        key: tuple[Any, ...] | None = None,
    ) -> None:
        """Launch the gradients that `outputs` has room for; every element of them is written."""
        if key is None:
            rows = tuple([None if x is None else (x.ptr, x.strides) for x in saved])
            key = ((workspace, rows), *map(address_of, inputs), *map(address_of, outputs))

        def commands() -> Iterable[Command]:
            wrt = tuple(name for name, out in zip(outputs._fields, outputs) if out is not None)
            call = _Call(self, inputs, stream, workspace, self.backward_bytes(wrt))
            return call.backward(saved, outputs, self.plan_for(wrt))

        self._launch(key, stream, commands)

    def loaded(self, kernel: KernelText, stream: int | None) -> int:
        """The handle; `stream`, unless None, is where the kernel is about to run."""
        handle = self._handles.get(kernel)
        if handle is None:
            if stream is not None:
                refuse_in_capture(stream, kernel.name, "indexer_kl_warmup")
            loaded = load(kernel.text, kernel.symbol, kernel.arch, smem_bytes=kernel.smem_bytes)
            handle = self._handles[kernel] = loaded.handle
        return handle


def _tensor(name: str, view: ArrayView | None, problem: IndexProblem, axes: str) -> dict[str, Value]:
    """Strides and address of an array by the letters that stand for batch, head, row and column, "-" for none."""
    fields = ("batch", "head", "row", "column")[: len(axes)]
    if view is None:
        return {f"{name}.{field}": 0 for field in (*fields, "pointer")}
    strides = problem.strides(axes.replace("-", ""), view)
    found: dict[str, Value] = {f"{name}.{field}": strides.get(x, 0) for field, x in zip(fields, axes, strict=True)}
    return found | {f"{name}.pointer": view.ptr}


class _Call:
    """What a call with its arrays runs, in order."""

    def __init__(self, runner: Runner, inputs: Inputs, stream: int, workspace: int, room: int) -> None:
        if room and not workspace:
            raise ValueError(f"workspace: got none; this call needs {room} bytes")
        self.runner, self.problem, self.stream, self.workspace = runner, runner.problem, stream, workspace
        self.views: Views = {view.name: view for view in inputs if view is not None}
        self.facts, self.plan = runner.facts, runner.plan
        self.cut, self.shape, self.sizes = self.plan.cut, self.plan.shape, self.plan.sizes
        self.commands: list[Command] = []
        self._last: tuple[Struct, Mapping[str, Value], Any] | None = None

    def forward(self, out: Results) -> list[Command]:
        """Into these; and into the teacher's log-sum-exps where none were given."""
        p = self.problem
        room = places(self.plan.forward_sizes(), self.workspace)
        score, cut = self.plan.score("rows").text, self.plan.row_cut
        args, rows = self._rows(room)
        if self.plan.makes_lse:
            self._make_lse(args, rows, room, out.made_lse)
        self._pack(room, out.made_lse if self.plan.makes_lse else self.views.get("teacher_lse"), {})
        args |= {"states": room["states"].at, "splits": cut.states}
        for tiles in self._tiles(self.plan.bit_tiles):
            here = args | self._bits(rows, room, tiles)
            self._run(score, self.plan.score_grid("rows", len(tiles), self.cut.splits), here)
        args |= _tensor("out_value", out.kl, p, "BGM") | _tensor("out_mass", out.target_sum, p, "BGM")
        args |= _tensor("out_lse", out.index_lse, p, "BGM")
        self._run(self.plan.join, indexer_join.grid(p["M"], p["B"] * p.groups, cut), args)
        return self.commands

    def _make_lse(
        self, args: dict[str, Value], rows: dict[str, Value], room: Mapping[str, Place], out: ArrayView
    ) -> None:
        p, heads, splits = self.problem, self.problem["B"] * self.sizes["H"], self.plan.lse_cut.states
        more = args | {"states": room["states"].at, "splits": splits} | _tensor("out_lse", out, p, "BHM")
        for tiles in self._tiles(self.plan.bit_tiles):
            here = more | self._bits(rows, room, tiles)
            self._run(self.plan.score("lse").text, self.plan.score_grid("lse", len(tiles), splits), here)
        if splits > 1:
            self._run(self.plan.lse_join, indexer_join.grid(p["M"], heads, self.plan.lse_cut), more)

    def _tiles(self, step: int) -> Iterator[range]:
        """Row tiles, some at a time."""
        for first in range(0, self.cut.grid_tiles, max(step, 1)):
            yield range(first, min(first + step, self.cut.grid_tiles))

    def target(self, outputs: Results) -> list[Command]:
        """Into (B, G, R, N) of R rows."""
        p, lse, out = self.problem, self.views.get("teacher_lse"), outputs.target
        first_row, end_row = p.rows or (0, p["M"])
        room = places(self.plan.forward_sizes(), self.workspace)
        first, end = first_row // GRID, -(-end_row // GRID)
        self._clear(Place(out.ptr, 4 * prod(out.shape)))
        args, rows = self._rows(room)
        if self.plan.makes_lse:
            shape = p.shape("BHM")
            made = (room["made_lse"].at, None)
            lse = ArrayView("teacher_lse", "", p.device, "float32", shape, compact_strides(shape), *made)
            self._make_lse(args, rows, room, lse)
        self._pack(room, lse, {})
        fields = _tensor("target", out, p, "BGMN")
        # Kernels count rows from the first of the call.
        fields["target.pointer"] = (out.ptr - 4 * p.strides("BGMN", out).get("M", 0) * first_row) % 2**64
        args |= fields | {"first_row": first_row, "end_row": end_row}
        for tiles in self._tiles(self.plan.bit_tiles):
            some = range(max(tiles.start, first), min(tiles.stop, end))
            if some:
                here = args | self._bits(rows, room, some)
                self._run(
                    self.plan.score("target").text, self.plan.score_grid("target", len(some), self.cut.splits), here
                )
        return self.commands

    def backward(self, saved: Saved, out: Gradients, plan: IndexerPlan) -> list[Command]:
        """The gradients that there is room for, strip by strip."""
        p = self.problem
        room = places(plan.backward_sizes(), self.workspace)
        args, rows = self._rows(room)
        lse = self.views.get("teacher_lse") if saved.made_lse is None else saved.made_lse
        self._pack(room, lse, {"grad": saved.grad, "index_lse": saved.index_lse, "target_sum": saved.target_sum})
        args |= {name: place.at for name, place in room.items() if name in INDEXER}
        args |= _tensor("out_q", out.index_q, p, "BIMD")
        args |= _tensor("out_weights", out.index_weights, p, "BIM")
        args |= _tensor("out_k", out.index_k, p, "BJND")
        args |= {"shares": plan.shares}
        if not plan.no_lists:
            self._lists(plan, args, rows, room)
        elif plan.no_gates:
            self._strips(plan, args, rows, room)
        else:
            self._gated_strips(plan, args, rows, room)
        return self.commands

    def _of_strip(
        self, strip: Strip, args: dict[str, Value], rows: dict[str, Value], room: Mapping[str, Place]
    ) -> dict[str, Value]:
        """What kernels of a strip read."""
        where = {"strip_rows": strip.tiles * GRID, "strip_pitch": strip.keys, "splits": strip.splits}
        return args | self._bits(rows, room, range(strip.first, strip.first + strip.tiles)) | where

    def _strips(
        self, plan: IndexerPlan, args: dict[str, Value], rows: dict[str, Value], room: Mapping[str, Place]
    ) -> None:
        """Strip by strip: the gradients of logits, then the kernels that compute scores again and multiply by them."""
        p, n = self.problem, self.sizes
        self._clear(room["broken"])
        self._run(plan.scan, indexer_scan.grid(self.facts), args)
        for strip in plan.strips:
            here = self._of_strip(strip, args, rows, room)
            self._run(plan.score("strip").text, plan.score_grid("strip", strip.tiles, strip.splits), here)
            if plan.by_query(plan.wrt):
                self._run(plan.query.text, plan.query.kernel.grid(plan.strip_cut(strip)), here)
            if "index_k" in plan.wrt:
                self._run(plan.key.text, plan.key.kernel.grid(plan.strip_cut(strip)), here)
        if "index_k" in plan.wrt:
            if self.cut.grid_tiles == 0:
                self._clear(room["key_sums"])
            self._run(plan.key_sum, indexer_sum.grid(p["N"] * n["D"], p["B"] * n["J"]), args)

    def _lists(
        self, plan: IndexerPlan, args: dict[str, Value], rows: dict[str, Value], room: Mapping[str, Place]
    ) -> None:
        """Some rows at a time: the gradients of the logits of keys that ids name, then all that multiplies by them."""
        p, n, by_key = self.problem, self.sizes, "index_k" in plan.wrt
        if by_key:
            self._clear(room["key_sums"])
        for tiles in self._tiles(plan.list_tiles):
            here = args | self._bits(rows, room, tiles)
            self._run(plan.score("list").text, plan.score_grid("list", len(tiles), 1), here)
            self._run(
                plan.listed.text, plan.listed.kernel.grid(len(tiles) * GRID * p["B"] * p.groups, self.facts), here
            )
        if by_key:
            self._run(plan.key_sum, indexer_sum.grid(p["N"] * n["D"], p["B"] * n["J"]), args)

    def _gated_strips(
        self, plan: IndexerPlan, args: dict[str, Value], rows: dict[str, Value], room: Mapping[str, Place]
    ) -> None:
        """Strip by strip: the gradients of logits and all gates, then the kernels that multiply by them."""
        batch, n = self.problem["B"], self.sizes
        by_query, by_key = plan.by_query(plan.wrt), "index_k" in plan.wrt
        if by_query:
            self._run(plan.key_tiling, indexer_tiles.grid(-(-n["N"] // GRID), batch * n["J"]), args)
            self._clear(room["kept_flags"])
        if by_key:
            self._clear(room["key_sums"])
        args |= {"kept_sums": room["partials"].at}
        for number, strip in enumerate(plan.strips):
            blocks = strip.keys // indexer_gated_key_sm90.KEY_BLOCK
            more: dict[str, Value] = {"strip_number": number, "key_blocks": blocks, "head_blocks": plan.head_blocks}
            strips = places(plan.strip_sizes(strip.tiles, strip.pairs), room["strips"].at)
            more |= {name: place.at for name, place in strips.items()}
            here = self._of_strip(strip, args | more, rows, room)
            self._run(plan.units, indexer_units.BLOCKS, here)
            self._run(plan.score("strip").text, plan.score_grid("strip", strip.tiles, strip.splits), here)
            if by_query:
                self._run(plan.query.text, plan.query.kernel.grid(plan.strip_cut(strip)), here)
            if by_key:
                self._run(plan.query_tiling, indexer_tiles.grid(strip.tiles, batch * n["I"]), here)
                self._run(plan.key.text, plan.key.kernel.grid(plan.strip_cut(strip)), here)
                self._run(plan.key_sum, indexer_gated_join.grid(batch * n["J"] * blocks), here)

    def _rows(self, room: Mapping[str, Place]) -> tuple[dict[str, Value], dict[str, Value]]:
        """Find which keys rows see; what all score kernels read, and what the kernel of bits does."""
        fields = self._row_fields(room)
        self._run(self.plan.rows, indexer_rows.grid(self.cut.grid_tiles, self.problem["B"]), fields)
        return self._score_fields(room), fields

    def _row_fields(self, room: Mapping[str, Place]) -> dict[str, Value]:
        """What the kernels read that say which keys rows see."""
        p, views, rule = self.problem, self.views, self.problem.rule
        wide = {
            "q": "cu_seqlens_q",
            "k": "cu_seqlens_k",
            "start": "key_start",
            "end": "key_end",
            "counts": "topk_length",
            "ids": "topk_indices",
        }
        ids = views.get("topk_indices")
        return {
            **_tensor("key_start", views.get("key_start"), p, "B-M"),
            **_tensor("key_end", views.get("key_end"), p, "B-M"),
            **_tensor("mask", views.get("key_mask"), p, "B-N"),
            **_tensor("counts", views.get("topk_length"), p, "BGM"),
            **_tensor("ids", ids, p, "BGMC"),
            **{name: views[name].ptr if name in views else 0 for name in ("cu_seqlens_q", "cu_seqlens_k")},
            **{name: room[name].at for name in ("row_keys", "tile_keys", "bases", "bits")},
            "q_offset": rule.q_offset or 0,
            "chosen": self.sizes.get("C", 0),
            "queries": p["M"],
            "keys": p["N"],
            "sequences": p.sequences,
            "diagonal": int(rule.causal),
            "offset_given": int(rule.q_offset is not None),
            "ratio": min(rule.compress_ratio, 2**31 - 1),
            "relative": int(rule.topk_relative),
            "bit_groups": self.plan.bit_groups,
            "first_row": 0,
            "bit_rows": 1,
            **{f"wide_{key}": int(name in views and views[name].dtype == "int64") for key, name in wide.items()},
        }

    def _score_fields(self, room: Mapping[str, Place]) -> dict[str, Value]:
        """What kernels of score tiles read, and those of their products."""
        p, views, n = self.problem, self.views, self.sizes
        return {
            **_tensor("teacher_q", views.get("teacher_q"), p, "BHMT"),
            **_tensor("teacher_k", views.get("teacher_k"), p, "BKNT"),
            **_tensor("rope_q", views.get("teacher_q_rope"), p, "BHMR"),
            **_tensor("rope_k", views.get("teacher_k_rope"), p, "BLNR"),
            **_tensor("index_q", views.get("index_q"), p, "BIMD"),
            **_tensor("index_k", views.get("index_k"), p, "BJND"),
            **_tensor("target", views.get("target"), p, "BGMN"),
            **_tensor("out_q", None, p, "BIMD"),
            **_tensor("out_k", None, p, "BJND"),
            **{
                k: v
                for name in ("value", "lse", "mass", "weights")
                for k, v in _tensor(f"out_{name}", None, p, "BGM").items()
            },
            **{name: room[name].at for name in ("lse2", "weights", "row_keys", "tile_keys", "bits")},
            "row_stats": 0,
            "states": 0,
            "strip": 0,
            "key_sums": 0,
            "broken": 0,
            "bits_batch": 0,
            "bits_group": 0,
            "bits_row": 0,
            "entries": p["B"],
            "groups": p.groups,
            "queries": p["M"],
            "keys": p["N"],
            "teacher_heads": n["H"] // p.groups,
            "teacher_group": max(n["H"] // n["K"], 1),
            "rope_group": max(n["H"] // n["L"], 1),
            "index_heads": n["I"] // p.groups,
            "index_key_heads": n["J"],
            "first_tile": 0,
            "tiles": self.cut.grid_tiles,
            "grid_tiles": self.cut.grid_tiles,
            "splits": self.cut.splits,
            "shares": self.cut.shares,
            "strip_rows": 0,
            "strip_pitch": 0,
            "first_row": 0,
            "end_row": p["M"],
            **{f"teacher_numbers.{name}": x for name, x in SCORE.numbers(p.teacher_scale).items()},
            **{f"student_numbers.{name}": x for name, x in SCORE.numbers(p.index_scale).items()},
            **dict.fromkeys(("gates", "weighted_queries", "key_tiles", "units", "items", "kept_sums", "kept_flags"), 0),
            "strip_widths": 0,
            "partials": 0,
            "strip_number": 0,
            "key_blocks": 0,
            "head_blocks": 0,
            "listed": 0,
        }

    def _bits(self, rows: dict[str, Value], room: Mapping[str, Place], tiles: range) -> dict[str, Value]:
        """Make the bits of the rows of some tiles; what a launch for these reads."""
        where: dict[str, Value] = {"first_tile": tiles.start, "tiles": len(tiles)}
        if not self.shape.bits:
            return where
        plan, p, words = self.plan, self.problem, self.plan.words
        chosen = "topk_indices" in self.views
        first, count = (tiles.start * GRID, min(tiles.stop * GRID, p["M"]) - tiles.start * GRID) if chosen else (0, 1)
        grid = indexer_bits.grid(plan.bit_groups * count, p["B"])
        self._run(plan.bits, grid, rows | {"first_row": first, "bit_rows": count})
        return where | {
            # Kernels count rows from the first of the call.
            "bits": (room["bits"].at - 4 * words * first) % 2**64,
            "bits_batch": plan.bit_groups * count * words,
            "bits_group": count * words if plan.bit_groups > 1 else 0,
            "bits_row": words if chosen else 0,
        }

    def _pack(self, room: Mapping[str, Place], lse: ArrayView | None, saved: Mapping[str, ArrayView]) -> None:
        p, n = self.problem, self.sizes
        row_stats = room["row_stats"].at if saved else 0
        vectors = p["B"] * ((n["H"] if lse is not None else 0) + n["I"] + (p.groups if saved else 0))
        self._run(
            self.plan.pack,
            indexer_pack.grid(p["M"], vectors),
            {
                **_tensor("teacher_lse", lse, p, "BHM"),
                **_tensor("in_weights", self.views.get("index_weights"), p, "BIM"),
                **_tensor("grad", saved.get("grad"), p, "BGM"),
                **_tensor("index_lse", saved.get("index_lse"), p, "BGM"),
                **_tensor("mass", saved.get("target_sum"), p, "BGM"),
                "lse2": room["lse2"].at,
                "weights": room["weights"].at,
                "row_stats": row_stats,
                "entries": p["B"],
                "groups": p.groups,
                "queries": p["M"],
                "teacher_heads": n["H"],
                "index_heads": n["I"],
                "index_scale": p.index_scale,
            },
        )

    def _map(self, box: Box) -> tuple[int, ...]:
        view = self.views[box.name]
        return _WORDS.unpack(encode(view.ptr, self.problem.operand(box.name), self.problem["B"], box))

    def _clear(self, place: Place) -> None:
        self.commands.append(Command(self.runner.runtime.memsetAsync, (place.at, 0, place.bytes)))

    def _run(self, kernel: KernelText, grid: tuple[int, ...], values: Mapping[str, Value]) -> None:
        """Launch a kernel; one that has nothing to do is left out."""
        if 0 in grid:
            return
        handle = self.runner.loaded(kernel, self.stream)
        if kernel.boxes:
            values = {**values, **{f"{box.name}.words": self._map(box) for box in kernel.boxes}}
        last = self._last  # kernels of a strip read the same
        packed = last[2] if last and last[0] is kernel.args and last[1] is values else _packed(kernel.args, values)
        if not kernel.boxes:
            self._last = kernel.args, values, packed
        parameters = ctypes.c_void_p(ctypes.addressof(packed))
        x, y, z = (*grid, 1, 1)[:3]
        shape = (x, y, z, kernel.threads, 1, 1, kernel.smem_bytes)
        end = (ctypes.addressof(parameters), 0)
        self.commands.append(Command(self.runner.launch, (handle, *shape), end, (packed, parameters)))


_WORDS = struct.Struct(f"={TENSOR_MAP.size // 8}Q")


def _packed(args: Struct, values: Mapping[str, Value]) -> Any:
    data = args.pack({name: value for name, value in values.items() if name in args})
    return (ctypes.c_char * len(data)).from_buffer_copy(data)

"""The indexer's kernels on a GPU: how a call is cut, what lies in its workspace, and its launches.

A forward is the rows' intervals, what is packed of rows, where they are wanted the teacher's log-sum-exps, one pass of
score tiles whose keys are split over blocks, and a join. A backward goes over strips of rows: the gradients of their
logits once, then the kernels that multiply by them. How many rows, splits and shares there are hangs on shapes and the
GPU alone, so equal calls have equal bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any, NamedTuple

from .. import frameworks
from ..arrays import ITEMSIZE, ArrayView
from ..compiler.nvrtc import import_cupy, load
from ..errors import CaptureError
from ..kernels import (
    indexer_bits,
    indexer_join,
    indexer_key_sm80,
    indexer_pack,
    indexer_query_sm80,
    indexer_rows,
    indexer_scan,
    indexer_score_sm80,
    indexer_sum,
)
from ..kernels.gpus import DeviceFacts, device_facts
from ..kernels.indexer import GRID, IndexerKernel, IndexerShape
from ..kernels.structs import Struct, Value
from ..launch import in_context
from ..rules.scores.interface import LOG2E
from .problem import IndexProblem, Views, callers_axes

STRIP_BYTES = 32 << 20
"""Of gradients of logits at a time: they are read once for every head, and should stay in the L2 cache."""
BLOCKS_PER_MULTIPROCESSOR = 6
"""Into so many the work is cut, for the last ones to end together."""
MOST_SPLITS = 64
LINE = 256


class _Place(NamedTuple):
    """A region of a workspace."""

    address: int
    bytes: int


class Cut(NamedTuple):
    """How the work of a call is cut."""

    grid_tiles: int
    strip_tiles: int
    """Of rows that a strip has."""
    splits: int
    """Blocks over which the keys of a row tile go, in a forward; and in a strip."""
    strip_splits: int
    shares: int
    """Blocks over which the rows of a key tile go."""


def shape_of(problem: IndexProblem, views: Views) -> IndexerShape:
    """What kernels are compiled for."""
    vectors = {"TQ": "teacher_q", "TK": "teacher_k", "RQ": "teacher_q_rope", "RK": "teacher_k_rope", "SQ": "index_q"}
    vectors["SK"] = "index_k"
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
        vectors=frozenset(key for key, name in vectors.items() if name not in views or _by_vectors(views[name])),
    )


def _by_vectors(view: ArrayView) -> bool:
    """Whether rows can be read 16 bytes at a time."""
    per_chunk = 16 // ITEMSIZE[view.dtype]
    return view.ptr % 16 == 0 and view.strides[-1] == 1 and all(x % per_chunk == 0 for x in view.strides[:-1])


def cut(problem: IndexProblem, facts: DeviceFacts) -> Cut:
    """How the work is cut, by shapes and the GPU."""
    entries, wanted = problem["B"] * problem.groups, BLOCKS_PER_MULTIPROCESSOR * facts.multiprocessors
    grid, keys = -(-problem["M"] // GRID), -(-problem["N"] // GRID)
    # float32 strips have half as many rows.
    strip = max(STRIP_BYTES // max(entries * GRID * keys * GRID * 2, 1), 1)
    strip = min(-(-grid // -(-grid // strip)), grid) if grid else 0

    def splits(rows: int) -> int:
        return max(min(-(-wanted // max(rows * entries, 1)), keys, MOST_SPLITS), 1)

    blocks = keys * problem["B"] * dict(problem.sizes).get("J", 1)
    shares = max(min(-(-wanted // max(blocks, 1)), strip, 16), 1)
    return Cut(grid, strip, splits(grid), splits(strip), shares)


def _tensor(name: str, view: ArrayView | None, problem: IndexProblem, axes: str) -> dict[str, Value]:
    """Strides and address of an array by the letters that stand for batch, head, row and column, "-" for none."""
    fields = ("batch", "head", "row", "column")[: len(axes)]
    if view is None:
        return {f"{name}.{field}": 0 for field in (*fields, "pointer")}
    strides = letters(view, problem, axes.replace("-", ""))
    found: dict[str, Value] = {f"{name}.{field}": strides.get(x, 0) for field, x in zip(fields, axes, strict=True)}
    return found | {f"{name}.pointer": view.ptr}


def letters(view: ArrayView, problem: IndexProblem, axes: str) -> dict[str, int]:
    """Strides by the letters of the axes that the array has of these."""
    found = callers_axes(axes, problem.layout, problem.batched)
    if len(found) != len(view.shape):
        found = callers_axes(axes.translate({ord(x): None for x in "GJ"}), problem.layout, problem.batched)
    return {x: 0 if n == 1 else step for x, n, step in zip(found, view.shape, view.strides, strict=True)}


class CudaRun:
    """A call with its arrays on a GPU."""

    def __init__(self, problem: IndexProblem, views: Views, like: ArrayView) -> None:
        self.problem, self.views, self.like = problem, views, like
        self.index = like.device.index
        self.facts = device_facts(self.index)
        self.cut = cut(problem, self.facts)
        self.shape = shape_of(problem, views)
        self.sizes = {"J": 1, "I": problem.groups, "H": 0, "K": 1, "L": 1, "D": 16, **dict(problem.sizes)}
        self.stream = frameworks.stream_of(like)
        self._launch = import_cupy().cuda.driver.launchKernel
        self._held: list[Any] = []

    @contextmanager
    def current(self) -> Iterator[None]:
        """Around all launches of a call; memory of guests is kept until these are done."""
        with in_context(self.index):
            yield
        if self.like.framework not in frameworks.OWN:
            frameworks.hold((*self.views.values(), *self._held))

    def forward(
        self, kl: ArrayView, index_lse: ArrayView, target_sum: ArrayView, teacher_lse: ArrayView | None
    ) -> None:
        """Launch into these; and into the teacher's log-sum-exps where none were given."""
        p, n = self.problem, self.sizes
        lse = self.views.get("teacher_lse") if teacher_lse is None else teacher_lse
        states = 16 * self.cut.splits * p["M"] * p["B"]
        room = self._room(**self._row_bytes, states=states * max(p.groups, n["H"] if teacher_lse is not None else 0))
        score, join = self._score("rows"), indexer_join.plan(lse=False)
        with self.current():
            args = self._rows(room)
            if teacher_lse is not None:
                self._make_lse(args, room, teacher_lse)
            self._pack(room, lse, {})
            args |= {"states": room["states"].address}
            self._run(score, (self.cut.grid_tiles * self.cut.splits, p["B"] * p.groups), args)
            args |= _tensor("out_value", kl, p, "BGM") | _tensor("out_mass", target_sum, p, "BGM")
            args |= _tensor("out_lse", index_lse, p, "BGM")
            self._run(join, (-(-p["M"] // join.threads), p["B"] * p.groups), args)

    def _make_lse(self, args: dict[str, Value], room: Mapping[str, _Place], out: ArrayView) -> None:
        p, heads = self.problem, self.problem["B"] * self.sizes["H"]
        more = args | {"states": room["states"].address} | _tensor("out_lse", out, p, "BHM")
        self._run(self._score("lse"), (self.cut.grid_tiles * self.cut.splits, heads), more)
        join = indexer_join.plan(lse=True)
        self._run(join, (-(-p["M"] // join.threads), heads), more)

    def target(self, out: ArrayView, first_row: int, end_row: int) -> None:
        """Launch into (B, G, R, N) of R rows, which are 0 already."""
        p, lse = self.problem, self.views.get("teacher_lse")
        made = None
        if lse is None:
            made = frameworks.empty(self.like, p.shape("BHM"), "float32")._replace(name="teacher_lse")
        states = 16 * self.cut.splits * p["M"] * p["B"] * self.sizes["H"] if made else 0
        room = self._room(**self._row_bytes, states=states)
        first, end = first_row // GRID, -(-end_row // GRID)
        with self.current():
            args = self._rows(room)
            if made is not None:
                self._make_lse(args, room, made)
            self._pack(room, lse if made is None else made, {})
            fields = _tensor("target", out, p, "BGMN")
            # Kernels count rows from the first of the call.
            fields["target.pointer"] = (out.ptr - 4 * letters(out, p, "BGMN").get("M", 0) * first_row) % 2**64
            args |= fields | {"first_tile": first, "tiles": end - first, "first_row": first_row, "end_row": end_row}
            self._run(self._score("target"), ((end - first) * self.cut.splits, p["B"] * p.groups), args)

    def backward(
        self,
        saved: Mapping[str, ArrayView],
        teacher_lse: ArrayView | None,
        out: Mapping[str, ArrayView],
    ) -> None:
        """Launch the gradients that are wanted, strip by strip."""
        p, n, c = self.problem, self.sizes, self.cut
        if self.shape.student == "float16":
            raise NotImplementedError(
                "gradients of an indexer in float16 on a GPU are not built; built are bfloat16 and float32. Cast "
                "index_q and index_k"
            )
        entries, depth = p["B"] * p.groups, -(-n["D"] // 16) * 16
        keys, rows = -(-p["N"] // GRID) * GRID, c.strip_tiles * GRID
        room = self._room(
            **self._row_bytes,
            row_stats=16 * entries * p["M"],
            strip=entries * rows * keys * ITEMSIZE[self.shape.student],
            key_sums=4 * c.shares * p["B"] * n["J"] * p["N"] * depth if "index_k" in out else 0,
            broken=4,
        )
        by_query = "index_q" in out or "index_weights" in out
        score, scan = self._score("strip"), indexer_scan.plan(self.shape)
        query = indexer_query_sm80.plan(self.shape, self.facts) if by_query else None
        key = indexer_key_sm80.plan(self.shape, self.facts) if "index_k" in out else None
        with self.current():
            self._clear(room["broken"])
            args = self._rows(room)
            self._pack(room, teacher_lse, saved)
            regions = ("row_stats", "strip", "key_sums", "broken")
            args |= {name: room[name].address for name in regions}
            args |= _tensor("out_q", out.get("index_q"), p, "BIMD")
            args |= _tensor("out_weights", out.get("index_weights"), p, "BIM")
            args |= _tensor("out_k", out.get("index_k"), p, "BJND")
            args |= {"strip_rows": rows, "strip_pitch": keys, "splits": c.strip_splits, "shares": c.shares}
            self._run(scan, (4 * self.facts.multiprocessors, 1), args)
            for first in range(0, c.grid_tiles, max(c.strip_tiles, 1)):
                tiles = min(c.strip_tiles, c.grid_tiles - first)
                args |= {"first_tile": first, "tiles": tiles}
                self._run(score, (tiles * c.strip_splits, entries), args)
                if query is not None:
                    self._run(query, (tiles, p["B"] * n["I"]), args)
                if key is not None:
                    self._run(key, (keys // GRID, p["B"] * n["J"], c.shares), args)
            if key is not None:
                total = indexer_sum.plan(self.shape)
                if c.grid_tiles == 0:
                    import_cupy().cuda.runtime.memsetAsync(
                        room["key_sums"].address, 0, room["key_sums"].bytes, self.stream
                    )
                self._run(total, (-(-p["N"] * n["D"] // total.threads), p["B"] * n["J"]), args)

    def _score(self, ending: indexer_score_sm80.Ending) -> IndexerKernel:
        return indexer_score_sm80.plan(self.shape, ending, self.facts)

    @cached_property
    def _row_bytes(self) -> dict[str, int]:
        """Of regions that every request has."""
        p, n = self.problem, self.sizes
        rows, words = p["B"] * p["M"], -(-p["N"] // 32)
        chosen = "topk_indices" in self.views
        bits = p["B"] * (self._bit_groups * p["M"] if chosen else 1) * words * 4 if self.shape.bits else 0
        return {
            "lse2": 4 * n["H"] * rows,
            "weights": 4 * n["I"] * rows,
            "row_keys": 8 * rows,
            "tile_keys": 8 * p["B"] * self.cut.grid_tiles,
            "bases": 4 * rows,
            "bits": bits,
        }

    @property
    def _bit_groups(self) -> int:
        ids = self.views.get("topk_indices")
        if ids is None:
            return 1
        lengths = self.views.get("topk_length")
        grouped = "G" in letters(ids, self.problem, "BGMC")
        grouped = grouped or (lengths is not None and "G" in letters(lengths, self.problem, "BGM"))
        return self.problem.groups if grouped else 1

    def _room(self, **regions: int) -> dict[str, _Place]:
        """Memory of the caller's framework, cut into regions."""
        sizes = {name: -(-size // LINE) * LINE for name, size in regions.items()}
        memory = frameworks.empty(self.like, (sum(sizes.values()) // 4 + LINE,), "float32")
        self._held.append(memory)
        found, address = {}, -(-memory.ptr // LINE) * LINE
        for name, size in sizes.items():
            found[name] = _Place(address, size)
            address += size
        return found

    def _rows(self, room: Mapping[str, _Place]) -> dict[str, Value]:
        """Find which keys rows see; what all score kernels read."""
        p, views, rule = self.problem, self.views, self.problem.rule
        wide = {
            "q": "cu_seqlens_q",
            "k": "cu_seqlens_k",
            "start": "key_start",
            "end": "key_end",
            "counts": "topk_length",
            "ids": "topk_indices",
        }
        ends = views.get("cu_seqlens_q")
        ids = views.get("topk_indices")
        fields: dict[str, Value] = {
            **_tensor("key_start", views.get("key_start"), p, "B-M"),
            **_tensor("key_end", views.get("key_end"), p, "B-M"),
            **_tensor("mask", views.get("key_mask"), p, "B-N"),
            **_tensor("counts", views.get("topk_length"), p, "BGM"),
            **_tensor("ids", ids, p, "BGMC"),
            **{name: views[name].ptr if name in views else 0 for name in ("cu_seqlens_q", "cu_seqlens_k")},
            **{name: room[name].address for name in ("row_keys", "tile_keys", "bases", "bits")},
            "q_offset": rule.q_offset or 0,
            "chosen": self.sizes.get("C", 0),
            "queries": p["M"],
            "keys": p["N"],
            "sequences": 0 if ends is None else ends.shape[0] - 1,
            "diagonal": int(rule.causal),
            "offset_given": int(rule.q_offset is not None),
            "ratio": min(rule.compress_ratio, 2**31 - 1),
            "relative": int(rule.topk_relative),
            "bit_groups": self._bit_groups,
            **{f"wide_{key}": int(name in views and views[name].dtype == "int64") for key, name in wide.items()},
        }
        self._run(indexer_rows.plan(), (self.cut.grid_tiles, p["B"]), fields)
        words, rows = -(-p["N"] // 32), p["M"] if ids is not None else 1
        if self.shape.bits:
            bits = indexer_bits.plan()
            self._run(bits, (-(-self._bit_groups * rows // (bits.threads // 32)), p["B"]), fields)
        n, per_group = self.sizes, self._bit_groups > 1
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
            **{name: room[name].address for name in ("lse2", "weights", "row_keys", "tile_keys", "bits")},
            "row_stats": 0,
            "states": 0,
            "strip": 0,
            "key_sums": 0,
            "broken": 0,
            "bits_batch": self._bit_groups * rows * words,
            "bits_group": rows * words if per_group else 0,
            "bits_row": words if ids is not None else 0,
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
            "teacher_scale2": p.teacher_scale * LOG2E,
            "index_scale2": p.index_scale * LOG2E,
        }

    def _pack(self, room: Mapping[str, _Place], lse: ArrayView | None, saved: Mapping[str, ArrayView]) -> None:
        p, n = self.problem, self.sizes
        row_stats = room["row_stats"].address if saved else 0
        pack = indexer_pack.plan(self.shape)
        vectors = p["B"] * ((n["H"] if lse is not None else 0) + n["I"] + (p.groups if saved else 0))
        self._run(
            pack,
            (-(-p["M"] // pack.threads), vectors),
            {
                **_tensor("teacher_lse", lse, p, "BHM"),
                **_tensor("in_weights", self.views.get("index_weights"), p, "BIM"),
                **_tensor("grad", saved.get("grad"), p, "BGM"),
                **_tensor("index_lse", saved.get("index_lse"), p, "BGM"),
                **_tensor("mass", saved.get("target_sum"), p, "BGM"),
                "lse2": room["lse2"].address,
                "weights": room["weights"].address,
                "row_stats": row_stats,
                "entries": p["B"],
                "groups": p.groups,
                "queries": p["M"],
                "teacher_heads": n["H"],
                "index_heads": n["I"],
                "index_scale": p.index_scale,
            },
        )

    def _clear(self, place: _Place) -> None:
        import_cupy().cuda.runtime.memsetAsync(place.address, 0, place.bytes, self.stream)

    def _run(self, kernel: IndexerKernel, grid: tuple[int, ...], values: Mapping[str, Value]) -> None:
        """Launch a kernel; one that has nothing to do is left out."""
        if 0 in grid:
            return
        handle = _loaded(kernel, self.facts.flag, self.index, self.stream)
        packed = _packed(kernel.args, values)
        parameters = ctypes.c_void_p(ctypes.addressof(packed))
        x, y, z = (*grid, 1, 1)[:3]
        shape = (x, y, z, kernel.threads, 1, 1, kernel.smem_bytes)
        self._launch(handle, *shape, self.stream, ctypes.addressof(parameters), 0)


def _packed(args: Struct, values: Mapping[str, Value]) -> Any:
    data = args.pack({name: value for name, value in values.items() if name in args})
    return (ctypes.c_char * len(data)).from_buffer_copy(data)


_handles: dict[tuple[IndexerKernel, int], int] = {}


def _loaded(kernel: IndexerKernel, arch: str, index: int, stream: int) -> int:
    handle = _handles.get((kernel, index))
    if handle is None:
        if import_cupy().cuda.runtime.streamIsCapturing(stream):
            raise CaptureError(
                f"the {kernel.name} kernel of this call is not loaded, and loading cannot be captured into a CUDA "
                "graph: run the call once before the capture"
            )
        loaded = load(kernel.text, kernel.symbol, arch, smem_bytes=kernel.smem_bytes)
        handle = _handles[kernel, index] = loaded.handle
    return handle

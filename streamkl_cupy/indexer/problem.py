"""What a call of the indexer asks for, and the errors of one that does not fit.

TypeError is for kinds and dtypes, ValueError for shapes and options, NotImplementedError for what is not built.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .. import frameworks
from ..arguments import a_kind_of, listed
from ..arrays import CPU, ITEMSIZE, ArrayView, Inputs, MaskArrays, cuda
from ..frameworks.base import FRAMEWORKS, dtype_label
from ..ops import INDEXER_KL, Op, OperandSpec
from ..ops.indexer_kl import MAX_INDEX_DIM, MAX_INDEX_HEADS, MAX_TEACHER_DIM, WRT
from ..options import IndexOptions
from ..problem import AnyProblem, Device, Operand, callers_axes, compact_strides
from ..rules.row_keys import RowKeys
from ..validate import MAX_SCALE, same_place

SPECS = INDEXER_KL.operand
Views = dict[str, ArrayView]
_MAY_LACK = {ord(letter): None for spec in INDEXER_KL.operands for letter in spec.may_lack}
_WORDS = {
    "B": "batch entries",
    "M": "query rows",
    "N": "keys",
    "G": "head groups",
    "H": "teacher heads",
    "I": "index heads",
    "T": "teacher columns",
    "R": "rotary columns",
    "D": "index columns",
    "S": "ends of sequences",
}


@dataclass(frozen=True, kw_only=True)
class IndexProblem(AnyProblem):
    """One whose operands are by the letters of their axes, and whose rows see what integers and bits say."""

    sizes: tuple[tuple[str, int], ...]
    """By the letters of the record; of an absent array there are none."""
    arrays: tuple[ArrayView, ...]
    """Those that there are, without memory: of an address what it is beyond a multiple of 16."""
    teacher_scale: float
    index_scale: float
    relu: bool
    groups: int
    grouped: bool
    """Whether row results have an axis of groups."""
    rule: RowKeys
    rows: tuple[int, int] | None = None
    """Those that a target is of, the first and the one after the last; None: all."""

    def __getitem__(self, letter: str) -> int:
        return dict(self.sizes)[letter]

    @property
    def dtypes(self) -> tuple[str, ...]:
        return tuple(view.dtype for view in self.arrays if SPECS[view.name].elements in ("teacher", "index"))

    @cached_property
    def views(self) -> Views:
        """`arrays` by name."""
        return {view.name: view for view in self.arrays}

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the arrays that there are."""
        return tuple(self.views)

    @property
    def makes_lse(self) -> bool:
        """Whether it makes the teacher's log-sum-exps."""
        return "teacher_q" in self.views and "teacher_lse" not in self.views

    @property
    def keys(self) -> int:
        return self["N"]

    @property
    def results(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and type of what a forward writes."""
        shapes = dict.fromkeys(self.operation.rows, self.row_shape)
        if self.makes_lse and "made_lse" in self.operation.ruled_rows:
            shapes["made_lse"] = self.shape("BHM")
        return {name: (shape, self.stat_dtype) for name, shape in shapes.items()}

    def shape(self, axes: str) -> tuple[int, ...]:
        """That of an array with these axes, as the caller has them."""
        sizes = {**dict(self.sizes), "G": self.groups}
        axes = axes if self.grouped else axes.replace("G", "")
        return tuple(sizes[letter] for letter in self.callers_axes(axes))

    def axes_of(self, axes: str, view: ArrayView) -> str:
        """Those of the axes that an array has, in its order; it may lack some whose extent is 1."""
        found = self.callers_axes(axes)
        return found if len(found) == len(view.shape) else self.callers_axes(axes.translate(_MAY_LACK))

    def strides(self, axes: str, view: ArrayView) -> dict[str, int]:
        """By the letters of the axes that the array has of these; 0 where the extent is 1."""
        found = self.axes_of(axes, view)
        return {x: 0 if n == 1 else step for x, n, step in zip(found, view.shape, view.strides, strict=True)}

    def operand(self, name: str) -> Operand:
        view, axes, sizes = self.views[name], SPECS[name].letters, dict(self.sizes)
        strides = self.strides(axes, view)
        steps = (strides.get(axes[0], 0), strides.get(axes[1], 0), strides[axes[2]], view.strides[-1])
        extents = sizes.get(axes[1], 1), sizes[axes[2]], sizes[axes[3]]
        return Operand(*extents, view.dtype, steps, view.ptr % 16 == 0)

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Of kl, index_lse and target_sum, or of a target."""
        if self.operation.rows != ("target",):
            return self.shape("BGM")
        first, end = self.rows or (0, self["M"])
        return dataclasses.replace(self, sizes=tuple({**dict(self.sizes), "M": end - first}.items())).shape("BGMN")


def read(op: Op, operands: tuple[Any, ...]) -> Inputs:
    """Read the arrays of a call."""
    framework = frameworks.framework_of(op.like, operands[op.at])
    return op.Inputs(*(None if x is None else describe(n, x, framework) for n, x in zip(op.names, operands)))


def describe(name: str, x: Any, framework: str) -> ArrayView:
    """Read one of the arrays, without a copy."""
    if SPECS[name].elements not in ("integer", "bool"):
        view = frameworks.describe(name, x)
        check_dtype(name, view.dtype)
        return view
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        raise TypeError(f"{name} is {a_kind_of(x)}; allowed is a {framework} array")
    check_dtype(name, dtype_label(dtype))
    return FRAMEWORKS[frameworks.framework_of(name, x)].read(name, x, True)


def standin(name: str, x: Any, device: Device, framework: str = "standin") -> ArrayView:
    """View something with a shape and a dtype as the compact array that it stands for."""
    shape, label = tuple(x.shape), dtype_label(np.dtype(x.dtype))
    check_dtype(name, label)
    return ArrayView(name, framework, device, label, shape, compact_strides(shape), 0, x)


def outline(op: Op, operands: tuple[Any, ...], device: Device | None = None) -> Inputs:
    """Views of arrays or of what stands for some, as if on `device` where one is given; without arrays on the current
    GPU, or where there is none on the CPU."""
    named = {name: x for name, x in zip(op.names, operands, strict=True) if x is not None}
    there = {name: x for name, x in named.items() if not frameworks.is_standin(name, x)}
    views = {name: describe(name, x, frameworks.framework_of(name, x)) for name, x in there.items()}
    like = next(iter(views.values()), None)
    gpu = frameworks.current_gpu() if like is None and device is None else None
    place = like.device if like is not None else CPU if gpu is None else cuda(gpu)
    framework = "stand-in" if like is None else like.framework
    for name, x in named.items():
        view = views.get(name) or standin(name, x, place, framework)
        views[name] = view if device is None else view._replace(device=device)
    return op.Inputs(*map(views.get, op.names))


_DTYPES = {
    "integer": ("int32", "int64"),
    "bool": ("bool",),
    "row number": ("float32", "float64"),
}


def check_dtype(name: str, label: str) -> None:
    """Refuse one that an array of the name does not have."""
    allowed = _DTYPES.get(SPECS[name].elements, tuple(ITEMSIZE))
    if label not in allowed:
        raise TypeError(f"{name} has dtype {label}; allowed are {', '.join(allowed)}. Cast it")


def wanted(wrt: Any) -> tuple[str, ...]:
    """The names of `wrt`, checked."""
    if isinstance(wrt, str) or not isinstance(wrt, (tuple, list)):
        raise TypeError(f"wrt is {a_kind_of(wrt)}; pass a tuple of argument names, such as wrt={WRT!r}")
    for name in wrt:
        if name in ("teacher_q", "teacher_k", "teacher_lse", "teacher_q_rope", "teacher_k_rope", "target"):
            raise NotImplementedError(f"wrt names {name!r}: {TEACHER_IS_CONSTANT}")
        if name not in WRT:
            raise ValueError(f"wrt names {name!r}; allowed are {listed(WRT)}")
    if not wrt or len(set(wrt)) != len(wrt):
        raise ValueError(f"wrt={tuple(wrt)!r}; name at least one of {listed(WRT)}, each once")
    return tuple(wrt)


TEACHER_IS_CONSTANT = (
    "the teacher is a constant of indexer_kl, as in every recipe that trains an indexer; detach it, or use "
    "attention_kl where queries and keys of a teacher are trained"
)


def to_problem(op: Op, inputs: Inputs, options: IndexOptions, masks: MaskArrays | None = None) -> IndexProblem:
    """Check arrays against each other and freeze what they ask for. What other operations have as arrays of masks are
    operands of this."""
    assert masks is None
    views = {view.name: view for view in inputs if view is not None}
    like = inputs[op.at]
    for view in views.values():
        same_place(like, view)
    packed = "cu_seqlens_q" in views
    _check_together(views)
    layout = "bnhd" if packed else options.layout
    rank = len(like.shape)
    if rank not in (3, 4) or (packed and rank != 3):
        allowed = "3, (rows of all sequences, index heads, columns)" if packed else "4, and 3 without batch"
        raise ValueError(f"{like.name}: shape {like.shape} has {rank} axes; allowed are {allowed}")
    sizes = _extents(op, views, layout, rank, options.head_groups or 1)
    _check_types(views)
    groups = options.head_groups or 1
    _check_heads(sizes, groups, views)
    dim = sizes.get("T", 0) + sizes.get("R", 0)
    scale = options.teacher_scale
    wide = any(view.dtype == "float64" for name, view in views.items() if SPECS[name].elements in ("teacher", "index"))
    if like.device.kind != "cpu":
        _check_gpu(views)
    for name, factor in (("teacher_scale", scale or 0), ("index_scale", options.index_scale)):
        if not wide and abs(factor) > MAX_SCALE:
            raise ValueError(
                f"{name}={factor} is beyond what float32 arithmetic can hold; allowed are magnitudes up to "
                f"{MAX_SCALE:g}"
            )
    if options.rows is not None:
        first, end = options.rows
        if not 0 <= first <= end <= sizes["M"]:
            raise ValueError(f"rows=({first}, {end}); allowed are rows of the {sizes['M']} that there are")
    return IndexProblem(
        op=op.name,
        sizes=tuple(sizes.items()),
        arrays=tuple(view.at(view.ptr % 16, None)._replace(framework="") for view in views.values()),
        teacher_scale=1 / math.sqrt(max(dim, 1)) if scale is None else scale,
        index_scale=options.index_scale,
        relu=options.relu,
        groups=groups,
        grouped=options.head_groups is not None,
        rule=RowKeys(options.causal, options.q_offset, options.compress_ratio, options.topk_relative),
        layout=layout,
        rank=rank,
        sequences=sizes["S"] - 1 if packed else 0,
        device=like.device,
        deterministic=bool(options.deterministic),
        rows=options.rows,
    )


def _check_gpu(views: Views) -> None:
    for view in views.values():
        if view.dtype == "float64":
            raise NotImplementedError(
                f"{view.name} is float64 on {view.device}; built there are bfloat16, float16 and float32. Cast it"
            )


def _check_together(given: Mapping[str, Any]) -> None:
    """Which arrays go with which."""
    for name, other in (
        ("cu_seqlens_q", "cu_seqlens_k"),
        ("cu_seqlens_k", "cu_seqlens_q"),
        ("teacher_q_rope", "teacher_k_rope"),
        ("teacher_k_rope", "teacher_q_rope"),
        ("topk_length", "topk_indices"),
        ("teacher_q", "teacher_k"),
        ("teacher_k", "teacher_q"),
    ):
        if name in given and other not in given:
            raise ValueError(f"{name} came without {other}; pass both or neither")
    if "target" in given:
        for name in ("teacher_q", "teacher_k", "teacher_lse", "teacher_q_rope"):
            if name in given:
                raise ValueError(
                    f"target came together with {name}; it is what the teacher's heads add up to, so pass None for "
                    f"teacher_q and teacher_k beside it, and no other array of the teacher"
                )
    elif "teacher_q" not in given:
        raise TypeError("teacher_q and teacher_k are None; pass them, or a target in their place")
    if "cu_seqlens_q" in given:
        for name in ("key_mask", "key_start", "key_end"):
            if name in given:
                raise NotImplementedError(
                    f"{name} with cu_seqlens_q and cu_seqlens_k; built are packed sequences alone, with causal and "
                    f"with topk_indices. Bounds of rows say all that cu_seqlens say: pass key_start and key_end alone"
                )


def _extents(op: Op, views: Views, layout: str, rank: int, groups: int) -> dict[str, int]:
    """Extents by letter; the first array that has one says what others must have."""
    sizes = {"B": 1} if rank == 3 else {}
    owner: dict[str, ArrayView] = {}
    for spec in sorted(op.operands, key=lambda spec: spec.name != op.like):
        view = views.get(spec.name)
        if view is None:
            continue
        axes = _axes_of(spec, view, layout, rank)
        for letter, extent in zip(axes, view.shape, strict=True):
            if letter == "G" and extent != groups:
                raise ValueError(
                    f"{view.name}: shape {view.shape} has {extent} in the place of head_groups, which is {groups}"
                )
            if sizes.setdefault(letter, extent) != extent:
                other = owner[letter]
                swapped = sorted(view.shape) == sorted(sizes.get(x, -1) for x in axes)
                hint = f"; in layout {layout!r} its axes are {_named(axes)}" if swapped else ""
                what = _WORDS.get(letter, "of an axis")
                raise ValueError(
                    f"{view.name}: shape {view.shape} has {extent} {what}, but {other.name} {other.shape} has "
                    f"{sizes[letter]}{hint}"
                )
            owner.setdefault(letter, view)
        for letter in spec.may_lack:
            if letter != "G":
                sizes.setdefault(letter, 1)
    return sizes


def _axes_of(spec: OperandSpec, view: ArrayView, layout: str, rank: int) -> str:
    full = callers_axes(spec.letters, layout, rank)
    few = callers_axes(spec.letters.replace(spec.may_lack, "") if spec.may_lack else spec.letters, layout, rank)
    for axes in (full, few):
        if len(axes) == len(view.shape):
            return axes
    also = f", or {len(few)}, {_named(few)}" if few != full else ""
    raise ValueError(
        f"{view.name}: shape {view.shape} has {len(view.shape)} axes; expected are {len(full)}, {_named(full)}{also}"
    )


def _named(axes: str) -> str:
    words = {"K": "teacher key heads", "L": "rotary key heads", "J": "index key heads", "C": "chosen keys"}
    return f"({', '.join({**_WORDS, **words}[letter] for letter in axes)})"


def _check_types(views: Views) -> None:
    first: dict[str, ArrayView] = {}
    for view in views.values():
        kind = SPECS[view.name].elements
        if kind in ("teacher", "index"):
            other = first.setdefault(kind, view)
            if view.dtype != other.dtype:
                raise TypeError(
                    f"{view.name} is {view.dtype}, but {other.name} is {other.dtype}; the queries and keys of a side "
                    f"have one dtype. Cast one of them"
                )


def _check_heads(sizes: dict[str, int], groups: int, views: Views) -> None:
    for letter, name, most in (
        ("T", "teacher_q", MAX_TEACHER_DIM),
        ("R", "teacher_q_rope", MAX_TEACHER_DIM),
        ("D", "index_q", MAX_INDEX_DIM),
        ("I", "index_q", MAX_INDEX_HEADS),
    ):
        if letter in sizes and not 1 <= sizes[letter] <= most:
            kind = NotImplementedError if sizes[letter] else ValueError
            raise kind(f"{name}: shape {views[name].shape} has {sizes[letter]} {_WORDS[letter]}; built are 1 to {most}")
    for part, of, names in (
        ("K", "H", ("teacher_k", "teacher_q")),
        ("L", "H", ("teacher_k_rope", "teacher_q_rope")),
    ):
        if part in sizes and (not sizes[part] or sizes[of] % sizes[part]):
            k, q = (views[name] for name in names)
            raise ValueError(
                f"{k.name}: shape {k.shape} has {sizes[part]} heads, which do not divide the {sizes[of]} of {q.name} "
                f"{q.shape}"
            )
    if sizes.get("L", 1) not in (1, sizes.get("K", 1)):
        raise ValueError(
            f"teacher_k_rope: shape {views['teacher_k_rope'].shape} has {sizes['L']} heads; allowed are 1, and as many "
            f"as teacher_k {views['teacher_k'].shape} has"
        )
    for letter, name in (("H", "teacher_q"), ("I", "index_q")):
        if letter in sizes and sizes[letter] % groups:
            raise ValueError(
                f"head_groups={groups} does not divide the {sizes[letter]} heads of {name} {views[name].shape}"
            )
    if sizes.get("J", 1) not in (1, groups):
        raise ValueError(
            f"index_k: shape {views['index_k'].shape} has {sizes['J']} heads; allowed are 1, and one for each of "
            f"head_groups={groups}"
        )
    if sizes.get("C", 1) == 0:
        raise ValueError(f"topk_indices: shape {views['topk_indices'].shape} names no keys; K is 1 or more")
    if "S" in sizes and sizes["S"] < 2:
        raise ValueError(f"cu_seqlens_q: {sizes['S']} entries; allowed are 2 and more: 0, and where each sequence ends")

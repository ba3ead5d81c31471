"""A call of the indexer: parsed, its arrays read and checked, run, results of the caller's framework."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import frameworks, validate
from ..arrays import CPU, ArrayView, cuda, host
from ..frameworks import framework_of
from ..frameworks.base import known
from ..numpy_backend import NumPyPlan
from ..numpy_backend import indexer as backend
from ..ops.indexer_kl import ARRAYS, LIKE, SPECS, WRT, ArraySpec
from ..problem import Device
from ..rules import row_keys
from ..rules.masks import ARRAYS as MASK_RULES
from ..rules.masks import Extents
from . import options, problem
from .options import IndexOptions
from .problem import IndexProblem, Views

Array = NDArray[Any]


class IndexCall(NamedTuple):
    """What a caller asks for: arrays as they came, in the order of the record, None for what there is not."""

    arrays: tuple[Any, ...]
    options: IndexOptions

    @classmethod
    def of(cls, operands: tuple[Any, ...], given: Mapping[str, Any]) -> IndexCall:
        """The call with arrays by position and all else by name."""
        named = {**given, **dict(zip(options.NAMES, operands))}
        return cls(tuple(named.get(spec.name) for spec in ARRAYS), options.parse(given))

    @property
    def like(self) -> Any:
        """The array whose framework the results have: of the student, or where there is none, of the teacher."""
        index_q, teacher_q = (self.arrays[options.NAMES.index(name)] for name in (LIKE, "teacher_q"))
        return teacher_q if index_q is None else index_q

    @property
    def named(self) -> dict[str, Any]:
        """Those that came."""
        return {spec.name: x for spec, x in zip(ARRAYS, self.arrays, strict=True) if x is not None}

    def views(self) -> Views:
        """Read all arrays."""
        framework = framework_of(LIKE, self.like)
        return {name: problem.describe(name, x, framework) for name, x in self.named.items()}

    def outline(self, device: Device | None = None) -> Views:
        """Views of arrays or of what stands for some, as if on `device` where one is given; without arrays on the
        current GPU, or where there is none on the CPU."""
        there = {name: x for name, x in self.named.items() if not frameworks.is_standin(name, x)}
        views = {name: problem.describe(name, x, framework_of(name, x)) for name, x in there.items()}
        like = next(iter(views.values()), None)
        gpu = frameworks.current_gpu() if like is None and device is None else None
        place = like.device if like is not None else CPU if gpu is None else cuda(gpu)
        framework = "stand-in" if like is None else like.framework
        for name, x in self.named.items():
            view = views.get(name) or problem.standin(name, x, framework, place)
            views[name] = view if device is None else view._replace(device=device)
        return {name: views[name] for name in self.named}

    def ready(self) -> Ready:
        """Read the arrays, or raise what is wrong."""
        views = self.views()
        return Ready(views, problem.to_problem(views, self.options))


class Rows(NamedTuple):
    """What a forward leaves, arrays of the caller's framework."""

    kl: Any
    index_lse: Any
    target_sum: Any
    teacher_lse: Any
    """None beside a target."""


class Ready:
    """A checked call with its arrays on the CPU."""

    def __init__(self, views: Views, problem: IndexProblem) -> None:
        self.views, self.problem = views, problem
        self.like = views.get(LIKE) or views["teacher_q"]

    def empty(self, shape: tuple[int, ...], dtype: str) -> ArrayView:
        """New memory of the caller's framework, or of NumPy where that lets nobody write into its arrays."""
        if self.like.framework == "jax":
            return known("numpy").empty(self.like, shape, dtype)
        return frameworks.empty(self.like, shape, dtype)

    def _own(self, view: ArrayView | None) -> Any:
        """The array of a view, of the framework that computes on results."""
        if view is None or view.framework == self.like.framework or self.like.framework != "jax":
            return None if view is None else view.array
        return frameworks.namespace(self.like).asarray(view.array)

    def given_back(self, like: Any, results: Any) -> Any:
        """Results in the caller's own type."""
        return frameworks.given_back(self.like, like, results)

    @property
    def makes_lse(self) -> bool:
        """Whether the forward has to make the teacher's log-sum-exps."""
        return "teacher_q" in self.views and "teacher_lse" not in self.views

    def forward(self) -> Rows:
        """Allocate results and compute."""
        p = self.problem
        kl, index_lse, target_sum = (self.empty(p.row_shape, p.stat_dtype) for _ in range(3))
        made = self.empty(p.shape("BHM"), p.stat_dtype) if self.makes_lse else None
        self.forward_into(kl, index_lse, target_sum, made)
        lse = self.views.get("teacher_lse") if made is None else made
        return Rows(*map(self._own, (kl, index_lse, target_sum, lse)))

    def forward_into(
        self, kl: ArrayView, index_lse: ArrayView, target_sum: ArrayView, teacher_lse: ArrayView | None
    ) -> None:
        """The same into memory that there is."""
        if self.like.device.kind == "cuda":
            self._on_gpu().forward(kl, index_lse, target_sum, teacher_lse)
            return
        rows = backend.RowOutputs(*(self._rows(view) for view in (kl, index_lse, target_sum)))
        lse = None if teacher_lse is None else self._canonical(SPECS["teacher_lse"], teacher_lse)
        self._run().forward(rows, lse)

    def backward(self, grad: Any, saved: Rows, wrt: tuple[str, ...]) -> dict[str, Any]:
        """The gradients that are named, from what the caller has of the rows."""
        p = self.problem
        for name, x in (("grad", grad), ("index_lse", saved.index_lse), ("target_sum", saved.target_sum)):
            validate.row_array(frameworks.describe(name, x), p.row_shape, p.stat_dtype, self.like)
        if "teacher_q" in self.views:
            if saved.teacher_lse is None:
                raise TypeError("teacher_lse is missing; pass that of the forward")
            lse = problem.describe("teacher_lse", saved.teacher_lse, self.like.framework)
            validate.same_place(self.like, lse)
            if lse.shape != p.shape("BHM"):
                raise ValueError(f"teacher_lse: shape {lse.shape}; expected is {p.shape('BHM')}")
        return self.gradients(grad, saved, wrt)

    def gradients(self, grad: Any, saved: Rows, wrt: tuple[str, ...]) -> dict[str, Any]:
        """The same from rows that are of a forward of this call."""
        given = (("grad", grad), ("index_lse", saved.index_lse), ("target_sum", saved.target_sum))
        views = [frameworks.describe(name, x) for name, x in given]
        lse = None
        if "teacher_q" in self.views:
            lse = frameworks.describe("teacher_lse", saved.teacher_lse)
        out: Views = {name: self.empty(self.views[name].shape, self.views[name].dtype) for name in WRT if name in wrt}
        self.backward_into(views[0], views[1], views[2], lse, out)
        return {name: self._own(view) for name, view in out.items()}

    def backward_into(
        self,
        grad: ArrayView,
        index_lse: ArrayView,
        target_sum: ArrayView,
        teacher_lse: ArrayView | None,
        out: dict[str, ArrayView],
    ) -> None:
        """The same into memory that there is."""
        if self.like.device.kind == "cuda":
            rows = {"grad": grad, "index_lse": index_lse, "target_sum": target_sum}
            self._on_gpu().backward(rows, teacher_lse, out)
            return
        saved = backend.SavedRows(*(self._rows(view) for view in (grad, index_lse, target_sum)))
        found = {name: self._canonical(SPECS[name], view) for name, view in out.items()}
        grads = backend.IndexGradients(found.get("index_q"), found.get("index_k"), found.get("index_weights"))
        self._run(teacher_lse).backward(saved, grads)

    def target(self, rows: tuple[int, int] | None) -> Any:
        """The teacher summed over the heads of each group, not normalised, of all rows or some."""
        p = self.problem
        first, end = (0, p["M"]) if rows is None else rows
        some = dataclasses.replace(p, sizes=tuple({**dict(p.sizes), "M": end - first}.items()))
        out = self.empty(some.shape("BGMN"), p.stat_dtype)
        if self.like.device.kind == "cuda":
            with frameworks.on_device(self.like):
                out.array[...] = 0
            self._on_gpu().target(out, first, end)
        else:
            self._run().target(self._canonical(SPECS["target"], out), first)
        return self._own(out)

    def _on_gpu(self) -> Any:
        # Imported here, because most of it is the compiler's.
        from .cuda import CudaRun

        return CudaRun(self.problem, self.views, self.like)

    @property
    def plan(self) -> NumPyPlan:
        """How a call would run on the CPU."""
        p = self.problem
        sides = {"BHMT": "teacher_q", "BKNT": "teacher_k", "BHMR": "teacher_q_rope", "BLNR": "teacher_k_rope"}
        sizes = dict(p.sizes)
        shaped = {
            name: np.broadcast_to(np.zeros((), p.stat_dtype), [sizes[x] for x in axes])
            for axes, name in (*sides.items(), ("BIMD", "index_q"), ("BJND", "index_k"))
            if name in p.given
        }
        return self._planned(shaped).plan

    @cached_property
    def arrays(self) -> dict[str, Array]:
        """All in canonical order."""
        return {name: self._canonical(SPECS[name], view) for name, view in self.views.items()}

    def _rows(self, view: ArrayView) -> Array:
        return self._canonical(ArraySpec(view.name, "BGM", "row number", "G"), view)

    def _canonical(self, spec: ArraySpec, view: ArrayView) -> Array:
        """As the record has its axes; of an axis that is not there, the extent is 1."""
        p, x = self.problem, host(view)
        axes = problem.callers_axes(spec.axes, p.layout, p.batched)
        if len(axes) != x.ndim:
            axes = problem.callers_axes(spec.axes.replace(spec.axis_may_lack, ""), p.layout, p.batched)
        for at, letter in enumerate(spec.axes):
            if letter not in axes:
                x, axes = np.expand_dims(x, at), axes[:at] + letter + axes[at:]
        return x.transpose([axes.index(letter) for letter in spec.axes])

    def _run(self, teacher_lse: ArrayView | None = None) -> backend.Run:
        """What computes, with the teacher's log-sum-exps where the forward has made them."""
        p, x = self.problem, self.arrays
        batch, queries, keys = p["B"], p["M"], p["N"]
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            if name in x:
                extents = Extents(batch, 1, queries, keys, 3)
                MASK_RULES[name].check_values(x[name], extents)
        lse = x.get("teacher_lse") if teacher_lse is None else self._canonical(SPECS["teacher_lse"], teacher_lse)
        return self._planned({**x, **({} if lse is None else {"teacher_lse": lse})})

    def _planned(self, x: dict[str, Array]) -> backend.Run:
        p = self.problem
        batch, queries, keys = p["B"], p["M"], p["N"]
        pairs = [(x[f"teacher_q{end}"], x[f"teacher_k{end}"]) for end in ("", "_rope") if f"teacher_q{end}" in x]
        nothing: Array = np.zeros((1, 1, 1, 1), p.stat_dtype)
        index_q = x.get("index_q", np.broadcast_to(nothing, (batch, p.groups, queries, 1)))
        index_k = x.get("index_k", np.broadcast_to(nothing, (batch, 1, keys, 1)))
        operands = backend.Operands(
            tuple(pairs), index_q, index_k, x.get("index_weights"), x.get("teacher_lse"), x.get("target")
        )
        numbers = backend.Numbers(p.groups, p.teacher_scale, p.index_scale, p.relu, p.stat_dtype)
        rows = row_keys.intervals(p.rule, batch, queries, keys, x)
        return backend.Run(
            operands, numbers, backend.Keys(rows, x.get("key_mask"), x.get("topk_indices"), x.get("topk_length"))
        )

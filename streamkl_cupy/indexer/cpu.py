"""A call of the indexer on the CPU: its arrays in canonical order, run by the NumPy backend."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..arrays import ArrayView, Gradients, Inputs, MaskArrays, Results, Saved, host
from ..numpy_backend import NumPyPlan
from ..numpy_backend import indexer as backend
from ..rules import row_keys
from ..rules.masks import ARRAYS as MASK_RULES
from ..rules.masks import Extents
from .problem import SPECS, IndexProblem

Array = NDArray[Any]


class Runner:
    """An IndexProblem made ready for the CPU. Thread-safe: calls share nothing that they change."""

    workspace_bytes = 0

    def __init__(self, problem: IndexProblem) -> None:
        self.problem = problem

    @cached_property
    def plan(self) -> NumPyPlan:
        """How a call is cut."""
        p = self.problem
        sizes = dict(p.sizes)
        shaped: dict[str, Array] = {
            name: np.broadcast_to(np.zeros((), p.stat_dtype), [sizes[x] for x in SPECS[name].letters])
            for name in ("teacher_q", "teacher_k", "teacher_q_rope", "teacher_k_rope", "index_q", "index_k")
            if name in p.views
        }
        return self._run(shaped).plan

    def warmup(self, wrt: tuple[str, ...] = ()) -> None:
        """There is nothing to do."""

    def backward_bytes(self, wrt: tuple[str, ...]) -> int:
        """None: scratch is each thread's own."""
        return 0

    def forward(
        self, inputs: Inputs, outputs: Results, stream: int, workspace: int = 0, masks: MaskArrays | None = None
    ) -> None:
        """Write every element of the outputs."""
        run = self._run(self._arrays(inputs))
        if self.problem.operation.rows == ("target",):
            out = self._canonical(SPECS["target"].letters, outputs.target)
            run.target(out, 0 if self.problem.rows is None else self.problem.rows[0])
            return
        rows = backend.RowOutputs(*(self._canonical("BGM", getattr(outputs, n)) for n in backend.RowOutputs._fields))
        made = outputs.made_lse
        run.forward(rows, None if made is None else self._canonical(SPECS["teacher_lse"].letters, made))

    def backward(
        self,
        inputs: Inputs,
        saved: Saved,
        outputs: Gradients,
        stream: int,
        workspace: int = 0,
        masks: MaskArrays | None = None,
        room: int | None = None,
    ) -> None:
        """Write every gradient that has an output."""
        x = self._arrays(inputs)
        if saved.made_lse is not None:
            x["teacher_lse"] = self._canonical(SPECS["teacher_lse"].letters, saved.made_lse)
        rows = backend.SavedRows(*(self._canonical("BGM", getattr(saved, n)) for n in backend.SavedRows._fields))
        wanted = (("index_q", outputs.index_q), ("index_k", outputs.index_k), ("index_weights", outputs.index_weights))
        found = (None if out is None else self._canonical(SPECS[name].letters, out) for name, out in wanted)
        self._run(x).backward(rows, backend.IndexGradients(*found))

    def _arrays(self, inputs: Inputs) -> dict[str, Array]:
        """All in canonical order, their values checked where these say what is read."""
        x = {view.name: self._canonical(SPECS[view.name].letters, view) for view in inputs if view is not None}
        p = self.problem
        for name in ("cu_seqlens_q", "cu_seqlens_k"):
            if name in x:
                MASK_RULES[name].check_values(x[name], Extents(p["B"], 1, p["M"], p["N"], 3))
        return x

    def _canonical(self, letters: str, view: ArrayView) -> Array:
        """As the record has its axes; of an axis that is not there, the extent is 1."""
        x, axes = host(view), self.problem.axes_of(letters, view)
        for at, letter in enumerate(letters):
            if letter not in axes:
                x, axes = np.expand_dims(x, at), axes[:at] + letter + axes[at:]
        return x.transpose([axes.index(letter) for letter in letters])

    def _run(self, x: Mapping[str, Array]) -> backend.Run:
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

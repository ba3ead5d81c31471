"""Warnings about calls that are right by the letter and probably not what is meant.

Looked for where a call of new shapes is first prepared, and said once per process and kind. Of arrays on a GPU only the
shapes are looked at; of those on the CPU a few rows as well. A false alarm is worse than none, so doubt is silent.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..arrays import host
from ..numpy_backend.elements import widen

if TYPE_CHECKING:
    from ..arrays import ArrayView, Inputs
    from ..options import Options
    from ..problem import Problem

MANY_HEADS = 512  # beyond what models have
FEW_ROWS = 128
LOOKED_AT = 4  # rows at either end of an array
_PACKAGE = str(Path(__file__).parents[1] / "_")[:-1]  # with the separator
_said: set[str] = set()


def look(inputs: Inputs, chosen: Options, problem: Problem) -> None:
    """Warn of what a checked call may have got wrong."""
    if problem.batch * problem.heads * problem.queries * problem.keys == 0:
        return
    _empty_rows(chosen, problem)
    _layout(inputs, problem)
    if problem.device.kind == "cpu" and len(problem.distributions) > 1:
        _maps(inputs, problem)


def _empty_rows(chosen: Options, problem: Problem) -> None:
    """A diagonal that leaves the first rows without a key; an offset that was given says that it is meant."""
    _, right = chosen.window or (-1, -1)
    right = 0 if chosen.causal else right
    empty = problem.queries - problem.keys - right
    if chosen.q_offset is None and not problem.sequences and right >= 0 and empty > 0:
        what = "causal" if chosen.causal else "a window"
        _warn(
            "empty rows",
            f"{what} with {problem.queries} query rows and {problem.keys} keys: the diagonal ends at the last key, so "
            f"the first {empty} rows see no key, and give 0. Pass q_offset=0 for a diagonal that begins at the "
            f"first key, or q_offset={problem.keys - problem.queries} if this is meant",
        )


def _layout(inputs: Inputs, problem: Problem) -> None:
    """(B, N, H, D) arrays that were taken for (B, H, N, D): very many heads, of as few rows as there are heads."""
    heads, queries, keys = problem.heads, problem.queries, problem.keys
    like = inputs[problem.operation.at]
    alike = all(heads == side.k.heads for side in problem.distributions)
    # Who folds the batch into the heads has a batch of 1, and the same number of rows and keys.
    folded = problem.batch == 1 and queries == keys
    if (
        (problem.layout, problem.rank, problem.sequences) == ("bhnd", 4, 0)
        and alike
        and heads >= MANY_HEADS
        and queries <= FEW_ROWS
        and queries % keys == 0
        and not folded
    ):
        _warn(
            "layout",
            f"{like.name} of shape {like.shape} means {heads} heads of {queries} rows each; if it is (batch, "
            f'rows, heads, head dim), pass layout="bnhd"',
        )


def _maps(inputs: Inputs, problem: Problem) -> None:
    """Attention maps in the place of queries and keys."""
    first, *others = (side.dim for side in problem.distributions)
    if first > 1 and all(dim == first for dim in others) and all(map(_is_map, inputs)):
        _warn(
            "maps",
            "all four arrays look like attention maps: their values lie between 0 and 1, and their rows sum to 1. "
            "attention_kl takes queries and keys, and compares the softmax of their products; of two maps p and q the "
            "KL is (p * (log(p) - log(q))).sum(-1)",
        )


def _is_map(view: ArrayView) -> bool:
    """Whether the first and last rows are distributions; unit vectors are, but are plausible as queries and keys."""
    x = host(view)
    first, last = (0,) * (x.ndim - 2), (-1,) * (x.ndim - 2)
    some = np.concatenate([x[first][:LOOKED_AT], x[last][-LOOKED_AT:]])
    rows = widen(some, np.empty(some.shape))
    if not ((rows >= 0) & (rows <= 1)).all():
        return False
    return bool((np.abs(rows.sum(-1) - 1) < 0.02).all() and ((rows > 0) & (rows < 1)).any())


def _warn(kind: str, text: str) -> None:
    if kind in _said:
        return
    _said.add(kind)
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UserWarning, stacklevel=level)

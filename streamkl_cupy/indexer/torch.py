"""PyTorch: `indexer_kl`, and what becomes of its rows; `autodiff/torch.py` is how."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .. import validate
from ..autodiff import torch as autodiff
from ..call import Call
from ..ops import INDEXER_KL
from ..options import IndexOptions
from ..problem import callers_axes
from ..rules import reductions
from .losses import IndexLoss, inactive, reduced
from .problem import SPECS

_ROWS = ("kl",)


def _row_shape(call: Call) -> Sequence[int]:
    named, options = dict(zip(call.op.names, call.operands)), cast(IndexOptions, call.options)
    index_q = named["index_q"]
    layout = options.layout if named["cu_seqlens_q"] is None else "bnhd"
    rank = index_q.dim()
    sizes = dict(zip(callers_axes(SPECS["index_q"].letters, layout, rank), index_q.shape))
    if options.head_groups is None:
        return [sizes[letter] for letter in callers_axes("BM", layout, rank)]
    sizes["G"] = options.head_groups
    return [sizes[letter] for letter in callers_axes("BGM", layout, rank)]


def _made(call: Call) -> dict[str, Sequence[int]]:
    """The teacher's log-sum-exps, where they are made."""
    named = dict(zip(call.op.names, call.operands))
    if named["teacher_q"] is None or named["teacher_lse"] is not None:
        return {}
    return {"made_lse": named["teacher_q"].shape[:-1]}


autodiff.register(INDEXER_KL, _row_shape, _made)


def loss(operands: tuple[Any, ...], given: dict[str, Any], asked: IndexLoss) -> Any:
    """`indexer_kl` of arrays in the order of the record and options by name."""
    call, traced = autodiff.asked(INDEXER_KL, operands, given)
    weight = asked.row_weight
    if traced or not autodiff.unwatched(operands):
        rows = autodiff.there(call, autodiff.results(call, traced))
        return _reduced(call, rows, asked)
    ready = call.ready()
    if not autodiff.differentiated(operands):
        return _reduced(call, autodiff.tensors(ready.forward()), asked)
    # What is asked for beside the value, and weights that are differentiated too, or looked on, are torch's own matter.
    if asked.return_stats or (weight is not None and not autodiff.plain((weight,))):
        return _reduced(call, autodiff.step(call, ready, call.op.results), asked)
    if weight is not None:
        _check_weight(weight, operands[call.op.at], ready.checked.row_shape)
    return autodiff.step(call, ready, _ROWS, functools.partial(_reduction, asked))


def _reduction(asked: IndexLoss, rows: Sequence[Any], every_row_sees: bool) -> tuple[Any, Any]:
    """The value, and its derivative by each row's."""
    return reductions.value_and_gradient(torch, rows[0], inactive(torch, rows[2]), asked.row_weight, asked.reduction)


def _reduced(call: Call, rows: tuple[Any, ...], asked: IndexLoss) -> Any:
    """What was asked for of the rows, by torch's own functions."""
    if asked.row_weight is not None:
        _check_weight(asked.row_weight, rows[0], rows[0].shape)
    return reduced(torch, rows, call.operands[call.op.names.index("teacher_lse")], asked)


def _check_weight(weight: Any, rows: Tensor, row_shape: Sequence[int]) -> None:
    if not isinstance(weight, Tensor):
        raise validate.not_of("torch", "row_weight", weight)
    validate.same_device("index_q", rows.device, "row_weight", weight.device)
    validate.weights(weight, row_shape)  # type: ignore[arg-type]

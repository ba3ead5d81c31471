"""Operations: a module for each, with the record of what it computes from what."""

from __future__ import annotations

from functools import cached_property

from .attention_kl import OP as ATTENTION_KL
from .attention_kl_to import OP as ATTENTION_KL_TO
from .indexer_kl import OP as INDEXER_KL
from .indexer_kl import TARGET as INDEXER_TARGET
from .interface import Op, OperandSpec, SavedSpec, Task
from .sparse_attention import OP as SPARSE_ATTENTION

__all__ = [
    "ATTENTION_KL",
    "ATTENTION_KL_TO",
    "INDEXER_KL",
    "INDEXER_TARGET",
    "OPS",
    "SPARSE_ATTENTION",
    "Op",
    "OperandSpec",
    "SavedSpec",
    "Task",
]

OPS: dict[str, Op] = {
    op.name: op for op in (ATTENTION_KL, ATTENTION_KL_TO, SPARSE_ATTENTION, INDEXER_KL, INDEXER_TARGET)
}

# What follows from a record is known before anything is traced: torch.compile cannot run what computes it.
for _op in OPS.values():
    for _name, _x in vars(Op).items():
        if isinstance(_x, cached_property):
            getattr(_op, _name)

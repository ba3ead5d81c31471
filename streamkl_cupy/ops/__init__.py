"""Operations: a module for each, with the record of what it computes from what."""

from __future__ import annotations

from .attention_kl import OP as ATTENTION_KL
from .interface import Op, OperandSpec, SavedSpec, Task

__all__ = ["ATTENTION_KL", "OPS", "Op", "OperandSpec", "SavedSpec", "Task"]

OPS: dict[str, Op] = {op.name: op for op in (ATTENTION_KL,)}

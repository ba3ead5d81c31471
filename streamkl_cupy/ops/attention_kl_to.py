"""The divergence of a student's attention distribution from one that is given, as probabilities or their logarithms."""

from __future__ import annotations

from dataclasses import replace

from .attention_kl import OP as BETWEEN_TWO
from .interface import OperandSpec

# What `attention_kl` is, with one array for the teacher, which is a constant.
OP = replace(
    BETWEEN_TWO,
    name="attention_kl_to",
    operands=(
        OperandSpec("target", "teacher", "q", "H", "N", max_dim=2**30, extra=True, one_for_all=True),
        *BETWEEN_TWO.side("student"),
    ),
    gradients=tuple(task for task in BETWEEN_TWO.gradients if task.side == "student"),
    fused=tuple(task for task in BETWEEN_TWO.fused if task.side == "student"),
)

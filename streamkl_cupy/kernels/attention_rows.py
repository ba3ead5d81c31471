"""What gradients of attention read of each row, made of the forward's results and of the derivatives by these:
`kernels/attention_rows.cu`."""

from __future__ import annotations

from ..ops.interface import Task
from ..problem import Problem
from .base import ELEMENT_CODES, KernelPlan
from .gpus import DeviceFacts
from .structs import ATTENTION_ROWS, attention_args_of
from .work_tiles import Schedule

THREADS = 128
LANES = 16
"""Threads that have a row together."""


def rows_bytes(problem: Problem) -> int:
    """Of the workspace for them."""
    return ATTENTION_ROWS.bytes(problem.batch * problem.heads * problem.queries)


def plan(problem: Problem, side: str, facts: DeviceFacts) -> KernelPlan:
    """The kernel for all gradients, `LANES` threads to a row."""
    value = problem.operand("value")
    constants: dict[str, int | float | str] = {
        "SKL_A_ELEMENT": ELEMENT_CODES[value.dtype],
        "SKL_VALUE_DIM": value.dim,
        "SKL_PLANES": 3,
        "SKL_LANES": LANES,
        "SKL_THREADS": THREADS,
    }
    return KernelPlan(
        task=Task("saved_rows", side),
        entry="kernels/attention_rows.cu",
        symbol="streamkl_attention_rows",
        arch=facts.flag,
        constants=tuple(sorted(constants.items())),
        slots=(),
        args=attention_args_of().rows,
        regions=(ATTENTION_ROWS,),
        blocks=-(-problem.batch * problem.heads * problem.queries * LANES // THREADS),
        threads=THREADS,
        schedule=Schedule(),
    )

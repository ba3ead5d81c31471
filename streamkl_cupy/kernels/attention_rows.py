"""What gradients of attention read of each row, made of the forward's results and of the derivatives by these:
`kernels/attention_rows.cu`."""

from __future__ import annotations

from collections.abc import Iterable

from ..ops.interface import Task
from ..problem import Problem
from .base import ELEMENT_BYTES, ELEMENT_CODES, KernelPlan
from .gpus import DeviceFacts
from .structs import ATTENTION_ROWS, Regions, attention_args_of, attention_copy
from .work_tiles import Schedule

THREADS = 128
LANES = 16
"""Threads that have a row together."""


def rows_bytes(problem: Problem, gradients: Iterable[KernelPlan]) -> int:
    """Of the workspace for them, and for a copy of the upstream gradient where one of the kernels reads that."""
    return sum(x.bytes(problem.batch * problem.heads * problem.queries) for x in _regions(problem, gradients))


def _regions(problem: Problem, gradients: Iterable[KernelPlan]) -> tuple[Regions, ...]:
    copied = any(box.name == "grad" for kernel in gradients for box in kernel.boxes)
    value = problem.operand("value")
    return (ATTENTION_ROWS, attention_copy(value.dim * ELEMENT_BYTES[value.dtype])) if copied else (ATTENTION_ROWS,)


def plan(problem: Problem, side: str, facts: DeviceFacts, gradients: Iterable[KernelPlan]) -> KernelPlan:
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
        regions=_regions(problem, gradients),
        blocks=-(-problem.batch * problem.heads * problem.queries * LANES // THREADS),
        threads=THREADS,
        schedule=Schedule(),
    )

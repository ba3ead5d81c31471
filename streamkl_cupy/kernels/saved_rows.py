"""What gradients read of each row where the divergence has moments, made of what the forward saved:
`kernels/saved_rows.cu`."""

from __future__ import annotations

from collections.abc import Iterable

from ..ops.interface import Task
from ..problem import Problem
from ..rules import divergences
from .base import KernelPlan
from .gpus import DeviceFacts
from .structs import SAVED_ROWS_ARGS
from .work_tiles import Schedule

THREADS = 128
VECTORS = 4
"""Upstream gradient, both log-sum-exps and a number."""


def rows_bytes(problem: Problem, gradients: Iterable[KernelPlan]) -> int:
    """Of the workspace for one side; 0 where gradients read what the forward saved as it is."""
    if not divergences.of(problem).moments:
        return 0
    return -(-VECTORS * 4 * problem.batch * problem.heads * problem.queries // 128) * 128


def plan(problem: Problem, side: str, facts: DeviceFacts, gradients: Iterable[KernelPlan]) -> KernelPlan:
    """The kernel for the gradients of a side, a thread to a row."""
    entry = divergences.of(problem)
    constants = {"SKL_THREADS": THREADS, "SKL_GRAD_SIDE": problem.operation.sides.index(side), **entry.constants}
    return KernelPlan(
        task=Task("saved_rows", side),
        entry="kernels/saved_rows.cu",
        symbol="streamkl_saved_rows",
        arch=facts.flag,
        constants=tuple(sorted(constants.items())),
        slots=(("divergence", entry.header),),
        args=SAVED_ROWS_ARGS,
        regions=(),
        blocks=-(-problem.batch * problem.heads * problem.queries // THREADS),
        threads=THREADS,
        schedule=Schedule(),
    )

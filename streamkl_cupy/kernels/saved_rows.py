"""What gradients read of each row where the divergence has moments, made of what the forward saved:
`kernels/saved_rows.cu`."""

from __future__ import annotations

from collections.abc import Iterable

from ..ops.interface import Task
from ..problem import Problem
from ..rules import divergences
from .base import KernelPlan, MadeRows
from .gpus import DeviceFacts
from .structs import LINE, SAVED_ROWS, SAVED_ROWS_ARGS
from .work_tiles import Schedule

THREADS = 128


def plan(
    problem: Problem, sides: Iterable[str], facts: DeviceFacts, gradients: Iterable[KernelPlan]
) -> tuple[MadeRows, ...]:
    """For each side, a thread to a row; none where gradients read what the forward saved as it is."""
    entry = divergences.of(problem)
    rows = problem.batch * problem.heads * problem.queries
    if not entry.moments or not rows:
        return ()

    def made(side: str) -> MadeRows:
        constants = {"SKL_THREADS": THREADS, "SKL_GRAD_SIDE": problem.operation.sides.index(side), **entry.constants}
        kernel = KernelPlan(
            task=Task("saved_rows", side),
            entry="kernels/saved_rows.cu",
            symbol="streamkl_saved_rows",
            arch=facts.flag,
            constants=tuple(sorted(constants.items())),
            slots=(("divergence", entry.header),),
            args=SAVED_ROWS_ARGS,
            regions=(),
            blocks=-(-rows // THREADS),
            threads=THREADS,
            schedule=Schedule(),
        )
        read = tuple((name, 4 * rows * i) for i, name in enumerate(SAVED_ROWS))
        size = -(-4 * rows * len(SAVED_ROWS) // LINE) * LINE
        return MadeRows(side, kernel, size, (("workspace", 0),), read)

    return tuple(map(made, sides))

"""What gradients of attention read of each row, made of the forward's results and of the derivatives by these:
`kernels/attention_rows.cu`."""

from __future__ import annotations

from collections.abc import Iterable

from ..ops.interface import Task
from ..problem import Operand, Problem
from .base import ELEMENT_BYTES, ELEMENT_CODES, KernelPlan, MadeRows
from .gpus import DeviceFacts
from .structs import ATTENTION_ROWS, Regions, attention_args_of, attention_copy
from .work_tiles import Schedule

THREADS = 128
LANES = 16
"""Threads that have a row together."""


def plan(
    problem: Problem, sides: Iterable[str], facts: DeviceFacts, gradients: Iterable[KernelPlan]
) -> tuple[MadeRows, ...]:
    """For all gradients of the only side, `LANES` threads to a row, which also copy the upstream gradient where one of
    the kernels reads that by tensor maps."""
    rows = problem.batch * problem.heads * problem.queries
    (side,) = tuple(sides) or ("",)
    if not side or not rows:
        return ()
    value = problem.operand("value")
    constants: dict[str, int | float | str] = {
        "SKL_A_ELEMENT": ELEMENT_CODES[value.dtype],
        "SKL_VALUE_DIM": value.dim,
        "SKL_PLANES": 3,
        "SKL_LANES": LANES,
        "SKL_THREADS": THREADS,
    }
    regions: tuple[Regions, ...] = (ATTENTION_ROWS,)
    written, behind = [("workspace", 0)], ATTENTION_ROWS.bytes(rows)
    copies: tuple[tuple[str, int, Operand], ...] = ()
    if any(box.name == "grad" for kernel in gradients for box in kernel.boxes):
        regions += (attention_copy(value.dim * ELEMENT_BYTES[value.dtype]),)
        written.append(("copy", behind))
        copies = (("grad", behind, _compact(problem, value)),)
    kernel = KernelPlan(
        task=Task("saved_rows", side),
        entry="kernels/attention_rows.cu",
        symbol="streamkl_attention_rows",
        arch=facts.flag,
        constants=tuple(sorted(constants.items())),
        slots=(),
        args=attention_args_of().rows,
        regions=regions,
        blocks=-(-rows * LANES // THREADS),
        threads=THREADS,
        schedule=Schedule(),
    )
    return (MadeRows(side, kernel, sum(x.bytes(rows) for x in regions), tuple(written), (("rows", 0),), copies),)


def _compact(problem: Problem, value: Operand) -> Operand:
    """The copy: compact, whatever the upstream gradient is."""
    heads, rows = problem.heads, problem.queries
    return Operand(
        heads, rows, value.dim, value.dtype, (heads * rows * value.dim, rows * value.dim, value.dim, 1), True
    )

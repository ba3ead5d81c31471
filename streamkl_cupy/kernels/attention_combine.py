"""Keys of few rows of attention are split over blocks; `kernels/attention_combine.cu` joins what these leave."""

from __future__ import annotations

from .base import ELEMENT_CODES, KernelPlan, Work, args_for
from .combine import COMBINE
from .gpus import DeviceFacts

THREADS = 128
WARP = 32


def plan(work: Work, forward: KernelPlan, facts: DeviceFacts) -> KernelPlan:
    """The kernel that joins the splits of `forward`, a warp to a row."""
    problem = work.problem
    constants: dict[str, int | float | str] = {
        "SKL_A_ELEMENT": ELEMENT_CODES[work.side.dtype],
        "SKL_PLANES": 3,
        "SKL_THREADS": THREADS,
    }
    return KernelPlan(
        task=COMBINE,
        entry="kernels/attention_combine.cu",
        symbol="streamkl_attention_combine",
        arch=facts.flag,
        constants=tuple(sorted(constants.items())),
        slots=(),
        args=args_for(problem).forward,
        regions=forward.regions,
        blocks=-(-problem.batch * problem.heads * problem.queries * WARP // THREADS),
        threads=THREADS,
        schedule=forward.schedule,
    )

"""States of rows over some of their keys joined with those over others, `kernels/join_states.cu`, a thread to a row."""

from __future__ import annotations

from ..ops.interface import Task
from ..rules.divergences.interface import Divergence
from .base import KernelPlan
from .gpus import DeviceFacts
from .structs import JOIN_STATES
from .work_tiles import Schedule

THREADS = 128


def plan(divergence: Divergence, facts: DeviceFacts) -> KernelPlan:
    """For rows of any number, which the launch says: of a divergence whose states merge outside of a call."""
    return KernelPlan(
        task=Task("join_states"),
        entry="kernels/join_states.cu",
        symbol="streamkl_join_states",
        arch=facts.flag,
        constants=tuple(sorted({"SKL_THREADS": THREADS, "SKL_SOME_KEYS": 1, **divergence.constants}.items())),
        slots=(("divergence", divergence.header),),
        args=JOIN_STATES,
        regions=(),
        blocks=0,
        threads=THREADS,
        schedule=Schedule(),
    )

"""States of rows over some of their keys joined with those over others, `kernels/join_states.cu`, a thread to a row."""

from __future__ import annotations

from ..ops.interface import Task
from ..rules.divergences import DIVERGENCES
from .base import KernelPlan
from .gpus import DeviceFacts
from .structs import JOIN_STATES
from .work_tiles import Schedule

THREADS = 128


def plan(facts: DeviceFacts) -> KernelPlan:
    """For rows of any number, which the launch says: of the divergence whose states merge outside of a call."""
    entry = DIVERGENCES["kl"]
    return KernelPlan(
        task=Task("join_states"),
        entry="kernels/join_states.cu",
        symbol="streamkl_join_states",
        arch=facts.flag,
        constants=tuple(sorted({"SKL_THREADS": THREADS, "SKL_SOME_KEYS": 1, **entry.constants}.items())),
        slots=(("divergence", entry.header),),
        args=JOIN_STATES,
        regions=(),
        blocks=0,
        threads=THREADS,
        schedule=Schedule(),
    )

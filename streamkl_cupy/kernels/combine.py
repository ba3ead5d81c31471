"""Keys of few rows are split over blocks, and `kernels/combine.cu` joins the states that these leave of each row."""

from __future__ import annotations

import math

from ..rules.divergences import DIVERGENCES
from .base import KernelPlan, Task, Work
from .gpus import DeviceFacts
from .structs import FORWARD

COMBINE = Task("combine")
# Splitting costs a workspace and a second launch: below this many key tiles an unsplit block is done sooner.
MIN_TILES_TO_SPLIT = 64
MIN_TILES_PER_SPLIT = 8
THREADS = 128


def splits(blocks: int, key_tiles: int, facts: DeviceFacts) -> int:
    """Over how many blocks the keys go: the fewest that fill the GPU's last wave nearly as well as any number would."""
    most = min(key_tiles // MIN_TILES_PER_SPLIT, -(-2 * facts.multiprocessors // max(blocks, 1)))
    if blocks == 0 or blocks * 5 >= facts.multiprocessors * 4 or key_tiles < MIN_TILES_TO_SPLIT:
        return 1

    def filled(number: int) -> float:
        waves = blocks * number / facts.multiprocessors
        return waves / math.ceil(waves)

    best = max(filled(number) for number in range(1, most + 1))
    return next(number for number in range(1, most + 1) if filled(number) >= 0.85 * best)


def plan(work: Work, forward: KernelPlan, facts: DeviceFacts) -> KernelPlan:
    """The kernel that joins the splits of `forward`, a thread to a row."""
    problem = work.problem
    # Only float32 keys have parts in common taken from them, and log-sum-exps to give those back to.
    constants = {"SKL_HAS_OFFSETS": int(work.float32), "SKL_THREADS": THREADS}
    return KernelPlan(
        task=COMBINE,
        entry="kernels/combine.cu",
        symbol="streamkl_combine",
        arch=facts.flag,
        constants=tuple(sorted(constants.items())),
        slots=(("divergence", DIVERGENCES[problem.divergence].header),),
        args=FORWARD,
        regions=forward.regions,
        blocks=-(-problem.batch * problem.heads * problem.queries // THREADS),
        threads=THREADS,
        schedule=forward.schedule,
    )

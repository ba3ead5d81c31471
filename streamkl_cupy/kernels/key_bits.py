"""A mask of keys, packed to bits before any other kernel runs: `kernels/key_bits.cu`, a warp to a word."""

from __future__ import annotations

from ..ops import Task
from ..problem import Problem
from ..rules.masks import parts_of
from .base import KernelPlan
from .gpus import DeviceFacts
from .structs import KEY_BITS as ARGS
from .structs import key_bits, key_words
from .work_tiles import Schedule

KEY_BITS = Task("key_bits")
THREADS = 256


def needed(problem: Problem) -> bool:
    """Whether a mask of keys is among the problem's."""
    return any(array.bits for part in parts_of(problem.mask) for array in part.arrays)


def mask_bytes(problem: Problem) -> int:
    """Of the bits."""
    return key_bits(problem.keys).bytes(problem.batch)


def plan(problem: Problem, facts: DeviceFacts) -> KernelPlan:
    """The kernel that packs the mask."""
    return KernelPlan(
        task=KEY_BITS,
        entry="kernels/key_bits.cu",
        symbol="streamkl_key_bits",
        arch=facts.flag,
        constants=(("SKL_THREADS", THREADS),),
        slots=(),
        args=ARGS,
        regions=(),
        blocks=-(-problem.batch * key_words(problem.keys) * 32 // THREADS),
        threads=THREADS,
        schedule=Schedule(),
    )

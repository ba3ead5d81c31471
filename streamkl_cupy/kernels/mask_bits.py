"""Masks of keys and of query rows, packed to bits before any other kernel runs: `kernels/mask_bits.cu`, a warp to a
word."""

from __future__ import annotations

from typing import NamedTuple

from ..ops import Task
from ..problem import Problem
from ..rules.masks import parts_of
from .base import KernelPlan
from .gpus import DeviceFacts
from .structs import MASK_BITS as ARGS
from .structs import bit_words, packed_mask
from .work_tiles import Schedule

MASK_BITS = Task("mask_bits")
THREADS = 256


class PackedMask(NamedTuple):
    """A mask's array as kernels get it."""

    array: str
    kernel: KernelPlan
    """That packs it."""
    offset: int
    """Where in every workspace the bits lie, bytes."""
    bytes: int
    """Of the bits."""

    def __str__(self) -> str:
        return f"{self.kernel}, of {self.array}"


def plan(problem: Problem, facts: DeviceFacts) -> tuple[PackedMask, ...]:
    """What is packed of the problem's mask, one after the other from the start of a workspace."""
    found: list[PackedMask] = []
    offset = 0
    for array in (array for part in parts_of(problem.mask) for array in part.arrays if array.bits):
        count = problem.queries if array.of == "queries" else problem.keys
        kernel = _kernel(problem.batch * bit_words(count), facts)
        found.append(PackedMask(array.name, kernel, offset, packed_mask(count).bytes(problem.batch)))
        offset += found[-1].bytes
    return tuple(found)


def _kernel(words: int, facts: DeviceFacts) -> KernelPlan:
    return KernelPlan(
        task=MASK_BITS,
        entry="kernels/mask_bits.cu",
        symbol="streamkl_mask_bits",
        arch=facts.flag,
        constants=(("SKL_THREADS", THREADS),),
        slots=(),
        args=ARGS,
        regions=(),
        blocks=-(-words * 32 // THREADS),
        threads=THREADS,
        schedule=Schedule(),
    )

"""Kernel families: one file each, all answering the same questions. `planning.py` asks and knows no number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceFacts:
    """What planning needs to know of a GPU."""

    compute_capability: tuple[int, int]
    smem_per_block: int
    """Most shared memory one block may ask for, bytes."""
    multiprocessors: int
    name: str = ""


@dataclass(frozen=True)
class TileRow:
    """One way to cut a kernel's work: a row of a family's table, with the reason it is there.

    `rows` of the stationary operand belong to a block of `warps` warps, each with `warp_tiles` strips of 16; `columns`
    rows of the other operand are streamed at a time, `stages` tiles in flight, and the kernel is compiled to leave room
    for `min_blocks` blocks per multiprocessor. `unroll` steps of 16 along the head dim are unrolled. The row applies to
    head dims up to `max_dim` on both sides and `max_out` on the differentiated one, on GPUs older than `before`.
    """

    warps: int
    warp_tiles: int
    columns: int
    stages: int
    min_blocks: int
    max_dim: int
    reason: str
    unroll: int = 4
    max_out: int = 256
    before: tuple[int, int] = (99, 0)

    @property
    def rows(self) -> int:
        return self.warps * self.warp_tiles * 16

    @property
    def threads(self) -> int:
        return self.warps * 32


@dataclass(frozen=True)
class Family:
    """A set of kernels that share their instructions."""

    name: str
    min_capability: tuple[int, int]
    flag: Callable[[tuple[int, int]], str]
    """Compute capability -> NVRTC architecture."""
    entries: dict[str, tuple[str, str]]
    """Kind of kernel ("forward", "gradient") -> (file, symbol)."""
    tiles: Callable[[str, bool], tuple[TileRow, ...]]
    """(kind, whether an operand is float32) -> rows in order of preference."""


def families() -> tuple[Family, ...]:
    """All families, the most capable first."""
    from . import sm80

    return (sm80.FAMILY,)

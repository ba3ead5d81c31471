"""Gradients of the indexer that compute scores again, whose kernels share `kernels/indexer_gradient/`."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple

from .base import KernelText
from .gpus import DeviceFacts
from .indexer import (
    GRID,
    OPERANDS,
    UNEVEN,
    Grid,
    HopperIndexerKernel,
    IndexerKernel,
    IndexerShape,
    IndexerWork,
    StripCut,
    pitch,
    tile_constants,
)
from .sm90 import chunks

STAGES = 2
"""Of Hopper's."""


class Tile(NamedTuple):
    """Of 64 rows of the stationary side."""

    columns: int
    """Rows of the streamed side at a time."""
    stages: int
    min_blocks: int
    unroll: int
    smem_bytes: int


class Gradient(IndexerKernel[Tile]):
    """One of either side."""

    def plan(self, work: IndexerWork, tile: Tile, facts: DeviceFacts, reason: str = "") -> KernelText:
        *cut, smem_bytes = tile
        return self.kernel(work.shape, facts, tile_constants(*cut), smem_bytes)


class OfQueries(Gradient):
    """One whose queries stay, while keys are streamed."""

    kind = "indexer_query"

    def grid(self, strip: StripCut) -> Grid:
        """Blocks of a launch over a strip."""
        return strip.row_tiles, strip.query_heads


class OfKeys(Gradient):
    """One whose keys stay, while queries are streamed."""

    kind = "indexer_key"

    def grid(self, strip: StripCut) -> Grid:
        """Blocks of a launch over a strip."""
        return strip.key_tiles, strip.key_heads, strip.shares


class HopperGradient(HopperIndexerKernel[Tile], Gradient):
    """One of 16-bit elements that are read 16 bytes at a time."""

    @abstractmethod
    def smem_bytes(self, rows: int, strip: int) -> int:
        """Of a block, where 64 rows of the student and a tile of the strip take so many."""

    def lacks(self, work: IndexerWork, facts: DeviceFacts) -> str:
        if work.shape.student == "float32":
            return "it multiplies 16-bit elements"
        return uneven(work.shape)

    def choice(self, work: IndexerWork, facts: DeviceFacts) -> tuple[Tile | None, str]:
        if reason := self.refuses(work, facts):
            return None, reason
        dim = work.shape.index_dim
        smem = self.smem_bytes(GRID * 128 * chunks(dim), GRID * pitch(GRID, work.shape.student))
        return Tile(GRID, STAGES, 3 if dim <= 128 and 3 * (smem + 1024) <= facts.smem_per_block else 2, 4, smem), ""


def portable(shape: IndexerShape, columns: int, stages: int, smem_bytes: int) -> Tile:
    """A tile of any element type, with as many blocks as a multiprocessor has registers for."""
    float32 = shape.student == "float32"
    return Tile(columns, stages, 1 if float32 or shape.index_dim > 128 else 2, 2 if float32 else 4, smem_bytes)


def columns_of(shape: IndexerShape) -> tuple[int, ...]:
    """Of such tiles, the best first: registers hold a row of sums, and of planes three."""
    if shape.student == "float32":
        return (32, 16) if shape.index_dim <= 128 else (16,)
    return (64, 32) if shape.index_dim <= 128 else (32,)


def uneven(shape: IndexerShape) -> str:
    """Why the student's rows cannot be read 16 bytes at a time; empty where they can."""
    names = [OPERANDS[key] for key in ("SQ", "SK") if key not in shape.vectors]
    return UNEVEN.format(" and ".join(names)) if names else ""

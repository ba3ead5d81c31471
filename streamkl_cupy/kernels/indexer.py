"""What the indexer's kernels have in common on the host: the shapes that they are compiled for, and their plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ..compiler.source import flatten
from .base import ELEMENT_BYTES, Box
from .gpus import DeviceFacts
from .structs import TENSOR_MAP, Struct

CODES = {"bfloat16": 0, "float16": 1, "float32": 2}
GRID = 64
"""Rows and keys of a tile of the strip."""
WARPS = 4


class IndexerShape(NamedTuple):
    """What is compiled into kernels of a call."""

    teacher: str
    """dtype."""
    student: str
    weights: str
    teacher_dim: int
    rope_dim: int
    index_dim: int
    gated: bool
    bits: bool
    """Whether rows see keys by bits."""
    target: bool
    """Whether the teacher's heads come added up."""
    vectors: frozenset[str]
    """Operands, as "TQ", that are read 16 bytes at a time."""
    maps: frozenset[str] = frozenset()
    """Those that tensor maps can describe."""
    tiled: bool = False
    """Whether the strip lies in tiles, with gates beside it."""


@dataclass(frozen=True)
class IndexerKernel:
    """A kernel with its tile, launchable."""

    name: str
    constants: tuple[tuple[str, int], ...]
    args: Struct
    threads: int
    smem_bytes: int = 0
    boxes: tuple[Box, ...] = ()
    """What its arguments have tensor maps of."""

    @property
    def symbol(self) -> str:
        return f"streamkl_{self.name.removesuffix('_sm80').removesuffix('_sm90')}"

    def arch(self, facts: DeviceFacts) -> str:
        """What it is compiled for."""
        return f"{facts.flag}a" if self.name.endswith("_sm90") else facts.flag

    @property
    def text(self) -> str:
        return _text(self.name, self.constants, self.args)

    def __str__(self) -> str:
        return f"{self.name}: {self.threads} threads, {self.smem_bytes} B of shared memory"


@lru_cache(maxsize=256)
def _text(name: str, constants: tuple[tuple[str, int], ...], args: Struct) -> str:
    # Tiles of Hopper's know how tensor maps load them.
    has_maps = any(field.type == TENSOR_MAP for field in args.fields)
    prologue = f"{TENSOR_MAP.text}\n{args.text}" if name.endswith("_sm90") and not has_maps else args.text
    return flatten(f"kernels/{name}.cu", dict(constants), {}, prologue=prologue)


def pitch(dim: int, dtype: str) -> int:
    """Bytes of a row of a tile in shared memory."""
    return -(-dim // 16) * 16 * ELEMENT_BYTES[dtype] + 16


def tile_constants(columns: int, stages: int, min_blocks: int, unroll: int) -> dict[str, int]:
    """Of blocks of `GRID` rows."""
    return {
        "SKL_ROWS": GRID,
        "SKL_COLUMNS": columns,
        "SKL_WARPS": WARPS,
        "SKL_WARP_TILES": 1,
        "SKL_STAGES": stages,
        "SKL_ROWS_ARE_QUERIES": 1,
        "SKL_PLANES": 3,
        "SKL_MIN_BLOCKS": min_blocks,
        "SKL_UNROLL": unroll,
    }


def shape_constants(shape: IndexerShape) -> dict[str, int]:
    """What the student's side is."""
    return {
        "SKL_S_ELEMENT": CODES[shape.student],
        "SKL_S_DIM": shape.index_dim,
        "SKL_W_ELEMENT": CODES[shape.weights],
        "SKL_GATED": int(shape.gated),
        "SKL_BITS": int(shape.bits),
        "SKL_TILED_STRIP": int(shape.tiled),
        **{f"SKL_{name}_VECTOR": int(name in shape.vectors) for name in ("TQ", "TK", "RQ", "RK", "SQ", "SK")},
    }


def kernel(
    name: str, constants: Mapping[str, int], args: Struct, threads: int = 32 * WARPS, smem_bytes: int = 0
) -> IndexerKernel:
    """With its constants in order, so that equal kernels are equal."""
    if smem_bytes:
        constants = {**constants, "SKL_SMEM_BYTES": smem_bytes}
    return IndexerKernel(name, tuple(sorted(constants.items())), args, threads, smem_bytes)


def too_large(what: str, facts: DeviceFacts) -> NotImplementedError:
    """The error about head dims that no tile has shared memory for."""
    return NotImplementedError(
        f"indexer_kl: {what} need more shared memory than the {facts.smem_per_block} B of {facts.name or 'this GPU'}; "
        f"use arrays on the CPU, or smaller head dims"
    )

"""What the indexer's kernels have in common on the host: what they are asked for, and what is compiled into them.

Those of scores and of gradients are candidates for their tasks (`KERNELS`), of which the first that does not refuse
serves; those that go with them, such as `indexer_rows`, have a `plan` alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final, Literal, NamedTuple, TypeVar, get_args

from ..rules.scores import SCORES
from .base import ELEMENT_BYTES, ELEMENT_CODES, PLANES, Box, Candidate, KernelText
from .gpus import DeviceFacts
from .structs import INDEXER, INDEXER_ROW_REGIONS, Regions, Struct, indexer_gradients, indexer_strip

GRID = 64
"""Rows and keys of a tile of the strip."""
WARPS = 4

Ending = Literal["rows", "strip", "target", "lse", "list"]
"""What becomes of a tile of scores, in the order of the kernels' numbers."""
ENDINGS: Final[tuple[Ending, ...]] = get_args(Ending)
OPERANDS: Final = {
    "TQ": "teacher_q",
    "TK": "teacher_k",
    "RQ": "teacher_q_rope",
    "RK": "teacher_k_rope",
    "SQ": "index_q",
    "SK": "index_k",
}
"""What scores are products of, by the names that constants have for them."""
UNEVEN = "rows of {} must start on 16-byte boundaries with adjacent elements"
"""Why what is read 16 bytes at a time cannot be."""

Constants = dict[str, int | float | str]
SCORE: Final = SCORES["dot"]
"""What products of the teacher mean, and the weighted sums of the student's."""
SLOTS: Final = (("score", SCORE.headers),)


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
    """Of `OPERANDS` those that are read 16 bytes at a time."""
    maps: frozenset[str] = frozenset()
    """Those that tensor maps can describe."""
    tiled: bool = False
    """Whether the strip lies in tiles, with gates beside it."""

    @property
    def float32(self) -> bool:
        """Whether a product is one of float32 operands."""
        return "float32" in (self.teacher, self.student)


class IndexerWork(NamedTuple):
    """A task of a call."""

    shape: IndexerShape
    ending: Ending = "rows"
    """Of scores."""
    several_keys: bool = False
    """Whether the teacher's heads of a group read more than one key head."""
    keys: int = 0
    heads: int = 1
    """Of the student, in a group."""
    teacher_heads: int = 0
    """The same of the teacher."""
    chosen: int = 0
    """Keys that ids name for a row; 0: there are no ids."""


class RowCut(NamedTuple):
    """How the keys of a row go over states that are joined afterwards."""

    states: int
    """Of each row."""
    split_keys: int = 0
    """Of a split, which has two of these; 0: every row has as many as there are splits."""
    tiles: int = 1
    """Row tiles that have their splits in common."""


class StripCut(NamedTuple):
    """What there is of a strip for kernels of gradients."""

    row_tiles: int
    query_heads: int
    """Of the student, of all batch entries."""
    key_tiles: int
    key_heads: int
    shares: int
    """Blocks over which work goes."""


Grid = tuple[int, ...]
Tile = TypeVar("Tile")


class IndexerKernel(Candidate[IndexerWork, Tile]):
    """A candidate for one of the tasks."""

    family = "sm80"
    slots: ClassVar[tuple[tuple[str, tuple[str, ...]], ...]] = ()
    """Rules that its text includes."""
    keeps_gates: ClassVar[bool] = False
    """Whether it multiplies gates that the scores have left, and does not compute these again."""

    def flag(self, facts: DeviceFacts) -> str:
        return facts.flag

    def kernel(
        self,
        shape: IndexerShape,
        facts: DeviceFacts,
        constants: Mapping[str, int | float | str],
        smem_bytes: int,
        threads: int = 32 * WARPS,
        args: Struct = INDEXER,
        boxes: tuple[Box, ...] = (),
    ) -> KernelText:
        """With its constants in order, so that equal kernels are equal."""
        return KernelText(
            entry=f"kernels/{self.stem}.cu",
            symbol=self.symbol,
            arch=self.flag(facts),
            constants=tuple(sorted({**shape_constants(shape), **constants, "SKL_SMEM_BYTES": smem_bytes}.items())),
            slots=self.slots,
            args=args,
            regions=regions_of(shape),
            threads=threads,
            smem_bytes=smem_bytes,
            boxes=boxes,
        )


class HopperIndexerKernel(IndexerKernel[Tile]):
    """One for Hopper."""

    family = "sm90"

    def flag(self, facts: DeviceFacts) -> str:
        return f"{facts.flag}a"

    def refuses(self, work: IndexerWork, facts: DeviceFacts) -> str:
        """Why this kernel cannot do the work on that GPU; empty where it can."""
        if facts.compute_capability != (9, 0):
            return "it needs compute capability 9.0"
        return self.lacks(work, facts)

    def lacks(self, work: IndexerWork, facts: DeviceFacts) -> str:
        """What else of the work this kernel cannot do."""
        return ""


class Scores(IndexerKernel[Tile]):
    """One of tiles of scores."""

    kind = "indexer_score"
    slots = SLOTS
    streams: ClassVar[bool] = False
    """Whether queries are streamed past keys, whose keys are split."""
    gathers: ClassVar[bool] = False
    """Whether keys that ids name are gathered."""

    def row_cut(self, work: IndexerWork, splits: int) -> RowCut:
        """What a forward leaves of each row, where the keys of a row tile go over so many blocks."""
        return RowCut(splits)

    def grid(self, work: IndexerWork, tiles: int, splits: int, entries: int, facts: DeviceFacts) -> Grid:
        """Blocks of a launch over so many row tiles of so many entries."""
        return tiles * splits, entries


def beside(
    stem: str,
    facts: DeviceFacts,
    threads: int,
    constants: Mapping[str, int | float | str],
    args: Struct = INDEXER,
    shape: IndexerShape | None = None,
    slots: tuple[tuple[str, tuple[str, ...]], ...] = (),
) -> KernelText:
    """A kernel that goes with those, on any GPU; with a shape, one that is compiled for the student's side."""
    of_shape = {} if shape is None else {**shape_constants(shape), **tile_constants(GRID, 1, 1, 1)}
    return KernelText(
        entry=f"kernels/{stem}.cu",
        symbol=f"streamkl_{stem}",
        arch=facts.flag,
        constants=tuple(sorted({**of_shape, **constants, "SKL_THREADS": threads}.items())),
        slots=slots,
        args=args,
        regions=(INDEXER_ROW_REGIONS,) if shape is None else regions_of(shape),
        threads=threads,
    )


def regions_of(shape: IndexerShape) -> tuple[Regions, ...]:
    """What lies in workspaces."""
    strip = indexer_strip(shape.index_dim, ELEMENT_BYTES[shape.student])
    return (INDEXER_ROW_REGIONS, strip, indexer_gradients(shape.index_dim))


def pitch(dim: int, dtype: str) -> int:
    """Bytes of a row of a tile in shared memory."""
    return -(-dim // 16) * 16 * ELEMENT_BYTES[dtype] + 16


def tile_constants(columns: int, stages: int, min_blocks: int, unroll: int) -> Constants:
    """Of blocks of `GRID` rows."""
    return {
        "SKL_ROWS": GRID,
        "SKL_COLUMNS": columns,
        "SKL_WARPS": WARPS,
        "SKL_WARP_TILES": 1,
        "SKL_STAGES": stages,
        "SKL_ROWS_ARE_QUERIES": 1,
        "SKL_PLANES": PLANES["highest"],
        "SKL_MIN_BLOCKS": min_blocks,
        "SKL_UNROLL": unroll,
    }


def shape_constants(shape: IndexerShape) -> Constants:
    """What the student's side is."""
    return {
        "SKL_S_ELEMENT": ELEMENT_CODES[shape.student],
        "SKL_S_DIM": shape.index_dim,
        "SKL_W_ELEMENT": ELEMENT_CODES[shape.weights],
        "SKL_GATED": int(shape.gated),
        "SKL_BITS": int(shape.bits),
        "SKL_TILED_STRIP": int(shape.tiled),
        **{f"SKL_{name}_VECTOR": int(name in shape.vectors) for name in OPERANDS},
    }


def teacher_constants(shape: IndexerShape, ending: Ending) -> Constants:
    """What the teacher's side of scores is, what they mean, and what becomes of them."""
    return {
        "SKL_T_ELEMENT": ELEMENT_CODES[shape.teacher],
        "SKL_T_DIM": shape.teacher_dim,
        "SKL_R_DIM": shape.rope_dim,
        "SKL_T_SCORE": SCORE.struct,
        "SKL_S_SCORE": SCORE.struct,
        "SKL_ENDING": ENDINGS.index(ending),
        "SKL_TARGET": int(shape.target),
    }


def too_large(what: str, facts: DeviceFacts) -> str:
    """Of head dims that no tile has shared memory for."""
    return (
        f"indexer_kl: {what} need more shared memory than the {facts.smem_per_block} B of {facts.name or 'this GPU'}; "
        f"use arrays on the CPU, or smaller head dims"
    )

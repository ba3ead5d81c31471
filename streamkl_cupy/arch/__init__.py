"""Kernel families: one file each, all answering the same questions. `planning.py` asks and knows no number."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from ..problem import Operand, Problem, Side
from ..rules.divergences import DIVERGENCES
from ..rules.masks import parts_of, registers
from ..structs import Regions, Struct, split_states

ELEMENT_CODES = {"bfloat16": 0, "float16": 1, "float32": 2}
ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
PLANES = {"highest": 3, "high": 2}

SIDES = ("teacher", "student")


@dataclass(frozen=True)
class DeviceFacts:
    """What planning needs to know of a GPU."""

    compute_capability: tuple[int, int]
    smem_per_block: int
    """Most shared memory one block may ask for, bytes."""
    multiprocessors: int
    name: str = ""


@dataclass(frozen=True)
class Work:
    """One kernel's share of a problem: "forward", the gradient of the input `name`, or both of the side `name`."""

    problem: Problem
    name: str

    @property
    def kind(self) -> str:
        if self.name == "forward":
            return "forward"
        return "fused" if self.name in SIDES else "gradient"

    @property
    def rows_are_keys(self) -> bool:
        """Whether the stationary operand is the keys and the queries are streamed."""
        return self.name.endswith("_k") or self.kind == "fused"

    @property
    def side(self) -> Side:
        """The side that is differentiated."""
        return self.problem.teacher if self.name.startswith("teacher") else self.problem.student

    @property
    def other_side(self) -> Side:
        """The side whose scores are only recomputed."""
        return self.problem.student if self.name.startswith("teacher") else self.problem.teacher

    @property
    def heads(self) -> int:
        return self.side.k.heads if self.rows_are_keys else self.problem.heads

    @property
    def rows(self) -> int:
        return self.problem.keys if self.rows_are_keys else self.problem.queries

    @property
    def typical_rows(self) -> int:
        """Rows of a sequence, where several lie one after the other and are taken to be equally long."""
        return -(-self.rows // max(self.problem.sequences, 1))

    @property
    def out_dim(self) -> int:
        return 0 if self.kind == "forward" else self.side.dim

    @property
    def row_vectors(self) -> int:
        """Statistics that travel with each streamed query: two log-sum-exps, the upstream gradient, the value."""
        if not self.rows_are_keys:
            return 0
        return 3 + (self.name.partition("_")[0] in DIVERGENCES[self.problem.divergence].needs_value)

    @property
    def mask_level(self) -> int:
        """How many registers a mask takes: 0 a bound, 1 an interval or places, 2 pairs apart, 3 all of that."""
        return registers(parts_of(self.problem.mask))

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.problem.teacher, self.problem.student

    @property
    def float32(self) -> bool:
        return "float32" in (self.problem.teacher.dtype, self.problem.student.dtype)

    @property
    def dim(self) -> int:
        return max(self.problem.teacher.dim, self.problem.student.dim)


@dataclass(frozen=True)
class TileRow:
    """One way to cut a kernel's work: a row of a family's table, with the reason it is there.

    `rows` of the stationary operand belong to a block of `warps` computing warps, each with `warp_tiles` strips of 16;
    `columns` rows of the other operand are streamed at a time, `stages` buffers in flight, and the kernel is compiled
    to leave room for `min_blocks` blocks per multiprocessor. `unroll` steps of 16 along the head dim are unrolled. The
    row applies to head dims up to `max_dim` on both sides and `max_out` on the differentiated one, to masks up to
    `max_mask` of `Work.mask_level`, to at most `max_vectors` row vectors, on GPUs older than `before`.
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
    max_mask: int = 3
    max_vectors: int = 4

    @property
    def rows(self) -> int:
        return self.warps * self.warp_tiles * 16


class Family(ABC):
    """A set of kernels that share their instructions."""

    name: str

    @abstractmethod
    def refuses(self, work: Work, facts: DeviceFacts) -> str:
        """Why this family cannot do the work on that GPU; empty where it can."""

    @abstractmethod
    def flag(self, capability: tuple[int, int]) -> str:
        """The NVRTC architecture."""

    @abstractmethod
    def entry(self, kind: str) -> tuple[str, str]:
        """File and symbol of a kind of kernel."""

    @abstractmethod
    def table(self, work: Work) -> tuple[TileRow, ...]:
        """Tile rows in order of preference."""

    @abstractmethod
    def smem_bytes(self, work: Work, tile: TileRow) -> int:
        """Dynamic shared memory of a block."""

    @abstractmethod
    def threads(self, tile: TileRow) -> int:
        """Threads of a block."""

    @abstractmethod
    def constants(self, work: Work, tile: TileRow) -> dict[str, int]:
        """What is compiled in beyond what every family needs."""

    @abstractmethod
    def args(self, kind: str) -> Struct:
        """The kernel's arguments."""

    def regions(self, work: Work, tile: TileRow) -> tuple[Regions, ...]:
        """What lies in workspaces that the kernel reads or writes."""
        if work.kind == "forward":
            return (split_states(DIVERGENCES[work.problem.divergence].state_floats),)
        return ()

    def boxes(self, work: Work, tile: TileRow) -> tuple[tuple[str, int], ...]:
        """Inputs that are read through tensor maps, in the order of the arguments, with the rows of a box."""
        return ()

    def helpers(self, work: Work) -> tuple[int, int]:
        """Blocks per query head, and threads of each, of the kernels that run before and after a fused one."""
        return 0, 0

    def shares_lists(self, work: Work) -> bool:
        """Whether blocks can share the list of one row tile."""
        return False

    def stays(self, work: Work) -> bool:
        """Whether a block takes one portion of the work after the other, so that a launch needs few blocks."""
        return False

    def __init__(self) -> None:
        self._fitting: dict[object, tuple[TileRow, ...]] = {}

    def fitting(self, work: Work, facts: DeviceFacts) -> tuple[TileRow, ...]:
        """The rows of the table that this work and this GPU allow, whatever the extents: found once for all of them."""
        teacher, student = work.sides
        key = (work.name, teacher.dim, student.dim, teacher.dtype, student.dtype, work.problem.mask.parts, facts)
        found = self._fitting.get(key)
        return found or self._fitting.setdefault(key, self._fits(work, facts))

    def _fits(self, work: Work, facts: DeviceFacts) -> tuple[TileRow, ...]:
        return tuple(
            row
            for row in self.table(work)
            if work.dim <= row.max_dim
            and work.out_dim <= row.max_out
            and work.mask_level <= row.max_mask
            and work.row_vectors <= row.max_vectors
            and facts.compute_capability < row.before
            and self.smem_bytes(work, row) <= facts.smem_per_block
        )


def vector_loads(x: Operand) -> bool:
    """Whether every row of an input starts on a 16-byte boundary and its elements are adjacent."""
    per_chunk = 16 // ELEMENT_BYTES[x.dtype]
    return x.aligned and x.strides[3] == 1 and all(stride % per_chunk == 0 for stride in x.strides[:3])


def families() -> tuple[Family, ...]:
    """All families, the most capable first; the last one runs on every supported GPU."""
    from . import sm80, sm90

    return (sm90.FAMILY, sm80.FAMILY)

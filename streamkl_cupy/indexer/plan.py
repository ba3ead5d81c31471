"""How a call of the indexer runs on a GPU: how it is cut, by which kernels, in how much memory.

Pure: for any GPU, here or not. Shapes and the GPU alone decide, so equal calls have equal bits.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from ..arrays import ITEMSIZE, ArrayView
from ..kernels import (
    indexer_bits,
    indexer_join,
    indexer_key_sm80,
    indexer_pack,
    indexer_query_sm80,
    indexer_rows,
    indexer_scan,
    indexer_score_sm80,
    indexer_sum,
)
from ..kernels.gpus import DeviceFacts
from ..kernels.indexer import GRID, IndexerKernel, IndexerShape
from .problem import IndexProblem, callers_axes

STRIP_BYTES = 32 << 20
"""Of gradients of logits at a time: they are read once for every head, and should stay in the L2 cache."""
BLOCKS_PER_MULTIPROCESSOR = 6
"""Into so many the work is cut, for the last ones to end together."""
BITS_BYTES = 32 << 20
"""Of the bits of chosen keys at a time, in a forward; a backward has those of a strip."""
MOST_SPLITS = 64
LINE = 256
"""Bytes that regions of a workspace are multiples of."""


class Cut(NamedTuple):
    """How the work of a call is cut."""

    grid_tiles: int
    strip_tiles: int
    """Of rows that a strip has."""
    splits: int
    """Blocks over which the keys of a row tile go, in a forward; and in a strip."""
    lse_splits: int
    strip_splits: int
    shares: int
    """Blocks over which the rows of a key tile go."""


def shape_of(problem: IndexProblem) -> IndexerShape:
    """What kernels are compiled for."""
    views = problem.views
    vectors = {"TQ": "teacher_q", "TK": "teacher_k", "RQ": "teacher_q_rope", "RK": "teacher_k_rope", "SQ": "index_q"}
    vectors["SK"] = "index_k"
    index = views.get("index_q")
    teacher = views.get("teacher_q", index)
    assert teacher is not None
    weights = views.get("index_weights")
    sizes = dict(problem.sizes)
    return IndexerShape(
        teacher=teacher.dtype,
        student=teacher.dtype if index is None else index.dtype,
        weights="float32" if weights is None else weights.dtype,
        teacher_dim=sizes.get("T", 16),
        rope_dim=sizes.get("R", 0),
        index_dim=sizes.get("D", 16),
        gated=problem.relu,
        bits="key_mask" in views or "topk_indices" in views,
        target="target" in views,
        vectors=frozenset(key for key, name in vectors.items() if name not in views or _by_vectors(views[name])),
    )


def _by_vectors(view: ArrayView) -> bool:
    """Whether rows can be read 16 bytes at a time."""
    per_chunk = 16 // ITEMSIZE[view.dtype]
    return view.ptr % 16 == 0 and view.strides[-1] == 1 and all(x % per_chunk == 0 for x in view.strides[:-1])


def cut(problem: IndexProblem, facts: DeviceFacts) -> Cut:
    """How the work is cut, by shapes and the GPU."""
    entries, wanted = problem["B"] * problem.groups, BLOCKS_PER_MULTIPROCESSOR * facts.multiprocessors
    grid, keys = -(-problem["M"] // GRID), -(-problem["N"] // GRID)
    # float32 strips have half as many rows.
    strip = max(STRIP_BYTES // max(entries * GRID * keys * GRID * 2, 1), 1)
    strip = min(-(-grid // -(-grid // strip)), grid) if grid else 0

    def splits(rows: int, entries: int = entries) -> int:
        return max(min(-(-wanted // max(rows * entries, 1)), keys, MOST_SPLITS), 1)

    blocks = keys * problem["B"] * dict(problem.sizes).get("J", 1)
    shares = max(min(-(-wanted // max(blocks, 1)), strip, 16), 1)
    lse_splits = splits(grid, problem["B"] * dict(problem.sizes).get("H", 1))
    return Cut(grid, strip, splits(grid), lse_splits, splits(strip), shares)


def letters(view: ArrayView, problem: IndexProblem, axes: str) -> dict[str, int]:
    """Strides by the letters of the axes that the array has of these."""
    found = callers_axes(axes, problem.layout, problem.batched)
    if len(found) != len(view.shape):
        found = callers_axes(axes.translate({ord(x): None for x in "GJ"}), problem.layout, problem.batched)
    return {x: 0 if n == 1 else step for x, n, step in zip(found, view.shape, view.strides, strict=True)}


@dataclass(frozen=True)
class IndexerPlan:
    """A call on a GPU; `print` it."""

    problem: IndexProblem
    shape: IndexerShape
    facts: DeviceFacts
    cut: Cut
    bit_groups: int
    """Groups with bits of their own."""
    wrt: tuple[str, ...]

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Extents by letter, also of what is not there."""
        return {"J": 1, "I": self.problem.groups, "H": 0, "K": 1, "L": 1, "D": 16, **dict(self.problem.sizes)}

    @property
    def makes_lse(self) -> bool:
        """Whether a forward makes the teacher's log-sum-exps."""
        return self.problem.makes_lse

    def score(self, ending: indexer_score_sm80.Ending) -> IndexerKernel:
        """The kernel of score tiles."""
        return indexer_score_sm80.plan(self.shape, ending, self.facts)

    @cached_property
    def query(self) -> IndexerKernel:
        """The kernel of the gradients to queries and weights."""
        return indexer_query_sm80.plan(self.shape, self.facts)

    @cached_property
    def key(self) -> IndexerKernel:
        """The kernel of the gradient to keys."""
        return indexer_key_sm80.plan(self.shape, self.facts)

    @property
    def rows(self) -> tuple[IndexerKernel, ...]:
        """What finds out which keys rows see, and packs what is read of rows."""
        bits = (indexer_bits.plan(),) if self.shape.bits else ()
        return (indexer_rows.plan(), *bits, indexer_pack.plan(self.shape))

    @property
    def forward(self) -> tuple[IndexerKernel, ...]:
        """All kernels of a forward, or of a target."""
        join = (indexer_join.plan(lse=True),) if self.cut.lse_splits > 1 else ()
        lse = (self.score("lse"), *join) if self.makes_lse else ()
        if self.problem.operation.rows == ("target",):
            return (*self.rows, *lse, self.score("target"))
        return (*self.rows, *lse, self.score("rows"), indexer_join.plan(lse=False))

    @property
    def backward(self) -> tuple[IndexerKernel, ...]:
        """All kernels of the gradients `wrt`."""
        if not self.wrt:
            return ()
        query = (self.query,) if self.by_query(self.wrt) else ()
        key = (self.key, indexer_sum.plan(self.shape)) if "index_k" in self.wrt else ()
        return (*self.rows, indexer_scan.plan(self.shape), self.score("strip"), *query, *key)

    @staticmethod
    def by_query(wrt: Collection[str]) -> bool:
        """Whether any of these comes of the kernel where queries are stationary."""
        return "index_q" in wrt or "index_weights" in wrt

    @property
    def words(self) -> int:
        """Of the bits of a row."""
        return -(-self.problem["N"] // 32)

    @cached_property
    def bit_tiles(self) -> int:
        """Row tiles whose bits a forward has at a time."""
        if "topk_indices" not in self.problem.given:
            return self.cut.grid_tiles
        each = 4 * self.problem["B"] * self.bit_groups * GRID * self.words
        return min(max(BITS_BYTES // max(each, 1), 1), self.cut.grid_tiles)

    def row_regions(self, bit_tiles: int) -> dict[str, int]:
        """Bytes of what every request has in its workspace, with bits of so many row tiles."""
        p, n = self.problem, self.sizes
        rows = p["B"] * p["M"]
        rows_of_bits = self.bit_groups * bit_tiles * GRID if "topk_indices" in p.given else 1
        return {
            "lse2": 4 * n["H"] * rows,
            "weights": 4 * n["I"] * rows,
            "row_keys": 8 * rows,
            "tile_keys": 8 * p["B"] * self.cut.grid_tiles,
            "bases": 4 * rows,
            "bits": 4 * p["B"] * rows_of_bits * self.words if self.shape.bits else 0,
        }

    def forward_regions(self, makes_lse: bool) -> dict[str, int]:
        """Bytes of the regions of a forward's workspace, or of a target's."""
        p, c = self.problem, self.cut
        lse = c.lse_splits * self.sizes["H"] if makes_lse and c.lse_splits > 1 else 0
        states = 16 * max(c.splits * p.groups, lse) * p["M"] * p["B"]
        made = {} if "made_lse" in p.operation.ruled_rows or not makes_lse else {"made_lse": 4 * prod(p.shape("BHM"))}
        return {**self.row_regions(self.bit_tiles), "states": states, **made}

    def backward_regions(self, wrt: Collection[str]) -> dict[str, int]:
        """Bytes of the regions of a backward's workspace."""
        p, n, c = self.problem, self.sizes, self.cut
        entries, depth = p["B"] * p.groups, -(-n["D"] // 16) * 16
        keys = -(-p["N"] // GRID) * GRID
        return {
            **self.row_regions(c.strip_tiles),
            "row_stats": 16 * entries * p["M"],
            "strip": entries * c.strip_tiles * GRID * keys * ITEMSIZE[self.shape.student],
            "key_sums": 4 * c.shares * p["B"] * n["J"] * p["N"] * depth if "index_k" in wrt else 0,
            "broken": 4,
        }

    @property
    def workspace_bytes(self) -> int:
        """Of a forward."""
        return total(self.forward_regions(self.makes_lse))

    @property
    def backward_bytes(self) -> int:
        """Of a workspace of the gradients `wrt`."""
        return total(self.backward_regions(self.wrt)) if self.wrt else 0

    def __str__(self) -> str:
        p, c, n = self.problem, self.cut, self.sizes
        teacher = f"H={n['H']} of {self.shape.teacher}" if n["H"] else "target given"
        lines = [
            f"indexer KL on {self.facts.name or p.device}: B={p['B']} M={p['M']} N={p['N']}, teacher {teacher}, "
            f"indexer HI={n['I']} of {self.shape.student}, {p.groups} groups",
            f"  forward, {self.workspace_bytes / 2**20:.1f} MiB of workspace, keys over {c.splits} blocks",
            *(f"    {kernel}" for kernel in self.forward),
        ]
        if self.wrt:
            lines += [
                f"  backward to {', '.join(self.wrt)}, {self.backward_bytes / 2**20:.1f} MiB of workspace, strips of "
                f"{c.strip_tiles * GRID} rows, keys over {c.strip_splits} blocks, rows over {c.shares}",
                *(f"    {kernel}" for kernel in self.backward),
            ]
        return "\n".join(lines)


def total(regions: dict[str, int]) -> int:
    """Bytes of a workspace with these regions."""
    return sum(-(-size // LINE) * LINE for size in regions.values()) + 4 * LINE


@lru_cache(maxsize=256)
def make_plan(problem: IndexProblem, facts: DeviceFacts, wrt: tuple[str, ...] = ()) -> IndexerPlan:
    """How a call runs on a GPU.

    Raises:
        NotImplementedError: a GPU that no kernel is for.
    """
    major, minor = facts.compute_capability
    if (major, minor) < (8, 0):
        raise NotImplementedError(
            f"GPU {facts.name or '?'} has compute capability {major}.{minor}; kernels are built for 8.0 (Ampere) and "
            f"newer; use arrays on the CPU"
        )
    return IndexerPlan(problem, shape_of(problem), facts, cut(problem, facts), _bit_groups(problem), wrt)


def _bit_groups(problem: IndexProblem) -> int:
    ids, lengths = problem.views.get("topk_indices"), problem.views.get("topk_length")
    if ids is None:
        return 1
    grouped = "G" in letters(ids, problem, "BGMC")
    grouped = grouped or (lengths is not None and "G" in letters(lengths, problem, "BGM"))
    return problem.groups if grouped else 1

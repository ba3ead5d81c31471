"""How a problem is cut on the CPU: blocks of rows, tiles of keys, threads."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from ..concurrency import threads
from ..problem import Problem, counted
from ..rules import divergences
from ..rules.masks import differs_by_entry, parts_of
from ..rules.scores import score_of

# Measured at N = 4096, D = 64, float32 on one Zen 4 core: 79 ms for the forward with 1024 x 512, 83 with 512 x 512, 88
# with 256 x 512 and 96 with 128 x 512. Taller still would waste work under a causal mask, where a block computes about
# half of its diagonal tiles in vain: there it is 75, 58, 54 and 57 ms.
QUERY_TILE, KEY_TILE = 1024, 512
BLOCK_ELEMENTS = QUERY_TILE * KEY_TILE
LONGEST_KEY_TILE = 2048

# For threads, blocks get shorter until there are a few for each, because whoever has the last one is waited for.
BLOCKS_PER_THREAD = 2
SHARED_QUERY_TILE, LEAST_QUERY_TILE = 256, 16
# Threads for less than this, 3 ms on one core, cost more than they save. Short sequences are mostly Python's work,
# which threads cannot share.
LEAST_SHARED_SCORES, LEAST_SHARED_SEQUENCE = 1 << 19, 1 << 14
# OpenBLAS shares products of more multiplications than this between its threads.
LEAST_SHARED_PRODUCT = 1 << 18


@dataclass(frozen=True)
class NumPyPlan:
    """How a problem is cut on the CPU: a block is `batches` x `heads` x `queries` rows and takes `keys` at a time.

    `scratch_bytes` are those of each of the `threads`.
    """

    dtype: str
    batches: int
    heads: int
    queries: int
    keys: int
    blocks: int
    scratch_bytes: int
    product: int
    """Multiplications of the largest product that BLAS is given."""
    threads: int = 1
    buffers: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    """Elements of each scratch buffer."""

    def __str__(self) -> str:
        return (
            f"numpy {self.dtype}: {counted(self.blocks, 'block')} of {counted(self.batches, 'batch', 'batches')} x "
            f"{counted(self.heads, 'head')} x {counted(self.queries, 'query', 'queries')}, "
            f"{counted(self.keys, 'key')} at a time, {self.scratch_bytes / 2**20:.1f} MiB of scratch"
            + (f" for each of {self.threads} threads" if self.threads > 1 else "")
        )


def make_plan(problem: Problem, queries: int | None = None, keys: int | None = None, threads: int = 1) -> NumPyPlan:
    """Cut a problem into blocks of about `BLOCK_ELEMENTS` scores; small heads are taken several at a time.

    `queries` and `keys` are those of one packed sequence; without them they are taken as one. There are blocks for so
    many threads as far as rows and heads allow.
    """
    M, N = problem.queries if queries is None else queries, problem.keys if keys is None else keys
    m = max(min(M, _tallest(problem, M), _shared(problem.batch * problem.heads, M, threads)), 1)
    n = max(min(N, max(KEY_TILE, min(BLOCK_ELEMENTS // m, LONGEST_KEY_TILE))), 1)
    width = sum(side.dim for side in problem.distributions)
    heads = batches = 1
    alike = problem.mask.pattern is None or problem.mask.pattern.heads == 1
    if problem.heads > 0 and alike:
        # Whole groups of both sides, so that a block's query heads fold onto its key heads. Keys count too: with few
        # query rows it is they that fill the cache.
        unit = head_group(problem)
        room = BLOCK_ELEMENTS // max(m * n, n * width, 1)
        if threads > 1:
            room = min(room, -(-problem.batch * problem.heads // (BLOCKS_PER_THREAD * threads)))
        heads = min(problem.heads, max(room // unit * unit, 1))
        if heads == problem.heads and not differs_by_entry(parts_of(problem.mask)):
            batches = max(min(problem.batch, room // heads), 1)
    blocks = -(-problem.batch // batches) * -(-problem.heads // heads) * -(-M // m)
    buffers = _buffers(problem, batches * heads, m, n)
    scratch = sum(buffers.values())
    wide = max(_dims(problem))
    product = max(min(heads, x.group) * m * n * wide for x in problem.distributions)
    itemsize = np.dtype(problem.stat_dtype).itemsize
    threads = max(min(threads, blocks), 1)
    return NumPyPlan(problem.stat_dtype, batches, heads, m, n, blocks, scratch * itemsize, product, threads, buffers)


def _buffers(problem: Problem, heads: int, m: int, n: int) -> dict[str, int]:
    """Elements of each buffer that a block of `heads` heads, all batch entries counted, needs at most."""
    own = divergences.of(problem).tile_buffers if "divergence" in problem.operation.rules else ("d_logits",)
    sizes = dict.fromkeys(own, heads * m * n)
    if problem.entropy:
        sizes["entropy"] = heads * m * n
    for name, side in problem.sides.items():
        dim = side.dim
        sizes[f"{name}_logits"] = heads * m * n
        if not score_of(side).linear:
            sizes[f"{name}_slopes"] = heads * m * n
        sizes[f"{name}_q"] = sizes[f"{name}_qw"] = heads * m * dim
        sizes[f"{name}_k"] = heads * n * dim
    for spec in problem.operation.operands:
        if spec.extra:
            sizes[spec.name] = heads * n * problem.operand(spec.name).dim
    sizes["product"] = heads * max(m, n) * max(_dims(problem))
    return sizes


def _dims(problem: Problem) -> list[int]:
    """Columns of all operands that are multiplied."""
    return [*(side.dim for side in problem.distributions), *(x.dim for x in problem.multiplied.values())]


def _shared(heads: int, rows: int, threads: int) -> int:
    """The most rows of a block with which all threads have work."""
    if threads == 1 or heads == 0:
        return QUERY_TILE
    m = max(-(-rows // -(-BLOCKS_PER_THREAD * threads // heads)), SHARED_QUERY_TILE)
    if heads * -(-rows // m) < threads:
        m = max(-(-rows // -(-threads // heads)), LEAST_QUERY_TILE)
    return -(-m // 16) * 16


def _tallest(problem: Problem, rows: int) -> int:
    """Rows of a block beyond which it would mostly compute pairs that the mask hides."""
    tallest = QUERY_TILE
    for part in parts_of(problem.mask):
        if part.tallest is not None:
            tallest = min(tallest, part.tallest(problem.mask, rows))
    return tallest


def threads_for(scores: int, each: float = math.inf) -> int:
    """Threads that so many pairs of rows and keys are worth, `each` of them in a sequence where several are packed."""
    return threads.available() if scores >= LEAST_SHARED_SCORES and each >= LEAST_SHARED_SEQUENCE else 1


def head_group(problem: Problem) -> int:
    """Query heads that share no key head with others, on either side."""
    return math.lcm(*(side.group for side in problem.distributions))

"""The patterns to start from. Windows and sinks count keys as everywhere else; strides and offsets count key blocks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import islice, pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..arguments import FAR, a_kind_of, choice, flag, integer
from .pattern import (
    LARGEST,
    BlockPattern,
    FlatBlocks,
    Grid,
    any_of,
    build,
    fits,
    flat_blocks,
    host_array,
    integers,
    ranged,
)

_F = TypeVar("_F", bound=Callable[..., Any])
MOST_HEADS = 2**16
# A diagonal beyond this is as far as any: rows, keys and every reach but that without a limit (FAR) have 31 bits each.
FARTHEST_OFFSET = 2**33
MOST_NAMED = 8  # offsets in a warning

# Said once, read in the help of every function.
_TEXT = {
    "GRID": """queries: M, rows of the problem.
        keys: N, keys of the problem. Default M.
        block: Rows and keys of a block, one number or (query_block, key_block): multiples of 16 from 16 to 128. The
            tiles of kernels have sizes of their own.
        causal: Leave out blocks that no row may see under attention_kl's causal=True (which the call still needs:
            the diagonal crosses blocks).""",
    "OFFSET": """q_offset: As in attention_kl: with causal, row i sees keys j <= i + q_offset. Default N - M.""",
    "BAND_OFFSET": """q_offset: As in attention_kl: row i stands at key i + q_offset. Default N - M, the last row at the
            last key. For a chunk of the queries.""",
    "ERRORS": """TypeError: an argument of the wrong kind.
        ValueError: a size that is not allowed, with what is.""",
}


class CoverageWarning(UserWarning):
    """The heads of a sharded pattern together do not see the whole context."""


def _documented(function: _F) -> _F:
    for key, text in _TEXT.items():
        function.__doc__ = (function.__doc__ or "").replace(f"<{key}>", text)
    return function


@_documented
def from_dense(
    blocks: Any,
    *,
    queries: int,
    keys: int | None = None,
    block: int | tuple[int, int] = 64,
    causal: bool = False,
    q_offset: int | None = None,
) -> BlockPattern:
    """A pattern from its block matrix.

    Args:
        blocks: (H, Mb, Nb) bool with Mb = ceil(M / query_block) and Nb = ceil(N / key_block); (1, Mb, Nb) or (Mb, Nb)
            for all heads alike. In host memory.
        <GRID>
        <OFFSET>

    Raises:
        <ERRORS>

    Example:
        >>> import numpy as np
        >>> from streamkl_cupy import patterns
        >>> patterns.from_dense(np.eye(4, dtype=bool), queries=250).key_blocks.tolist()
        [0, 1, 2, 3]
    """
    grid, _ = _grid(queries, keys, block, causal, q_offset)
    matrix = host_array("blocks", blocks)
    if matrix.dtype != np.bool_:
        raise TypeError(f"blocks has dtype {matrix.dtype}; allowed is bool, True where a block is visited")
    if matrix.ndim == 2:
        matrix = matrix[None]
    if matrix.ndim != 3 or matrix.shape[1:] != (grid.row_blocks, grid.column_blocks) or not len(matrix):
        raise ValueError(
            f"blocks has shape {np.shape(blocks)}; {grid.queries} queries and {grid.keys} keys in blocks of "
            f"{grid.query_block} and {grid.key_block} need (1 or H, {grid.row_blocks}, {grid.column_blocks})"
        )
    return build(grid, range(len(matrix)), lambda head: grid.inside(np.flatnonzero(matrix[head])))


@_documented
def from_csr(
    row_offsets: Any,
    key_blocks: Any,
    *,
    queries: int,
    keys: int | None = None,
    block: int | tuple[int, int] = 64,
    causal: bool = False,
    q_offset: int | None = None,
) -> BlockPattern:
    """A pattern from compressed rows, which are checked here once and never again.

    Args:
        row_offsets: (P, Mb + 1) integers, P = 1 or H, or (Mb + 1,): query block r of head p visits the key blocks
            key_blocks[row_offsets[p, r] : row_offsets[p, r + 1]]. Head p begins where head p - 1 ends.
        key_blocks: (n,) integers from 0 to Nb - 1, in any order, none twice for one query block.
        <GRID>
        <OFFSET>

    Raises:
        <ERRORS>

    Example:
        >>> from streamkl_cupy import patterns
        >>> patterns.from_csr([0, 1, 3], [0, 1, 0], queries=32, block=16).dense().astype(int).tolist()
        [[[1, 0], [1, 1]]]
    """
    grid, _ = _grid(queries, keys, block, causal, q_offset)
    pattern = BlockPattern(row_offsets, key_blocks, *grid._replace(diagonal=None))
    if grid.diagonal is None:
        return pattern
    return build(grid, range(pattern.heads), lambda head: grid.inside(flat_blocks(pattern, head)))


@_documented
def full(
    *,
    queries: int,
    keys: int | None = None,
    block: int | tuple[int, int] = 64,
    causal: bool = False,
    q_offset: int | None = None,
) -> BlockPattern:
    """Every block, for all heads alike; with causal, every block that a row may see.

    Args:
        <GRID>
        <OFFSET>

    Raises:
        <ERRORS>

    Example:
        >>> from streamkl_cupy import patterns
        >>> patterns.full(queries=48, block=16, causal=True).dense()[0].astype(int).tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """
    grid, _ = _grid(queries, keys, block, causal, q_offset)
    return build(grid, [0], lambda _: _listed_by(grid, _all(grid)))


@_documented
def local(
    window: int | tuple[int | None, int | None],
    *,
    queries: int,
    keys: int | None = None,
    block: int | tuple[int, int] = 64,
    causal: bool = False,
    q_offset: int | None = None,
) -> BlockPattern:
    """A band along the diagonal.

    Lists every block that holds a row i and a key j with i + q_offset - left <= j <= i + q_offset + right. Blocks are
    whole: rows see what else lies in them. For a band of exact width without anything beside it, use the window option
    of `attention_kl` instead.

    Args:
        window: (left, right) in keys; None and -1 are unlimited. A number w is (w, w).
        <GRID>
        <BAND_OFFSET>

    Raises:
        <ERRORS>

    Example:
        >>> from streamkl_cupy import patterns
        >>> patterns.local(16, queries=64, block=16, causal=True).dense()[0].astype(int).tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    """
    grid, offset = _grid(queries, keys, block, causal, q_offset, band=True)
    return build(grid, [0], lambda _: _listed_by(grid, _band(grid, offset, *_window(window))))


@_documented
def strided(
    stride: int,
    offset_per_head: int | Sequence[int] = 0,
    *,
    queries: int,
    keys: int | None = None,
    block: int | tuple[int, int] = 64,
    causal: bool = False,
    q_offset: int | None = None,
) -> BlockPattern:
    """Vertical stripes: head h visits the key blocks c with c = offset_h modulo stride.

    Args:
        stride: In key blocks, at least 1.
        offset_per_head: In key blocks: one number for all heads, or one for each. Offsets that differ by a multiple of
            the stride are the same.
        <GRID>
        <OFFSET>

    Raises:
        <ERRORS>

    Example:
        >>> from streamkl_cupy import patterns
        >>> patterns.strided(3, [0, 2], queries=16, keys=96, block=16).dense()[:, 0].astype(int).tolist()
        [[1, 0, 0, 1, 0, 0], [0, 0, 1, 0, 0, 1]]
    """
    grid, _ = _grid(queries, keys, block, causal, q_offset)
    stride = ranged("stride", stride, 1)
    offsets = _each("offset_per_head", [offset_per_head] if _is_number(offset_per_head) else offset_per_head)
    phases = [offset % stride for offset in offsets]
    return build(grid, phases, lambda phase: _listed_by(grid, _all(grid)._replace(step=stride, phase=phase)))


@_documented
def sinks(
    n: int,
    *,
    queries: int,
    keys: int | None = None,
    block: int | tuple[int, int] = 64,
    causal: bool = False,
    q_offset: int | None = None,
) -> BlockPattern:
    """The blocks of the first n keys, which language models use as a place for attention that is not needed.

    Args:
        n: In keys; whole blocks are listed.
        <GRID>
        <OFFSET>

    Raises:
        <ERRORS>

    Example:
        >>> from streamkl_cupy import patterns
        >>> patterns.sinks(4, queries=48, block=16).dense()[0].astype(int).tolist()
        [[1, 0, 0], [1, 0, 0], [1, 0, 0]]
    """
    grid, _ = _grid(queries, keys, block, causal, q_offset)
    n = ranged("n", n, 0)
    return build(grid, [0], lambda _: _listed_by(grid, _first_keys(grid, n)))


@_documented
def sharded(
    heads: int,
    *,
    window: int,
    stride: int | Sequence[tuple[int | None, int]],
    queries: int,
    keys: int | None = None,
    block: int | tuple[int, int] = 64,
    causal: bool = False,
    q_offset: int | None = None,
    key_heads: int | None = None,
    groups: str = "share",
    offsets: Sequence[int] | None = None,
    dense_heads: int = 0,
    sink: int = 0,
) -> BlockPattern:
    """A local band plus vertical stripes whose offset differs per head, so that the heads together see everything.

    Each head reads every block near the row and one in `stride` of those farther away; the next head reads the next
    ones. The design is S2-Attention's (arXiv:2407.17678).

    Args:
        heads: H, query heads, at most 65536.
        window: Left reach of the band in keys, as in `local`; without causal the right reach too.
        stride: In key blocks. Or ranges from near to far as pairs (distance, stride): blocks up to that many keys from
            the row are taken one in that stride, None standing for any distance. A stride of 1 is dense. Beyond the
            last range only band and sink are seen. Stripes go on from range to range if the strides divide each other.
        <GRID>
        <BAND_OFFSET>
        key_heads: H_k, key heads: query head h reads key head h // (H / H_k). Default H.
        groups: "share": the query heads of a key head have one offset, so that they read the same keys. "differ": each
            query head has its own.
        offsets: Key blocks that the stripes are moved by: one for each sparse key head ("share") or sparse query head
            ("differ"). Default 0, 1, 2, ...
        dense_heads: How many query heads see everything: the last ones.
        sink: The first keys, seen by all heads, as in `sinks`.

    Returns:
        A `BlockPattern` of H heads.

    Warns:
        CoverageWarning: the heads together do not see their whole context, as when there are fewer offsets than the
            stride. `BlockPattern.coverage` says how much they do see, also those of one GPU.

    Raises:
        <ERRORS>

    Example:
        >>> from streamkl_cupy import patterns
        >>> pattern = patterns.sharded(8, window=64, stride=[(512, 2), (None, 8)], queries=4096, causal=True)
        >>> round(pattern.density, 2), pattern.coverage().fraction, round(pattern.coverage(heads=range(4)).fraction, 2)
        (0.25, 1.0, 0.66)
    """
    grid, offset = _grid(queries, keys, block, causal, q_offset, band=True)
    heads = ranged("heads", heads, 1, MOST_HEADS)
    key_heads = heads if key_heads is None else ranged("key_heads", key_heads, 1, heads)
    if heads % key_heads:
        raise ValueError(
            f"key_heads={key_heads} does not divide heads={heads}; every key head serves as many query heads"
        )
    choice("groups", groups, ("share", "differ"))
    unit = heads // key_heads if groups == "share" else 1
    dense_heads = ranged("dense_heads", dense_heads, 0, heads)
    if dense_heads % unit:
        raise ValueError(
            f"dense_heads={dense_heads} cuts a group of {unit} query heads that share a pattern; give a multiple of "
            f'{unit}, or groups="differ"'
        )
    sparse = (heads - dense_heads) // unit
    chosen = list(range(sparse)) if offsets is None else _each("offsets", offsets)
    if len(chosen) != sparse:
        raise ValueError(f"offsets has {len(chosen)} entries; there are {sparse} sparse {_units(groups, key_heads)}")
    ranges = _ranges(stride)
    window = ranged("window", window, 0)
    near = _band(grid, offset, window, window)
    first_keys = _first_keys(grid, ranged("sink", sink, 0))
    # Between the bands of two distances, one row has blocks on both sides of the diagonal.
    bands = [_band(grid, offset, limit, limit) for limit, _ in ranges]
    inner = [Stripes(bands[0].first, bands[0].first), *bands[:-1]]
    far = [
        (Stripes(outer.first, within.first, step), Stripes(within.stop, outer.stop, step))
        for outer, within, (_, step) in zip(bands, inner, ranges)
    ]

    def flat(phases: tuple[int, ...] | None) -> FlatBlocks:
        if phases is None:
            return _listed_by(grid, _all(grid))
        moved = [side._replace(phase=phase) for sides, phase in zip(far, phases) for side in sides]
        return _listed_by(grid, near, first_keys, *moved)

    # Offsets that no range tells apart make the same head.
    per_head: list[tuple[int, ...] | None] = [
        tuple(moved % step for _, step in ranges) for moved in chosen for _ in range(unit)
    ]
    pattern = build(grid, per_head + [None] * dense_heads, flat)
    covered = pattern.coverage().fraction
    if covered < 1:
        widest = max(step for _, step in ranges)
        used = {moved % widest for moved in chosen}
        missing = [str(offset) for offset in islice((x for x in range(widest) if x not in used), MOST_NAMED)]
        if len(used) + MOST_NAMED < widest:
            missing.append("...")
        unseen = f", and no head has the offsets {', '.join(missing)} of the stride {widest}" if missing else ""
        advice = ['groups="differ"'] * (unit > 1) + ["a smaller stride", "other offsets", "a last range without limit"]
        warnings.warn(
            f"the {heads} heads together see {int(covered * 1000) / 10:g} % of their context{unseen}; what they miss "
            f"no head of the layer can attend to. Remedies: {', '.join(advice)}",
            CoverageWarning,
            stacklevel=2,
        )
    return pattern


@_documented
def phi3_small(*, queries: int, keys: int | None = None, q_offset: int | None = None) -> BlockPattern:
    """The pattern of the sparse layers of Phi-3-small: 32 query heads over 8 key heads, causal, blocks of 64.

    Every row sees the 16 blocks up to its own, and of those before them head h the blocks c with (c + h + 1) % 8 == 0.
    Every other layer of that model is dense. Heads of one key head differ: `select` them for a shard, never make them
    anew.

    Args:
        queries: M, rows of the problem.
        keys: N, keys of the problem. Default M.
        <BAND_OFFSET>

    Raises:
        <ERRORS>

    Example:
        >>> from streamkl_cupy import patterns
        >>> pattern = patterns.phi3_small(queries=8192)
        >>> pattern.key_blocks[pattern.row_offsets[0, 31] :][:4].tolist()  # stripes of head 0, then the band
        [7, 15, 16, 17]
    """
    return sharded(
        32,
        window=15 * 64,
        stride=8,
        queries=queries,
        keys=keys,
        causal=True,
        q_offset=q_offset,
        key_heads=8,
        groups="differ",
        offsets=[-1 - head for head in range(32)],
    )


class Stripes(NamedTuple):
    """For each query block the key blocks c with first <= c < stop and c = phase modulo step."""

    first: NDArray[np.int64]
    stop: NDArray[np.int64]
    step: int = 1
    phase: int = 0


def _listed_by(grid: Grid, *stripes: Stripes) -> FlatBlocks:
    """The blocks of all stripes that a row may see, each once: work and memory are those of what is listed."""
    found, reach = [], grid.reach()
    for first, stop, step, phase in stripes:
        first = first + (phase - first) % step
        counts = np.maximum(-(-(np.minimum(stop, reach) - first) // step), 0)
        fits(int(counts.sum()))
        row = np.repeat(np.arange(grid.row_blocks), counts)
        nth = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        found.append(row * grid.column_blocks + first[row] + nth * step)
    return any_of(*found)


def _grid(queries: Any, keys: Any, block: Any, causal: Any, q_offset: Any, band: bool = False) -> tuple[Grid, int]:
    """The block matrix, and the key that row 0 stands at."""
    causal = flag("causal", causal)
    if q_offset is not None and not causal and not band:
        raise ValueError(
            f"q_offset={q_offset} moves the causal diagonal, but causal is False; pass causal=True or leave it out"
        )
    grid = Grid.checked(queries, queries if keys is None else keys, block, None)
    offset = grid.keys - grid.queries if q_offset is None else integer("q_offset", q_offset)
    offset = max(-FARTHEST_OFFSET, min(offset, FARTHEST_OFFSET))
    return Grid.checked(*grid[:2], grid[2:4], offset if causal else None), offset


def _band(grid: Grid, offset: int, left: int | None, right: int | None) -> Stripes:
    """Blocks that hold a row i and a key j with i + offset - left <= j <= i + offset + right."""
    everything = _all(grid)
    row = np.arange(grid.row_blocks, dtype=np.int64) * grid.query_block + offset
    last_row = np.minimum(row + grid.query_block, grid.queries + offset) - 1
    first, stop = everything.first, everything.stop
    if left is not None:
        nearest = np.maximum(row - left, 0)
        first = np.where(nearest < grid.keys, nearest // grid.key_block, grid.column_blocks)
    if right is not None:
        stop = np.clip((last_row + right) // grid.key_block + 1, 0, grid.column_blocks)
    return Stripes(first, stop)


def _first_keys(grid: Grid, n: int) -> Stripes:
    return _all(grid)._replace(stop=np.full(grid.row_blocks, -(-min(n, grid.keys) // grid.key_block)))


def _all(grid: Grid) -> Stripes:
    return Stripes(np.zeros(grid.row_blocks, np.int64), np.full(grid.row_blocks, grid.column_blocks))


def _window(window: Any) -> tuple[int | None, int | None]:
    """(left, right) with None for unlimited."""
    if not isinstance(window, (tuple, list)):
        window = (window, window)
    if len(window) != 2:
        raise ValueError(f"window={window!r}; allowed are one number, and a pair (left, right)")
    left, right = (-1 if x is None else ranged("window", x, -1) for x in window)
    return None if left == -1 else left, None if right == -1 else right


def _ranges(stride: Any) -> list[tuple[int, int]]:
    """(distance, stride) from near to far."""
    if _is_number(stride):
        stride = [(None, stride)]
    pairs = [tuple(pair) if isinstance(pair, (tuple, list)) else (pair,) for pair in _items("stride", stride)]
    if not pairs or any(len(pair) != 2 for pair in pairs):
        raise ValueError(f"stride={stride!r}; allowed are a number, and pairs (distance, stride) from near to far")
    ranges = [
        (FAR if limit is None else ranged("distance", limit, 0), ranged("stride", step, 1)) for limit, step in pairs
    ]
    if any(far <= near for (near, _), (far, _) in pairwise(ranges)):
        raise ValueError(
            f"stride={stride!r}: the distances must grow, and None, for any distance, can only be the last"
        )
    return ranges


def _is_number(value: Any) -> bool:
    """One integer, and not several: an array without axes too."""
    return hasattr(value, "__index__") and getattr(value, "ndim", 0) == 0


def _items(name: str, values: Any) -> list[Any]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable) or getattr(values, "ndim", 1) == 0:
        raise TypeError(f"{name} is {a_kind_of(values)}; allowed are a number and a sequence")
    return list(values)


def _each(name: str, values: Any) -> list[int]:
    """Offsets, one per head."""
    array = integers(name, _items(name, values))
    if array.ndim != 1 or (not array.size and name == "offset_per_head"):
        raise ValueError(f"{name} has shape {array.shape}; allowed is one number for each head")
    return [ranged(name, offset, -LARGEST) for offset in array]


def _units(groups: str, key_heads: int) -> str:
    return f"key heads (of {key_heads})" if groups == "share" else "query heads"

"""Head h sees the blocks that a BlockPattern lists for it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...problem import MaskSpec
from .interface import Asked, Bools, Cutting, Indices, Part, Range, Scene

if TYPE_CHECKING:
    from ...patterns import BlockPattern


def _blocks_between(q0: int, q1: int, size: int) -> Indices:
    """The first row of every block that has rows of [q0, q1)."""
    return np.arange(q0 // size, -(-q1 // size)) * size


def _listed(scene: Scene, rows: Indices, keys: Indices) -> Bools:
    """(1, h, rows, keys), h is 1 where one head of the pattern serves all; the rows ascend."""
    pattern = scene.pattern
    heads = scene.heads if pattern.heads > 1 else range(1)
    row, column = rows // pattern.query_block, keys // pattern.key_block
    first, last = (int(row[0]), int(row[-1]) + 1) if len(row) else (0, 0)
    lines = np.stack([pattern.dense_rows(head, first, last) for head in heads])
    return lines[None, :, (row - first)[:, None], column]


def _listed_blocks(scene: Scene, q0: int, q1: int, k0: int, k1: int) -> Bools:
    pattern = scene.pattern
    return _listed(scene, _blocks_between(q0, q1, pattern.query_block), _blocks_between(k0, k1, pattern.key_block))


def _block_holes(scene: Scene, q0: int, q1: int, k0: int, k1: int) -> Bools:
    size = scene.pattern.key_block
    listed = _listed_blocks(scene, q0, q1, k0, k1).any(axis=(0, 1, 2))
    return np.repeat(listed, size)[k0 - k0 // size * size :][: k1 - k0]


def _check(asked: Asked) -> None:
    pattern, extents = asked.options.block_mask, asked.extents
    if pattern is None:
        return
    if pattern.heads not in (1, extents.heads):
        raise ValueError(
            f"block_mask is a pattern of {pattern.heads} heads, but the inputs have {extents.heads} query heads; "
            f"allowed are as many, and 1 for all of them. pattern.select picks heads"
        )
    if (pattern.queries, pattern.keys) != (extents.queries, extents.keys):
        raise ValueError(
            f"block_mask is a pattern for {pattern.queries} query rows and {pattern.keys} keys, but the inputs have "
            f"{extents.queries} and {extents.keys}; make it for their size"
        )


def _tallest(mask: MaskSpec, rows: int) -> int:
    pattern = mask.pattern
    return rows if pattern is None else pattern.query_block


_cuts: weakref.WeakKeyDictionary[BlockPattern, dict[Any, BlockPattern]] = weakref.WeakKeyDictionary()


def _pattern_of(pattern: BlockPattern, rows: Range, keys: Range, heads: Range | None) -> BlockPattern:
    """The pattern of some rows, keys and heads, kept for as long as the whole one lives."""
    if heads is not None and pattern.heads == 1:
        heads = None
    if rows == (0, pattern.queries) and keys == (0, pattern.keys) and heads is None:
        return pattern
    for what, start, block in (("rows", rows[0], pattern.query_block), ("keys", keys[0], pattern.key_block)):
        if start % block:
            raise ValueError(
                f"block_mask: a shard's {what} begin at position {start}, inside a block of {block}; allowed are "
                f"shards whose pieces begin with a block: choose a length that makes chunks multiples of {block}, "
                f"or give the positions of every rank as ownership"
            )
    known = _cuts.setdefault(pattern, {})
    found = known.get((rows, keys, heads))
    if found is None:
        found = known[rows, keys, heads] = _cut_out(pattern, rows, keys, range(*(heads or (0, pattern.heads))))
    return found


def _cut_out(pattern: BlockPattern, rows: Range, keys: Range, heads: range) -> BlockPattern:
    first, last = rows[0] // pattern.query_block, -(-rows[1] // pattern.query_block)
    low, high = keys[0] // pattern.key_block, -(-keys[1] // pattern.key_block)
    counts, blocks = [], []
    for head in heads:
        offsets = pattern.row_offsets[head, first : last + 1].astype(np.int64)
        listed = pattern.key_blocks[offsets[0] : offsets[-1]]
        inside = (listed >= low) & (listed < high)
        before = np.concatenate([[0], np.cumsum(inside)])
        counts.append(np.diff(before[offsets - offsets[0]]))
        blocks.append(listed[inside] - low)
    ends = np.cumsum(np.concatenate(counts)) if counts else np.zeros(0, np.int64)
    each = last - first
    starts = np.concatenate([[0], ends])
    row_offsets = np.stack([starts[i * each : (i + 1) * each + 1] for i in range(len(heads))])
    diagonal = None if pattern.diagonal is None else pattern.diagonal + rows[0] - keys[0]
    return type(pattern)(
        row_offsets,
        np.concatenate(blocks),
        rows[1] - rows[0],
        keys[1] - keys[0],
        pattern.query_block,
        pattern.key_block,
        diagonal,
    )


def _narrowed(part: Cutting) -> Cutting:
    """To where a block begins."""
    pattern = part.options.block_mask
    assert pattern is not None
    (g0, g1), (k0, k1) = part.q, part.k
    size_q, size_k = pattern.query_block, pattern.key_block
    return part._replace(q=(g0 // size_q * size_q, g1), k=(k0 // size_k * size_k, k1))


def _cut(part: Cutting) -> Mapping[str, Any]:
    pattern = part.options.block_mask
    assert pattern is not None
    return {"block_mask": _pattern_of(pattern, part.q, part.k, part.heads)}


def _definition(options: Mapping[str, Any], rows: int, keys: int) -> Bools:
    pattern = options["block_mask"]
    lines = np.repeat(pattern.dense(), pattern.query_block, axis=1)[:, :rows]
    return np.repeat(lines, pattern.key_block, axis=2)[:, :, :keys]


def drawn_pattern(rng: np.random.Generator, heads: int, queries: int, keys: int) -> BlockPattern:
    """A random one, of blocks of any size."""
    from ...patterns import from_dense  # which a call without a pattern does not import

    size_q, size_k = (int(x) for x in rng.choice([16, 32, 48, 128], 2))
    listed = rng.random((heads, -(-queries // size_q), -(-keys // size_k))) < rng.choice([0.1, 0.4, 0.9])
    return from_dense(listed, queries=queries, keys=keys, block=(size_q, size_k))


PART = Part(
    name="blocks",
    header="masks/blocks.cuh",
    struct="Blocks",
    params=(),
    arrays=(),
    asked=lambda asked: None if asked.options.block_mask is None else {},
    visible=lambda scene, rows, keys: _listed(scene, rows.ravel(), keys),
    key_range=lambda scene, q0, q1: (0, scene.keys),
    full=lambda scene, q0, q1, k0, k1: bool(_listed_blocks(scene, q0, q1, k0, k1).all()),
    definition=_definition,
    drawn=lambda rng, extents: {"block_mask": drawn_pattern(rng, 1, extents.queries, extents.keys)},
    holes=_block_holes,
    sparse=True,
    registers=2,
    listed=True,
    check=_check,
    tallest=_tallest,
    beside=("causal",),
    options=("block_mask",),
    narrowed=_narrowed,
    cut=_cut,
    cut_once=True,
)

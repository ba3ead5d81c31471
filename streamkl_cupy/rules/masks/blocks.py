"""Head h sees the blocks that a BlockPattern lists for it."""

from __future__ import annotations

import numpy as np

from ...problem import MaskSpec
from .interface import Asked, Bools, Indices, Part, Scene


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
    holes=_block_holes,
    sparse=True,
    registers=2,
    listed=True,
    check=_check,
    tallest=_tallest,
    beside=("causal",),
)

"""Block patterns against naive loops over pairs of rows and keys, their tile lists against one sub-block at a time."""

from __future__ import annotations

import copy
import dataclasses
import doctest
import math
import pickle
import re
import subprocess
import sys
import threading
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import streamkl_cupy
from streamkl_cupy import patterns
from streamkl_cupy.errors import install
from streamkl_cupy.kernels.work_tiles import Lists, cut, survey
from streamkl_cupy.patterns import BlockPattern, CoverageWarning, families, pattern
from streamkl_cupy.patterns.pattern import LARGEST

Array = NDArray[Any]
ROOT = Path(__file__).resolve().parents[1]
BLOCKS = [16, 32, 48, 64, 80, 112, 128]
TILES = [(r, c) for r in (64, 128, 192, 256) for c in (32, 64, 128) if r * c <= 16384]


@st.composite
def grids(draw: Any, most: int = 300) -> dict[str, Any]:
    """Sizes that are often no multiples of the blocks, with more queries than keys or fewer."""
    sizes = {"queries": draw(st.integers(0, most)), "keys": draw(st.none() | st.integers(0, most))}
    block = draw(st.sampled_from(BLOCKS) | st.tuples(st.sampled_from(BLOCKS), st.sampled_from(BLOCKS)))
    return {**sizes, "block": block}


@st.composite
def aligned(draw: Any, band: bool = False) -> dict[str, Any]:
    """A grid with a diagonal or without."""
    grid = draw(grids())
    causal = draw(st.booleans())
    offset = draw(st.none() | st.integers(-350, 350)) if causal or band else None
    return {**grid, "causal": causal, "q_offset": offset}


@st.composite
def random_patterns(draw: Any, most: int = 600) -> BlockPattern:
    grid = draw(grids(most))
    query_block, key_block = grid["block"] if isinstance(grid["block"], tuple) else [grid["block"]] * 2
    keys = grid["queries"] if grid["keys"] is None else grid["keys"]
    shape = (draw(st.integers(1, 3)), -(-grid["queries"] // query_block), -(-keys // key_block))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    return patterns.from_dense(rng.random(shape) < draw(st.sampled_from([0, 0.05, 0.4, 1])), **grid)


def offset_of(grid: dict[str, Any]) -> int:
    keys = grid["queries"] if grid["keys"] is None else grid["keys"]
    given_offset = grid.get("q_offset")
    return keys - grid["queries"] if given_offset is None else given_offset


def pairs(grid: dict[str, Any]) -> tuple[Array, Array]:
    """Rows (M, 1) and keys (N,)."""
    keys = grid["queries"] if grid["keys"] is None else grid["keys"]
    return np.arange(grid["queries"])[:, None], np.arange(keys)


def blocks_with(seen: Array, query_block: int, key_block: int) -> Array:
    """Which blocks hold a pair that is True, one block at a time."""
    rows, columns = (-(-size // block) for size, block in zip(seen.shape, (query_block, key_block)))
    found = np.zeros((rows, columns), bool)
    for r in range(rows):
        for c in range(columns):
            found[r, c] = seen[r * query_block :, c * key_block :][:query_block, :key_block].any()
    return found


def expected(seen: Array, made: BlockPattern, grid: dict[str, Any]) -> Array:
    """Blocks that hold a pair of `seen`, without those that the causal diagonal hides."""
    rows, keys = pairs(grid)
    found = blocks_with(np.broadcast_to(seen, (rows.size, keys.size)), made.query_block, made.key_block)
    if grid.get("causal"):
        found &= blocks_with(keys <= rows + offset_of(grid), made.query_block, made.key_block)
    return found


def check(made: BlockPattern) -> None:
    """What holds for every pattern."""
    dense = made.dense()
    heads, rows, columns = dense.shape
    assert heads == made.heads
    assert (rows, columns) == (-(-made.queries // made.query_block), -(-made.keys // made.key_block))
    for p in range(heads):
        for r in range(rows):
            listed = made.key_blocks[made.row_offsets[p, r] : made.row_offsets[p, r + 1]]
            assert listed.tolist() == np.nonzero(dense[p, r])[0].tolist()
        for c in range(columns):
            listed = made.query_blocks[made.column_offsets[p, c] : made.column_offsets[p, c + 1]]
            assert listed.tolist() == np.nonzero(dense[p, :, c])[0].tolist()
    assert made.row_offsets.shape == (heads, rows + 1)
    assert made.column_offsets.shape == (heads, columns + 1)
    for array in (made.row_offsets, made.key_blocks, made.column_offsets, made.query_blocks):
        assert array.dtype == np.int32
        assert array.flags.c_contiguous
        assert not array.flags.writeable


@examples(60)
@given(aligned(band=True), st.integers(-1, 200), st.none() | st.integers(-1, 200))
def test_local_lists_the_blocks_with_a_pair_in_the_window(grid: dict[str, Any], left: int, right: int | None) -> None:
    made = patterns.local((left, right), **grid)
    rows, keys = pairs(grid)
    at = rows + offset_of(grid)
    seen = np.ones((rows.size, keys.size), bool)
    if left != -1:
        seen &= keys >= at - left
    if right not in (None, -1):
        seen &= keys <= at + right
    check(made)
    np.testing.assert_array_equal(made.dense()[0], expected(seen, made, grid))


@examples(40)
@given(aligned(), st.integers(1, 6), st.lists(st.integers(-20, 20), min_size=1, max_size=4))
def test_strided_and_sinks_list_what_they_say(grid: dict[str, Any], stride: int, offsets: list[int]) -> None:
    made = patterns.strided(stride, offsets, **grid)
    check(made)
    _, keys = pairs(grid)
    for head, offset in enumerate(offsets):
        want = expected((keys // made.key_block - offset) % stride == 0, made, grid)
        np.testing.assert_array_equal(made.dense()[head], want)
    assert patterns.strided(stride, offsets[0], **grid) == made.select(0)
    made = patterns.sinks(abs(offsets[0]), **grid)
    check(made)
    np.testing.assert_array_equal(made.dense()[0], expected(keys < abs(offsets[0]), made, grid))
    made = patterns.full(**grid)
    check(made)
    np.testing.assert_array_equal(made.dense()[0], expected(keys >= 0, made, grid))


@st.composite
def shards(draw: Any) -> dict[str, Any]:
    key_heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    groups = draw(st.sampled_from(["share", "differ"]))
    dense = draw(st.integers(0, key_heads)) * group if groups == "share" else draw(st.integers(0, key_heads * group))
    far = draw(st.sampled_from([2, 3, 8]))
    sparse = (key_heads * group - dense) // (group if groups == "share" else 1)
    return {
        "heads": key_heads * group,
        "key_heads": key_heads,
        "groups": groups,
        "dense_heads": dense,
        "window": draw(st.integers(0, 100)),
        "stride": draw(st.sampled_from([far, [(100, 1), (None, far)], [(60, 2), (150, far)], [(0, 1), (None, far)]])),
        "sink": draw(st.sampled_from([0, 0, 3, 50])),
        "offsets": draw(st.none() | st.lists(st.integers(-9, 9), min_size=sparse, max_size=sparse)),
    }


@examples(60)
@given(aligned(band=True), shards())
def test_sharded_against_its_words(grid: dict[str, Any], options: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CoverageWarning)
        made = patterns.sharded(**options, **grid)
    check(made)
    heads, group = options["heads"], options["heads"] // options["key_heads"]
    rows, keys = pairs(grid)
    at, w = rows + offset_of(grid), options["window"]
    base = blocks_with((keys >= at - w) & (keys <= at + w), made.query_block, made.key_block)
    base |= blocks_with((keys < options["sink"]) & (at == at), made.query_block, made.key_block)
    base &= expected(np.array(True), made, grid)
    stride = options["stride"]
    ranges = [(10**9 if d is None else d, s) for d, s in ([(None, stride)] if isinstance(stride, int) else stride)]
    for head in range(heads):
        if head >= heads - options["dense_heads"]:
            want = expected(np.array(True), made, grid)
        else:
            unit = head // group if options["groups"] == "share" else head
            moved = unit if options["offsets"] is None else options["offsets"][unit]
            want = base.copy()
            for r, c in np.argwhere(expected(np.array(True), made, grid)):
                i = np.arange(r * made.query_block, min((r + 1) * made.query_block, made.queries))[:, None]
                j = np.arange(c * made.key_block, min((c + 1) * made.key_block, made.keys))
                distance = abs(i + offset_of(grid) - j).min()
                step = next((s for limit, s in ranges if distance <= limit), None)
                want[r, c] |= step is not None and (c - moved) % step == 0
        np.testing.assert_array_equal(made.dense()[head], want, err_msg=f"head {head}")


@examples(40)
@given(random_patterns(), st.data())
def test_pairs_unions_intersections_and_shards(made: BlockPattern, data: Any) -> None:
    check(made)
    dense = made.dense()
    sizes = {"queries": made.queries, "keys": made.keys, "block": (made.query_block, made.key_block)}
    assert patterns.from_dense(dense, **sizes) == made
    assert patterns.from_csr(made.row_offsets, made.key_blocks, **sizes) == made
    head = data.draw(st.integers(0, made.heads - 1))
    rows, keys = np.arange(made.queries), np.arange(made.keys)
    by_hand = dense[head][rows[:, None] // made.query_block, keys // made.key_block]
    np.testing.assert_array_equal(made.visible(rows[:, None], keys, head), by_hand)
    some = rows[made.queries // 3 :]
    np.testing.assert_array_equal(made.visible(some[:, None], keys[:7], head), by_hand[some, :7])
    other = patterns.local(40, causal=data.draw(st.booleans()), **sizes)
    for both, rule in ((made | other, np.logical_or), (made & other, np.logical_and)):
        check(both)
        np.testing.assert_array_equal(both.dense(), rule(dense, other.dense()))
    assert made | made == made & made == made
    shard = data.draw(st.lists(st.integers(0, made.heads - 1), min_size=1, max_size=4))
    np.testing.assert_array_equal(made.select(shard).dense(), dense[shard])
    again = made.select(0).beside(*(made.select(h) for h in range(1, made.heads)), made.select(shard))
    np.testing.assert_array_equal(again.dense(), np.concatenate([dense, dense[shard]]))
    seen = dense[shard].any(axis=0)
    covered = made.coverage(shard)
    assert covered.fraction == pytest.approx(seen.mean() if seen.size else 1)
    np.testing.assert_allclose(covered.per_query_block, seen.mean(axis=1) if seen.size else 1)
    assert covered.fraction == made.select(shard).coverage().fraction
    assert made.density == pytest.approx(dense.mean() if dense.size else 0)


@pytest.mark.parametrize("first, second", [(0, 100), (100, 0), (None, 0), (0, None), (-64, 64)])
def test_diagonals_of_unions_and_intersections(first: int | None, second: int | None) -> None:
    """A union may see what either may, an intersection what both may; density counts against that."""
    size: dict[str, Any] = {"queries": 256, "block": 32}
    everything = patterns.full(**size)
    one, other = (everything if x is None else patterns.full(**size, causal=True, q_offset=x) for x in (first, second))
    together, common = one | other, one & other
    np.testing.assert_array_equal(together.dense(), one.dense() | other.dense())
    np.testing.assert_array_equal(common.dense(), one.dense() & other.dense())
    known = [x for x in (first, second) if x is not None]
    for made, diagonal in ((together, max(known) if len(known) == 2 else None), (common, min(known))):
        assert made.diagonal == diagonal
        assert made.density == 1, "a share of what it may see"
        rebuilt = patterns.BlockPattern(made.row_offsets, made.key_blocks, *made.grid)
        assert rebuilt == made


@examples(30)
@given(aligned(), st.integers(0, 100))
def test_causal_patterns_count_against_the_context(grid: dict[str, Any], window: int) -> None:
    grid["causal"] = True
    everything = patterns.full(**grid)
    reach = everything.dense().sum()
    assert everything.density == (1 if reach else 0)
    assert everything.coverage().fraction == 1
    near = patterns.local(window, **grid)
    assert near & everything == near
    assert near | everything == everything
    assert near.density == near.coverage().fraction or not reach
    assert near.coverage().fraction == pytest.approx(near.dense().sum() / reach if reach else 1)


@pytest.mark.parametrize("start", [0, 64, 320])
def test_a_chunk_of_queries_has_the_rows_of_the_whole(start: int) -> None:
    whole = {"queries": 448, "block": (64, 32), "causal": True}
    part = {"queries": 128, "keys": 448, "block": (64, 32), "causal": True, "q_offset": start}
    family = {"window": 40, "stride": [(96, 2), (None, 4)], "sink": 1}
    for make in (
        lambda **grid: patterns.local(70, **grid),
        lambda **grid: patterns.full(**grid),
        lambda **grid: patterns.strided(3, [0, 1, 2], **grid),
        lambda **grid: patterns.sharded(4, **family, **grid),
    ):
        rows = slice(start // 64, start // 64 + 2)
        np.testing.assert_array_equal(make(**part).dense(), make(**whole).dense()[:, rows])


@examples(80)
@given(random_patterns(most=400), st.booleans(), st.data())
def test_rows_see_what_they_see_in_the_whole(made: BlockPattern, causal: bool, data: Any) -> None:
    if causal:
        sizes = {"queries": made.queries, "keys": made.keys, "block": (made.query_block, made.key_block)}
        made &= patterns.full(causal=True, q_offset=data.draw(st.integers(-300, 300)), **sizes)
    first = data.draw(st.integers(0, made.queries) | st.integers(0, made.queries // 16).map(lambda i: 16 * i))
    last = data.draw(st.integers(first, made.queries))
    keys = data.draw(st.none() | st.integers(0, made.keys))
    boundary = next((i for i in range(first, last) if i % made.query_block == 0), first)
    if (boundary - first) % 16:
        with pytest.raises(ValueError, match=f"rows {first} to {last} begin .* multiples of 16 there"):
            made.rows(first, last, keys)
        return
    part = made.rows(first, last, keys)
    check(part)
    there = np.arange(made.keys if keys is None else keys)
    assert (part.queries, part.keys, part.heads) == (last - first, there.size, made.heads)
    rows = np.arange(last - first)[:, None]
    for head in range(made.heads):
        seen, whole = part.visible(rows, there, head), made.visible(rows + first, there, head)
        if made.diagonal is not None:  # which cuts smaller blocks
            possible = there <= rows + first + made.diagonal
            seen, whole = seen & possible, whole & possible
        np.testing.assert_array_equal(seen, whole)


def test_patterns_beside_each_other_are_of_one_size() -> None:
    made = patterns.full(queries=64, block=16, causal=True)
    assert made.beside(made).diagonal == 0
    assert made.beside(patterns.full(queries=64, block=16, causal=True, q_offset=5)).diagonal is None
    with pytest.raises(ValueError, match="keys is 64 on the left and 80 on the right"):
        made.beside(patterns.full(queries=64, keys=80, block=16))
    with pytest.raises(TypeError, match="beside takes patterns, and an int came"):
        made.beside(3)  # type: ignore[arg-type]


def test_rows_out_of_range_are_named() -> None:
    made = patterns.full(queries=100, keys=80, block=16)
    for arguments, message in (
        ((-1, 5), "first=-1; allowed are integers from 0 to 100"),
        ((5, 101), "last=101; allowed are integers from 5 to 100"),
        ((5, 4), "last=4; allowed are integers from 5 to 100"),
        ((0, 4, 81), "keys=81; allowed are integers from 0 to 80"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            made.rows(*arguments)
    with pytest.raises(ValueError, match=r"begin 3 rows into a query block of 16 .* Begin at 16, or take the first 13"):
        made.rows(19, 40)


@examples(60)
@given(random_patterns(most=400), st.booleans(), st.data())
def test_what_a_decoder_keeps_against_its_words(made: BlockPattern, causal: bool, data: Any) -> None:
    sizes = {"queries": made.queries, "keys": made.keys, "block": (made.query_block, made.key_block)}
    if causal:
        offset = data.draw(st.integers(-300, 300))
        made &= patterns.full(causal=True, q_offset=offset, **sizes)
        made |= patterns.local(data.draw(st.integers(0, 90)), causal=True, q_offset=offset, **sizes)
    reach, budget, monotone = made.grid.reach(), [], True
    for dense in made.dense():
        kept, seen = [0], np.zeros(made.grid.column_blocks, bool)
        dropped = seen.copy()
        for r, line in enumerate(dense):
            kept.append(int(dense[r:, : reach[r]].any(axis=0).sum()))
            monotone &= not (line & dropped).any()
            dropped[: reach[r]] |= ~line[: reach[r]]
        budget.append(max(kept))
    assert made.kv_budget().tolist() == budget
    assert made.is_cache_monotone() is bool(monotone)


def test_sharded_numbers_by_hand() -> None:
    size: dict[str, Any] = {"queries": 8 * 16, "block": 16, "causal": True}
    made = patterns.sharded(4, window=16, stride=4, offsets=[0, -1, -2, -3], **size)
    lines = made.dense()
    assert [np.flatnonzero(head[7]).tolist() for head in lines] == [[0, 4, 6, 7], [3, 6, 7], [2, 6, 7], [1, 5, 6, 7]]
    assert lines.sum(axis=(1, 2)).tolist() == [23, 18, 19, 21]
    assert made.coverage().per_query_block[7] == 1
    assert made.kv_budget().tolist() == [4, 3, 3, 4]
    chunk = patterns.sharded(4, window=16, stride=4, offsets=[0, -1, -2, -3], **{**size, "queries": 48}, keys=128)
    assert made.rows(80, 128) == chunk
    ranges = [(16, 1), (112, 2), (None, 4)]
    four = patterns.sharded(4, window=0, stride=ranges, queries=256, block=16, causal=True)
    assert np.flatnonzero(four.dense()[0, 15]).tolist() == [0, 4, 8, 10, 12, 14, 15]


def test_heads_that_cover_a_context_together_do_so_over_gpus() -> None:
    size: dict[str, Any] = {"queries": 128 * 16, "block": 16, "causal": True}

    def stripes(offsets: list[int]) -> BlockPattern:
        return patterns.sharded(len(offsets), window=7 * 16, stride=16, offsets=offsets, **size)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CoverageWarning)
        whole, half, quarter = (stripes([-h for h in range(n)]) for n in (16, 8, 4))
        wide = stripes([-2 * h for h in range(8)]) | stripes([1 - 2 * h for h in range(8)])
        shifted = stripes([-8 - h for h in range(16)])
    last = [made.coverage().per_query_block[127] for made in (whole, half, quarter, wide)]
    assert last == pytest.approx([1, 65 / 128, 37 / 128, 1])
    ranks = [whole.select(range(8)), whole.select(range(8, 16))]
    np.testing.assert_array_equal(np.concatenate([rank.dense() for rank in ranks]), whole.dense())
    # A rank that moves its offsets by its first head, and takes its heads of the result, sees what the first one sees.
    both = ranks[0].dense() | shifted.select(range(8, 16)).dense()
    assert both[:, 127].any(axis=0).mean() == pytest.approx(65 / 128)


def test_phi3_small_is_as_its_model_says() -> None:
    made = patterns.phi3_small(queries=40 * 64)
    row, column = np.arange(40)[:, None], np.arange(40)
    for head, dense in enumerate(made.dense()):
        want = (row >= column) & ((row - column < 16) | ((column + head + 1) % 8 == 0))
        np.testing.assert_array_equal(dense, want)
    assert np.flatnonzero(made.dense()[0, 39])[0] == 7
    assert (made.heads, made.query_block, made.diagonal) == (32, 64, 0)
    assert made.is_cache_monotone()
    assert patterns.phi3_small(queries=64, keys=40 * 64) == made.rows(39 * 64, 40 * 64)


def naive_lists(made: BlockPattern, rows: int, columns: int, by_keys: bool) -> list[list[list[tuple[int, int]]]]:
    """[head][row tile] -> (tile, bits), asking one 16 x 16 sub-block after the other."""
    dense = made.dense()
    size = (made.keys, made.queries) if by_keys else (made.queries, made.keys)
    lists = []
    for head in range(made.heads):
        of_head = []
        for row_tile in range(-(-size[0] // rows)):
            of_tile = []
            for tile in range(-(-size[1] // columns)):
                bits, seen = 0, False
                for a in range(0, rows, 16):
                    for b in range(0, columns, 16):
                        r, c = row_tile * rows + a, tile * columns + b
                        bit = 1 << (a // 16) * (columns // 16) + b // 16
                        if r >= size[0] or c >= size[1]:
                            bits |= bit
                        else:
                            q, k = (c, r) if by_keys else (r, c)
                            if dense[head, q // made.query_block, k // made.key_block]:
                                bits, seen = bits | bit, True
                if seen:
                    of_tile.append((tile, bits))
            of_head.append(of_tile)
        lists.append(of_head)
    return lists


def check_lists(made: BlockPattern, rows: int, columns: int, by_keys: bool) -> None:
    lists = made.tile_lists(rows, columns, by_keys)
    want = naive_lists(made, rows, columns, by_keys)
    row_tiles = -(-(made.keys if by_keys else made.queries) // rows)
    assert (lists.offsets.dtype, lists.offsets.shape) == (np.int32, (made.heads, row_tiles + 1))
    assert (lists.entries.dtype, lists.entries.shape[1]) == (np.uint32, 4)
    assert lists.offsets[0, 0] == 0
    assert lists.offsets[-1, -1] == len(lists.entries)
    assert (lists.offsets[1:, 0] == lists.offsets[:-1, -1]).all()
    for array in lists:
        assert array.flags.c_contiguous
        assert not array.flags.writeable
    for head in range(made.heads):
        for t in range(row_tiles):
            entries = lists.entries[lists.offsets[head, t] : lists.offsets[head, t + 1]].astype(object)
            assert [(e[0], e[2] | e[3] << 32) for e in entries] == want[head][t]
            assert not any(e[1] for e in entries)


@examples(60)
@given(random_patterns(), st.sampled_from(TILES), st.booleans())
def test_tile_lists_ask_every_sub_block(made: BlockPattern, tile: tuple[int, int], by_keys: bool) -> None:
    check_lists(made, *tile, by_keys)


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("tile", TILES)
def test_tile_lists_of_every_kernel_shape(
    tile: tuple[int, int], by_keys: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the scratch memory holds a few row tiles only, so that the work is cut."""
    from streamkl_cupy.patterns import tiles

    monkeypatch.setattr(tiles, "CELLS", 16)
    monkeypatch.setattr(pattern, "CELLS", 16)
    for block in ((64, 64), (16, 128), (112, 48)):
        queries, keys = (int(x) for x in rng.integers(300, 700, 2))
        shape = (2, -(-queries // block[0]), -(-keys // block[1]))
        made = patterns.from_dense(rng.random(shape) < 0.3, queries=queries, keys=keys, block=block)
        check_lists(made, *tile, by_keys)


@pytest.mark.parametrize("tile", [(16, 16), (16, 1024), (1024, 16)])
def test_tile_lists_of_extreme_tiles(tile: tuple[int, int]) -> None:
    check_lists(patterns.local(100, queries=500, keys=430, block=48), *tile, False)


@pytest.mark.parametrize("by_keys", [False, True])
def test_tile_lists_of_a_long_context(by_keys: bool) -> None:
    """Blocks of 64 in tiles of 128: every tile is 2 x 2 blocks, so a dense matrix of them can be folded."""
    made = patterns.sharded(16, window=512, stride=16, queries=131072, causal=True).select([0, 7])
    lists = made.tile_lists(128, 128, by_keys)
    for head, dense in enumerate(made.dense()):
        tiles = (dense.T if by_keys else dense).reshape(1024, 2, 1024, 2)
        counts = tiles.any(axis=(1, 3)).sum(axis=1)
        np.testing.assert_array_equal(np.diff(lists.offsets[head]), counts)
        entries = lists.entries[lists.offsets[head, 0] : lists.offsets[head, -1]]
        row = np.repeat(np.arange(1024), counts)
        np.testing.assert_array_equal(np.stack([row, entries[:, 0]]), np.nonzero(tiles.any(axis=(1, 3))))
        bits = entries[:, 2].astype(np.uint64) | entries[:, 3].astype(np.uint64) << np.uint64(32)
        for a in range(2):
            for b in range(2):
                block = sum(0xF << (8 * (4 * a + i) + 4 * b) for i in range(4))
                want = np.where(tiles[row, a, entries[:, 0], b], np.uint64(block), np.uint64(0))
                np.testing.assert_array_equal(bits & np.uint64(block), want)


def test_full_tiles_have_every_bit() -> None:
    lists = patterns.full(queries=100, keys=90).tile_lists(64, 128)
    assert (lists.entries[:, 2:] == [0xFFFFFFFF, 0]).all()  # 4 x 8 sub-blocks
    lists = patterns.full(queries=100, keys=90).tile_lists(128, 128)
    assert (lists.entries[:, 2:] == 0xFFFFFFFF).all()


def test_longest_first_puts_the_last_rows_of_a_causal_pattern_first() -> None:
    made = patterns.full(queries=1024, causal=True)
    for by_keys in (False, True):
        entries, slots = cut(survey(made, 128, 128, by_keys, group=1))
        tiles = list(range(8)) if by_keys else list(range(8))[::-1]
        assert (entries[0].tolist(), slots) == ([[t, 0, 1, 0, 0, LARGEST] for t in tiles], 0)


@pytest.mark.parametrize("by_keys", [False, True])
def test_survey_knows_the_lists_where_blocks_are_tiles(by_keys: bool, rng: np.random.Generator) -> None:
    made = patterns.from_dense(rng.random((4, 5, 7)) < 0.4, queries=5 * 64 - 3, keys=7 * 128 - 50, block=(64, 128))
    tile = (128, 64) if by_keys else (64, 128)
    counts = np.diff(made.tile_lists(*tile, by_keys).offsets, axis=1)
    np.testing.assert_array_equal(survey(made, *tile, by_keys, 1).lengths, counts)
    pairs = counts.reshape(2, 2, -1).sum(axis=1)
    np.testing.assert_array_equal(survey(made, *tile, by_keys, 2).lengths, pairs.repeat(2, axis=0))
    np.testing.assert_array_equal(survey(made.select(0), *tile, by_keys, 3).lengths, 3 * counts[:1])


@examples(60)
@given(random_patterns(), st.sampled_from(TILES), st.booleans(), st.integers(1, 3))
def test_survey_bounds_the_lists(made: BlockPattern, tile: tuple[int, int], by_keys: bool, group: int) -> None:
    lists = made.tile_lists(*tile, by_keys)
    group = group if made.heads % group == 0 else 1
    found = survey(made, *tile, by_keys, group)
    assert {x.shape for x in found} == {np.diff(lists.offsets, axis=1).shape}
    for head, row in np.ndindex(found.lengths.shape):
        heads = range(head // group * group, head // group * group + group) if made.heads > 1 else [0]
        tiles = [t for h in heads for t in lists.entries[lists.offsets[h, row] : lists.offsets[h, row + 1], 0].tolist()]
        assert (found.lengths[head, row] > 0) == (len(tiles) > 0)
        if tiles:
            assert found.first[head, row] <= min(tiles)
            assert max(tiles) < found.stop[head, row]


@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("longest", [0, 1, 5, 16, 200])
def test_work_tiles_cover_every_list_once(longest: int, group: int, rng: np.random.Generator) -> None:
    first = rng.integers(0, 30, (4 // group, 9))
    stop = first + rng.integers(1, 60, first.shape)
    lengths = rng.integers(0, group * (stop - first) + 1)
    lists = Lists(*(x.repeat(group, axis=0) for x in (lengths, first, stop)))
    entries, slots = cut(lists, longest, group)
    taken: list[int] = []
    for head in range(4):
        done = entries[head, :, 2] > 0
        assert (np.diff(done.astype(int)) <= 0).all()
        assert not entries[head][~done].any()
        mine = entries[head][done]
        for tile in range(9):
            shares = mine[mine[:, 0] == tile]
            shares = shares[np.argsort(shares[:, 1])]
            count, length = len(shares), lists.lengths[head, tile]
            assert shares[:, 1].tolist() == list(range(count))
            assert (shares[:, 2] == count).all()
            assert shares[0, 4] <= lists.first[head, tile]
            assert lists.stop[head, tile] <= shares[-1, 5]
            assert (shares[1:, 4] == shares[:-1, 5]).all()
            if not 0 < longest < length:
                assert count == 1
                continue
            assert count <= 2 * length / longest + 2
            if count > 1:
                (size,) = set(shares[:, 5] - shares[:, 4])
                assert math.log2(size / -(-longest // group)).is_integer()
                assert (shares[:, 4] % size == 0).all()
                assert len(set(shares[:, 3])) == 1
                if head % group == 0:
                    start = head // group * slots + shares[0, 3]
                    taken += range(start, start + count)
        np.testing.assert_array_equal(mine, entries[head // group * group][done])
    assert len(set(taken)) == len(taken)
    assert set(taken) <= set(range(4 // group * slots))
    assert (slots > 0) == (0 < longest < 100)
    assert not entries.flags.writeable


@pytest.mark.parametrize("heads, scattered", [(1, 1), (8, 1), (8, 8)])
def test_scattered_lists_are_not_cut_to_nothing(heads: int, scattered: int) -> None:
    """One key block in a few is seen by rows far apart: shares are as many as the tiles are worth, of all heads."""
    listed = np.zeros((heads, 8192, 32), np.bool_)
    for head in range(scattered):
        listed[head, np.linspace(0, 8191, 500).astype(int), head] = True
    listed[:, :8, 16:] = True
    made = patterns.from_dense(listed, queries=1 << 20, keys=4096, block=128)
    lists = survey(made, 128, 64, True, 1)
    assert lists.lengths.max() == 1000
    entries, slots = cut(lists, 64)
    (shares,) = set(entries[0, entries[0, :, 0] == 0, 2].tolist())
    assert 8 <= shares <= 34
    assert heads * slots < scattered * 34 + heads


def test_long_lists_come_first_and_are_cut_alike() -> None:
    made = patterns.sharded(8, window=64, stride=8, queries=4096, block=128, causal=True)
    entries, _ = cut(survey(made, 128, 64, True, 1), 16)
    tiles = made.tile_lists(128, 64, by_keys=True)
    for head in range(8):
        lengths = []
        for tile, _, shares, _, begin, end in entries[head].tolist():
            if shares:
                mine = tiles.entries[tiles.offsets[head, tile] : tiles.offsets[head, tile + 1], 0]
                lengths.append(int(((mine >= begin) & (mine < end)).sum()))
        assert max(lengths) == 16
        assert lengths[: lengths.count(16)] == [16] * lengths.count(16)
        starts = entries[head, : lengths.count(16), 4]
        assert (np.diff(starts) >= 0).all()


def test_tile_lists_are_made_once_by_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first thread is held inside until the others have had the time to go in too, if nothing keeps them out."""
    made, calls, real = patterns.local(100, queries=4096), [], pattern.tile_lists
    inside, go_on = threading.Semaphore(0), threading.Event()

    def slow(*args: Any) -> Any:
        calls.append(args)
        inside.release()
        go_on.wait(10)
        return real(*args)

    monkeypatch.setattr(pattern, "tile_lists", slow)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(made.tile_lists(128, 64))) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert inside.acquire(timeout=10)
    assert not inside.acquire(timeout=0.2), "two threads make the same lists"
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert all(lists is found[0] for lists in found)
    assert made.tile_lists(128, 64, by_keys=True) is not found[0]


@pytest.mark.parametrize("rows, columns", [(24, 64), (64, 8), (0, 64), (256, 128), (2048, 16)])
def test_tiles_that_no_kernel_has_are_refused(rows: int, columns: int) -> None:
    with pytest.raises(ValueError, match=r"tiles of|allowed are integers from 16"):
        patterns.full(queries=64).tile_lists(rows, columns)


def test_equal_contents_are_equal_whatever_made_them() -> None:
    size = {"queries": 256, "block": 32}
    a = patterns.local(0, **size)
    b = patterns.from_dense(np.eye(8, dtype=bool), **size)
    c = patterns.from_csr(np.arange(9, dtype=np.int16), list(range(8)), **size)
    assert a == b == c
    assert len({a, b, c}) == 1
    assert {a: 1}[c] == 1
    different = [
        patterns.local(32, **size),
        patterns.local(0, queries=255, block=32),
        patterns.local(0, queries=256, block=32, causal=True),
        patterns.from_dense(np.stack([np.eye(8, dtype=bool)] * 2), **size),
        patterns.from_dense(np.eye(8, dtype=bool), queries=500),
    ]
    assert len({a, *different}) == 6
    assert a != 3
    assert len({x.digest for x in (a, b, c, *different)}) == 6


def test_pickles_and_copies_are_equal_and_work() -> None:
    made = patterns.sharded(4, window=100, stride=4, queries=1000, keys=1300, block=(48, 64), causal=True)
    made.tile_lists(64, 64)
    for again in (pickle.loads(pickle.dumps(made)), copy.copy(made), copy.deepcopy(made)):
        assert again == made
        assert hash(again) == hash(made)
        check(again)
        np.testing.assert_array_equal(again.tile_lists(64, 64).entries, made.tile_lists(64, 64).entries)


def test_the_digest_is_the_same_in_every_process() -> None:
    made = patterns.strided(3, [0, 1], queries=100)
    code = "from streamkl_cupy import patterns; print(patterns.strided(3, [0, 1], queries=100).digest)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == made.digest


def test_what_a_pattern_lends_stays_as_it_is() -> None:
    """Whoever holds an array cannot make it writeable again, nor find an owner who can."""
    made = patterns.local(32, queries=200, block=16)
    held = [made.row_offsets, made.key_blocks, made.column_offsets, made.query_blocks]
    held += [*made.tile_lists(64, 64), made.coverage().per_query_block, *patterns.full(queries=0).tile_lists(64, 64)]
    for array in held:
        while isinstance(array, np.ndarray):
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.flags.writeable = True
            array = array.base
        assert isinstance(array, bytes)


def test_fields_are_the_value_and_nothing_else() -> None:
    made = patterns.strided(2, [0, 1], queries=100, keys=130, block=(16, 32))
    made.tile_lists(64, 64)
    found = dataclasses.asdict(made)
    assert list(found) == [
        "row_offsets", "key_blocks", "queries", "keys", "query_block", "key_block", "diagonal",
        "column_offsets", "query_blocks", "digest",
    ]  # fmt: skip
    again = BlockPattern(**{field.name: found[field.name] for field in dataclasses.fields(made) if field.init})
    assert again == made
    assert dataclasses.replace(made, queries=97) == dataclasses.replace(again, queries=97) != made


def test_nothing_can_be_changed() -> None:
    offsets, blocks = np.array([0, 1, 2]), np.array([0, 1])
    made = patterns.from_csr(offsets, blocks, queries=128)
    blocks[:] = 0
    assert made.key_blocks.tolist() == [0, 1], "the pattern shares the caller's memory"
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.queries = 3  # type: ignore[misc]
    for array in (made.row_offsets, made.key_blocks, made.column_offsets, made.query_blocks):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0
    with pytest.raises(ValueError, match="read-only"):
        made.coverage().per_query_block[0] = 0
    assert blocks.flags.writeable


def test_indices_come_in_any_order_and_type() -> None:
    size = {"queries": 64, "keys": 128, "block": 32}
    for kind in ("int8", "uint16", "int64", "uint64"):
        made = patterns.from_csr(np.array([[0, 3, 4]], kind), np.array([3, 0, 1, 2], kind), **size)
        assert made.key_blocks.tolist() == [0, 1, 3, 2]


def test_causal_drops_what_no_row_may_see() -> None:
    size = {"queries": 64, "keys": 96, "block": 32, "causal": True}
    everything = patterns.full(**size)
    assert everything.dense()[0].tolist() == [[True, True, False], [True, True, True]]
    assert patterns.from_csr([0, 3, 6], [2, 1, 0, 0, 1, 2], **size) == everything
    assert patterns.from_dense(np.ones((2, 3), bool), **size) == everything


FAMILY = {"window": 64, "queries": 4096, "causal": True}


def test_a_family_that_sees_half_of_the_context_is_noticed() -> None:
    with pytest.warns(CoverageWarning, match=r"8 heads together see 5\d(\.\d)? % of their context.*offsets 8, 9, 10"):
        made = patterns.sharded(8, stride=16, **FAMILY)
    assert 0.5 < made.coverage().per_query_block[-1] < 0.54
    assert made.coverage().fraction < 0.6
    with pytest.warns(CoverageWarning, match=r"offsets 1, 3, 5, 7 of the stride 8"):
        patterns.sharded(4, stride=8, offsets=[0, 2, 4, 6], **FAMILY)
    with pytest.warns(CoverageWarning, match=r'groups="differ"'):
        patterns.sharded(16, stride=8, key_heads=4, **FAMILY)
    with pytest.warns(CoverageWarning, match="a last range without limit"):
        patterns.sharded(8, stride=[(512, 8)], **FAMILY)


def test_a_family_that_sees_everything_is_not() -> None:
    made = patterns.sharded(8, stride=8, **FAMILY)
    assert made.coverage().fraction == 1
    assert made.coverage(range(4)).fraction < 0.6
    assert made.coverage([0, 0, 0]).fraction == made.coverage(0).fraction == made.select(0).density
    shared = patterns.sharded(16, stride=4, key_heads=4, **FAMILY)
    assert all(shared.select(h) == shared.select(h // 4 * 4) for h in range(16))
    differ = patterns.sharded(16, stride=4, key_heads=4, groups="differ", **FAMILY)
    assert all(differ.coverage(range(4 * g, 4 * g + 4)).fraction == 1 for g in range(4))
    ranged = patterns.sharded(8, stride=[(256, 1), (1024, 4), (None, 8)], **FAMILY)
    assert ranged.coverage().fraction == 1
    rows = np.array([[4095]])
    for head in range(8):
        seen = ranged.visible(rows, np.arange(4096), head)[0]
        assert seen[4096 - 256 :].all(), "dense near"
        assert seen[3072:3840].mean() == pytest.approx(1 / 4, abs=0.09)
        assert seen[:3072].mean() == pytest.approx(1 / 8, abs=0.03)
    dense = patterns.sharded(8, stride=16, dense_heads=1, **FAMILY)
    assert dense.select(7) == patterns.full(queries=4096, causal=True)
    assert dense.coverage(range(7)).per_query_block[-1] < 0.5


@pytest.mark.parametrize("queries, keys", [(0, 0), (0, 100), (100, 0), (1, 1), (1, 1000)], ids=lambda value: str(value))
def test_sizes_at_the_edge(queries: int, keys: int) -> None:
    for causal in (False, True):
        made = patterns.sharded(2, window=10, stride=2, queries=queries, keys=keys, causal=causal)
        check(made)
        check_lists(made, 64, 128, False)
        check_lists(made, 64, 128, True)
        assert made.coverage().fraction == 1


def test_far_offsets_are_one_pattern() -> None:
    far = patterns.full(queries=100, keys=50, causal=True, q_offset=10**9)
    assert far == patterns.full(queries=100, keys=50, causal=True, q_offset=50)
    none = patterns.local(5, queries=100, keys=50, causal=True, q_offset=-(10**9))
    assert none.density == 0
    assert none.coverage().fraction == 1, "there is no context to miss"


FAR_OFFSETS = [
    sign * (2**bits + more) for bits in (31, 33, 40, 41, 63, 64, 80) for more in (-1, 0, 1) for sign in (1, -1)
]


@pytest.mark.filterwarnings("ignore::streamkl_cupy.patterns.CoverageWarning")
@pytest.mark.parametrize("offset", FAR_OFFSETS)
def test_an_offset_has_any_size(offset: int) -> None:
    """As in a call: what lies beyond all keys is one and the same."""
    near = 10**6 if offset > 0 else -(10**6)
    size = {"queries": 100, "keys": 170, "block": (16, 32)}
    every, listed = np.ones((7, 6), bool), patterns.full(**size)
    for make in (
        lambda x: patterns.full(**size, causal=True, q_offset=x),
        lambda x: patterns.from_dense(every, **size, causal=True, q_offset=x),
        lambda x: patterns.from_csr(listed.row_offsets, listed.key_blocks, **size, causal=True, q_offset=x),
        lambda x: patterns.local(5, **size, q_offset=x),
        lambda x: patterns.local((None, 5), **size, q_offset=x),
        lambda x: patterns.local((5, None), **size, q_offset=x),
        lambda x: patterns.local(9, **size, causal=True, q_offset=x),
        lambda x: patterns.strided(3, [0, 2], **size, causal=True, q_offset=x),
        lambda x: patterns.sinks(40, **size, causal=True, q_offset=x),
        lambda x: patterns.sharded(2, window=9, stride=2, sink=3, **size, causal=True, q_offset=x),
        lambda x: patterns.sharded(2, window=9, stride=[(64, 1), (None, 2)], **size, q_offset=x),
        lambda x: patterns.sharded(2, window=9, stride=[(64, 1)], **size, q_offset=x),
        lambda x: BlockPattern(np.zeros((1, 8), int), [], 100, 170, 16, 32, diagonal=x),
    ):
        assert make(offset) == make(near)
    # A reach as long as can be does not come back from there.
    for window in (MOST, (MOST, 0), (0, MOST)):
        if abs(offset) > MOST + 10**6:
            assert patterns.local(window, **size, q_offset=offset).density == 0


@pytest.mark.parametrize(
    "make",
    [
        lambda x: patterns.full(queries=1, causal=True, q_offset=x),
        lambda x: patterns.local(1, queries=1, q_offset=x),
        lambda x: BlockPattern([0, 0], [], 1, 1, diagonal=x),  # type: ignore[arg-type]
    ],
)
def test_an_offset_is_an_integer(make: Callable[[Any], Any]) -> None:
    for odd in (2.0, "2", True, b"2"):
        with pytest.raises(TypeError, match=r"(q_offset|diagonal)=.* is an? (float|str|bool|bytes)"):
            make(odd)


@pytest.mark.filterwarnings("ignore")  # of rows that see nothing
@pytest.mark.parametrize("offset", FAR_OFFSETS)
@pytest.mark.parametrize("window", [None, (5, 5), (None, 0), (2**31 - 1, 0), (2**40, 2**40)], ids=str)
def test_calls_with_patterns_and_far_offsets(offset: int, window: Any, rng: np.random.Generator) -> None:
    size = {"queries": 40, "keys": 50, "block": 16}
    made = patterns.strided(2, [0, 1], **size) | patterns.local(5, **size, causal=True, q_offset=offset)
    x = [rng.standard_normal((1, 2, n, 8)).astype(np.float32) for n in (40, 50, 40, 50)]
    for causal in (False, True) if window else (True,):
        options = {"causal": causal, "window": window, "q_offset": offset, "block_mask": made}
        left, right = (2**100 if side is None else side for side in window or (None, None))
        distance = [[j - i - offset for j in range(50)] for i in range(40)]  # in integers without an end
        inside = np.array([[-left <= d <= (min(right, 0) if causal else right) for d in line] for line in distance])
        seen = np.stack([inside & made.visible(np.arange(40)[:, None], np.arange(50), head) for head in (0, 1)])
        rows = streamkl_cupy.attention_kl_forward(*x, **options)
        logits = np.where(seen, x[0][0].astype(float) @ x[1][0].swapaxes(1, 2) / 8**0.5, -np.inf)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(rows.teacher_lse[0], np.log(np.exp(logits).sum(-1)), rtol=1e-4, atol=1e-5)
        _, grads = streamkl_cupy.attention_kl_value_and_grad(*x, **options, reduction="sum")
        assert ((grads.student_q[0] != 0).any(-1) <= seen.any(-1)).all()
        assert ((grads.student_k[0] != 0).any(-1) <= seen.any(1)).all()


def peak_of(work: Callable[[], Any]) -> float:
    """MiB that Python and NumPy hold at the most during the work, beyond what they held before."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()


MOST = 2**31 - 1
SMALL = {"queries": 200, "keys": 300, "block": 16}


@pytest.mark.filterwarnings("ignore::streamkl_cupy.patterns.CoverageWarning")
@pytest.mark.parametrize(
    "huge, like",
    [
        (lambda: patterns.local(MOST, **SMALL), lambda: patterns.full(**SMALL)),
        (lambda: patterns.sinks(MOST, **SMALL), lambda: patterns.full(**SMALL)),
        (lambda: patterns.strided(MOST, **SMALL), lambda: patterns.strided(30, **SMALL)),
        (lambda: patterns.strided(MOST, [-MOST, MOST, 7], **SMALL), lambda: patterns.strided(30, [0, 0, 7], **SMALL)),
        (lambda: patterns.full(**SMALL, causal=True, q_offset=MOST), lambda: patterns.full(**SMALL)),
        (lambda: patterns.local(9, **SMALL, q_offset=-MOST), lambda: patterns.local(9, **SMALL, q_offset=-10**6)),
        (
            lambda: patterns.sharded(2, window=0, stride=10**9, **SMALL),
            lambda: patterns.sharded(2, window=0, stride=30, **SMALL),
        ),
        (
            lambda: patterns.sharded(2, window=MOST, stride=MOST, sink=MOST, offsets=[MOST, -MOST], **SMALL),
            lambda: patterns.full(**SMALL).select([0, 0]),
        ),
        # The least common multiple of these strides fits into no integer of NumPy.
        (
            lambda: patterns.sharded(
                1, window=0, stride=[(20, MOST), (90, MOST - 1), (MOST, MOST - 2)], offsets=[-5], **SMALL
            ),
            lambda: patterns.local(0, **SMALL),
        ),
        # None stands for any distance, those of the farthest diagonal too.
        (
            lambda: patterns.sharded(1, window=0, stride=[(MOST, 1), (None, 1)], q_offset=-MOST, **SMALL),
            lambda: patterns.full(**SMALL),
        ),
    ],
)  # fmt: skip
def test_work_follows_the_pattern_not_the_numbers(huge: Any, like: Any) -> None:
    like()  # NumPy imports a part of itself late
    assert peak_of(huge) < 1
    np.testing.assert_array_equal(huge().dense(), like().dense())


@pytest.mark.filterwarnings("ignore::streamkl_cupy.patterns.CoverageWarning")
def test_a_long_context_costs_what_it_lists() -> None:
    """65,536 x 65,536 blocks: a byte for each of them would be 4 GiB."""
    size = {"queries": 2**20, "block": 16, "causal": True}
    near, first = patterns.local(100, **size), patterns.sinks(4, **size)
    assert near.key_blocks.size < 2**19
    corners = np.array([0, 2**20 - 1])
    for work in (
        lambda: patterns.local(100, **size),
        lambda: near | first,
        lambda: near & first,
        lambda: patterns.sharded(2, window=64, stride=2**15, **size),
        lambda: patterns.from_csr(near.row_offsets, near.key_blocks, **size),
        near.coverage,
        lambda: near.visible(corners[:, None], corners),
        lambda: near.dense_rows(0, 2**16 - 3, 2**16),
    ):
        assert peak_of(work) < 64
    assert near.visible(corners[:, None], corners).tolist() == [[True, False], [False, True]]
    assert (near | first).visible(corners[:, None], corners).tolist() == [[True, False], [True, True]]


@pytest.mark.parametrize("blocks", [2**16, 2**16 + 1, 70_000])
def test_columns_beyond_sixteen_bits(blocks: int, rng: np.random.Generator) -> None:
    """What walks by keys finds its rows whatever the number of key blocks."""
    listed = [np.unique(np.append(rng.integers(blocks, size=300), [0, 1, blocks - 1])) for _ in range(3)]
    offsets = np.cumsum([0, *map(len, listed)])
    made = patterns.from_csr(offsets, np.concatenate(listed), queries=48, keys=16 * blocks, block=16)
    lists = made.tile_lists(16, 16, by_keys=True)
    found = [set[int]() for _ in range(3)]
    for column in np.flatnonzero(np.diff(lists.offsets[0])):
        rows = lists.entries[lists.offsets[0, column] : lists.offsets[0, column + 1], 0].tolist()
        assert rows == sorted(rows)
        for row in rows:
            found[row].add(int(column))
    assert [sorted(x) for x in found] == [x.tolist() for x in listed]


def test_more_blocks_than_fit_are_refused_before_they_are_made() -> None:
    size = {"queries": 2**21, "block": 16}
    for make in (
        lambda: patterns.full(**size),
        lambda: patterns.local((None, 5), **size, causal=True),
        lambda: patterns.sharded(2**16, window=2**14, stride=64, queries=2**16, causal=True),
    ):
        with pytest.raises(ValueError, match=r"\d+ listed blocks do not fit into 32-bit offsets, 2147483647 do"):
            assert peak_of(make) < 64


def test_the_union_of_heads_in_small_parts(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pattern, "CELLS", 5)
    blocks = rng.random((3, 9, 14)) < np.array([0, 0.02, 0.9])[:, None, None]
    made = patterns.from_dense(blocks, queries=140, keys=220, block=16)
    np.testing.assert_allclose(made.coverage([0, 2]).per_query_block, blocks[[0, 2]].any(axis=0).mean(axis=1))


SIZE = {"queries": 100, "block": 32}


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: patterns.full(queries=-1), ValueError, "queries=-1; allowed are integers from 0"),
        (lambda: patterns.full(queries=2.0), TypeError, "queries=2.0 is a float"),
        (lambda: patterns.full(queries=True), TypeError, "queries=True is a bool"),
        (lambda: patterns.full(queries=10, keys="9"), TypeError, "keys='9' is a str"),
        (lambda: patterns.full(queries=10, block=24), ValueError, "query_block=24; allowed are multiples of 16"),
        (lambda: patterns.full(queries=10, block=(16, 256)), ValueError, "key_block=256; allowed are multiples of 16"),
        (lambda: patterns.full(queries=10, block=(16, 0)), ValueError, "key_block=0"),
        (lambda: patterns.full(queries=10, block=(16, 16, 16)), ValueError, "allowed are one size, and a pair"),
        (lambda: patterns.full(queries=10, causal=1), TypeError, "causal=1 is an int"),
        (lambda: patterns.full(queries=10, q_offset=1), ValueError, "causal is False"),
        (lambda: patterns.strided(2, queries=10, q_offset=1), ValueError, "causal is False"),
        (lambda: patterns.full(queries=10, causal=True, q_offset=1.5), TypeError, "q_offset=1.5 is a float"),
        (lambda: patterns.local(-2, **SIZE), ValueError, "window=-2"),
        (lambda: patterns.local((1, 2, 3), **SIZE), ValueError, "allowed are one number, and a pair"),
        (lambda: patterns.local("7", **SIZE), TypeError, "window='7' is a str"),
        (lambda: patterns.strided(0, **SIZE), ValueError, "stride=0; allowed are integers from 1"),
        (lambda: patterns.strided(2, [], **SIZE), ValueError, "offset_per_head has shape"),
        (lambda: patterns.strided(2, [[1]], **SIZE), ValueError, "offset_per_head has shape"),
        (lambda: patterns.strided(2, [1.5], **SIZE), TypeError, "offset_per_head has dtype float64"),
        (lambda: patterns.strided(2, 1.5, **SIZE), TypeError, "offset_per_head is a float"),
        (lambda: patterns.sinks(-1, **SIZE), ValueError, "n=-1"),
        (lambda: patterns.from_dense(np.ones((4, 4)), **SIZE), TypeError, "dtype float64; allowed is bool"),
        (lambda: patterns.from_dense(np.ones((4, 3), bool), **SIZE), ValueError, r"need \(1 or H, 4, 4\)"),
        (lambda: patterns.from_dense(np.ones((0, 4, 4), bool), **SIZE), ValueError, r"need \(1 or H, 4, 4\)"),
        (lambda: patterns.from_csr([0, 1], [0], **SIZE), ValueError, r"row_offsets has shape \(2,\).*need \(P, 5\)"),
        (lambda: patterns.from_csr([0, 0, 0, 0, 2], [0], **SIZE), ValueError, "end at the 1 entries"),
        (lambda: patterns.from_csr([1, 1, 1, 1, 1], [0], **SIZE), ValueError, "must start at 0"),
        (lambda: patterns.from_csr([0, 2, 1, 1, 2], [0, 1], **SIZE), ValueError, "falls after query block 1"),
        (
            lambda: patterns.from_csr([[0, 1, 1, 1, 1], [0, 1, 1, 1, 2]], [0, 1], **SIZE),
            ValueError,
            "head 1 begins at 0, but head 0 ends at 1",
        ),
        (lambda: patterns.from_csr([0, 0, 0, 0, 1], [4], **SIZE), ValueError, r"key_blocks\[0\] is 4;.*blocks 0 to 3"),
        (lambda: patterns.from_csr([0, 0, 0, 0, 1], [-1], **SIZE), ValueError, r"key_blocks\[0\] is -1"),
        (
            lambda: patterns.from_csr([[0, 0, 0, 0, 0], [0, 0, 3, 3, 3]], [3, 1, 3], **SIZE),
            ValueError,
            "lists block 3 twice for query block 1 of head 1",
        ),
        (lambda: patterns.from_csr([0, 0, 0, 0, 1], [0.0], **SIZE), TypeError, "key_blocks has dtype float64"),
        (lambda: patterns.from_csr([0, 0, 0, 0, 1], [[0]], **SIZE), ValueError, r"key_blocks has shape \(1, 1\)"),
        (
            lambda: BlockPattern([0, 1], [1], 16, 32, 16, 16, diagonal=0),  # type: ignore[arg-type]
            ValueError,
            "lists block 1 for query block 0 of head 0, but no row of that may see it with diagonal=0",
        ),
        (lambda: patterns.full(**SIZE) | patterns.full(queries=99, block=32), ValueError, "queries is 100 on the left"),
        (lambda: patterns.full(**SIZE) & patterns.full(queries=100), ValueError, "query_block is 32 on the left"),
        (
            lambda: patterns.strided(2, [0, 1], **SIZE) | patterns.strided(3, [0, 1, 2], **SIZE),
            ValueError,
            "2 heads on the left and 3 on the right",
        ),
        (lambda: patterns.full(**SIZE) | 3, TypeError, "unsupported operand"),
        (lambda: patterns.sharded(0, window=1, stride=1, **SIZE), ValueError, "heads=0"),
        (lambda: patterns.sharded(4, window=1, stride=1, key_heads=3, **SIZE), ValueError, "does not divide heads=4"),
        (lambda: patterns.sharded(4, window=1, stride=1, groups="same", **SIZE), ValueError, "groups='same'"),
        (lambda: patterns.sharded(4, window=1, stride=1, dense_heads=5, **SIZE), ValueError, "dense_heads=5"),
        (
            lambda: patterns.sharded(4, window=1, stride=1, dense_heads=1, key_heads=2, **SIZE),
            ValueError,
            "cuts a group of 2 query heads",
        ),
        (lambda: patterns.sharded(4, window=1, stride=1, offsets=[1], **SIZE), ValueError, "there are 4 sparse"),
        (lambda: patterns.sharded(4, window=None, stride=1, **SIZE), TypeError, "window=None"),
        (lambda: patterns.sharded(4, window=1, stride=0, **SIZE), ValueError, "stride=0"),
        (lambda: patterns.sharded(4, window=1, stride=[], **SIZE), ValueError, "from near to far"),
        (lambda: patterns.sharded(4, window=1, stride=[4, 8], **SIZE), ValueError, "from near to far"),
        (lambda: patterns.sharded(4, window=1, stride=2.5, **SIZE), TypeError, "stride is a float"),
        (lambda: patterns.sharded(4, window=1, stride=[(-1, 2), (None, 4)], **SIZE), ValueError, "distance=-1"),
        (
            lambda: patterns.sharded(4, window=1, stride=[(9, 1), (9, 2)], **SIZE),
            ValueError,
            "the distances must grow",
        ),
        (
            lambda: patterns.sharded(4, window=1, stride=[(None, 1), (9, 2)], **SIZE),
            ValueError,
            "the distances must grow",
        ),
        (lambda: patterns.full(**SIZE).coverage([1]), ValueError, "heads=1; allowed are integers from 0 to 0"),
        (lambda: patterns.full(**SIZE).coverage([]), ValueError, "heads is empty"),
        (lambda: patterns.full(**SIZE).coverage("0"), TypeError, "heads is a str"),
        (lambda: patterns.full(**SIZE).select(1.5), TypeError, "heads is a float"),  # type: ignore[arg-type]
        (lambda: patterns.full(**SIZE).select(np.array(1.5)), TypeError, r"heads=array\(1.5\) is a numpy.ndarray"),
        (lambda: patterns.full(**SIZE).select(np.eye(2)), TypeError, "heads=array"),
        (lambda: patterns.full(**SIZE).tile_lists(64, 64, 1), TypeError, "by_keys=1 is an int"),  # type: ignore[arg-type]
        (lambda: patterns.full(**SIZE).plot(columns=0), ValueError, "columns=0; allowed are integers from 1"),
        (lambda: patterns.full(queries=10, block=-16), ValueError, "query_block=-16; allowed are multiples of 16"),
        (lambda: patterns.full(queries=10, block=2**40), ValueError, "multiples of 16 from 16 to 128"),
        (lambda: patterns.full(queries=10, block=[16, 16.0]), TypeError, "key_block=16.0 is a float"),
        (lambda: patterns.local(np.array([1, 2]), **SIZE), TypeError, r"window=array\(\[1, 2\]\) is a numpy.ndarray"),
        (lambda: patterns.strided(2, np.array(1.5), **SIZE), TypeError, "offset_per_head has dtype float64"),
        (lambda: patterns.sharded(4, window=1, stride=np.array(2.5), **SIZE), TypeError, "stride=array"),
        (lambda: patterns.sharded(4, window=1, stride=True, **SIZE), TypeError, "stride=True is a bool"),
        (lambda: patterns.sharded(4, window=1, stride=1, groups=["share"], **SIZE), TypeError, "groups is a list"),
        (lambda: patterns.sharded(4, window=1, stride=1, offsets=7, **SIZE), TypeError, "offsets is an int"),
    ],
)
def test_bad_input_is_named(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


NUMBERS: dict[str, tuple[Callable[[Any], Any], int, int]] = {
    "queries": (lambda x: patterns.full(queries=x), 0, MOST),
    "keys": (lambda x: patterns.full(queries=1, keys=x), 0, MOST),
    "window": (lambda x: patterns.local(x, queries=1), -1, MOST),
    "stride": (lambda x: patterns.strided(x, queries=1), 1, MOST),
    "offset_per_head": (lambda x: patterns.strided(1, x, queries=1), -MOST, MOST),
    "n": (lambda x: patterns.sinks(x, queries=1), 0, MOST),
    "heads": (lambda x: patterns.sharded(x, window=0, stride=1, queries=1), 1, 2**16),
    "key_heads": (lambda x: patterns.sharded(4, window=0, stride=1, queries=1, key_heads=x), 1, 4),
    "dense_heads": (lambda x: patterns.sharded(4, window=0, stride=1, queries=1, dense_heads=x), 0, 4),
    "sink": (lambda x: patterns.sharded(1, window=0, stride=1, queries=1, sink=x), 0, MOST),
    "distance": (lambda x: patterns.sharded(1, window=0, stride=[(x, 1)], queries=1), 0, MOST),
    "rows": (lambda x: patterns.full(queries=1).tile_lists(x, 16), 16, MOST),
    "columns": (lambda x: patterns.full(queries=1).tile_lists(16, x), 16, MOST),
    "head": (lambda x: patterns.strided(1, [0, 1], queries=1).visible([], [], x), 0, 1),
    "first": (lambda x: patterns.full(queries=100).dense_rows(0, x, 1), 0, 2),
    "last": (lambda x: patterns.full(queries=100).dense_rows(0, 1, x), 1, 2),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_names_its_range_and_kind(name: str) -> None:
    make, low, high = NUMBERS[name]
    for bad in (low - 1, high + 1):
        with pytest.raises(ValueError, match=rf"^{name}={bad}; allowed are integers from {low} to {high}$"):
            make(bad)
    for odd in (2.0, "2", True, b"2"):
        with pytest.raises(TypeError, match=rf"{name}(=.*)? (is an? (float|str|bool|bytes)|has dtype)"):
            make(odd)
    make(np.int64(max(low, 1)))


@pytest.mark.parametrize(
    "rows, keys, head, error, message",
    [
        ([0, 200], [0], 0, ValueError, "rows holds 200; allowed are integers from 0 to 199"),
        ([[0], [-1]], [0], 0, ValueError, "rows holds -1; allowed are integers from 0 to 199"),
        (0, 300, 0, ValueError, "keys holds 300; allowed are integers from 0 to 299"),
        (0, np.uint64(2**64 - 1), 0, ValueError, "keys holds 18446744073709551615"),
        (0.0, 0, 0, TypeError, "rows has dtype float64; allowed are integers"),
        (0, np.array([0.5]), 0, TypeError, "keys has dtype float64; allowed are integers"),
        ("0", 0, 0, TypeError, "rows has dtype <U1; allowed are integers"),
        (True, 0, 0, TypeError, "rows has dtype bool; allowed are integers"),
        (None, 0, 0, TypeError, "rows has dtype object; allowed are integers"),
        (
            [0, 1, 2],
            [0, 1],
            0,
            ValueError,
            r"rows has shape \(3,\) and keys \(2,\), which do not",
        ),
        (0, 0, -1, ValueError, "head=-1; allowed are integers from 0 to 1"),
        (0, 0, 2, ValueError, "head=2; allowed are integers from 0 to 1"),
        (0, 0, 0.0, TypeError, "head=0.0 is a float; allowed is an integer"),
    ],
)
def test_what_a_pattern_cannot_be_asked(rows: Any, keys: Any, head: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        patterns.strided(2, [0, 1], **SMALL).visible(rows, keys, head)


def test_pairs_come_in_any_shape_and_type() -> None:
    made = patterns.strided(2, [0, 1], queries=200, keys=300, block=128)
    dense = made.dense()
    for kind in ("int8", "uint8", "int32", "uint64"):  # 128 is beyond int8
        rows, keys = np.array([3, 127, 0], kind), np.array([127, 5, 80], kind)
        assert made.visible(rows, keys, 1).tolist() == [
            dense[1, r, k] for r, k in zip(rows // 64 // 2, keys // 64 // 2)
        ]
        assert made.visible(rows[:, None], keys).shape == (3, 3)
    assert bool(made.visible(150, 299, 1)) is bool(dense[1, 1, 2])
    assert made.visible([], []).shape == (0,)
    assert made.visible(np.zeros((0, 1), int), [5, 6]).shape == (0, 2)
    one = patterns.full(queries=200)
    assert one.visible(0, 0, head=31), "a pattern of one head answers for all"
    with pytest.raises(ValueError, match="keys holds 0; the pattern has no keys"):
        patterns.full(queries=5, keys=0).visible(0, 0)


def test_numbers_may_be_arrays_without_axes() -> None:
    size = {"queries": 256, "block": 16}
    assert patterns.strided(np.array(3), np.array(1), **size) == patterns.strided(3, 1, **size)
    made = patterns.sharded(2, window=np.int64(4), stride=np.array(2), **size)
    assert made == patterns.sharded(2, window=4, stride=2, **size)
    assert made.select(np.array(1)) == made.select(np.array([1])) == made.select(1)


def test_arrays_that_are_not_in_host_memory_are_named() -> None:
    class Device:
        def __array__(self, *_: Any, **__: Any) -> Array:
            raise TypeError("implicit conversion is not allowed")

    with pytest.raises(TypeError, match=r"blocks is a .*Device that NumPy cannot read; pass an array in host memory"):
        patterns.from_dense(Device(), queries=64)
    with pytest.raises(
        TypeError, match=r"key_blocks is a .*Device that NumPy cannot read; pass an array in host memory"
    ):
        patterns.from_csr([0, 1], Device(), queries=64)


def test_plot_draws_heads_and_what_they_see_together(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image", reason="needs matplotlib, of the examples extra")
    made = patterns.sharded(4, window=64, stride=4, queries=20000, causal=True)
    figure = made.plot()
    assert [axis.get_title("center") for axis in figure.axes] == [
        *(f"head {h}" for h in range(4)),
        "together: 100% of the context",
    ]
    assert "together: 50" in made.plot([0, 2], columns=2).axes[-1].get_title("center")
    figure.savefig(tmp_path / "pattern.png")
    pixels = image.imread(tmp_path / "pattern.png")
    assert pixels[..., :3].std() > 0.1, "the plot is all but blank"
    patterns.full(queries=0).plot().savefig(tmp_path / "empty.png")


def test_plot_without_matplotlib_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=re.escape(install.command("examples"))):
        patterns.full(queries=64).plot()


@pytest.mark.parametrize("module", [patterns, pattern, families], ids=lambda module: module.__name__)
def test_examples_of_the_docstrings(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "random", None)  # what they print must not depend on luck
    examples_of = doctest.DocTestFinder().find(module)
    if any("plot()" in example.source for test in examples_of for example in test.examples):
        pytest.importorskip("matplotlib", reason="needs matplotlib, of the examples extra")
    results = doctest.testmod(module)
    assert results.attempted > 2
    assert not results.failed


def test_the_module_is_imported_by_those_who_use_it() -> None:
    code = (
        "import sys, streamkl_cupy; assert 'streamkl_cupy.patterns' not in sys.modules; "
        "assert 'patterns' in streamkl_cupy.__all__; streamkl_cupy.patterns.full(queries=3)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    with pytest.raises(AttributeError, match="no attribute 'pattern_s'"):
        streamkl_cupy.pattern_s  # noqa: B018

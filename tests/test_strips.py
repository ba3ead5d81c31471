"""Strips of an indexer's backward: within their room, and cut so that they take the fewest waves of all ways."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streamkl_cupy.indexer import strips
from streamkl_cupy.rules.row_keys import RowKeys


def problem(B: int, groups: int, M: int, N: int, **rule: Any) -> Any:
    class Sizes(SimpleNamespace):
        def __getitem__(self, letter: str) -> int:
            return {"B": B, "M": M, "N": N}[letter]

    rules = {"causal": True, "q_offset": None, "compress_ratio": 1, "relative": False, **rule}
    return Sizes(groups=groups, rule=RowKeys(*rules.values()), given=())


def pieces_of(of: Any, first: int, tiles: int, grid: int) -> int:
    """Pieces of 256 keys that rows of these tiles may see, row tile by row tile."""
    ends = [min(64 * (i + 1), of["M"]) for i in range(first, first + tiles)]
    return sum(-(-strips.keys_before(of, end) // 256) for end in ends)


@pytest.mark.parametrize("causal", [True, False])
def test_strips_take_the_fewest_waves(causal: bool, rng: np.random.Generator) -> None:
    for _ in range(12):
        M, N = int(rng.integers(1, 640)), int(rng.integers(1, 3000))
        of = problem(int(rng.integers(1, 3)), int(rng.integers(1, 4)), M, N, causal=causal)
        blocks, heads, room = int(rng.integers(1, 40)), int(rng.integers(1, 65)), int(rng.integers(0, 12))
        grid = -(-M // 64)

        def size(tiles: int, pairs: int) -> int:
            return tiles + pairs // (1 << 18)  # grows with both

        def allowed(first: int, tiles: int, of: Any = of, room: int = room, grid: int = grid) -> bool:
            return tiles == 1 or size(tiles, pieces_of(of, first, tiles, grid) * 64 * 256) <= room

        def cost(first: int, tiles: int, of: Any = of, grid: int = grid) -> float:
            work = of["B"] * of.groups * pieces_of(of, first, tiles, grid)
            return -(-work // blocks) + 38 / heads  # noqa: B023

        found = strips.cut_strips(of, blocks, heads, size, room)
        assert [x[0] for x in found] == [0, *itertools.accumulate(x[1] for x in found)][:-1]
        assert sum(x[1] for x in found) == grid
        for first, tiles, keys, pairs in found:
            assert allowed(first, tiles)
            assert pairs == pieces_of(of, first, tiles, grid) * 64 * 256
            assert keys % 256 == 0
            assert keys >= strips.keys_before(of, min(64 * (first + tiles), M))
        best = min(
            sum(map(cost, [0, *cuts], np.diff([0, *cuts, grid]).tolist()))
            for n in range(grid)
            for cuts in itertools.combinations(range(1, grid), n)
            if all(map(allowed, [0, *cuts], np.diff([0, *cuts, grid]).tolist()))
        )
        assert sum(cost(first, tiles) for first, tiles, *_ in found) == pytest.approx(best)


def test_long_sequences_are_cut_where_memory_ends() -> None:
    """Where all ways to cut them would be too many to look at."""
    for grid, choices in ((1500, True), (1501, False)):
        # Of the first way to have as few waves the shortest strips would come first.
        of = problem(1, 1, 64 * grid, 256, causal=False)
        found = strips.cut_strips(of, 5, 1 << 30, lambda tiles, pairs: tiles, 7)
        lengths = [tiles for _, tiles, *_ in found]
        assert (sum(lengths), max(lengths) <= 7) == (grid, True)
        assert (set(lengths) == {5}) == choices
        assert lengths == ([5] * 300 if choices else [7] * 214 + [3])


def test_keys_before_a_row() -> None:
    of = problem(1, 1, 10, 8, compress_ratio=2)
    # Eight keys stand for 16 positions, of which the last ten have rows.
    assert [strips.keys_before(of, end) for end in range(1, 12)] == [3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8]
    late = problem(1, 1, 10, 8, compress_ratio=2, q_offset=-4)
    assert [strips.keys_before(late, end) for end in range(1, 11)] == [0, 0, 0, 0, 0, 1, 1, 2, 2, 3]
    assert strips.keys_before(problem(1, 1, 10, 8, causal=False), 1) == 8
    packed = problem(1, 1, 10, 8)
    packed.given = ("cu_seqlens_q",)
    assert strips.keys_before(packed, 1) == 8

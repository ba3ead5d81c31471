"""Into which strips of rows a backward is cut that keeps gates: as few as memory allows, and such that what computes
their scores ends with whole waves of blocks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

from ..kernels.indexer import GRID
from .problem import IndexProblem

ITEM_KEYS = 256
"""Of a piece of work of the scores: one row tile, and all heads."""
OVERHEAD_HEADS = 38
"""What a strip costs beside its work, in heads of such a piece."""
CHOICES = 40
"""Lengths that a strip may have, from the longest on."""
MOST_CHOICES = 60_000
"""Strips that are looked at; where there would be more, all are as long as memory allows."""


class Strip(NamedTuple):
    """Row tiles that a backward takes at a time."""

    first: int
    tiles: int
    keys: int
    """That its rows see, in whole tiles of whoever reads them."""
    pairs: int
    """Of tiles of rows and keys that there are."""
    splits: int
    """Blocks over which the keys of a row tile go, where scores are not cut by themselves."""


def keys_before(problem: IndexProblem, end_row: int) -> int:
    """No row before this one sees keys from there on. What arrays say is not known: it can only hide more."""
    keys, rule = problem["N"], problem.rule
    if not rule.causal or "cu_seqlens_q" in problem.given:
        return keys
    offset = keys * rule.compress_ratio - problem["M"] if rule.q_offset is None else rule.q_offset
    return min(max((min(end_row, problem["M"]) + offset) // rule.compress_ratio, 0), keys)


def cut_strips(
    problem: IndexProblem, blocks: int, heads: int, size: Callable[[int, int], int], room: int
) -> list[tuple[int, int, int, int]]:
    """(first, tiles, keys, pairs) of strips whose `size` of tiles and pairs is within the room, where that of one tile
    is; on a GPU that has so many blocks at a time."""
    grid, entries = -(-problem["M"] // GRID), problem["B"] * problem.groups
    wide = [-(-keys_before(problem, GRID * i) // ITEM_KEYS) for i in range(1, grid + 1)]
    before = [0, *accumulate(wide)]  # pieces of work

    def step(first: int, tiles: int) -> tuple[int, int, int, int]:
        end = first + tiles
        # The last strip has all keys: some may be seen by nobody.
        keys = max(wide[end - 1], 1) * ITEM_KEYS if end < grid else -(-problem["N"] // ITEM_KEYS) * ITEM_KEYS
        return first, tiles, keys, (before[end] - before[first]) * GRID * ITEM_KEYS

    def longest(first: int) -> int:
        def too_large(tiles: int) -> bool:
            return size(tiles, step(first, tiles)[3]) > room

        return max(bisect_left(range(1, grid - first + 1), True, key=too_large), 1)

    def cost(first: int, tiles: int) -> float:
        # Waves of blocks, and what each strip costs beside them.
        return -(-entries * (before[first + tiles] - before[first]) // blocks) + OVERHEAD_HEADS / heads

    found, first = list[tuple[int, int, int, int]](), 0
    if grid * CHOICES > MOST_CHOICES:
        while first < grid:
            found.append(step(first, longest(first)))
            first += found[-1][1]
        return found
    # Of all that is left the least cost, from the end on, and the length of the next strip.
    best: list[tuple[float, int]] = [(0.0, 0)] * (grid + 1)
    for first in range(grid - 1, -1, -1):
        most = longest(first)
        lengths = range(most, 0, -max(most // CHOICES, 1))
        best[first] = min((cost(first, n) + best[first + n][0], n) for n in lengths[:CHOICES])
    first = 0
    while first < grid:
        found.append(step(first, best[first][1]))
        first += best[first][1]
    return found

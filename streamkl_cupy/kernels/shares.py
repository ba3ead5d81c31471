"""Over how many blocks the steps of a row tile go, where row tiles are few: `tile/shares.cuh` cuts them.

A step is a tile of streamed rows; where a block sums the query heads that share its keys, each head has its own. Lists
of patterns are not cut here but in `work_tiles.py`.
"""

from __future__ import annotations

import heapq
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ..problem import Problem
from ..rules.masks import Scene, key_range, parts_of

LEAST_STEPS = 8
"""Of a share; a share of the last ones may have fewer."""
# Steps that a block could walk while it starts and ends, and while the sums of a share are written and added up.
START, SUMS = 2, 2
# Beyond so many row tiles for each multiprocessor blocks even one another out as they are.
MOST_PER_MULTIPROCESSOR = 4
# What sharing has to gain.
WORTH = 0.95
SAMPLES = 64
# Beyond so many tiles for each multiprocessor the last ones hardly count; and what is nearly as even as can be.
MOST_SIMULATED, EVEN = 16, 1.06
# Of an L2 cache of 50 MB, what should be under way at a time, and where it is so much more that this matters.
CACHED, MOST_CACHED = 32 << 20, 160 << 20


def scene_of(problem: Problem) -> Scene:
    """The rows and keys of one sequence, as far as they are known when planning: they count as equally long, and what
    arrays of masks hide is not known."""
    sequences = max(problem.sequences, 1)
    queries, keys = -(-problem.queries // sequences), -(-problem.keys // sequences)
    params = dict(problem.mask.params)
    if not params.get("q_offset_given", 1):
        params["q_offset"] = keys - queries
    return Scene(queries, keys, params)


def steps_of(problem: Problem, rows: int, columns: int, by_keys: bool) -> NDArray[np.int64]:
    """About how many tiles of `columns` rows are streamed past each tile of `rows`, from the first to the last; by
    keys, queries are."""
    scene, parts = scene_of(problem), parts_of(problem.mask)
    size = scene.keys if by_keys else scene.queries
    starts = np.arange(0, size, rows)
    if not parts:
        return shapes_of(problem, rows, columns, by_keys)[0]
    # Row tiles and streamed ones alike are asked in samples: masks that are known here change evenly.
    height = columns if by_keys else rows
    asked = np.unique(np.linspace(0, max(-(-scene.queries // height) - 1, 0), SAMPLES).astype(np.int64)) * height
    ranges = [key_range(parts, scene, q0, min(q0 + height, scene.queries)) for q0 in asked.tolist()]
    begin, end = np.array(ranges, np.int64).T
    if by_keys:
        met = (begin < np.minimum(starts + rows, size)[:, None]) & (end > starts[:, None])
        share = -(-scene.queries // height) / len(asked)
        return np.asarray(np.ceil(met.sum(axis=1) * share), np.int64)
    lengths = np.maximum(-(-end // columns) - begin // columns, 0)
    return np.asarray(np.interp(starts, asked, lengths), np.int64)


def shapes_of(problem: Problem, rows: int, columns: int, by_keys: bool) -> tuple[NDArray[np.int64], ...]:
    """What `steps_of` may find, whatever numbers the mask has: all tiles for each, and from none to all of them."""
    scene = scene_of(problem)
    size, streamed = (scene.keys, scene.queries) if by_keys else (scene.queries, scene.keys)
    tiles, steps = -(-size // rows), -(-streamed // columns)
    ramp = -(-np.arange(1, tiles + 1, dtype=np.int64) * steps // max(tiles, 1))
    return (np.full(tiles, steps, np.int64), *([ramp] if parts_of(problem.mask) else []))


def turn(steps: NDArray[np.int64], copies: int, bytes_of_all: int, multiprocessors: int) -> int:
    """Steps of a share where blocks should take shares in turns, those that begin with the same query heads together;
    0 where it does not matter who takes which.

    What the blocks are at should fit the L2 cache together. Where each is at heads of its own, whatever it reads and
    adds to comes from memory: 2 x 128 heads x 2048 rows on one key head, D = 192 / 128, causal, 3.2 TB/s and 1.8 ms.

    Args:
        steps: Of the row tiles of a head.
        copies: Heads.
        bytes_of_all: What is read and added to beside them, of all query heads.
        multiprocessors: Of the GPU.
    """
    if bytes_of_all <= MOST_CACHED:
        return 0
    return max(int(CACHED * int(steps.sum()) * copies / bytes_of_all / multiprocessors), 2 * LEAST_STEPS)


def time_of(steps: NDArray[np.int64], shares: int, copies: int, multiprocessors: int) -> float:
    """About how long a launch takes, in steps, if blocks take tiles from long to short.

    Args:
        steps: Of the row tiles of a head.
        shares: Over how many blocks those of each go.
        copies: Heads.
        multiprocessors: Of the GPU.
    """
    made = np.minimum(shares, np.maximum(-(-steps // LEAST_STEPS), 1))
    lengths = np.repeat(steps / made + START + SUMS * (made > 1), made * copies)
    lengths = -np.sort(-lengths)
    load = np.zeros(multiprocessors)
    for first in range(0, len(lengths), multiprocessors):
        wave = lengths[first : first + multiprocessors]
        load.sort()
        load[: len(wave)] += wave
    return float(load.max())


@lru_cache(maxsize=1024)
def side_by_side(tiles: int, heads: int, least: int, multiprocessors: int) -> int:
    """How many of `heads`, `least` or more, should run side by side whose tiles are a ramp from long to short: the
    fewest with which blocks are busy to the end, or nearly so.

    Blocks take the tiles of a group from long to short, then those of the next one. What is left for a last group of
    few heads are long tiles: 32 heads of 16 tiles by tens leave two, and take 1.25 times as long as by eights.
    """
    if not heads * tiles or heads * tiles > MOST_SIMULATED * multiprocessors:
        return least
    sizes = sorted({-(-heads // groups) for groups in range(1, heads // max(least, 1) + 1)} | {least})
    times = {size: _time_by_groups(tiles, heads, size, multiprocessors) for size in sizes}
    best = min(times.values())
    return next(size for size in sizes if times[size] <= EVEN * best)


def _time_by_groups(tiles: int, heads: int, size: int, multiprocessors: int) -> float:
    """About how long a launch takes whose groups have so many heads; a tile takes as long as it has tiles behind it."""
    free = [0.0] * multiprocessors
    for first in range(0, heads, size):
        for tile in range(tiles):
            for _ in range(min(size, heads - first)):
                heapq.heapreplace(free, free[0] + tiles - tile)
    return max(free)


def number(steps: NDArray[np.int64], copies: int, multiprocessors: int) -> int:
    """Over how many blocks the steps of each row tile go: the fewest that are nearly as good as any number would be.

    Args:
        steps: Of the row tiles of a head.
        copies: Heads.
        multiprocessors: Of the GPU.
    """
    tiles = len(steps) * copies
    most = min(MOST_PER_MULTIPROCESSOR * multiprocessors // max(tiles, 1), int(steps.max(initial=0)) // LEAST_STEPS)
    if most <= 1:
        return 1
    # What fills the GPU once, twice and so on, and what divides heads evenly.
    waves = (multiprocessors * wave // tiles for wave in range(1, MOST_PER_MULTIPROCESSOR + 1))
    tried = sorted({x for x in (*waves, *(1 << i for i in range(most.bit_length()))) if 1 < x <= most} | {most})
    times = {shares: time_of(steps, shares, copies, multiprocessors) for shares in tried}
    best = min(times.values())
    if best > WORTH * time_of(steps, 1, copies, multiprocessors):
        return 1
    return next(shares for shares in tried if times[shares] <= 1.03 * best)

"""How few row tiles are shared out over a GPU, and few rows split: against counting tiles one by one."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_planning import plan, problem

from streamkl_cupy import patterns
from streamkl_cupy.kernels import combine, shares
from streamkl_cupy.kernels.gpus import facts_for_arch
from streamkl_cupy.problem import MaskSpec
from streamkl_cupy.testing import reference

Array = NDArray[Any]

MASKS: dict[str, tuple[MaskSpec, dict[str, Any]]] = {
    "none": (MaskSpec(), {}),
    "causal": (MaskSpec(("causal",), (("q_offset", -9),)), {"causal": True, "q_offset": -9}),
    "window": (
        MaskSpec(("window",), (("left", 20), ("right", 45), ("q_offset", 3))),
        {"window": (20, 45), "q_offset": 3},
    ),
}


def walked(M: int, N: int, mask: dict[str, Any], rows: int, columns: int, *starts: int) -> list[tuple[int, int]]:
    """By tile of `rows` query rows, tiles of `columns` keys from the first to the last one that any of them sees."""
    seen = np.broadcast_to(reference.visible((1, 1, M, N), mask), (1, 1, M, N))[0, 0]
    found = []
    for row in starts or range(0, M, rows):
        keys = np.flatnonzero(seen[row : row + rows].any(axis=0))
        found.append((keys[0] // columns, keys[-1] // columns + 1) if len(keys) else (0, 0))
    return found


@pytest.mark.parametrize("mask", MASKS)
def test_steps_are_tiles_from_the_first_to_the_last_that_is_seen(mask: str, rng: np.random.Generator) -> None:
    spec, options = MASKS[mask]
    for _ in range(10):
        M, N = int(rng.integers(1, 500)), int(rng.integers(1, 500))
        rows, columns = (int(x) for x in rng.choice([16, 32, 48, 64], 2))
        p = problem(M, N, mask=spec)
        ranges = walked(M, N, options, rows, columns)
        steps = shares.steps_of(p, rows, columns, False)
        assert steps.tolist() == [stop - start for start, stop in ranges]
        # By keys: the tiles of queries that see something of a tile of keys, or something on both sides of it.
        keys = [range(a, b) for a, b in walked(M, N, options, columns, 1)]
        meets = [sum(len(x) > 0 and x.start < min(k + rows, N) and x.stop > k for x in keys) for k in range(0, N, rows)]
        assert shares.steps_of(p, rows, columns, True).tolist() == meets
        # The longest, of which one is at an end or in the middle; the others of a window are about as long.
        some = walked(M, N, options, rows, columns, 0, M // 2, max(M - rows, 0))
        assert combine.key_tiles(p, rows, columns) == max(stop - start for start, stop in some)
        if mask != "window":
            assert max(stop - start for start, stop in some) == max(steps)
    # Sequences count as equally long; a mask of each is aligned at the end of its keys unless it says where.
    whole = problem(100, 60, mask=MaskSpec(("causal",), (("q_offset", -40),)))
    packed = problem(
        400, 240, mask=MaskSpec(("packed", "causal"), (("q_offset_given", 0), ("q_offset", 7))), sequences=4
    )
    for by_keys in (False, True):
        assert shares.steps_of(packed, 16, 32, by_keys).tolist() == shares.steps_of(whole, 16, 32, by_keys).tolist()
    assert combine.key_tiles(packed, 16, 32) == combine.key_tiles(whole, 16, 32)


def test_steps_of_many_tiles_are_between_samples() -> None:
    p = problem(64 * 300, 64 * 300, mask=MaskSpec(("causal",), (("q_offset", 0),)))
    steps = shares.steps_of(p, 64, 64, False)
    assert np.abs(steps - np.arange(1, 301)).max() <= 3
    steps = shares.steps_of(p, 64, 64, True)
    assert np.abs(steps - np.arange(300, 0, -1)).max() <= 6


def test_shapes_go_from_a_triangle_to_everything() -> None:
    p = problem(130, 300)
    for by_keys, tiles, steps in ((False, 5, 5), (True, 10, 3)):
        (full,) = shares.shapes_of(p, 32, 64, by_keys)
        assert full.tolist() == [steps] * tiles
        full, ramp = shares.shapes_of(replace(p, mask=MaskSpec(("causal",), (("q_offset", 0),))), 32, 64, by_keys)
        assert full.tolist() == [steps] * tiles
        assert ramp.tolist() == [-(-i * steps // tiles) for i in range(1, tiles + 1)]


def simulated(steps: Array, count: int, copies: int, multiprocessors: int) -> float:
    """Steps until a GPU is done, whose blocks take shares from long to short, whoever is free first."""
    lengths = []
    for x in steps.tolist():
        made = min(count, max(-(-x // shares.LEAST_STEPS), 1))
        lengths += [x / made + shares.START + shares.SUMS * (made > 1)] * made * copies
    free = [0.0] * multiprocessors
    for length in sorted(lengths, reverse=True):
        heapq.heappush(free, heapq.heappop(free) + length)
    return max(free)


def test_shares_are_as_few_as_keep_a_gpu_busy(rng: np.random.Generator) -> None:
    shared = 0
    for _ in range(40):
        tiles, copies, gpu = int(rng.integers(1, 40)), int(rng.integers(1, 9)), int(rng.integers(8, 140))
        steps = rng.integers(0, 300, tiles) if rng.random() < 0.5 else np.full(tiles, int(rng.integers(1, 300)))
        found = shares.number(steps, copies, gpu)
        most = min(shares.MOST_PER_MULTIPROCESSOR * gpu // (tiles * copies), int(steps.max()) // shares.LEAST_STEPS)
        assert 1 <= found <= max(most, 1)
        times = {count: simulated(steps, count, copies, gpu) for count in range(1, max(most, 1) + 1)}
        for count in {1, found, max(most, 1)}:
            assert shares.time_of(steps, count, copies, gpu) == pytest.approx(times[count], rel=0.25)
        assert times[found] <= 1.6 * min(times.values())
        shared += found > 1
    assert 5 < shared < 40
    assert shares.number(np.zeros(3, np.int64), 2, 132) == 1
    assert shares.number(np.zeros(0, np.int64), 2, 132) == 1
    # Two tiles for 132 multiprocessors and 1,000 steps each: all of them, and no more than that.
    assert 60 <= shares.number(np.full(2, 1000), 1, 132) <= 66
    # As many tiles as multiprocessors, all alike: sharing has nothing to gain.
    assert shares.number(np.full(132, 1000), 1, 132) == 1


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_no_launch_is_empty(arch: str, rng: np.random.Generator) -> None:
    """Whatever is shared or split, each row tile has a block, and states and sums have room."""
    for i in range(12):
        heads, key_heads = [(8, 8), (8, 1), (32, 4), (2, 2), (16, 1), (64, 1)][i % 6]
        what: dict[str, Any] = {
            "M": int(rng.choice([1, 30, 300, 2000, 9000])), "N": int(rng.choice([1, 100, 4000, 50_000])),
            "heads": heads, "key_heads": key_heads, "dims": (int(rng.choice([64, 192])), int(rng.choice([64, 128]))),
            "mask": MASKS[str(rng.choice([*MASKS]))][0], "deterministic": bool(rng.integers(2)),
        }  # fmt: skip
        p = plan(arch, **what)
        launched = [p.forward, *(kernel for _, kernel in p.gradients), *(x for fused in p.fused for x in fused.kernels)]
        for kernel in launched:
            schedule, tile = kernel.schedule, kernel.tile
            assert kernel.blocks > 0
            assert min(schedule.tiles, schedule.splits, schedule.head_group, schedule.group) > 0
            if not schedule.partial_bytes or tile is None:
                continue
            pairs = heads if dict(kernel.constants)["SKL_ROWS_ARE_QUERIES"] else key_heads
            each = 1 if schedule.totals else schedule.splits
            assert schedule.partial_slots == schedule.tiles * each
            slots = pairs * schedule.partial_slots
            assert schedule.arrivals_bytes >= 4 * slots * tile.warps
            out = dict(kernel.constants)["SKL_S_DIM" if kernel.task.side == "student" else "SKL_T_DIM"]
            assert schedule.partial_bytes - schedule.arrivals_bytes >= 4 * slots * tile.rows * out
            assert schedule.share_steps >= 0


def test_keys_are_split_so_that_a_gpu_is_done_soonest(rng: np.random.Generator) -> None:
    facts = facts_for_arch("sm_90")
    for _ in range(60):
        blocks, tiles, at_a_time = int(rng.integers(0, 140)), int(rng.integers(1, 3000)), int(rng.integers(1, 4))
        found = combine.splits(blocks, tiles, facts, at_a_time)
        most = combine.most_splits(tiles)
        assert most == (tiles // 8 if tiles >= 64 else 1)
        if blocks == 0 or blocks >= 0.8 * 132:
            assert found == 1
            continue

        tried = [count for count in range(1, most + 1) if count * blocks < 2 * 132 * at_a_time + blocks]
        times = {
            count: len(range(0, blocks * count, 132 * at_a_time)) * (len(range(0, tiles, count)) + 6) for count in tried
        }
        assert found == min(tried, key=times.__getitem__)  # the first, of equals


def test_tiles_of_the_last_rows_decide_over_the_tile() -> None:
    """Numbers that change from call to call do not: causal rows may be anywhere in front of the keys."""
    mask = MaskSpec(("causal",), (("q_offset", 0),))
    found = [
        combine.splits_of_last_rows(problem(16, 64 * 100, mask=each), 16, 64)
        for each in (mask, replace(mask, params=(("q_offset", -10_000),)), MaskSpec())
    ]
    assert found == [100 // 8] * 3
    window = MaskSpec(("window",), (("left", 64 * 20), ("right", 0), ("q_offset", 0)))
    assert combine.splits_of_last_rows(problem(16, 64 * 100, mask=window), 16, 64) == 1
    listed = MaskSpec(("blocks",), (), patterns.local(256, queries=16, keys=6400))
    assert combine.splits_of_last_rows(problem(16, 6400, mask=listed), 16, 64) == 1


def test_what_is_shared_in_turns_fits_the_cache() -> None:
    for factor, copies in itertools.product((2, 5), (1, 7)):
        steps = np.full(40, 20_000)
        size = shares.turn(steps, copies, factor * shares.MOST_CACHED, 132)
        # Of all that is read, what blocks are at together.
        part = size * 132 / (int(steps.sum()) * copies)
        assert part * factor * shares.MOST_CACHED == pytest.approx(shares.CACHED, rel=0.02)
    assert shares.turn(np.full(40, 1000), 1, shares.MOST_CACHED, 132) == 0
    assert shares.turn(np.full(40, 1000), 1, 1000 * shares.MOST_CACHED, 132) == 2 * shares.LEAST_STEPS

"""How calls are cut on the CPU: into blocks that fit a cache and keep all threads busy, and no smaller than that."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from test_planning import problem

from streamkl_cupy.numpy_backend import make_plan
from streamkl_cupy.numpy_backend import plan as planning
from streamkl_cupy.problem import MaskSpec
from streamkl_cupy.rules.masks import MASKS


def cut(M: int, N: int, threads: int = 1, **what: Any) -> Any:
    return make_plan(problem(M, N, dtypes=("float32", "float32"), **what), threads=threads)


def test_blocks_are_all_there_and_fit_a_cache(rng: np.random.Generator) -> None:
    for _ in range(80):
        M, N = (int(x) for x in np.exp2(rng.uniform(0, 14, 2)))
        batch, threads = int(rng.integers(1, 5)), int(rng.choice([1, 1, 3, 8, 64]))
        heads = int(rng.choice([1, 6, 12]))
        key_heads = int(rng.choice([x for x in (1, 2, 6, 12) if heads % x == 0]))
        dim = int(rng.choice([8, 64]))
        found = cut(M, N, threads, batch=batch, heads=heads, key_heads=key_heads, dims=(dim, dim))
        b, h, m, n = found.batches, found.heads, found.queries, found.keys
        assert found.blocks == -(-batch // b) * -(-heads // h) * -(-M // m)
        assert (1 <= m <= M, 1 <= n <= N, 1 <= h <= heads, 1 <= b <= batch) == (True,) * 4
        # Of several heads whole groups, and entries only of all heads.
        assert h == 1 or h % (heads // key_heads) == 0
        assert b == 1 or h == heads
        # Scores and keys of several heads at a time are no more than those of one large head.
        assert b * h == 1 or b * h * n * max(m, 2 * dim) <= planning.BLOCK_ELEMENTS
        assert m * n <= planning.BLOCK_ELEMENTS or n <= planning.KEY_TILE
        assert found.threads == max(min(threads, found.blocks), 1)
        # Threads have blocks, as far as heads and rows by sixteens allow.
        assert 2 * found.blocks > min(threads, batch * heads * -(-M // 16))
        assert found.scratch_bytes == 4 * sum(found.buffers.values())
        assert found.product == min(h, heads // key_heads) * m * n * dim


def test_blocks_are_no_shorter_than_threads_ask_for() -> None:
    assert (cut(9000, 9000, heads=1).queries, cut(9000, 9000, heads=1).keys) == (1024, 512)
    assert cut(100, 9000, heads=1).keys == 2048
    assert cut(300, 300, heads=1, dims=(8, 8)).keys == 300
    # Two blocks for each of four threads; by sixteens.
    assert cut(8192, 9000, 4, heads=1).queries == 1024
    assert cut(4100, 9000, 4, heads=1).queries == 528
    # Not below 256 rows for that, and below them only for one block to each.
    assert cut(1000, 9000, 3, heads=1).queries == 256
    assert cut(1000, 9000, 8, heads=1).queries == 128
    assert cut(100, 9000, 64, heads=1).queries == 16
    assert cut(1000, 9000, 8, heads=4, dims=(8, 8)).queries == 256
    # One head after the other where several would leave threads without.
    assert cut(64, 64, heads=12, batch=4, dims=(8, 8)).blocks == 1
    assert cut(64, 64, 6, heads=12, batch=4, dims=(8, 8)).blocks == 12


def test_buffers_are_as_large_as_what_a_block_needs() -> None:
    plain = cut(64, 96, heads=2, dims=(8, 24))
    b = plain.batches * plain.heads
    assert (plain.queries, plain.keys) == (64, 96)
    for side, dim in (("teacher", 8), ("student", 24)):
        assert plain.buffers[f"{side}_logits"] == b * 64 * 96
        assert plain.buffers[f"{side}_q"] == plain.buffers[f"{side}_qw"] == b * 64 * dim
        assert plain.buffers[f"{side}_k"] == b * 96 * dim
    assert plain.buffers["product"] == b * 96 * 24
    assert f"{plain.scratch_bytes / 2**20:.1f} MiB of scratch" in str(plain)
    assert str(cut(4096, 4096, 4)).endswith("for each of 4 threads")


def test_rows_under_a_mask_are_shorter() -> None:
    for name, part in MASKS.items():
        if part.tallest is None:
            continue
        params = tuple((param, 0) for param in part.params)
        spec = MaskSpec((name,), params)
        tallest = part.tallest(spec, 9000)
        assert cut(9000, 9000, heads=1, mask=spec).queries == min(tallest, 1024)


@pytest.mark.parametrize("threads", [1, 5])
def test_few_scores_are_worth_no_threads(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning.threads, "available", lambda: threads)
    assert planning.threads_for((1 << 19) - 1) == 1
    assert planning.threads_for(1 << 19) == threads
    assert planning.threads_for(1 << 30, (1 << 14) - 1) == 1
    assert planning.threads_for(1 << 19, 1 << 14) == threads


def test_heads_that_share_keys_stay_together() -> None:
    for heads, key_heads in ((12, 3), (12, 12), (12, 1)):
        assert planning.head_group(problem(heads=heads, key_heads=key_heads)) == heads // key_heads
    one, two = problem(heads=12, key_heads=6), problem(heads=12, key_heads=4)
    mixed = replace(one, distributions=(one.distributions[0], two.distributions[1]))
    assert planning.head_group(mixed) == 6

"""What plans of sharded calls say that is moved and held, against counting bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_parallel import Counting

from streamkl_cupy import parallel
from streamkl_cupy.parallel import LocalWorld, shard
from streamkl_cupy.rules.divergences import DIVERGENCES

Array = np.ndarray[Any, Any]
B, H, H_t, H_s, M, N, D_t, D_s = 2, 4, 2, 1, 24, 36, 8, 6
WRT = ("student_q", "student_k", "teacher_k")


def full(rng: np.random.Generator, dtype: str = "float16") -> list[Array]:
    shapes = (B, H, M, D_t), (B, H_t, N, D_t), (B, H, M, D_s), (B, H_s, N, D_s)
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def stated(arrays: list[Array], size: int, **how: Any) -> Any:
    return parallel.plan(*(shard(x, 2, 0, size) for x in arrays), size=size, wrt=WRT, causal=True, **how)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("strategy", ["all_gather", "all_gather_queries", "p2p", "a2a"])
def test_forward_and_backward_move_what_is_said(strategy: str, size: int, rng: np.random.Generator) -> None:
    arrays = full(rng)
    if strategy == "a2a":  # whose heads go to ranks
        arrays = [np.concatenate([x] * 6, 1)[:, : 2 * size] for x in arrays]
    said = stated(arrays, size, strategy=strategy).traffic

    def rank_of(rank: Any) -> tuple[int, int]:
        mine = [shard(x, 2, rank.rank, size) for x in arrays]
        count = Counting(rank)
        how: dict[str, Any] = {"group": rank, "strategy": strategy, "causal": True}
        rows = parallel.attention_kl_forward(*mine, **how)
        forward = count.bytes
        if strategy != "all_gather":  # which has kept what it has gathered where a step goes on
            parallel.attention_kl_value_and_grad(*mine, wrt=WRT, reduction="sum", **how)
        assert rows.kl.shape == mine[0].shape[:3]
        return forward, count.bytes - 2 * forward

    moved = LocalWorld(size).run(rank_of)
    assert max(forward for forward, _ in moved) == said.forward
    if strategy != "all_gather":
        assert max(backward for _, backward in moved) == said.backward


@pytest.mark.parametrize("size", [2, 3])
def test_what_is_held_is_said(size: int, rng: np.random.Generator) -> None:
    arrays, others = full(rng), size - 1
    # Of a shard, in bytes: queries and keys as they are, gradients of those that are wanted in float32, states of rows.
    queries, keys = 2 * B * H * M * (D_t + D_s) // size, 2 * B * N * (H_t * D_t + H_s * D_s) // size
    of_queries, of_keys = 4 * B * H * M * D_s // size, 4 * B * N * (H_t * D_t + H_s * D_s) // size
    states = 4 * DIVERGENCES["kl"].state_floats * B * H * M // size
    held = {
        # Keys of others, and sums of keys that are sent and that come, beside one's own; queries' as calls go on.
        "early": (others * keys, (2 * others + 1) * of_keys + (2 if size == 2 else 3) * of_queries),
        # Of float32 all keys at once, and sums of them before and after they are exchanged.
        "all_gather": (size * 2 * keys, 2 * size * of_keys),
        "all_gather_queries": (size * (queries + 2 * states), 2 * size * of_queries),
        # The keys at hand and those that come.
        "p2p": (2 * keys, 3 * of_keys + of_queries),
    }
    for name, (gathered, sums) in held.items():
        how: dict[str, Any] = {"strategy": "all_gather" if name == "early" else name}
        given = full(rng, "float32") if name == "all_gather" else arrays
        said = stated(given, size, **how).traffic
        assert (said.gathered, said.sums, said.workspace) == (gathered, sums, 0), name
    split = stated(full(rng)[:1] * 4, size, strategy="all_gather", head_groups=2).traffic
    whole = stated(full(rng)[:1] * 4, size, strategy="all_gather").traffic
    assert (split.gathered, split.sums) == (whole.gathered, whole.sums // 2)


def test_heads_that_change_places_are_counted(rng: np.random.Generator) -> None:
    size = 2
    arrays = [np.concatenate([x, x], 1)[:, :4] for x in full(rng)]
    heads = [x.shape[1] for x in arrays]
    said = stated(arrays, size, strategy="a2a").traffic
    parts = [x.nbytes // size for x in arrays]
    rows = B * heads[0] * M // size
    wanted = parts[1] + parts[2] + parts[3]
    # Half of each shard goes away and as much comes; of rows three float32 come back, and one goes for the backward.
    assert said.forward == (sum(parts) + 12 * rows) // 2
    assert said.backward == (wanted + 4 * rows) // 2
    assert (said.gathered, said.sums) == (2 * sum(parts), 2 * wanted)


def test_a_plan_of_ranks_in_words(rng: np.random.Generator) -> None:
    arrays = full(rng)
    one = parallel.plan(*arrays, size=1, causal=True)
    assert (one.traffic.forward, one.traffic.backward, one.traffic.gathered, one.traffic.sums) == (0, 0, 0, 0)
    two = stated(arrays, 2, strategy="all_gather")
    text = str(two)
    moved = two.traffic
    assert text.startswith("rank 0 of 2: all_gather (asked for)\n")
    assert f"receives {moved.forward:,} B for rows, {moved.backward:,} B for gradients of {', '.join(WRT)}" in text
    assert f"holds {moved.gathered:,} B of what is gathered, {moved.sums:,} B of gradients in float32" in text
    assert "workspaces" not in text
    assert "rows 0 to 6 x keys 9 to 18\n  rows 18 to 24 x keys 9 to 27" in text
    assert "rows 18 to 24 x keys 0 to 9 and 27 to 36" in text
    assert ", keys in 2 steps" in str(stated(arrays[:1] * 4, 2, strategy="all_gather", head_groups=2))
    assert "steps" not in text

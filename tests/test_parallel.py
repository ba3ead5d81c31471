"""Sharded calls against one call: simulated ranks over NumPy, ranks of torch over gloo, JAX with several devices."""

from __future__ import annotations

import collections
import doctest
import itertools
import math
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import streamkl_cupy
from streamkl_cupy import parallel, patterns
from streamkl_cupy.compiler import nvrtc
from streamkl_cupy.kernels import join_states
from streamkl_cupy.kernels.gpus import GPUS
from streamkl_cupy.ops import ATTENTION_KL
from streamkl_cupy.options import parse
from streamkl_cupy.parallel import (
    KLState,
    LocalWorld,
    Ownership,
    finish_kl_state,
    merge_kl_states,
    positions,
    setup,
    shard,
    unshard,
)
from streamkl_cupy.parallel import job as jobs
from streamkl_cupy.parallel.blocks import Whole
from streamkl_cupy.parallel.communicators import NcclRanks
from streamkl_cupy.parallel.engine import Launching
from streamkl_cupy.parallel.libraries import library_named
from streamkl_cupy.problem import INPUT_NAMES
from streamkl_cupy.rules.divergences import DIVERGENCES

STRATEGIES = ("all_gather", "a2a", "all_gather_queries", "p2p")
PROGRAMS = Path(__file__).with_name("parallel_programs.py")
OPEN_MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
"""Without these it starts nothing as root, nor more processes than there are cores; the last two are of 4 and of 5."""
Array = np.ndarray[Any, Any]


def arrays(rng: np.random.Generator, tokens: int, heads: int = 4, key_heads: int = 2, batch: int = 2) -> list[Array]:
    """Float64 operands whose keys share a part, as keys do, with one that nobody may read."""
    shapes = ((heads, 6), (key_heads, 6), (heads, 4), (key_heads, 4))
    found = [rng.normal(size=(batch, n, tokens, d)) for n, d in shapes]
    for keys in found[1::2]:
        keys += 3 * rng.normal(size=(batch, keys.shape[1], 1, keys.shape[3]))
    return found


def check(full: list[Array], grad: Array, size: int, axis: int = 2, **options: Any) -> None:
    """Rows, all four gradients, sums and means of all ranks, against one call."""
    how = {name: options.pop(name) for name in ("strategy", "ownership", "head_groups") if name in options}
    ownership = how.get("ownership", "zigzag")
    rows = streamkl_cupy.attention_kl_forward(*full, **options)
    grads = streamkl_cupy.attention_kl_backward(grad, *full, saved=rows, wrt=INPUT_NAMES, **options)
    mean = streamkl_cupy.attention_kl(*full, reduction="mean", row_weight=np.abs(grad), **options)

    def rank_of(rank: Any) -> Any:
        mine = [shard(x, axis, rank.rank, size, ownership) for x in full]
        part = shard(grad, axis, rank.rank, size, ownership)
        found = parallel.attention_kl_forward(*mine, group=rank, **how, **options)
        back = parallel.attention_kl_backward(part, *mine, saved=found, wrt=INPUT_NAMES, group=rank, **how, **options)
        loss = {"reduction": "mean", "row_weight": np.abs(part), "group": rank}
        return found, back, parallel.attention_kl(*mine, **loss, **how, **options)

    for rank, (found, back, total) in enumerate(LocalWorld(size).run(rank_of)):
        pairs = [pair for pair in zip((*found, *back), (*rows, *grads), strict=True) if pair[1] is not None]
        for x, whole in pairs:
            np.testing.assert_allclose(x, shard(whole, axis, rank, size, ownership), rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(total, mean, rtol=1e-12)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_together_are_one_call(strategy: str, rng: np.random.Generator) -> None:
    for size in map(int, rng.choice(np.arange(1, 9), 4, replace=False)):
        key_heads = size if strategy == "a2a" else 2
        heads = 2 * key_heads
        tokens = int(rng.integers(size, 50))  # chunks of any length, some of them empty
        full = arrays(rng, tokens, heads, key_heads, batch=1)
        seen = rng.random((1, tokens)) < 0.9
        for keys in full[1::2]:
            keys[:, :, ~seen[0]] = np.nan
        grad = rng.normal(size=full[0].shape[:-1])
        options: dict[str, Any] = {"key_mask": seen, "teacher_scale": 0.4, "strategy": strategy}
        diagonal = {"causal": True, "q_offset": int(rng.integers(-5, 2))}
        check(full, grad, size, **options, **diagonal)
        check(
            full,
            grad,
            size,
            ownership="contiguous",
            head_groups=2 if strategy == "all_gather" and size > 1 else None,
            **options,
        )
        order = rng.permutation(tokens)
        where = [np.sort(x) for x in np.array_split(order, size)]
        check(full, grad, size, ownership=where, **options, **diagonal)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shards_that_are_empty_or_see_nothing(strategy: str, rng: np.random.Generator) -> None:
    """Fewer positions than chunks, lengths that chunks do not divide, rows without keys on every rank or on some, ranks
    with rows alone or with keys alone."""
    key_heads = 4
    for tokens, options in (
        (3, {"causal": True}),
        (13, {}),
        (13, {"causal": True, "q_offset": -5}),
        (8, {"causal": True, "q_offset": -8}),
        (13, {"causal": True, "ownership": "contiguous"}),
        (9, {"causal": True, "ownership": [[], range(3, 9), range(3), []]}),
    ):
        full = arrays(rng, tokens, 4, key_heads, batch=1)
        grad = rng.normal(size=full[0].shape[:-1])
        check(full, grad, 4, strategy=strategy, **options)
    rows, keys = [[0, 1], [], [2, 3, 4], [5]], [[], [0, 1, 2, 3, 4, 5], [], [6]]
    full = [x[:, :, : 6 + i % 2] for i, x in enumerate(arrays(rng, 7, 4, key_heads, batch=1))]
    whole = streamkl_cupy.attention_kl_forward(*full, causal=True)
    grads = streamkl_cupy.attention_kl_backward(whole.kl, *full, saved=whole, wrt=INPUT_NAMES, causal=True)

    def rank_of(rank: Any) -> None:
        mine = [x[:, :, [*(keys, rows)[i % 2 == 0][rank.rank]]] for i, x in enumerate(full)]
        how = {"group": rank, "strategy": strategy, "ownership": Ownership(rows, keys), "causal": True}
        found = parallel.attention_kl_forward(*mine, **how)
        back = parallel.attention_kl_backward(found.kl, *mine, saved=found, wrt=INPUT_NAMES, **how)
        np.testing.assert_allclose(found.kl, whole.kl[..., rows[rank.rank]], rtol=1e-10, atol=1e-12)
        for i, (x, y) in enumerate(zip(back, grads, strict=True)):
            wanted = y[:, :, [*(keys, rows)[i % 2 == 0][rank.rank]]]
            np.testing.assert_allclose(x, wanted, rtol=1e-10, atol=1e-12)

    LocalWorld(4).run(rank_of)


class Counting:
    """A rank's bytes that come from others."""

    def __init__(self, rank: Any) -> None:
        self.bytes = 0
        for name in ("all_gather", "reduce_scatter", "all_to_all", "shift", "post"):
            setattr(rank, name, self.counted(name, getattr(rank, name), rank.size))

    def counted(self, name: str, move: Any, size: int) -> Any:
        def moved(*given: Any) -> Any:
            if name == "post":
                come = sum(x.nbytes for xs in given[1].values() for x in xs)
            elif name == "shift":
                come = sum(x.nbytes for x in given[0])
            else:  # of one part from each of the others
                come = given[0].nbytes * (size - 1) // (1 if name == "all_gather" else size)
            self.bytes += come
            return move(*given)

        return moved


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_plan_says_what_moves(strategy: str, rng: np.random.Generator) -> None:
    """The bytes that come to the rank to which most come, of shards as large as one another."""
    size, wrt = 4, ("student_q", "student_k", "teacher_k")
    for dtype, causal in ((np.float16, True), (np.float32, False)):
        full = [x.astype(dtype) for x in arrays(rng, 32, 8, 4)]

        def rank_of(rank: Any, full: Any = full, causal: bool = causal) -> Any:
            mine = [shard(x, 2, rank.rank, size) for x in full]
            how = {"strategy": strategy, "causal": causal}
            said = parallel.plan(*mine, size=size, rank=rank.rank, wrt=wrt, **how).traffic
            count = Counting(rank)
            found = parallel.attention_kl_value_and_grad(*mine, group=rank, wrt=wrt, reduction="sum", **how)
            return said, count.bytes, found

        plans, moved, _ = zip(*LocalWorld(size).run(rank_of))
        assert {said.forward + said.backward for said in plans} == {max(moved)}


def test_few_rows_go_to_the_keys(rng: np.random.Generator) -> None:
    """Where queries and states of rows are fewer bytes than keys, and states merge."""
    q, k = rng.normal(size=(2, 4, 8)), rng.normal(size=(2, 64, 8))
    for options, strategy in (({}, "all_gather_queries"), ({"divergence": "jsd"}, "all_gather")):
        said = parallel.plan(*(x[:, ::2] for x in (q, k, q, k)), size=2, **options)
        assert said.strategy == strategy
        assert "bytes to receive" in said.why

    def rank_of(rank: Any) -> Any:
        mine = [shard(x, 1, rank.rank, 2) for x in (q, k, q + 1, k)]
        return parallel.attention_kl(*mine, group=rank)

    wanted = streamkl_cupy.attention_kl(q, k, q + 1, k)
    np.testing.assert_allclose(parallel.unshard(LocalWorld(2).run(rank_of), 1), wanted, rtol=1e-10, atol=1e-12)
    assert parallel.plan(q, q, q, q, size=2).strategy == "all_gather"


def masks(rng: np.random.Generator, tokens: int) -> dict[str, dict[str, Any]]:
    sizes = np.sort(rng.integers(0, tokens, 5))
    bounds = np.array([0, *sizes], np.int32)
    pattern = patterns.local(50, queries=tokens, block=16, causal=True) | patterns.strided(
        4, [0, 1, 2, 3], queries=tokens, block=16
    )
    lengths = {"key_lengths": rng.integers(0, tokens, 2).astype(np.int32)}
    return {
        "window": {"causal": True, "window": (20, 0)},
        "two sides, lengths": {
            "window": (9, 30),
            "query_lengths": rng.integers(0, tokens, 2).astype(np.int32),
            **lengths,
        },
        "masks": {
            "causal": True,
            "key_mask": rng.random((2, tokens)) < 0.7,
            "query_mask": rng.random((2, tokens)) < 0.7,
        },
        "pattern": {"causal": True, "block_mask": pattern},
        "packed": {"causal": True, "cu_seqlens_q": bounds, "cu_seqlens_k": bounds},
        "packed, unlike": {"window": (30, 3), "cu_seqlens_q": bounds, "cu_seqlens_k": np.sort(bounds // 2)},
    }


@pytest.mark.parametrize("name", ["window", "two sides, lengths", "masks", "pattern", "packed", "packed, unlike"])
def test_masks_are_in_positions_of_the_whole(name: str, rng: np.random.Generator) -> None:
    tokens = 192
    options = masks(rng, tokens)[name]
    packed = name.startswith("packed")
    full = arrays(rng, tokens, 4, 4, batch=1 if packed else 2)
    if packed:
        full = [x[0].swapaxes(0, 1) for x in full]
    grad = rng.normal(size=full[0].shape[:-1])
    ownership = "contiguous" if name == "pattern" else str(rng.choice(["zigzag", "contiguous"]))
    for strategy in STRATEGIES:
        size = int(rng.choice([2, 4]))
        check(full, grad, size, 0 if packed else 2, strategy=strategy, ownership=ownership, **options)


def test_every_pair_that_is_visible_is_in_one_call(rng: np.random.Generator) -> None:
    """Calls in the numbers of shards, of rows and keys in whatever order: a window to the left goes run by run."""
    for _ in range(60):
        rows, keys, size = (int(x) for x in rng.integers(1, (40, 40, 5)))
        where = [[np.sort(x) for x in np.array_split(rng.permutation(n), size)] for n in (rows, keys)]
        if rng.random() < 0.5:
            where = [positions(n, size, str(rng.choice(["zigzag", "contiguous"]))) for n in (rows, keys)]
        owned = Ownership(*where)
        given = {
            "causal": bool(rng.random() < 0.6),
            "q_offset": int(rng.integers(-20, 20)),
            "window": [None, (-1, 3), (int(rng.integers(5)), 2)][rng.integers(3)],
        }
        offset = given["q_offset"] if given["causal"] or given["window"] else given.pop("q_offset")
        options, _ = parse(ATTENTION_KL, given)
        whole = Whole(rows, keys, options, {}, {})
        right = 0 if given["causal"] else (given["window"] or (-1, -1))[1]
        left = (given["window"] or (-1, -1))[0]
        far = np.arange(keys) - np.arange(rows)[:, None] - offset
        wanted = np.full((rows, keys), True) if right < 0 else far <= right
        wanted &= (left < 0) | (far >= -left)
        count = np.zeros((rows, keys), int)
        for q, of_q in zip(where[0], owned.rows):
            for k, of_k in zip(where[1], owned.keys):
                for row_part, key_part, call in whole.cut(of_q, of_k):
                    i, j = np.arange(rows)[q][row_part], np.arange(keys)[k][key_part]
                    distance = np.arange(len(j)) - np.arange(len(i))[:, None] - call.get("q_offset", 0)
                    seen = np.full(distance.shape, True)
                    reach = 0 if call.get("causal") else (call.get("window") or (-1, -1))[1]
                    if "q_offset" in call:
                        seen = distance <= reach if reach >= 0 else seen
                        seen &= (left < 0) | (distance >= -left)
                    np.add.at(count, np.ix_(i, j), seen.astype(int))
        np.testing.assert_array_equal(count, wanted)


def test_calls_of_shards_are_few() -> None:
    """Own keys are one call whose diagonal is that of the shard, those of another rank one without a diagonal."""
    options, _ = parse(ATTENTION_KL, {"causal": True})
    whole, owned = Whole(64, 64, options, {}, {}), Ownership(positions(64, 4)).rows
    for q, k in itertools.product(range(4), repeat=2):
        ((rows, keys, call),) = whole.cut(owned[q], owned[k])
        assert call == ({"causal": True, "q_offset": 0} if q == k else {})
        assert (rows, keys) == (slice(8 if q < k else 0, 16), slice(0, 8 if q > k else 16))


@pytest.mark.parametrize("divergence", setup.MERGED)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_kernel_that_joins_rows_compiles(arch: str, divergence: str) -> None:
    pytest.importorskip("cupy", reason="needs CuPy and the NVRTC it brings")
    kernel = join_states.plan(DIVERGENCES[divergence], GPUS[arch])
    built = nvrtc.build(kernel.text, kernel.arch)
    assert (built.spill_bytes, built.notes) == (0, ())


@pytest.mark.parametrize("strategy, k", [("all_gather_queries", 1), ("all_gather", 0), ("a2a", 0), ("a2a", 1)])
def test_gradients_that_are_not_summed_are_of_one_call(strategy: str, k: int) -> None:
    """They leave kernels in the type of the input: of two calls with the same rows or keys each would round a part."""
    x = np.empty((1, 4, 16, 8), np.float32)
    for ownership, options in itertools.product(("zigzag", "contiguous"), ({"causal": True}, {}, {"window": (30, 0)})):
        for rank in range(2):
            call = setup.plain("plan", options)
            job, _ = setup.planned(rank, 2, (x, x, x, x), call, setup.Asked(strategy, ownership))
            parts = sorted(
                (x.start, x.stop) for x in (getattr(p, ("rows", "keys")[k]) for p, *_ in job.pieces(rank, x))
            )
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(parts))


def test_keys_that_nobody_sees_do_not_travel(rng: np.random.Generator) -> None:
    """Of contiguous shards under a window a rank sends its last keys to the next one."""
    full = arrays(rng, 64, batch=1)
    moved: list[Any] = []

    def rank_of(rank: Any) -> Any:
        post = rank.post

        def noted(sent: Any, room: Any) -> Any:
            moved.extend((rank.rank, to, x.shape[2]) for to, xs in sent.items() for x in xs)
            return post(sent, room)

        rank.post = noted
        mine = [shard(x, 2, rank.rank, 4, "contiguous") for x in full]
        return parallel.attention_kl(*mine, group=rank, ownership="contiguous", causal=True, window=(5, 0))

    found = LocalWorld(4).run(rank_of)
    assert sorted(moved) == sorted(2 * [(rank, rank + 1, 5) for rank in range(3)])
    wanted = streamkl_cupy.attention_kl(*full, causal=True, window=(5, 0))
    np.testing.assert_allclose(np.concatenate(found, 2), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("halves", [False, True])
def test_what_travels_does_so_beside_what_needs_nobody(
    halves: bool, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    """Keys come while own ones are computed, of many rows beside the earlier half; gradients go home meanwhile."""
    full, here = arrays(rng, 37, batch=1), threading.local()
    monkeypatch.setattr(jobs, "LEAST", 1 if halves else 1 << 17)
    for name in ("forward", "backward"):
        computed = getattr(Launching, name)
        monkeypatch.setattr(Launching, name, lambda *given, of=computed: here.seen.append("call") or of(*given))

    def rank_of(rank: Any) -> tuple[list[str], Any, Any]:
        here.seen, post = [], rank.post

        def posted(sent: Any, room: Any) -> Any:
            here.seen.append("post")
            start = post(sent, room)

            def started() -> Any:
                here.seen.append("start")
                wait = start()
                return lambda: here.seen.append("wait") or wait()

            return started

        rank.post = posted
        mine = [shard(x, 2, rank.rank, 2) for x in full]
        _, grads = parallel.attention_kl_value_and_grad(*mine, group=rank, causal=True)
        return here.seen, parallel.attention_kl(*mine, group=rank, causal=True), grads.student_k

    forward = ["post", "call", "start", *["call"] * halves, "wait", "call"]
    seen, rows, grads = zip(*LocalWorld(2).run(rank_of))
    for found in seen:
        assert found == [*forward, "call", "post", "start", "call", "wait", *forward]
    np.testing.assert_allclose(unshard(rows, 2), streamkl_cupy.attention_kl(*full, causal=True), rtol=1e-10, atol=1e-12)
    wanted = streamkl_cupy.attention_kl_value_and_grad(*full, causal=True)[1].student_k
    np.testing.assert_allclose(unshard(grads, 2), wanted, rtol=1e-10, atol=1e-12)


class ToldOfBytes:
    """What `cupyx.distributed.NCCLBackend` does, over queues of threads."""

    def __init__(self, queues: dict[tuple[int, int], queue.Queue[Array]], rank: int, size: int) -> None:
        self._queues, self.rank, self._n_devices = queues, rank, size

    def send(self, x: Array, to: int) -> None:
        assert x.dtype == np.uint8
        self._queues[self.rank, to].put(x.copy())

    def recv(self, x: Array, source: int) -> None:
        assert x.dtype == np.uint8
        x[...] = self._queues[source, self.rank].get(timeout=60)

    def all_to_all(self, x: Array, out: Array) -> None:
        for i in range(self._n_devices):
            self.send(x[i], i)
        for i in range(self._n_devices):
            self.recv(out[i], i)

    def all_gather(self, x: Array, out: Array, count: int) -> None:
        self.all_to_all(np.stack([x] * self._n_devices), out.reshape(-1, count))

    def reduce_scatter(self, x: Array, out: Array, count: int) -> None:
        found = np.empty((self._n_devices, count), x.dtype)
        self.all_to_all(x.view("uint8").reshape(self._n_devices, -1), found.view("uint8"))
        out[...] = found.sum(0)

    def all_reduce(self, x: Array, out: Array) -> None:
        self.reduce_scatter(np.concatenate([x] * self._n_devices), out, x.size)


def test_ranks_of_cupyx_move_what_others_do(rng: np.random.Generator) -> None:
    """The adapter beside ranks that are threads."""
    queues: dict[tuple[int, int], queue.Queue[Array]] = collections.defaultdict(queue.Queue)
    x = {kind: [rng.integers(-90, 90, (3, 4, 5)).astype(kind) for _ in range(3)] for kind in ("f2", "u2", "f4", "i8")}
    nccl = SimpleNamespace(groupStart=lambda: None, groupEnd=lambda: None)
    cupy = SimpleNamespace(
        ascontiguousarray=np.ascontiguousarray,
        asarray=np.asarray,
        empty=np.empty,
        empty_like=np.empty_like,
        cuda=SimpleNamespace(nccl=nccl),
    )

    def rank_of(rank: Any) -> None:
        ours = NcclRanks(ToldOfBytes(queues, rank.rank, 3), cupy)
        for kind, mine in ((kind, xs[rank.rank]) for kind, xs in x.items()):
            across = mine.swapaxes(1, 2)  # which is not contiguous
            pairs = [
                (ours.all_gather(across)(), rank.all_gather(across)()),
                (ours.all_to_all(mine), rank.all_to_all(mine)),
            ]
            if kind == "f4":
                pairs += [(ours.all_reduce(mine), rank.all_reduce(mine))]
                pairs += [(ours.reduce_scatter(mine)(), rank.reduce_scatter(mine)())]
            pairs += zip(ours.shift((across, mine))(), rank.shift((across, mine))())
            for found, wanted in pairs:
                assert found.dtype == wanted.dtype
                np.testing.assert_array_equal(found, wanted)
        assert ours.exchange([rank.rank, 7], None) == [[i, 7] for i in range(3)]
        with pytest.raises(TypeError, match=r"x is ndarray; .* moves CuPy arrays"):
            ours.check("x", mine)

    LocalWorld(3).run(rank_of)


def test_calls_alike_agree_once(rng: np.random.Generator) -> None:
    """What ranks have agreed on is kept by how a call looks, and what looks otherwise is checked again."""
    full = arrays(rng, 24, batch=1)

    def rank_of(rank: Any) -> None:
        exchanges: list[Any] = []
        exchange = rank.exchange

        def noted(*given: Any) -> Any:
            exchanges.append(given)
            return exchange(*given)

        rank.exchange = noted
        mine = [shard(x, 2, rank.rank, 3) for x in full]
        first, second = (parallel.attention_kl(*mine, group=rank, causal=True) for _ in range(2))
        np.testing.assert_array_equal(first, second)
        assert len(exchanges) == 1
        with pytest.raises(TypeError, match="causal"):
            parallel.attention_kl(*mine, group=rank, causal=1)
        parallel.attention_kl(*(x.astype(np.float32) for x in mine), group=rank, causal=True)
        assert [len(exchanges), len(rank.jobs)] == [3, 2]

    LocalWorld(3).run(rank_of)


@pytest.mark.parametrize("layout, axis", [("bhnd", 1), ("bnhd", 0), ("bhnd", 0)])
def test_layouts_and_divergences(layout: str, axis: int, rng: np.random.Generator) -> None:
    full = [x[0] for x in arrays(rng, 24, batch=1)]
    if layout == "bnhd":
        full = [x.swapaxes(0, 1) for x in full]
    elif axis == 0:
        full = [x[0] for x in full]
    grad = rng.normal(size=full[0].shape[:-1])
    for divergence in ("kl", "jsd"):
        check(full, grad, 3, axis, causal=True, layout=layout, divergence=divergence, strategy="all_gather")


def test_ranks_of_torch() -> None:
    pytest.importorskip("torch")
    run_program("torch", free_port())


@pytest.mark.gpu
def test_ranks_of_nccl() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run_program("nccl", free_port())


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def test_devices_of_jax() -> None:
    pytest.importorskip("jax")
    run_program("jax")


def test_ranks_of_mpi() -> None:
    pytest.importorskip("mpi4py")
    if (start := shutil.which("mpiexec")) is None:
        pytest.skip("needs mpiexec, which is not installed")
    run_program("mpi", before=(start, "-n", "3"))


def run_program(kind: str, *more: str, before: tuple[str, ...] = ()) -> None:
    seed = str(np.random.default_rng().integers(10**6))
    command = [*before, sys.executable, "-X", "faulthandler", str(PROGRAMS), kind, seed, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ | OPEN_MPI)
    assert done.returncode == 0, f"seed {seed}:\n{done.stdout}{done.stderr}"
    assert "all right" in done.stdout


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_ranks_on_one_gpu(dtype: str, rng: np.random.Generator) -> None:
    """Kernels that leave states and wide gradients, against one call."""
    cupy = pytest.importorskip("cupy")
    shapes = ((16, 64), (8, 64), (16, 128), (8, 128))
    full = [cupy.asarray(rng.normal(size=(1, n, 777, d)).astype(dtype)) for n, d in shapes]
    rows = streamkl_cupy.attention_kl_forward(*full, causal=True)
    grad = cupy.asarray(rng.random(rows.kl.shape).astype(np.float32))
    grads = streamkl_cupy.attention_kl_backward(grad, *full, saved=rows, wrt=INPUT_NAMES, causal=True)
    for strategy in STRATEGIES:

        def rank_of(rank: Any, strategy: str = strategy) -> Any:
            mine = [shard(x, 2, rank.rank, rank.size) for x in full]
            how = {"causal": True, "strategy": strategy, "group": rank}
            found = parallel.attention_kl_forward(*mine, **how)
            part = shard(grad, 2, rank.rank, rank.size)
            return found, parallel.attention_kl_backward(part, *mine, saved=found, wrt=INPUT_NAMES, **how)

        size = int(rng.choice([2, 4, 8]))
        for rank, (found, back) in enumerate(LocalWorld(size).run(rank_of)):
            kl = shard(rows.kl, 2, rank, size)
            assert float(cupy.abs(found.kl - kl).max()) <= 2e-6 * (1 + float(kl.max()))
            for x, whole in zip(back, grads, strict=True):
                wanted = shard(whole, 2, rank, size).astype("float64")
                apart = cupy.linalg.norm(x.astype("float64") - wanted) / cupy.linalg.norm(wanted)
                assert x.dtype == whole.dtype
                assert float(apart) <= (1e-3 if dtype == "float16" else 1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_torch_programs_are_interrupted(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    full = [torch.from_numpy(x[0].astype(np.float32)) for x in arrays(rng, 24, batch=1)]
    full[2].requires_grad_()

    def loss(*inputs: Any) -> Any:
        return parallel.attention_kl(*inputs, causal=True, reduction="mean", group=rank) * 2

    def run(given: Any) -> Any:
        nonlocal rank
        rank = given
        value = torch.compile(loss, backend="eager")(*full)
        return value, torch.autograd.grad(value, full[2])[0]

    rank: Any = None
    ((value, grad),) = LocalWorld(1).run(run)
    wanted = streamkl_cupy.attention_kl(*full, causal=True, reduction="mean") * 2
    torch.testing.assert_close(value, wanted, rtol=0, atol=0)
    torch.testing.assert_close(grad, torch.autograd.grad(wanted, full[2])[0], rtol=1e-6, atol=1e-9)


# States of rows


def rows_of(logits: Any) -> tuple[Array, Array]:
    """A query and keys whose products are these logits."""
    return np.ones((1, 1)), np.asarray(logits, np.float64)[:, None]


def states(teacher: Any, student: Any, cuts: tuple[int, ...], dtype: Any = np.float64) -> list[KLState]:
    (q_t, k_t), (q_s, k_s) = (tuple(x.astype(dtype) for x in rows_of(logits)) for logits in (teacher, student))
    ends = [0, *cuts, len(k_t)]
    return [parallel.attention_kl_state(q_t, k_t[a:b], q_s, k_s[a:b]) for a, b in itertools.pairwise(ends)]


def test_states_by_hand() -> None:
    parts = states(np.log([4.0, 3, 2, 1]), np.zeros(4), (2,))
    halves = [float(finish_kl_state(x).kl[0]) for x in parts]
    np.testing.assert_allclose(halves, [0.010239, 0.056633], atol=5e-7)
    kl, teacher_lse, student_lse = finish_kl_state(merge_kl_states(*parts))
    np.testing.assert_allclose(
        [kl[0], teacher_lse[0], student_lse[0]], [0.106440, math.log(10), math.log(4)], atol=5e-7
    )


@pytest.mark.parametrize(
    "teacher, student, wanted",
    [
        ([0.0, -200.0], [-200.0, 0.0], 200.0),  # the mass of each lies with another rank
        ([1e4, -1e4], [1e4, -1e4], 0.0),
        ([-1e4, 1e4], [1e4, 1e4], math.log(2)),
    ],
)
def test_states_far_apart(teacher: list[float], student: list[float], wanted: float) -> None:
    for dtype in (np.float32, np.float64):
        parts = states(teacher, student, (1,), dtype)
        for order in (parts, parts[::-1]):
            found = finish_kl_state(merge_kl_states(*order))
            np.testing.assert_allclose(found.kl, [wanted], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shift, spread, noise", [(0, 1, 1), (0, 1, 1e-3), (40, 3, 1)])
def test_merged_states_are_as_exact_as_one_call(
    shift: float, spread: float, noise: float, rng: np.random.Generator
) -> None:
    """Merging ordinary results would lose what a log-sum-exp near `shift` cannot tell."""
    teacher = (rng.normal(size=4096) * spread + shift).astype(np.float32)
    student = (teacher + noise * rng.normal(size=4096) - shift / 2).astype(np.float32)
    inputs = [x.astype(np.float32) for y in (teacher, student) for x in rows_of(y)]
    exact = float(streamkl_cupy.attention_kl(*inputs)[0])
    merged = merge_kl_states(*states(teacher, student, tuple(range(512, 4096, 512)), np.float32))
    assert merged.teacher_sum.dtype == np.float32
    assert abs(float(finish_kl_state(merged).kl[0]) - exact) <= 2e-6 * (1 + exact)


def test_a_sink_is_the_state_of_one_key(rng: np.random.Generator) -> None:
    """However many parts the keys are in, it counts once."""
    full, z_t, z_s = [x[0] for x in arrays(rng, 12, batch=1)], *rng.normal(size=(2, 4))
    q_t, k_t, q_s, k_s = full
    parts = [parallel.attention_kl_state(q_t, k_t[:, a:b], q_s, k_s[:, a:b]) for a, b in ((0, 5), (5, 12))]
    ones = np.ones(q_t.shape[:-1])
    sink = KLState(*(z[:, None] / math.log(2) * ones for z in (z_t, z_s)), ones, ones, 0 * ones)
    wanted = streamkl_cupy.attention_kl_forward(*full, teacher_sink_logits=z_t, student_sink_logits=z_s)
    for x, y in zip(finish_kl_state(merge_kl_states(*parts, sink)), wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10)


def test_states_that_are_not_built() -> None:
    inputs = [x for _ in range(2) for x in rows_of([1.0, 2.0])]
    with pytest.raises(NotImplementedError, match="divergence='reverse_kl' has no states"):
        parallel.attention_kl_state(*inputs, divergence="reverse_kl")
    for option in ("student_sink_logits", "return_entropy"):
        with pytest.raises(NotImplementedError, match=f"{option} is not built for"):
            parallel.attention_kl_state(*inputs, **{option: np.zeros(1)})


def test_empty_states_and_nan() -> None:
    some = states([1.0, 2.0], [0.0, 1.0], ())[0]
    none = parallel.attention_kl_state(*(x for _ in range(2) for x in rows_of([5.0])), causal=True, q_offset=-1)
    for order in ((some, none), (none, some)):
        for x, y in zip(finish_kl_state(merge_kl_states(*order)), finish_kl_state(some), strict=True):
            np.testing.assert_array_equal(x, y)
    kl, teacher_lse, student_lse = finish_kl_state(merge_kl_states(none, none))
    assert (kl[0], teacher_lse[0], student_lse[0]) == (0, -math.inf, -math.inf)
    bad = states([np.nan, 1.0], [0.0, 1.0], ())[0]
    assert all(np.isnan(x).all() for x in finish_kl_state(merge_kl_states(some, bad, none)))


@pytest.mark.parametrize("library", ["numpy", "torch", "jax.numpy"])
def test_states_of_every_library(library: str, rng: np.random.Generator) -> None:
    xp = pytest.importorskip(library)
    full = [x.astype(np.float32) for x in arrays(rng, 40, batch=1)]
    rows = streamkl_cupy.attention_kl_forward(*full)
    q_t, k_t, q_s, k_s = (xp.asarray(x) for x in full)
    parts = [parallel.attention_kl_state(q_t, k_t[:, :, a:b], q_s, k_s[:, :, a:b]) for a, b in ((0, 15), (15, 40))]
    found = finish_kl_state(merge_kl_states(*parts))
    for x, y in zip(found, rows, strict=True):
        assert type(x) is type(q_t)
        np.testing.assert_allclose(np.asarray(x), y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["numpy", "torch", "jax.numpy"])
def test_parts_are_written_and_added_to(name: str, rng: np.random.Generator) -> None:
    """The forms of an index that strategies use, and numbers, as NumPy has it."""
    pytest.importorskip(name)
    library = library_named(name.partition(".")[0])
    shape = (2, 3, 6, 5)
    for index in ((..., 3), (...,), (1, slice(None), slice(2, 5)), (slice(None), slice(None), slice(0, 6)), (0, ...)):
        wanted, made = rng.random(shape).astype("f4"), rng.random(shape).astype("f4")[index]
        out = library.made(wanted.copy(), library.xp.zeros(0))
        wanted[index] = made
        out = library.put(out, index, library.made(made, out))
        wanted[index] += made
        np.testing.assert_array_equal(library.add(out, index, library.made(made, out)), wanted)
        wanted[index] = -2.5
        np.testing.assert_array_equal(library.put(out, index, -2.5), wanted)


def test_planted_faults_are_seen(rng: np.random.Generator) -> None:
    """What these tests compare differs by far more than their tolerance where a strategy goes wrong."""
    teacher, student = rng.normal(size=(2, 64)) * 3
    parts = states(teacher, student, (20,))
    right = finish_kl_state(merge_kl_states(*parts))
    without_move = [x._replace(difference=x.difference + (x.teacher_reference - x.student_reference)) for x in parts]
    mean = np.mean([finish_kl_state(x).kl for x in parts])
    assert abs(finish_kl_state(merge_kl_states(*without_move)).kl[0] - right.kl[0]) > 1e-3
    assert abs(mean - right.kl[0]) > 1e-3
    (q_t, k_t), (q_s, k_s) = rows_of(teacher), rows_of(student)
    local = streamkl_cupy.attention_kl_forward(q_t, k_t[:20], q_s, k_s[:20])

    def gradient(rows: Any) -> Any:
        grads = streamkl_cupy.attention_kl_backward(np.ones(1), q_t, k_t[:20], q_s, k_s[:20], saved=rows)
        return grads.student_k

    assert np.abs(gradient(local) - gradient(right)).max() > 1e-3

    def of_teacher(rows: Any) -> Any:
        given = {"saved": rows, "wrt": ("teacher_k",)}
        return streamkl_cupy.attention_kl_backward(np.ones(1), q_t, k_t[:20], q_s, k_s[:20], **given).teacher_k

    # The value of all keys, not of some of them, beside log-sum-exps of all.
    assert np.abs(of_teacher(right._replace(kl=local.kl)) - of_teacher(right)).max() > 1e-3


# Reductions, bits, mistakes


def test_a_mean_is_of_all_rows_not_of_means() -> None:
    """Rank 0 has rows of KL .1 to .5 that weigh something, rank 1 has rows that do not: a mean of means is half."""
    values, weights = np.array([0.1, 0.2, 0.3, 0.4, 0.5, 1, 1, 1]), np.array([1.0, 0, 2, 1, 1, 0, 0, 0])
    # Of two keys, with the teacher's mass on the first: KL = log(1 + e^x), so x is known of a KL.
    q_t, k_t = np.full((8, 1), 60.0), np.array([[1.0], [-1.0]])
    q_s, k_s = np.log(np.expm1(values))[:, None], np.array([[0.0], [1.0]])
    where = Ownership([range(5), range(5, 8)], [[0], [1]])

    def rank_of(rank: Any) -> Any:
        rows, keys = (slice(0, 5), slice(0, 1)) if rank.rank == 0 else (slice(5, 8), slice(1, 2))
        mine = (q_t[rows], k_t[keys], q_s[rows], k_s[keys])
        options = {"student_scale": 1.0, "group": rank, "ownership": where}
        weighted = [
            parallel.attention_kl(*mine, reduction=x, row_weight=weights[rows], **options) for x in ("sum", "mean")
        ]
        return *weighted, parallel.attention_kl(*mine, reduction="mean", **options)

    for total, weighted, plain in LocalWorld(2).run(rank_of):
        np.testing.assert_allclose([total, weighted, plain], [1.6, 0.32, values.mean()], rtol=1e-12)


def test_one_rank_is_the_plain_call(rng: np.random.Generator) -> None:
    full = [x.astype(np.float32) for x in arrays(rng, 33)]
    rows = streamkl_cupy.attention_kl_forward(*full, causal=True)
    grad = rng.random(rows.kl.shape).astype(np.float32)
    grads = streamkl_cupy.attention_kl_backward(grad, *full, saved=rows, wrt=INPUT_NAMES, causal=True)
    for strategy in STRATEGIES:

        def rank_of(rank: Any, strategy: str = strategy) -> Any:
            how = {"group": rank, "strategy": strategy, "causal": True}
            found = parallel.attention_kl_forward(*full, **how)
            return found, parallel.attention_kl_backward(grad, *full, saved=found, wrt=INPUT_NAMES, **how)

        ((found, back),) = LocalWorld(1).run(rank_of)
        for x, y in zip((*found, *back), (*rows, *grads), strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("strategy, dtype", [*((x, np.float32) for x in STRATEGIES), ("all_gather", np.float64)])
def test_the_same_bits_from_run_to_run(strategy: str, dtype: Any, rng: np.random.Generator) -> None:
    full = [x.astype(dtype) for x in arrays(rng, 40, 4, 4)]

    def rank_of(rank: Any) -> Any:
        mine = [shard(x, 2, rank.rank, 4) for x in full]
        how = {"group": rank, "causal": True, "strategy": strategy}
        found = parallel.attention_kl_forward(*mine, **how)
        return *found, *parallel.attention_kl_backward(np.ones_like(found.kl), *mine, saved=found, **how)

    for first, second in zip(LocalWorld(4).run(rank_of), LocalWorld(4).run(rank_of), strict=True):
        for x, y in zip(first, second, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    "size, options, words",
    [
        (2, {"strategy": "ring"}, "strategy='ring' is unknown; allowed are"),
        (2, {"ownership": "striped"}, "ownership='striped'; allowed are"),
        (2, {"ownership": [[0, 1, 2], [2, 3]]}, "position 2 is owned twice"),
        (2, {"ownership": [[0, 1], [3, 4]]}, "position 2 is owned by no rank"),
        (2, {"ownership": [range(5), range(5, 12)]}, "rank 0 holds 6 rows"),
        (3, {"strategy": "a2a"}, "numbers that 3 divides"),
        (2, {"strategy": "p2p", "divergence": "jsd"}, "merges states of rows"),
        (2, {"head_groups": 3}, "head_groups=3 does not divide"),
        (2, {"key_mask": np.ones((1, 6), np.bool_)}, "masks are in positions of the whole sequence, 12 here"),
        (2, {"key_lengths": np.ones(3, np.int32)}, "key_lengths: shape"),
        (2, {"block_mask": patterns.full(queries=12)}, "inside a block of 64"),
        (2, {"block_mask": patterns.full(queries=6)}, "block_mask is a pattern for 6 query rows"),
        (2, {"mesh": None}, "has no option 'mesh'"),
        (2, {"return_entropy": True}, "return_entropy is not built for keys that several calls hold"),
        (2, {"student_sink_logits": np.zeros(4)}, "student_sink_logits is not built"),
        (2, {"reduction": "max"}, "reduction='max' is unknown"),
        (2, {"keep_gathered": 1}, "keep_gathered=1 is an int"),
        (2, {"row_weight": np.ones(12)}, "row_weight: shape (12,) does not broadcast to the rows (1, 4, 6)"),
        (2, {"row_weight": 2.0}, "row_weight is a float"),
    ],
)
def test_mistakes_are_errors_on_every_rank(
    size: int, options: dict[str, Any], words: str, rng: np.random.Generator
) -> None:
    full = arrays(rng, 12, batch=1)
    errors = []

    def rank_of(rank: Any) -> None:
        try:
            parallel.attention_kl(*(shard(x, 2, rank.rank, size) for x in full), group=rank, **options)
        except Exception as error:
            errors.append(str(error))

    LocalWorld(size).run(rank_of)
    assert len(errors) == size
    assert all(words in error for error in errors), errors


def test_a_mistake_of_one_rank_is_told_to_all(rng: np.random.Generator) -> None:
    """The others do not wait for a rank that could not even read its call."""
    full = arrays(rng, 12, batch=1)

    def rank_of(rank: Any) -> None:
        mine, wrong = [shard(x, 2, rank.rank, 2) for x in full], rank.rank == 1

        def told(call: Any, options: dict[str, Any], kind: Any, words: str) -> None:
            with pytest.raises(kind if wrong else RuntimeError, match=words if wrong else "rank 1"):
                call(*mine, group=rank, **(options if wrong else {}))

        kl = parallel.attention_kl
        told(kl, {"causal": 1}, TypeError, "causal")
        told(kl, {"mesh": None}, TypeError, "mesh")
        told(kl, {"reduction": "max"}, ValueError, "reduction")
        told(kl, {"row_weight": np.ones(7)}, ValueError, "row_weight")
        told(parallel.attention_kl_value_and_grad, {"wrt": ("keys",)}, ValueError, "wrt names 'keys'")
        told(parallel.warmup, {"wrt": "student_q"}, TypeError, "is a string")

    LocalWorld(2).run(rank_of)


def test_warmup_compares_what_was_agreed_on_before(rng: np.random.Generator) -> None:
    """Of a length that grows by one a rank whose shard stays as long cannot know by itself."""
    full = arrays(rng, 9, batch=1)

    def rank_of(rank: Any) -> list[Any]:
        def part(tokens: int) -> list[Any]:
            return [shard(x[:, :, :tokens], 2, rank.rank, 2) for x in full]

        found = []
        for tokens in (8, 9):
            parallel.warmup(*part(tokens), group=rank, causal=True)
            found += [parallel.attention_kl(*part(tokens), group=rank, causal=True) for _ in range(2)]
        assert part(8)[0].shape == part(9)[0].shape or rank.rank == 0
        with pytest.raises(ValueError, match="options differ between rank 0 and"):
            parallel.warmup(*part(9), group=rank, causal=rank.rank == 0)
        return found

    found = LocalWorld(2).run(rank_of)
    for i, tokens in enumerate((8, 8, 9, 9)):
        wanted = streamkl_cupy.attention_kl(*(x[:, :, :tokens] for x in full), causal=True)
        got = parallel.unshard([parts[i] for parts in found], 2)
        np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-12)


def test_ranks_that_disagree_are_told(rng: np.random.Generator) -> None:
    full = arrays(rng, 12, batch=1)
    errors: dict[int, Exception] = {}

    def rank_of(rank: Any) -> None:
        mine = [shard(x, 2, rank.rank, 2) for x in full]
        for mistake, words in (
            ({"causal": rank.rank == 0}, "options differ"),
            ({"strategy": STRATEGIES[rank.rank]}, "strategy differ"),
            ({"keep_gathered": rank.rank == 0}, "strategy differ"),
            ({"reduction": ("mean", "none")[rank.rank]}, "reduction differ"),
            ({"key_lengths": np.ones(1 + rank.rank, np.int32)}, "masks differ"),
        ):
            with pytest.raises(ValueError, match=words):
                parallel.attention_kl(*mine, group=rank, **mistake)
        try:
            parallel.attention_kl(*(x[:, :, 1:] if rank.rank and i < 3 else x for i, x in enumerate(mine)), group=rank)
        except (ValueError, RuntimeError) as error:
            errors[rank.rank] = error

    LocalWorld(2).run(rank_of)
    assert isinstance(errors[1], ValueError)
    assert "rank 1" in str(errors[0])


def test_an_error_of_one_rank_ends_all(rng: np.random.Generator) -> None:
    def rank_of(rank: Any) -> None:
        if rank.rank == 1:
            raise KeyError("mine")
        rank.all_reduce(np.ones(1))

    with pytest.raises(KeyError, match="mine"):
        LocalWorld(3).run(rank_of)


def test_docstrings() -> None:
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    for name in parallel.__all__:
        for example in finder.find(getattr(parallel, name), name, globs={}):
            runner.run(example)
    assert runner.tries > 20
    assert not runner.failures


def test_zigzag_is_even() -> None:
    for size in (2, 4, 8):
        work = [int((x + 1).sum()) for x in positions(16 * size, size)]
        assert len(set(work)) == 1


def test_a_rank_that_gets_no_thread_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def one_alone(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", one_alone)
    world = LocalWorld(2)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        world.run(lambda rank: rank.all_reduce(np.ones(1)))
    started[0].join(20)
    waiting = started[0].is_alive()
    world._barrier.abort()
    assert not waiting

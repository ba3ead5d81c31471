"""Every kernel family on the same problems: right by float64, the same bits each time, agreeing with the others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import streamkl_cupy
from streamkl_cupy import call, frameworks, patterns, planning
from streamkl_cupy.call import Call
from streamkl_cupy.kernels import KERNELS, gpus, shares, work_tiles
from streamkl_cupy.ops import ATTENTION_KL
from streamkl_cupy.problem import INPUT_NAMES, STUDENT
from streamkl_cupy.rules.divergences import DIVERGENCES
from streamkl_cupy.testing import reference
from streamkl_cupy.testing.compare import check_gradients, check_same_bits
from streamkl_cupy.testing.problems import MASK_OPTIONS, RECIPES, make, upstream

pytestmark = pytest.mark.gpu

DTYPES = ("bfloat16", "float16")
DIMS = [(8, 8), (16, 64), (64, 64), (72, 80), (128, 128), (64, 128), (192, 128), (256, 256), (512, 64), (576, 128)]
ONE_PASS = [
    (64, 64),
    (128, 128),
    (40, 72),
    (64, 128),
    (192, 128),
    (256, 128),
    (120, 16),
    (192, 176),
    (328, 64),
    (576, 128),
]
LONG = [(320, 128), (384, 64), (512, 128), (576, 72), (576, 128), (576, 256), (520, 192)]
LISTED = [(64, 64), (128, 128), (72, 40), (64, 192)]
ONE_TILE = [(64, 64), (128, 40), (72, 128)]


def forget_plans() -> None:
    planning.make_plan.cache_clear()
    planning._unsplit_plan.cache_clear()


FAMILIES = ("sm80", "sm90")


def use(monkeypatch: pytest.MonkeyPatch, *families: str) -> None:
    """Plans are made of kernels of these families only."""
    for kind, kernels in KERNELS.items():
        monkeypatch.setitem(KERNELS, kind, tuple(x for x in kernels if x.family in families))
    monkeypatch.setattr(call, "_looks", {})
    monkeypatch.setattr(call, "_checked", {})
    monkeypatch.setattr(call, "_runners", {})
    forget_plans()


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, cupy_only: Any) -> Iterator[str]:
    """Plans with one family, and with the portable one where that cannot."""
    if request.param == "sm90" and gpus.device_facts(0).compute_capability != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    use(monkeypatch, request.param, "sm80")
    yield request.param
    forget_plans()


def judged(family: str, backend: Any, case: Any, grad: Any = None, **how: Any) -> Any:
    inputs = backend.arrays(case)
    assert streamkl_cupy.plan(*inputs, **case.options).forward.family == family
    return backend.judge(case, grad, arrays=inputs, **how)


@pytest.mark.parametrize("D_t, D_s", DIMS)
def test_head_dims(family: str, cupy_only: Any, rng: Any, turn: Any, D_t: int, D_s: int) -> None:
    dtype = turn(DTYPES, DIMS.index((D_t, D_s)))
    for M, N, causal in ((300, 333, False), (257, 129, True), (64, 700, True)):
        case = make(H=4, M=M, N=N, D_t=D_t, D_s=D_s, teacher_key_heads=2, student_key_heads=1, dtypes=dtype,
                    seed=int(rng.integers(1 << 30)), causal=causal)  # fmt: skip
        grad = upstream(rng, (1, 4, M))
        judged(family, cupy_only, case, grad, wrt=STUDENT if D_t > 256 else ("teacher_q", "teacher_k", *STUDENT))


@pytest.mark.parametrize("offset", [None, -500, -70, -1, 0, 63, 64, 1000])
def test_causal_offsets(family: str, cupy_only: Any, rng: Any, offset: int | None) -> None:
    for M, N in itertools.product((1, 65, 300), (64, 257)):
        case = make(B=2, H=2, M=M, N=N, D_t=64, dtypes="bfloat16", seed=int(rng.integers(1 << 30)), causal=True,
                    q_offset=offset)  # fmt: skip
        judged(family, cupy_only, case, upstream(rng, (2, 2, M)))


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_named_problems(family: str, cupy_only: Any, rng: Any, name: str) -> None:
    for D, causal in ((64, False), (128, True)):
        case = make(name, H=2, M=190, N=700, D_t=D, dtypes="bfloat16", seed=int(rng.integers(1 << 30)), causal=causal)
        judged(family, cupy_only, case, upstream(rng, (1, 2, 190)))


@pytest.mark.parametrize("M, N, H", [(1, 40_000, 1), (7, 9_000, 2), (100, 5_000, 1), (300, 4_500, 1)])
def test_split_keys(family: str, cupy_only: Any, rng: Any, M: int, N: int, H: int) -> None:
    for name, causal in (("gaussian", False), ("rising", True), ("spiky", False)):
        case = make(name, H=H, M=M, N=N, D_t=64, dtypes="bfloat16", seed=int(rng.integers(1 << 30)), causal=causal)
        inputs = cupy_only.arrays(case)
        plan = streamkl_cupy.plan(*inputs, **case.options)
        assert plan.forward.schedule.splits > 1
        assert plan.workspace_bytes == 20 * plan.forward.schedule.splits * M * H
        rows, _ = cupy_only.judge(case, arrays=inputs)
        again = streamkl_cupy.attention_kl_forward(*inputs, **case.options)
        for field in rows._fields:
            check_same_bits(field, cupy_only.numpy(getattr(again, field)), cupy_only.numpy(getattr(rows, field)))


def test_splitting_changes_only_the_last_bits(cupy_only: Any, rng: Any) -> None:
    case = make(M=40, N=20_000, D_t=64, dtypes="bfloat16", seed=int(rng.integers(1 << 30)))
    inputs = cupy_only.arrays(case)
    ready = Call.of(ATTENTION_KL, tuple(inputs), {}).ready()
    views = ready.inputs
    whole = ATTENTION_KL.Results(
        *frameworks.empty_rows(views.student_q, ATTENTION_KL.rows, ready.checked.row_shape, "float32")
    )
    ready.checked.runner.forward(views, whole, frameworks.stream_of(views.student_q))
    split = streamkl_cupy.attention_kl_forward(*inputs)
    for got, expected in zip(split, whole[: len(split)], strict=True):
        np.testing.assert_allclose(cupy_only.numpy(got), cupy_only.numpy(expected.array), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("D_t, D_s", ONE_PASS)
def test_both_gradients_in_one_pass(family: str, cupy_only: Any, rng: Any, turn: Any, D_t: int, D_s: int) -> None:
    dtype = turn(DTYPES, ONE_PASS.index((D_t, D_s)))
    heads = 1 if D_s <= 128 else 2  # fewer tiles would be shared, for which a long gradient leaves no registers
    for M, N, options in ((300, 333, {}), (257, 700, {"causal": True}), (400, 129, {"causal": True, "q_offset": -37})):
        case = make(B=2, H=4, M=M, N=N, D_t=D_t, D_s=D_s, teacher_key_heads=2, student_key_heads=heads, dtypes=dtype,
                    seed=int(rng.integers(1 << 30)), **options)  # fmt: skip
        grad = upstream(rng, (2, 4, M))
        grad[:, :, ::5] *= 1e-3
        inputs = cupy_only.arrays(case)
        plan = streamkl_cupy.plan(*inputs, **case.options)
        most = 192 if dtype == "bfloat16" else 128
        assert [fused.side for fused in plan.fused] == (
            [] if family == "sm80" else [side for side, D in (("teacher", D_t), ("student", D_s)) if most >= D]
        )
        cupy_only.judge(case, grad, arrays=inputs, wrt=STUDENT if D_t > 256 else INPUT_NAMES)


# Whose gradients read the row's value on the teacher's side alone, and on the student's.
VALUED = {entry.needs_value: name for name, entry in sorted(DIVERGENCES.items()) if len(entry.needs_value) == 1}


@pytest.mark.parametrize("D_t, D_s", LONG)
def test_students_of_long_teachers(
    family: str, cupy_only: Any, rng: Any, turn: Any, D_t: int, D_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All masks, four by turns for each pair of head dims, both ways to compute, key heads shared differently; without
    atomics the same bits each time."""
    monkeypatch.setattr(work_tiles, "MIN_TILES_IN_LIST", 2)
    masks, place = [*enumerate([("none", lambda *_: {}), *MASK_OPTIONS.items()])], LONG.index((D_t, D_s))
    divergence = turn((*VALUED.values(),), place)
    for i, (mask, ask) in [turn(masks, 4 * place, step) for step in range(4)]:
        B, M, N = 1 if mask == "packed" else 2, int(rng.integers(270, 700)), int(rng.integers(60, 700))
        heads_t, heads_s = ((2, 4), (1, 2), (4, 1))[i % 3]
        options = {**ask(rng, B, M, N), **({"causal": True} if i % 2 else {})}
        case = make(B=B, H=4, M=M, N=N, D_t=D_t, D_s=D_s, teacher_key_heads=heads_t, student_key_heads=heads_s,
                    dtypes=DTYPES[i % 2], seed=int(rng.integers(1 << 30)), divergence=divergence,
                    **options)  # fmt: skip
        grad = upstream(rng, (M, 4) if mask == "packed" else (B, 4, M))
        inputs = cupy_only.arrays(case)
        plan = streamkl_cupy.plan(*inputs, **cupy_only.options(case))
        if family == "sm90" and M // max(plan.problem.sequences, 1) >= 256:
            assert {plan.gradient(name).family for name in STUDENT} == {"sm90"}
            assert [fused.side for fused in plan.fused] == (["student"] if D_s <= 128 else [])
        results = [
            cupy_only.judge(case, grad, arrays=inputs, wrt=STUDENT, deterministic=how)[1] for how in (None, True, True)
        ]
        for name, first, second in zip(INPUT_NAMES, results[1], results[2], strict=True):
            if first is not None:
                check_same_bits(name, cupy_only.numpy(first), cupy_only.numpy(second))


def direct(plan: Any) -> list[bool]:
    """Of each pass that makes both gradients of a side, whether it writes the queries' without sums."""
    return [len(fused.kernels) == 2 for fused in plan.fused]


@pytest.mark.parametrize("divergence", sorted(DIVERGENCES))
@pytest.mark.parametrize("D_t, D_s", ONE_TILE)
def test_all_keys_in_one_tile(cupy_only: Any, rng: Any, turn: Any, D_t: int, D_s: int, divergence: str) -> None:
    """Numbers of keys that share kernels share a test, too, and the 16-bit types take turns."""
    if gpus.device_facts(0).compute_capability != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    dtype = turn(DTYPES, ONE_TILE.index((D_t, D_s)), sorted(DIVERGENCES).index(divergence))
    for N in (1, 16, 64, 100, 128, 192, 197, 256):
        H, M = 40, int(rng.choice([64, 65, 100, 197, 333]))
        case = make(B=3, H=H, M=M, N=N, D_t=D_t, D_s=D_s, teacher_key_heads=H, student_key_heads=H, dtypes=dtype,
                    seed=int(rng.integers(1 << 30)), divergence=divergence)  # fmt: skip
        inputs = cupy_only.arrays(case)
        fits = [(256 if D <= 64 and max(D_t, D_s) <= 64 else 128) >= N for D in (D_t, D_s)]
        assert direct(streamkl_cupy.plan(*inputs, **case.options)) == fits
        grad = upstream(rng, (3, H, M))
        grad[:, :, ::5] *= 1e-3
        results = [cupy_only.judge(case, grad, arrays=inputs, deterministic=how)[1] for how in (None, True)]
        for name, *both in zip(INPUT_NAMES, *results, strict=True):
            if N <= 128:
                check_same_bits(name, *(cupy_only.numpy(x) for x in both))


@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("part", sorted(MASK_OPTIONS))
def test_all_keys_in_one_tile_under_masks(cupy_only: Any, rng: Any, turn: Any, part: str, D: int) -> None:
    """Tiles of queries that no step visits are written too, as all of them are in poisoned memory."""
    if gpus.device_facts(0).compute_capability != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    B = 1 if part == "packed" else 2
    dtype = turn(DTYPES, sorted(MASK_OPTIONS).index(part), D // 128)
    for trial in range(3):
        M, N = int(rng.integers(200, 700)), int(rng.integers(1, 129))
        options = MASK_OPTIONS[part](rng, B, M, N)
        if trial == 0 and part in ("causal", "window", "blocks"):
            options |= {"causal": True, "q_offset": int(rng.integers(-M, N))}  # some rows see nothing
        case = make(B=B, H=4, M=M, N=N, D_t=64, D_s=D, teacher_key_heads=2, student_key_heads=1, dtypes=dtype,
                    seed=int(rng.integers(1 << 30)), **options)  # fmt: skip
        inputs = cupy_only.arrays(case)
        plan = streamkl_cupy.plan(*inputs, **cupy_only.options(case))
        assert direct(plan) == [True, True] or "fewer than 64 queries" in str(plan.unfused)
        rows = reference.forward(*case.arrays, **case.options)
        for deterministic in (None, True):
            cupy_only.judge(case, upstream(rng, rows.kl.shape), arrays=inputs, deterministic=deterministic)


@pytest.mark.parametrize("D_t, D_s", LISTED)
def test_shared_lists(
    family: str, cupy_only: Any, rng: Any, turn: Any, D_t: int, D_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists of a few tiles are cut here as those of long contexts are: what blocks have is added up, in one order."""
    dtype = turn(DTYPES, LISTED.index((D_t, D_s)))
    monkeypatch.setattr(work_tiles, "MIN_TILES_IN_LIST", 2)
    for M, N, pattern_heads, causal in ((700, 650, 4, False), (613, 700, 1, True), (900, 300, 4, True)):
        blocks = rng.random((pattern_heads, -(-M // 64), -(-N // 32))) < 0.2
        blocks[:, :, 1] = True  # a stripe that all rows see
        blocks[:, -2] = True  # and a row that sees all keys
        blocks[-1, :, 3] = blocks[-1, 3] = False
        pattern = patterns.from_dense(blocks, queries=M, keys=N, block=(64, 32))
        case = make(B=2, H=4, M=M, N=N, D_t=D_t, D_s=D_s, teacher_key_heads=2, student_key_heads=1, dtypes=dtype,
                    seed=int(rng.integers(1 << 30)), causal=causal, block_mask=pattern)  # fmt: skip
        grad = upstream(rng, (2, 4, M))
        inputs = cupy_only.arrays(case)
        results = []
        for deterministic in (None, True, True):
            options = {**case.options, "deterministic": deterministic}
            plan = streamkl_cupy.plan(*inputs, **options)
            size = plan.backward_bytes(INPUT_NAMES)
            kernels = [kernel for _, kernel in plan.gradients] + [fused.main for fused in plan.fused]
            assert {kernel.schedule.partial_bytes > 0 for kernel in kernels} == {family == "sm90"}
            # Where the workspace will lie, counters of who has come are not zero.
            cupy_only.full((size // 4 + 1,), "float32")
            results.append(cupy_only.judge(case, grad, arrays=inputs, deterministic=deterministic)[1])
        for name, first, second in zip(INPUT_NAMES, results[1], results[2], strict=True):
            check_same_bits(name, cupy_only.numpy(first), cupy_only.numpy(second))


def cut_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row tiles of a few steps are shared here as those of long rows are."""
    for name, value in (("LEAST_STEPS", 1), ("START", 0), ("SUMS", 0), ("WORTH", 2.0)):
        monkeypatch.setattr(shares, name, value)


def own_steps(plan: Any) -> dict[str, int]:
    """Over how many blocks the steps of row tiles go, by kernel."""
    kernels = [*plan.gradients, *(("fused " + fused.side, fused.main) for fused in plan.fused)]
    return {name: kernel.schedule.splits for name, kernel in kernels}


MASKED: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True},
    "far below": {"causal": True, "q_offset": -333},
    "window": {"window": (150, 40)},
    "lengths": {"key_lengths": np.array([0, 131], np.int32), "causal": True, "q_offset": 0},
    "padded": {"key_lengths": np.array([59, 63], np.int32), "query_lengths": np.array([0, 37], np.int32)},
    "packed": {
        "cu_seqlens_q": np.array([0, 0, 500, 501, 1080], np.int32),
        "cu_seqlens_k": np.array([0, 70, 290, 290, 600], np.int32),
    },
}


KINDS = [*MASKED, "keys", "rows"]
SHARED = [[(64, 64), (72, 40)], [(128, 128), (192, 128)]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dims", SHARED)
def test_shared_row_tiles(
    family: str,
    cupy_only: Any,
    rng: Any,
    turn: Any,
    dims: list[tuple[int, int]],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One key head for many heads of queries, few keys, few queries: blocks share what a tile of rows streams.

    Of two pairs of head dims and of two types one each, of three shapes two, by turns.
    """
    cut_small(monkeypatch)
    D_t, D_s = turn(dims, KINDS.index(kind))
    dtype = turn(DTYPES, KINDS.index(kind) // 2, SHARED.index(dims))
    shapes = ((700, 610, 6, 2, 1), (900, 63, 2, 2, 2), (40, 2000, 2, 1, 2))
    for M, N, heads, teacher, student in [turn(shapes, KINDS.index(kind), SHARED.index(dims), i) for i in range(2)]:
        if kind == "packed" and N == 63:
            continue
        options = {"key_mask": rng.random((2, N)) < 0.6} if kind == "keys" else MASKED.get(kind, {})
        options = {"query_mask": rng.random((2, M)) < 0.6} if kind == "rows" else options
        rows = max(M, 1100) if kind == "packed" else M
        case = make(B=1 if kind == "packed" else 2, H=heads, M=rows, N=max(N, 610) if kind == "packed" else N, D_t=D_t,
                    D_s=D_s, teacher_key_heads=teacher, student_key_heads=student, dtypes=dtype,
                    seed=int(rng.integers(1 << 30)), **options)  # fmt: skip
        grad = upstream(rng, case.arrays[0].shape[:-1])
        inputs = cupy_only.arrays(case)
        results = []
        for deterministic in (None, True, True):
            options = {**case.options, "deterministic": deterministic}
            plan = streamkl_cupy.plan(*inputs, **cupy_only.options(case._replace(options=options)))
            if family == "sm90" and kind in ("none", "keys"):
                assert max(own_steps(plan).values()) > 1, plan
            # Where the workspace will lie, counters of who has come are not zero.
            cupy_only.full((plan.backward_bytes(INPUT_NAMES) // 4 + 1,), "float32")
            results.append(cupy_only.judge(case, grad, arrays=inputs, deterministic=deterministic)[1])
        for name, first, second in zip(INPUT_NAMES, results[1], results[2], strict=True):
            check_same_bits(name, cupy_only.numpy(first), cupy_only.numpy(second))


def test_row_tiles_are_not_shared_without_a_workspace(
    family: str, cupy_only: Any, rng: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_small(monkeypatch)
    case = make(H=8, M=640, N=300, D_t=64, teacher_key_heads=1, student_key_heads=1, dtypes="bfloat16",
                seed=int(rng.integers(1 << 30)), causal=True)  # fmt: skip
    inputs = cupy_only.arrays(case)
    ready = Call.of(ATTENTION_KL, tuple(inputs), {"causal": True}).ready()
    views, stream = ready.inputs, frameworks.stream_of(ready.inputs.student_q)
    rows = streamkl_cupy.attention_kl_forward(*inputs, **case.options)
    grad = upstream(rng, (1, 8, 640))
    given = {
        "grad": cupy_only.array(grad, "float32"),
        **{x: getattr(rows, x) for x in ("teacher_lse", "student_lse", "kl")},
    }
    saved = ATTENTION_KL.Saved(
        **{x: frameworks.describe(x, given[x]) if x in given else None for x in ATTENTION_KL.Saved._fields}
    )
    wanted = reference.backward(grad, *case.arrays, **case.options)
    plan = ready.checked.runner.plan
    sums = max((x.workspace_bytes - x.main.schedule.partial_bytes for x in plan.fused), default=0)
    for room in (0, sums):
        outputs = ATTENTION_KL.Gradients(*(frameworks.empty(view, view.shape, view.dtype) for view in views))
        workspace = cupy_only.full((room // 4 + 1,), "float32")
        address = workspace.data.ptr if room else 0
        ready.checked.runner.backward(views, saved, outputs, stream, address, room=room)
        check_gradients(tuple(cupy_only.numpy(x.array) for x in outputs), wanted, case.dtypes)


@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
def test_heads_that_see_nothing(family: str, cupy_only: Any, rng: Any, dtype: str) -> None:
    """Between others that share their keys, and in some key tiles only: rows loaded for them are soon overwritten."""
    blocks = rng.random((8, 5, 6)) < 0.4
    blocks[[1, 2, 5]] = False
    blocks[4, :, 2:] = False
    pattern = patterns.from_dense(blocks, queries=600, keys=700, block=(128, 128))
    case = make(H=8, M=600, N=700, D_t=64, teacher_key_heads=8, student_key_heads=2, dtypes=dtype,
                seed=int(rng.integers(1 << 30)), block_mask=pattern)  # fmt: skip
    for deterministic in (None, True):
        cupy_only.judge(case, upstream(rng, (1, 8, 600)), deterministic=deterministic)


def test_lists_are_walked_whole_without_a_workspace(
    family: str, cupy_only: Any, rng: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_tiles, "MIN_TILES_IN_LIST", 2)
    pattern = patterns.strided(2, queries=640, block=32)
    case = make(H=2, M=640, N=640, D_t=64, dtypes="bfloat16", seed=int(rng.integers(1 << 30)), block_mask=pattern)
    inputs = cupy_only.arrays(case)
    ready = Call.of(ATTENTION_KL, tuple(inputs), {"block_mask": pattern}).ready()
    views = ready.inputs
    rows = streamkl_cupy.attention_kl_forward(*inputs, **case.options)
    grad = upstream(rng, (1, 2, 640))
    given = {
        "grad": cupy_only.array(grad, "float32"),
        **{x: getattr(rows, x) for x in ("teacher_lse", "student_lse", "kl")},
    }
    saved = ATTENTION_KL.Saved(
        **{x: frameworks.describe(x, given[x]) if x in given else None for x in ATTENTION_KL.Saved._fields}
    )
    outputs = ATTENTION_KL.Gradients(*(frameworks.empty(view, view.shape, view.dtype) for view in views))
    ready.checked.runner.backward(views, saved, outputs, frameworks.stream_of(views.student_q))
    wanted = reference.backward(grad, *case.arrays, **case.options)
    check_gradients(tuple(cupy_only.numpy(x.array) for x in outputs), wanted, case.dtypes)


def test_strides_that_a_map_can_say(family: str, cupy_only: Any, rng: Any) -> None:
    """Slices of a fused projection, the other layout, repeated heads: read in place, by either family."""
    B, H, M, D = 2, 4, 150, 64
    fused = cupy_only.array(rng.standard_normal((B, M, 3 * H * D)), "bfloat16").reshape(B, M, 3, H, D)
    q, k = fused[:, :, 0].transpose(0, 2, 1, 3), fused[:, :, 1].transpose(0, 2, 1, 3)
    shared = cupy_only.xp.broadcast_to(k[:, :1], k.shape)
    for keys in (k, shared):
        assert streamkl_cupy.plan(q, keys, q, k).forward.family == family
        got = streamkl_cupy.attention_kl_forward(q, keys, q, k)
        copies = [cupy_only.xp.ascontiguousarray(x) for x in (q, keys, q, k)]
        for a, b in zip(got, streamkl_cupy.attention_kl_forward(*copies), strict=True):
            check_same_bits("rows", cupy_only.numpy(a), cupy_only.numpy(b))


def test_families_agree(cupy_only: Any, rng: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make(H=3, M=500, N=900, D_t=128, dtypes="bfloat16", seed=int(rng.integers(1 << 30)), causal=True)
    inputs, results = cupy_only.arrays(case), []
    for families in (FAMILIES, ("sm80",)):
        use(monkeypatch, *families)
        results.append([cupy_only.numpy(x) for x in streamkl_cupy.attention_kl_forward(*inputs, **case.options)])
    forget_plans()
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-6, atol=3e-6)

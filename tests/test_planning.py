"""What is planned for which problem and GPU: pure functions of values, so every architecture is tested everywhere."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from math import gcd
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streamkl_cupy import indexer_kl_plan, patterns
from streamkl_cupy.cli import catalogue
from streamkl_cupy.errors import DriverError
from streamkl_cupy.kernels import KERNELS, combine, gpus, shares
from streamkl_cupy.kernels.base import Work
from streamkl_cupy.kernels.shares import CACHED, steps_of
from streamkl_cupy.kernels.work_tiles import survey
from streamkl_cupy.numpy_backend import make_plan as numpy_plan
from streamkl_cupy.ops import ATTENTION_KL, SPARSE_ATTENTION
from streamkl_cupy.planning import MAX_ROWS, Plan, facts_for_arch, make_plan
from streamkl_cupy.problem import INPUT_NAMES, Device, MaskSpec, Operand, Problem, Side
from streamkl_cupy.rules.divergences import DIVERGENCES

ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


def problem(M: int = 8192, N: int = 8192, dims: tuple[int, int] = (64, 64), **options: Any) -> Problem:
    dtypes = options.pop("dtypes", ("bfloat16", "bfloat16"))
    heads, key_heads, strides = options.pop("heads", 8), options.pop("key_heads", None), options.pop("strides", None)

    def operand(h: int, rows: int, dim: int, dtype: str) -> Operand:
        return Operand(
            h, rows, dim, dtype, strides or (h * rows * dim, rows * dim, dim, 1), options.get("aligned", True)
        )

    sides = [
        Side(operand(heads, M, d, t), operand(key_heads or heads, N, d, t), d**-0.5)
        for d, t in zip(dims, dtypes, strict=True)
    ]
    options.pop("aligned", None)
    return Problem(options.pop("batch", 1), heads, M, N, tuple(sides), device=Device("cuda"), **options)


def plan(arch: str = "sm_90", **what: Any) -> Plan:
    return make_plan(problem(**what), facts_for_arch(arch))


def kernels(p: Plan) -> list[Any]:
    passes = [fused.main for fused in p.fused]
    return [p.forward, *(kernel for _, kernel in p.gradients), *passes, *([p.combine] if p.combine else [])]


@pytest.mark.long
@pytest.mark.parametrize("arch", ARCHS)
def test_tiles_are_the_same_whatever_was_planned_before(arch: str, rng: np.random.Generator) -> None:
    """Rows of a table that fit are kept by what they hang on: of rules, the mask and the divergence."""
    facts = facts_for_arch(arch)
    cases = [
        (Work(catalogue.problem((dim, dim), types, mask, divergence=divergence), task), kernel)
        for dim in (64, 128)
        for types in catalogue.ELEMENT_TYPES
        for mask in catalogue.MASK_CASES
        for divergence in DIVERGENCES
        for task in ATTENTION_KL.gradients
        for kernel in KERNELS[task.kind]
    ]
    for i in rng.permutation(len(cases)):
        work, kernel = cases[i]
        if not kernel.refuses(work, facts):
            assert kernel.fitting(work, facts) == kernel._fits(work, facts), (work, kernel)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    "dims", [(1, 3), (64, 64), (80, 72), (128, 128), (192, 128), (256, 256), (576, 128), (512, 64)]
)
@pytest.mark.parametrize("dtypes", [("bfloat16",) * 2, ("float32",) * 2, ("float16", "float32")])
def test_every_plan_fits_its_gpu(arch: str, dims: tuple[int, int], dtypes: tuple[str, str]) -> None:
    facts = facts_for_arch(arch)
    p = plan(arch, dims=dims, dtypes=dtypes)
    for kernel in kernels(p):
        assert kernel.smem_bytes <= facts.smem_per_block
        assert kernel.threads <= 1024
        assert kernel.threads % 32 == 0
        work_tiles = 8 * kernel.schedule.tiles * kernel.schedule.splits
        persistent = kernel.entry.endswith("fused_sm90.cu")  # a block per multiprocessor takes one after the other
        assert kernel.blocks == (min(work_tiles, facts.multiprocessors) if persistent else work_tiles)
    assert [name for name, _ in p.gradients] == [n for n in INPUT_NAMES if dims[n.startswith("student")] <= 256]
    assert str(p) == str(plan(arch, dims=dims, dtypes=dtypes))


def test_hopper_runs_what_it_can_and_says_why_not() -> None:
    assert plan().forward.family == "sm90"
    assert plan().forward.arch == "sm_90a"
    assert plan().forward.reason == ""
    for arch in ARCHS:
        if arch != "sm_90":
            assert plan(arch).forward.family == "sm80"
    for what, reason in (
        ({"dtypes": ("float32", "float32")}, "16-bit elements"),
        ({"dims": (60, 64)}, "multiples of 8"),
        ({"aligned": False}, "teacher_q: its rows must start on 16-byte boundaries"),
        ({"strides": (0, -64 * 8192, 64, 1)}, "teacher_q: its strides must be positive"),
        ({"strides": (0, 64 * 8192, 0, 1)}, "teacher_q: its rows overlap"),
        ({"N": 0}, "cannot be empty"),
    ):
        forward = plan(**what).forward
        assert forward.family == "sm80"
        assert reason in forward.reason
        assert forward.reason in str(plan(**what))


def test_few_rows_split_their_keys_and_many_do_not() -> None:
    for arch, M, heads, N in itertools.product(("sm_80", "sm_90"), (1, 64, 256), (1, 4), (100_000, 1_000_000)):
        p = plan(arch, M=M, heads=heads, N=N, dims=(128, 128))
        # At least three quarters of the multiprocessors have a block.
        assert p.forward.blocks * 4 >= 3 * facts_for_arch(arch).multiprocessors
        assert p.forward.schedule.splits > 1
        assert p.combine is not None
        assert p.workspace_bytes == 20 * p.forward.schedule.splits * M * heads
        assert "keys split over" in str(p)
    for what in ({}, {"M": 128, "heads": 1000, "N": 128}, {"M": 1, "heads": 1, "N": 2000}):
        p = plan(**what)
        assert p.forward.schedule.splits == 1
        assert p.combine is None
        assert p.workspace_bytes == 0


def striped(causal: bool) -> patterns.BlockPattern:
    return patterns.sharded(16, window=512, stride=16, queries=16384, block=128, causal=causal).select(range(8))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_lists_that_are_longer_than_the_others_are_split(causal: bool, deterministic: bool) -> None:
    what: dict[str, Any] = {"M": 16384, "N": 16384, "dims": (128, 128), "deterministic": deterministic}
    p = plan(mask=MaskSpec(("blocks",), (), striped(causal)), **what)
    for kernel in kernels(p)[1:]:
        by_keys = not dict(kernel.constants)["SKL_ROWS_ARE_QUERIES"]
        lengths = survey(striped(causal), kernel.tile.rows, kernel.tile.columns, by_keys, 1).lengths
        average = lengths.sum() / 132
        assert (kernel.schedule.partial_bytes > 0) == (lengths.max() > kernel.schedule.longest), kernel.name
        assert average / 2 <= kernel.schedule.longest < max(average / 2 + 2, 33)
        # Every tile of rows has a block, and pieces of long ones have more.
        assert lengths.shape[1] <= kernel.schedule.tiles < 1.3 * lengths.shape[1]
        assert (kernel.schedule.tiles > lengths.shape[1]) == (kernel.schedule.partial_bytes > 0)
        # As many float32 tiles as there are splits, and a counter for each of their warps.
        slots = 8 * kernel.schedule.partial_slots
        assert kernel.schedule.arrivals_bytes == -(-4 * slots * kernel.tile.warps // 128) * 128
        assert kernel.schedule.partial_bytes - kernel.schedule.arrivals_bytes == 4 * slots * kernel.tile.rows * 128
        assert kernel.schedule.partial_bytes < 40 << 20
        assert ("tiles shared" in str(kernel)) == (kernel.schedule.partial_bytes > 0)
    alone = p.gradient("student_k").schedule.partial_bytes
    assert alone > 0
    assert p.backward_bytes(("student_k",)) == alone
    if deterministic:
        assert p.backward_bytes(INPUT_NAMES) == alone
    else:
        assert p.backward_bytes(("student_q", "student_k")) == p.fused[1].workspace_bytes
        assert p.fused[1].workspace_bytes > p.fused[1].main.schedule.partial_bytes + 4 * 8 * 16384 * 128
    # Eight query heads that share keys: what they have together is cut, and heads of the keys have one set of slots.
    grouped = plan(mask=MaskSpec(("blocks",), (), striped(causal)), key_heads=1, **what).gradient("student_k")
    assert 0 < grouped.schedule.partial_bytes < 8 * 132 * 4 * 128 * 128
    assert grouped.schedule.head_group == 1
    even = plan(mask=MaskSpec(("blocks",), (), patterns.full(queries=16384, block=128)), **what)
    older = plan("sm_80", mask=MaskSpec(("blocks",), (), striped(causal)), **what)
    assert not any(kernel.schedule.partial_bytes for kernel in (*kernels(even), *kernels(older)))
    assert older.backward_bytes(INPUT_NAMES) == 0


def test_shares_come_in_turns_where_sums_do_not_fit_the_cache() -> None:
    """Many query heads on one key head; few of them, or a deterministic gradient, have as many shares of each tile."""
    mask = MaskSpec(("causal",), (("q_offset", 0),))
    what: dict[str, Any] = {"key_heads": 1, "M": 2048, "N": 2048, "dims": (192, 128), "mask": mask}
    many, few = (plan(heads=heads, **what).fused[-1].main.schedule for heads in (128, 16))
    # 128 heads of 16 tiles, of up to 32 steps each.
    bytes_of_head = 2048 * (2 * (192 + 128) + 4 * 128)
    steps = 272 * CACHED // bytes_of_head / 132
    assert many.share_steps == pytest.approx(steps, rel=0.1)
    assert many.splits == -(-128 * 32 // many.share_steps)
    assert (few.share_steps, few.splits > 1) == (0, True)
    for schedule in (many, few):
        # One sum of a tile for all of its shares, cleared with the counters.
        assert (schedule.totals, schedule.partial_slots) == (True, 16)
        assert schedule.cleared_bytes == schedule.partial_bytes == 4 * 16 * 128 * 128 + schedule.arrivals_bytes
    assert "shared by up to 142 blocks in turns of 29 steps" in str(plan(heads=128, **what))
    alone = plan(heads=128, **what).gradient("student_k").schedule
    assert (alone.share_steps, alone.totals, alone.cleared_bytes) == (0, False, alone.arrivals_bytes)


def test_both_gradients_of_a_side_share_a_pass_where_that_can_be() -> None:
    p = plan(dims=(256, 128), M=1000, N=3000, heads=6, batch=2, key_heads=2)
    (student,) = p.fused  # a gradient of 256 columns does not fit
    assert student.names == ("student_q", "student_k")
    tiles = -(-1000 // 64)
    assert student.workspace_bytes == -(-4 * (2 * 6 * tiles * (64 * (128 + 3) + 1) + 1) // 128) * 128
    # Little more than one float32 gradient of the queries.
    assert student.workspace_bytes < 1.1 * 4 * 2 * 6 * 1000 * 128
    assert [kernel.blocks for kernel in student.kernels] == [2 * 6 * tiles, 2 * 2 * -(-3000 // 128), 2 * 6 * tiles]
    shares = {name: kernel.schedule.partial_bytes for name, kernel in p.gradients}
    room = max(student.workspace_bytes, shares["teacher_q"])
    assert p.backward_bytes(("student_q", "student_k", "teacher_q")) == room
    for wrt in ((), ("student_q",), ("teacher_q", "student_k"), ("teacher_q", "teacher_k")):
        assert p.backward_bytes(wrt) == max((shares[name] for name in wrt), default=0)
    assert f"workspace {student.workspace_bytes} B" in str(p)
    assert [fused.side for fused in plan().fused] == ["teacher", "student"]
    for what, why in (
        ({"deterministic": True}, "adds its sums in no fixed order"),
        ({"dtypes": ("float32",) * 2}, "it multiplies 16-bit elements"),
        ({"dims": (256, 200)}, "registers hold gradients of head dims up to 192"),
        ({"aligned": False}, "16-byte boundaries"),
        ({"arch": "sm_80"}, "it needs compute capability 9.0"),
    ):
        unfused = plan(**what)
        assert unfused.fused == ()
        assert unfused.backward_bytes(INPUT_NAMES) == 0
        for side in ATTENTION_KL.sides:
            assert re.search(f"{side}: a kernel per gradient .*{why}", str(unfused))
    assert plan().unfused == ()
    for what, why in (
        ({"dims": (576, 192)}, "registers hold no pieces of 576 columns beside a gradient of 192"),
        ({"dims": (64, 192), "heads": 32, "key_heads": 1, "M": 4096}, "registers hold no shares of few row tiles"),
        ({"dims": (64, 192), "mask": MaskSpec(("keys",))}, "registers hold no such mask beside a gradient of 192"),
    ):
        assert why in dict(plan(**what).unfused)["student"]


def test_one_pass_blocks_fill_the_gpu_once_and_their_registers_fit() -> None:
    for dims, mask in itertools.product(((64, 64), (128, 128), (96, 96), (128, 64)), (MaskSpec(), MaskSpec(("keys",)))):
        for fused in plan(dims=dims, mask=mask).fused:
            prepare, main, finish = fused.kernels
            assert not main.tile.direct
            assert main.blocks == facts_for_arch("sm_90").multiprocessors
            assert prepare.blocks == finish.blocks == 8 * -(-8192 // 64)
            constants = dict(main.constants)
            consumer, query_gradient, producer = (
                int(constants[f"SKL_{name}_REGISTERS"]) for name in ("CONSUMER", "DQ", "PRODUCER")
            )
            # Four warpgroups of 128 threads; a multiprocessor has 65,536.
            assert 128 * (2 * consumer + query_gradient + producer) <= 65536
            assert {consumer % 8, query_gradient % 8, producer % 8} == {0}


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_tile_with_all_keys_needs_no_sums_of_the_queries_gradient(deterministic: bool) -> None:
    for dims, rows in (((64, 64), 256), ((128, 128), 128), ((64, 128), 128)):
        for N, M, mask in itertools.product((1, rows - 59, rows), (64, 197), (MaskSpec(), MaskSpec(("keys",)))):
            p = plan(M=M, N=N, dims=dims, heads=150, mask=mask, deterministic=deterministic)
            assert p.unfused == ()
            for fused in p.fused:
                assert [kernel.symbol for kernel in fused.kernels] == ["streamkl_fused_prepare", "streamkl_fused"]
                assert fused.main.tile.direct
                entries, vectors = 150 * -(-M // 64), 4 if fused.side == "teacher" else 3
                assert fused.workspace_bytes == -(-4 * (entries * (64 * vectors + 1) + 1) // 128) * 128
                assert f"workspace {fused.workspace_bytes} B" in str(p)
                assert fused.kernels[0].blocks == entries
        for fused in plan(M=197, N=rows + 1, dims=dims, heads=150).fused:
            assert len(fused.kernels) == 3
            assert fused.workspace_bytes > 4 * 150 * 197 * dims[fused.side == "student"]
        assert (plan(M=197, N=rows + 1, dims=dims, heads=150, deterministic=True).fused == ()) is True
    # Whatever the lengths of sequences are, one of them has no more keys than there are.
    for N, finishes in ((128, False), (129, True)):
        packed = plan(M=1000, N=N, heads=150, mask=MaskSpec(("packed",), (("q_offset_given", 0),)), sequences=3, rank=3)
        assert [len(fused.kernels) == 3 for fused in packed.fused] == [finishes] * 2
    # Few heads: twice the blocks count for more.
    assert [fused.main.tile.rows for fused in plan(M=197, N=197, heads=8).fused] == [128, 128]
    # Registers hold no more of a gradient of 192 columns than that it is added to sums.
    assert {f.side: f.main.tile.direct for f in plan(M=197, N=128, dims=(192, 128), heads=150).fused} == {
        "teacher": False,
        "student": True,
    }


@pytest.mark.parametrize("kind", ["forward", "gradient", "attention", "attention_gradient"])
def test_registers_of_warpgroups_fit_what_a_launch_gets(kind: str) -> None:
    """A consumer has the sums, and the producer addresses: not the other way."""
    masks = [catalogue.mask_spec(name, 8192, 8192) for name in catalogue.MASK_CASES]
    op = ATTENTION_KL if kind in ("forward", "gradient") else SPARSE_ATTENTION
    kernel = KERNELS[kind][0]
    for task, mask in itertools.product([x for x in (op.forward, *op.gradients, *op.fused) if x.kind == kind], masks):
        of = problem(mask=mask)
        value = of.distributions[0].k
        work = Work(
            of if op is ATTENTION_KL else replace(of, op=op.name, distributions=of.distributions[:1], extras=(value,)),
            task,
        )
        for row in kernel.table(work):
            constants = kernel.constants(work, row)
            consumer, producer = (constants[f"SKL_{name}_REGISTERS"] for name in ("CONSUMER", "PRODUCER"))
            assert {consumer % 8, producer % 8} == {0}
            assert producer < consumer <= 240, row
            threads = kernel.threads(row)
            # Of 65,536 per multiprocessor, as many for each thread, in eights.
            given = 65536 // (threads * row.min_blocks) // 8 * 8 * threads
            assert 128 * (row.warps // 4 * consumer + producer) <= given, (task, row)


def test_splits_of_keys_are_worth_a_block(rng: Any) -> None:
    facts = facts_for_arch("sm_90")
    for blocks, tiles in zip(rng.integers(1, 200, 200).tolist(), rng.integers(1, 3000, 200).tolist()):
        for each in (1, 2):
            splits = combine.splits(blocks, tiles, facts, each)
            assert splits == 1 or tiles >= 8 * splits
            assert splits == 1 or (tiles >= 64 and blocks * 5 < facts.multiprocessors * 4)
            # With no other number the last block would be done sooner; a start counts as six tiles.
            if tiles >= 64 and blocks * 5 < facts.multiprocessors * 4:
                most = min(tiles // 8, -(-2 * each * facts.multiprocessors // blocks))
                done = [-(-blocks * n // (132 * each)) * (-(-tiles // n) + 6) for n in range(1, most + 1)]
                assert splits == 1 + done.index(min(done))


@pytest.mark.parametrize("lengths", [(512, 65_536), (4096, 512)])
def test_packed_sequences_whose_ends_meet_count_as_that(lengths: tuple[int, int]) -> None:
    """Without an offset the last row of a sequence is at its last key, wherever that is."""
    M, N = lengths

    def counted(given: int, offset: int) -> list[Any]:
        mask = MaskSpec(("packed", "causal"), (("q_offset_given", given), ("q_offset", offset)))
        what = problem(M=3 * M, N=3 * N, rank=3, sequences=3, mask=mask)
        steps = [steps_of(what, 128, 64, by_keys).tolist() for by_keys in (False, True)]
        return [combine.key_tiles(what, 128, 64), *steps]

    assert counted(0, 0) == counted(1, N - M) != counted(1, 0)


def test_few_row_tiles_on_many_keys_stay_the_best_ones_and_are_split() -> None:
    """A chunk on a cache: half as many rows to a block would fill the GPU too, but compute more slowly."""
    for mask in (MaskSpec(), MaskSpec(("causal",), (("q_offset", 65536 - 512),))):
        forward = plan(M=512, N=65536, dims=(128, 128), heads=32, key_heads=8, mask=mask).forward
        assert forward.tile is not None
        assert (forward.tile.rows, forward.blocks, forward.schedule.splits) == (256, 128, 2)
    # Where a mask leaves few keys there is nothing to split.
    narrow = MaskSpec(("window",), (("left", 600), ("right", 0), ("q_offset", 65536 - 512)))
    forward = plan(M=512, N=65536, dims=(128, 128), heads=32, key_heads=8, mask=narrow).forward
    assert (forward.blocks, forward.schedule.splits) == (128, 1)


@pytest.mark.parametrize(
    "M, heads, key_heads, rows, packed",
    [
        (16, 32, (8, 8), 64, "4 heads packed into 64 rows"),
        (17, 32, (8, 8), 128, "4 heads packed into 128 rows"),
        (1, 32, (1, 1), 256, "16 heads packed into 256 rows"),
        (3, 8, (2, 1), 64, "4 heads packed into 64 rows"),
        (33, 12, (4, 2), 256, "3 heads packed into 192 rows"),
        (64, 12, (6, 2), 128, "2 heads packed into 128 rows"),
    ],
)
def test_few_queries_of_heads_that_share_keys_are_packed(
    M: int, heads: int, key_heads: tuple[int, int], rows: int, packed: str
) -> None:
    what = problem(M=M, N=65536, dims=(128, 128), heads=heads)
    sides = (replace(side, k=replace(side.k, heads=k)) for side, k in zip(what.distributions, key_heads))
    what = replace(what, distributions=tuple(sides))
    forward = make_plan(what, facts_for_arch("sm_90")).forward
    together = gcd(*(heads // k for k in key_heads))
    assert forward.tile is not None
    assert forward.tile.rows == rows
    assert packed in str(forward)
    s = forward.schedule
    assert (s.packed_rows, s.heads_together) == (dict(forward.constants)["SKL_PACKED_ROWS"], together)
    assert s.tiles == -(-together * s.packed_rows // rows)
    assert forward.blocks == heads // together * s.tiles * s.splits
    assert {box.name: (box.rows, box.heads) for box in forward.boxes} == {
        "teacher_q": (s.packed_rows, rows // s.packed_rows),
        "teacher_k": (64, 1),
        "student_q": (s.packed_rows, rows // s.packed_rows),
        "student_k": (64, 1),
    }


@pytest.mark.parametrize(
    "M, heads, key_heads, packs",
    [
        (16, 32, (8, 8), (4, 8)),  # heads to a pack, packs
        (17, 32, (8, 8), (2, 16)),
        (1, 32, (1, 1), (4, 8)),
        (5, 6, (1, 2), (4, 2)),  # three share keys of both sides: one of four slots is empty
        (7, 14, (2, 2), (4, 4)),  # seven: the second pack has three
        (16, 12, (1, 2), (4, 4)),
    ],
)
@pytest.mark.parametrize("mask", [MaskSpec(), MaskSpec(("causal",), (("q_offset", 40),))])
def test_the_one_pass_backward_counts_packs(
    M: int, heads: int, key_heads: tuple[int, int], packs: tuple[int, int], mask: MaskSpec
) -> None:
    what = problem(M=M, N=20000, dims=(64, 128), heads=heads, batch=3, mask=mask)
    sides = (replace(side, k=replace(side.k, heads=k)) for side, k in zip(what.distributions, key_heads))
    what = replace(what, distributions=tuple(sides))
    p = make_plan(what, facts_for_arch("sm_90"))
    most, count = packs
    assert [fused.side for fused in p.fused] == ["teacher", "student"]
    for fused, dim, vectors in zip(p.fused, (64, 128), (4, 3), strict=True):
        prepare, main, finish = fused.kernels
        assert main.schedule.packed_rows == dict(main.constants)["SKL_PACKED_ROWS"] == 64 // most
        assert main.schedule.heads_together == gcd(*(heads // k for k in key_heads))
        assert prepare.blocks == finish.blocks == 3 * count
        sums = 4 * (3 * count * (64 * (dim + vectors) + 1) + 1)
        assert fused.workspace_bytes == -(-sums // 128) * 128 + main.schedule.partial_bytes
        boxes = {box.name: (box.rows, box.heads) for box in main.boxes}
        assert boxes["teacher_q"] == boxes["student_q"] == (64 // most, most)
        assert boxes["teacher_k"][1] == boxes["student_k"][1] == 1
        assert f"packed into {min(most, main.schedule.heads_together) * 64 // most} rows" in str(main)


def test_what_the_one_pass_backward_does_not_pack() -> None:
    few: dict[str, Any] = {"M": 16, "N": 20000, "heads": 32, "key_heads": 8}
    assert all(fused.main.schedule.packed_rows for fused in plan(**few).fused)
    for what in (
        {"M": 33},  # half a tile of one head
        {"key_heads": 32},
        {"M": 8, "heads": 8, "key_heads": 8},
        {"deterministic": True},
        {"dtypes": ("float32", "float32")},
        {"mask": MaskSpec(("keys",))},
    ):
        assert plan(**{**few, **what}).fused == ()
    whole = plan(**{**few, "M": 64}).fused
    assert [fused.main.schedule.packed_rows for fused in whole] == [0, 0]


def test_what_is_not_packed() -> None:
    few: dict[str, Any] = {"M": 16, "N": 65536, "heads": 32}
    lists = MaskSpec(("blocks",), (), patterns.local(256, queries=16, keys=65536))
    packed = MaskSpec(("packed",), (("q_offset_given", 0), ("q_offset", 0)))
    for what in (
        {},  # every head has keys of its own
        {"key_heads": 8, "M": 65},
        {"key_heads": 8, "mask": lists},
        {"key_heads": 8, "mask": packed, "sequences": 2},
        {"key_heads": 8, "arch": "sm_80"},
    ):
        forward = plan(**{**few, **what}).forward
        assert forward.schedule.packed_rows == 0
        assert dict(forward.constants).get("SKL_PACKED_ROWS", 0) == 0
        assert all(box.heads == 1 for box in forward.boxes)


def test_heads_side_by_side_are_groups_of_one_size() -> None:
    # Five heads of causal D = 64 would fit the budget, and leave three; of eleven, three would be a group of their own.
    causal = MaskSpec(("causal",), (("q_offset", 0),))
    for heads, size in ((8, 4), (7, 4), (11, 11), (4, 4), (1, 1)):
        (teacher, student) = plan(heads=heads, mask=causal).fused
        assert [teacher.main.schedule.head_group, student.main.schedule.head_group] == [size, size]
    # Where no row sees fewer keys than another, heads need not end together.
    for mask in (MaskSpec(("keys",)), MaskSpec(("lengths",))):
        assert plan(heads=11, mask=mask).fused[1].main.schedule.head_group == 4
    # Of key heads, whose tiles are what blocks take: by tens the last two of 32 would start when the others end.
    for batch, size in ((4, 8), (3, 12), (5, 10), (64, 10)):
        (_, student) = plan(batch=batch, heads=32, key_heads=8, M=2048, N=2048, dims=(128, 128), mask=causal).fused
        assert student.main.schedule.head_group == size
    for nothing in ({"heads": 0}, {"batch": 0}):
        assert plan(**nothing).forward.blocks == 0


def test_groups_of_heads_leave_no_block_without_work() -> None:
    tiles, blocks = 16, 132
    for heads in (1, 2, 24, 32, 40, 77, 132):
        size = shares.side_by_side(tiles, heads, 8, blocks)
        ends = [0] * blocks
        for first in range(0, heads, size):
            for length in range(tiles, 0, -1):
                for _ in range(min(size, heads - first)):
                    ends[ends.index(min(ends))] += length
        # Whatever the groups are, nobody ends before the longest tile or the mean.
        assert max(ends) <= 1.08 * max(heads * tiles * (tiles + 1) / 2 / blocks, tiles) + tiles / 4
    assert shares.side_by_side(tiles, 10_000, 7, blocks) == 7


def test_one_mask_with_holes_leaves_registers_for_one_pass() -> None:
    pattern = patterns.local(256, queries=8192)
    assert plan(mask=MaskSpec(("causal", "blocks"), (("q_offset", 0),), pattern)).unfused == ()
    assert plan(mask=MaskSpec(("lengths", "keys"))).unfused == ()
    # A mask of rows beside it goes with the three row vectors of the student, not with the teacher's four.
    assert [fused.side for fused in plan(mask=MaskSpec(("keys", "query_mask"))).fused] == ["student"]
    assert plan(mask=MaskSpec(("keys", "blocks"), (), pattern)).fused == ()
    assert "registers hold one mask with holes" in str(plan(mask=MaskSpec(("keys", "blocks"), (), pattern)))


def test_tiles_are_kept_from_where_they_spill() -> None:
    """By mask and by architecture, as compiles have shown."""
    half, single = (next(x for x in catalogue.ELEMENT_TYPES if x.teacher == name) for name in ("bfloat16", "float32"))

    def tiles(arch: str, dim: int, types: catalogue.ElementTypes, mask: str) -> dict[str, Any]:
        plan = make_plan(catalogue.problem((dim, dim), types, mask), facts_for_arch(arch))
        return {name: kernel.tile for name, kernel in plan.gradients}

    plain, picked = (tiles("sm_80", 128, half, mask)["teacher_q"] for mask in ("none", "query_mask"))
    assert plain == replace(picked, unroll=4, max_mask=0, before=plain.before, reason=plain.reason)
    for dim, arch, columns in ((96, "sm_90", 32), (96, "sm_100", 32), (128, "sm_90", 32), (128, "sm_100", 16)):
        found = tiles(arch, dim, single, "padding")
        assert {(tile.rows, tile.columns) for tile in found.values()} == {(128, columns)}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_plans_count_in_words(arch: str) -> None:
    """One of a thing is not several, whatever is counted."""
    shapes = [{"M": 1, "N": 1, "heads": 1, "batch": 1, "key_heads": 1}, {"heads": 2, "batch": 3, "M": 300, "N": 9000}]
    texts = [str(plan(arch, **what)) for what in shapes]
    texts += [str(numpy_plan(problem(**what))) for what in shapes]
    for (B, H, M, D), groups in itertools.product(((1, 1, 1, 16), (2, 4, 9000, 64)), (1, 2)):
        teacher, index = np.empty((B, 2 * H, M, D), np.float32), np.empty((B, 2, M, D), np.float32)
        arrays = (teacher, teacher[:, :groups], index, index[:, :groups], np.empty((B, 2, M), np.float32))
        texts.append(str(indexer_kl_plan(*arrays, index_scale=1.0, head_groups=groups, arch=arch)))
    one = {"block", "batch", "head", "query", "key", "thread", "row", "column", "stage", "group", "state", "strip"}
    several = {f"{x}s" for x in one} - {"batchs", "querys"} | {"batches", "queries"}
    for text in texts:
        counted = [
            (int(n), noun) for n, noun in re.findall(r"\b(\d+) (?:key (?=head))?(\w+)", text) if noun in one | several
        ]
        assert len(counted) > 4
        assert [found for found in counted if (found[0] == 1) != (found[1] in one)] == []
    assert "1 block of 1 batch x 1 head x 1 query, 1 key at a time" in texts[2]
    assert "1 block x" in texts[0]
    assert "1 key head," in texts[0]


def test_limits_are_errors() -> None:
    with pytest.raises(NotImplementedError, match=f"kernels count rows up to {MAX_ROWS}; split the call"):
        plan(M=MAX_ROWS + 1)
    with pytest.raises(NotImplementedError, match="exceed the grid limit of 2147483647; split the batch"):
        plan(M=1 << 20, heads=1 << 20)
    old = replace(facts_for_arch("sm_80"), compute_capability=(7, 5), name="T4")
    with pytest.raises(NotImplementedError, match=r"GPU T4 has compute capability 7.5; kernels are built for 8.0"):
        make_plan(problem(), old)
    with pytest.raises(
        NotImplementedError, match=r"576 .float32. and 256 .float32. need more shared memory than the 101376 B"
    ):
        plan("sm_89", dims=(576, 256), dtypes=("float32", "float32"))
    with pytest.raises(
        NotImplementedError,
        match="wrt 'teacher_q': gradients to this side are built for head dims up to 256",
    ):
        plan(dims=(576, 64)).gradient("teacher_q")
    with pytest.raises(ValueError, match="'sm_75' is not known; known are sm_80"):
        facts_for_arch("sm_75")


def test_more_heads_than_two_grid_axes_could_hold() -> None:
    p = plan(M=128, N=128, heads=70_000, batch=3)
    assert p.forward.blocks >= 210_000


def test_tile_rows_say_why_and_make_whole_products() -> None:
    tasks = (ATTENTION_KL.forward, *ATTENTION_KL.gradients, *ATTENTION_KL.fused)
    for task, dtypes in itertools.product(tasks, (("bfloat16",) * 2, ("float32",) * 2)):
        for kernel in KERNELS[task.kind]:
            for row in kernel.table(Work(problem(dtypes=dtypes), task)):
                assert row.reason
                assert row.min_blocks >= 1
                assert row.stages >= 1
                # The depth of a product, and on Hopper the warps that make one together.
                assert row.columns % 16 == 0
                assert kernel.family != "sm90" or row.warps % 4 == 0


def test_a_request_is_told_what_runs_and_where() -> None:
    """Forwards with and without a workspace, and any set of gradients with any room, from the plan alone."""
    p = plan(M=64, heads=1, N=100_000, dims=(128, 128), mask=MaskSpec(("keys",)))
    assert p.combine
    split, combine = p.forward_steps(workspace=True)
    assert (split.kernels, combine.kernels) == ((p.forward,), (p.combine,))
    assert split.placed == combine.placed == (("workspace", p.mask_bytes),)
    assert p.mask_bytes > 0
    assert split.outputs == combine.outputs
    (whole,) = p.forward_steps(workspace=False)
    assert whole.placed == ()
    assert whole.kernels[0].schedule.splits == 1
    assert whole.kernels[0].blocks * p.forward.schedule.splits == p.forward.blocks
    assert (p.forward.text, p.forward.args) == (whole.kernels[0].text, whole.kernels[0].args)

    p = plan(M=16384, N=16384, dims=(128, 128), mask=MaskSpec(("blocks",), (), striped(False)))
    pair = ("student_q", "student_k")
    (fused,) = p.backward_steps(pair)
    main = p.fused[1].main
    sums = p.fused[1].workspace_bytes - main.schedule.partial_bytes
    assert fused.kernels == p.fused[1].kernels
    assert dict(fused.outputs) == {"out": "student_k", "out_q": "student_q"}
    schedule = main.schedule
    shared = (("partial_arrivals", sums), ("partial_sums", sums + schedule.arrivals_bytes))
    assert (fused.placed, fused.cleared) == ((("workspace", 0), *shared), (sums, schedule.cleared_bytes))
    assert p.backward_steps(pair, p.backward_bytes(pair)) == (fused,)
    (unsplit,) = p.backward_steps(pair, p.backward_bytes(pair) - 1)
    assert (unsplit.kernels, unsplit.placed, unsplit.cleared) == (fused.kernels, (("workspace", 0),), None)
    for room in (sums - 1, 0):
        apart = p.backward_steps(pair, room)
        assert [step.kernels for step in apart] == [(p.gradient(name),) for name in pair]
        assert [step.outputs for step in apart] == [(("out", name),) for name in pair]
        for name, step in zip(pair, apart, strict=True):
            schedule = p.gradient(name).schedule
            fits = 0 < schedule.partial_bytes <= room
            shared = (("partial_arrivals", 0), ("partial_sums", schedule.arrivals_bytes))
            assert (step.placed, step.cleared) == ((shared, (0, schedule.cleared_bytes)) if fits else ((), None))
    # Every gradient once, in one pass or alone.
    for wrt in itertools.chain.from_iterable(itertools.combinations(INPUT_NAMES, n) for n in range(5)):
        made = [name for step in p.backward_steps(wrt) for _, name in step.outputs]
        assert sorted(made) == sorted(wrt)


def test_nothing_runs_where_there_is_nothing_to_write() -> None:
    for nothing in ({"heads": 0}, {"batch": 0}, {"M": 0}):
        assert plan(**nothing).forward_steps(workspace=True) == ()
    assert plan(heads=0).backward_steps(INPUT_NAMES) == ()
    assert [dict(step.outputs)["out"] for step in plan(M=0).backward_steps(INPUT_NAMES)] == ["teacher_k", "student_k"]


@pytest.mark.parametrize("types", list(itertools.product(("bfloat16", "float16", "float32"), repeat=2)), ids="/".join)
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_kernels_are_told_what_their_numbers_are(types: tuple[str, str], precision: str) -> None:
    p = plan("sm_80", dims=(64, 128), dtypes=types, settings=(("precision", precision),), M=133, heads=1, N=400_000)
    assert p.combine is not None
    assert (p.combine.blocks - 1) * p.combine.threads < 133 <= p.combine.blocks * p.combine.threads
    single = "float32" in types
    assert dict(p.combine.constants)["SKL_HAS_OFFSETS"] == int(single)
    codes = {"bfloat16": "kBf16", "float16": "kF16", "float32": "kF32"}
    for kernel in kernels(p):
        if kernel is not p.combine:
            told = dict(kernel.constants)
            assert (told["SKL_T_ELEMENT"], told["SKL_S_ELEMENT"]) == (codes[types[0]], codes[types[1]])
            assert (told["SKL_T_DIM"], told["SKL_S_DIM"]) == (64, 128)
            # float32 in three parts or in two; one text for both where there is none.
            assert told["SKL_PLANES"] == (2 if single and precision == "high" else 3)
    for name, kernel in p.gradients:
        assert dict(kernel.constants)["SKL_GRAD_SIDE"] == int(name.startswith("student"))
        assert dict(kernel.constants)["SKL_ROWS_ARE_QUERIES"] == int(name.endswith("_q"))


@pytest.mark.parametrize("dims", [(64, 128), (128, 64), (72, 128), (192, 128), (128, 96)])
def test_sides_that_change_places_have_the_same_passes(dims: tuple[int, int]) -> None:
    """But for a row vector that the teacher's gradient reads besides."""
    one, other = (plan(dims=pair) for pair in (dims, dims[::-1]))
    mirrored = {"teacher": "student", "student": "teacher"}
    passes = {fused.side: fused for fused in other.fused}
    assert {mirrored[fused.side] for fused in one.fused} == set(passes)
    for fused in one.fused:
        same = passes[mirrored[fused.side]]
        assert fused.main.tile == same.main.tile
        # By pieces it may be room for one more of them.
        assert abs(fused.main.smem_bytes - same.main.smem_bytes) <= (8192 if same.main.tile.pieces else 4096)
        assert fused.main.blocks == same.main.blocks
    for name, kernel in one.gradients:
        side, _, which = name.partition("_")
        same = other.gradient(f"{mirrored[side]}_{which}")
        assert (kernel.tile, kernel.blocks) == (same.tile, same.blocks)


def test_facts_of_an_installed_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        CUDARuntimeError = RuntimeError
        cudaDevAttrMaxSharedMemoryPerBlockOptin = 97

        def getDeviceProperties(self, index: int) -> dict[str, Any]:
            if index == 5:
                raise RuntimeError("invalid device ordinal")
            return {"major": 8, "minor": 6, "multiProcessorCount": 82, "name": b"a GPU", "sharedMemPerBlock": 49152}

        def deviceGetAttribute(self, attribute: int, index: int) -> int:
            assert (attribute, index) == (97, 3)
            return 101_376

    fake = SimpleNamespace(cuda=SimpleNamespace(runtime=Runtime()))
    monkeypatch.setattr("streamkl_cupy.compiler.nvrtc.import_cupy", lambda: fake)
    facts = gpus.device_facts.__wrapped__(3)
    assert facts == gpus.DeviceFacts((8, 6), 101_376, 82, "a GPU")
    assert facts.flag == "sm_86"
    with pytest.raises(DriverError, match="GPU 5 cannot be used: invalid device ordinal"):
        gpus.device_facts.__wrapped__(5)


@pytest.mark.parametrize("keys", [1, 32, 33, 8192, 100_001])
def test_a_warp_packs_a_word_of_a_mask_of_keys(keys: int) -> None:
    for batch in (1, 3):
        (packed,) = plan(N=keys, batch=batch, mask=MaskSpec(("keys",))).mask_bits
        bits = packed.kernel
        assert bits.threads % 32 == 0
        assert bits.threads <= 1024
        words = batch * -(-keys // 32)
        assert (bits.blocks - 1) * bits.threads < 32 * words <= bits.blocks * bits.threads

"""Kernels of attention: what is packed for them, how they are chosen, and each family against the definition."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_packing
from test_packing import LOG2E, Book, needs_compiler, shapes, strides, under

import streamkl_cupy
from streamkl_cupy import launch, patterns, planning
from streamkl_cupy.kernels import KERNELS, attention_fused_sm90, structs
from streamkl_cupy.kernels.gathered import gathered
from streamkl_cupy.kernels.gpus import facts_for_arch
from streamkl_cupy.kernels.work_tiles import same_lists
from streamkl_cupy.ops import SPARSE_ATTENTION
from streamkl_cupy.planning import make_plan
from streamkl_cupy.problem import Device, MaskSpec, Operand, Problem, Side, compact_strides
from streamkl_cupy.testing import attention as definition
from streamkl_cupy.testing.compare import check_gradient, check_lse
from streamkl_cupy.testing.reference import rounded

FOUR, THREE = ("batch", "head", "row", "column"), ("batch", "head", "row")
NAMES = SPARSE_ATTENTION.names
NO_MASK = MaskSpec()


def members(name: str) -> dict[str, str]:
    """Of the arguments of attention's kernels, with the codes of their types."""
    if name == "AttentionRowsArgs":
        tensors = {"grad": FOUR, "saved_out": FOUR, "lse": THREE, "grad_lse": THREE}
        rest = {"entries": "i", "heads": "i", "queries": "i", "workspace": "Q", "copy": "Q"}
    else:
        counts = "batch heads queries keys group tiles head_group splits sequences"
        rest = {**{f"n.{x}": "i" for x in counts.split()}, "n.mask": f"{structs.MASK_WORDS}q", "numbers.scale": "f"}
        tensors = dict.fromkeys(NAMES, FOUR)
        if "Gradient" in name or "Fused" in name:
            tensors |= dict.fromkeys(("grad", "out", "out_value"), FOUR)
            rest |= {"out_scale": "f", "rows": "Q"}
        else:
            tensors |= {"out": FOUR, "lse": THREE}
            rest |= {"workspace": "Q"}
    found = {f"{x}.pointer": "Q" for x in tensors} | {f"{x}.{a}": "q" for x, axes in tensors.items() for a in axes}
    found |= rest
    if name.startswith("Hopper"):
        found = {f"base.{x}": code for x, code in found.items()}
        found |= dict.fromkeys(NAMES if name == "HopperAttentionArgs" else (*NAMES, "grad"), "16Q")
        if "Fused" in name:
            found |= {"out_q.pointer": "Q", **{f"out_q.{a}": "q" for a in FOUR}, "workspace": "Q"}
    return found


class Call:
    """One in which no two numbers are the same that could be taken for one another."""

    def __init__(self, rng: np.random.Generator, M: int, N: int, dims: tuple[int, int], mask: MaskSpec) -> None:
        addresses = itertools.count(1 << 20, 4096)
        batch, heads, key_heads = 2, 8, 2

        def operand(count: int, rows: int, dim: int) -> Operand:
            row = dim + 8 * int(rng.integers(1, 9))
            head = row * rows + 8 * int(rng.integers(1, 99))
            return Operand(count, rows, dim, "bfloat16", (head * count + 8, head, row, 1), True)

        side = Side(operand(heads, M, dims[0]), operand(key_heads, N, dims[0]), float(rng.uniform(0.1, 2)))
        value = operand(key_heads, N, dims[1])
        self.problem = p = Problem(
            batch, heads, M, N, (side,), mask=mask, device=Device("cuda"), op=SPARSE_ATTENTION.name, extras=(value,)
        )
        self.inputs = {name: SimpleNamespace(ptr=next(addresses)) for name in NAMES}
        self.results = SPARSE_ATTENTION.Results(*(SimpleNamespace(ptr=next(addresses)) for _ in range(2)))
        shape = (batch, heads, M, dims[1])
        wide = {"grad": tuple(3 * x for x in compact_strides(shape)), "out": compact_strides(shape)}
        rows = {"lse": (heads * M + 5, M, 1), "grad_lse": (2 * heads * M, 2 * M, 2)}
        self.saved = SPARSE_ATTENTION.Saved(
            **{name: SimpleNamespace(ptr=next(addresses), strides=x) for name, x in {**wide, **rows}.items()}
        )
        self.outputs = {
            name: SimpleNamespace(ptr=next(addresses), shape=p.input_shape(name), dtype="bfloat16") for name in NAMES
        }
        self.workspace = next(addresses)
        self.runner = launch.Runner(p)

    def expected(self, kernel: Any, mask: tuple[int, ...] = ()) -> dict[str, Any]:
        """What all kernels of tiles are told."""
        p = self.problem
        found: dict[str, Any] = {
            "n.batch": 2, "n.heads": 8, "n.queries": p.queries, "n.keys": p.keys, "n.group": 4, "n.sequences": 0,
            **{f"n.{x}": getattr(kernel.schedule, x) for x in ("tiles", "head_group", "splits")},
            "n.mask": (*mask, *[0] * (structs.MASK_WORDS - len(mask))),
            "numbers.scale": pytest.approx(p.distributions[0].scale * LOG2E),
        }  # fmt: skip
        for name, view in self.inputs.items():
            found |= {f"{name}.pointer": view.ptr, **strides(name, p.operand(name).strides)}
        return found

    def saved_row(self, name: str, field: str, axes: tuple[str, ...]) -> dict[str, Any]:
        view = getattr(self.saved, name)
        return under(field, {"pointer": view.ptr, **dict(zip(axes, view.strides, strict=True))})


@pytest.fixture(params=["sm_80", "sm_90"])
def book(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Book:
    monkeypatch.setattr(test_packing, "paths", members)
    return Book(monkeypatch, tmp_path, request.param)


def check(got: dict[str, Any], want: dict[str, Any], **maps: int) -> None:
    """The members that were read, but for maps, of which the first word is the address in a `Book`."""
    found = {name: got.pop(name)[0] for name in (*NAMES, "grad") if name in got}
    assert found in ({}, maps)
    assert got == want


@needs_compiler
def test_a_forward_of_split_keys_is_packed_by_name(book: Book, rng: np.random.Generator) -> None:
    call = Call(rng, 70, 70_000, (64, 128), NO_MASK)
    plan = call.runner.plan
    assert plan.forward.schedule.splits > 1
    inputs = tuple(call.inputs.values())
    call.runner.forward(inputs, call.results, 7, call.workspace)
    lse, out = call.results
    want = call.expected(plan.forward) | {"workspace": call.workspace}
    want |= under("lse", {"pointer": lse.ptr, "batch": 8 * 70, "head": 70, "row": 1})
    want |= {"out.pointer": out.ptr, **strides("out", compact_strides((2, 8, 70, 128)))}
    assert [name for name, _ in book] == ["streamkl_attention", "streamkl_attention_combine"]
    for _, got in book:
        check(got, want, **{name: x.ptr for name, x in call.inputs.items()})
    assert book.shapes == shapes(plan.forward, plan.combine)
    assert plan.workspace_bytes == structs.attention_states(128).bytes(plan.forward.schedule.splits * 2 * 8 * 70)


@needs_compiler
@pytest.mark.parametrize("wrt", [NAMES, ("key",), ("query", "value")])
def test_a_backward_is_packed_by_name(
    book: Book, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, wrt: tuple[str, ...]
) -> None:
    monkeypatch.setattr(attention_fused_sm90, "WITHOUT_PATTERNS", True)
    call = Call(rng, 300, 333, (64, 128), MaskSpec(("causal",), (("q_offset", 33),)))
    plan = call.runner.plan
    outputs = SPARSE_ATTENTION.Gradients(*(call.outputs[name] if name in wrt else None for name in NAMES))
    call.runner.backward(tuple(call.inputs.values()), call.saved, outputs, 7, call.workspace)
    passes = [fused for fused in plan.fused if set(fused.names) <= set(wrt)][:1]
    done = {name for fused in passes for name in fused.names}
    kernels = [kernel for fused in passes for kernel in fused.kernels]
    kernels += [plan.gradient(name) for name in NAMES if name in wrt and name not in done]
    made = plan.saved_rows[0].kernel
    assert book.shapes == shapes(made, *kernels)
    copied = any(kernel.boxes for _, kernel in plan.gradients)
    copy = call.workspace + structs.ATTENTION_ROWS.bytes(2 * 8 * 300)
    (first, got), *rest = book
    assert first == "streamkl_attention_rows"
    grad = call.saved_row("grad", "grad", FOUR)
    assert got == {
        **grad, **call.saved_row("out", "saved_out", FOUR), **call.saved_row("lse", "lse", THREE),
        **call.saved_row("grad_lse", "grad_lse", THREE), "entries": 2, "heads": 8, "queries": 300,
        "workspace": call.workspace, "copy": copy if copied else 0,
    }  # fmt: skip
    for (symbol, read), kernel in zip(rest, kernels, strict=True):
        assert symbol == kernel.symbol
        want = call.expected(kernel, (33,)) | grad | {"rows": call.workspace}
        want["out_scale"] = pytest.approx(call.problem.distributions[0].scale)
        written = dict(kernel.task.outputs)
        if len(written) == 3:
            want["workspace"] = call.workspace + plan.gradient_start
        for field in ("out", "out_value", "out_q")[: 3 if len(written) == 3 else 2]:
            got = {x: read.pop(x) for x in [y for y in read if y.startswith(f"{field}.")]}
            if field in written:
                name = written[field]
                shape = call.outputs[name].shape
                assert got == {f"{field}.pointer": call.outputs[name].ptr, **strides(field, compact_strides(shape))}
            else:
                assert got[f"{field}.pointer"] == 0
        check(read, want, **{name: x.ptr for name, x in call.inputs.items()}, grad=copy)
    room = plan.backward_bytes(wrt)
    assert room >= copy - call.workspace + copied * 2 * 8 * 300 * 128 * 2


@needs_compiler
def test_a_backward_without_a_workspace_is_refused(book: Book, rng: np.random.Generator) -> None:
    call = Call(rng, 30, 33, (64, 64), NO_MASK)
    outputs = SPARSE_ATTENTION.Gradients(*call.outputs.values())
    inputs, least = tuple(call.inputs.values()), call.runner.plan.gradient_start
    for room in ((0,), (call.workspace, None, 0), (call.workspace, None, least - 1)):
        with pytest.raises(ValueError, match="workspace: got none; these gradients need what backward_bytes says"):
            call.runner.backward(inputs, call.saved, outputs, 7, *room)
        assert not book
    call.runner.backward(inputs, call.saved, outputs, 7, call.workspace, None, least)
    assert book[0][0] == "streamkl_attention_rows"


# Choice of kernels


def problem(dims: tuple[int, int], dtype: str = "bfloat16", rows: tuple[int, int] = (4096, 4096),
            heads: tuple[int, int] = (32, 8), mask: MaskSpec = NO_MASK) -> Problem:  # fmt: skip
    M, N = rows

    def operand(count: int, length: int, dim: int) -> Operand:
        return Operand(count, length, dim, dtype, (count * length * dim, length * dim, dim, 1), True)

    side = Side(operand(heads[0], M, dims[0]), operand(heads[1], N, dims[0]), 1.0)
    extras = (operand(heads[1], N, dims[1]),)
    return Problem(
        1, heads[0], M, N, (side,), mask=mask, device=Device("cuda"), op=SPARSE_ATTENTION.name, extras=extras
    )


@pytest.mark.parametrize(
    "dims, dtype, forward, gradients, both",
    [
        ((128, 128), "bfloat16", "sm90", ["sm90"] * 3, "sm90"),
        ((64, 128), "float16", "sm90", ["sm90"] * 3, "sm90"),
        ((192, 128), "bfloat16", "sm90", ["sm90", "sm80", "sm80"], ""),
        ((256, 256), "float16", "sm80", ["sm80"] * 3, ""),
        ((128, 100), "bfloat16", "sm80", ["sm80"] * 3, "sm80"),
        ((128, 128), "float32", "sm80", ["sm80"] * 3, ""),
        ((64, 64), "float32", "sm80", ["sm80"] * 3, "sm80"),
    ],
)
def test_the_kernels_of_a_call_on_hopper(
    dims: tuple[int, int], dtype: str, forward: str, gradients: list[str], both: str
) -> None:
    plan = make_plan(problem(dims, dtype), facts_for_arch("sm_90"))
    assert plan.forward.family == forward
    assert [kernel.family for _, kernel in plan.gradients] == gradients
    assert [fused.main.family for fused in plan.fused] == both.split()
    assert bool(both) or plan.unfused[0][1]
    copied = "sm90" in gradients
    assert len(plan.saved_rows[0].kernel.regions) == 1 + copied
    assert len(plan.saved_rows[0].copies) == copied
    assert not any(kernel.boxes for _, kernel in make_plan(problem(dims, dtype), facts_for_arch("sm_80")).gradients)


@pytest.mark.parametrize("rows", [(0, 64), (64, 0), (0, 0)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_nothing_is_launched_without_blocks(arch: str, rows: tuple[int, int]) -> None:
    plan = make_plan(problem((64, 64), rows=rows), facts_for_arch(arch))
    steps = (*plan.forward_steps(False), *plan.backward_steps(NAMES))
    assert all(kernel.blocks for step in steps for kernel in step.kernels)
    written = {name for step in steps for _, name in step.outputs}
    empty = {name for name in NAMES if 0 in plan.problem.input_shape(name)}
    assert written == ({*NAMES} - empty) | ({"out", "lse"} if rows[0] else set())


def test_heads_of_a_group_are_packed_where_they_read_the_same_keys() -> None:
    dense = np.random.default_rng().random((8, 1, 64)) < 0.3
    dense[:, :, 0] = True
    dense[0, 0, 1], dense[1, 0, 1] = True, False
    alike = patterns.from_dense(np.repeat(dense, 4, 0), queries=1, keys=4096, block=64)
    other = patterns.from_dense(np.tile(dense, (4, 1, 1)), queries=1, keys=4096, block=64)
    assert (same_lists(alike, 4), same_lists(other, 4)) == (True, False)

    def packed(mask: MaskSpec, rows: int = 1) -> int:
        plan = make_plan(problem((128, 128), rows=(rows, 4096), mask=mask), facts_for_arch("sm_90"))
        return plan.forward.schedule.packed_rows

    assert packed(NO_MASK) == 16
    assert packed(NO_MASK, 17) == 32
    assert packed(NO_MASK, 65) == 0
    assert packed(MaskSpec(("blocks",), (), alike)) == 16
    assert packed(MaskSpec(("blocks",), (), other)) == 0


def test_stationary_keys_beside_a_pattern_are_64() -> None:
    """Neighbouring blocks have other lists, and rows that do not see a tile would wait for those that do."""
    made = patterns.sharded(32, window=127, stride=4, queries=4096, block=64, causal=True, key_heads=8)
    with_lists = make_plan(problem((128, 128), mask=MaskSpec(("blocks",), (), made)), facts_for_arch("sm_90"))
    without = make_plan(problem((128, 128)), facts_for_arch("sm_90"))
    tiles = [plan.fused[-1].main.tile for plan in (with_lists, without)]
    assert [tile and (tile.rows, tile.warps) for tile in tiles] == [(64, 8), (128, 8)]


@pytest.mark.parametrize(
    "heads, group, rows, block",
    [(4, 2, (300, 333), 32), (1, 4, (100, 70), 16), (6, 3, (700, 600), 128), (2, 1, (9, 16), 16)],
)
def test_units_of_keys_are_gathered_with_all_that_their_lists_have(
    heads: int, group: int, rows: tuple[int, int], block: int, rng: np.random.Generator
) -> None:
    M, N = rows
    dense = rng.random((heads, -(-M // block), -(-N // block))) < 0.3
    made = patterns.from_dense(dense, queries=M, keys=N, block=block)
    units, offsets, entries = gathered(made, group)
    count = -(-N // 64)
    for order in units.reshape(len(units), -1):
        assert sorted(order)[:count] == list(range(count))
    subtiles = np.repeat(np.repeat(dense, block // 16, 1), block // 16, 2)[:, : -(-M // 16), : -(-N // 16)]
    seen = np.zeros_like(subtiles)
    for head, tile in np.ndindex(heads, units.shape[1]):
        listed = entries[offsets[head, tile] : offsets[head, tile + 1]]
        assert (np.diff(listed[:, 0].astype(int)) > 0).all()
        for row, _, bits, more in listed.tolist():
            assert more == 0
            for bit in range(32):
                half, down, across = bit // 16, bit // 4 % 4, bit % 4
                at = 4 * row + across, 4 * int(units[0 if len(units) == 1 else head // group, tile, half]) + down
                if at[0] < seen.shape[1] and at[1] < seen.shape[2] and bits >> bit & 1:
                    seen[head][at] = True
    np.testing.assert_array_equal(seen, subtiles)
    # What the heads of a block have together decides which units go together.
    together = gathered(made, group).lists().lengths
    assert together.shape == (heads, units.shape[1])


def test_alike_units_are_gathered() -> None:
    """Stripes with stripes: the lists of a block have little that only one of its units has."""
    made = patterns.sharded(16, window=448, stride=16, queries=16384, block=64, causal=True)
    alone = len(made.tile_lists(64, 64, True).entries)
    neighbours = 2 * len(made.tile_lists(128, 64, True).entries)
    assert 2 * len(gathered(made, 1).entries) < 1.11 * alone < 1.5 * alone < neighbours


def test_all_gradients_in_one_pass_are_planned() -> None:
    made = patterns.sharded(32, window=127, stride=4, queries=4096, block=64, causal=True, key_heads=8)
    mask = MaskSpec(("blocks",), (), made)
    plan = make_plan(problem((128, 128), mask=mask), facts_for_arch("sm_90"))
    whole, both = plan.fused
    assert whole.names == NAMES
    sums = 4 * 32 * 64 * 64 * 128
    assert whole.workspace_bytes == sums + 128  # and a counter, in a line of its own
    assert plan.backward_bytes(NAMES) == plan.gradient_start + whole.workspace_bytes
    assert "all gradients of the attention: kernels/attention_fused_sm90.cu" in str(plan)
    assert f"workspace {sums + 128} B" in str(plan)
    assert [step.kernels[-1].symbol for step in plan.backward_steps(("key", "value"))][1:] == [both.main.symbol]
    # Without room for the sums, as with equal bits, each of the two passes has its kernel.
    few = [[kernel.name for kernel in step.kernels] for step in plan.backward_steps(NAMES, plan.gradient_start)]
    assert few[1:] == [["attention"], ["query"]]
    equal = make_plan(replace(problem((128, 128), mask=mask), deterministic=True), facts_for_arch("sm_90"))
    assert equal.fused == (both,)
    assert "attention: no pass for all gradients (not sm90: deterministic=True" in str(equal)
    assert equal.backward_bytes(NAMES) == equal.gradient_start
    without = make_plan(problem((128, 128)), facts_for_arch("sm_90"))
    assert [x.names for x in without.fused] == [both.names]
    assert "no pass for all gradients (not sm90: without a pattern" in str(without)


# Results


@pytest.fixture(params=["sm80", "sm90", "one pass"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Kernels of one family for all that it can do, or with that for all gradients in one pass."""
    found = str(request.param)
    monkeypatch.setattr(attention_fused_sm90, "WITHOUT_PATTERNS", True)
    if found != "one pass":
        monkeypatch.setitem(KERNELS, "attention_fused", ())
        for kind in ("attention", "attention_gradient"):
            of_family = tuple(kernel for kernel in KERNELS[kind] if kernel.family in (found, "sm80"))
            monkeypatch.setitem(KERNELS, kind, of_family)
    for cached in (planning.make_plan, planning._unsplit_plan):
        cached.cache_clear()
    return found


# M, N, D, D_v, H, H_k.
EXTENTS = {
    "odd": (77, 130, 40, 24, 4, 2),
    "wide": (90, 150, 192, 128, 2, 1),
    "groups": (200, 200, 128, 128, 6, 2),
    "decode": (1, 9000, 128, 128, 8, 2),
    "packed decode": (20, 3000, 64, 128, 8, 2),
    # Enough rows for the tiles that large problems have.
    "many": (128, 96, 64, 64, 56, 56),
    "many wide": (128, 96, 128, 128, 56, 56),
    # More work tiles than blocks stay on a GPU.
    "stays": (260, 500, 64, 64, 40, 40),
    "stays wide": (257, 300, 128, 128, 64, 64),
}
CASES = ("plain", "causal", "far", "holes", "lengths", "pattern", *EXTENTS)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", CASES)
def test_each_family_is_as_defined(
    case: str, dtype: str, family: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden memory holds what is no number, and so do outputs before."""
    cupy = pytest.importorskip("cupy")
    from streamkl_cupy import call as calls

    monkeypatch.setattr(calls, "_runners", {})
    monkeypatch.setattr(calls, "_checked", {})
    monkeypatch.setattr(calls, "_looks", {})
    M, N, D, Dv, H, Hk = EXTENTS.get(case, (300, 333, 128, 64, 4, 2))
    options: dict[str, Any] = {"causal": case != "plain"}
    if case == "far":
        options |= {"q_offset": -100, "softcap": 3.0, "scale": -0.2}
    if case == "holes":
        options |= {"key_mask": rng.random((2, N)) < 0.5, "query_mask": rng.random((2, M)) < 0.5}
        # Keys that nobody but masked rows at the ends would see.
        options["key_mask"][:, [M - 1, N - 1]], options["query_mask"][:, [0, M - 1]] = True, False
    if case == "lengths":
        options |= {"key_lengths": np.array([N, 7], np.int32), "query_lengths": np.array([0, M], np.int32)}
    if case == "pattern":
        blocks = rng.random((H, -(-M // 32), -(-N // 32))) < 0.4
        blocks[:, 2], blocks[:, :, 3] = False, False
        options["block_mask"] = patterns.from_dense(blocks, queries=M, keys=N, block=32)
    q, k, v, grad = (
        rounded(rng.standard_normal(s), dtype) for s in ((2, H, M, D), (2, Hk, N, D), (2, Hk, N, Dv), (2, H, M, Dv))
    )
    grad_lse = rng.standard_normal((2, H, M)).astype(np.float32)
    want = definition.forward(q, k, v, **options)
    wanted = definition.backward(grad, grad_lse, q, k, v, **options)
    dead_rows = ~np.isfinite(want.lse)
    dead_keys = (np.abs(wanted.value.value).sum(-1) == 0) & (np.abs(wanted.key.value).sum(-1) == 0)
    q[dead_rows], grad[dead_rows], grad_lse[dead_rows] = np.nan, np.inf, np.nan
    k[dead_keys], v[dead_keys] = np.nan, np.inf
    import conftest

    backend = conftest.CuPy()
    arrays = [backend.array(x, dtype) for x in (q, k, v)]
    for name in ("key_mask", "query_mask", "key_lengths", "query_lengths"):
        if name in options:
            options[name] = cupy.asarray(options[name])
    for bytes_of in {x.nbytes for x in arrays} | {2 * H * M * Dv * arrays[0].itemsize, 4 * 2 * H * M}:
        cupy.full(bytes_of, 255, np.uint8)  # no numbers, in memory that results are likely to get
    forward = streamkl_cupy.sparse_attention_forward(*arrays, **options)
    check_gradient("out", backend.numpy(forward.out), want.out, dtype)
    check_lse("lse", backend.numpy(forward.lse), want.lse, want.largest, dtype)
    found = streamkl_cupy.sparse_attention_backward(
        backend.array(grad, dtype), *arrays, saved=forward, grad_lse=backend.array(grad_lse, "float32"), **options
    )
    for name, got, terms in zip(NAMES, found, wanted, strict=True):
        check_gradient(f"gradient of {name}, {family}", backend.numpy(got), terms, dtype)

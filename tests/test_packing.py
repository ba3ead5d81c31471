"""What is packed for kernels, read back as a kernel would: through the text of its structs, compiled for the host.

Everything of a call differs from everything else in it, so that two things that change places are noticed.
"""

from __future__ import annotations

import ctypes
import itertools
import pickle
import re
import shutil
import struct
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streamkl_cupy import launch, patterns
from streamkl_cupy.compiler.nvrtc import Loaded
from streamkl_cupy.compiler.source import flatten
from streamkl_cupy.kernels import structs, tensor_maps
from streamkl_cupy.kernels.base import Box
from streamkl_cupy.kernels.gpus import facts_for_arch
from streamkl_cupy.ops import ATTENTION_KL
from streamkl_cupy.planning import Plan, make_plan
from streamkl_cupy.problem import INPUT_NAMES, Device, MaskSpec, Operand, Problem, Side

COMPILER = shutil.which("c++") or shutil.which("g++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
LOG2E = 1.4426950408889634
ROWS = ("grad", "teacher_lse", "student_lse", "kl")

SHIM = "#include <cstddef>\n#include <algorithm>\n#define __device__\nusing std::max;\nusing std::min;\n"


_libraries: dict[str, ctypes.CDLL] = {}
"""What has been compiled, by its text: of all tests."""


def compiled(folder: Path, text: str) -> ctypes.CDLL:
    assert COMPILER
    if text not in _libraries:
        source = folder / f"text{len(list(folder.iterdir()))}.cpp"
        source.write_text(SHIM + text)
        subprocess.run(
            [COMPILER, "-std=c++17", "-w", "-shared", "-fPIC", source, "-o", source.with_suffix(".so")], check=True
        )
        _libraries[text] = ctypes.CDLL(str(source.with_suffix(".so")))
    return _libraries[text]


def prologue(text: str) -> str:
    """The structs that stand in a kernel's text."""
    found = re.search(r'#line 1 "structs.py"\n(.*?)\n#line', text, re.DOTALL)
    assert found
    return found[1]


def paths(name: str) -> dict[str, str]:
    """Members of an argument struct, with the codes of their types; those of its base as a kernel says them."""
    if name == "MaskBitsArgs":
        return {"bytes": "Q", "words": "Q", "batch": "q", "column": "q", "count": "q", "entries": "i"}
    four, three = ("batch", "head", "row", "column"), ("batch", "head", "row")
    if name == "SavedRowsArgs":
        found = {
            f"{x}.{axis}": "q" for x in ("grad", "value", "teacher_lse", "student_lse", "moments") for axis in three
        }
        found |= {f"{x}.pointer": "Q" for x in ("grad", "value", "teacher_lse", "student_lse", "moments")}
        return found | {"entries": "i", "heads": "i", "queries": "i", "workspace": "Q"}
    forward = "Forward" in name
    tensors = {f"in.{x}": four for x in INPUT_NAMES}
    tensors |= dict.fromkeys(("value", "teacher_lse", "student_lse"), three)
    tensors |= {} if forward else {"grad": three, "out": four}
    found = {f"{x}.pointer": "Q" for x in tensors}
    found |= {f"{x}.{axis}": "q" for x, axes in tensors.items() for axis in axes}
    counts = "batch heads queries keys teacher_group student_group tiles head_group splits sequences"
    found |= {f"n.{x}": "i" for x in counts.split()} | {
        "n.mask": "12q",
        "teacher_numbers.scale": "f",
        "student_numbers.scale": "f",
    }
    partials = {"partial_slots": "i", "partial_arrivals": "Q", "partial_sums": "Q"}
    found |= {"workspace": "Q"} if forward else {"out_scale": "f", **partials}
    if "Fused" in name:
        found = {f"base.{x}": code for x, code in found.items()}
        found |= {"out_q.pointer": "Q", **{f"out_q.{axis}": "q" for axis in four}, "workspace": "Q"}
    if name.startswith("Hopper"):
        found = {f"{'fused' if 'Fused' in name else 'base'}.{x}": code for x, code in found.items()}
        found |= dict.fromkeys(INPUT_NAMES, "16Q")
    return found


def read(folder: Path, text: str, name: str, address: int) -> dict[str, Any]:
    """Every member of the struct `name` at an address, by the end of its path that it has without the bases'."""
    members = paths(name)
    offsets = "".join(f", offsetof({name}, {member})" for member in members)
    made = compiled(folder, f'{prologue(text)}\nextern "C" const long long found[] = {{sizeof({name}){offsets}}};')
    size, *at = (ctypes.c_longlong * (len(members) + 1)).in_dll(made, "found")
    assert sum(struct.calcsize(code) for code in members.values()) <= size
    found = {}
    for (member, code), offset in zip(members.items(), at):
        values = struct.unpack(f"={code}", ctypes.string_at(address + offset, struct.calcsize(code)))
        found[re.sub(r"^((base|fused|in)\.)+", "", member)] = values[0] if len(values) == 1 else values
    return found


class Book(list[tuple[str, dict[str, Any]]]):
    """A driver that notes launches: symbol and arguments, and in `shapes` blocks, threads and bytes of shared memory.
    Of sets to zero, where and how many bytes."""

    class CUDARuntimeError(Exception):
        pass

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, arch: str) -> None:
        self.folder, self.loaded = folder, [("", "", 0)]
        self.shapes: list[tuple[int, int, int]] = []
        self.cleared: list[tuple[int, int]] = []
        cuda = SimpleNamespace(driver=self, runtime=self)
        monkeypatch.setattr(launch, "import_cupy", lambda: SimpleNamespace(cuda=cuda))
        monkeypatch.setattr(launch, "device_facts", lambda index: facts_for_arch(arch))
        monkeypatch.setattr(launch, "_primary_context", lambda index: 1)
        monkeypatch.setattr(launch, "load", self.load)
        monkeypatch.setattr(launch, "encode", lambda pointer, *how: struct.pack("=Q120x", pointer))
        lists = SimpleNamespace(pointers=(71, 72, 73, 74, 75), units=0, used_on=lambda stream: None)
        monkeypatch.setattr(launch, "_tile_lists", lambda problem, plan: lists if problem.mask.pattern else None)

    def load(self, text: str, symbol: str, arch: str, **how: Any) -> Loaded:
        self.loaded.append((text, symbol, how["smem_bytes"] if how else 0))
        return Loaded(len(self.loaded) - 1, None)

    def ctxGetCurrent(self) -> int:
        return 1

    def streamIsCapturing(self, stream: int) -> bool:
        return False

    def memsetAsync(self, address: int, value: int, size: int, stream: int) -> None:
        assert (value, stream) == (0, 7)
        self.cleared.append((address, size))

    def launchKernel(self, handle: int, *args: Any) -> None:
        stream, parameters, extra = args[-3:]
        assert (stream, extra) == (7, 0)
        (address,) = struct.unpack("=Q", ctypes.string_at(parameters, 8))
        text, symbol, granted = self.loaded[handle]
        blocks, *ones, threads, _, _, smem_bytes = args[:7]
        assert (*ones, *args[4:6]) == (1, 1, 1, 1)
        assert smem_bytes == granted
        self.shapes.append((blocks, threads, smem_bytes))
        (name,) = re.findall(rf"{symbol}\(const __grid_constant__ (\w+)", text)
        self.append((symbol, read(self.folder, text, name, address)))


class Call:
    """A call in which no two numbers are the same that could be taken for one another."""

    def __init__(self, rng: np.random.Generator, M: int, N: int, dims: tuple[int, int], mask: MaskSpec) -> None:
        self.addresses = itertools.count(1 << 20, 4096)
        groups = {"teacher": 2, "student": 4}
        batch, heads = 2, 8

        def operand(side: str, which: str, dim: int) -> Operand:
            count, rows = (heads, M) if which == "q" else (heads // groups[side], N)
            row = dim + 8 * int(rng.integers(1, 9))
            head = row * rows + 8 * int(rng.integers(1, 99))
            steps = (head * count + 8 * int(rng.integers(1, 99)), head, row, 1)
            return Operand(count, rows, dim, "bfloat16", steps, True)

        sides = [
            Side(operand(side, "q", dim), operand(side, "k", dim), scale)
            for side, dim, scale in zip(groups, dims, rng.uniform(0.1, 2, 2))
        ]
        self.problem = p = Problem(batch, heads, M, N, tuple(sides), mask=mask, device=Device("cuda"))
        self.inputs = {name: SimpleNamespace(ptr=next(self.addresses)) for name in INPUT_NAMES}
        row = {name: int(rng.integers(1, 9)) for name in ROWS}
        self.saved = ATTENTION_KL.Saved(**{
            name: SimpleNamespace(ptr=next(self.addresses), strides=(heads * (M * step + i), M * step + i, step))
            for i, (name, step) in enumerate(row.items())
        })  # fmt: skip
        self.outputs = SimpleNamespace(**{
            name: SimpleNamespace(ptr=next(self.addresses), shape=p.input_shape(name), dtype="bfloat16")
            for name in INPUT_NAMES
        })  # fmt: skip
        self.rows = ATTENTION_KL.Results(**{name: SimpleNamespace(ptr=next(self.addresses)) for name in ROWS[1:]})
        self.masks = SimpleNamespace(**{
            name: SimpleNamespace(ptr=next(self.addresses), shape=(batch, count), strides=(2 * count + 3, 2))
            for name, count in (
                ("key_lengths", N), ("key_mask", N), ("cu_seqlens_q", N), ("cu_seqlens_k", N),
                ("query_lengths", M), ("query_mask", M),
            )
        })  # fmt: skip
        self.workspace = next(self.addresses)
        self.runner = launch.Runner(p)

    def forward(self, workspace: int | None = None) -> None:
        at = self.workspace if workspace is None else workspace
        self.runner.forward(tuple(self.inputs.values()), self.rows, 7, at, vars(self.masks))

    def backward(self, *wrt: str, **room: int) -> None:
        outputs = ATTENTION_KL.Gradients(
            *(getattr(self.outputs, name) if name in wrt else None for name in INPUT_NAMES)
        )
        self.runner.backward(
            tuple(self.inputs.values()), self.saved, outputs, 7, self.workspace, vars(self.masks), **room
        )  # fmt: skip

    def expected(self, kernel: Any, mask: tuple[int, ...]) -> dict[str, Any]:
        """What all kernels are told; ones without some of it are not asked for that."""
        p = self.problem
        found: dict[str, Any] = {
            "n.batch": 2, "n.heads": 8, "n.queries": p.queries, "n.keys": p.keys, "n.sequences": p.sequences,
            "n.teacher_group": 2, "n.student_group": 4,
            **{f"n.{x}": getattr(kernel.schedule, x) for x in ("tiles", "head_group", "splits")},
            "n.mask": (*mask, *[0] * (12 - len(mask))),
            "teacher_numbers.scale": pytest.approx(p.side("teacher").scale * LOG2E),
            "student_numbers.scale": pytest.approx(p.side("student").scale * LOG2E),
        }  # fmt: skip
        for name, view in self.inputs.items():
            found[f"{name}.pointer"] = view.ptr
            found |= strides(name, p.operand(name).strides)
        return found


def shapes(*kernels: Any) -> list[tuple[int, int, int]]:
    """As the plan has them, which is held against the GPU."""
    return [(kernel.blocks, kernel.threads, kernel.smem_bytes) for kernel in kernels]


def strides(name: str, steps: tuple[int, ...]) -> dict[str, int]:
    return {f"{name}.{axis}": step for axis, step in zip(("batch", "head", "row", "column"), steps)}


def compact(name: str, call: Call, pointer: int) -> dict[str, int]:
    """A new array of an input's shape."""
    x = call.problem.operand(name)
    return {"pointer": pointer, "batch": x.heads * x.rows * x.dim, "head": x.rows * x.dim, "row": x.dim, "column": 1}


def under(name: str, members: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{name}.{member}": value for member, value in members.items()}


@pytest.fixture(params=["sm_80", "sm_90"])
def book(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Book:
    return Book(monkeypatch, tmp_path, request.param)


WINDOW = MaskSpec(("window", "lengths", "keys"), (("left", 11), ("right", 13), ("q_offset", -17)))


def check(got: dict[str, Any], want: dict[str, Any], book: Book) -> None:
    maps = {name: (got.pop(name), got[f"{name}.pointer"]) for name in INPUT_NAMES if name in got}
    for name, (words, pointer) in maps.items():
        assert words[0] == pointer, f"{name}: the map of another array"
    assert got == want


@needs_compiler
def test_a_forward_is_packed_by_name(book: Book, rng: np.random.Generator) -> None:
    # Few rows and many keys, all of which are met: they are split.
    mask = MaskSpec(WINDOW.parts, (("left", 70_000), ("right", 70_001), ("q_offset", -17)))
    call = Call(rng, 9, 70_000, (64, 128), mask)
    plan: Plan = call.runner.plan
    assert plan.forward.schedule.splits > 1
    call.forward()
    bits, forward, combine = book
    row = {"batch": 8 * 9, "head": 9, "row": 1}
    rows = [("value", call.rows.kl), ("teacher_lse", call.rows.teacher_lse), ("student_lse", call.rows.student_lse)]
    words = (70_000, 70_001, -17, call.masks.key_lengths.ptr, call.workspace)
    want = call.expected(plan.forward, words) | {"workspace": call.workspace + plan.mask_bytes}
    for name, view in rows:
        want |= under(name, {**row, "pointer": view.ptr})
    assert [name for name, _ in book] == ["streamkl_mask_bits", "streamkl_forward", "streamkl_combine"]
    check(forward[1], want, book)
    check(combine[1], want, book)
    assert book.shapes == shapes(plan.mask_bits[0].kernel, plan.forward, plan.combine)
    assert bits[1] == {
        "bytes": call.masks.key_mask.ptr, "words": call.workspace, "batch": 140_003, "column": 2,
        "count": 70_000, "entries": 2,
    }  # fmt: skip


@needs_compiler
def test_masks_of_keys_and_of_rows_are_packed_one_after_the_other(book: Book, rng: np.random.Generator) -> None:
    call = Call(rng, 300, 3333, (64, 128), MaskSpec(("query_lengths", "keys", "query_mask"), ()))
    call.forward()
    plan: Plan = call.runner.plan
    keys, rows, (_, forward), *_ = book
    behind = call.workspace + -(-2 * -(-3333 // 32) * 4 // 128) * 128
    for got, name, count, words in (
        (keys, "key_mask", 3333, call.workspace),
        (rows, "query_mask", 300, behind),
    ):
        assert got == (
            "streamkl_mask_bits",
            {
                "bytes": getattr(call.masks, name).ptr, "words": words, "batch": 2 * count + 3, "column": 2,
                "count": count, "entries": 2,
            },
        )  # fmt: skip
    assert forward["n.mask"][:3] == (call.masks.query_lengths.ptr, call.workspace, behind)
    assert plan.mask_bytes == behind - call.workspace + 128
    assert book.shapes[:2] == shapes(*(packed.kernel for packed in plan.mask_bits))


@needs_compiler
@pytest.mark.parametrize("name", INPUT_NAMES)
def test_a_gradient_is_packed_by_name(book: Book, rng: np.random.Generator, name: str) -> None:
    call = Call(rng, 300, 333, (64, 128), WINDOW)
    kernel = call.runner.plan.gradient(name)
    call.backward(name)
    (bits, (symbol, got)) = book
    assert book.shapes == shapes(call.runner.plan.mask_bits[0].kernel, kernel)
    assert (bits[0], symbol) == ("streamkl_mask_bits", "streamkl_gradient")
    side = call.problem.side(name[:7])
    want = call.expected(kernel, (11, 13, -17, call.masks.key_lengths.ptr, call.workspace)) | gradient(call, side)
    want |= under("out", compact(name, call, getattr(call.outputs, name).ptr))
    check(got, {**want, "partial_slots": 0, "partial_arrivals": 0, "partial_sums": 0}, book)


def gradient(call: Call, side: Side) -> dict[str, Any]:
    found: dict[str, Any] = {"out_scale": pytest.approx(side.scale)}
    for field, name in zip(("grad", "teacher_lse", "student_lse", "value"), ROWS):
        view = getattr(call.saved, name)
        found |= under(field, {"pointer": view.ptr, **dict(zip(("batch", "head", "row"), view.strides))})
    return found


@needs_compiler
@pytest.mark.parametrize("side", ["teacher", "student"])
def test_both_gradients_of_a_side_are_packed_by_name(
    side: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rng: np.random.Generator
) -> None:
    book = Book(monkeypatch, tmp_path, "sm_90")
    call = Call(rng, 300, 333, (64, 128), WINDOW)
    plan = call.runner.plan
    fused = dict(zip(("teacher", "student"), plan.fused))[side]
    call.backward(f"{side}_q", f"{side}_k")
    assert [name for name, _ in book] == [
        "streamkl_mask_bits", "streamkl_fused_prepare", "streamkl_fused", "streamkl_fused_finish"
    ]  # fmt: skip
    want = call.expected(fused.main, (11, 13, -17, call.masks.key_lengths.ptr, call.workspace))
    want |= gradient(call, call.problem.side(side)) | {"workspace": call.workspace + plan.mask_bytes}
    for field, which in (("out", "k"), ("out_q", "q")):
        name = f"{side}_{which}"
        want |= under(field, compact(name, call, getattr(call.outputs, name).ptr))
    assert book.shapes == shapes(plan.mask_bits[0].kernel, *fused.kernels)
    for _, got in book[1:]:
        check(got, {**want, "partial_slots": 0, "partial_arrivals": 0, "partial_sums": 0}, book)


@needs_compiler
def test_partial_sums_of_lists_lie_behind_what_the_kernel_has_besides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rng: np.random.Generator
) -> None:
    book = Book(monkeypatch, tmp_path, "sm_90")
    pattern = patterns.sharded(16, window=512, stride=16, queries=16384, block=128).select([0])
    call = Call(rng, 16384, 16384, (128, 128), MaskSpec(("blocks",), (), pattern))
    fused = call.runner.plan.fused[1]
    kernel = fused.main
    assert kernel.schedule.partial_bytes > 0
    sums = call.workspace + fused.workspace_bytes - kernel.schedule.partial_bytes + kernel.schedule.arrivals_bytes
    call.backward("student_q", "student_k")
    for _, got in book:
        assert got["n.mask"][:7] == (71, 72, 73, 74, 75, pattern.heads, 0)
        partials = (got["partial_slots"], got["partial_arrivals"], got["partial_sums"])
        assert partials == (kernel.schedule.partial_slots, sums - kernel.schedule.arrivals_bytes, sums)
    assert book.cleared == [(sums - kernel.schedule.arrivals_bytes, kernel.schedule.arrivals_bytes)]
    # With room for the sums of the queries only, no list is split; with less, each gradient has its own kernel.
    own = fused.workspace_bytes - kernel.schedule.partial_bytes
    book.clear()
    call.backward("student_q", "student_k", room=own)
    assert [name for name, _ in book] == ["streamkl_fused_prepare", "streamkl_fused", "streamkl_fused_finish"]
    assert {(got["partial_arrivals"], got["partial_sums"]) for _, got in book} == {(0, 0)}
    book.clear()
    call.backward("student_q", "student_k", room=own - 1)
    assert [name for name, _ in book] == ["streamkl_gradient"] * 2


@needs_compiler
def test_workspaces_are_as_large_as_what_kernels_put_there(tmp_path: Path, rng: np.random.Generator) -> None:
    sizes = compiled(
        tmp_path,
        flatten("common/sizes.cuh", {}, {})
        + 'extern "C" int tiles(int rows, int tile, int sequences) { return row_tiles(rows, tile, sequences); }\n'
        'extern "C" int words(int bits) { return bit_words(bits); }\n',
    )
    for trial in range(6):
        M, N = int(rng.integers(300, 3000)), int(rng.integers(*((1, 129) if trial > 3 else (300, 3000))))
        sequences = int(rng.integers(1, 9)) if trial % 2 else 0
        batch, heads, dim = 1 if sequences else 2, 4, int(rng.choice([64, 96, 128]))
        q, k = (Operand(heads, n, dim, "bfloat16", (heads * n * dim, n * dim, dim, 1), True) for n in (M, N))
        parts = ("packed",) if sequences else ("keys",)
        spec = MaskSpec(parts, (("q_offset_given", 0),) if sequences else ())
        side = Side(q, k, 1.0)
        problem = Problem(batch, heads, M, N, (side, side), mask=spec, device=Device("cuda"), sequences=sequences)
        plan = make_plan(problem, facts_for_arch("sm_90"))
        if not sequences:
            assert 0 <= plan.mask_bytes - 4 * batch * sizes.words(N) < 128
        for fused in plan.fused:
            made = compiled(tmp_path, prologue(fused.main.text) + END)
            made.end.restype = ctypes.c_longlong
            entries = batch * heads * sizes.tiles(M, 64, sequences)
            prepare, _, *finish = fused.kernels
            assert {kernel.blocks for kernel in (prepare, *finish)} == {entries}
            # What the kernel has there, apart from each other: sums of D columns and 64 rows unless one tile has all
            # keys, row vectors, an exponent.
            each = (64 * dim if N > 128 else 0) + 64 * (4 if fused.side == "teacher" else 3) + 1
            end = made.end(ctypes.c_longlong(entries))
            assert end == 4 * (entries * each + 1)
            assert 0 <= fused.workspace_bytes - fused.main.schedule.partial_bytes - end < 128


END = """
extern "C" long long end(long long entries) {
    FusedWorkspace x;
    x.locate(4096, entries);
    return reinterpret_cast<long long>(x.taken + 1) - 4096;
}
"""


@needs_compiler
def test_plans_go_to_other_processes(book: Book, rng: np.random.Generator) -> None:
    """Those too that a call has packed arguments of: kernels are compiled by many processes."""
    call = Call(rng, 300, 333, (64, 128), WINDOW)
    call.forward()
    call.backward(*INPUT_NAMES)
    assert pickle.loads(pickle.dumps(call.runner.plan)) == call.runner.plan


def test_a_field_without_a_value_is_not_zero_by_chance() -> None:
    with pytest.raises(KeyError, match=r"count.* has no value"):
        structs.MASK_BITS.pack({"batch": 1, "column": 1, "entries": 1})
    with pytest.raises(KeyError, match="rows"):
        structs.MASK_BITS.pack({"batch": 1, "column": 1, "entries": 1, "count": 1, "rows": 1})


@needs_compiler
@pytest.mark.parametrize("wrt", [("student_q",), ("teacher_k", "student_k")])
def test_rows_of_moments_are_made_in_the_workspace_and_read_there(
    book: Book, rng: np.random.Generator, wrt: tuple[str, ...]
) -> None:
    call = Call(rng, 300, 333, (64, 128), WINDOW)
    call.problem = replace(call.problem, divergence="cosine")
    call.runner = launch.Runner(call.problem)
    row = SimpleNamespace(ptr=next(call.addresses), strides=(8 * 300 * 5, 300 * 5, 5, 1))
    call.saved = call.saved._replace(moments=row)
    call.backward(*wrt)
    plan, size = call.runner.plan, 4 * 2 * 8 * 300
    free = call.workspace + plan.mask_bytes
    made: dict[str, int] = {}
    for symbol, got in book:
        if symbol == "streamkl_saved_rows":
            assert [got[x] for x in ("entries", "heads", "queries")] == [2, 8, 300]
            for name, field in (*zip(ROWS, ("grad", "teacher_lse", "student_lse", "value")), ("moments", "moments")):
                view = getattr(call.saved, name)
                want = {"pointer": view.ptr, **dict(zip(("batch", "head", "row"), view.strides))}
                assert {x: got[f"{field}.{x}"] for x in want} == want
            # One side's beside the other's, behind the mask's bits and before what gradients work in.
            assert free <= got["workspace"] <= call.workspace + plan.gradient_start - 4 * size
            free = got["workspace"] + 4 * size
            made[("teacher", "student")[len(made) if len(wrt) > 1 else 1]] = got["workspace"]
        elif "mask_bits" not in symbol:
            side = next(x for x in made if got["out.pointer"] in [
                getattr(call.outputs, name).ptr for name in wrt if name.startswith(x)
            ])  # fmt: skip
            for i, field in enumerate(("grad", "teacher_lse", "student_lse", "value")):
                want = {"pointer": made[side] + i * size, "batch": 8 * 300, "head": 300, "row": 1}
                assert {x: got[f"{field}.{x}"] for x in want} == want
    assert len(made) == len(wrt)
    assert len([symbol for symbol, _ in book if "gradient" in symbol]) == len(wrt)


def test_split_states_fit_the_workspace(rng: np.random.Generator) -> None:
    M, heads = int(rng.integers(1, 64)), int(rng.integers(1, 4))
    q, k = (Operand(heads, n, 64, "float16", (heads * n * 64, n * 64, 64, 1), True) for n in (M, 100_000))
    side = Side(q, k, 1.0)
    plan = make_plan(
        Problem(1, heads, M, 100_000, (side, side), mask=MaskSpec(), device=Device("cuda")), facts_for_arch("sm_90")
    )
    assert plan.forward.schedule.splits > 1
    (floats,) = re.findall(r"kStates = (\d+)", prologue(plan.forward.text))
    assert plan.workspace_bytes == 4 * int(floats) * plan.forward.schedule.splits * M * heads


def test_a_tensor_map_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    asked: list[Any] = []

    def encoder(where: Any, *args: Any) -> int:
        asked.extend((where, *args))
        address = ctypes.cast(where, ctypes.c_void_p).value
        assert address
        assert address % 64 == 0
        ctypes.memmove(address, bytes(range(128)), 128)
        return 0

    monkeypatch.setattr(tensor_maps, "_encoder", lambda: encoder)
    heads, rows, dim, batch = 3, 50, 72, 2
    steps = tuple(int(x) for x in 8 * rng.permutation(np.arange(500, 900))[:3])
    x = Operand(heads, rows, dim, "bfloat16", (*steps, 1), True)
    for _ in range(8):  # memory comes at any address
        asked.clear()
        assert tensor_maps.encode(1 << 30, x, batch, Box("student_q", 16, 3)) == bytes(range(128))
    _, kind, rank, pointer, extents, strides, box, each, *rest = asked
    assert (kind.value, rank.value, pointer.value) == (9, 4, 1 << 30)
    assert list(extents) == [dim, rows, heads, batch]
    assert list(strides) == [2 * steps[2], 2 * steps[1], 2 * steps[0]]
    assert list(box) == [64, 16, 3, 1]
    assert list(each) == [1, 1, 1, 1]
    assert [x.value for x in rest] == [0, 3, 3, 0]
    # An axis that is never stepped along may have come with any stride.
    asked.clear()
    tensor_maps.encode(1 << 30, Operand(1, 1, dim, "float16", (7, 5, 3, 1), True), 1, Box("student_q", 48))
    assert asked[1].value == 6
    assert list(asked[5]) == [16, 16, 16]


def test_tensor_maps_have_the_boxes_that_the_kernel_loads() -> None:
    q, k = (Operand(8, n, 128, "bfloat16", (8 * n * 128, n * 128, 128, 1), True) for n in (4096, 8192))
    side = Side(q, k, 1.0)
    plan = make_plan(
        Problem(1, 8, 4096, 8192, (side, side), mask=MaskSpec(), device=Device("cuda")), facts_for_arch("sm_90")
    )
    for kernel in (plan.forward, *(x for _, x in plan.gradients), *(x.main for x in plan.fused)):
        by_queries = dict(kernel.constants)["SKL_ROWS_ARE_QUERIES"]
        stationary, streamed = ("_q", "_k") if by_queries else ("_k", "_q")
        boxes = {box.name: box.rows for box in kernel.boxes}
        assert {box.heads for box in kernel.boxes} == {1}
        assert tuple(boxes) == INPUT_NAMES
        for name in ("teacher", "student"):
            assert boxes[name + stationary] == kernel.tile.rows
            assert boxes[name + streamed] == kernel.tile.columns

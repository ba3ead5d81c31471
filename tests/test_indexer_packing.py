"""What is packed for the indexer's kernels, read back as a kernel would, and where they work in a workspace.

Everything of a call differs from everything else in it, so that two things that change places are noticed.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from test_packing import LOG2E, compiled, needs_compiler, prologue

import streamkl_cupy
from streamkl_cupy import launch
from streamkl_cupy.arrays import ArrayView
from streamkl_cupy.compiler.nvrtc import Loaded
from streamkl_cupy.errors import CaptureError
from streamkl_cupy.indexer import cuda, plan, steps
from streamkl_cupy.indexer.problem import to_problem
from streamkl_cupy.kernels import KERNELS, structs
from streamkl_cupy.kernels.gpus import facts_for_arch
from streamkl_cupy.ops import INDEXER_KL, INDEXER_TARGET, Op
from streamkl_cupy.options import IndexOptions
from streamkl_cupy.problem import Device, compact_strides

Found = dict[str, Any]
SIZES = {"B": 2, "H": 8, "K": 4, "L": 1, "I": 6, "J": 2, "G": 2, "M": 150, "N": 333, "T": 72, "R": 16, "D": 40, "C": 37}
BYTES = {"bfloat16": 2, "float32": 4}
FIELDS = ("batch", "head", "row", "column")
# Of the arguments, with the axes that they have, "-" for none.
TENSORS = {
    "teacher_q": "BHMT", "teacher_k": "BKNT", "rope_q": "BHMR", "rope_k": "BLNR", "index_q": "BIMD", "index_k": "BJND",
    "key_start": "B-M", "key_end": "B-M", "mask": "B-N", "counts": "BGM", "ids": "BGMC", "teacher_lse": "BHM",
    "in_weights": "BIM",
}  # fmt: skip
ARRAYS = {"rope_q": "teacher_q_rope", "rope_k": "teacher_k_rope", "mask": "key_mask", "counts": "topk_length",
          "ids": "topk_indices", "in_weights": "index_weights"}  # fmt: skip


class Book(list[tuple[str, tuple[int, ...], Found]]):
    """A driver that notes launches: symbol, grid, arguments by name; and what is set to zero."""

    offsets: ClassVar[dict[tuple[str, str], list[int]]] = {}
    """By struct and its text: of all tests."""

    class CUDARuntimeError(Exception):
        pass

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, arch: str) -> None:
        self.folder, self.texts = folder, [("", "", 0)]
        self.cleared: list[tuple[int, int]] = []
        self.threads: list[int] = []
        self.told: list[dict[str, str]] = []
        modules = SimpleNamespace(cuda=SimpleNamespace(driver=self, runtime=self))
        for module in (launch, cuda):
            monkeypatch.setattr(module, "import_cupy", lambda: modules)
            monkeypatch.setattr(module, "device_facts", lambda index: facts_for_arch(arch))
        monkeypatch.setattr(launch, "_primary_context", lambda index: 1)
        monkeypatch.setattr(cuda, "load", self.load)

    def load(self, text: str, symbol: str, arch: str, smem_bytes: int) -> Loaded:
        self.texts.append((text, symbol, smem_bytes))
        return Loaded(len(self.texts) - 1, None)

    def ctxGetCurrent(self) -> int:
        return 1

    def streamIsCapturing(self, stream: int) -> bool:
        return False

    def memsetAsync(self, address: int, value: int, size: int, stream: int) -> None:
        assert (value, stream) == (0, 7)
        self.cleared.append((address, size))

    def launchKernel(self, handle: int, *given: Any) -> None:
        *grid, threads, one, other, smem_bytes, stream, parameters, extra = given
        text, symbol, granted = self.texts[handle]
        assert (one, other, stream, extra) == (1, 1, 7, 0)
        assert smem_bytes == granted
        assert threads % 32 == 0
        self.threads.append(threads)
        self.told.append(dict(re.findall(r"#define (SKL_\w+) (.+)", text)))
        (address,) = struct.unpack("=Q", ctypes.string_at(parameters, 8))
        (name,) = re.findall(rf"{symbol}\(const __grid_constant__ (\w+)", text)
        self.append((symbol.removeprefix("streamkl_indexer_"), tuple(grid), self.read(text, name, address)))

    def read(self, text: str, name: str, address: int) -> Found:
        """By the offsets that a C++ compiler finds in the kernel's own text."""
        args = {"IndexerArgs": structs.INDEXER, "IndexerRowsArgs": structs.INDEXER_ROWS}.get(name, structs.INDEXER_PACK)
        code = {"u64": "Q", "i64": "q", "int": "i", "float": "f"}
        members: dict[str, str] = {}
        for field in args.fields:
            if isinstance(field.type, str):
                members[field.name] = code[field.type]
            else:
                members |= {f"{field.name}.{x.name}": code[str(x.type)] for x in field.type.fields}
        key = name, prologue(text)
        if key not in self.offsets:
            found = "".join(f", offsetof({name}, {member})" for member in members)
            made = compiled(self.folder, f'{key[1]}\nextern "C" const long long found[] = {{sizeof({name}){found}}};')
            self.offsets[key] = list((ctypes.c_longlong * (len(members) + 1)).in_dll(made, "found"))
        size, *at = self.offsets[key]
        assert sum(struct.calcsize(x) for x in members.values()) <= size
        return {
            member: struct.unpack(f"={x}", ctypes.string_at(address + offset, struct.calcsize(x)))[0]
            for (member, x), offset in zip(members.items(), at, strict=True)
        }


class Call:
    """One with some of the arrays, each at an address and with strides of its own."""

    def __init__(
        self, rng: np.random.Generator, op: Op, names: tuple[str, ...], dtype: str = "bfloat16", **options: Any
    ) -> None:
        self.addresses = itertools.count(1 << 30, 1 << 20)
        self.rng, self.options, self.op = rng, options, op
        types = {"index_weights": "float32", "teacher_lse": "float32", "key_mask": "bool", "target": "float32"}
        wide = {"topk_indices": "int64", "key_end": "int64"}
        views = {}
        for name in names:
            kind = types.get(name) or wide.get(name) or ("int32" if name in INTEGERS else dtype)
            views[name] = self.view(name, AXES[name], kind)
        self.views = views
        self.inputs = op.Inputs(*(views.get(name) for name in op.names))
        self.problem = to_problem(op, self.inputs, IndexOptions(**options))
        self.runner = cuda.Runner(self.problem)
        self.workspace = 12_345_678_976 + 64  # no multiple of a line

    def view(self, name: str, axes: str, dtype: str) -> ArrayView:
        shape = tuple(SIZES[x] for x in axes)
        padded = (*(n + 8 * int(self.rng.integers(1, 9)) for n in shape[:-1]), shape[-1] + 8 - shape[-1] % 8)
        return ArrayView(name, "", Device("cuda"), dtype, shape, compact_strides(padded), next(self.addresses), None)

    def results(self, **axes: str) -> dict[str, ArrayView]:
        return {name: self.view(name, x, "float32") for name, x in axes.items()}

    def tensor(self, field: str, view: ArrayView | None, axes: str) -> Found:
        # An axis of one is not walked.
        steps = {x: y for x, y in zip(axes.replace("-", ""), view.strides, strict=True) if SIZES[x] > 1} if view else {}
        found = {f"{field}.{part}": steps.get(x, 0) for part, x in zip(FIELDS, axes)}
        return found | {f"{field}.pointer": view.ptr if view else 0}

    def tensors(self, *fields: str) -> Found:
        found: Found = {}
        for field in fields:
            found |= self.tensor(field, self.views.get(ARRAYS.get(field, field)), TENSORS[field])
        return found

    def check_rows(self, got: Found, regions: dict[str, int]) -> None:
        """What the kernels of intervals and of bits are told."""
        n, views = SIZES, self.views
        want = self.tensors("key_start", "key_end", "mask", "counts", "ids")
        want |= {name: views[name].ptr if name in views else 0 for name in ("cu_seqlens_q", "cu_seqlens_k")}
        want |= {name: regions[name] for name in ("row_keys", "tile_keys", "bases", "bits")}
        want |= {
            "q_offset": self.options.get("q_offset") or 0, "offset_given": int("q_offset" in self.options),
            "chosen": n["C"] if "topk_indices" in views else 0, "queries": n["M"], "keys": n["N"], "sequences": 0,
            "diagonal": int(self.options.get("causal", False)), "ratio": self.options.get("compress_ratio", 1),
            "relative": 0, "bit_groups": n["G"] if "topk_indices" in views else 1,
            **{f"wide_{x}": 0 for x in ("q", "k", "start", "counts")},
            "wide_end": int("key_end" in views), "wide_ids": int("topk_indices" in views),
        }  # fmt: skip
        assert {x: y for x, y in got.items() if x not in ("first_row", "bit_rows")} == {
            x: y for x, y in want.items() if x not in ("first_row", "bit_rows")
        }

    def common(self) -> Found:
        """What all kernels of tiles are told, whatever they do."""
        n = SIZES
        return {
            **self.tensors("teacher_q", "teacher_k", "rope_q", "rope_k", "index_q", "index_k"),
            "entries": n["B"], "groups": n["G"], "queries": n["M"], "keys": n["N"],
            "teacher_heads": n["H"] // n["G"], "teacher_group": n["H"] // n["K"], "rope_group": n["H"] // n["L"],
            "index_heads": n["I"] // n["G"], "index_key_heads": n["J"],
            "grid_tiles": -(-n["M"] // 64), "shares": self.runner.plan.cut.shares,
            "teacher_numbers.scale": pytest.approx(self.options["teacher_scale"] * LOG2E),
            "student_numbers.scale": pytest.approx(self.options["index_scale"] * LOG2E),
        }  # fmt: skip

    def check_pack(self, got: Found, regions: dict[str, int], lse: ArrayView, saved: Any = None) -> None:
        n = SIZES
        want = self.tensor("teacher_lse", lse, "BHM") | self.tensors("in_weights")
        for field, name in (("grad", "grad"), ("index_lse", "index_lse"), ("mass", "target_sum")):
            want |= self.tensor(field, saved and getattr(saved, name), "BGM")
        want |= {
            "lse2": regions["lse2"], "weights": regions["weights"], "row_stats": regions["row_stats"] if saved else 0,
            "entries": n["B"], "groups": n["G"], "queries": n["M"], "teacher_heads": n["H"], "index_heads": n["I"],
            "index_scale": pytest.approx(self.options["index_scale"]),
        }  # fmt: skip
        assert got == want

    def check_room(self, regions: dict[str, int], wanted: dict[str, int], size: int) -> None:
        """Regions of so many bytes lie in the workspace, on whole lines, one beside the other."""
        end = self.workspace
        for name in sorted(wanted, key=regions.__getitem__):
            assert regions[name] % 256 == 0, name
            assert regions[name] >= end, name
            end = regions[name] + wanted[name]
        assert end <= self.workspace + size


INTEGERS = ("key_start", "key_end", "topk_indices", "topk_length", "cu_seqlens_q", "cu_seqlens_k")
AXES = {name: axes.replace("-", "") for name, axes in TENSORS.items()} | {
    name: TENSORS[field].replace("-", "") for field, name in ARRAYS.items()
}
OPERANDS = ("teacher_q", "teacher_k", "index_q", "index_k", "index_weights", "teacher_q_rope", "teacher_k_rope")
MASKS = {
    "ids": ("key_start", "key_end", "topk_indices", "topk_length"),
    "keys": ("key_mask",),
}


@pytest.fixture(params=["sm_80", "sm_90"])
def book(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Book:
    # Rows have bits in two launches, and gradients of logits in three strips.
    monkeypatch.setattr(plan, "BITS_BYTES", 2 * 64 * 4 * 2 * 2 * 11)
    monkeypatch.setattr(plan, "STRIP_BYTES", 1)
    return Book(monkeypatch, tmp_path, request.param)


def call_of(rng: np.random.Generator, mask: str, **more: Any) -> Call:
    options = {"index_scale": float(rng.uniform(0.1, 2)), "teacher_scale": float(rng.uniform(0.1, 2)), **more}
    options |= {"head_groups": SIZES["G"], "causal": True}
    options |= {"q_offset": 7} if rng.integers(2) else {"compress_ratio": 3}
    return Call(rng, INDEXER_KL, (*OPERANDS, *MASKS[mask]), **options)


def addresses(book: Book) -> dict[str, int]:
    """Where regions are, the same for all kernels; bits where the rows' kernel has them."""
    found: dict[str, int] = dict(book[0][2])
    for _, _, got in book:
        names = ("lse2", "weights", "row_stats", "row_keys", "tile_keys", "states", "strip", "key_sums", "broken")
        for name in names:
            if got.get(name):
                assert found.setdefault(name, got[name]) == got[name], name
    return found


def region_bytes() -> dict[str, int]:
    """Of what every request has, but the bits."""
    n, rows = SIZES, SIZES["B"] * SIZES["M"]
    return {
        "lse2": 4 * n["H"] * rows, "weights": 4 * n["I"] * rows, "row_keys": 8 * rows,
        "tile_keys": 8 * n["B"] * -(-n["M"] // 64), "bases": 4 * rows,
    }  # fmt: skip


def check_enough(grid: tuple[int, ...], each: int, count: int, others: int) -> None:
    """As many blocks as so many want, and none without any."""
    assert (grid[0] - 1) * each < count <= grid[0] * each
    assert grid[1:] == (others, 1)


def check_bits(call: Call, got: Found, bits: list[Found], start: int) -> None:
    """A launch reads the bits that the kernel of bits has written for its rows before, or all rows the same ones."""
    words, rows, groups = -(-SIZES["N"] // 32), bits[-1]["bit_rows"], bits[-1]["bit_groups"]
    first = bits[-1]["first_row"]
    chosen = "topk_indices" in call.views
    assert (first, rows) == ((64 * got["first_tile"], min(64 * got["tiles"], 150 - first)) if chosen else (0, 1))
    assert got["bits_row"] == (words if chosen else 0)
    assert got["bits_group"] == (words * rows if groups > 1 else 0)
    assert got["bits_batch"] == words * rows * groups
    # Kernels count rows from the first of the call.
    assert (got["bits"] + 4 * first * got["bits_row"]) % 2**64 == start


@needs_compiler
@pytest.mark.parametrize("mask", MASKS)
def test_a_forward_is_packed_by_name(book: Book, rng: np.random.Generator, mask: str) -> None:
    call, n = call_of(rng, mask), SIZES
    cut = call.runner.plan.cut
    out = call.results(kl="BGM", index_lse="BGM", target_sum="BGM", made_lse="BHM")
    call.runner.forward(call.inputs, call.op.Results(**out), 7, call.workspace)
    regions, tiles = addresses(book), -(-n["M"] // 64)
    wanted = region_bytes()
    states = max(cut.splits * n["G"], (cut.lse_splits if cut.lse_splits > 1 else 0) * n["H"])
    wanted |= {"states": 16 * states * n["M"] * n["B"], "bits": 4 * n["B"] * 11}
    symbols = [symbol for symbol, *_ in book]
    assert symbols[0] == "rows"
    assert book[0][1] == (tiles, n["B"], 1)
    call.check_rows(book[0][2], regions)
    bits: list[Found] = []
    packed = 0
    for (symbol, grid, got), threads in zip(book[1:], book.threads[1:]):
        if symbol == "bits":
            call.check_rows(got, regions)
            bits.append(got)
            check_enough(grid, threads // 32, got["bit_groups"] * got["bit_rows"], n["B"])
            wanted["bits"] = max(wanted["bits"], 4 * n["B"] * 11 * got["bit_groups"] * got["bit_rows"])
        elif symbol == "pack":
            call.check_pack(got, regions, out["made_lse"])
            check_enough(grid, threads, n["M"], n["B"] * (n["H"] + n["I"]))
            packed += 1
        else:
            lse = not packed
            want = call.common() | {"first_row": 0, "end_row": n["M"], "states": regions["states"]}
            want |= {"splits": cut.lse_splits if lse else cut.splits, "row_stats": 0, "strip": 0, "key_sums": 0}
            want |= {x: regions[x] for x in ("lse2", "weights", "row_keys", "tile_keys")}
            last = symbol == "join" and not lse
            want |= call.tensor("out_lse", out["made_lse"] if lse else out["index_lse"] if last else None,
                                "BHM" if lse else "BGM")  # fmt: skip
            for field, name in (("out_value", "kl"), ("out_mass", "target_sum")):
                want |= call.tensor(field, out[name] if last else None, "BGM")
            assert {x: got[x] for x in want} == want
            heads = n["B"] * (n["H"] if lse else n["G"])
            if symbol == "score":
                check_bits(call, got, bits, regions["bits"])
                assert grid == (got["tiles"] * want["splits"], heads, 1)
            else:
                check_enough(grid, threads, n["M"], heads)
    assert packed == 1
    scores = [got for symbol, _, got in book if symbol == "score"]
    assert sum(got["tiles"] for got in scores) == 2 * tiles  # log-sum-exps, then rows
    assert symbols.count("join") == 1 + (cut.lse_splits > 1)
    call.check_room(regions, wanted, call.runner.workspace_bytes)


@pytest.mark.parametrize("mask", MASKS)
def test_steps_launch_the_kernels_of_the_plan(book: Book, rng: np.random.Generator, mask: str) -> None:
    made = call_of(rng, mask).runner.plan_for(("index_q", "index_k", "index_weights"))
    for found, kernels in ((steps.forward_steps(made), made.forward), (steps.backward_steps(made), made.backward)):
        assert {step.kernel for step in found if isinstance(step, steps.Step)} == set(kernels)


@needs_compiler
@pytest.mark.parametrize("wrt", [("index_q", "index_k", "index_weights"), ("index_k",), ("index_weights",)])
def test_a_backward_is_packed_by_name(
    book: Book,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    wrt: tuple[str, ...],
) -> None:
    """Of kernels that compute scores again; strips of those that keep gates are cut in test_indexer.py."""
    for kind, kernels in KERNELS.items():
        monkeypatch.setitem(KERNELS, kind, tuple(x for x in kernels if not getattr(x, "keeps_gates", False)))
    plan.make_plan.cache_clear()
    request.addfinalizer(plan.make_plan.cache_clear)
    call, n = call_of(rng, str(rng.choice(list(MASKS)))), SIZES
    saved = call.op.Saved(**call.results(grad="BGM", index_lse="BGM", target_sum="BGM", made_lse="BHM"))
    axes = {"index_q": "BIMD", "index_k": "BJND", "index_weights": "BIM"}
    made = {name: call.view(name, x, "bfloat16") if name in wrt else None for name, x in axes.items()}
    out = call.op.Gradients(*(made.get(name) for name in call.op.Gradients._fields))
    call.runner.backward(call.inputs, saved, out, 7, call.workspace)
    cut, regions, tiles = call.runner.plan.cut, addresses(book), -(-n["M"] // 64)
    assert cut.strip_tiles == 1
    pitch, depth = -(-n["N"] // 64) * 64, -(-n["D"] // 16) * 16
    wanted = region_bytes() | {
        "row_stats": 16 * n["B"] * n["G"] * n["M"], "strip": n["B"] * n["G"] * 64 * pitch * 2, "broken": 4,
        "bits": 4 * n["B"] * 11,
    }  # fmt: skip
    wanted |= {"key_sums": 4 * cut.shares * n["B"] * n["J"] * n["N"] * depth} if "index_k" in wrt else {}
    assert book.cleared == [(regions["broken"], structs.INDEXER_LINE)]
    symbols = [symbol for symbol, *_ in book]
    strips = (["score"] + ["query"] * (wrt != ("index_k",)) + ["key"] * ("index_k" in wrt)) * tiles
    assert [x for x in symbols if x != "bits"] == ["rows", "pack", "scan", *strips, *["sum"] * ("index_k" in wrt)]
    bits: list[Found] = []
    for (symbol, grid, got), threads in zip(book[1:], book.threads[1:]):
        if symbol == "bits":
            call.check_rows(got, regions)
            bits.append(got)
            wanted["bits"] = max(wanted["bits"], 4 * n["B"] * 11 * got["bit_groups"] * got["bit_rows"])
        elif symbol == "pack":
            call.check_pack(got, regions, saved.made_lse, saved)
            check_enough(grid, threads, n["M"], n["B"] * (n["H"] + n["I"] + n["G"]))
        else:
            strip = (64, pitch) if symbol in ("score", "query", "key") else (0, 0)
            want = call.common() | {"splits": cut.strip_splits} | dict(zip(("strip_rows", "strip_pitch"), strip))
            names = ("lse2", "weights", "row_keys", "tile_keys", "row_stats", "strip", "broken")
            want |= {x: regions[x] for x in names}
            want |= call.tensor("out_q", out.index_q, "BIMD") | call.tensor("out_k", out.index_k, "BJND")
            want |= call.tensor("out_weights", out.index_weights, "BIM")
            assert {x: got[x] for x in want} == want
            if symbol in ("score", "query", "key"):
                check_bits(call, got, bits, regions["bits"])
            assert grid[1:] == {
                "scan": (1, 1), "score": (n["B"] * n["G"], 1), "query": (n["B"] * n["I"], 1),
                "key": (n["B"] * n["J"], cut.shares), "sum": (n["B"] * n["J"], 1),
            }[symbol]  # fmt: skip
            of_tiles = {"score": got["tiles"] * cut.strip_splits, "query": got["tiles"], "key": pitch // 64}
            assert grid[0] == of_tiles.get(symbol, grid[0])
            if symbol == "sum":
                check_enough(grid, threads, n["N"] * n["D"], n["B"] * n["J"])
    assert [got["first_tile"] for symbol, _, got in book if symbol == "score"] == [*range(tiles)]
    call.check_room(regions, wanted, call.runner.backward_bytes(wrt))


@needs_compiler
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("mask", ["keys", "none"])
def test_kernels_are_told_what_the_call_is(
    book: Book, rng: np.random.Generator, dtype: str, relu: bool, mask: str
) -> None:
    """By constants of their texts: element types, extents, what becomes of scores, whose states are joined."""
    n = SIZES
    scales = {"index_scale": 0.3, "teacher_scale": 0.7, "head_groups": n["G"]}
    call = Call(rng, INDEXER_KL, (*OPERANDS, *MASKS.get(mask, ())), dtype, relu=relu, **scales)
    out = call.results(kl="BGM", index_lse="BGM", target_sum="BGM", made_lse="BHM")
    call.runner.forward(call.inputs, call.op.Results(**out), 7, call.workspace)
    forward = len(book)
    saved = call.op.Saved(**call.results(grad="BGM", index_lse="BGM", target_sum="BGM", made_lse="BHM"))
    axes = {"index_q": "BIMD", "index_k": "BJND", "index_weights": "BIM"}
    made = {name: call.view(name, x, dtype) for name, x in axes.items()}
    gradients = call.op.Gradients(*(made.get(name) for name in call.op.Gradients._fields))
    call.runner.backward(call.inputs, saved, gradients, 7, call.workspace)
    code = {"bfloat16": "kBf16", "float32": "kF32"}[dtype]
    for i, ((symbol, _, got), told, threads) in enumerate(zip(book, book.told, book.threads, strict=True)):
        want = {"SKL_S_DIM": "40", "SKL_S_ELEMENT": code, "SKL_W_ELEMENT": "kF32", "SKL_GATED": str(int(relu))}
        want |= {"SKL_BITS": str(int(mask == "keys"))}
        want = {name: x for name, x in want.items() if name in told and symbol != "units"}
        assert len(want) == (0 if symbol in ("rows", "bits", "join", "units") else 5), symbol
        if symbol == "score":
            packed = "pack" in [name for name, *_ in book[:i]]
            # As the enumeration of its text has them.
            ending = {"kEndsInRows": 0, "kEndsInStrip": 1, "kEndsInLse": 3}
            phase = "kEndsInStrip" if i > forward else "kEndsInRows" if packed else "kEndsInLse"
            want |= {"SKL_ENDING": str(ending[phase]), "SKL_T_DIM": "72", "SKL_R_DIM": "16", "SKL_T_ELEMENT": code}
            want |= {"SKL_TARGET": "0", "SKL_T_SCORE": "Dot", "SKL_S_SCORE": "Dot"}
        if symbol == "join":
            want["SKL_LSE"] = str(int(bool(got["out_lse.pointer"] == out["made_lse"].ptr)))
        if symbol == "gated_join":
            want["SKL_SHARES"] = str(call.runner.plan.shares)
        if "SKL_THREADS" in told:
            want["SKL_THREADS"] = str(threads)
        assert {name: told[name] for name in want} == want, symbol
    # Keys go into tiles as they are, queries with the weights of their heads.
    weighted = [told["SKL_WEIGHTED"] for (symbol, *_), told in zip(book, book.told) if symbol == "tiles"]
    assert weighted in ([], ["0", "1"])


@needs_compiler
@pytest.mark.parametrize("lse", ["given", "made"])
def test_a_target_of_some_rows(book: Book, rng: np.random.Generator, lse: str) -> None:
    names = ("teacher_q", "teacher_k", "teacher_q_rope", "teacher_k_rope", *MASKS["ids"])
    names += ("teacher_lse",) if lse == "given" else ()
    scale, n = float(rng.uniform(0.1, 2)), SIZES
    call = Call(rng, INDEXER_TARGET, names, teacher_scale=scale, head_groups=n["G"], rows=(70, 131))
    shape = (n["B"], n["G"], 61, n["N"])
    out = ArrayView("target", "", Device("cuda"), "float32", shape, compact_strides(shape), next(call.addresses), None)
    call.runner.forward(call.inputs, call.op.Results(out), 7, call.workspace)
    assert book.cleared == [(out.ptr, 4 * int(np.prod(shape)))]
    scores = [got for symbol, _, got in book if symbol == "score"]
    made = [got for got in scores if got["out_lse.pointer"]]
    # Of both tiles of rows that have bits at a time, those that the target has rows of.
    assert [(got["first_tile"], got["tiles"]) for got in made] == ([(0, 2), (2, 1)] if lse == "made" else [])
    assert [(got["first_tile"], got["tiles"]) for got in scores[len(made) :]] == [(1, 1), (2, 1)]
    steps = dict(zip(FIELDS, out.strides))
    for score in scores[len(made) :]:
        assert (score["first_row"], score["end_row"]) == (70, 131)
        assert {x: score[f"target.{x}"] for x in FIELDS} == steps
        assert (score["target.pointer"] + 4 * 70 * steps["row"]) % 2**64 == out.ptr
        assert score["teacher_numbers.scale"] == pytest.approx(scale * LOG2E)
        for field in ("teacher_q", "teacher_k", "rope_q", "rope_k"):
            want = call.tensors(field)
            assert {x: score[x] for x in want} == want
    (pack,) = [got for symbol, _, got in book if symbol == "pack"]
    if lse == "given":
        assert pack["teacher_lse.pointer"] == call.views["teacher_lse"].ptr
        return
    # What is made lies in the workspace, compact, and beside all else that is there.
    regions, rows = addresses(book), n["B"] * n["M"]
    regions["made_lse"] = pack["teacher_lse.pointer"]
    assert [pack[f"teacher_lse.{x}"] for x in FIELDS[:3]] == [n["H"] * n["M"], n["M"], 1]
    for got in made:
        assert [got[f"out_lse.{x}"] for x in (*FIELDS[:3], "pointer")] == [
            *(n["H"] * n["M"], n["M"], 1), regions["made_lse"]
        ]  # fmt: skip
    wanted = {x: y for x, y in region_bytes().items() if x != "weights"} | {"made_lse": 4 * n["H"] * rows}
    wanted["states"] = 16 * call.runner.plan.cut.lse_splits * n["H"] * rows
    call.check_room(regions, wanted, call.runner.workspace_bytes)


@needs_compiler
def test_kernels_are_not_loaded_while_a_graph_is_captured(book: Book, rng: np.random.Generator) -> None:
    call = call_of(rng, "keys")
    out = call.op.Results(**call.results(kl="BGM", index_lse="BGM", target_sum="BGM", made_lse="BHM"))
    book.streamIsCapturing = lambda stream: stream == 7  # type: ignore[method-assign]
    with pytest.raises(CaptureError, match=r"call streamkl_cupy\.indexer_kl_warmup\("):
        call.runner.forward(call.inputs, out, 7, call.workspace)
    call.runner.warmup()
    loaded = len(book.texts)
    call.runner.forward(call.inputs, out, 7, call.workspace)
    assert (len(book.texts), len(book) > 3) == (loaded, True)
    with pytest.raises(ValueError, match="workspace: got none; this call needs"):
        call.runner.forward(call.inputs, out, 7)


@pytest.mark.parametrize("M, N", [(128, 100_000), (4096, 4096), (64, 64), (20_000, 333)])
def test_the_work_is_cut_to_keep_a_gpu_busy(
    book: Book, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator, M: int, N: int
) -> None:
    monkeypatch.setitem(SIZES, "M", M)
    monkeypatch.setitem(SIZES, "N", N)
    call = call_of(rng, "keys")
    facts = facts_for_arch("sm_90")
    cut, wanted, n = plan.make_plan(call.problem, facts).cut, 6 * facts.multiprocessors, SIZES
    for splits, others in (
        (cut.splits, cut.grid_tiles * n["B"] * n["G"]), (cut.lse_splits, cut.grid_tiles * n["B"] * n["H"]),
        (cut.strip_splits, cut.strip_tiles * n["B"] * n["G"]),
    ):  # fmt: skip
        assert splits == min(max(-(-wanted // others), 1), -(-N // 64), 64)
    assert cut.shares == min(-(-wanted // (-(-N // 64) * n["B"] * n["J"])), max(cut.strip_tiles, 1), 16)


@pytest.mark.parametrize("teacher", ["bfloat16", "float32"])
@pytest.mark.parametrize("index", ["bfloat16", "float32"])
def test_products_of_float32_have_kernels_that_multiply_it(teacher: str, index: str) -> None:
    """Hopper's own multiply 16-bit elements: scores are theirs if both sides are such, gradients if the student is."""
    types = {"bfloat16": pytest.importorskip("ml_dtypes").bfloat16, "float32": np.float32}
    q, k = (np.empty((1, h, 512, 128), types[teacher]) for h in (16, 1))
    index_q, index_k = (np.empty(x, types[index]) for x in ((1, 8, 512, 64), (1, 512, 64)))
    weights = np.empty((1, 8, 512), np.float32)
    found: Any = streamkl_cupy.indexer_kl_plan(
        q, k, index_q, index_k, weights, index_scale=1.0, causal=True, arch="sm_90"
    )
    hopper = {kernel.name: kernel.arch == "sm_90a" for kernel in (*found.forward, *found.backward)}
    scores = {of for name, of in hopper.items() if "_score_" in name or "_stream_" in name}
    gradients = {of for name, of in hopper.items() if "_query_" in name or "_key_" in name}
    assert scores == {(teacher, index) == ("bfloat16", "bfloat16")}
    assert gradients == {index == "bfloat16"}

"""What is packed for kernels of a side that is given, and for rows that are asked for besides, read back by name."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_packing
from test_packing import LOG2E, Book, compact, needs_compiler, strides, under

from streamkl_cupy import launch
from streamkl_cupy.ops import ATTENTION_KL_TO
from streamkl_cupy.problem import Device, MaskSpec, Operand, Problem, Side

M, N, DIM, BATCH, HEADS = 300, 333, 64, 2, 8


@pytest.fixture(params=["sm_80", "sm_90"])
def book(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Book:
    return Book(monkeypatch, tmp_path, request.param)


class Given:
    """A call with a target of one head or of all, of strides that differ from all else."""

    def __init__(self, rng: np.random.Generator, heads: int) -> None:
        self.addresses = itertools.count(1 << 20, 4096)
        row = N + 3 + int(rng.integers(1, 9))
        head, column = row * M + 5, 1
        self.steps = (head * heads + 11, head, row, column)
        target = Operand(heads, M, N, "float32", self.steps, True)
        given = Side(
            replace(target, dim=0, strides=(self.steps[0], head if heads > 1 else 0, row, 0)),
            replace(target, rows=N, dim=0, strides=(0, 0, column, 0)),
            1.0,
            "probability",
        )

        def operand(count: int, rows: int) -> Operand:
            row = DIM + 8 * int(rng.integers(1, 9))
            head = row * rows + 8 * int(rng.integers(1, 99))
            return Operand(count, rows, DIM, "bfloat16", (head * count + 8, head, row, 1), True)

        student = Side(operand(HEADS, M), operand(2, N), float(rng.uniform(0.1, 2)))
        self.problem = Problem(
            BATCH, HEADS, M, N, (given, student), mask=MaskSpec(("causal",), (("q_offset", 19),)),
            device=Device("cuda"), op=ATTENTION_KL_TO.name, extras=(target,),
        )  # fmt: skip
        op = ATTENTION_KL_TO
        self.inputs = op.Inputs(*(SimpleNamespace(ptr=next(self.addresses)) for _ in op.names))
        rows = {name: (HEADS * M * (i + 2), M * (i + 2), i + 2) for i, name in enumerate(op.Saved._fields)}
        self.saved = op.Saved(**{
            name: SimpleNamespace(ptr=next(self.addresses), strides=rows[name])
            if name in ("grad", "teacher_lse", "student_lse", "kl") else None for name in op.Saved._fields
        })  # fmt: skip
        self.runner = launch.Runner(self.problem)

    def check(self, got: dict[str, Any], kernel: Any) -> None:
        """What all kernels are told of operands and extents."""
        got = {name: x for name, x in got.items() if not isinstance(x, tuple) or name == "n.mask"}
        p, inputs = self.problem, self.inputs
        teacher, student = p.distributions
        want: dict[str, Any] = {
            "teacher_q.pointer": inputs.target.ptr, "student_q.pointer": inputs.student_q.ptr,
            "student_k.pointer": inputs.student_k.ptr, **strides("teacher_q", teacher.q.strides),
            **strides("teacher_k", teacher.k.strides), **strides("student_q", student.q.strides),
            **strides("student_k", student.k.strides), "n.batch": BATCH, "n.heads": HEADS, "n.queries": M,
            "n.keys": N, "n.student_group": 4, "n.teacher_group": 1,
            **{f"n.{x}": getattr(kernel.schedule, x) for x in ("tiles", "head_group", "splits")},
            "student_numbers.scale": pytest.approx(student.scale * LOG2E),
            "n.mask": (19, *[0] * 11),
        }  # fmt: skip
        assert {name: got[name] for name in want} == want


@needs_compiler
@pytest.mark.parametrize("heads", [1, HEADS])
def test_a_given_side_is_packed_by_name(
    book: Book, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, heads: int
) -> None:
    paths = test_packing.paths

    def without_numbers(name: str) -> dict[str, str]:
        """A side that is given has none."""
        return {path: code for path, code in paths(name).items() if not path.endswith("teacher_numbers.scale")}

    monkeypatch.setattr(test_packing, "paths", without_numbers)
    call = Given(rng, heads)
    op, plan = ATTENTION_KL_TO, call.runner.plan
    out = {name: SimpleNamespace(ptr=next(call.addresses)) for name in ("kl", "teacher_lse", "student_lse")}
    call.runner.forward(call.inputs, op.Results(**out), 7)
    ((symbol, got),) = book
    assert symbol == "streamkl_forward"
    call.check(got, plan.forward)
    for field, name in (("value", "kl"), ("teacher_lse", "teacher_lse"), ("student_lse", "student_lse")):
        want = under(field, {"pointer": out[name].ptr, "batch": HEADS * M, "head": M, "row": 1})
        assert {x: got[x] for x in want} == want
    book.clear()
    for wrt in (("student_q",), ("student_k",), ("student_q", "student_k")):
        made = {name: SimpleNamespace(ptr=next(call.addresses), shape=(), dtype="bfloat16") for name in wrt}
        workspace = next(call.addresses)
        call.runner.backward(
            call.inputs, call.saved, op.Gradients(*(made.get(name) for name in op.names)), 7, workspace
        )
        fused = len(wrt) > 1 and bool(plan.fused)
        for symbol, got in book:
            assert symbol.startswith("streamkl_fused") == fused
            name = next(x for x in wrt if made[x].ptr == got["out.pointer"])
            call.check(got, plan.fused[0].main if fused else plan.gradient(name))
            for field, saved in zip(("grad", "teacher_lse", "student_lse", "value"), test_packing.ROWS):
                view = getattr(call.saved, saved)
                want = under(field, {"pointer": view.ptr, **dict(zip(("batch", "head", "row"), view.strides))})
                assert {x: got[x] for x in want} == want
            want = under("out", compact(name, call, made[name].ptr))
            if fused:
                want |= under("out_q", compact("student_q", call, made["student_q"].ptr))
                want["workspace"] = workspace
            assert {x: got[x] for x in want} == want
            assert got["out_scale"] == pytest.approx(call.problem.distributions[1].scale)
        assert len(book) == (3 if fused else len(wrt))
        book.clear()


@needs_compiler
@pytest.mark.parametrize("few", [False, True])
def test_rows_that_are_asked_for_besides_are_packed_by_name(
    book: Book, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, few: bool
) -> None:
    """Entropies, and moments, of which a row has several; where keys are split, of the kernel that joins them too."""
    paths = test_packing.paths

    def with_rows(name: str) -> dict[str, str]:
        found = paths(name)
        base = "base." if name.startswith("Hopper") else ""
        if "Forward" in name:
            found |= {f"{base}{x}.pointer": "Q" for x in ("entropy", "moments")}
            found |= {f"{base}{x}.{axis}": "q" for x in ("entropy", "moments") for axis in ("batch", "head", "row")}
        return found

    monkeypatch.setattr(test_packing, "paths", with_rows)
    call = test_packing.Call(rng, 9 if few else M, 70_000 if few else N, (64, 128), MaskSpec())
    rows = call.problem.queries
    call.problem = replace(call.problem, divergence="cosine", entropy=True)
    call.runner = launch.Runner(call.problem)
    out = {name: SimpleNamespace(ptr=next(call.addresses)) for name in ("teacher_entropy", "moments")}
    call.rows = call.rows._replace(**out)
    call.forward()
    kernels = [got for symbol, got in book if symbol in ("streamkl_forward", "streamkl_combine")]
    assert len(kernels) == 1 + few
    for got in kernels:
        want = under("entropy", {"pointer": out["teacher_entropy"].ptr, "batch": 8 * rows, "head": rows, "row": 1})
        assert {x: got[x] for x in want} == want
        # Three to a row: P P, P Q and Q Q.
        want = under("moments", {"pointer": out["moments"].ptr, "batch": 24 * rows, "head": 3 * rows, "row": 3})
        assert {x: got[x] for x in want} == want

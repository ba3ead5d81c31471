"""What mypy says about calls: the types of results, and which words an option may be."""

from __future__ import annotations

import pickle
import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkl_cupy
from streamkl_cupy import KLForward, KLForwardMass, KLGradients, options, problem
from streamkl_cupy.testing.problems import make

PREAMBLE = """
import numpy as np
from numpy.typing import NDArray
from streamkl_cupy import (
    attention_kl, attention_kl_backward, attention_kl_forward, attention_kl_value_and_grad, plan, warmup,
    KLForward, KLForwardMass, KLGradients,
    merge_attention_states, sparse_attention, sparse_attention_backward, sparse_attention_forward,
)
class Tensor:  # stands for the tensors of any framework
    shape: tuple[int, ...]
class Other: ...
t: Tensor
h: NDArray[np.float16]
"""
ROWS = "numpy.ndarray[tuple[Any, ...], numpy.dtype[numpy.floating[Any]]]"
# Expressions and what mypy reveals of them.
RIGHT = {
    "attention_kl(t, t, t, t)": "Tensor",
    'attention_kl(t, t, t, t, window=(3, None), reduction="mean", layout="bnhd", precision="high")': "Tensor",
    "attention_kl(t, t, t, t, return_lse=True)": "KLForward[Tensor]",
    "attention_kl(t, t, t, t, return_lse=True).kl": "Tensor",
    "attention_kl(t, t, t, t, return_lse=True, dense_teacher_lse=t).teacher_mass": "Tensor",
    "attention_kl(t, t, t, t, return_lse=True, dense_teacher_lse=t)": "KLForwardMass[Tensor]",
    "attention_kl_forward(t, t, t, t, q_offset=1, causal=True)": "KLForward[Tensor]",
    "attention_kl_forward(t, t, t, t, dense_teacher_lse=t)": "KLForwardMass[Tensor]",
    "attention_kl_forward(t, t, t, t)[1]": "Tensor",
    "attention_kl(t, t, t, t, return_entropy=True).teacher_entropy": "Tensor",
    "attention_kl(t, t, t, t, return_lse=True, return_entropy=True).teacher_entropy": "Tensor | None",
    "attention_kl_forward(h, h, h, h, return_entropy=True).kl": ROWS,
    "attention_kl_value_and_grad(t, t, t, t)": "tuple[Tensor, KLGradients[Tensor]]",
    'attention_kl_value_and_grad(t, t, t, t, wrt=("student_k",), reduction="sum")[1].student_k': "Tensor | Any",
    # Half precision goes in, rows come out in single.
    "attention_kl(h, h, h, h)": ROWS,
    "attention_kl_forward(h, h, h, h).teacher_lse": ROWS,
    "attention_kl(h, h, h, h, return_lse=True).kl": ROWS,
    "sparse_attention(t, t, t, causal=True)": "Tensor",
    "sparse_attention(t, t, t, return_lse=True).lse": "Tensor",
    "sparse_attention_forward(t, t, t)": "AttentionForward[Tensor]",
    "sparse_attention_backward(t, t, t, t, saved=sparse_attention_forward(t, t, t)).key": "Tensor | Any",
    "merge_attention_states([t, t], [t, t]).out": "Tensor",
}
WRONG = {
    'attention_kl(t, t, t, t, reduction="men")': "reduction",
    'attention_kl_value_and_grad(t, t, t, t, reduction="none")': "reduction",
    'attention_kl(t, t, t, t, layout="bhdn")': "layout",
    'attention_kl_forward(t, t, t, t, precision="tf32")': "precision",
    'attention_kl_value_and_grad(t, t, t, t, wrt=("student",))': "wrt",
    'attention_kl_value_and_grad(t, t, t, t, wrt="student_q")': "wrt",
    "attention_kl(t, t, t, t, is_causal=True)": "is_causal",
    'sparse_attention(t, t, t, layout="bhdn")': "layout",
    'sparse_attention_backward(t, t, t, t, wrt=("q",))': "wrt",
    "attention_kl(t, t, t)": "overload",
    "attention_kl(t, t, t, t, True)": "overload",
    "attention_kl(t, t, t, t, dense_teacher_lse=t)": "overload",
    'plan(t, t, t, t, layout="nhd")': "layout",
    'warmup(t, t, t, t, wrt=("teacher",))': "wrt",
}


def checked(lines: list[str], folder: Path, *flags: str) -> dict[int, list[str]]:
    """What mypy says, by the line of `lines`."""
    mypy = pytest.importorskip("mypy.api", reason="needs mypy, which is not installed")
    path = folder / "calls.py"
    path.write_text(PREAMBLE + "\n".join(lines) + "\n", encoding="utf-8")
    given = ["--strict", "--no-error-summary", "--hide-error-context", "--cache-dir", str(folder.parent / "mypy")]
    out, err, _ = mypy.run([*given, *flags, "--no-pretty", str(path)])
    assert not err
    first, said = PREAMBLE.count("\n") + 1, dict[int, list[str]]()
    for line in out.splitlines():
        found = re.match(r".*?calls\.py:(\d+): (?:error|note): (.*)", line)
        assert found or "calls.py" not in line, line
        if found:
            said.setdefault(int(found[1]) - first, []).append(found[2])
        else:
            raise AssertionError(line)  # the package itself is clean
    return said


@pytest.mark.parametrize("version", ["3.10", "3.13"])
def test_results_have_the_type_of_the_inputs(version: str, tmp_path: Path) -> None:
    lines = [f"reveal_type({expression})" for expression in RIGHT]
    said = checked(lines, tmp_path, "--python-version", version)
    assert sorted(said) == list(range(len(lines))), said
    for number, wanted in enumerate(RIGHT.values()):
        (text,) = said[number]
        shown = re.sub(r"\b(calls|streamkl_cupy\.results|builtins|typing)\.", "", text)
        # NamedTuples are shown as the tuples they are.
        shown = re.sub(r"tuple\[[^\[\]]*(?:\[[^\[\]]*\])?[^\[\]]*, fallback=(\w+\[[^\[\]]*\])\]", r"\1", shown)
        assert shown == f'Revealed type is "{wanted}"', (lines[number], shown)


def test_wrong_words_are_found(tmp_path: Path) -> None:
    said = checked(list(WRONG), tmp_path)
    for number, (expression, text) in enumerate(WRONG.items()):
        assert number in said, expression
        assert any(text in line for line in said[number]), (expression, said[number])


def test_every_backend_offers_what_calls_ask_of_a_runner(tmp_path: Path) -> None:
    lines = textwrap.dedent("""
        from streamkl_cupy import launch, numpy_backend
        from streamkl_cupy.problem import Problem
        from streamkl_cupy.call import Runner
        def both(p: Problem) -> tuple[Runner, Runner]:
            return numpy_backend.Runner(p), launch.Runner(p)
        def neither(p: Problem) -> Runner:
            return p
    """).splitlines()
    said = checked(lines, tmp_path)
    assert list(said) == [len(lines) - 1], said


def test_more_that_people_write(tmp_path: Path) -> None:
    lines = textwrap.dedent("""
        def step(rows: KLForward[Tensor], plain: KLForward, grads: KLGradients[Tensor]) -> Tensor:
            q: Tensor = grads.student_q
            kl, teacher_lse, student_lse = rows
            return kl
        grads = attention_kl_value_and_grad(h, h, h, h)[1]
        h -= 0.1 * grads.student_q
        float(attention_kl(h, h, h, h, reduction="sum"))
        print(plan(t, t, t, t, arch="sm_90"), warmup(t, t, t, t))
        def either(flag: bool) -> None:
            attention_kl(t, t, t, t, return_lse=flag)
    """).splitlines()
    assert not checked(lines, tmp_path)


def test_words_are_those_that_are_checked() -> None:
    for literal, words in (
        (options.Layout, options.LAYOUTS),
        (options.Precision, options.PRECISIONS),
        (options.Reduction, options.REDUCTIONS),
        (problem.InputName, problem.INPUT_NAMES),
    ):
        assert literal.__args__ == tuple(words)


def test_generic_results_at_run_time() -> None:
    x = make("gaussian", B=1, H=1, M=3, N=3, D_t=8).arrays
    rows = streamkl_cupy.attention_kl_forward(*x)
    for kind, fields in ((KLForward, 3), (KLForwardMass, 4), (KLGradients, 4)):
        generic: Any = kind[np.ndarray]  # type: ignore[index]
        assert generic.__origin__ is kind
        assert len(kind._fields) == fields
        assert kind.__doc__
        made = kind(*range(fields))
        assert pickle.loads(pickle.dumps(made)) == made
    assert type(pickle.loads(pickle.dumps(rows))) is KLForward

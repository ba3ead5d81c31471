"""The benchmark of the CPU: its peers compute what this package does, and its table has all of them."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from conftest import load_script

import streamkl_cupy
from streamkl_cupy.cli.cases import Case


@pytest.fixture(scope="module")
def cpu() -> ModuleType:
    return load_script("benchmarks/cpu.py")


@pytest.mark.parametrize("causal", [False, True])
def test_jax_computes_the_same(cpu: ModuleType, rng: np.random.Generator, causal: bool) -> None:
    pytest.importorskip("jax")
    case = Case("cpu", 1, 2, 24, 24, 8, 8, "float32", causal)
    arrays = [rng.standard_normal(shape, np.float32) for shape in case.shapes]
    rows = streamkl_cupy.attention_kl_forward(*arrays, causal=causal)
    loss, grads = streamkl_cupy.attention_kl_value_and_grad(*arrays, causal=causal)
    of_rows = streamkl_cupy.attention_kl_backward(rows.kl, *arrays, saved=rows, causal=causal)
    peer = cpu.Jax()
    np.testing.assert_allclose(peer.prepare(case, "forward", arrays)(), rows.kl[0], rtol=1e-4, atol=1e-5)
    value, by_student = peer.prepare(case, "value_and_grad", arrays)()
    np.testing.assert_allclose(value, loss, rtol=1e-4)
    for found, expected in ((by_student, grads), (peer.prepare(case, "backward", arrays)(), of_rows)):
        for x, y in zip(found, (expected.student_q, expected.student_k), strict=True):
            np.testing.assert_allclose(x, y[0], rtol=1e-3, atol=1e-5 * np.abs(y).max() + 1e-6)


def test_a_run_and_its_table(cpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--sizes", "16", "32", "--dims", "8", "--heads", "2", "--peers", "numpy", "--rounds", "1"]
    options: argparse.Namespace = cpu.arguments().parse_args([*given, "--seconds", "0.001", "--out", str(tmp_path)])
    assert cpu.run(options) == 0
    printed = capsys.readouterr().out
    assert printed.count("NumPy materialising") == 6
    with (tmp_path / "cpu.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["status"] for row in rows] == ["ok"] * 12
    table = load_script("benchmarks/readme_table.py").cpu(rows).splitlines()
    assert len(table) == 4 + 6
    ours, theirs = (next(float(x["ms_median"]) for x in rows if x["peer"] == peer) for peer in ("streamkl", "numpy"))
    assert table[4] == f"| 2, 16, 8 | forward | {ours:.0f} | {theirs:.0f} ({theirs / ours:.2f}) |"

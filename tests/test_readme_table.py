"""The performance table of the README is the committed benchmark's, to the digit."""

from __future__ import annotations

import csv
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import load_script

from streamkl_cupy.cli import bench, report

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def table() -> ModuleType:
    return load_script("benchmarks/readme_table.py")


def row(name: str, peer: str, **cells: Any) -> bench.Row:
    shape = {"batch": 1, "heads": 8, "queries": 4096, "keys": 4096, "teacher_dim": 128, "student_dim": 64}
    return bench.Row(name, peer, peer, "cuda", **{**shape, "dtype": "bfloat16", "causal": True, **cells})


ROWS = (
    row(
        "forward", "streamkl", ms_p20=0.1, ms_median=0.2, ms_p80=0.3, tflops=250.4, share_of_matmul=0.313,
        peak_bytes=2**20,
    ),
    row("forward", "compile", ms_median=1.5, tflops=33.0, peak_bytes=2**30),
    row("forward", "eager", status="out of memory", note="CUDA out of memory"),
    row("forward", "flash", ms_median=0.18, tflops=299.6),
    row("forward", "cudnn", status="missing", note="no cuDNN"),
    row("all_gradients", "streamkl", ms_median=9.0),
    bench.Row("matmul", "matmul", "product", "cuda", tflops=801.2),
    bench.Row("host", "streamkl-torch", "forward", "cuda", ms_median=0.0214),
)  # fmt: skip


@pytest.fixture
def results(tmp_path: Path) -> Path:
    stamp = {"card": "A card", "driver": "1.2", "torch": "3.4", "cupy": "5.6", "date": "2030-01-02T03:04:05"}
    report.write_csv(tmp_path / "r.csv", bench.FIELDS, [{**x.as_dict(), **stamp} for x in ROWS])
    return tmp_path / "r.csv"


def test_the_readme_agrees_with_the_committed_results(table: ModuleType) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text == table.expected(text), "run python examples/benchmarks/readme_table.py"


def test_the_table_has_the_numbers_of_the_results(table: ModuleType, results: Path) -> None:
    with results.open(encoding="utf-8", newline="") as file:
        lines = table.section(list(csv.DictReader(file))).splitlines()
    assert lines[0].startswith("A card, driver 1.2, torch 3.4, CuPy 5.6, 2030-01-02, bfloat16, M = N.")
    assert "801 TFLOP/s" in lines[0]
    assert [line for line in lines if line.startswith("| 8")] == [
        "| 8, 4096, 128/64, causal | forward | 0.200 (0.100 to 0.300) | 250 | 31% | 1.500 | out of memory | 300 | "
        "1.0 | 1024 | out of memory |"
    ]
    assert not any("cuDNN TFLOP/s" in line for line in lines), "a peer that is missing has a column"
    assert lines[-1] == "A forward call costs the host 21 µs from torch, the launch included."


def test_a_stale_table_is_replaced_whole(table: ModuleType, results: Path) -> None:
    text = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    fresh = table.expected(text, results)
    assert "old" not in fresh
    assert table.expected(fresh, results) == fresh
    assert table.replaced(fresh, "") == f"before\n{table.BEGIN}\n{table.END}\nafter\n"
    with pytest.raises(ValueError, match="has no <!-- performance:begin"):
        table.replaced("no markers", "x")

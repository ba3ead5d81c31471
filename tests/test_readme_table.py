"""The performance table of the README is the committed benchmark's, to the digit."""

from __future__ import annotations

import csv
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from conftest import load_script

from streamkl_cupy.cli import bench, report, shapes

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


@pytest.mark.parametrize("name", ["README.md", "docs/index.md", "docs/performance.md"])
def test_pages_agree_with_the_committed_results(table: ModuleType, name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text == table.expected(text), "run python examples/benchmarks/readme_table.py"
    assert ROOT / name in table.PAGES


def test_readme_has_six_rows(table: ModuleType) -> None:
    with table.RESULTS.open(encoding="utf-8", newline="") as file:
        lines = table.section(list(csv.DictReader(file)), few=True).splitlines()
    assert sum(line.startswith("| 8, ") for line in lines) == 6


def test_shapes_are_compared_with_the_fastest_attention(table: ModuleType, tmp_path: Path) -> None:
    def line(of: shapes.Shape, name: str, peer: str, ms: float | None) -> dict[str, Any]:
        row = {**of._asdict(), "dtype": "bfloat16", "pass": name, "peer": peer, "status": "ok", "ms_median": ms}
        return row if ms else {**row, "status": "failed"}

    rows = []
    for i, of in enumerate(shapes.SHAPES, start=1):
        rows += [
            line(of, name, "streamkl", i * ms) for name, ms in (("forward", 0.5), ("backward", 1.0), ("step", 3.0))
        ]
        rows += [line(of, "step", "cudnn", 2.5 * i), line(of, "step", "flash, grouped", 2.0 * i)]
        rows += [line(of, "step", "flash", None), line(of, "step", "compile", 7.0 if i > 1 else None)]
    rows += [line(shapes.TINY, "host", peer, us * 1e-3) for peer, us in (("streamkl", 200.4), ("attention", 150.0))]
    about = {"card": "A card", "driver": "1.2", "torch": "3.4", "cupy": "5.6", "date": "2030-01-02T03:04:05"}
    shapes.write(tmp_path / "s", rows, about)
    with (tmp_path / "s.csv").open(encoding="utf-8", newline="") as file:
        text = table.shapes(list(csv.DictReader(file)))
    assert "A card, driver 1.2" in text
    assert "200 µs for a step of tiny inputs, 150 µs" in text
    lines = [x for x in text.splitlines() if x.startswith("| ")][2:]
    assert len(lines) == len(shapes.SHAPES)
    cells = [x.strip() for x in lines[1].strip("|").split("|")]
    assert cells[1:] == [
        "4, 32 / 8, 8", "2,048 × 2,048, 128, causal", "1.000", "2.000", "6.000", "4.000 (flash, grouped)", "1.50",
        "7.00",
    ]  # fmt: skip
    assert lines[0].endswith("| 1.50 | failed |")
    best = shapes.fastest([row for row in rows if row["name"] == shapes.SHAPES[2].name])
    assert best is not None
    assert (best["peer"], best["ms_median"]) == ("flash, grouped", 6.0)


STEP = """A card, driver 1.2, 2030-01-02
random weights, 12 layers of 16 x 128 -> 12 layers of 16 x 64, 1 x 2048 tokens, bfloat16
torch 3.4 on cuda, transformers 5.6, 20 steps

                      first KL   last KL  ms a step  peak GiB
eager, maps             0.0103    0.0102       98.7     14.21
SDPA, attention_kl      0.0103    0.0102       65.4      1.34
random weights, 12 layers of 16 x 128 -> 12 layers of 16 x 64, 2 x 4096 tokens, bfloat16
torch 3.4 on cuda, transformers 5.6, 9 steps

                      first KL   last KL  ms a step  peak GiB
eager, maps           out of memory
SDPA, attention_kl      0.0103    0.0102      165.4      4.96
"""


def test_a_step_has_the_numbers_that_were_printed(table: ModuleType) -> None:
    lines = table.step(STEP).splitlines()
    assert lines[0].startswith(
        "A card, driver 1.2, 2030-01-02, torch 3.4, transformers 5.6; random weights, 12 layers of "
    )
    assert lines[-2:] == [
        "| 1 × 2,048 | 99 ms, 14.2 GiB | 65 ms, 1.3 GiB |",
        "| 2 × 4,096 | out of memory | 165 ms, 5.0 GiB |",
    ]


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
    begin, end = "<!-- performance:begin -->", "<!-- performance:end -->"
    text = f"before\n{begin}\nold\n{end}\nafter\n"
    fresh = table.expected(text, results)
    assert "old" not in fresh
    assert table.expected(fresh, results) == fresh
    assert table.replaced(fresh, "") == f"before\n{begin}\n{end}\nafter\n"
    with pytest.raises(ValueError, match="has no <!-- performance:begin"):
        table.replaced("no markers", "x")

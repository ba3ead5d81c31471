"""Write the performance table of the README from one benchmark CSV, so that no number is copied by hand.

python examples/benchmarks/readme_table.py
python examples/benchmarks/readme_table.py --check
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
README = HERE.parents[1] / "README.md"
RESULTS = HERE / "h100.csv"
BEGIN, END = "<!-- performance:begin -->", "<!-- performance:end -->"
PASSES = ("forward", "backward", "value_and_grad")
HEAD = (
    "B·H, N, D",
    "pass",
    "ms (20 % to 80 %)",
    "TFLOP/s",
    "of a matrix product",
    "torch.compile ms",
    "eager ms",
    "flash TFLOP/s",
    "cuDNN TFLOP/s",
    "extra MiB",
    "torch.compile extra MiB",
    "eager extra MiB",
)

Row = dict[str, str]


def section(rows: list[Row]) -> str:
    """The lines between the markers."""
    cases: dict[tuple[str, ...], dict[tuple[str, str], Row]] = {}
    for row in rows:
        if row["pass"] in PASSES:
            case = tuple(
                row[name] for name in ("batch", "heads", "queries", "keys", "teacher_dim", "student_dim", "causal")
            )
            cases.setdefault(case, {})[row["pass"], row["peer"]] = row
    cells = [
        _cells(_name(*case), name, found)
        for case, found in cases.items()
        for name in PASSES
        if (name, "streamkl") in found
    ]
    # A peer that did not take part has no columns.
    shown = [i for i in range(len(HEAD)) if any(line[i] for line in cells)]
    table = [HEAD, ("---",) * len(HEAD), *cells]
    lines = [_caption(rows), "", *(f"| {' | '.join(line[i] for i in shown)} |" for line in table)]
    lines += ["", _host(rows)] if _host(rows) else []
    return "\n".join(lines)


def _caption(rows: list[Row]) -> str:
    run = next(row for row in rows if row["peer"] == "streamkl")
    products = sorted(float(row["tflops"]) for row in rows if row["pass"] == "matmul" and row["tflops"])
    product = f" A matrix product of 8192³ reached {_span(products, '.0f')} TFLOP/s." if products else ""
    return (
        f"{run['card']}, driver {run['driver']}, torch {run['torch']}, CuPy {run['cupy']}, {run['date'][:10]}, "
        f"{run['dtype']}, M = N.{product} flash and cuDNN are attention, another function, at the student's D: what "
        "the GPU does with portable and with its own instructions. backward is the student's two gradients from a "
        "saved forward, and its memory includes what that saved."
    )


def _name(batch: str, heads: str, queries: str, keys: str, teacher_dim: str, student_dim: str, causal: str) -> str:
    dims = teacher_dim if teacher_dim == student_dim else f"{teacher_dim}/{student_dim}"
    rows = keys if queries == keys else f"{queries}×{keys}"
    return f"{int(batch) * int(heads)}, {rows}, {dims}{', causal' if causal == 'True' else ''}"


def _cells(case: str, name: str, found: dict[tuple[str, str], Row]) -> tuple[str, ...]:
    ours = found[name, "streamkl"]

    def cell(peer: str, column: str, form: str, scale: float = 1.0) -> str:
        row = found.get((name, peer))
        if row is None or row["status"] == "missing":
            return ""
        return format(float(row[column]) * scale, form) if row[column] else row["status"]

    time = cell("streamkl", "ms_median", ".3f")
    if ours["ms_p20"]:
        time += f" ({float(ours['ms_p20']):.3f} to {float(ours['ms_p80']):.3f})"
    return (
        case,
        name.replace("_", " "),
        time,
        cell("streamkl", "tflops", ".0f"),
        f"{float(ours['share_of_matmul']):.0%}" if ours["share_of_matmul"] else "",
        cell("compile", "ms_median", ".3f"),
        cell("eager", "ms_median", ".2f"),
        cell("flash", "tflops", ".0f"),
        cell("cudnn", "tflops", ".0f"),
        cell("streamkl", "peak_bytes", ".1f", 2.0**-20),
        cell("compile", "peak_bytes", ".0f", 2.0**-20),
        cell("eager", "peak_bytes", ".0f", 2.0**-20),
    )


def _host(rows: list[Row]) -> str:
    costs = [
        f"{float(row['ms_median']) * 1e3:.0f} µs from {row['peer'].removeprefix('streamkl-')}"
        for row in rows
        if row["pass"] == "host" and row["peer"].startswith("streamkl-") and row["ms_median"]
    ]
    return f"A forward call costs the host {' and '.join(costs)}, the launch included." if costs else ""


def _span(values: list[float], form: str) -> str:
    ends = [format(values[0], form), format(values[-1], form)]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def replaced(text: str, inside: str) -> str:
    """A README with `inside` between its markers."""
    before, _, rest = text.partition(BEGIN)
    _, marker, after = rest.partition(END)
    if not marker:
        raise ValueError(f"the README has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{inside}\n{END}{after}" if inside else f"{before}{BEGIN}\n{END}{after}"


def expected(text: str, results: Path = RESULTS) -> str:
    """What the README should be: with the table of the results, or with none while there are none."""
    if not results.exists():
        return replaced(text, "")
    with results.open(encoding="utf-8", newline="") as file:
        return replaced(text, section(list(csv.DictReader(file))))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="example: python examples/benchmarks/readme_table.py --check",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="CSV", help="default: %(default)s")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the README and the CSV disagree")
    options = parser.parse_args()
    if not options.results.is_file():
        sys.exit(
            f"{options.results} is missing; python -m streamkl_cupy bench --published --out {options.results.parent} "
            f"--name {options.results.stem} makes it"
        )
    text = README.read_text(encoding="utf-8")
    wanted = expected(text, options.results)
    if text == wanted:
        print(f"{README.name} agrees with {options.results.name}")
    elif options.check:
        sys.exit(f"{README.name} and {options.results.name} disagree; run python {Path(__file__).name}")
    else:
        README.write_text(wanted, encoding="utf-8")
        print(f"wrote the table of {options.results.name} into {README.name}")


if __name__ == "__main__":
    main()

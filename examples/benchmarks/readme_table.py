"""Write the tables of README and pages from the committed results, so that no number is copied by hand.

Of one benchmark CSV, docs/performance.md gets all and README six rows; all that have a place for it get the table of a
training step, from what examples/hf_distill.py printed, and that of the shapes that trainers have, from a CSV of
`bench --shapes`.

python examples/benchmarks/readme_table.py
python examples/benchmarks/readme_table.py --check
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGES = tuple(ROOT / name for name in ("README.md", "docs/index.md", "docs/performance.md"))
RESULTS = HERE / "h100.csv"
STEP = HERE / "h200_step.txt"
SHAPES = HERE / "h200_shapes.csv"
TABLES = ("performance", "six rows", "step", "shapes")
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

# What the six rows are, and their columns.
FEW = ("forward", "backward"), ("8, 8192, 64", "8, 8192, 128", "8, 8192, 128, causal")
FEW_COLUMNS = (0, 1, 2, 3, 4, 6, 8, 9, 11)

Row = dict[str, str]


def section(rows: list[Row], few: bool = False) -> str:
    """The lines between the markers; a few of them for README."""
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
    if few:
        passes, names = FEW
        cells = [line for line in cells if line[1] in passes and line[0] in names]
    # A peer that did not take part has no columns.
    shown = [i for i in (FEW_COLUMNS if few else range(len(HEAD))) if any(line[i] for line in cells)]
    table = [HEAD, ("---",) * len(HEAD), *cells]
    lines = [_caption(rows), "", *(f"| {' | '.join(line[i] for i in shown)} |" for line in table)]
    lines += ["", _host(rows)] if _host(rows) and not few else []
    return "\n".join(lines)


def step(printed: str) -> str:
    """The table of a training step: of outputs of examples/hf_distill.py, after a line that names the GPU."""
    card, *runs = re.split(r"^(?=[^\n]* layers of )", printed, flags=re.MULTILINE)
    models, versions = (runs[0].splitlines()[i] for i in (0, 1))
    what, tokens = models.rsplit(", ", 2)[0], re.compile(r", (\d+) x (\d+) tokens, (\w+)$", re.MULTILINE)
    (dtype,) = {found[3] for found in map(tokens.search, runs) if found}
    versions = versions.replace(" on cuda", "").rpartition(",")[0]
    lines = [
        f"{card.strip()}, {versions}; {what} (heads x head dim), {dtype}, KL on every layer. A step "
        "of `transformers.Trainer` is forward of both models, backward and optimiser; memory is what it takes beyond "
        "weights and optimiser state, gradients among it.",
        "",
        "| tokens | eager attention, its maps | SDPA, `attention_kl` |",
        "| --- | --- | --- |",
    ]
    for run in runs:
        found = tokens.search(run)
        cells = []
        for way in ("eager, maps", "SDPA, attention_kl"):
            row = re.search(rf"^{way} +[\d.]+ +[\d.]+ +([\d.]+) +([\d.]+)$", run, re.MULTILINE)
            cells.append(f"{float(row[1]):.0f} ms, {float(row[2]):.1f} GiB" if row else "out of memory")
        assert found, run
        lines.append(f"| {found[1]} × {int(found[2]):,} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def shapes(rows: list[Row]) -> str:
    """The table of steps at shapes that trainers have, slower ones than attention's included."""
    run, attention = rows[0], ("cudnn", "flash")
    by_shape: dict[str, list[Row]] = {}
    for row in rows:
        by_shape.setdefault(row["name"], []).append(row)
    host = {row["peer"]: float(row["ms_median"]) * 1e3 for row in by_shape.pop("tiny")}
    lines = [
        f"{run['card']}, driver {run['driver']}, torch {run['torch']}, CuPy {run['cupy']}, {run['date'][:10]}, "
        f"{run['dtype']}; medians of device time in ms, in turns in one process. A step is loss and both student "
        "gradients through torch's autograd; attention's, for its three gradients, is the fastest of cuDNN and flash, "
        "with keys as they are or repeated for all heads. The host takes "
        f"{host['streamkl']:.0f} µs for a step of tiny inputs, {host['attention']:.0f} µs for one of attention.",
        "",
        "| | B, heads / key heads of teacher, student | rows × keys, D | forward | backward | step | "
        "attention's step | ratio | torch.compile's step |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in by_shape.items():
        times = {(row["pass"], row["peer"]): row["ms_median"] or row["status"] for row in found}
        steps = [row for row in found if row["peer"].partition(",")[0] in attention and row["ms_median"]]
        best = min(steps, key=lambda row: float(row["ms_median"]))
        ratio = float(times["step", "streamkl"]) / float(best["ms_median"])
        x = found[0]
        heads = f"{x['batch']}, {x['heads']} / {x['teacher_key_heads']}, {x['student_key_heads']}"
        dims = x["student_dim"] if x["teacher_dim"] == x["student_dim"] else f"{x['teacher_dim']}/{x['student_dim']}"
        size = f"{int(x['queries']):,} × {int(x['keys']):,}, {dims}{', causal' if x['causal'] == 'True' else ''}"
        ours = [f"{float(times[of, 'streamkl']):.3f}" for of in ("forward", "backward", "step")]
        compiled = times.get(("step", "compile"), "")
        cells = [name, heads, size, *ours, f"{float(best['ms_median']):.3f} ({best['peer']})", f"{ratio:.2f}"]
        cells.append(f"{float(compiled):.2f}" if compiled[:1].isdigit() else compiled)
        lines.append(f"| {' | '.join(cells)} |")
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


def replaced(text: str, inside: str, name: str = "performance") -> str:
    """A page with `inside` between the markers of that name."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, _, rest = text.partition(begin)
    _, marker, after = rest.partition(end)
    if not marker:
        raise ValueError(f"the page has no {begin} ... {end}")
    return f"{before}{begin}\n{inside}\n{end}{after}" if inside else f"{before}{begin}\n{end}{after}"


def expected(text: str, results: Path = RESULTS, printed: Path = STEP) -> str:
    """What a page should be: with the tables of the results that it has a place for, empty while there are none."""
    rows = _read(results) if results.exists() else []
    made = {
        "performance": lambda: section(rows) if rows else "",
        "six rows": lambda: section(rows, few=True) if rows else "",
        "step": lambda: step(printed.read_text(encoding="utf-8")) if printed.exists() else "",
        "shapes": lambda: shapes(_read(SHAPES)) if SHAPES.exists() else "",
    }
    found = [name for name in TABLES if f"<!-- {name}:begin -->" in text]
    if not found:
        raise ValueError(f"the page has no <!-- {TABLES[0]}:begin --> ... and no other table")
    for name in found:
        text = replaced(text, made[name](), name)
    return text


def _read(path: Path) -> list[Row]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="example: python examples/benchmarks/readme_table.py --check",
    )
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="CSV", help="default: %(default)s")
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page and the results disagree")
    options = parser.parse_args()
    if not options.results.is_file():
        sys.exit(
            f"{options.results} is missing; python -m streamkl_cupy bench --published --out {options.results.parent} "
            f"--name {options.results.stem} makes it"
        )
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        wanted = expected(text, options.results)
        name = path.relative_to(ROOT).as_posix()
        if text == wanted:
            print(f"{name} agrees with the results")
        elif options.check:
            sys.exit(f"{name} and the results disagree; run python {Path(__file__).name}")
        else:
            path.write_text(wanted, encoding="utf-8")
            print(f"wrote the tables of {name}")


if __name__ == "__main__":
    main()

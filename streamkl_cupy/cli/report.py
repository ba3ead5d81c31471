"""What a command shows and writes: tables, a progress bar, CSV, JSON and the plot.

rich, tqdm and matplotlib make these better where they are installed; only the plot cannot do without.
"""

from __future__ import annotations

import csv
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from math import nan
from pathlib import Path
from textwrap import fill
from types import TracebackType
from typing import Any

from ..errors import install

NARROWEST = 150
"""Columns assumed where the output is no terminal, so that a log keeps whole lines."""
QUIET_SECONDS = 5.0
"""Between two lines of progress where no terminal watches: often enough to see that it lives, rare enough for a log."""


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], out: Any = None) -> None:
    """Print a table. A column whose name begins with "<" is text, set left without that sign; others are numbers."""
    out = out or sys.stdout
    body = [tuple(row) for row in rows]
    names = [column.removeprefix("<") for column in columns]
    left = [column.startswith("<") for column in columns]
    try:
        from rich.console import Console
        from rich.table import Table
    except Exception:  # absent, or broken, which is no reason to show nothing
        print(_plain(title, names, left, body), file=out)
        return
    grid = Table()
    for name, is_left in zip(names, left):
        grid.add_column(name, justify="left" if is_left else "right", overflow="fold")
    for row in body:
        grid.add_row(*row)
    width = None if out.isatty() else NARROWEST
    console = Console(file=out, width=width, markup=False, highlight=False, emoji=False)
    console.print(title, style="bold", soft_wrap=True)  # which may name a folder, and be longer than the table is wide
    console.print(grid)


def _plain(title: str, names: list[str], left: list[bool], body: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(names, *body)]

    def line(row: Sequence[str]) -> str:
        cells = (cell.ljust(width) if is_left else cell.rjust(width) for cell, width, is_left in zip(row, widths, left))
        return "  ".join(cells).rstrip()

    return "\n".join((title, line(names), line(["-" * width for width in widths]), *map(line, body), ""))


class Progress:
    """How far a long run is, on standard error: tqdm's bar on a terminal, else a line now and then.

    What takes no longer than `QUIET_SECONDS` writes no line.
    """

    def __init__(self, total: int, unit: str) -> None:
        self._bar: Any = None
        self._total, self._unit, self._done = total, unit, 0
        self._began = self._said = time.monotonic()
        if not sys.stderr.isatty():
            return
        try:
            from tqdm import tqdm
        except Exception:  # absent, or broken, which is no reason not to begin
            return
        self._bar = tqdm(total=total, unit=unit, leave=False, dynamic_ncols=True)

    def step(self, what: str = "") -> None:
        """One unit of work is done or begins; `what` names it."""
        self._done += 1
        if self._bar is not None:
            self._bar.set_description_str(what, refresh=False)
            self._bar.update()
            return
        now = time.monotonic()
        if now - self._said < QUIET_SECONDS:
            return
        self._said = now
        share = f"{self._done} of {self._total} {self._unit}s, {now - self._began:.0f} s"
        print(f"{share}: {what}" if what else share, file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()


def write_csv(path: Path, fields: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Rows with exactly these fields, None as an empty cell."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fields, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_json(path: Path, value: Any) -> None:
    """A value as indented JSON."""
    path.write_text(json.dumps(value, indent=1, default=str) + "\n", encoding="utf-8")


def require_matplotlib() -> None:
    """Raise before a long run whose plot could not be drawn."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError(f"--plot needs matplotlib: {install.command('bench')}, or leave out --plot")


# One colour per peer, the same in every panel, told apart in the common kinds of colour blindness too.
COLOURS = {
    "streamkl": "#d55e00",
    "eager": "#999999",
    "compile": "#0072b2",
    "cudnn": "#009e73",
    "flash": "#56b4e9",
    "cupy": "#cc79a7",
    "numpy": "#f0b000",
    "yardstick": "#000000",
}


def not_drawn(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why points are missing from the plot, a line per peer and reason."""
    missing: dict[tuple[str, str], dict[str, list[int]]] = {}
    for row in rows:
        if not row["keys"] or row["peer"] not in COLOURS:
            continue
        if row["status"] != "ok":
            why = row["status"]
        elif row["peak_bytes"] is None:
            why = "memory not measured"
        elif row["peak_bytes"] == 0:
            why = "no extra memory, and zero is nowhere on a logarithmic axis"
        else:
            continue
        missing.setdefault((row["title"], why), {}).setdefault(row["pass"].replace("_", " "), []).append(row["keys"])
    return [
        f"{title}, {why}: " + "; ".join(f"{name} N = {', '.join(map(str, sizes))}" for name, sizes in passes.items())
        for (title, why), passes in missing.items()
    ]


def plot(path: Path, rows: Sequence[Mapping[str, Any]], subtitle: str) -> None:
    """Time and peak extra memory against N on logarithmic axes, one column of panels per pass."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogFormatter

    measured = [row for row in rows if row["status"] == "ok" and row["keys"] and row["peer"] in COLOURS]
    passes = list(dict.fromkeys(row["pass"] for row in measured))
    if not passes:
        raise ValueError("nothing was measured, so there is nothing to plot")
    # For this figure only: whoever calls keeps their own style.
    with plt.rc_context():
        plt.rcParams |= {"font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left"}
        figure, axes = plt.subplots(
            2,
            len(passes),
            figsize=(3.6 * len(passes) + 1, 6.4),
            layout="constrained",
            squeeze=False,
            sharex=True,
            sharey="row",
        )
        for column, name in enumerate(passes):
            for axis, value, scale in ((axes[0][column], "ms_median", 1.0), (axes[1][column], "peak_bytes", 2.0**-20)):
                for peer, colour in COLOURS.items():
                    points = sorted(
                        (row["keys"], row[value] * scale if row["status"] == "ok" and row[value] else nan, row["title"])
                        for row in rows
                        if row["pass"] == name and row["peer"] == peer and row["keys"]
                    )
                    # A line has a gap where a point is missing; the words above the panels say why.
                    if any(y == y for _, y, _ in points):
                        x, y, titles = zip(*points)
                        axis.plot(x, y, color=colour, marker="o", markersize=3.5, linewidth=1.4, label=titles[0])
                axis.set_xscale("log", base=2)
                axis.set_yscale("log")
                axis.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(1, 0.4)))  # where no decade is in sight
                axis.grid(color="0.9")
                axis.spines[["top", "right"]].set_visible(False)
            axes[0][column].set_title(name.replace("_", " "))
            axes[1][column].set_xlabel("N (keys)")
        axes[0][0].set_ylabel("milliseconds")
        axes[1][0].set_ylabel("peak extra memory, MiB")
        handles = {label: h for axis in axes.flat for h, label in zip(*axis.get_legend_handles_labels())}
        figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=4, frameon=False)
        words = [fill(line, 48 * len(passes)) for line in (subtitle, *not_drawn(rows))]
        figure.suptitle("\n".join(words), fontsize=9, x=0.01, ha="left")
        figure.savefig(path, dpi=150)
        plt.close(figure)

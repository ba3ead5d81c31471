"""Rows of timings: lines of a CSV, and the JSON with all that is known beside it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..testing.timing import Outcome, Timing
from . import report


class Row:
    """A dataclass of this kind is one line of a CSV; None is an empty cell. Times in milliseconds, sizes in bytes. A
    column whose name is a keyword of Python has a field that ends in an underscore."""

    def as_dict(self) -> dict[str, Any]:
        """By column name."""
        return {key.rstrip("_"): value for key, value in asdict(self).items()}  # type: ignore[call-overload]


@dataclass(kw_only=True)
class Timed(Row):
    """What a measurement came to. Lines add what was measured, and what follows from its time."""

    status: str = "ok"
    note: str = ""
    ms_p20: float | None = None
    ms_median: float | None = None
    ms_p80: float | None = None
    samples: int | None = None

    def failed(self, error: Exception) -> None:
        """Note why there is no time."""
        self.status, self.note = "failed", brief(error)

    def took(self, timing: Timing) -> None:
        """Note the times."""
        self.ms_p20, self.ms_median, self.ms_p80, self.samples = timing

    def timed(self, outcome: Outcome) -> None:
        """Note the times, or why there are none."""
        if outcome.error:
            self.status, self.note = outcome.status, outcome.error
        elif outcome.timing is not None:
            self.took(outcome.timing)


TIMED = tuple(x.name for x in fields(Timed))


@dataclass
class CaseRow(Timed):
    """One pass of a case by one of those that are compared. Scripts add columns of their own."""

    group: str
    case: str
    peer: str
    pass_: str
    base: str
    """The case that it is compared with."""
    batch: int
    heads: int
    rows: int
    dim: int
    dtype: str


STAMP = ("card", "driver", "streamkl_cupy", "torch", "cupy", "date")
"""Of the environment, in every line of a script's CSV."""


def columns(kind: type, *first: str, stamp: Sequence[str] = STAMP) -> tuple[str, ...]:
    """Of rows of a kind, some of them first, and times behind what was measured."""
    names = [x.name.rstrip("_") for x in fields(kind)]
    return (*first, *(name for name in names if name not in (*first, *TIMED)), *TIMED, *stamp)


def write(
    base: Path,
    named: Sequence[str],
    rows: Iterable[Row],
    about: Mapping[str, Any],
    samples: Mapping[str, Any],
    stamp: Mapping[str, Any] | None = None,
) -> None:
    """CSV of rows with these columns, and JSON with the environment and all samples, beside each other."""
    rows = tuple(rows)
    same = {name: about.get(name) for name in STAMP} if stamp is None else stamp
    records = [{**row.as_dict(), **same} for row in rows]
    report.write_csv(base.with_name(f"{base.name}.csv"), named, [rounded(x) for x in records])
    value = {"environment": about, "rows": [row.as_dict() for row in rows], "samples_ms": samples}
    report.write_json(base.with_name(f"{base.name}.json"), value)


def rounded(record: Mapping[str, Any]) -> dict[str, Any]:
    """Six digits say all that a clock can."""
    return {key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in record.items()}


def brief(error: Exception) -> str:
    """An error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]

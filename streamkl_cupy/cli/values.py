"""Values of command-line options, checked where they are read."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from ..ops import ATTENTION_KL


def dims(text: str) -> tuple[int, int]:
    """Head dims: "128" for both sides, "192/128" for teacher and student."""
    first, _, second = text.partition("/")
    try:
        teacher, student = int(first), int(second or first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no head dim; write 128, or teacher/student as 192/128") from None
    wide, narrow = (ATTENTION_KL.side(side)[0].max_dim for side in ATTENTION_KL.sides)
    if not (1 <= teacher <= wide and 1 <= student <= narrow):
        raise argparse.ArgumentTypeError(
            f"{text!r} is out of range; the teacher's may be 1 to {wide}, the student's 1 to {narrow}"
        )
    return teacher, student


def positive(text: str) -> int:
    """A whole number of at least 1, as 4096, 4k or 1M."""
    units = {"k": 1024, "m": 1024**2}
    factor = units.get(text[-1:].lower(), 1)
    try:
        number = int(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1; write 4096 or 4k")
    return number


def whole(low: int, high: int, step: int = 1) -> Callable[[str], int]:
    """Type of an option: a whole number within limits, a multiple of `step`."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = low - 1
        if not low <= number <= high or number % step:
            kind = "whole number" if step == 1 else f"multiple of {step}"
            raise argparse.ArgumentTypeError(f"{text!r} is no {kind} from {low} to {high}")
        return number

    return read


def results(folder: Path, name: str) -> Path:
    """The path that result files begin with: `name`, of --name, in `folder`, of --out, which is made.

    Raises:
        ValueError: no name of a file, or a folder that nothing can be written to.
    """
    if Path(name).name != name or name in ("", ".."):
        raise ValueError(f"--name {name!r}: give a base name without folders; --out names the folder")
    base = folder / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".{name}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"--out {folder}: cannot be written ({error.strerror}); name another folder") from error
    return base


def seconds(text: str) -> float:
    """A positive number of seconds."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no time in seconds; write 0.3")
    return number

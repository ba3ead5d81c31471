"""Values of command-line options, checked where they are read."""

from __future__ import annotations

import argparse

from ..planning import MAX_DIM, MAX_TEACHER_DIM


def dims(text: str) -> tuple[int, int]:
    """Head dims: "128" for both sides, "192/128" for teacher and student."""
    first, _, second = text.partition("/")
    try:
        teacher, student = int(first), int(second or first)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no head dim; write 128, or teacher/student as 192/128") from None
    if not (1 <= teacher <= MAX_TEACHER_DIM and 1 <= student <= MAX_DIM):
        raise argparse.ArgumentTypeError(
            f"{text!r} is out of range; the teacher's may be 1 to {MAX_TEACHER_DIM}, the student's 1 to {MAX_DIM}"
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


def seconds(text: str) -> float:
    """A positive number of seconds."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no time in seconds; write 0.3")
    return number

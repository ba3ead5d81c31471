"""What the examples share: sample data, choice of array library, checked options, a word on a missing package."""

from __future__ import annotations

import argparse
import importlib
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np

SAMPLE = Path(__file__).with_name("data") / "smollm2_qk.npz"
PICTURES = (".png", ".pdf", ".svg")


def install(*extras: str) -> str:
    """How to install this package with some of its extras, in the package's own words, also where it is missing."""
    try:
        from streamkl_cupy.errors.install import command
    except ImportError:
        path = Path(__file__).resolve().parents[1] / "streamkl_cupy" / "errors" / "install.py"
        command = runpy.run_path(str(path))["command"]
    return command(*extras)


def need(module: str, fix: str) -> ModuleType:
    """Import an optional package, or leave with one line that says how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # it is installed, and broken in a way that the traceback tells better
            raise
        sys.exit(f"This example needs the package {module}, which is not installed. Fix: {fix}")


def whole(low: int, high: int = 2**31 - 1, step: int = 1) -> Callable[[str], int]:
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


def rate(text: str) -> float:
    """Type of an option: a learning rate of Adam, which moves a weight by about so much in a step."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 1e-6 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1e-6 to 1; write 0.01")
    return number


def new_file(*endings: str) -> Callable[[str], Path]:
    """Type of an option: a file that can be written, so that nobody trains first and learns then that it cannot."""

    def read(text: str) -> Path:
        path = Path(text)
        if path.suffix.lower() not in endings:
            raise argparse.ArgumentTypeError(f"{text!r} does not end in {' or '.join(endings)}")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r} is in a folder that is not there; make {str(path.parent)!r}")
        try:
            writable = not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)
        except OSError:  # such as a name that is too long
            writable = False
        if not writable:
            raise argparse.ArgumentTypeError(f"{text!r} cannot be written; name another file")
        return path

    return read


def training_options(parser: argparse.ArgumentParser, steps: int) -> None:
    """What every example that trains can be told; `steps` is the default."""
    parser.add_argument(
        "--steps", type=whole(20), default=steps, metavar="N", help="optimiser steps, at least 20 (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=whole(0), default=0, metavar="N", help="of the student's first weights (%(default)s)"
    )


def array_library(cpu: bool = False) -> ModuleType:
    """CuPy where a CUDA GPU is usable, NumPy otherwise or if `cpu` asks for it."""
    if not cpu:
        try:
            import cupy
        except ImportError:
            return np
        if cupy.cuda.is_available():
            return cupy
    return np


def sample() -> dict[str, np.ndarray]:
    """Queries (9, 320, 64) and keys (3, 320, 64) of three layers of SmolLM2-135M; see data/README.md."""
    with np.load(SAMPLE) as file:
        return dict(file)

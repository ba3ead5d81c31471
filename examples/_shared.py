"""What the examples share: the sample data, the choice of array library, and a helpful word on a missing package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import numpy as np

SAMPLE = Path(__file__).with_name("data") / "smollm2_qk.npz"


def need(module: str, fix: str) -> ModuleType:
    """Import an optional package, or leave with one line that says how to get it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # it is installed, and broken in a way that the traceback tells better
            raise
        sys.exit(f"This example needs the package {module}, which is not installed. Fix: {fix}")


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

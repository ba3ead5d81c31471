"""NumPy."""

from __future__ import annotations

from .base import Library


class NumPy(Library):
    """Arrays in host memory."""

    name = "numpy"


LIBRARY = NumPy

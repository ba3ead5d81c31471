"""CuPy."""

from __future__ import annotations

from typing import Any

from .base import Library


class CuPy(Library):
    """Arrays of the current GPU."""

    name = "cupy"

    def on_gpu(self, x: Any) -> bool:
        return True


LIBRARY = CuPy

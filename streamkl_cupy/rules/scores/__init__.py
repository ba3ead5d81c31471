"""The scores by name: every module of this folder but `interface` is one, and has it as `SCORE`."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from .interface import Score

SCORES: Final[dict[str, Score]] = {
    found.name: import_module(f"{__name__}.{found.name}").SCORE
    for found in iter_modules(__path__)
    if found.name != "interface"
}

"""The scores by name: every module of this folder but `interface` is one, and has it as `SCORE`."""

from __future__ import annotations

from typing import Final

from ..registry import entries_of
from .interface import Score

SCORES: Final[dict[str, Score]] = entries_of(__name__, __path__, "SCORE", ("interface",))

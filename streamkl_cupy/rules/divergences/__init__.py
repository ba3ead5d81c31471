"""The divergences by name: every module of this folder but `interface` and `sums` is one, as `DIVERGENCE`."""

from __future__ import annotations

from typing import Final

from ..registry import entries_of
from .interface import Divergence

DIVERGENCES: Final[dict[str, Divergence]] = entries_of(__name__, __path__, "DIVERGENCE", ("interface", "sums"))

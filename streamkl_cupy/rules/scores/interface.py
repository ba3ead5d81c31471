"""What a score must offer on the host, beside its header and under the same name.

A score says what the dot product of a query and a key means: which logit it becomes, on either side. Its entry says it
twice: for tiles, in base 2, as the NumPy backend streams them, and for all pairs of a head, in natural logarithms, as
the definition that everything is judged by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Meaning:
    """What dot products of one side mean, as `Score<side>` says it on the device.

    The derivative of a logit by its dot product is the factor, which all pairs share, times the pair's slope.
    """

    formula: str
    """The natural logit in Python, of `dot` and the side's `scale`, with numpy's functions: for people, and for tests.
    """
    factor: Callable[[float], float]
    """Of the side's scale."""
    largest_slope: float
    """A bound of slopes, by which gradients of logits are kept in the range of float16."""
    tile_logits: Callable[[Array, float], Array]
    """(dots, scale x log2(e)) -> logits in base 2; the dots may be overwritten."""
    tile_slopes: Callable[[Array, float, Array], object] | None
    """(logits in base 2, scale x log2(e), where slopes go). Logits are -inf where not visible; any slope will do there.
    None: every slope is 1."""
    pair_logits: Callable[[Array, float], Array]
    """(dots, scale) -> natural logits, in the precision of the dots."""
    pair_slopes: Callable[[Array, float], Array | float]
    """(dots, scale) -> slopes."""

    @property
    def linear(self) -> bool:
        """Whether adding one vector to all keys adds the same to all logits of a row."""
        return self.tile_slopes is None


@dataclass(frozen=True)
class Score:
    """One score."""

    name: str
    header: str
    teacher: Meaning
    student: Meaning

    @property
    def sides(self) -> tuple[Meaning, Meaning]:
        """The teacher's and the student's."""
        return self.teacher, self.student

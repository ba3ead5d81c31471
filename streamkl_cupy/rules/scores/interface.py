"""What a score must offer on the host, beside its header and under the same name.

A score says what the dot product of a query and a key means: which logit it becomes, on either side. Its entry says it
twice: for tiles, in base 2, as the NumPy backend streams them, and for all pairs of a head, in natural logarithms, as
the definition that everything is judged by.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

Array = NDArray[Any]
LOG2E = 1.0 / math.log(2.0)


@dataclass(frozen=True)
class Score:
    """One score.

    The derivative of a logit by its dot product is the factor, which all pairs share, times the pair's slope.
    """

    name: str
    header: str
    struct: str
    """The type of the device that says it."""
    formula: str
    """The natural logit in Python, of `dot` and the side's `scale`, with numpy's functions: for people, and for tests.
    """
    numbers: Callable[[float], dict[str, float]]
    """What the device reads of a side, of its scale. Their names are part of what is compiled, so the same for all
    scales."""
    factor: Callable[[float], float]
    """Of the side's scale."""
    largest_slope: float
    """A bound of slopes, by which gradients of logits are kept in the range of float16."""
    linear: bool
    """Whether adding one vector to all keys adds the same to all logits of a row; slopes are 1 then."""
    tile_logits: Callable[[Array, float, Array | None], Array]
    """(dots, scale, where slopes go) -> logits in base 2; the dots may be overwritten. Slopes are of scores that are
    not linear, and asked for where they are not None."""
    pair_logits: Callable[[Array, float], Array]
    """(dots, scale) -> natural logits, in the precision of the dots."""
    pair_slopes: Callable[[Array, float], Array | float]
    """(dots, scale) -> slopes."""
    positive: bool = False
    """Whether the scale must be positive; it is 1 by default then."""
    proportional: bool = True
    """Whether logits are proportional to the scale. A cap is kept by dividing that."""
    cap_header: str = ""
    """Of the cap, where there is one."""

    @property
    def headers(self) -> tuple[str, ...]:
        return (self.header, self.cap_header) if self.cap_header else (self.header,)

"""The divergences by name: each a module of this folder, as its `DIVERGENCE`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from ...problem import Problem
from ..registry import entries_of
from .interface import Divergence

DIVERGENCES: Final[dict[str, Divergence]] = entries_of(
    __name__, __path__, "DIVERGENCE", ("interface", "overlap", "sums")
)

PARAMETERS: Final = tuple(dict.fromkeys(name for entry in DIVERGENCES.values() for name in entry.parameters))
"""Names of all options that are numbers of a divergence."""


@lru_cache(maxsize=256)
def bound(name: str, parameters: tuple[tuple[str, float], ...]) -> Divergence:
    """A divergence with its parameters; those that are not named have their defaults."""
    entry = DIVERGENCES[name]
    if entry.bind is None or not parameters:
        return entry
    return entry.bind({**{x: y.default for x, y in entry.parameters.items()}, **dict(parameters)})


def of(problem: Problem) -> Divergence:
    """The divergence of a problem."""
    return bound(problem.divergence, problem.parameters)


def given_parameters(options: Mapping[str, float | None]) -> tuple[tuple[str, float], ...]:
    """Those that were given, in the order of `PARAMETERS`."""
    return tuple((name, x) for name in PARAMETERS if (x := options.get(name)) is not None)


def extra_rows(problem: Problem) -> dict[str, tuple[int, ...]]:
    """What a forward has of its rows beside the value and both log-sum-exps, and the axes that each has after them."""
    found: dict[str, tuple[int, ...]] = {"teacher_entropy": ()} if problem.entropy else {}
    moments = moments_of(problem)
    return found | ({"moments": (moments,)} if moments else {})


def moments_of(problem: Problem) -> int:
    """How many moments a forward leaves of a row: those of its divergence, or the state of a row with other keys."""
    divergence = of(problem)
    return divergence.state_floats if problem.some_keys else divergence.moments

"""Attention sinks: a logit z per head that takes mass and has no value, as one more outcome of a row.

With m and p the mass that a side leaves its keys and what its sink takes, log m = -softplus(z - lse) and
log p = -softplus(lse - z), a row whose sides both have sinks is

    lse' = lse + softplus(z - lse)
    KL(A || B)' = m_a (KL + log m_a - log m_b) + p_a (log p_a - log p_b)

and where B alone has one, KL - log m_b; where A alone has one, infinite. Logit gradients are those of the formula
without sinks, with lse' and the value in place of lse and the row's value, so kernels read rows that have been changed
and know of no sinks. By a sink's logit, g (p_b - p_a) and g p_a (log p_a - log p_b - value).

Written once for every framework, as `reductions` is. A row without keys stays as it is, with log-sum-exps of -inf.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .divergences import DIVERGENCES
from .reductions import to_zero


class Sinks(NamedTuple):
    """Logits of the teacher's and the student's sinks, of the shape of rows or None."""

    teacher: Any = None
    student: Any = None


# Of divergences that weigh by one side: which side is A and which is B, and whether the value is -sum A log B.
_ORDER = {
    name: (x.weighing.side, 1 - x.weighing.side, x.weighing.crossed)
    for name, x in DIVERGENCES.items()
    if x.weighing is not None
}


def check(sinks: Sinks, divergence: str) -> None:
    """Refuse sinks that have no meaning together, or none that is built."""
    given = [name for name, z in zip(Sinks._fields, sinks) if z is not None]
    if not given:
        return
    if divergence not in _ORDER:
        built = ", ".join(f'"{name}"' for name in _ORDER)
        raise NotImplementedError(
            f"{given[0]}_sink_logits beside divergence={divergence!r}; built are sinks beside {built}"
        )
    a, b, _ = _ORDER[divergence]
    if sinks[a] is not None and sinks[b] is None:
        alone, other = Sinks._fields[a], Sinks._fields[b]
        raise ValueError(
            f"{alone}_sink_logits without {other}_sink_logits: the mass of the {alone}'s sink would lie where the "
            f"{other} has none, so {divergence!r} would be infinite in every row. Give both sides sinks; or leave "
            f"these out, which compares what lies on keys alone, each side divided by its sum over them"
        )


def spread(xp: Any, z: Any, like: Any) -> Any:
    """Logits that broadcast to the rows `like` as one for each row, in their dtype."""
    return xp.broadcast_to(_cast(z, like.dtype), like.shape)


def summed(xp: Any, x: Any, z: Any) -> Any:
    """Derivatives of each row by the logits `z` that were spread to them, as one for each head, in their dtype."""
    lead = len(x.shape) - len(z.shape)
    axes = tuple(i for i in range(len(x.shape)) if i < lead or z.shape[i - lead] == 1)
    return _cast(xp.sum(x, axes) if axes else x, z.dtype).reshape(-1)


def _cast(x: Any, dtype: Any) -> Any:
    return x.to(dtype) if hasattr(x, "to") else x.astype(dtype)


@to_zero
def with_sinks(xp: Any, rows: tuple[Any, Any, Any], sinks: Sinks, divergence: str) -> tuple[Any, Any, Any]:
    """Value and both log-sum-exps of rows, with their sinks."""
    value, *lses = rows
    empty = lses[0] == -xp.inf
    lses = [xp.where(empty, 0.0, lse) for lse in lses]
    a, b, crossed = _ORDER[divergence]
    masses: list[Any] = [None if z is None else -_softplus(xp, z - lse) for z, lse in zip(sinks, lses)]
    taken: list[Any] = [None if z is None else -_softplus(xp, lse - z) for z, lse in zip(sinks, lses)]
    if masses[a] is None:
        found = value - masses[b]
    elif crossed:
        found = xp.exp(masses[a]) * (value - masses[b]) - _times(xp, xp.exp(taken[a]), taken[b])
    else:
        found = xp.exp(masses[a]) * (value + (masses[a] - masses[b]))
        found = found + _times(xp, xp.exp(taken[a]), _less(xp, taken[a], taken[b]))
    moved = [lse if mass is None else lse - mass for lse, mass in zip(lses, masses)]
    teacher_lse, student_lse = (xp.where(empty, -xp.inf, lse) for lse in moved)
    return xp.where(empty, value, found), teacher_lse, student_lse


@to_zero
def entropy_with_sink(xp: Any, entropy: Any, lse: Any, sink: Any) -> Any:
    """The teacher's entropy, of rows whose log-sum-exp had no sink yet."""
    empty = lse == -xp.inf
    lse = xp.where(empty, 0.0, lse)
    mass, taken = -_softplus(xp, sink - lse), -_softplus(xp, lse - sink)
    return xp.where(empty, entropy, xp.exp(mass) * (entropy - mass) - _times(xp, xp.exp(taken), taken))


@to_zero
def gradients(xp: Any, grad: Any, rows: tuple[Any, Any, Any], sinks: Sinks, divergence: str) -> Sinks:
    """Of rows `with_sinks`: derivatives by the sinks' logits, one for each row."""
    value, *lses = rows
    empty = lses[0] == -xp.inf
    grad = xp.where(empty, 0.0, grad)
    a, b, crossed = _ORDER[divergence]
    taken: list[Any] = [None if z is None else xp.where(empty, 0.0, z - lse) for z, lse in zip(sinks, lses)]
    mass: list[Any] = [None if x is None else xp.exp(x) for x in taken]
    found: list[Any] = [None, None]
    found[b] = grad * (mass[b] if mass[a] is None else mass[b] - mass[a])
    if mass[a] is not None:
        ratio = -taken[b] if crossed else _less(xp, taken[a], taken[b])
        found[a] = grad * _times(xp, mass[a], ratio - value)
    return Sinks(*found)


def _times(xp: Any, p: Any, x: Any) -> Any:
    """p x, and 0 where p is 0: a logit of -inf is no sink."""
    return p * xp.where(p == 0, 0.0, x)


def _less(xp: Any, x: Any, y: Any) -> Any:
    """x - y, and anything where x is -inf, for it weighs nothing."""
    return xp.where(x == -xp.inf, 0.0, x) - xp.where(x == -xp.inf, 0.0, y)


def _softplus(xp: Any, x: Any) -> Any:
    return xp.where(x > 0, x, 0.0) + xp.log1p(xp.exp(-xp.abs(x)))

"""The diagonal that causal and window share: where it lies, and how far each side of it is seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .interface import Asked, Chosen, Cutting, Extents, Indices


class Band(NamedTuple):
    """Keys that a row sees around its own: `left` and `right` of them, -1 for no limit."""

    left: int
    right: int
    offset: int
    """Row i is at key i + offset; 0 where packed sequences have offsets of their own."""
    own: bool

    @property
    def one_sided(self) -> bool:
        """Whether one number says it all: the last key that a row sees. It is a window then without a left side."""
        return self.left < 0 and not (self.right > 0 and self.own)


def band_of(asked: Asked) -> Band:
    """What options say of it, together."""
    options, extents = asked.options, asked.extents
    left, right = options.window or (-1, -1)
    # Of packed sequences each has its own offset, unless one is given for all.
    own = asked.sequences > 0 and options.q_offset is None
    offset = extents.keys - extents.queries if options.q_offset is None else options.q_offset
    return Band(left, 0 if options.causal else right, 0 if own else offset, own)


def distances(options: Mapping[str, Any], rows: int, keys: int) -> Indices:
    """How far keys lie behind the diagonal of each row; unless an offset is given, the last row's is the last key."""
    offset = options.get("q_offset")
    return np.arange(keys) - np.arange(rows)[:, None] - (keys - rows if offset is None else offset)


# What is the same of every part that is a diagonal, where a call is cut. All ask the same options.

OPTIONS = ("causal", "q_offset", "window")


def _reach(options: Chosen) -> tuple[int, int]:
    """How many keys to the left and to the right of the diagonal a row sees; -1: all."""
    left, right = options.window or (-1, -1)
    return left, 0 if options.causal else right


def _offset(options: Chosen, extents: Extents) -> int:
    return extents.keys - extents.queries if options.q_offset is None else options.q_offset


def narrowed(part: Cutting) -> Cutting:
    """Keys that no row sees, and rows that see none of the keys, are left out at both ends."""
    (g0, g1), (k0, k1) = part.q, part.k
    (left, right), offset = _reach(part.options), _offset(part.options, part.extents)
    if left >= 0:
        k0 = max(k0, g0 + offset - left)
        g1 = min(g1, k1 + left - offset)
    if right >= 0:
        k1 = min(k1, g1 + offset + right)
        g0 = max(g0, k0 - right - offset)
    return part._replace(q=(g0, g1), k=(k0, k1))


def cut(part: Cutting) -> Mapping[str, Any]:
    """The same diagonal, told from the first row and key."""
    options = part.options
    offset = _offset(options, part.extents) + part.q[0] - part.k[0]
    return {"causal": options.causal, "window": options.window, "q_offset": offset}


def last_key(options: Chosen, extents: Extents) -> int:
    """Where there is no left side: how far beyond its own number a row sees keys."""
    return _offset(options, extents) + _reach(options)[1]


def up_to(last: int) -> Mapping[str, Any]:
    """The options of a call whose row i sees the keys j <= i + last."""
    return {"causal": True, "q_offset": last}


def from_ends(options: Chosen) -> bool:
    """Whether it hangs on the last row and key of each sequence."""
    return options.q_offset is None

"""The diagonal that causal and window share: where it lies, and how far each side of it is seen."""

from __future__ import annotations

from typing import NamedTuple

from .interface import Asked


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

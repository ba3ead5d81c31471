"""The plain operation, as strategies call it on blocks: with all keys of their rows, or with some of them.

With some, a forward leaves states of rows, and a backward reads what rows have of all their keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from ..call import Call, SavedArrays
from ..ops import ATTENTION_KL
from ..results import KLForwardRows

NAMES = ("teacher_q", "teacher_k", "student_q", "student_k")
QUERIES, KEYS = (0, 2), (1, 3)
"""Where among the arrays they are."""


class Engine(Protocol):
    """Rows and gradients of a block."""

    def forward(self, call: Call) -> KLForwardRows[Any]:
        """Rows; with `some_keys` their `moments` are the numbers of their states."""
        ...

    def backward(self, saved: tuple[Any, ...], call: Call, wrt: tuple[str, ...]) -> tuple[Any, ...]:
        """From grad, both log-sum-exps, values and moments: the gradients of the operands, None for those that `wrt`
        does not name."""
        ...


def call_of(arrays: tuple[Any, ...], options: Mapping[str, Any], some_keys: bool = False, wide: str = "") -> Call:
    """A call of the plain operation; `wide` says of which rows gradients are to be summed, "q", "k" or both."""
    return Call.of(ATTENTION_KL, arrays, {**options, "some_keys": some_keys, "wide_gradients": wide})


class Launching:
    """For libraries whose arrays have memory."""

    def forward(self, call: Call) -> KLForwardRows[Any]:
        rows = call.ready().forward()
        kl, teacher_lse, student_lse, _, moments = (None if x is None else x.array for x in rows)
        return KLForwardRows(kl, teacher_lse, student_lse, moments=moments)

    def backward(self, saved: tuple[Any, ...], call: Call, wrt: tuple[str, ...]) -> tuple[Any, ...]:
        return call.ready(SavedArrays(saved)).backward(wrt)

"""The plain operation, as strategies call it on blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

from ..api import attention_kl_backward, attention_kl_forward
from ..results import KLForwardRows

NAMES = ("teacher_q", "teacher_k", "student_q", "student_k")
QUERIES, KEYS = (0, 2), (1, 3)
"""Where among the arrays they are."""


class Engine(Protocol):
    """Rows and gradients of a block."""

    def forward(self, arrays: tuple[Any, ...], options: Mapping[str, Any]) -> KLForwardRows[Any]: ...

    def backward(
        self,
        grad: Any,
        arrays: tuple[Any, ...],
        rows: KLForwardRows[Any],
        options: Mapping[str, Any],
        wrt: tuple[str, ...],
    ) -> tuple[Any, ...]:
        """Of the four arrays, None for those that `wrt` does not name."""
        ...


class Explicit:
    """By the explicit functions, of every library whose arrays have memory."""

    def forward(self, arrays: tuple[Any, ...], options: Mapping[str, Any]) -> KLForwardRows[Any]:
        rows = attention_kl_forward(*arrays, **options)
        return KLForwardRows(rows.kl, rows.teacher_lse, rows.student_lse, moments=getattr(rows, "moments", None))

    def backward(
        self,
        grad: Any,
        arrays: tuple[Any, ...],
        rows: KLForwardRows[Any],
        options: Mapping[str, Any],
        wrt: tuple[str, ...],
    ) -> tuple[Any, ...]:
        return tuple(attention_kl_backward(grad, *arrays, saved=rows, wrt=cast(Any, wrt), **options))

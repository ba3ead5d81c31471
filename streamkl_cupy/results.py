"""What calls give back."""

from __future__ import annotations

from types import GenericAlias
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

A = TypeVar("A")  # the type of the caller's arrays

if TYPE_CHECKING:
    from typing import Generic, Protocol, TypeAlias

    import numpy as np
    import typing_extensions
    from numpy.typing import NDArray

    # NumPy's arrays have a dtype, and those of rows are float32 or float64 whatever the inputs' is.
    Given: TypeAlias = NDArray[Any]
    Rows: TypeAlias = NDArray[np.floating[Any]]

    T = typing_extensions.TypeVar("T", default=Any)

    class KLForward(NamedTuple, Generic[T]):
        kl: T
        teacher_lse: T
        student_lse: T

    class KLForwardMass(NamedTuple, Generic[T]):
        kl: T
        teacher_lse: T
        student_lse: T
        teacher_mass: T

    class KLEntropy(NamedTuple, Generic[T]):
        kl: T
        teacher_entropy: T

    class KLForwardRows(NamedTuple, Generic[T]):
        kl: T
        teacher_lse: T
        student_lse: T
        teacher_mass: T | None = None
        teacher_entropy: T | None = None
        moments: T | None = None

    class SavedRows(Protocol):
        """What `attention_kl_forward` returns, whatever it was asked for."""

        @property
        def kl(self) -> Any: ...
        @property
        def teacher_lse(self) -> Any: ...
        @property
        def student_lse(self) -> Any: ...

    # `T | Any`, and not `T | None`: which of them are None is in `wrt`, and whoever asked for one has it.
    class KLGradients(NamedTuple, Generic[T]):
        teacher_q: T | Any = None
        teacher_k: T | Any = None
        student_q: T | Any = None
        student_k: T | Any = None

    class KLSinkGradients(NamedTuple, Generic[T]):
        teacher_q: T | Any = None
        teacher_k: T | Any = None
        student_q: T | Any = None
        student_k: T | Any = None
        teacher_sink_logits: T | Any = None
        student_sink_logits: T | Any = None

    class AttentionForward(NamedTuple, Generic[T]):
        out: T
        lse: T

    class AttentionGradients(NamedTuple, Generic[T]):
        query: T | Any = None
        key: T | Any = None
        value: T | Any = None

else:
    # A NamedTuple that is generic needs Python 3.11.

    class KLForward(NamedTuple):
        """Row results: `kl` in nats, and the natural log-sum-exps of both logit rows, (B, H, M), float32 or float64."""

        kl: Any
        teacher_lse: Any
        student_lse: Any
        __class_getitem__ = classmethod(GenericAlias)

    class KLForwardMass(NamedTuple):
        """`KLForward`, and how much of the teacher's dense distribution lies on the keys that the row sees, 0 to 1."""

        kl: Any
        teacher_lse: Any
        student_lse: Any
        teacher_mass: Any
        __class_getitem__ = classmethod(GenericAlias)

    class KLEntropy(NamedTuple):
        """`kl` as asked for, and beside it the entropy of each row of the teacher, nats."""

        kl: Any
        teacher_entropy: Any
        __class_getitem__ = classmethod(GenericAlias)

    class KLForwardRows(NamedTuple):
        """`KLForward`, and what else there is of the rows; None for what was not asked for.

        `teacher_mass` as in `KLForwardMass`, `teacher_entropy` in nats, `moments` (..., k) whatever the divergence's
        gradients read besides.
        """

        kl: Any
        teacher_lse: Any
        student_lse: Any
        teacher_mass: Any = None
        teacher_entropy: Any = None
        moments: Any = None
        __class_getitem__ = classmethod(GenericAlias)

    class KLGradients(NamedTuple):
        """Gradients in shape, dtype and framework of their inputs, compact; None for what was not asked."""

        teacher_q: Any = None
        teacher_k: Any = None
        student_q: Any = None
        student_k: Any = None
        __class_getitem__ = classmethod(GenericAlias)

    class KLSinkGradients(NamedTuple):
        """`KLGradients`, and those of sinks, (H,), in their dtype; None for sinks that a side does not have."""

        teacher_q: Any = None
        teacher_k: Any = None
        student_q: Any = None
        student_k: Any = None
        teacher_sink_logits: Any = None
        student_sink_logits: Any = None
        __class_getitem__ = classmethod(GenericAlias)

    class AttentionForward(NamedTuple):
        """Outputs (B, H, M, D_v) in the type of the values, and beside them the natural log-sum-exp of each row's
        logits, (B, H, M), float32 or float64."""

        out: Any
        lse: Any
        __class_getitem__ = classmethod(GenericAlias)

    class AttentionGradients(NamedTuple):
        """Gradients in shape, dtype and framework of their inputs, compact; None for what was not asked."""

        query: Any = None
        key: Any = None
        value: Any = None
        __class_getitem__ = classmethod(GenericAlias)


def rows_of(
    kl: Any, teacher_lse: Any, student_lse: Any, mass: Any = None, entropy: Any = None, moments: Any = None
) -> Any:
    """Row results as callers have them: the smallest kind that holds what there is."""
    if entropy is not None or moments is not None:
        return KLForwardRows(kl, teacher_lse, student_lse, mass, entropy, moments)
    if mass is not None:
        return KLForwardMass(kl, teacher_lse, student_lse, mass)
    return KLForward(kl, teacher_lse, student_lse)

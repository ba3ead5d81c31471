"""What the type checker sees: the words that options may be, and the options that several functions have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

Layout = Literal["bhnd", "bnhd"]
Precision = Literal["highest", "high"]
Reduction = Literal["none", "sum", "mean"]
InputName = Literal["teacher_q", "teacher_k", "student_q", "student_k"]

if TYPE_CHECKING:
    from typing import TypeAlias, TypedDict

    from .numpy_backend import NumPyPlan
    from .patterns import BlockPattern
    from .planning import Plan

    Wrt: TypeAlias = tuple[InputName, ...]
    AnyPlan: TypeAlias = Plan | NumPyPlan

    class Options(TypedDict, total=False):
        """The options that every function has."""

        teacher_scale: float | None
        student_scale: float | None
        causal: bool
        q_offset: int | None
        window: tuple[int | None, int | None] | None
        key_lengths: Any
        cu_seqlens_q: Any
        cu_seqlens_k: Any
        key_mask: Any
        block_mask: BlockPattern | None
        layout: Layout
        precision: Precision
        deterministic: bool | None

    class LossOptions(Options, total=False):
        """Those of `attention_kl`."""

        row_weight: Any
        reduction: Reduction

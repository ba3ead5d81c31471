"""What calls of the indexer give back."""

from __future__ import annotations

from typing import Any, NamedTuple


class IndexerForward(NamedTuple):
    """`kl`, in nats, as it was asked for; of each row the student's natural log-sum-exp and the sum Z of the teacher's
    target before it is normalised; the teacher's log-sum-exps of each head; and what a mean divides by."""

    kl: Any
    index_lse: Any
    target_sum: Any
    teacher_lse: Any
    """None beside a target."""
    weight_sum: Any


class IndexerGradients(NamedTuple):
    """Gradients in shape, dtype and framework of their inputs, compact; None for what was not asked."""

    index_q: Any = None
    index_k: Any = None
    index_weights: Any = None

"""Kernels: a file for each of `cuda_src/kernels`, all of them answering the questions of `base.py`."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Final

from ..ops import ATTENTION_KL, ATTENTION_KL_TO, SPARSE_ATTENTION
from . import (
    attention_combine,
    attention_fused_sm90,
    attention_gradient_sm80,
    attention_gradient_sm90,
    attention_rows,
    attention_sm80,
    attention_sm90,
    combine,
    forward_sm80,
    forward_sm90,
    fused_sm90,
    gradient_sm80,
    gradient_sm90,
    indexer_gated_key_sm90,
    indexer_gated_query_sm90,
    indexer_gathered_sm90,
    indexer_key_sm80,
    indexer_key_sm90,
    indexer_listed_sm90,
    indexer_query_sm80,
    indexer_query_sm90,
    indexer_score_sm80,
    indexer_score_sm90,
    indexer_stream_sm90,
    saved_rows,
)
from .base import Candidate
from .gpus import DeviceFacts

KERNELS: dict[str, tuple[Candidate[Any, Any], ...]] = {
    "forward": (forward_sm90.KERNEL, forward_sm80.KERNEL),
    "gradient": (gradient_sm90.KERNEL, gradient_sm80.KERNEL),
    "fused": (fused_sm90.KERNEL,),
    "attention": (attention_sm90.KERNEL, attention_sm80.KERNEL),
    "attention_gradient": (attention_gradient_sm90.KERNEL, attention_gradient_sm80.KERNEL),
    "attention_fused": (attention_fused_sm90.KERNEL,),
    "indexer_score": (
        indexer_gathered_sm90.KERNEL,
        indexer_stream_sm90.KERNEL,
        indexer_score_sm90.KERNEL,
        indexer_score_sm80.KERNEL,
    ),
    "indexer_query": (indexer_gated_query_sm90.KERNEL, indexer_query_sm90.KERNEL, indexer_query_sm80.KERNEL),
    "indexer_key": (indexer_gated_key_sm90.KERNEL, indexer_key_sm90.KERNEL, indexer_key_sm80.KERNEL),
    "indexer_listed": (indexer_listed_sm90.KERNEL,),
}
"""By kind of task, the most capable first; the last forward and gradients run on every supported GPU."""


def choose(kind: str, work: Any, facts: DeviceFacts) -> tuple[tuple[Any, Any] | None, dict[Candidate[Any, Any], str]]:
    """The first kernel that does the work with its tile, if any, and why those before it do not."""
    refusals: dict[Candidate[Any, Any], str] = {}
    for kernel in KERNELS[kind]:
        tile, reason = kernel.choice(work, facts)
        if tile is not None:
            return (kernel, tile), refusals
        refusals[kernel] = reason
    return None, refusals


def chosen(kind: str, work: Any, facts: DeviceFacts) -> tuple[Any, Any, dict[Candidate[Any, Any], str]]:
    """The same of work that has to be done: kernel, tile and refusals.

    Raises:
        NotImplementedError: no kernel does it.
    """
    found, refusals = choose(kind, work, facts)
    if found is None:
        raise NotImplementedError(list(refusals.values())[-1])
    return (*found, refusals)


JOINS: Final[dict[str, ModuleType]] = {
    ATTENTION_KL.name: combine,
    ATTENTION_KL_TO.name: combine,
    SPARSE_ATTENTION.name: attention_combine,
}
"""By operation, what joins the splits of its forward."""
SAVED_ROWS: Final[dict[str, ModuleType]] = {
    ATTENTION_KL.name: saved_rows,
    ATTENTION_KL_TO.name: saved_rows,
    SPARSE_ATTENTION.name: attention_rows,
}
"""By operation, what makes of saved rows those that its gradients read."""

"""The family of gradient kernels that multiply gates and gradients which the score kernels have left."""

from __future__ import annotations

from . import indexer_score_sm90
from .gpus import DeviceFacts
from .indexer import IndexerShape

MOST_COLUMNS = 128
"""Of the index head dim: a warpgroup's sums of two heads fill its registers."""


def refuses(shape: IndexerShape, facts: DeviceFacts) -> str:
    """Why scores have to be computed again for each gradient; empty where their gates can be kept."""
    if facts.compute_capability != (9, 0):
        return "it needs compute capability 9.0"
    if shape.student == "float32":
        return "it multiplies 16-bit elements"
    if shape.index_dim > MOST_COLUMNS or shape.index_dim % 8:
        return f"index head dims must be multiples of 8 up to {MOST_COLUMNS}"
    if not {"SQ", "SK"} <= shape.vectors:
        return "rows of index_q and index_k must start on 16-byte boundaries with adjacent elements"
    if indexer_score_sm90.plan(shape._replace(tiled=True), 1, facts) is None:
        return "the scores are the portable kernel's"
    return ""

"""Which keys a row of the indexer sees: an interval of its own, and of that those that bits and ids name.

Causal rows, compressed keys, bounds of rows and packed sequences all come to one interval for each row, so whatever
walks over tiles asks for nothing else: a block sees the keys between the least start and the largest end of its rows,
and a tile is full where the largest start and the least end leave it whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


class RowKeys(NamedTuple):
    """What is static of it."""

    causal: bool = False
    q_offset: int | None = None
    """None: the last row sees the last key, of each sequence."""
    compress_ratio: int = 1
    """Tokens that a key stands for: row i sees keys whose tokens have all been."""
    topk_relative: bool = False
    """Whether ids count from the start of the row's sequence."""


class Intervals(NamedTuple):
    """(B, M) each: row i sees keys from `start` to before `end`; `base` is what ids count from."""

    start: Array
    end: Array
    base: Array


def intervals(rule: RowKeys, batch: int, queries: int, keys: int, arrays: Mapping[str, Array]) -> Intervals:
    """Those of all rows, inside the keys, with 0 to 0 where a row sees none. Bounds are (B, M)."""
    start, end, base = (np.zeros((batch, queries), np.int64) for _ in Intervals._fields)
    bounds = ([0, queries], [0, keys])
    if "cu_seqlens_q" in arrays:
        bounds = (arrays["cu_seqlens_q"].tolist(), arrays["cu_seqlens_k"].tolist())
    for (q0, q1), (k0, k1) in zip(*map(pairwise, bounds), strict=True):
        rows = np.arange(q1 - q0)
        start[:, q0:q1] = k0
        base[:, q0:q1] = k0 if rule.topk_relative else 0
        seen = np.full(q1 - q0, k1 - k0)
        if rule.causal:
            offset = (k1 - k0) * rule.compress_ratio - (q1 - q0) if rule.q_offset is None else rule.q_offset
            seen = np.clip((rows + offset + 1) // rule.compress_ratio, 0, k1 - k0)
        end[:, q0:q1] = k0 + seen
    if "key_start" in arrays:
        start = np.maximum(start, arrays["key_start"])
    if "key_end" in arrays:
        end = np.minimum(end, arrays["key_end"])
    nothing = end <= start
    return Intervals(np.where(nothing, 0, start), np.where(nothing, 0, end), base)


def chosen(ids: Array, lengths: Array | None, base: Array, keys: int) -> Array:
    """(m, N), which keys ids (m, K) name, the first `lengths` (m,) of each row; others than 0 to N - 1 name none.

    A repeated id counts once, and their order has no effect. `base` (m,) is added to those that are not negative.
    """
    used = ids >= 0
    if lengths is not None:
        used &= np.arange(ids.shape[-1]) < lengths[:, None]
    used &= ids < keys - base[:, None]  # before the sum, which could leave the type of the ids
    found = np.zeros((len(ids), keys + 1), np.bool_)
    np.put_along_axis(found, np.where(used, ids + base[:, None], keys), True, axis=-1)
    return found[:, :keys]

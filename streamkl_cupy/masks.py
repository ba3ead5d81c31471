"""The masks by name: parameters, the rule, and which tiles of the score matrix a kernel must visit.

A mask is one header under `cuda_src/masks/` and one entry here. Everything else asks the entry: the kernels'
schedule through the two ranges, the NumPy backend and the float64 reference through `visible`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Range = tuple[int, int]


class Params(Protocol):
    """A mask's integer parameters by name: a dict, or the `MaskSpec` of a `Problem`."""

    def __getitem__(self, key: str, /) -> int: ...


@dataclass(frozen=True)
class Mask:
    """One rule for which keys a query row may see.

    Ranges are half open, in rows or keys, clipped to the matrix; an empty one is (0, 0). They may be wider than
    what is really visible, never narrower: they decide which tiles are skipped.
    """

    name: str
    header: str
    params: tuple[str, ...]
    doc: str
    visible: Callable[[Params, NDArray[Any], NDArray[Any]], NDArray[np.bool_]]
    """(params, rows, keys) -> bool; the two index arrays broadcast against each other."""
    key_range: Callable[[Params, int, int, int, int], Range]
    """(params, q0, q1, M, N) -> keys that any of the rows [q0, q1) may see."""
    query_range: Callable[[Params, int, int, int, int], Range]
    """(params, k0, k1, M, N) -> rows that may see any of the keys [k0, k1)."""
    full: Callable[[Params, int, int, int, int], bool]
    """(params, q0, q1, k0, k1) -> whether every row of [q0, q1) sees every key of [k0, k1)."""

    def dense(self, params: Params, M: int, N: int) -> NDArray[np.bool_]:
        """The whole (M, N) matrix, True where row i sees key j: the definition tests compare with."""
        return self.visible(params, np.arange(M)[:, None], np.arange(N)[None, :])


def _clipped(start: int, stop: int, size: int) -> Range:
    start, stop = max(start, 0), min(stop, size)
    return (start, stop) if start < stop else (0, 0)


def _see_all(params: Params, rows: NDArray[Any], keys: NDArray[Any]) -> NDArray[np.bool_]:
    return np.ones(np.broadcast_shapes(rows.shape, keys.shape), dtype=np.bool_)


def _see_causal(params: Params, rows: NDArray[Any], keys: NDArray[Any]) -> NDArray[np.bool_]:
    seen: NDArray[np.bool_] = np.asarray(keys - rows <= params["q_offset"])
    return seen


def _nonempty(start: int, stop: int, size: int) -> Range:
    return (0, size) if start < stop else (0, 0)


def _causal_keys(params: Params, q0: int, q1: int, M: int, N: int) -> Range:
    return _clipped(0, q1 + params["q_offset"], N) if q0 < q1 else (0, 0)


def _causal_queries(params: Params, k0: int, k1: int, M: int, N: int) -> Range:
    return _clipped(k0 - params["q_offset"], M, M) if k0 < k1 else (0, 0)


MASKS: dict[str, Mask] = {
    mask.name: mask
    for mask in (
        Mask(
            name="none",
            header="masks/none.cuh",
            params=(),
            doc="every row sees every key",
            visible=_see_all,
            key_range=lambda params, q0, q1, M, N: _nonempty(q0, q1, N),
            query_range=lambda params, k0, k1, M, N: _nonempty(k0, k1, M),
            full=lambda params, q0, q1, k0, k1: True,
        ),
        Mask(
            name="causal",
            header="masks/causal.cuh",
            params=("q_offset",),
            doc="row i sees keys j <= i + q_offset; unless given, N - M: the last row sees the last key",
            visible=_see_causal,
            key_range=_causal_keys,
            query_range=_causal_queries,
            full=lambda params, q0, q1, k0, k1: k1 - 1 <= q0 + params["q_offset"],
        ),
    )
}

"""Elements as NumPy computes with them: bfloat16 is the uint16 of its bits, which knows no arithmetic."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def widen(x: Array, out: Array) -> Array:
    """Copy `x` into the float32 or float64 array `out`; uint16 holds bfloat16 bits."""
    if x.dtype != np.uint16:
        np.copyto(out, x)
    elif out.dtype == np.float32:
        np.left_shift(x, 16, out=out.view(np.uint32), dtype=np.uint32)
    else:
        with np.errstate(invalid="ignore"):  # signalling NaN
            np.copyto(out, np.left_shift(x, 16, dtype=np.uint32).view(np.float32))
    return out


def narrow(x: Array, dtype: np.dtype[Any]) -> Array:
    """`x` rounded to nearest even in `dtype`; uint16 stands for bfloat16 bits."""
    with np.errstate(over="ignore", invalid="ignore"):
        if dtype != np.uint16:
            return x.astype(dtype)
        bits = x.astype(np.float32).view(np.uint32)
    # Adding the last kept bit to half a unit rounds ties to even. A NaN must not be carried over into infinity.
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)

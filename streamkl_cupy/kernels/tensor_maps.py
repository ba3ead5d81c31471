"""Tensor maps: how Hopper's copy engine is told the shape of an array. Encoded by the driver, kept by address."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from ..errors import DriverError
from ..problem import Operand
from .base import ELEMENT_BYTES, Box, vector_loads
from .structs import TENSOR_MAP

MAX_STRIDE_BYTES = 1 << 40
_BOX_BYTES = 128  # of a row: the most that the 128-byte swizzle allows
_DATA_TYPES = {"float16": 6, "float32": 7, "bfloat16": 9}  # CUtensorMapDataType
_SWIZZLE_128B, _PROMOTE_L2_256B = 3, 3


def no_map(x: Operand) -> str:
    """Why a tensor map cannot describe an input; empty where it can."""
    if not vector_loads(x):
        return "its rows must start on 16-byte boundaries with adjacent elements"
    if any(stride < 0 or stride * ELEMENT_BYTES[x.dtype] >= MAX_STRIDE_BYTES for stride in x.strides[:3]):
        return "its strides must be positive and below 2^40 bytes"
    if x.rows > 1 and x.strides[2] < x.dim:
        return "its rows overlap"
    return ""


@lru_cache(maxsize=1)
def _encoder() -> Any:
    try:
        function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    except (OSError, AttributeError) as error:
        raise DriverError(f"the NVIDIA driver cannot encode tensor maps: {error}; update it to 525 or newer") from error
    function.restype = ctypes.c_int
    return function


def encode(pointer: int, x: Operand, batch: int, box: Box) -> bytes:
    """The map of an input at an address: boxes of 128 bytes, 64 columns of 16 bits, 128-byte swizzle, zeros outside.

    Raises:
        DriverError: the driver refused; the message says what it was given.
    """
    size = ELEMENT_BYTES[x.dtype]
    extents = (x.dim, x.rows, x.heads, batch)
    sb, sh, sr, _ = x.strides
    # An axis of extent 1 is never stepped along, whatever stride it came with.
    strides = tuple(s * size if n > 1 else 16 for s, n in ((sr, x.rows), (sh, x.heads), (sb, batch)))
    raw = (ctypes.c_uint8 * (TENSOR_MAP.size + TENSOR_MAP.align))()
    start = -ctypes.addressof(raw) % TENSOR_MAP.align
    code = _encoder()(
        ctypes.byref(raw, start),
        ctypes.c_int(_DATA_TYPES[x.dtype]),
        ctypes.c_uint32(4),
        ctypes.c_void_p(pointer),
        (ctypes.c_uint64 * 4)(*extents),
        (ctypes.c_uint64 * 3)(*strides),
        (ctypes.c_uint32 * 4)(_BOX_BYTES // size, box.rows, box.heads, 1),
        (ctypes.c_uint32 * 4)(1, 1, 1, 1),
        ctypes.c_int(0),
        ctypes.c_int(_SWIZZLE_128B),
        ctypes.c_int(_PROMOTE_L2_256B),
        ctypes.c_int(0),
    )
    if code:
        raise DriverError(
            f"the driver refused a tensor map (CUresult {code}): address {pointer:#x}, extents {extents}, "
            f"strides {strides} bytes, box {box.heads} x {box.rows} x {_BOX_BYTES // size}"
        )
    return bytes(raw[start : start + TENSOR_MAP.size])

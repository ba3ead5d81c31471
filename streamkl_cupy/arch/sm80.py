"""Ampere and newer: cp.async, ldmatrix, mma.sync. The portable family, and the only one every supported GPU can run.

Shared memory of a row, bytes, with p(D) = round_up(D, 16) * element + 16 the padded length of one tile row:

    forward    rows * (p(D_t) + p(D_s)) + stages * columns * (p(D_t) + p(D_s))
    gradient   the same, plus 12 or 16 bytes per streamed query when the keys are stationary

Registers per thread that hold scores: warp_tiles * columns (both sides together); output of a gradient:
warp_tiles * D / 2; resident stationary operands: warp_tiles * (D_t + D_s) / 4. The limit is 255 per thread and 65,536
per multiprocessor.
"""

from __future__ import annotations

from . import Family, TileRow

_FORWARD = (
    TileRow(8, 1, 64, 2, 2, True, 64, "two blocks per multiprocessor hide the exponentials; queries fit in registers"),
    TileRow(8, 2, 64, 2, 1, False, 128, "32 rows per warp halve the shared-memory reads per product"),
    TileRow(4, 1, 32, 2, 1, False, 256, "fits 99 KiB"),
    TileRow(2, 1, 16, 1, 1, False, 576, "fits 99 KiB at the largest head dims"),
)

_FORWARD_F32 = (
    TileRow(4, 1, 32, 2, 1, False, 128, "operands are split at every read, so registers go to planes"),
    TileRow(4, 1, 16, 1, 1, False, 256, ""),
    TileRow(1, 1, 16, 1, 1, False, 576, "the least a block can be"),
)

_GRADIENT = (
    TileRow(8, 2, 32, 2, 1, False, 128, ""),
    TileRow(4, 1, 32, 2, 1, False, 256, ""),
    TileRow(2, 1, 16, 1, 1, False, 576, ""),
)

_GRADIENT_F32 = (
    TileRow(4, 1, 16, 2, 1, False, 128, ""),
    TileRow(2, 1, 16, 1, 1, False, 256, ""),
    TileRow(1, 1, 16, 1, 1, False, 576, ""),
)

_TILES = {
    ("forward", False): _FORWARD,
    ("forward", True): _FORWARD_F32,
    ("gradient", False): _GRADIENT,
    ("gradient", True): _GRADIENT_F32,
}

FAMILY = Family(
    name="sm80",
    min_capability=(8, 0),
    flag=lambda capability: f"sm_{capability[0]}{capability[1]}",
    entries={
        "forward": ("kernels/forward_sm80.cu", "streamkl_forward"),
        "gradient": ("kernels/gradient_sm80.cu", "streamkl_gradient"),
    },
    tiles=lambda kind, float32: _TILES[kind, float32],
)

"""Ampere and newer: cp.async, ldmatrix, mma.sync. The portable family, and the only one every supported GPU can run.

Shared memory of a row, bytes, with p(D) = round_up(D, 16) * element + 16 the padded length of one tile row:

    forward    rows * (p(D_t) + p(D_s)) + stages * columns * (p(D_t) + p(D_s))
    gradient   the same, plus 12 or 16 bytes per streamed query when the keys are stationary

Registers per thread that hold scores: warp_tiles * columns (both sides together); output of a gradient:
warp_tiles * D / 2. The limit is 255 per thread and 65,536 per multiprocessor.
"""

from __future__ import annotations

from . import Family, TileRow

_FORWARD = (
    TileRow(4, 2, 64, 2, 2, 64, "32 rows per warp, two blocks per multiprocessor", unroll=4),
    TileRow(4, 2, 32, 2, 2, 128, "32 rows per warp halve the reads per product; two blocks fit", unroll=8),
    TileRow(2, 1, 64, 2, 2, 64, "few rows in all: more blocks, long tiles"),
    TileRow(2, 1, 32, 2, 2, 128, "few rows in all: more blocks"),
    TileRow(4, 1, 32, 2, 1, 576, "one strip per warp: room for long rows"),
    TileRow(2, 1, 16, 1, 1, 576, "fits 99 KiB at the largest head dims"),
)

_FORWARD_F32 = (
    TileRow(4, 2, 32, 2, 1, 128, "operands are split at every read: 32 rows per warp share a split", unroll=2),
    TileRow(2, 1, 32, 2, 1, 128, "few rows in all, or 99 KiB", unroll=2),
    TileRow(4, 1, 16, 1, 1, 256, "one strip per warp: room for long rows", unroll=2),
    TileRow(1, 1, 16, 1, 1, 576, "the least a block can be", unroll=2),
)

_GRADIENT = (
    TileRow(4, 2, 64, 2, 2, 64, "as the forward; unroll 4 spills, and sm_120 spills any", unroll=3, before=(10, 0)),
    TileRow(4, 2, 48, 2, 2, 64, "3 % slower on an H100"),
    TileRow(4, 2, 32, 2, 2, 128, "as the forward; unroll 8 is 3 % faster and spills under a mask", unroll=4),
    TileRow(2, 1, 32, 2, 2, 128, "few rows in all: more blocks", unroll=2),
    TileRow(4, 1, 32, 2, 1, 576, "one strip per warp: room for long rows and outputs", unroll=1),
    TileRow(4, 1, 16, 1, 1, 576, "the same in less shared memory", unroll=1),
    TileRow(2, 1, 16, 1, 1, 576, "fits 99 KiB at the largest head dims", unroll=1),
)

_GRADIENT_F32 = (
    TileRow(4, 2, 32, 2, 1, 64, "as the forward", unroll=1),
    TileRow(8, 1, 32, 2, 1, 128, "eight warps hide the splitting; one strip pays for the output", unroll=1),
    TileRow(2, 1, 16, 2, 1, 128, "few rows in all, or 99 KiB", unroll=1),
    TileRow(2, 1, 16, 1, 1, 256, "room for long rows", unroll=1),
    TileRow(1, 1, 16, 1, 1, 576, "the least a block can be", unroll=1),
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

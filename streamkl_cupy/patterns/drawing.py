"""Pictures of patterns; the only module here that needs matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import install

PIXELS = 512
Extents = tuple[int, int]


def draw(
    listed: Mapping[str, Iterable[NDArray[np.int64]]],
    blocks: Extents,
    size: Extents,
    diagonal: int | None,
    columns: int,
) -> Any:
    """One picture for each title, on a `Figure` that no window owns.

    Args:
        listed: By title, the blocks that are listed, as numbers row * columns of blocks + column.
        blocks: Rows and columns of them.
        size: Rows and keys.
        diagonal: Row i sees keys up to i + diagonal: the edge of what there is to see.
        columns: Pictures per line.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as cause:
        raise ImportError(f"plot() needs matplotlib, which is not installed: {install.command('examples')}") from cause

    columns = min(columns, len(listed))
    lines = -(-len(listed) // columns)
    figure = Figure(figsize=(2.6 * columns + 0.4, 2.7 * lines + 0.5), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).reshape(-1)
    for axis in axes[len(listed) :]:
        axis.remove()
    queries, keys = size
    extent = (0, max(keys, 1), max(queries, 1), 0)  # a picture of nothing still has a size
    for axis, (title, flat) in zip(axes, listed.items(), strict=False):
        image = _image(flat, blocks)
        axis.imshow(image, cmap="Blues", vmin=0, vmax=1, extent=extent, interpolation="nearest", aspect="auto")
        axis.set_title(title, loc="center", fontsize=9)
        axis.tick_params(labelsize=7)
        if diagonal is not None:
            edge = np.array([0, queries])
            axis.plot(edge + diagonal, edge, color="#e07b39", linewidth=0.8)
            axis.set(xlim=extent[:2], ylim=extent[2:])
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    return figure


def _image(listed: Iterable[NDArray[np.int64]], blocks: Extents) -> NDArray[np.float64]:
    """At most PIXELS a side; a pixel is the fraction of its blocks that is listed, so that no thin stripe is lost."""
    steps = [-(-size // PIXELS) or 1 for size in blocks]
    # How many blocks lie in each line of pixels; the last ones may have fewer.
    height, width = (np.diff(np.r_[0:size:step, size]) for size, step in zip(blocks, steps))
    image = np.zeros((len(height), len(width)))
    for flat in listed:
        row, column = np.divmod(flat, blocks[1])
        np.add.at(image, (row // steps[0], column // steps[1]), 1)
    return image / np.outer(height, width)

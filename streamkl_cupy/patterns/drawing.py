"""Pictures of patterns; the only module here that needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..advice import install
from .pattern import union_of

if TYPE_CHECKING:
    from .pattern import BlockPattern

PIXELS = 512


def draw(pattern: BlockPattern, heads: list[int], columns: int) -> Any:
    """One picture per head and one of how many of them see each block, on a `Figure` that no window owns."""
    try:
        from matplotlib.figure import Figure
    except ImportError as cause:
        raise ImportError(f"plot() needs matplotlib, which is not installed: {install.command('examples')}") from cause

    maps = {f"head {head}": _image(pattern, [head]) for head in heads}
    covered = pattern.coverage(heads).fraction
    # Rounded down: 99.96 % must not read as all.
    maps[f"together: {int(covered * 1000) / 10:g} % of the context"] = _image(pattern, heads)
    columns = min(columns, len(maps))
    lines = -(-len(maps) // columns)
    figure = Figure(figsize=(2.6 * columns + 0.4, 2.7 * lines + 0.5), layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).reshape(-1)
    for axis in axes[len(maps) :]:
        axis.remove()
    extent = (0, max(pattern.keys, 1), max(pattern.queries, 1), 0)  # a picture of nothing still has a size
    for axis, (title, image) in zip(axes, maps.items(), strict=False):
        axis.imshow(image, cmap="Blues", vmin=0, vmax=1, extent=extent, interpolation="nearest", aspect="auto")
        axis.set_title(title, loc="center", fontsize=9)
        axis.tick_params(labelsize=7)
        if pattern.diagonal is not None:
            # Row i sees keys up to i + diagonal: the edge of what there is to see.
            edge = np.array([0, pattern.queries])
            axis.plot(edge + pattern.diagonal, edge, color="#e07b39", linewidth=0.8)
            axis.set(xlim=extent[:2], ylim=extent[2:])
    figure.supxlabel("key", fontsize=9)
    figure.supylabel("query", fontsize=9)
    return figure


def _image(pattern: BlockPattern, heads: list[int]) -> NDArray[np.float64]:
    """At most PIXELS a side; a pixel is the fraction of its blocks that is listed, so that no thin stripe is lost."""
    sizes = pattern.grid.row_blocks, pattern.grid.column_blocks
    steps = [-(-size // PIXELS) or 1 for size in sizes]
    # How many blocks lie in each line of pixels; the last ones may have fewer.
    height, width = (np.diff(np.r_[0:size:step, size]) for size, step in zip(sizes, steps))
    listed = np.zeros((len(height), len(width)))
    for places in union_of(pattern, heads):
        row, column = np.divmod(places, sizes[1])
        np.add.at(listed, (row // steps[0], column // steps[1]), 1)
    return listed / np.outer(height, width)

"""Pictures of patterns, by their pixels and their axes."""

from __future__ import annotations

import numpy as np
import pytest

from streamkl_cupy.patterns import drawing

pytest.importorskip("matplotlib", reason="needs matplotlib, of the examples extra")


def test_pixels_are_blocks_and_axes_are_rows_and_keys(rng: np.random.Generator) -> None:
    blocks, size = (5, 9), (77, 140)
    seen = rng.random((4, *blocks)) < 0.3
    listed = {f"head {i}": [np.flatnonzero(x)] for i, x in enumerate(seen)}
    figure = drawing.draw(listed, blocks, size, 63, 3)
    assert [axis.get_title("center") for axis in figure.axes] == list(listed)
    for axis, dense in zip(figure.axes, seen, strict=True):
        (image,) = axis.images
        np.testing.assert_array_equal(image.get_array(), dense)
        assert (image.norm.vmin, image.norm.vmax) == (0, 1)
        assert tuple(image.get_extent()) == (0, 140, 77, 0)
        assert (axis.get_xlim(), axis.get_ylim()) == ((0, 140), (77, 0))
        (edge,) = axis.get_lines()
        np.testing.assert_array_equal(edge.get_xydata(), [[63, 0], [140, 77]])
    assert (figure.get_supxlabel(), figure.get_supylabel()) == ("key", "query")
    # Three to a line, with as much room for each in every figure.
    width, height = figure.get_size_inches()
    one = drawing.draw(dict([*listed.items()][:1]), blocks, size, None, 3)
    assert one.axes[0].get_lines() == []
    assert width - one.get_size_inches()[0] == pytest.approx(2 * 2.6)
    assert height - one.get_size_inches()[1] == pytest.approx(2.7)
    assert one.get_size_inches()[0] > 2.6
    nothing = drawing.draw({"nothing": []}, (0, 0), (0, 0), None, 1)
    assert tuple(nothing.axes[0].images[0].get_extent()) == (0, 1, 1, 0)


def test_no_stripe_is_lost_where_blocks_are_more_than_pixels(rng: np.random.Generator) -> None:
    for count in (512, 513, 1024, 1500):
        step = -(-count // 512)
        dense = rng.random((3, count)) < 0.4
        image = drawing._image([np.flatnonzero(dense)], (3, count))
        assert image.shape == (3, len(range(0, count, step)))
        for x in range(image.shape[1]):
            np.testing.assert_allclose(image[:, x], dense[:, step * x : step * (x + 1)].mean(axis=1))
    one = drawing._image([np.array([999 * 4 + 2])], (1000, 4))
    assert one[-1].tolist() == [0, 0, 0.5, 0]
    halves = drawing._image([np.array([0]), np.array([3])], (2, 2))
    assert halves.tolist() == [[1, 0], [0, 1]]

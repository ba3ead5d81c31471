"""Batch entry b has the keys j < key_lengths[b]."""

from __future__ import annotations

import numpy as np

from .interface import Bools, Extents, Indices, MaskArray, Part, Range, Scene, Shape


def _misfit(shape: Shape, extents: Extents) -> str:
    expected = (extents.batch,)
    return "" if shape == expected else f", but there is one length per batch entry: expected {expected}"


def _check_values(lengths: Indices, extents: Extents) -> None:
    if lengths.size and not (lengths.min() >= 0 and lengths.max() <= extents.keys):
        worst = int(np.argmax((lengths < 0) | (lengths > extents.keys)))
        raise ValueError(
            f"key_lengths[{worst}] is {lengths.flat[worst]}; allowed are 0 to {extents.keys}, the number of keys"
        )


def _visible(scene: Scene, rows: Indices, keys: Indices) -> Bools:
    seen: Bools = keys < scene.arrays["key_lengths"][:, None, None, None]
    return seen


def _key_range(scene: Scene, q0: int, q1: int) -> Range:
    lengths = scene.arrays.get("key_lengths")
    return 0, scene.keys if lengths is None else int(lengths.max(initial=0))


PART = Part(
    name="lengths",
    header="masks/key_lengths.cuh",
    struct="KeyLengths",
    params=(),
    arrays=(MaskArray("key_lengths", "int32", 0, _misfit, _check_values),),
    asked=lambda asked: {} if "key_lengths" in asked.shapes else None,
    visible=_visible,
    key_range=_key_range,
    full=lambda scene, q0, q1, k0, k1: bool(k1 <= scene.arrays["key_lengths"].min(initial=k1)),
    registers=0,
)

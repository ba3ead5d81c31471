"""Batch entry b has the keys with key_mask[b, j]."""

from __future__ import annotations

from typing import Any

import numpy as np

from .interface import Extents, MaskArray, Part, Shape


def _misfit(shape: Shape, extents: Extents) -> str:
    expected = (extents.batch, extents.keys) if extents.rank == 4 else (extents.keys,)
    return "" if shape == expected else f", but there is one value per batch entry and key: expected {expected}"


def cut(mask: Any, start: int, stop: int) -> Any:
    """Of an array of any library."""
    return mask[..., start:stop]


PART = Part(
    name="keys",
    header="masks/keys.cuh",
    struct="KeyBits",
    params=(),
    arrays=(MaskArray("key_mask", "bool", 1, _misfit, lambda values, extents: None, of="keys", cut=cut, bits=True),),
    asked=lambda asked: {} if "key_mask" in asked.shapes else None,
    visible=lambda scene, rows, keys: scene.arrays["key_mask"][:, None, None, keys],
    key_range=lambda scene, q0, q1: (0, scene.keys),
    full=lambda scene, q0, q1, k0, k1: bool(scene.arrays["key_mask"][:, k0:k1].all()),
    holes=lambda scene, q0, q1, k0, k1: np.logical_or.reduce(scene.arrays["key_mask"][:, k0:k1], axis=0),
    sparse=True,
    registers=2,
    beside=("lengths",),
)

"""Batch entry b has the keys with key_mask[b, j]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .interface import Bools, Extents, MaskArray, Part, Shape


def _misfit(shape: Shape, extents: Extents) -> str:
    expected = (extents.batch, extents.keys) if extents.rank == 4 else (extents.keys,)
    return "" if shape == expected else f", but there is one value per batch entry and key: expected {expected}"


def cut(mask: Any, start: int, stop: int) -> Any:
    """Of an array of any library."""
    return mask[..., start:stop]


def drawn_values(rng: np.random.Generator, batch: int, count: int) -> Bools:
    """Few of them, half or most."""
    drawn: Bools = rng.random((batch, count)) < rng.choice([0.05, 0.5, 0.95])
    return drawn


def _definition(options: Mapping[str, Any], rows: int, keys: int) -> Bools:
    return np.atleast_2d(np.asarray(options["key_mask"]))[:, None, None, :]


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
    definition=_definition,
    drawn=lambda rng, extents: {"key_mask": drawn_values(rng, extents.batch, extents.keys)},
    holes=lambda scene, q0, q1, k0, k1: np.logical_or.reduce(scene.arrays["key_mask"][:, k0:k1], axis=0),
    sparse=True,
    registers=2,
    beside=("lengths",),
)

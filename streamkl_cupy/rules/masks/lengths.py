"""Batch entry b has the keys j < key_lengths[b]."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from .interface import Bools, Extents, Indices, MaskArray, Part, Range, Scene, Shape


def misfit(shape: Shape, extents: Extents) -> str:
    """What is wrong with the shape of lengths, of keys or of rows."""
    expected = (extents.batch,)
    return "" if shape == expected else f", but there is one length per batch entry: expected {expected}"


def check_lengths(name: str, lengths: Indices, most: int, what: str) -> None:
    """Raise where a length is negative or longer than what it is of."""
    if lengths.size and not (lengths.min() >= 0 and lengths.max() <= most):
        worst = int(np.argmax((lengths < 0) | (lengths > most)))
        raise ValueError(f"{name}[{worst}] is {lengths.flat[worst]}; allowed are 0 to {most}, the number of {what}")


def cut(lengths: Any, start: int, stop: int) -> Any:
    """Of an array of any library."""
    return (lengths - start).clip(0, stop - start)


def drawn_lengths(rng: np.random.Generator, batch: int, most: int) -> Indices:
    """Random ones, some of them 0."""
    found = rng.integers(0, most + 1, batch)
    found[rng.random(batch) < 0.2] = 0
    return found.astype(np.int32)


def _visible(scene: Scene, rows: Indices, keys: Indices) -> Bools:
    seen: Bools = keys < scene.arrays["key_lengths"][:, None, None, None]
    return seen


def _definition(options: Mapping[str, Any], rows: int, keys: int) -> Bools:
    seen: Bools = np.arange(keys) < np.asarray(options["key_lengths"])[:, None, None, None]
    return seen


def _key_range(scene: Scene, q0: int, q1: int) -> Range:
    lengths = scene.arrays.get("key_lengths")
    return 0, scene.keys if lengths is None else int(lengths.max(initial=0))


PART = Part(
    name="lengths",
    header="masks/lengths.cuh",
    struct="KeyLengths",
    params=(),
    arrays=(
        MaskArray(
            "key_lengths",
            "int32",
            0,
            misfit,
            lambda lengths, extents: check_lengths("key_lengths", lengths, extents.keys, "keys"),
            of="keys",
            cut=cut,
        ),
    ),
    asked=lambda asked: {} if "key_lengths" in asked.shapes else None,
    visible=_visible,
    key_range=_key_range,
    full=lambda scene, q0, q1, k0, k1: bool(k1 <= scene.arrays["key_lengths"].min(initial=k1)),
    definition=_definition,
    drawn=lambda rng, extents: {"key_lengths": drawn_lengths(rng, extents.batch, extents.keys)},
    registers=0,
    shortens=True,
)

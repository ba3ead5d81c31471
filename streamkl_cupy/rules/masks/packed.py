"""Sequences lie one after the other, each seeing its own keys; a scene is inside one of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from .interface import Asked, Bools, Chosen, Extents, Indices, MaskArray, Packing, Part, Segment, Shape

BOUNDS = ("cu_seqlens_q", "cu_seqlens_k")


def _misfit(shape: Shape, extents: Extents) -> str:
    if len(shape) == 1 and shape[0] >= 2:
        return ""
    return "; allowed is (S + 1,) for S sequences, at least one: 0, and where each of them ends"


def _check(asked: Asked) -> None:
    if asked.sequences:
        q, k = (asked.shapes[name] for name in BOUNDS)
        if q != k:
            raise ValueError(
                f"cu_seqlens_k: {k[0]} entries, but cu_seqlens_q has {q[0]}; both describe the same sequences"
            )


def _check_values(name: str, bounds: Indices, total: int, what: str) -> None:
    if bounds[0] != 0:
        raise ValueError(f"{name} begins with {bounds[0]}; it must begin with 0, where the first sequence starts")
    steps = np.diff(bounds)
    if (steps < 0).any():
        at = int(np.argmax(steps < 0))
        raise ValueError(
            f"{name} falls from {bounds[at]} to {bounds[at + 1]} at position {at + 1}; it holds the ends of "
            f"sequences that lie one after the other, so it never falls (equal entries are empty sequences)"
        )
    if bounds[-1] > total:
        raise ValueError(
            f"{name} ends at {bounds[-1]}, but there are {total} {what}; it ends at their number, or before it "
            f"where padding follows"
        )


def _check_inputs(options: Chosen, given: Mapping[str, Shape], inputs: Mapping[str, Shape]) -> None:
    for name, other in (BOUNDS, BOUNDS[::-1]):
        if name not in given:
            raise ValueError(
                f"{other} came without {name}; packed sequences need both, even where queries and keys have the same "
                f"lengths: pass {name}={other} then"
            )
    excluded = [name for name in given if name not in BOUNDS]
    if options.block_mask is not None:
        excluded.append("block_mask")
    if excluded:
        raise NotImplementedError(
            f"{excluded[0]} with cu_seqlens_q and cu_seqlens_k: packed sequences are built alone and with causal, "
            f"window and q_offset; leave keys and rows out of the packed arrays, or pad and use {excluded[0]}"
        )
    for name, shape in inputs.items():
        if len(shape) != 3:
            raise ValueError(
                f"{name}: shape {shape} has {len(shape)} axes; with cu_seqlens_q and cu_seqlens_k allowed are 3, "
                f"(rows of all sequences, heads, head dim)"
            )


def _asked(asked: Asked) -> Mapping[str, int] | None:
    return {"q_offset_given": int(asked.options.q_offset is not None), "q_offset": 0} if asked.sequences else None


def _segments(values: Mapping[str, Indices], params: Mapping[str, int]) -> list[Segment]:
    bounds = (itertools.pairwise(values[name].tolist()) for name in BOUNDS)
    return [
        Segment(
            slice(*q),
            slice(*k),
            params if params["q_offset_given"] else {**params, "q_offset": (k[1] - k[0]) - (q[1] - q[0])},
        )
        for q, k in zip(*bounds, strict=True)
    ]


def _definition(options: Mapping[str, Any], rows: int, keys: int) -> Bools:
    """Inside a sequence all of it; pairs of different ones are never asked about."""
    return np.ones((rows, keys), np.bool_)


def _drawn(rng: np.random.Generator, extents: Extents) -> dict[str, Any]:
    """Some sequences are empty, and some rows and keys may be left at the end."""
    sequences = int(rng.integers(1, 7))
    return {
        name: np.sort(np.r_[0, rng.integers(0, total + 1, sequences)]).astype(np.int32)
        for name, total in zip(BOUNDS, (extents.queries, extents.keys), strict=True)
    }


PART = Part(
    name="packed",
    header="masks/packed.cuh",
    struct="Packed",
    params=("q_offset_given",),
    arrays=(
        MaskArray(
            "cu_seqlens_q",
            "int32",
            1,
            _misfit,
            lambda values, extents: _check_values("cu_seqlens_q", values, extents.queries, "rows"),
            per_entry=False,
        ),
        MaskArray(
            "cu_seqlens_k",
            "int32",
            1,
            _misfit,
            lambda values, extents: _check_values("cu_seqlens_k", values, extents.keys, "keys"),
            per_entry=False,
        ),
    ),
    asked=_asked,
    visible=lambda scene, rows, keys: True,
    key_range=lambda scene, q0, q1: (0, scene.keys),
    full=lambda scene, q0, q1, k0, k1: True,
    definition=_definition,
    drawn=_drawn,
    check=_check,
    cut_once=True,
    packing=Packing("bnhd", BOUNDS, _check_inputs, lambda given: given["cu_seqlens_q"][0] - 1, _segments),
    beside=("window",),
)

"""The list of kernels that are compiled ahead: whose calls find theirs there, and what its problems are."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import streamkl_cupy
from streamkl_cupy.cli import bench, catalogue, shapes
from streamkl_cupy.cli.catalogue import ELEMENT_TYPES, ElementTypes, Extents
from streamkl_cupy.kernels.gpus import facts_for_arch
from streamkl_cupy.planning import make_plan
from streamkl_cupy.problem import Operand
from streamkl_cupy.rules.masks import MASKS

BF16 = ElementTypes("bfloat16", "bfloat16")


def texts(listed: Any) -> set[tuple[str, str]]:
    return {(entry.kernel.text, entry.kernel.arch) for entry in listed}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_calls_that_are_timed_find_their_kernels(arch: str, rng: np.random.Generator) -> None:
    """Of batches, extents and key heads that are not the list's: none of these is part of a kernel."""
    facts = facts_for_arch(arch)
    timed = [
        (x.batch, (x.teacher_dim, x.student_dim), x.causal, Extents(x.heads, x.student_key_heads, x.queries, x.keys))
        for x in shapes.SHAPES
    ]
    timed += [(1, dims, causal, Extents(heads, heads, n, n)) for heads, n, dims, causal in bench.PUBLISHED]
    timed += [(1, (64, 128), False, Extents(8, 8, 4096, 4096)), (1, (512, 64), True, Extents(8, 8, 4096, 4096))]
    assert {dims for _, dims, *_ in timed} <= set(catalogue.DIMS)
    # By lot: a list of a few hundred takes a while.
    lot = timed[rng.integers(len(timed))][1:3]
    mask = ("none", "causal")[lot[1]]
    there = texts(catalogue.entries(arch, [lot[0]], [BF16], [mask])[0])
    for batch, *which, extents in timed:
        if tuple(which) == lot:
            plan = make_plan(replace(catalogue.problem(lot[0], BF16, mask, extents=extents), batch=batch), facts)
            found: dict[Any, Any] = {}
            catalogue._note(found, plan, facts, "")
            assert len(found) >= 4
            assert texts(found.values()) <= there, (lot, extents)


def test_indexers_that_are_timed_find_their_kernels() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    there = texts(catalogue.indexer_entries("sm_90", [(128, 128)], [BF16])[0])
    for index_heads, n in itertools.product((8, 64), (4096, 16384)):
        teacher, keys = (np.empty((1, h, n, 128), ml_dtypes.bfloat16) for h in (16, 1))
        index, index_keys = (np.empty(x, ml_dtypes.bfloat16) for x in ((1, index_heads, n, 128), (1, n, 128)))
        weights = np.empty((1, index_heads, n), np.float32)
        plan: Any = streamkl_cupy.indexer_kl_plan(
            teacher, keys, index, index_keys, weights, index_scale=1.0, causal=True, arch="sm_90",
            wrt=("index_q", "index_k", "index_weights"),
        )  # fmt: skip
        assert {(kernel.text, kernel.arch) for kernel in (*plan.forward, *plan.backward)} <= there


def test_masks_of_the_list_are_in_the_order_of_kernels_words() -> None:
    for name, parts in catalogue.MASK_CASES.items():
        assert list(parts) == sorted(parts, key=list(MASKS).index), name
        assert name not in MASKS or name in parts
    assert catalogue.MASK_CASES["none"] == ()
    assert {*catalogue.MASK_CASES["padding"]} == {"causal", "keys", "query_mask"}


def test_problems_of_the_list() -> None:
    for mask, aligned in itertools.product(catalogue.MASK_CASES, (True, False)):
        parts = catalogue.MASK_CASES[mask]
        types = ElementTypes("bfloat16", "float32", "high")
        p = catalogue.problem((64, 96), types, mask, aligned, Extents(6, 3, 40, 48), "jsd", ("dot+softcap", "relu"))
        packed = "packed" in parts
        assert (p.mask.parts, p.rank, p.sequences > 1) == (parts, 3 if packed else 4, packed)
        assert (p.batch, p.heads, p.queries, p.keys, p.divergence) == (1, 6, 40, 48, "jsd")
        assert p.settings == (("precision", "high"),)
        teacher, student = p.distributions
        assert teacher.q == Operand(6, 40, 64, "bfloat16", (6 * 40 * 64, 40 * 64, 64, 1), aligned)
        assert teacher.k == Operand(3, 48, 64, "bfloat16", (3 * 48 * 64, 48 * 64, 64, 1), aligned)
        assert student.q == Operand(6, 40, 96, "float32", (6 * 40 * 96, 40 * 96, 96, 1), aligned)
        assert student.k == Operand(3, 48, 96, "float32", (3 * 48 * 96, 48 * 96, 96, 1), aligned)
        assert [(x.score, x.softcap) for x in (teacher, student)] == [("dot", 30.0), ("relu", None)]
        assert [x.scale for x in (teacher, student)] == [64**-0.5, 96**-0.5]
        pattern = p.mask.pattern
        assert (pattern is None) == ("blocks" not in parts)
        if pattern is not None:
            assert (pattern.queries, pattern.keys) == (40, 48)
        own = catalogue.attention_problem((64, 96), BF16, mask, aligned, Extents(6, 3, 40, 48), "relu")
        (side,), (values,) = own.distributions, own.extras
        assert (side.q.heads, side.k.heads, values.heads) == (6, 3, 3)
        assert (side.q.rows, side.k.rows, values.rows) == (40, 48, 48)
        assert (side.q.dim, side.k.dim, values.dim, side.scale, side.score) == (64, 64, 96, 0.125, "relu")
        assert {side.q.aligned, side.k.aligned, values.aligned} == {aligned}
        assert (own.mask, own.rank, own.sequences) == (p.mask, p.rank, p.sequences)
    given = catalogue.problem((64, 96), BF16, extents=Extents(6, 3, 40, 48), scores=("probability", "dot"))
    assert (given.op, given.distributions[0].q.dim, given.distributions[0].score) == (
        "attention_kl_to",
        0,
        "probability",
    )
    assert {x.aligned for side in given.distributions for x in (side.q, side.k)} == {True}
    (target,) = given.extras
    assert (target.heads, target.rows, target.dim, target.dtype) == (6, 40, 48, "bfloat16")


def test_labels_say_what_differs() -> None:
    assert str(ElementTypes("float16", "float16")) == "float16"
    assert str(ElementTypes("float32", "float32", "high")) == "float32 high"
    assert str(ElementTypes("bfloat16", "float32")) == "bfloat16/float32 highest"
    few: dict[str, Any] = {"extents": [Extents(8, 8, 512, 512)]}
    listed, refused = catalogue.entries("sm_90", [(64, 96)], [BF16], ["keys"], ["jsd"], [("dot", "relu")], **few)
    assert {x.label.partition(" ")[2] for x in listed} == {"64/96 bfloat16 keys jsd dot/relu"}
    assert refused == []
    listed, _ = catalogue.entries("sm_90", [(64, 96)], [BF16], ["none"], **few)
    assert {x.label.partition(" ")[2] for x in listed} == {"64/96 bfloat16 none", "64/96 bfloat16 none unaligned"}
    # Element-wise loads of one type of each size, without other masks.
    listed, _ = catalogue.entries("sm_80", [(64, 64)], ELEMENT_TYPES, ["none", "keys"], **few)
    odd = {x.label.partition(" ")[2] for x in listed if x.label.endswith("unaligned")}
    assert odd == {f"64/64 {x} none unaligned" for x in ("bfloat16", "float32 highest")}
    masked = {x.label.partition(" ")[2] for x in listed if x.label.endswith(" keys")}
    assert masked <= {f"64/64 {x} keys" for x in ("bfloat16", "float16", "float32 highest")}
    listed, _ = catalogue.indexer_entries("sm_80", [(64, 64)], ELEMENT_TYPES)
    assert {x.label.split()[0] for x in listed} >= {"indexer_score_sm80", "indexer_rows"}


def test_the_hardest_of_a_tile_is_its_largest() -> None:
    few = [Extents(8, 8, 8192, 8192)]
    listed, _ = catalogue.entries(
        "sm_80", [(64, 64), (128, 128), (96, 96)], ELEMENT_TYPES, ["none", "keys"], extents=few
    )
    chosen = catalogue.hardest(listed)
    assert 0 < len(chosen) < len(listed) / 3
    assert all("high" not in x.label.split() for x in chosen)

    def group(entry: Any) -> tuple[Any, ...]:
        told = dict(entry.kernel.constants)
        wide = tuple(told.get(f"SKL_{side}_ELEMENT") == "kF32" for side in "TS")
        return (entry.kernel.name, entry.kernel.tile, wide)

    largest: dict[Any, int] = {}
    for entry in listed:
        told = dict(entry.kernel.constants)
        if told.get("SKL_PLANES") != 2 and "SKL_T_DIM" in told:
            key = group(entry)
            largest[key] = max(largest.get(key, 0), told["SKL_T_DIM"])
    found = {group(x): dict(x.kernel.constants)["SKL_T_DIM"] for x in chosen if "SKL_T_DIM" in dict(x.kernel.constants)}
    assert found == largest
    # Of two alike, element-wise loads and a mask are harder.
    for entry in chosen:
        same = [x for x in listed if group(x) == group(entry) and x.label.split()[1] == entry.label.split()[1]]
        if any("unaligned" in x.label for x in same):
            assert "unaligned" in entry.label or "keys" in entry.label

"""What the benchmark of masks says of a case: shares, blocks, and what is right."""

from __future__ import annotations

import argparse
import warnings
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from conftest import load_script

SIZE, HEADS, BLOCK = 256, 3, 16


@pytest.fixture(scope="module")
def masks() -> ModuleType:
    return load_script("benchmarks/masks.py")


@pytest.fixture(scope="module")
def cases(masks: ModuleType) -> dict[str, Any]:
    options = argparse.Namespace(dim=16, dtype="float32", window=40, block=BLOCK, seed=0)
    groups = [masks.cases_of(group, SIZE, HEADS, options) for group in masks.GROUPS]
    return {case.title: case for group in groups for case in group}


def test_the_cases(cases: dict[str, Any]) -> None:
    assert list(cases) == [
        "dense",
        "causal",
        "window (40, 0) causal",
        "window (40, 40)",
        "packed, 11 sequences",
        "padded, no mask",
        "padded, key_lengths",
        "padded, both lengths",
        "sharded 1/8",
        "sharded 1/16",
        "sharded 1/8 causal",
        "sharded 1/16 causal",
    ]
    lengths = cases["packed, 11 sequences"].lengths
    assert sum(lengths) == SIZE
    assert cases["padded, key_lengths"].rows == max(lengths)


@pytest.mark.parametrize("size, heads", [(16384, 8), (65536, 4)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("share", [8, 16])
def test_sharded_patterns_are_as_dense_as_they_say(
    masks: ModuleType, size: int, heads: int, causal: bool, share: int
) -> None:
    pattern = masks.sharded(share, size, heads, 128, causal)
    assert pattern.heads == heads
    assert pattern.density == pytest.approx(1 / share, rel=0.25)


def test_shares_are_what_the_masks_show(cases: dict[str, Any]) -> None:
    for case in cases.values():
        for rows, columns, by_keys in ((32, 16, False), (48, 32, False), (32, 16, True)):
            size = (columns, rows) if by_keys else (rows, columns)
            visited = everything = pairs = 0
            for head in range(HEADS):
                for queries, keys in case.scenes:
                    # Tiles of padding count among all tiles; a packed batch has those of one long sequence.
                    seen = case.visible(head, np.arange(queries), np.arange(keys))
                    pairs += seen.sum()
                    lines = [seen[first : first + size[0]] for first in range(0, queries, size[0])]
                    visited += sum(line[:, i : i + size[1]].any() for line in lines for i in range(0, keys, size[1]))
                everything += case.batch * -(-case.rows // size[0]) * -(-case.rows // size[1])
            assert case.tiles(rows, columns, by_keys) == pytest.approx(visited / everything), case.title
            assert case.pairs() == pytest.approx(pairs / (HEADS * case.batch * case.rows**2)), case.title


def test_wrong_results_are_found(masks: ModuleType, cases: dict[str, Any]) -> None:
    for case in cases.values():
        given = masks.random_inputs(case, "numpy")
        right = masks.placed(case, "numpy")
        for name in masks.PASSES:
            assert masks.Ours(case, right).verify(name, given) == ""
    narrow = masks.Ours(cases["window (40, 40)"], {"window": (20, 20)})
    given = masks.random_inputs(narrow.case, "numpy")
    assert "KL of head" in narrow.verify("forward", given)
    assert "gradient to student_q" in narrow.verify("backward", given)


def test_flex_attention_gets_the_same_mask(
    monkeypatch: pytest.MonkeyPatch, masks: ModuleType, cases: dict[str, Any]
) -> None:
    torch = pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    monkeypatch.setattr(masks.Flex, "_compiled", flex.flex_attention)  # compiling takes long
    for case in cases.values():
        if case.batch > 1 or case.lengths:
            continue
        given = [torch.from_numpy(x) for x in masks.random_inputs(case, "numpy")]
        contestant = masks.Flex(case, BLOCK, "cpu")
        some, every = contestant.blocks()
        seen = np.stack([case.visible(head, np.arange(SIZE), np.arange(SIZE)) for head in range(HEADS)])
        tiled = seen.reshape(HEADS, SIZE // BLOCK, BLOCK, SIZE // BLOCK, BLOCK)
        np.testing.assert_array_equal(np.broadcast_to(some, tiled.any((2, 4)).shape), tiled.any((2, 4)))
        np.testing.assert_array_equal(np.broadcast_to(every, tiled.all((2, 4)).shape), tiled.all((2, 4)))
        if case.title != case.base:
            listed = contestant._mask.to_dense()[0].numpy().astype(bool)
            np.testing.assert_array_equal(listed, np.broadcast_to(some, listed.shape))
        if case.pattern is None:  # uncompiled, it reads the function of the mask and no blocks
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it is not compiled
                assert contestant.verify("forward", given) == "", case.title


def test_ratios(masks: ModuleType) -> None:
    def row(case: str, name: str, ms: float | None, tiles: float, base: str = "dense") -> Any:
        made = masks.Row("window", case, masks.OURS, name, base, 1, 1, 64, 16, "float32", size=64, tiles=tiles)
        made.ms_median = ms
        return made

    rows = [
        row("dense", "forward", 2.0, 1.0),
        row("causal", "forward", 1.0, 0.5),
        row("window", "forward", 1.0, 0.25),
        row("causal", "backward", 1.0, 0.5),
        row("window", "backward", None, 0.5),
    ]
    masks.compare(rows)
    assert [x.of_dense for x in rows] == [None, 0.5, 0.5, None, None]
    assert [x.time_over_tiles for x in rows] == [None, 1.0, 2.0, None, None]
    assert [x.over_us for x in rows] == [None, 0.0, 375.0, None, None]
    assert masks.summary(rows) == [
        "1 of 2 masked times are within 1.25 x tiles x dense",
        "  N=64 window forward: time/tiles 2.00, 375 us over",
    ]

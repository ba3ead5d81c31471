"""The benchmark of users' losses: every case of it is right, and shares of tiles are what padding leaves."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
from conftest import load_script

pytest.importorskip("torch", reason="its inputs are torch's")


@pytest.fixture(scope="module")
def users() -> ModuleType:
    return load_script("benchmarks/users.py")


def test_every_case_is_right(users: ModuleType) -> None:
    titles = set()
    for group in users.GROUPS:
        for cases in users.cases_of(group, 1, (32, 40), "float32"):
            for case in cases:
                problem = users.Problem(case, "cpu")
                assert [problem.verify(users.OURS, name) for name in case.passes] == [""] * len(case.passes), case
                titles.add((group, case.title, case.base))
    assert {group for group, _, _ in titles} == set(users.GROUPS)
    assert {(group, base) for group, _, base in titles} <= {(group, title) for group, title, _ in titles}


def test_shares_are_what_padding_leaves(users: ModuleType) -> None:
    (cases,) = users.cases_of("rows", 1, (96,), "float32")
    for case in cases:
        seen = case.there("query")[:, :, None] & case.there("key")[:, None, :]
        for rows, columns in ((1, 1), (16, 32), (24, 8)):
            tiles = seen.reshape(case.batch, 96 // rows, rows, 96 // columns, columns).any((2, 4))
            assert case.tiles(rows, columns) == pytest.approx(tiles.mean())
    assert np.any([case.tiles(32, 32) < 1 for case in cases])

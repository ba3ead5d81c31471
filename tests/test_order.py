"""In which order tests run, and how those of a GPU share out what they compile."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import dealt


@pytest.mark.parametrize("processes", [1, 2, 3, 16])
@pytest.mark.parametrize("many, few", [(40, 5), (0, 7), (7, 0), (3, 3), (300, 33)])
def test_long_tests_begin_each_process(processes: int, many: int, few: int) -> None:
    long, others = list(range(-few, 0)), list(range(many))
    found = dealt(long, others, processes)
    assert sorted(found) == long + others
    # As xdist cuts a list.
    rest, pieces = list(found), []
    for i in range(processes):
        size = len(rest) // (processes - i)
        pieces.append(rest[:size])
        rest = rest[size:]
    for piece in pieces:
        assert [x < 0 for x in piece] == sorted((x < 0 for x in piece), reverse=True)
    counts = [sum(x < 0 for x in piece) for piece in pieces]
    assert max(counts) - min(counts) <= 1 or many < few


def test_each_run_has_all_that_takes_turns(turn: Any) -> None:
    """Along each parameter, whatever the others are."""
    for several in ("ab", "abcde"):
        for other in range(7):
            assert {turn(several, place, other) for place in range(len(several))} == set(several)

"""Copies of a pattern's lists in GPU memory: made once per GPU and tile shape, and given back when the pattern is gone.

Kernels run after the call that launched them has returned, on streams that CuPy's memory pool knows nothing of. So what
a launch reads is given back only when the GPU has passed the last launch on every stream, and never where a CUDA graph
has captured one: a graph may be replayed at any time.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ..compiler.nvrtc import import_cupy
from ..patterns import BlockPattern
from ..patterns.pattern import when_gone
from .gathered import gathered
from .work_tiles import cut, survey


class Lists:
    """Offsets and entries of tile lists, and the work tiles of a launch's blocks, in the memory of one GPU."""

    __slots__ = ("_arrays", "_events", "captured", "pointers", "units")

    def __init__(self, *arrays: Any, units: Any = None) -> None:
        cupy = import_cupy()
        self._arrays = tuple(cupy.asarray(x) for x in (*arrays, units) if x is not None)
        addresses = tuple(int(x.data.ptr) for x in self._arrays)
        self.pointers = addresses[: len(arrays)]
        self.units = 0 if units is None else addresses[-1]
        """Of units of keys, where a tile has two of these; 0: they lie side by side."""
        self._events: dict[int, Any] = {}
        self.captured = False
        cupy.cuda.get_current_stream().synchronize()  # kernels run on other streams

    def used_on(self, stream: int) -> None:
        """Note a launch that reads this, just put on a stream."""
        cupy = import_cupy()
        if cupy.cuda.runtime.streamIsCapturing(stream):
            self.captured = True
            return
        event = self._events.get(stream)
        if event is None:
            event = self._events[stream] = cupy.cuda.Event(disable_timing=True)
        cupy.cuda.runtime.eventRecord(event.ptr, stream)

    @property
    def done(self) -> bool:
        """Whether nothing can read this any more, its owner being gone."""
        return not self.captured and all(event.done for event in tuple(self._events.values()))


_Key = tuple[int, int, int, bool, int, int, bool]
# By digest, then by GPU, tile and schedule.
_uploaded: dict[str, dict[_Key, Lists]] = {}
_left: list[Lists] = []


def lists_for(
    pattern: BlockPattern,
    device: int,
    rows: int,
    columns: int,
    by_keys: bool,
    group: int,
    longest: int,
    pairs: bool = False,
) -> Lists:
    """What kernels with tiles of this shape read, in the memory of the current GPU, which is `device`; with `pairs`, of
    two units of keys to a tile."""
    when_gone(_leave)
    _give_back()
    key = (device, rows, columns, by_keys, group, longest, pairs)
    of_pattern = _uploaded.setdefault(pattern.digest, {})
    found = of_pattern.get(key)
    if found is None and pairs:
        units, offsets, entries = made = gathered(pattern, group)
        found = of_pattern.setdefault(key, Lists(offsets, entries, cut(made.lists(), 0, group).entries, units=units))
    if found is None:
        work = cut(survey(pattern, rows, columns, by_keys, group), longest, group)
        found = of_pattern.setdefault(key, Lists(*pattern.tile_lists(rows, columns, by_keys), work.entries))
    return found


def _give_back() -> None:
    # One by one, because patterns end, and add to this list, at any time and in any thread.
    for lists in tuple(_left):
        if lists.done:
            with suppress(ValueError):  # another thread was here
                _left.remove(lists)


def _leave(digest: str) -> None:
    _left.extend(_uploaded.pop(digest, {}).values())

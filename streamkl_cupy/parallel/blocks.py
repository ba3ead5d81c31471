"""A call on the whole sequence, cut into calls on some rows and some keys, with masks that mean the same there.

Masks, offsets, lengths and patterns are in positions of the whole sequence. A block is a call of the plain operation on
a range of rows and a range of keys: offsets move, lengths are clipped, masks and patterns are cut. Keys that no row of
the block sees are left out of it, and rows that see none of the keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..options import Options
from ..rules import masks
from ..rules.masks import Asked, Cutting, Extents, MaskArray, Packing, Part
from .libraries import library_named, library_of
from .shards import Run, Runs, length, starts_of


class _Span(NamedTuple):
    """Rows of a shard, in its numbers."""

    start: int
    stop: int
    seen: int
    """How many keys the last of them sees."""
    diagonal: int | None
    """Row i sees keys j <= i + diagonal of these; None: all rows see as many."""
    level: bool = False
    """Whether last rows see all the keys that there are before the diagonal."""


def _add(spans: list[_Span], new: _Span) -> None:
    """Rows behind those of the last span, as a part of it where one call can have both."""
    if new.start >= new.stop or new.seen <= 0:
        return
    if spans and spans[-1].stop == new.start:
        last = spans[-1]
        # Behind the last key of a diagonal rows see all the keys that the call has.
        if new.diagonal is None and last.seen == new.seen:
            spans[-1] = last._replace(stop=new.stop, level=True)
            return
        if new.diagonal is not None and last.diagonal == new.diagonal and not last.level:
            spans[-1] = last._replace(stop=new.stop, seen=new.seen)
            return
    spans.append(new)


class Block(NamedTuple):
    """A call on some rows and some keys."""

    rows: Run
    keys: Run
    options: Mapping[str, Any]
    """Of the plain operation."""


@dataclass(frozen=True)
class Whole:
    """A call on the whole sequence: what its blocks are cut from."""

    rows: int
    keys: int
    options: Options
    masks: Mapping[str, Any]
    """Arrays of masks, those that were given."""
    given: Mapping[str, Any]
    """The options as they were given, without masks and what concerns positions."""
    heads: Run | None = None
    """Query heads of which the blocks are; None: all."""
    bounds: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Of packed sequences, those of rows and of keys, read once."""

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Those of its mask."""
        shapes = {name: tuple(x.shape) for name, x in self.masks.items()}
        packing = masks.packing(shapes)
        sequences = 0 if packing is None else packing.sequences(shapes)
        return masks.parts_of(masks.spec_of(Asked(self.options, shapes, self._extents, sequences)))

    @property
    def _extents(self) -> Extents:
        return Extents(0, 0, self.rows, self.keys)

    def of_heads(self, first: int, last: int) -> Whole:
        """The same of some query heads."""
        found = replace(self, heads=(first, last))
        found.__dict__["parts"] = self.parts
        return found

    def read(self) -> Whole:
        """The same with the bounds of packed sequences in host memory, for which a GPU is waited for."""
        packing = masks.packing(self.masks)
        if packing is None or self.bounds is not None:
            return self
        q, k = (_on_host(self.masks[name]) for name in packing.bounds)
        return replace(self, bounds=(q, k))

    def cut(self, rows: Runs, keys: Runs, by_runs: bool = False) -> Iterator[tuple[slice, slice, Mapping[str, Any]]]:
        """Calls that together are a shard of rows and a shard of keys, each as parts of both, and its options; with
        `by_runs` each of one run of both."""
        if self.heads is None and (rows, keys) == (((0, self.rows),), ((0, self.keys),)):
            # Whoever has everything makes the plain call, so that its results are the same to the last bit.
            yield slice(0, self.rows), slice(0, self.keys), {**self._as_given, **self.masks}
            return
        if not by_runs and self._alike_in_shards and list(keys) == sorted(keys):
            yield from self._together(rows, keys)
            return
        for row_run, row_start in zip(rows, starts_of(rows)):
            for key_run, key_start in zip(keys, starts_of(keys)):
                for block in self.blocks(row_run, key_run):
                    yield _moved(block.rows, row_run, row_start), _moved(block.keys, key_run, key_start), block.options

    @property
    def _alike_in_shards(self) -> bool:
        """Whether a row sees the first so many keys of whichever shard, if these are in the order of positions."""
        return all(part.last_key for part in self.parts)

    def _together(self, rows: Runs, keys: Runs) -> Iterator[tuple[slice, slice, Mapping[str, Any]]]:
        """As few calls as there are, where only a diagonal hides keys: in the numbers of the shards it is one again for
        rows that lie beside the same keys, and hides nothing or all of them from rows that lie between keys."""
        count, lasts = length(keys), [x.last_key(self.options, self._extents) for x in self.parts if x.last_key]
        if not lasts:
            if count and length(rows):
                yield slice(0, length(rows)), slice(0, count), dict(self.given)
            return
        reach, spans = min(lasts), list[_Span]()
        for (first, last), start in zip(rows, starts_of(rows)):
            shift, before = start - first, -reach  # of positions to the numbers of the shard
            for (k0, k1), seen in zip(keys, starts_of(keys)):
                between, beside = (
                    (max(before, first), min(k0 - reach, last)),
                    (max(k0 - reach, first), min(k1 - reach, last)),
                )
                _add(spans, _Span(between[0] + shift, between[1] + shift, seen, None))
                diagonal = seen + reach - k0
                _add(spans, _Span(beside[0] + shift, beside[1] + shift, diagonal + beside[1], diagonal - shift))
                before = k1 - reach
            _add(spans, _Span(max(before, first) + shift, last + shift, count, None))
        for span in spans:
            options = dict(self.given)
            if span.diagonal is not None:  # told from the first row of the call
                options |= masks.up_to(span.diagonal + span.start)
            yield slice(span.start, span.stop), slice(0, span.seen), options

    @property
    def _as_given(self) -> dict[str, Any]:
        """Options of a call that knows the same positions."""
        asked = (name for rule in self.parts for name in rule.options)
        return {**self.given, **{name: getattr(self.options, name) for name in asked}}

    def blocks(self, rows: Run, keys: Run) -> list[Block]:
        """Calls that together are these rows and these keys, each pair of a row and a key in one at most."""
        if rows[0] >= rows[1] or keys[0] >= keys[1]:
            return []
        if self.bounds is not None:
            return list(self._packed_blocks(rows, keys))
        return self._block(rows, keys)

    def _block(self, rows: Run, keys: Run) -> list[Block]:
        part = Cutting(self.options, self._extents, rows, keys, self.heads)
        for rule in self.parts:
            if rule.narrowed is not None:
                (g0, g1), (k0, k1) = (x := rule.narrowed(part)).q, x.k
                part = part._replace(q=(max(g0, rows[0]), min(g1, rows[1])), k=(max(k0, keys[0]), min(k1, keys[1])))
        if part.q[0] >= part.q[1] or part.k[0] >= part.k[1]:
            return []
        options = dict(self.given)
        for rule in self.parts:
            if rule.cut is not None:
                options |= rule.cut(part)
            for array in rule.arrays:
                options[array.name] = self._cut(array, part)
        return [Block(part.q, part.k, options)]

    def _cut(self, array: MaskArray, part: Cutting) -> Any:
        """What an array says of a part."""
        run, total = (part.k, self.keys) if array.of == "keys" else (part.q, self.rows)
        x = self.masks[array.name]
        return x if run == (0, total) else array.cut(x, *run)

    def _packed_blocks(self, rows: Run, keys: Run) -> Iterator[Block]:
        """Sequences that are whole in both go into one call, what is cut off each into one of its own."""
        packing = masks.packing(self.masks)
        assert self.bounds is not None
        assert packing is not None
        # What is to be counted from the ends of a sequence must keep these.
        from_ends = all(rule.from_ends(self.options) for rule in self.parts)
        together: list[tuple[Run, Run]] = []
        for of_q, of_k in zip(*(itertools.pairwise(x) for x in self.bounds), strict=True):
            q, k = _common(of_q, rows), _common(of_k, keys)
            if q[0] >= q[1] or k[0] >= k[1]:
                continue
            if q == of_q and k == of_k and from_ends:
                if together and (together[-1][0][1], together[-1][1][1]) != (q[0], k[0]):
                    yield self._sequences(packing, together)
                    together = []
                together.append((q, k))
                continue
            inside = replace(self, rows=of_q[1] - of_q[0], keys=of_k[1] - of_k[0], masks={}, bounds=None)
            local = inside._block((q[0] - of_q[0], q[1] - of_q[0]), (k[0] - of_k[0], k[1] - of_k[0]))
            for (g0, g1), (k0, k1), options in local:
                yield Block(
                    (g0 + of_q[0], g1 + of_q[0]), (k0 + of_k[0], k1 + of_k[0]), {**options, "layout": packing.layout}
                )
        if together:
            yield self._sequences(packing, together)

    def _sequences(self, packing: Packing, together: list[tuple[Run, Run]]) -> Block:
        (q0, _), (k0, _) = together[0]
        (_, q1), (_, k1) = together[-1]
        options = self._as_given
        ends = ([q[1] for q, _ in together], [k[1] for _, k in together])
        for name, start, stops in zip(packing.bounds, (q0, k0), ends, strict=True):
            like = self.masks[name]
            bounds = np.array([0, *(stop - start for stop in stops)], np.int32)
            options[name] = library_named(library_of(name, like)).made(bounds, like)
        return Block((q0, q1), (k0, k1), options)


def _common(a: Run, b: Run) -> Run:
    return max(a[0], b[0]), min(a[1], b[1])


def _moved(where: Run, run: Run, start: int) -> slice:
    """A part of a run in the numbers of a shard in which the run begins there."""
    return slice(start + where[0] - run[0], start + where[1] - run[0])


def _on_host(x: Any) -> tuple[int, ...]:
    return tuple(int(i) for i in x.tolist())

"""A call on the whole sequence, cut into calls on some rows and some keys, with masks that mean the same there.

Masks, offsets, lengths and patterns are in positions of the whole sequence. A block is a call of the plain operation on
a range of rows and a range of keys: offsets move, lengths are clipped, masks and patterns are cut. Keys that no row of
the block sees are left out of it, and rows that see none of the keys.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..options import Options
from ..patterns import BlockPattern
from .library import Library, library_of
from .shards import Run, Runs, length, starts_of

MASKS = ("key_lengths", "query_lengths", "key_mask", "query_mask", "cu_seqlens_q", "cu_seqlens_k")


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

    @property
    def packed(self) -> bool:
        """Whether sequences lie one after the other."""
        return "cu_seqlens_q" in self.masks

    def of_heads(self, first: int, last: int) -> Whole:
        """The same of some query heads."""
        return replace(self, heads=(first, last))

    def read(self) -> Whole:
        """The same with the bounds of packed sequences in host memory, for which a GPU is waited for."""
        if not self.packed or self.bounds is not None:
            return self
        q, k = (_on_host(self.masks[name]) for name in ("cu_seqlens_q", "cu_seqlens_k"))
        return replace(self, bounds=(q, k))

    def cut(self, rows: Runs, keys: Runs, by_runs: bool = False) -> Iterator[tuple[slice, slice, Mapping[str, Any]]]:
        """Calls that together are a shard of rows and a shard of keys, each as parts of both, and its options; with
        `by_runs` each of one run of both."""
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
        return not self.masks and self.options.block_mask is None and self._reach[0] is None

    def _together(self, rows: Runs, keys: Runs) -> Iterator[tuple[slice, slice, Mapping[str, Any]]]:
        """As few calls as there are, where only a diagonal hides keys: in the numbers of the shards it is one again for
        rows that lie beside the same keys, and hides nothing or all of them from rows that lie between keys."""
        count, right = length(keys), self._reach[1]
        if right is None:
            if count and length(rows):
                yield slice(0, length(rows)), slice(0, count), dict(self.given)
            return
        reach, spans = self._offset + right, list[_Span]()
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
                options |= {"causal": True, "q_offset": span.diagonal + span.start}
            yield slice(span.start, span.stop), slice(0, span.seen), options

    def blocks(self, rows: Run, keys: Run) -> list[Block]:
        """Calls that together are these rows and these keys, each pair of a row and a key in one at most."""
        if rows[0] >= rows[1] or keys[0] >= keys[1]:
            return []
        if self.bounds is not None:
            return list(self._packed_blocks(rows, keys))
        return self._block(rows, keys)

    @property
    def _offset(self) -> int:
        offset = self.options.q_offset
        return self.keys - self.rows if offset is None else offset

    @property
    def _reach(self) -> tuple[int | None, int | None]:
        """How many keys to the left and to the right of the diagonal a row sees; None: all."""
        left, right = self.options.window or (-1, -1)
        if self.options.causal:
            right = 0
        return (None if left < 0 else left), (None if right < 0 else right)

    def _block(self, rows: Run, keys: Run) -> list[Block]:
        (g0, g1), (k0, k1) = rows, keys
        (left, right), offset, pattern = self._reach, self._offset, self.options.block_mask
        if left is not None:
            k0 = max(k0, g0 + offset - left)
            g1 = min(g1, k1 + left - offset)
        if right is not None:
            k1 = min(k1, g1 + offset + right)
            g0 = max(g0, k0 - right - offset)
        if pattern is not None:  # which is cut between its blocks
            k0 = max(keys[0], k0 // pattern.key_block * pattern.key_block)
            g0 = max(rows[0], g0 // pattern.query_block * pattern.query_block)
        if g0 >= g1 or k0 >= k1:
            return []
        options = dict(self.given)
        if left is not None or right is not None:
            options |= {"causal": self.options.causal, "window": self.options.window, "q_offset": offset + g0 - k0}
        options |= self._masks((g0, g1), (k0, k1))
        if pattern is not None:
            options["block_mask"] = _cut(pattern, (g0, g1), (k0, k1), self.heads)
        return [Block((g0, g1), (k0, k1), options)]

    def _masks(self, rows: Run, keys: Run) -> dict[str, Any]:
        found = {}
        for name, (start, stop), total in (("key", keys, self.keys), ("query", rows, self.rows)):
            if (lengths := self.masks.get(f"{name}_lengths")) is not None:
                whole = (start, stop) == (0, total)
                library = Library(library_of(f"{name}_lengths", lengths))
                found[f"{name}_lengths"] = lengths if whole else library.clipped(lengths - start, 0, stop - start)
            if (mask := self.masks.get(f"{name}_mask")) is not None:
                found[f"{name}_mask"] = mask[..., start:stop]
        return found

    def _packed_blocks(self, rows: Run, keys: Run) -> Iterator[Block]:
        """Sequences that are whole in both go into one call, what is cut off each into one of its own."""
        assert self.bounds is not None
        together: list[tuple[Run, Run]] = []
        for of_q, of_k in zip(*(itertools.pairwise(x) for x in self.bounds), strict=True):
            q, k = _common(of_q, rows), _common(of_k, keys)
            if q[0] >= q[1] or k[0] >= k[1]:
                continue
            # The plain call counts from the last key, so what it is to count from must stay.
            if q == of_q and k == of_k and (self.options.q_offset is None or self._reach == (None, None)):
                if together and (together[-1][0][1], together[-1][1][1]) != (q[0], k[0]):
                    yield from self._sequences(together)
                    together = []
                together.append((q, k))
                continue
            offset = self.options.q_offset
            own = offset if offset is not None else (of_k[1] - of_k[0]) - (of_q[1] - of_q[0])
            inside = replace(
                self,
                rows=of_q[1] - of_q[0],
                keys=of_k[1] - of_k[0],
                options=self.options._replace(q_offset=own),
                masks={},
                bounds=None,
            )
            local = inside._block((q[0] - of_q[0], q[1] - of_q[0]), (k[0] - of_k[0], k[1] - of_k[0]))
            for (g0, g1), (k0, k1), options in local:
                yield Block((g0 + of_q[0], g1 + of_q[0]), (k0 + of_k[0], k1 + of_k[0]), {**options, "layout": "bnhd"})
        if together:
            yield from self._sequences(together)

    def _sequences(self, together: list[tuple[Run, Run]]) -> Iterator[Block]:
        (q0, _), (k0, _) = together[0]
        (_, q1), (_, k1) = together[-1]
        options = {**self.given, "causal": self.options.causal, "window": self.options.window}
        for name, start, ends in (
            ("cu_seqlens_q", q0, [q[1] for q, _ in together]),
            ("cu_seqlens_k", k0, [k[1] for _, k in together]),
        ):
            like = self.masks[name]
            bounds = np.array([0, *(end - start for end in ends)], np.int32)
            xp = Library(library_of(name, like)).xp
            options[name] = xp.asarray(bounds, device=like.device) if xp.__name__ == "torch" else xp.asarray(bounds)
        yield Block((q0, q1), (k0, k1), options)


def _common(a: Run, b: Run) -> Run:
    return max(a[0], b[0]), min(a[1], b[1])


def _moved(where: Run, run: Run, start: int) -> slice:
    """A part of a run in the numbers of a shard in which the run begins there."""
    return slice(start + where[0] - run[0], start + where[1] - run[0])


def _on_host(x: Any) -> tuple[int, ...]:
    return tuple(int(i) for i in x.tolist())


_cuts: weakref.WeakKeyDictionary[BlockPattern, dict[Any, BlockPattern]] = weakref.WeakKeyDictionary()


def _cut(pattern: BlockPattern, rows: Run, keys: Run, heads: Run | None) -> BlockPattern:
    """The pattern of some rows, keys and heads, kept for as long as the whole one lives."""
    if heads is not None and pattern.heads == 1:
        heads = None
    if rows == (0, pattern.queries) and keys == (0, pattern.keys) and heads is None:
        return pattern
    for what, start, block in (("rows", rows[0], pattern.query_block), ("keys", keys[0], pattern.key_block)):
        if start % block:
            raise ValueError(
                f"block_mask: a shard's {what} begin at position {start}, inside a block of {block}; allowed are "
                f"shards whose pieces begin with a block: choose a length that makes chunks multiples of {block}, "
                f"or give the positions of every rank as ownership"
            )
    known = _cuts.setdefault(pattern, {})
    found = known.get((rows, keys, heads))
    if found is None:
        found = known[rows, keys, heads] = _cut_out(pattern, rows, keys, range(*(heads or (0, pattern.heads))))
    return found


def _cut_out(pattern: BlockPattern, rows: Run, keys: Run, heads: range) -> BlockPattern:
    first, last = rows[0] // pattern.query_block, -(-rows[1] // pattern.query_block)
    low, high = keys[0] // pattern.key_block, -(-keys[1] // pattern.key_block)
    counts, blocks = [], []
    for head in heads:
        offsets = pattern.row_offsets[head, first : last + 1].astype(np.int64)
        listed = pattern.key_blocks[offsets[0] : offsets[-1]]
        inside = (listed >= low) & (listed < high)
        before = np.concatenate([[0], np.cumsum(inside)])
        counts.append(np.diff(before[offsets - offsets[0]]))
        blocks.append(listed[inside] - low)
    ends = np.cumsum(np.concatenate(counts)) if counts else np.zeros(0, np.int64)
    each = last - first
    starts = np.concatenate([[0], ends])
    row_offsets = np.stack([starts[i * each : (i + 1) * each + 1] for i in range(len(heads))])
    diagonal = None if pattern.diagonal is None else pattern.diagonal + rows[0] - keys[0]
    return BlockPattern(
        row_offsets,
        np.concatenate(blocks),
        rows[1] - rows[0],
        keys[1] - keys[0],
        pattern.query_block,
        pattern.key_block,
        diagonal,
    )

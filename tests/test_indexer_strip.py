"""The kernel that streams queries past keys, compiled for the host: which cells of a tiled strip it writes.

Blocks find their items as on a GPU, the lanes of a warp one after the other; instructions do nothing. Of each item what
it writes is looked at by itself, since tiles that lie side by side would hide each other's mistakes.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import numpy as np
import pytest
from on_host import built, needs_compiler

from streamkl_cupy.kernels import indexer_stream_sm90
from streamkl_cupy.kernels.gpus import GPUS
from streamkl_cupy.kernels.indexer import GRID, IndexerShape, IndexerWork
from streamkl_cupy.kernels.structs import INDEXER
from streamkl_cupy.rules import row_keys
from streamkl_cupy.rules.row_keys import RowKeys

pytestmark = needs_compiler

DRIVER = r"""
// The items of all blocks, one after the other.
extern "C" int find_items(const IndexerArgs* args, int blocks, Item* found) {
    HopperIndexerArgs all{};
    all.base = *args;
    int count = 0;
    for (int block = 0; block < blocks; ++block) {
        blockIdx.x = block, gridDim.x = blocks;
        work = [&] {
            const int lane = threadIdx.x;
            const Producer producer{all, Shared{0}, lane, block % kCluster};
            const int entries = args->entries * args->groups;
            const int pairs = entries * (producer.end_tile() - producer.first_tile());
            int pair = 0;
            for (u32 index = block / kCluster;; index += blocks / kCluster) {
                Item item{};
                if (!producer.find(item, pair, index, entries, pairs)) break;
                if (lane == 0) found[count++] = item;
            }
        };
        run_threads(32);
    }
    return count;
}

extern "C" void write_item(const IndexerArgs* args, const Item* item) {
    for (int i = 0; i < 256; ++i) {
        threadIdx.x = i;
        Consumer consumer(*args, Shared{0}, i / 128);
        if (item->idle)
            consumer.clear_strip(*item);
        else
            for (int key = item->key; key < item->end; key += kColumns)
                if (key + i / 128 * kWarpColumns < item->end) consumer.tile(*item, key);
    }
}
"""


class Item(ctypes.Structure):
    names = ("tile", "entry", "key", "end", "strip_end", "state", "all_begin", "all_end", "idle", "absent")
    _fields_ = [(name, ctypes.c_int) for name in names]


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("states", [2, 128])
def test_a_tile_is_written_where_the_strip_has_it(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, several: bool, states: int
) -> None:
    """All that its rows see, and nothing of others: tiles of a cluster see keys to different ends."""
    assert ctypes.sizeof(Item) == indexer_stream_sm90.ITEM_BYTES
    monkeypatch.setattr(indexer_stream_sm90, "MOST_STATES", states)
    B, G, heads, M, N = 2, 3, 2, 290, 780
    maps = frozenset(("TQ", "TK", "SQ", "SK"))
    shape = IndexerShape("bfloat16", "bfloat16", "float32", 64, 0, 32, True, False, False, maps, maps, tiled=True)
    work, stream = IndexerWork(shape, "strip", several, N), indexer_stream_sm90.KERNEL
    tile, _ = stream.choice(work, GPUS["sm_90"])
    assert tile
    kernel = stream.plan(work, tile, GPUS["sm_90"])
    library = built(tmp_path, "stream", kernel.text, DRIVER)
    grid = -(-M // GRID)
    # Rows that see nothing, ends of tiles on either side of a block of keys, a strip that begins amid a cluster.
    for offset, first, tiles in ((-130, 0, 5), (150, 0, 5), (150, 1, 3), (int(rng.integers(-60, 500)), 1, 4)):
        seen = row_keys.intervals(RowKeys(causal=True, q_offset=offset), B, M, N, {})
        rows = np.stack([np.broadcast_to(x, (B, M)) for x in (seen.start, seen.end)], -1)
        rows = np.ascontiguousarray(np.where(rows[..., :1] < rows[..., 1:], rows, 0), np.int32)
        ends = np.stack([rows[:, i : i + GRID, 1].max(1) for i in range(0, M, GRID)], 1)
        tile_keys = np.ascontiguousarray(np.stack([np.where(ends > 0, 0, N), ends], -1), np.int32)
        ends = -(-ends // GRID)  # in tiles
        width = -(-ends // 4) * 4
        before = np.concatenate(([0], np.cumsum(width[:, first : first + tiles]))).astype(np.int32)
        stats = rng.integers(0, 2, (B, G, M, 1)).astype(np.float32) * np.ones(4, np.float32)
        stats[0, 0] = 0  # whose tiles are cleared
        strip = np.empty((before[-1] * G, GRID * GRID), np.uint16)
        gates = np.empty((before[-1] * G * heads, 128), np.uint32)
        vectors = np.ones((B, G * heads, M), np.float32)
        there = {"row_keys": rows, "tile_keys": tile_keys, "strip_widths": before, "row_stats": stats, "strip": strip,
                 "gates": gates, "weights": vectors, "lse2": vectors}  # fmt: skip
        values = dict.fromkeys(INDEXER.leaves, 0) | {name: a.ctypes.data for name, a in there.items()}
        values |= {"entries": B, "groups": G, "queries": M, "keys": N, "teacher_heads": heads, "teacher_group": 3}
        values |= {"index_heads": heads, "index_key_heads": 1, "first_tile": first, "tiles": tiles, "grid_tiles": grid}
        args = INDEXER.pack(values)
        items = (Item * 4096)()
        count = library.find_items(args, 6, items)
        written = np.zeros(len(strip), int)
        for item in items[:count]:
            strip[:], gates[:] = 1, 0
            library.write_item(args, ctypes.byref(item))
            batch, group = divmod(item.entry, G)
            cells = np.flatnonzero((strip != 1).any(1))
            assert (strip[cells] != 1).all()
            if not first <= item.tile < first + tiles:
                assert not cells.size
                continue
            at = batch * tiles + item.tile - first
            wide = before[at + 1] - before[at]
            here = before[at] * G + group * wide
            assert ((here <= cells) & (cells < here + ends[batch, item.tile])).all()
            opened = np.flatnonzero(gates.any(1))
            of_heads = [before[at] * G * heads + (group * heads + h) * wide + cells - here for h in range(heads)]
            np.testing.assert_array_equal(opened, [] if item.idle else np.concatenate(of_heads))
            written[cells] += 1
        for batch in range(B):
            for tile in range(first, first + tiles):
                at = batch * tiles + tile - first
                wide = before[at + 1] - before[at]
                cells = before[at] * G + np.arange(G)[:, None] * wide + np.arange(ends[batch, tile])
                assert (written[cells] == 1).all()

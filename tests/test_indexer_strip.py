"""The kernel that streams queries past keys, compiled for the host: which cells of a tiled strip it writes.

Blocks find their items as on a GPU, the lanes of a warp one after the other; instructions do nothing. Of each item what
it writes is looked at by itself, since tiles that lie side by side would hide each other's mistakes.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from streamkl_cupy.kernels import indexer_stream_sm90
from streamkl_cupy.kernels.gpus import GPUS
from streamkl_cupy.kernels.indexer import GRID, IndexerShape, IndexerWork
from streamkl_cupy.kernels.structs import INDEXER
from streamkl_cupy.rules import row_keys
from streamkl_cupy.rules.row_keys import RowKeys

COMPILER = shutil.which("c++") or shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

SHIM = r"""
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>
#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __shared__
using std::max;
using std::min;
struct int2 { int x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float __uint_as_float(unsigned x) { float y; memcpy(&y, &x, 4); return y; }
inline float __int_as_float(int x) { return __uint_as_float(x); }
inline unsigned __float_as_uint(float x) { unsigned y; memcpy(&y, &x, 4); return y; }
inline int __float_as_int(float x) { return __float_as_uint(x); }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
static struct { unsigned x; } threadIdx, blockIdx, gridDim;
static unsigned char memory[256];
inline void* __cvta_shared_to_generic(size_t x) { return memory + x; }
inline size_t __cvta_generic_to_shared(const void*) { return 0; }
inline void __syncwarp() {}
inline void __syncthreads() {}

// Of a warp whose lanes come one after the other, each as far as it needs the others; one by itself has its own.
struct Warp {
    long long values[2][32];  // of one question and the next
    int asked[32] = {};
    ucontext_t all, lanes[32];
    std::vector<char> stacks = std::vector<char>(32 << 16);
    bool over[32] = {};
};
static Warp* warp = nullptr;
template <class T, class Of>
auto together(T x, Of of) {
    const int lane = threadIdx.x % 32;
    T seen[32];
    std::fill(seen, seen + 32, x);
    if (warp) {
        long long* const values = warp->values[warp->asked[lane]++ % 2];
        memcpy(&values[lane], &x, sizeof(T));
        swapcontext(&warp->lanes[lane], &warp->all);
        for (int i = 0; i < 32; ++i) memcpy(&seen[i], &values[i], sizeof(T));
    }
    return of(seen);
}
static std::function<void()> work;
static void work_of_lane() {
    work();
    warp->over[threadIdx.x] = true;
}
inline void run_warp() {
    Warp lanes;
    warp = &lanes;
    for (int i = 0; i < 32; ++i) {
        getcontext(&lanes.lanes[i]);
        lanes.lanes[i].uc_stack = {lanes.stacks.data() + (i << 16), 0, 1 << 16};
        lanes.lanes[i].uc_link = &lanes.all;
        makecontext(&lanes.lanes[i], work_of_lane, 0);
    }
    while (!lanes.over[31])
        for (int i = 0; i < 32; ++i) {
            threadIdx.x = i;
            if (!lanes.over[i]) swapcontext(&lanes.all, &lanes.lanes[i]);
        }
    warp = nullptr;
}
template <class T>
T __shfl_sync(unsigned, T x, int from) { return together(x, [=](const T* all) { return all[from % 32]; }); }
template <class T>
T __shfl_xor_sync(unsigned, T x, int by) {
    return together(x, [=](const T* all) { return all[threadIdx.x % 32 ^ by]; });
}
template <class T>
T __shfl_up_sync(unsigned, T x, int by) {
    const int lane = threadIdx.x % 32;
    return together(x, [=](const T* all) { return all[lane < by ? lane : lane - by]; });
}
inline unsigned __ballot_sync(unsigned, bool x) {
    return together(int(x), [](const int* all) {
        unsigned y = 0;
        for (int i = 0; i < 32; ++i) y |= unsigned(all[i]) << i;
        return y;
    });
}
inline bool __any_sync(unsigned, bool x) { return __ballot_sync(~0u, x) != 0; }
inline int __reduce_min_sync(unsigned, int x) {
    return together(x, [](const int* all) { return *std::min_element(all, all + 32); });
}
inline int __reduce_max_sync(unsigned, int x) {
    return together(x, [](const int* all) { return *std::max_element(all, all + 32); });
}
"""

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
        run_warp();
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


def on_host(text: str) -> str:
    """A kernel without its instructions: what they give is 0, gates are open, and nobody waits."""
    for there, instead in {"u32 r;": "u32 r = 0;", "u32 mask;": "u32 mask = ~0u;", "u32 done;": "u32 done = 1;",
                           "float y;": "float y = 0.f;", "private:": "public:"}.items():  # fmt: skip
        text = text.replace(there, instead)
    out, at = [], 0
    for found in re.finditer(r"\basm(?: volatile)?\s*\(", text):
        depth, end = 1, found.end()
        while depth:
            string = re.compile(r'"(?:[^"\\]|\\.)*"').match(text, end)
            depth += 0 if string else (text[end] == "(") - (text[end] == ")")
            end = string.end() if string else end + 1
        out += [text[at : found.start()], "(void)0"]
        at = end
    return "".join((*out, text[at:]))


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
    source = tmp_path / "stream.cpp"
    source.write_text(SHIM + on_host(kernel.text) + DRIVER)
    assert COMPILER
    flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC"]
    subprocess.run([COMPILER, *flags, source, "-o", source.with_suffix(".so")], check=True)
    library = ctypes.CDLL(str(source.with_suffix(".so")))
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

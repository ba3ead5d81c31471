"""The kernel that streams queries past keys, run on the host as a whole: what waits for what, and the states of rows.

A coroutine stands for each warp of the warpgroups, with its first lane alone, and for each lane of the producer; who
goes on is drawn, and somebody is always slow. Barriers, copies and products are those of the text, with a meaning on
the host: a copy arrives some time after it is asked for, a product is done when it is waited for, and both look at who
else has the memory meanwhile.
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

SCHEDULE = r"""
#include <array>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
typedef unsigned int u32_;
typedef unsigned long long u64_;
static std::mt19937 dice;
struct HostFiber {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(1 << 20);
    int thread;
    bool over = false;
    std::function<bool()> ready;  // empty: it may go on
};
static std::vector<HostFiber*> fibers;
static HostFiber* now = nullptr;
static ucontext_t scheduler;
static const char* wrong = nullptr;
static void fail(const char* what) {
    if (!wrong) wrong = what;
}
static void wait_until(std::function<bool()> ready) {
    if (wrong) ready = [] { return false; };
    now->ready = ready;
    swapcontext(&now->context, &scheduler);
}

// Barriers in shared memory.
struct HostBarrier {
    int arrivals = 0, pending = 0, phase = 0;
    long long bytes = 0;
    void settle() {
        if (pending == 0 && bytes == 0) ++phase, pending = arrivals;
    }
};
static std::map<u32_, HostBarrier> barriers;
static void mbarrier_init(u32_ at, u32_ arrivals) { barriers[at] = HostBarrier{int(arrivals), int(arrivals)}; }
static void mbarrier_publish() {}
static void mbarrier_arrive(u32_ at) {
    HostBarrier& b = barriers[at];
    if (--b.pending < 0) fail("an arrival too many");
    b.settle();
}
static void mbarrier_expect(u32_ at, u32_ bytes) {
    barriers[at].bytes += bytes;
    mbarrier_arrive(at);
}
static bool mbarrier_test(u32_ at, u32_ parity) {
    const int phase = barriers[at].phase;
    wait_until([=] { return (barriers[at].phase & 1) != int(parity); });
    if (barriers[at].phase > phase + 1 && (phase & 1) == int(parity)) fail("a phase was missed");
    return true;
}
static void mbarrier_wait(u32_ at, u32_ parity) { mbarrier_test(at, parity); }
static bool mbarrier_is_over(u32_ at, u32_ parity) { return (barriers[at].phase & 1) != int(parity); }

// Barriers by a number: those who arrive without waiting count as well.
struct HostNamed {
    int count = 0, phase = 0;
};
static std::map<int, HostNamed> named;
static void named_arrive(int number, int threads) {
    HostNamed& b = named[number];
    b.count += 32;
    if (b.count > threads) fail("more than its threads at a barrier");
    if (b.count == threads) b.count = 0, ++b.phase;
}
static void barrier_sync(int number, int threads) {
    const int phase = named[number].phase;
    named_arrive(number, threads);
    wait_until([=] { return named[number].phase != phase; });
}
static void barrier_arrive(int number, int threads) { named_arrive(number, threads); }

// Rows of 128 bytes of shared memory: what of an array lies there.
struct HostSource {
    const unsigned short* from = nullptr;  // the array's 64 elements
    bool arriving = false;
    int readers = 0;
};
static HostSource rows[2048];
struct HostArray {
    const unsigned short* at;
    int heads, rows, columns;
};
static HostArray arrays[4];  // as the maps of the kernel lie
static const void* first_map;
static int map_bytes;
static const unsigned short nothing[64] = {};
struct HostCopy {
    std::vector<int> where;
    u32_ barrier;
};
static std::vector<HostCopy> copies;
static int box_rows[4];
template <class Map>
static void tma_load(u32_ to, const Map& map, u32_ barrier, int column, int row, int head, int batch) {
    const int which = int((reinterpret_cast<const char*>(&map) - static_cast<const char*>(first_map)) / map_bytes);
    const HostArray& a = arrays[which];
    HostCopy copy{{}, barrier};
    for (int r = 0; r < box_rows[which]; ++r) {
        HostSource& s = rows[to / 128 + r];
        if (s.readers) fail("a copy to where a product reads");
        if (s.arriving) fail("two copies to one place");
        s.arriving = true;
        const bool there = row + r < a.rows && head < a.heads;
        s.from = there ? a.at + ((long long)(batch * a.heads + head) * a.rows + row + r) * a.columns + column : nothing;
        copy.where.push_back(to / 128 + r);
    }
    copies.push_back(copy);
}
static void arrive_some() {
    const size_t i = dice() % copies.size();
    for (int r : copies[i].where) rows[r].arriving = false;
    HostBarrier& b = barriers[copies[i].barrier];
    b.bytes -= 128 * (long long)(copies[i].where.size());
    b.settle();
    copies.erase(copies.begin() + i);
}

// Products: of each warp those that are under way, in groups.
struct HostProduct {
    float* d;
    std::vector<std::array<float, 64>> sums;
    std::vector<int> read;
};
static std::map<int, std::vector<std::vector<HostProduct>>> groups;
static std::map<int, std::vector<HostProduct>> open;
static float number(unsigned short x) {
    unsigned y = unsigned(x) << 16;
    float z;
    memcpy(&z, &y, 4);
    return z;
}
template <bool HALF, int A, int B, int TILES>
static void wgmma(float (&d)[TILES][4], u64_ a, u64_ b, int keep) {
    const int warp = now->thread / 32 % 4;
    const u32_ from_a = (a & 0x3fff) << 4, from_b = (b & 0x3fff) << 4;
    const int row_a = from_a / 128, row_b = from_b / 128, column = from_a % 128 / 2;
    if (from_b % 128 / 2 != u32_(column)) fail("columns that are not each other's");
    HostProduct product{d[0], {}, {}};
    for (int r = 0; r < 64; ++r) product.read.push_back(row_a + r);
    for (int r = 0; r < 8 * TILES; ++r) product.read.push_back(row_b + r);
    for (int r : product.read) {
        if (rows[r].arriving || !rows[r].from) fail("a product of what has not arrived");
        ++rows[r].readers;
    }
    for (int n = 0; n < TILES; ++n)
        for (int e = 0; e < 4; ++e) {
            const unsigned short *x = rows[row_a + 16 * warp + 8 * (e / 2)].from, *y = rows[row_b + 8 * n + e % 2].from;
            float sum = keep ? d[n][e] : 0.f;
            if (x && y)
                for (int i = 0; i < 16; ++i) sum += number(x[column + i]) * number(y[column + i]);
            d[n][e] = sum;
        }
    open[now->thread].push_back(product);
}
static void wgmma_fence() {}
static void wgmma_commit() {
    groups[now->thread].push_back(open[now->thread]);
    open[now->thread].clear();
}
template <int N>
static void wgmma_wait() {
    wait_until([] { return true; });  // others go on meanwhile
    auto& mine = groups[now->thread];
    while (int(mine.size()) > N) {
        for (const HostProduct& p : mine[0])
            for (int r : p.read) --rows[r].readers;
        mine.erase(mine.begin());
    }
}
static float exp2_approx(float x) { return exp2f(x); }
static float log2_approx(float x) { return log2f(x); }
static float reciprocal_approx(float x) { return 1.f / x; }

// What the lanes of the producer ask each other.
static long long lane_values[2][32];
static int lane_asked[32];
template <class T, class Of>
auto together(T x, Of of) {
    const int lane = threadIdx.x % 32;
    T seen[32];
    std::fill(seen, seen + 32, x);
    if (threadIdx.x >= 256) {
        const int mine = lane_asked[lane]++;
        memcpy(&lane_values[mine % 2][lane], &x, sizeof(T));
        wait_until([=] { return *std::min_element(lane_asked, lane_asked + 32) > mine; });
        for (int i = 0; i < 32; ++i) memcpy(&seen[i], &lane_values[mine % 2][i], sizeof(T));
    }
    return of(seen);
}
inline void __syncwarp() {
    together(0, [](const int*) { return 0; });
}
inline void __syncthreads() {}
static std::function<void()> work;
"""

DRIVER = r"""
static HopperIndexerArgs all;
static void enter() {
    streamkl_indexer_stream(all);
    now->over = true;
    swapcontext(&now->context, &scheduler);
}
extern "C" const char* run_block(const IndexerArgs* args, int block, int blocks, const unsigned short* const* data,
                                 const int* sizes, unsigned seed) {
    dice.seed(seed);
    all.base = *args;
    first_map = &all.teacher_q, map_bytes = sizeof(all.teacher_q), wrong = nullptr;
    for (int i = 0; i < 4; ++i) {
        arrays[i] = {data[i], sizes[3 * i], sizes[3 * i + 1], sizes[3 * i + 2]};
        box_rows[i] = i % 2 ? kKeyBox : kRows;
    }
    barriers.clear(), named.clear(), copies.clear(), groups.clear(), open.clear();
    std::fill(rows, rows + 2048, HostSource{});
    std::fill(lane_asked, lane_asked + 32, 0);
    blockIdx.x = block, gridDim.x = blocks;
    for (int i = 0; i < 8 + 32; ++i) {
        HostFiber* f = new HostFiber;
        f->thread = i < 8 ? 32 * i : 256 + i - 8;
        getcontext(&f->context);
        f->context.uc_stack = {f->stack.data(), 0, f->stack.size()};
        f->context.uc_link = &scheduler;
        makecontext(&f->context, enter, 0);
        fibers.push_back(f);
    }
    bool first = true;  // it makes the barriers
    HostFiber* slow = nullptr;
    while (!wrong) {
        std::vector<HostFiber*> able;
        bool some = false;
        for (HostFiber* f : fibers) {
            some |= !f->over;
            if (!f->over && (!f->ready || f->ready())) able.push_back(f);
        }
        if (!some) break;
        if (!first && !copies.empty() && (able.empty() || dice() % 4 == 0)) {
            arrive_some();
            continue;
        }
        if (able.empty()) {
            fail("nobody can go on");
            break;
        }
        now = first ? fibers[0] : able[dice() % able.size()];
        if (dice() % 128 == 0) slow = fibers[dice() % fibers.size()];
        if (!first && now == slow && able.size() > 1) continue;
        // A warp may be far ahead of others.
        for (int times = 1 + dice() % 8; times && !now->over && (!now->ready || now->ready()); --times) {
            now->ready = nullptr, threadIdx.x = now->thread;
            swapcontext(&scheduler, &now->context);
        }
        first = false;
    }
    if (!wrong && !copies.empty()) fail("a copy that nobody waited for");
    for (const HostSource& s : rows)
        if (!wrong && s.readers) fail("a product that nobody waited for");
    for (HostFiber* f : fibers) delete f;
    fibers.clear();
    return wrong;
}
"""


def as_a_whole(text: str) -> str:
    """A kernel whose instructions are those above."""
    for name in (
        *("mbarrier_init", "mbarrier_publish", "mbarrier_arrive", "mbarrier_expect", "mbarrier_test"),
        *("mbarrier_is_over", "mbarrier_wait", "barrier_sync", "barrier_arrive", "tma_load"),
        *("wgmma", "wgmma_fence", "wgmma_commit", "exp2_approx", "log2_approx", "reciprocal_approx"),
    ):
        for kind in ("void", "bool", "float"):
            text = text.replace(f"__device__ inline {kind} {name}(", f"__device__ inline {kind} text_{name}(")
    text = text.replace("__device__ inline void wgmma_wait()", "__device__ inline void text_wgmma_wait()")
    return text.replace("__grid_constant__ HopperIndexerArgs all", "HopperIndexerArgs& all")


def test_a_block_on_the_host(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(indexer_stream_sm90, "MOST_STATES", int(rng.choice([4, 128])))
    T, D = (128, 128) if rng.random() < 0.5 else (64, 64)
    maps = frozenset(("TQ", "TK", "SQ", "SK"))
    shape = IndexerShape("bfloat16", "bfloat16", "float32", T, 0, D, True, False, False, maps, maps)
    B, G, N, M = 1, 2, 700, 200
    work, stream = IndexerWork(shape, "rows", False, N), indexer_stream_sm90.KERNEL
    tile, _ = stream.choice(work, GPUS["sm_90"])
    assert tile
    kernel, cut = stream.plan(work, tile, GPUS["sm_90"]), stream.row_cut(work, 1)
    library = built(tmp_path, "stream", as_a_whole(kernel.text), DRIVER, SCHEDULE)
    library.run_block.restype = ctypes.c_char_p
    slots, grid = cut.states, -(-M // GRID)
    hidden, large = 24, 40  # rows whose first head has products of -inf, and such that products of two are infinite
    for blocks, heads in ((1, (2, 3)), (2, (3, int(rng.choice([1, 2]))))):
        H, HI = (G * h for h in heads)

        def bf16(*shape: int) -> np.ndarray:
            return (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)

        data = [bf16(B, H, M, T), bf16(B, 1, N, T), bf16(B, HI, M, D), bf16(B, 1, N, D)]
        data[1][..., 0] &= 0x7FFF
        data[0][:, 0, [hidden, large]] = 0
        data[0][:, 0, [hidden, large], 0] = 0xFF80, 0xE904  # -inf, -1e25
        tq, tk, iq, ik = ((a.astype(np.uint32) << 16).view(np.float32).astype(float) for a in data)
        seen = row_keys.intervals(RowKeys(causal=True, q_offset=int(rng.integers(100, 450))), B, M, N, {})
        rows = np.stack([np.broadcast_to(x, (B, M)) for x in (seen.start, seen.end)], -1)
        rows = np.ascontiguousarray(np.where(rows[..., :1] < rows[..., 1:], rows, 0), np.int32)
        ends = np.stack([rows[:, i : i + GRID, 1].max(1) for i in range(0, M, GRID)], 1)
        tile_keys = np.ascontiguousarray(np.stack([np.where(ends > 0, 0, N), ends], -1), np.int32)
        found = np.full((B * G, slots, M, 4), np.nan, np.float32)
        weights = rng.standard_normal((B, HI, M)).astype(np.float32)
        scale = 0.1
        teacher = scale * np.einsum("bhmd,bnd->bhmn", tq, tk[:, 0])
        lse2 = np.log2(np.maximum(np.exp2(teacher).sum(-1), 1e-9)).astype(np.float32)
        lse2[0, 1, :5] = np.inf
        places = {"row_keys": rows, "tile_keys": tile_keys, "states": found, "weights": weights,
                  "lse2": lse2}  # fmt: skip
        values = dict.fromkeys(INDEXER.leaves, 0) | {name: a.ctypes.data for name, a in places.items()}
        values |= {"entries": B, "groups": G, "queries": M, "keys": N, "teacher_heads": heads[0], "teacher_group": H}
        values |= {"index_heads": heads[1], "index_key_heads": 1, "tiles": grid, "grid_tiles": grid, "splits": slots}
        values |= {"teacher_numbers.scale": scale, "student_numbers.scale": 0.3}
        args = INDEXER.pack(values)
        pointers = (ctypes.c_void_p * 4)(*(a.ctypes.data for a in data))
        sizes = (ctypes.c_int * 12)(*(n for a in data for n in a.shape[1:]))
        for block in range(blocks):
            wrong = library.run_block(args, block, blocks, pointers, sizes, int(rng.integers(1 << 31)))
            assert wrong is None, (wrong, block, heads)
        t = np.exp2(teacher - lse2[..., None]).reshape(B, G, heads[0], M, N).sum(2)
        scores = np.einsum("bhmd,bnd->bhmn", iq, ik[:, 0])
        logits = 0.3 * (weights[..., None] * np.maximum(scores, 0)).reshape(B, G, heads[1], M, N).sum(2)
        keys_each = cut.split_keys
        lanes = np.arange(N) % 8 < 2  # of the first lane of a warp, which stands for all four
        for row in range(0, M, 8):
            end = rows[0, row, 1]
            wide = 2 * -(-(-(-ends[0, row // GRID] // GRID) * GRID) // keys_each)
            for g in range(G):
                mass = total = terms = 0.0
                r = found[g, :wide, row, 0].max()
                for x in found[g, :wide, row].astype(float):
                    mass += x[2]
                    total += x[1] * 2.0 ** (x[0] - r)
                    terms += x[3] + (r - x[0]) * x[2]
                pairs = lanes & (np.arange(N) < end)
                a, b = t[0, g, row, pairs], logits[0, g, row, pairs]
                if row == hidden and g == 0:
                    assert np.isnan(mass)
                    continue
                expected = 4 * np.array(
                    [a.sum(), np.exp2(b - r).sum(), (a * (np.log2(np.maximum(a, 1e-38)) - b + r)).sum()]
                )
                np.testing.assert_allclose([mass, total, terms], expected, rtol=2e-4, atol=1e-5)
                assert np.isnan(found[g, wide:, row]).all()

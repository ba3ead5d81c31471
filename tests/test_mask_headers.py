"""The headers of masks and the tile cursor, compiled for the host and walked block by block, against dense masks.

A kernel's index arithmetic is the same on a CPU: what is visited, called full, visible or seen is checked for every
block of random problems, in both orientations, without a GPU.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from streamkl_cupy.compiler.source import cuda_root, flatten
from streamkl_cupy.kernels.structs import EXTENTS, args_of, row_tiles
from streamkl_cupy.kernels.work_tiles import cut, survey
from streamkl_cupy.launch import _mask_words
from streamkl_cupy.ops import ATTENTION_KL
from streamkl_cupy.options import parse
from streamkl_cupy.rules import masks
from streamkl_cupy.rules.masks import MASKS
from streamkl_cupy.rules.masks.blocks import drawn_pattern
from streamkl_cupy.testing import reference
from streamkl_cupy.testing.problems import MASK_OPTIONS

COMPILER = shutil.which("c++") or shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

SHIM = """
#include <algorithm>
#define __device__
using std::max;
using std::min;
struct uint4 { unsigned x, y, z, w; };
static struct { unsigned x; } blockIdx;
"""

# The same search, with the lanes of the warp one after the other.
SEARCH = """
#pragma once
#include "common/types.cuh"
template <class Ok>
inline int last_where(int last, Ok ok) {
    int low = 0, high = last;
    while (low < high) {
        const int step = ceil_div(high - low, 32);
        int passed = 0;
        for (int lane = 0; lane < 32; ++lane) {
            const int probe = low + (lane + 1) * step;
            passed += probe <= high && ok(probe);
        }
        low += step * passed;
        high = min(high, low + step - 1);
    }
    return low;
}
"""

WALK = """
#include "tile/shares.cuh"
#include "@mask"

// What is known of a pair must be the same whoever asks. Returns the number of the first broken rule; 0 for none.
template <int STEP, bool SHARED>
int walk(const Extents& n, int heads, int group, int turn, unsigned char* seen, int* written, int* visits) {
    Block block = turn ? turn_of(blockIdx.x, n, heads, n.batch * heads)
                       : block_of(blockIdx.x, n, heads, n.batch * heads, kRowsAreQueries && !Mask::kListed);
    const Segment segment = Mask::locate(n, block.head * group, block);
    const int row_count = kRowsAreQueries ? segment.queries : segment.keys;
    const int column_count = kRowsAreQueries ? segment.keys : segment.queries;
    const int first = block.tile * kRows, end = min(first + kRows, row_count);
    if (first >= row_count) return Mask::kRagged ? 0 : 1;
    const auto steps_of = [&](const Mask& mask) {
        Range tiles = covering(kRowsAreQueries ? mask.keys_of(first, end) : mask.queries_of(first, end), kColumns);
        if (Mask::kListed) tiles.intersect(block.streamed);
        return mask.steps_of(first, tiles);
    };
    Range own{block.head * group, (block.head + 1) * group};
    if (SHARED) {
        const Range all = steps_of(Mask(n, segment, block.batch, own.begin));
        const int steps = all.end - all.begin;
        if (turn)
            take_turn<Mask>(block, group, steps, n, turn, n.splits > 1);
        else
            take_share<Mask>(block, group, steps, n, n.splits > 1);
        own = heads_of<Mask>(block, own.begin, group, steps);
        if (block.shares > n.splits || (!turn && block.share != block.split)) return 8;
        // Shares of a turn have all come about as far.
        if (turn && block.shares && block.share * n.splits / block.shares != block.split) return 11;
    }
    if (block.shares == 0) return 0;
    if (own.begin < block.head * group || own.end > (block.head + 1) * group || own.empty()) return 9;
    if (block.share == 0 && block.split == 0)
        for (int r = first; r < end; ++r)
            ++written[(block.batch * heads + block.head) * (kRowsAreQueries ? n.queries : n.keys) +
                      (kRowsAreQueries ? segment.first_query : segment.first_key) + r];
    for (int head = own.begin; head < own.end; ++head) {
        const Mask mask(n, segment, block.batch, head);
        const Range met = kRowsAreQueries ? mask.keys_of(first, end) : mask.queries_of(first, end);
        if (!met.empty() && (met.begin < 0 || met.end > column_count)) return 2;
        int last = STEP > 0 ? -1 : 1 << 30;
        const Range steps = SHARED ? share_of<Mask>(steps_of(mask), block, head - block.head * group)
                                   : split_of(steps_of(mask), block, n);
        if (SHARED && block.shares > 1 && steps.empty()) return 10;
        for (Cursor<Mask, STEP> at(mask, {first, end}, steps); at.more(); at.next()) {
            if (STEP * (at.tile() - last) <= 0) return 3;
            last = at.tile();
            ++*visits;
            bool any = false, all = true;
            for (int c = at.row(); c < at.row() + kColumns; ++c) {
                bool column = false;
                for (int r = first; r < end; ++r) {
                    const int q = kRowsAreQueries ? r : c, k = kRowsAreQueries ? c : r;
                    // Of stationary rows nobody asks which are there, before they are written.
                    const bool passes = at.mask.visible(q, k), visible = passes && at.mask.there(q);
                    column = column || visible;
                    all = all && (kRowsAreQueries ? passes : visible);
                    if (!visible) continue;
                    const i64 row = (i64(block.batch) * n.heads + head) * n.queries + segment.first_query + q;
                    ++seen[row * n.keys + segment.first_key + k];
                }
                any = any || column;
                if (c < column_count && (met.contains(c) && at.streamed_seen(first, end, c)) != column) return 4;
            }
            if (at.full(first, end) && !all) return 5;
            if (any && !at.any_visible(first, end)) return 6;
            if (Mask::kHoles && !at.any_visible(first, end)) return 7;
        }
    }
    return 0;
}

extern "C" int walk_all(const Extents* n, int blocks, int heads, int group, int step, int shared, int turn,
                        unsigned char* seen, int* written, int* visits) {
    int broken = 0;
    for (blockIdx.x = 0; blockIdx.x < static_cast<unsigned>(blocks) && !broken; ++blockIdx.x)
        broken = shared     ? walk<1, true>(*n, heads, group, turn, seen, written, visits)
                 : step > 0 ? walk<1, false>(*n, heads, group, 0, seen, written, visits)
                            : walk<-1, false>(*n, heads, group, 0, seen, written, visits);
    return broken;
}
"""


Walker = Callable[..., int]


@pytest.fixture(scope="module")
def walkers(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Walker]:
    """Compiled walkers by parts, tile shape and orientation."""
    folder = tmp_path_factory.mktemp("walk")
    root = folder / "cuda_src"
    shutil.copytree(cuda_root(), root)
    (root / "common/search.cuh").write_text(SEARCH)
    (root / "kernels/walk.cu").write_text(WALK)
    made: dict[Any, Walker] = {}

    def make(parts: tuple[str, ...], rows: int, columns: int, queries: bool) -> Walker:
        key = (parts, rows, columns, queries)
        if key not in made:
            entries = [part for part in MASKS.values() if part.name in parts]
            constants = {
                "SKL_ROWS": rows, "SKL_COLUMNS": columns, "SKL_WARPS": rows // 16, "SKL_WARP_TILES": 1, "SKL_STAGES": 1,
                "SKL_ROWS_ARE_QUERIES": int(queries), "SKL_MASK_PARTS": ", ".join(part.struct for part in entries),
                "SKL_SHARED": 1, "SKL_LEAST_STEPS": 2,
            }  # fmt: skip
            slots = {"mask": (*(part.header for part in entries), "masks/all.cuh")}
            text = SHIM + flatten("kernels/walk.cu", constants, slots, root, args_of().forward.text)
            made[key] = compiled(folder / f"walk{len(made)}", text)
        return made[key]

    return make


def compiled(path: Path, text: str) -> Walker:
    assert COMPILER
    path.with_suffix(".cpp").write_text(text)
    checks = ["-fsanitize=undefined", "-fno-sanitize-recover=undefined", "-D_GLIBCXX_ASSERTIONS"]
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", *checks]
    subprocess.run([*command, path.with_suffix(".cpp"), "-o", path.with_suffix(".so")], check=True)
    return ctypes.CDLL(str(path.with_suffix(".so"))).walk_all  # type: ignore[no-any-return]


def complaint(folder: Path, parts: tuple[str, ...], line: str = "") -> str:
    """What the compiler says of a mask of these parts, and of a line behind it; empty where it is content."""
    assert COMPILER
    entries = [MASKS[name] for name in parts]
    root = folder / "cuda_src"
    shutil.copytree(cuda_root(), root, dirs_exist_ok=True)
    (root / "common/search.cuh").write_text(SEARCH)
    (root / "kernels/ask.cu").write_text(f'#include "@mask"\nusing Asked = Mask;\n{line}\n')
    constants = {
        "SKL_ROWS": 64, "SKL_COLUMNS": 64, "SKL_WARPS": 4, "SKL_WARP_TILES": 1, "SKL_STAGES": 1,
        "SKL_ROWS_ARE_QUERIES": 1, "SKL_MASK_PARTS": ", ".join(part.struct for part in entries),
    }  # fmt: skip
    slots = {"mask": (*(part.header for part in entries), "masks/all.cuh")}
    text = (
        SHIM
        + flatten("kernels/ask.cu", constants, slots, root, args_of().forward.text)
        + "static const int size = sizeof(Asked);\n"
    )
    done = subprocess.run(
        [COMPILER, "-std=c++17", "-w", "-fsyntax-only", "-x", "c++", "-"], input=text, capture_output=True, text=True
    )
    return done.stderr


@pytest.mark.parametrize("name", MASKS)
def test_the_registry_says_what_the_header_says(tmp_path: Path, name: str) -> None:
    part = MASKS[name]
    facts = {
        "kKnowsQueries": part.knows_queries,
        "kListed": part.listed,
        "kSparse": part.sparse,
        "kPicksQueries": part.picks_queries,
        "kShortens": part.shortens,
        "kWords": part.words,
    }
    line = " ".join(f'static_assert({part.struct}::{fact} == {int(x)}, "{fact}");' for fact, x in facts.items())
    assert complaint(tmp_path, (name,), line) == ""
    assert "kListed" in complaint(tmp_path, (name,), line.replace("kListed ==", "kListed !="))


def test_parts_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    """What the mask's own functions take for granted of its parts."""
    assert complaint(tmp_path, ("causal", "blocks")) == ""
    assert "ask parts one by one" in complaint(tmp_path, ("causal", "window"))
    assert complaint(tmp_path, masks.together()) == ""


CASES = [
    (),
    *((name,) for name in MASKS),
    ("window", "lengths"),
    ("window", "query_mask"),
    ("causal", "lengths", "query_lengths", "keys", "query_mask"),
    ("causal", "blocks"),
    ("causal", "packed"),
    ("window", "packed"),
    masks.together(),
]
TILES = [(48, 32), (128, 96)]


@pytest.mark.parametrize("queries", [True, False], ids=["stationary queries", "stationary keys"])
@pytest.mark.parametrize("parts", CASES, ids="+".join)
def test_every_pair_is_visited_once(walkers: Any, parts: tuple[str, ...], queries: bool, rng: Any) -> None:
    rows, columns = TILES[rng.integers(len(TILES))]  # compiling takes most of the time
    for _ in range(20):
        one_block(walkers, parts, rows, columns, queries, rng)


def one_block(walker: Any, parts: tuple[str, ...], rows: int, columns: int, queries: bool, rng: Any) -> None:
    packed = "packed" in parts
    batch, group = 1 if packed else int(rng.integers(1, 3)), int(rng.integers(1, 3))
    heads = group * int(rng.integers(1, 3))
    M, N = int(rng.integers(1, 300)), int(rng.integers(1, 300))
    given: dict[str, Any] = {}
    for name in parts:
        given |= MASK_OPTIONS[name](rng, batch, M, N)
    if {"causal", "window"} & {*parts} and rng.integers(2):
        given["q_offset"] = int(rng.integers(-M - 20, N + 20))
    if "block_mask" in given and rng.integers(2):
        given["block_mask"] = drawn_pattern(rng, heads, M, N)
    dense = np.broadcast_to(reference.visible((batch, heads, M, N), given), (batch, heads, M, N))
    options, values = parse(ATTENTION_KL, given)
    arrays = {name: x for name, x in zip(masks.ARRAYS, values) if x is not None}
    sequences = len(arrays["cu_seqlens_q"]) - 1 if packed else 0
    shapes = {name: x.shape for name, x in arrays.items()}
    spec = masks.spec_of(masks.Asked(options, shapes, masks.Extents(batch, heads, M, N), sequences))
    walk = walker(spec.parts, rows, columns, queries)
    keep: list[Any] = []

    def pointer(array: Any) -> int:
        keep.append(np.ascontiguousarray(array))
        return int(keep[-1].ctypes.data)

    pattern = options.block_mask
    lists = [] if pattern is None else [*pattern.tile_lists(rows, columns, by_keys=not queries), np.zeros(0)]
    words, places = _mask_words(SimpleNamespace(mask=spec), [pointer(x) for x in lists])  # type: ignore[arg-type]
    for word, name in places:
        words[word] = pointer(as_bits(arrays[name]) if masks.ARRAYS[name].bits else arrays[name])
    extents = {
        "batch": batch, "heads": heads, "queries": M, "keys": N, "teacher_group": group, "student_group": group,
        "head_group": int(rng.integers(1, batch * heads + 1)), "sequences": sequences,
    }  # fmt: skip
    total = M if queries else N
    extents["tiles"] = row_tiles(total, rows, sequences)
    out_heads, group = (heads, 1) if queries else (heads // group, group)
    # Forwards split streamed rows evenly, whole lists too; gradients share those of all heads, or lists of 3 tiles.
    ways = [(1, 1, 0, False, 0), (1, 1, 3, False, 0)] + [(-1, 1, 0, False, 0), (-1, 3, 0, False, 0)] * queries
    ways += [(1, splits, 0, True, 0) for splits in (1, 2, 5, 40)] * (pattern is None)
    # In turns of so many steps; with fewer turns than that takes, these are longer.
    ways += [(1, splits, 0, True, turn) for splits, turn in ((1, 3), (2, 4), (5, 2), (40, 1))] * (pattern is None)
    for step, splits, longest, shared, turn in ways:
        extents["splits"] = splits
        if pattern is not None:
            entries = cut(survey(pattern, rows, columns, not queries, group), longest, group).entries
            extents["tiles"] = entries.shape[1]
            last = len([x for part in masks.parts_of(spec) for x in (*part.params, *part.arrays)]) + len(lists) - 1
            words[last] = pointer(entries)
        seen = np.zeros((batch, heads, M, N), np.uint8)
        written = np.zeros((batch, out_heads, total), np.int32)
        visits = ctypes.c_int()
        blocks = batch * out_heads * extents["tiles"] * splits
        out = [ctypes.c_void_p(x.ctypes.data) for x in (seen, written)]
        packed_extents = EXTENTS.pack({**extents, "mask": words})
        broken = walk(packed_extents, blocks, out_heads, group, step, shared, turn, *out, ctypes.byref(visits))
        about = f"M={M} N={N} {spec} {given} {rows}x{columns} {step} {longest} {splits} {shared} {turn}"
        assert broken == 0, about
        assert (written == 1).all(), about
        np.testing.assert_array_equal(seen, dense, err_msg=about)
        if len(spec.parts) <= 1 and not packed:
            assert visits.value == touched(dense if queries else dense.swapaxes(2, 3), rows, columns), about


def as_bits(mask: Any) -> Any:
    """(B, N) bool as kernels have it: words of 32 keys."""
    packed = np.zeros((len(mask), -(-mask.shape[1] // 32) * 4), np.uint8)
    bits = np.packbits(mask, axis=1, bitorder="little")
    packed[:, : bits.shape[1]] = bits
    return packed


def touched(dense: Any, rows: int, columns: int) -> int:
    """How many tiles have a visible pair."""
    padded = np.pad(dense, [(0, 0), (0, 0), (0, -dense.shape[2] % rows), (0, -dense.shape[3] % columns)])
    b, h, m, n = padded.shape
    return int(padded.reshape(b, h, m // rows, rows, n // columns, columns).any(axis=(3, 5)).sum())


# A warp whose lanes are threads, which meet where lanes vote.
WARP = """
#include <pthread.h>
#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>
#define __device__
#define __popc __builtin_popcount
using std::max;
using std::min;
static thread_local struct { unsigned x; } threadIdx;
static pthread_barrier_t barrier;
static std::atomic<unsigned> votes;
static unsigned __ballot_sync(unsigned lanes, bool vote) {
    pthread_barrier_wait(&barrier);
    if (threadIdx.x == 0) votes = 0;
    pthread_barrier_wait(&barrier);
    if (vote) votes |= 1u << threadIdx.x;
    pthread_barrier_wait(&barrier);
    return votes;
}
"""
SEARCHED = """
extern "C" void search_all(int count, const int* lasts, const unsigned char* const* says, int* found) {
    pthread_barrier_init(&barrier, nullptr, 32);
    std::vector<std::thread> lanes;
    for (unsigned lane = 0; lane < 32; ++lane)
        lanes.emplace_back([=] {
            threadIdx.x = lane;
            for (int i = 0; i < count; ++i) {
                bool outside = false;
                const int at = last_where(lasts[i], [&](int probe) {
                    outside |= probe < 0 || probe > lasts[i];
                    return probe >= 0 && probe <= lasts[i] && says[i][probe];
                });
                found[32 * i + lane] = outside ? -1 : at;
            }
        });
    for (auto& lane : lanes) lane.join();
}
"""


def test_a_warp_finds_the_last_that_holds(tmp_path: Path, rng: np.random.Generator) -> None:
    """The search itself: the walks above have one whose lanes come one after the other."""
    assert COMPILER
    root = tmp_path / "cuda_src"
    shutil.copytree(cuda_root(), root)
    (root / "kernels/search.cu").write_text('#include "common/search.cuh"\n')
    text = WARP + flatten("kernels/search.cu", {}, {}, root) + SEARCHED
    (tmp_path / "search.cpp").write_text(text)
    command = [COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-pthread", tmp_path / "search.cpp", "-o"]
    subprocess.run([*command, tmp_path / "search.so"], check=True)
    lasts = [0, 1, 31, 32, 33, 1023, 1024, *(int(x) for x in rng.integers(0, 5000, 20))]
    expected, says = [], []
    for last in lasts:
        holds = int(rng.choice([0, last, rng.integers(last + 1)]))
        says.append(np.arange(last + 1) <= holds)
        expected.append(holds)
    lasts += [500] * 5  # of what is in no order the answer is inside at least
    says += [rng.random(501) < 0.5 for _ in range(5)]
    found = np.empty((len(lasts), 32), np.int32)
    rows = [np.ascontiguousarray(x, np.uint8) for x in says]
    pointers = (ctypes.c_void_p * len(rows))(*(x.ctypes.data for x in rows))
    ctypes.CDLL(str(tmp_path / "search.so")).search_all(
        len(lasts), (ctypes.c_int * len(lasts))(*lasts), pointers, found.ctypes.data_as(ctypes.c_void_p)
    )
    assert (found == found[:, :1]).all(), "lanes have answers of their own"
    assert found[: len(expected), 0].tolist() == expected
    assert ((found[len(expected) :] >= 0) & (found[len(expected) :] <= 500)).all()

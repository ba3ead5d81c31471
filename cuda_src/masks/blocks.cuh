// Row i sees key j where the pattern of the head lists their block. Kernels read the pattern as lists made for their
// tiles (stationary rows x streamed rows): per row tile the column tiles to visit, ascending, with a bit for each
// subtile of 16 x 16, number (row / 16) * (kColumns / 16) + column / 16; subtiles outside the problem have theirs set.
// Words: the addresses of offsets (heads, row tiles + 1), of entries, and of work tiles (heads, as many as the grid has
// per head), the longest first; then the number of heads, of the problem or 1.
#pragma once
#include "masks/interface.cuh"
#include "common/search.cuh"

struct Blocks : Part {
    static constexpr int kWords = 4;
    static constexpr bool kSparse = true, kListed = true;
    static constexpr int kAcross = kColumns / 16, kDown = kRows / 16;
    static_assert(kRows % 16 == 0 && kColumns % 16 == 0 && kAcross * kDown <= 64,
                  "plan: 64 subtiles of 16 x 16 to a tile");

    const int* offsets;
    const uint4* entries;  // tile, 0, bits
    int first_row, first_column;
    u64 bits;

    // The lists know the kernel's own tiles; others stay in their order.
    template <int ROWS, bool QUERIES>
    __device__ static void locate(Words words, const Extents& n, int head, WorkTile& work, Segment&) {
        if constexpr (ROWS != kRows || QUERIES != kRowsAreQueries) return;
        static_assert(sizeof(WorkTile) == 6 * sizeof(int), "kernels/work_tiles.py makes six ints of each");
        words.at += 2;
        const WorkTile* const work_tiles = words.pointer<WorkTile>();
        work = work_tiles[static_cast<i64>(words.number() == 1 ? 0 : head) * n.tiles + work.tile];
    }
    __device__ Blocks(Words& words, const Extents& n, const Segment&, int, int head)
        : offsets(words.pointer<int>()), entries(words.pointer<uint4>()), first_row(0), first_column(0), bits(0) {
        words.at += 1;
        offsets += static_cast<i64>(words.number() == 1 ? 0 : head) *
                   (ceil_div(kRowsAreQueries ? n.queries : n.keys, kRows) + 1);
    }

    __device__ Range steps_of(int row, Range tiles) const {
        const int first = offsets[row / kRows], count = offsets[row / kRows + 1] - first;
        const auto before = [this, first, count](int tile) {
            return first + last_where(count, [this, first, tile](int i) {
                       return i == 0 || static_cast<int>(entries[first + i - 1].x) < tile;
                   });
        };
        return {before(tiles.begin), before(tiles.end)};
    }
    // The same without a search where all of the list lies in `tiles`, as that of a pattern does which was made for the
    // other parts of the mask.
    __device__ Range steps_at_once(int row, Range tiles) const {
        const int first = offsets[row / kRows], end = offsets[row / kRows + 1];
        if (first >= end) return {first, first};
        const int low = static_cast<int>(entries[first].x), high = static_cast<int>(entries[end - 1].x);
        return low >= tiles.begin && high < tiles.end ? Range{first, end} : steps_of(row, tiles);
    }
    __device__ TileEntry entry(int step) const {
        const uint4 x = entries[step];
        return {static_cast<int>(x.x), static_cast<u64>(x.w) << 32 | x.z};
    }
    __device__ void enter(int row, int column, u64 subtiles) {
        first_row = row;
        first_column = column;
        bits = subtiles;
    }

    __device__ static constexpr u64 ones(int count) { return count >= 64 ? ~0ull : (1ull << count) - 1; }
    __device__ static constexpr u64 every_row() {
        u64 x = 0;
        for (int i = 0; i < kDown; ++i) x |= 1ull << i * kAcross;
        return x;
    }
    // The bits of the subtiles that the intervals meet.
    __device__ u64 subtiles_of(int q0, int q1, int k0, int k1) const {
        const Range rows = kRowsAreQueries ? Range{q0, q1} : Range{k0, k1},
                    columns = kRowsAreQueries ? Range{k0, k1} : Range{q0, q1};
        const int i0 = (rows.begin - first_row) / 16, i1 = min(ceil_div(rows.end - first_row, 16), kDown);
        const int j0 = (columns.begin - first_column) / 16, j1 = min(ceil_div(columns.end - first_column, 16), kAcross);
        return every_row() * (ones(j1) & ~ones(j0)) & ones(i1 * kAcross) & ~ones(i0 * kAcross);
    }
    __device__ bool any_visible(int q0, int q1, int k0, int k1) const { return bits & subtiles_of(q0, q1, k0, k1); }
    __device__ bool full(int q0, int q1, int k0, int k1) const { return !(~bits & subtiles_of(q0, q1, k0, k1)); }
    __device__ bool visible(int q, int k) const {
        const int row = (kRowsAreQueries ? q : k) - first_row, column = (kRowsAreQueries ? k : q) - first_column;
        return bits >> (row / 16 * kAcross) >> (column / 16) & 1;
    }
};

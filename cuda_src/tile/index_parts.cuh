// What the indexer's kernels share: which keys a row sees, parts of head dims, the strip of logit gradients.
//
// Rows see an interval of keys each, and of that what bits leave. Tiles of a strip lie on one grid of kStripTile rows
// and keys, whoever writes or reads them, so that all that is read has been written.
#pragma once
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "tile/load.cuh"

constexpr int larger(int a, int b) { return a > b ? a : b; }

constexpr int kStripTile = 64;
static_assert((kStripTile % kColumns == 0 || kColumns % kStripTile == 0) && kStripTile % kRows == 0,
              "plan: tiles lie on the strip's grid");

static_assert(IndexerRowRegions::kRowKeys == 2 && IndexerRowRegions::kTileKeys == 2 && IndexerRowRegions::kBits == 1,
              "plan: an int2 for each row and each row tile, a word of bits");

// The keys that any of the rows of a tile of the grid sees, whole tiles of the grid; empty where no row sees one.
__device__ inline Range keys_of_tile(const IndexerArgs& args, int batch, int tile) {
    const int2 x = reinterpret_cast<const int2*>(args.tile_keys)[batch * args.grid_tiles + tile];
    if (x.y <= x.x) return {0, 0};
    return {x.x / kStripTile * kStripTile, round_up(x.y, kStripTile)};
}

// Tiles of keys that a row tile has in a strip that lies in tiles: whole blocks of whoever reads the keys, and nothing
// beyond what rows see.
constexpr int kStripBlock = 256;
__device__ inline int strip_width(Range keys) { return round_up(keys.end, kStripBlock) / kStripTile; }

// Which keys the row sees.
struct RowKeys {
    Range interval;
    const u32* bits;  // null: all of the interval
    __device__ RowKeys(const IndexerArgs& args, int batch, int group, int row) : interval{0, 0}, bits(nullptr) {
        if (row >= args.queries) return;
        const int2 x = reinterpret_cast<const int2*>(args.row_keys)[static_cast<i64>(batch) * args.queries + row];
        interval = {x.x, x.y};
        if constexpr (SKL_BITS)
            bits = reinterpret_cast<const u32*>(args.bits) + batch * args.bits_batch + group * args.bits_group +
                   row * args.bits_row;
    }
    __device__ bool visible(int key) const {
        if constexpr (SKL_BITS) {
            if (!interval.contains(key)) return false;
            return bits[key >> 5] >> (key & 31) & 1;
        }
        return interval.contains(key);
    }
};

// Columns of a head dim that one product takes.
struct Columns {
    int first, count;
};

// Rows of a part of a head dim, `columns` of it from the first on, the rest of the tile's width zero; see load_rows.
template <int ROWS, bool VECTOR, class T>
__device__ inline void load_part(T tile, const HeadView& x, int first, Range valid, Columns columns) {
    constexpr int per_chunk = 16 / T::E::kBytes;
    constexpr int chunks = grid_of<T>().chunks, across = grid_of<T>().across, down = grid_of<T>().down;
    const int thread_row = threadIdx.x / across;
    const u64 from = x.base + columns.first * (VECTOR ? T::E::kBytes : x.column);
#pragma unroll 1
    for (int c = threadIdx.x % across; c < chunks; c += across) {
        const int column = c * per_chunk, width = max(0, min(per_chunk, columns.count - column));
        u64 source =
            from + (static_cast<i64>(first) + thread_row) * x.row + column * (VECTOR ? T::E::kBytes : x.column);
#pragma unroll(VECTOR ? ceil_div(ROWS, down) : 1)
        for (int j = 0; j < ceil_div(ROWS, down); ++j) {
            const int r = thread_row + j * down;
            const int count = valid.contains(first + r) ? width : 0;
            if ((kThreads % across == 0 || thread_row < down) && (ROWS % down == 0 || r < ROWS)) {
                if constexpr (VECTOR)
                    cp_async_16(tile.address(r, column), reinterpret_cast<const void*>(source), count * T::E::kBytes);
                else
                    gather_chunk<T>(tile.address(r, column), source, x.column, count);
            }
            source += static_cast<i64>(down) * x.row;
        }
    }
}

// The strip, as rows and keys of one batch entry and group: as many rows as one launch works on.
template <class T>
__device__ inline HeadView strip_view(const IndexerArgs& args, int entry, int key) {
    constexpr int bytes = T::E::kBytes;
    const i64 row = static_cast<i64>(args.strip_pitch) * bytes;
    return {args.strip + entry * static_cast<i64>(args.strip_rows) * row + static_cast<i64>(key) * bytes, row, bytes};
}

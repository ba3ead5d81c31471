// Rows of the indexer's operands as products of warpgroups read them, brought there by cp.async: head dims in parts,
// any strides between rows. Who writes has to say so to the unit that reads: async_fence, then a barrier.
#pragma once
#include "ptx/shared.cuh"
#include "tile/index_parts.cuh"
#include "tile/swizzled.cuh"

// Columns beyond the part, up to whole products, are zeros.
template <int CODE, int DIM>
struct WideTile : SwizzledTile<CODE, round_up(DIM, 16)> {
    using E = Element<CODE>;
    u32 base;
    __device__ explicit WideTile(u32 base) : base(base) {}
};
// Rows from `first` on, `columns` of each; rows outside `valid` become zeros.
template <int ROWS, class T>
__device__ inline void load_wide(T tile, const HeadView& x, int first, Range valid, Columns columns) {
    // A thread keeps its piece of a row, where the pieces divide the threads, and then addition finds its sources.
    constexpr int pieces = 2 * T::kSteps, across = kThreads % pieces == 0 ? pieces : 2 * (pieces / 2 <= 8 ? 8 : 16);
    constexpr int down = kThreads / across;
    const int piece = threadIdx.x % across, row = threadIdx.x / across;
    if (piece < pieces) {
        const int width = 2 * max(0, min(8, columns.count - 8 * piece));
        u64 source = x.base + columns.first * 2 + (static_cast<i64>(first) + row) * x.row + 16 * piece;
        u32 to = tile.base + (piece / 8 * ROWS + row) * 128;
#pragma unroll 2
        for (int r = row; r < ROWS; r += down) {
            cp_async_16(to + ((piece % 8 ^ (r & 7)) << 4), reinterpret_cast<const void*>(source),
                        valid.contains(first + r) ? width : 0);
            source += down * x.row;
            to += down * 128;
        }
    }
}

// s = rows * streamed^T, or more of it.
template <int TILES, class T>
__device__ inline void wide_scores(Strip<TILES>& s, T rows, T streamed, bool first) {
    wgmma_fence();
    multiply_rows<T, kRows, T::kChunks>(s[0], swizzled_descriptor(rows.base), swizzled_descriptor(streamed.base), 0,
                                        first ? 0 : -1);
    wgmma_commit();
    wgmma_wait<0>();
    fence_accumulators(s[0]);
}

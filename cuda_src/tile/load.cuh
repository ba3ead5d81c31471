// Bringing rows of an input into a shared-memory tile, whatever its strides.
#pragma once
#include "common/args.cuh"
#include "ptx/cp_async.cuh"
#include "tile/fragment.cuh"

// One head of an input: the base address and the strides that are left, in bytes.
struct HeadView {
    u64 base;
    i64 row, column;
};

// Rows from `first` on.
template <class T>
__device__ inline HeadView head_view(const Tensor4& x, int b, int h, int first) {
    constexpr int bytes = T::E::kBytes;
    return {x.pointer + (b * x.batch + h * x.head + first * x.row) * bytes, x.row * bytes, x.column * bytes};
}

// One 16-byte chunk of `count` elements that lie `stride` bytes apart, the rest zero. A word at a time: this is the
// path of last resort, and in flight loads would cost the main loop its registers.
template <class T>
__device__ inline void gather_chunk(u32 shared, u64 source, i64 stride, int count) {
    u32* const words = reinterpret_cast<u32*>(__cvta_shared_to_generic(shared));
#pragma unroll 1
    for (int w = 0; w < 4; ++w) {
        u32 word = 0;
        if constexpr (T::E::kBytes == 2) {
            if (2 * w < count) word = *reinterpret_cast<const u16*>(source);
            if (2 * w + 1 < count) word |= static_cast<u32>(*reinterpret_cast<const u16*>(source + stride)) << 16;
            source += 2 * stride;
        } else {
            if (w < count) word = *reinterpret_cast<const u32*>(source);
            source += stride;
        }
        words[w] = word;
    }
}

// How load_rows spreads the threads over a tile: a grid of rows x chunks of 16 bytes, in which each keeps its column.
struct Grid {
    int chunks, across, down;  // chunks of a row; threads side by side; rows at a time
};
template <class T>
__device__ constexpr Grid grid_of() {
    constexpr int chunks = T::kDepth * T::E::kBytes / 16, across = chunks < kThreads ? chunks : kThreads;
    return {chunks, across, kThreads / across};
}

// ROWS rows from first on; rows outside `valid`, and those that are not `wanted`, become zeros and are not read. With
// VECTOR the input's columns are adjacent and its rows start on 16-byte boundaries: asynchronous 16-byte copies, part
// of the thread's current group. Otherwise plain element loads, complete when the function returns. A barrier must
// follow before the tile is read.
//
// As each thread keeps its column, one 64-bit product per tile finds its first source, and additions find the rest. The
// trip counts are constants, and up to AT_ONCE rows of a thread are unrolled.
template <int ROWS, bool VECTOR, int AT_ONCE = 16, class T, class Wanted = Everything>
__device__ inline void load_rows(T tile, const HeadView& x, int first, Range valid, Wanted wanted = {}) {
    constexpr int per_chunk = 16 / T::E::kBytes;
    constexpr int chunks = grid_of<T>().chunks, across = grid_of<T>().across, down = grid_of<T>().down;
    const int thread_row = threadIdx.x / across;
    const u32 begin = static_cast<u32>(valid.begin - first), rows_inside = static_cast<u32>(valid.end - valid.begin);
#pragma unroll 1
    for (int c = threadIdx.x % across; c < chunks; c += across) {
        const int column = c * per_chunk;
        const int width = T::kHeadDim == T::kDepth ? per_chunk : max(0, min(per_chunk, T::kHeadDim - column));
        u64 source =
            x.base + (static_cast<i64>(first) + thread_row) * x.row + column * (VECTOR ? T::E::kBytes : x.column);
#pragma unroll(VECTOR&& ceil_div(ROWS, down) <= AT_ONCE ? ceil_div(ROWS, down) : 1)
        for (int j = 0; j < ceil_div(ROWS, down); ++j) {
            const int r = thread_row + j * down;
            const int count = static_cast<u32>(r) - begin < rows_inside && wanted(first + r) ? width : 0;
            // Where the grid does not fill the block or the tile, the threads beyond it have nothing to do.
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

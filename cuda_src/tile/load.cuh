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

template <class T>
__device__ inline HeadView head_view(const Tensor4& x, int b, int h) {
    constexpr int bytes = T::E::kBytes;
    return {x.pointer + (b * x.batch + h * x.head) * bytes, x.row * bytes, x.column * bytes};
}

// One 16-byte chunk of `count` elements that lie `stride` bytes apart, the rest zero.
template <class T>
__device__ inline void gather_chunk(u32 shared, u64 source, i64 stride, int count) {
    u32 words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int e = 0; e < 16 / T::E::kBytes; ++e) {
        if (e < count) {
            const u64 address = source + e * stride;
            if constexpr (T::E::kBytes == 2)
                words[e / 2] |= u32(*reinterpret_cast<const u16*>(address)) << (16 * (e & 1));
            else
                words[e] = *reinterpret_cast<const u32*>(address);
        }
    }
    *reinterpret_cast<uint4*>(__cvta_shared_to_generic(shared)) = make_uint4(words[0], words[1], words[2], words[3]);
}

// ROWS rows from first on; rows outside `valid` become zeros and are not read. With VECTOR the input's columns are
// adjacent and its rows start on 16-byte boundaries: asynchronous 16-byte copies, part of the thread's current group.
// Otherwise plain element loads, complete when the function returns. A barrier must follow before the tile is read.
//
// The trip count is a constant and, where the chunks of a row divide the threads, so is a thread's column: then one
// 64-bit product per tile finds the thread's first source, and additions find the rest.
template <int ROWS, bool VECTOR, class T>
__device__ inline void load_rows(T tile, const HeadView& x, int first, Range valid) {
    constexpr int per_chunk = 16 / T::E::kBytes, chunks = T::kDepth / per_chunk, total = ROWS * chunks;
    constexpr bool fixed_column = kThreads % chunks == 0;
    constexpr int row_step = kThreads / chunks;
    const u32 begin = static_cast<u32>(valid.begin - first), rows_inside = static_cast<u32>(valid.end - valid.begin);
    int r = threadIdx.x / chunks, column = threadIdx.x % chunks * per_chunk;
    u64 source = x.base + (static_cast<i64>(first) + r) * x.row + (VECTOR ? column * T::E::kBytes : 0);
#pragma unroll(ceil_div(total, kThreads) <= 16 ? ceil_div(total, kThreads) : 4)
    for (int j = 0; j < ceil_div(total, kThreads); ++j) {
        if constexpr (!fixed_column) {
            const int i = threadIdx.x + j * kThreads;
            r = i / chunks;
            column = i % chunks * per_chunk;
            source = x.base + (static_cast<i64>(first) + r) * x.row + (VECTOR ? column * T::E::kBytes : 0);
        }
        if (total % kThreads == 0 || r < ROWS) {
            const bool inside = static_cast<u32>(r) - begin < rows_inside;
            int count = per_chunk;
            if constexpr (T::kHeadDim != T::kDepth) count = max(0, min(per_chunk, T::kHeadDim - column));
            if (!inside) count = 0;
            if constexpr (VECTOR)
                cp_async_16(tile.address(r, column), reinterpret_cast<const void*>(source), count * T::E::kBytes);
            else
                gather_chunk<T>(tile.address(r, column), source + column * x.column, x.column, count);
        }
        if constexpr (fixed_column) {
            r += row_step;
            source += row_step * x.row;
        }
    }
}

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

// ROWS rows from first on; rows outside `valid` become zeros and are not read. With VECTOR the input's columns are
// adjacent and its rows start on 16-byte boundaries: asynchronous 16-byte copies, part of the thread's current group.
// Otherwise plain element loads, complete when the function returns. A barrier must follow before the tile is read.
template <int ROWS, bool VECTOR, class T>
__device__ inline void load_rows(T tile, const HeadView& x, int first, Range valid) {
    constexpr int per_chunk = 16 / T::E::kBytes, chunks = T::kDepth / per_chunk, total = ROWS * chunks;
#pragma unroll(total / kThreads <= 16 ? ceil_div(total, kThreads) : 4)
    for (int i = threadIdx.x; i < total; i += kThreads) {
        const int r = i / chunks, column = i % chunks * per_chunk;
        const bool inside = valid.contains(first + r);
        const u64 source = inside ? x.base + (first + r) * x.row : x.base;
        const int left = T::kHeadDim - column, count = !inside || left < 0 ? 0 : left < per_chunk ? left : per_chunk;
        if constexpr (VECTOR) {
            cp_async_16(tile.address(r, column), reinterpret_cast<const void*>(count ? source + column * T::E::kBytes : x.base),
                        count * T::E::kBytes);
        } else {
            u32 words[4] = {0, 0, 0, 0};
#pragma unroll
            for (int e = 0; e < per_chunk; ++e) {
                if (e < count) {
                    const u64 address = source + (column + e) * x.column;
                    if constexpr (T::E::kBytes == 2)
                        words[e / 2] |= u32(*reinterpret_cast<const u16*>(address)) << (16 * (e & 1));
                    else
                        words[e] = *reinterpret_cast<const u32*>(address);
                }
            }
            *reinterpret_cast<uint4*>(__cvta_shared_to_generic(tile.address(r, column))) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

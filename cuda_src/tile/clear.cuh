// Zeros for operand rows that must not enter a product, in tiles of swizzled.cuh.
#pragma once
#include "common/types.cuh"
#include "ptx/shared.cuh"

// Clears the rows of a tile [chunks][ROWS][64], whose first row is `first`, that lie outside `valid`. Called by the 128
// threads of a warpgroup that multiplies next; `barrier` is theirs. Whole rows are written, so the swizzle does not matter.
template <int ROWS, int CHUNKS>
__device__ inline void clear_rows(u32 tile, int first, Range valid, int barrier) {
    const int thread = threadIdx.x & 127;
    const float zeros[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int r = thread / 8; r < ROWS; r += 16) {
        if (valid.contains(first + r)) continue;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) store_float4(tile + (c * ROWS + r) * 128 + thread % 8 * 16, zeros);
    }
    async_fence();
    barrier_sync(barrier, 128);
}

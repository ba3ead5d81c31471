// Zeros for streamed rows that must not enter a product, in tiles of swizzled.cuh. The kernel has included its mask before.
#pragma once
#include "ptx/shared.cuh"
#include "tile/schedule.cuh"

// Clears, of a tile of ROWS rows, those that none of the stationary rows of the block sees; `streamed` are those inside
// the intervals. Called by the 128 threads of a warpgroup that multiplies next, with a barrier of their own; several
// warpgroups may clear the same rows. Whole rows are written, so the swizzle does not matter.
template <class Side, int ROWS, class Walk>
__device__ inline void clear_unseen(u32 tile, const Walk& at, Range streamed, int barrier) {
    const float zeros[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int r = threadIdx.x & 127; r < ROWS; r += 128) {
        const int row = at.row() + r;
        if (streamed.contains(row) && at.streamed_seen(at.rows.begin, at.rows.end, row)) continue;
#pragma unroll 1
        for (int c = 0; c < Side::kChunks; ++c)
#pragma unroll
            for (int piece = 0; piece < 8; ++piece) store_float4(tile + (c * ROWS + r) * 128 + 16 * piece, zeros);
    }
    async_fence();
    barrier_sync(barrier, 128);
}

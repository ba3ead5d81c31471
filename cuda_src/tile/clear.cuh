// Zeros for operand rows that must not enter a product, in tiles of swizzled.cuh.
#pragma once
#include "common/types.cuh"
#include "ptx/shared.cuh"
#include "tile/element.cuh"
#include "tile/fragment.cuh"

// Clears the rows of a tile [chunks][ROWS][64] that hold an infinity or a NaN. A pair that sees such a row has NaN for
// a gradient of its logit whatever the row holds; for one that does not, 0 times the row must be 0. Called by the 128
// threads of a warpgroup that multiplies next; `barrier` is theirs. PIECES of 8 elements of a row have been loaded:
// what lies beyond may be anything, no product reads it, and it says nothing of the row.
template <class E, int ROWS, int CHUNKS, int PIECES = 8 * CHUNKS>
__device__ inline void clear_non_finite(u32 tile, int barrier) {
    // An exponent of ones carries into the sign.
    constexpr u32 exponent = E::kNarrowExponent ? 0x7c007c00u : 0x7f807f80u,
                  one = E::kNarrowExponent ? 0x04000400u : 0x00800080u;
    const auto broken = [](float x) { return (__float_as_uint(x) & exponent) + one & 0x80008000u; };
    const int thread = threadIdx.x & 127;
    const float zeros[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int r = thread / 8; r < ROWS; r += 16) {
        const u32 row = tile + r * 128 + thread % 8 * 16;
        u32 bad = 0;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if (PIECES < 8 * CHUNKS && 8 * c + (thread % 8 ^ (r & 7)) >= PIECES) continue;
            const float4 x = shared_float4(row + c * ROWS * 128);
            bad |= broken(x.x) | broken(x.y) | broken(x.z) | broken(x.w);
        }
        // Eight neighbours have the row.
        if (__ballot_sync(~0u, bad != 0) >> (lane_id() & 24) & 255) {
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c) store_float4(row + c * ROWS * 128, zeros);
        }
    }
    async_fence();
    barrier_sync(barrier, 128);
}

// Zeros for rows that must not enter a product, in tiles of swizzled.cuh. The kernel has included its mask before.
#pragma once
#include "ptx/shared.cuh"
#include "tile/element.cuh"
#include "tile/fragment.cuh"
#include "tile/schedule.cuh"

// Not 0 if 16 bytes of elements hold an infinity or a NaN.
template <class E>
__device__ inline u32 no_numbers(float4 x) {
    // An exponent of ones carries into the sign.
    constexpr u32 exponent = E::kNarrowExponent ? 0x7c007c00u : 0x7f807f80u,
                  one = E::kNarrowExponent ? 0x04000400u : 0x00800080u;
    const auto broken = [](float part) { return (__float_as_uint(part) & exponent) + one & 0x80008000u; };
    return broken(x.x) | broken(x.y) | broken(x.z) | broken(x.w);
}

// Clears, of a tile of ROWS rows, those that hold what is no number and that `seen` does not say is seen: 0 times that
// need not be 0. Who sees a row is a long question beside a pattern, and asked about such rows only. Called by the 128
// threads of a warpgroup that multiplies next, with a barrier of their own; several warpgroups may clear the same rows.
// Chunks of the tile are `pitch` rows apart.
template <class Side, int ROWS, class Seen>
__device__ inline void clear_unseen(u32 tile, int pitch, int barrier, Seen seen) {
    const int thread = threadIdx.x & 127;
    const float zeros[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
    for (int r = thread / 8; r < ROWS; r += 16) {
        const u32 piece = tile + r * 128 + thread % 8 * 16;
        u32 bad = 0;
#pragma unroll
        for (int c = 0; c < Side::kChunks; ++c)
            bad |= no_numbers<Element<Side::kCode>>(shared_float4(piece + c * pitch * 128));
        // Eight neighbours have the row.
        bad = __ballot_sync(~0u, bad != 0) >> (lane_id() & 24) & 255;
        if (bad != 0) bad = !seen(r);
#pragma unroll
        for (int c = 0; c < Side::kChunks && bad != 0; ++c) store_float4(piece + c * pitch * 128, zeros);
    }
    async_fence();
    barrier_sync(barrier, 128);
}

// The same of a walk's tile: who sees it are the stationary rows, and `streamed` are the rows inside the intervals.
// Where these are keys the question is short, and rows are cleared whatever they hold: to look takes registers.
template <class Side, int ROWS, class Walk>
__device__ inline void clear_unseen(u32 tile, const Walk& at, Range streamed, int barrier) {
    const auto seen = [&at, streamed](int r) {
        const int row = at.row() + r;
        return streamed.contains(row) && at.streamed_seen(at.rows.begin, at.rows.end, row);
    };
    if constexpr (kRowsAreQueries) {
        clear_unseen<Side, ROWS>(tile, ROWS, barrier, seen);
    } else {
        const float zeros[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll 1
        for (int r = threadIdx.x & 127; r < ROWS; r += 128) {
            if (seen(r)) continue;
#pragma unroll 1
            for (int c = 0; c < Side::kChunks; ++c)
#pragma unroll
                for (int piece = 0; piece < 8; ++piece) store_float4(tile + (c * ROWS + r) * 128 + 16 * piece, zeros);
        }
        async_fence();
        barrier_sync(barrier, 128);
    }
}

// A warp's score tile, or what was made of one, times the streamed rows that it belongs to.
#pragma once
#include "tile/fragment.cuh"

// A strip of TILES accumulators as operands A.
template <int CODE, int TILES>
using StripA = FragmentA<CODE>[TILES / 2][kWarpTiles];

template <int CODE, int TILES>
__device__ inline void strip_to_a(StripA<CODE, TILES>& a, const Strip<TILES>& x) {
#pragma unroll
    for (int k = 0; k < TILES / 2; ++k)
#pragma unroll
        for (int m = 0; m < kWarpTiles; ++m) accumulators_to_a<CODE>(a[k][m], x[m][2 * k], x[m][2 * k + 1]);
}

// out += a * streamed tile. The matrix unit truncates when it adds; where operands are planes, a tile's many small
// products are therefore summed apart, and join the long sum by one rounded addition. Beyond a head dim of 192 there
// are no registers for that.
template <int OUT_TILES, int TILES, class T>
__device__ inline void accumulate(Strip<OUT_TILES>& out, const StripA<T::kCode, TILES>& a, T streamed) {
    if constexpr (T::E::kPlanes == 1 || OUT_TILES > 24) {
#pragma unroll
        for (int k = 0; k < TILES / 2; ++k)
#pragma unroll
            for (int d = 0; d < OUT_TILES; d += 2) {
                FragmentB2<T::kCode> b;
                load_b2_transposed(b, streamed, 16 * k, 8 * d);
#pragma unroll
                for (int m = 0; m < kWarpTiles; ++m) {
                    multiply(out[m][d], a[k][m], b, 0);
                    multiply(out[m][d + 1], a[k][m], b, 1);
                }
            }
    } else {
#pragma unroll
        for (int d = 0; d < OUT_TILES; d += 2) {
            Strip<2> part;
            clear<2>(part);
#pragma unroll
            for (int k = 0; k < TILES / 2; ++k) {
                FragmentB2<T::kCode> b;
                load_b2_transposed(b, streamed, 16 * k, 8 * d);
#pragma unroll
                for (int m = 0; m < kWarpTiles; ++m) {
                    multiply(part[m][0], a[k][m], b, 0);
                    multiply(part[m][1], a[k][m], b, 1);
                }
            }
#pragma unroll
            for (int m = 0; m < kWarpTiles; ++m)
#pragma unroll
                for (int which = 0; which < 2; ++which)
#pragma unroll
                    for (int e = 0; e < 4; ++e) out[m][d + which][e] += part[m][which][e];
        }
    }
}

// Stores the two neighbouring elements from `column` on of a row of T, written as E, at `address`, as far as the row
// has them.
template <class T, class E = typename T::E>
__device__ inline void store_two(u64 address, int column, float x, float y) {
    if (T::kHeadDim % 2 == 0 && column < T::kHeadDim) {
        E::store_pair(address, x, y);
    } else {
        if (column < T::kHeadDim) E::store(address, x);
        if (column + 1 < T::kHeadDim) E::store(address + E::kBytes, y);
    }
}

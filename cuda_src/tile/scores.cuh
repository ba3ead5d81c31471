// The score tile of one warp: stationary rows against streamed rows, summed over the head dim.
#pragma once
#include "tile/fragment.cuh"

// out += stationary rows from `row` on * streamed rows^T over the steps [first, end) of the head dim. Unrolling lets
// loads run ahead of products and costs registers and code: the plan says how far. The small products of planes are
// summed on their own: each sum then sees one truncating addition per step instead of one per plane pair.
template <int TILES, class T>
__device__ inline void add_scores(Strip<TILES>& out, T stationary, int row, T streamed, int first, int end) {
    constexpr bool split = T::E::kPlanes > 1;
    Strip<split ? TILES : 1> small;
    if constexpr (split) clear<TILES>(small);
#pragma unroll(SKL_UNROLL)
    for (int k = first; k < end; ++k) {
        FragmentA<T::kCode> a[kWarpTiles];
#pragma unroll
        for (int m = 0; m < kWarpTiles; ++m) load_a(a[m], stationary, row + 16 * m, 16 * k);
#pragma unroll
        for (int n = 0; n < TILES; n += 2) {
            FragmentB2<T::kCode> b;
            load_b2(b, streamed, 8 * n, 16 * k);
#pragma unroll
            for (int m = 0; m < kWarpTiles; ++m)
#pragma unroll
                for (int which = 0; which < 2; ++which) {
                    multiply_leading<T::kCode>(out[m][n + which], a[m], b, which);
                    if constexpr (split) multiply_rest<T::kCode>(small[m][n + which], a[m], b, which);
                }
        }
    }
    if constexpr (split) add<TILES>(out, small);
}

// out = stationary rows from `row` on * streamed rows^T.
template <int TILES, class T>
__device__ inline void scores(Strip<TILES>& out, T stationary, int row, T streamed) {
    constexpr int depth = T::kDepth / 16;
    clear<TILES>(out);
    if constexpr (depth <= kLongDepth) {
        add_scores<TILES>(out, stationary, row, streamed, 0, depth);
    } else {
        Strip<TILES> rest;
        clear<TILES>(rest);
        add_scores<TILES>(out, stationary, row, streamed, 0, depth / 2);
        add_scores<TILES>(rest, stationary, row, streamed, depth / 2, depth);
        add<TILES>(out, rest);
    }
}

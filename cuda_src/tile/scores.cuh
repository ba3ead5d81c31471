// The score tile of one warp: stationary rows against streamed rows, summed over the head dim.
#pragma once
#include "tile/fragment.cuh"

// out = stationary rows from `row` on * streamed rows^T. Unrolling lets loads run ahead of products and costs registers and code: the
// plan says how far. The matrix unit truncates when it adds, so the small products of planes are summed on their own:
// each sum then sees one addition per step instead of one per plane pair.
template <int TILES, class T>
__device__ inline void scores(Strip<TILES>& out, T stationary, int row, T streamed) {
    constexpr int depth = T::kDepth / 16;
    constexpr bool split = T::E::kPlanes > 1;
    Strip<split ? TILES : 1> small;
    clear<TILES>(out);
    if constexpr (split) clear<TILES>(small);
#pragma unroll(SKL_UNROLL)
    for (int k = 0; k < depth; ++k) {
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
    if constexpr (split) {
#pragma unroll
        for (int m = 0; m < kWarpTiles; ++m)
#pragma unroll
            for (int n = 0; n < TILES; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[m][n][e] += small[m][n][e];
    }
}

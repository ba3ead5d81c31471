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

// Four lanes of a row have a pair of each of four tiles; each gets all of one, that of its own number among them.
__device__ inline uint4 exchange_pairs(const u32 (&x)[4]) {
    const bool odd = lane_id() & 1, upper = lane_id() & 2;
    const u32 a = __shfl_xor_sync(~0u, odd ? x[0] : x[1], 1), b = __shfl_xor_sync(~0u, odd ? x[2] : x[3], 1);
    const u32 low[2] = {odd ? a : x[0], odd ? x[1] : a}, high[2] = {odd ? b : x[2], odd ? x[3] : b};
    const u32 c = __shfl_xor_sync(~0u, upper ? low[0] : high[0], 2),
              d = __shfl_xor_sync(~0u, upper ? low[1] : high[1], 2);
    return upper ? make_uint4(c, d, high[0], high[1]) : make_uint4(low[0], low[1], c, d);
}

// Stores a row of T at `address`, of which the lane has elements `half` of each tile of x, times `factor`, or zeros
// where it is not kept. All lanes of a warp come here, `there` says whether the lane's row does. Elements of two bytes
// are written 16 bytes at a time, as far as the row has 32 columns: by pairs, a warp has 16 bytes for each of eight
// rows, which keeps the cache busy four times as long. That counts where blocks are short, as beside a pattern.
template <class T, int TILES>
__device__ inline void store_row(u64 address, bool there, const float (&x)[TILES][4], int half, float factor,
                                 bool kept) {
    using E = typename T::E;
    constexpr int kTogether = E::kBytes == 2 && T::kHeadDim % 8 == 0 ? T::kHeadDim / 32 * 4 : 0;
    const auto element = [&x, half, factor, kept](int tile, int column) {
        return kept ? x[tile][Accumulators::element(half, column)] * factor : 0.f;
    };
    if constexpr (kTogether > 0) {
#pragma unroll
        for (int d = 0; d < kTogether; d += 4) {
            u32 pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                u32 planes[1];
                E::split(element(d + i, 0), element(d + i, 1), planes);
                pairs[i] = planes[0];
            }
            const uint4 eight = exchange_pairs(pairs);
            if (there) *reinterpret_cast<uint4*>(address + 8 * (d + Accumulators::pair(lane_id())) * E::kBytes) = eight;
        }
    }
#pragma unroll
    for (int d = kTogether; d < TILES; ++d) {
        const int column = 8 * d + Accumulators::first_column(lane_id());
        if (there) store_two<T>(address + column * E::kBytes, column, element(d, 0), element(d, 1));
    }
}

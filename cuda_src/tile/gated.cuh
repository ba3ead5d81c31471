// Gradients of the indexer's logits on their way to a product: gated by scores, weighted by columns.
#pragma once
#include "common/math.cuh"
#include "tile/fragment.cuh"

// Whether the gate of a score lets its gradient pass. That of a NaN is open, for the gradient is NaN too.
__device__ inline bool open_gate(float s) { return !(s <= 0.f); }

// A pair of 16-bit elements where the gates of both are asked.
__device__ inline u32 open_pair(float left, float right) {
    return (open_gate(left) ? 0xffffu : 0u) | (open_gate(right) ? 0xffff0000u : 0u);
}

// Scores lie as accumulators of two neighbouring products do, and so does the operand A.
template <int CODE>
__device__ inline void close_gates(FragmentA<CODE>& a, const float (&left)[4], const float (&right)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float (&x)[4] = i < 2 ? left : right;
        const u32 open = open_pair(x[2 * (i & 1)], x[2 * (i & 1) + 1]);
#pragma unroll
        for (int p = 0; p < Element<CODE>::kPlanes; ++p) a.r[p][i] &= open;
    }
}

// Two neighbouring elements of a tile.
template <class T>
__device__ inline float2 pair_of(T tile, int row, int column) {
    if constexpr (T::kCode == kF32) {
        return shared_float2(tile.address(row, column));
    } else {
        return T::E::widen(*reinterpret_cast<const u32*>(__cvta_shared_to_generic(tile.address(row, column))));
    }
}

// Rows k..k+15 of the strip's tile as the depth, its columns key..key+15 as the rows of operand A, each row of the
// strip times its weight; `weights` is where those of the tile lie. A gate lets an element pass or makes it 0.
template <bool GATED, class T>
__device__ inline void load_weighted_a(FragmentA<T::kCode>& a, T strip, int key, int k, u32 weights,
                                       const float (&left)[4], const float (&right)[4]) {
    constexpr int code = T::kCode;
    const int lane = lane_id(), query = k + 2 * (lane & 3);
    u32 raw[4];
    if constexpr (code != kF32)
        ldmatrix_x4_trans(raw, strip.address(k + (lane & 7) + (lane >> 4) * 8, key + ((lane >> 3) & 1) * 8));
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int q = query + (i >> 1) * 8;
        const float2 w = shared_float2(weights + 4 * q);
        float lo, hi;
        if constexpr (code == kF32) {
            const int column = key + lane / 4 + (i & 1) * 8;
            lo = shared_float(strip.address(q, column));
            hi = shared_float(strip.address(q + 1, column));
        } else {
            static_assert(code == kBf16, "plan: strips are bfloat16 or float32");
            const float2 x = T::E::widen(raw[i]);
            lo = x.x;
            hi = x.y;
        }
        // No weight is asked where there is no gradient: those of such rows may be NaN.
        lo = lo == 0.f ? 0.f : lo * w.x;
        hi = hi == 0.f ? 0.f : hi * w.y;
        const float (&x)[4] = i < 2 ? left : right;
        if constexpr (GATED) {
            lo = open_gate(x[2 * (i & 1)]) ? lo : 0.f;
            hi = open_gate(x[2 * (i & 1) + 1]) ? hi : 0.f;
        }
        u32 planes[Element<code>::kPlanes];
        Element<code>::split(lo, hi, planes);
#pragma unroll
        for (int p = 0; p < Element<code>::kPlanes; ++p) a.r[p][i] = planes[p];
    }
}

// Elements of an operand that are not finite become 0: gradients that see them are NaN already, and for others 0 times
// the element must be 0.
template <int CODE>
__device__ inline void clear_non_finite(FragmentB2<CODE>& b) {
#pragma unroll
    for (int p = 0; p < Element<CODE>::kPlanes; ++p)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // Planes of a float that is not finite are not either.
            const u32 x = b.r[p][i];
            if ((x & 0x7f80u) == 0x7f80u) b.r[p][i] &= 0xffff0000u;
            if ((x & 0x7f800000u) == 0x7f800000u) b.r[p][i] &= 0xffffu;
        }
}

// out += a * rows k..k+15 of the tile.
template <int TILES, class T>
__device__ inline void add_product(Strip<TILES>& out, const FragmentA<T::kCode>& a, T tile, int k, bool broken) {
#pragma unroll
    for (int d = 0; d < TILES; d += 2) {
        FragmentB2<T::kCode> b;
        load_b2_transposed(b, tile, k, 8 * d);
        if (broken) clear_non_finite<T::kCode>(b);
        multiply(out[0][d], a, b, 0);
        multiply(out[0][d + 1], a, b, 1);
    }
}

// Matrix fragments of one warp, and the tile in shared memory they come from.
//
// Accumulators lie as accumulators.cuh says. SwizzledTile A (16x16): registers 0..3 = (rows 0-7, depth 0-7), (rows
// 8-15, depth 0-7), (rows 0-7, depth 8-15), (rows 8-15, depth 8-15), so two neighbouring accumulators are one A
// fragment: products chain without leaving the registers.
#pragma once
#include "common/config.cuh"
#include "tile/accumulators.cuh"
#include "tile/element.cuh"

// One operand tile [rows][D] in shared memory. A row is padded by 16 bytes: its length is then an odd number of 16-byte
// units, so the eight rows that one matrix load touches fall into eight different bank groups.
template <int CODE, int DIM>
struct Tile {
    using E = Element<CODE>;
    static constexpr int kCode = CODE;
    static constexpr int kHeadDim = DIM;                    // as the caller has it
    static constexpr int kDepth = round_up(DIM, 16);        // as the matrix unit needs it; the rest is zero
    static constexpr int kPitch = kDepth * E::kBytes + 16;  // bytes
    static constexpr int bytes(int rows) { return rows * kPitch; }
    u32 base;  // shared-memory address

    __device__ u32 address(int row, int column) const { return base + row * kPitch + column * E::kBytes; }
};

template <int CODE>
struct FragmentA {
    u32 r[Element<CODE>::kPlanes][4];
};

// Two neighbouring 16x8 B operands: [plane][2 * which + half of the depth].
template <int CODE>
struct FragmentB2 {
    u32 r[Element<CODE>::kPlanes][4];
};

__device__ inline float2 shared_float2(u32 address) {
    return *reinterpret_cast<const float2*>(__cvta_shared_to_generic(address));
}
__device__ inline float4 shared_float4(u32 address) {
    return *reinterpret_cast<const float4*>(__cvta_shared_to_generic(address));
}
__device__ inline float shared_float(u32 address) {
    return *reinterpret_cast<const float*>(__cvta_shared_to_generic(address));
}

// Rows row..row+15, depth k..k+15 as operand A.
template <class T>
__device__ inline void load_a(FragmentA<T::kCode>& a, T tile, int row, int k) {
    const int lane = lane_id();
    if constexpr (T::kCode != kF32) {
        ldmatrix_x4(a.r[0], tile.address(row + (lane & 15), k + (lane >> 4) * 8));
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 x =
                shared_float2(tile.address(row + lane / 4 + (i & 1) * 8, k + (i >> 1) * 8 + (lane & 3) * 2));
            u32 planes[T::E::kPlanes];
            T::E::split(x.x, x.y, planes);
#pragma unroll
            for (int p = 0; p < T::E::kPlanes; ++p) a.r[p][i] = planes[p];
        }
    }
}

// Rows n..n+15 of the tile as two operands B (depth k..k+15): scores against 16 streamed rows.
template <class T>
__device__ inline void load_b2(FragmentB2<T::kCode>& b, T tile, int n, int k) {
    const int lane = lane_id();
    if constexpr (T::kCode != kF32) {
        ldmatrix_x4(b.r[0], tile.address(n + (lane & 7) + (lane >> 4) * 8, k + ((lane >> 3) & 1) * 8));
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 x = shared_float2(tile.address(n + lane / 4 + (i >> 1) * 8, k + (i & 1) * 8 + (lane & 3) * 2));
            u32 planes[T::E::kPlanes];
            T::E::split(x.x, x.y, planes);
#pragma unroll
            for (int p = 0; p < T::E::kPlanes; ++p) b.r[p][i] = planes[p];
        }
    }
}

// Head-dim columns d..d+15 of the tile as two operands B whose depth is the rows k..k+15: score gradients times the
// tile.
template <class T>
__device__ inline void load_b2_transposed(FragmentB2<T::kCode>& b, T tile, int k, int d) {
    const int lane = lane_id();
    if constexpr (T::kCode != kF32) {
        ldmatrix_x4_trans(b.r[0], tile.address(k + (lane & 15), d + (lane >> 4) * 8));
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = k + (i & 1) * 8 + (lane & 3) * 2, column = d + (i >> 1) * 8 + lane / 4;
            u32 planes[T::E::kPlanes];
            T::E::split(shared_float(tile.address(row, column)), shared_float(tile.address(row + 1, column)), planes);
#pragma unroll
            for (int p = 0; p < T::E::kPlanes; ++p) b.r[p][i] = planes[p];
        }
    }
}

// d (16 x 8) += the product of the leading planes, `which` of the two operands B.
template <int CODE>
__device__ inline void multiply_leading(float (&d)[4], const FragmentA<CODE>& a, const FragmentB2<CODE>& b, int which) {
    Element<CODE>::multiply(d, a.r[0], b.r[0][2 * which], b.r[0][2 * which + 1]);
}

// d (16 x 8) += all other products of planes that matter, the smallest first.
template <int CODE>
__device__ inline void multiply_rest(float (&d)[4], const FragmentA<CODE>& a, const FragmentB2<CODE>& b, int which) {
    using E = Element<CODE>;
#pragma unroll
    for (int order = E::kPlanes - 1; order > 0; --order) {
#pragma unroll
        for (int i = 0; i <= order; ++i)
            E::multiply(d, a.r[i], b.r[order - i][2 * which], b.r[order - i][2 * which + 1]);
    }
}

// d (16 x 8) += a * b.
template <int CODE>
__device__ inline void multiply(float (&d)[4], const FragmentA<CODE>& a, const FragmentB2<CODE>& b, int which) {
    multiply_rest(d, a, b, which);
    multiply_leading(d, a, b, which);
}

// The accumulators of two neighbouring 16x8 products as one operand A.
template <int CODE>
__device__ inline void accumulators_to_a(FragmentA<CODE>& a, const float (&left)[4], const float (&right)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float (&x)[4] = i < 2 ? left : right;
        u32 planes[Element<CODE>::kPlanes];
        Element<CODE>::split(x[2 * (i & 1)], x[2 * (i & 1) + 1], planes);
#pragma unroll
        for (int p = 0; p < Element<CODE>::kPlanes; ++p) a.r[p][i] = planes[p];
    }
}

// Accumulators of kWarpTiles x TILES products of 16x8.
template <int TILES>
using Strip = float[kWarpTiles][TILES][4];

template <int TILES>
__device__ inline void clear(Strip<TILES>& x) {
#pragma unroll
    for (int m = 0; m < kWarpTiles; ++m)
#pragma unroll
        for (int n = 0; n < TILES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[m][n][e] = 0.f;
}

template <int TILES>
__device__ inline void add(float (&x)[TILES][4], const float (&y)[TILES][4]) {
#pragma unroll
    for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[n][e] += y[n][e];
}
template <int TILES>
__device__ inline void add(Strip<TILES>& x, const Strip<TILES>& y) {
#pragma unroll
    for (int m = 0; m < kWarpTiles; ++m) add<TILES>(x[m], y[m]);
}

// The matrix unit truncates when it adds to an accumulator, so a long head dim is summed in two halves.
constexpr int kLongDepth = 16;  // steps of 16: beyond a head dim of 256

// The elements of one row that this lane holds: one of the lane's rows in a strip of accumulators.
template <int TILES>
struct FragmentRow {
    const float (*tiles)[4];
    int row;
    static constexpr int kCount = 2 * TILES;
    __device__ float operator[](int i) const { return tiles[i / 2][Accumulators::element(row, i % 2)]; }
};

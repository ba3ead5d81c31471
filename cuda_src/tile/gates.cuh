// Gradients of the indexer's logits as operands A of a warpgroup's products, for each head with the gates that the
// score kernels have left (tile/strip.cuh): no score is computed again, and no element touched but by a mask.
#pragma once
#include "ptx/mma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/fragment.cuh"
#include "tile/strip.cuh"

// A warp's 16 rows of a 64 x 64 tile: four operands A.
using Gradients64 = u32[4][4];

// Row tiles of queries: of the tile's rows the warp's, and as depth its keys.
__device__ inline void load_rows_of_strip(Gradients64& d, u32 tile, int warp) {
#pragma unroll
    for (int k = 0; k < 4; ++k) ldmatrix_x4(d[k], tile + (4 * warp + k) * 512 + lane_id() * 16);
}
// The same with the gates closed that the lane's word says are closed.
__device__ inline void gate_rows(Gradients64& a, const Gradients64& d, u32 word) {
#pragma unroll
    for (int s = 0; s < 8; ++s) {
        const u32 x = word << s;  // the gates of pairs s and s + 8 are the highest bits of bytes
        a[s / 4][s % 4] = d[s / 4][s % 4] & select_bytes<0xbb99>(x, x);
        a[2 + s / 4][s % 4] = d[2 + s / 4][s % 4] & select_bytes<0xaa88>(x, x);
    }
}

// Tiles of keys: of the tile's keys the warp's, and as depth the rows, transposed on the way.
__device__ inline void load_keys_of_strip(Gradients64& d, u32 tile, int warp) {
    const int lane = lane_id(), piece = (lane >> 4) + 2 * (lane >> 3 & 1);
#pragma unroll
    for (int k = 0; k < 4; ++k) ldmatrix_x4_trans(d[k], tile + (4 * k + warp) * 512 + piece * 128 + (lane & 7) * 16);
}
// A lane has rows of four warps that wrote words, two neighbouring rows of each, and of their gates those of its two
// keys, which are half of one byte. Bytes of the same rows make a word, and then gates are the highest bits of bytes.
__device__ inline void gate_keys(Gradients64& a, const Gradients64& d, u32 words, int warp) {
    const int lane = lane_id();
    const u32 mine = (warp < 2 ? 1 : 0) + 2 * (lane >> 2 & 1), byte_of_both = mine | (4 + mine) << 4;
    const u32 from = words + 4 * (8 * (lane & 3) + 2 * (lane >> 3));
    float2 x[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) x[k] = shared_float2(from + 128 * k);
    const auto joined = [byte_of_both, warp](float w0, float w1, float w2, float w3) {
        return select_bytes<0x5410>(select_bytes(__float_as_uint(w0), __float_as_uint(w1), byte_of_both),
                                    select_bytes(__float_as_uint(w2), __float_as_uint(w3), byte_of_both))
               << 4 * (warp & 1);
    };
    const u32 even = joined(x[0].x, x[1].x, x[2].x, x[3].x), odd = joined(x[0].y, x[1].y, x[2].y, x[3].y);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const u32 lo = even << i, hi = odd << i;
        const int r = (i >> 1) + 2 * (i & 1);
        a[0][r] = d[0][r] & select_bytes<0xcc88>(lo, hi);
        a[1][r] = d[1][r] & select_bytes<0xdd99>(lo, hi);
        a[2][r] = d[2][r] & select_bytes<0xeeaa>(lo, hi);
        a[3][r] = d[3][r] & select_bytes<0xffbb>(lo, hi);
    }
}

// Tiles of 64 rows of the student's queries or keys as kernels/indexer_tiles.cu leaves them: chunks of 64 columns, as
// products read them, in bfloat16 whatever they were, for these are factors of gradients.
constexpr int kOperandChunks = ceil_div(SKL_S_DIM, 64), kOperandBytes = kOperandChunks * 64 * 128;
constexpr int kOperandTiles = round_up(SKL_S_DIM, 16) / 8;  // columns that a product has, by eight
static_assert(kOperandTiles <= 16, "plan: the sums of a row are one product wide");

// Issues out += a * tile.
__device__ inline void multiply_operand(float (&out)[kOperandTiles][4], const Gradients64& a, u32 tile) {
    const u64 rows = swizzled_descriptor(tile, 64 * 128);
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma<false, 1>(out, a[k], rows + (k * 16 * 128 >> 4), 1);
}

// The same of N products, each to sums of its own, and done when it returns.
template <int N>
__device__ inline void multiply_operands(float (&out)[N][kOperandTiles][4], Gradients64 (&a)[N], u32 tile) {
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
        for (int k = 0; k < 4; ++k) fence_operand(a[i][k]);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < N; ++i) multiply_operand(out[i], a[i], tile);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < N; ++i) fence_accumulators(out[i]);
}
// Gates that are all open.
__device__ inline void gate_nothing(Gradients64& a, const Gradients64& d) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
        for (int r = 0; r < 4; ++r) a[k][r] = d[k][r];
}
template <int N>
__device__ inline void clear_sums(float (&out)[N][kOperandTiles][4]) {
#pragma unroll
    for (int i = 0; i < N; ++i)
#pragma unroll
        for (int d = 0; d < kOperandTiles; ++d)
#pragma unroll
            for (int e = 0; e < 4; ++e) out[i][d][e] = 0.f;
}

// SwizzledTile tiles of the Hopper kernels: chunks of 64 columns, each [rows][64] 16-bit elements in rows of 128 bytes,
// the 16-byte pieces of row r permuted by XOR with r % 8 (what TMA writes and wgmma reads as the 128-byte swizzle).
#pragma once
#include "common/args.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/mma.cuh"
#include "ptx/shared.cuh"
#include "ptx/tma.cuh"
#include "ptx/wgmma.cuh"
#include "tile/element.cuh"

template <int CODE, int DIM>
struct SwizzledTile {
    static_assert(CODE == kBf16 || CODE == kF16, "plan: the Hopper kernels multiply 16-bit elements");
    static_assert(DIM % 8 == 0, "plan: tensor maps need rows of whole 16-byte pieces");
    static constexpr int kCode = CODE;
    static constexpr int kDim = DIM;
    static constexpr bool kHalf = CODE == kF16;
    static constexpr int kSteps = ceil_div(DIM, 16);   // products of depth 16
    static constexpr int kChunks = ceil_div(DIM, 64);  // columns beyond DIM arrive as zeros
    static constexpr int bytes(int rows) { return kChunks * rows * 128; }
    // What sides have that are given instead (tile/given_swizzled.cuh).
    enum : int { kBoxKeys = 1, kBoxBytes = 0 };
    static constexpr int boxes(int) { return 0; }
    template <class... Args>
    __device__ static void read_rows(Args&&...) {}
    template <class... Args>
    __device__ static void read_columns(Args&&...) {}
};

// Boxes of 64 queries and 128 bytes of keys, from a pair on, announced on the barrier by the caller.
template <class Side>
__device__ inline void load_boxes(u32 shared, const TensorMap& map, u32 barrier, int boxes, int query, int key,
                                  int head, int batch) {
    for (int i = 0; i < boxes; ++i)
        tma_load(shared + i * Side::kBoxBytes, map, barrier, key + i * Side::kBoxKeys, query, head, batch);
}

// Where a lane puts its part of a warp's 16 rows of a tile, `row` the first of them, and one operand A of 16 columns
// there: 16 columns further are 32 bytes further in the row, under the swizzle too.
__device__ inline u32 fragment_address(u32 tile, int row, int lane) {
    const int mine = row + (lane & 15);
    return tile + mine * 128 + ((lane >> 4 ^ (mine & 7)) << 4);
}
__device__ inline void store_fragment(u32 to, int k, const u32 (&fragment)[4]) { stmatrix_x4(to ^ (k << 5), fragment); }

// All chunks of `ROWS` rows from (row, head, batch), announced on the barrier by the caller.
template <int ROWS>
__device__ inline void load_chunks(u32 shared, const TensorMap& map, u32 barrier, int first_chunk, int chunks, int row,
                                   int head, int batch) {
    for (int c = 0; c < chunks; ++c)
        tma_load(shared + c * ROWS * 128, map, barrier, 64 * (first_chunk + c), row, head, batch);
}

// The first STEPS 16-column steps of a warp's 16 stationary rows, in registers as operand A. A product of 64 x 64 x 16
// that reads both operands from shared memory takes all that it delivers; one that reads a single operand leaves room
// for everybody else.
template <int STEPS>
struct HeldRows {
    u32 step[STEPS > 0 ? STEPS : 1][4];

    // From a tile of ROWS rows; `row` is the warp's first.
    template <int ROWS>
    __device__ void load(u32 tile, int row) {
        const int mine = row + (threadIdx.x & 15), piece = threadIdx.x / 16 & 1;
#pragma unroll
        for (int k = 0; k < STEPS; ++k)
            ldmatrix_x4(step[k], tile + (k / 4 * ROWS + mine) * 128 + (((2 * (k % 4) + piece) ^ (mine & 7)) << 4));
    }
};

// Issues scores = stationary rows * streamed rows^T over CHUNKS chunks of the head dim, `first_chunk` on; the scores
// start afresh with chunk `start`. Descriptors of the warpgroup's rows in the first chunk of a tile of ROWS rows, and
// of the chunk `first_chunk` of as many streamed rows as the scores have columns. Of stationary rows, the `held` steps
// come from there.
template <class Side, int ROWS, int CHUNKS, int TILES, int HELD = 0>
__device__ inline void multiply_rows(float (&scores)[TILES][4], u64 stationary, u64 streamed, int first_chunk,
                                     int start = 0, const HeldRows<HELD>& held = {}) {
#pragma unroll
    for (int k = 0; k < 4 * CHUNKS; ++k) {
        const int step = 4 * first_chunk + k;
        const u64 columns = streamed + ((k / 4 * TILES * 1024 + k % 4 * 32) >> 4);
        if (step < HELD)
            wgmma<Side::kHalf, 0>(scores, held.step[step < HELD ? step : 0], columns, step > 4 * start);
        else if (step < Side::kSteps)
            wgmma<Side::kHalf, 0, 0>(scores, stationary + ((step / 4 * ROWS * 128 + step % 4 * 32) >> 4), columns,
                                     step > 4 * start);
    }
}

// A side that is given, as the Hopper kernels have it: there are no products, and tensor copies bring the numbers of its
// pairs themselves, in boxes of 64 queries x 128 bytes of keys in the 128-byte swizzle. Lanes read from there what
// accumulators of a product would have.
#pragma once
#include "tile/fragment.cuh"
#include "tile/swizzled.cuh"

template <int CODE>
struct SwizzledTile<CODE, 0> {
    using E = Element<CODE>;
    enum : int { kCode = CODE, kDim = 0, kSteps = 0, kChunks = 0 };
    static constexpr bool kHalf = false;
    enum : int { kBoxKeys = 128 / E::kBytes, kBoxBytes = 64 * 128 };
    static constexpr int bytes(int) { return 0; }  // of operands
    static constexpr int boxes(int keys) { return keys / kBoxKeys; }

    // Where a pair is, of neighbouring boxes.
    __device__ static u32 place(u32 boxes, int query, int key) {
        const int byte = key * E::kBytes;
        return boxes + byte / 128 * kBoxBytes + query * 128 + (byte % 128 ^ (query & 7) << 4);
    }

    // A box, for accumulators whose rows are queries and of which it has all; `query` is the lane's first.
    template <int TILES>
    __device__ static void read_rows(float (&x)[TILES][4], int box, u32 at, int query) {
        const u32 first = place(at, query, Accumulators::first_column(lane_id()));
#pragma unroll
        for (int n = 0; n < kBoxKeys / 8; ++n)
#pragma unroll
            for (int half = 0; half < Accumulators::kRows; ++half) {
                const float2 two = pair((first ^ 8 * n * E::kBytes) + Accumulators::below(half) * 128);
                float (&to)[4] = x[box * (kBoxKeys / 8) + n];
                to[Accumulators::element(half, 0)] = two.x;
                to[Accumulators::element(half, 1)] = two.y;
            }
    }
    // All boxes of a tile, for accumulators whose columns are its 64 queries; `key` is the lane's first.
    template <int TILES>
    __device__ static void read_columns(float (&x)[TILES][4], u32 at, int key) {
        const u32 first = place(at, Accumulators::first_column(lane_id()), key);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            // The next query and the lane's other key change bits that are not set yet: one register has all four places.
            const int query = Accumulators::column(e), other = Accumulators::below(Accumulators::row(e)) * E::kBytes;
            const u32 mine = (first ^ (query << 4) ^ other) + query * 128;
#pragma unroll
            for (int c = 0; c < TILES; ++c) x[c][e] = single(mine + c * 8 * 128);
        }
    }

private:
    __device__ static float2 pair(u32 at) {
        if constexpr (E::kBytes == 4)
            return shared_float2(at);
        else
            return E::widen(*reinterpret_cast<const u32*>(__cvta_shared_to_generic(at)));
    }
    __device__ static float single(u32 at) {
        if constexpr (E::kBytes == 4)
            return shared_float(at);
        else
            return E::widen(*reinterpret_cast<const u16*>(__cvta_shared_to_generic(at))).x;
    }
};

// Long lists are split between blocks (WorkTile). Each split leaves its sums in memory, and whichever comes last adds
// those of all, in their order, so that the result does not depend on who came last. Warps own their rows, so each does
// this on its own:
//
//   arrivals   [slot][warp] int, zero before the launch; a tile uses the slot of its first split
//   sums       [slot][four floats of every thread, one after the other]
//
// where slots belong to the splits of a batch entry and head. Only lists are split.
#pragma once
#include "common/args.cuh"
#include "common/config.cuh"
#include "masks/interface.cuh"
#include "tile/fragment.cuh"

// Whether the block has anything to do. Where there is no memory for sums the first split takes the whole tile.
__device__ inline bool limit_list_splits(WorkTile& work, const GradientArgs& args) {
    if (args.partial_sums == 0 && work.list_splits > 1) {
        work.list_splits = work.list_split == 0;
        work.streamed = {0, kNoLimit};
    }
    return work.list_splits > 0;
}

// Adds up what the splits of a tile have; `pair` counts the block's batch entry and head. True for the warp that has
// the total then, and nobody else.
template <int TILES>
__device__ inline bool add_partials(float (&out)[TILES][4], const WorkTile& work, int pair, const GradientArgs& args) {
    static_assert(Partials::kSums == 4 * TILES * kThreads && Partials::kArrivals == kWarps, "plan: what a slot holds");
    const i64 first = static_cast<i64>(pair) * args.partial_slots + work.partial_slot;
    float4* const sums = reinterpret_cast<float4*>(args.partial_sums) + first * (TILES * kThreads) + threadIdx.x;
    float4* const mine = sums + static_cast<i64>(work.list_split) * (TILES * kThreads);
#pragma unroll
    for (int i = 0; i < TILES; ++i) mine[i * kThreads] = make_float4(out[i][0], out[i][1], out[i][2], out[i][3]);
    __threadfence();
    __syncwarp();
    int before = 0;
    if (lane_id() == 0)
        before = atomicAdd(reinterpret_cast<int*>(args.partial_arrivals) + first * kWarps + threadIdx.x / 32, 1);
    if (__shfl_sync(~0u, before, 0) < work.list_splits - 1) return false;
    __threadfence();
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[i][e] = 0.f;
#pragma unroll 1
    for (int list_split = 0; list_split < work.list_splits; ++list_split) {
        const float4* const part = sums + static_cast<i64>(list_split) * (TILES * kThreads);
#pragma unroll
        for (int i = 0; i < TILES; ++i) {
            const float4 x = __ldcg(part + i * kThreads);
            out[i][0] += x.x;
            out[i][1] += x.y;
            out[i][2] += x.z;
            out[i][3] += x.w;
        }
    }
    return true;
}

// Blocks that share a work tile (tile/shares.cuh): each leaves its sums in memory, and whichever comes last adds those
// of all, in their order, so that the result does not depend on who came last. The few shares of a list are added at
// once. Others can be many, and are added up a tree, kFan to a node, so that nobody has many to add. Warps own their
// rows, so each does this on its own:
//
//   arrivals   [slot][warp] int, zero before the launch
//   sums       [slot][four floats of every thread, one after the other]
//
// where slots belong to the shares of the tiles of a batch entry and head. A node has the slot of its first share; who
// have come there are counted in as many slots further as it is levels above the shares that have come, so that each
// slot counts for one node only.
#pragma once
#include "common/args.cuh"
#include "common/config.cuh"
#include "masks/interface.cuh"
#include "ptx/bulk.cuh"
#include "tile/fragment.cuh"
#include "tile/shares.cuh"

constexpr int kFan = 8;

// Sums of a thread in the slots of a tile.
template <int TILES>
struct PartialSums {
    float4* sums;   // of the first slot
    int* arrivals;  // of the first slot and the warp

    // Leaves those of child `mine` of a node, and counts in slot `count`. The last of its children, which are
    // [begin, end) and `apart` slots from one another, gets all of them and hears true.
    __device__ bool add(float (&out)[TILES][4], int mine, int begin, int end, int apart, int count) const {
        float4* const place = at(mine * apart);
#pragma unroll
        for (int i = 0; i < TILES; ++i) place[i * kThreads] = make_float4(out[i][0], out[i][1], out[i][2], out[i][3]);
        __threadfence();
        __syncwarp();
        int before = 0;
        if (lane_id() == 0) before = atomicAdd(arrivals + count * kWarps, 1);
        if (__shfl_sync(~0u, before, 0) < end - begin - 1) return false;
        __threadfence();
#pragma unroll
        for (int i = 0; i < TILES; ++i)
#pragma unroll
            for (int e = 0; e < 4; ++e) out[i][e] = 0.f;
#pragma unroll 1
        for (int child = begin; child < end; ++child) {
            const float4* const part = at(child * apart);
#pragma unroll
            for (int i = 0; i < TILES; ++i) {
                if (i % 8 == 0) __syncwarp();  // or more reads are under way than there are registers for
                const float4 x = __ldcg(part + i * kThreads);
                out[i][0] += x.x;
                out[i][1] += x.y;
                out[i][2] += x.z;
                out[i][3] += x.w;
            }
        }
        return true;
    }

private:
    __device__ float4* at(int slot) const { return sums + static_cast<i64>(slot) * (TILES * kThreads); }
};

// Adds what a share has to the sums of all shares of its tile, which are zero before the launch, in whichever order
// they come: a tile has one slot. True for the warp that has the total then, which came last.
template <int TILES>
__device__ inline bool add_to_total(float (&out)[TILES][4], int slot, int shares, const GradientArgs& args) {
    float4* const place =
        reinterpret_cast<float4*>(args.partial_sums) + static_cast<i64>(slot) * (TILES * kThreads) + threadIdx.x;
#pragma unroll
    for (int i = 0; i < TILES; ++i) vector_add(place + i * kThreads, out[i]);
    __threadfence();
    __syncwarp();
    int before = 0;
    if (lane_id() == 0)
        before = atomicAdd(reinterpret_cast<int*>(args.partial_arrivals) + slot * kWarps + threadIdx.x / 32, 1);
    if (__shfl_sync(~0u, before, 0) < shares - 1) return false;
    __threadfence();
#pragma unroll
    for (int i = 0; i < TILES; ++i) {
        if (i % 8 == 0) __syncwarp();  // or more reads are under way than there are registers for
        const float4 x = __ldcg(place + i * kThreads);
        out[i][0] = x.x;
        out[i][1] = x.y;
        out[i][2] = x.z;
        out[i][3] = x.w;
    }
    return true;
}

// Adds up what the shares of a tile have; `pair` counts the block's batch entry and head. True for the warp that has
// the total then, and nobody else.
template <int TILES>
__device__ inline bool add_partials(float (&out)[TILES][4], const WorkTile& work, int pair, const GradientArgs& args) {
    static_assert(Partials::kSums == 4 * TILES * kThreads && Partials::kArrivals == kWarps, "plan: what a slot holds");
    const i64 first = static_cast<i64>(pair) * args.partial_slots + work.partial_slot;
    const PartialSums<TILES> partials{
        reinterpret_cast<float4*>(args.partial_sums) + first * (TILES * kThreads) + threadIdx.x,
        reinterpret_cast<int*>(args.partial_arrivals) + first * kWarps + threadIdx.x / 32};
    if constexpr (!kShared) return partials.add(out, work.share, 0, work.shares, 1, 0);
    int node = work.share, nodes = work.shares, apart = 1;  // of a level, and how many slots lie between two of them
#pragma unroll 1
    for (int level = 0; nodes > 1; ++level) {
        const int parent = node / kFan, begin = parent * kFan, end = min(begin + kFan, nodes);
        if (end > begin + 1 && !partials.add(out, node, begin, end, apart, begin * apart + level)) return false;
        node = parent;
        nodes = ceil_div(nodes, kFan);
        apart *= kFan;
    }
    return true;
}

// Where there are few tiles of stationary rows, or a tile has a long list, blocks share the steps of a tile (WorkTile).
// Each share leaves its sums in memory, and whichever comes last adds those of all. Sums are added in their order, and up
// a tree of kFan to a node, so that the result does not depend on who came last and nobody has many to add. Warps own
// their rows, so each does this on its own:
//
//   arrivals   [slot][warp] int, zero before the launch
//   sums       [slot][four floats of every thread, one after the other]
//
// where slots belong to the shares of the tiles of a batch entry and head. A node has the slot of its first share; who
// have come there are counted in as many slots further as it is levels above the shares that have come, so that each slot
// counts for one node only.
#pragma once
#include "common/args.cuh"
#include "common/config.cuh"
#include "tile/fragment.cuh"
#include "tile/schedule.cuh"

constexpr int kFan = 8;
constexpr int kLeastSteps = SKL_LEAST_STEPS;  // of a share, but of the last one

// Which share of a work tile the block has; `steps` are those of each of its `heads`. Where there is no memory for sums
// the first share takes all.
__device__ inline void take_share(Block& block, int heads, int steps, const GradientArgs& args) {
    if constexpr (Mask::kListed) {
        if (args.partial_sums != 0 || block.shares <= 1) return;
        block.shares = block.share == 0;
        block.streamed = {0, kNoLimit};
    } else {
        const int all = heads * steps, splits = args.partial_sums == 0 ? 1 : args.n.splits;
        const int size = max(ceil_div(all, splits), kLeastSteps);
        block.share = block.split;
        block.shares = max(ceil_div(all, size), 1);
        if (block.share >= block.shares) block.shares = 0;
        block.streamed = {block.share * size, min(block.share * size + size, all)};
    }
}
// The query heads of a share, of those from `first` on that a work tile has.
__device__ inline Range heads_of(const Block& block, int first, int heads, int steps) {
    if (Mask::kListed || steps == 0) return {first, first + (Mask::kListed ? heads : 1)};
    return {first + block.streamed.begin / steps, first + (block.streamed.end - 1) / steps + 1};
}
// Of the steps of one of these, number `head` of the work tile, those of the share.
__device__ inline Range share_of(Range steps, const Block& block, int head) {
    if constexpr (Mask::kListed) return steps;
    const int before = head * (steps.end - steps.begin);
    return {steps.begin + max(block.streamed.begin - before, 0), min(steps.end, steps.begin + block.streamed.end - before)};
}

// Adds up what the shares of a tile have; `pair` counts the block's batch entry and head. True for the warp that has the
// total then, and nobody else.
template <int TILES>
__device__ inline bool add_partials(float (&out)[TILES][4], const WorkTile& work, int pair, const GradientArgs& args) {
    static_assert(Partials::kSums == 4 * TILES * kThreads && Partials::kArrivals == kWarps, "plan: what a slot holds");
    const i64 first = static_cast<i64>(pair) * args.partial_slots + work.partial_slot;
    float4* const sums = reinterpret_cast<float4*>(args.partial_sums) + first * (TILES * kThreads) + threadIdx.x;
    int* const arrivals = reinterpret_cast<int*>(args.partial_arrivals) + first * kWarps + threadIdx.x / 32;
    int node = work.share, nodes = work.shares, apart = 1;  // of a level, and how many slots lie between two of them
#pragma unroll 1
    for (int level = 0; nodes > 1; ++level) {
        const int parent = node / kFan, begin = parent * kFan, end = min(begin + kFan, nodes);
        if (end > begin + 1) {
            float4* const mine = sums + static_cast<i64>(node) * apart * (TILES * kThreads);
#pragma unroll
            for (int i = 0; i < TILES; ++i)
                mine[i * kThreads] = make_float4(out[i][0], out[i][1], out[i][2], out[i][3]);
            __threadfence();
            __syncwarp();
            int before = 0;
            if (lane_id() == 0) before = atomicAdd(arrivals + (begin * apart + level) * kWarps, 1);
            if (__shfl_sync(~0u, before, 0) < end - begin - 1) return false;
            __threadfence();
#pragma unroll
            for (int i = 0; i < TILES; ++i)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[i][e] = 0.f;
#pragma unroll 1
            for (int child = begin; child < end; ++child) {
                const float4* const part = sums + static_cast<i64>(child) * apart * (TILES * kThreads);
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
        }
        node = parent;
        nodes = ceil_div(nodes, kFan);
        apart *= kFan;
    }
    return true;
}

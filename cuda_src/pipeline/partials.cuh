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

// What a block has of a work tile: query heads, and where the steps of the first one begin and those of the last one end
// in all steps of a head. Lists have been shared already.
struct Share {
    Range heads;
    int begin, end;

    Share() = default;

    // Of a work tile whose block has all `heads`, with as many steps each; says in `block` which share of how many this
    // is. Where there is no memory for sums the first one takes all.
    __device__ Share(Range heads, int steps, Block& block, const GradientArgs& args)
        : heads(heads), begin(0), end(steps) {
        if constexpr (Mask::kListed) {
            if (args.partial_sums != 0 || block.shares <= 1) return;
            block.shares = block.share == 0;
            block.streamed = {0, kNoLimit};
        } else {
            if (args.n.splits == 1) return;
            const int all = (heads.end - heads.begin) * steps;
            const int size = args.partial_sums == 0 ? all : max(ceil_div(all, args.n.splits), kLeastSteps);
            block.share = block.split;
            block.shares = max(ceil_div(all, max(size, 1)), 1);
            if (block.share >= block.shares) block.shares = 0;
            if (block.shares <= 1) return;
            const int first = block.share * size, last = min(first + size, all) - 1;
            this->heads = {heads.begin + first / steps, heads.begin + last / steps + 1};
            begin = first % steps;
            end = last % steps + 1;
        }
    }
    // Of all steps of one of the heads.
    __device__ Range of(int head, Range steps) const {
        if constexpr (Mask::kListed) return steps;
        return {steps.begin + (head == heads.begin ? begin : 0), head == heads.end - 1 ? steps.begin + end : steps.end};
    }
};

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

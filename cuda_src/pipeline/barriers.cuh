// Arrivals and waits of whole warps. One lane arrives for all, after something that orders the others before it. The
// race checker of compute-sanitizer follows arrivals lane by lane and takes that for a race: for it, a plan lets all
// lanes arrive.
#pragma once
#include "ptx/mbarrier.cuh"
#include "tile/fragment.cuh"

// Of barriers that threads name by a number.
enum NamedBarrier {
    kSyncThreads,  // all threads
    kWarpgroup,    // one per warpgroup, by its number
    kTurn = 4      // one per consumer of those that take turns, of which there are two, with one more warpgroup
};

constexpr int kArrivals = SKL_ARRIVING_LANES;  // of a warp
static_assert(kArrivals == 1 || kArrivals == 32, "plan: one lane arrives, or all");

__device__ inline void warp_arrive(u32 barrier) {
    if (kArrivals > 1 || lane_id() == 0) mbarrier_arrive(barrier);
}

// Where the first lane arrives by itself, because it announces bytes too.
__device__ inline void others_arrive(u32 barrier) {
    if (kArrivals > 1 && lane_id() > 0) mbarrier_arrive(barrier);
}

// Where nothing else that is done by whole warps stands between a wait and what one lane does next: that could let the
// barrier go on to its next phase, which a lane that is still waiting would take for the one before.
__device__ inline void warp_wait(u32 barrier, u32 parity) {
    mbarrier_wait(barrier, parity);
    __syncwarp();
}

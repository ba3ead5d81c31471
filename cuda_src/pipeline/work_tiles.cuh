// Blocks that stay. Each takes portions from a common counter until there are none, and its producer warp looks ahead: while the
// others are still at one portion it finds the next, and has its stationary rows on their way as soon as the last ones are done
// with, then the streamed ones. What it found it writes to shared memory, a visit at a time.
//
//   barrier    arrivals                        waited for by
//   known[i]   1                               everybody but the producer: visit i is written
//   over[i]    one per warp of these           the producer: visit i may be overwritten
#pragma once
#include "common/args.cuh"
#include "ptx/mbarrier.cuh"
#include "pipeline/barriers.cuh"
#include "tile/schedule.cuh"

// One query head of a portion.
struct Visit {
    Block block;
    Place place;
    int head;         // negative: no more visits
    Range steps;      // of the walk
    float lift;       // what narrow types' weights are multiplied by, all over the portion
    int first, last;  // of the portion
    int comes, goes;  // the other side's stationary rows: new ones with this visit, others after it
    u32 own_parity, other_parity;  // of the barriers that say that both sides' rows have come
};

constexpr int kVisits = SKL_VISITS;  // one under way, and the next
constexpr int kVisitBarriers = 2 * kVisits;
static_assert(sizeof(Visit) == SKL_VISIT_BYTES, "plan: a visit in shared memory");

// Where visits are read or written, one after the other.
struct VisitRing {
    Visit* visits;
    u32 barriers;
    u32 count = 0;
    __device__ int slot() const { return count % kVisits; }
    __device__ u32 parity() const { return count / kVisits & 1; }

    // One thread, before anybody uses the ring; `warps` read it.
    __device__ void init(int warps) const {
        for (int i = 0; i < kVisits; ++i) {
            mbarrier_init(barriers + 8 * i, 1);
            mbarrier_init(barriers + 8 * (kVisits + i), warps * kArrivals);
        }
    }
    // The producer's warp; returns where the visit is now.
    __device__ const Visit& write(const Visit& visit) {
        Visit& written = visits[slot()];
        warp_wait(barriers + 8 * (kVisits + slot()), parity() ^ 1);
        if (lane_id() == 0) {
            written = visit;
            mbarrier_arrive(barriers + 8 * slot());
        }
        __syncwarp();
        ++count;
        return written;
    }
    // The others: the visit stays until the warp says that it is over.
    __device__ const Visit& read() const {
        mbarrier_wait(barriers + 8 * slot(), parity());
        return visits[slot()];
    }
    __device__ void over() {
        __syncwarp();
        warp_arrive(barriers + 8 * (kVisits + slot()));
        ++count;
    }
};

// The number of a portion that no block has taken yet; blocks begin with the one of their own number. A whole warp. Unsigned:
// portions count to 2^31 - 1, and each block asks once more after the last of them.
__device__ inline u32 take_portion(u32* taken) {
    u32 before = 0;
    if (lane_id() == 0) before = atomicAdd(taken, 1u);
    return gridDim.x + __shfl_sync(~0u, before, 0);
}

// Persistent blocks. Each takes work tiles from a common counter until there are none, and its producer warp looks
// ahead: while the others are still at one work tile it finds the next, and has its stationary rows on their way as
// soon as the last ones are done with, then the streamed ones. What it found it writes to shared memory, a work item at
// a time.
//
//   barrier    arrivals                        waited for by
//   known[i]   1                               everybody but the producer: item i is written
//   over[i]    one per warp of these           the producer: item i may be overwritten
#pragma once
#include "common/args.cuh"
#include "ptx/mbarrier.cuh"
#include "pipeline/barriers.cuh"
#include "tile/schedule.cuh"

// One query head of a work tile, or of a block's share of one.
struct WorkItem {
    Block block;
    Segment segment;
    int head;                       // negative: no more work items
    Range steps;                    // of the walk
    float scale;                    // what narrow types' weights are multiplied by, all over the share
    int first, last;                // of the share
    int comes, goes;                // the score side's stationary rows: new ones with this item, others after it
    u32 grad_parity, score_parity;  // of the barriers that say that both sides' rows have come
    u32 number;                     // of the work items of the block
};

constexpr int kWorkItems = SKL_WORK_ITEMS;  // one under way, and the next
constexpr int kWorkItemBarriers = 2 * kWorkItems;
static_assert(sizeof(WorkItem) == SKL_WORK_ITEM_BYTES, "plan: a work item in shared memory");

// Where work items are read or written, one after the other.
struct WorkItemRing {
    u32 barriers;  // and behind them the items
    u32 count = 0;
    __device__ WorkItem& item() const {
        return reinterpret_cast<WorkItem*>(__cvta_shared_to_generic(barriers + 8 * kWorkItemBarriers))[slot()];
    }
    __device__ int slot() const { return count % kWorkItems; }
    __device__ u32 parity() const { return count / kWorkItems & 1; }

    // One thread, before anybody uses the ring; `warps` read it.
    __device__ void init(int warps) const {
        for (int i = 0; i < kWorkItems; ++i) {
            mbarrier_init(barriers + 8 * i, 1);
            mbarrier_init(barriers + 8 * (kWorkItems + i), warps * kArrivals);
        }
    }
    // The producer's warp; returns where the item is now.
    __device__ const WorkItem& write(const WorkItem& next) {
        WorkItem& written = item();
        warp_wait(barriers + 8 * (kWorkItems + slot()), parity() ^ 1);
        if (lane_id() == 0) {
            written = next;
            written.number = count;
            mbarrier_arrive(barriers + 8 * slot());
        }
        __syncwarp();
        ++count;
        return written;
    }
    // The others: the item stays until the warp says that it is over. Meanwhile it knows itself where it stands.
    __device__ const WorkItem& read() const {
        mbarrier_wait(barriers + 8 * slot(), parity());
        return item();
    }
    __device__ void over(const WorkItem& item) {
        count = item.number;
        __syncwarp();
        warp_arrive(barriers + 8 * (kWorkItems + slot()));
        ++count;
    }
};

// The number of a work tile that no block has taken yet; blocks begin with the one of their own number. A whole warp.
// Unsigned: work tiles count to 2^31 - 1, and each block asks once more after the last of them.
__device__ inline u32 take_work_tile(u32* taken) {
    u32 before = 0;
    if (lane_id() == 0) before = atomicAdd(taken, 1u);
    return gridDim.x + __shfl_sync(~0u, before, 0);
}

// What the kernels of gathered keys share: a block takes one query row after another, a producer warpgroup lists the
// row's keys and copies their rows ahead, and two warpgroups multiply.
//
// Copies of single rows have no barrier to tell (no tensor copy gathers on this architecture): each thread waits for
// its own, kLag buffers behind those it asks for, and then says so for asynchronous readers.
#pragma once
#include "common/args.cuh"
#include "pipeline/barriers.cuh"
#include "pipeline/ring.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "tile/index_parts.cuh"
#include "tile/key_list.cuh"

constexpr int kRing = SKL_STAGES, kLag = SKL_LAG;  // buffers, and those that are on their way
constexpr int kConsumers = 2, kConsumerWarps = 8, kProducerWarps = 4;

// A query row of one batch entry and group, and all keys of its list.
struct Item {
    int row;    // negative: there is no more
    int entry;  // batch entry and group
    int keys;
    int first;  // number of its first tile of keys, among those of all the block's items
};

// In the order of what they are waited for: arrivals and meaning stand in the kernels' heads.
enum Barrier {
    kKnown,
    kOver = kKnown + 2,
    kQueriesOver = kOver + 2,
    kFull,
    kEmpty = kFull + kRing,
    kBarriers = kEmpty + kRing
};
constexpr int kBarrierBytes = 8 * kBarriers + 2 * sizeof(Item);
static_assert(2 * SKL_CONSUMER_REGISTERS + SKL_PRODUCER_REGISTERS <= 504, "plan: registers that a launch gets");

// Shared memory, whose barriers and items lie at an offset.
template <int BARRIERS_AT>
struct SharedRoles {
    u32 base;
    __device__ u32 barrier(int which, int slot = 0) const { return base + BARRIERS_AT + 8 * (which + slot); }
    template <class T>
    __device__ T* at(int offset) const {
        return reinterpret_cast<T*>(__cvta_shared_to_generic(base + offset));
    }
    __device__ Item& item(int slot) const { return at<Item>(BARRIERS_AT + 8 * kBarriers)[slot]; }
};

template <class Shared>
struct Copier {
    const IndexerArgs& args;
    const Shared shared;
    const int thread;  // of the warpgroup
    RingCursor<2> items;
    RingCursor<1> queries;
    RingCursor<kRing> ring, arrived;
    int pending = 0;  // buffers on their way
    int tiles = 0;    // of all items so far

    // Of all rows of the launch those of this block, the last rows first: `copy(item)` has the keys of its list copied.
    // Rows that are not `wanted` have none.
    template <class Wanted, class Copy>
    __device__ void run(int list_at, int counts_at, const Wanted& wanted, const Copy& copy) {
        const int first = args.first_tile * kStripTile;
        const int rows = min(args.tiles * kStripTile, args.queries - first), entries = args.entries * args.groups;
        for (i64 i = blockIdx.x; i < static_cast<i64>(rows) * entries; i += gridDim.x) {
            Item item{first + rows - 1 - static_cast<int>(i / entries), static_cast<int>(i % entries), 0, tiles};
            if (wanted(item))
                item.keys = list_keys<kProducerWarps>(
                    RowKeys(args, item.entry / args.groups, item.entry % args.groups, item.row), thread,
                    shared.template at<int>(list_at), shared.template at<int>(counts_at), kWarpgroup + kConsumers);
            put(item);
            copy(item);
            tiles += ceil_div(item.keys, kColumns);
            // What comes next takes a while.
            cp_async_wait<0>();
            while (pending > 0) arrive();
        }
        put({-1, 0, 0, 0});
    }
    // 16 bytes of a row of 128, to their place in a chunk; zeros where there is nothing.
    __device__ void copy_piece(u32 chunk, int row, u64 from, bool there) const {
        cp_async_16(chunk + row * 128 + ((thread % 8 ^ row % 8) << 4), reinterpret_cast<const void*>(from),
                    there ? 16 : 0);
    }
    __device__ void wait_for_buffer() const { mbarrier_wait(shared.barrier(kEmpty, ring.slot), ring.parity ^ 1); }
    __device__ void wait_for_queries() {
        mbarrier_wait(shared.barrier(kQueriesOver), queries.parity ^ 1);
        queries.advance();
    }
    // A buffer's copies, and all before them that belong to none, are asked for.
    __device__ void commit() {
        cp_async_commit();
        ring.advance();
        if (++pending > kLag) {
            cp_async_wait<kLag>();
            arrive();
        }
    }

private:
    __device__ void put(const Item& item) {
        warp_wait(shared.barrier(kOver, items.slot), items.parity ^ 1);
        if (thread == 0) {
            shared.item(items.slot) = item;
            mbarrier_arrive(shared.barrier(kKnown, items.slot));
        }
        __syncwarp();
        items.advance();
    }
    __device__ void arrive() {
        async_fence();
        __syncwarp();
        warp_arrive(shared.barrier(kFull, arrived.slot));
        arrived.advance();
        --pending;
    }
};

// Has a consumer warp do all items, `row(item, slot)` one of them.
template <class Shared, class Row>
__device__ inline void consume_rows(const Shared& shared, const Row& row) {
    RingCursor<2> items;
    for (;; items.advance()) {
        mbarrier_wait(shared.barrier(kKnown, items.slot), items.parity);
        const Item item = shared.item(items.slot);
        __syncwarp();
        warp_arrive(shared.barrier(kOver, items.slot));
        if (item.row < 0) return;
        row(item, items.slot);
    }
}

// Which role a thread has, the last warpgroup the producer's; `readers` are the warps that empty a buffer.
template <class Shared, class Produce, class Consume>
__device__ inline void take_roles(const Shared& shared, int readers, const Produce& produce, const Consume& consume) {
    // Uniform over the warp by construction, which the compiler must be told.
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kBarriers; ++i) {
            const int warps = i < kFull ? kConsumerWarps : i < kEmpty ? kProducerWarps : readers;
            mbarrier_init(shared.barrier(i), i < kOver ? 1 : kArrivals * warps);
        }
        mbarrier_publish();
    }
    __syncthreads();
    if (group == kConsumers) {
        registers_lower<SKL_PRODUCER_REGISTERS>();
        produce(static_cast<int>(threadIdx.x) - 128 * kConsumers);
    } else {
        registers_raise<SKL_CONSUMER_REGISTERS>();
        consume(group);
    }
}

// Attention, forward, on Hopper: the mathematics of attention_sm80.cu with asynchronous copies and warpgroup products.
//
//   block     kRows = kGroups x 64 query rows of one head, or of several that read the same keys
//             (tile/packed_rows.cuh), resident in shared memory
//   producer  one thread; streams tiles of kColumns keys and of their values through a ring of kRing pieces, in turns
//   consumers kGroups warpgroups, 64 rows each: S (64 x kColumns) and O in registers; the products P V of one tile and
//             Q K^T of the next are one batch, during which the other warpgroups compute
//
//   barrier   arrivals                         waited for by
//   queries   1 (+ bytes)                      consumers, once
//   full[i]   1 (+ bytes) by the producer      consumers: piece i has arrived
//   empty[i]  one per consumer warp            the producer: piece i may be overwritten
//
// A warpgroup that sees no key of a tile skips its products; the tiles run from the last key to the first, so that
// under a mask the partial ones come first. In those, values that no row of the block sees are cleared: a weight of 0
// times what such memory holds need not be 0.
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "pipeline/barriers.cuh"
#include "pipeline/ring.cuh"
#include "ptx/registers.cuh"
#include "tile/fragment.cuh"
#include "tile/packed_rows.cuh"
#include "tile/schedule.cuh"
#include "tile/swizzled.cuh"
#include "@mask"
#include "@score"
#include "tile/attention_rows.cuh"
#include "tile/attention_unseen.cuh"

using Score = SKL_A_SCORE;
using Keys = SwizzledTile<SKL_A_ELEMENT, SKL_A_DIM>;  // and queries
using Values = SwizzledTile<SKL_A_ELEMENT, SKL_VALUE_DIM>;
using OutTile = Tile<SKL_A_ELEMENT, SKL_VALUE_DIM>;
using E = OutTile::E;

constexpr int kGroups = kWarps / 4;
constexpr int kTiles = kColumns / 8;
constexpr int kOutTiles = OutTile::kDepth / 8;
constexpr int kRing = kStages;
constexpr int kPieceBytes = Keys::bytes(kColumns) > Values::bytes(kColumns) ? Keys::bytes(kColumns)
                                                                            : Values::bytes(kColumns);
constexpr int kQueryBytes = Keys::bytes(kRows);
constexpr int kBarrierBytes = 8 * (2 * kRing + 1);

static_assert(kWarpTiles == 1, "plan: a consumer warpgroup has 64 rows");
static_assert(1024 + kQueryBytes + kRing * kPieceBytes + kBarrierBytes == SKL_SMEM_BYTES, "plan: smem_bytes");

using Walk = Cursor<Mask, -1>;

// The barriers and pieces of a block, in shared memory.
struct Layout {
    u32 base;
    __device__ u32 queries() const { return base; }
    __device__ u32 piece(int slot) const { return base + kQueryBytes + slot * kPieceBytes; }
    __device__ u32 full(int slot) const { return piece(kRing) + 8 * slot; }
    __device__ u32 empty(int slot) const { return full(kRing) + 8 * slot; }
    __device__ u32 queries_here() const { return empty(kRing); }
};

// Issues O += P V.
__device__ inline void multiply_values(Strip<kOutTiles>& out, const StripA<OutTile::kCode, kTiles>& a, u64 values) {
#pragma unroll
    for (int k = 0; k < kTiles / 2; ++k) wgmma<Values::kHalf, 1>(out[0], a[k][0].r[0], values + (k * 2048 >> 4), 1);
}

// One thread: the block's queries, and tile by tile keys and values.
__device__ inline void produce(const HopperAttentionArgs& all, const Layout& lay, const Block& block,
                               const Segment& segment, int first_row, Walk& walk) {
    RingCursor<kRing> at;
    mbarrier_expect(lay.queries_here(), kQueryBytes);
    load_chunks<kRows>(lay.queries(), all.query, lay.queries_here(), 0, Keys::kChunks, segment.first_query + first_row,
                       block.head, block.batch);
    const int head = block.head / all.base.n.group;
    for (; walk.more(); walk.next()) {
        const int key = segment.first_key + walk.row();
        mbarrier_wait(lay.empty(at.slot), at.parity ^ 1);
        mbarrier_expect(lay.full(at.slot), Keys::bytes(kColumns));
        load_chunks<kColumns>(lay.piece(at.slot), all.key, lay.full(at.slot), 0, Keys::kChunks, key, head, block.batch);
        at.advance();
        mbarrier_wait(lay.empty(at.slot), at.parity ^ 1);
        mbarrier_expect(lay.full(at.slot), Values::bytes(kColumns));
        load_chunks<kColumns>(lay.piece(at.slot), all.value, lay.full(at.slot), 0, Values::kChunks, key, head,
                              block.batch);
        at.advance();
    }
}

extern "C" __global__ void __launch_bounds__(kThreads + 128, SKL_MIN_BLOCKS)
    streamkl_attention(const __grid_constant__ HopperAttentionArgs all) {
    extern __shared__ unsigned char shared[];
    const AttentionArgs& args = all.base;
    const Extents& n = args.n;
    const int together = kPacked ? n.group : 1, packs = n.heads / together;
    Block block = block_of(blockIdx.x, n, packs, n.batch * packs, !Mask::kListed);
    const int end_head = (block.head + 1) * together;
    if constexpr (kPacked) {  // a tile has all queries of its heads
        block.head = block.head * together + block.tile * kTileHeads;
        block.tile = 0;
    }
    const Segment segment = Mask::locate(n, block.head, block);
    const Mask mask(n, segment, block.batch, block.head);
    const int first_row = block.tile * kRows, end_row = min(first_row + kRows, segment.queries);
    if (Mask::kRagged && first_row >= segment.queries) return;
    // Uniform over the warp by construction, which the compiler must be told: descriptors then live in uniform
    // registers.
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);

    const Layout lay{(static_cast<u32>(__cvta_generic_to_shared(shared)) + 1023) & ~1023u};
    if (threadIdx.x == 0) {
        for (int i = 0; i < kRing; ++i) {
            mbarrier_init(lay.full(i), 1);
            mbarrier_init(lay.empty(i), kWarps * kArrivals);
        }
        mbarrier_init(lay.queries_here(), 1);
        mbarrier_publish();
    }
    __syncthreads();

    const Range keys = mask.keys_of(first_row, end_row), tiles = covering(keys, kColumns);
    Walk walk(mask, {first_row, end_row}, split_of(mask.steps_at_once(first_row, tiles), block, n));

    if (group == kGroups) {
        registers_lower<SKL_PRODUCER_REGISTERS>();
        if (threadIdx.x == kThreads) produce(all, lay, block, segment, first_row, walk);
        return;
    }

    registers_raise<SKL_CONSUMER_REGISTERS>();
    RingCursor<kRing> at;
    const int lane = lane_id();
    const int strip = 16 * ((threadIdx.x / 32) & 3);
    const bool idle = block.head + packed_head(64 * group) >= end_head;
    const int group_row = idle ? segment.queries : first_row + packed_query(64 * group);
    const int group_end = min(group_row + 64, segment.queries);
    const int row = (kPacked ? packed_query(64 * group + strip) : group_row + strip) + Accumulators::first_row(lane);
    const Range mine = group_row < segment.queries ? mask.keys_of(group_row, group_end) : Range{0, 0};
    SoftmaxRow<E> state[kLaneRows];
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) state[i].start();
    Strip<kOutTiles> out;
    clear<kOutTiles>(out);
    Strip<kTiles> x;
    StripA<OutTile::kCode, kTiles> a;

    const u64 queries = swizzled_descriptor(lay.queries() + group * 64 * 128);
    const u64 keys_ring = swizzled_descriptor(lay.piece(0)),
              values_ring = swizzled_descriptor(lay.piece(0), kColumns * 128);
    const auto piece = [](u64 ring, int slot) { return ring + static_cast<u64>(slot * (kPieceBytes >> 4)); };
    const auto release = [&lay](int slot) { warp_arrive(lay.empty(slot)); };
    // Whether the warpgroup sees any key of the walk's tile.
    const auto seen = [&walk, &mine, group_row, group_end]() {
        const int key = walk.row();
        return key < mine.end && key + kColumns > mine.begin &&
               (!Mask::kListed || walk.any_visible(group_row, group_end));
    };
    // On to the next tile that it does, releasing what lies before.
    const auto skip = [&walk, &at, &lay, &release, &seen]() {
        while (walk.more() && !seen()) {
#pragma unroll 1
            for (int p = 0; p < 2; ++p) {
                warp_wait(lay.full(at.slot), at.parity);  // or two arrivals could fall into one phase
                release(at.slot);
                at.advance();
            }
            walk.next();
        }
        return walk.more();
    };

    mbarrier_wait(lay.queries_here(), 0);
    if (skip()) {
        mbarrier_wait(lay.full(at.slot), at.parity);
        wgmma_fence();
        multiply_rows<Keys, kRows, Keys::kChunks>(x[0], queries, piece(keys_ring, at.slot), 0);
        wgmma_commit();
        for (;;) {
            wgmma_wait<0>();
            fence_accumulators(x[0]);
            fence_accumulators(out[0]);
            release(at.slot);
            at.advance();
#pragma unroll
            for (int c = 0; c < kTiles; ++c) turn<Score>(x[0], c, args.numbers);
            const bool full = walk.full(group_row, group_end);
            if (full) {
                weigh<Score, kOutTiles, kTiles>(state, out, a, x, args.numbers);
            } else {
                hide<Score, kTiles>(x, walk.mask, row, walk.row(), args.numbers);
                weigh<LogitsThemselves, kOutTiles, kTiles>(state, out, a, x, args.numbers);
            }
            const int slot = at.slot;
            mbarrier_wait(lay.full(slot), at.parity);
            if (!full) clear_unseen<Values, kColumns>(lay.piece(slot), walk, keys, kWarpgroup + group);
            at.advance();
            walk.next();
            if (walk.more() && seen()) {
                mbarrier_wait(lay.full(at.slot), at.parity);
                wgmma_fence();
                multiply_rows<Keys, kRows, Keys::kChunks>(x[0], queries, piece(keys_ring, at.slot), 0);
                wgmma_commit();
                multiply_values(out, a, piece(values_ring, slot));
                wgmma_commit();
                wgmma_wait<0>();
                release(slot);
                continue;
            }
            wgmma_fence();
            multiply_values(out, a, piece(values_ring, slot));
            wgmma_commit();
            wgmma_wait<0>();
            fence_accumulators(out[0]);
            release(slot);
            if (!skip()) break;
            mbarrier_wait(lay.full(at.slot), at.parity);
            wgmma_fence();
            multiply_rows<Keys, kRows, Keys::kChunks>(x[0], queries, piece(keys_ring, at.slot), 0);
            wgmma_commit();
        }
    }
    if constexpr (kPacked) {
        block.head += packed_head(64 * group + strip);
        if (block.head >= end_head) return;
    }
    write_rows<OutTile>(args, block, segment, state, out, row);
}

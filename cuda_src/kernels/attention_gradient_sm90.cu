// Attention, backward, on Hopper: the mathematics of attention_gradient_sm80.cu with asynchronous copies and warpgroup
// products.
//
//   block     kRows = kGroups x 64 rows of the operand that is differentiated, with those of G or of the values that go
//             with them, resident in shared memory
//   producer  one warp; streams tiles of kColumns rows of both other operands through a ring of kStages stages; where
//             these are queries, their statistics too
//   consumers kGroups warpgroups, 64 rows each: S and G V^T, or these transposed, in registers, where they become P and
//             X, and operands A of the products with the very tiles that they came from, read transposed; with kTurns
//             all of them have the same 64 rows, take the tiles in turns and add up what they have at the end: of a
//             pattern's lists other rows would have other ones
//
//   barrier   arrivals                         waited for by
//   rows      1 (+ bytes)                      consumers, once
//   full[i]   one for the producer's warp      consumers: stage i has arrived
//             (+ bytes)
//   empty[i]  one per consumer warp            the producer: stage i may be overwritten
//
// G is a copy that attention_rows.cu has made. Streamed rows that none of the block's rows sees are cleared in tiles that
// are not full: 0 times what such memory holds need not be 0.
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "pipeline/barriers.cuh"
#include "pipeline/ring.cuh"
#include "ptx/registers.cuh"
#include "tile/schedule.cuh"
#include "tile/swizzled.cuh"
#include "@mask"
#include "@score"
#include "tile/attention_gradient.cuh"
#include "tile/attention_unseen.cuh"

using Scored = SwizzledTile<SKL_A_ELEMENT, SKL_A_DIM>;
using Valued = SwizzledTile<SKL_A_ELEMENT, SKL_VALUE_DIM>;

constexpr int kGroups = kWarps / 4;
constexpr int kRowBytes = Scored::bytes(kRows) + (kScored ? Valued::bytes(kRows) : 0);
constexpr int kStageBytes = Scored::bytes(kColumns) + Valued::bytes(kColumns);
constexpr int kVectorBytes = 4 * kVectors * kColumns;
constexpr int kBarrierBytes = 8 * (2 * kStages + 1);

static_assert(kWarpTiles == 1, "plan: a consumer warpgroup has 64 rows");
static_assert(!kTurns || kGroups == 2, "plan: two warpgroups take turns");
static_assert(kColumns % 32 == 0, "plan: a lane of the producer has as many queries of a tile as any other");
static_assert(1024 + kRowBytes + kStages * (kStageBytes + kVectorBytes) + kBarrierBytes == SKL_SMEM_BYTES,
              "plan: smem_bytes");

// Stages, statistics and barriers of a block, in shared memory.
struct Layout {
    u32 base;
    __device__ u32 scored_rows() const { return base; }
    __device__ u32 valued_rows() const { return base + Scored::bytes(kRows); }
    __device__ u32 scored(int slot) const { return base + kRowBytes + slot * kStageBytes; }
    __device__ u32 valued(int slot) const { return scored(slot) + Scored::bytes(kColumns); }
    __device__ u32 vectors(int slot) const { return scored(kStages) + slot * kVectorBytes; }
    __device__ u32 full(int slot) const { return vectors(kStages) + 8 * slot; }
    __device__ u32 empty(int slot) const { return full(kStages) + 8 * slot; }
    __device__ u32 rows_here() const { return empty(kStages); }

    // One thread, before anybody uses a barrier.
    __device__ void init() const {
        for (int i = 0; i < kStages; ++i) {
            mbarrier_init(full(i), kVectors > 0 ? kArrivals : 1);
            mbarrier_init(empty(i), kWarps * kArrivals);
        }
        mbarrier_init(rows_here(), 1);
        mbarrier_publish();
    }
};

// Statistics of a tile of streamed queries, on their way through the producer's warp.
struct StreamedRows {
    static constexpr int kMine = kVectors > 0 ? kColumns / 32 : 1;  // of a lane
    Row rows[kMine];
    __device__ void read(const RowVectors& vectors, Range there, int first) {
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            const int q = first + lane_id() + 32 * i;
            rows[i] = {infinity(), 0.f};
            if (there.contains(q)) rows[i] = {vectors.lse[q], vectors.delta[q]};
        }
    }
    __device__ void put(u32 shared) const {
        float* const to = reinterpret_cast<float*>(__cvta_shared_to_generic(shared));
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            to[lane_id() + 32 * i] = rows[i].lse;
            to[kColumns + lane_id() + 32 * i] = rows[i].delta;
        }
    }
};

// One thread: the rows of a block, from (row, head, batch) on, on their way.
__device__ inline void load_block(const HopperAttentionGradientArgs& all, const Layout& lay, int row, int head,
                                  int batch) {
    mbarrier_expect(lay.rows_here(), kRowBytes);
    load_chunks<kRows>(lay.scored_rows(), kRowsAreQueries ? all.query : all.key, lay.rows_here(), 0, Scored::kChunks,
                       row, head, batch);
    if constexpr (kScored)
        load_chunks<kRows>(lay.valued_rows(), kRowsAreQueries ? all.grad : all.value, lay.rows_here(), 0,
                           Valued::kChunks, row, head, batch);
}
// The same of a tile of streamed rows.
__device__ inline void load_tile(const HopperAttentionGradientArgs& all, const Layout& lay, int slot, int row, int head,
                                 int batch) {
    mbarrier_expect(lay.full(slot), kStageBytes);
    load_chunks<kColumns>(lay.scored(slot), kRowsAreQueries ? all.key : all.query, lay.full(slot), 0, Scored::kChunks,
                          row, head, batch);
    load_chunks<kColumns>(lay.valued(slot), kRowsAreQueries ? all.value : all.grad, lay.full(slot), 0, Valued::kChunks,
                          row, head, batch);
}

// Issues out += a * streamed tile, up to 128 columns of the output per product.
template <class Side, int TILES>
__device__ inline void multiply_out(float (&out)[TILES][4], const StripA<KeyTile::kCode, kTiles>& a, u64 streamed) {
    constexpr int wide = 16, rest = TILES % wide;
#pragma unroll
    for (int k = 0; k < kTiles / 2; ++k) {
        const u64 rows = streamed + (k * 2048 >> 4);
#pragma unroll
        for (int d = 0; d < TILES - rest; d += wide)
            wgmma<Side::kHalf, 1>(reinterpret_cast<float (&)[wide][4]>(out[d]), a[k][0].r[0],
                                  rows + (d / 8 * kColumns * 128 >> 4), 1);
        if constexpr (rest > 0)
            wgmma<Side::kHalf, 1>(reinterpret_cast<float (&)[rest][4]>(out[TILES - rest]), a[k][0].r[0],
                                  rows + ((TILES - rest) / 8 * kColumns * 128 >> 4), 1);
    }
}

// What a thread of the second warpgroup leaves for the one of the first that has the same elements.
constexpr int kSums = 4 * ((kScored ? kOutTiles : 0) + (kValues ? kValueTiles : 0)) + kLaneRows;
static_assert(!kTurns || kStages * kStageBytes >= 4 * 128 * kSums, "plan: stages hold the sums of a warpgroup");

// Adds up the sums of both warpgroups, in the memory of the stages, which all are done with then. True for the one that
// has the total.
__device__ inline bool add_up(u32 memory, Strip<kOutTiles>& out, Strip<kValueTiles>& out_values,
                              int (&exponent)[kLaneRows], int group) {
    float* const place = reinterpret_cast<float*>(__cvta_shared_to_generic(memory)) + (threadIdx.x & 127);
    float* at = place;
    const auto each = [&out, &out_values, &at](auto&& one) {
        if constexpr (kScored) {
#pragma unroll
            for (int d = 0; d < kOutTiles; ++d)
#pragma unroll
                for (int e = 0; e < 4; ++e, at += 128) one(out[0][d][e], Accumulators::row(e), true);
        }
        if constexpr (kValues) {
#pragma unroll
            for (int d = 0; d < kValueTiles; ++d)
#pragma unroll
                for (int e = 0; e < 4; ++e, at += 128) one(out_values[0][d][e], Accumulators::row(e), false);
        }
    };
    barrier_sync(kTurn, kThreads);
    if (group == 1) {
        each([&at](float& x, int, bool) { *at = x; });
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) at[128 * i] = __int_as_float(exponent[i]);
    }
    barrier_sync(kTurn, kThreads);
    if (group == 1) return false;
    float mine[kLaneRows], theirs[kLaneRows];
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
        mine[i] = theirs[i] = 1.f;
        if constexpr (E::kNarrowExponent && kScored) {
            const int other = __float_as_int(place[128 * (kSums - kLaneRows + i)]), least = min(exponent[i], other);
            mine[i] = power_of_two(max(least - exponent[i], -126));
            theirs[i] = power_of_two(max(least - other, -126));
            exponent[i] = least;
        }
    }
    each([&at, &mine, &theirs](float& x, int row, bool scaled) {
        x = scaled ? fmaf(*at, theirs[row], x * mine[row]) : x + *at;
    });
    return true;
}

extern "C" __global__ void __launch_bounds__(kThreads + 128, SKL_MIN_BLOCKS)
    streamkl_attention_gradient(const __grid_constant__ HopperAttentionGradientArgs all) {
    extern __shared__ unsigned char shared[];
    const AttentionGradientArgs& args = all.base;
    const Extents& n = args.n;
    const int heads_per_block = kRowsAreQueries ? 1 : n.group;  // query heads summed into one key head
    const int out_heads = n.heads / heads_per_block;
    Block block = block_of(blockIdx.x, n, out_heads, n.batch * out_heads, kRowsAreQueries && !Mask::kListed);
    const int first_head = block.head * heads_per_block, end_head = first_head + heads_per_block;
    const int key_head = first_head / n.group;
    const Segment segment = Mask::locate(n, first_head, block);
    const int row_count = kRowsAreQueries ? segment.queries : segment.keys;
    const int first_row = block.tile * kRows, end_row = min(first_row + kRows, row_count);
    if (Mask::kRagged && first_row >= row_count) return;
    const Range rows{first_row, end_row};
    // Uniform over the warp by construction, which the compiler must be told: descriptors then live in uniform
    // registers.
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);

    const Layout lay{(static_cast<u32>(__cvta_generic_to_shared(shared)) + 1023) & ~1023u};
    if (threadIdx.x == 0) lay.init();
    __syncthreads();
    RingCursor<kStages> at;
    const auto columns_of = [first_row, end_row](const Mask& mask) {
        return kRowsAreQueries ? mask.keys_of(first_row, end_row) : mask.queries_of(first_row, end_row);
    };

    if (group == kGroups) {
        registers_lower<SKL_PRODUCER_REGISTERS>();
        if (threadIdx.x >= kThreads + 32) return;
        const int lane = lane_id();
        const int first_in = (kRowsAreQueries ? segment.first_query : segment.first_key) + first_row;
        const int row_head = kRowsAreQueries ? first_head : key_head;
        if (lane == 0) load_block(all, lay, first_in, row_head, block.batch);
        __syncwarp();
        for (int head = first_head; head < end_head; ++head) {
            const Mask mask(n, segment, block.batch, head);
            const Range columns = columns_of(mask);
            const RowVectors vectors(args, block.batch, head, segment);
            for (Cursor<Mask> walk(mask, rows, mask.steps_of(first_row, covering(columns, kColumns))); walk.more();
                 walk.next()) {
                const int first = walk.row(), streamed_head = kRowsAreQueries ? key_head : head;
                StreamedRows stats;
                if constexpr (kVectors > 0) stats.read(vectors, columns, first);
                warp_wait(lay.empty(at.slot), at.parity ^ 1);
                if constexpr (kVectors > 0) {
                    stats.put(lay.vectors(at.slot));
                    __syncwarp();
                    others_arrive(lay.full(at.slot));
                }
                if (lane == 0) {
                    const int from = (kRowsAreQueries ? segment.first_key : segment.first_query) + first;
                    load_tile(all, lay, at.slot, from, streamed_head, block.batch);
                }
                __syncwarp();
                at.advance();
            }
        }
        return;
    }

    registers_raise<SKL_CONSUMER_REGISTERS>();
    const int lane = lane_id();
    const int rows_of = kTurns ? 0 : group;  // which 64 of the block's
    const int group_row = first_row + 64 * rows_of, group_end = min(group_row + 64, row_count);
    const int row = group_row + 16 * ((threadIdx.x / 32) & 3) + Accumulators::first_row(lane);
    Strip<kOutTiles> out;
    Strip<kValueTiles> out_values;
    clear<kOutTiles>(out);
    clear<kValueTiles>(out_values);
    int exponent[kLaneRows];
    Row stats[kLaneRows];
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
        exponent[i] = E::kNarrowExponent ? 126 : 0;
        if constexpr (kRowsAreQueries)
            stats[i] = RowVectors(args, block.batch, first_head, segment).read(row + below_first(i), segment.queries);
    }

    const u64 rows_scored = swizzled_descriptor(lay.scored_rows() + rows_of * 64 * 128),
              rows_valued = swizzled_descriptor(lay.valued_rows() + rows_of * 64 * 128);
    const u64 scored = swizzled_descriptor(lay.scored(0)), valued = swizzled_descriptor(lay.valued(0));
    const u64 scored_out = swizzled_descriptor(lay.scored(0), kColumns * 128),
              valued_out = swizzled_descriptor(lay.valued(0), kColumns * 128);
    const auto stage = [](u64 first, int slot) { return first + static_cast<u64>(slot * (kStageBytes >> 4)); };
    mbarrier_wait(lay.rows_here(), 0);
    int turn = 0;

#pragma unroll 1
    for (int head = first_head; head < end_head; ++head) {
        const Mask mask(n, segment, block.batch, head);
        Range mine{0, 0};
        if (group_row < row_count)
            mine = kRowsAreQueries ? mask.keys_of(group_row, group_end) : mask.queries_of(group_row, group_end);
        for (Cursor<Mask> walk(mask, rows, mask.steps_of(first_row, covering(columns_of(mask), kColumns))); walk.more();
             walk.next()) {
            const int slot = at.slot, first = walk.row();
            warp_wait(lay.full(slot), at.parity);  // or two arrivals could fall into one phase
            at.advance();
            // The cursor stops at what any of the block's rows see, which are all of its own where there are turns.
            bool passed = turn++ % kGroups != group;
            if constexpr (!kTurns)
                passed = first >= mine.end || first + kColumns <= mine.begin ||
                         ((Mask::kListed || Mask::kHoles) && !walk.any_visible(group_row, group_end));
            if (passed) {
                warp_arrive(lay.empty(slot));
                continue;
            }
            const bool full = walk.full(group_row, group_end);
            if (!full)
                clear_unseen<Scored, kColumns>(lay.scored(slot), walk, columns_of(walk.mask), kWarpgroup + group);
            Strip<kTiles> t, d;
            wgmma_fence();
            multiply_rows<Scored, kRows, Scored::kChunks>(t[0], rows_scored, stage(scored, slot), 0);
            if constexpr (kScored)
                multiply_rows<Valued, kRows, Valued::kChunks>(d[0], rows_valued, stage(valued, slot), 0);
            wgmma_commit();
            wgmma_wait<0>();
            fence_accumulators(t[0]);
            if constexpr (kScored) fence_accumulators(d[0]);
            if (full)
                logit_gradients<false>(t, d, stats, lay.vectors(slot), walk, row, args.numbers);
            else
                logit_gradients<true>(t, d, stats, lay.vectors(slot), walk, row, args.numbers);
            StripA<KeyTile::kCode, kTiles> p, x;
            if constexpr (kValues) strip_to_a<KeyTile::kCode, kTiles>(p, t);
            if constexpr (kScored) {
                if constexpr (E::kNarrowExponent) rescale(d, out, exponent);
                strip_to_a<KeyTile::kCode, kTiles>(x, d);
            }
            wgmma_fence();
            if constexpr (kValues) multiply_out<Valued>(out_values[0], p, stage(valued_out, slot));
            if constexpr (kScored) multiply_out<Scored>(out[0], x, stage(scored_out, slot));
            wgmma_commit();
            wgmma_wait<0>();
            if constexpr (kValues) fence_accumulators(out_values[0]);
            if constexpr (kScored) fence_accumulators(out[0]);
            warp_arrive(lay.empty(slot));
        }
    }
    if constexpr (kTurns) {
        if (!add_up(lay.scored(0), out, out_values, exponent, group)) return;
    }
    write_gradients(args, out, out_values, exponent, row, blockIdx.x);
}

// Attention, backward, on Hopper, all three gradients in one pass: five products per tile where kernels for queries and
// for keys and values need seven. The mathematics is that of attention_gradient_sm80.cu, and
//
//   dQ = c X K   needs all keys: blocks add fp32 parts in global memory, in no fixed order
//
// Three kernels: `prepare` clears the sums of dQ, the main kernel adds, `finish` scales and converts them. In the
// workspace, one entry per query head and kColumns queries:
//
//   sums       [warp][D / 8][lane][4] floats, as the accumulators of the dQ product hold them
//
//   block     64 rows of keys and values, resident in shared memory
//   producer  one warp; streams tiles of kColumns queries and rows of G through a ring of kStages stages, and their
//             statistics
//   consumers two warpgroups, which have the same keys and take the tiles in turns, each on its own: S^T and dP^T in
//             registers, where they become P^T and X^T, operands A of dV and dK; X^T goes through shared memory too, and
//             comes back transposed as operand A of dQ, whose registers are those that the scores had. What comes out is
//             staged in shared memory, and each warp has the copy engine add its rows to the sums. At the end the
//             warpgroups add up dK and dV
//
//   barrier   arrivals                         waited for by
//   rows      1 (+ bytes)                      consumers, once
//   full[i]   1 (+ bytes) by the producer      consumers: stage i has arrived
//   empty[i]  one per consumer warp            the producer: stage i may be overwritten
//
// X^T has two buffers: a warp that writes one has passed a barrier behind which nobody reads it.
//
// G is a copy that attention_rows.cu has made. Queries that none of the block's keys sees are cleared in tiles that are
// not full, and keys that no query at all sees where they hold no numbers: 0 times what such memory holds need not be 0.
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "common/sizes.cuh"
#include "pipeline/barriers.cuh"
#include "pipeline/ring.cuh"
#include "ptx/bulk.cuh"
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
constexpr int kRowBytes = Scored::bytes(kRows) + Valued::bytes(kRows);
constexpr int kStageBytes = Scored::bytes(kColumns) + Valued::bytes(kColumns);
constexpr int kVectorBytes = 4 * kVectors * kColumns;
constexpr int kExchangeBytes = kRows * kColumns * E::kBytes;  // X^T of a tile
constexpr int kWarpSums = 128 * kOutTiles;                    // floats of dQ that a warp makes of a tile
constexpr int kStagingBytes = 4 * 4 * kWarpSums;              // of a warpgroup
constexpr int kExchanges = 2;
constexpr int kBarrierBytes = 8 * (2 * kStages + 1);
constexpr int kHelperThreads = SKL_HELPER_THREADS;

static_assert(kTurns && kGroups == 2 && kRows == 64 && kColumns == 64 && !kRowsAreQueries, "plan: 64 keys, in turns");
static_assert(kScored && kValues, "plan: all gradients");
static_assert(1024 + kRowBytes + kStages * (kStageBytes + kVectorBytes) +
                      kGroups * (kExchanges * kExchangeBytes + kStagingBytes) + kBarrierBytes ==
                  SKL_SMEM_BYTES,
              "plan: smem_bytes");
static_assert(AttentionSums::kSums == 4 * kWarpSums, "plan: workspace");

// Beside a pattern, blocks side by side should stream the same rows: causal lists have the end in common.
using Walk = Cursor<Mask, Mask::kListed ? -1 : 1>;

// Shared memory of a block.
struct Layout {
    u32 base;
    __device__ u32 keys() const { return base; }
    __device__ u32 values() const { return base + Scored::bytes(kRows); }
    __device__ u32 queries(int slot) const { return base + kRowBytes + slot * kStageBytes; }
    __device__ u32 grads(int slot) const { return queries(slot) + Scored::bytes(kColumns); }
    __device__ u32 exchange(int group) const { return queries(kStages) + group * kExchanges * kExchangeBytes; }
    __device__ u32 staging(int group) const { return exchange(kGroups) + group * kStagingBytes; }
    __device__ u32 vectors(int slot) const { return staging(kGroups) + slot * kVectorBytes; }
    __device__ u32 full(int slot) const { return vectors(kStages) + 8 * slot; }
    __device__ u32 empty(int slot) const { return full(kStages) + 8 * slot; }
    __device__ u32 rows_here() const { return empty(kStages); }
};

// Where the sums of a tile of queries lie, in a workspace with an entry for each.
struct Sums : AttentionSums {
    int heads, tiles;
    __device__ Sums(u64 workspace, const Extents& n)
        : heads(n.heads), tiles(row_tiles(n.queries, kColumns, n.sequences)) {
        locate(workspace, static_cast<i64>(n.batch) * heads * tiles);
    }
    // Of the segment's first tile.
    __device__ float* of(int b, int h, const Segment& segment) const {
        return sums + (static_cast<i64>(b * heads + h) * tiles + segment.first_query / kColumns + segment.sequence) *
                          AttentionSums::kSums;
    }
};

// Issues out += a * streamed tile.
template <class Side, int TILES>
__device__ inline void multiply_out(float (&out)[TILES][4], const StripA<KeyTile::kCode, kTiles>& a, u64 streamed) {
#pragma unroll
    for (int k = 0; k < kTiles / 2; ++k) wgmma<Side::kHalf, 1>(out, a[k][0].r[0], streamed + (k * 2048 >> 4), 1);
}

// Issues out += X^T * queries.
__device__ inline void multiply_keys(float (&out)[kOutTiles][4], u64 exchange, u64 queries) {
#pragma unroll
    for (int k = 0; k < kTiles / 2; ++k)
        wgmma<Scored::kHalf, 0, 1>(out, exchange + (32 * k >> 4), queries + (k * 2048 >> 4), 1);
}

// Issues dq = X * keys, of X^T in shared memory.
__device__ inline void multiply_queries(float (&dq)[kOutTiles][4], u64 exchange, u64 keys) {
#pragma unroll
    for (int k = 0; k < kRows / 16; ++k)
        wgmma<Scored::kHalf, 1, 1>(dq, exchange + (k * 2048 >> 4), keys + (k * 2048 >> 4), k > 0);
}

// What a thread of the second warpgroup leaves for the one of the first that has the same elements.
constexpr int kSumsLeft = 4 * (kOutTiles + kValueTiles);
static_assert(kStages * kStageBytes >= 4 * 128 * kSumsLeft, "plan: stages hold the sums of a warpgroup");

// Adds up dK and dV of both warpgroups, in the memory of the stages, which all are done with then. True for the one that
// has the total.
__device__ inline bool add_up(u32 memory, Strip<kOutTiles>& out, Strip<kValueTiles>& out_values, int group) {
    float4* const place = reinterpret_cast<float4*>(__cvta_shared_to_generic(memory)) + (threadIdx.x & 127);
    barrier_sync(kTurn, kThreads);
    if (group == 1) {
#pragma unroll
        for (int d = 0; d < kOutTiles + kValueTiles; ++d) {
            const float (&x)[4] = d < kOutTiles ? out[0][d] : out_values[0][d - kOutTiles];
            place[128 * d] = make_float4(x[0], x[1], x[2], x[3]);
        }
    }
    barrier_sync(kTurn, kThreads);
    if (group == 1) return false;
#pragma unroll
    for (int d = 0; d < kOutTiles + kValueTiles; ++d) {
        float (&x)[4] = d < kOutTiles ? out[0][d] : out_values[0][d - kOutTiles];
        const float4 y = place[128 * d];
        x[0] += y.x;
        x[1] += y.y;
        x[2] += y.z;
        x[3] += y.w;
    }
    return true;
}

// Clears keys that hold an infinity or a NaN and that no query of the block's heads sees: a rare thing, so that it may
// take long. All consumers; each looks at half of a row.
__device__ inline void clear_unseen_keys(const Layout& lay, const AttentionGradientArgs& args, const Block& block,
                                         const Segment& segment, Range keys, Range heads) {
    constexpr u32 exponent = E::kNarrowExponent ? 0x7c007c00u : 0x7f807f80u,
                  one = E::kNarrowExponent ? 0x04000400u : 0x00800080u;
    const auto broken = [](float x) { return (__float_as_uint(x) & exponent) + one & 0x80008000u; };
    const int r = threadIdx.x / 4, part = threadIdx.x % 4;
    u32 bad = 0;
#pragma unroll
    for (int c = 0; c < Scored::kChunks; ++c)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float4 x = shared_float4(lay.keys() + (c * kRows + r) * 128 + 16 * (2 * part + i));
            bad |= broken(x.x) | broken(x.y) | broken(x.z) | broken(x.w);
        }
    bad = __ballot_sync(~0u, bad != 0) >> (lane_id() & 28) & 15;
    // Rows differ within a warp, and lists are searched by whole ones: one row after the other.
    for (int i = 0; i < 8; ++i) {
        if (__shfl_sync(~0u, bad, 4 * i) == 0) continue;
        const int key = keys.begin + 8 * (static_cast<int>(threadIdx.x) / 32) + i;
        bool seen = false;
        for (int head = heads.begin; head < heads.end && key < keys.end; ++head) {
            const Mask mask(args.n, segment, block.batch, head);
            const Range queries = mask.queries_of(key, key + 1);
            const RowVectors vectors(args, block.batch, head, segment);
            for (Walk walk(mask, keys, mask.steps_at_once(keys.begin, covering(queries, kColumns))); walk.more();
                 walk.next())
                for (int j = lane_id(); j < kColumns; j += 32) {
                    const int q = walk.row() + j;
                    seen = seen || (walk.mask.visible(q, key) && vectors.lse[q] != infinity());
                }
        }
        if (__any_sync(~0u, seen)) continue;
        const float zeros[4] = {0.f, 0.f, 0.f, 0.f};
        for (int piece = lane_id(); piece < 8 * Scored::kChunks; piece += 32)
            store_float4(
                lay.keys() + (piece / 8 * kRows + 8 * (static_cast<int>(threadIdx.x) / 32) + i) * 128 + piece % 8 * 16,
                zeros);
    }
    async_fence();
    barrier_sync(kTurn, kThreads);
}

// Streams the queries of a block's heads.
__device__ inline void produce(const HopperAttentionFusedArgs& all, const Layout& lay, const Block& block,
                               const Segment& segment, Range rows, Range heads) {
    const AttentionGradientArgs& args = all.base;
    const Extents& n = args.n;
    const int lane = lane_id(), key_head = heads.begin / n.group;
    RingCursor<kStages> at;
    if (lane == 0) {
        mbarrier_expect(lay.rows_here(), kRowBytes);
        const int first = segment.first_key + rows.begin;
        load_chunks<kRows>(lay.keys(), all.key, lay.rows_here(), 0, Scored::kChunks, first, key_head, block.batch);
        load_chunks<kRows>(lay.values(), all.value, lay.rows_here(), 0, Valued::kChunks, first, key_head, block.batch);
    }
    __syncwarp();
    for (int head = heads.begin; head < heads.end; ++head) {
        const Mask mask(n, segment, block.batch, head);
        const Range queries = mask.queries_of(rows.begin, rows.end);
        const RowVectors vectors(args, block.batch, head, segment);
        for (Walk walk(mask, rows, mask.steps_at_once(rows.begin, covering(queries, kColumns))); walk.more();
             walk.next()) {
            const int first = walk.row();
            Row stats[kColumns / 32];
#pragma unroll
            for (int i = 0; i < kColumns / 32; ++i) {
                const int q = first + lane + 32 * i;
                stats[i] = {infinity(), 0.f};
                if (queries.contains(q)) stats[i] = {vectors.lse[q], vectors.delta[q]};
            }
            warp_wait(lay.empty(at.slot), at.parity ^ 1);
            float* const to = reinterpret_cast<float*>(__cvta_shared_to_generic(lay.vectors(at.slot)));
#pragma unroll
            for (int i = 0; i < kColumns / 32; ++i) {
                to[lane + 32 * i] = stats[i].lse;
                to[kColumns + lane + 32 * i] = stats[i].delta;
            }
            __syncwarp();
            if (lane == 0) {
                const int from = segment.first_query + first;
                mbarrier_expect(lay.full(at.slot), kStageBytes);
                load_chunks<kColumns>(lay.queries(at.slot), all.query, lay.full(at.slot), 0, Scored::kChunks, from,
                                      head, block.batch);
                load_chunks<kColumns>(lay.grads(at.slot), all.grad, lay.full(at.slot), 0, Valued::kChunks, from, head,
                                      block.batch);
            }
            __syncwarp();
            at.advance();
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads + 128, 1)
    streamkl_attention_fused(const __grid_constant__ HopperAttentionFusedArgs all) {
    extern __shared__ unsigned char shared[];
    const AttentionGradientArgs& args = all.base;
    const Extents& n = args.n;
    const int out_heads = n.heads / n.group;
    Block block = block_of(blockIdx.x, n, out_heads, n.batch * out_heads, false);
    const Range heads{block.head * n.group, (block.head + 1) * n.group};
    const Segment segment = Mask::locate(n, heads.begin, block);
    const Range rows{block.tile * kRows, min(block.tile * kRows + kRows, segment.keys)};
    if (Mask::kRagged && rows.empty()) return;
    // Uniform over the warp by construction, which the compiler must be told: descriptors then live in uniform
    // registers.
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);

    const Layout lay{(static_cast<u32>(__cvta_generic_to_shared(shared)) + 1023) & ~1023u};
    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            mbarrier_init(lay.full(i), 1);
            mbarrier_init(lay.empty(i), kWarps * kArrivals);
        }
        mbarrier_init(lay.rows_here(), 1);
        mbarrier_publish();
    }
    __syncthreads();

    if (group == kGroups) {
        registers_lower<SKL_PRODUCER_REGISTERS>();
        if (threadIdx.x < kThreads + 32) produce(all, lay, block, segment, rows, heads);
        return;
    }

    registers_raise<SKL_CONSUMER_REGISTERS>();
    const int lane = lane_id(), warp = (threadIdx.x / 32) & 3;
    const int row = rows.begin + 16 * warp + Accumulators::first_row(lane);
    RingCursor<kStages> at;
    Strip<kOutTiles> out;
    Strip<kValueTiles> out_values;
    clear<kOutTiles>(out);
    clear<kValueTiles>(out_values);
    Row stats[kLaneRows];  // of stationary queries, which there are none of

    const u64 keys = swizzled_descriptor(lay.keys()), values = swizzled_descriptor(lay.values()),
              keys_out = swizzled_descriptor(lay.keys(), kRows * 128);
    const u64 queries = swizzled_descriptor(lay.queries(0)), grads = swizzled_descriptor(lay.grads(0));
    const u64 queries_out = swizzled_descriptor(lay.queries(0), kColumns * 128),
              grads_out = swizzled_descriptor(lay.grads(0), kColumns * 128);
    const u64 exchange = swizzled_descriptor(lay.exchange(group));
    const u32 exchange_to = fragment_address(lay.exchange(group), 16 * warp, lane);
    const u32 staging = lay.staging(group) + warp * 4 * kWarpSums;
    const auto stage = [](u64 first, int slot) { return first + static_cast<u64>(slot * (kStageBytes >> 4)); };
    mbarrier_wait(lay.rows_here(), 0);
    clear_unseen_keys(lay, args, block, segment, rows, heads);
    int turn = 0, buffer = 0;

#pragma unroll 1
    for (int head = heads.begin; head < heads.end; ++head) {
        const Mask mask(n, segment, block.batch, head);
        const Range seen = mask.queries_of(rows.begin, rows.end);
        float* const sums = Sums(all.workspace, n).of(block.batch, head, segment) + warp * kWarpSums;
        for (Walk walk(mask, rows, mask.steps_at_once(rows.begin, covering(seen, kColumns))); walk.more();
             walk.next()) {
            const int slot = at.slot;
            warp_wait(lay.full(slot), at.parity);  // or two arrivals could fall into one phase
            at.advance();
            if (turn++ % kGroups != group) {
                warp_arrive(lay.empty(slot));
                continue;
            }
            const bool full = walk.full(rows.begin, rows.end);
            if (!full) clear_unseen<Scored, kColumns>(lay.queries(slot), walk, seen, kWarpgroup + group);
            Strip<kTiles> t, d;
            wgmma_fence();
            multiply_rows<Scored, kRows, Scored::kChunks>(t[0], keys, stage(queries, slot), 0);
            multiply_rows<Valued, kRows, Valued::kChunks>(d[0], values, stage(grads, slot), 0);
            wgmma_commit();
            wgmma_wait<0>();
            fence_accumulators(t[0]);
            fence_accumulators(d[0]);
            if (full)
                logit_gradients<false>(t, d, stats, lay.vectors(slot), walk, row, args.numbers);
            else
                logit_gradients<true>(t, d, stats, lay.vectors(slot), walk, row, args.numbers);
            StripA<KeyTile::kCode, kTiles> p, x;
            strip_to_a<KeyTile::kCode, kTiles>(p, t);
            strip_to_a<KeyTile::kCode, kTiles>(x, d);
#pragma unroll
            for (int k = 0; k < kTiles / 2; ++k) store_fragment(exchange_to + buffer * kExchangeBytes, k, x[k][0].r[0]);
            async_fence();
            wgmma_fence();
            multiply_out<Valued>(out_values[0], p, stage(grads_out, slot));
            wgmma_commit();
            barrier_sync(kWarpgroup + group, 128);
            const u64 exchanged = exchange + static_cast<u64>(buffer * (kExchangeBytes >> 4));
            multiply_keys(out[0], exchanged, stage(queries_out, slot));
            wgmma_commit();
            float dq[kOutTiles][4];
            multiply_queries(dq, exchanged, keys_out);
            wgmma_commit();
            wgmma_wait<1>();
            fence_accumulators(out_values[0]);
            fence_accumulators(out[0]);
            warp_arrive(lay.empty(slot));
            buffer ^= 1;
            if (lane == 0) bulk_wait_read<0>();
            wgmma_wait<0>();
            fence_accumulators(dq);
            __syncwarp();
#pragma unroll
            for (int i = 0; i < kOutTiles; ++i) store_float4(staging + (i * 32 + lane) * 16, dq[i]);
            async_fence();
            __syncwarp();
            if (lane == 0) {
                bulk_add(sums + static_cast<i64>(walk.tile()) * AttentionSums::kSums, staging, 4 * kWarpSums);
                bulk_commit();
            }
        }
    }
    const bool total = add_up(lay.queries(0), out, out_values, group);
    if (lane == 0) bulk_wait();
    if (!total) return;
    int exponent[kLaneRows];
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) exponent[i] = 0;
    write_gradients(args, out, out_values, exponent, row);
}

// The tile of queries that a block of the small kernels has.
struct Entry {
    int batch, head, tile;
    Segment segment;
    __device__ Entry(const Sums& space, const Extents& n) {
        const int pair = blockIdx.x / space.tiles;
        batch = pair / space.heads;
        head = pair % space.heads;
        WorkTile whole{static_cast<int>(blockIdx.x % space.tiles), 0, 1, 0, {0, kNoLimit}};
        segment = Mask::locate<kColumns, true>(n, head, whole);
        tile = whole.tile;
    }
};

extern "C" __global__ void __launch_bounds__(kHelperThreads)
    streamkl_attention_fused_prepare(const __grid_constant__ HopperAttentionFusedArgs all) {
    const Sums space(all.workspace, all.base.n);
    float4* const sums = reinterpret_cast<float4*>(space.sums + static_cast<i64>(blockIdx.x) * AttentionSums::kSums);
    for (int i = threadIdx.x; i < AttentionSums::kSums / 4; i += kHelperThreads)
        sums[i] = make_float4(0.f, 0.f, 0.f, 0.f);
}

// A quad's part of a tile of 8 columns is 64 contiguous bytes of the sums: the first halves of its four elements are the
// upper row, the others the lower one. A thread takes whole parts, neighbours those of one row. Rows without keys get
// zeros, whatever the keys of their tile hold.
extern "C" __global__ void __launch_bounds__(kHelperThreads)
    streamkl_attention_fused_finish(const __grid_constant__ HopperAttentionFusedArgs all) {
    const AttentionGradientArgs& args = all.base;
    const Sums space(all.workspace, args.n);
    const Entry at(space, args.n);
    const float* const sums = space.sums + static_cast<i64>(blockIdx.x) * AttentionSums::kSums;
    const RowVectors vectors(args, at.batch, at.head, at.segment);
    const float factor = Score::factor(args.out_scale);
    constexpr int kParts = KeyTile::kHeadDim / 8;
    for (int i = threadIdx.x; i < 32 * kParts; i += kHelperThreads) {
        const int part = i % kParts, quad = i / kParts;
        const float4* const from =
            reinterpret_cast<const float4*>(sums + quad / 8 * kWarpSums + (part * 32 + quad % 8 * 4) * 4);
        const float4 x[4] = {from[0], from[1], from[2], from[3]};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int q = at.tile * kColumns + quad / 8 * 16 + quad % 8 + 8 * half;
            if (q >= at.segment.queries) continue;
            const bool kept = vectors.lse[q] != infinity();
            const u64 to = all.out_q.pointer + (at.batch * all.out_q.batch + at.head * all.out_q.head +
                                                (at.segment.first_query + q) * all.out_q.row + 8 * part) *
                                                   E::kBytes;
            u32 packed[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                u32 planes[1];
                E::split(kept ? (half ? x[j].z : x[j].x) * factor : 0.f, kept ? (half ? x[j].w : x[j].y) * factor : 0.f,
                         planes);
                packed[j] = planes[0];
            }
            *reinterpret_cast<uint4*>(to) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
        }
    }
}

// The gradient of the indexer's keys on Hopper, from what the score kernels leave: gradients of logits and gates
// (tile/strip.cuh), and queries times their weights (kernels/indexer_tiles.cu):
//
//   dk_j = sum over rows and heads of [gate] dI (w_h q_h)
//
//   block     as many units of work as every other (indexer_gradient/units.cuh): heads of row tiles, of one block of
//             256 keys after another
//   producer  one warp; streams a row tile's gradients for these keys, two buffers, and through a ring each head's
//             weighted queries and gates
//   consumers two warpgroups, 128 of the keys each: the gradients, transposed, stay in registers for all heads of a row
//             tile; closed gates make zeros of them, which is operand A; dK += A Q, in registers over all units
//
//   barrier        arrivals                 waited for by
//   full[i]        1 (+ bytes)              consumers: slot i is filled
//   empty[i]       one per consumer warp    the producer: slot i may be overwritten
//   strip_full[i], strip_empty[i]           the same for gradients
//
// Who has a block's first unit adds to the sums, of which it is the only owner in this launch; what a block of threads
// has of a block of keys that another began goes beside them (kernels/indexer_gated_join.cu).
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "pipeline/barriers.cuh"
#include "pipeline/ring.cuh"
#include "ptx/bulk.cuh"
#include "ptx/registers.cuh"
#include "kernels/indexer_gradient/units.cuh"
#include "tile/gates.cuh"
#include "tile/index_parts.cuh"
#include "tile/swizzled.cuh"

constexpr bool kGated = SKL_GATED;
constexpr int kGroups = 2, kKeyTiles = kKeyBlock / kStripTile, kTilesEach = kKeyTiles / kGroups, kRing = SKL_STAGES;
constexpr int kDepth = IndexerGradients::kKeySums;
static_assert(IndexerGradients::kPartials == kDepth, "plan: what lies beside the sums has rows like theirs");

// Shared memory, as addresses.
struct Layout {
    static constexpr int kGateBytes = kGated ? kKeyTiles * kGateWords * 4 : 0;
    static constexpr int kStage = kOperandBytes + kGateBytes, kStrip = kKeyTiles * kStripTileBytes;
    static constexpr int kBytes = 1024 + 2 * kStrip + kRing * kStage + 8 * (2 * kRing + 4);
    u32 base;
    __device__ u32 strip(int slot) const { return base + slot * kStrip; }
    __device__ u32 queries(int slot) const { return base + 2 * kStrip + slot * kStage; }
    __device__ u32 gates(int slot, int tile) const { return queries(slot) + kOperandBytes + tile * kGateWords * 4; }
    __device__ u32 full(int slot) const { return queries(kRing) + 8 * slot; }
    __device__ u32 empty(int slot) const { return full(kRing) + 8 * slot; }
    __device__ u32 strip_full(int slot) const { return empty(kRing) + 8 * slot; }
    __device__ u32 strip_empty(int slot) const { return strip_full(2) + 8 * slot; }
};
static_assert(Layout::kBytes == SKL_SMEM_BYTES && Layout::kStage % 1024 == 0, "plan: smem_bytes");

// One warp, its first lane issues the copies.
__device__ inline void produce(const IndexerArgs& args, const Layout& shared) {
    RingCursor<kRing> at;
    RingCursor<2> strip;
    const i64 row_tiles = args.strip_rows / kStripTile;
    for (Walk walk(args, blockIdx.x, gridDim.x); walk.more();) {
        walk.start();
        while (walk.left > 0) {
            const int run = walk.run(), group = walk.group();
            if (lane_id() == 0) {
                const int entry = walk.batch * args.groups + group, head = walk.head % args.index_heads;
                const int key_tile = walk.block * kKeyTiles;
                const StripRow row(args, walk.batch, walk.tile);
                mbarrier_wait(shared.strip_empty(strip.slot), strip.parity ^ 1);
                mbarrier_expect(shared.strip_full(strip.slot), Layout::kStrip);
                bulk_load(shared.strip(strip.slot), reinterpret_cast<const void*>(row.tile(args, group, key_tile)),
                          Layout::kStrip, shared.strip_full(strip.slot));
                const u64 step = static_cast<u64>(row.width) * (kGateWords * 4);
                u64 gates = row.gates(args, group, head, key_tile);
                u64 queries = args.weighted_queries + ((static_cast<i64>(entry) * args.index_heads + head) * row_tiles +
                                                       walk.tile - args.first_tile) *
                                                          kOperandBytes;
                for (int i = 0; i < run; ++i) {
                    const u32 full = shared.full(at.slot);
                    mbarrier_wait(shared.empty(at.slot), at.parity ^ 1);
                    mbarrier_expect(full, Layout::kStage);
                    bulk_load(shared.queries(at.slot), reinterpret_cast<const void*>(queries), kOperandBytes, full);
                    if constexpr (kGated)
                        bulk_load(shared.gates(at.slot, 0), reinterpret_cast<const void*>(gates), Layout::kGateBytes,
                                  full);
                    queries += row_tiles * kOperandBytes;
                    gates += step;
                    at.advance();
                }
            }
            __syncwarp();
            strip.advance();
            walk.next(run);
        }
    }
}

// Sums of the warp's keys of a tile, into rows of kDepth floats: added to those that are there, or in their place.
__device__ inline void leave(const float (&x)[kOperandTiles][4], float* to, int first, int count, bool added) {
#pragma unroll
    for (int half = 0; half < Accumulators::kRows; ++half) {
        const int key = first + Accumulators::first_row(lane_id()) + Accumulators::below(half);
        if (key >= count) continue;
        float2* const row =
            reinterpret_cast<float2*>(to + static_cast<i64>(key) * kDepth + Accumulators::first_column(lane_id()));
        float2 before[kOperandTiles];  // all on their way before the first is waited for
#pragma unroll
        for (int d = 0; d < kOperandTiles; ++d) before[d] = added ? row[4 * d] : make_float2(0.f, 0.f);
#pragma unroll
        for (int d = 0; d < kOperandTiles; ++d)
            row[4 * d] = make_float2(before[d].x + x[d][Accumulators::element(half, 0)],
                                     before[d].y + x[d][Accumulators::element(half, 1)]);
    }
}

// A consumer: one warpgroup.
__device__ inline void consume(const IndexerArgs& args, const Layout& shared, int which) {
    const int warp = threadIdx.x / 32 % 4;
    float out[kTilesEach][kOperandTiles][4];
    RingCursor<kRing> at;
    RingCursor<2> strip;
    for (Walk walk(args, blockIdx.x, gridDim.x); walk.more();) {
        walk.start();
        const bool begins = walk.begins();
        clear_sums(out);
        const int first_key = walk.block * kKeyBlock + which * (kTilesEach * kStripTile);
        while (walk.left > 0) {
            const int run = walk.run();
            Gradients64 d[kTilesEach];
            mbarrier_wait(shared.strip_full(strip.slot), strip.parity);
            const Range keys = keys_of_tile(args, walk.batch, walk.tile);
#pragma unroll
            for (int t = 0; t < kTilesEach; ++t) {
                load_keys_of_strip(d[t], shared.strip(strip.slot) + (which * kTilesEach + t) * kStripTileBytes, warp);
                // Of keys that no row sees nothing has been written.
                const u32 met = keys.contains(first_key + t * kStripTile) ? ~0u : 0u;
#pragma unroll
                for (int k = 0; k < 4; ++k)
#pragma unroll
                    for (int r = 0; r < 4; ++r) d[t][k][r] &= met;
            }
            __syncwarp();
            warp_arrive(shared.strip_empty(strip.slot));
            strip.advance();
#pragma unroll 1
            for (int i = 0; i < run; ++i) {
                mbarrier_wait(shared.full(at.slot), at.parity);
                Gradients64 a[kTilesEach];
#pragma unroll
                for (int t = 0; t < kTilesEach; ++t) {
                    if constexpr (kGated)
                        gate_keys(a[t], d[t], shared.gates(at.slot, which * kTilesEach + t), warp);
                    else
                        gate_nothing(a[t], d[t]);
                }
                multiply_operands(out, a, shared.queries(at.slot));
                __syncwarp();
                warp_arrive(shared.empty(at.slot));
                at.advance();
            }
            walk.next(run);
        }
        const int local = which * (kTilesEach * kStripTile) + 16 * warp;
        float* const sums =
            reinterpret_cast<float*>(args.key_sums) +
            (static_cast<i64>(walk.entry / args.key_blocks) * args.keys + walk.block * kKeyBlock) * kDepth;
        float* const beside =
            reinterpret_cast<float*>(args.partials) + static_cast<i64>(blockIdx.x) * kKeyBlock * kDepth;
#pragma unroll
        for (int t = 0; t < kTilesEach; ++t)
            leave(out[t], begins ? sums : beside, local + t * kStripTile,
                  begins ? args.keys - walk.block * kKeyBlock : kKeyBlock, begins);
    }
}

extern "C" __global__ void __launch_bounds__(128 * (kGroups + 1), 1)
    streamkl_indexer_gated_key(const __grid_constant__ IndexerArgs args) {
    extern __shared__ __align__(16) unsigned char bytes[];
    const Layout shared{(static_cast<u32>(__cvta_generic_to_shared(bytes)) + 1023) & ~1023u};
    if (threadIdx.x == 0) {
        for (int i = 0; i < kRing; ++i) {
            mbarrier_init(shared.full(i), 1);
            mbarrier_init(shared.empty(i), 4 * kGroups * kArrivals);
        }
        for (int i = 0; i < 2; ++i) {
            mbarrier_init(shared.strip_full(i), 1);
            mbarrier_init(shared.strip_empty(i), 4 * kGroups * kArrivals);
        }
        mbarrier_publish();
    }
    __syncthreads();
    const int which = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128, 0);
    if (which == kGroups) {
        registers_lower<40>();
        if (threadIdx.x / 32 == 4 * kGroups) produce(args, shared);
    } else {
        registers_raise<232>();
        consume(args, shared, which);
    }
}

// Gradients of the indexer's queries and weights on Hopper, from what the score kernels leave: gradients of logits and
// gates (tile/strip.cuh). With x_h = (gate_h . dI) K of a row, dq_h = w_h x_h and dw_h = q_h . x_h.
//
//   block     as many units of work as every other (indexer_gradient/items.cuh): key tiles of one item after another,
//             64 query rows of kGroups * kHeads heads of one group
//   producer  one warp; streams keys, the strip's tile and the heads' gates, 64 keys at a time, through a ring
//   consumers kGroups warpgroups with kHeads heads each: operand A from the strip's tile, which they share, and gates;
//             X += A K, in registers over all keys. One builds operands while another's products are under way
//
//   barrier   arrivals                 waited for by
//   full[i]   1 (+ bytes)              consumers: slot i is filled
//   empty[i]  one per consumer warp    the producer: slot i may be overwritten
//
// A consumer's queries come to its own part of shared memory while it multiplies; there x becomes dq at the end, and
// leaves in whole rows. Each output element has one owner and a fixed order of addition.
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "pipeline/barriers.cuh"
#include "pipeline/ring.cuh"
#include "ptx/bulk.cuh"
#include "ptx/registers.cuh"
#include "kernels/indexer_gradient/items.cuh"
#include "tile/gates.cuh"
#include "tile/index_parts.cuh"
#include "tile/swizzled.cuh"

using E = Element<SKL_S_ELEMENT>;
constexpr bool kGated = SKL_GATED;
constexpr int kGroups = 2, kHeads = SKL_HEADS, kRing = SKL_STAGES, kBlockHeads = kGroups * kHeads;
constexpr int kPieces = SKL_S_DIM / 8;  // of 16 bytes, of a row

// Shared memory, as addresses.
struct Layout {
    static constexpr int kGateBytes = kGated ? kBlockHeads * kGateWords * 4 : 0;
    static constexpr int kStage = kOperandBytes + kStripTileBytes + kGateBytes;
    static constexpr int kBytes = 1024 + kBlockHeads * kOperandBytes + kRing * kStage + 16 * kRing;
    u32 base;
    __device__ u32 queries(int head) const { return base + head * kOperandBytes; }
    __device__ u32 keys(int slot) const { return base + kBlockHeads * kOperandBytes + slot * kStage; }
    __device__ u32 strip(int slot) const { return keys(slot) + kOperandBytes; }
    __device__ u32 gates(int slot, int head) const { return strip(slot) + kStripTileBytes + head * kGateWords * 4; }
    __device__ u32 full(int slot) const { return keys(kRing) + 8 * slot; }
    __device__ u32 empty(int slot) const { return full(kRing) + 8 * slot; }
};
static_assert(Layout::kBytes == SKL_SMEM_BYTES && Layout::kStage % 1024 == 0, "plan: smem_bytes");
static_assert(IndexerGradients::kKeptFlags == 4 * kGroups && IndexerGradients::kItems == 1,
              "plan: a flag of each warp");
static_assert(SKL_SQ_VECTOR && SKL_S_DIM % 8 == 0, "plan: elements come 16 bytes at a time");

// Where heads do not fill an item, it computes some twice.
__device__ inline int head_of(const IndexerArgs& args, const ItemWalk& walk, int i) {
    return min(walk.head + i, args.index_heads - 1);
}

// One warp, its first lane issues the copies.
__device__ inline void produce(const IndexerArgs& args, const Layout& shared) {
    RingCursor<kRing> at;
    for (ItemWalk walk(args, blockIdx.x, gridDim.x); walk.more(); walk.next()) {
        walk.take(kBlockHeads);
        if (lane_id() == 0) {
            const int key_head = args.index_key_heads > 1 ? walk.group : 0;
            u64 keys = args.key_tiles + (static_cast<i64>(walk.batch * args.index_key_heads + key_head) *
                                             ceil_div(args.keys, kStripTile) +
                                         walk.keys.begin) *
                                            kOperandBytes;
            const StripRow row(args, walk.batch, walk.tile);
            u64 strip = row.tile(args, walk.group, walk.keys.begin);
            u64 gates[kBlockHeads];
#pragma unroll
            for (int i = 0; i < kBlockHeads; ++i)
                gates[i] = row.gates(args, walk.group, head_of(args, walk, i), walk.keys.begin);
            for (int i = walk.keys.begin; i < walk.keys.end; ++i) {
                const u32 full = shared.full(at.slot);
                mbarrier_wait(shared.empty(at.slot), at.parity ^ 1);
                mbarrier_expect(full, Layout::kStage);
                bulk_load(shared.keys(at.slot), reinterpret_cast<const void*>(keys), kOperandBytes, full);
                bulk_load(shared.strip(at.slot), reinterpret_cast<const void*>(strip), kStripTileBytes, full);
                if constexpr (kGated)
#pragma unroll
                    for (int h = 0; h < kBlockHeads; ++h) {
                        bulk_load(shared.gates(at.slot, h), reinterpret_cast<const void*>(gates[h]), kGateWords * 4,
                                  full);
                        gates[h] += kGateWords * 4;
                    }
                keys += kOperandBytes;
                strip += kStripTileBytes;
                at.advance();
            }
        }
        __syncwarp();
    }
}

// Where a row's piece of 16 bytes lies in a tile of queries.
__device__ inline u32 piece_address(u32 tile, int row, int piece) {
    return tile + piece / 8 * (kStripTile * 128) + row * 128 + ((piece % 8 ^ (row & 7)) << 4);
}

// The warp's 16 rows of a head's queries are on their way.
__device__ inline void fetch_queries(const IndexerArgs& args, const ItemWalk& walk, int head, u32 tile, int warp) {
    const Tensor4& x = args.index_q;
    const u64 from = x.pointer + (walk.batch * x.batch + (walk.group * args.index_heads + head) * x.head) * E::kBytes;
#pragma unroll 4
    for (int i = lane_id(); i < 16 * kPieces; i += 32) {
        const int local = 16 * warp + i / kPieces, row = walk.tile * kStripTile + local, piece = i % kPieces;
        const bool there = row < args.queries;
        cp_async_16(piece_address(tile, local, piece),
                    reinterpret_cast<const void*>(from + ((there ? row : 0) * x.row + 8 * piece) * E::kBytes),
                    there ? 16 : 0);
    }
}

// What the lane's two rows have to their gradients, asked for long before it is needed.
struct RowFactors {
    float weight[kHeads][Accumulators::kRows];  // of dq
    float share[Accumulators::kRows];           // of dw: 1; exactly nothing of a row without gradient, whatever its
                                                // queries and weights hold; of one that is NaN all is, though gates
                                                // may be closed
    __device__ void read(const IndexerArgs& args, const ItemWalk& walk, int first, int warp) {
        const int heads = args.groups * args.index_heads;
#pragma unroll
        for (int half = 0; half < Accumulators::kRows; ++half) {
            const int r =
                walk.tile * kStripTile + 16 * warp + Accumulators::first_row(lane_id()) + Accumulators::below(half);
            float4 stats = make_float4(0.f, 0.f, 0.f, 0.f);
            if (r < args.queries)
                stats =
                    reinterpret_cast<const float4*>(args.row_stats)[static_cast<i64>(walk.entry()) * args.queries + r];
            const bool live = stats.z != 0.f, poisoned = !is_finite(stats.x + stats.y + stats.z);
            share[half] = poisoned ? not_a_number() : live ? 1.f : 0.f;
#pragma unroll
            for (int h = 0; h < kHeads; ++h) {
                const i64 head = walk.batch * heads + walk.group * args.index_heads + head_of(args, walk, first + h);
                const float w = live ? reinterpret_cast<const float*>(args.weights)[head * args.queries + r] : 0.f;
                weight[h][half] = poisoned ? not_a_number() : w;
            }
        }
    }
};

// dw of the warp's 16 rows of a head; x times the weight takes the place of the queries, rounded.
__device__ inline void finish_rows(const IndexerArgs& args, const ItemWalk& walk, int head,
                                   const float (&x)[kOperandTiles][4], const RowFactors& rows, int which, u32 tile,
                                   int warp) {
    const int lane = lane_id();
#pragma unroll
    for (int half = 0; half < Accumulators::kRows; ++half) {
        const int local = 16 * warp + Accumulators::first_row(lane) + Accumulators::below(half);
        const u32 row = piece_address(tile, local, 0) + Accumulators::first_column(lane) * E::kBytes;
        const auto pair = [row](int d) {
            return reinterpret_cast<u32*>(__cvta_shared_to_generic((row ^ d % 8 << 4) + d / 8 * (kStripTile * 128)));
        };
        float along = 0.f;
#pragma unroll
        for (int d = 0; d < kPieces; ++d) {
            const float2 q = E::widen(*pair(d));
            along =
                fmaf(x[d][Accumulators::element(half, 0)], q.x, fmaf(x[d][Accumulators::element(half, 1)], q.y, along));
        }
        const float w = rows.weight[which][half], share = rows.share[half];
#pragma unroll
        for (int d = 0; d < kPieces; ++d) {
            u32 planes[1];
            E::split(w * x[d][Accumulators::element(half, 0)], w * x[d][Accumulators::element(half, 1)], planes);
            *pair(d) = planes[0];
        }
        along = Accumulators::sum_row(along);
        const int r = walk.tile * kStripTile + local;
        if (r < args.queries && args.out_weights.pointer && Accumulators::writes_row(lane)) {
            const Tensor3& out = args.out_weights;
            Element<SKL_W_ELEMENT>::store(
                out.pointer +
                    (walk.batch * out.batch + (walk.group * args.index_heads + head) * out.head + r * out.row) *
                        Element<SKL_W_ELEMENT>::kBytes,
                share == 0.f ? 0.f : along * share);
        }
    }
}

// The warp's 16 rows of dq, from shared memory in whole rows.
__device__ inline void write_rows(const IndexerArgs& args, const ItemWalk& walk, int head, u32 tile, int warp) {
    const Tensor4& out = args.out_q;
    const u64 to =
        out.pointer + (walk.batch * out.batch + (walk.group * args.index_heads + head) * out.head) * E::kBytes;
    const bool wide = vector_rows(out, E::kBytes);
#pragma unroll 4
    for (int i = lane_id(); i < 16 * kPieces; i += 32) {
        const int local = 16 * warp + i / kPieces, row = walk.tile * kStripTile + local, piece = i % kPieces;
        if (row >= args.queries) continue;
        const uint4 x = *reinterpret_cast<const uint4*>(__cvta_shared_to_generic(piece_address(tile, local, piece)));
        const u64 here = to + (static_cast<i64>(row) * out.row + 8 * piece * out.column) * E::kBytes;
        if (wide) {
            *reinterpret_cast<uint4*>(here) = x;
        } else {
            const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
            for (int j = 0; j < 8; ++j)
                *reinterpret_cast<u16*>(here + j * out.column * E::kBytes) =
                    static_cast<u16>(words[j / 2] >> 16 * (j % 2));
        }
    }
}

// Sums of a warp that go on in the next share: kept in memory, and there when the warp's flag says which strip they are
// of.
struct Kept {
    float4* sums;
    int* flag;
    __device__ Kept(const IndexerArgs& args, int share)
        : sums(reinterpret_cast<float4*>(args.kept_sums) +
               static_cast<i64>(share) * (kHeads * kOperandTiles * 128 * kGroups) + threadIdx.x),
          flag(reinterpret_cast<int*>(args.kept_flags) + share * (4 * kGroups) + threadIdx.x / 32) {}
    __device__ float4* at(int head, int d) const { return sums + (head * kOperandTiles + d) * (128 * kGroups); }
};

__device__ inline void keep(const IndexerArgs& args, const float (&x)[kHeads][kOperandTiles][4]) {
    const Kept kept(args, blockIdx.x);
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
#pragma unroll
        for (int d = 0; d < kOperandTiles; ++d)
            *kept.at(h, d) = make_float4(x[h][d][0], x[h][d][1], x[h][d][2], x[h][d][3]);
    __threadfence();
    __syncwarp();
    if (lane_id() == 0) atomicExch(kept.flag, args.strip_number + 1);
}

// Adds what the shares before have of the item, in their order.
__device__ inline void add_kept(const IndexerArgs& args, const ItemWalk& walk, float (&x)[kHeads][kOperandTiles][4]) {
    const int shares = gridDim.x;
    int share = static_cast<int>(static_cast<i64>(walk.first) * shares / walk.items.before[walk.items.count]);
    while (walk.items.first_of(share + 1, shares) <= walk.first) ++share;
#pragma unroll 1
    for (; share < blockIdx.x; ++share) {
        if (walk.items.first_of(share, shares) == walk.items.first_of(share + 1, shares)) continue;
        const Kept kept(args, share);
        if (lane_id() == 0)
            while (atomicAdd(kept.flag, 0) != args.strip_number + 1) {
            }
        __syncwarp();
        __threadfence();
#pragma unroll
        for (int h = 0; h < kHeads; ++h)
#pragma unroll
            for (int d = 0; d < kOperandTiles; ++d) {
                if (d % 8 == 0) __syncwarp();  // or more reads are under way than there are registers for
                const float4 y = __ldcg(kept.at(h, d));
                x[h][d][0] += y.x;
                x[h][d][1] += y.y;
                x[h][d][2] += y.z;
                x[h][d][3] += y.w;
            }
    }
}

// A consumer: one warpgroup.
__device__ inline void consume(const IndexerArgs& args, const Layout& shared, int which) {
    const int warp = threadIdx.x / 32 % 4, mine = which * kHeads;
    float out[kHeads][kOperandTiles][4];
    RingCursor<kRing> at;
    const u32 word = 4 * (32 * warp + gate_word(lane_id()));
    for (ItemWalk walk(args, blockIdx.x, gridDim.x); walk.more(); walk.next()) {
        walk.take(kBlockHeads);
        RowFactors rows;
        rows.read(args, walk, mine, warp);
        if (walk.finishes)
#pragma unroll
            for (int h = 0; h < kHeads; ++h)
                fetch_queries(args, walk, head_of(args, walk, mine + h), shared.queries(mine + h), warp);
        cp_async_commit();
        clear_sums(out);
#pragma unroll 1
        for (int i = walk.keys.begin; i < walk.keys.end; ++i) {
            mbarrier_wait(shared.full(at.slot), at.parity);
            Gradients64 d, a[kHeads];
            load_rows_of_strip(d, shared.strip(at.slot), warp);
#pragma unroll
            for (int h = 0; h < kHeads; ++h) {
                if constexpr (kGated)
                    gate_rows(a[h], d, __float_as_uint(shared_float(shared.gates(at.slot, mine + h) + word)));
                else
                    gate_nothing(a[h], d);
            }
            multiply_operands(out, a, shared.keys(at.slot));
            __syncwarp();
            warp_arrive(shared.empty(at.slot));
            at.advance();
        }
        cp_async_wait<0>();
        __syncwarp();
        if (!walk.finishes) {
            keep(args, out);
            continue;
        }
        if (!walk.starts()) add_kept(args, walk, out);
#pragma unroll
        for (int h = 0; h < kHeads; ++h)
            if (walk.head + mine + h < args.index_heads)
                finish_rows(args, walk, walk.head + mine + h, out[h], rows, h, shared.queries(mine + h), warp);
        __syncwarp();
        if (args.out_q.pointer)
#pragma unroll 1
            for (int h = 0; h < kHeads; ++h)
                if (walk.head + mine + h < args.index_heads)
                    write_rows(args, walk, walk.head + mine + h, shared.queries(mine + h), warp);
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(128 * (kGroups + 1), 1)
    streamkl_indexer_gated_query(const __grid_constant__ IndexerArgs args) {
    extern __shared__ __align__(16) unsigned char bytes[];
    const Layout shared{(static_cast<u32>(__cvta_generic_to_shared(bytes)) + 1023) & ~1023u};
    if (threadIdx.x == 0) {
        for (int i = 0; i < kRing; ++i) {
            mbarrier_init(shared.full(i), 1);
            mbarrier_init(shared.empty(i), 4 * kGroups * kArrivals);
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

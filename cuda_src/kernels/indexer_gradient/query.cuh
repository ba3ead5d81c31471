// Gradients of the indexer's queries and weights, of the rows of one strip. With g = [s > 0] dI, or dI without gates,
//
//   x_h = g_h K       dq_h = w_h x_h       dw_h = q_h . x_h
//
// for sum_j dI_j a(s_j) is the dot product of the query with what its gated gradients make of the keys.
//
//   block    kRows query rows of one head; kWarps warps of 16 rows each
//   stream   tiles of kColumns keys, and of the strip beside them, kStages in flight
//   per tile s = Q K^T as in the forward, the strip's tile as operand A with pairs of closed gates put to zero,
//            X += A K
//
// The kernel has said before what an IndexTile is, how it is loaded, and how it multiplies.
#pragma once
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "pipeline/ring.cuh"
#include "tile/index_parts.cuh"
#include "tile/gated.cuh"

using StripTile = Tile<SKL_S_ELEMENT, kColumns>;
using E = IndexTile::E;

constexpr int kTiles = kColumns / 8, kOutTiles = Products::kDepth / 8;
constexpr int kStageBytes = IndexTile::bytes(kColumns) + StripTile::bytes(kRows);
static_assert(IndexTile::bytes(kRows) + kStages * kStageBytes + Products::kAlignment == SKL_SMEM_BYTES,
              "plan: smem_bytes");

// Keys, some tiles at a time, and the gradients of the rows' logits for them.
struct Tiles {
    const IndexerArgs& args;
    u32 ring;
    HeadView keys;
    int entry, first_row, key, end;
    __device__ bool more() const { return key < end; }
    __device__ IndexTile tile(int i) const { return IndexTile{ring + i % kStages * kStageBytes}; }
    __device__ StripTile strip(int i) const { return {tile(i).base + IndexTile::bytes(kColumns)}; }
    __device__ void operator()(int i) {
        Products::load<kColumns, SKL_SK_VECTOR>(tile(i), keys, key, Range{0, args.keys});
        load_rows<kRows, true>(strip(i), strip_view<StripTile>(args, entry, key),
                               first_row - args.first_tile * kStripTile, Range{0, args.strip_rows});
        key += kColumns;
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, SKL_MIN_BLOCKS)
    streamkl_indexer_query(const __grid_constant__ IndexerArgs args) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int tile = (args.first_tile + args.tiles) * (kStripTile / kRows) - 1 - static_cast<int>(blockIdx.x);
    const int heads = args.groups * args.index_heads;
    const int batch = static_cast<int>(blockIdx.y) / heads, head = static_cast<int>(blockIdx.y) % heads;
    const int group = head / args.index_heads, first_row = tile * kRows;
    const Range keys = keys_of_tile(args, batch, tile * kRows / kStripTile);

    const u32 base = Products::aligned(static_cast<u32>(__cvta_generic_to_shared(shared)));
    const IndexTile queries{base};
    Tiles fetch{args,
                base + IndexTile::bytes(kRows),
                head_view<IndexTile>(args.index_k, batch, args.index_key_heads > 1 ? group : 0, 0),
                batch * args.groups + group,
                first_row,
                keys.begin,
                keys.end};
    Products::load<kRows, SKL_SQ_VECTOR>(queries, head_view<IndexTile>(args.index_q, batch, head, 0), first_row,
                                         Range{0, args.queries});
    cp_async_commit();
    fill_ring(fetch, fetch);

    const int lane = lane_id(), warp_row = (threadIdx.x / 32) * 16;
    const bool broken = *reinterpret_cast<const int*>(args.broken) != 0;
    Strip<kOutTiles> out;
    clear<kOutTiles>(out);
    const auto arrived = [](int) { Products::arrived(); };
    const int count = (keys.end - keys.begin) / kColumns;
    for (int i = 0; i < count; ++i) {
        advance_ring(i, fetch, fetch, arrived);
        Strip<kTiles> s;
        if constexpr (SKL_GATED) Products::scores(s, queries, warp_row, fetch.tile(i));
        const StripTile strip = fetch.strip(i);
        const auto gated = [&s, strip, warp_row](int k, FragmentA<IndexTile::kCode>& a) {
            load_a(a, strip, warp_row, 16 * k);
            if constexpr (SKL_GATED) close_gates<IndexTile::kCode>(a, s[0][2 * k], s[0][2 * k + 1]);
        };
        Products::accumulate<kTiles / 2>(out, gated, fetch.tile(i), broken);
    }
    cp_async_wait<0>();  // rows that see nothing have not waited for their queries
    __syncthreads();

    const float* const weights =
        reinterpret_cast<const float*>(args.weights) + static_cast<i64>(batch * heads + head) * args.queries;
#pragma unroll
    for (int half = 0; half < Accumulators::kRows; ++half) {
        const int local = warp_row + Accumulators::first_row(lane) + Accumulators::below(half), r = first_row + local;
        const bool there = r < args.queries;
        float4 stats = make_float4(0.f, 0.f, 0.f, 0.f);
        if (there)
            stats = reinterpret_cast<const float4*>(
                args.row_stats)[static_cast<i64>(batch * args.groups + group) * args.queries + r];
        // Exactly nothing of a row without gradient, whatever its queries and weights hold. Of one that is NaN all is,
        // though gates may be closed.
        const bool live = stats.z != 0.f, poisoned = !is_finite(stats.x + stats.y + stats.z);
        const float w = poisoned ? not_a_number() : live ? weights[r] : 0.f;
        float along = 0.f;
        const u64 to =
            args.out_q.pointer +
            (batch * args.out_q.batch + head * args.out_q.head + static_cast<i64>(r) * args.out_q.row) * E::kBytes;
#pragma unroll
        for (int d = 0; d < kOutTiles; ++d) {
            const int column = 8 * d + Accumulators::first_column(lane);
            const float x = out[0][d][Accumulators::element(half, 0)], y = out[0][d][Accumulators::element(half, 1)];
            const float2 q = Products::pair(queries, local, column);
            along = fmaf(x, q.x, fmaf(y, q.y, along));
            if (!there || !args.out_q.pointer) continue;
            if (SKL_S_DIM % 2 == 0 && column < SKL_S_DIM) {
                E::store_pair(to + column * E::kBytes, w * x, w * y);
            } else {
                if (column < SKL_S_DIM) E::store(to + column * E::kBytes, w * x);
                if (column + 1 < SKL_S_DIM) E::store(to + (column + 1) * E::kBytes, w * y);
            }
        }
        along = Accumulators::sum_row(along);
        if (there && args.out_weights.pointer && Accumulators::writes_row(lane)) {
            const Tensor3& x = args.out_weights;
            Element<SKL_W_ELEMENT>::store(
                x.pointer + (batch * x.batch + head * x.head + r * x.row) * Element<SKL_W_ELEMENT>::kBytes,
                live ? along * (poisoned ? w : 1.f) : 0.f);
        }
    }
}

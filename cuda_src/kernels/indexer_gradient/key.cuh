// The gradient of the indexer's keys, by the rows of one strip: dk_j = sum over rows and heads of [s > 0] dI w_h q_h.
//
//   block    kRows keys of one head of keys, and every so many of the strip's row tiles; kWarps warps of 16 keys each
//   step     one head of one row tile: its queries and weights, on their way while the step before is computed; and the
//            strip's tile, which stays for all heads of its group
//   per step s^T = K Q^T, the strip's tile transposed on its way to operand A, times the weight of its column, with
//            closed gates put to zero; dK += A Q
//
// Sums stay in registers over all rows and heads of the strip, and from strip to strip in float32; where blocks share
// keys each has sums of its own, which kernels/indexer_sum.cu adds up in their order.
//
// The kernel has said before what an IndexTile is, how it is loaded, and how it multiplies.
#pragma once
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "tile/index_parts.cuh"
#include "tile/gated.cuh"

using StripTile = Tile<SKL_S_ELEMENT, kRows>;

constexpr int kTiles = kColumns / 8, kOutTiles = Products::kDepth / 8;
constexpr int kQueryBytes = round_up(IndexTile::bytes(kColumns) + 4 * kColumns, larger(Products::kAlignment, 16)),
              kStripBytes = StripTile::bytes(kColumns);
static_assert(IndexTile::bytes(kRows) + 2 * (kQueryBytes + kStripBytes) + Products::kAlignment == SKL_SMEM_BYTES,
              "plan: smem_bytes");
static_assert(IndexerGradients::kKeySums == Products::kDepth, "plan: sums of whole rows");

// Where a block is among its products: tiles of rows, and in each the heads of all groups that read the keys.
struct Step {
    int tile, end, stride;
    int head, first_head, end_head, heads;  // of the call, and of a group
    int slot = 0;                           // of the strip's tile
    bool fresh = true;
    __device__ bool more() const { return tile < end; }
    __device__ int group() const { return head / heads; }
    // On to the next tile that has rows which see the keys.
    template <class MaySee>
    __device__ void skip_hidden(const MaySee& may_see) {
        while (tile < end && !may_see(tile)) tile += stride;
    }
    template <class MaySee>
    __device__ void next(const MaySee& may_see) {
        fresh = ++head % heads == 0;
        if (head == end_head) {
            head = first_head;
            tile += stride;
            skip_hidden(may_see);
        }
        slot ^= fresh;
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, SKL_MIN_BLOCKS)
    streamkl_indexer_key(const __grid_constant__ IndexerArgs args) {
    extern __shared__ __align__(16) unsigned char shared[];
    const int first_key = blockIdx.x * kRows, share = blockIdx.z;
    const int batch = static_cast<int>(blockIdx.y) / args.index_key_heads,
              key_head = static_cast<int>(blockIdx.y) % args.index_key_heads;
    const int groups = args.groups / args.index_key_heads;

    // Tiles of rows are those of the streamed side, kColumns high.
    Step at;
    at.stride = args.shares;
    at.tile = args.first_tile * (kStripTile / kColumns) + share;
    at.end = min((args.first_tile + args.tiles) * (kStripTile / kColumns), ceil_div(args.queries, kColumns));
    at.heads = args.index_heads;
    at.head = at.first_head = key_head * groups * args.index_heads;
    at.end_head = at.first_head + groups * args.index_heads;
    const auto may_see = [&args, batch, first_key](int tile) {
        Range keys = keys_of_tile(args, batch, tile * kColumns / kStripTile);
        keys.intersect({first_key, first_key + kRows});
        return !keys.empty();
    };
    at.skip_hidden(may_see);
    Step ahead = at;

    const u32 base = Products::aligned(static_cast<u32>(__cvta_generic_to_shared(shared)));
    const IndexTile keys{base};
    const auto queries = [base](int i) { return IndexTile{base + IndexTile::bytes(kRows) + (i & 1) * kQueryBytes}; };
    const auto weights = [&queries](int i) { return queries(i).base + IndexTile::bytes(kColumns); };
    const auto strip = [base](int slot) {
        return StripTile{base + IndexTile::bytes(kRows) + 2 * kQueryBytes + slot * kStripBytes};
    };
    const auto fetch = [&args, &ahead, &queries, &weights, &strip, batch, first_key](int i) {
        const int first = ahead.tile * kColumns;
        Products::load<kColumns, SKL_SQ_VECTOR>(queries(i), head_view<IndexTile>(args.index_q, batch, ahead.head, 0),
                                                first, Range{0, args.queries});
        const float* const from = reinterpret_cast<const float*>(args.weights) +
                                  static_cast<i64>(batch * args.groups * args.index_heads + ahead.head) * args.queries;
        for (int j = threadIdx.x; j < kColumns; j += kThreads) {
            const bool inside = first + j < args.queries;
            cp_async_4(weights(i) + 4 * j, from + (inside ? first + j : 0), inside ? 4 : 0);
        }
        if (ahead.fresh)
            load_rows<kColumns, true>(strip(ahead.slot),
                                      strip_view<StripTile>(args, batch * args.groups + ahead.group(), first_key),
                                      first - args.first_tile * kStripTile, Range{0, args.strip_rows});
    };

    Products::load<kRows, SKL_SK_VECTOR>(keys, head_view<IndexTile>(args.index_k, batch, key_head, 0), first_key,
                                         Range{0, args.keys});
    if (ahead.more()) {
        fetch(0);
        ahead.next(may_see);
    }
    cp_async_commit();

    const int lane = lane_id(), warp_row = (threadIdx.x / 32) * 16;
    const bool broken = *reinterpret_cast<const int*>(args.broken) != 0;
    Strip<kOutTiles> out;
    clear<kOutTiles>(out);
    for (int i = 0; at.more(); ++i, at.next(may_see)) {
        cp_async_wait<0>();
        Products::arrived();
        __syncthreads();
        if (ahead.more()) {
            fetch(i + 1);
            ahead.next(may_see);
        }
        cp_async_commit();
        Strip<kTiles> s;
        if constexpr (SKL_GATED) Products::scores(s, keys, warp_row, queries(i));
        const StripTile gradients = strip(at.slot);
        const u32 factors = weights(i);
        const auto weighted = [&s, gradients, factors, warp_row](int k, FragmentA<IndexTile::kCode>& a) {
            load_weighted_a<SKL_GATED>(a, gradients, warp_row, 16 * k, factors, s[0][2 * k], s[0][2 * k + 1]);
        };
        Products::accumulate<kTiles / 2>(out, weighted, queries(i), broken);
    }
    float* const sums = reinterpret_cast<float*>(args.key_sums) +
                        (static_cast<i64>(share) * gridDim.y + blockIdx.y) * args.keys * Products::kDepth;
#pragma unroll
    for (int half = 0; half < Accumulators::kRows; ++half) {
        const int key = first_key + warp_row + Accumulators::first_row(lane) + Accumulators::below(half);
        if (key >= args.keys) continue;
#pragma unroll
        for (int d = 0; d < kOutTiles; ++d) {
            float2* const to = reinterpret_cast<float2*>(sums + static_cast<i64>(key) * Products::kDepth + 8 * d +
                                                         Accumulators::first_column(lane));
            float2 x =
                make_float2(out[0][d][Accumulators::element(half, 0)], out[0][d][Accumulators::element(half, 1)]);
            if (args.first_tile > 0) {  // strips before have left theirs
                const float2 before = *to;
                x.x += before.x;
                x.y += before.y;
            }
            *to = x;
        }
    }
}

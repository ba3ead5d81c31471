// The student's queries times their weights, or its keys as they are, in tiles of 64 rows as products of warpgroups
// read them: bfloat16, chunks of 64 columns, swizzled, one tile after the other, so that plain bulk copies bring them.
// blockIdx.x is the tile, of queries in the strip, and blockIdx.y the head.
//
// Of queries without gradient nothing comes, whatever they and their weights hold; and rows that hold a NaN or an
// infinity become zeros, for the gradients of pairs that see them are NaN already, and for others 0 times the row must
// be 0.
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "tile/element.cuh"

using E = Element<SKL_S_ELEMENT>;
using Stored = Element<kBf16>;

constexpr bool kWeighted = SKL_WEIGHTED;
constexpr int kChunks = ceil_div(SKL_S_DIM, 64), kPieces = 8 * kChunks, kTileRows = 64;
static_assert(kPieces == 8 || kPieces == 16, "plan: pieces of a row are part of a warp");
static_assert(IndexerGradients::kKeyTiles == kChunks * kTileRows * 128 &&
                  IndexerStrip::kWeightedQueries == IndexerGradients::kKeyTiles,
              "plan: tiles of operands");
static_assert(SKL_S_DIM % 8 == 0 && E::kBytes == 2, "plan: rows are whole pieces");

extern "C" __global__ void __launch_bounds__(SKL_THREADS)
    streamkl_indexer_tiles(const __grid_constant__ IndexerArgs args) {
    const int heads = kWeighted ? args.groups * args.index_heads : args.index_key_heads;
    const int batch = static_cast<int>(blockIdx.y) / heads, head = static_cast<int>(blockIdx.y) % heads;
    const int piece = threadIdx.x % kPieces, first = (blockIdx.x + (kWeighted ? args.first_tile : 0)) * kTileRows;
    const int count = kWeighted ? args.queries : args.keys;
    const Tensor4& x = kWeighted ? args.index_q : args.index_k;
    const u64 from = x.pointer + (batch * x.batch + head * x.head + 8 * piece) * 2;
    const i64 tiles = kWeighted ? args.strip_rows / kTileRows : ceil_div(args.keys, kTileRows);
    const u64 to = (kWeighted ? args.weighted_queries : args.key_tiles) +
                   (blockIdx.y * tiles + blockIdx.x) * (kChunks * kTileRows * 128) + piece / 8 * (kTileRows * 128);
    const int group = batch * args.groups + head / args.index_heads;
#pragma unroll
    for (int r = threadIdx.x / kPieces; r < kTileRows; r += SKL_THREADS / kPieces) {
        const int row = first + r;
        uint4 raw = {0u, 0u, 0u, 0u};
        float weight = 1.f;
        if (row < count) {
            if constexpr (kWeighted) {
                const bool live =
                    reinterpret_cast<const float4*>(args.row_stats)[static_cast<i64>(group) * args.queries + row].z !=
                    0.f;
                weight = live ? reinterpret_cast<const float*>(
                                    args.weights)[static_cast<i64>(blockIdx.y) * args.queries + row]
                              : 0.f;
            }
            if (8 * piece < SKL_S_DIM && weight != 0.f)
                raw = *reinterpret_cast<const uint4*>(from + static_cast<i64>(row) * x.row * 2);
        }
        const u32 words[4] = {raw.x, raw.y, raw.z, raw.w};
        u32 found[4];
        bool finite = is_finite(weight);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 v = E::widen(words[i]);
            finite = finite && is_finite(v.x) && is_finite(v.y);
            u32 planes[1];
            Stored::split(v.x * weight, v.y * weight, planes);
            found[i] = planes[0];
        }
        const u32 broken =
            __ballot_sync(~0u, !finite) >> (threadIdx.x % 32 / kPieces * kPieces) & ((1u << kPieces) - 1);
        const uint4 y = broken ? make_uint4(0u, 0u, 0u, 0u) : make_uint4(found[0], found[1], found[2], found[3]);
        *reinterpret_cast<uint4*>(to + r * 128 + ((piece % 8 ^ (r & 7)) << 4)) = y;
    }
}

// The strip of logit gradients, and beside it the gates of every head, as the score kernels leave them.
//
// By rows (SKL_TILED_STRIP 0): [B][G][strip_rows][strip_pitch], and no gates. In tiles: [B][row tile][G][key tile] of
// 64 x 64, as many of keys as rows of the tile see, in each the 8 x 8 pieces of operands A one after the other, [16
// rows][16 keys][8 keys][8 rows], a piece by rows. ldmatrix reads them as they are or transposed, and a warp writes its
// accumulators 128 bytes at a time.
//
// Gates: [B][row tile][G][head][key tile] of 128 words, a word for each thread of a warpgroup: of 64 x 64 accumulators
// (tile/accumulators.cuh) those of the pair m, which as operand A are register m % 4 of step m / 4, are bits 15 - m and
// 31 - m. Words of lanes whose rows are neighbours stand beside each other.
#pragma once
#include "common/args.cuh"
#include "common/config.cuh"
#include "ptx/convert.cuh"
#include "ptx/masks.cuh"
#include "tile/accumulators.cuh"
#include "tile/element.cuh"
#include "tile/index_parts.cuh"

#ifndef SKL_TILED_STRIP
#define SKL_TILED_STRIP 0
#endif
constexpr bool kTiledStrip = SKL_TILED_STRIP;
// Gradients of logits need the range of float32, and where operands are tiles of kernels/indexer_tiles.cu these have
// it.
using StripElement = Element<SKL_S_ELEMENT == kF16 ? int(kBf16) : SKL_S_ELEMENT>;
constexpr int kStripTileBytes = kStripTile * kStripTile * 2, kGateWords = 2 * kStripTile;
static_assert(IndexerStrip::kStrip == kStripTile * kStripTile * StripElement::kBytes &&
                  IndexerStrip::kGates == kGateWords,
              "plan: tiles of 64 x 64 gradients, and their gates");

// Where those of a row tile of a batch entry begin, counted over all before it, and how many there are.
struct StripRow {
    i64 first;
    int width;
    __device__ StripRow(const IndexerArgs& args, int batch, int row_tile) {
        const int* const before =
            reinterpret_cast<const int*>(args.strip_widths) + batch * args.tiles + row_tile - args.first_tile;
        first = before[0];
        width = before[1] - before[0];
    }
    __device__ u64 tile(const IndexerArgs& args, int group, int key_tile) const {
        return args.strip + (first * args.groups + group * width + key_tile) * kStripTileBytes;
    }
    __device__ u64 gates(const IndexerArgs& args, int group, int head, int key_tile) const {
        return args.gates +
               ((first * args.groups + group * width) * args.index_heads + head * width + key_tile) * (4 * kGateWords);
    }
};
// Which word of its warp's 32 is the lane's.
__device__ inline int gate_word(int lane) { return (lane & 24) | (lane & 3) << 1 | (lane >> 2 & 1); }

// Where two neighbouring gradients lie, the first of an even key; those of 8 n keys more are strip_step(n) bytes
// further, where the first is among the first eight of a tile.
__device__ inline u64 strip_pair(const IndexerArgs& args, int entry, int row, int key) {
    if constexpr (kTiledStrip) {
        const int r = row % kStripTile, k = key % kStripTile;
        return StripRow(args, entry / args.groups, row / kStripTile).tile(args, entry % args.groups, key / kStripTile) +
               (r / 16 * 2048 + k / 16 * 512 + k / 8 % 2 * 256 + r / 8 % 2 * 128 + r % 8 * 16 + k % 8 * 2);
    } else {
        const i64 local = static_cast<i64>(entry) * args.strip_rows + row - args.first_tile * kStripTile;
        return args.strip + (local * args.strip_pitch + key) * StripElement::kBytes;
    }
}
__device__ constexpr int strip_step(int n) {
    return kTiledStrip ? n / 8 * kStripTileBytes + n / 2 % 4 * 512 + n % 2 * 256 : 8 * n * StripElement::kBytes;
}

// The gates of a lane's 64 x 64 accumulators: which products are above 0, or NaN, for then the gradient is NaN too.
__device__ inline u32 gates_of(const float (*s)[4]) {
    u32 bits[4] = {};  // or each would wait for the one before
#pragma unroll
    for (int m = 0; m < 16; ++m) {
        const float (&x)[4] = s[m / 2];
        bits[m % 4] |= above_zero_bf16(pack_bf16(x[m % 2 * 2], x[m % 2 * 2 + 1])) & 0x80008000u >> m;
    }
    return bits[0] | bits[1] | bits[2] | bits[3];
}
__device__ inline void store_gates(const IndexerArgs& args, int entry, int head, int row_tile, int key_tile, int warp,
                                   u32 bits) {
    const StripRow row(args, entry / args.groups, row_tile);
    reinterpret_cast<u32*>(row.gates(args, entry % args.groups, head, key_tile))[32 * warp + gate_word(lane_id())] =
        bits;
}

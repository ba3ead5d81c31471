// What gradients of the indexer multiply, and how, by mma.sync: any element type, strides and head dims.
#pragma once
#include "common/args.cuh"
#include "common/config.cuh"
#include "tile/scores.cuh"
#include "tile/index_parts.cuh"
#include "tile/gated.cuh"

using IndexTile = Tile<SKL_S_ELEMENT, SKL_S_DIM>;

struct Products {
    static constexpr int kAlignment = 0, kDepth = IndexTile::kDepth;
    __device__ static u32 aligned(u32 base) { return base; }
    template <int ROWS, bool VECTOR>
    __device__ static void load(IndexTile tile, const HeadView& x, int first, Range valid) {
        load_rows<ROWS, VECTOR>(tile, x, first, valid);
    }
    __device__ static void arrived() {}
    template <int TILES>
    __device__ static void scores(Strip<TILES>& s, IndexTile rows, int row, IndexTile streamed) {
        ::scores<TILES>(s, rows, row, streamed);
    }
    template <int STEPS, int TILES, class Source>
    __device__ static void accumulate(Strip<TILES>& out, const Source& operand, IndexTile streamed, bool broken) {
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            FragmentA<IndexTile::kCode> a;
            operand(k, a);
            add_product<TILES>(out, a, streamed, 16 * k, broken);
        }
    }
    __device__ static float2 pair(IndexTile tile, int row, int column) { return pair_of(tile, row, column); }
};

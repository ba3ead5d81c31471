// What gradients of the indexer multiply, and how, by products of a warpgroup: 16-bit elements that are read 16 bytes
// at a time.
#pragma once
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "tile/wide_parts.cuh"
#include "tile/clear.cuh"
#include "tile/gated.cuh"

using IndexTile = WideTile<SKL_S_ELEMENT, SKL_S_DIM>;

struct Products {
    static constexpr int kAlignment = 1024, kDepth = IndexTile::kDim;
    __device__ static u32 aligned(u32 base) { return (base + 1023) & ~1023u; }
    template <int ROWS, bool VECTOR>
    __device__ static void load(IndexTile tile, const HeadView& x, int first, Range valid) {
        static_assert(VECTOR, "plan: elements come 16 bytes at a time");
        load_wide<ROWS>(tile, x, first, valid, Columns{0, SKL_S_DIM});
    }
    __device__ static void arrived() { async_fence(); }
    template <int TILES>
    __device__ static void scores(Strip<TILES>& s, IndexTile rows, int, IndexTile streamed) {
        wide_scores(s, rows, streamed, true);
    }
    template <int STEPS, int TILES, class Source>
    __device__ static void accumulate(Strip<TILES>& out, const Source& operand, IndexTile streamed, bool broken) {
        FragmentA<IndexTile::kCode> a[STEPS];
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            operand(k, a[k]);
            fence_operand(a[k].r[0]);
        }
        if (broken)
            clear_non_finite<IndexTile::E, kColumns, IndexTile::kChunks, 2 * IndexTile::kSteps>(streamed.base, 1);
        const u64 rows = swizzled_descriptor(streamed.base, kColumns * 128);
        constexpr int wide = 16, rest = TILES % wide;
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            const u64 here = rows + (k * 16 * 128 >> 4);
#pragma unroll
            for (int d = 0; d < TILES - rest; d += wide)
                wgmma<IndexTile::kHalf, 1>(reinterpret_cast<float (&)[wide][4]>(out[0][d]), a[k].r[0],
                                           here + (d / 8 * kColumns * 128 >> 4), 1);
            if constexpr (rest > 0)
                wgmma<IndexTile::kHalf, 1>(reinterpret_cast<float (&)[rest][4]>(out[0][TILES - rest]), a[k].r[0],
                                           here + ((TILES - rest) / 8 * kColumns * 128 >> 4), 1);
        }
        wgmma_commit();
        wgmma_wait<0>();
        fence_accumulators(out[0]);
    }
    __device__ static float2 pair(IndexTile tile, int row, int column) {
        const u32 at =
            tile.base + (column / 64 * kRows + row) * 128 + ((column % 64 / 8 ^ (row & 7)) << 4) + column % 8 * 2;
        return IndexTile::E::widen(*reinterpret_cast<const u32*>(__cvta_shared_to_generic(at)));
    }
};

static_assert(kRows == 64 && kThreads == 128 && kColumns == 64, "plan: a block is a warpgroup");

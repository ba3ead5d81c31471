// What kernels of attention's gradients have in common, whatever multiplies: the weights of a tile and the gradients of
// its logits, scales of narrow types, what is written. The kernel has included its mask and the score before.
#pragma once
#include "common/args.cuh"
#include "common/math.cuh"
#include "divergences/interface.cuh"
#include "ptx/cp_async.cuh"
#include "tile/accumulate.cuh"
#include "tile/logits.cuh"
#include "tile/schedule.cuh"

using Score = SKL_A_SCORE;
using KeyTile = Tile<SKL_A_ELEMENT, SKL_A_DIM>;        // and queries
using ValueTile = Tile<SKL_A_ELEMENT, SKL_VALUE_DIM>;  // and G
using E = KeyTile::E;

// What is asked for: dQ or dK, and dV.
constexpr bool kScored = SKL_GRADIENT_OF_SCORES, kValues = SKL_GRADIENT_OF_VALUES;
static_assert(kRowsAreQueries ? kScored && !kValues : kScored || kValues, "plan: queries have one gradient");

constexpr int kTiles = kColumns / 8;
constexpr int kLaneRows = Accumulators::kRows * kWarpTiles;
constexpr int kOutTiles = kScored ? KeyTile::kDepth / 8 : 2;  // of those that are not wanted little, and unused
constexpr int kValueTiles = kValues ? ValueTile::kDepth / 8 : 2;
constexpr int kVectors = kRowsAreQueries ? 0 : 2;  // per streamed query: log-sum-exp and delta

__device__ constexpr int below_first(int i) {
    return 16 * (i / Accumulators::kRows) + Accumulators::below(i % Accumulators::kRows);
}

constexpr int kWeightScale = E::kNarrowExponent ? 14 : 0;
constexpr int kTopExponent = 8;  // of X when the scale of a row moves: 2^7 below what makes it move
constexpr float kLargest = 32768.f;

// The log-sum-exp in base 2 and delta of a query row, as attention_rows.cu has them.
struct Row {
    float lse, delta;
};

// Of the head's first query row.
struct RowVectors {
    const float *lse, *delta;
    __device__ RowVectors(const AttentionGradientArgs& args, int batch, int head, const Segment& segment) {
        const Extents& n = args.n;
        AttentionRows rows;
        rows.locate(args.rows, static_cast<i64>(n.batch) * n.heads * n.queries);
        const i64 first = (static_cast<i64>(batch) * n.heads + head) * n.queries + segment.first_query;
        lse = rows.lse + first;
        delta = rows.delta + first;
    }
    // A row that is not there has no weights.
    __device__ Row read(int q, int queries) const {
        const bool inside = q < queries;
        return {inside ? lse[q] - kWeightScale : infinity(), inside ? delta[q] : 0.f};
    }
    // Those of a tile of queries, from `first` on.
    __device__ void load(u32 to, int first, Range valid) const {
        for (int j = threadIdx.x; j < kVectors * kColumns; j += kThreads) {
            const int q = first + j % kColumns;
            const bool inside = valid.contains(q);
            cp_async_4(to + 4 * j, (j < kColumns ? lse : delta) + (inside ? q : 0), inside ? 4 : 0);
        }
    }
};

// The dots t become P and, where that is asked for, the products d of G and values become X. With MASKED the pairs that
// are not visible are set to zero after the fact, whatever came out for them. Two instances, because a test inside one
// would be turned into selections that every tile pays for.
template <bool MASKED, class Walk, class N>
__device__ inline void logit_gradients(Strip<kTiles>& t, Strip<kTiles>& d, const Row (&rows)[kLaneRows], u32 vectors,
                                       const Walk& at, int row, const N& numbers) {
#pragma unroll
    for (int c = 0; c < kTiles; ++c) {
        const int column = 8 * c + Accumulators::first_column(lane_id());
        Row streamed[2];
        if constexpr (!kRowsAreQueries) {
            const float2 lse = shared_float2(vectors + 4 * column),
                         delta = shared_float2(vectors + 4 * (kColumns + column));
            streamed[0] = {lse.x - kWeightScale, delta.x};
            streamed[1] = {lse.y - kWeightScale, delta.y};
        }
#pragma unroll
        for (int m = 0; m < kWarpTiles; ++m) {
            turn<Score>(t[m], c, numbers);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const Row& x = kRowsAreQueries ? rows[Accumulators::kRows * m + Accumulators::row(e)]
                                               : streamed[Accumulators::column(e)];
                float p = exp2_approx(Score::logit(t[m][c][e], numbers, x.lse));
                float dx = 0.f;
                if constexpr (kScored) dx = by_dot<Score>(p * (d[m][c][e] - x.delta), t[m][c][e], numbers);
                if constexpr (MASKED) {
                    const int r = row + 16 * m + Accumulators::below(Accumulators::row(e)),
                              other = at.row() + column + Accumulators::column(e);
                    if (!(kRowsAreQueries ? at.mask.visible(r, other) : at.mask.visible(other, r))) p = dx = 0.f;
                    if (Mask::kPicksQueries && !kRowsAreQueries && x.lse == infinity()) p = dx = 0.f;
                }
                t[m][c][e] = p;
                d[m][c][e] = dx;
            }
        }
    }
}

// Types of narrow exponent: brings X into their range by a power of two per row, 2^exponent, and where a row's has to
// move, its sums with it.
__device__ inline void rescale(Strip<kTiles>& x, Strip<kOutTiles>& out, int (&exponent)[kLaneRows]) {
    float top[kLaneRows];
    bool safe = true;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
        const int m = i / Accumulators::kRows, half = i % Accumulators::kRows;
        top[i] = 0.f;
#pragma unroll
        for (int c = 0; c < kTiles; ++c)
#pragma unroll
            for (int j = 0; j < 2; ++j) top[i] = fmaxf(top[i], fabsf(x[m][c][Accumulators::element(half, j)]));
        safe = safe && !(top[i] * power_of_two(exponent[i]) > kLargest);
    }
    if (!__all_sync(~0u, safe)) {
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
            const int m = i / Accumulators::kRows, half = i % Accumulators::kRows;
            const float largest = Accumulators::largest_of_row(top[i]);
            if (largest * power_of_two(exponent[i]) > kLargest) {
                const int to = kTopExponent - exponent_of(largest);
                const float shrink = power_of_two(max(to - exponent[i], -126));
                exponent[i] = to;
#pragma unroll
                for (int d = 0; d < kOutTiles; ++d)
#pragma unroll
                    for (int j = 0; j < 2; ++j) out[m][d][Accumulators::element(half, j)] *= shrink;
            }
        }
        __syncwarp();
    }
#pragma unroll
    for (int m = 0; m < kWarpTiles; ++m)
#pragma unroll
        for (int c = 0; c < kTiles; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                x[m][c][e] *= power_of_two(exponent[Accumulators::kRows * m + Accumulators::row(e)]);
}

// The rows of an output whose sums lack `factor` and, per row, a power of two.
template <class T, int TILES>
__device__ inline void write(u64 head, i64 stride, const Strip<TILES>& out, int row, int end, float factor,
                             const int (&exponent)[kLaneRows], const bool (&kept)[kLaneRows]) {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
        const int m = i / Accumulators::kRows, half = i % Accumulators::kRows;
        const int r = row + 16 * m + Accumulators::below(half);
        if (!Mask::kListed && r >= end) continue;
        const float scale = factor * power_of_two(-exponent[i]);
        const u64 to = head + r * stride * T::E::kBytes;
        if constexpr (Mask::kListed) {
            store_row<T>(to, r < end, out[m], half, scale, kept[i]);
        } else {
#pragma unroll
            for (int d = 0; d < TILES; ++d) {
                const int column = 8 * d + Accumulators::first_column(lane_id());
                const float a = kept[i] ? out[m][d][Accumulators::element(half, 0)] * scale : 0.f,
                            b = kept[i] ? out[m][d][Accumulators::element(half, 1)] * scale : 0.f;
                store_two<T>(to + column * T::E::kBytes, column, a, b);
            }
        }
    }
}

// All that a block has, or has of a work tile, from the lane's first row on; what it is multiplied by is known here,
// and so is the segment, found anew: registers are dear in the loop.
__device__ inline void write_gradients(const AttentionGradientArgs& args, const Strip<kOutTiles>& out,
                                       const Strip<kValueTiles>& out_values, const int (&exponent)[kLaneRows], int row,
                                       int index) {
    const Extents& n = args.n;
    const int heads_per_block = kRowsAreQueries ? 1 : n.group, out_heads = n.heads / heads_per_block;
    Block block = block_of(index, n, out_heads, n.batch * out_heads, kRowsAreQueries && !Mask::kListed);
    const int first_head = block.head * heads_per_block;
    const Segment segment = Mask::locate(n, first_head, block);
    const Mask mask(n, segment, block.batch, first_head);
    const int first = kRowsAreQueries ? segment.first_query : segment.first_key,
              end = kRowsAreQueries ? segment.queries : segment.keys;
    const auto head_of = [&block, first](const Tensor4& x) {
        return x.pointer + (block.batch * x.batch + block.head * x.head + first * x.row) * E::kBytes;
    };
    bool kept[kLaneRows];
    int scale[kLaneRows];
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
        const int r = row + below_first(i);
        kept[i] = !(kRowsAreQueries && Mask::kPicksQueries) || !mask.keys_of(r, r + 1).empty();
        scale[i] = kWeightScale;
    }
    if constexpr (kScored)
        write<KeyTile>(head_of(args.out), args.out.row, out, row, end,
                       Score::factor(args.out_scale) * power_of_two(-kWeightScale), exponent, kept);
    if constexpr (kValues)
        write<ValueTile>(head_of(args.out_value), args.out_value.row, out_values, row, end, 1.f, scale, kept);
}

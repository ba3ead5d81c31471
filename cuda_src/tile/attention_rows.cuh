// Rows of an attention forward: their softmax so far, beside the sums of values that the kernel keeps. The kernel has
// included its mask and the score before.
#pragma once
#include "common/args.cuh"
#include "common/math.cuh"
#include "divergences/interface.cuh"
#include "tile/accumulate.cuh"
#include "tile/logits.cuh"
#include "tile/schedule.cuh"

// Rows of which a lane holds elements, and how far below the first of them number i lies.
constexpr int kLaneRows = Accumulators::kRows * kWarpTiles;
__device__ constexpr int below_first(int i) {
    return 16 * (i / Accumulators::kRows) + Accumulators::below(i % Accumulators::kRows);
}

// A row's weights are 2^(logit - reference), and its sums those of all keys so far. The four lanes of a row have one
// reference and each the sum of its own keys. No running maximum is kept: the reference moves when a sum of one tile
// leaves the range, which ordinary data makes it do at its first tile only. A type of narrow exponent has its weights
// scaled up, so that small ones keep their digits.
template <class E>
struct SoftmaxRow {
    static constexpr float kWeightScale = E::kNarrowExponent ? 8.f : 0.f;
    static constexpr float kLargest = 32768.f;  // half of the largest number of any type
    float reference, sum;

    __device__ void start() {
        reference = kUnseen;
        sum = 0.f;
    }
    __device__ bool empty() const { return reference == kUnseen && sum == 0.f; }
    // The natural log-sum-exp, once the sum is that of all keys.
    __device__ float lse() const { return empty() ? -infinity() : kLn2 * (reference + log2f(sum)); }
};

// One tile's dots x, or what else L makes logits of, become weights `a`; their sums join those of the rows, and where
// references move, `out` moves with them. The whole warp moves together, since matrix instructions want all of it.
template <class L, int OUT_TILES, int TILES, class E, class A, class N>
__device__ inline void weigh(SoftmaxRow<E> (&rows)[kLaneRows], Strip<OUT_TILES>& out, A& a, const Strip<TILES>& x,
                             const N& n) {
    float sums[kLaneRows];
#pragma unroll 1
    for (bool moved = false;; moved = true) {
        bool safe = true;
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) sums[i] = 0.f;
#pragma unroll
        for (int m = 0; m < kWarpTiles; ++m)
#pragma unroll
            for (int k = 0; k < TILES / 2; ++k) {
                float p[2][4];
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const int e = j % 4, i = Accumulators::kRows * m + Accumulators::row(e);
                    p[j / 4][e] = exp2_approx(L::logit(x[m][2 * k + j / 4][e], n, rows[i].reference));
                    sums[i] += p[j / 4][e];
                }
                accumulators_to_a(a[k][m], p[0], p[1]);
            }
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) safe = safe && sums[i] < SoftmaxRow<E>::kLargest;
        // A NaN fails the comparison and stays one.
        if (moved || __all_sync(~0u, safe)) break;
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) {
            const int m = i / Accumulators::kRows, half = i % Accumulators::kRows;
            float top = rows[i].reference;
            if (!(sums[i] < SoftmaxRow<E>::kLargest)) {
#pragma unroll
                for (int c = 0; c < TILES; ++c)
#pragma unroll
                    for (int j = 0; j < 2; ++j)
                        top = fmaxf(top,
                                    L::logit(x[m][c][Accumulators::element(half, j)], n) - SoftmaxRow<E>::kWeightScale);
            }
            top = Accumulators::largest_of_row(top);
            const float shrink = exp2_approx(rows[i].reference - top);
            rows[i].reference = top;
            rows[i].sum *= shrink;
#pragma unroll
            for (int d = 0; d < OUT_TILES; ++d)
#pragma unroll
                for (int j = 0; j < 2; ++j) out[m][d][Accumulators::element(half, j)] *= shrink;
        }
    }
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) rows[i].sum += sums[i];
}

// A tile's dots in place: the score's function of them and, where the tile is not full, logits with pairs that are not
// visible put out of the way. In a branch of its own: a test inside one would be turned into selections that every tile
// pays for.
template <class S, int TILES, class N>
__device__ inline void hide(Strip<TILES>& x, const Mask& mask, int row, int first_key, const N& n) {
    const int key = first_key + Accumulators::first_column(lane_id());
#pragma unroll
    for (int m = 0; m < kWarpTiles; ++m)
#pragma unroll
        for (int c = 0; c < TILES; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const bool visible = mask.visible(row + 16 * m + Accumulators::below(Accumulators::row(e)),
                                                  key + 8 * c + Accumulators::column(e));
                x[m][c][e] = visible ? S::logit(x[m][c][e], n) : kMasked;
            }
}

// What is known of the rows, once all lanes of one know the same: results, or the state where keys are split.
template <class T, int OUT_TILES>
__device__ inline void write_rows(const AttentionArgs& args, const Block& block, const Segment& segment,
                                  SoftmaxRow<typename T::E> (&rows)[kLaneRows], const Strip<OUT_TILES>& out, int row) {
    using E = typename T::E;
    static_assert(T::kHeadDim == AttentionStates::kOut, "plan: the state of a row");
    const Extents& n = args.n;
    const int lane = lane_id();
    const i64 all = static_cast<i64>(n.batch) * n.heads * n.queries;
    AttentionStates states;
    if (n.splits > 1) states.locate(args.workspace, n.splits * all);
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
        SoftmaxRow<E>& x = rows[i];
        x.sum = Accumulators::sum_row(x.sum);
        const int r = row + below_first(i), query = segment.first_query + r;
        const bool there = r < segment.queries;
        if (!Mask::kListed && !there) continue;
        if constexpr (Mask::kPicksQueries) {
            if (there && !Mask(n, segment, block.batch, block.head).there(r)) x.start();
        }
        const bool kept = !x.empty(), whole = n.splits == 1;
        const float factor = whole ? 1.f / x.sum : 1.f;
        const i64 state =
            block.split * all + (static_cast<i64>(block.batch) * n.heads + block.head) * n.queries + query;
        if (there && Accumulators::writes_row(lane)) {
            if (whole) {
                *row_vector(args.lse, block.batch, block.head, query) = x.lse();
            } else {
                states.reference[state] = x.reference;
                states.sum[state] = x.sum;
            }
        }
        const u64 to = args.out.pointer +
                       (block.batch * args.out.batch + block.head * args.out.head + query * args.out.row) * E::kBytes;
        if constexpr (Mask::kListed) {
            if (whole) {
                store_row<T>(to, there, out[i / Accumulators::kRows], i % Accumulators::kRows, factor, kept);
                continue;
            }
            if (!there) continue;
        }
#pragma unroll
        for (int d = 0; d < OUT_TILES; ++d) {
            const int column = 8 * d + Accumulators::first_column(lane), half = i % Accumulators::kRows;
            const float (&o)[4] = out[i / Accumulators::kRows][d];
            const float a = kept ? o[Accumulators::element(half, 0)] * factor : 0.f,
                        b = kept ? o[Accumulators::element(half, 1)] * factor : 0.f;
            if (whole) {
                store_two<T>(to + column * E::kBytes, column, a, b);
            } else {
                float* const sums = states.out + state * AttentionStates::kOut + column;
                if (column < T::kHeadDim) sums[0] = a;
                if (column + 1 < T::kHeadDim) sums[1] = b;
            }
        }
    }
}

// Attention, backward: the gradient of the queries, or of the keys, of the values or of both. A block owns kRows rows of
// one operand and streams the rows of the other ones, recomputing the weights P from the saved log-sum-exps. With G the
// upstream gradient of the results,
//
//   stationary queries:  X = P (G V^T - delta)       dQ = c X K         queries and G stay, keys and values come by
//   stationary keys:     X^T alike                   dK = c X^T Q       keys and values stay, queries and G come by; the
//                                                    dV = P^T G         query heads that share them are summed here
//
//   per tile: S and G V^T in registers, X and P in their places, packed as operands A, times the streamed tiles read
//   transposed
//
// No atomics: each output element has one owner and a fixed order of addition. An element type of narrow exponent gets
// P, which is at most 1, times 2^kLift, and X scaled by a power of two per row of the output, which moves when a tile
// exceeds it; the epilogue takes both back.
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "divergences/interface.cuh"
#include "pipeline/ring.cuh"
#include "tile/accumulate.cuh"
#include "tile/load.cuh"
#include "tile/scores.cuh"
#include "tile/schedule.cuh"
#include "@mask"
#include "@score"
#include "tile/logits.cuh"

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
constexpr int kRowBytes = KeyTile::bytes(kRows) + (kScored ? ValueTile::bytes(kRows) : 0);
constexpr int kVectors = kRowsAreQueries ? 0 : 2;  // per streamed query: log-sum-exp and delta
constexpr int kStageBytes = KeyTile::bytes(kColumns) + ValueTile::bytes(kColumns) + kVectors * kColumns * 4;
static_assert(kRowBytes + kStages * kStageBytes == SKL_SMEM_BYTES, "plan: smem_bytes");

constexpr int kLift = E::kNarrowExponent ? 14 : 0;
constexpr int kTopExponent = 8;  // of X when the scale of a row moves: 2^7 below what makes it move
constexpr float kLargest = 32768.f;

// The log-sum-exp in base 2 and delta of a query row, as attention_rows.cu has them.
struct Row {
    float lse, delta;
};

// A tile of streamed rows in shared memory.
struct Stage {
    u32 base;
    __device__ KeyTile scored() const { return {base}; }
    __device__ ValueTile valued() const { return {base + KeyTile::bytes(kColumns)}; }
    __device__ u32 vectors() const { return base + KeyTile::bytes(kColumns) + ValueTile::bytes(kColumns); }
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
        return {inside ? lse[q] - kLift : infinity(), inside ? delta[q] : 0.f};
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

// Rows of G, which comes as the caller's framework has it: what a plan does not know.
template <int ROWS, int AT_ONCE = 16, class Wanted = Everything>
__device__ inline void load_grads(ValueTile tile, const AttentionGradientArgs& args, const HeadView& grads, int first,
                                  Range valid, Wanted wanted = {}) {
    if (vector_rows(args.grad, E::kBytes))
        load_rows<ROWS, true, AT_ONCE>(tile, grads, first, valid, wanted);
    else
        load_rows<ROWS, false>(tile, grads, first, valid, wanted);
}

// The dots t become P and, where that is asked for, the products d of G and values become X. With MASKED the pairs that
// are not visible are set to zero after the fact, whatever came out for them. Two instances, because a test inside one
// would be turned into selections that every tile pays for.
template <bool MASKED, class N>
__device__ inline void logit_gradients(Strip<kTiles>& t, Strip<kTiles>& d, const Row (&rows)[kLaneRows], u32 vectors,
                                       const Cursor<Mask>& at, int row, const N& numbers) {
#pragma unroll
    for (int c = 0; c < kTiles; ++c) {
        const int column = 8 * c + Accumulators::first_column(lane_id());
        Row streamed[2];
        if constexpr (!kRowsAreQueries) {
            const float2 lse = shared_float2(vectors + 4 * column),
                         delta = shared_float2(vectors + 4 * (kColumns + column));
            streamed[0] = {lse.x - kLift, delta.x};
            streamed[1] = {lse.y - kLift, delta.y};
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
        if (r >= end) continue;
        const float scale = factor * power_of_two(-exponent[i]);
        const u64 to = head + r * stride * T::E::kBytes;
#pragma unroll
        for (int d = 0; d < TILES; ++d) {
            const int column = 8 * d + Accumulators::first_column(lane_id());
            const float a = kept[i] ? out[m][d][Accumulators::element(half, 0)] * scale : 0.f,
                        b = kept[i] ? out[m][d][Accumulators::element(half, 1)] * scale : 0.f;
            store_two<T>(to + column * T::E::kBytes, column, a, b);
        }
    }
}

__device__ inline u64 head_of(const Tensor4& x, int batch, int head, int first) {
    return x.pointer + (batch * x.batch + head * x.head + first * x.row) * E::kBytes;
}

extern "C" __global__ void __launch_bounds__(kThreads, SKL_MIN_BLOCKS)
    streamkl_attention_gradient(const __grid_constant__ AttentionGradientArgs args) {
    extern __shared__ __align__(16) unsigned char shared[];
    const Extents& n = args.n;
    const int heads_per_block = kRowsAreQueries ? 1 : n.group;  // query heads summed into one key head
    const int out_heads = n.heads / heads_per_block;
    Block block = block_of(blockIdx.x, n, out_heads, n.batch * out_heads, kRowsAreQueries && !Mask::kListed);
    const int first_head = block.head * heads_per_block, end_head = first_head + heads_per_block;
    const int key_head = first_head / n.group;
    const Segment segment = Mask::locate(n, first_head, block);
    const int row_count = kRowsAreQueries ? segment.queries : segment.keys;
    const int first_row = block.tile * kRows, end_row = min(first_row + kRows, row_count);
    if (Mask::kRagged && first_row >= row_count) return;
    const Range rows{first_row, end_row};

    const u32 base = static_cast<u32>(__cvta_generic_to_shared(shared));
    const KeyTile rows_scored{base};
    const ValueTile rows_valued{base + KeyTile::bytes(kRows)};
    const int lane = lane_id(), warp_row = (threadIdx.x / 32) * (16 * kWarpTiles);
    const int row = first_row + warp_row + Accumulators::first_row(lane);

    // Asked for wherever a tile is used: registers that keep what is cheap to compute are missing elsewhere.
    const auto stage = [base](int i) { return Stage{base + kRowBytes + (i % kStages) * kStageBytes}; };

    Strip<kOutTiles> out;
    Strip<kValueTiles> out_values;
    clear<kOutTiles>(out);
    clear<kValueTiles>(out_values);
    int exponent[kLaneRows];
    Row stats[kLaneRows];
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) exponent[i] = E::kNarrowExponent ? 126 : 0;

    for (int head = first_head; head < end_head; ++head) {
        const Mask mask(n, segment, block.batch, head);
        const Range columns = kRowsAreQueries ? mask.keys_of(first_row, end_row) : mask.queries_of(first_row, end_row);
        Cursor<Mask> at(mask, rows, mask.steps_of(first_row, covering(columns, kColumns)));
        const RowVectors vectors(args, block.batch, head, segment);
        const HeadView queries = head_view<KeyTile>(args.query, block.batch, head, segment.first_query);
        const HeadView grads = head_view<ValueTile>(args.grad, block.batch, head, segment.first_query);
        const HeadView keys = head_view<KeyTile>(args.key, block.batch, key_head, segment.first_key);
        const HeadView values = head_view<ValueTile>(args.value, block.batch, key_head, segment.first_key);
        Cursor<Mask> ahead = at;
        const auto fetch = [&args, &rows, &columns, &ahead, &vectors, &queries, &grads, &keys, &values, stage](int i) {
            const int first = ahead.row();
            // Asking takes registers.
            constexpr int at_once = Mask::kSparse ? 1 : 16;
            const bool full = ahead.full(rows.begin, rows.end);
            const auto met = [&ahead, &rows, full](int column) {
                return full || ahead.streamed_seen(rows.begin, rows.end, column);
            };
            if constexpr (kRowsAreQueries) {
                load_rows<kColumns, SKL_AK_VECTOR, at_once>(stage(i).scored(), keys, first, columns, met);
                load_rows<kColumns, SKL_VALUE_VECTOR>(stage(i).valued(), values, first, columns);
            } else {
                load_rows<kColumns, SKL_AQ_VECTOR, at_once>(stage(i).scored(), queries, first, columns, met);
                load_grads<kColumns, at_once>(stage(i).valued(), args, grads, first, columns, met);
                vectors.load(stage(i).vectors(), first, columns);
            }
            ahead.next();
        };

        cp_async_wait<0>();  // a head whose list is empty has waited for nothing, not even for its rows
        __syncthreads();     // the previous head's last tile is still being read
        if (head == first_head) {
            load_rows<kRows, kRowsAreQueries ? SKL_AQ_VECTOR : SKL_AK_VECTOR>(
                rows_scored, kRowsAreQueries ? queries : keys, first_row, rows);
            if constexpr (kRowsAreQueries)
                load_grads<kRows>(rows_valued, args, grads, first_row, rows);
            else if constexpr (kScored)
                load_rows<kRows, SKL_VALUE_VECTOR>(rows_valued, values, first_row, rows);
            cp_async_commit();
        }
        fill_ring(ahead, fetch);
        if constexpr (kRowsAreQueries) {
#pragma unroll
            for (int i = 0; i < kLaneRows; ++i)
                stats[i] =
                    vectors.read(row + 16 * (i / Accumulators::kRows) + Accumulators::below(i % Accumulators::kRows),
                                 segment.queries);
        }

        for (int i = 0; at.more(); ++i, at.next()) {
            advance_ring(i, ahead, fetch, Nothing{});
            Strip<kTiles> t, d;
            scores<kTiles>(t, rows_scored, warp_row, stage(i).scored());
            if constexpr (kScored) scores<kTiles>(d, rows_valued, warp_row, stage(i).valued());
            if (at.full(first_row, end_row))
                logit_gradients<false>(t, d, stats, stage(i).vectors(), at, row, args.numbers);
            else
                logit_gradients<true>(t, d, stats, stage(i).vectors(), at, row, args.numbers);
            StripA<KeyTile::kCode, kTiles> a;
            if constexpr (kValues) {
                strip_to_a<KeyTile::kCode, kTiles>(a, t);
                accumulate<kValueTiles, kTiles>(out_values, a, stage(i).valued());
            }
            if constexpr (kScored) {
                if constexpr (E::kNarrowExponent) rescale(d, out, exponent);
                strip_to_a<KeyTile::kCode, kTiles>(a, d);
                accumulate<kOutTiles, kTiles>(out, a, stage(i).scored());
            }
        }
    }
    cp_async_wait<0>();  // a block without tiles has not waited for its rows

    Block again = block_of(blockIdx.x, n, out_heads, n.batch * out_heads, kRowsAreQueries && !Mask::kListed);
    const Segment here = Mask::locate(n, first_head, again);
    const Mask mask(n, here, block.batch, first_head);
    const int first_out = kRowsAreQueries ? here.first_query : here.first_key;
    bool kept[kLaneRows];
    int lift[kLaneRows];
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
        const int r = row + 16 * (i / Accumulators::kRows) + Accumulators::below(i % Accumulators::kRows);
        kept[i] = !(kRowsAreQueries && Mask::kPicksQueries) || !mask.keys_of(r, r + 1).empty();
        lift[i] = kLift;
    }
    if constexpr (kScored)
        write<KeyTile>(head_of(args.out, block.batch, block.head, first_out), args.out.row, out, row, row_count,
                       Score::factor(args.out_scale) * power_of_two(-kLift), exponent, kept);
    if constexpr (kValues)
        write<ValueTile>(head_of(args.out_value, block.batch, block.head, first_out), args.out_value.row, out_values,
                         row, row_count, 1.f, lift, kept);
}

// Backward: the gradient of one of the four inputs. The same loop serves all of them: a block owns kRows rows of the
// operand it differentiates and streams the rows of the other one, recomputing both score tiles from the saved
// log-sum-exps. With X the logits of the differentiated side, dX = g * dvalue/dX and
//
//   stationary queries:  dQ = c  dX K       dX has queries as rows; g is a row factor and waits for the epilogue
//   stationary keys:     dK = c  dX^T Q     dX^T has keys as rows; the query heads that share a key head are
//                                          summed here
//
//   per tile: T and S in registers, dX in place, packed as operand A, times the streamed tile read transposed
//
// No atomics and no workspace: each output element has one owner and a fixed order of addition. An element type of
// narrow exponent gets dX scaled by powers of two that the epilogue takes back: per row when the rows are queries, and
// per tile with a running exponent when they are streamed.
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "pipeline/ring.cuh"
#include "tile/accumulate.cuh"
#include "tile/load.cuh"
#include "tile/scores.cuh"
#include "tile/schedule.cuh"
#include "@mask"
#include "@divergence"
#include "@score"
#include "tile/row_stats.cuh"
#include "tile/common_part.cuh"

using TeacherTile = Tile<SKL_T_ELEMENT, SKL_T_DIM>;
using StudentTile = Tile<SKL_S_ELEMENT, SKL_S_DIM>;

using OutTile = OfSide<kSide, TeacherTile, StudentTile>::Type;
using OutElement = OutTile::E;
using WrittenElement = Written<OutTile::kCode>;

constexpr int kTiles = kColumns / 8;
constexpr int kOutTiles = OutTile::kDepth / 8;
constexpr int kRowBytes = TeacherTile::bytes(kRows) + StudentTile::bytes(kRows);
constexpr int kTileBytes = TeacherTile::bytes(kColumns) + StudentTile::bytes(kColumns);
constexpr int kVectors = kRowsAreQueries      ? 0
                         : Logit::kNeedsValue ? 4
                                              : 3;  // per streamed query: two LSEs, g, the value
constexpr int kStageBytes = kTileBytes + kVectors * kColumns * 4;

// Of the side that is differentiated, whose keys the gradient adds up; registers are dear, and the score side's logits
// know no less without it than the log-sum-exp that they meet.
using Common = CommonPart<OutTile, Score<kSide>>;

static_assert(kRowBytes + kStages * kStageBytes + Common::kBytes == SKL_SMEM_BYTES, "plan: smem_bytes");

// Whether streamed query j sees any key: no other one has an infinite log-sum-exp, and then its memory may hold
// anything.
__device__ inline bool counts(u32 vectors, int j) {
    return !Mask::kSparse || shared_float(vectors + 4 * j) != -infinity();
}

// t becomes the gradient of the logits; `vectors` is where the streamed queries' statistics lie. With MASKED the pairs
// that are not visible are set to zero after the fact, whatever came out for them. Two instances, because a test inside
// one would be turned into selections that every tile pays for.
template <bool MASKED>
__device__ inline void logit_gradients(Strip<kTiles>& t, Strip<kTiles>& s,
                                       const RowStats (&stats)[kWarpTiles][Accumulators::kRows], u32 vectors,
                                       float scale, const Cursor<Mask>& at, int row, Numbers numbers) {
#pragma unroll
    for (int c = 0; c < kTiles; ++c) {
        const int column = 8 * c + Accumulators::first_column(lane_id());
        RowStats streamed[2];
        if constexpr (!kRowsAreQueries) {
            const float2 lse_t = shared_float2(vectors + 4 * column),
                         lse_s = shared_float2(vectors + 4 * (kColumns + column));
            const float2 g = shared_float2(vectors + 4 * (2 * kColumns + column));
            const float2 value =
                Logit::kNeedsValue ? shared_float2(vectors + 4 * (3 * kColumns + column)) : make_float2(0.f, 0.f);
            streamed[0] = {kLog2e * lse_t.x, kLog2e * lse_s.x, scale * g.x, kLog2e * value.x};
            streamed[1] = {kLog2e * lse_t.y, kLog2e * lse_s.y, scale * g.y, kLog2e * value.y};
            turn_references(streamed[0], numbers);
            turn_references(streamed[1], numbers);
        }
#pragma unroll
        for (int m = 0; m < kWarpTiles; ++m) {
            turn<Score<kTeacher>>(t[m], c, numbers.teacher);
            turn<Score<kStudent>>(s[m], c, numbers.student);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const RowStats& x =
                    kRowsAreQueries ? stats[m][Accumulators::row(e)] : streamed[Accumulators::column(e)];
                float dx = dot_gradient<kSide>(t[m][c][e], s[m][c][e], x, numbers);
                if constexpr (!kRowsAreQueries)
                    dx *= x.weight;
                else if constexpr (OutElement::kNarrowExponent)
                    dx *= power_of_two(kTopExponent - 1 - exponent_of(Logit::bound(x.value)));
                if constexpr (MASKED) {
                    const int r = row + 16 * m + Accumulators::below(Accumulators::row(e)),
                              other = at.row() + column + Accumulators::column(e);
                    if (!(kRowsAreQueries ? at.mask.visible(r, other) : at.mask.visible(other, r))) dx = 0.f;
                    if (Mask::kPicksQueries && !kRowsAreQueries && x.lse_t == -infinity()) dx = 0.f;
                }
                t[m][c][e] = dx;
            }
        }
    }
}

// Brings the sums to a scale that the weights of one more tile of queries can have, and returns that. Narrow types,
// streamed queries: weights are scaled by 2^(kTopExponent - exponent).
__device__ inline float rescale(Strip<kOutTiles>& out, int& exponent, u32 vectors, Range columns, int first_column) {
    int top = exponent;
    for (int j = lane_id(); j < kColumns; j += 32) {
        const float g = shared_float(vectors + 4 * (2 * kColumns + j));
        const float value = Logit::kNeedsValue ? kLog2e * shared_float(vectors + 4 * (3 * kColumns + j)) : 0.f;
        const int e = exponent_of(g * Logit::bound(value));
        if (columns.contains(first_column + j) && e < 127 && counts(vectors, j)) top = max(top, e);
    }
    top = __reduce_max_sync(~0u, top);
    if (top > exponent) {
        const float shrink = power_of_two(max(exponent - top, -126));
#pragma unroll
        for (int m = 0; m < kWarpTiles; ++m)
#pragma unroll
            for (int d = 0; d < kOutTiles; ++d)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[m][d][e] *= shrink;
        exponent = top;
    }
    return power_of_two(max(kTopExponent - exponent, -126));
}

// A tile of streamed rows in shared memory: of both sides, and where queries are streamed their statistics.
struct Stage {
    u32 base;
    __device__ TeacherTile teacher() const { return {base}; }
    __device__ StudentTile student() const { return {base + TeacherTile::bytes(kColumns)}; }
    __device__ OutTile grad() const { return {kSide == kTeacher ? teacher().base : student().base}; }
    __device__ u32 vectors() const { return base + kTileBytes; }
};

// The statistics of a tile of queries, from `first` on.
__device__ inline void load_vectors(u32 to, const GradientArgs& args, int batch, int head, int first_query, int first,
                                    Range valid) {
    for (int j = threadIdx.x; j < kVectors * kColumns; j += kThreads) {
        const int which = j / kColumns, q = first + j % kColumns;
        const Tensor3& x = which == 0   ? args.teacher_lse
                           : which == 1 ? args.student_lse
                           : which == 2 ? args.grad
                                        : args.value;
        const bool inside = valid.contains(q);
        cp_async_4(to + 4 * j, row_vector(x, batch, head, first_query) + (inside ? q * x.row : 0), inside ? 4 : 0);
    }
}

// What the sums must be multiplied by is known where they are written; so is the segment, found anew: registers are
// dear in the loop.
__device__ inline void write(const GradientArgs& args, const Block& block, int first_head, int out_heads,
                             const Strip<kOutTiles>& out, int row, int exponent) {
    constexpr int bytes = WrittenElement::kBytes;
    const Extents& n = args.n;
    const int lane = lane_id();
    Block again = block_of(blockIdx.x, n, out_heads, n.batch * out_heads, kRowsAreQueries && !Mask::kListed);
    const Segment here = Mask::locate(n, first_head, again);
    const int first_out = kRowsAreQueries ? here.first_query : here.first_key;
    const u64 head_base =
        args.out.pointer +
        (block.batch * args.out.batch + block.head * args.out.head + first_out * args.out.row) * bytes;
    const Mask mask(n, here, block.batch, first_head);
#pragma unroll
    for (int m = 0; m < kWarpTiles; ++m)
#pragma unroll
        for (int half = 0; half < Accumulators::kRows; ++half) {
            const int r = row + 16 * m + Accumulators::below(half);
            float factor = gradient_factor<kSide>(args.out_scale);
            bool kept = true;
            if constexpr (kRowsAreQueries) {
                const RowStats x = read_row_stats(args, mask, block.batch, block.head, r);
                if constexpr (Mask::kPicksQueries) kept = !mask.keys_of(r, r + 1).empty();
                factor *= x.weight;
                if constexpr (OutElement::kNarrowExponent)
                    factor *= power_of_two(exponent_of(Logit::bound(x.value)) + 1 - kTopExponent);
            } else if constexpr (OutElement::kNarrowExponent) {
                factor *= power_of_two(exponent - kTopExponent);
            }
            if (r >= (kRowsAreQueries ? here.queries : here.keys)) continue;
#pragma unroll
            for (int d = 0; d < kOutTiles; ++d) {
                const int column = 8 * d + Accumulators::first_column(lane);
                const float x = kept ? out[m][d][Accumulators::element(half, 0)] * factor : 0.f,
                            y = kept ? out[m][d][Accumulators::element(half, 1)] * factor : 0.f;
                store_two<OutTile, WrittenElement>(head_base + (r * args.out.row + column) * bytes, column, x, y);
            }
        }
}

extern "C" __global__ void __launch_bounds__(kThreads, SKL_MIN_BLOCKS)
    streamkl_gradient(const __grid_constant__ GradientArgs args) {
    extern __shared__ __align__(16) unsigned char shared[];
    const Extents& n = args.n;
    const int out_group = kSide == kTeacher ? n.teacher_group : n.student_group;
    const int heads_per_block = kRowsAreQueries ? 1 : out_group;  // query heads summed into one output head
    const int out_heads = n.heads / heads_per_block;
    Block block = block_of(blockIdx.x, n, out_heads, n.batch * out_heads, kRowsAreQueries && !Mask::kListed);
    const int first_head = block.head * heads_per_block, end_head = first_head + heads_per_block;
    const Segment segment = Mask::locate(n, first_head, block);
    const int row_count = kRowsAreQueries ? segment.queries : segment.keys;
    const int first_row = block.tile * kRows, end_row = min(first_row + kRows, row_count);
    if (Mask::kRagged && first_row >= row_count) return;
    const Range rows{first_row, end_row};

    const u32 base = static_cast<u32>(__cvta_generic_to_shared(shared));
    const TeacherTile rows_t{base};
    const StudentTile rows_s{base + TeacherTile::bytes(kRows)};
    const OutTile grad_rows{kSide == kTeacher ? rows_t.base : rows_s.base};

    const int lane = lane_id(), warp_row = (threadIdx.x / 32) * (16 * kWarpTiles);
    const int row = first_row + warp_row + Accumulators::first_row(lane);
    const Numbers numbers{args.teacher_numbers, args.student_numbers};

    // Asked for wherever a tile is used: registers that keep what is cheap to compute are missing elsewhere, and
    // kernels with none to spare spill.
    const auto stage = [base](int i) { return Stage{base + kRowBytes + (i % kStages) * kStageBytes}; };

    Strip<kOutTiles> out;
    clear<kOutTiles>(out);
    int exponent = kLowestExponent;
    RowStats stats[kWarpTiles][Accumulators::kRows];

    for (int head = first_head; head < end_head; ++head) {
        const Mask mask(n, segment, block.batch, head);
        const Range columns = kRowsAreQueries ? mask.keys_of(first_row, end_row) : mask.queries_of(first_row, end_row);
        Cursor<Mask> at(mask, rows, mask.steps_of(first_row, covering(columns, kColumns)));
        Common common{base + kRowBytes + kStages * kStageBytes};
        const HeadView queries_t = head_view<TeacherTile>(args.in.teacher_q, block.batch, head, segment.first_query);
        const HeadView queries_s = head_view<StudentTile>(args.in.student_q, block.batch, head, segment.first_query);
        const HeadView keys_t =
            head_view<TeacherTile>(args.in.teacher_k, block.batch, head / n.teacher_group, segment.first_key);
        const HeadView keys_s =
            head_view<StudentTile>(args.in.student_k, block.batch, head / n.student_group, segment.first_key);
        Cursor<Mask> ahead = at;
        const auto fetch = [&args, &block, &segment, &rows, &columns, &ahead, &keys_t, &keys_s, &queries_t, &queries_s,
                            stage, head](int i) {
            const int first = ahead.row();
            // Asking takes registers.
            constexpr int at_once = Mask::kSparse && (kRowsAreQueries || OutElement::kPlanes > 1) ? 1
                                    : Mask::kPicksQueries                                         ? 4
                                                                                                  : 16;
            const bool full = ahead.full(rows.begin, rows.end);
            const auto met = [&ahead, &rows, full](int column) {
                return full || ahead.streamed_seen(rows.begin, rows.end, column);
            };
            if constexpr (kRowsAreQueries) {
                load_rows<kColumns, SKL_TK_VECTOR, at_once>(stage(i).teacher(), keys_t, first, columns, met);
                load_rows<kColumns, SKL_SK_VECTOR, at_once>(stage(i).student(), keys_s, first, columns, met);
            } else {
                load_rows<kColumns, SKL_TQ_VECTOR, at_once>(stage(i).teacher(), queries_t, first, columns, met);
                load_rows<kColumns, SKL_SQ_VECTOR, at_once>(stage(i).student(), queries_s, first, columns, met);
                load_vectors(stage(i).vectors(), args, block.batch, head, segment.first_query, first, columns);
            }
            ahead.next();
        };

        cp_async_wait<0>();  // a head whose list is empty has waited for nothing, not even for its rows
        __syncthreads();     // the previous head's last tile is still being read
        load_rows<kRows, kRowsAreQueries ? SKL_TQ_VECTOR : SKL_TK_VECTOR>(rows_t, kRowsAreQueries ? queries_t : keys_t,
                                                                          first_row, rows);
        load_rows<kRows, kRowsAreQueries ? SKL_SQ_VECTOR : SKL_SK_VECTOR>(rows_s, kRowsAreQueries ? queries_s : keys_s,
                                                                          first_row, rows);
        cp_async_commit();
        fill_ring(ahead, fetch);

        if constexpr (kRowsAreQueries) {
#pragma unroll
            for (int m = 0; m < kWarpTiles; ++m)
#pragma unroll
                for (int half = 0; half < Accumulators::kRows; ++half)
                    stats[m][half] =
                        read_row_stats(args, mask, block.batch, head, row + 16 * m + Accumulators::below(half));
        }
        if constexpr (Common::kPossible) {
            common.find(kSide == kTeacher ? keys_t : keys_s, KeySample(at, columns));
            cp_async_wait<kStages - 1>();  // the queries
            __syncthreads();
#pragma unroll
            for (int m = 0; m < kWarpTiles; ++m)
#pragma unroll
                for (int half = 0; half < Accumulators::kRows; ++half) {
                    const int r = warp_row + Accumulators::first_row(lane) + 16 * m + Accumulators::below(half);
                    float& lse = kSide == kTeacher ? stats[m][half].lse_t : stats[m][half].lse_s;
                    if constexpr (Score<kSide>::kLinear)
                        lse = -Score<kSide>::logit(common.times(grad_rows, r), numbers.of<kSide>(), lse);
                }
        }
        if constexpr (kRowsAreQueries) {
#pragma unroll
            for (int m = 0; m < kWarpTiles; ++m)
#pragma unroll
                for (int half = 0; half < Accumulators::kRows; ++half) turn_references(stats[m][half], numbers);
        }
        const auto leave_common = [&common, &stage](int i) { common.template leave<kColumns>(stage(i).grad()); };
        for (int i = 0; at.more(); ++i, at.next()) {
            advance_ring(i, ahead, fetch, leave_common);
            const int first_column = at.row();
            const bool full = at.full(first_row, end_row);
            const u32 vectors = stage(i).vectors();
            float scale = 1.f;
            if constexpr (!kRowsAreQueries && OutElement::kNarrowExponent)
                scale = rescale(out, exponent, vectors, columns, first_column);

            Strip<kTiles> t, s;
            scores<kTiles>(t, rows_t, warp_row, stage(i).teacher());
            scores<kTiles>(s, rows_s, warp_row, stage(i).student());

            if (full)
                logit_gradients<false>(t, s, stats, vectors, scale, at, row, numbers);
            else
                logit_gradients<true>(t, s, stats, vectors, scale, at, row, numbers);

            StripA<OutTile::kCode, kTiles> a;
            strip_to_a<OutTile::kCode, kTiles>(a, t);
            accumulate<kOutTiles, kTiles>(out, a, stage(i).grad());
        }
    }
    write(args, block, first_head, out_heads, out, row, exponent);
}

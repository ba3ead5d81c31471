// The row states of a warp in a forward kernel: feeding them score tiles, merging lanes, writing results. The kernel
// has included its mask, its divergence and the scores before.
#pragma once
#include "common/args.cuh"
#include "common/math.cuh"
#include "tile/fragment.cuh"
#include "tile/logits.cuh"
#include "tile/row_results.cuh"
#include "tile/schedule.cuh"

static_assert(RowState::kResumes || sizeof(RowState) == 4 * SplitStates::kStates, "plan: the state of a row");

// Rows of which a lane holds elements, and how far below the first of them number i lies.
constexpr int kLaneRows = Accumulators::kRows * kWarpTiles;
__device__ constexpr int below_first(int i) {
    return 16 * (i / Accumulators::kRows) + Accumulators::below(i % Accumulators::kRows);
}

// States of the lane's rows, from `row` on of head `head`, before any key; those of a later pass know what the pass
// before has of the row.
__device__ inline void start_rows(const ForwardArgs& args, RowState (&state)[kLaneRows], int batch, int head,
                                  const Segment& segment, int row) {
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
        const int r = row + below_first(i);
        start_row(args, state[i], batch, head, segment.first_query + r, r < segment.queries);
    }
}

// T and S are the scores whose dots t and s hold, n_t and n_s their numbers. False: the lane's references have to move,
// which it takes logits to find out how far.
template <class T, class S, int TILES, class NT, class NS>
__device__ inline bool absorb_all(RowState (&state)[kLaneRows], const Strip<TILES>& t, const Strip<TILES>& s,
                                  const NT& n_t, const NS& n_s) {
    LogitRow<T, NT, TILES> row_t[kLaneRows];
    LogitRow<S, NS, TILES> row_s[kLaneRows];
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
        row_t[i] = {{t[i / Accumulators::kRows], i % Accumulators::kRows}, n_t};
        row_s[i] = {{s[i / Accumulators::kRows], i % Accumulators::kRows}, n_s};
    }
    if constexpr (T::kWeighs || S::kWeighs) return RowState::absorb_once(state, row_t, row_s);
    RowState::absorb(state, row_t, row_s);
    return true;
}

// One tile's dots, keys first_key on, into the states. Where the tile is not full, pairs that are not visible are put
// out of the way first, in a branch of its own: a test inside one would be turned into selections that every tile pays
// for.
template <int TILES>
__device__ inline void absorb_tile(RowState (&state)[kLaneRows], Strip<TILES>& t, Strip<TILES>& s, const Mask& mask,
                                   int row, bool full, int first_key, Numbers numbers) {
#pragma unroll
    for (int m = 0; m < kWarpTiles; ++m)
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
            turn<Score<kTeacher>>(t[m], n, numbers.teacher);
            turn<Score<kStudent>>(s[m], n, numbers.student);
        }
    if (!full || !absorb_all<Score<kTeacher>, Score<kStudent>, TILES>(state, t, s, numbers.teacher, numbers.student)) {
        const int key = first_key + Accumulators::first_column(lane_id());
#pragma unroll
        for (int m = 0; m < kWarpTiles; ++m)
#pragma unroll
            for (int n = 0; n < TILES; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const bool visible = mask.visible(row + 16 * m + Accumulators::below(Accumulators::row(e)),
                                                      key + 8 * n + Accumulators::column(e));
                    t[m][n][e] = visible ? Score<kTeacher>::logit(t[m][n][e], numbers.teacher) : kMasked;
                    s[m][n][e] = visible ? Score<kStudent>::logit(s[m][n][e], numbers.student) : kMasked;
                }
        absorb_all<LogitsThemselves, LogitsThemselves, TILES>(state, t, s, numbers.teacher, numbers.student);
    }
    __syncwarp();  // lanes whose references moved took longer; the matrix instructions want all of them
}

// What the logits of a row lack, in base 2 and of both sides: nothing, unless a kernel says otherwise.
struct NoOffsets {
    static constexpr bool kAny = false;
    __device__ float2 operator()(int) const { return make_float2(0.f, 0.f); }
};

// Merges the four lanes of each row and writes what they know: results, or the state where keys are split. `offsets`
// says what the logits lack of the row so many below the lane's first. The first split leaves that where the
// log-sum-exps will be, for combine.cu: in the states it would be rounded with the references, and the value hangs on
// their differences.
template <class Offsets = NoOffsets>
__device__ inline void write_rows(const ForwardArgs& args, const Block& block, const Segment& segment,
                                  RowState (&state)[kLaneRows], int row, const Offsets& offsets = {}) {
    const Extents& n = args.n;
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) {
        RowState& x = state[i];
        Accumulators::merge_row(x);
        const int r = row + below_first(i);
        const float2 offset = offsets(r - row);
        if (!Accumulators::writes_row(lane_id()) || r >= segment.queries) continue;
        if constexpr (Mask::kPicksQueries) {
            if (!Mask(n, segment, block.batch, block.head).there(r)) x.start();
        }
        const int query = segment.first_query + r;
        if (n.splits == 1) {
            write_row<Offsets::kAny>(args, x, block.batch, block.head, query, offset);
        } else {
            if (Offsets::kAny && !RowState::kResumes && block.split == 0) {
                *row_vector(args.teacher_lse, block.batch, block.head, query) = offset.x;
                *row_vector(args.student_lse, block.batch, block.head, query) = offset.y;
            }
            const i64 rows = static_cast<i64>(n.batch) * n.heads * n.queries;
            const i64 index = (static_cast<i64>(block.batch) * n.heads + block.head) * n.queries + query;
            x.store(reinterpret_cast<float*>(args.workspace) + block.split * rows + index, n.splits * rows);
        }
    }
}

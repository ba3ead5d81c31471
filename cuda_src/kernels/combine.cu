// Joins the row states that the blocks of a split forward left behind. One thread per row; splits are merged in their
// order, so the result does not depend on who finished first.
#include "common/args.cuh"
#include "common/math.cuh"
#include "@divergence"
#include "tile/row_results.cuh"

static_assert(RowState::kResumes || sizeof(RowState) == 4 * SplitStates::kStates, "plan: the state of a row");

extern "C" __global__ void __launch_bounds__(SKL_THREADS) streamkl_combine(const __grid_constant__ ForwardArgs args) {
    const Extents& n = args.n;
    const i64 rows = static_cast<i64>(n.batch) * n.heads * n.queries;
    const i64 index = static_cast<i64>(blockIdx.x) * SKL_THREADS + threadIdx.x;
    if (index >= rows) return;
    const float* const from = reinterpret_cast<const float*>(args.workspace) + index;
    RowState state, other;
    state.load(from, n.splits * rows);
    for (int split = 1; split < n.splits; ++split) {
        other.load(from + split * rows, n.splits * rows);
        state.merge(other);
    }
    const int r = static_cast<int>(index % n.queries), pair = static_cast<int>(index / n.queries);
    const int b = pair / n.heads, h = pair % n.heads;
    float2 offset = make_float2(0.f, 0.f);
    if constexpr (SKL_HAS_OFFSETS)  // what the logits lacked lies where the log-sum-exps go
        offset = make_float2(*row_vector(args.teacher_lse, b, h, r), *row_vector(args.student_lse, b, h, r));
    write_row<SKL_HAS_OFFSETS != 0>(args, state, b, h, r, offset);
}

// Rows that a call has left over some of their keys, joined with what another has left over others: states as moments
// of rows have them, and the results that follow, written over the first call's. One thread per row.
#include "common/args.cuh"
#include "common/math.cuh"
#include "@divergence"

extern "C" __global__ void __launch_bounds__(SKL_THREADS)
    streamkl_join_states(const __grid_constant__ JoinStatesArgs args) {
    const i64 index = static_cast<i64>(blockIdx.x) * SKL_THREADS + threadIdx.x;
    if (index >= args.entries * args.count) return;
    const i64 entry = index / args.count, row = entry * args.pitch + args.first + (index - entry * args.count);
    float* const states = reinterpret_cast<float*>(args.states) + row * RowState::kMoments;
    float* const lse_t = reinterpret_cast<float*>(args.teacher_lse) + row;
    float* const lse_s = reinterpret_cast<float*>(args.student_lse) + row;
    RowState state, other;
    state.start();
    if (*lse_t != -infinity()) state.load(states, 1);  // of a row that no call has seen there is no state
    other.load(reinterpret_cast<const float*>(args.others) + index * RowState::kMoments, 1);
    state.merge(other);
    state.store(states, 1);
    state.finish(*(reinterpret_cast<float*>(args.value) + row), *lse_t, *lse_s);
}

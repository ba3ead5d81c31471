// Joins the states that kernels/indexer_score_sm80.cu leaves of each row, one for each share of its keys, in their
// order: KL, the student's log-sum-exp and the teacher's mass; or with SKL_LSE the teacher's log-sum-exp of a head.
#include "common/args.cuh"
#include "common/math.cuh"

extern "C" __global__ void __launch_bounds__(SKL_THREADS)
    streamkl_indexer_join(const __grid_constant__ IndexerArgs args) {
    const int row = blockIdx.x * SKL_THREADS + threadIdx.x, entry = blockIdx.y;
    if (row >= args.queries) return;
    const float4* const states =
        reinterpret_cast<const float4*>(args.states) + static_cast<i64>(entry) * args.splits * args.queries + row;
    float4 sum = states[0];
    for (int i = 1; i < args.splits; ++i) {
        float4 x = states[static_cast<i64>(i) * args.queries];
        const float to = fmaxf(sum.x, x.x), d = to - sum.x, other = to - x.x;
        sum.y = fmaf(sum.y, exp2f(-d), x.y * exp2f(-other));
        sum.w = fmaf(d, sum.z, sum.w) + fmaf(other, x.z, x.w);
        sum.z += x.z;
        sum.x = to;
    }
    const float lse = sum.y == 0.f ? -infinity() : kLn2 * (sum.x + log2f(sum.y));
    const int heads = static_cast<int>(gridDim.y) / args.entries, batch = entry / heads, head = entry % heads;
    if constexpr (SKL_LSE) {
        *row_vector(args.out_lse, batch, head, row) = lse;
    } else {
        const bool active = sum.z != 0.f;  // so is one that is NaN
        const float value = active ? kLn2 * (sum.w / sum.z + (log2f(sum.y) - log2f(sum.z))) : 0.f;
        const bool bad = active && !is_finite(value);
        *row_vector(args.out_value, batch, head, row) = bad ? not_a_number() : value;
        *row_vector(args.out_lse, batch, head, row) = bad ? not_a_number() : lse;
        *row_vector(args.out_mass, batch, head, row) = sum.z;
    }
}

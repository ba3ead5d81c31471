// Joins the states of rows whose keys were split. One warp to a row; splits are added in their order, so the result
// does not depend on who finished first.
#include "common/args.cuh"
#include "common/math.cuh"
#include "divergences/interface.cuh"
#include "tile/accumulators.cuh"
#include "tile/element.cuh"

using E = Element<SKL_A_ELEMENT>;

extern "C" __global__ void __launch_bounds__(SKL_THREADS)
    streamkl_attention_combine(const __grid_constant__ AttentionArgs args) {
    const Extents& n = args.n;
    const i64 all = static_cast<i64>(n.batch) * n.heads * n.queries;
    const i64 index = (static_cast<i64>(blockIdx.x) * SKL_THREADS + threadIdx.x) / 32;
    if (index >= all) return;
    AttentionStates states;
    states.locate(args.workspace, n.splits * all);
    float reference = kUnseen, sum = 0.f;
    for (int split = 0; split < n.splits; ++split) reference = fmaxf(reference, states.reference[split * all + index]);
    for (int split = 0; split < n.splits; ++split) {
        const i64 state = split * all + index;
        sum = fmaf(states.sum[state], exp2_approx(states.reference[state] - reference), sum);
    }
    const bool empty = reference == kUnseen && sum == 0.f;
    const i64 pair = index / n.queries;
    const int r = static_cast<int>(index % n.queries), b = static_cast<int>(pair / n.heads),
              h = static_cast<int>(pair % n.heads), lane = lane_id();
    if (lane == 0) *row_vector(args.lse, b, h, r) = empty ? -infinity() : kLn2 * (reference + log2f(sum));
    const u64 to = args.out.pointer + (b * args.out.batch + h * args.out.head + r * args.out.row) * E::kBytes;
    for (int d = lane; d < AttentionStates::kOut; d += 32) {
        float x = 0.f;
        for (int split = 0; split < n.splits; ++split) {
            const i64 state = split * all + index;
            // One that saw nothing adds nothing.
            const float weight = exp2_approx(states.reference[state] - reference);
            x = fmaf(states.out[state * AttentionStates::kOut + d], weight, x);
        }
        E::store(to + d * E::kBytes, empty ? 0.f : x / sum);
    }
}

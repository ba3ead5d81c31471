// What gradients of attention read of each row: its log-sum-exp in base 2, and delta, the product of its result with the
// upstream gradient of that, less the upstream gradient of the log-sum-exp. kLanes threads to a row. A row without keys
// has an infinite log-sum-exp, so that all of its weights are 0, and a delta of 0: its upstream gradients, which may be
// anything, are not used.
#include "common/args.cuh"
#include "common/math.cuh"
#include "tile/element.cuh"

constexpr int kLanes = SKL_LANES;
using E = Element<SKL_A_ELEMENT>;

extern "C" __global__ void __launch_bounds__(SKL_THREADS)
    streamkl_attention_rows(const __grid_constant__ AttentionRowsArgs args) {
    const i64 all = static_cast<i64>(args.entries) * args.heads * args.queries;
    const i64 index = (static_cast<i64>(blockIdx.x) * SKL_THREADS + threadIdx.x) / kLanes;
    const bool inside = index < all;
    const i64 pair = inside ? index / args.queries : 0;
    const int r = static_cast<int>(inside ? index % args.queries : 0);
    const int b = static_cast<int>(pair / args.heads), h = static_cast<int>(pair % args.heads);
    const float lse = inside ? *row_vector(args.lse, b, h, r) : -infinity();
    const bool empty = lse == -infinity();
    float sum = 0.f;
    if (!empty) {
        const auto row_of = [b, h, r](const Tensor4& x) {
            return x.pointer + (b * x.batch + h * x.head + r * x.row) * E::kBytes;
        };
        const u64 out = row_of(args.saved_out), grad = row_of(args.grad);
        for (int d = threadIdx.x % kLanes; d < SKL_VALUE_DIM; d += kLanes)
            sum = fmaf(E::load(out + d * args.saved_out.column * E::kBytes),
                       E::load(grad + d * args.grad.column * E::kBytes), sum);
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (!inside || threadIdx.x % kLanes > 0) return;
    if (args.grad_lse.pointer != 0 && !empty) sum -= *row_vector(args.grad_lse, b, h, r);
    AttentionRows rows;
    rows.locate(args.workspace, all);
    rows.lse[index] = empty ? infinity() : kLog2e * lse;
    rows.delta[index] = sum;
}

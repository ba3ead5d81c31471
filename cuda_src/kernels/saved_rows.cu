// What gradients read of each row where the divergence has moments: upstream gradient, log-sum-exps and one number,
// made of what the forward saved. One thread per row; the four lie in the workspace one after the other, compact.
#include "common/args.cuh"
#include "common/math.cuh"
#include "@divergence"

constexpr int kSide = SKL_GRAD_SIDE;

struct SavedRow {
    float lse_t, lse_s, weight, value;  // nats
};

extern "C" __global__ void __launch_bounds__(SKL_THREADS)
    streamkl_saved_rows(const __grid_constant__ SavedRowsArgs args) {
    const i64 rows = static_cast<i64>(args.entries) * args.heads * args.queries;
    const i64 index = static_cast<i64>(blockIdx.x) * SKL_THREADS + threadIdx.x;
    if (index >= rows) return;
    const int r = static_cast<int>(index % args.queries), pair = static_cast<int>(index / args.queries);
    const int b = pair / args.heads, h = pair % args.heads;
    SavedRow row{*row_vector(args.teacher_lse, b, h, r), *row_vector(args.student_lse, b, h, r),
                 *row_vector(args.grad, b, h, r), 0.f};
    // A row without keys has nothing to be made of, and says so by its log-sum-exp.
    if (row.lse_t != -infinity()) LogitGradient<kSide>::prepare(row, row_vector(args.moments, b, h, r));
    float* const to = reinterpret_cast<float*>(args.workspace) + index;
    to[0] = row.weight;
    to[rows] = row.lse_t;
    to[2 * rows] = row.lse_s;
    to[3 * rows] = row.value;
}

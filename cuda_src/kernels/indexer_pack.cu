// What the indexer's kernels read of rows, one after the other and in float32: the teacher's log-sum-exps in base 2,
// +inf where a head counts nothing, the weights, and for a backward what a row has to its gradient. blockIdx.y is the
// vector: of all heads of the teacher, of all heads of the student, of all groups; absent ones are skipped.
#include "common/args.cuh"
#include "common/math.cuh"
#include "tile/element.cuh"
#include "@score"

using E = Element<SKL_W_ELEMENT>;
static_assert(IndexerRowRegions::kLse2 == 1 && IndexerRowRegions::kWeights == 1 && IndexerRowRegions::kRowStats == 4,
              "plan: floats, and a float4 for each row");

extern "C" __global__ void __launch_bounds__(SKL_THREADS)
    streamkl_indexer_pack(const __grid_constant__ IndexerPackArgs args) {
    const int row = blockIdx.x * SKL_THREADS + threadIdx.x;
    if (row >= args.queries) return;
    int vector = blockIdx.y;
    const int teacher = args.teacher_lse.pointer ? args.entries * args.teacher_heads : 0;
    if (vector < teacher) {
        const float lse = *row_vector(args.teacher_lse, vector / args.teacher_heads, vector % args.teacher_heads, row);
        reinterpret_cast<float*>(args.lse2)[static_cast<i64>(vector) * args.queries + row] =
            fabsf(lse) == infinity() ? infinity() : kLog2e * lse;
        return;
    }
    vector -= teacher;
    if (vector < args.entries * args.index_heads) {
        const Tensor3& x = args.in_weights;
        const i64 at = vector / args.index_heads * x.batch + vector % args.index_heads * x.head + row * x.row;
        reinterpret_cast<float*>(args.weights)[static_cast<i64>(vector) * args.queries + row] =
            x.pointer ? E::load(x.pointer + at * E::kBytes) : 1.f;
        return;
    }
    vector -= args.entries * args.index_heads;
    const int batch = vector / args.groups, group = vector % args.groups;
    const float lse = *row_vector(args.index_lse, batch, group, row), mass = *row_vector(args.mass, batch, group, row),
                grad = *row_vector(args.grad, batch, group, row);
    // Rows that no head has mass in, and those that weigh nothing, have exactly no gradient, whatever memory holds.
    const bool live = mass != 0.f && grad != 0.f && lse != -infinity();
    reinterpret_cast<float4*>(args.row_stats)[static_cast<i64>(vector) * args.queries + row] =
        live ? make_float4(kLog2e * lse, 1.f / mass, SKL_S_SCORE::factor(args.index_scale) * grad, 0.f)
             : make_float4(0.f, 0.f, 0.f, 0.f);
}

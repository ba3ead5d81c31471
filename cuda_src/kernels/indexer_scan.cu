// Whether the student's queries and keys hold NaN or infinities: products then clear them from operands, which costs
// time that other calls need not spend. A warp has a row at a time.
#include "common/args.cuh"
#include "common/math.cuh"
#include "tile/element.cuh"

using E = Element<SKL_S_ELEMENT>;

extern "C" __global__ void __launch_bounds__(SKL_THREADS)
    streamkl_indexer_scan(const __grid_constant__ IndexerArgs args) {
    const int heads = args.groups * args.index_heads, lane = threadIdx.x % 32;
    const i64 queries = static_cast<i64>(args.entries) * heads * args.queries,
              keys = static_cast<i64>(args.entries) * args.index_key_heads * args.keys;
    bool finite = true;
    for (i64 i = static_cast<i64>(blockIdx.x) * (SKL_THREADS / 32) + threadIdx.x / 32; i < queries + keys;
         i += static_cast<i64>(gridDim.x) * (SKL_THREADS / 32)) {
        const bool is_query = i < queries;
        const Tensor4& x = is_query ? args.index_q : args.index_k;
        const i64 j = is_query ? i : i - queries;
        const int rows = is_query ? args.queries : args.keys, of = is_query ? heads : args.index_key_heads;
        const i64 at = j / rows / of * x.batch + j / rows % of * x.head + j % rows * x.row;
        for (int d = lane; d < SKL_S_DIM; d += 32)
            finite = finite && is_finite(E::load(x.pointer + (at + d * x.column) * E::kBytes));
    }
    if (!finite) *reinterpret_cast<int*>(args.broken) = 1;
}

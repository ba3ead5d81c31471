// Adds up the key gradients of blocks that have shared the rows, in their order, and rounds them into the output.
#include "common/args.cuh"
#include "common/config.cuh"
#include "tile/element.cuh"

using E = Element<SKL_S_ELEMENT>;

extern "C" __global__ void __launch_bounds__(SKL_THREADS)
    streamkl_indexer_sum(const __grid_constant__ IndexerArgs args) {
    constexpr int depth = IndexerGradients::kKeySums;
    const i64 index = static_cast<i64>(blockIdx.x) * SKL_THREADS + threadIdx.x;
    const int column = static_cast<int>(index % SKL_S_DIM), entry = blockIdx.y;
    const i64 key = index / SKL_S_DIM;
    if (key >= args.keys) return;
    const float* const sums = reinterpret_cast<const float*>(args.key_sums);
    float sum = 0.f;
    for (int share = 0; share < args.shares; ++share)
        sum += sums[((static_cast<i64>(share) * gridDim.y + entry) * args.keys + key) * depth + column];
    const int batch = entry / args.index_key_heads, head = entry % args.index_key_heads;
    const u64 to = args.out_k.pointer +
                   (batch * args.out_k.batch + head * args.out_k.head + key * args.out_k.row + column) * E::kBytes;
    E::store(to, sum);
}

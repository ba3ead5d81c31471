// Adds what blocks of threads have left of blocks of keys that others began to the sums, in their order, and after the
// last strip rounds the sums into the output. blockIdx.x is the block of keys of an entry, blockIdx.y a part of its
// rows.
#include "common/args.cuh"
#include "common/config.cuh"
#include "kernels/indexer_gradient/units.cuh"
#include "tile/element.cuh"

using E = Element<SKL_S_ELEMENT>;
constexpr int kDepth = IndexerGradients::kKeySums, kPartKeys = SKL_PART_KEYS, kMostShares = SKL_SHARES;
static_assert(IndexerGradients::kPartials == kDepth, "plan: what lies beside the sums has rows like theirs");

extern "C" __global__ void __launch_bounds__(SKL_THREADS)
    streamkl_indexer_gated_join(const __grid_constant__ IndexerArgs args) {
    // Whether a share has left something of this block of keys, and between which shares those are.
    __shared__ bool has[kMostShares];
    __shared__ int first, last;
    const Units units(args);
    const int entry = blockIdx.x, block = entry % args.key_blocks, shares = args.shares;
    const int begin = units.before[entry], end = units.before[entry + 1];
    if (threadIdx.x == 0) {
        first = shares;
        last = -1;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < shares; i += SKL_THREADS) {
        const int from = units.first_of(i, shares);
        has[i] = from > begin && from < end && units.first_of(i + 1, shares) > from;
        if (has[i]) {
            atomicMin(&first, i);
            atomicMax(&last, i);
        }
    }
    __syncthreads();
    const bool ends = args.first_tile + args.tiles >= args.grid_tiles;
    if (!ends && last < 0) return;
    const int of_keys = entry / args.key_blocks, batch = of_keys / args.index_key_heads,
              head = of_keys % args.index_key_heads;
    float* const sums = reinterpret_cast<float*>(args.key_sums) + static_cast<i64>(of_keys) * args.keys * kDepth;
    const float* const beside = reinterpret_cast<const float*>(args.partials);
    constexpr int quads = kDepth / 4;
    for (int i = threadIdx.x; i < kPartKeys * quads; i += SKL_THREADS) {
        const int local = static_cast<int>(blockIdx.y) * kPartKeys + i / quads, column = i % quads * 4;
        const i64 key = static_cast<i64>(block) * kKeyBlock + local;
        if (key >= args.keys) continue;
        float4* const place = reinterpret_cast<float4*>(sums + key * kDepth + column);
        float4 sum = *place;
        for (int share = first; share <= last; ++share) {
            if (!has[share]) continue;
            const float4 x = *reinterpret_cast<const float4*>(
                beside + (static_cast<i64>(share) * kKeyBlock + local) * kDepth + column);
            sum.x += x.x;
            sum.y += x.y;
            sum.z += x.z;
            sum.w += x.w;
        }
        if (!ends) {
            *place = sum;
            continue;
        }
        const float values[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int j = 0; j < 4; ++j)
            if (column + j < SKL_S_DIM)
                E::store(args.out_k.pointer + (batch * args.out_k.batch + head * args.out_k.head +
                                               key * args.out_k.row + (column + j) * args.out_k.column) *
                                                  E::kBytes,
                         values[j]);
    }
}

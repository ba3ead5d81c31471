// How the work that the gradients are in a strip is numbered: what is before each block of keys
// (indexer_gradient/units.cuh), by the first block of threads, and before each row tile (indexer_gradient/items.cuh),
// by the second. The third numbers the strip's tiles themselves, by row tiles.
#include "common/args.cuh"
#include "common/config.cuh"
#include "kernels/indexer_gradient/items.cuh"
#include "kernels/indexer_gradient/units.cuh"
#include "tile/index_parts.cuh"

// Sums of `units(i)` over what comes before, of `count`, and of all.
template <class UnitsOf>
__device__ inline void number(int* before, int count, UnitsOf units) {
    __shared__ int sums[SKL_THREADS / 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int total = 0;
    for (int base = 0; base < count; base += SKL_THREADS) {
        const int i = base + threadIdx.x;
        const int mine = i < count ? units(i) : 0;
        int up_to = mine;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int x = __shfl_up_sync(~0u, up_to, step);
            if (lane >= step) up_to += x;
        }
        if (lane == 31) sums[warp] = up_to;
        __syncthreads();
        int all = 0;
#pragma unroll
        for (int w = 0; w < SKL_THREADS / 32; ++w) {
            if (w < warp) up_to += sums[w];
            all += sums[w];
        }
        if (i < count) before[i] = total + up_to - mine;
        total += all;
        __syncthreads();
    }
    if (threadIdx.x == 0) before[count] = total;
}

extern "C" __global__ void __launch_bounds__(SKL_THREADS)
    streamkl_indexer_units(const __grid_constant__ IndexerArgs args) {
    const int tiles = args.tiles, first = args.first_tile, end = first + tiles;
    if (blockIdx.x == 0) {
        if (!args.units) return;
        const int count = args.entries * args.index_key_heads * args.key_blocks;
        const int heads = args.groups / args.index_key_heads * args.index_heads;
        number(reinterpret_cast<int*>(args.units), count, [&args, first, end, heads](int i) {
            const int batch = i / args.key_blocks / args.index_key_heads, block = i % args.key_blocks;
            int found = 0;
            for (int tile = first; tile < end; ++tile) found += may_see(args, batch, tile, block) ? heads : 0;
            return found;
        });
    } else {
        const bool widths = blockIdx.x == 2;
        if (!widths && !args.items) return;
        const int count = args.entries * tiles, parts = args.groups * args.head_blocks;
        number(reinterpret_cast<int*>(widths ? args.strip_widths : args.items), count,
               [&args, tiles, first, widths, parts](int i) {
                   const Range keys = keys_of_tile(args, i / tiles, first + i % tiles);
                   return widths ? strip_width(keys) : parts * units_of(keys);
               });
    }
}

// Which keys each row of the indexer sees: one interval of what causal, compressed keys, bounds and packed sequences
// leave, and of each tile of the strip's grid the union. A thread has a row, a block a tile. Values are clamped here,
// since nobody has looked at them.
#include "common/args.cuh"
#include "common/integers.cuh"

extern "C" __global__ void __launch_bounds__(SKL_THREADS)
    streamkl_indexer_rows(const __grid_constant__ IndexerRowsArgs args) {
    const int tile = blockIdx.x, batch = blockIdx.y, row = tile * SKL_THREADS + static_cast<int>(threadIdx.x);
    Range queries{0, args.queries}, keys{0, args.keys};
    if (args.sequences > 0) {
        // The sequence that begins last at or before the row.
        int low = 0, high = args.sequences - 1;
        while (low < high) {
            const int middle = (low + high + 1) / 2;
            if (integer_at(args.cu_seqlens_q, middle, args.wide_q) <= row)
                low = middle;
            else
                high = middle - 1;
        }
        queries = {clamped(integer_at(args.cu_seqlens_q, low, args.wide_q), args.queries),
                   clamped(integer_at(args.cu_seqlens_q, low + 1, args.wide_q), args.queries)};
        keys = {clamped(integer_at(args.cu_seqlens_k, low, args.wide_k), args.keys),
                clamped(integer_at(args.cu_seqlens_k, low + 1, args.wide_k), args.keys)};
    }
    Range seen{0, 0};
    if (row < args.queries && queries.contains(row)) {
        seen = keys;
        const int count = keys.end - keys.begin;
        if (args.diagonal) {
            const i64 offset = args.offset_given ? args.q_offset
                                                 : static_cast<i64>(count) * args.ratio - (queries.end - queries.begin);
            const i64 tokens = row - queries.begin + offset + 1;
            seen.end = keys.begin + (tokens < 0 ? 0 : clamped(tokens / args.ratio, count));
        }
        if (args.key_start.pointer)
            seen.begin = max(seen.begin, clamped(integer_at(args.key_start.pointer,
                                                            batch * args.key_start.batch + row * args.key_start.row,
                                                            args.wide_start),
                                                 args.keys));
        if (args.key_end.pointer)
            seen.end =
                min(seen.end, clamped(integer_at(args.key_end.pointer,
                                                 batch * args.key_end.batch + row * args.key_end.row, args.wide_end),
                                      args.keys));
    }
    const bool some = !seen.empty();
    if (row < args.queries) {
        const i64 at = static_cast<i64>(batch) * args.queries + row;
        reinterpret_cast<int2*>(args.row_keys)[at] = some ? make_int2(seen.begin, seen.end) : make_int2(0, 0);
        reinterpret_cast<int*>(args.bases)[at] = args.relative ? keys.begin : 0;
    }
    __shared__ int least[SKL_THREADS / 32], most[SKL_THREADS / 32];
    const int first = __reduce_min_sync(~0u, some ? seen.begin : args.keys);
    const int last = __reduce_max_sync(~0u, some ? seen.end : 0);
    if (threadIdx.x % 32 == 0) {
        least[threadIdx.x / 32] = first;
        most[threadIdx.x / 32] = last;
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        int2 all = make_int2(least[0], most[0]);
        for (int i = 1; i < SKL_THREADS / 32; ++i) all = make_int2(min(all.x, least[i]), max(all.y, most[i]));
        reinterpret_cast<int2*>(args.tile_keys)[static_cast<i64>(batch) * gridDim.x + tile] = all;
    }
}

// The keys that a row sees, as a list in ascending order: an id that came twice stands there once, and the order that
// ids came in is forgotten. And what lies in memory in the order of lists.
#pragma once
#include "common/args.cuh"
#include "ptx/shared.cuh"
#include "tile/index_parts.cuh"

constexpr int kMostKeys = SKL_MOST_KEYS;  // of a row
static_assert(IndexerGradients::kListed == 1 && IndexerRowRegions::kRowStats == 4, "plan: a float of each key");

// Of a row (the student's log-sum-exp in base 2, 1 / mass, u, 0); u is 0 where it has no gradient.
__device__ inline float4 stats_of(const IndexerArgs& args, int entry, int row) {
    return reinterpret_cast<const float4*>(args.row_stats)[static_cast<i64>(entry) * args.queries + row];
}

// The gradients of a row's logits, those of its list, of the rows of a launch.
__device__ inline float* listed_gradients(const IndexerArgs& args, int entry, int row) {
    const int rows = args.tiles * kStripTile, first = args.first_tile * kStripTile;
    return reinterpret_cast<float*>(args.listed) + (static_cast<i64>(entry) * rows + row - first) * kMostKeys;
}

// A word of bits, without those of keys that the row's interval leaves out.
__device__ inline u32 seen_bits(const RowKeys& row, int word) {
    const int first = row.interval.begin - 32 * word, end = row.interval.end - 32 * word;
    u32 bits = row.bits[word];
    if (first > 0) bits &= ~0u << first;
    if (end < 32) bits &= (1u << end) - 1;
    return bits;
}

// Lists a row's keys by so many warps, each thread a part of its bits in their order, and says how many there are.
// `counts` has room for an int of each warp; the threads meet at a barrier of this number, before which nobody reads
// the list that was there.
template <int WARPS>
__device__ inline int list_keys(const RowKeys& row, int thread, int* list, int* counts, int barrier) {
    const int begin = row.interval.begin / 32, end = ceil_div(row.interval.end, 32);
    const int each = ceil_div(end - begin, 32 * WARPS);
    const int from = begin + thread * each, to = min(from + each, end), lane = lane_id(), warp = thread / 32;
    int count = 0;
    for (int word = from; word < to; ++word) count += __popc(seen_bits(row, word));
    int sum = count;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int before = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += before;
    }
    if (lane == 31) counts[warp] = sum;
    barrier_sync(barrier, 32 * WARPS);
    int at = sum - count, all = 0;
    for (int i = 0; i < WARPS; ++i) {
        at += i < warp ? counts[i] : 0;
        all += counts[i];
    }
    for (int word = from; word < to; ++word)
        for (u32 bits = seen_bits(row, word); bits != 0; bits &= bits - 1) list[at++] = 32 * word + __ffs(bits) - 1;
    barrier_sync(barrier, 32 * WARPS);
    return all;
}

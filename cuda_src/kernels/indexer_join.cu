// Joins the states that kernels/indexer_score_sm80.cu leaves of each row, one for each split of its keys, in their
// order: KL, the student's log-sum-exp and the teacher's mass; or with SKL_LSE the teacher's log-sum-exp of a head.
#include "common/args.cuh"
#include "common/math.cuh"

static_assert(IndexerRowRegions::kStates == 4, "plan: a float4 for each state");

// Adds a split's state to the sum of those before it.
__device__ inline void add_state(float4& sum, const float4& x) {
    const float to = fmaxf(sum.x, x.x), d = to - sum.x, other = to - x.x;
    sum.y = fmaf(sum.y, exp2f(-d), x.y * exp2f(-other));
    sum.w = fmaf(d, sum.z, sum.w) + fmaf(other, x.z, x.w);
    sum.z += x.z;
    sum.x = to;
}

// How many states a row of streamed queries has: two for each split of the keys that its tiles see.
__device__ inline int states_of(const IndexerArgs& args, int batch, int row) {
    const int2* const tiles = reinterpret_cast<const int2*>(args.tile_keys) + batch * args.grid_tiles;
    constexpr int together = SKL_SPLIT_ROWS / SKL_GRID;
    const int first = row / SKL_SPLIT_ROWS * together;
    Range seen{args.keys, 0};
    for (int i = first; i < min(first + together, args.grid_tiles); ++i) {
        const int2 keys = tiles[i];
        if (keys.y > keys.x) seen = {min(seen.begin, keys.x), max(seen.end, keys.y)};
    }
    const int begin = seen.begin / SKL_GRID * SKL_GRID;
    return seen.empty() ? 0 : 2 * ceil_div(round_up(seen.end, SKL_GRID) - begin, SKL_SPLIT_KEYS);
}

extern "C" __global__ void __launch_bounds__(SKL_THREADS)
    streamkl_indexer_join(const __grid_constant__ IndexerArgs args) {
    constexpr int rows = SKL_THREADS / SKL_PARTS;  // of a block
    const int mine = threadIdx.x % rows, part = threadIdx.x / rows, entry = blockIdx.y;
    const int row = blockIdx.x * rows + mine;
    const bool there = row < args.queries;
    const float4* const states =
        reinterpret_cast<const float4*>(args.states) + static_cast<i64>(entry) * args.splits * args.queries + row;
    const int count = !there ? 0 : SKL_SPLIT_KEYS > 0 ? states_of(args, entry / args.groups, row) : args.splits;
    float4 sum = make_float4(-2e30f, 0.f, 0.f, 0.f);
#pragma unroll 4
    for (int i = part; i < count; i += SKL_PARTS) add_state(sum, states[static_cast<i64>(i) * args.queries]);
    if constexpr (SKL_PARTS > 1) {
        __shared__ float4 left[SKL_THREADS];
        left[threadIdx.x] = sum;
        __syncthreads();
        if (part > 0) return;
        for (int i = 1; i < SKL_PARTS; ++i) add_state(sum, left[i * rows + mine]);
    }
    if (!there) return;
    const float lse = sum.y == 0.f ? -infinity() : kLn2 * (sum.x + log2f(sum.y));
    const int heads = static_cast<int>(gridDim.y) / args.entries, batch = entry / heads, head = entry % heads;
    if constexpr (SKL_LSE) {
        *row_vector(args.out_lse, batch, head, row) = lse;
    } else {
        const bool active = sum.z != 0.f;  // so is one that is NaN
        const float value = active ? kLn2 * (sum.w / sum.z + (log2f(sum.y) - log2f(sum.z))) : 0.f;
        const bool bad = active && !is_finite(value);
        *row_vector(args.out_value, batch, head, row) = bad ? not_a_number() : value;
        *row_vector(args.out_lse, batch, head, row) = bad ? not_a_number() : lse;
        *row_vector(args.out_mass, batch, head, row) = sum.z;
    }
}

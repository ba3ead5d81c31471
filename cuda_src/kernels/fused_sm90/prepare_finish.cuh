// Before and after the pass of fused_sm90.cu: clearing sums and writing what rows contribute; making sums the gradient
// of the queries. Where the pass writes that gradient itself, there is no after, and before it are cleared the rows
// that no step of it visits.
#pragma once
#include "kernels/fused_sm90/layout.cuh"

__device__ inline u32 pack(float lo, float hi) {
    u32 planes[1];
    E::split(lo, hi, planes);
    return planes[0];
}

// Which (batch, head or pack, tile) of the workspace a block of the small kernels has; the tile is counted in its
// segment.
struct Entry {
    i64 index;
    int batch, head, tile;
    Segment segment;
    __device__ Entry(const Workspace& space, const Extents& n) {
        index = blockIdx.x;
        const int pair = blockIdx.x / space.tiles;
        batch = pair / space.heads;
        head = pair % space.heads;
        WorkTile whole{static_cast<int>(blockIdx.x % space.tiles), 0, 1, 0, {0, kNoLimit}};
        segment = Mask::locate<kColumns, true>(n, head, whole);
        tile = whole.tile;
    }
};

// Whether the pass visits a tile of queries, where all keys of a head are in one work tile. A whole warp.
__device__ inline bool any_visible(const Mask& mask, int tile) {
    const Range keys = keys_of(mask.segment, 0);
    if (keys.empty()) return false;
    Range tiles = covering(mask.queries_of(keys.begin, keys.end), kColumns);
    tiles.intersect({tile, tile + 1});
    return Walk(mask, keys, mask.steps_of(keys.begin, tiles)).more();
}

// Zeros for a tile of the gradient of the queries, by a warp.
__device__ inline void clear_queries(const FusedArgs& args, const Entry& at) {
    constexpr int kPieces = GradSide::kDim / 8;
    const int first = at.tile * kColumns, rows = min(kColumns, at.segment.queries - first);
    for (int i = threadIdx.x; i < rows * kPieces; i += 32)
        *reinterpret_cast<uint4*>(query_address(args.out_q, at.batch, at.head, at.segment, first + i / kPieces,
                                                i % kPieces * 8)) = make_uint4(0, 0, 0, 0);
}

// Whether no query of a tile sees a key, so that nobody need clear its sums: whatever the pass may add to them is not
// read either.
__device__ inline bool unseen(const Mask& mask, int tile) {
    if constexpr (kPacked || Mask::kParts == 0) return false;
    const int first = tile * kColumns, end = min(first + kColumns, mask.segment.queries);
    return end <= first || mask.keys_of(first, end).empty();
}

extern "C" __global__ void __launch_bounds__(kHelperThreads)
    streamkl_fused_prepare(const __grid_constant__ HopperFusedArgs all) {
    const GradientArgs& args = all.fused.base;
    const Workspace space(all.fused);
    const Entry at(space, args.n);
    const Mask mask(args.n, at.segment, at.batch, at.head);

    if constexpr (!kDirect) {
        float4* const sums = reinterpret_cast<float4*>(space.sums + at.index * Workspace::kSums);
        if (!unseen(mask, at.tile)) {
#pragma unroll
            for (int i = 0; i < kColumns * GradSide::kDim / 4 / kHelperThreads; ++i)
                sums[threadIdx.x + kHelperThreads * i] = make_float4(0.f, 0.f, 0.f, 0.f);
        }
        if (threadIdx.x >= 32) return;
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) *space.taken = 0;

    if constexpr (kDirect && Mask::kParts > 0) {
        if (!any_visible(mask, at.tile)) clear_queries(all.fused, at);
    }
    int top = kLowestExponent;
#pragma unroll
    for (int j = threadIdx.x; j < kColumns; j += 32) {
        const TileRow row(all.fused, at.segment, at.head, at.tile, j);
        RowStats x = read_row_stats(args, mask, at.batch, row.head, row.query);
        const int e = exponent_of(x.weight * Logit::bound(x.value));
        if (e < 127) top = max(top, e);
        if constexpr (kNarrow) x.weight *= plain_unscale(x);
        turn_references(x, {args.teacher_numbers, args.student_numbers});
        Stats::write(space.row_stats + at.index * Stats::kFloats, j, x);
    }
    if constexpr (kNarrow) {
        top = __reduce_max_sync(~0u, top);
        if (threadIdx.x == 0) space.exponents[at.index] = top;
    }
}

// Row statistics of a narrow type take registers, of which the compiler otherwise spills some to have more blocks.
extern "C" __global__ void __launch_bounds__(kHelperThreads, kNarrow ? 8 : 0)
    streamkl_fused_finish(const __grid_constant__ HopperFusedArgs all) {
    const GradientArgs& args = all.fused.base;
    const Workspace space(all.fused);
    const Entry at(space, args.n);
    const float* const sums = space.sums + at.index * Workspace::kSums;
    const Mask mask(args.n, at.segment, at.batch, at.head);
    const bool zeros = unseen(mask, at.tile);
    // A quad's part of a tile of 8 columns is 64 contiguous bytes of the sums: the first halves of its four elements
    // are the upper row, the others the lower one. A thread takes whole parts, neighbours those of one row.
    constexpr int kParts = GradSide::kDim / 8;
#pragma unroll
    for (int i = threadIdx.x; i < 32 * kParts; i += kHelperThreads) {
        const int part = i % kParts, quad = i / kParts, upper = quad / 8 * 16 + quad % 8, chunk = part / 8;
        const float4* const from = reinterpret_cast<const float4*>(sums + sum_index(chunk, part % 8, quad * 4));
        float4 x[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = zeros ? make_float4(0.f, 0.f, 0.f, 0.f) : from[j];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const TileRow to(all.fused, at.segment, at.head, at.tile, upper + 8 * half);
            if (to.query >= at.segment.queries) continue;
            float factor = gradient_factor<kSide>(args.out_scale);
            if constexpr (kNarrow) {
                const RowStats row = read_row_stats(args, mask, at.batch, to.head, to.query);
                factor *= row.weight * plain_unscale(row);
            }
            const u64 address = query_address(all.fused.out_q, at.batch, to.head, at.segment, to.query, 8 * part);
            if constexpr (kWideQueries) {
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    QueryElement::store_pair(address + 2 * j * QueryElement::kBytes, (half ? x[j].z : x[j].x) * factor,
                                             (half ? x[j].w : x[j].y) * factor);
            } else {
                u32 packed[4];
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    packed[j] = half ? pack(x[j].z * factor, x[j].w * factor) : pack(x[j].x * factor, x[j].y * factor);
                *reinterpret_cast<uint4*>(address) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
            }
        }
    }
}

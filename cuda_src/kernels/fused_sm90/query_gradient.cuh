// The warpgroup of fused_sm90.cu that multiplies dS with the grad side's keys, and has the copy engine add what comes
// out to the sums; or writes it, where it is the whole of dQ.
#pragma once
#include "kernels/fused_sm90/layout.cuh"
#include "ptx/bulk.cuh"
#include "tile/clear.cuh"

struct QueryGradient {
    const FusedArgs& args;
    const Extents& n;
    const Layout& shared;
    WorkItemRing& items;
    const Workspace space;
    const int group, thread, lane;
    const u64 gradients, keys;
    RingCursor<kDsStages> at;
    RingCursor<kStagings> stage;

    __device__ QueryGradient(const HopperFusedArgs& all, const Layout& shared, WorkItemRing& items, Thread who)
        : args(all.fused),
          n(all.fused.base.n),
          shared(shared),
          items(items),
          space(all.fused),
          group(who.group),
          thread(threadIdx.x & 127),
          lane(who.lane),
          gradients(swizzled_descriptor(shared.base + kDsAt)),
          keys(swizzled_descriptor(shared.base + kGradKeysAt, kRows * 128)) {}

    __device__ void run() {
        for (;;) {
            const WorkItem& item = items.read();
            if (item.head < 0) break;
            if (item.first) {
                mbarrier_wait(shared.barrier(kGradKeys), item.grad_parity);
                clear_non_finite<E, kRows, GradSide::kChunks>(shared.base + kGradKeysAt, kWarpgroup + group);
            }
            work(item);
            items.over(item);
        }
        if (!kDirect && lane == 0) bulk_wait();
    }

private:
    // kColumns queries x so many columns of dQ.
    using Part = float[kWide < GradSide::kChunks ? 8 * kWide : kOutTiles][4];

    __device__ void work(const WorkItem& item) {
        const i64 entry = space.entry(item.block.batch, item.head, item.segment, 0);
        float* const head_sums = space.sums + entry * Workspace::kSums;
        bool done = false;  // with the work tile's keys, before the last sums are on their way
        for (Walk walk = walk_of(item, n); walk.more(); walk.next()) {
            float* const sums = head_sums + static_cast<i64>(walk.tile()) * Workspace::kSums;
            float factors[Accumulators::kRows];
            if constexpr (kDirect) row_factors(factors, entry + walk.tile());
#pragma unroll
            for (int first = 0; first < GradSide::kChunks; first += kWide) {
                Part part;
                const bool all = first + kWide >= GradSide::kChunks;
                multiply(part, first, all);
                if (all && item.last && walk.at_last()) {
                    warp_arrive(shared.barrier(kGradKeysFree));
                    done = true;
                }
#pragma unroll
                for (int c = first; c < first + kWide; ++c) {
                    if constexpr (kDirect)
                        write(item, walk.row(), factors, part, first, c);
                    else
                        add(sums, part, first, c);
                }
            }
        }
        if (item.last && !done) warp_arrive(shared.barrier(kGradKeysFree));
    }

    // The chunks of dQ from `first` on. With `all`, dS is read for the last time.
    __device__ void multiply(Part& part, int first, bool all) {
#pragma unroll
        for (int sub = 0; sub < kSubs; ++sub) {
            mbarrier_wait(shared.barrier(kDsFull, at.slot), at.parity);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kSubRows / 16; ++k)
                wgmma<GradSide::kHalf, 1, 1>(part, gradients + static_cast<u64>((at.slot * kDsBytes + k * 2048) >> 4),
                                             keys + ((first * kRows * 128 + (sub * kSubRows + 16 * k) * 128) >> 4),
                                             sub + k > 0);
            wgmma_commit();
            wgmma_wait<0>();
            fence_accumulators(part);
            if (!all) continue;
            warp_arrive(shared.barrier(kDsEmpty, at.slot));
            at.advance();
        }
    }

    // The warp's own part of a buffer: no other warp is waited for.
    __device__ u32 staging() const {
        return shared.base + kStagingAt + stage.slot * kStagingBytes + thread / 32 * (kStagingBytes / 4);
    }

    // What the products of the lane's rows are multiplied by.
    __device__ void row_factors(float (&factors)[Accumulators::kRows], i64 entry) const {
#pragma unroll
        for (int i = 0; i < Accumulators::kRows; ++i) {
            factors[i] = gradient_factor<kSide>(args.base.out_scale);
            if constexpr (kNarrow)
                factors[i] *= Stats::weight(space.row_stats + entry * Stats::kFloats,
                                            thread / 32 * 16 + Accumulators::first_row(lane) + Accumulators::below(i));
        }
    }

    // Chunk c of the tile that begins with query `row`, so that neighbouring lanes write neighbouring 16 bytes.
    __device__ void write(const WorkItem& item, int row, const float (&factors)[Accumulators::kRows], const Part& part,
                          int first, int c) const {
        const u32 mine = staging(), to = fragment_address(mine, 0, lane);
#pragma unroll
        for (int k = 0; k < (sum_tiles(c) + 1) / 2; ++k) {
            float scaled[2][4];
#pragma unroll
            for (int e = 0; e < 8; ++e)
                scaled[e / 4][e % 4] = part[8 * (c - first) + 2 * k + e / 4][e % 4] * factors[Accumulators::row(e % 4)];
            FragmentA<GradSide::kCode> fragment;
            accumulators_to_a<GradSide::kCode>(fragment, scaled[0], scaled[1]);
            store_fragment(to, k, fragment.r[0]);
        }
        __syncwarp();
        const int piece = lane % 8, first_row = row + thread / 32 * 16;
        const int rows = piece < sum_tiles(c) ? min(16, item.segment.queries - first_row) : 0;
        u64 address = query_address(args.out_q, item.block.batch, item.head, item.segment, first_row + lane / 8,
                                    64 * c + 8 * piece);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int r = 4 * i + lane / 8;
            if (r < rows)
                *reinterpret_cast<float4*>(address) = shared_float4(mine + r * 128 + ((piece ^ (r & 7)) << 4));
            address += 4 * args.out_q.row * E::kBytes;
        }
        __syncwarp();  // everybody has read, and the products want all of them
    }

    // Chunk c, as many of its columns at a time as a buffer takes.
    __device__ void add(float* sums, const Part& part, int first, int c) {
        add_tiles(sums, part, first, c, 0, kStagingTiles < 8 ? min(kStagingTiles, sum_tiles(c)) : sum_tiles(c));
        if constexpr (kStagingTiles < 8)
            if (sum_tiles(c) > kStagingTiles)
                add_tiles(sums, part, first, c, kStagingTiles, sum_tiles(c) - kStagingTiles);
    }
    __device__ void add_tiles(float* sums, const Part& part, int first, int c, int start, int tiles) {
        const u32 mine = staging();
        if (lane == 0) bulk_wait_read<kStagings - 1>();
        __syncwarp();
#pragma unroll
        for (int d = 0; d < tiles; ++d) store_float4(mine + (d * 32 + lane) * 16, part[8 * (c - first) + start + d]);
        async_fence();
        __syncwarp();
        if (lane == 0) {
            bulk_add(sums + sum_index(c, start, thread), mine, tiles * 512);
            bulk_commit();
        }
        stage.advance();
    }
};

// The producer of fused_sm90.cu: finds work tiles, writes their work items down, and has keys and queries on their way.
#pragma once
#include "kernels/fused_sm90/layout.cuh"
#include "ptx/bulk.cuh"

struct Producer {
    const HopperFusedArgs& all;
    const Layout& shared;
    WorkItemRing& items;
    const Workspace space;
    const int lane, grad_group, score_group;  // query heads, or packs of them, to a key head
    RingCursor<1> at_grad_keys, at_score_keys;
    RingCursor<kScoreRing> at_score;
    RingCursor<kGradRing> at_grad;

    __device__ Producer(const HopperFusedArgs& all, const Layout& shared, WorkItemRing& items, Thread thread)
        : all(all),
          shared(shared),
          items(items),
          space(all.fused),
          lane(thread.lane),
          grad_group(packs_of(kSide == kTeacher ? n().teacher_group : n().student_group, all.fused.heads_together)),
          score_group(packs_of(kSide == kTeacher ? n().student_group : n().teacher_group, all.fused.heads_together)) {}
    __device__ const Extents& n() const { return all.fused.base.n; }

    __device__ void run() {
        const int grad_heads = packs_of(n().heads, all.fused.heads_together) / grad_group,
                  pairs = n().batch * grad_heads;
        const u32 work_tiles = pairs * n().tiles * n().splits;
        for (u32 index = blockIdx.x; index < work_tiles; index = take_work_tile(space.taken)) {
            WorkItem next;
            const int share_steps = kShared ? all.fused.share_steps : 0;
            next.block =
                share_steps ? turn_of(index, n(), grad_heads, pairs) : block_of(index, n(), grad_heads, pairs, false);
            next.head = next.block.head * grad_group;
            next.segment = Mask::locate(n(), next.head, next.block);
            if (Mask::kRagged && next.block.tile * kRows >= next.segment.keys) continue;
            next.steps = steps_of(next, n());
            const int steps = next.steps.end - next.steps.begin;
            const bool memory = all.fused.base.partial_sums != 0;
            if (share_steps)
                take_turn<Mask>(next.block, grad_group, steps, n(), share_steps, memory);
            else
                take_share<Mask>(next.block, grad_group, steps, n(), memory);
            if (next.block.shares == 0) continue;
            const Range heads = heads_of<Mask>(next.block, next.head, grad_group, next.steps.end - next.steps.begin);
            next.scale = kNarrow ? scale_of(next, heads) : 1.f;
            for (next.head = heads.begin;; ++next.head) {
                next.first = next.head == heads.begin;
                next.last = next.head == heads.end - 1;
                next.comes = next.first || next.head % score_group == 0;
                next.goes = next.last || (next.head + 1) % score_group == 0;
                next.steps = share_of<Mask>(steps_of(next, n()), next.block, next.head % grad_group);
                next.grad_parity = at_grad_keys.parity;
                next.score_parity = at_score_keys.parity;
                // What is in shared memory needs no registers.
                const WorkItem& item = items.write(next);
                load_keys(item);
                stream(item);
                if (item.last) break;
                next = item;
            }
        }
        WorkItem none{};
        none.head = -1;
        items.write(none);
    }

private:
    // What a narrow type's weights are multiplied by, for the largest of all query heads of a share.
    __device__ float scale_of(const WorkItem& item, Range heads) const {
        int exponent = kLowestExponent;
        for (int head = heads.begin; head < heads.end; ++head) {
            const int* const exponents = space.exponents + space.entry(item.block.batch, head, item.segment, 0);
            for (int j = lane; j < ceil_div(item.segment.queries, kColumns); j += 32)
                exponent = max(exponent, exponents[j]);
        }
        return power_of_two(kTopExponent - __reduce_max_sync(~0u, exponent));
    }

    // Of both sides those that are new, when the last ones are done with.
    __device__ void load_keys(const WorkItem& item) {
        const TensorMap& grad_k = kSide == kTeacher ? all.teacher_k : all.student_k;
        const TensorMap& score_k = kSide == kTeacher ? all.student_k : all.teacher_k;
        const int batch = item.block.batch, key = item.segment.first_key + item.block.tile * kRows;
        if (item.first) {
            warp_wait(shared.barrier(kGradKeysFree), at_grad_keys.parity ^ 1);
            if (lane == 0) {
                const u32 here = shared.barrier(kGradKeys);
                mbarrier_expect(here, GradSide::bytes(kRows));
                load_chunks<kRows>(shared.base + kGradKeysAt, grad_k, here, 0, GradSide::kChunks, key, item.block.head,
                                   batch);
            }
            at_grad_keys.advance();
        }
        if (item.comes) {
            warp_wait(shared.barrier(kScoreKeysEmpty), at_score_keys.parity ^ 1);
            if (lane == 0) {
                const u32 here = shared.barrier(kScoreKeysFull);
                mbarrier_expect(here, kKept * kRows * 128);
                for (int row = 0; row < kRows; row += kKeyBox)
                    load_chunks<kRows>(shared.base + kScoreKeysAt + row * 128, score_k, here, 0, kKept, key + row,
                                       item.head / score_group, batch);
            }
            at_score_keys.advance();
        }
    }

    __device__ int first_head(const WorkItem& item) const { return first_head_of(item.head, all.fused.heads_together); }

    // The queries of a work item, of both sides, with what they contribute.
    __device__ void stream(const WorkItem& item) {
        const TensorMap& grad_q = kSide == kTeacher ? all.teacher_q : all.student_q;
        const TensorMap& score_q = kSide == kTeacher ? all.student_q : all.teacher_q;
        const int batch = item.block.batch;
        const float* const stats = space.row_stats + space.entry(batch, item.head, item.segment, 0) * Stats::kFloats;
        const auto load_grad = [this, &grad_q, &item, batch, stats](const Walk& walk, int query) {
            warp_wait(shared.barrier(kGradEmpty, at_grad.slot), at_grad.parity ^ 1);
            if (lane == 0) {
                const u32 grad_side = shared.barrier(kGradFull, at_grad.slot);
                mbarrier_expect(grad_side, kGradTileBytes + kStatsBytes);
                load_chunks<kColumns>(shared.grad_tile(at_grad.slot), grad_q, grad_side, 0, GradSide::kChunks, query,
                                      first_head(item), batch);
                bulk_load(shared.stats(at_grad.slot), stats + static_cast<i64>(walk.tile()) * Stats::kFloats,
                          kStatsBytes, grad_side);
            }
            at_grad.advance();
        };
        for (Walk walk = walk_of(item, n()); walk.more(); walk.next()) {
            const int query = item.segment.first_query + walk.row();
            if constexpr (kPieces) {
                // The grad side's tile as soon as the ring is full: consumers give the last one back with their first
                // piece of this tile at the latest, and want it after all pieces.
                for (int c = 0; c < ScoreSide::kChunks; ++c) {
                    load_score(score_q, c, 1, query, first_head(item), batch);
                    if (c + 1 == min(kScoreRing, kKept)) load_grad(walk, query);
                    if (c < kKept) continue;
                    const TensorMap& score_k = kSide == kTeacher ? all.student_k : all.teacher_k;
                    const int key = item.segment.first_key + item.block.tile * kRows;
                    for (int group = 0; group < kGroups; ++group)
                        load_score(score_k, c, 1, key + 64 * group, item.head / score_group, batch);
                }
            } else if constexpr (kGiven) {
                load_given(score_q, query, item);
                load_grad(walk, query);
            } else {
                load_score(score_q, 0, ScoreSide::kChunks, query, first_head(item), batch);
                load_grad(walk, query);
            }
        }
    }

    // The numbers of the pairs of a tile, where the score side is given.
    __device__ void load_given(const TensorMap& map, int query, const WorkItem& item) {
        warp_wait(shared.barrier(kScoreEmpty, at_score.slot), at_score.parity ^ 1);
        if (lane == 0) {
            const u32 here = shared.barrier(kScoreFull, at_score.slot);
            const Tensor4& numbers = kSide == kTeacher ? all.fused.base.in.student_q : all.fused.base.in.teacher_q;
            mbarrier_expect(here, kScoreStageBytes);
            load_boxes<ScoreSide>(shared.score_stage(at_score.slot), map, here, kBoxes, query,
                                  item.segment.first_key + item.block.tile * kRows,
                                  numbers.head == 0 ? 0 : first_head(item), item.block.batch);
        }
        at_score.advance();
    }

    // What a stage of the score side's ring holds, when that is free.
    __device__ void load_score(const TensorMap& map, int first_chunk, int chunks, int row, int head, int batch) {
        warp_wait(shared.barrier(kScoreEmpty, at_score.slot), at_score.parity ^ 1);
        if (lane == 0) {
            const u32 here = shared.barrier(kScoreFull, at_score.slot);
            mbarrier_expect(here, kScoreStageBytes);
            load_chunks<kColumns>(shared.score_stage(at_score.slot), map, here, first_chunk, chunks, row, head, batch);
        }
        at_score.advance();
    }
};

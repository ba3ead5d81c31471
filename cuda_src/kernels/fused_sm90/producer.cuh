// The producer of fused_sm90.cu: finds portions, writes their visits down, and has keys and queries on their way.
#pragma once
#include "kernels/fused_sm90/layout.cuh"
#include "ptx/bulk.cuh"

struct Producer {
    const HopperFusedArgs& all;
    const Layout& shared;
    VisitRing& visits;
    const Workspace space;
    const int lane, own_group, other_group;  // query heads to a key head
    RingCursor<1> at_own_keys, at_keys;
    RingCursor<kOtherRing> at_other;
    RingCursor<kOwnRing> at_own;

    __device__ Producer(const HopperFusedArgs& all, const Layout& shared, VisitRing& visits, Thread thread)
        : all(all), shared(shared), visits(visits), space(all.fused), lane(thread.lane),
          own_group(kSide == kTeacher ? n().teacher_group : n().student_group),
          other_group(kSide == kTeacher ? n().student_group : n().teacher_group) {}
    __device__ const Extents& n() const { return all.fused.base.n; }

    __device__ void run() {
        const int own_heads = n().heads / own_group, pairs = n().batch * own_heads;
        const u32 portions = pairs * n().tiles;
        for (u32 index = blockIdx.x; index < portions; index = take_portion(space.taken)) {
            Visit next;
            next.block = block_of(index, n(), own_heads, pairs, false);
            next.head = next.block.head * own_group;
            next.place = Mask::locate(n(), next.head, next.block);
            if (Mask::kRagged && next.block.tile * kRows >= next.place.keys) continue;
            if (Mask::kListed && !settle_shares(next.block, all.fused.base)) continue;
            next.lift = kNarrow ? lift_of(next) : 1.f;
            for (;; ++next.head) {
                next.first = next.head % own_group == 0;
                next.last = (next.head + 1) % own_group == 0;
                next.comes = next.first || next.head % other_group == 0;
                next.goes = next.last || (next.head + 1) % other_group == 0;
                next.steps = steps_of(next, n());
                next.own_parity = at_own_keys.parity;
                next.other_parity = at_keys.parity;
                // What is in shared memory needs no registers.
                const Visit& visit = visits.write(next);
                load_keys(visit);
                stream(visit);
                if (visit.last) break;
                next = visit;
            }
        }
        Visit none{};
        none.head = -1;
        visits.write(none);
    }

private:
    // What a narrow type's weights are multiplied by, for the largest of all query heads of a portion.
    __device__ float lift_of(const Visit& visit) const {
        int exponent = kLowestExponent;
        for (int i = 0; i < own_group; ++i) {
            const int* const exponents = space.exponents + space.entry(visit.block.batch, visit.head + i, visit.place, 0);
            for (int j = lane; j < ceil_div(visit.place.queries, kColumns); j += 32) exponent = max(exponent, exponents[j]);
        }
        return power_of_two(kTopExponent - __reduce_max_sync(~0u, exponent));
    }

    // Of both sides those that are new, when the last ones are done with.
    __device__ void load_keys(const Visit& visit) {
        const TensorMap& own_k = kSide == kTeacher ? all.teacher_k : all.student_k;
        const TensorMap& other_k = kSide == kTeacher ? all.student_k : all.teacher_k;
        const int batch = visit.block.batch, key = visit.place.first_key + visit.block.tile * kRows;
        if (visit.first) {
            warp_wait(shared.barrier(kOwnKeysFree), at_own_keys.parity ^ 1);
            if (lane == 0) {
                const u32 here = shared.barrier(kOwnKeys);
                mbarrier_expect(here, Own::bytes(kRows));
                load_chunks<kRows>(shared.base + kOwnKeysAt, own_k, here, 0, Own::kChunks, key, visit.block.head, batch);
            }
            at_own_keys.advance();
        }
        if (visit.comes) {
            warp_wait(shared.barrier(kKeysEmpty), at_keys.parity ^ 1);
            if (lane == 0) {
                const u32 here = shared.barrier(kKeysFull);
                mbarrier_expect(here, Other::bytes(kRows));
                load_chunks<kRows>(shared.base + kOtherKeysAt, other_k, here, 0, Other::kChunks, key, visit.head / other_group, batch);
            }
            at_keys.advance();
        }
    }

    // The queries of a visit, of both sides, with what they contribute.
    __device__ void stream(const Visit& visit) {
        const TensorMap& own_q = kSide == kTeacher ? all.teacher_q : all.student_q;
        const TensorMap& other_q = kSide == kTeacher ? all.student_q : all.teacher_q;
        const int batch = visit.block.batch;
        const float* const terms = space.terms + space.entry(batch, visit.head, visit.place, 0) * Terms::kFloats;
        for (Walk walk = walk_of(visit, n()); walk.more(); walk.next()) {
            const int query = visit.place.first_query + walk.row();
            warp_wait(shared.barrier(kOtherEmpty, at_other.slot), at_other.parity ^ 1);
            if (lane == 0) {
                const u32 other = shared.barrier(kOtherFull, at_other.slot);
                mbarrier_expect(other, kOtherTileBytes);
                load_chunks<kColumns>(shared.other_tile(at_other.slot), other_q, other, 0, Other::kChunks, query, visit.head, batch);
            }
            at_other.advance();
            warp_wait(shared.barrier(kOwnEmpty, at_own.slot), at_own.parity ^ 1);
            if (lane == 0) {
                const u32 own = shared.barrier(kOwnFull, at_own.slot);
                mbarrier_expect(own, kOwnTileBytes + kTermBytes);
                load_chunks<kColumns>(shared.own_tile(at_own.slot), own_q, own, 0, Own::kChunks, query, visit.head, batch);
                bulk_load(shared.terms(at_own.slot), terms + static_cast<i64>(walk.tile()) * Terms::kFloats, kTermBytes, own);
            }
            at_own.advance();
        }
    }
};

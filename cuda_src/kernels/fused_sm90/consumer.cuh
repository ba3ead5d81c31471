// The consumers of fused_sm90.cu: a warpgroup each, for 64 of every kSubRows keys of the block.
#pragma once
#include "kernels/fused_sm90/layout.cuh"
#include "ptx/shared.cuh"
#include "tile/clear.cuh"

using Scores = float[kTiles][4];  // of one thread: accumulators of keys x queries

// Where a consumer is in the ring of the other side: one register will do where that has a power of two places, at the price
// of instructions, and masks need it.
template <bool COUNTS = Mask::kParts != 0 && (kOtherRing & (kOtherRing - 1)) == 0>
struct OtherCursor : RingCursor<kOtherRing> {
    __device__ int place() const { return this->slot; }
    __device__ u32 phase() const { return this->parity; }
};
template <>
struct OtherCursor<true> {
    u32 count = 0;
    __device__ int place() const { return count % kOtherRing; }
    __device__ u32 phase() const { return count / kOtherRing & 1; }
    __device__ void advance() { ++count; }
};
// dX^T with g of one consumer thread as operand A, a fragment per 16 queries.
using Gradients = FragmentA<Own::kCode>[kTiles / 2];

// Puts one fragment where the dQ warpgroup reads: 16 queries further are 32 bytes further in the row, under the swizzle too.
__device__ inline void hand_over(u32 hand, int k, const u32 (&fragment)[4]) { stmatrix_x4(hand ^ (k << 5), fragment); }
// Whether a tile is asked which of its pairs are visible, by the columns and rows of the lane's accumulators.
template <class Visible>
constexpr bool kMasks = true;
template <>
constexpr bool kMasks<Everything> = false;

// Pairs that are not visible are set to zero after the fact, whatever came out for them. Two instances, because a test inside
// one would be turned into selections that every tile pays for. What a narrow type hands over is handed over here: there are
// no registers to keep it.
template <class Visible>
__device__ inline void logit_gradients(Gradients& out, u32 hand, const Scores& other, Scores& own, u32 terms, float lift,
                                       Visible visible, float ct, float cs) {
    const int pair = Accumulators::pair(lane_id());
#pragma unroll
    for (int c = 0; c < kTiles; ++c) {
        RowTerms x[2];
        Terms::read(x, terms, 4 * c + pair);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const RowTerms& row = x[Accumulators::column(e)];
            const float t = kSide == kTeacher ? own[c][e] : other[c][e], s = kSide == kTeacher ? other[c][e] : own[c][e];
            float dx = dot_gradient<kSide>(t, s, row, ct, cs);
            dx *= kNarrow ? plain_scale(row) : row.weight;
            if constexpr (kMasks<Visible>) {
                if (!visible(8 * c + 2 * pair + Accumulators::column(e), Accumulators::below(Accumulators::row(e)))) dx = 0.f;
            }
            own[c][e] = dx;
        }
    }
#pragma unroll
    for (int k = 0; k < kTiles / 2; ++k) {
        if constexpr (kNarrow) {
            FragmentA<Own::kCode> plain;
            accumulators_to_a<Own::kCode>(plain, own[2 * k], own[2 * k + 1]);
            hand_over(hand, k, plain.r[0]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                RowTerms x[2];
                Terms::read(x, terms, 4 * (2 * k + half) + pair);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float& dx = own[2 * k + half][e];
                    // An infinite weight must not make a pair that is not visible count.
                    dx = kMasks<Visible> && dx == 0.f ? 0.f : dx * (x[Accumulators::column(e)].weight * lift);
                }
            }
        }
        accumulators_to_a<Own::kCode>(out[k], own[2 * k], own[2 * k + 1]);
    }
}

// Where a consumer is in a visit: steps go over tiles and, within a tile, over its parts of the keys.
struct Steps {
    const Visit& visit;
    const int group;
    Walk walk;
    int sub = 0;

    __device__ Steps(const Visit& visit, int group, const Extents& n) : visit(visit), group(group), walk(walk_of(visit, n)) {}
    __device__ bool more() const { return walk.more(); }
    __device__ int first() const { return (kReadAgain ? visit.block.tile * kRows : walk.rows.begin) + 64 * group + sub * kSubRows; }
    __device__ bool idle() const { return first() >= visit.place.keys || !walk.sees(first(), first() + 64); }
    __device__ bool full() const { return walk.full(first(), first() + 64); }
    __device__ void advance() {
        if (++sub < kSubs) return;
        sub = 0;
        walk.next();
    }
    // Whether the next step, which becomes the one at hand, sees everything.
    __device__ bool next_is_full() {
        advance();
        return more() && full();
    }
};

using Sums = float[kSubs][kOutTiles][4];  // of dK
using Held = HeldRows<kHeld>[kSubs];

struct Consumer {
    const GradientArgs& args;
    const Layout& shared;
    VisitRing& visits;
    const int group, lane;
    const int warp_row;  // of every kSubRows keys the consumer has 64, and of these the warp 16
    const float ct, cs;
    const u32 hand_start;
    const u64 keys_other, keys_own, ring_other, ring_own, ring_own_rows;
    OtherCursor<> at_other;
    RingCursor<kOwnRing> at_own;
    RingCursor<kHandovers> at_handed;
    float lift = 1.f;
    // Variables of the kernel: the compiler takes arrays that lie in a struct for memory for most of its way.
    Sums& out;
    Scores &other, &own;
    Held& held;

    __device__ Consumer(const GradientArgs& args, const Layout& shared, VisitRing& visits, Thread thread, Sums& out, Scores& other,
                        Scores& own, Held& held)
        : args(args), shared(shared), visits(visits), group(thread.group), lane(thread.lane),
          warp_row(64 * group + 16 * ((threadIdx.x / 32) & 3)), ct(args.teacher_scale), cs(args.student_scale),
          hand_start(hand_of(shared, warp_row + (lane & 15), lane >> 4)),
          keys_other(swizzled_descriptor(shared.base + kOtherKeysAt + group * 64 * 128)),
          keys_own(swizzled_descriptor(shared.base + kOwnKeysAt + group * 64 * 128)),
          ring_other(swizzled_descriptor(shared.base + kOtherAt)), ring_own(swizzled_descriptor(shared.base + kOwnAt)),
          ring_own_rows(swizzled_descriptor(shared.base + kOwnAt, kColumns * 128)), out(out), other(other), own(own), held(held) {}

    __device__ void run() {
        if (group == 1) pass_turn();
        for (;;) {
            const Visit& visit = visits.read();
            if (visit.head < 0) return;
            if (visit.first) start(visit);
            if (visit.comes) warp_wait(shared.barrier(kKeysFull), visit.other_parity);
            work(visit);
            if (visit.goes) warp_arrive(shared.barrier(kKeysEmpty));
            if (visit.last) {
                warp_arrive(shared.barrier(kOwnKeysFree));
                write_keys(visit);
            }
            visits.over();
        }
    }

private:
    // Where a lane puts its part of dX^T: a row of the warp's 16 keys, one half of 16 queries.
    __device__ static u32 hand_of(const Layout& shared, int row, int half) {
        return shared.base + kHandoverAt + row * 128 + ((half ^ (row & 7)) << 4);
    }

    __device__ void start(const Visit& visit) {
        if constexpr (kNarrow) lift = visit.lift;
#pragma unroll
        for (int i = 0; i < 4 * kSubs * kOutTiles; ++i) out[i / (4 * kOutTiles)][i / 4 % kOutTiles][i % 4] = 0.f;
        mbarrier_wait(shared.barrier(kOwnKeys), visit.own_parity);
#pragma unroll
        for (int sub = 0; sub < kSubs; ++sub) held[sub].template load<kRows>(shared.base + kOwnKeysAt, sub * kSubRows + warp_row);
    }

    // Runs of steps that see everything are pipelined. What is decided between steps is decided before products are under way.
    __device__ void work(const Visit& visit) {
        Steps at(visit, group, args.n);
        while (at.more()) {
            if (at.idle()) {
                idle_step(at.sub);
                at.advance();
                continue;
            }
            await_other();
            multiply_other(at.sub);
            await_own();
            if (at.sub == 0)
                multiply_own<0>();
            else
                multiply_own<kSubs - 1>();
            wgmma_wait<0>();
            settle(other);
            settle(own);
            other_done(at.sub);
            if (!at.full()) {
                if (at.sub == 0)
                    partial_step<0>(at);
                else
                    partial_step<kSubs - 1>(at);
                at.advance();
                continue;
            }
            for (bool second = at.sub > 0;; second = false) {
                if (!second) {
                    if (!at.next_is_full()) {
                        step<0, false>();
                        break;
                    }
                    step<0, true>();
                }
                if constexpr (kSubs > 1) {
                    if (!at.next_is_full()) {
                        step<1, false>();
                        break;
                    }
                    step<1, true>();
                }
            }
        }
    }

    __device__ void await_other() const { mbarrier_wait(shared.barrier(kOtherFull, at_other.place()), at_other.phase()); }
    __device__ void await_own() const { mbarrier_wait(shared.barrier(kOwnFull, at_own.slot), at_own.parity); }
    __device__ void multiply_other(int sub) {
        wgmma_fence();
        const u64 tile = ring_other + static_cast<u64>(at_other.place() * (kOtherTileBytes >> 4));
        multiply_rows<Other, kRows, Other::kChunks>(other, keys_other + static_cast<u64>(sub * (kSubRows * 128 >> 4)), tile, 0);
        wgmma_commit();
    }
    template <int SUB>
    __device__ void multiply_own() {
        wgmma_fence();
        const u64 tile = ring_own + static_cast<u64>(at_own.slot * (kOwnTileBytes >> 4));
        multiply_rows<Own, kRows, Own::kChunks>(own, keys_own + static_cast<u64>(SUB * (kSubRows * 128 >> 4)), tile, 0, 0, held[SUB]);
        wgmma_commit();
    }
    __device__ void other_done(int sub) {
        if (sub < kSubs - 1) return;
        warp_arrive(shared.barrier(kOtherEmpty, at_other.place()));
        at_other.advance();
    }
    __device__ void own_done(int slot, int sub) const {
        if (sub == kSubs - 1) warp_arrive(shared.barrier(kOwnEmpty, slot));
    }

    // Consumers take turns at issuing products: in step with each other they would compute exponentials together and then
    // wait for the matrix unit together.
    __device__ void await_turn() const { barrier_sync(kTurn + group, kThreads); }
    __device__ void pass_turn() const { barrier_arrive(kTurn + 1 - group, kThreads); }

    __device__ u32 hand_at() const {
        const u32 hand = hand_start + at_handed.slot * kHandoverBytes;
        if constexpr (kNarrow) mbarrier_wait(shared.barrier(kTaken, at_handed.slot), at_handed.parity ^ 1);
        return hand;
    }
    __device__ void handed_over() {
        async_fence();
        __syncwarp();
        warp_arrive(shared.barrier(kHanded, at_handed.slot));
        at_handed.advance();
    }
    // Hands dX over and issues dK += dX^T Q for the tile in the given slot of the ring.
    template <int SUB>
    __device__ void accumulate(const Gradients& dx, u32 hand, int slot) {
        if constexpr (!kNarrow) {
            mbarrier_wait(shared.barrier(kTaken, at_handed.slot), at_handed.parity ^ 1);
#pragma unroll
            for (int k = 0; k < kTiles / 2; ++k) hand_over(hand, k, dx[k].r[0]);
        }
        handed_over();
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kTiles / 2; ++k)
            wgmma<Own::kHalf, 1>(out[SUB], dx[k].r[0], ring_own_rows + static_cast<u64>((slot * kOwnTileBytes + k * 2048) >> 4), 1);
        wgmma_commit();
    }

    // One step on a full tile; with MORE the next one is full too, and its products are done afterwards. They start before
    // dX is handed over, which takes as long. No arrival of a single lane stands last: without a wait behind it the compiler
    // takes the lanes for parted, and keeps descriptors out of uniform registers, at 50 instructions a step.
    template <int SUB, bool MORE>
    __device__ void step() {
        constexpr int kNextSub = (SUB + 1) % kSubs;
        const int slot = at_own.slot;
        if (SUB == kSubs - 1) at_own.advance();
        const u32 hand = hand_at();
        Gradients dx;
        logit_gradients(dx, hand, other, own, shared.terms(slot), lift, Everything{}, ct, cs);
        if constexpr (MORE && kEarlyWaits) {
            await_other();
            await_own();
        }
        await_turn();
        if constexpr (MORE) {
            if constexpr (!kEarlyWaits) await_other();
            multiply_other(kNextSub);
            if constexpr (!kEarlyWaits) await_own();
            multiply_own<kNextSub>();
        }
        accumulate<SUB>(dx, hand, slot);
        if constexpr (MORE) {
            wgmma_wait<1>();
            pass_turn();
            other_done(kNextSub);
            wgmma_wait<0>();
            own_done(slot, SUB);
            settle(other);
            settle(own);
            settle(out[SUB]);
        } else {
            pass_turn();
            wgmma_wait<0>();
            settle(out[SUB]);
            own_done(slot, SUB);
        }
    }

    template <int SUB>
    __device__ void partial_step(const Steps& at) {
        const int slot = at_own.slot;
        if (SUB == kSubs - 1) at_own.advance();
        const u32 hand = hand_at();
        Gradients dx;
        // From memory: registers are dear.
        const int first_key = at.visit.block.tile * kRows + warp_row + Accumulators::first_row(lane) + SUB * kSubRows;
        const auto visible = [&walk = at.walk, first_key](int column, int row) { return walk.mask.visible(walk.row() + column, first_key + row); };
        logit_gradients(dx, hand, other, own, shared.terms(slot), lift, visible, ct, cs);
        clear_non_finite<E, kColumns, Own::kChunks>(shared.own_tile(slot), kWarpgroup + group);
        await_turn();
        accumulate<SUB>(dx, hand, slot);
        pass_turn();
        wgmma_wait<0>();
        settle(out[SUB]);
        own_done(slot, SUB);
    }

    // Nothing of the consumer's part is visible: no product, and zeros for the queries.
    __device__ void idle_step(int sub) {
        const int slot = at_own.slot;
        await_other();  // or two arrivals could fall into one phase
        await_own();
        if (sub == kSubs - 1) at_own.advance();
        mbarrier_wait(shared.barrier(kTaken, at_handed.slot), at_handed.parity ^ 1);
        const u32 zeros[4] = {0, 0, 0, 0};
#pragma unroll
        for (int k = 0; k < kTiles / 2; ++k) hand_over(hand_start + at_handed.slot * kHandoverBytes, k, zeros);
        handed_over();
        await_turn();
        pass_turn();
        other_done(sub);
        own_done(slot, sub);
    }

    // dK of the portion, by who has all of it.
    __device__ void write_keys(const Visit& visit) {
        const Block& block = visit.block;
        if constexpr (Mask::kListed) {
            const int own_heads = args.n.heads / (kSide == kTeacher ? args.n.teacher_group : args.n.student_group);
            if (block.shares > 1 && !add_shares(reinterpret_cast<float(&)[kSubs * kOutTiles][4]>(out), block, block.batch * own_heads + block.head, args)) return;
        }
        const float factor = gradient_factor<kSide>(args.out_scale) / lift;
#pragma unroll
        for (int i = 0; i < Accumulators::kRows * kSubs; ++i) {
            const int sub = i / Accumulators::kRows, half = i % Accumulators::kRows;
            const int k = block.tile * kRows + warp_row + Accumulators::first_row(lane) + sub * kSubRows + Accumulators::below(half);
            if (k >= visit.place.keys) continue;
            const u64 address = args.out.pointer +
                                (block.batch * args.out.batch + block.head * args.out.head + (visit.place.first_key + k) * args.out.row +
                                 Accumulators::first_column(lane)) * E::kBytes;
#pragma unroll
            for (int d = 0; d < Own::kDim / 8; ++d)
                E::store_pair(address + 8 * d * E::kBytes, out[sub][d][Accumulators::element(half, 0)] * factor,
                              out[sub][d][Accumulators::element(half, 1)] * factor);
        }
    }
};

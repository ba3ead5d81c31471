// The consumers of fused_sm90.cu: a warpgroup each, for 64 of every kSubRows keys of the block.
#pragma once
#include "kernels/fused_sm90/layout.cuh"
#include "ptx/shared.cuh"
#include "tile/clear.cuh"

using Scores = float[kTiles][4];  // of one thread: accumulators of keys x queries

// Where a consumer is in the ring of the score side: one register will do where that has a power of two buffers, at the
// price of instructions, and masks need it.
template <bool COUNTS = Mask::kParts != 0 && !kPieces && (kScoreRing & (kScoreRing - 1)) == 0>
struct ScoreCursor : RingCursor<kScoreRing> {
    __device__ int index() const { return this->slot; }
    __device__ u32 phase() const { return this->parity; }
};
template <>
struct ScoreCursor<true> {
    u32 count = 0;
    __device__ int index() const { return count % kScoreRing; }
    __device__ u32 phase() const { return count / kScoreRing & 1; }
    __device__ void advance() { ++count; }
};
// dS^T with g of one consumer thread as operand A, a fragment per 16 queries.
using Gradients = FragmentA<GradSide::kCode>[kTiles / 2];

// Whether a tile is asked which of its pairs are visible, by the columns and rows of the lane's accumulators.
template <class Visible>
constexpr bool kMasks = true;
template <>
constexpr bool kMasks<Everything> = false;

// Pairs that are not visible are set to zero after the fact, whatever came out for them. Two instances, because a test
// inside one would be turned into selections that every tile pays for. What a narrow type stages for dQ is staged here:
// there are no registers to keep it.
template <class Visible>
__device__ inline void logit_gradients(Gradients& out, u32 to, Scores& score_side, Scores& grad_side, u32 stats,
                                       float scale, Visible visible, Numbers numbers) {
    const int pair = Accumulators::pair(lane_id());
#pragma unroll
    for (int c = 0; c < kTiles; ++c) {
        turn<Score<1 - kSide>, 4>(score_side, c, numbers.of<1 - kSide>());
        turn<Score<kSide>, 4>(grad_side, c, numbers.of<kSide>());
        RowStats x[2];
        Stats::read(x, stats, 4 * c + pair);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const RowStats& row = x[Accumulators::column(e)];
            const float t = kSide == kTeacher ? grad_side[c][e] : score_side[c][e],
                        s = kSide == kTeacher ? score_side[c][e] : grad_side[c][e];
            float dx = dot_gradient<kSide>(t, s, row, numbers);
            dx *= kNarrow ? plain_scale(row) : row.weight;
            if constexpr (kMasks<Visible>) {
                if (!visible(8 * c + 2 * pair + Accumulators::column(e), Accumulators::below(Accumulators::row(e))))
                    dx = 0.f;
                if (Mask::kPicksQueries && row.lse_t == -infinity()) dx = 0.f;
            }
            grad_side[c][e] = dx;
        }
    }
#pragma unroll
    for (int k = 0; k < kTiles / 2; ++k) {
        if constexpr (kNarrow) {
            FragmentA<GradSide::kCode> plain;
            accumulators_to_a<GradSide::kCode>(plain, grad_side[2 * k], grad_side[2 * k + 1]);
            store_fragment(to, k, plain.r[0]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                RowStats x[2];
                Stats::read(x, stats, 4 * (2 * k + half) + pair);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float& dx = grad_side[2 * k + half][e];
                    // An infinite weight must not make a pair that is not visible count.
                    dx = kMasks<Visible> && dx == 0.f ? 0.f : dx * (x[Accumulators::column(e)].weight * scale);
                }
            }
        }
        accumulators_to_a<GradSide::kCode>(out[k], grad_side[2 * k], grad_side[2 * k + 1]);
    }
}

// Where a consumer is in a work item: steps go over tiles and, within a tile, over its parts of the keys.
struct Steps {
    const WorkItem& item;
    const FusedArgs& args;
    const int group;
    Walk walk;
    int sub = 0;

    __device__ Steps(const WorkItem& item, int group, const FusedArgs& args)
        : item(item), args(args), group(group), walk(walk_of(item, args.base.n)) {}
    __device__ bool more() const { return walk.more(); }
    __device__ int first() const {
        return (kReadAgain ? item.block.tile * kRows : walk.rows.begin) + 64 * group + sub * kSubRows;
    }
    __device__ bool idle() const { return first() >= item.segment.keys || !walk.may_see(first(), first() + 64); }
    __device__ bool full() const {
        // Rows of a pack beyond the queries are zeros, those of heads beyond it may be anything.
        if constexpr (kPacked) return whole() && walk.mask.full(0, item.segment.queries, first(), first() + 64);
        return walk.full(first(), first() + 64);
    }
    // Whether the query head or pack has as many heads as a tile.
    __device__ bool whole() const { return heads_of_pack(item.head, args.heads_together) == kTileHeads; }
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
    const FusedArgs& all;
    const GradientArgs& args;
    const Layout& shared;
    WorkItemRing& items;
    const int group, lane;
    const int warp_row;  // of every kSubRows keys the consumer has 64, and of these the warp 16
    const Numbers numbers;
    const u32 ds_start;
    const u64 keys_score, keys_grad, ring_score, ring_grad, ring_grad_rows;
    ScoreCursor<> at_score;
    RingCursor<kGradRing> at_grad;
    RingCursor<kDsStages> at_ds;
    float scale = 1.f;
    // Variables of the kernel: the compiler takes arrays that lie in a struct for memory for most of its way.
    Sums& out;
    Scores &score_side, &grad_side;
    Held& held;

    __device__ Consumer(const FusedArgs& all, const Layout& shared, WorkItemRing& items, Thread thread, Sums& out,
                        Scores& score_side, Scores& grad_side, Held& held)
        : all(all),
          args(all.base),
          shared(shared),
          items(items),
          group(thread.group),
          lane(thread.lane),
          warp_row(64 * group + 16 * ((threadIdx.x / 32) & 3)),
          numbers{all.base.teacher_numbers, all.base.student_numbers},
          ds_start(fragment_address(shared.base + kDsAt, warp_row, lane)),
          keys_score(swizzled_descriptor(shared.base + kScoreKeysAt + group * 64 * 128)),
          keys_grad(swizzled_descriptor(shared.base + kGradKeysAt + group * 64 * 128)),
          ring_score(swizzled_descriptor(shared.base + kScoreAt)),
          ring_grad(swizzled_descriptor(shared.base + kGradAt)),
          ring_grad_rows(swizzled_descriptor(shared.base + kGradAt, kColumns * 128)),
          out(out),
          score_side(score_side),
          grad_side(grad_side),
          held(held) {}

    __device__ void run() {
        if (!kPieces && group == 1) pass_turn();
        for (;;) {
            const WorkItem& item = items.read();
            if (item.head < 0) return;
            if (item.first) start(item);
            if (item.comes) warp_wait(shared.barrier(kScoreKeysFull), item.score_parity);
            work(item);
            if (item.goes) warp_arrive(shared.barrier(kScoreKeysEmpty));
            if (item.last) {
                warp_arrive(shared.barrier(kGradKeysFree));
                write_keys(item);
            }
            items.over(item);
        }
    }

private:
    __device__ void start(const WorkItem& item) {
        if constexpr (kNarrow) scale = item.scale;
#pragma unroll
        for (int i = 0; i < 4 * kSubs * kOutTiles; ++i) out[i / (4 * kOutTiles)][i / 4 % kOutTiles][i % 4] = 0.f;
        mbarrier_wait(shared.barrier(kGradKeys), item.grad_parity);
#pragma unroll
        for (int sub = 0; sub < kSubs; ++sub)
            held[sub].template load<kRows>(shared.base + kGradKeysAt, sub * kSubRows + warp_row);
    }

    // Runs of steps that see everything are pipelined. What is decided between steps is decided before products are
    // under way.
    __device__ void work(const WorkItem& item) {
        Steps at(item, group, all);
        bool multiplied = false;  // the step at hand, by the one before
        while (at.more()) {
            if (!kCarry || !multiplied) {
                if (at.idle()) {
                    idle_step(at.sub);
                    at.advance();
                    continue;
                }
                if constexpr (kPieces) {
                    multiply_pieces(Everything{});
                } else {
                    await_score();
                    if constexpr (kGiven)
                        read_score();
                    else
                        multiply_score(at.sub);
                }
                await_grad();
                if (at.sub == 0)
                    multiply_grad<0>();
                else
                    multiply_grad<kSubs - 1>();
                wgmma_wait<0>();
                fence_accumulators(score_side);
                fence_accumulators(grad_side);
                if constexpr (!kPieces) score_done(at.sub);
            }
            if (!at.full()) {
                if constexpr (kCarry) {
                    multiplied = at.sub == 0 ? carrying_step<0>(at) : carrying_step<kSubs - 1>(at);
                } else {
                    if (at.sub == 0)
                        partial_step<0>(at);
                    else
                        partial_step<kSubs - 1>(at);
                    at.advance();
                }
                continue;
            }
            multiplied = false;
            if constexpr (kPieces) {
                while (at.next_is_full()) step_by_pieces<true>();
                step_by_pieces<false>();
            } else {
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
    }

    __device__ void await_score() const {
        mbarrier_wait(shared.barrier(kScoreFull, at_score.index()), at_score.phase());
    }
    __device__ void await_grad() const { mbarrier_wait(shared.barrier(kGradFull, at_grad.slot), at_grad.parity); }
    __device__ u64 score_stage(int slot) const { return ring_score + static_cast<u64>(slot * (kScoreStageBytes >> 4)); }
    __device__ void multiply_score(int sub) {
        wgmma_fence();
        multiply_rows<ScoreSide, kRows, ScoreSide::kChunks>(
            score_side, keys_score + static_cast<u64>(sub * (kSubRows * 128 >> 4)), score_stage(at_score.index()), 0);
        wgmma_commit();
    }
    // The same where it is given.
    __device__ void read_score() {
        ScoreSide::read_columns(score_side, shared.score_stage(at_score.index()),
                                warp_row + Accumulators::first_row(lane));
        __syncwarp();
    }
    // The same by pieces, done when it returns: each is waited for when it is needed and given back when it has been
    // read. `done` is called when what was under way before is done. Sums of long head dims are two halves; for the
    // second the grad side's registers are free.
    template <class Done>
    __device__ void multiply_pieces(Done done) {
        constexpr bool kLong = ScoreSide::kSteps > kLongDepth;
        constexpr int kHalf = kLong ? kKept / 2 : kKept;
        int before = next_piece();
        multiply_piece(score_side, 0, keys_score, before, 0);
        wgmma_wait<1>();
        done();
        add_pieces(score_side, 1, kHalf, before);
        if constexpr (kLong) {
            add_pieces<true>(grad_side, kHalf, kKept, before);
        }
        // A chunk whose keys come too: those of both consumers behind the queries. The last pieces stay until its product
        // is under way where the ring has room for both.
        constexpr bool kOverlap = kScoreRing >= 2 * (1 + kGroups);
#pragma unroll 1
        for (int c = kKept; c < ScoreSide::kChunks; ++c) {
            if constexpr (!kOverlap) {
                wgmma_wait<0>();
                pieces_done(c - 1, before);
            }
            const int queries = next_piece();
            int keys = next_piece();
            const int others = next_piece();
            piece_done(group == 0 ? others : keys);
            if (group == 1) keys = others;
            multiply_piece(score_side, 0, score_stage(keys), queries, 1);
            if constexpr (kOverlap) {
                wgmma_wait<1>();
                pieces_done(c - 1, before);
            }
            before = queries;
        }
        wgmma_wait<0>();
        pieces_done(ScoreSide::kChunks - 1, before);
        fence_accumulators(score_side);
        if constexpr (kLong) {
            fence_accumulators(grad_side);
            add<kTiles>(score_side, grad_side);
        }
    }
    template <bool FRESH = false>
    __device__ void add_pieces(Scores& scores, int first, int end, int& before) {
#pragma unroll 1
        for (int c = first; c < end; ++c) {
            const int slot = next_piece();
            multiply_piece(scores, c, keys_score, slot, !FRESH || c > first);
            wgmma_wait<1>();
            piece_done(before);
            before = slot;
        }
    }
    __device__ void multiply_piece(Scores& scores, int c, u64 keys, int slot, int keep) const {
        const u64 rows = keys + static_cast<u64>(c * (kRows * 128 >> 4)), columns = score_stage(slot);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; ++k)
            wgmma<ScoreSide::kHalf, 0, 0>(scores, rows + (32 * k >> 4), columns + (32 * k >> 4), k > 0 || keep);
        wgmma_commit();
    }
    // Waits for a piece, and goes on to the next; returns its stage.
    __device__ int next_piece() {
        await_score();
        const int slot = at_score.index();
        at_score.advance();
        return slot;
    }
    // Of chunk c, whose queries are in `slot`.
    __device__ void pieces_done(int c, int slot) const {
        piece_done(slot);
        if (c < kKept) return;
        slot += 1 + group;
        piece_done(slot < kScoreRing ? slot : slot - kScoreRing);
    }
    __device__ void piece_done(int slot) const { warp_arrive(shared.barrier(kScoreEmpty, slot)); }

    template <int SUB>
    __device__ void multiply_grad() {
        wgmma_fence();
        const u64 tile = ring_grad + static_cast<u64>(at_grad.slot * (kGradTileBytes >> 4));
        multiply_rows<GradSide, kRows, GradSide::kChunks>(
            grad_side, keys_grad + static_cast<u64>(SUB * (kSubRows * 128 >> 4)), tile, 0, 0, held[SUB]);
        wgmma_commit();
    }
    __device__ void score_done(int sub) {
        if (sub < kSubs - 1) return;
        warp_arrive(shared.barrier(kScoreEmpty, at_score.index()));
        at_score.advance();
    }
    __device__ void grad_done(int slot, int sub) const {
        if (sub == kSubs - 1) warp_arrive(shared.barrier(kGradEmpty, slot));
    }

    // Consumers take turns at issuing products: in step with each other they would compute exponentials together and
    // then wait for the matrix unit together.
    __device__ void await_turn() const {
        if constexpr (!kPieces) barrier_sync(kTurn + group, kThreads);
    }
    __device__ void pass_turn() const {
        if constexpr (!kPieces) barrier_arrive(kTurn + 1 - group, kThreads);
    }

    __device__ u32 ds_address() const {
        const u32 to = ds_start + at_ds.slot * kDsBytes;
        if constexpr (kNarrow) mbarrier_wait(shared.barrier(kDsEmpty, at_ds.slot), at_ds.parity ^ 1);
        return to;
    }
    __device__ void ds_staged() {
        async_fence();
        __syncwarp();
        warp_arrive(shared.barrier(kDsFull, at_ds.slot));
        at_ds.advance();
    }
    // dK += 16 queries' part of dS^T times their rows, at most 128 columns to a product.
    template <int TILES>
    __device__ static void multiply_keys(float (&sums)[TILES][4], const u32 (&a)[4], u64 rows) {
        constexpr int kFirst = TILES < 16 ? TILES : 16, kRest = TILES - kFirst;
        wgmma<GradSide::kHalf, 1>(reinterpret_cast<float (&)[kFirst][4]>(sums), a, rows, 1);
        if constexpr (kRest > 0)
            wgmma<GradSide::kHalf, 1>(reinterpret_cast<float (&)[kRest][4]>(sums[kFirst]), a,
                                      rows + (kFirst / 8 * kColumns * 128 >> 4), 1);
    }
    // Stages dS for dQ and issues dK += dS^T Q for the tile in the given slot of the ring.
    template <int SUB>
    __device__ void accumulate(const Gradients& dx, u32 to, int slot) {
        if constexpr (!kNarrow) {
            mbarrier_wait(shared.barrier(kDsEmpty, at_ds.slot), at_ds.parity ^ 1);
#pragma unroll
            for (int k = 0; k < kTiles / 2; ++k) store_fragment(to, k, dx[k].r[0]);
        }
        ds_staged();
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kTiles / 2; ++k)
            multiply_keys(out[SUB], dx[k].r[0],
                          ring_grad_rows + static_cast<u64>((slot * kGradTileBytes + k * 2048) >> 4));
        wgmma_commit();
    }

    // One step on a full tile; with MORE the next one is full too, and its products are done afterwards. They start
    // before dS is staged, which takes as long. No arrival of a single lane stands last: without a wait behind it the
    // compiler takes the lanes for parted, and keeps descriptors out of uniform registers, at 50 instructions a step.
    template <int SUB, bool MORE>
    __device__ void step() {
        const int slot = at_grad.slot;
        if (SUB == kSubs - 1) at_grad.advance();
        const u32 to = ds_address();
        Gradients dx;
        logit_gradients(dx, to, score_side, grad_side, shared.stats(slot), scale, Everything{}, numbers);
        hand_over<SUB, MORE>(dx, to, slot);
    }
    // The second half of a step, when its logit gradients are there.
    template <int SUB, bool MORE>
    __device__ void hand_over(const Gradients& dx, u32 to, int slot) {
        constexpr int kNextSub = (SUB + 1) % kSubs;
        if constexpr (MORE && kEarlyWaits) {
            await_score();
            await_grad();
        }
        await_turn();
        if constexpr (MORE) {
            if constexpr (!kEarlyWaits && !kGiven) await_score();
            if constexpr (!kGiven) multiply_score(kNextSub);
            if constexpr (!kEarlyWaits) await_grad();
            multiply_grad<kNextSub>();
        }
        accumulate<SUB>(dx, to, slot);
        if constexpr (MORE) {
            wgmma_wait<1>();
            pass_turn();
            if constexpr (kGiven) {  // while the product that adds to the sums is under way
                await_score();
                read_score();
            }
            score_done(kNextSub);
            wgmma_wait<0>();
            grad_done(slot, SUB);
            fence_accumulators(score_side);
            fence_accumulators(grad_side);
            fence_accumulators(out[SUB]);
        } else {
            pass_turn();
            wgmma_wait<0>();
            fence_accumulators(out[SUB]);
            grad_done(slot, SUB);
        }
    }

    // The same by pieces. The ring holds less than a tile, so consumers take no turns: what one gives back the other has
    // read. The next scores come after dK += dS^T Q, because the grad side may have one stage, which its next tile wants.
    template <bool MORE>
    __device__ void step_by_pieces() {
        const int slot = at_grad.slot;
        at_grad.advance();
        const u32 to = ds_address();
        Gradients dx;
        logit_gradients(dx, to, score_side, grad_side, shared.stats(slot), scale, Everything{}, numbers);
        accumulate<0>(dx, to, slot);
        if constexpr (MORE) {
            multiply_pieces([this, slot] { grad_done(slot, 0); });
            await_grad();
            multiply_grad<0>();
        }
        wgmma_wait<0>();
        if constexpr (MORE) {
            fence_accumulators(grad_side);
        } else {
            grad_done(slot, 0);
        }
        fence_accumulators(out[0]);
    }

    template <int SUB>
    __device__ void partial_step(const Steps& at) {
        const int slot = at_grad.slot;
        if (SUB == kSubs - 1) at_grad.advance();
        const u32 to = ds_address();
        Gradients dx;
        partial_gradients<SUB>(dx, at, to, slot);
        hand_over<SUB, false>(dx, to, slot);
    }

    // The same, and on to the next step; true where the products of that are done.
    template <int SUB>
    __device__ bool carrying_step(Steps& at) {
        const int slot = at_grad.slot;
        if (SUB == kSubs - 1) at_grad.advance();
        const u32 to = ds_address();
        Gradients dx;
        partial_gradients<SUB>(dx, at, to, slot);
        at.advance();
        const bool more = at.more() && !at.idle();
        if (more)
            hand_over<SUB, true>(dx, to, slot);
        else
            hand_over<SUB, false>(dx, to, slot);
        return more;
    }

    template <int SUB>
    __device__ void partial_gradients(Gradients& dx, const Steps& at, u32 to, int slot) {
        // From memory: registers are dear.
        const int first_key = at.item.block.tile * kRows + warp_row + Accumulators::first_row(lane) + SUB * kSubRows;
        const auto visible = [&at, first_key](int column, int row) {
            if (kPacked && packed_head(column) >= heads_of_pack(at.item.head, at.args.heads_together)) return false;
            return at.walk.mask.visible(at.walk.row() + packed_query(column), first_key + row);
        };
        logit_gradients(dx, to, score_side, grad_side, shared.stats(slot), scale, visible, numbers);
        clear_non_finite<E, kColumns, GradSide::kChunks>(shared.grad_tile(slot), kWarpgroup + group);
    }

    // Nothing of the consumer's part is visible: no product, and zeros for the queries.
    __device__ void idle_step(int sub) {
        const int slot = at_grad.slot;
        // Waits, or two arrivals could fall into one phase.
        if constexpr (kPieces) {
            for (int i = 0; i < kTilePieces; ++i) {
                const int piece = next_piece();
                __syncwarp();
                piece_done(piece);
            }
        } else {
            await_score();
        }
        await_grad();
        if (sub == kSubs - 1) at_grad.advance();
        mbarrier_wait(shared.barrier(kDsEmpty, at_ds.slot), at_ds.parity ^ 1);
        const u32 zeros[4] = {0, 0, 0, 0};
#pragma unroll
        for (int k = 0; k < kTiles / 2; ++k) store_fragment(ds_start + at_ds.slot * kDsBytes, k, zeros);
        ds_staged();
        await_turn();
        pass_turn();
        if constexpr (!kPieces) score_done(sub);
        grad_done(slot, sub);
    }

    // dK of the work tile, by who has all of it.
    __device__ void write_keys(const WorkItem& item) {
        const Block& block = item.block;
        if (block.tile * kRows + warp_row >= item.segment.keys) return;
        const float factor = gradient_factor<kSide>(args.out_scale) / scale;
#pragma unroll
        for (int i = 0; i < 4 * kSubs * kOutTiles; ++i) out[i / (4 * kOutTiles)][i / 4 % kOutTiles][i % 4] *= factor;
        if constexpr (kSumsInParts<Mask>) {
            const int grad_heads = args.n.heads / (kSide == kTeacher ? args.n.teacher_group : args.n.student_group);
            const int pair = block.batch * grad_heads + block.head;
            auto& sums = reinterpret_cast<float (&)[kSubs * kOutTiles][4]>(out);
            if constexpr (kShared && !kDirect) {
                const int slot = pair * args.partial_slots + block.partial_slot / args.n.splits;
                if (block.shares > 1 && !add_to_total(sums, slot, block.shares, args)) return;
            } else if (block.shares > 1 && !add_partials(sums, block, pair, args)) {
                return;
            }
        }
#pragma unroll
        for (int i = 0; i < Accumulators::kRows * kSubs; ++i) {
            const int sub = i / Accumulators::kRows, half = i % Accumulators::kRows;
            const int k = block.tile * kRows + warp_row + Accumulators::first_row(lane) + sub * kSubRows +
                          Accumulators::below(half);
            if (k >= item.segment.keys) continue;
            const u64 address =
                args.out.pointer + (block.batch * args.out.batch + block.head * args.out.head +
                                    (item.segment.first_key + k) * args.out.row + Accumulators::first_column(lane)) *
                                       KeyElement::kBytes;
#pragma unroll
            for (int d = 0; d < GradSide::kDim / 8; ++d)
                KeyElement::store_pair(address + 8 * d * KeyElement::kBytes,
                                       out[sub][d][Accumulators::element(half, 0)],
                                       out[sub][d][Accumulators::element(half, 1)]);
        }
    }
};

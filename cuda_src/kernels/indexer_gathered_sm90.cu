// The indexer's scores where ids name few of many keys: those of each row are gathered, and the rows of a product are
// the heads of one query, which all read them.
//
//   item       one query row of one batch entry and group, and all keys that its bits leave, in ascending order
//   producer   a warpgroup; lists the keys of an item (tile/key_list.cuh), and copies them to a ring of pieces, each 64
//              columns of 64 keys
//   consumers  two warpgroups. Each has 64 of the teacher's heads, their queries in registers, and all keys of a tile;
//              of the student both have all heads, and a half of the keys each
//
//   barrier        arrivals                waited for by
//   known[i]       1                       consumers: item i is written
//   over[i]        one per consumer warp   the producer: item i may be overwritten
//   queries_over   one per consumer warp   the producer: the student's queries may be overwritten
//   full[i]        one per producer warp   consumers: piece i has arrived; the first of the student's brings its
//                  queries
//   empty[i]       one per consumer warp   the producer: piece i may be overwritten
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "kernels/indexer_gathered/roles.cuh"
#include "kernels/indexer_score/ending.cuh"
#include "tile/fragment.cuh"
#include "tile/index_parts.cuh"
#include "tile/swizzled.cuh"

using TeacherSide = SwizzledTile<SKL_T_ELEMENT, SKL_T_DIM>;
using RopeSide = SwizzledTile<SKL_T_ELEMENT, SKL_R_DIM>;
using IndexSide = SwizzledTile<SKL_S_ELEMENT, SKL_S_DIM>;

constexpr int kPieceBytes = kColumns * 128;
constexpr int kTeacherSteps = TeacherSide::kSteps + RopeSide::kSteps;
constexpr int kHalfColumns = kColumns / 2;

// Offsets in shared memory.
constexpr int kQueriesAt = 0;
constexpr int kRingAt = kQueriesAt + (kHasStudent ? IndexSide::bytes(kRows) : 0);
constexpr int kListAt = kRingAt + kRing * kPieceBytes;
constexpr int kMassesAt = kListAt + 4 * kMostKeys;                        // of a warp's heads, [slot][warp][key]
constexpr int kLogitsAt = kMassesAt + 2 * kConsumerWarps * kColumns * 4;  // the same of the student, [slot][warp][key]
constexpr int kStatesAt = kLogitsAt + 2 * kWarps * kColumns * 4;          // [item][warp]
constexpr int kCountsAt = kStatesAt + 2 * 4 * 16;
constexpr int kBarriersAt = kCountsAt + 4 * kProducerWarps;
static_assert(kRows == 64 && kColumns == 64 && kWarps == 4, "plan: a warpgroup has 64 heads, and a tile 64 keys");
static_assert(!kTeacherIsGiven && SKL_BITS, "plan: the teacher's heads, and ids");
static_assert(kEnding == kEndsInRows || kEnding == kEndsInLse || kEnding == kEndsInList,
              "plan: rows, log-sum-exps of heads, or gradients in the order of lists");
static_assert(kLag >= 1 && kLag + 2 <= kRing, "plan: consumers have two pieces in hand");
static_assert(1024 + kBarriersAt + kBarrierBytes == SKL_SMEM_BYTES, "plan: smem_bytes");

// Which keys of a list there are.
struct Listed {
    int count;
    __device__ bool visible(int key) const { return key < count; }
};

struct Shared : SharedRoles<kBarriersAt> {
    __device__ int* list() const { return at<int>(kListAt); }
    __device__ float* masses(int slot, int warp) const {
        return at<float>(kMassesAt) + (slot * kConsumerWarps + warp) * kColumns;
    }
    __device__ float* logits(int slot, int warp) const {
        return at<float>(kLogitsAt) + (slot * kWarps + warp) * kColumns;
    }
};

struct Producer : Copier<Shared> {
    __device__ void run() {
        Copier::run(
            kListAt, kCountsAt,
            [this](const Item& item) {
                return kEnding != kEndsInList || stats_of(args, item.entry, item.row).z != 0.f;
            },
            [this](const Item& item) { copy(item); });
    }

private:
    __device__ void copy(const Item& item) {
        const int batch = item.entry / args.groups, group = item.entry % args.groups;
        const int head = group * args.teacher_heads;
        const HeadView teacher = head_view<TeacherTile>(args.teacher_k, batch, head / args.teacher_group, 0);
        const HeadView rope = head_view<TeacherTile>(args.rope_k, batch, head / args.rope_group, 0);
        const HeadView index = head_view<IndexTile>(args.index_k, batch, args.index_key_heads > 1 ? group : 0, 0);
        for (int key = 0; key < item.keys; key += kColumns) {
            copy_keys<TeacherSide>(teacher, item, key);
            if constexpr (RopeSide::kChunks > 0) copy_keys<RopeSide>(rope, item, key);
            if constexpr (kHasStudent) {
                if (key == 0) copy_queries(batch, group, item.row);
                copy_keys<IndexSide>(index, item, key);
            }
        }
    }
    // Rows of 8 threads each, 16 at a time.
    template <class Side>
    __device__ void copy_keys(const HeadView& x, const Item& item, int key) {
        constexpr int down = 4 * kProducerWarps, together = kColumns / down;
        u64 from[together];
        bool there[together];
#pragma unroll
        for (int i = 0; i < together; ++i) {
            const int at = key + thread / 8 + i * down;
            there[i] = at < item.keys;
            from[i] = x.base + (there[i] ? shared.list()[at] * x.row : 0) + thread % 8 * 16;
        }
#pragma unroll 1
        for (int c = 0; c < Side::kChunks; ++c) {
            wait_for_buffer();
            const u32 to = shared.base + kRingAt + ring.slot * kPieceBytes;
#pragma unroll
            for (int i = 0; i < together; ++i)
                copy_piece(to, thread / 8 + i * down, from[i] + 128 * c,
                           there[i] && 64 * c + thread % 8 * 8 < Side::kDim);
            commit();
        }
    }
    // The student's, a row to a head: they come with the next buffer.
    __device__ void copy_queries(int batch, int group, int row) {
        wait_for_queries();
        for (int i = thread / 8; i < kRows; i += 4 * kProducerWarps) {
            const bool there = i < args.index_heads;
            const HeadView x =
                head_view<IndexTile>(args.index_q, batch, group * args.index_heads + (there ? i : 0), row);
            for (int c = 0; c < IndexSide::kChunks; ++c)
                copy_piece(shared.base + kQueriesAt + c * kRows * 128, i, x.base + 128 * c + thread % 8 * 16,
                           there && 64 * c + thread % 8 * 8 < IndexSide::kDim);
        }
    }
    struct TeacherTile {
        using E = Element<SKL_T_ELEMENT>;
    };
    struct IndexTile {
        using E = Element<SKL_S_ELEMENT>;
    };
};

// Sums over the rows of a warp's products, of COUNT values that each lane has of a row and the one below, both of them
// added. Lanes of a column halve what they have, and keep other halves: what is left are the lane's COUNT / 8 first, of
// columns that follow each other from COUNT / 8 * (lane / 4) on, among those of lane % 4.
template <int COUNT>
__device__ inline void sum_rows(float (&x)[COUNT], int lane) {
#pragma unroll
    for (int mask = 16, left = COUNT / 2; mask >= 4; mask /= 2, left /= 2) {
        const bool second = lane & mask;
#pragma unroll
        for (int i = 0; i < left; ++i) {
            const float other = __shfl_xor_sync(~0u, second ? x[i] : x[i + left], mask);
            x[i] = (second ? x[i + left] : x[i]) + other;
        }
    }
}

struct Consumer {
    const IndexerArgs& args;
    const Shared shared;
    const int half, warp, lane;  // the warp's number in its warpgroup
    const int head;              // of the lane's first row of a product, among those of a warpgroup
    u64 ring_start, queries_start;
    RingCursor<kRing> ring, done;  // done: of those pieces that products have been waited for of
    int tiles = 0;                 // of all items so far, whose sums lie in two places in turns

    __device__ Consumer(const IndexerArgs& args, Shared shared, int half)
        : args(args),
          shared(shared),
          half(half),
          warp(threadIdx.x / 32 % kWarps),
          lane(lane_id()),
          head(warp * 16 + Accumulators::first_row(lane)),
          ring_start(swizzled_descriptor(shared.base + kRingAt)),
          queries_start(swizzled_descriptor(shared.base + kQueriesAt)) {}

    __device__ void run() {
        consume_rows(shared, [this](const Item& item, int slot) { row(item, slot); });
    }

private:
    // The lane's parts of the queries of its heads, as operand A; zeros where there is no head.
    __device__ void load_queries(u32 (&q)[kTeacherSteps][4], const Item& item) const {
        load_part<TeacherSide, 0>(q, args.teacher_q, item);
        if constexpr (RopeSide::kSteps > 0) load_part<RopeSide, TeacherSide::kSteps>(q, args.rope_q, item);
#pragma unroll
        for (int k = 0; k < kTeacherSteps; ++k) fence_operand(q[k]);
    }
    template <class Side, int FIRST>
    __device__ void load_part(u32 (&q)[kTeacherSteps][4], const Tensor4& x, const Item& item) const {
        const int batch = item.entry / args.groups, group = item.entry % args.groups;
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            const int h = kRows * half + head + Accumulators::below(below);
            const bool there = h < args.teacher_heads;
            const u64 from =
                x.pointer + 2 * (batch * x.batch + (group * args.teacher_heads + (there ? h : 0)) * x.head +
                                 item.row * x.row + Accumulators::first_column(lane));
#pragma unroll
            for (int k = 0; k < Side::kSteps; ++k)
#pragma unroll
                for (int right = 0; right < 2; ++right) {
                    const int column = 16 * k + 8 * right;
                    u32& to = q[FIRST + k][below + 2 * right];
                    to = 0;
                    if (there && column < Side::kDim) to = *reinterpret_cast<const u32*>(from + 2 * column);
                }
        }
    }

    // What a vector of all heads has for the lane's two, `heads` of a group.
    __device__ void read(float (&factor)[2], u64 vectors, const Item& item, int heads, int first, float none) const {
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            const int h = first + Accumulators::below(below);
            factor[below] = none;
            if (h < heads)
                factor[below] = reinterpret_cast<const float*>(
                    vectors)[(static_cast<i64>(item.entry) * heads + h) * args.queries + item.row];
        }
    }

    __device__ void wait_for_piece() const { mbarrier_wait(shared.barrier(kFull, ring.slot), ring.parity); }
    __device__ void release_piece() {
        warp_arrive(shared.barrier(kEmpty, done.slot));
        done.advance();
    }

    // Sums of a chunk of columns while those of the one before are waited for, whose piece may then be overwritten.
    // `step(k, piece)` has step k multiplied with what lies in a piece from a descriptor on.
    template <int STEPS, int TILES, class Step>
    __device__ void multiply(float (&s)[TILES][4], const Step& step) {
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            if (k % 4 == 0) {
                wait_for_piece();
                wgmma_fence();
            }
            step(k, ring_start + ((static_cast<u64>(ring.slot) * kPieceBytes + k % 4 * 32) >> 4));
            if (k % 4 == 3 || k + 1 == STEPS) {
                wgmma_commit();
                ring.advance();
                if (k >= 4) {
                    wgmma_wait<1>();
                    release_piece();
                }
            }
        }
        wgmma_wait<0>();
        fence_accumulators(s);
        release_piece();
    }

    // The teacher's of a tile: heads are rows.
    __device__ void multiply_teacher(float (&s)[kColumns / 8][4], const u32 (&q)[kTeacherSteps][4]) {
        multiply<kTeacherSteps>(s, [&s, &q](int k, u64 piece) { wgmma<TeacherSide::kHalf, 0>(s, q[k], piece, k > 0); });
    }

    // Sums over the warp's heads, to where those of other warps lie; of heads that count nothing nothing is added.
    __device__ void leave_masses(const float (&s)[kColumns / 8][4], const float (&lse)[2], float* to) const {
        float sums[kColumns / 4];
#pragma unroll
        for (int i = 0; i < kColumns / 4; ++i) {
            sums[i] = 0.f;
#pragma unroll
            for (int below = 0; below < 2; ++below) {
                const float dot = s[i / 2][Accumulators::element(below, i % 2)];
                const float x = exp2_approx(TeacherScore::logit(dot, args.teacher_numbers, lse[below]));
                if (lse[below] != infinity()) sums[i] += fmaf(dot, 0.f, x);
            }
        }
        sum_rows(sums, lane);
        reinterpret_cast<float2*>(to)[lane] = make_float2(sums[0], sums[1]);
    }

    __device__ void leave_logits(const float (&s)[kHalfColumns / 8][4], const float (&weight)[2], float* to) const {
        float sums[kHalfColumns / 4];
#pragma unroll
        for (int i = 0; i < kHalfColumns / 4; ++i) {
            sums[i] = 0.f;
#pragma unroll
            for (int below = 0; below < 2; ++below) {
                const float dot = s[i / 2][Accumulators::element(below, i % 2)];
                sums[i] = kGated ? fmaf(dot, 0.f, fmaf(weight[below], fmaxf(dot, 0.f), sums[i]))
                                 : fmaf(weight[below], dot, sums[i]);
            }
        }
        sum_rows(sums, lane);
        to[kHalfColumns * half + lane / 8 * 8 + Accumulators::first_column(lane) + lane / 4 % 2] = sums[0];
    }

    __device__ void row(const Item& item, int item_slot) {
        u32 q[kTeacherSteps][4];
        if (item.keys > 0) load_queries(q, item);
        if constexpr (kEnding == kEndsInLse) {
            row_of_heads(item, q);
        } else {
            float lse[2], weight[2];
            read(lse, args.lse2, item, args.teacher_heads, kRows * half + head, infinity());
            read(weight, args.weights, item, args.index_heads, head, 0.f);
            MassState state;
            state.start();
            float4 stats = make_float4(0.f, 0.f, 0.f, 0.f);
            if constexpr (kEnding == kEndsInList) stats = stats_of(args, item.entry, item.row);
            for (int key = 0; key < item.keys; key += kColumns, ++tiles) {
                const int slot = tiles % 2;
                {
                    float s[kColumns / 8][4];
                    multiply_teacher(s, q);
                    leave_masses(s, lse, shared.masses(slot, half * kWarps + warp));
                }
                {
                    float s[kHalfColumns / 8][4];
                    multiply<IndexSide::kSteps>(s, [this, &s](int k, u64 piece) {
                        wgmma<IndexSide::kHalf, 0, 0>(s, queries_start + ((k / 4 * kRows * 128 + k % 4 * 32) >> 4),
                                                      piece + ((half * kHalfColumns * 128) >> 4), k > 0);
                    });
                    leave_logits(s, weight, shared.logits(slot, warp));
                }
                barrier_sync(kTurn, 32 * kConsumerWarps);
                // Its sums are read by one warpgroup, while the other goes on to the next tile.
                if (slot == half && warp < kColumns / 32) add_key(state, stats, item, key, slot);
            }
            if (item.keys > 0) warp_arrive(shared.barrier(kQueriesOver));
            if constexpr (kEnding == kEndsInRows) end_row(item, item_slot, state);
        }
    }

    // What the lane's key adds to its state of the row, or the gradient of its logit.
    __device__ void add_key(MassState& state, const float4& stats, const Item& item, int key, int slot) const {
        const int mine = warp * 32 + lane;
        if (key + mine >= item.keys) return;
        float mass = 0.f, dot = 0.f;
#pragma unroll
        for (int w = 0; w < kConsumerWarps; ++w) mass += shared.masses(slot, w)[mine];
#pragma unroll
        for (int w = 0; w < kWarps; ++w) dot += shared.logits(slot, w)[mine];
        if constexpr (kEnding == kEndsInList) {
            const float q = exp2_approx(StudentScore::logit(dot, args.student_numbers, stats.x));
            listed_gradients(args, item.entry, item.row)[key + mine] = stats.z * fmaf(-stats.y, mass, q);
        } else {
            const float x = StudentScore::logit(dot, args.student_numbers);
            state.move(fmaxf(state.r, x));
            const float above = x - state.r;
            state.l += exp2_approx(above);
            state.mass += mass;
            state.terms += mass == 0.f ? 0.f : mass * (log2_approx(mass) - above);
        }
    }

    // Of the lanes that have states, in their order.
    __device__ void end_row(const Item& item, int item_slot, MassState state) const {
        float4* const left = shared.at<float4>(kStatesAt) + 4 * item_slot;
        if (warp < kColumns / 32) {
#pragma unroll
            for (int mask = 1; mask < 32; mask *= 2) state.merge(state.shuffle(mask));
            if (lane == 0) left[2 * half + warp] = make_float4(state.r, state.l, state.mass, state.terms);
        }
        barrier_sync(kTurn, 32 * kConsumerWarps);
        if (threadIdx.x > 0) return;
        for (int i = 1; i < 4; ++i) state.merge({left[i].x, left[i].y, left[i].z, left[i].w});
        reinterpret_cast<float4*>(args.states)[static_cast<i64>(item.entry) * args.splits * args.queries + item.row] =
            make_float4(state.r, state.l, state.mass, state.terms);
    }

    // Log-sum-exps of the teacher's heads.
    __device__ void row_of_heads(const Item& item, const u32 (&q)[kTeacherSteps][4]) {
        MassState state[2];
        state[0].start();
        state[1].start();
        for (int key = 0; key < item.keys; key += kColumns) {
            float s[1][kColumns / 8][4];
            multiply_teacher(s[0], q);
#pragma unroll
            for (int below = 0; below < 2; ++below)
                absorb<TeacherScore, false>(state[below], s, s, args.teacher_numbers, below, Listed{item.keys}, key);
        }
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            MassState& x = state[below];
            Accumulators::merge_row(x);
            const int h = kRows * half + head + Accumulators::below(below);
            if (!Accumulators::writes_row(lane) || h >= args.teacher_heads) continue;
            const int batch = item.entry / args.groups, first = item.entry % args.groups * args.teacher_heads;
            *row_vector(args.out_lse, batch, first + h, item.row) =
                x.l == 0.f ? -infinity() : kLn2 * (x.r + log2f(x.l));
        }
    }
};

extern "C" __global__ void __launch_bounds__(384, 1)
    streamkl_indexer_gathered(const __grid_constant__ IndexerArgs args) {
    extern __shared__ unsigned char memory[];
    const Shared shared{{(static_cast<u32>(__cvta_generic_to_shared(memory)) + 1023) & ~1023u}};
    take_roles(
        shared, kConsumerWarps, [&args, &shared](int thread) { Producer{{args, shared, thread}}.run(); },
        [&args, &shared](int group) { Consumer(args, shared, group).run(); });
}

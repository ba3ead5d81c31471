// Backward on Hopper: the mathematics of gradient_sm80.cu with asynchronous copies and warpgroup products. One source
// for the gradients of all four inputs; with X the logits of the differentiated side and dX = g * dvalue/dX,
//
//   stationary queries:  dQ = c  dX K       streams keys; g waits for the epilogue
//   stationary keys:     dK = c  dX^T Q     streams queries of all heads that share the key head, with their
//                                          row vectors
//
//   block     kRows = kGroups x 64 rows of both sides, resident in shared memory
//   producer  one warp; streams the other operand's rows, kColumns at a time, through a ring of kRing slots that hold a
//             tile of both sides, and for stationary keys what the queries contribute (tile/row_stats.cuh)
//   consumers kGroups warpgroups, 64 rows each: T and S (64 x kColumns) in registers become dX, which packed as
//             operand A is multiplied with the tile it came from, read transposed. That product and the next tile's T
//             and S are one batch for the matrix unit, and while one warpgroup waits for it the others compute: they
//             share only barriers. kAhead: registers hold two tiles of scores, and on runs of tiles that are visible as
//             a whole no warpgroup waits
//
//   barrier    arrivals                                        waited for by
//   full[i]    1 (+ bytes), and 1 when row vectors are written consumers: slot i is filled
//   empty[i]   one per consumer warp                           the producer: slot i may be overwritten
//   rows_here  1 (+ bytes)                                     consumers: the resident rows are there
//   rows_free  one per consumer warp                           the producer: the score side's keys may be exchanged
//
// Rows of a tile that hold an infinity or a NaN are cleared before the product with dX, on tiles that are not visible
// as a whole: who sees them has NaN already, and who does not must not get it. No atomics and no workspace, but where
// blocks share a tile's steps (pipeline/partials.cuh): each output element has one owner and a fixed order of addition.
// Of the teacher's resident rows kHeld steps are kept in registers (tile/swizzled.cuh). Types of narrow exponent are
// scaled as in gradient_sm80.cu.
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "pipeline/barriers.cuh"
#include "pipeline/partials.cuh"
#include "pipeline/ring.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "ptx/thread.cuh"
#include "tile/clear.cuh"
#include "tile/fragment.cuh"
#include "tile/schedule.cuh"
#include "tile/shares.cuh"
#include "tile/swizzled.cuh"
#include "@mask"
#include "@divergence"
#include "@score"
#include "tile/row_stats.cuh"

using Teacher = SwizzledTile<SKL_T_ELEMENT, SKL_T_DIM>;
using Student = SwizzledTile<SKL_S_ELEMENT, SKL_S_DIM>;

using Out = OfSide<kSide, Teacher, Student>::Type;
using OutElement = Element<Out::kCode>;
using WrittenElement = Written<Out::kCode>;
using Stats = RowStatsLayout<kColumns>;

constexpr bool kNarrow = OutElement::kNarrowExponent;  // gradients of logits are scaled by powers of two
constexpr int kGroups = kWarps / 4;
constexpr int kTiles = kColumns / 8;
constexpr int kOutTiles = 2 * Out::kSteps;
constexpr int kRing = SKL_STAGES;
constexpr int kRowBytes = Teacher::bytes(kRows) + Student::bytes(kRows);
constexpr int kTileBytes = Teacher::bytes(kColumns) + Student::bytes(kColumns);
constexpr int kStatsBytes = kRowsAreQueries ? 0 : Stats::kFloats * 4 + 16;  // the 16: an exponent
constexpr int kStatsPerLane = ceil_div(kColumns, 32);                       // of the producer
constexpr int kHeld = SKL_HELD_STEPS;                                       // of the teacher's resident rows
constexpr bool kAsksStats = Mask::kPicksQueries && !kRowsAreQueries;        // which queries are there
constexpr bool kAhead = SKL_AHEAD;  // the next tile's scores are multiplied while this one's gradients are computed
constexpr int kBarriers = 2 * kRing + 2;
// Sums of long head dims, the teacher's, are two halves.
constexpr bool kLong = Teacher::kSteps > kLongDepth;
constexpr int kFirstHalf = kLong ? Teacher::kChunks / 2 : Teacher::kChunks;

static_assert(kWarpTiles == 1, "plan: a consumer warpgroup has 64 rows");
static_assert(kRing >= 2 + kAhead, "plan: a tile is released after the scores of the next one, or the one after that");
static_assert(!(kAhead && kLong), "plan: no registers for a second tile of long sums");

// What a block works on. Where blocks share tiles it is more, and lies in shared memory, because registers are dear; so
// it does beside lists where row statistics are streamed.
constexpr bool kTaskInMemory = kShared || (Mask::kListed && !kRowsAreQueries);
struct Task {
    Block block;
    Segment segment;
    int row_count;                    // rows of the stationary operand
    Range rows;                       // the block's own
    int first_head, heads_per_block;  // query heads that are summed into one head of the gradient
    Range heads;                      // of these the block's own

    __device__ explicit Task(const GradientArgs& args) {
        const Extents& n = args.n;
        heads_per_block = kRowsAreQueries ? 1 : kSide == kTeacher ? n.teacher_group : n.student_group;
        const int out_heads = n.heads / heads_per_block;
        block = block_of(blockIdx.x, n, out_heads, n.batch * out_heads, kRowsAreQueries && !Mask::kListed);
        first_head = block.head * heads_per_block;
        segment = Mask::locate(n, first_head, block);
        row_count = kRowsAreQueries ? segment.queries : segment.keys;
        rows = {block.tile * kRows, min(block.tile * kRows + kRows, row_count)};
        const Range all = steps(mask(n, first_head));
        take_share<Mask>(block, heads_per_block, all.end - all.begin, n, args.partial_sums != 0);
        heads = heads_of<Mask>(block, first_head, heads_per_block, all.end - all.begin);
    }
    __device__ bool empty() const { return block.shares == 0 || (Mask::kRagged && rows.begin >= row_count); }
    __device__ Mask mask(const Extents& n, int head) const { return Mask(n, segment, block.batch, head); }
    // The interval of streamed rows that some of these rows meet.
    __device__ static Range streamed_of(const Mask& mask, Range rows) {
        return kRowsAreQueries ? mask.keys_of(rows.begin, rows.end) : mask.queries_of(rows.begin, rows.end);
    }
    // All steps of a head.
    __device__ Range steps(const Mask& mask) const {
        Range tiles = covering(streamed_of(mask, rows), kColumns);
        if constexpr (Mask::kListed) tiles.intersect(block.streamed);
        return mask.steps_of(rows.begin, tiles);
    }
    __device__ Cursor<Mask> walk(const Mask& mask, int head) const {
        return {mask, rows, share_of<Mask>(steps(mask), block, head - first_head)};
    }
    // Whether the resident rows are other ones than those of the head before: the score side may share keys
    // differently. Then the parity of how often that was before.
    __device__ bool new_rows(const Extents& n, int head) const {
        return head == heads.begin || score_key(n, head) != score_key(n, head - 1);
    }
    __device__ u32 rows_parity(const Extents& n, int head) const {
        return (score_key(n, head) - score_key(n, heads.begin)) & 1;
    }

private:
    __device__ static int score_key(const Extents& n, int head) {
        return head / (kSide == kTeacher ? n.student_group : n.teacher_group);
    }
};

// Shared memory, as addresses.
struct Layout {
    u32 rows, ring, stats_ring, barriers;
    __device__ explicit Layout(u32 base)
        : rows(base),
          ring(base + kRowBytes),
          stats_ring(ring + kRing * kTileBytes),
          barriers(stats_ring + kRing * kStatsBytes) {}
    __device__ u32 tile(int slot) const { return ring + slot * kTileBytes; }
    __device__ u32 stats(int slot) const { return stats_ring + slot * kStatsBytes; }
    __device__ u32 exponent(int slot) const { return stats(slot) + Stats::kFloats * 4; }
    __device__ u32 full(int slot) const { return barriers + 8 * slot; }
    __device__ u32 empty(int slot) const { return barriers + 8 * (kRing + slot); }
    __device__ u32 rows_here() const { return barriers + 8 * (2 * kRing); }
    __device__ u32 rows_free() const { return barriers + 8 * (2 * kRing + 1); }
    __device__ Task& task() const {
        return *reinterpret_cast<Task*>(__cvta_shared_to_generic(barriers + 8 * kBarriers));
    }
};

// Offset, in a tile or in the resident rows, of the differentiated side.
__device__ constexpr int out_offset(int rows) { return kSide == kTeacher ? 0 : Teacher::bytes(rows); }

static_assert(sizeof(Task) == SKL_TASK_BYTES, "plan: what a block works on, in shared memory");
static_assert(1024 + kRowBytes + kRing * (kTileBytes + kStatsBytes) + 8 * kBarriers + kTaskInMemory * sizeof(Task) ==
                  SKL_SMEM_BYTES,
              "plan: smem_bytes");

// ROWS rows of both sides, one after the other.
template <int ROWS>
__device__ inline void load_both(u32 shared, const TensorMap& teacher, const TensorMap& student, u32 barrier, int row,
                                 int head_t, int head_s, int batch) {
    mbarrier_expect(barrier, Teacher::bytes(ROWS) + Student::bytes(ROWS));
    load_chunks<ROWS>(shared, teacher, barrier, 0, Teacher::kChunks, row, head_t, batch);
    load_chunks<ROWS>(shared + Teacher::bytes(ROWS), student, barrier, 0, Student::kChunks, row, head_s, batch);
}

// The row vectors of one head. Its reader has no time to lose: what it does, a consumer on the same scheduler waits
// for.
struct RowVectors {
    const float *lse_t, *lse_s, *weight, *value;
    __device__ RowVectors(const GradientArgs& args, int b, int h, int first)
        : lse_t(row_vector(args.teacher_lse, b, h, first)),
          lse_s(row_vector(args.student_lse, b, h, first)),
          weight(row_vector(args.grad, b, h, first)),
          value(Logit::kNeedsValue ? row_vector(args.value, b, h, first) : nullptr) {}
    // As they stand in memory, which holds anything for a row that sees no key: its pairs are hidden later.
    __device__ RowStats at(const GradientArgs& args, int q) const {
        return {lse_t[q * args.teacher_lse.row], lse_s[q * args.student_lse.row], weight[q * args.grad.row],
                Logit::kNeedsValue ? value[q * args.value.row] : 0.f};
    }
};

// The producer: one warp, its first lane issues the tensor copies.
__device__ inline void produce(const HopperGradientArgs& all, const Task& task, const Layout& shared) {
    const GradientArgs& args = all.base;
    const Extents& n = args.n;
    const int lane = lane_id(), batch = task.block.batch;
    const int first_query = task.segment.first_query, first_key = task.segment.first_key;
    RingCursor<kRing> at;
    u32 free_parity = 0;
    int exponent = kLowestExponent;

    for (int head = task.heads.begin; head < task.heads.end; ++head) {
        const int head_t = head / n.teacher_group, head_s = head / n.student_group;  // of the keys
        const Mask mask = task.mask(n, head);
        const RowVectors vectors(args, batch, head, first_query);
        if (task.new_rows(n, head)) {
            if (head > task.heads.begin) {
                warp_wait(shared.rows_free(), free_parity);
                free_parity ^= 1;
            }
            if (lane == 0) {
                const u32 here = shared.rows_here();
                if (kRowsAreQueries)
                    load_both<kRows>(shared.rows, all.teacher_q, all.student_q, here, first_query + task.rows.begin,
                                     head, head, batch);
                else
                    load_both<kRows>(shared.rows, all.teacher_k, all.student_k, here, first_key + task.rows.begin,
                                     head_t, head_s, batch);
            }
            __syncwarp();
        }
        RowStats x[kStatsPerLane];  // read one tile ahead, and not touched before: memory is far
        const auto read = [&x, &vectors, &args, lane, last = task.segment.queries - 1](int first) {
            if constexpr (!kRowsAreQueries)
#pragma unroll
                for (int i = 0; i < kStatsPerLane; ++i) x[i] = vectors.at(args, min(first + lane + 32 * i, last));
        };
        Cursor<Mask> walk = task.walk(mask, head);
        if (walk.more()) read(walk.row());
        while (walk.more()) {
            const int first = walk.row();
            warp_wait(shared.empty(at.slot), at.parity ^ 1);
            if (lane == 0) {
                const u32 barrier = shared.full(at.slot), slot = shared.tile(at.slot);
                if (kRowsAreQueries)
                    load_both<kColumns>(slot, all.teacher_k, all.student_k, barrier, first_key + first, head_t, head_s,
                                        batch);
                else
                    load_both<kColumns>(slot, all.teacher_q, all.student_q, barrier, first_query + first, head, head,
                                        batch);
            }
            if constexpr (!kRowsAreQueries) {
#pragma unroll
                for (int i = 0; i < kStatsPerLane; ++i) {
                    x[i].lse_t *= kLog2e;
                    x[i].lse_s *= kLog2e;
                    x[i].value *= kLog2e;
                }
                float scale = 1.f;
                if constexpr (kNarrow) {
#pragma unroll
                    for (int i = 0; i < kStatsPerLane; ++i) {
                        const int q = first + lane + 32 * i, e = exponent_of(x[i].weight * Logit::bound(x[i].value));
                        const bool seen =
                            (q < task.segment.queries) & !mask.keys_of(q, q + 1).empty() & (x[i].lse_t != -infinity());
                        if (seen & (e < 127)) exponent = max(exponent, e);
                    }
                    exponent = __reduce_max_sync(~0u, exponent);
                    scale = power_of_two(max(kTopExponent - exponent, -126));
                    if (lane == 0)
                        *reinterpret_cast<int*>(__cvta_shared_to_generic(shared.exponent(at.slot))) = exponent;
                }
                float* const stats = reinterpret_cast<float*>(__cvta_shared_to_generic(shared.stats(at.slot)));
#pragma unroll
                for (int i = 0; i < kStatsPerLane; ++i) {
                    if (kColumns % 32 > 0 && lane + 32 * i >= kColumns) continue;
                    if constexpr (kNarrow) x[i].weight *= scale;
                    turn_references(x[i], {args.teacher_numbers, args.student_numbers});
                    Stats::write(stats, lane + 32 * i, x[i]);
                }
            }
            __syncwarp();  // what all lanes wrote, before one arrives for them
            if (!kRowsAreQueries) warp_arrive(shared.full(at.slot));
            at.advance();
            walk.next();
            if (walk.more()) read(walk.row());
        }
    }
}

// t becomes the gradient of the logits.
__device__ inline void logit_gradients(float (&t)[kTiles][4], float (&s)[kTiles][4],
                                       const RowStats (&rows)[Accumulators::kRows], u32 stats, Numbers numbers) {
#pragma unroll
    for (int c = 0; c < kTiles; ++c) {
        turn<Score<kTeacher>>(t, c, numbers.teacher);
        turn<Score<kStudent>>(s, c, numbers.student);
        RowStats streamed[2];
        if constexpr (!kRowsAreQueries) Stats::read(streamed, stats, 4 * c + Accumulators::pair(lane_id()));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const RowStats& x = kRowsAreQueries ? rows[Accumulators::row(e)] : streamed[Accumulators::column(e)];
            t[c][e] = dot_gradient<kSide>(t[c][e], s[c][e], x, numbers);
            if constexpr (!kRowsAreQueries || kNarrow) t[c][e] *= x.weight;
        }
    }
}

// Sets the pairs that are not visible to zero, whatever came out for them. A pass of its own: the other scores'
// registers are free by then, and tiles that are visible as a whole do not pay for it.
__device__ inline void hide(float (&dx)[kTiles][4], const Mask& mask, int row, int first_column, u32 stats) {
#pragma unroll
    for (int c = 0; c < kTiles; ++c) {
        float lse_t[2];
        if constexpr (kAsksStats) Stats::read_lse(lse_t, stats, 4 * c + Accumulators::pair(lane_id()));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int r = row + Accumulators::below(Accumulators::row(e));
            const int column = first_column + 8 * c + Accumulators::first_column(lane_id()) + Accumulators::column(e);
            if (!(kRowsAreQueries ? mask.visible(r, column) : mask.visible(column, r))) dx[c][e] = 0.f;
            if (kAsksStats && lse_t[Accumulators::column(e)] == -infinity()) dx[c][e] = 0.f;
        }
    }
}

using Gradients = FragmentA<Out::kCode>[kTiles / 2];

// Issues out += dX * streamed tile, up to 128 columns of the output per product.
template <int TILES>
__device__ inline void multiply_out(float (&out)[TILES][4], const Gradients& a, u64 streamed) {
    constexpr int wide = 16, rest = TILES % wide;
#pragma unroll
    for (int k = 0; k < kTiles / 2; ++k) {
        const u64 rows = streamed + (k * 16 * 128 >> 4);
#pragma unroll
        for (int d = 0; d < TILES - rest; d += wide)
            wgmma<Out::kHalf, 1>(reinterpret_cast<float (&)[wide][4]>(out[d]), a[k].r[0],
                                 rows + (d / 8 * kColumns * 128 >> 4), 1);
        if constexpr (rest > 0)
            wgmma<Out::kHalf, 1>(reinterpret_cast<float (&)[rest][4]>(out[TILES - rest]), a[k].r[0],
                                 rows + ((TILES - rest) / 8 * kColumns * 128 >> 4), 1);
    }
}

// A consumer: one warpgroup, which has 64 of the resident rows.
struct Consumer {
    using Scores = float[kTiles][4];
    using LaneStats = RowStats[Accumulators::kRows];
    using Sums = float[kOutTiles][4];
    using Held = HeldRows<kHeld>;

    const GradientArgs& args;
    const Task& task;
    const Layout& shared;
    const int group, lane;
    const Numbers numbers;
    const Range rows;  // its own
    const Range mine;  // tiles that these may see
    const int first_row;
    const u64 rows_t, rows_s, ring_t, ring_s, ring_out;
    int exponent = kLowestExponent;  // narrow types, streamed queries
    RingCursor<kRing> at, done;
    u32 rows_parity = 0;
    // Variables of the kernel: the compiler takes arrays that lie in a struct for memory for most of its way.
    LaneStats& stats;
    Sums& out;
    Held& held;

    __device__ Consumer(const GradientArgs& args, const Task& task, const Layout& shared, int group, LaneStats& stats,
                        Sums& out, Held& held)
        : args(args),
          task(task),
          shared(shared),
          group(group),
          lane(lane_id()),
          numbers{args.teacher_numbers, args.student_numbers},
          rows(rows_of(task, group)),
          mine(rows.empty() ? Range{0, 0} : covering(Task::streamed_of(first_mask(), rows), kColumns)),
          first_row(first_row_of(task, lane)),
          rows_t(swizzled_descriptor(shared.rows + group * 64 * 128)),
          rows_s(rows_t + (Teacher::bytes(kRows) >> 4)),
          ring_t(swizzled_descriptor(shared.ring)),
          ring_s(ring_t + (Teacher::bytes(kColumns) >> 4)),
          ring_out(swizzled_descriptor(shared.ring + out_offset(kColumns), kColumns * 128)),
          stats(stats),
          out(out),
          held(held) {
        if constexpr (kRowsAreQueries) {
#pragma unroll
            for (int half = 0; half < Accumulators::kRows; ++half) {
                stats[half] = read_row_stats(args, first_mask(), task.block.batch, task.block.head,
                                             row() + Accumulators::below(half));
                if constexpr (kNarrow)
                    stats[half].weight = power_of_two(kTopExponent - 1 - exponent_of(Logit::bound(stats[half].value)));
                turn_references(stats[half], {args.teacher_numbers, args.student_numbers});
            }
        }
#pragma unroll
        for (int d = 0; d < kOutTiles; ++d)
#pragma unroll
            for (int e = 0; e < 4; ++e) out[d][e] = 0.f;
    }

    // Sums over all heads of the block.
    __device__ void run() {
        for (int head = task.heads.begin; head < task.heads.end; ++head) {
            if (task.new_rows(args.n, head)) {
                warp_wait(shared.rows_here(), kTaskInMemory ? task.rows_parity(args.n, head) : rows_parity);
                rows_parity ^= 1;
                held.template load<kRows>(shared.rows, 16 * (threadIdx.x / 32));
            }
            Cursor<Mask> walk = task.walk(task.mask(args.n, head), head);
            for (; walk.more() && walk.tile() < mine.begin; walk.next()) skip();
            if constexpr (kAhead)
                work_ahead(walk);
            else
                work(walk);
            for (; walk.more(); walk.next()) skip();
            if (head + 1 < task.heads.end && task.new_rows(args.n, head + 1)) warp_arrive(shared.rows_free());
        }
    }

    // Scales the sums and writes them, by who has all of them.
    __device__ void write() {
        // Asked for again: registers are dear above.
        const int warp_row = task.rows.begin + 16 * (thread_again() / 32);
        if (warp_row >= task.row_count) return;
        const int row = warp_row + Accumulators::first_row(lane);
        constexpr int bytes = WrittenElement::kBytes;
        const Block& block = task.block;
        const int first_out = kRowsAreQueries ? task.segment.first_query : task.segment.first_key;
        const u64 head_base =
            args.out.pointer +
            (block.batch * args.out.batch + block.head * args.out.head + first_out * args.out.row) * bytes;
#pragma unroll
        for (int half = 0; half < Accumulators::kRows; ++half) {
            const int r = row + Accumulators::below(half);
            float factor = gradient_factor<kSide>(args.out_scale);
            bool kept = true;
            if constexpr (kRowsAreQueries) {
                const Mask mask = first_mask();
                const RowStats x = read_row_stats(args, mask, block.batch, block.head, r);
                if constexpr (Mask::kPicksQueries) kept = !mask.keys_of(r, r + 1).empty();
                factor *= x.weight;
                if constexpr (kNarrow) factor *= power_of_two(exponent_of(Logit::bound(x.value)) + 1 - kTopExponent);
            } else if constexpr (kNarrow) {
                factor *= power_of_two(exponent - kTopExponent);
            }
#pragma unroll
            for (int d = 0; d < kOutTiles; ++d) {
                float &x = out[d][Accumulators::element(half, 0)], &y = out[d][Accumulators::element(half, 1)];
                x = kept ? x * factor : 0.f;
                y = kept ? y * factor : 0.f;
            }
        }
        if constexpr (kSumsInParts<Mask>) {
            const int out_heads = args.n.heads / task.heads_per_block;
            if (block.shares > 1 && !add_partials(out, block, block.batch * out_heads + block.head, args)) return;
        }
#pragma unroll
        for (int half = 0; half < Accumulators::kRows; ++half) {
            const int r = row + Accumulators::below(half);
            if (r >= task.row_count) continue;
#pragma unroll
            for (int d = 0; d < kOutTiles; ++d) {
                const int column = 8 * d + Accumulators::first_column(lane);
                if (column < Out::kDim)
                    WrittenElement::store_pair(head_base + (r * args.out.row + column) * bytes,
                                               out[d][Accumulators::element(half, 0)],
                                               out[d][Accumulators::element(half, 1)]);
            }
        }
    }

private:
    __device__ static Range rows_of(const Task& task, int group) {
        const int begin = task.rows.begin + 64 * group;
        return {begin, min(begin + 64, task.row_count)};
    }
    __device__ static int first_row_of(const Task& task, int lane) {
        return task.rows.begin + 16 * (threadIdx.x / 32) + Accumulators::first_row(lane);
    }
    // What memory has needs no registers.
    __device__ Range own() const { return kTaskInMemory ? rows_of(task, group) : rows; }
    __device__ int row() const { return kTaskInMemory ? first_row_of(task, lane) : first_row; }
    __device__ Mask first_mask() const { return task.mask(args.n, task.heads.begin); }
    __device__ void arrived() const { mbarrier_wait(shared.full(at.slot), at.parity); }
    __device__ void release() {  // the next slot in order
        __syncwarp();
        warp_arrive(shared.empty(done.slot));
        done.advance();
    }
    __device__ void skip() {
        arrived();  // or two arrivals could fall into one phase
        at.advance();
        release();
    }
    __device__ bool wanted(const Cursor<Mask>& walk) const {
        return walk.tile() >= mine.begin && walk.tile() < mine.end &&
               (!Mask::kListed || walk.any_visible(own().begin, own().end));
    }
    __device__ void multiply_scores(Scores& t, Scores& s) const {  // of the tile at hand
        const u64 offset = static_cast<u64>(at.slot * (kTileBytes >> 4));
        multiply_rows<Teacher, kRows, kFirstHalf>(t, rows_t, ring_t + offset, 0, 0, held);
        multiply_rows<Student, kRows, Student::kChunks>(s, rows_s, ring_s + offset, 0);
    }
    // The same, with nothing else under way.
    __device__ void multiply_scores_now(Scores& t, Scores& s) const {
        Scores rest;  // the second half
        wgmma_fence();
        multiply_scores(t, s);
        if constexpr (kLong)
            multiply_rows<Teacher, kRows, Teacher::kChunks - kFirstHalf>(
                rest, rows_t, ring_t + static_cast<u64>((at.slot * kTileBytes + kFirstHalf * kColumns * 128) >> 4),
                kFirstHalf, kFirstHalf);
        wgmma_commit();
        wgmma_wait<0>();
        fence_accumulators(t);
        fence_accumulators(s);
        if constexpr (kLong) {
            fence_accumulators(rest);
            add<kTiles>(t, rest);
        }
    }
    __device__ void gradients_of(Scores& t, Scores& s, int slot) const {
        logit_gradients(t, s, stats, shared.stats(slot), numbers);
    }
    __device__ void hide_unseen(Scores& dx, const Cursor<Mask>& walk, int slot) const {
        hide(dx, walk.mask, row(), walk.row(), shared.stats(slot));
        clear_non_finite<OutElement, kColumns, Out::kChunks>(shared.tile(slot) + out_offset(kColumns),
                                                             kWarpgroup + group);
    }
    __device__ static void pack(Gradients& a, const Scores& dx) {
#pragma unroll
        for (int k = 0; k < kTiles / 2; ++k) accumulators_to_a<Out::kCode>(a[k], dx[2 * k], dx[2 * k + 1]);
    }
    // Brings the sums to the scale of the tile in a slot, while no product is under way that adds to them.
    __device__ void rescale(int slot) {
        if constexpr (!kRowsAreQueries && kNarrow) {
            const int top = *reinterpret_cast<const int*>(__cvta_shared_to_generic(shared.exponent(slot)));
            if (top <= exponent) return;
            const float shrink = power_of_two(max(exponent - top, -126));
#pragma unroll
            for (int d = 0; d < kOutTiles; ++d)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[d][e] *= shrink;
            exponent = top;
        }
    }
    __device__ void accumulate(const Gradients& a, int slot) const {
        multiply_out(out, a, ring_out + static_cast<u64>(slot * (kTileBytes >> 4)));
    }
    __device__ void accumulate_now(const Gradients& a, int slot) {
        rescale(slot);
        wgmma_fence();
        accumulate(a, slot);
        wgmma_commit();
        wgmma_wait<0>();
        fence_accumulators(out);
        release();
    }

    // One tile after the other: the product with dX is under way while the next tile's scores are multiplied.
    __device__ void work(Cursor<Mask>& walk) {
        bool pending = false;  // the last product is under way, and its tile not yet released
        for (; walk.more() && walk.tile() < mine.end; walk.next()) {
            if (Mask::kListed && !wanted(walk)) {
                wgmma_wait<0>();
                fence_accumulators(out);
                if (pending) release();
                pending = false;
                skip();
                continue;
            }
            arrived();
            const int slot = at.slot;
            Scores t, s;
            multiply_scores_now(t, s);
            fence_accumulators(out);
            if (pending) release();
            pending = true;
            rescale(slot);
            at.advance();
            // Twice, or the scores of full tiles would wait for a branch.
            if (walk.full(own().begin, own().end)) {
                gradients_of(t, s, slot);
            } else {
                gradients_of(t, s, slot);
                hide_unseen(t, walk, slot);
            }
            Gradients a;
            pack(a, t);
            wgmma_fence();
            accumulate(a, slot);
            wgmma_commit();
        }
        wgmma_wait<0>();
        fence_accumulators(out);
        if (pending) release();
    }

    // Takes the tile whose scores are in t and s. Meanwhile the product that `a`, dX of the tile in `slot`, has to make
    // is under way, unless this is the first of a run, and with MORE the next tile's scores. dX ends in `a`.
    template <bool FIRST, bool MORE>
    __device__ void step(Gradients& a, int& slot, Scores& t, Scores& s, Scores& next_t, Scores& next_s) {
        const int before = slot;
        slot = at.slot;
        at.advance();
        if constexpr (MORE) arrived();
        if constexpr (!FIRST) rescale(before);
        if constexpr (MORE || !FIRST) {
            wgmma_fence();
            if constexpr (!FIRST) accumulate(a, before);
            if constexpr (MORE) multiply_scores(next_t, next_s);
            wgmma_commit();
        }
        gradients_of(t, s, slot);
        if constexpr (MORE || !FIRST) wgmma_wait<0>();
        fence_accumulators(out);
        if constexpr (MORE) {
            fence_accumulators(next_t);
            fence_accumulators(next_s);
        }
        pack(a, t);
        if constexpr (!FIRST) release();
        if constexpr (!MORE) accumulate_now(a, slot);
    }
    // What is decided between tiles is decided before products are under way.
    __device__ bool next_is_full(Cursor<Mask>& walk) const {
        walk.next();
        return walk.more() && wanted(walk) && walk.full(own().begin, own().end);
    }
    // Runs of tiles that are visible as a whole are pipelined, with two tiles of scores in registers.
    __device__ void work_ahead(Cursor<Mask>& walk) {
        Scores t, s, next_t, next_s;
        Gradients a;
        int slot = 0;
        while (walk.more() && walk.tile() < mine.end) {
            if (Mask::kListed && !wanted(walk)) {
                skip();
                walk.next();
                continue;
            }
            arrived();
            multiply_scores_now(t, s);
            if (!walk.full(own().begin, own().end)) {
                gradients_of(t, s, at.slot);
                hide_unseen(t, walk, at.slot);
                pack(a, t);
                accumulate_now(a, at.slot);
                at.advance();
                walk.next();
                continue;
            }
            if (!next_is_full(walk)) {
                step<true, false>(a, slot, t, s, next_t, next_s);
                continue;
            }
            step<true, true>(a, slot, t, s, next_t, next_s);
            for (;;) {
                if (!next_is_full(walk)) {
                    step<false, false>(a, slot, next_t, next_s, t, s);
                    break;
                }
                step<false, true>(a, slot, next_t, next_s, t, s);
                if (!next_is_full(walk)) {
                    step<false, false>(a, slot, t, s, next_t, next_s);
                    break;
                }
                step<false, true>(a, slot, t, s, next_t, next_s);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(kThreads + 128, SKL_MIN_BLOCKS)
    streamkl_gradient(const __grid_constant__ HopperGradientArgs all) {
    extern __shared__ unsigned char memory[];
    const Task found(all.base);
    if (found.empty()) return;
    const Layout shared((static_cast<u32>(__cvta_generic_to_shared(memory)) + 1023) & ~1023u);
    // Uniform over the warp by construction, which the compiler must be told: descriptors then live in uniform
    // registers.
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        if constexpr (kTaskInMemory) shared.task() = found;
        for (int i = 0; i < kRing; ++i) {
            mbarrier_init(shared.full(i), kRowsAreQueries ? 1 : 1 + kArrivals);
            mbarrier_init(shared.empty(i), kWarps * kArrivals);
        }
        mbarrier_init(shared.rows_here(), 1);
        mbarrier_init(shared.rows_free(), kWarps * kArrivals);
        mbarrier_publish();
    }
    __syncthreads();
    const Task& task = kTaskInMemory ? shared.task() : found;

    if (group == kGroups) {
        registers_lower<SKL_PRODUCER_REGISTERS>();
        if (threadIdx.x < kThreads + 32) produce(all, task, shared);
        return;
    }
    registers_raise<SKL_CONSUMER_REGISTERS>();
    Consumer::LaneStats stats;
    Consumer::Sums out;
    Consumer::Held held;
    Consumer consumer(all.base, task, shared, group, stats, out, held);
    consumer.run();
    consumer.write();
}

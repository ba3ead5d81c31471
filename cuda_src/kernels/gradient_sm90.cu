// Backward on Hopper: the mathematics of gradient_sm80.cu with asynchronous copies and warpgroup products. One source for
// the gradients of all four inputs; with X the logits of the differentiated side and dX = g * dvalue/dX,
//
//   stationary queries:  dQ = c  dX K       streams keys; g waits for the epilogue
//   stationary keys:     dK = c  dX^T Q     streams queries of all heads that share the key head, with their row vectors
//
//   block     kRows = kGroups x 64 rows of both sides, resident in shared memory
//   producer  one warp; streams the other operand's rows, kColumns at a time, through a ring of kRing slots that hold a
//             tile of both sides, and for stationary keys what the queries contribute (tile/terms.cuh)
//   consumers kGroups warpgroups, 64 rows each: T and S (64 x kColumns) in registers become dX, which packed as operand A
//             is multiplied with the tile it came from, read transposed. That product and the next tile's T and S are one
//             batch for the matrix unit, and while one warpgroup waits for it the others compute: they share only barriers.
//
//   barrier    arrivals                                        waited for by
//   full[i]    1 (+ bytes), and 1 when row vectors are written consumers: slot i is filled
//   empty[i]   one per consumer warp                           the producer: slot i may be overwritten
//   rows_here  1 (+ bytes)                                     consumers: the resident rows are there
//   rows_free  one per consumer warp                           the producer: the other side's keys may be exchanged
//   edge       1 (+ bytes)                                     the producer, where it has to touch a tile before consumers do
//
// Rows at the ends of a tile that no row of the block meets may hold anything, NaN too. Their scores are selected away, but
// the product with the tile would see them, so the producer writes zeros over them. No atomics and no workspace: each
// output element has one owner and a fixed order of addition. Types of narrow exponent are scaled as in gradient_sm80.cu.
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "tile/fragment.cuh"
#include "tile/schedule.cuh"
#include "tile/swizzled.cuh"
#include "@mask"
#include "@divergence"
#include "tile/terms.cuh"

using Teacher = Operand<SKL_T_ELEMENT, SKL_T_DIM>;
using Student = Operand<SKL_S_ELEMENT, SKL_S_DIM>;

constexpr int kSide = SKL_GRAD_SIDE;
using Logit = LogitGradient<kSide>;

template <int SIDE> struct OfSide;
template <> struct OfSide<kTeacher> { using Operand = Teacher; };
template <> struct OfSide<kStudent> { using Operand = Student; };
using Out = OfSide<kSide>::Operand;
using OutElement = Element<Out::kCode>;

struct HopperGradientArgs {
    TensorMap teacher_q, teacher_k, student_q, student_k;
    GradientArgs base;
};

constexpr bool kNarrow = OutElement::kNarrowExponent;  // gradients of logits are scaled by powers of two
constexpr int kGroups = kWarps / 4;
constexpr int kTiles = kColumns / 8;
constexpr int kOutTiles = 2 * Out::kSteps;
constexpr int kRing = SKL_STAGES;
constexpr int kRowBytes = Teacher::bytes(kRows) + Student::bytes(kRows);
constexpr int kTileBytes = Teacher::bytes(kColumns) + Student::bytes(kColumns);
constexpr int kTermFloats = kRowsAreQueries ? 0 : Logit::kNeedsValue ? 4 : 3;        // per streamed query
constexpr int kTermBytes = kTermFloats * kColumns * 4 + (kRowsAreQueries ? 0 : 16);  // the 16: an exponent
constexpr int kBarriers = 2 * kRing + 3;
constexpr int kLowestExponent = kTopExponent - 126;  // weights are scaled by 2^(kTopExponent - exponent)

static_assert(kWarpTiles == 1, "plan: a consumer warpgroup has 64 rows");
static_assert(kRing >= 2, "plan: a tile is released only when the next one has been multiplied");
static_assert(sizeof(HopperGradientArgs) == SKL_ARGS_BYTES, "launch: the packed arguments and HopperGradientArgs differ");
static_assert(1024 + kRowBytes + kRing * (kTileBytes + kTermBytes) + 8 * kBarriers == SKL_SMEM_BYTES, "plan: smem_bytes");

// Shared memory, as addresses.
struct Layout {
    u32 rows, ring, terms_ring, barriers;
    __device__ explicit Layout(u32 base)
        : rows(base), ring(base + kRowBytes), terms_ring(ring + kRing * kTileBytes), barriers(terms_ring + kRing * kTermBytes) {}
    __device__ u32 tile(int slot) const { return ring + slot * kTileBytes; }
    __device__ u32 terms(int slot) const { return terms_ring + slot * kTermBytes; }
    __device__ u32 exponent(int slot) const { return terms(slot) + kTermFloats * kColumns * 4; }
    __device__ u32 full(int slot) const { return barriers + 8 * slot; }
    __device__ u32 empty(int slot) const { return barriers + 8 * (kRing + slot); }
    __device__ u32 rows_here() const { return barriers + 8 * (2 * kRing); }
    __device__ u32 rows_free() const { return barriers + 8 * (2 * kRing + 1); }
    __device__ u32 edge() const { return barriers + 8 * (2 * kRing + 2); }
};

// Offset, in a tile or in the resident rows, of the differentiated side.
__device__ constexpr int out_offset(int rows) { return kSide == kTeacher ? 0 : Teacher::bytes(rows); }

// What a block works on.
struct Task {
    Block block;
    int first_head, end_head;     // query heads that are summed
    Place place;
    int row_count, column_count;  // rows of the stationary and of the streamed operand
    Range rows;                   // the block's own

    __device__ explicit Task(const Extents& n) {
        const int heads_per_block = kRowsAreQueries ? 1 : kSide == kTeacher ? n.teacher_group : n.student_group;
        const int out_heads = n.heads / heads_per_block;
        block = block_of(n, out_heads, n.batch * out_heads, kRowsAreQueries && !Mask::kListed);
        first_head = block.head * heads_per_block;
        end_head = first_head + heads_per_block;
        place = Mask::locate(n, first_head, block.tile);
        row_count = kRowsAreQueries ? place.queries : place.keys;
        column_count = kRowsAreQueries ? place.keys : place.queries;
        rows = {block.tile * kRows, min(block.tile * kRows + kRows, row_count)};
    }
    __device__ Mask mask(const Extents& n, int head) const { return Mask(n, place, block.batch, head); }
    // The interval of streamed rows that some of these rows meet.
    __device__ static Range met_by(const Mask& mask, Range rows) {
        return kRowsAreQueries ? mask.keys_of(rows.begin, rows.end) : mask.queries_of(rows.begin, rows.end);
    }
    __device__ Cursor<Mask> walk(const Mask& mask) const {
        return {mask, rows, mask.steps_of(rows.begin, covering(met_by(mask, rows), kColumns))};
    }
    // Whether the resident rows are other ones than those of the head before: the other side may share keys differently.
    __device__ bool new_rows(const Extents& n, int head) const {
        const int other_group = kSide == kTeacher ? n.student_group : n.teacher_group;
        return head == first_head || head / other_group != (head - 1) / other_group;
    }
};

// Where the terms of a pair of streamed queries lie: both log-sum-exps of both, then their weights, and their values.
__device__ inline u32 pair_lse(u32 terms, int pair) { return terms + 16 * pair; }
__device__ inline u32 pair_rest(u32 terms, int pair) { return terms + 8 * kColumns + 4 * (2 * kTermFloats - 4) * pair; }

__device__ inline void read_pair(RowTerms (&x)[2], u32 terms, int pair) {
    const float4 lse = shared_float4(pair_lse(terms, pair));
    float4 rest = {0.f, 0.f, 0.f, 0.f};
    if constexpr (Logit::kNeedsValue) {
        rest = shared_float4(pair_rest(terms, pair));
    } else {
        const float2 weights = shared_float2(pair_rest(terms, pair));
        rest.x = weights.x;
        rest.y = weights.y;
    }
    x[0] = {lse.x, lse.z, rest.x, rest.z};
    x[1] = {lse.y, lse.w, rest.y, rest.w};
}

__device__ inline void write_terms(u32 terms, int column, const RowTerms& x) {
    const auto write = [](u32 address, float y) { *reinterpret_cast<float*>(__cvta_shared_to_generic(address)) = y; };
    const u32 lse = pair_lse(terms, column / 2) + 4 * (column & 1), rest = pair_rest(terms, column / 2) + 4 * (column & 1);
    write(lse, x.lse_t);
    write(lse + 8, x.lse_s);
    write(rest, x.weight);
    if constexpr (Logit::kNeedsValue) write(rest + 8, x.value);
}

// ROWS rows of both sides, one after the other.
template <int ROWS>
__device__ inline void load_both(u32 shared, const TensorMap& teacher, const TensorMap& student, u32 barrier, int row, int head_t,
                                 int head_s, int batch) {
    mbarrier_expect(barrier, Teacher::bytes(ROWS) + Student::bytes(ROWS));
    load_chunks<ROWS>(shared, teacher, barrier, 0, Teacher::kChunks, row, head_t, batch);
    load_chunks<ROWS>(shared + Teacher::bytes(ROWS), student, barrier, 0, Student::kChunks, row, head_s, batch);
}

// Whether a tile has rows that must not enter a product. What lies beyond the arrays arrives as zeros; beyond a place that
// is one of many lie the rows of the next one.
template <class Met>
__device__ inline bool needs_zeros(const Cursor<Mask>& walk, const Task& task, Range columns, Met met) {
    const int first = walk.row(), end = Mask::kRagged ? first + kColumns : min(first + kColumns, task.column_count);
    if (first < columns.begin || end > columns.end) return true;
    if (!Mask::kSparse || walk.full(task.rows.begin, task.rows.end)) return false;
    bool missing = false;
    for (int j = lane_id(); j < kColumns; j += 32) missing = missing || (first + j < end && !met(first + j));
    return __any_sync(~0u, missing);
}

// The producer: one warp, its first lane issues the tensor copies.
__device__ inline void produce(const HopperGradientArgs& all, const Task& task, const Layout& shared) {
    const GradientArgs& args = all.base;
    const Extents& n = args.n;
    const int lane = lane_id(), batch = task.block.batch;
    const int first_query = task.place.first_query, first_key = task.place.first_key;
    RingCursor<kRing> at;
    u32 edge_parity = 0, free_parity = 0;
    int exponent = kLowestExponent;

    for (int head = task.first_head; head < task.end_head; ++head) {
        const int head_t = head / n.teacher_group, head_s = head / n.student_group;  // of the keys
        const Mask mask = task.mask(n, head);
        const Range columns = Task::met_by(mask, task.rows);
        const auto terms_of = [&](int q) {
            return columns.contains(q) ? read_terms<Logit>(args, mask, batch, head, q) : RowTerms{0.f, 0.f, 0.f, 0.f};
        };
        if (task.new_rows(n, head)) {
            if (head > task.first_head) {
                mbarrier_wait(shared.rows_free(), free_parity);
                free_parity ^= 1;
            }
            if (lane == 0) {
                const u32 here = shared.rows_here();
                if (kRowsAreQueries)
                    load_both<kRows>(shared.rows, all.teacher_q, all.student_q, here, first_query + task.rows.begin, head, head, batch);
                else
                    load_both<kRows>(shared.rows, all.teacher_k, all.student_k, here, first_key + task.rows.begin, head_t, head_s, batch);
            }
            __syncwarp();
        }
        for (Cursor<Mask> walk = task.walk(mask); walk.more(); walk.next()) {
            const int first = walk.row();
            const auto met = [&](int column) { return columns.contains(column) && walk.meets(task.rows.begin, task.rows.end, column); };
            const bool edge = needs_zeros(walk, task, columns, met);
            mbarrier_wait(shared.empty(at.slot), at.parity ^ 1);
            if (lane == 0) {
                const u32 barrier = edge ? shared.edge() : shared.full(at.slot), slot = shared.tile(at.slot);
                if (kRowsAreQueries)
                    load_both<kColumns>(slot, all.teacher_k, all.student_k, barrier, first_key + first, head_t, head_s, batch);
                else
                    load_both<kColumns>(slot, all.teacher_q, all.student_q, barrier, first_query + first, head, head, batch);
            }
            if (edge) {
                mbarrier_wait(shared.edge(), edge_parity);
                edge_parity ^= 1;
                // Whole rows, so the swizzle inside them does not matter.
                const float zeros[4] = {0.f, 0.f, 0.f, 0.f};
                const u32 rows = shared.tile(at.slot) + out_offset(kColumns);
                for (int j = lane; j < kColumns; j += 32)
                    if (!met(first + j))
#pragma unroll 1
                        for (int piece = 0; piece < 8 * Out::kChunks; ++piece)  // from a piece of its own: other banks
                            store_float4(rows + (piece / 8 * kColumns + j) * 128 + ((piece + lane) & 7) * 16, zeros);
                async_fence();
            }
            if constexpr (!kRowsAreQueries) {
                float lift = 1.f;
                if constexpr (kNarrow) {
                    for (int j = lane; j < kColumns; j += 32) {
                        const RowTerms x = terms_of(first + j);
                        const int e = exponent_of(x.weight * Logit::bound(x.value));
                        if (e < 127) exponent = max(exponent, e);
                    }
                    exponent = __reduce_max_sync(~0u, exponent);
                    lift = power_of_two(max(kTopExponent - exponent, -126));
                    if (lane == 0) *reinterpret_cast<int*>(__cvta_shared_to_generic(shared.exponent(at.slot))) = exponent;
                }
                for (int j = lane; j < kColumns; j += 32) {
                    RowTerms x = terms_of(first + j);
                    x.weight *= lift;
                    write_terms(shared.terms(at.slot), j, x);
                }
            }
            __syncwarp();  // a lane may not fall two rounds behind: parities could not tell
            if (lane == 0) {
                if (edge) mbarrier_arrive(shared.full(at.slot));
                if (!kRowsAreQueries) mbarrier_arrive(shared.full(at.slot));
            }
            at.advance();
        }
    }
}

// t becomes the gradient of the logits. With MASKED the pairs that are not visible are set to zero after the fact,
// whatever came out for them. Two instances, because a test inside one would be turned into selections that every tile
// pays for.
template <bool MASKED>
__device__ inline void logit_gradients(float (&t)[kTiles][4], const float (&s)[kTiles][4], const RowTerms (&rows)[2], u32 terms,
                                       const Mask& mask, int row, int first_column, float ct, float cs) {
#pragma unroll
    for (int c = 0; c < kTiles; ++c) {
        RowTerms streamed[2];
        if constexpr (!kRowsAreQueries) read_pair(streamed, terms, 4 * c + (lane_id() & 3));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const RowTerms& x = kRowsAreQueries ? rows[e >> 1] : streamed[e & 1];
            float dx = Logit::evaluate(fmaf(t[c][e], ct, -x.lse_t), fmaf(s[c][e], cs, -x.lse_s), x.value);
            if constexpr (!kRowsAreQueries || kNarrow) dx *= x.weight;
            if constexpr (MASKED) {
                const int r = row + (e >> 1) * 8, other = first_column + 8 * c + 2 * (lane_id() & 3) + (e & 1);
                if (!(kRowsAreQueries ? mask.visible(r, other) : mask.visible(other, r))) dx = 0.f;
            }
            t[c][e] = dx;
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
            wgmma<Out::kHalf, 1>(reinterpret_cast<float(&)[wide][4]>(out[d]), a[k].r[0], rows + (d / 8 * kColumns * 128 >> 4), 1);
        if constexpr (rest > 0)
            wgmma<Out::kHalf, 1>(reinterpret_cast<float(&)[rest][4]>(out[TILES - rest]), a[k].r[0],
                                 rows + ((TILES - rest) / 8 * kColumns * 128 >> 4), 1);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads + 128, SKL_MIN_BLOCKS)
    streamkl_gradient(const __grid_constant__ HopperGradientArgs all) {
    extern __shared__ unsigned char memory[];
    const GradientArgs& args = all.base;
    const Extents& n = args.n;
    const Task task(n);
    if (Mask::kRagged && task.rows.begin >= task.row_count) return;
    const Layout shared((static_cast<u32>(__cvta_generic_to_shared(memory)) + 1023) & ~1023u);
    // Uniform over the warp by construction, which the compiler must be told: descriptors then live in uniform registers.
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kRing; ++i) {
            mbarrier_init(shared.full(i), kRowsAreQueries ? 1 : 2);
            mbarrier_init(shared.empty(i), kWarps);
        }
        mbarrier_init(shared.rows_here(), 1);
        mbarrier_init(shared.rows_free(), kWarps);
        mbarrier_init(shared.edge(), 1);
        mbarrier_publish();
    }
    __syncthreads();

    if (group == kGroups) {
        registers_lower<SKL_PRODUCER_REGISTERS>();
        if (threadIdx.x < kThreads + 32) produce(all, task, shared);
        return;
    }

    registers_raise<SKL_CONSUMER_REGISTERS>();
    const int lane = lane_id(), group_row = task.rows.begin + 64 * group, group_end = min(group_row + 64, task.row_count);
    const int row = group_row + 16 * ((threadIdx.x / 32) & 3) + lane / 4;
    const float ct = args.teacher_scale, cs = args.student_scale;

    const Mask mask = task.mask(n, task.first_head);
    const Range mine = group_row < group_end ? covering(Task::met_by(mask, {group_row, group_end}), kColumns) : Range{0, 0};

    RowTerms terms[2];
    if constexpr (kRowsAreQueries) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            terms[half] = read_terms<Logit>(args, mask, task.block.batch, task.block.head, row + 8 * half);
            if constexpr (kNarrow)
                terms[half].weight = power_of_two(kTopExponent - 1 - exponent_of(Logit::bound(terms[half].value)));
        }
    }

    float out[kOutTiles][4];
#pragma unroll
    for (int d = 0; d < kOutTiles; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) out[d][e] = 0.f;
    int exponent = kLowestExponent;  // narrow types, streamed queries

    const u64 rows_t = swizzled_descriptor(shared.rows + group * 64 * 128), rows_s = rows_t + (Teacher::bytes(kRows) >> 4);
    const u64 ring_t = swizzled_descriptor(shared.ring), ring_s = ring_t + (Teacher::bytes(kColumns) >> 4);
    const u64 ring_out = swizzled_descriptor(shared.ring + out_offset(kColumns), kColumns * 128);

    RingCursor<kRing> at, done;
    u32 rows_parity = 0;
    const auto release = [&] {  // the next slot in order
        __syncwarp();
        if (lane == 0) mbarrier_arrive(shared.empty(done.slot));
        done.advance();
    };
    const auto skip = [&] {
        mbarrier_wait(shared.full(at.slot), at.parity);  // or two arrivals could fall into one phase
        at.advance();
        release();
    };

    for (int head = task.first_head; head < task.end_head; ++head) {
        if (task.new_rows(n, head)) {
            mbarrier_wait(shared.rows_here(), rows_parity);
            rows_parity ^= 1;
        }
        Cursor<Mask> walk = task.walk(task.mask(n, head));
        for (; walk.more() && walk.tile() < mine.begin; walk.next()) skip();
        bool pending = false;  // the last product is under way, and its tile not yet released
        for (; walk.more() && walk.tile() < mine.end; walk.next()) {
            if (Mask::kListed && !walk.touches(group_row, group_end)) {
                wgmma_wait<0>();
                settle(out);
                if (pending) release();
                pending = false;
                skip();
                continue;
            }
            mbarrier_wait(shared.full(at.slot), at.parity);
            const u64 offset = static_cast<u64>(at.slot * (kTileBytes >> 4));
            const u32 streamed = shared.terms(at.slot);
            float t[kTiles][4], s[kTiles][4];
            wgmma_fence();
            multiply_rows<Teacher, kRows, Teacher::kChunks>(t, rows_t, ring_t + offset, 0);
            multiply_rows<Student, kRows, Student::kChunks>(s, rows_s, ring_s + offset, 0);
            wgmma_commit();
            wgmma_wait<0>();
            settle(t);
            settle(s);
            settle(out);
            if (pending) release();
            pending = true;
            if constexpr (!kRowsAreQueries && kNarrow) {
                const int top = *reinterpret_cast<const int*>(__cvta_shared_to_generic(shared.exponent(at.slot)));
                if (top > exponent) {
                    const float shrink = power_of_two(max(exponent - top, -126));
#pragma unroll
                    for (int d = 0; d < kOutTiles; ++d)
#pragma unroll
                        for (int e = 0; e < 4; ++e) out[d][e] *= shrink;
                    exponent = top;
                }
            }
            at.advance();

            if (walk.full(group_row, group_end))
                logit_gradients<false>(t, s, terms, streamed, walk.mask, row, walk.row(), ct, cs);
            else
                logit_gradients<true>(t, s, terms, streamed, walk.mask, row, walk.row(), ct, cs);
            Gradients a;
#pragma unroll
            for (int k = 0; k < kTiles / 2; ++k) accumulators_to_a<Out::kCode>(a[k], t[2 * k], t[2 * k + 1]);
            wgmma_fence();
            multiply_out(out, a, ring_out + offset);
            wgmma_commit();
        }
        wgmma_wait<0>();
        settle(out);
        if (pending) release();
        for (; walk.more(); walk.next()) skip();
        if (head + 1 < task.end_head && task.new_rows(n, head + 1) && lane == 0) mbarrier_arrive(shared.rows_free());
    }

    constexpr int bytes = OutElement::kBytes;
    const Block& block = task.block;
    const int first_out = kRowsAreQueries ? task.place.first_query : task.place.first_key;
    const u64 head_base =
        args.out.pointer + (block.batch * args.out.batch + block.head * args.out.head + first_out * args.out.row) * bytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = row + 8 * half;
        if (r >= task.row_count) continue;
        float factor = Logit::kFactor * args.out_scale;
        if constexpr (kRowsAreQueries) {
            const RowTerms x = read_terms<Logit>(args, mask, block.batch, block.head, r);  // again: registers are dear above
            factor *= x.weight;
            if constexpr (kNarrow) factor *= power_of_two(exponent_of(Logit::bound(x.value)) + 1 - kTopExponent);
        } else if constexpr (kNarrow) {
            factor *= power_of_two(exponent - kTopExponent);
        }
#pragma unroll
        for (int d = 0; d < kOutTiles; ++d) {
            const int column = 8 * d + 2 * (lane & 3);
            if (column < Out::kDim)
                OutElement::store_pair(head_base + (r * args.out.row + column) * bytes, out[d][2 * half] * factor,
                                       out[d][2 * half + 1] * factor);
        }
    }
}

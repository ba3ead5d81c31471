// The indexer's score tile, whatever computes its products: for each tile of rows and keys t = sum_h exp2(c q_h k_h -
// lse_h) over the teacher's heads and I = sum_h w_h a(q_h k) over the student's, a(s) being s, or max(s, 0) where gates
// are asked for. Nothing of a head is kept. What becomes of a tile is the ending:
//
//   0 rows     states (r, l, Z, A) of the rows, over the keys of one split; kernels/indexer_join.cu makes rows of them
//   1 strip    the gradient of the student's logits, u (Q - P), for the kernels that multiply by it
//   2 target   t as it is
//   3 lse      of one head of the teacher alone, states (r, l, 0, 0)
//
//   block    kRows query rows of one batch entry and group; kWarps warps of 16 rows each
//   step     one part of the head dim of one head: its queries, and its keys where those are others than before, on
//            their way while the step before is computed (cp.async); of either there are two buffers
//
// The keys of a tile stay for all heads that read them. Products are gated as they come and weighted afterwards: the
// weight folded into the queries before would flip gates. A NaN or an infinity of a pair shows in it, though ReLU and
// the exponential would hide some: what is 0 times a finite number is added.
//
// The kernel has said before what a TeacherTile and an IndexTile are, how they are loaded, and how one multiplies.
#pragma once
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "kernels/indexer_score/ending.cuh"
#include "pipeline/ring.cuh"
#include "tile/index_parts.cuh"

constexpr int kTeacherParts = ceil_div(SKL_T_DIM, SKL_T_PART), kExtraParts = SKL_R_DIM > 0;
constexpr int kIndexParts = ceil_div(SKL_S_DIM, SKL_S_PART);

constexpr int kQueryBytes = larger(TeacherTile::bytes(kRows), IndexTile::bytes(kRows)),
              kKeyBytes = larger(TeacherTile::bytes(kColumns), IndexTile::bytes(kColumns));
static_assert(2 * (kQueryBytes + kKeyBytes) + Products::kAlignment == SKL_SMEM_BYTES && kStages == 2,
              "plan: smem_bytes");
static_assert(SKL_R_DIM <= SKL_T_PART, "plan: a rotary part is one part");

// Where a block is among its products.
struct Step {
    int key, end;                    // of the tile, and of the block's split
    int head, teacher_heads, heads;  // the teacher's come first
    int first_head, teacher_group;   // of the call, and how many share their keys
    int part = 0;
    int slot = 0;       // of the keys
    bool fresh = true;  // whether these keys are others than those of the step before

    // With the first head of a tile, whose first one of the teacher is that of the call.
    __device__ void begin(const IndexerArgs& args, int first_of_teacher) {
        head = 0;
        teacher_heads = kTeacherIsGiven ? 0 : kEnding == kEndsInLse ? 1 : args.teacher_heads;
        heads = teacher_heads + (kHasStudent ? args.index_heads : 0);
        first_head = first_of_teacher;
        teacher_group = args.teacher_group;
    }
    __device__ bool more() const { return key < end; }
    __device__ bool teacher() const { return head < teacher_heads; }
    __device__ int parts() const { return teacher() ? kTeacherParts + kExtraParts : kIndexParts; }
    __device__ bool last_part() const { return part + 1 == parts(); }
    __device__ bool last() const { return head + 1 == heads && last_part(); }
    __device__ void next() {
        if (++part == parts()) {
            part = 0;
            if (++head == heads) {
                head = 0;
                key += kColumns;
            }
        }
        fresh = parts() > 1 || head == 0 || head == teacher_heads ||
                (teacher() && (first_head + head) % teacher_group == 0);
        slot ^= fresh;
    }
};

// What has to be fetched for a step.
struct Fetch {
    const IndexerArgs& args;
    u32 base;
    int batch, group, first_row;
    Range rows;

    __device__ u32 queries(int i) const { return base + (i & 1) * kQueryBytes; }
    __device__ u32 keys(int slot) const { return base + 2 * kQueryBytes + slot * kKeyBytes; }

    template <class T, bool QUERY_VECTOR, bool KEY_VECTOR>
    __device__ void both(const Tensor4& q, const Tensor4& k, int head, int key_head, Columns columns, const Step& at,
                         int i) const {
        Products::load<kRows, QUERY_VECTOR>(T{queries(i)}, head_view<T>(q, batch, head, 0), first_row, rows, columns);
        if (at.fresh)
            Products::load<kColumns, KEY_VECTOR>(T{keys(at.slot)}, head_view<T>(k, batch, key_head, 0), at.key,
                                                 Range{0, args.keys}, columns);
    }
    __device__ void operator()(const Step& at, int i) const {
        if (at.teacher()) {
            const int head = at.first_head + at.head;
            if (kExtraParts && at.part == kTeacherParts) {
                both<TeacherTile, SKL_RQ_VECTOR, SKL_RK_VECTOR>(args.rope_q, args.rope_k, head, head / args.rope_group,
                                                                Columns{0, SKL_R_DIM}, at, i);
            } else {
                const int first = at.part * SKL_T_PART;
                both<TeacherTile, SKL_TQ_VECTOR, SKL_TK_VECTOR>(args.teacher_q, args.teacher_k, head,
                                                                head / args.teacher_group,
                                                                Columns{first, SKL_T_DIM - first}, at, i);
            }
        } else {
            const int head = group * args.index_heads + at.head - at.teacher_heads, first = at.part * SKL_S_PART;
            both<IndexTile, SKL_SQ_VECTOR, SKL_SK_VECTOR>(args.index_q, args.index_k, head,
                                                          args.index_key_heads > 1 ? group : 0,
                                                          Columns{first, SKL_S_DIM - first}, at, i);
        }
    }
};

// What the lane's rows have of a head: the teacher's log-sum-exp in base 2, or the student's weight.
__device__ inline void head_factors(const IndexerArgs& args, const Step& at, int batch, int group, int row,
                                    float (&factor)[2]) {
    const float* const vector =
        at.teacher()
            ? reinterpret_cast<const float*>(args.lse2) +
                  static_cast<i64>(batch * args.groups * args.teacher_heads + at.first_head + at.head) * args.queries
            : reinterpret_cast<const float*>(args.weights) +
                  static_cast<i64>((batch * args.groups + group) * args.index_heads + at.head - at.teacher_heads) *
                      args.queries;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = row + Accumulators::below(half);
        factor[half] = kEnding != kEndsInLse && r < args.queries ? vector[r] : at.teacher() ? infinity() : 0.f;
    }
}

// The state of a row, or where there is but one its log-sum-exp.
__device__ inline void leave_state(const IndexerArgs& args, const MassState& x, int batch, int which, int split,
                                   int r) {
    if (kEnding == kEndsInLse && args.splits == 1)
        *row_vector(args.out_lse, batch, which, r) = x.l == 0.f ? -infinity() : kLn2 * (x.r + log2f(x.l));
    else
        reinterpret_cast<float4*>(
            args.states)[(static_cast<i64>(blockIdx.y) * args.splits + split) * args.queries + r] =
            make_float4(x.r, x.l, x.mass, x.terms);
}

// A target that is given, in place of the teacher's masses.
__device__ inline void read_target(const IndexerArgs& args, int batch, int group, int row, const RowKeys (&seen)[2],
                                   int first_key, Strip<kTiles>& t) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float* const from = reinterpret_cast<const float*>(args.target.pointer) + batch * args.target.batch +
                                  group * args.target.head + (row + Accumulators::below(half)) * args.target.row;
#pragma unroll
        for (int j = 0; j < 2 * kTiles; ++j) {
            const int key = key_of(first_key, j);
            if (seen[half].visible(key))
                t[0][j / 2][Accumulators::element(half, j % 2)] = from[key * args.target.column];
        }
    }
}

// What gradients read of the lane's rows, of those that there are.
__device__ inline void read_stats(const IndexerArgs& args, int batch, int group, int row, float4 (&rows)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = row + Accumulators::below(half);
        if (r < args.queries)
            rows[half] = reinterpret_cast<const float4*>(
                args.row_stats)[static_cast<i64>(batch * args.groups + group) * args.queries + r];
    }
}

// No gradients of the lane's rows by the keys of a tile.
__device__ inline void clear_strip(const IndexerArgs& args, int batch, int group, int row, int key, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
            StripElement::store_pair(strip_pair(args, batch * args.groups + group, row + Accumulators::below(half),
                                                key + Accumulators::first_column(lane)) +
                                         strip_step(n),
                                     0.f, 0.f);
}

// A head of the teacher.
__device__ inline void add_head(Strip<kTiles>& t, const Strip<kTiles>& s, const TeacherNumbers& n,
                                const float (&lse)[2]) {
    if (__any_sync(~0u, lse[0] == infinity() || lse[1] == infinity()))
        add_masses<true>(t, s, n, lse);
    else
        add_masses<false>(t, s, n, lse);
}

// Leaves the gates of a head's scores for gradients.
__device__ inline void keep_gates(const IndexerArgs& args, int entry, int head, int tile, int first_key,
                                  const Strip<kTiles>& s) {
    if constexpr (kKeepsGates)
        store_gates(args, entry, head, tile, first_key / kStripTile, threadIdx.x / 32 % kWarps, gates_of(s[0]));
}

// What the warps that share rows have of them, for the first one to merge.
__device__ inline void leave_for_others(float4* left, int warp, int warp_row, int lane, MassState (&state)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        Accumulators::merge_row(state[half]);
        const MassState& x = state[half];
        if (Accumulators::writes_row(lane))
            left[warp / kWarps * kRows + warp_row + Accumulators::first_row(lane) + Accumulators::below(half)] =
                make_float4(x.r, x.l, x.mass, x.terms);
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, SKL_MIN_BLOCKS)
    streamkl_indexer_score(const __grid_constant__ IndexerArgs args) {
    extern __shared__ __align__(16) unsigned char shared[];
    // Under a causal mask the last rows have most keys.
    const int last_tile = (args.first_tile + args.tiles) * (kStripTile / kRows) - 1;
    const int tile = last_tile - static_cast<int>(blockIdx.x) / args.splits;
    const int split = static_cast<int>(blockIdx.x) % args.splits;
    const int entries = kEnding == kEndsInLse ? args.groups * args.teacher_heads : args.groups;
    const int batch = static_cast<int>(blockIdx.y) / entries, which = static_cast<int>(blockIdx.y) % entries;
    const int group = kEnding == kEndsInLse ? which / args.teacher_heads : which;
    const int first_row = tile * kRows;

    const Range keys = keys_of_tile(args, batch, tile * kRows / kStripTile);
    const int tiles = ceil_div(keys.end - keys.begin, kColumns);
    const auto cut = [&keys, &args, tiles](int i) {
        return keys.begin + static_cast<int>(static_cast<i64>(tiles) * i / args.splits) * kColumns;
    };
    Step at;
    at.key = cut(split);
    at.end = cut(split + 1);
    at.begin(args, kEnding == kEndsInLse ? which : group * args.teacher_heads);
    Step ahead = at;

    const u32 base = Products::aligned(static_cast<u32>(__cvta_generic_to_shared(shared)));
    const Fetch fetch{args, base, batch, group, first_row, Range{0, args.queries}};

    const int lane = lane_id(), warp = threadIdx.x / 32;
    const int warp_row = warp % kWarps * 16, warp_column = warp / kWarps * kWarpColumns;
    const int row = first_row + warp_row + Accumulators::first_row(lane);
    const RowKeys seen[2] = {RowKeys(args, batch, group, row),
                             RowKeys(args, batch, group, row + Accumulators::below(1))};
    MassState state[2];
    state[0].start();
    state[1].start();

    // Of each row (log-sum-exp in base 2, 1 / mass, u): zeros where it has no gradient.
    float4 rows[2] = {make_float4(0.f, 0.f, 0.f, 0.f), make_float4(0.f, 0.f, 0.f, 0.f)};
    if constexpr (kEnding == kEndsInStrip) {
        read_stats(args, batch, group, row, rows);
        // Where no row has one, no product is needed to know the tiles.
        if (!__syncthreads_or(rows[0].z != 0.f || rows[1].z != 0.f)) {
            for (int key = at.key + warp_column; key < min(at.end, keys.end); key += kColumns)
                clear_strip(args, batch, group, row, key, lane);
            return;
        }
    }

    if (ahead.more()) {
        fetch(ahead, 0);
        ahead.next();
    }
    cp_async_commit();
    Strip<kTiles> t, logits, s;
    clear<kTiles>(t);
    if constexpr (kHasStudent) clear<kTiles>(logits);
    for (int i = 0; at.more(); ++i, at.next()) {
        cp_async_wait<0>();
        Products::arrived();
        __syncthreads();
        if (ahead.more()) {
            fetch(ahead, i + 1);
            ahead.next();
        }
        cp_async_commit();

        // Of the head, asked for before its product and needed after it.
        float factor[2];
        head_factors(args, at, batch, group, row, factor);
        if (at.teacher()) {
            Products::multiply(s, TeacherTile{fetch.queries(i)}, warp_row, TeacherTile{fetch.keys(at.slot)},
                               warp_column, at.part == 0);
            if (at.last_part() && kEnding != kEndsInLse) add_head(t, s, args.teacher_numbers, factor);
        } else {
            Products::multiply(s, IndexTile{fetch.queries(i)}, warp_row, IndexTile{fetch.keys(at.slot)}, warp_column,
                               at.part == 0);
            if (at.last_part()) {
                const int first = at.key + warp_column;
                if (kKeepsGates && (kColumns == kStripTile || first < keys.end))
                    keep_gates(args, batch * args.groups + group, at.head - at.teacher_heads, tile, first, s);
                add_weighted(logits, s, factor);
            }
        }
        if (!at.last()) continue;
        const int first_key = at.key + warp_column;

        if constexpr (kTeacherIsGiven) read_target(args, batch, group, row, seen, first_key, t);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = row + Accumulators::below(half);
            if constexpr (kEnding == kEndsInRows) {
                absorb<StudentScore, true>(state[half], t, logits, args.student_numbers, half, seen[half], first_key);
            } else if constexpr (kEnding == kEndsInLse) {
                absorb<TeacherScore, false>(state[half], t, s, args.teacher_numbers, half, seen[half], first_key);
            } else if constexpr (kEnding == kEndsInTarget) {
                const bool wanted = r >= args.first_row && r < args.end_row;
                float* const to = reinterpret_cast<float*>(args.target.pointer) + batch * args.target.batch +
                                  group * args.target.head + r * args.target.row;
#pragma unroll
                for (int j = 0; j < 2 * kTiles; ++j) {
                    const int key = key_of(first_key, j);
                    if (wanted && seen[half].visible(key))
                        to[key * args.target.column] = t[0][j / 2][Accumulators::element(half, j % 2)];
                }
            } else {
                const float4 stats = rows[half];
                const u64 to =
                    strip_pair(args, batch * args.groups + group, r, first_key + Accumulators::first_column(lane));
#pragma unroll
                for (int n = 0; n < kTiles; ++n) {
                    float d[2];
#pragma unroll
                    for (int j = 0; j < 2; ++j) {
                        const int e = Accumulators::element(half, j);
                        const float q =
                            exp2_approx(StudentScore::logit(logits[0][n][e], args.student_numbers, stats.x));
                        const bool counts = stats.z != 0.f && seen[half].visible(key_of(first_key, 2 * n + j));
                        d[j] = counts ? stats.z * fmaf(-stats.y, t[0][n][e], q) : 0.f;
                    }
                    if (kColumns > kStripTile && first_key >= keys.end) continue;  // beyond the strip's tiles
                    StripElement::store_pair(to + strip_step(n), d[0], d[1]);
                }
            }
        }
        clear<kTiles>(t);
        if constexpr (kHasStudent) clear<kTiles>(logits);
    }
    if constexpr (kEnding == kEndsInRows || kEnding == kEndsInLse) {
        if constexpr (kColumnWarps > 1) {  // the first of the warps that share rows merges, in their order
            __syncthreads();
            float4* const left = reinterpret_cast<float4*>(shared);
            leave_for_others(left, warp, warp_row, lane, state);
            __syncthreads();
            if (warp >= kWarps) return;
#pragma unroll
            for (int half = 0; half < 2; ++half)
                for (int i = 1; i < kColumnWarps; ++i) {
                    const float4 x =
                        left[i * kRows + warp_row + Accumulators::first_row(lane) + Accumulators::below(half)];
                    state[half].merge({x.x, x.y, x.z, x.w});
                }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if constexpr (kColumnWarps == 1) Accumulators::merge_row(state[half]);
            const int r = row + Accumulators::below(half);
            if (!Accumulators::writes_row(lane) || r >= args.queries) continue;
            leave_state(args, state[half], batch, which, split, r);
        }
    }
}

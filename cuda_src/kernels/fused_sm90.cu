// Backward of one side on Hopper, both gradients in one pass: the mathematics of gradient_sm80.cu with four products per
// tile where a kernel per gradient needs six. "Own" is the side that is differentiated, "other" the one only recomputed; X
// are own logits, dX = g * dvalue/dX:
//
//   dK = c dX^T Q   summed in registers by the block that owns the keys, over the query heads that share them
//   dQ = c dX K     needs all keys: blocks add fp32 parts in global memory, in no fixed order
//
// Three kernels: `prepare` clears the sums of dQ and the count of portions, and writes the rows' statistics where the copy
// engine can fetch them, the main kernel adds, `finish` scales and converts dQ. In the workspace, one entry per query head and
// kColumns queries:
//
//   sums       [own D / 8][...] floats, in the order in which the accumulators of the dQ product hold them
//   terms      of the queries, as tile/terms.cuh lays them out; narrow types: g times what takes back a row's scale
//   exponents  int, types of narrow exponent only: the largest exponent of g * bound
//   taken      one int: portions that blocks have taken beyond their first
//
// Main kernel, whose blocks stay and take one portion after the other (tile/visits.cuh):
//
//   portion   kRows keys of one own key head, resident in shared memory
//   producer  one warp, whose first lane issues copies (lists of tiles are searched by whole warps); finds portions and streams
//             queries, kColumns at a time: other side and own side through a ring each, the own one with the terms. Other
//             keys are loaded anew where the query head reads other ones
//   consumers two warpgroups, 64 of every 128 keys each: both scores, transposed (keys x queries), become dX^T, which is
//             operand A of dK from registers, and goes through shared memory to
//   dQ        one warpgroup: dX (read transposed) times the own keys, kWide x 64 columns at a time; each warp stages its rows
//             in shared memory and has the copy engine add them to the sums
//
//   barrier        arrivals                    waited for by
//   own_keys       1 (+ bytes)                 consumers and dQ
//   own_keys_free  one per warp of these       the producer: own keys may be overwritten
//   keys_full      1 (+ bytes)                 consumers: other keys are here
//   keys_empty     one per consumer warp       the producer: other keys may be overwritten
//   other_full[i]  1 (+ bytes)                 consumers
//   other_empty[i] one per consumer warp       the producer
//   own_full[i]    1 (+ bytes)                 consumers
//   own_empty[i]   one per consumer warp       the producer
//   handed[i]      one per consumer warp       dQ: tile i of dX is complete
//   taken[i]       one per warp of dQ          consumers: tile i of dX may be overwritten
//
// An element type of narrow exponent gets dX twice: with g, scaled by one power of two per key block, for dK, and
// without g, scaled by one per row, for dQ; `finish` multiplies g in. Where a list says so, blocks share the queries of a
// key tile and dK is added up as in tile/shares.cuh.
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "common/sizes.cuh"
#include "ptx/bulk.cuh"
#include "ptx/registers.cuh"
#include "ptx/shared.cuh"
#include "tile/arrive.cuh"
#include "tile/clear.cuh"
#include "tile/fragment.cuh"
#include "tile/schedule.cuh"
#include "tile/shares.cuh"
#include "tile/swizzled.cuh"
#include "tile/visits.cuh"
#include "@mask"
#include "@divergence"
#include "@score"
#include "tile/terms.cuh"

constexpr int kSide = SKL_GRAD_SIDE;
using Logit = LogitGradient<kSide>;

template <int SIDE> struct OfSide;
template <> struct OfSide<kTeacher> { using Operand = ::Operand<SKL_T_ELEMENT, SKL_T_DIM>; };
template <> struct OfSide<kStudent> { using Operand = ::Operand<SKL_S_ELEMENT, SKL_S_DIM>; };
using Own = OfSide<kSide>::Operand;
using Other = OfSide<1 - kSide>::Operand;
using E = Element<Own::kCode>;
using Terms = TermLayout<Logit, kColumns>;

constexpr int kGroups = kWarps / 4;
constexpr int kTiles = kColumns / 8;
constexpr int kOwnRing = SKL_STAGES, kOtherRing = SKL_OTHER_STAGES;
constexpr int kHandovers = SKL_HANDOVERS;  // tiles of dX between the consumers and dQ
constexpr int kStagings = SKL_STAGINGS;    // buffers between dQ and the copy engine
constexpr bool kNarrow = E::kNarrowExponent;         // gradients of logits are scaled by powers of two
constexpr int kLowestExponent = kTopExponent - 126;  // weights are scaled by 2^(kTopExponent - exponent)

constexpr int kHelperThreads = 128;  // of the kernels before and after
constexpr int kTurnBarrier = kGroups + 2;  // one per consumer; those before are the warpgroups' own
constexpr int kOutTiles = 2 * Own::kSteps;  // tiles of 8 columns of dK and dQ

constexpr int kOwnTileBytes = Own::bytes(kColumns), kOtherTileBytes = Other::bytes(kColumns);
constexpr int kHeld = SKL_HELD_STEPS;  // of the consumers' own keys
constexpr bool kEarlyWaits = SKL_EARLY_WAITS;  // for the next tile's copies, before taking the turn
constexpr bool kReadAgain = SKL_READ_AGAIN;    // what shared memory has, in every step, where no register is left for it
constexpr int kWide = SKL_WIDE_CHUNKS;         // chunks of dQ that one product makes
constexpr int kSubs = kWarpTiles;             // a consumer works on 64 of every 128 keys of the block
constexpr int kSubRows = kRows / kSubs;
constexpr int kHandoverBytes = kSubRows * kColumns * 2;
constexpr int kStagingBytes = 64 * kColumns * 4;
constexpr int kTermBytes = 4 * Terms::kFloats;

// Offsets in shared memory.
constexpr int kOtherKeysAt = 0;
constexpr int kOwnKeysAt = kOtherKeysAt + Other::bytes(kRows);
constexpr int kOtherAt = kOwnKeysAt + Own::bytes(kRows);
constexpr int kOwnAt = kOtherAt + kOtherRing * kOtherTileBytes;
constexpr int kHandoverAt = kOwnAt + kOwnRing * kOwnTileBytes;
constexpr int kStagingAt = kHandoverAt + kHandovers * kHandoverBytes;
constexpr int kTermsAt = kStagingAt + kStagings * kStagingBytes;
constexpr int kBarriersAt = kTermsAt + kOwnRing * kTermBytes;
constexpr int kBarriers = 4 + 2 * (kOtherRing + kOwnRing + kHandovers) + kVisitBarriers;
constexpr int kVisitsAt = kBarriersAt + 8 * kBarriers;

static_assert(kOutTiles <= 16, "plan: one product of the matrix unit makes at most 128 columns of dK");
static_assert(Own::kChunks % kWide == 0, "plan: products of dQ are equally wide");
static_assert(kColumns == 64 && kGroups == 2, "plan: two consumer warpgroups compute 64 x 64 scores each");
static_assert(kSubs == 1 || (kSubs == 2 && Own::kChunks == 1), "plan: registers hold two gradients of up to 64 columns");
static_assert(1024 + kVisitsAt + kVisits * sizeof(Visit) == SKL_SMEM_BYTES, "plan: smem_bytes");

template <int N>
struct Value {
    static constexpr int value = N;
};

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

// Blocks side by side should stream the same rows, or they all come from memory. Shares of lists, and the lists of causal
// patterns, have the end in common.
using Walk = Cursor<Mask, Mask::kListed ? -1 : 1>;
using Scores = float[kTiles][4];  // of one consumer thread: accumulators of keys x queries

// What a narrow type's gradients without g are multiplied by, a power of two per row, and what takes it back.
__device__ inline int plain_exponent(const RowTerms& x) { return kTopExponent - 1 - exponent_of(Logit::bound(x.value)); }
__device__ inline float plain_scale(const RowTerms& x) { return power_of_two(plain_exponent(x)); }
__device__ inline float plain_unscale(const RowTerms& x) { return power_of_two(-plain_exponent(x)); }

__device__ inline u32 pack(float lo, float hi) {
    u32 planes[1];
    E::split(lo, hi, planes);
    return planes[0];
}

static_assert(FusedWorkspace::kSums == kColumns * Own::kDim && FusedWorkspace::kTerms == Terms::kFloats, "plan: workspace");

struct Workspace : FusedWorkspace {
    int heads, tiles;

    __device__ explicit Workspace(const FusedArgs& args) {
        const Extents& n = args.base.n;
        heads = n.heads;
        tiles = row_tiles(n.queries, kColumns, n.sequences);
        locate(args.workspace, static_cast<i64>(n.batch * heads) * tiles);
    }
    // Of a tile of 64 queries, counted in its place.
    __device__ i64 entry(int b, int h, const Place& place, int tile) const {
        return static_cast<i64>(b * heads + h) * tiles + place.first_query / kColumns + place.sequence + tile;
    }
};

// Tiles of 8 columns in a 64-column chunk of the sums, and where thread `thread` of the dQ warpgroup has its four elements
// of such a tile. A warp's part of a chunk is contiguous.
__device__ constexpr int sum_tiles(int chunk) { return chunk < Own::kDim / 64 ? 8 : Own::kDim % 64 / 8; }
__device__ inline int sum_index(int chunk, int tile, int thread) {
    return chunk * 64 * kColumns + ((thread / 32 * sum_tiles(chunk) + tile) * 32 + thread % 32) * 4;
}

// Which (batch, head, tile) of the workspace a block of the small kernels has; the tile is counted in its place.
struct Entry {
    i64 index;
    int batch, head, tile;
    Place place;
    __device__ Entry(const Workspace& space, const Extents& n) {
        index = blockIdx.x;
        const int pair = blockIdx.x / space.tiles;
        batch = pair / space.heads;
        head = pair % space.heads;
        Portion whole{static_cast<int>(blockIdx.x % space.tiles), 0, 1, 0, {0, kNoLimit}};
        place = Mask::locate<kColumns, true>(n, head, whole);
        tile = whole.tile;
    }
};

extern "C" __global__ void __launch_bounds__(kHelperThreads) streamkl_fused_prepare(const __grid_constant__ HopperFusedArgs all) {
    const GradientArgs& args = all.fused.base;
    const Workspace space(all.fused);
    const Entry at(space, args.n);

    float4* const sums = reinterpret_cast<float4*>(space.sums + at.index * Workspace::kSums);
#pragma unroll
    for (int i = 0; i < kColumns * Own::kDim / 4 / kHelperThreads; ++i)
        sums[threadIdx.x + kHelperThreads * i] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (threadIdx.x >= 32) return;
    if (blockIdx.x == 0 && threadIdx.x == 0) *space.taken = 0;

    const Mask mask(args.n, at.place, at.batch, at.head);
    int top = kLowestExponent;
#pragma unroll
    for (int j = threadIdx.x; j < kColumns; j += 32) {
        RowTerms x = read_terms<Logit>(args, mask, at.batch, at.head, at.tile * kColumns + j);
        const int e = exponent_of(x.weight * Logit::bound(x.value));
        if (e < 127) top = max(top, e);
        if constexpr (kNarrow) x.weight *= plain_unscale(x);
        Terms::write(space.terms + at.index * Terms::kFloats, j, x);
    }
    if constexpr (kNarrow) {
        top = __reduce_max_sync(~0u, top);
        if (threadIdx.x == 0) space.exponents[at.index] = top;
    }
}

extern "C" __global__ void __launch_bounds__(kHelperThreads) streamkl_fused_finish(const __grid_constant__ HopperFusedArgs all) {
    const GradientArgs& args = all.fused.base;
    const Tensor4& out = all.fused.out_q;
    const Workspace space(all.fused);
    const Entry at(space, args.n);
    const float* const sums = space.sums + at.index * Workspace::kSums;
    const Mask mask(args.n, at.place, at.batch, at.head);
    // A quad's part of a tile of 8 columns is 64 contiguous bytes of the sums: the first halves of its four elements are the
    // upper row, the others the lower one. A thread takes whole parts, neighbours those of one row.
    constexpr int kParts = Own::kDim / 8;
#pragma unroll
    for (int i = threadIdx.x; i < 32 * kParts; i += kHelperThreads) {
        const int part = i % kParts, quad = i / kParts, upper = quad / 8 * 16 + quad % 8, chunk = part / 8;
        const float4* const from = reinterpret_cast<const float4*>(sums + sum_index(chunk, part % 8, quad * 4));
        const float4 x[4] = {from[0], from[1], from[2], from[3]};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int q = at.tile * kColumns + upper + 8 * half;
            if (q >= at.place.queries) continue;
            float factor = gradient_factor<kSide>(args.out_scale);
            if constexpr (kNarrow) {
                const RowTerms row = read_terms<Logit>(args, mask, at.batch, at.head, q);
                factor *= row.weight * plain_unscale(row);
            }
            u32 packed[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) packed[j] = half ? pack(x[j].z * factor, x[j].w * factor) : pack(x[j].x * factor, x[j].y * factor);
            const u64 address = out.pointer + (at.batch * out.batch + at.head * out.head + (at.place.first_query + q) * out.row + 8 * part) * E::kBytes;
            *reinterpret_cast<uint4*>(address) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
        }
    }
}

// dX^T with g of one consumer thread as operand A, a fragment per 16 queries.
using Gradients = FragmentA<Own::kCode>[kTiles / 2];

// Puts one fragment where the dQ warpgroup reads: 16 queries further are 32 bytes further in the row, under the swizzle too.
__device__ inline void hand_over(u32 hand, int k, const u32 (&fragment)[4]) { stmatrix_x4(hand ^ (k << 5), fragment); }

// What a tile shows of itself, where that is all; else it is asked for the columns and rows of the lane's accumulators.
struct Everything {
    __device__ bool operator()(int, int) const { return true; }
};
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

extern "C" __global__ void __launch_bounds__(kThreads + 256, 1) streamkl_fused(const __grid_constant__ HopperFusedArgs all) {
    extern __shared__ unsigned char shared[];
    const GradientArgs& args = all.fused.base;
    const Extents& n = args.n;
    // Uniform over the warp by construction, which the compiler must be told: descriptors then live in uniform registers.
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const int lane = lane_id();

    const u32 base = (static_cast<u32>(__cvta_generic_to_shared(shared)) + 1023) & ~1023u;
    const u32 own_keys = base + kBarriersAt, own_keys_free = own_keys + 8;
    const u32 keys_full = own_keys_free + 8, keys_empty = keys_full + 8;
    const u32 other_full = keys_empty + 8, other_empty = other_full + 8 * kOtherRing;
    const u32 own_full = other_empty + 8 * kOtherRing, own_empty = own_full + 8 * kOwnRing;
    const u32 handed = own_empty + 8 * kOwnRing, taken = handed + 8 * kHandovers;
    VisitRing visits{reinterpret_cast<Visit*>(shared + (base - static_cast<u32>(__cvta_generic_to_shared(shared))) + kVisitsAt),
                     taken + 8 * kHandovers};
    if (threadIdx.x == 0) {
        mbarrier_init(own_keys, 1);
        mbarrier_init(own_keys_free, (kWarps + 4) * kArrivals);
        mbarrier_init(keys_full, 1);
        mbarrier_init(keys_empty, kWarps * kArrivals);
        for (int i = 0; i < kOtherRing; ++i) {
            mbarrier_init(other_full + 8 * i, 1);
            mbarrier_init(other_empty + 8 * i, kWarps * kArrivals);
        }
        for (int i = 0; i < kOwnRing; ++i) {
            mbarrier_init(own_full + 8 * i, 1);
            mbarrier_init(own_empty + 8 * i, kWarps * kArrivals);
        }
        for (int i = 0; i < kHandovers; ++i) {
            mbarrier_init(handed + 8 * i, kWarps * kArrivals);
            mbarrier_init(taken + 8 * i, 4 * kArrivals);
        }
        visits.init(kWarps + 4);
        mbarrier_publish();
    }
    __syncthreads();

    const auto keys_of = [](const Visit& visit) {
        return Range{visit.block.tile * kRows, min(visit.block.tile * kRows + kRows, visit.place.keys)};
    };
    const auto steps_of = [&](const Visit& visit) {
        const Mask mask(n, visit.place, visit.block.batch, visit.head);
        const Range keys = keys_of(visit);
        Range tiles = covering(mask.queries_of(keys.begin, keys.end), kColumns);
        if constexpr (Mask::kListed) tiles.meet(visit.block.streamed);
        return mask.steps_of(keys.begin, tiles);
    };
    const auto walk_of = [&](const Visit& visit) {
        return Walk(Mask(n, visit.place, visit.block.batch, visit.head), keys_of(visit), visit.steps);
    };

    if (group == kGroups + 1) {
        registers_lower<SKL_PRODUCER_REGISTERS>();
        if (threadIdx.x >= kThreads + 160) return;
        const TensorMap& other_q = kSide == kTeacher ? all.student_q : all.teacher_q;
        const TensorMap& other_k = kSide == kTeacher ? all.student_k : all.teacher_k;
        const TensorMap& own_q = kSide == kTeacher ? all.teacher_q : all.student_q;
        const TensorMap& own_k = kSide == kTeacher ? all.teacher_k : all.student_k;
        const Workspace space(all.fused);
        RingCursor<1> at_own_keys, at_keys;
        RingCursor<kOtherRing> at_other;
        RingCursor<kOwnRing> at_own;
        const int own_group = kSide == kTeacher ? n.teacher_group : n.student_group;
        const int other_group = kSide == kTeacher ? n.student_group : n.teacher_group;
        const int own_heads = n.heads / own_group, pairs = n.batch * own_heads;
        const u32 portions = pairs * n.tiles;
        for (u32 index = blockIdx.x; index < portions; index = take_portion(space.taken)) {
            Visit next;
            next.block = block_of(index, n, own_heads, pairs, false);
            next.head = next.block.head * own_group;
            next.place = Mask::locate(n, next.head, next.block);
            if (Mask::kRagged && next.block.tile * kRows >= next.place.keys) continue;
            if (Mask::kListed && !settle_shares(next.block, args)) continue;
            next.lift = 1.f;
            if constexpr (kNarrow) {
                int exponent = kLowestExponent;
                for (int i = 0; i < own_group; ++i) {
                    const int* const exponents = space.exponents + space.entry(next.block.batch, next.head + i, next.place, 0);
                    for (int j = lane; j < ceil_div(next.place.queries, kColumns); j += 32) exponent = max(exponent, exponents[j]);
                }
                next.lift = power_of_two(kTopExponent - __reduce_max_sync(~0u, exponent));
            }
            for (;; ++next.head) {
                next.first = next.head % own_group == 0;
                next.last = (next.head + 1) % own_group == 0;
                next.comes = next.first || next.head % other_group == 0;
                next.goes = next.last || (next.head + 1) % other_group == 0;
                next.steps = steps_of(next);
                next.own_parity = at_own_keys.parity;
                next.other_parity = at_keys.parity;
                // What is in shared memory needs no registers.
                const Visit& visit = visits.write(next);
                const Place& place = visit.place;
                const int batch = visit.block.batch, key = place.first_key + visit.block.tile * kRows;
                if (visit.first) {
                    warp_wait(own_keys_free, at_own_keys.parity ^ 1);
                    if (lane == 0) {
                        mbarrier_expect(own_keys, Own::bytes(kRows));
                        load_chunks<kRows>(base + kOwnKeysAt, own_k, own_keys, 0, Own::kChunks, key, visit.block.head, batch);
                    }
                    at_own_keys.advance();
                }
                if (visit.comes) {
                    warp_wait(keys_empty, at_keys.parity ^ 1);
                    if (lane == 0) {
                        mbarrier_expect(keys_full, Other::bytes(kRows));
                        load_chunks<kRows>(base + kOtherKeysAt, other_k, keys_full, 0, Other::kChunks, key, visit.head / other_group, batch);
                    }
                    at_keys.advance();
                }
                const float* const terms = space.terms + space.entry(batch, visit.head, place, 0) * Terms::kFloats;
                for (Walk walk = walk_of(visit); walk.more(); walk.next()) {
                    const int query = visit.place.first_query + walk.row();
                    warp_wait(other_empty + 8 * at_other.slot, at_other.parity ^ 1);
                    if (lane == 0) {
                        const u32 other = other_full + 8 * at_other.slot;
                        mbarrier_expect(other, kOtherTileBytes);
                        load_chunks<kColumns>(base + kOtherAt + at_other.slot * kOtherTileBytes, other_q, other, 0, Other::kChunks, query,
                                              visit.head, batch);
                    }
                    at_other.advance();
                    warp_wait(own_empty + 8 * at_own.slot, at_own.parity ^ 1);
                    if (lane == 0) {
                        const u32 own = own_full + 8 * at_own.slot;
                        mbarrier_expect(own, kOwnTileBytes + kTermBytes);
                        load_chunks<kColumns>(base + kOwnAt + at_own.slot * kOwnTileBytes, own_q, own, 0, Own::kChunks, query, visit.head,
                                              batch);
                        bulk_load(base + kTermsAt + at_own.slot * kTermBytes, terms + static_cast<i64>(walk.tile()) * Terms::kFloats,
                                  kTermBytes, own);
                    }
                    at_own.advance();
                }
                if (visit.last) break;
                next = visit;
            }
        }
        Visit none{};
        none.head = -1;
        visits.write(none);
        return;
    }

    if (group == kGroups) {
        registers_lower<SKL_DQ_REGISTERS>();
        const int thread = threadIdx.x & 127;
        const u64 gradients = swizzled_descriptor(base + kHandoverAt), keys = swizzled_descriptor(base + kOwnKeysAt, kRows * 128);
        const u32 staging = base + kStagingAt;
        const Workspace space(all.fused);
        RingCursor<kHandovers> at;
        RingCursor<kStagings> stage;
        for (;;) {
            const Visit& visit = visits.read();
            if (visit.head < 0) break;
            if (visit.first) {
                mbarrier_wait(own_keys, visit.own_parity);
                clear_non_finite<E, kRows, Own::kChunks>(base + kOwnKeysAt, 1 + group);
            }
            float* const head_sums = space.sums + space.entry(visit.block.batch, visit.head, visit.place, 0) * Workspace::kSums;
            bool done = false;  // with the portion's keys, before the last sums are on their way
            for (Walk walk = walk_of(visit); walk.more(); walk.next()) {
                float* const sums = head_sums + static_cast<i64>(walk.tile()) * Workspace::kSums;
#pragma unroll
                for (int first = 0; first < Own::kChunks; first += kWide) {
                    float part[kWide < Own::kChunks ? 8 * kWide : kOutTiles][4];  // kColumns queries x so many columns of dQ
                    const bool all = first + kWide >= Own::kChunks;
#pragma unroll
                    for (int sub = 0; sub < kSubs; ++sub) {
                        mbarrier_wait(handed + 8 * at.slot, at.parity);
                        wgmma_fence();
#pragma unroll
                        for (int k = 0; k < kSubRows / 16; ++k)
                            wgmma<Own::kHalf, 1, 1>(part, gradients + static_cast<u64>((at.slot * kHandoverBytes + k * 2048) >> 4),
                                                    keys + ((first * kRows * 128 + (sub * kSubRows + 16 * k) * 128) >> 4), sub + k > 0);
                        wgmma_commit();
                        wgmma_wait<0>();
                        settle(part);
                        if (!all) continue;
                        warp_arrive(taken + 8 * at.slot);
                        at.advance();
                    }
                    if (all && visit.last && walk.at_last()) {
                        warp_arrive(own_keys_free);
                        done = true;
                    }
#pragma unroll
                    for (int c = first; c < first + kWide; ++c) {
                        // The warp's own part of the buffer: no other warp is waited for.
                        const u32 mine = staging + stage.slot * kStagingBytes + thread / 32 * (kStagingBytes / 4);
                        if (lane == 0) bulk_wait_read<kStagings - 1>();
                        __syncwarp();
#pragma unroll
                        for (int d = 0; d < sum_tiles(c); ++d) store_float4(mine + (d * 32 + lane) * 16, part[8 * (c - first) + d]);
                        async_fence();
                        __syncwarp();
                        if (lane == 0) {
                            bulk_add(sums + sum_index(c, 0, thread), mine, sum_tiles(c) * 512);
                            bulk_commit();
                        }
                        stage.advance();
                    }
                }
            }
            if (visit.last && !done) warp_arrive(own_keys_free);
            visits.over();
        }
        if (lane == 0) bulk_wait();
        return;
    }

    registers_raise<SKL_CONSUMER_REGISTERS>();
    // Of every kSubRows keys the consumer has 64, and of these the warp 16.
    const int warp_row = 64 * group + 16 * ((threadIdx.x / 32) & 3);
    const float ct = args.teacher_scale, cs = args.student_scale;
    // Where this lane puts its part of dX^T: row lane % 16 of the warp's 16 keys, one half of 16 queries.
    const int hand_row = warp_row + (lane & 15);
    const u32 hand_start = base + kHandoverAt + hand_row * 128 + (((lane >> 4) ^ (hand_row & 7)) << 4);

    const u64 keys_other = swizzled_descriptor(base + kOtherKeysAt + group * 64 * 128);
    const u64 keys_own = swizzled_descriptor(base + kOwnKeysAt + group * 64 * 128);
    const u64 ring_other = swizzled_descriptor(base + kOtherAt), ring_own = swizzled_descriptor(base + kOwnAt);
    const u64 ring_own_rows = swizzled_descriptor(base + kOwnAt, kColumns * 128);
    OtherCursor<> at_other;
    RingCursor<kOwnRing> at_own;
    RingCursor<kHandovers> at_handed;

    float out[kSubs][kOutTiles][4];
    Scores other, own;
    HeldRows<kHeld> held[kSubs];
    float lift = 1.f;

    const auto await_other = [&] { mbarrier_wait(other_full + 8 * at_other.place(), at_other.phase()); };
    const auto await_own = [&] { mbarrier_wait(own_full + 8 * at_own.slot, at_own.parity); };
    const auto multiply_other = [&](int sub) {
        wgmma_fence();
        const u64 tile = ring_other + static_cast<u64>(at_other.place() * (kOtherTileBytes >> 4));
        multiply_rows<Other, kRows, Other::kChunks>(other, keys_other + static_cast<u64>(sub * (kSubRows * 128 >> 4)), tile, 0);
        wgmma_commit();
    };
    const auto multiply_own = [&](auto part) {
        constexpr int kSub = decltype(part)::value;
        wgmma_fence();
        const u64 tile = ring_own + static_cast<u64>(at_own.slot * (kOwnTileBytes >> 4));
        multiply_rows<Own, kRows, Own::kChunks>(own, keys_own + static_cast<u64>(kSub * (kSubRows * 128 >> 4)), tile, 0, 0, held[kSub]);
        wgmma_commit();
    };
    const auto other_done = [&](int sub) {
        if (sub < kSubs - 1) return;
        warp_arrive(other_empty + 8 * at_other.place());
        at_other.advance();
    };
    const auto own_done = [&](int slot, int sub) {
        if (sub == kSubs - 1) warp_arrive(own_empty + 8 * slot);
    };
    // Consumers take turns at issuing products: in step with each other they would compute exponentials together and then
    // wait for the matrix unit together.
    const auto await_turn = [&] { barrier_sync(kTurnBarrier + group, kThreads); };
    const auto pass_turn = [&] { barrier_arrive(kTurnBarrier + 1 - group, kThreads); };
    const auto hand_at = [&] {
        const u32 hand = hand_start + at_handed.slot * kHandoverBytes;
        if constexpr (kNarrow) mbarrier_wait(taken + 8 * at_handed.slot, at_handed.parity ^ 1);
        return hand;
    };
    const auto handed_over = [&] {
        async_fence();
        __syncwarp();
        warp_arrive(handed + 8 * at_handed.slot);
        at_handed.advance();
    };
    // Hands dX over and issues dK += dX^T Q for the tile in the given slot of the ring.
    const auto accumulate = [&](float (&sum)[kOutTiles][4], const Gradients& dx, u32 hand, int slot) {
        if constexpr (!kNarrow) {
            mbarrier_wait(taken + 8 * at_handed.slot, at_handed.parity ^ 1);
#pragma unroll
            for (int k = 0; k < kTiles / 2; ++k) hand_over(hand, k, dx[k].r[0]);
        }
        handed_over();
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kTiles / 2; ++k)
            wgmma<Own::kHalf, 1>(sum, dx[k].r[0], ring_own_rows + static_cast<u64>((slot * kOwnTileBytes + k * 2048) >> 4), 1);
        wgmma_commit();
    };
    // One step on a full tile; with MORE the next one is full too, and its products are done afterwards. They start before
    // dX is handed over, which takes as long. No arrival of a single lane stands last: without a wait behind it the compiler
    // takes the lanes for parted, and keeps descriptors out of uniform registers, at 50 instructions a step.
    const auto step = [&](auto part, auto more) {
        constexpr int kSub = decltype(part)::value, kNextSub = (kSub + 1) % kSubs;
        constexpr bool kMore = decltype(more)::value;
        const int slot = at_own.slot;
        if (kSub == kSubs - 1) at_own.advance();
        const u32 hand = hand_at();
        Gradients dx;
        logit_gradients(dx, hand, other, own, base + kTermsAt + slot * kTermBytes, lift, Everything{}, ct, cs);
        if constexpr (kMore && kEarlyWaits) {
            await_other();
            await_own();
        }
        await_turn();
        if constexpr (kMore) {
            if constexpr (!kEarlyWaits) await_other();
            multiply_other(kNextSub);
            if constexpr (!kEarlyWaits) await_own();
            multiply_own(Value<kNextSub>{});
        }
        accumulate(out[kSub], dx, hand, slot);
        if constexpr (kMore) {
            wgmma_wait<1>();
            pass_turn();
            other_done(kNextSub);
            wgmma_wait<0>();
            own_done(slot, kSub);
            settle(other);
            settle(own);
            settle(out[kSub]);
        } else {
            pass_turn();
            wgmma_wait<0>();
            settle(out[kSub]);
            own_done(slot, kSub);
        }
    };
    const auto partial_step = [&](auto part, const Walk& walk, const Visit& visit) {
        constexpr int kSub = decltype(part)::value;
        const int slot = at_own.slot;
        if (kSub == kSubs - 1) at_own.advance();
        const u32 hand = hand_at();
        Gradients dx;
        const int first_key = visit.block.tile * kRows + warp_row + Accumulators::first_row(lane) + kSub * kSubRows;  // from memory: registers are dear
        const auto visible = [&](int column, int row) { return walk.mask.visible(walk.row() + column, first_key + row); };
        logit_gradients(dx, hand, other, own, base + kTermsAt + slot * kTermBytes, lift, visible, ct, cs);
        clear_non_finite<E, kColumns, Own::kChunks>(base + kOwnAt + slot * kOwnTileBytes, 1 + group);
        await_turn();
        accumulate(out[kSub], dx, hand, slot);
        pass_turn();
        wgmma_wait<0>();
        settle(out[kSub]);
        own_done(slot, kSub);
    };
    // Nothing of the consumer's part is visible: no product, and zeros for the queries.
    const auto idle_step = [&](int sub) {
        const int slot = at_own.slot;
        await_other();  // or two arrivals could fall into one phase
        await_own();
        if (sub == kSubs - 1) at_own.advance();
        mbarrier_wait(taken + 8 * at_handed.slot, at_handed.parity ^ 1);
        const u32 zeros[4] = {0, 0, 0, 0};
#pragma unroll
        for (int k = 0; k < kTiles / 2; ++k) hand_over(hand_start + at_handed.slot * kHandoverBytes, k, zeros);
        handed_over();
        await_turn();
        pass_turn();
        other_done(sub);
        own_done(slot, sub);
    };

    // dK of the portion, by who has all of it.
    const auto write_keys = [&](const Visit& visit) {
        const Block& block = visit.block;
        using Sums = float[kSubs * kOutTiles][4];
        if constexpr (Mask::kListed) {
            const int own_heads = n.heads / (kSide == kTeacher ? n.teacher_group : n.student_group);
            if (block.shares > 1 && !add_shares(reinterpret_cast<Sums&>(out), block, block.batch * own_heads + block.head, args)) return;
        }
        const float factor = gradient_factor<kSide>(args.out_scale) / lift;
#pragma unroll
        for (int i = 0; i < 2 * kSubs; ++i) {
            const int sub = i / 2, half = i % 2, k = block.tile * kRows + warp_row + Accumulators::first_row(lane) + sub * kSubRows + Accumulators::below(half);
            if (k >= visit.place.keys) continue;
            const u64 address = args.out.pointer +
                                (block.batch * args.out.batch + block.head * args.out.head + (visit.place.first_key + k) * args.out.row +
                                 Accumulators::first_column(lane)) * E::kBytes;
#pragma unroll
            for (int d = 0; d < Own::kDim / 8; ++d)
                E::store_pair(address + 8 * d * E::kBytes, out[sub][d][Accumulators::element(half, 0)] * factor,
                              out[sub][d][Accumulators::element(half, 1)] * factor);
        }
    };

    if (group == 1) pass_turn();
    for (;;) {
        const Visit& visit = visits.read();
        if (visit.head < 0) return;
        if (visit.first) {
            if constexpr (kNarrow) lift = visit.lift;
#pragma unroll
            for (int i = 0; i < 4 * kSubs * kOutTiles; ++i) out[i / (4 * kOutTiles)][i / 4 % kOutTiles][i % 4] = 0.f;
            mbarrier_wait(own_keys, visit.own_parity);
#pragma unroll
            for (int sub = 0; sub < kSubs; ++sub) held[sub].load<kRows>(base + kOwnKeysAt, sub * kSubRows + warp_row);
        }
        if (visit.comes) warp_wait(keys_full, visit.other_parity);
        // Steps go over tiles and, within a tile, over the consumer's keys. Runs of steps that see everything are pipelined.
        // What is decided between steps is decided before products are under way.
        Walk walk = walk_of(visit);
        int sub = 0;
        const auto first = [&] { return (kReadAgain ? visit.block.tile * kRows : walk.rows.begin) + 64 * group + sub * kSubRows; };
        const auto advance = [&] {
            if (++sub < kSubs) return;
            sub = 0;
            walk.next();
        };
        const auto next_is_full = [&] {
            advance();
            return walk.more() && walk.full(first(), first() + 64);
        };
        while (walk.more()) {
            if (first() >= visit.place.keys || !walk.sees(first(), first() + 64)) {
                idle_step(sub);
                advance();
                continue;
            }
            await_other();
            multiply_other(sub);
            await_own();
            if (sub == 0)
                multiply_own(Value<0>{});
            else
                multiply_own(Value<kSubs - 1>{});
            wgmma_wait<0>();
            settle(other);
            settle(own);
            other_done(sub);
            if (!walk.full(first(), first() + 64)) {
                if (sub == 0)
                    partial_step(Value<0>{}, walk, visit);
                else
                    partial_step(Value<kSubs - 1>{}, walk, visit);
                advance();
                continue;
            }
            for (bool second = sub > 0;; second = false) {
                if (!second) {
                    if (!next_is_full()) {
                        step(Value<0>{}, Value<0>{});
                        break;
                    }
                    step(Value<0>{}, Value<1>{});
                }
                if constexpr (kSubs > 1) {
                    if (!next_is_full()) {
                        step(Value<1>{}, Value<0>{});
                        break;
                    }
                    step(Value<1>{}, Value<1>{});
                }
            }
        }
        if (visit.goes) warp_arrive(keys_empty);
        if (visit.last) {
            warp_arrive(own_keys_free);
            write_keys(visit);
        }
        visits.over();
    }
}

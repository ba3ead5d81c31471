// What the roles of fused_sm90.cu share: the two sides, shared memory with its barriers, the workspace, and how a visit is walked.
#pragma once
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "common/sizes.cuh"
#include "pipeline/barriers.cuh"
#include "pipeline/partials.cuh"
#include "pipeline/ring.cuh"
#include "pipeline/work_tiles.cuh"
#include "tile/fragment.cuh"
#include "tile/schedule.cuh"
#include "tile/swizzled.cuh"
#include "@mask"
#include "@divergence"
#include "@score"
#include "tile/terms.cuh"

using Teacher = Operand<SKL_T_ELEMENT, SKL_T_DIM>;
using Student = Operand<SKL_S_ELEMENT, SKL_S_DIM>;
using Own = OfSide<kSide, Teacher, Student>::Type;
using Other = OfSide<1 - kSide, Teacher, Student>::Type;
using E = Element<Own::kCode>;
using Terms = TermLayout<kColumns>;

constexpr int kGroups = kWarps / 4;
constexpr int kTiles = kColumns / 8;
constexpr int kOwnRing = SKL_STAGES, kOtherRing = SKL_OTHER_STAGES;
constexpr int kHandovers = SKL_HANDOVERS;  // tiles of dX between the consumers and dQ
constexpr int kStagings = SKL_STAGINGS;    // buffers between dQ and the copy engine
constexpr bool kNarrow = E::kNarrowExponent;         // gradients of logits are scaled by powers of two

constexpr int kHelperThreads = 128;  // of the kernels before and after
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

// Barriers in shared memory, as the table of fused_sm90.cu has them; of rings the first.
enum Barrier {
    kOwnKeys,
    kOwnKeysFree,
    kKeysFull,
    kKeysEmpty,
    kOtherFull,
    kOtherEmpty = kOtherFull + kOtherRing,
    kOwnFull = kOtherEmpty + kOtherRing,
    kOwnEmpty = kOwnFull + kOwnRing,
    kHanded = kOwnEmpty + kOwnRing,
    kTaken = kHanded + kHandovers,
    kVisitRing = kTaken + kHandovers,
    kBarriers = kVisitRing + kVisitBarriers
};
constexpr int kVisitsAt = kBarriersAt + 8 * kBarriers;

static_assert(kOutTiles <= 16, "plan: one product of the matrix unit makes at most 128 columns of dK");
static_assert(Own::kChunks % kWide == 0, "plan: products of dQ are equally wide");
static_assert(kColumns == 64 && kGroups == 2, "plan: two consumer warpgroups compute 64 x 64 scores each");
static_assert(kSubs == 1 || (kSubs == 2 && Own::kChunks == 1), "plan: registers hold two gradients of up to 64 columns");
static_assert(1024 + kVisitsAt + kVisits * sizeof(Visit) == SKL_SMEM_BYTES, "plan: smem_bytes");
static_assert(kWarpgroup + kGroups + 1 <= kTurn, "the query gradient's warpgroup has a barrier too");

// Who asks: the warpgroup and the lane, found once for all roles.
struct Thread {
    int group, lane;
};

// Shared memory, as addresses.
struct Layout {
    u32 base;
    __device__ explicit Layout(const unsigned char* memory) : base((static_cast<u32>(__cvta_generic_to_shared(memory)) + 1023) & ~1023u) {}

    __device__ u32 barrier(Barrier which, int slot = 0) const { return base + (kBarriersAt + 8 * which) + 8 * slot; }
    __device__ u32 other_tile(int slot) const { return base + kOtherAt + slot * kOtherTileBytes; }
    __device__ u32 own_tile(int slot) const { return base + kOwnAt + slot * kOwnTileBytes; }
    __device__ u32 terms(int slot) const { return base + kTermsAt + slot * kTermBytes; }
    __device__ VisitRing visits(unsigned char* memory) const {
        const u32 offset = base - static_cast<u32>(__cvta_generic_to_shared(memory)) + kVisitsAt;
        return {reinterpret_cast<Visit*>(memory + offset), barrier(kVisitRing)};
    }

    // One thread, before anybody uses a barrier.
    __device__ void init() const {
        mbarrier_init(barrier(kOwnKeys), 1);
        mbarrier_init(barrier(kOwnKeysFree), (kWarps + 4) * kArrivals);
        mbarrier_init(barrier(kKeysFull), 1);
        mbarrier_init(barrier(kKeysEmpty), kWarps * kArrivals);
        for (int i = 0; i < kOtherRing; ++i) {
            mbarrier_init(barrier(kOtherFull, i), 1);
            mbarrier_init(barrier(kOtherEmpty, i), kWarps * kArrivals);
        }
        for (int i = 0; i < kOwnRing; ++i) {
            mbarrier_init(barrier(kOwnFull, i), 1);
            mbarrier_init(barrier(kOwnEmpty, i), kWarps * kArrivals);
        }
        for (int i = 0; i < kHandovers; ++i) {
            mbarrier_init(barrier(kHanded, i), kWarps * kArrivals);
            mbarrier_init(barrier(kTaken, i), 4 * kArrivals);
        }
    }
};

// Blocks side by side should stream the same rows, or they all come from memory. Shares of lists, and the lists of causal
// patterns, have the end in common.
using Walk = Cursor<Mask, Mask::kListed ? -1 : 1>;

// The block's keys of a visit, the steps past them, and the walk over these.
__device__ inline Range keys_of(const Visit& visit) {
    return {visit.block.tile * kRows, min(visit.block.tile * kRows + kRows, visit.place.keys)};
}
__device__ inline Range steps_of(const Visit& visit, const Extents& n) {
    const Mask mask(n, visit.place, visit.block.batch, visit.head);
    const Range keys = keys_of(visit);
    Range tiles = covering(mask.queries_of(keys.begin, keys.end), kColumns);
    if constexpr (Mask::kListed) tiles.meet(visit.block.streamed);
    return mask.steps_of(keys.begin, tiles);
}
__device__ inline Walk walk_of(const Visit& visit, const Extents& n) {
    return Walk(Mask(n, visit.place, visit.block.batch, visit.head), keys_of(visit), visit.steps);
}

// What a narrow type's gradients without g are multiplied by, a power of two per row, and what takes it back.
__device__ inline int plain_exponent(const RowTerms& x) { return kTopExponent - 1 - exponent_of(Logit::bound(x.value)); }
__device__ inline float plain_scale(const RowTerms& x) { return power_of_two(plain_exponent(x)); }
__device__ inline float plain_unscale(const RowTerms& x) { return power_of_two(-plain_exponent(x)); }

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

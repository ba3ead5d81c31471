// What the roles of fused_sm90.cu share: the two sides, shared memory with its barriers, the workspace, and how a work
// item is walked.
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
#include "tile/packed_rows.cuh"
#include "tile/schedule.cuh"
#include "tile/shares.cuh"
#include "tile/swizzled.cuh"
#include "@mask"
#include "@divergence"
#include "@score"
#include "tile/row_stats.cuh"

using Teacher = SwizzledTile<SKL_T_ELEMENT, SKL_T_DIM>;
using Student = SwizzledTile<SKL_S_ELEMENT, SKL_S_DIM>;
using GradSide = OfSide<kSide, Teacher, Student>::Type;
using ScoreSide = OfSide<1 - kSide, Teacher, Student>::Type;
using E = Element<GradSide::kCode>;
#ifndef SKL_WIDE_QUERIES
#define SKL_WIDE_QUERIES 0
#endif
constexpr bool kWideQueries = SKL_WIDE_QUERIES;
using KeyElement = Written<GradSide::kCode>;
using QueryElement = Written<GradSide::kCode, kWideQueries>;
using Stats = RowStatsLayout<kColumns>;

constexpr int kGroups = kWarps / 4;
constexpr int kTiles = kColumns / 8;
constexpr int kGradRing = SKL_STAGES, kScoreRing = SKL_SCORE_STAGES;
constexpr int kDsStages = SKL_DS_STAGES;      // tiles of dS between the consumers and dQ
constexpr int kStagings = SKL_STAGINGS;       // buffers between dQ and the copy engine
constexpr bool kDirect = SKL_DIRECT;          // one work tile has all keys of a head: what is made of dQ is all of it
constexpr bool kNarrow = E::kNarrowExponent;  // gradients of logits are scaled by powers of two

constexpr int kHelperThreads = SKL_HELPER_THREADS;  // of the kernels before and after
constexpr int kOutTiles = 2 * GradSide::kSteps;     // tiles of 8 columns of dK and dQ

// Where whole tiles of the score side do not fit, a stage of its ring is a piece: 64 columns of 64 rows. Of the keys
// kKept chunks of columns stay, the pieces of the others come with those of the queries they meet.
constexpr bool kPieces = SKL_PIECES;
constexpr int kKept = SKL_KEPT_CHUNKS;
constexpr int kTilePieces = ScoreSide::kChunks + (ScoreSide::kChunks - kKept) * kGroups;  // of a tile of queries
constexpr int kKeyBox = kKept < ScoreSide::kChunks ? 64 : kRows;  // keys that are copied at a time

// Whether the score side is given: a stage of its ring has the numbers of a tile's pairs, and of keys there are none.
enum : bool { kGiven = ScoreSide::kDim == 0 };
enum : int { kBoxes = ScoreSide::boxes(kRows) };

constexpr int kGradTileBytes = GradSide::bytes(kColumns);
constexpr int kScoreStageBytes = kGiven    ? kBoxes * ScoreSide::kBoxBytes
                                 : kPieces ? kColumns * 128
                                           : ScoreSide::bytes(kColumns);
constexpr int kHeld = SKL_HELD_STEPS;          // of the consumers' keys of the grad side
constexpr bool kEarlyWaits = SKL_EARLY_WAITS;  // for the next tile's copies, before taking the turn
constexpr bool kReadAgain = SKL_READ_AGAIN;  // what shared memory has, in every step, where no register is left for it
constexpr int kWide = SKL_WIDE_CHUNKS;       // chunks of dQ that one product makes
constexpr int kSubs = kWarpTiles;            // a consumer works on 64 of every 128 keys of the block
constexpr int kSubRows = kRows / kSubs;
constexpr int kDsBytes = kSubRows * kColumns * 2;
// Of 8 columns of dQ, that a buffer to the copy engine takes. No constexpr int: one symbol more, and the compiler
// orders the instructions of the whole kernel anew: D = 64, causal, took 0.329 ms instead of 0.311 on an H200.
enum : int { kStagingTiles = SKL_STAGING_TILES };
enum : bool { kCarry = SKL_CARRY };  // the products of a step behind a partial tile start before that is done with
constexpr int kStagingBytes = 8 * kStagingTiles * kColumns * (kDirect ? 2 : 4);
constexpr int kStatsBytes = 4 * Stats::kFloats;

// Offsets in shared memory.
constexpr int kScoreKeysAt = 0;
constexpr int kGradKeysAt = kScoreKeysAt + kKept * kRows * 128;
constexpr int kScoreAt = kGradKeysAt + GradSide::bytes(kRows);
constexpr int kGradAt = kScoreAt + kScoreRing * kScoreStageBytes;
constexpr int kDsAt = kGradAt + kGradRing * kGradTileBytes;
constexpr int kStagingAt = kDsAt + kDsStages * kDsBytes;
constexpr int kStatsAt = kStagingAt + kStagings * kStagingBytes;
constexpr int kBarriersAt = kStatsAt + kGradRing * kStatsBytes;

// Barriers in shared memory, as the table of fused_sm90.cu has them; of rings the first.
enum Barrier {
    kGradKeys,
    kGradKeysFree,
    kScoreKeysFull,
    kScoreKeysEmpty,
    kScoreFull,
    kScoreEmpty = kScoreFull + kScoreRing,
    kGradFull = kScoreEmpty + kScoreRing,
    kGradEmpty = kGradFull + kGradRing,
    kDsFull = kGradEmpty + kGradRing,
    kDsEmpty = kDsFull + kDsStages,
    kWorkItemRing = kDsEmpty + kDsStages,
    kBarriers = kWorkItemRing + kWorkItemBarriers
};
constexpr int kWorkItemsAt = kBarriersAt + 8 * kBarriers;  // behind their ring's barriers, the last ones

static_assert(!(kPacked && kDirect), "plan: packed tiles of queries have sums");
static_assert(!(kWideQueries && kDirect), "plan: what is written at once goes through a buffer of 16-bit numbers");
static_assert(kStagingTiles == 4 || kStagingTiles == 8, "plan: a chunk of dQ goes in one buffer or two");
static_assert(kOutTiles <= 24, "plan: registers hold at most 192 columns of dK");
static_assert(GradSide::kChunks % kWide == 0, "plan: products of dQ are equally wide");
static_assert(kColumns == 64 && kGroups == 2, "plan: two consumer warpgroups compute 64 x 64 scores each");
static_assert(!kGiven || (kSubs == 1 && !kPieces && !kPacked), "plan: no boxes of several heads");
static_assert(kSubs == 1 || (kSubs == 2 && GradSide::kChunks == 1),
              "plan: registers hold two gradients of up to 64 columns");
static_assert(kPieces ? kSubs == 1 && kScoreRing > kGroups : kKept == ScoreSide::kChunks,
              "plan: a piece of queries meets one of each consumer's keys");
static_assert(1024 + kWorkItemsAt + kWorkItems * sizeof(WorkItem) == SKL_SMEM_BYTES, "plan: smem_bytes");
static_assert(kWarpgroup + kGroups + 1 <= kTurn, "the query gradient's warpgroup has a barrier too");

// Who asks: the warpgroup and the lane, found once for all roles.
struct Thread {
    int group, lane;
};

// Shared memory, as addresses.
struct Layout {
    u32 base;
    __device__ explicit Layout(const unsigned char* memory)
        : base((static_cast<u32>(__cvta_generic_to_shared(memory)) + 1023) & ~1023u) {}

    __device__ u32 barrier(Barrier which, int slot = 0) const { return base + (kBarriersAt + 8 * which) + 8 * slot; }
    __device__ u32 score_stage(int slot) const { return base + kScoreAt + slot * kScoreStageBytes; }
    __device__ u32 grad_tile(int slot) const { return base + kGradAt + slot * kGradTileBytes; }
    __device__ u32 stats(int slot) const { return base + kStatsAt + slot * kStatsBytes; }
    __device__ WorkItemRing items() const { return {barrier(kWorkItemRing)}; }

    // One thread, before anybody uses a barrier.
    __device__ void init() const {
        mbarrier_init(barrier(kGradKeys), 1);
        mbarrier_init(barrier(kGradKeysFree), (kWarps + 4) * kArrivals);
        mbarrier_init(barrier(kScoreKeysFull), 1);
        mbarrier_init(barrier(kScoreKeysEmpty), kWarps * kArrivals);
        for (int i = 0; i < kScoreRing; ++i) {
            mbarrier_init(barrier(kScoreFull, i), 1);
            mbarrier_init(barrier(kScoreEmpty, i), kWarps * kArrivals);
        }
        for (int i = 0; i < kGradRing; ++i) {
            mbarrier_init(barrier(kGradFull, i), 1);
            mbarrier_init(barrier(kGradEmpty, i), kWarps * kArrivals);
        }
        for (int i = 0; i < kDsStages; ++i) {
            mbarrier_init(barrier(kDsFull, i), kWarps * kArrivals);
            mbarrier_init(barrier(kDsEmpty, i), 4 * kArrivals);
        }
    }
};

// Blocks side by side should stream the same rows, or they all come from memory. Shares of lists, and the lists of
// causal patterns, have the end in common.
using Walk = Cursor<Mask, Mask::kListed ? -1 : 1>;

// The keys of a work tile, the steps past them, and the walk over these.
__device__ inline Range keys_of(const Segment& segment, int tile) {
    return {tile * kRows, min(tile * kRows + kRows, segment.keys)};
}
__device__ inline Range keys_of(const WorkItem& item) { return keys_of(item.segment, item.block.tile); }
__device__ inline Range steps_of(const WorkItem& item, const Extents& n) {
    const Mask mask(n, item.segment, item.block.batch, item.head);
    const Range keys = keys_of(item);
    Range tiles = covering(mask.queries_of(keys.begin, keys.end), kColumns);
    if constexpr (Mask::kListed) tiles.intersect(item.block.streamed);
    return mask.steps_of(keys.begin, tiles);
}
__device__ inline Walk walk_of(const WorkItem& item, const Extents& n) {
    return Walk(Mask(n, item.segment, item.block.batch, item.head), keys_of(item), item.steps);
}

// A row of a tile of queries of a head or pack: whose it is, and which of its queries; beyond these where none is.
struct TileRow {
    int head, query;
    __device__ TileRow(const FusedArgs& args, const Segment& segment, int head_or_pack, int tile, int row)
        : head(first_head_of(head_or_pack, args.heads_together) + packed_head(row)),
          query(tile * kColumns + packed_query(row)) {
        if (kPacked && packed_head(row) >= heads_of_pack(head_or_pack, args.heads_together)) {
            head = first_head_of(head_or_pack, args.heads_together);
            query = segment.queries;
        }
    }
};

// What a narrow type's gradients without g are multiplied by, a power of two per row, and what takes it back.
__device__ inline int plain_exponent(const RowStats& x) {
    return kTopExponent - 1 - exponent_of(Logit::bound(x.value));
}
__device__ inline float plain_scale(const RowStats& x) { return power_of_two(plain_exponent(x)); }
__device__ inline float plain_unscale(const RowStats& x) { return power_of_two(-plain_exponent(x)); }

static_assert(FusedWorkspace::kSums == (kDirect ? 0 : kColumns * GradSide::kDim) &&
                  FusedWorkspace::kRowStats == Stats::kFloats,
              "plan: workspace");

struct Workspace : FusedWorkspace {
    int heads, tiles;

    __device__ explicit Workspace(const FusedArgs& args) {
        const Extents& n = args.base.n;
        heads = packs_of(n.heads, args.heads_together);
        tiles = kPacked ? 1 : row_tiles(n.queries, kColumns, n.sequences);
        locate(args.workspace, static_cast<i64>(n.batch * heads) * tiles);
    }
    // Of a tile of 64 queries of a head or pack, counted in its segment.
    __device__ i64 entry(int b, int h, const Segment& segment, int tile) const {
        return static_cast<i64>(b * heads + h) * tiles + segment.first_query / kColumns + segment.sequence + tile;
    }
};

// Where the gradient of query q of a segment has a column.
__device__ inline u64 query_address(const Tensor4& out, int b, int h, const Segment& segment, int q, int column) {
    return out.pointer +
           (b * out.batch + h * out.head + (segment.first_query + q) * out.row + column) * QueryElement::kBytes;
}

// Tiles of 8 columns in a 64-column chunk of the sums, and where thread `thread` of the dQ warpgroup has its four
// elements of such a tile. A warp's part of a chunk is contiguous.
__device__ constexpr int sum_tiles(int chunk) { return chunk < GradSide::kDim / 64 ? 8 : GradSide::kDim % 64 / 8; }
__device__ inline int sum_index(int chunk, int tile, int thread) {
    return chunk * 64 * kColumns + ((thread / 32 * sum_tiles(chunk) + tile) * 32 + thread % 32) * 4;
}

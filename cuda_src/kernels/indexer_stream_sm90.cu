// The indexer's score tile (indexer_score/score.cuh has what it is) where queries of heads stream past keys that stay:
// tensor-memory copies, products of warpgroups, blocks that go from one piece of work to the next.
//
//   item       kRows query rows of one batch entry and group, and kSplitKeys of the keys that they see
//   producer   one warp; finds items, has keys on their way for as many heads as read them, and streams the queries of
//              all heads through a ring of pieces, each some chunks of 64 columns of kRows rows
//   consumers  two warpgroups, which have the same rows and each a half of a tile's keys: a head's queries are read
//              from memory once for both, and by no other block that has these keys
//
//   barrier           arrivals                    waited for by
//   known[i]          1                           consumers: item i is written
//   over[i]           one per consumer warp       the producer: item i may be overwritten
//   teacher_full[i]   1 (+ bytes)                 consumers: keys of the teacher are there
//   teacher_empty[i]  one per consumer warp       the producer: they are done with
//   index_full        1 (+ bytes)                 the same of the student's keys
//   index_empty       one per consumer warp
//   full[i]           1 (+ bytes)                 consumers: piece i has arrived
//   empty[i]          one per consumer warp       the producer: piece i may be overwritten
//
// Where heads of a group read several key heads (kKeysStream), the teacher's keys come in the pieces, behind the
// queries of their columns, and a cluster of blocks with neighbouring tiles of rows brings each part of them once for
// all: then the warps of all of its blocks arrive where a piece, or keys, are done with.
//
// Of the teacher the next head's product is under way while one head's exponentials are taken; the warpgroups ask for
// products in turns, so that one takes exponentials while the other asks. Of the student there are no registers for two
// products beside both sums: there a turn is half a product long, one multiplies while the other adds.
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "kernels/indexer_score/ending.cuh"
#include "pipeline/barriers.cuh"
#include "pipeline/ring.cuh"
#include "ptx/cluster.cuh"
#include "ptx/registers.cuh"
#include "tile/fragment.cuh"
#include "tile/index_parts.cuh"
#include "tile/swizzled.cuh"

using TeacherSide = SwizzledTile<SKL_T_ELEMENT, SKL_T_DIM>;
using IndexSide = SwizzledTile<SKL_S_ELEMENT, SKL_S_DIM>;

constexpr int kRing = SKL_STAGES;
constexpr bool kKeysStream = SKL_KEYS_STREAM;   // the teacher's: other heads read others
constexpr int kCluster = SKL_CLUSTER;           // blocks that have row tiles side by side, and the same keys
constexpr int kPieceChunks = SKL_PIECE_CHUNKS;  // of queries, in a piece
constexpr int kQueryBytes = kRows * 128, kKeyPieceBytes = kColumns * 128;
constexpr int kPieceBytes = kPieceChunks * kQueryBytes + (kKeysStream ? kKeyPieceBytes : 0);
constexpr int kTeacherPieces = TeacherSide::kChunks / kPieceChunks;
constexpr int kIndexPieces = kKeysStream ? 1 : IndexSide::kChunks / kPieceChunks;
constexpr int kOwnKeys = kColumns / kCluster;  // that a block has brought, for all of the cluster
constexpr int kKeyBox = kOwnKeys < kColumns / 2 ? kOwnKeys : kColumns / 2;
constexpr int kSplitKeys = SKL_SPLIT_KEYS;
constexpr int kConsumerWarps = 8;
constexpr int kTeacherKeyBytes = kKeysStream ? 0 : TeacherSide::bytes(kColumns);
constexpr int kIndexKeyBytes = IndexSide::bytes(kColumns);

// Where a piece of work is.
struct Item {
    int tile;   // of rows; negative: there is no more
    int entry;  // batch entry and group
    int key, end;
    int strip_end;           // of the keys that the strip has of the tile: others of a cluster may see more
    int state;               // number of the row state of the first half
    int all_begin, all_end;  // keys that all rows see, but for bits
    int idle;                // no row has a gradient
    int absent;              // no row of this launch
};

// Offsets in shared memory.
constexpr int kTeacherKeysAt = 0;
constexpr int kIndexKeysAt = kTeacherKeysAt + kTeacherKeyBytes;
constexpr int kRingAt = kIndexKeysAt + kIndexKeyBytes;
constexpr int kBarriersAt = kRingAt + kRing * kPieceBytes;
enum Barrier {
    kKnown,
    kOver = kKnown + 2,
    kTeacherFull = kOver + 2,
    kTeacherEmpty,
    kIndexFull,
    kIndexEmpty,
    kFull,
    kEmpty = kFull + kRing,
    kBarriers = kEmpty + kRing
};
constexpr int kItemsAt = kBarriersAt + 8 * kBarriers;

static_assert(kRows == 64 && kWarps == 4 && kColumnWarps == 2, "plan: two warpgroups share 64 rows");
static_assert(kEnding == kEndsInRows || kEnding == kEndsInStrip, "plan: rows or a strip");
static_assert(!kTeacherIsGiven && SKL_R_DIM == 0, "plan: products of one part, of teacher and student");
static_assert(!kKeysStream || IndexSide::kChunks * kQueryBytes <= kPieceBytes, "plan: a head's queries are one piece");
static_assert(kCluster <= 2, "plan: clusters of which a GPU is full");
static_assert(kSplitKeys % kColumns == 0, "plan: a split has whole tiles");
static_assert(TeacherSide::kChunks % kPieceChunks == 0 && IndexSide::kChunks % kPieceChunks == 0, "plan: whole pieces");
static_assert(!kKeysStream || kPieceChunks == 1, "plan: a piece has a chunk of keys");
static_assert(1024 + kItemsAt + 2 * sizeof(Item) == SKL_SMEM_BYTES, "plan: smem_bytes");

struct Shared {
    u32 base;
    __device__ u32 barrier(int which, int slot = 0) const { return base + kBarriersAt + 8 * (which + slot); }
    __device__ Item& item(int slot) const {
        return reinterpret_cast<Item*>(__cvta_shared_to_generic(base + kItemsAt))[slot];
    }
};

struct Producer {
    const HopperIndexerArgs& all;
    const Shared shared;
    const int lane, rank;
    RingCursor<2> items;
    RingCursor<1> teacher_keys, index_keys;
    RingCursor<kRing> ring;

    __device__ const IndexerArgs& args() const { return all.base; }

    __device__ int first_tile() const { return args().first_tile / kCluster; }
    __device__ int end_tile() const { return ceil_div(args().first_tile + args().tiles, kCluster); }

    __device__ void run() {
        const int entries = args().entries * args().groups, pairs = entries * (end_tile() - first_tile());
        int pair = 0;                       // of row tiles of a cluster and an entry, the last rows first
        u32 index = blockIdx.x / kCluster;  // of the item, among those of this pair and the ones after it
        Item item{};
        while (find(item, pair, index, entries, pairs)) {
            const Item& written = put(item);  // what is in shared memory needs no registers
            if (!written.idle) stream(written);
            index += gridDim.x / kCluster;
        }
        item.tile = -1;
        put(item);
    }

private:
    // The item of this number, a lane to a pair. Those that have no keys for the second warpgroup take less long, and
    // come after all others.
    __device__ bool find(Item& item, int& pair, u32& index, int entries, int pairs) const {
        for (; pair < 2 * pairs; pair += 32) {
            const int mine = (pair + lane) % pairs;
            Range keys{0, 0};
            if (pair + lane < 2 * pairs)
                keys = keys_of_tiles(mine % entries / args().groups, end_tile() - 1 - mine / entries);
            const int length = keys.end - keys.begin, rest = length % kSplitKeys;
            const u32 splits = ceil_div(length, kSplitKeys), less = rest > 0 && rest <= kWarpColumns;
            const u32 count = pair + lane < pairs ? splits - less : less;
            u32 sum = count;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const u32 before = __shfl_up_sync(~0u, sum, d);
                if (lane >= d) sum += before;
            }
            const u32 holds = __ballot_sync(~0u, index < sum);
            if (holds == 0) {
                index -= __shfl_sync(~0u, sum, 31);
                continue;
            }
            const int from = __ffs(holds) - 1;
            index -= __shfl_sync(~0u, sum - count, from);
            pair += from;
            const int tiles = (end_tile() - 1 - pair % pairs / entries) * kCluster;
            const int split = pair < pairs ? static_cast<int>(index) : __shfl_sync(~0u, splits, from) - 1;
            item.tile = tiles + rank;
            item.entry = pair % pairs % entries;
            item.key = __shfl_sync(~0u, keys.begin, from) + split * kSplitKeys;
            item.end = min(__shfl_sync(~0u, keys.end, from), item.key + kSplitKeys);
            item.state = 2 * split;
            if constexpr (kEnding == kEndsInRows && !SKL_BITS) find_common(item);
            item.idle = kEnding == kEndsInStrip && idle(tiles, item.entry);
            item.absent =
                kCluster > 1 && (item.tile < args().first_tile || item.tile >= args().first_tile + args().tiles);
            if constexpr (kEnding == kEndsInStrip)
                item.strip_end =
                    item.absent ? 0 : min(item.end, keys_of_tile(args(), item.entry / args().groups, item.tile).end);
            return true;
        }
        return false;
    }

    // Keys that all rows of the item's tile see.
    __device__ void find_common(Item& item) const {
        const int2* const rows = reinterpret_cast<const int2*>(args().row_keys) +
                                 static_cast<i64>(item.entry / args().groups) * args().queries;
        int begin = 0, end = args().keys;
        for (int row = item.tile * kRows + lane; row < min((item.tile + 1) * kRows, args().queries); row += 32) {
            const int2 x = rows[row];
            begin = max(begin, x.x);
            end = min(end, x.y);
        }
        item.all_begin = __reduce_max_sync(~0u, begin);
        item.all_end = __reduce_min_sync(~0u, end);
    }

    // That any row of a cluster's tiles sees.
    __device__ Range keys_of_tiles(int batch, int tiles) const {
        Range all_keys{args().keys, 0};
        for (int i = tiles * kCluster; i < min((tiles + 1) * kCluster, args().grid_tiles); ++i) {
            const Range keys = keys_of_tile(args(), batch, i);
            if (keys.empty()) continue;
            all_keys = {min(all_keys.begin, keys.begin), max(all_keys.end, keys.end)};
        }
        return all_keys.empty() ? Range{0, 0} : all_keys;
    }

    __device__ bool idle(int tiles, int entry) const {
        bool some = false;
        for (int row = tiles * kRows + lane; row < min((tiles + kCluster) * kRows, args().queries); row += 32)
            some |=
                reinterpret_cast<const float4*>(args().row_stats)[static_cast<i64>(entry) * args().queries + row].z !=
                0.f;
        return !__any_sync(~0u, some);
    }

    __device__ const Item& put(const Item& item) {
        warp_wait(shared.barrier(kOver, items.slot), items.parity ^ 1);
        if (lane == 0) {
            shared.item(items.slot) = item;
            mbarrier_arrive(shared.barrier(kKnown, items.slot));
        }
        __syncwarp();
        const Item& written = shared.item(items.slot);
        items.advance();
        return written;
    }

    __device__ void stream(const Item& item) {
        const int batch = item.entry / args().groups, group = item.entry % args().groups;
        const int row = item.tile * kRows;
        for (int key = item.key; key < item.end; key += kColumns) {
            if constexpr (!kKeysStream)
                load_keys<TeacherSide>(kTeacherKeysAt, kTeacherFull, kTeacherEmpty, teacher_keys, all.teacher_k, key,
                                       group * args().teacher_heads / args().teacher_group, batch);
            for (int h = 0; h < args().teacher_heads; ++h) {
                const int head = group * args().teacher_heads + h;
                for (int c = 0; c < TeacherSide::kChunks; c += kPieceChunks)
                    load_piece(all.teacher_q, c, kPieceChunks, row, head, batch, key);
            }
            load_keys<IndexSide>(kIndexKeysAt, kIndexFull, kIndexEmpty, index_keys, all.index_k, key,
                                 args().index_key_heads > 1 ? group : 0, batch);
            constexpr int chunks = IndexSide::kChunks / kIndexPieces;
            for (int h = 0; h < args().index_heads; ++h)
                for (int c = 0; c < IndexSide::kChunks; c += chunks)
                    load_piece(all.index_q, c, chunks, row, group * args().index_heads + h, batch, -1);
        }
    }

    // The block's part of a chunk of keys. Each half of a tile's is by itself, so that it is one operand.
    template <class Side>
    __device__ void load_own_keys(u32 to, u32 here, const TensorMap& map, int chunk, int key, int head,
                                  int batch) const {
        for (int own = 0; own < kOwnKeys; own += kKeyBox) {
            const int at = rank * kOwnKeys + own, half = at / kWarpColumns, in_half = at % kWarpColumns;
            const u32 there = to + half * Side::bytes(kWarpColumns) + in_half * 128;
            if constexpr (kCluster > 1)
                tma_load_to_cluster(there, map, here, 64 * chunk, key + at, head, batch, (1 << kCluster) - 1);
            else
                tma_load(there, map, here, 64 * chunk, key + at, head, batch);
        }
    }
    template <class Side>
    __device__ void load_keys(int at, int full, int empty, RingCursor<1>& cursor, const TensorMap& map, int key,
                              int head, int batch) {
        warp_wait(shared.barrier(empty), cursor.parity ^ 1);
        if (lane == 0) {
            mbarrier_expect(shared.barrier(full), Side::bytes(kColumns));
            for (int c = 0; c < Side::kChunks; ++c)
                load_own_keys<Side>(shared.base + at + c * kWarpColumns * 128, shared.barrier(full), map, c, key, head,
                                    batch);
        }
        __syncwarp();
        cursor.advance();
    }
    // Chunks of a head's queries, and where keys stream the chunk of those from a key on.
    __device__ void load_piece(const TensorMap& map, int first, int chunks, int row, int head, int batch, int key) {
        warp_wait(shared.barrier(kEmpty, ring.slot), ring.parity ^ 1);
        if (lane == 0) {
            const u32 here = shared.barrier(kFull, ring.slot), to = shared.base + kRingAt + ring.slot * kPieceBytes;
            const bool keys = kKeysStream && key >= 0;
            mbarrier_expect(here, chunks * kQueryBytes + (keys ? kKeyPieceBytes : 0));
            load_chunks<kRows>(to, map, here, first, chunks, row, head, batch);
            if (keys)
                load_own_keys<SwizzledTile<SKL_T_ELEMENT, 64>>(to + kQueryBytes, here, all.teacher_k, first, key,
                                                               head / args().teacher_group, batch);
        }
        __syncwarp();
        ring.advance();
    }
};

struct Consumer {
    const IndexerArgs& args;
    const Shared shared;
    const int half, lane, row;  // row: the lane's first among those of a tile
    u64 ring_start, teacher_start, index_start;
    RingCursor<2> items;
    RingCursor<1> teacher_keys, index_keys;
    RingCursor<kRing> ring, done;  // done: of those pieces that products have been waited for of
    bool arrived = false;          // the next piece, as far as is known
    const float *first, *second;   // what a head has for each of the lane's rows

    __device__ Consumer(const IndexerArgs& args, Shared shared, int half)
        : args(args),
          shared(shared),
          half(half),
          lane(lane_id()),
          row(threadIdx.x / 32 % 4 * 16 + Accumulators::first_row(lane_id())),
          ring_start(swizzled_descriptor(shared.base + kRingAt)),
          teacher_start(swizzled_descriptor(shared.base + kTeacherKeysAt + half * TeacherSide::bytes(kWarpColumns))),
          index_start(swizzled_descriptor(shared.base + kIndexKeysAt + half * IndexSide::bytes(kWarpColumns))) {}

    __device__ void run() {
        if (half == 1) barrier_arrive(kTurn, 256);
        for (;;) {
            mbarrier_wait(shared.barrier(kKnown, items.slot), items.parity);
            const Item& item = shared.item(items.slot);  // what is in shared memory needs no registers
            if (item.tile < 0) break;
            if (kEnding == kEndsInStrip && item.idle) {
                clear_strip(item);
            } else
                for (int key = item.key; key < item.end; key += kColumns) {
                    if (key + half * kWarpColumns < item.end)
                        tile(item, key);
                    else
                        pass(item, key);
                }
            __syncwarp();
            warp_arrive(shared.barrier(kOver, items.slot));
            items.advance();
        }
    }

private:
    // A tile whose half for this warpgroup nobody sees.
    __device__ void pass(const Item& item, int key) {
        if constexpr (!kKeysStream) {
            pass_keys(kTeacherFull, teacher_keys);
            done_with_keys(kTeacherEmpty, teacher_keys);
        }
        for (int h = 0; h < args.teacher_heads; ++h) {
            take_turn();
            give_turn();
            pass_pieces(kTeacherPieces);
        }
        pass_keys(kIndexFull, index_keys);
        done_with_keys(kIndexEmpty, index_keys);
        for (int h = 0; h < args.index_heads; ++h) {
            take_turn();
            give_turn();
            pass_pieces(kIndexPieces);
        }
        if (kEnding == kEndsInRows && key == item.key && !item.absent) {
            MassState none;
            none.start();
            for (int below = 0; below < 2; ++below) write_state(item, key, below, none);
        }
    }
    __device__ void pass_keys(int full, const RingCursor<1>& cursor) const {
        warp_wait(shared.barrier(full), cursor.parity);  // or two arrivals could fall into one phase
    }
    __device__ void done_with_keys(int empty, RingCursor<1>& cursor) const {
        arrive(shared.barrier(empty));
        cursor.advance();
    }
    __device__ void pass_pieces(int pieces) {
        for (int c = 0; c < pieces; ++c) {
            warp_wait(shared.barrier(kFull, ring.slot), ring.parity);
            ring.advance();
        }
        arrived = false;
        release(pieces);
    }
    __device__ void release(int pieces) {
        for (int c = 0; c < pieces; ++c) {
            arrive<kKeysStream>(shared.barrier(kEmpty, done.slot));
            done.advance();
        }
    }
    // Of what others of the cluster write too, all of them have to know.
    template <bool SHARED = true>
    __device__ void arrive(u32 barrier) const {
        if constexpr (kCluster > 1 && SHARED) {
            if (lane < kCluster) mbarrier_arrive_at(barrier, lane);
        } else {
            warp_arrive(barrier);
        }
    }
    __device__ void take_turn() const { barrier_sync(kTurn + half, 256); }
    __device__ void give_turn() const { barrier_arrive(kTurn + 1 - half, 256); }

    // Has a head's product under way, once its pieces have come; in two groups where the turn lasts until half of it is
    // done. Whether the next piece has come is asked afterwards, so that turns need not wait for the answer.
    template <class Side, int PIECES, bool UNTIL_HALF>
    __device__ void issue(Strip<kTiles>& s, u64 keys) {
        constexpr int steps = Side::kSteps, chunks = Side::kChunks / PIECES;  // of a piece
        take_turn();
        RingCursor<kRing> waited = ring;
#pragma unroll
        for (int p = 0; p < PIECES; ++p) {
            if (p > 0 || !arrived) mbarrier_wait(shared.barrier(kFull, waited.slot), waited.parity);
            waited.advance();
        }
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < steps; ++k) {
            const u64 piece = ring_start + static_cast<u64>(ring.slot * (kPieceBytes >> 4));
            // Keys that stream lie behind the queries of their chunk.
            const u64 b = keys == 0 ? piece + ((kQueryBytes + half * kWarpColumns * 128 + k % 4 * 32) >> 4)
                                    : keys + ((k / 4 * kWarpColumns * 128 + k % 4 * 32) >> 4);
            wgmma<Side::kHalf, 0, 0>(s[0], piece + ((k / 4 % chunks * kQueryBytes + k % 4 * 32) >> 4), b, k > 0);
            if ((k + 1) % (4 * chunks) == 0 || k + 1 == steps) ring.advance();
            if (UNTIL_HALF && k + 1 == (steps + 1) / 2) wgmma_commit();
        }
        wgmma_commit();
        if constexpr (!UNTIL_HALF) give_turn();
        arrived = mbarrier_is_over(shared.barrier(kFull, ring.slot), ring.parity);
    }
    // Waits for a product; its pieces may be overwritten. Products are asked for at once and done in the order of all
    // that were, so a turn may end when half of this one is done: the other warpgroup's then follows without a gap.
    template <bool UNTIL_HALF>
    __device__ void finish(Strip<kTiles>& s, int pieces) {
        if constexpr (UNTIL_HALF) {
            wgmma_wait<1>();
            give_turn();
        }
        wgmma_wait<0>();
        fence_accumulators(s[0]);
        release(pieces);
    }

    // What the lane's rows have of each head.
    __device__ void start_vectors(u64 vectors, const Item& item, int heads) {
        const int at = item.tile * kRows + row, last = args.queries - 1;
        const float* const of =
            reinterpret_cast<const float*>(vectors) + static_cast<i64>(item.entry) * heads * args.queries;
        first = of + min(at, last);
        second = of + min(at + Accumulators::below(1), last);
    }
    __device__ void read(float (&factor)[2]) {
        factor[0] = *first;
        factor[1] = *second;
        first += args.queries;
        second += args.queries;
    }

    __device__ void issue_teacher(Strip<kTiles>& s, float (&lse)[2]) {
        read(lse);
        issue<TeacherSide, kTeacherPieces, false>(s, kKeysStream ? 0 : teacher_start);
    }
    __device__ void add_teacher(Strip<kTiles>& t, const Strip<kTiles>& s, const float (&lse)[2]) const {
        if (__any_sync(~0u, lse[0] == infinity() || lse[1] == infinity()))
            add_masses<true>(t, s, args.teacher_numbers, lse);
        else
            add_masses<false>(t, s, args.teacher_numbers, lse);
    }
    // One head is added up while the next one is multiplied.
    __device__ void teacher_step(Strip<kTiles>& t, const Strip<kTiles>& now, float (&lse)[2], Strip<kTiles>& next) {
        float ahead[2];
        issue_teacher(next, ahead);
        add_teacher(t, now, lse);
        finish<false>(next, kTeacherPieces);
        lse[0] = ahead[0];
        lse[1] = ahead[1];
    }
    __device__ void teacher(Strip<kTiles>& t, const Item& item) {
        Strip<kTiles> x, y;
        float lse[2];
        const int heads = args.teacher_heads;
        start_vectors(args.lse2, item, heads);
        if constexpr (!kKeysStream) mbarrier_wait(shared.barrier(kTeacherFull), teacher_keys.parity);
        issue_teacher(x, lse);
        finish<false>(x, kTeacherPieces);
        int h = 0;
#pragma unroll 1
        for (; h + 2 < heads; h += 2) {
            teacher_step(t, x, lse, y);
            teacher_step(t, y, lse, x);
        }
        if (h + 2 == heads) {
            teacher_step(t, x, lse, y);
            if constexpr (!kKeysStream) done_with_keys(kTeacherEmpty, teacher_keys);
            add_teacher(t, y, lse);
        } else {
            if constexpr (!kKeysStream) done_with_keys(kTeacherEmpty, teacher_keys);
            add_teacher(t, x, lse);
        }
    }

    // x + |x| is 2 max(x, 0) of what is finite, and shows what is not.
    __device__ static void add_student(Strip<kTiles>& logits, const Strip<kTiles>& s, const float (&weight)[2]) {
        const float half_weight[2] = {0.5f * weight[0], 0.5f * weight[1]};
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float x = s[0][n][e];
                float& sum = logits[0][n][e];
                sum = kGated ? fmaf(half_weight[Accumulators::row(e)], x + fabsf(x), sum)
                             : fmaf(weight[Accumulators::row(e)], x, sum);
            }
    }
    __device__ void student(Strip<kTiles>& logits, const Item& item, int first_key) {
        start_vectors(args.weights, item, args.index_heads);
        mbarrier_wait(shared.barrier(kIndexFull), index_keys.parity);
        Strip<kTiles> x;
        u32* gates = nullptr;  // of the head
        int kept = 0;          // tiles that are there in the strip
        int step = 0;
        if constexpr (kKeepsGates) {
            kept = min(ceil_div(item.strip_end - first_key, kStripTile), kWarpColumns / kStripTile);
            if (kCluster == 1 || kept > 0) {  // of rows of another launch the strip knows nothing
                const StripRow strip(args, item.entry / args.groups, item.tile);
                gates = reinterpret_cast<u32*>(strip.gates(args, item.entry % args.groups, 0, first_key / kStripTile)) +
                        threadIdx.x / 32 % 4 * 32 + gate_word(lane);
                step = strip.width * kGateWords;
            }
        }
#pragma unroll 1
        for (int h = 0; h < args.index_heads; ++h) {
            float weight[2];
            read(weight);
            issue<IndexSide, kIndexPieces, true>(x, index_start);
            finish<true>(x, kIndexPieces);
            if constexpr (kKeepsGates) {
#pragma unroll
                for (int i = 0; i < kWarpColumns / kStripTile; ++i)
                    if (i < kept) gates[i * kGateWords] = gates_of(x[0] + i * (kStripTile / 8));
                gates += step;
            }
            add_student(logits, x, weight);
        }
        done_with_keys(kIndexEmpty, index_keys);
    }

    __device__ void tile(const Item& item, int key) {
        Strip<kTiles> t, logits;
        clear<kTiles>(t);
        teacher(t, item);
        clear<kTiles>(logits);
        const int first_key = key + half * kWarpColumns, first_row = item.tile * kRows + row;
        student(logits, item, first_key);
        if (item.absent) return;
        const int batch = item.entry / args.groups, group = item.entry % args.groups;
        // Most tiles are not cut by any row's interval.
        const bool all = kEnding == kEndsInRows && !SKL_BITS && item.all_begin <= first_key &&
                         first_key + kWarpColumns <= item.all_end;
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            if constexpr (kEnding == kEndsInRows && !SKL_BITS) {
                if (all) {
                    end_row(t, logits, item, key, first_key, below, AllKeys{});
                    continue;
                }
            }
            const RowKeys seen(args, batch, group, first_row + Accumulators::below(below));
            if constexpr (kEnding == kEndsInRows)
                end_row(t, logits, item, key, first_key, below, seen);
            else
                write_strip(t, logits, item, below, seen, first_key);
        }
    }

    template <class Keys>
    __device__ void end_row(const Strip<kTiles>& t, const Strip<kTiles>& logits, const Item& item, int key,
                            int first_key, int below, const Keys& seen) const {
        MassState state;
        state.start();
        absorb<StudentScore, true>(state, t, logits, args.student_numbers, below, seen, first_key);
        Accumulators::merge_row(state);
        write_state(item, key, below, state);
    }

    // Of a split's second and later tiles what there is already is added to.
    __device__ void write_state(const Item& item, int key, int below, MassState state) const {
        const int r = item.tile * kRows + row + Accumulators::below(below);
        if (!Accumulators::writes_row(lane) || r >= args.queries) return;
        float4& to = reinterpret_cast<float4*>(
            args.states)[(static_cast<i64>(item.entry) * args.splits + item.state + half) * args.queries + r];
        if (kSplitKeys > kColumns && key > item.key) state.merge({to.x, to.y, to.z, to.w});
        to = make_float4(state.r, state.l, state.mass, state.terms);
    }

    __device__ void write_strip(const Strip<kTiles>& t, const Strip<kTiles>& logits, const Item& item, int below,
                                const RowKeys& seen, int first_key) const {
        const int r = item.tile * kRows + row + Accumulators::below(below);
        float4 stats = make_float4(0.f, 0.f, 0.f, 0.f);
        if (r < args.queries)
            stats = reinterpret_cast<const float4*>(args.row_stats)[static_cast<i64>(item.entry) * args.queries + r];
        const u64 to = strip_pair(args, item.entry, r, first_key + Accumulators::first_column(lane));
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
            float d[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int e = Accumulators::element(below, j);
                const float q = exp2_approx(StudentScore::logit(logits[0][n][e], args.student_numbers, stats.x));
                const bool counts = stats.z != 0.f && seen.visible(key_of(first_key, 2 * n + j));
                d[j] = counts ? stats.z * fmaf(-stats.y, t[0][n][e], q) : 0.f;
            }
            if (first_key + 8 * n >= item.strip_end) continue;  // beyond the strip's tiles
            StripElement::store_pair(to + strip_step(n), d[0], d[1]);
        }
    }
    __device__ void clear_strip(const Item& item) const {
        for (int key = item.key + half * kWarpColumns; key < item.strip_end; key += kColumns)
            for (int below = 0; below < 2; ++below)
                for (int n = 0; n < kTiles; ++n)
                    if (key + 8 * n < item.strip_end)
                        StripElement::store_pair(
                            strip_pair(args, item.entry, item.tile * kRows + row + Accumulators::below(below),
                                       key + Accumulators::first_column(lane)) +
                                strip_step(n),
                            0.f, 0.f);
    }
};

#if SKL_CLUSTER > 1
#define SKL_CLUSTERED __cluster_dims__(SKL_CLUSTER, 1, 1)
#else
#define SKL_CLUSTERED
#endif

__device__ inline void sync_all() {
    if constexpr (kCluster > 1)
        cluster_sync();
    else
        __syncthreads();
}

extern "C" __global__ void SKL_CLUSTERED __launch_bounds__(384, 1)
    streamkl_indexer_stream(const __grid_constant__ HopperIndexerArgs all) {
    extern __shared__ unsigned char memory[];
    const Shared shared{(static_cast<u32>(__cvta_generic_to_shared(memory)) + 1023) & ~1023u};
    // Uniform over the warp by construction, which the compiler must be told.
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        for (int i = 0; i < kBarriers; ++i) {
            const bool filled = i < kOver || i == kTeacherFull || i == kIndexFull || (i >= kFull && i < kEmpty);
            const bool keys = i == kTeacherEmpty || i == kIndexEmpty || (kKeysStream && i >= kEmpty);
            const int arrivals = kConsumerWarps * (kCluster > 1 && keys ? kCluster : kArrivals);
            mbarrier_init(shared.barrier(i), filled ? 1 : arrivals);
        }
        mbarrier_publish();
    }
    sync_all();
    if (group == 2) {
        registers_lower<SKL_PRODUCER_REGISTERS>();
        if (threadIdx.x / 32 == 8) Producer{all, shared, lane_id(), kCluster > 1 ? cluster_rank() : 0}.run();
    } else {
        registers_raise<SKL_CONSUMER_REGISTERS>();
        Consumer(all.base, shared, group).run();
    }
    if constexpr (kCluster > 1) cluster_sync();  // others may still arrive here
}

// Attention, backward, on Hopper, all three gradients in one pass: five products per tile where kernels for queries and
// for keys and values need seven. The mathematics is that of attention_gradient_sm80.cu, and
//
//   dQ = c X K   needs all keys: blocks add fp32 parts in global memory, in no fixed order
//
// Three kernels: `prepare` clears the sums of dQ, the main kernel adds, `finish` scales and converts them. In the
// workspace, one entry per query head and kColumns queries:
//
//   sums       [warp][D / 8][lane][4] floats, as the accumulators of the dQ product hold them
//   taken      one int: work tiles that blocks have taken beyond their first
//
//   blocks    are persistent, and take work tiles from a common counter (pipeline/work_tiles.cuh)
//   work tile two halves of 64 keys and values each, resident in shared memory: beside a pattern two units of 64 keys
//             whose lists are like one another, wherever they lie (kernels/gathered.py), else neighbours
//   producer  one warp; streams tiles of kColumns queries and rows of G through a ring of kStages stages, and their
//             statistics; between those of two work tiles goes a stage that says so, and what comes: the producer
//             looks that up while the others are still busy
//   consumers two warpgroups, one for each half: S^T and dP^T in registers, where they become P^T and X^T, operands A of
//             dV; X^T goes through shared memory, as operand A of dK, and transposed of dQ. That product is of both
//             halves, and the warpgroups take it in turns, a tile later than all others: nobody waits for the other's
//             half. Its registers are those that the scores had, and what comes out is added to the sums from there
//
//   barrier   arrivals                         waited for by
//   keys      1 (+ bytes)                      consumers, once for each work tile
//   free      one per consumer warp            the producer: keys and values may be overwritten
//   full[i]   one for the producer's warp      consumers: stage i has arrived
//             (+ bytes)
//   empty[i]  one per consumer warp            the producer: stage i may be overwritten
//   made[i]   one per consumer warp            whose turn dQ is: X^T of both halves is in buffer i
//   taken[i]  one per warp of whose turn it is consumers: buffer i may be overwritten
//
// An element type of narrow exponent has X scaled by a power of two for each half. Sums over keys are brought from the first
// half's to the second's between two products.
//
// G is a copy that attention_rows.cu has made. Of queries in tiles that are not full, and of keys, those are cleared that
// hold no numbers and that nobody sees: 0 times what such memory holds need not be 0.
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "common/sizes.cuh"
#include "pipeline/barriers.cuh"
#include "pipeline/ring.cuh"
#include "ptx/global.cuh"
#include "ptx/registers.cuh"
#include "tile/schedule.cuh"
#include "tile/swizzled.cuh"
#include "@mask"
#include "@score"
#include "tile/attention_gradient.cuh"
#include "tile/attention_unseen.cuh"

using Scored = SwizzledTile<SKL_A_ELEMENT, SKL_A_DIM>;
using Valued = SwizzledTile<SKL_A_ELEMENT, SKL_VALUE_DIM>;

constexpr int kGroups = kWarps / 4;
constexpr int kRowBytes = Scored::bytes(kRows) + Valued::bytes(kRows);
constexpr int kStageBytes = Scored::bytes(kColumns) + Valued::bytes(kColumns);
constexpr int kVectorBytes = 4 * kVectors * kColumns + 16;  // statistics of queries, and which they are
constexpr int kExchanges = SKL_EXCHANGES;
constexpr int kExchangeBytes = kRows * kColumns * E::kBytes;  // X^T of a tile
constexpr int kWarpSums = 128 * kOutTiles;                    // floats of dQ that a warp makes of a tile
constexpr int kBarrierBytes = 8 * (2 * kStages + 2 * kExchanges + 2) + 4 * (1 + kGroups) * kExchanges + 32 * kGroups;
constexpr int kHelperThreads = SKL_HELPER_THREADS;
constexpr bool kNarrow = E::kNarrowExponent;  // gradients of logits are scaled by powers of two
constexpr int kFirstExponent = 60;            // of these; what is smaller than that makes normal adds nothing

static_assert(kGroups == 2 && kRows == 128 && kColumns == 64 && !kRowsAreQueries, "plan: two halves of 64 keys");
static_assert(kScored && kValues, "plan: all gradients");
static_assert(1024 + kRowBytes + kStages * (kStageBytes + kVectorBytes) + kExchanges * kExchangeBytes + kBarrierBytes ==
                  SKL_SMEM_BYTES,
              "plan: smem_bytes");
static_assert(AttentionSums::kSums == 4 * kWarpSums, "plan: workspace");

// Beside a pattern, blocks side by side should stream the same rows: causal lists have the end in common.
using Walk = Cursor<Mask, Mask::kListed ? -1 : 1>;

__device__ inline int& shared_int(u32 address) { return *reinterpret_cast<int*>(__cvta_shared_to_generic(address)); }

// Shared memory of a block.
struct Layout {
    u32 base;
    __device__ u32 keys() const { return base; }
    __device__ u32 values() const { return base + Scored::bytes(kRows); }
    __device__ u32 queries(int slot) const { return base + kRowBytes + slot * kStageBytes; }
    __device__ u32 grads(int slot) const { return queries(slot) + Scored::bytes(kColumns); }
    __device__ u32 exchange(int buffer) const { return queries(kStages) + buffer * kExchangeBytes; }
    __device__ u32 vectors(int slot) const { return exchange(kExchanges) + slot * kVectorBytes; }
    __device__ u32 step(int slot) const { return vectors(slot + 1) - 16; }
    __device__ u32 tops(int group) const { return vectors(kStages) + 16 * group; }
    __device__ u32 full(int slot) const { return tops(kGroups) + 8 * slot; }
    __device__ u32 empty(int slot) const { return full(kStages) + 8 * slot; }
    __device__ u32 made(int buffer) const { return empty(kStages) + 8 * buffer; }
    __device__ u32 taken(int buffer) const { return made(kExchanges) + 8 * buffer; }
    __device__ u32 keys_here() const { return taken(kExchanges); }
    __device__ u32 keys_free() const { return keys_here() + 8; }
    // Of X^T in a buffer, the entry of the sums, and the exponent of each half; last what those of the next have.
    __device__ u32 entry(int buffer) const { return keys_free() + 8 + 4 * buffer; }
    __device__ u32 exponent(int buffer, int group) const { return entry(kExchanges + kGroups * buffer + group); }
    // Of a warpgroup's work tile, its number and where its halves begin.
    __device__ u32 work(int group) const { return exponent(kExchanges + 1, 3 * group); }

    // One thread, before anybody uses a barrier.
    __device__ void init() const {
        for (int i = 0; i < kStages; ++i) {
            mbarrier_init(full(i), kArrivals);
            mbarrier_init(empty(i), kWarps * kArrivals);
        }
        for (int i = 0; i < kExchanges; ++i) {
            mbarrier_init(made(i), kWarps * kArrivals);
            mbarrier_init(taken(i), 4 * kArrivals);
        }
        mbarrier_init(keys_here(), 1);
        mbarrier_init(keys_free(), kWarps * kArrivals);
        mbarrier_publish();
    }
};

// The keys of a work tile, which its tile of lists knows as one after the other.
struct Halves {
    Block block;
    Segment segment;
    int first[kGroups];

    // As the producer finds them, and as the others read what it has put.
    __device__ Halves(const HopperAttentionFusedArgs& all, int index) {
        const Extents& n = all.base.n;
        const int key_heads = n.heads / n.group;
        block = block_of(index, n, key_heads, n.batch * key_heads, false);
        segment = Mask::locate(n, block.head * n.group, block);
        int2 unit = make_int2(kGroups * block.tile, kGroups * block.tile + 1);
        if (all.units != 0)
            unit = reinterpret_cast<const int2*>(
                all.units)[static_cast<i64>(all.units_alike ? 0 : block.head) * n.tiles + block.tile];
        first[0] = 64 * unit.x;
        first[1] = 64 * unit.y;
    }
    __device__ Halves(const Extents& n, u32 put)
        : Halves(*reinterpret_cast<const Halves*>(__cvta_shared_to_generic(put))) {
        if constexpr (!Mask::kRagged) segment = {n.queries, n.keys, 0, 0, 0, 0};
    }
    __device__ Range half(int i) const {
        const int begin = i == 0 ? first[0] : first[1];
        return {begin, min(begin + 64, segment.keys)};
    }
    // Of all queries that may see one of them.
    __device__ Range queries(const Mask& mask) const {
        Range found{0, 0};
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
            const Range keys = half(i);
            if (keys.empty()) continue;
            const Range more = mask.queries_of(keys.begin, keys.end);
            if (!more.empty())
                found = found.empty() ? more : Range{min(found.begin, more.begin), max(found.end, more.end)};
        }
        return found;
    }
    // Where half i begins for a list, whose tile has it in its place.
    __device__ int listed(int i) const { return half(i).begin - 64 * i; }
    __device__ Walk walk(const Mask& mask, Range queries) const {
        return Walk(mask, {first[0], min(first[0] + kRows, segment.keys)},
                    mask.steps_at_once(block.tile * kRows, covering(queries, kColumns)));
    }
};

// A tile of queries, as the producer found it.
struct Step {
    int tile;   // or a Mark
    int entry;  // of the sums; or the number of the work tile, and in `bits` the parity of its keys
    u64 bits;   // of a list
};
enum Mark { kNoMore = -1, kWork = -2 };

// Which pairs of a lane are visible, a bit for each, found while registers are free: number 4 c + e of element e of the
// tile of 8 columns c. Stands for a walk whose pairs count from the lane's first.
struct Visible {
    struct {
        u32 bits;
        __device__ bool visible(int query, int key) const {
            return bits >> (query / 8 * 4 + Accumulators::element(key / 8, query % 8)) & 1;
        }
    } mask = {0};
    __device__ void find(const Mask& of, int first_query, int first_key) {
        const int query = first_query + Accumulators::first_column(lane_id());
#pragma unroll 1
        for (int i = 0; i < 4 * kTiles; ++i) {
            const int e = i % 4, q = query + i / 4 * 8 + Accumulators::column(e),
                      k = first_key + Accumulators::below(Accumulators::row(e));
            mask.bits |= static_cast<u32>(of.visible(q, k)) << i;
        }
    }
    __device__ int row() const { return -Accumulators::first_column(lane_id()); }
};

// Whether any key of the work tile sees a query: a rare question.
__device__ inline bool query_seen(u32 work, Mask mask, const Step& at, int query) {
    for (int i = 0; i < kGroups && query < mask.segment.queries; ++i) {
        const int first = shared_int(work + 4 * (1 + i)), end = min(first + 64, mask.segment.keys);
        mask.enter(first - 64 * i, at.tile * kColumns, at.bits);
        if (first < end && mask.query_seen(first, end, query)) return true;
    }
    return false;
}

// Tiles of queries of a head, and the first of a segment's, among the entries of the workspace.
__device__ inline int head_entries(const Extents& n) { return row_tiles(n.queries, kColumns, n.sequences); }
__device__ inline int entry_of(const Extents& n, int batch, int head, const Segment& segment) {
    return (batch * n.heads + head) * head_entries(n) + segment.first_query / kColumns + segment.sequence;
}

__device__ inline u32* taken(const HopperAttentionFusedArgs& all) {
    AttentionSums space;
    space.locate(all.workspace, static_cast<i64>(all.base.n.batch * all.base.n.heads) * head_entries(all.base.n));
    return space.taken;
}

// Issues out += a * streamed tile.
template <class Side, int TILES>
__device__ inline void multiply_out(float (&out)[TILES][4], const StripA<KeyTile::kCode, kTiles>& a, u64 streamed) {
#pragma unroll
    for (int k = 0; k < kTiles / 2; ++k) wgmma<Side::kHalf, 1>(out, a[k][0].r[0], streamed + (k * 2048 >> 4), 1);
}

// Issues out += X^T * queries.
__device__ inline void multiply_keys(float (&out)[kOutTiles][4], u64 exchange, u64 queries) {
#pragma unroll
    for (int k = 0; k < kTiles / 2; ++k)
        wgmma<Scored::kHalf, 0, 1>(out, exchange + (32 * k >> 4), queries + (k * 2048 >> 4), 1);
}

// Issues dq = X * keys, of X^T of both halves, or of one after the other.
template <int FIRST = 0, int END = kRows / 16>
__device__ inline void multiply_queries(float (&dq)[kOutTiles][4], u64 exchange, u64 keys) {
#pragma unroll
    for (int k = FIRST; k < END; ++k)
        wgmma<Scored::kHalf, 1, 1>(dq, exchange + (k * 2048 >> 4), keys + (k * 2048 >> 4), k > 0);
}

__device__ inline void multiply(float (&x)[kOutTiles][4], int exponent) {
    const float factor = power_of_two(min(max(exponent, -126), 127));
#pragma unroll
    for (int i = 0; i < 4 * kOutTiles; ++i) x[i / 4][i % 4] *= factor;
}

// Types of narrow exponent: a power of two that brings X of a tile into their range, one for all of a warpgroup's, so that
// it does for sums over keys and over queries. Where it has to move, the sums over queries move with it.
__device__ inline void scale(float (&x)[kTiles][4], float (&out)[kOutTiles][4], u32 tops, u32 running, int group) {
    float top = 0.f;
    int exponent = shared_int(running);
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) top = fmaxf(top, fabsf(x[i / 4][i % 4]));
    const u32 of_warp = __reduce_max_sync(~0u, __float_as_uint(top));
    if (lane_id() == 0) shared_int(tops + 4 * (threadIdx.x / 32 & 3)) = of_warp;
    barrier_sync(kWarpgroup + group, 128);
    const float4 all = shared_float4(tops);
    top = fmaxf(fmaxf(all.x, all.y), fmaxf(all.z, all.w));
    if (__any_sync(~0u, top * power_of_two(exponent) > kLargest)) {
        const int to = max(kTopExponent - exponent_of(top), -126);
        const float shrink = power_of_two(max(to - exponent, -126));
        exponent = to;
        if (threadIdx.x % 128 == 0) shared_int(running) = to;  // which all have read before the barrier
#pragma unroll
        for (int i = 0; i < 4 * kOutTiles; ++i) out[i / 4][i % 4] *= shrink;
    }
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) x[i / 4][i % 4] *= power_of_two(exponent);
}

// Whether any query of the block's heads sees a key of half i: a rare question.
__device__ inline bool key_seen(const HopperAttentionFusedArgs& all, const Halves& halves, int i, int key) {
    const AttentionGradientArgs& args = all.base;
    if (key >= halves.segment.keys) return false;
    for (int head = halves.block.head * args.n.group; head < (halves.block.head + 1) * args.n.group; ++head) {
        const Mask mask(args.n, halves.segment, halves.block.batch, head);
        const RowVectors vectors(args, halves.block.batch, head, halves.segment);
        const Range all_tiles{0, ceil_div(halves.segment.queries, kColumns)},
            steps = Mask::kListed ? mask.steps_at_once(halves.block.tile * kRows, all_tiles) : all_tiles;
        for (int step = steps.begin; step < steps.end; ++step) {
            const TileEntry entry = mask.entry(step);
            Mask here = mask;
            here.enter(halves.listed(i), entry.tile * kColumns, entry.bits);
            for (int q = entry.tile * kColumns; q < entry.tile * kColumns + kColumns; ++q)
                if (here.visible(q, key) && vectors.lse[q] != infinity()) return true;
        }
    }
    return false;
}

__device__ inline void put_step(u32 to, const Step& step) {
    *reinterpret_cast<Step*>(__cvta_shared_to_generic(to)) = step;
}

struct Producer {
    const HopperAttentionFusedArgs& all;
    const Layout& lay;
    const int lane;
    RingCursor<kStages> at;
    RingCursor<1> keys;

    __device__ Producer(const HopperAttentionFusedArgs& all, const Layout& lay) : all(all), lay(lay), lane(lane_id()) {}

    __device__ void run() {
        const Extents& n = all.base.n;
        const u32 works = n.batch * (n.heads / n.group) * n.tiles;
        for (u32 index = blockIdx.x; index < works; index = take()) {
            const Halves halves(all, index);
            if (Mask::kRagged && halves.block.tile * kRows >= halves.segment.keys) continue;
            tell({kWork, static_cast<int>(index), keys.parity}, &halves);
            stream(halves);
        }
        tell({kNoMore, 0, 0});
    }

private:
    // The number of a work tile that no block has taken yet.
    __device__ u32 take() const {
        u32 before = 0;
        if (lane == 0) before = atomicAdd(taken(all), 1u);
        return gridDim.x + __shfl_sync(~0u, before, 0);
    }
    // A stage without queries. In place of their statistics it has what comes.
    __device__ void tell(const Step& step, const Halves* halves = nullptr) {
        static_assert(sizeof(Halves) <= kVectorBytes - sizeof(Step), "a stage has room for the halves of a work tile");
        warp_wait(lay.empty(at.slot), at.parity ^ 1);
        if (lane == 0) {
            if (halves) *reinterpret_cast<Halves*>(__cvta_shared_to_generic(lay.vectors(at.slot))) = *halves;
            put_step(lay.step(at.slot), step);
            mbarrier_expect(lay.full(at.slot), 0);
        }
        __syncwarp();
        others_arrive(lay.full(at.slot));
        at.advance();
    }
    // When the last work tile's are done with.
    __device__ void load_keys(const Halves& halves) {
        warp_wait(lay.keys_free(), keys.parity ^ 1);
        keys.advance();
        if (lane == 0) {
            mbarrier_expect(lay.keys_here(), kRowBytes);
            for (int i = 0; i < kGroups; ++i) {
                const int first = halves.segment.first_key + halves.first[i], here = i * 64 * 128;
                load_chunks<kRows>(lay.keys() + here, all.key, lay.keys_here(), 0, Scored::kChunks, first,
                                   halves.block.head, halves.block.batch);
                load_chunks<kRows>(lay.values() + here, all.value, lay.keys_here(), 0, Valued::kChunks, first,
                                   halves.block.head, halves.block.batch);
            }
        }
        __syncwarp();
    }
    // The queries of all heads; the keys as soon as is known what comes first.
    __device__ void stream(const Halves& halves) {
        const AttentionGradientArgs& args = all.base;
        const Extents& n = args.n;
        const Block& block = halves.block;
        const Segment& segment = halves.segment;
        bool loaded = false;
        for (int head = block.head * n.group; head < (block.head + 1) * n.group; ++head) {
            const Mask mask(n, segment, block.batch, head);
            const Range queries = halves.queries(mask);
            const RowVectors vectors(args, block.batch, head, segment);
            const int entries = entry_of(n, block.batch, head, segment);
            for (Walk walk = halves.walk(mask, queries); walk.more(); walk.next()) {
                Row stats[kColumns / 32];
#pragma unroll
                for (int i = 0; i < kColumns / 32; ++i) {
                    const int q = walk.row() + lane + 32 * i;
                    stats[i] = {infinity(), 0.f};
                    if (queries.contains(q)) stats[i] = {vectors.lse[q], vectors.delta[q]};
                }
                if (!loaded) load_keys(halves);
                loaded = true;
                warp_wait(lay.empty(at.slot), at.parity ^ 1);
                float* const to = reinterpret_cast<float*>(__cvta_shared_to_generic(lay.vectors(at.slot)));
#pragma unroll
                for (int i = 0; i < kColumns / 32; ++i) {
                    to[lane + 32 * i] = stats[i].lse;
                    to[kColumns + lane + 32 * i] = stats[i].delta;
                }
                if (lane == 0) put_step(lay.step(at.slot), {walk.tile(), entries + walk.tile(), walk.here.bits});
                __syncwarp();
                others_arrive(lay.full(at.slot));
                if (lane == 0) {
                    const u32 here = lay.full(at.slot);
                    const int from = segment.first_query + walk.row();
                    mbarrier_expect(here, kStageBytes);
                    load_chunks<kColumns>(lay.queries(at.slot), all.query, here, 0, Scored::kChunks, from, head,
                                          block.batch);
                    load_chunks<kColumns>(lay.grads(at.slot), all.grad, here, 0, Valued::kChunks, from, head,
                                          block.batch);
                }
                __syncwarp();
                at.advance();
            }
        }
        if (!loaded) load_keys(halves);
    }
};

extern "C" __global__ void __launch_bounds__(kThreads + 128, 1)
    streamkl_attention_fused(const __grid_constant__ HopperAttentionFusedArgs all) {
    extern __shared__ unsigned char shared[];
    const AttentionGradientArgs& args = all.base;
    const Extents& n = args.n;
    // Uniform over the warp by construction, which the compiler must be told: descriptors then live in uniform
    // registers.
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);

    const Layout lay{(static_cast<u32>(__cvta_generic_to_shared(shared)) + 1023) & ~1023u};
    if (threadIdx.x == 0) lay.init();
    __syncthreads();

    if (group == kGroups) {
        registers_lower<SKL_PRODUCER_REGISTERS>();
        if (threadIdx.x < kThreads + 32) Producer(all, lay).run();
        return;
    }

    registers_raise<SKL_CONSUMER_REGISTERS>();
    const int lane = lane_id(), warp = (threadIdx.x / 32) & 3;
    Row stats[kLaneRows];  // of stationary queries, which there are none of

    const u64 keys = swizzled_descriptor(lay.keys() + group * 64 * 128),
              values = swizzled_descriptor(lay.values() + group * 64 * 128),
              keys_out = swizzled_descriptor(lay.keys(), kRows * 128);
    const u64 queries = swizzled_descriptor(lay.queries(0)), grads = swizzled_descriptor(lay.grads(0));
    const u64 queries_out = swizzled_descriptor(lay.queries(0), kColumns * 128),
              grads_out = swizzled_descriptor(lay.grads(0), kColumns * 128);
    const u64 exchange = swizzled_descriptor(lay.exchange(0));
    const u32 exchange_to = fragment_address(lay.exchange(0), 64 * group + 16 * warp, lane);
    const auto stage = [](u64 first, int slot) { return first + static_cast<u64>(slot * (kStageBytes >> 4)); };
    const auto buffer = [](u64 first, int slot) { return first + static_cast<u64>(slot * (kExchangeBytes >> 4)); };
    RingCursor<kStages> at;
    u32 count = 0;  // of tiles
    const auto next_step = [&lay, &at]() {
        warp_wait(lay.full(at.slot), at.parity);  // or two arrivals could fall into one phase
        return *reinterpret_cast<const Step*>(__cvta_shared_to_generic(lay.step(at.slot)));
    };

    // dQ of the last tile, added to its sums, where it is the warpgroup's turn.
    using Part = float[kOutTiles][4];
    const auto issue_queries = [&lay, &count, &buffer, exchange, keys_out](Part& dq) {
        const u32 of_last = count - 1;
        mbarrier_wait(lay.made(of_last % kExchanges), of_last / kExchanges & 1);
        const u64 exchanged = buffer(exchange, of_last % kExchanges);
        wgmma_fence();
        if constexpr (kNarrow) {
            multiply_queries<0, 4>(dq, exchanged, keys_out);
            wgmma_commit();
            wgmma_wait<0>();
            fence_accumulators(dq);
            multiply(dq, shared_int(lay.exponent(of_last % kExchanges, 1)) -
                             shared_int(lay.exponent(of_last % kExchanges, 0)));
            wgmma_fence();
            multiply_queries<4, 8>(dq, exchanged, keys_out);
        } else {
            multiply_queries(dq, exchanged, keys_out);
        }
        wgmma_commit();
    };
    const auto add_queries = [&lay, &count, &all, warp, lane](Part& dq) {
        fence_accumulators(dq);
        const u32 of_last = (count - 1) % kExchanges;
        const int entry = shared_int(lay.entry(of_last));
        if constexpr (kNarrow) multiply(dq, -shared_int(lay.exponent(of_last, 1)));
        __syncwarp();
        warp_arrive(lay.taken(of_last));
        float* const sums = reinterpret_cast<float*>(all.workspace) + static_cast<i64>(entry) * AttentionSums::kSums +
                            warp * kWarpSums + lane * 4;
#pragma unroll
        for (int i = 0; i < kOutTiles; ++i) global_add(sums + i * 128, dq[i]);
    };

#pragma unroll 1
    for (;;) {
        const Step work = next_step();
        if (work.tile == kNoMore) break;
        const Halves halves(n, lay.vectors(at.slot));
        barrier_sync(kWarpgroup + group, 128);  // all have read what is written now
        if (threadIdx.x % 128 == 0) {
            shared_int(lay.work(group)) = work.entry;
            shared_int(lay.work(group) + 4) = halves.first[0];
            shared_int(lay.work(group) + 8) = halves.first[1];
            shared_int(lay.exponent(kExchanges, group)) = kFirstExponent;
        }
        warp_arrive(lay.empty(at.slot));
        at.advance();
        const int first_key = halves.half(group).begin;
        // Of a list it knows what the producer tells.
        Mask mask(n, halves.segment, halves.block.batch, halves.block.head * n.group);
        Strip<kOutTiles> out;
        Strip<kValueTiles> out_values;
        clear<kOutTiles>(out);
        clear<kValueTiles>(out_values);
        mbarrier_wait(lay.keys_here(), static_cast<u32>(work.bits));
        clear_unseen<Scored, 64>(
            lay.keys() + group * 64 * 128, kRows, kWarpgroup + group,
            [&all, &halves, group, first_key](int r) { return key_seen(all, halves, group, first_key + r); });
        const u32 start = count;
#pragma unroll 1
        for (;;) {
            const Step step = next_step();
            if (step.tile < 0) break;
            const int slot = at.slot;
            at.advance();
            const int query = step.tile * kColumns;
            mask.enter(first_key - 64 * group, query, step.bits);
            Range seen{0, 0};
            if (first_key < mask.segment.keys)
                seen = mask.queries_of(first_key, min(first_key + 64, mask.segment.keys));
            seen.intersect({query, query + kColumns});
            const bool works = !seen.empty() && mask.any_visible(query, query + kColumns, first_key, first_key + 64);
            StripA<KeyTile::kCode, kTiles> p, x;
            if (works) {
                const bool full = mask.full(query, query + kColumns, first_key, first_key + 64);
                Visible pairs;
                if (!full) {
                    pairs.find(mask, query, first_key + 16 * warp + Accumulators::first_row(lane));
                    clear_unseen<Scored, kColumns>(lay.queries(slot), kColumns, kWarpgroup + group,
                                                   [&lay, &mask, &step, group, query](int r) {
                                                       return query_seen(lay.work(group), mask, step, query + r);
                                                   });
                }
                Strip<kTiles> t, d;
                wgmma_fence();
                multiply_rows<Scored, kRows, Scored::kChunks>(t[0], keys, stage(queries, slot), 0);
                multiply_rows<Valued, kRows, Valued::kChunks>(d[0], values, stage(grads, slot), 0);
                wgmma_commit();
                wgmma_wait<0>();
                fence_accumulators(t[0]);
                fence_accumulators(d[0]);
                if (full)
                    logit_gradients<false>(t, d, stats, lay.vectors(slot), pairs, 0, args.numbers);
                else
                    logit_gradients<true>(t, d, stats, lay.vectors(slot), pairs, 0, args.numbers);
                strip_to_a<KeyTile::kCode, kTiles>(p, t);
                if constexpr (kNarrow) {
#pragma unroll
                    for (int k = 0; k < kTiles / 2; ++k)
                        fence_operand(p[k][0].r[0]);  // half the registers that they were
                    fence_accumulators(d[0]);
                    scale(d[0], out[0], lay.tops(group), lay.exponent(kExchanges, group), group);
                }
                strip_to_a<KeyTile::kCode, kTiles>(x, d);
            } else {
#pragma unroll
                for (int k = 0; k < 2 * kTiles; ++k) x[k / 4][0].r[0][k % 4] = 0;
            }
            const int made = count % kExchanges;
            mbarrier_wait(lay.taken(made), count / kExchanges & 1 ^ 1);
#pragma unroll
            for (int k = 0; k < kTiles / 2; ++k) store_fragment(exchange_to + made * kExchangeBytes, k, x[k][0].r[0]);
            async_fence();
            if (works) {
                wgmma_fence();
                multiply_out<Valued>(out_values[0], p, stage(grads_out, slot));
                wgmma_commit();
                barrier_sync(kWarpgroup + group, 128);
                multiply_keys(out[0], buffer(exchange, made) + (group * 64 * 128 >> 4), stage(queries_out, slot));
                wgmma_commit();
            }
            __syncwarp();
            if (threadIdx.x == 0) shared_int(lay.entry(made)) = shared_int(lay.step(slot) + 4);
            if (kNarrow && threadIdx.x % 128 == 0)
                shared_int(lay.exponent(made, group)) = shared_int(lay.exponent(kExchanges, group));
            warp_arrive(lay.made(made));
            if (count > start && count % 2 == group) {
                Part dq;
                wgmma_wait<kNarrow ? 0 : 1>();
                fence_accumulators(out_values[0]);
                if constexpr (kNarrow) fence_accumulators(out[0]);
                issue_queries(dq);
                wgmma_wait<1>();
                if constexpr (!kNarrow) fence_accumulators(out[0]);
                warp_arrive(lay.empty(slot));
                wgmma_wait<0>();
                add_queries(dq);
            } else {
                wgmma_wait<0>();
                fence_accumulators(out_values[0]);
                fence_accumulators(out[0]);
                warp_arrive(lay.empty(slot));
            }
            ++count;
        }
        if (count > start && count % 2 == group) {
            Part dq;
            issue_queries(dq);
            wgmma_wait<0>();
            add_queries(dq);
        }
        warp_arrive(lay.keys_free());
        int exponents[kLaneRows];
#pragma unroll
        for (int i = 0; i < kLaneRows; ++i) exponents[i] = kNarrow ? shared_int(lay.exponent(kExchanges, group)) : 0;
        write_gradients(args, out, out_values, exponents, first_key + 16 * warp + Accumulators::first_row(lane),
                        shared_int(lay.work(group)));
    }
}

// The first entries last, and the last ones first behind the pass: these are in the L2 cache then.
extern "C" __global__ void __launch_bounds__(kHelperThreads)
    streamkl_attention_fused_prepare(const __grid_constant__ HopperAttentionFusedArgs all) {
    const int index = gridDim.x - 1 - blockIdx.x;
    float4* const sums =
        reinterpret_cast<float4*>(all.workspace) + static_cast<i64>(index) * (AttentionSums::kSums / 4);
    for (int i = threadIdx.x; i < AttentionSums::kSums / 4; i += kHelperThreads)
        sums[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (blockIdx.x > 0 || threadIdx.x > 0) return;
    *taken(all) = 0;
}

// A quad's part of a tile of 8 columns is 64 contiguous bytes of the sums: the first halves of its four elements are the
// upper row, the others the lower one. A thread takes whole parts, neighbours those of one row. Rows without keys get
// zeros, whatever the keys of their tile hold.
extern "C" __global__ void __launch_bounds__(kHelperThreads)
    streamkl_attention_fused_finish(const __grid_constant__ HopperAttentionFusedArgs all) {
    const AttentionGradientArgs& args = all.base;
    const int index = gridDim.x - 1 - blockIdx.x, tiles = head_entries(args.n), pair = index / tiles,
              batch = pair / args.n.heads, head = pair % args.n.heads;
    WorkTile tile{index % tiles, 0, 1, 0, {0, kNoLimit}};
    const Segment segment = Mask::locate<kColumns, true>(args.n, head, tile);
    const float* const sums =
        reinterpret_cast<const float*>(all.workspace) + static_cast<i64>(index) * AttentionSums::kSums;
    const RowVectors vectors(args, batch, head, segment);
    const float factor = Score::factor(args.out_scale) * power_of_two(-kWeightScale);
    constexpr int kParts = KeyTile::kHeadDim / 8;
    for (int i = threadIdx.x; i < 32 * kParts; i += kHelperThreads) {
        const int part = i % kParts, quad = i / kParts;
        const float4* const from =
            reinterpret_cast<const float4*>(sums + quad / 8 * kWarpSums + (part * 32 + quad % 8 * 4) * 4);
        const float4 x[4] = {from[0], from[1], from[2], from[3]};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int q = tile.tile * kColumns + quad / 8 * 16 + quad % 8 + 8 * half;
            if (q >= segment.queries) continue;
            const bool kept = vectors.lse[q] != infinity();
            const u64 to = all.out_q.pointer + (batch * all.out_q.batch + head * all.out_q.head +
                                                (segment.first_query + q) * all.out_q.row + 8 * part) *
                                                   E::kBytes;
            u32 packed[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                u32 planes[1];
                E::split(kept ? (half ? x[j].z : x[j].x) * factor : 0.f, kept ? (half ? x[j].w : x[j].y) * factor : 0.f,
                         planes);
                packed[j] = planes[0];
            }
            *reinterpret_cast<uint4*>(to) = make_uint4(packed[0], packed[1], packed[2], packed[3]);
        }
    }
}

// Gradients of the indexer's queries, weights and keys where ids name few of many keys, from the gradients of logits in
// the order of each row's list (tile/key_list.cuh). Heads are the rows of a product: with s = q_h k_j, g its gate and
// d_j the gradient of the logit, A = d_j w_h g, dq_h = A k, dw_h = sum_j d_j a(s), and of each key A^T q.
//
//   item       one query row of one batch entry and group, and all keys of its list
//   producer   a warpgroup; lists the keys of an item, and copies their rows to a ring of tiles of 64 keys
//   consumers  two warpgroups, which take tiles in turns and have sums of dq and dw of their own: the second's are
//              added to the first's
//
//   barrier        arrivals                                     waited for by
//   known[i]       1                                            consumers: item i is written
//   over[i]        one per consumer warp                        the producer: item i may be overwritten
//   queries_over   one per consumer warp                        the producer: the queries may be overwritten
//   full[i]        one per producer warp                        its consumer: tile i has arrived; the first of an item
//                                                               brings the queries
//   empty[i]       one per warp of its consumer                 the producer: tile i may be overwritten
//
// What rows have for a key is added in memory, in no fixed order.
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "kernels/indexer_gathered/roles.cuh"
#include "ptx/global.cuh"
#include "tile/fragment.cuh"
#include "tile/gated.cuh"
#include "tile/index_parts.cuh"
#include "tile/swizzled.cuh"

using IndexSide = SwizzledTile<SKL_S_ELEMENT, SKL_S_DIM>;
using E = Element<SKL_S_ELEMENT>;

constexpr bool kGated = SKL_GATED;
constexpr int kTileBytes = IndexSide::bytes(kColumns);
constexpr int kDimTiles = round_up(SKL_S_DIM, 16) / 8;

// Offsets in shared memory.
constexpr int kQueriesAt = 0;
constexpr int kRingAt = kQueriesAt + IndexSide::bytes(kRows);
constexpr int kFactorsAt = kRingAt + kRing * kTileBytes;         // operand A of the keys' sums, [consumer]
constexpr int kSumsAt = kFactorsAt + kConsumers * kRows * 128;   // the second consumer's, [number][thread]
constexpr int kIdsAt = kSumsAt + 128 * 4 * (4 * kDimTiles + 2);  // keys of tiles, [slot]
constexpr int kListAt = kIdsAt + kRing * kColumns * 4;
constexpr int kCountsAt = kListAt + 4 * kMostKeys;
constexpr int kBarriersAt = kCountsAt + 4 * kProducerWarps;
static_assert(kRows == 64 && kColumns == 64 && kWarps == 4, "plan: a warpgroup has 64 heads, and a tile 64 keys");
static_assert(!IndexSide::kHalf && kDimTiles <= 16, "plan: bfloat16, and sums that are one product wide");
static_assert(kRing % kConsumers == 0 && kLag >= 1 && kLag + kConsumers <= kRing, "plan: each has a tile in hand");
static_assert(1024 + kBarriersAt + kBarrierBytes == SKL_SMEM_BYTES, "plan: smem_bytes");

struct Shared : SharedRoles<kBarriersAt> {
    __device__ int* ids(int slot) const { return at<int>(kIdsAt) + slot * kColumns; }
    __device__ u32 tile(int slot) const { return base + kRingAt + slot * kTileBytes; }
};

struct Producer : Copier<Shared> {
    __device__ void run() {
        Copier::run(
            kListAt, kCountsAt, [this](const Item& item) { return stats_of(args, item.entry, item.row).z != 0.f; },
            [this](const Item& item) {
                for (int key = 0; key < item.keys; key += kColumns) copy(item, key);
            });
    }

private:
    // Rows of 8 threads each, 16 at a time.
    __device__ void copy(const Item& item, int key) {
        const int batch = item.entry / args.groups, group = item.entry % args.groups;
        wait_for_buffer();
        if (key == 0) copy_queries(batch, group, item.row);
        const HeadView x = head_view<Rows>(args.index_k, batch, args.index_key_heads > 1 ? group : 0, 0);
        for (int i = thread / 8; i < kColumns; i += 4 * kProducerWarps) {
            const bool there = key + i < item.keys;
            const int id = there ? shared.at<int>(kListAt)[key + i] : 0;
            if (thread % 8 == 0) shared.ids(ring.slot)[i] = id;
            copy_row(shared.tile(ring.slot), kColumns, i, x.base + id * x.row, there);
        }
        commit();
    }
    // A row to a head: they come with the item's first keys.
    __device__ void copy_queries(int batch, int group, int row) {
        wait_for_queries();
        for (int i = thread / 8; i < kRows; i += 4 * kProducerWarps) {
            const bool there = i < args.index_heads;
            const HeadView x = head_view<Rows>(args.index_q, batch, group * args.index_heads + (there ? i : 0), row);
            copy_row(shared.base + kQueriesAt, kRows, i, x.base, there);
        }
    }
    __device__ void copy_row(u32 tile, int rows, int row, u64 from, bool there) const {
#pragma unroll
        for (int c = 0; c < IndexSide::kChunks; ++c)
            copy_piece(tile + c * rows * 128, row, from + 128 * c + thread % 8 * 16,
                       there && 64 * c + thread % 8 * 8 < IndexSide::kDim);
    }
    struct Rows {
        using E = Element<SKL_S_ELEMENT>;
    };
};

struct Consumer {
    const IndexerArgs& args;
    const Shared shared;
    const int which, warp, lane;  // the warp's number in its warpgroup
    const int head;               // of the lane's first row of a product of heads
    RingCursor<kRing> ring;       // of all tiles; its own are those of its turn

    __device__ Consumer(const IndexerArgs& args, Shared shared, int which)
        : args(args),
          shared(shared),
          which(which),
          warp(threadIdx.x / 32 % kWarps),
          lane(lane_id()),
          head(warp * 16 + Accumulators::first_row(lane)) {}

    __device__ void run() {
        consume_rows(shared, [this](const Item& item, int) { row(item); });
    }

private:
    using Sums = float[kDimTiles][4];

    __device__ static void clear(Sums& x) {
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[d][e] = 0.f;
    }

    __device__ void row(const Item& item) {
        const float4 stats = stats_of(args, item.entry, item.row);
        // Of a row that is NaN all is, though gates may be closed.
        const bool poisoned = !is_finite(stats.x + stats.y + stats.z);
        float weight[2], of_weights[2] = {0.f, 0.f};
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            const int h = head + Accumulators::below(below);
            weight[below] = 0.f;
            if (h < args.index_heads && item.keys > 0)
                weight[below] = reinterpret_cast<const float*>(
                    args.weights)[(static_cast<i64>(item.entry) * args.index_heads + h) * args.queries + item.row];
            if (poisoned) weight[below] = not_a_number();
        }
        Sums out;
        clear(out);
        for (int i = 0; kColumns * i < item.keys; ++i, ring.advance())
            if ((item.first + i) % kConsumers == which) tile(out, of_weights, item, weight, kColumns * i);
        if (item.keys > 0) warp_arrive(shared.barrier(kQueriesOver));
        if (poisoned) of_weights[0] = of_weights[1] = not_a_number();
        join(out, of_weights, item);
    }

    // What a tile of keys adds to the sums of the row, and to those of its keys.
    __device__ void tile(Sums& out, float (&of_weights)[2], const Item& item, const float (&weight)[2], int key) {
        const u32 keys = shared.tile(ring.slot), queries = shared.base + kQueriesAt,
                  factors = shared.base + kFactorsAt + which * kRows * 128;
        mbarrier_wait(shared.barrier(kFull, ring.slot), ring.parity);
        float s[kColumns / 8][4];
        {
            const u64 a = swizzled_descriptor(queries), b = swizzled_descriptor(keys);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < IndexSide::kSteps; ++k)
                wgmma<false, 0, 0>(s, a + ((k / 4 * kRows * 128 + k % 4 * 32) >> 4),
                                   b + ((k / 4 * kColumns * 128 + k % 4 * 32) >> 4), k > 0);
            wgmma_commit();
            wgmma_wait<0>();
            fence_accumulators(s);
        }
        const float* const gradients = listed_gradients(args, item.entry, item.row) + key;
        u32 a[kColumns / 16][4];
#pragma unroll
        for (int n = 0; n < kColumns / 8; ++n) {
            float x[4];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const int column = 8 * n + Accumulators::first_column(lane) + j;
                const float d = key + column < item.keys ? gradients[column] : 0.f;
#pragma unroll
                for (int below = 0; below < 2; ++below) {
                    const int e = Accumulators::element(below, j);
                    const bool open = !kGated || open_gate(s[n][e]) || weight[below] != weight[below];
                    of_weights[below] = fmaf(d, open ? s[n][e] : 0.f, of_weights[below]);
                    x[e] = open ? d * weight[below] : 0.f;
                }
            }
            a[n / 2][2 * (n % 2)] = pack_bf16(x[0], x[1]);
            a[n / 2][2 * (n % 2) + 1] = pack_bf16(x[2], x[3]);
        }
        const u32 to = fragment_address(factors, 16 * warp, lane);
#pragma unroll
        for (int k = 0; k < kColumns / 16; ++k) {
            store_fragment(to, k, a[k]);
            fence_operand(a[k]);
        }
        async_fence();
        barrier_sync(kWarpgroup + which, 128);
        Sums of_keys;
        {
            const u64 b = swizzled_descriptor(keys, kColumns * 128), q = swizzled_descriptor(queries, kRows * 128),
                      transposed = swizzled_descriptor(factors, kRows * 128);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < kColumns / 16; ++k) wgmma<false, 1>(out, a[k], b + (k * 16 * 128 >> 4), 1);
#pragma unroll
            for (int k = 0; k < kRows / 16; ++k)
                wgmma<false, 1, 1>(of_keys, transposed + (k * 16 * 128 >> 4), q + (k * 16 * 128 >> 4), k > 0);
            wgmma_commit();
            wgmma_wait<0>();
            fence_accumulators(out);
            fence_accumulators(of_keys);
        }
        if (args.key_sums) add_keys(of_keys, item, key);
        __syncwarp();
        warp_arrive(shared.barrier(kEmpty, ring.slot));
        // Its factors are read: others of the warpgroup may write the next ones.
        barrier_sync(kWarpgroup + which, 128);
    }

    // Two lanes have four columns of two rows: one has the first row of them, the other the second.
    __device__ void add_keys(const Sums& x, const Item& item, int key) const {
        const bool second = lane & 1;
        const int mine = 16 * warp + Accumulators::first_row(lane) + Accumulators::below(second);
        const int batch = item.entry / args.groups, group = item.entry % args.groups;
        const int heads = args.index_key_heads;
        constexpr int depth = IndexerGradients::kKeySums;
        float* const to =
            reinterpret_cast<float*>(args.key_sums) +
            (static_cast<i64>(batch * heads + (heads > 1 ? group : 0)) * args.keys + shared.ids(ring.slot)[mine]) *
                depth +
            lane / 2 % 2 * 4;
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d) {
            const float left = __shfl_xor_sync(~0u, second ? x[d][0] : x[d][2], 1),
                        right = __shfl_xor_sync(~0u, second ? x[d][1] : x[d][3], 1);
            const float four[4] = {second ? left : x[d][0], second ? right : x[d][1], second ? x[d][2] : left,
                                   second ? x[d][3] : right};
            if (key + mine < item.keys) global_add(to + 8 * d, four);
        }
    }

    // The second consumer's sums are added to those of the first, which writes them.
    __device__ void join(Sums& out, float (&of_weights)[2], const Item& item) const {
        float* const left = shared.at<float>(kSumsAt) + threadIdx.x % 128;
        if (which == 1) {
#pragma unroll
            for (int d = 0; d < kDimTiles; ++d)
#pragma unroll
                for (int e = 0; e < 4; ++e) left[(4 * d + e) * 128] = out[d][e];
            for (int below = 0; below < 2; ++below) left[(4 * kDimTiles + below) * 128] = of_weights[below];
        }
        barrier_sync(kTurn, 256);
        if (which == 0) {
#pragma unroll
            for (int d = 0; d < kDimTiles; ++d)
#pragma unroll
                for (int e = 0; e < 4; ++e) out[d][e] += left[(4 * d + e) * 128];
            for (int below = 0; below < 2; ++below) of_weights[below] += left[(4 * kDimTiles + below) * 128];
        }
        barrier_sync(kTurn + 1, 256);  // they may be overwritten
        if (which == 0) write(out, of_weights, item);
    }
    __device__ void write(const Sums& out, const float (&of_weights)[2], const Item& item) const {
        const int batch = item.entry / args.groups, group = item.entry % args.groups;
#pragma unroll
        for (int below = 0; below < 2; ++below) {
            const float sum = Accumulators::sum_row(of_weights[below]);
            const int h = head + Accumulators::below(below), of_all = group * args.index_heads + h;
            if (h >= args.index_heads) continue;
            if (const Tensor3& to = args.out_weights; to.pointer && Accumulators::writes_row(lane))
                Element<SKL_W_ELEMENT>::store(to.pointer + (batch * to.batch + of_all * to.head + item.row * to.row) *
                                                               Element<SKL_W_ELEMENT>::kBytes,
                                              sum);
            const Tensor4& to = args.out_q;
            if (!to.pointer) continue;
            const u64 row = to.pointer + (batch * to.batch + of_all * to.head + item.row * to.row) * E::kBytes;
#pragma unroll
            for (int d = 0; d < kDimTiles; ++d) {
                const int column = 8 * d + Accumulators::first_column(lane);
                if (column >= SKL_S_DIM) continue;
                for (int j = 0; j < 2; ++j)
                    E::store(row + (column + j) * to.column * E::kBytes, out[d][Accumulators::element(below, j)]);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(384, 1) streamkl_indexer_listed(const __grid_constant__ IndexerArgs args) {
    extern __shared__ unsigned char memory[];
    const Shared shared{{(static_cast<u32>(__cvta_generic_to_shared(memory)) + 1023) & ~1023u}};
    take_roles(
        shared, kWarps, [&args, &shared](int thread) { Producer{{args, shared, thread}}.run(); },
        [&args, &shared](int group) { Consumer(args, shared, group).run(); });
}

// Attention, forward: of every row the values that it sees, weighed by the softmax of its logits, and the log-sum-exp
// of these, one pass over the keys.
//
//   block    kRows query rows of one head; kWarps warps with kWarpTiles x 16 rows each, independent of one another
//   stream   tiles of kColumns keys and values, kStages in flight (cp.async)
//   per tile S = Q K^T in registers, weights of it against the rows' references (tile/attention_rows.cuh), packed as
//            operand A, times the values: O += P V
//
// Needs sm_80: cp.async, ldmatrix, mma.sync. One __syncthreads per tile: it says both that tile i has arrived and that
// everybody is done with the buffer that is filled next. Values that no row of the block sees are zeros by then: a
// weight of 0 times what such memory holds need not be 0.
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "pipeline/ring.cuh"
#include "tile/load.cuh"
#include "tile/scores.cuh"
#include "tile/schedule.cuh"
#include "@mask"
#include "@score"
#include "tile/attention_rows.cuh"

using Score = SKL_A_SCORE;
using KeyTile = Tile<SKL_A_ELEMENT, SKL_A_DIM>;  // and queries
using ValueTile = Tile<SKL_A_ELEMENT, SKL_VALUE_DIM>;
using E = KeyTile::E;

constexpr int kTiles = kColumns / 8;
constexpr int kOutTiles = ValueTile::kDepth / 8;
constexpr int kQueryBytes = KeyTile::bytes(kRows);
constexpr int kStageBytes = KeyTile::bytes(kColumns) + ValueTile::bytes(kColumns);

static_assert(kQueryBytes + kStages * kStageBytes == SKL_SMEM_BYTES, "plan: smem_bytes");

// Keys and values, a tile after the other.
struct Keys {
    u32 ring;  // shared memory
    HeadView key_view, value_view;
    Range valid;
    Cursor<Mask> ahead;
    __device__ KeyTile keys(int stage) const { return {ring + stage * kStageBytes}; }
    __device__ ValueTile values(int stage) const { return {ring + stage * kStageBytes + KeyTile::bytes(kColumns)}; }
    __device__ void operator()(int i) {
        const int key = ahead.row(), stage = i % kStages;
        // Asking takes registers.
        constexpr int at_once = Mask::kSparse ? 1 : 16;
        const bool full = ahead.full(ahead.rows.begin, ahead.rows.end);
        const auto met = [this, full](int k) {
            return full || ahead.streamed_seen(ahead.rows.begin, ahead.rows.end, k);
        };
        load_rows<kColumns, SKL_AK_VECTOR>(keys(stage), key_view, key, valid);
        load_rows<kColumns, SKL_VALUE_VECTOR, at_once>(values(stage), value_view, key, valid, met);
        ahead.next();
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, SKL_MIN_BLOCKS)
    streamkl_attention(const __grid_constant__ AttentionArgs args) {
    extern __shared__ __align__(16) unsigned char shared[];
    const Extents& n = args.n;
    Block block = block_of(blockIdx.x, n, n.heads, n.batch * n.heads, !Mask::kListed);
    const Segment segment = Mask::locate(n, block.head, block);
    const Mask mask(n, segment, block.batch, block.head);

    const int first_row = block.tile * kRows, end_row = min(first_row + kRows, segment.queries);
    if (Mask::kRagged && first_row >= segment.queries) return;
    const Range rows{first_row, end_row}, keys = mask.keys_of(first_row, end_row);
    const Range steps = mask.steps_of(first_row, covering(keys, kColumns));
    Cursor<Mask> at(mask, rows, split_of(steps, block, n));

    const u32 base = static_cast<u32>(__cvta_generic_to_shared(shared));
    const KeyTile queries{base};
    const int key_head = block.head / n.group;
    Keys fetch{base + kQueryBytes, head_view<KeyTile>(args.key, block.batch, key_head, segment.first_key),
               head_view<ValueTile>(args.value, block.batch, key_head, segment.first_key), keys, at};

    load_rows<kRows, SKL_AQ_VECTOR>(
        queries, head_view<KeyTile>(args.query, block.batch, block.head, segment.first_query), first_row, rows);
    cp_async_commit();
    fill_ring(fetch.ahead, fetch);

    const int lane = lane_id(), warp_row = (threadIdx.x / 32) * (16 * kWarpTiles);
    const int row = first_row + warp_row + Accumulators::first_row(lane);
    SoftmaxRow<E> state[kLaneRows];
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) state[i].start();
    Strip<kOutTiles> out;
    clear<kOutTiles>(out);

    for (int i = 0; at.more(); ++i, at.next()) {
        advance_ring(i, fetch.ahead, fetch, Nothing{});
        const int stage = i % kStages;
        Strip<kTiles> x;
        scores<kTiles>(x, queries, warp_row, fetch.keys(stage));
#pragma unroll
        for (int m = 0; m < kWarpTiles; ++m)
#pragma unroll
            for (int c = 0; c < kTiles; ++c) turn<Score>(x[m], c, args.numbers);
        StripA<KeyTile::kCode, kTiles> a;
        if (at.full(first_row, end_row)) {
            weigh<Score, kOutTiles, kTiles>(state, out, a, x, args.numbers);
        } else {
            hide<Score, kTiles>(x, at.mask, row, at.row(), args.numbers);
            weigh<LogitsThemselves, kOutTiles, kTiles>(state, out, a, x, args.numbers);
        }
        accumulate<kOutTiles, kTiles>(out, a, fetch.values(stage));
    }
    cp_async_wait<0>();  // a split without tiles has not waited for its queries
    write_rows<ValueTile>(args, block, segment, state, out, row);
}

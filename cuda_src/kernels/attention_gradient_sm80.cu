// Attention, backward: the gradient of the queries, or of the keys, of the values or of both. A block owns kRows rows
// of one operand and streams the rows of the other ones, recomputing the weights P from the saved log-sum-exps. With G
// the upstream gradient of the results,
//
//   stationary queries:  X = P (G V^T - delta)       dQ = c X K         queries and G stay, keys and values come by
//   stationary keys:     X^T alike                   dK = c X^T Q       keys and values stay, queries and G come by;
//                                                    dV = P^T G         the query heads that share them are summed
//
//   per tile: S and G V^T in registers, X and P in their places, packed as operands A, times the streamed tiles read
//   transposed
//
// No atomics: each output element has one owner and a fixed order of addition. An element type of narrow exponent gets
// P, which is at most 1, times 2^kWeightScale, and X scaled by a power of two per row of the output, which moves when a
// tile exceeds it; the epilogue takes both back.
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "pipeline/ring.cuh"
#include "tile/load.cuh"
#include "tile/scores.cuh"
#include "tile/schedule.cuh"
#include "@mask"
#include "@score"
#include "tile/attention_gradient.cuh"

constexpr int kRowBytes = KeyTile::bytes(kRows) + (kScored ? ValueTile::bytes(kRows) : 0);
constexpr int kStageBytes = KeyTile::bytes(kColumns) + ValueTile::bytes(kColumns) + kVectors * kColumns * 4;
static_assert(kRowBytes + kStages * kStageBytes == SKL_SMEM_BYTES, "plan: smem_bytes");

// A tile of streamed rows in shared memory.
struct Stage {
    u32 base;
    __device__ KeyTile scored() const { return {base}; }
    __device__ ValueTile valued() const { return {base + KeyTile::bytes(kColumns)}; }
    __device__ u32 vectors() const { return base + KeyTile::bytes(kColumns) + ValueTile::bytes(kColumns); }
};

// Rows of G, which comes as the caller's framework has it: what a plan does not know.
template <int ROWS, int AT_ONCE = 16, class Wanted = Everything>
__device__ inline void load_grads(ValueTile tile, const AttentionGradientArgs& args, const HeadView& grads, int first,
                                  Range valid, Wanted wanted = {}) {
    if (vector_rows(args.grad, E::kBytes))
        load_rows<ROWS, true, AT_ONCE>(tile, grads, first, valid, wanted);
    else
        load_rows<ROWS, false>(tile, grads, first, valid, wanted);
}

extern "C" __global__ void __launch_bounds__(kThreads, SKL_MIN_BLOCKS)
    streamkl_attention_gradient(const __grid_constant__ AttentionGradientArgs args) {
    extern __shared__ __align__(16) unsigned char shared[];
    const Extents& n = args.n;
    const int heads_per_block = kRowsAreQueries ? 1 : n.group;  // query heads summed into one key head
    const int out_heads = n.heads / heads_per_block;
    Block block = block_of(blockIdx.x, n, out_heads, n.batch * out_heads, kRowsAreQueries && !Mask::kListed);
    const int first_head = block.head * heads_per_block, end_head = first_head + heads_per_block;
    const int key_head = first_head / n.group;
    const Segment segment = Mask::locate(n, first_head, block);
    const int row_count = kRowsAreQueries ? segment.queries : segment.keys;
    const int first_row = block.tile * kRows, end_row = min(first_row + kRows, row_count);
    if (Mask::kRagged && first_row >= row_count) return;
    const Range rows{first_row, end_row};

    const u32 base = static_cast<u32>(__cvta_generic_to_shared(shared));
    const KeyTile rows_scored{base};
    const ValueTile rows_valued{base + KeyTile::bytes(kRows)};
    const int lane = lane_id(), warp_row = (threadIdx.x / 32) * (16 * kWarpTiles);
    const int row = first_row + warp_row + Accumulators::first_row(lane);

    // Asked for wherever a tile is used: registers that keep what is cheap to compute are missing elsewhere.
    const auto stage = [base](int i) { return Stage{base + kRowBytes + (i % kStages) * kStageBytes}; };

    Strip<kOutTiles> out;
    Strip<kValueTiles> out_values;
    clear<kOutTiles>(out);
    clear<kValueTiles>(out_values);
    int exponent[kLaneRows];
    Row stats[kLaneRows];
#pragma unroll
    for (int i = 0; i < kLaneRows; ++i) exponent[i] = E::kNarrowExponent ? 126 : 0;

    for (int head = first_head; head < end_head; ++head) {
        const Mask mask(n, segment, block.batch, head);
        const Range columns = kRowsAreQueries ? mask.keys_of(first_row, end_row) : mask.queries_of(first_row, end_row);
        Cursor<Mask> at(mask, rows, mask.steps_of(first_row, covering(columns, kColumns)));
        const RowVectors vectors(args, block.batch, head, segment);
        const HeadView queries = head_view<KeyTile>(args.query, block.batch, head, segment.first_query);
        const HeadView grads = head_view<ValueTile>(args.grad, block.batch, head, segment.first_query);
        const HeadView keys = head_view<KeyTile>(args.key, block.batch, key_head, segment.first_key);
        const HeadView values = head_view<ValueTile>(args.value, block.batch, key_head, segment.first_key);
        Cursor<Mask> ahead = at;
        const auto fetch = [&args, &rows, &columns, &ahead, &vectors, &queries, &grads, &keys, &values, stage](int i) {
            const int first = ahead.row();
            // Asking takes registers.
            constexpr int at_once = Mask::kSparse ? 1 : 16;
            const bool full = ahead.full(rows.begin, rows.end);
            const auto met = [&ahead, &rows, full](int column) {
                return full || ahead.streamed_seen(rows.begin, rows.end, column);
            };
            if constexpr (kRowsAreQueries) {
                load_rows<kColumns, SKL_AK_VECTOR, at_once>(stage(i).scored(), keys, first, columns, met);
                load_rows<kColumns, SKL_VALUE_VECTOR>(stage(i).valued(), values, first, columns);
            } else {
                load_rows<kColumns, SKL_AQ_VECTOR, at_once>(stage(i).scored(), queries, first, columns, met);
                load_grads<kColumns, at_once>(stage(i).valued(), args, grads, first, columns, met);
                vectors.load(stage(i).vectors(), first, columns);
            }
            ahead.next();
        };

        cp_async_wait<0>();  // a head whose list is empty has waited for nothing, not even for its rows
        __syncthreads();     // the previous head's last tile is still being read
        if (head == first_head) {
            load_rows<kRows, kRowsAreQueries ? SKL_AQ_VECTOR : SKL_AK_VECTOR>(
                rows_scored, kRowsAreQueries ? queries : keys, first_row, rows);
            if constexpr (kRowsAreQueries)
                load_grads<kRows>(rows_valued, args, grads, first_row, rows);
            else if constexpr (kScored)
                load_rows<kRows, SKL_VALUE_VECTOR>(rows_valued, values, first_row, rows);
            cp_async_commit();
        }
        fill_ring(ahead, fetch);
        if constexpr (kRowsAreQueries) {
#pragma unroll
            for (int i = 0; i < kLaneRows; ++i) stats[i] = vectors.read(row + below_first(i), segment.queries);
        }

        for (int i = 0; at.more(); ++i, at.next()) {
            advance_ring(i, ahead, fetch, Nothing{});
            Strip<kTiles> t, d;
            scores<kTiles>(t, rows_scored, warp_row, stage(i).scored());
            if constexpr (kScored) scores<kTiles>(d, rows_valued, warp_row, stage(i).valued());
            if (at.full(first_row, end_row))
                logit_gradients<false>(t, d, stats, stage(i).vectors(), at, row, args.numbers);
            else
                logit_gradients<true>(t, d, stats, stage(i).vectors(), at, row, args.numbers);
            StripA<KeyTile::kCode, kTiles> a;
            if constexpr (kValues) {
                strip_to_a<KeyTile::kCode, kTiles>(a, t);
                accumulate<kValueTiles, kTiles>(out_values, a, stage(i).valued());
            }
            if constexpr (kScored) {
                if constexpr (E::kNarrowExponent) rescale(d, out, exponent);
                strip_to_a<KeyTile::kCode, kTiles>(a, d);
                accumulate<kOutTiles, kTiles>(out, a, stage(i).scored());
            }
        }
    }
    cp_async_wait<0>();  // a block without tiles has not waited for its rows

    write_gradients(args, out, out_values, exponent, row, blockIdx.x);
}

// Backward of one side on Hopper, both gradients in one pass: the mathematics of gradient_sm80.cu with four products
// per tile where a kernel per gradient needs six. The grad side is differentiated, the score side only recomputed; S
// are the grad side's logits, dS = g * dvalue/dS:
//
//   dK = c dS^T Q   summed in registers by the block that owns the keys, over the query heads that share them
//   dQ = c dS K     needs all keys: blocks add fp32 parts in global memory, in no fixed order; where one work tile has
//                   all keys of a head (kDirect), the product is all of dQ, and written at once
//
// Three kernels: `prepare` clears the sums of dQ and the count of work tiles, and writes the rows' statistics where the
// copy engine can fetch them, the main kernel adds, `finish` scales and converts dQ. In the workspace, one entry per
// query head and kColumns queries:
//
//   sums       [grad side's D / 8][...] floats, in the order in which the accumulators of the dQ product hold them;
//              none where dQ is written at once: then `prepare` clears the rows of dQ that no step of the main kernel
//              visits, and there is no `finish`
//   row_stats  of the queries, as tile/row_stats.cuh lays them out; narrow types: g times what takes back a row's scale
//   exponents  int, types of narrow exponent only: the largest exponent of g * bound
//   taken      one int: work tiles that blocks have taken beyond their first
//
// Main kernel, whose blocks are persistent (pipeline/work_tiles.cuh); each role is a struct in a file of its own, in
// fused_sm90/ producer.cuh, consumer.cuh and query_gradient.cuh, and layout.cuh is what they share:
//
//   work tile kRows keys of one key head of the grad side, resident in shared memory, or a share of its steps; a work
//             item is one of its query heads
//   producer  one warp, whose first lane issues copies (lists of tiles are searched by whole warps); finds work tiles
//             and streams queries, kColumns at a time, of each side through a ring, the grad side's with the row stats.
//             The score side's keys are loaded anew where the query head reads others. kPieces: the score side is too
//             wide for whole tiles, its ring has pieces of 64 x 64 and with them what of its keys does not stay
//   consumers two warpgroups, 64 of every 128 keys each: both scores, transposed (keys x queries), become dS^T, which
//             is operand A of dK from registers, and goes through shared memory to
//   dQ        one warpgroup: dS (read transposed) times the grad side's keys, kWide x 64 columns at a time; each warp
//             stages its rows in shared memory and has the copy engine add them to the sums, or writes them as dQ
//
//   barrier          arrivals                    waited for by
//   grad_keys        1 (+ bytes)                 consumers and dQ
//   grad_keys_free   one per warp of these       the producer: the grad side's keys may be overwritten
//   score_keys_full  1 (+ bytes)                 consumers
//   score_keys_empty one per consumer warp       the producer: the score side's keys may be overwritten
//   score_full[i]    1 (+ bytes)                 consumers
//   score_empty[i]   one per consumer warp       the producer
//   grad_full[i]     1 (+ bytes)                 consumers
//   grad_empty[i]    one per consumer warp       the producer
//   ds_full[i]       one per consumer warp       dQ: stage i of dS is complete
//   ds_empty[i]      one per warp of dQ          consumers: stage i of dS may be overwritten
//
// An element type of narrow exponent gets dS twice: with g, scaled by one power of two per key block, for dK, and
// without g, scaled by one per row, for dQ; whoever writes dQ multiplies g in. Where key tiles are few or have long
// lists, blocks share the queries of one and dK is added up as in pipeline/partials.cuh.
#include "kernels/fused_sm90/layout.cuh"
#include "kernels/fused_sm90/prepare_finish.cuh"
#include "kernels/fused_sm90/producer.cuh"
#include "kernels/fused_sm90/query_gradient.cuh"
#include "kernels/fused_sm90/consumer.cuh"
#include "ptx/registers.cuh"

extern "C" __global__ void __launch_bounds__(kThreads + 256, 1)
    streamkl_fused(const __grid_constant__ HopperFusedArgs all) {
    extern __shared__ unsigned char memory[];
    // Uniform over the warp by construction, which the compiler must be told: descriptors then live in uniform
    // registers.
    const Thread thread{__shfl_sync(~0u, static_cast<int>(threadIdx.x / 128), 0), lane_id()};
    const Layout shared(memory);
    WorkItemRing items = shared.items();
    if (threadIdx.x == 0) {
        shared.init();
        items.init(kWarps + 4);
        mbarrier_publish();
    }
    __syncthreads();

    if (thread.group == kGroups + 1) {
        registers_lower<SKL_PRODUCER_REGISTERS>();
        if (threadIdx.x >= kThreads + 160) return;
        Producer(all, shared, items, thread).run();
        return;
    }
    if (thread.group == kGroups) {
        registers_lower<SKL_DQ_REGISTERS>();
        QueryGradient(all, shared, items, thread).run();
        return;
    }
    registers_raise<SKL_CONSUMER_REGISTERS>();
    Sums out;
    Scores score_side, grad_side;
    Held held;
    Consumer(all.fused, shared, items, thread, out, score_side, grad_side, held).run();
}

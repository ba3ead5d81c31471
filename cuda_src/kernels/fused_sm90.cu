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
// Main kernel, whose blocks stay and take one portion after the other (pipeline/work_tiles.cuh); each role is a struct in a file
// of its own, fused_sm90/producer.cuh, consumer.cuh and query_gradient.cuh, and layout.cuh is what they share:
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
// key tile and dK is added up as in pipeline/partials.cuh.
#include "kernels/fused_sm90/layout.cuh"
#include "kernels/fused_sm90/prepare_finish.cuh"
#include "kernels/fused_sm90/producer.cuh"
#include "kernels/fused_sm90/query_gradient.cuh"
#include "kernels/fused_sm90/consumer.cuh"
#include "ptx/registers.cuh"

extern "C" __global__ void __launch_bounds__(kThreads + 256, 1) streamkl_fused(const __grid_constant__ HopperFusedArgs all) {
    extern __shared__ unsigned char memory[];
    // Uniform over the warp by construction, which the compiler must be told: descriptors then live in uniform registers.
    const Thread thread{__shfl_sync(~0u, static_cast<int>(threadIdx.x / 128), 0), lane_id()};
    const Layout shared(memory);
    VisitRing visits = shared.visits(memory);
    if (threadIdx.x == 0) {
        shared.init();
        visits.init(kWarps + 4);
        mbarrier_publish();
    }
    __syncthreads();

    if (thread.group == kGroups + 1) {
        registers_lower<SKL_PRODUCER_REGISTERS>();
        if (threadIdx.x >= kThreads + 160) return;
        Producer(all, shared, visits, thread).run();
        return;
    }
    if (thread.group == kGroups) {
        registers_lower<SKL_DQ_REGISTERS>();
        QueryGradient(all, shared, visits, thread).run();
        return;
    }
    registers_raise<SKL_CONSUMER_REGISTERS>();
    Sums out;
    Scores other, own;
    Held held;
    Consumer(all.fused.base, shared, visits, thread, out, other, own, held).run();
}

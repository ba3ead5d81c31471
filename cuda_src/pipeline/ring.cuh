// Rings of buffers between those who fill them and those who use them.
#pragma once
#include "common/config.cuh"
#include "ptx/cp_async.cuh"

// Position in a ring whose buffers have barriers: which buffer, and the parity of its current round.
template <int COUNT>
struct RingCursor {
    int slot = 0;
    u32 parity = 0;
    __device__ void advance() {
        if (++slot == COUNT) {
            slot = 0;
            parity ^= 1;
        }
    }
};

// A ring of kStages tiles that all threads of a block fill by cp.async and use together. `fetch(i)` has tile i on its
// way into buffer i % kStages while `more()` holds; groups are committed where nothing is fetched too, so that they
// count tiles.
template <class Ahead, class Fetch>
__device__ inline void fill_ring(const Ahead& ahead, Fetch& fetch) {
#pragma unroll
    for (int i = 0; i < kStages - 1; ++i) {
        if (ahead.more()) fetch(i);
        cp_async_commit();
    }
}

// Has tile i there for all threads, and one more on its way; `arrived` may touch what this thread has fetched of tile i
// before. The one __syncthreads says both that tile i is there and that everybody is done with the buffer that is
// filled next.
template <class Ahead, class Fetch, class Arrived>
__device__ inline void advance_ring(int i, const Ahead& ahead, Fetch& fetch, const Arrived& arrived) {
    if constexpr (kStages == 1) {
        __syncthreads();
        fetch(i);
        cp_async_commit();
        cp_async_wait<0>();
        arrived(0);
        __syncthreads();
    } else {
        cp_async_wait<kStages - 2>();
        arrived(i % kStages);
        __syncthreads();
        if (ahead.more()) fetch(i + kStages - 1);
        cp_async_commit();
    }
}

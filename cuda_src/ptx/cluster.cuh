// Blocks that run side by side and reach each other's shared memory (sm_90).
#pragma once
#include "common/types.cuh"

// The block's number in its cluster.
__device__ inline int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
// All threads of all blocks of the cluster; what they wrote before is seen after.
__device__ inline void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Arrives at the barrier that lies in a block of the cluster where this one lies here.
__device__ inline void mbarrier_arrive_at(u32 barrier, int block) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n}" ::"r"(barrier),
        "r"(block)
        : "memory");
}

// Bulk copies of contiguous bytes (sm_90): addresses on 16-byte boundaries, sizes in multiples of 16. One thread
// issues.
#pragma once
#include "common/types.cuh"

// Global to shared memory; an mbarrier counts the bytes.
__device__ inline void bulk_load(u32 shared, const void* global, u32 bytes, u32 barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
        "l"(global), "r"(bytes), "r"(barrier)
        : "memory");
}

// Adds floats of shared memory to floats of global memory, each addition atomic, in no fixed order. Part of the
// thread's current group.
__device__ inline void bulk_add(float* global, u32 shared, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global),
                 "r"(shared), "r"(bytes)
                 : "memory");
}

// Adds four floats of a thread to those at a 16-byte boundary of global memory, each addition atomic.
__device__ inline void vector_add(float4* global, const float (&x)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(x[0]), "f"(x[1]),
                 "f"(x[2]), "f"(x[3])
                 : "memory");
}

__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until at most N of this thread's groups have yet to read their shared memory.
template <int N>
__device__ inline void bulk_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}

// Waits until all of this thread's groups are done.
__device__ inline void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

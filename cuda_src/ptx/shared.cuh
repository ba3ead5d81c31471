// Writing shared memory that the asynchronous units read next (sm_90): write, async_fence in every writer, then a
// barrier.
#pragma once
#include "common/types.cuh"

// Four 8x8 matrices of 16-bit elements, the inverse of ldmatrix_x4: lane i names row i%8 of matrix i/8.
__device__ inline void stmatrix_x4(u32 shared, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}

__device__ inline void store_float4(u32 shared, const float (&x)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
}

// Orders this thread's ordinary accesses to shared memory before later ones of tensor copies and warpgroup products.
__device__ inline void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A barrier among `threads` threads, whole warps; numbers 1 to 15, as 0 is __syncthreads.
__device__ inline void barrier_sync(int number, int threads) {
    asm volatile("barrier.cta.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Counts as arrived at such a barrier without waiting there.
__device__ inline void barrier_arrive(int number, int threads) {
    asm volatile("barrier.cta.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

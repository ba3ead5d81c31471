// Writing shared memory that the asynchronous units read next (sm_90): write, async_fence in every writer, then a barrier.
#pragma once
#include "common/types.cuh"

__device__ inline void store_float4(u32 shared, const float (&x)[4]) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(shared), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

// Orders this thread's ordinary accesses to shared memory before later ones of tensor copies and warpgroup products.
__device__ inline void async_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

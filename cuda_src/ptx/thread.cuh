// The thread's own number.
#pragma once

// threadIdx.x, read where it stands: what is computed of it is not kept in registers around a loop.
__device__ inline int thread_again() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

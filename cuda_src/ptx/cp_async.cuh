// Asynchronous copies from global to shared memory (sm_80). Each thread owns the groups it commits.
#pragma once
#include "common/types.cuh"

// Copies `bytes` (0 to 16) and fills the rest of the 16 bytes with zeros; both addresses on 16-byte boundaries.
__device__ inline void cp_async_16(u32 shared, const void* global, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// Copies one 4-byte word, or writes zero where `bytes` is 0.
__device__ inline void cp_async_4(u32 shared, const void* global, int bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}

// Closes this thread's current group of copies.
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most N of this thread's groups are still under way; a barrier must follow before others' data is read.
template <int N>
__device__ inline void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Barriers in shared memory (sm_90): a phase ends when its arrivals and its announced bytes are in. A waiter names the
// parity of the phase it waits for; a fresh barrier is in phase 0, so a wait for parity 1 passes at once.
#pragma once
#include "common/types.cuh"

// One thread, before anybody uses the barrier.
__device__ inline void mbarrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// The initialising thread, after its last init and before the block's __syncthreads.
__device__ inline void mbarrier_publish() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline void mbarrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives and announces bytes that asynchronous copies will bring.
__device__ inline void mbarrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline bool mbarrier_test(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n.reg .pred done;\nmbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}
// Whether a phase is over already; nobody waits.
__device__ inline bool mbarrier_is_over(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{\n.reg .pred done;\nmbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\nselp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done;
}
// Nothing but the test may stand in this loop: a way out of it would cost the kernel its register budget.
__device__ inline void mbarrier_wait(u32 barrier, u32 parity) {
    while (!mbarrier_test(barrier, parity)) {
    }
}

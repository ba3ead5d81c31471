// Moving registers between warpgroups (sm_90a): each role of a kernel takes what it needs at its start. Every warp of
// the warpgroup executes it, first thing in its branch; the kernel must be compiled for one block per multiprocessor.
#pragma once

template <int COUNT>
__device__ inline void registers_raise() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ inline void registers_lower() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Additions in global memory (sm_90), each atomic, in no fixed order.
#pragma once
#include "common/types.cuh"

// To four floats on a 16-byte boundary.
__device__ inline void global_add(float* to, const float (&x)[4]) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]),
                 "f"(x[3])
                 : "memory");
}

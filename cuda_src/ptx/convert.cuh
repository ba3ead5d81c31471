// Rounding pairs of floats to packed 16-bit elements, and widening them again. The first argument is the lower half.
#pragma once
#include "common/types.cuh"

__device__ inline u32 pack_bf16(float lo, float hi) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

__device__ inline u32 pack_f16(float lo, float hi) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}

// A bf16 is the upper half of the float of the same value.
__device__ inline float bf16_low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ inline float bf16_high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ inline float f16_to_float(u16 x) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(x));
    return r;
}

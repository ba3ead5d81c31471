// Bits of packed 16-bit elements and masks of them.
#pragma once
#include "common/types.cuh"

// Of each of two bfloat16: all of its bits where it is above 0 or NaN (sm_90).
__device__ inline u32 above_zero_bf16(u32 pair) {
    u32 mask;
    asm("set.gtu.u32.bf16x2 %0, %1, %2;" : "=r"(mask) : "r"(pair), "r"(0u));
    return mask;
}

// Four bytes by the nibbles of SELECTED, the lowest first: byte 0 to 3 of x, 4 to 7 of y; with 8 added, eight times its
// highest bit.
template <u32 SELECTED>
__device__ inline u32 select_bytes(u32 x, u32 y) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "n"(SELECTED));
    return r;
}
__device__ inline u32 select_bytes(u32 x, u32 y, u32 selected) {
    u32 r;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(x), "r"(y), "r"(selected));
    return r;
}

// 2^x on the special-function unit: relative error 2^-22, subnormal results flush to zero. One call per thread.
#pragma once

__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

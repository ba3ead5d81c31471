// The special-function unit, one call per thread, subnormal numbers flushed to zero: 2^x with a relative error of 2^-22,
// the logarithm to the base 2 with one of 2^-22 (absolute between 1/2 and 2), the reciprocal with one of 1 ulp.
#pragma once

__device__ inline float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float log2_approx(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ inline float reciprocal_approx(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

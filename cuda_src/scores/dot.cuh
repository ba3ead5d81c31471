// The logit is the scaled dot product.
#pragma once
#include "scores/interface.cuh"

template <int SIDE>
struct Score {
    static constexpr bool kLinear = true;
    __device__ static float logit(float dot, float scale) { return dot * scale; }
    __device__ static float logit(float dot, float scale, float reference) { return fmaf(dot, scale, -reference); }
    __device__ static float slope(float, float) { return 1.f; }
    __device__ static float factor(float scale) { return scale; }
};

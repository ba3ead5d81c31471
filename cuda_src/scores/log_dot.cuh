// The logit is the logarithm of the scaled dot product, so that the softmax is what linear attention has: each product
// over the sum of all. A product below the smallest normal float counts as that, and its logit does not move with it.
#pragma once
#include "ptx/math.cuh"
#include "scores/interface.cuh"

struct LogDot {
    static constexpr bool kLinear = false;
    static constexpr float kLeast = 1.17549435e-38f;  // 2^-126
    __device__ static float factor(float scale) { return scale; }
    template <class N>
    __device__ static float prepare(float dot, const N& n) {
        return dot * n.scale;
    }
    __device__ static bool usual(float x) { return x >= kLeast; }
    __device__ static float tame(float x) { return x < kLeast ? kLeast : x; }
    template <class N>
    __device__ static float finish(float x, const N&) {
        return log2_approx(x);
    }
    // 1 / x
    template <class N>
    __device__ static float slope(float logit, const N&) {
        return logit <= -126.f ? 0.f : exp2_approx(-logit);
    }
};

// The logit is the logarithm of the dot product, so that the softmax is what linear attention has: each product over the
// sum of all. A product below the smallest normal float counts as that, and its logit does not move with it. The scale
// adds n.offset to all logits.
#pragma once
#include "ptx/math.cuh"
#include "scores/interface.cuh"

struct LogDot {
    static constexpr bool kLinear = false;
    static constexpr float kLeast = 1.17549435e-38f;  // 2^-126
    __device__ static float factor(float) { return 1.f; }
    template <class N>
    __device__ static float prepare(float dot, const N&) {
        return dot;
    }
    static constexpr float kOdd = -kLeast;
    __device__ static float oddness(float x) { return -x; }
    __device__ static float tame(float x) { return fmaxf(x, kLeast) + 0.f * x; }  // a NaN for -Inf
    template <class N>
    __device__ static float finish(float x, const N&) {
        return log2_approx(x);
    }
    template <class N>
    __device__ static float logit(float y, const N& n) {
        return y + n.offset;
    }
    template <class N>
    __device__ static float logit(float y, const N& n, float reference) {
        return y - (reference - n.offset);
    }
    // 1 / x, and 0 of the least, whose logarithm may be rounded.
    template <class N>
    __device__ static float slope(float y, const N&) {
        return y < -125.9f ? 0.f : exp2_approx(-y);
    }
};

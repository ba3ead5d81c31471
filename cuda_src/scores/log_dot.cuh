// The logit is the logarithm of the dot product, so that the softmax is what linear attention has: each product over
// the sum of all. A product below the smallest normal float counts as that, and its logit does not move with it. The
// scale adds n.offset to all logits.
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
    // What is kept is the product: its logarithm is wanted once at most, and 2^logit is the product but for a factor.
    enum : bool { kKnowsAll = true, kWeighs = true };
    template <class N>
    __device__ static float finish(float x, const N&) {
        return fmaf(0.f, x, fmaxf(x, kLeast));  // a NaN for -Inf
    }
    template <class N>
    __device__ static float logit(float y, const N& n) {
        return log2_approx(y + y) + (n.offset - 1.f);  // not as below: the compiler would keep these for later
    }
    template <class N>
    __device__ static float logit(float y, const N& n, float reference) {
        return log2_approx(y) - (reference - n.offset);
    }
    template <class N>
    __device__ static float factor_of(const N& n, float reference) {
        return exp2_approx(n.offset - reference);
    }
    __device__ static float weight(float y, float factor) { return y * factor; }
    // The weight less another one, times the slope.
    __device__ static float by_dot(float y, float factor, float other) {
        return y > kLeast ? fmaf(-other, reciprocal_approx(y), factor) : 0.f;
    }
    // 1 / y, and 0 of the least.
    template <class N>
    __device__ static float slope(float y, const N&) {
        return y > kLeast ? reciprocal_approx(y) : 0.f;
    }
};

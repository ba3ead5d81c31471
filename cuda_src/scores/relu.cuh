// The logit is the scaled dot product where that is positive, else 0.
#pragma once
#include "scores/interface.cuh"

struct Relu {
    static constexpr bool kLinear = false;
    __device__ static float factor(float scale) { return scale; }
    template <class N>
    __device__ static float prepare(float dot, const N& n) {
        return dot * (.5f * n.scale);
    }
    enum : bool { kKnowsAll = true, kWeighs = false };
    // 2 max(0, half), exactly, and a NaN for a NaN or -Inf.
    template <class N>
    __device__ static float finish(float half, const N&) {
        return half + fabsf(half);
    }
    template <class N>
    __device__ static float logit(float y, const N&) {
        return y;
    }
    template <class N>
    __device__ static float logit(float y, const N&, float reference) {
        return y - reference;
    }
    template <class N>
    __device__ static float slope(float y, const N&) {
        return y > 0.f ? 1.f : 0.f;
    }
};

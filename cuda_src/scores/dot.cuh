// The logit is the scaled dot product.
#pragma once
#include "scores/interface.cuh"

struct Dot {
    static constexpr bool kLinear = true;
    enum : bool { kWeighs = false };
    __device__ static float factor(float scale) { return scale; }
    template <class N>
    __device__ static float logit(float dot, const N& n) {
        return dot * n.scale;
    }
    template <class N>
    __device__ static float logit(float dot, const N& n, float reference) {
        return fmaf(dot, n.scale, -reference);
    }
};

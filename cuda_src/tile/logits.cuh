// Where dots become logits.
#pragma once
#include "common/math.cuh"
#include "tile/fragment.cuh"
#include "tile/turn.cuh"

// 2^logit less a reference, of what scores leave in accumulators. Of most it is had from that difference alone.
template <class S, bool WEIGHS = S::kWeighs>
struct WeightsLess {
    template <class N>
    __device__ WeightsLess(const N&, float) {}
    __device__ float operator()(float, float difference) const { return exp2_approx(difference); }
    // Of a difference that is more by a logarithm, whose power is the factor.
    __device__ float times(float, float difference, float) const { return exp2_approx(difference); }
};
template <class S>
struct WeightsLess<S, true> {
    float factor;
    template <class N>
    __device__ WeightsLess(const N& n, float reference) : factor(S::factor_of(n, reference)) {}
    __device__ float operator()(float y, float) const { return S::weight(y, factor); }
    __device__ float times(float y, float, float more) const { return S::weight(y, factor) * more; }
};

// The logits of one row that a lane holds, as a divergence asks for them: each, each less a reference, and 2^ that. S
// is the score whose dots the accumulators hold, N its numbers.
template <class S, class N, int TILES>
struct LogitRow {
    FragmentRow<TILES> dots;
    N numbers;
    static constexpr int kCount = FragmentRow<TILES>::kCount;
    __device__ float operator[](int i) const { return S::logit(dots[i], numbers); }
    __device__ float less(int i, float reference) const { return S::logit(dots[i], numbers, reference); }
    __device__ WeightsLess<S> weights(float reference) const { return {numbers, reference}; }
};

// From the derivative by a logit, whose dot has been turned to y, that by the dot, but for the factor.
template <class S, class N>
__device__ inline float by_dot(float by_logit, float y, const N& n) {
    if constexpr (S::kLinear)
        return by_logit;
    else
        return by_logit * S::slope(y, n);
}

// For accumulators that hold logits already.
struct LogitsThemselves {
    enum : bool { kWeighs = false };
    template <class N>
    __device__ static float logit(float x, const N&) {
        return x;
    }
    template <class N>
    __device__ static float logit(float x, const N&, float reference) {
        return x - reference;
    }
};

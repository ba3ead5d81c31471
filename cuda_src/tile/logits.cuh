// Where dots become logits.
#pragma once
#include "common/math.cuh"
#include "tile/fragment.cuh"
#include "tile/turn.cuh"

// 2^logit less a reference of a forward, of what scores leave in accumulators. Of most it is had from that difference
// alone.
template <class S, bool WEIGHS = S::kWeighs>
struct WeightsLess {
    template <class N>
    __device__ WeightsLess(const N&, float) {}
    __device__ float operator()(float, float difference) const { return exp2_approx(difference); }
    // Of a difference that is more by a logarithm, whose power is the factor.
    __device__ float times(float, float difference, float) const { return exp2_approx(difference); }
    __device__ float sum(float x) const { return x; }
};
template <class S>
struct WeightsLess<S, true> {
    static constexpr float kMost = 1.70141183e+38f;  // 2^127: finite, so that nothing times this is nothing
    float factor;
    template <class N>
    __device__ WeightsLess(const N& n, float reference) : factor(fminf(S::factor_of(n, reference), kMost)) {}
    __device__ float operator()(float y, float) const { return S::weight(y, factor); }
    __device__ float times(float y, float, float more) const { return S::weight(y, factor) * more; }
    // Of weights: what is there at all is too large beside a reference of before any key.
    __device__ float sum(float x) const { return factor == kMost && x > 0.f ? infinity() : x; }
};

// The logits of one row that a lane holds, as a divergence asks for them: each, each less a reference, and 2^ that. S is
// the score whose dots the accumulators hold, N its numbers.
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

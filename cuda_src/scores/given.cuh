// Sides whose probabilities are given, or their logarithms: what is read is no dot product, and what it means no choice of
// the caller's. A probability of 0 is a logit that counts for nothing, as a hidden key's does, but on its side alone; where
// the divergence is infinite then (SKL_ZEROS is 0), -Inf, which nothing absorbs silently.
#pragma once
#include "common/math.cuh"
#include "divergences/interface.cuh"
#include "scores/interface.cuh"

struct Given {
    static constexpr bool kLinear = false;
    enum : bool { kKnowsAll = true };
    template <class N>
    __device__ static float prepare(float x, const N&) {
        return x;
    }

protected:
    // A NaN fails the comparison and stays one.
    __device__ static float logarithm(float y) { return y < kMasked ? (SKL_ZEROS ? kMasked : -infinity()) : y; }
};

// What is kept is the probability: its logarithm is wanted once at most, and it is the weight but for a factor.
struct Probability : Given {
    enum : bool { kWeighs = true };
    static constexpr float kLeast = 1.17549435e-38f;  // 2^-126, below which the logarithm is that of 0
    template <class N>
    __device__ static float finish(float x, const N&) {
        return x;
    }
    template <class N>
    __device__ static float logit(float y, const N&) {
        return logarithm(log2_approx(y + y) - 1.f);  // not as below: the compiler would keep these for later
    }
    template <class N>
    __device__ static float logit(float y, const N&, float reference) {
        return logarithm(log2_approx(y)) - reference;
    }
    template <class N>
    __device__ static float factor_of(const N&, float reference) {
        return exp2_approx(-reference);
    }
    __device__ static float weight(float y, float factor) { return y * (y >= kLeast ? factor : 0.f); }
};

struct LogProbability : Given {
    enum : bool { kWeighs = false };
    template <class N>
    __device__ static float logit(float y, const N&) {
        return y;
    }
    template <class N>
    __device__ static float logit(float y, const N&, float reference) {
        return y - reference;
    }
    template <class N>
    __device__ static float finish(float x, const N& n) {
        return logarithm(x * n.scale);
    }
};

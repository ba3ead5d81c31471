// Sides whose probabilities are given, or their logarithms: what is read is no dot product, and what it means no choice of
// the caller's. A probability of 0 is a logit that counts for nothing, as a hidden key's does, but on its side alone; where
// the divergence is infinite then (SKL_ZEROS is 0), -Inf, which nothing absorbs silently.
#pragma once
#include "common/math.cuh"
#include "divergences/interface.cuh"
#include "scores/interface.cuh"

struct Given {
    static constexpr bool kLinear = false;
    enum : bool { kKnowsAll = true, kWeighs = false };
    template <class N>
    __device__ static float prepare(float x, const N&) {
        return x;
    }
    template <class N>
    __device__ static float logit(float y, const N&) {
        return y;
    }
    template <class N>
    __device__ static float logit(float y, const N&, float reference) {
        return y - reference;
    }

protected:
    // A NaN fails the comparison and stays one.
    __device__ static float logarithm(float y) { return y < kMasked ? (SKL_ZEROS ? kMasked : -infinity()) : y; }
};

struct Probability : Given {
    template <class N>
    __device__ static float finish(float x, const N&) {
        return logarithm(log2_approx(x));
    }
};

struct LogProbability : Given {
    template <class N>
    __device__ static float finish(float x, const N& n) {
        return logarithm(x * n.scale);
    }
};

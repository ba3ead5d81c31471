// Logits of another score that are proportional to its scale, softly kept within a cap: cap tanh(logit / cap). The
// scale of the other one is 1 here, or -1; n.inner times what it gives is logit / cap, and n.cap is in base 2.
//
// Up to n.odd tanh is an odd polynomial, whose coefficients n.p1, n.p3, ... have powers of n.inner in them, and no
// instruction of the special-function unit, which the exponentials keep busy. Where a few arguments are larger, for
// those that are computed together it is a quotient of two polynomials, up to where tanh is 1 but for rounding. The
// exponential form takes two of those instructions, and a second formula near 0; tanh.approx is off by 2^-11.
// Coefficients: least relative error; in float32 1e-7 and 3e-7, most of it from rounding. Gradients of 16-bit products,
// which are rounded to 16 bits themselves, take a shorter polynomial, n.r1, n.r3, ..., that is off by 1.1e-6.
#pragma once
#include "ptx/math.cuh"
#include "scores/interface.cuh"

#ifndef SKL_SHORT_TANH
#define SKL_SHORT_TANH 0
#endif

// For |x| up to 8.
__device__ inline float tanh_of(float x) {
    const float w = x * x;
    float p = fmaf(w, 1.5231048220230738e-08f, 2.189513762272271e-05f);
    float q = fmaf(w, 8.522710876469021e-07f, 3.4113400993510834e-04f);
    p = fmaf(p, w, 3.571627801102922e-03f);
    q = fmaf(q, w, 2.6164557140466383e-02f);
    p = fmaf(p, w, 1.3444523352475451e-01f);
    q = fmaf(q, w, 4.677785069375522e-01f);
    p = fmaf(p, w, 1.f);
    q = fmaf(q, w, 1.f);
    return x * p * reciprocal_approx(q);
}

template <class S>
struct Softcap {
    static constexpr bool kLinear = false;
    enum : bool { kKnowsAll = false, kWeighs = false };
    static constexpr float kMost = 8.f;
    __device__ static float factor(float scale) { return S::factor(scale); }
    template <class N>
    __device__ static float prepare(float dot, const N& n) {
        if constexpr (S::kLinear)
            return dot;
        else if constexpr (S::kKnowsAll)
            return S::logit(S::finish(S::prepare(dot, n), n), n);
        else
            return S::logit(S::finish_odd(S::prepare(dot, n), n), n);
    }
    __device__ static float oddness(float x) { return fabsf(x); }
    template <class N>
    __device__ static float most(const N& n) {
        return n.odd;
    }
    template <class N>
    __device__ static float finish_odd(float x, const N& n) {
        x *= n.inner;
        return fminf(fmaxf(tanh_of(fminf(fmaxf(x, -kMost), kMost)), -1.f), 1.f) + 0.f * x;
    }
    template <class N>
    __device__ static float finish(float x, const N& n) {
        const float w = x * x;
        if constexpr (SKL_SHORT_TANH) return x * fmaf(fmaf(fmaf(n.r7, w, n.r5), w, n.r3), w, n.r1);
        return x * fmaf(fmaf(fmaf(fmaf(n.p9, w, n.p7), w, n.p5), w, n.p3), w, n.p1);
    }
    template <class N>
    __device__ static float logit(float y, const N& n) {
        return n.cap * y;
    }
    template <class N>
    __device__ static float logit(float y, const N& n, float reference) {
        return fmaf(n.cap, y, -reference);
    }
    // 1 - tanh^2, rounded once.
    template <class N>
    __device__ static float slope(float y, const N& n) {
        const float slope = fmaf(-y, y, 1.f);
        if constexpr (S::kLinear)
            return slope;
        else
            return slope * S::slope(y, n);
    }
};

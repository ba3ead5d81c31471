// Where dots become logits, and gradients of logits those of dots. The kernel has included its divergence and the scores
// before.
#pragma once
#include "common/math.cuh"
#include "tile/fragment.cuh"
#include "tile/turn.cuh"

// The logits of one row that a lane holds, as a divergence asks for them: each, and each less a reference. S is the
// score whose dots the accumulators hold, N its numbers.
template <class S, class N, int TILES>
struct LogitRow {
    FragmentRow<TILES> dots;
    N numbers;
    static constexpr int kCount = FragmentRow<TILES>::kCount;
    __device__ float operator[](int i) const { return S::logit(dots[i], numbers); }
    __device__ float less(int i, float reference) const { return S::logit(dots[i], numbers, reference); }
};

// For accumulators that hold logits already.
struct LogitsThemselves {
    template <class N>
    __device__ static float logit(float x, const N&) {
        return x;
    }
    template <class N>
    __device__ static float logit(float x, const N&, float reference) {
        return x - reference;
    }
};

// What a query row contributes to the gradients of its logits.
struct RowStats {
    float lse_t, lse_s;  // base 2
    float weight;        // factor on the logit gradient
    float value;         // base 2
};

// The derivative of a row's value by one dot product of a side, up to a constant and without the weight. Of accumulators
// that have been turned.
template <int SIDE>
__device__ inline float dot_gradient(float t, float s, const RowStats& row, Numbers numbers) {
    const float x = Score<kTeacher>::logit(t, numbers.teacher, row.lse_t);
    const float y = Score<kStudent>::logit(s, numbers.student, row.lse_s);
    const float gradient = LogitGradient<SIDE>::evaluate(x, y, row.value);
    if constexpr (Score<SIDE>::kLinear)
        return gradient;
    else
        return gradient * Score<SIDE>::slope(SIDE == kTeacher ? t : s, numbers.of<SIDE>());
}

// That constant; `scale` is the side's plain one.
template <int SIDE>
__device__ inline float gradient_factor(float scale) {
    return LogitGradient<SIDE>::kFactor * Score<SIDE>::factor(scale);
}

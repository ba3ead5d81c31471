// Where dots become logits, and gradients of logits those of dots. The kernel has included its divergence and its score
// before.
#pragma once
#include "common/math.cuh"
#include "tile/fragment.cuh"

// What dots are multiplied by, times log2(e).
struct Scales {
    float teacher, student;
};

// The logits of one row that a lane holds, as a divergence asks for them: each, and each less a reference. S is the
// score whose dots the accumulators hold.
template <class S, int TILES>
struct LogitRow {
    FragmentRow<TILES> dots;
    float scale;
    static constexpr int kCount = FragmentRow<TILES>::kCount;
    __device__ float operator[](int i) const { return S::logit(dots[i], scale); }
    __device__ float less(int i, float reference) const { return S::logit(dots[i], scale, reference); }
};

// For accumulators that hold logits already.
struct LogitsThemselves {
    __device__ static float logit(float x, float) { return x; }
    __device__ static float logit(float x, float, float reference) { return x - reference; }
};

// What a query row contributes to the gradients of its logits.
struct RowStats {
    float lse_t, lse_s;  // base 2
    float weight;        // factor on the logit gradient
    float value;         // base 2
};

// The derivative of a row's value by one dot product of a side, up to a constant and without the weight.
template <int SIDE>
__device__ inline float dot_gradient(float dot_t, float dot_s, const RowStats& row, Scales scales) {
    const float x = Score<kTeacher>::logit(dot_t, scales.teacher, row.lse_t);
    const float y = Score<kStudent>::logit(dot_s, scales.student, row.lse_s);
    const float slope = SIDE == kTeacher ? Score<kTeacher>::slope(x + row.lse_t, scales.teacher)
                                         : Score<kStudent>::slope(y + row.lse_s, scales.student);
    return LogitGradient<SIDE>::evaluate(x, y, row.value) * slope;
}

// That constant; `scale` is the side's plain one.
template <int SIDE>
__device__ inline float gradient_factor(float scale) {
    return LogitGradient<SIDE>::kFactor * Score<SIDE>::factor(scale);
}

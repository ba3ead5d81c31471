// Where dots become logits, and gradients of logits those of dots. The kernel has included its divergence and the scores
// before.
#pragma once
#include "common/math.cuh"
#include "tile/fragment.cuh"

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

// Columns of a lane's accumulators of which the function of a score is taken at once. Each takes registers meanwhile, and
// the compiler would take as many at once as there are, if there were no branch between them; fewer leave it waiting.
constexpr int kTurnedAtOnce = 2;

// Takes the function of a score of dots, in place, when it comes to the first of so many columns; one that is linear has
// none.
template <class S, int TILES, class N>
__device__ inline void turn(float (&x)[TILES][4], int column, const N& n) {
    if constexpr (!S::kLinear) {
        if (column % kTurnedAtOnce > 0) return;
        float oddness[4 * kTurnedAtOnce];
#pragma unroll
        for (int i = 0; i < 4 * kTurnedAtOnce; ++i) {
            oddness[i] = S::kOdd;
            if (column + i / 4 >= TILES) continue;
            float& y = x[column + i / 4][i % 4];
            y = S::prepare(y, n);
            oddness[i] = S::oddness(y);
        }
#pragma unroll
        for (int step = 1; step < 4 * kTurnedAtOnce; step *= 2)
#pragma unroll
            for (int i = 0; i < 4 * kTurnedAtOnce; i += 2 * step) oddness[i] = fmaxf(oddness[i], oddness[i + step]);
        if (__any_sync(~0u, oddness[0] > S::kOdd)) {
#pragma unroll
            for (int i = 0; i < 4 * kTurnedAtOnce; ++i)
                if (column + i / 4 < TILES) x[column + i / 4][i % 4] = S::tame(x[column + i / 4][i % 4]);
        }
#pragma unroll
        for (int i = 0; i < 4 * kTurnedAtOnce; ++i)
            if (column + i / 4 < TILES) x[column + i / 4][i % 4] = S::finish(x[column + i / 4][i % 4], n);
    }
}

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

// H(P, Q) = -sum_j P_j log Q_j = KL(P || Q) + H(P), P = softmax of the teacher's logits, Q of the student's.
//
// H(P, Q) = ln 2 (log2 l_s - C / l_t), C = sum 2^u v: relative to the student's reference, so that nothing large is
// subtracted but what the value itself is.
#pragma once
#include "divergences/relative_entropy.cuh"

struct RowState : RowSums<TeacherCross> {
    __device__ void finish(float& value, float& lse_t, float& lse_s) const {
        value = kLn2 * (log2f(l_s) - terms[0] / l_t);
        empty_or_nan(value, lse_t, lse_s);
    }
};

template <int SIDE>
struct LogitGradient;

// P_j (-log Q_j - value), whose positive part sums to at most the value.
template <>
struct LogitGradient<kTeacher> {
    enum : bool { kOfWeights = false };
    static constexpr float kFactor = kLn2;
    static constexpr bool kNeedsValue = true;
    __device__ static float evaluate(float x, float y, float value) { return exp2_approx(x) * (-y - value); }
    __device__ static float bound(float value) { return value + 1.f; }
};

template <>
struct LogitGradient<kStudent> : RelativeBySecond {
    __device__ static float weigh(float p, float q) { return q - p; }
    __device__ static float evaluate(float x, float y, float value) { return of(x, y, value); }
};

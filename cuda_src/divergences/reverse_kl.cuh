// KL(Q || P) = sum_j Q_j (log Q_j - log P_j), P = softmax of the teacher's logits, Q of the student's.
#pragma once
#include "divergences/relative_entropy.cuh"

struct RowState : RowSums<StudentRelative> {
    __device__ void finish(float& value, float& lse_t, float& lse_s) const {
        value = kLn2 * (terms[0] / l_s + log2f(l_t / l_s));
        empty_or_nan(value, lse_t, lse_s);
    }
};

template <int SIDE>
struct LogitGradient;

template <>
struct LogitGradient<kTeacher> : RelativeBySecond {
    __device__ static float weigh(float p, float q) { return p - q; }
    __device__ static float evaluate(float x, float y, float value) { return of(y, x, value); }
};

template <>
struct LogitGradient<kStudent> : RelativeByFirst {
    __device__ static float evaluate(float x, float y, float value) { return of(y, x, value); }
};

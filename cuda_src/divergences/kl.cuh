// KL(P || Q) = sum_j P_j (log P_j - log Q_j), P = softmax of the teacher's logits, Q of the student's.
#pragma once
#include "divergences/relative_entropy.cuh"

// Beside the entropy, whose term is B = sum 2^u u, A is B - C: as many instructions as A alone.
template <bool ENTROPY>
struct Term {
    using Type = TeacherRelative;
};
template <>
struct Term<true> {
    using Type = TeacherCross;
};

struct RowState : RowSums<Term<bool(kEntropy)>::Type> {
    __device__ void finish(float& value, float& lse_t, float& lse_s) const {
        const float a = kEntropy ? terms[kTerms - 1] - terms[0] : terms[0];
        value = kLn2 * (a / l_t + log2f(l_s / l_t));
        empty_or_nan(value, lse_t, lse_s);
    }
};

template <int SIDE>
struct LogitGradient;

template <>
struct LogitGradient<kTeacher> : RelativeByFirst {
    __device__ static float evaluate(float x, float y, float value) { return of(x, y, value); }
};

template <>
struct LogitGradient<kStudent> : RelativeBySecond {
    __device__ static float weigh(float p, float q) { return q - p; }
    __device__ static float evaluate(float x, float y, float value) { return of(x, y, value); }
};

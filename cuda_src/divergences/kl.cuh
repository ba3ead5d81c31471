// KL(P || Q) = sum_j P_j (log P_j - log Q_j), P = softmax of the teacher's logits, Q of the student's.
#pragma once
#include "divergences/relative_entropy.cuh"

using RowState = RelativeEntropy;

template <int SIDE>
struct LogitGradient;

template <>
struct LogitGradient<kTeacher> : EntropyByFirst {
    __device__ static float evaluate(float x, float y, float value) { return of(x, y, value); }
};

template <>
struct LogitGradient<kStudent> : EntropyBySecond {
    __device__ static float evaluate(float x, float y, float value) { return of(x, y, value); }
};

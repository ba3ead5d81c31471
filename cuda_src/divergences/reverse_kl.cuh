// KL(Q || P) = sum_j Q_j (log Q_j - log P_j), P = softmax of the teacher's logits, Q of the student's.
#pragma once
#include "divergences/relative_entropy.cuh"

// The student's distribution is the one that weighs.
struct RowState : RelativeEntropy {
    RowState() = default;
    __device__ RowState(const RelativeEntropy& x) : RelativeEntropy(x) {}

    template <int COUNT, class T, class S>
    __device__ static void absorb(RowState (&rows)[COUNT], const T (&t)[COUNT], const S (&s)[COUNT]) {
        RelativeEntropy::absorb(rows, s, t);
    }
    __device__ void finish(float& value, float& lse_t, float& lse_s) const {
        RelativeEntropy::finish(value, lse_s, lse_t);
    }
};

template <int SIDE>
struct LogitGradient;

template <>
struct LogitGradient<kTeacher> : EntropyBySecond {
    __device__ static float evaluate(float x, float y, float value) { return of(y, x, value); }
};

template <>
struct LogitGradient<kStudent> : EntropyByFirst {
    __device__ static float evaluate(float x, float y, float value) { return of(y, x, value); }
};

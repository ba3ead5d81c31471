// 1 - cos of the angle between P and Q, P = softmax of the teacher's logits, Q of the student's: cos = pq / sqrt(pp
// qq). It cancels where both point alike: the error is a rounding of 1.
//
// By a logit of P: p_j (cos p_j - q_j), where p = P / sqrt(pp) and q = Q / sqrt(qq), which gradient kernels have in
// place of P and Q.
#pragma once
#include "divergences/overlap.cuh"

__device__ inline float cosine_of(float pp, float pq, float qq) { return pq / (sqrtf(pp) * sqrtf(qq)); }

struct RowState : Overlap {
    // Of the sums themselves: what they are relative to cancels.
    __device__ void finish(float& value, float& lse_t, float& lse_s) const {
        value = 1.f - cosine_of(terms[0], terms[1], terms[2]);
        empty_or_nan(value, lse_t, lse_s);
    }
};

template <int SIDE>
struct LogitGradient {
    enum : bool { kOfWeights = false };
    static constexpr float kFactor = 1.f;
    static constexpr bool kNeedsValue = true;
    __device__ static float evaluate(float x, float y, float value) {
        const float p = exp2_approx(x), q = exp2_approx(y);
        return SIDE == kTeacher ? p * (value * p - q) : q * (value * q - p);
    }
    __device__ static float bound(float) { return 2.f; }
    template <class Row>
    __device__ static void prepare(Row& row, const float* moments) {
        row.lse_t += .5f * logf(moments[0]);
        row.lse_s += .5f * logf(moments[2]);
        row.value = kLn2 * cosine_of(moments[0], moments[1], moments[2]);
    }
};

// sum_j (P_j - Q_j)^2, P = softmax of the teacher's logits, Q of the student's. It is pp - 2 pq + qq, which cancels
// where both are nearly equal: the error is a rounding of pp + qq.
//
// By a logit of P: 2 P_j (P_j - Q_j - (pp - pq)). Gradient kernels have P and Q times k = 1 / sqrt(max(pp, qq)), which
// are at most 1 however many keys there are, and the row's weight over k^2.
#pragma once
#include "divergences/overlap.cuh"

struct RowState : Overlap {
    __device__ void finish(float& value, float& lse_t, float& lse_s) const {
        value = (pp() - pq()) + (qq() - pq());
        empty_or_nan(value, lse_t, lse_s);
    }
};

template <int SIDE>
struct LogitGradient {
    enum : bool { kOfWeights = false };
    static constexpr float kFactor = 2.f;
    static constexpr bool kNeedsValue = true;
    __device__ static float evaluate(float x, float y, float value) {
        const float p = exp2_approx(x), q = exp2_approx(y);
        return SIDE == kTeacher ? p * (p - q - value) : q * (q - p - value);
    }
    __device__ static float bound(float) { return 3.f; }
    template <class Row>
    __device__ static void prepare(Row& row, const float* moments) {
        const float pp = moments[0], pq = moments[1], qq = moments[2], top = fmaxf(pp, qq), half = .5f * logf(top);
        row.lse_t += half;
        row.lse_s += half;
        row.weight *= top;
        row.value = kLn2 * ((SIDE == kTeacher ? pp : qq) - pq) * rsqrtf(top);
    }
};

// What the divergences have in common that are sums of P_j (log P_j - log Q_j), whichever distribution is the
// teacher's: with x = log2 P, y = log2 Q, in base 2.
#pragma once
#include "divergences/softmax_sums.cuh"

// KL = ln 2 (A / l_p + log2(l_q / l_p)), A = sum 2^u (u - v) of P's logits u and Q's v. The references cancel in it, so
// nothing large is subtracted.
struct TeacherRelative {
    __device__ static constexpr float largest() { return largest_sum(); }
    __device__ static float add(float p, float, float u, float v, float sum) { return fmaf(p, u - v, sum); }
    __device__ static float move(float sum, const Moves& x) { return x.shrink_t * (sum - (x.d_t - x.d_s) * x.l_t); }
};
struct StudentRelative {
    __device__ static constexpr float largest() { return largest_sum(); }
    __device__ static float add(float, float q, float u, float v, float sum) { return fmaf(q, v - u, sum); }
    __device__ static float move(float sum, const Moves& x) { return x.shrink_s * (sum - (x.d_s - x.d_t) * x.l_s); }
};

// C = sum 2^u v.
struct TeacherCross {
    __device__ static constexpr float largest() { return largest_sum(); }
    // 0 times u is for an infinite one, whose weight may be 0: it must not be silent. Where there is one,
    // the entropy's term tells.
    __device__ static float add(float p, float, float u, float v, float sum) {
        return fmaf(p, kEntropy ? v : fmaf(u, 0.f, v), sum);
    }
    __device__ static float move(float sum, const Moves& x) { return x.shrink_t * (sum - x.d_s * x.l_t); }
};

// By a logit of P: P_j (log P_j - log Q_j - value). P (log2 P - log2 Q) is above -1, and its positive part sums to at
// most the value + 1.
struct RelativeByFirst {
    enum : bool { kOfWeights = false };
    static constexpr float kFactor = kLn2;
    static constexpr bool kNeedsValue = true;
    __device__ static float of(float log_p, float log_q, float value) {
        return exp2_approx(log_p) * (log_p - log_q - value);
    }
    __device__ static float bound(float value) { return 2.f * fabsf(value) + 2.f; }
};

// By a logit of Q: Q_j - P_j
struct RelativeBySecond {
    enum : bool { kOfWeights = true };
    static constexpr float kFactor = 1.f;
    static constexpr bool kNeedsValue = false;
    __device__ static float of(float log_p, float log_q, float) { return exp2_approx(log_q) - exp2_approx(log_p); }
    __device__ static float bound(float) { return 1.f; }
};

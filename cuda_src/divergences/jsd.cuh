// beta KL(P || M) + (1 - beta) KL(Q || M), M = beta P + (1 - beta) Q, P = softmax of the teacher's logits, Q of the
// student's; with smoothing s, of (1 - s) P + s / n and (1 - s) Q + s / n over the n keys that the row sees.
//
// Two passes: the log-sum-exps, and then a sum over keys that nothing rescales. In base 2 with x = log2 P, y = log2 Q:
//     log2(P / M) = x - log2 M = -log2(beta + (1 - beta) 2^(y - x))
// Sums take the first form, whose logarithms are of P l_t and Q l_t, l_t the teacher's sum beside its reference: what
// counts is not far from 1. Gradients, which have no reference, take the second, and more than 2^120 as that: such a
// side's own weight is nothing then. Smoothed, P and Q stand for n P + c and n Q + c, c = s / (1 - s), and the
// logarithms are of their ratio. The first pass leaves n and of both sides the reference and log2 of the sum: added up
// they would be rounded at the size of logits. Moments of the second are a = sum P log2(P / M), sum Q log2(Q / M) and
// n.
//
// By a logit of P: beta (1 - s) P_j (log(P_j / M_j) - a).
#pragma once
#include "divergences/softmax_sums.cuh"

#ifndef SKL_JSD_BETA  // of everything but the test of this header alone
#define SKL_JSD_BETA .5f
#define SKL_SMOOTHING 0.f
#endif
__device__ constexpr float beta() { return SKL_JSD_BETA; }
__device__ constexpr float smoothing() { return SKL_SMOOTHING; }
__device__ constexpr float floor_mass() { return smoothing() / (1.f - smoothing()); }  // c

// log2(M / P), M = part P + (1 - part) Q, from log2 P and log2 Q.
__device__ inline float log_of_mixture(float part, float log_p, float log_q) {
    return log2_approx(fmaf(1.f - part, exp2_approx(fminf(log_q - log_p, 120.f)), part));
}

// log2(P / M) and log2(Q / M), smoothed.
struct LogRatios {
    float p, q;
    // From n P + c and n Q + c.
    __device__ static LogRatios of_smoothed(float p, float q) {
        return {-log2_approx(fmaf(1.f - beta(), q * reciprocal_approx(p), beta())),
                -log2_approx(fmaf(beta(), p * reciprocal_approx(q), 1.f - beta()))};
    }
};

struct VisibleKeys {
    __device__ static constexpr float largest() { return largest_sum(); }
    // By the student's logit: the teacher's is as low where its probability is given as 0.
    __device__ static float add(float, float, float, float v, float sum) {
        return smoothing() > 0.f ? sum + (v > .5f * kUnseen ? 1.f : 0.f) : sum;
    }
    __device__ static float move(float sum, const Moves&) { return sum; }
};

// What lies in memory of a row: what the second pass leaves in place of the first two, and what the first one does.
enum Moment { kOfTeacher = 0, kOfStudent = 1, kKeys = 2, kLogTeacher = 3, kLogStudent = 4 };

struct LogSumExps : RowSums<VisibleKeys> {
    enum : int { kMoments = 5 };
    __device__ void finish(float& value, float& lse_t, float& lse_s) const {
        value = 0.f * (log2f(l_t) + log2f(l_s));
        empty_or_nan(value, lse_t, lse_s);
    }
    __device__ void moments(float* to, float lse_t) const {
        const bool bad = !(lse_t == -infinity() || is_finite(lse_t));
        to[kOfTeacher] = r_t;
        to[kOfStudent] = r_s;
        to[kKeys] = terms[0];
        to[kLogTeacher] = bad ? lse_t : log2f(l_t);
        to[kLogStudent] = bad ? lse_t : log2f(l_s);
    }
};

// Sums of the second pass, times l_t; smoothed, the student's times l_s.
struct MixtureSums {
    enum : int { kMoments = 5 };
    enum : bool { kResumes = true };
    static constexpr float kLeast = 1e-37f;  // of a mixture, whose logarithm is finite then
    float r_t, r_s;
    float a, b;                  // log2(l_t / l_s) and l_t / l_s; smoothed, n / l_t and n / l_s
    float of_t, of_s, smoothed;  // sum P log2(P / M), sum Q log2(Q / M), and the value's where it is not made of these

    __device__ void start() { r_t = r_s = a = b = of_t = of_s = smoothed = 0.f; }
    __device__ void resume(const float* moments) {
        r_t = moments[kOfTeacher];
        r_s = moments[kOfStudent];
        const float log_t = moments[kLogTeacher], log_s = moments[kLogStudent];
        const bool empty = log_t == -infinity();
        if constexpr (smoothing() > 0.f) {
            a = empty ? 0.f : moments[kKeys] * exp2_approx(-log_t);
            b = empty ? 0.f : moments[kKeys] * exp2_approx(-log_s);
        } else {
            a = empty ? 0.f : log_t - log_s;
            b = exp2_approx(a);
        }
    }

    template <class Rows, int COUNT, class T, class S>
    __device__ static void absorb(Rows (&rows)[COUNT], const T (&t)[COUNT], const S (&s)[COUNT]) {
#pragma unroll
        for (int r = 0; r < COUNT; ++r) {
            float of_t = 0.f, of_s = 0.f, smoothed = 0.f;
            const auto weigh_t = t[r].weights(rows[r].r_t);
            const auto weigh_s = s[r].weights(rows[r].r_s);
#pragma unroll
            for (int i = 0; i < T::kCount; ++i) {
                const float u = t[r].less(i, rows[r].r_t), v = s[r].less(i, rows[r].r_s);
                const float p = weigh_t(t[r].dots[i], u);
                if constexpr (smoothing() > 0.f) {
                    const float q = weigh_s(s[r].dots[i], v);
                    const float more_p = fmaf(rows[r].a, p, floor_mass()), more_q = fmaf(rows[r].b, q, floor_mass());
                    const LogRatios ratios = LogRatios::of_smoothed(more_p, more_q);
                    of_t = fmaf(fmaf(u, 0.f, p), ratios.p, of_t);  // an infinite logit must not be silent
                    of_s = fmaf(fmaf(v, 0.f, q), ratios.q, of_s);
                    smoothed = fmaf(beta() * more_p, ratios.p, fmaf((1.f - beta()) * more_q, ratios.q, smoothed));
                } else {
                    // Of Q l_t, and that.
                    const float y = v + rows[r].a, q = weigh_s.times(s[r].dots[i], y, rows[r].b);
                    const float m = log2_approx(fmaf(beta(), p, fmaf(1.f - beta(), q, kLeast)));
                    of_t = fmaf(p, u - m, of_t);
                    of_s = fmaf(q, y - m, of_s);
                }
            }
            rows[r].of_t += of_t;
            rows[r].of_s += of_s;
            rows[r].smoothed += smoothed;
        }
    }

    template <class Rows, int COUNT, class T, class S>
    __device__ static bool absorb_once(Rows (&rows)[COUNT], const T (&t)[COUNT], const S (&s)[COUNT]) {
        absorb(rows, t, s);
        return true;
    }

    __device__ void merge(const MixtureSums& other) {
        of_t += other.of_t;
        of_s += other.of_s;
        smoothed += other.smoothed;
    }
    __device__ MixtureSums shuffle(int mask) const {
        MixtureSums x = *this;
        x.of_t = __shfl_xor_sync(~0u, of_t, mask);
        x.of_s = __shfl_xor_sync(~0u, of_s, mask);
        x.smoothed = __shfl_xor_sync(~0u, smoothed, mask);
        return x;
    }
    __device__ void store(float* to, i64 stride) const {
        const float fields[] = {of_t, of_s, smoothed};
#pragma unroll
        for (int i = 0; i < 3; ++i) to[i * stride] = fields[i];
    }
    __device__ void load(const float* from, i64 stride) {
        of_t = from[0];
        of_s = from[stride];
        smoothed = from[2 * stride];
    }
    __device__ void finish(float& value, float* moments) const {
        const bool empty = moments[kLogTeacher] == -infinity();
        const float teacher = empty ? 0.f : of_t * exp2_approx(-moments[kLogTeacher]);
        const float student = empty ? 0.f : of_s * exp2_approx(-moments[smoothing() > 0.f ? kLogStudent : kLogTeacher]);
        if constexpr (smoothing() > 0.f)
            value = empty ? 0.f : kLn2 * (1.f - smoothing()) * smoothed / moments[kKeys];
        else
            value = kLn2 * fmaf(beta(), teacher, (1.f - beta()) * student);
        if (!is_finite(value)) value = not_a_number();
        moments[kOfTeacher] = teacher;
        moments[kOfStudent] = student;
    }
};

template <int PASS>
struct StateOf {
    using Type = LogSumExps;
};
template <>
struct StateOf<1> {
    using Type = MixtureSums;
};
using RowState = StateOf<SKL_PASS>::Type;

template <int SIDE>
struct LogitGradient {
    enum : bool { kOfWeights = false };
    static constexpr float kFactor = kLn2 * (SIDE == kTeacher ? beta() : 1.f - beta()) * (1.f - smoothing());
    static constexpr bool kNeedsValue = true;
    // Smoothed, x and y are log2(n P) and log2(n Q), and the weight is over n.
    __device__ static float evaluate(float x, float y, float value) {
        if constexpr (smoothing() > 0.f) {
            const float p = exp2_approx(x), q = exp2_approx(y);
            const LogRatios ratios = LogRatios::of_smoothed(p + floor_mass(), q + floor_mass());
            return SIDE == kTeacher ? p * (ratios.p - value) : q * (ratios.q - value);
        } else {
            return SIDE == kTeacher ? exp2_approx(x) * (-log_of_mixture(beta(), x, y) - value)
                                    : exp2_approx(y) * (-log_of_mixture(1.f - beta(), y, x) - value);
        }
    }
    // P log2(P / M) is above -1, and log2(P / M) at most log2(1 / beta).
    __device__ static float bound(float value) {
        return fabsf(value) + 1.f - log2_approx(SIDE == kTeacher ? beta() : 1.f - beta());
    }
    template <class Row>
    __device__ static void prepare(Row& row, const float* moments) {
        row.value = kLn2 * moments[SIDE == kTeacher ? kOfTeacher : kOfStudent];
        if constexpr (smoothing() > 0.f) {
            row.lse_t -= logf(moments[kKeys]);
            row.lse_s -= logf(moments[kKeys]);
            row.weight /= moments[kKeys];
        }
    }
};

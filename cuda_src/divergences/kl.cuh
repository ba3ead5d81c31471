// KL(P || Q) = sum_j P_j (log P_j - log Q_j), P = softmax of the teacher's logits, Q of the student's.
//
// Per row, in base 2, with references r_t, r_s (logits that occurred) and u = T - r_t, v = S - r_s:
//     l_t = sum 2^u     l_s = sum 2^v     A = sum 2^u (u - v)     KL = ln 2 (A / l_t + log2(l_s / l_t))
// The references cancel, so nothing large is subtracted. Moving them by (d_t, d_s):
//     A <- 2^-d_t (A - (d_t - d_s) l_t)     l_t <- 2^-d_t l_t     l_s <- 2^-d_s l_s
// which also merges two states. No running maximum is kept: a reference moves only when a sum leaves the safe range.
#pragma once
#include "divergences/interface.cuh"

struct RowState {
    float r_t, r_s, l_t, l_s, a;

    __device__ void start() {
        r_t = r_s = kUnseen;
        l_t = l_s = a = 0.f;
    }

    __device__ void move_references(float to_t, float to_s) {
        const float d_t = to_t - r_t, d_s = to_s - r_s, shrink = exp2_approx(-d_t);
        a = shrink * (a - (d_t - d_s) * l_t);
        l_t *= shrink;
        l_s *= exp2_approx(-d_s);
        r_t = to_t;
        r_s = to_s;
    }

    // The sums of one tile over the row's keys, relative to the references.
    struct Sums {
        float l_t, l_s, a;

        template <class T, class S>
        __device__ void take(const RowState& x, const T& t, const S& s) {
            l_t = l_s = a = 0.f;
#pragma unroll
            for (int i = 0; i < T::kCount; ++i) {
                const float u = t.less(i, x.r_t), v = s.less(i, x.r_s);
                const float p = exp2_approx(u);
                l_t += p;
                l_s += exp2_approx(v);
                a = fmaf(p, u - v, a);
            }
        }
        // 2^60 per tile leaves 2^67 tiles before float overflows; a NaN fails the comparison and stays a NaN.
        __device__ bool safe() const { return l_t < 1.152921504606847e18f && l_s < 1.152921504606847e18f; }
    };

    __device__ void add(const Sums& x) {
        l_t += x.l_t;
        l_s += x.l_s;
        a += x.a;
    }

    // All rows of a lane in one pass, so that their chains of additions overlap; the references move afterwards, for
    // the rows that need it, and those passes are done again. Ordinary data needs that for its first tile only.
    template <int COUNT, class T, class S>
    __device__ static void absorb(RowState (&rows)[COUNT], const T (&t)[COUNT], const S (&s)[COUNT]) {
        Sums sums[COUNT];
        bool safe = true;
#pragma unroll
        for (int r = 0; r < COUNT; ++r) {
            sums[r].take(rows[r], t[r], s[r]);
            safe = safe && sums[r].safe();
        }
        if (!safe) {
#pragma unroll
            for (int r = 0; r < COUNT; ++r) {
                if (sums[r].safe()) continue;
                float to_t = rows[r].r_t, to_s = rows[r].r_s;
#pragma unroll
                for (int i = 0; i < T::kCount; ++i) {
                    to_t = fmaxf(to_t, t[r][i]);
                    to_s = fmaxf(to_s, s[r][i]);
                }
                rows[r].move_references(to_t, to_s);
                sums[r].take(rows[r], t[r], s[r]);
            }
        }
#pragma unroll
        for (int r = 0; r < COUNT; ++r) rows[r].add(sums[r]);
    }

    __device__ void merge(RowState other) {
        const float to_t = fmaxf(r_t, other.r_t), to_s = fmaxf(r_s, other.r_s);
        move_references(to_t, to_s);
        other.move_references(to_t, to_s);
        l_t += other.l_t;
        l_s += other.l_s;
        a += other.a;
    }

    __device__ RowState shuffle(int mask) const {
        return {__shfl_xor_sync(~0u, r_t, mask), __shfl_xor_sync(~0u, r_s, mask), __shfl_xor_sync(~0u, l_t, mask),
                __shfl_xor_sync(~0u, l_s, mask), __shfl_xor_sync(~0u, a, mask)};
    }

    // As floats `stride` apart, for another block to merge.
    __device__ void store(float* to, i64 stride) const {
        const float fields[] = {r_t, r_s, l_t, l_s, a};
#pragma unroll
        for (int i = 0; i < 5; ++i) to[i * stride] = fields[i];
    }

    __device__ static RowState load(const float* from, i64 stride) {
        return {from[0], from[stride], from[2 * stride], from[3 * stride], from[4 * stride]};
    }

    __device__ void finish(float& kl, float& lse_t, float& lse_s) const {
        if (r_t == kUnseen && l_t == 0.f && l_s == 0.f && a == 0.f) {
            kl = 0.f;
            lse_t = lse_s = -infinity();
            return;
        }
        kl = kLn2 * (a / l_t + log2f(l_s / l_t));
        lse_t = kLn2 * (r_t + log2f(l_t));
        lse_s = kLn2 * (r_s + log2f(l_s));
        if (!is_finite(kl)) kl = lse_t = lse_s = not_a_number();  // only an infinite or NaN input leads here
    }
};

template <int SIDE>
struct LogitGradient;

// dKL/dS_j = Q_j - P_j
template <>
struct LogitGradient<kStudent> {
    static constexpr float kFactor = 1.f;
    static constexpr bool kNeedsValue = false;
    __device__ static float evaluate(float x, float y, float) { return exp2_approx(y) - exp2_approx(x); }
    __device__ static float bound(float) { return 1.f; }
};

// dKL/dT_j = P_j (log P_j - log Q_j - KL). P (log2 P - log2 Q) is above -1, and its positive part sums to at most KL + 1.
template <>
struct LogitGradient<kTeacher> {
    static constexpr float kFactor = kLn2;
    static constexpr bool kNeedsValue = true;
    __device__ static float evaluate(float x, float y, float value) { return exp2_approx(x) * (x - y - value); }
    __device__ static float bound(float value) { return 2.f * fabsf(value) + 2.f; }
};

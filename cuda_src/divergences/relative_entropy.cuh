// sum_j P_j (log P_j - log Q_j) of two distributions over the keys of a row, whichever of them is the teacher's.
//
// Per row, in base 2, with references r_p, r_q (logits that occurred), u and v the logits of P and of Q less these:
//     l_p = sum 2^u     l_q = sum 2^v     A = sum 2^u (u - v)     value = ln 2 (A / l_p + log2(l_q / l_p))
// The references cancel, so nothing large is subtracted. Moving them by (d_p, d_q):
//     A <- 2^-d_p (A - (d_p - d_q) l_p)     l_p <- 2^-d_p l_p     l_q <- 2^-d_q l_q
// which also merges two states. No running maximum is kept: a reference moves only when a sum leaves the safe range.
#pragma once
#include "divergences/interface.cuh"

struct RelativeEntropy {
    float r_p, r_q, l_p, l_q, a;

    __device__ void start() {
        r_p = r_q = kUnseen;
        l_p = l_q = a = 0.f;
    }

    __device__ void move_references(float to_p, float to_q) {
        const float d_p = to_p - r_p, d_q = to_q - r_q, shrink = exp2_approx(-d_p);
        a = shrink * (a - (d_p - d_q) * l_p);
        l_p *= shrink;
        l_q *= exp2_approx(-d_q);
        r_p = to_p;
        r_q = to_q;
    }

    // The sums of one tile over the row's keys, relative to the references.
    struct Sums {
        float l_p, l_q, a;

        template <class P, class Q>
        __device__ void take(const RelativeEntropy& x, const P& p, const Q& q) {
            l_p = l_q = a = 0.f;
#pragma unroll
            for (int i = 0; i < P::kCount; ++i) {
                const float u = p.less(i, x.r_p), v = q.less(i, x.r_q);
                const float weight = exp2_approx(u);
                l_p += weight;
                l_q += exp2_approx(v);
                a = fmaf(weight, u - v, a);
            }
        }
        // 2^60 per tile leaves 2^67 tiles before float overflows; a NaN fails the comparison and stays a NaN.
        __device__ bool safe() const { return l_p < 1.152921504606847e18f && l_q < 1.152921504606847e18f; }
    };

    __device__ void add(const Sums& x) {
        l_p += x.l_p;
        l_q += x.l_q;
        a += x.a;
    }

    // All rows of a lane in one pass, so that their chains of additions overlap; the references move afterwards, for
    // the rows that need it, and those passes are done again. Ordinary data needs that for its first tile only.
    template <class Rows, int COUNT, class P, class Q>
    __device__ static void absorb(Rows (&rows)[COUNT], const P (&p)[COUNT], const Q (&q)[COUNT]) {
        Sums sums[COUNT];
        bool safe = true;
#pragma unroll
        for (int r = 0; r < COUNT; ++r) {
            sums[r].take(rows[r], p[r], q[r]);
            safe = safe && sums[r].safe();
        }
        if (!safe) {
#pragma unroll
            for (int r = 0; r < COUNT; ++r) {
                if (sums[r].safe()) continue;
                float to_p = rows[r].r_p, to_q = rows[r].r_q;
#pragma unroll
                for (int i = 0; i < P::kCount; ++i) {
                    to_p = fmaxf(to_p, p[r][i]);
                    to_q = fmaxf(to_q, q[r][i]);
                }
                rows[r].move_references(to_p, to_q);
                sums[r].take(rows[r], p[r], q[r]);
            }
        }
#pragma unroll
        for (int r = 0; r < COUNT; ++r) rows[r].add(sums[r]);
    }

    __device__ void merge(RelativeEntropy other) {
        const float to_p = fmaxf(r_p, other.r_p), to_q = fmaxf(r_q, other.r_q);
        move_references(to_p, to_q);
        other.move_references(to_p, to_q);
        l_p += other.l_p;
        l_q += other.l_q;
        a += other.a;
    }

    __device__ RelativeEntropy shuffle(int mask) const {
        return {__shfl_xor_sync(~0u, r_p, mask), __shfl_xor_sync(~0u, r_q, mask), __shfl_xor_sync(~0u, l_p, mask),
                __shfl_xor_sync(~0u, l_q, mask), __shfl_xor_sync(~0u, a, mask)};
    }

    // As floats `stride` apart, for another block to merge.
    __device__ void store(float* to, i64 stride) const {
        const float fields[] = {r_p, r_q, l_p, l_q, a};
#pragma unroll
        for (int i = 0; i < 5; ++i) to[i * stride] = fields[i];
    }

    __device__ static RelativeEntropy load(const float* from, i64 stride) {
        return {from[0], from[stride], from[2 * stride], from[3 * stride], from[4 * stride]};
    }

    __device__ void finish(float& value, float& lse_p, float& lse_q) const {
        if (r_p == kUnseen && l_p == 0.f && l_q == 0.f && a == 0.f) {
            value = 0.f;
            lse_p = lse_q = -infinity();
            return;
        }
        value = kLn2 * (a / l_p + log2f(l_q / l_p));
        lse_p = kLn2 * (r_p + log2f(l_p));
        lse_q = kLn2 * (r_q + log2f(l_q));
        if (!is_finite(value)) value = lse_p = lse_q = not_a_number();  // only an infinite or NaN input leads here
    }
};

// By a logit of P: P_j (log P_j - log Q_j - value). P (log2 P - log2 Q) is above -1, and its positive part sums to at
// most the value + 1.
struct EntropyByFirst {
    static constexpr float kFactor = kLn2;
    static constexpr bool kNeedsValue = true;
    __device__ static float of(float log_p, float log_q, float value) {
        return exp2_approx(log_p) * (log_p - log_q - value);
    }
    __device__ static float bound(float value) { return 2.f * fabsf(value) + 2.f; }
};

// By a logit of Q: Q_j - P_j
struct EntropyBySecond {
    static constexpr float kFactor = 1.f;
    static constexpr bool kNeedsValue = false;
    __device__ static float of(float log_p, float log_q, float) { return exp2_approx(log_q) - exp2_approx(log_p); }
    __device__ static float bound(float) { return 1.f; }
};

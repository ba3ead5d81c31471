// Sums of one row over the keys of both distributions, P of the teacher and Q of the student, relative to moving
// references. In base 2, with references r_t, r_s (logits that occurred), u and v the logits less these:
//     l_t = sum 2^u     l_s = sum 2^v     and TERMS, each a sum of its own that knows how it moves
// When references move by (d_t, d_s), l_t <- 2^-d_t l_t and l_s <- 2^-d_s l_s, which also merges two states. No running
// maximum is kept: a reference moves only when a sum leaves the safe range.
//
// A term is a struct of static functions:
//     add(p, q, u, v, sum)                the sum with one more key; p = 2^u, q = 2^v
//     move(sum, moves)                    the sum after the references have moved
//     largest()                           an l of a tile beyond which references move
//
// Where the teacher's entropy is wanted too (SKL_ENTROPY, of a forward), its term comes last.
#pragma once
#include "divergences/interface.cuh"

// How far references move, the factors on the sums that follow from it, and these before they move.
struct Moves {
    float d_t, d_s, shrink_t, shrink_s, l_t, l_s;
};

// 2^60 per tile leaves 2^67 tiles before float overflows.
__device__ constexpr float largest_sum() { return 1.152921504606847e18f; }

__device__ constexpr float least(float x) { return x; }
template <class... Rest>
__device__ constexpr float least(float x, float y, Rest... rest) {
    return least(x < y ? x : y, rest...);
}

template <class... TERMS>
struct SoftmaxSums {
    enum : int { kTerms = sizeof...(TERMS), kMoments = kSomeKeys ? 4 + kTerms : 0 };
    enum : bool { kResumes = false };
    float r_t, r_s, l_t, l_s, terms[kTerms];

    __device__ void start() {
        r_t = r_s = kUnseen;
        l_t = l_s = 0.f;
#pragma unroll
        for (int i = 0; i < kTerms; ++i) terms[i] = 0.f;
    }

    __device__ void move_references(float to_t, float to_s) {
        const float d_t = to_t - r_t, d_s = to_s - r_s;
        const Moves moves{d_t, d_s, exp2_approx(-d_t), exp2_approx(-d_s), l_t, l_s};
        int i = 0;
        ((terms[i] = TERMS::move(terms[i], moves), ++i), ...);
        l_t *= moves.shrink_t;
        l_s *= moves.shrink_s;
        r_t = to_t;
        r_s = to_s;
    }

    // The sums of one tile over the row's keys, relative to the references.
    struct Tile {
        float l_t, l_s, terms[kTerms];

        template <class T, class S>
        __device__ void take(const SoftmaxSums& x, const T& t, const S& s) {
            l_t = l_s = 0.f;
#pragma unroll
            for (int i = 0; i < kTerms; ++i) terms[i] = 0.f;
            const auto weigh_t = t.weights(x.r_t);
            const auto weigh_s = s.weights(x.r_s);
#pragma unroll
            for (int i = 0; i < T::kCount; ++i) {
                const float u = t.less(i, x.r_t), v = s.less(i, x.r_s);
                const float p = weigh_t(t.dots[i], u), q = weigh_s(s.dots[i], v);
                l_t += p;
                l_s += q;
                int k = 0;
                ((terms[k] = TERMS::add(p, q, u, v, terms[k]), ++k), ...);
            }
        }
        // A NaN fails the comparison and stays a NaN.
        __device__ bool safe() const { return l_t < least(TERMS::largest()...) && l_s < least(TERMS::largest()...); }
    };

    __device__ void add(const Tile& x) {
        l_t += x.l_t;
        l_s += x.l_s;
#pragma unroll
        for (int i = 0; i < kTerms; ++i) terms[i] += x.terms[i];
    }

    // All rows of a lane in one pass, so that their chains of additions overlap; the references move afterwards, for
    // the rows that need it, and those passes are done again. Ordinary data needs that for its first tile only.
    template <class Rows, int COUNT, class T, class S>
    __device__ static void absorb(Rows (&rows)[COUNT], const T (&t)[COUNT], const S (&s)[COUNT]) {
        Tile sums[COUNT];
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

    // The same where references need not move; false: they need to, and nothing has been added.
    template <class Rows, int COUNT, class T, class S>
    __device__ static bool absorb_once(Rows (&rows)[COUNT], const T (&t)[COUNT], const S (&s)[COUNT]) {
        Tile sums[COUNT];
        bool safe = true;
#pragma unroll
        for (int r = 0; r < COUNT; ++r) {
            sums[r].take(rows[r], t[r], s[r]);
            safe = safe && sums[r].safe();
        }
        if (!safe) return false;
#pragma unroll
        for (int r = 0; r < COUNT; ++r) rows[r].add(sums[r]);
        return true;
    }

    __device__ void merge(SoftmaxSums other) {
        const float to_t = fmaxf(r_t, other.r_t), to_s = fmaxf(r_s, other.r_s);
        move_references(to_t, to_s);
        other.move_references(to_t, to_s);
        l_t += other.l_t;
        l_s += other.l_s;
#pragma unroll
        for (int i = 0; i < kTerms; ++i) terms[i] += other.terms[i];
    }

    __device__ SoftmaxSums shuffle(int mask) const {
        SoftmaxSums x;
        x.r_t = __shfl_xor_sync(~0u, r_t, mask);
        x.r_s = __shfl_xor_sync(~0u, r_s, mask);
        x.l_t = __shfl_xor_sync(~0u, l_t, mask);
        x.l_s = __shfl_xor_sync(~0u, l_s, mask);
#pragma unroll
        for (int i = 0; i < kTerms; ++i) x.terms[i] = __shfl_xor_sync(~0u, terms[i], mask);
        return x;
    }

    // As floats `stride` apart, for another block to merge.
    __device__ void store(float* to, i64 stride) const {
        const float fields[] = {r_t, r_s, l_t, l_s};
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i * stride] = fields[i];
#pragma unroll
        for (int i = 0; i < kTerms; ++i) to[(4 + i) * stride] = terms[i];
    }

    __device__ void load(const float* from, i64 stride) {
        r_t = from[0];
        r_s = from[stride];
        l_t = from[2 * stride];
        l_s = from[3 * stride];
#pragma unroll
        for (int i = 0; i < kTerms; ++i) terms[i] = from[(4 + i) * stride];
    }

    __device__ bool empty() const {
        bool nothing = r_t == kUnseen && l_t == 0.f && l_s == 0.f;
#pragma unroll
        for (int i = 0; i < kTerms; ++i) nothing = nothing && terms[i] == 0.f;
        return nothing;
    }

    __device__ void moments(float* to, float) const {
        if constexpr (kSomeKeys) store(to, 1);
    }

    // Nats, of the last term, beside the log-sum-exp that the row has: 0 without keys, NaN where that is.
    __device__ float entropy(float lse_t) const {
        if (lse_t == -infinity()) return 0.f;
        return is_finite(lse_t) ? kLn2 * (log2f(l_t) - terms[kTerms - 1] / l_t) : lse_t;
    }

    // The natural log-sum-exps, beside a value. Only an infinite or NaN input leads to a value, or a sum of the entropy,
    // that is not finite.
    __device__ void empty_or_nan(float& value, float& lse_t, float& lse_s) const {
        lse_t = kLn2 * (r_t + log2f(l_t));
        lse_s = kLn2 * (r_s + log2f(l_s));
        if (empty()) {
            value = 0.f;
            lse_t = lse_s = -infinity();
        } else if (!is_finite(value) || (kEntropy && !is_finite(terms[kTerms - 1]))) {
            value = lse_t = lse_s = not_a_number();
        }
    }
};

// H(P) = -sum P log P = ln 2 (log2 l_t - B / l_t), B = sum 2^u u.
struct TeacherEntropy {
    __device__ static constexpr float largest() { return largest_sum(); }
    __device__ static float add(float p, float, float u, float, float sum) { return fmaf(p, u, sum); }
    __device__ static float move(float sum, const Moves& x) { return x.shrink_t * (sum - x.d_t * x.l_t); }
};

template <bool ENTROPY, class... TERMS>
struct RowSumsOf {
    using Type = SoftmaxSums<TERMS...>;
};
template <class... TERMS>
struct RowSumsOf<true, TERMS...> {
    using Type = SoftmaxSums<TERMS..., TeacherEntropy>;
};

// What row states are made of: the terms of a divergence, and with them that of the entropy where it is wanted.
template <class... TERMS>
using RowSums = typename RowSumsOf<bool(kEntropy), TERMS...>::Type;

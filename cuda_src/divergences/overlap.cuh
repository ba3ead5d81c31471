// What divergences have in common that compare P and Q by their products: the row's
//     pp = sum P^2     pq = sum P Q     qq = sum Q^2
// which are its moments too. All are relative to the squares of l_t and l_s, so references cancel, and equal
// distributions have three equal numbers.
#pragma once
#include "divergences/softmax_sums.cuh"

// The square of a sum of a tile stays below 2^80.
__device__ constexpr float largest_rooted() { return 1.099511627776e12f; }

struct TeacherSquares {
    __device__ static constexpr float largest() { return largest_rooted(); }
    __device__ static float add(float p, float, float, float, float sum) { return fmaf(p, p, sum); }
    __device__ static float move(float sum, const Moves& x) { return x.shrink_t * x.shrink_t * sum; }
};
struct Products {
    __device__ static constexpr float largest() { return largest_rooted(); }
    // 0 times u - v is for infinite ones, whose p or q may be 0: they must not be silent.
    __device__ static float add(float p, float q, float u, float v, float sum) {
        return fmaf(p, fmaf(u - v, 0.f, q), sum);
    }
    __device__ static float move(float sum, const Moves& x) { return x.shrink_t * x.shrink_s * sum; }
};
struct StudentSquares {
    __device__ static constexpr float largest() { return largest_rooted(); }
    __device__ static float add(float, float q, float, float, float sum) { return fmaf(q, q, sum); }
    __device__ static float move(float sum, const Moves& x) { return x.shrink_s * x.shrink_s * sum; }
};

struct Overlap : RowSums<TeacherSquares, Products, StudentSquares> {
    enum : int { kMoments = 3 };
    __device__ float pp() const { return terms[0] / l_t / l_t; }
    __device__ float pq() const { return terms[1] / l_t / l_s; }
    __device__ float qq() const { return terms[2] / l_s / l_s; }
    // Zeros without keys, NaN where the log-sum-exp is.
    __device__ void moments(float* to, float lse_t) const {
        const bool empty = lse_t == -infinity(), bad = !empty && !is_finite(lse_t);
        to[0] = empty ? 0.f : bad ? lse_t : pp();
        to[1] = empty ? 0.f : bad ? lse_t : pq();
        to[2] = empty ? 0.f : bad ? lse_t : qq();
    }
};

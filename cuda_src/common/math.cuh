// Constants and small float helpers.
#pragma once
#include "common/types.cuh"
#include "ptx/math.cuh"

constexpr float kLn2 = 0.69314718055994530942f;
constexpr float kLog2e = 1.44269504088896340736f;

__device__ inline float infinity() { return __int_as_float(0x7f800000); }
__device__ inline float not_a_number() { return __int_as_float(0x7fffffff); }
__device__ inline bool is_finite(float x) { return fabsf(x) < infinity(); }

// Log-sum-exps, nats, of logits that lacked so much in base 2. A row without keys stays what it is; where the numbers
// are too large, all of the row is NaN.
__device__ inline void add_offsets(float& value, float& lse_t, float& lse_s, float offset_t, float offset_s) {
    if (lse_t == -infinity()) return;
    lse_t = fmaf(kLn2, offset_t, lse_t);
    lse_s = fmaf(kLn2, offset_s, lse_s);
    if (!(is_finite(lse_t) && is_finite(lse_s))) value = lse_t = lse_s = not_a_number();
}

// 2^e for an integer e in [-126, 127], exactly.
__device__ inline float power_of_two(int e) { return __int_as_float((e + 127) << 23); }

// The smallest e with |x| < 2^(e+1) for normal finite x; subnormals count as -127, infinities and NaN as 128.
__device__ inline int exponent_of(float x) { return ((__float_as_int(x) >> 23) & 255) - 127; }

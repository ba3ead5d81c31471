// Element types as the matrix unit sees them. A product needs 16-bit operands: bf16 and fp16 are used as they are, and
// a float is carried as a sum of bf16 "planes", x = p0 + p1 + p2 with |p(i+1)| <= 2^-8 |p(i)|. Three planes hold all
// 24 bits and the six products with i + j < 3 leave an error of 2^-24 per term; two planes hold 16 bits.
#pragma once
#include "common/types.cuh"
#include "ptx/convert.cuh"
#include "ptx/mma.cuh"

template <int CODE>
struct Element;

#ifndef SKL_WIDE
#define SKL_WIDE 0
#endif
// What the gradient of the stationary operand is written as: floats where others are to be added to it.
template <int CODE, bool WIDE = SKL_WIDE>
using Written = Element<WIDE ? int(kF32) : CODE>;

template <>
struct Element<kBf16> {
    static constexpr int kBytes = 2;
    static constexpr int kPlanes = 1;
    static constexpr bool kNarrowExponent = false;
    __device__ static void split(float lo, float hi, u32 (&planes)[1]) { planes[0] = pack_bf16(lo, hi); }
    __device__ static void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_bf16(d, a, b0, b1); }
    __device__ static float2 widen(u32 pair) { return make_float2(bf16_low(pair), bf16_high(pair)); }
    __device__ static float load(u64 address) { return bf16_low(*reinterpret_cast<const u16*>(address)); }
    __device__ static void store(u64 address, float x) {
        *reinterpret_cast<u16*>(address) = static_cast<u16>(pack_bf16(x, 0.f));
    }
    __device__ static void store_pair(u64 address, float x, float y) {
        *reinterpret_cast<u32*>(address) = pack_bf16(x, y);
    }
};

template <>
struct Element<kF16> {
    static constexpr int kBytes = 2;
    static constexpr int kPlanes = 1;
    static constexpr bool kNarrowExponent = true;  // 2^-24 to 65504: gradients of scores must be scaled into it
    __device__ static void split(float lo, float hi, u32 (&planes)[1]) { planes[0] = pack_f16(lo, hi); }
    __device__ static void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_f16(d, a, b0, b1); }
    __device__ static float2 widen(u32 pair) {
        return make_float2(f16_to_float(static_cast<u16>(pair)), f16_to_float(static_cast<u16>(pair >> 16)));
    }
    __device__ static float load(u64 address) { return f16_to_float(*reinterpret_cast<const u16*>(address)); }
    __device__ static void store(u64 address, float x) {
        *reinterpret_cast<u16*>(address) = static_cast<u16>(pack_f16(x, 0.f));
    }
    __device__ static void store_pair(u64 address, float x, float y) {
        *reinterpret_cast<u32*>(address) = pack_f16(x, y);
    }
};

template <>
struct Element<kF32> {
    static constexpr int kBytes = 4;
    static constexpr int kPlanes = SKL_PLANES;
    static constexpr bool kNarrowExponent = false;
    static_assert(kPlanes == 2 || kPlanes == 3, "plan: planes must be 3 (precision highest) or 2 (precision high)");
    __device__ static void split(float lo, float hi, u32 (&planes)[kPlanes]) {
#pragma unroll
        for (int p = 0; p < kPlanes; ++p) {
            planes[p] = pack_bf16(lo, hi);
            lo -= bf16_low(planes[p]);
            hi -= bf16_high(planes[p]);
        }
    }
    __device__ static void multiply(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_bf16(d, a, b0, b1); }
    __device__ static float load(u64 address) { return *reinterpret_cast<const float*>(address); }
    __device__ static void store(u64 address, float x) { *reinterpret_cast<float*>(address) = x; }
    __device__ static void store_pair(u64 address, float x, float y) {
        *reinterpret_cast<float2*>(address) = make_float2(x, y);
    }
};

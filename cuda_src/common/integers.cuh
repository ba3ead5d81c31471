// Integers of a caller's array, of 32 or 64 bits.
#pragma once
#include "common/types.cuh"

__device__ inline i64 integer_at(u64 pointer, i64 index, bool wide) {
    return wide ? reinterpret_cast<const i64*>(pointer)[index] : reinterpret_cast<const int*>(pointer)[index];
}
__device__ inline int clamped(i64 x, int most) { return static_cast<int>(min(max(x, 0ll), static_cast<i64>(most))); }

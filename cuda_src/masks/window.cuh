// Row i sees the keys i + q_offset - left <= j <= i + q_offset + right. Words: left, right (negative: unlimited),
// q_offset.
#pragma once
#include "masks/interface.cuh"

struct Window : Part {
    static constexpr int kWords = 3;
    static constexpr bool kKnowsQueries = true;
    int low, high;  // row i sees [i + low, i + high]
    // Clipped to where every row sees everything on that side, or nothing, so that sums stay below 2^31.
    __device__ Window(Words& words, const Extents&, const Segment& segment, int, int) {
        const i64 left = words.next(), right = words.next(), offset = words.next() + segment.diagonal;
        const i64 lowest = 1 - segment.queries, highest = segment.keys;
        low = static_cast<int>(left < 0 ? lowest : max(lowest, min(offset - left, highest)));
        high = static_cast<int>(right < 0 ? highest - 1 : max(lowest - 1, min(offset + right, highest - 1)));
    }
    __device__ Range keys_of(int q0, int q1) const { return {q0 + low, q1 + high}; }
    __device__ Range queries_of(int k0, int k1) const { return {k0 - high, k1 - low}; }
    __device__ bool full(int q0, int q1, int k0, int k1) const { return q1 + low <= k0 + 1 && k1 <= q0 + high + 1; }
    // One comparison, and of a difference, so that neighbouring pairs differ by a constant. Where high < low no tile is
    // visited.
    __device__ bool visible(int q, int k) const {
        return static_cast<u32>(k - q - low) <= static_cast<u32>(high - low);
    }
};

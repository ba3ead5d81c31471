// Row i sees the keys j <= i + q_offset. Words: q_offset (N - M is the bottom-right alignment).
#pragma once
#include "masks/interface.cuh"

struct Causal : Part {
    static constexpr int kWords = 1;
    static constexpr bool kKnowsQueries = true;
    int offset;  // the host keeps it within [-M, N], which changes no result
    __device__ Causal(Words& words, const Extents&, const Segment& segment, int, int)
        : offset(words.number() + segment.diagonal) {}
    __device__ Range keys_of(int, int q1) const { return {0, q1 + offset}; }
    __device__ Range queries_of(int k0, int) const { return {k0 - offset, kNoLimit}; }
    __device__ bool full(int q0, int, int, int k1) const { return k1 <= q0 + offset + 1; }
    __device__ bool visible(int q, int k) const { return k <= q + offset; }
};

// Row i sees the keys j <= i + q_offset. Parameters: q_offset (N - M is the bottom-right alignment).
#pragma once
#include "masks/interface.cuh"

struct Mask {
    int queries, keys;
    int offset;  // the host keeps it within [-M, N], which changes no result
    __device__ explicit Mask(const Extents& n) : queries(n.queries), keys(n.keys), offset(static_cast<int>(n.mask[0])) {}
    __device__ Range keys_of(int, int q1) const { return {0, max(0, min(q1 + offset, keys))}; }
    __device__ Range queries_of(int k0, int) const { return {max(0, min(k0 - offset, queries)), queries}; }
    __device__ bool full(int q0, int q1, int, int k1) const { return q1 <= queries && k1 <= keys && k1 <= q0 + offset + 1; }
    __device__ bool visible(int q, int k) const { return q < queries && k < keys && k <= q + offset; }
};

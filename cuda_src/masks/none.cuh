// Every key is visible to every row.
#pragma once
#include "masks/interface.cuh"

struct Mask {
    int queries, keys;
    __device__ explicit Mask(const Extents& n) : queries(n.queries), keys(n.keys) {}
    __device__ Range keys_of(int, int) const { return {0, keys}; }
    __device__ Range queries_of(int, int) const { return {0, queries}; }
    __device__ bool full(int, int q1, int, int k1) const { return q1 <= queries && k1 <= keys; }
    __device__ bool visible(int q, int k) const { return q < queries && k < keys; }
};

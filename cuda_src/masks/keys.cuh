// Key j of batch entry b is there where its bit is set. Words: the address of the bits.
#pragma once
#include "masks/bits.cuh"

struct KeyBits : Part {
    static constexpr int kWords = 1;
    static constexpr bool kSparse = true;
    static constexpr bool kHoles = kRowsAreQueries;  // stationary keys have said what they see by `queries_of`
    Bits given;
    __device__ KeyBits(Words& words, const Extents& n, const Segment&, int batch, int)
        : given(words.pointer<u32>(), batch, n.keys) {}
    __device__ bool any_visible(int, int, int k0, int k1) const { return given.any(k0, k1); }
    __device__ bool full(int, int, int k0, int k1) const { return given.all(k0, k1); }
    __device__ Range queries_of(int k0, int k1) const { return {0, given.any(k0, k1) ? kNoLimit : 0}; }
    __device__ bool visible(int, int k) const { return given.at(k); }
};

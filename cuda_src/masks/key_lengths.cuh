// Batch entry b has key_lengths[b] keys. Words: the address of the lengths, int32.
#pragma once
#include "masks/interface.cuh"

struct KeyLengths : Part {
    static constexpr int kWords = 1;
    int length;
    __device__ KeyLengths(Words& words, const Extents&, const Segment& segment, int batch, int)
        : length(max(0, min(words.pointer<int>()[batch], segment.keys))) {}
    __device__ Range keys_of(int, int) const { return {0, length}; }
    __device__ Range queries_of(int k0, int) const { return {0, k0 < length ? kNoLimit : 0}; }
    __device__ bool full(int, int, int, int k1) const { return k1 <= length; }
    __device__ bool visible(int, int k) const { return k < length; }
};

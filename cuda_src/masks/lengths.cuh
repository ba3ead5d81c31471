// Batch entry b has key_lengths[b] keys. Words: the address of the lengths, int32.
#pragma once
#include "masks/interface.cuh"

struct KeyLengths : Part {
    static constexpr int kWords = 1;
    static constexpr bool kShortens = true;
    int length;
    __device__ KeyLengths(Words& words, const Extents&, const Segment& segment, int batch, int)
        : length(max(0, min(words.pointer<int>()[batch], segment.keys))) {}
    __device__ void shorten(Segment& segment) const { segment.keys = length; }
};

// Batch entry b has query_lengths[b] rows; those behind them see nothing. Words: the address of the lengths, int32.
#pragma once
#include "masks/interface.cuh"

struct QueryLengths : Part {
    static constexpr int kWords = 1;
    static constexpr bool kShortens = true;
    int length;
    __device__ QueryLengths(Words& words, const Extents&, const Segment& segment, int batch, int)
        : length(max(0, min(words.pointer<int>()[batch], segment.queries))) {}
    __device__ void shorten(Segment& segment) const { segment.queries = length; }
};

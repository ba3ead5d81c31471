// Row i of batch entry b is there where its bit is set; others see nothing. Words: the address of the bits.
#pragma once
#include "masks/bits.cuh"

struct QueryBits : Part {
    static constexpr int kWords = 1;
    static constexpr bool kSparse = true, kPicksQueries = true;
    static constexpr bool kHoles = !kRowsAreQueries;  // stationary rows have said what they see by `keys_of`
    Bits rows;
    __device__ QueryBits(Words& words, const Extents& n, const Segment&, int batch, int)
        : rows(words.pointer<u32>(), batch, n.queries) {}
    __device__ Range keys_of(int q0, int q1) const { return {0, rows.any(q0, q1) ? kNoLimit : 0}; }
    __device__ bool any_visible(int q0, int q1, int, int) const { return kRowsAreQueries || rows.any(q0, q1); }
    __device__ bool full(int q0, int q1, int, int) const { return kRowsAreQueries || rows.all(q0, q1); }
    __device__ bool there(int q) const { return rows.at(q); }
};

// A bit for each key or each query row of a batch entry, 32 to a word, whole words per entry; kernels/mask_bits.cu
// packs them.
#pragma once
#include "common/sizes.cuh"
#include "masks/interface.cuh"

struct Bits {
    const u32* words;
    int count;
    __device__ Bits(const u32* words, int batch, int count)
        : words(words + static_cast<i64>(batch) * bit_words(count)), count(count) {}

    // Of the word that holds bit i, those of [i, end) in it.
    __device__ static u32 inside(int i, int end) {
        const int above = (i | 31) + 1 - end;
        return ~0u << (i & 31) & ~0u >> max(above, 0);
    }
    __device__ bool any(int begin, int end) const {
        end = min(end, count);
#pragma unroll 1
        for (int i = begin; i < end; i = (i | 31) + 1)
            if (words[i >> 5] & inside(i, end)) return true;
        return false;
    }
    __device__ bool all(int begin, int end) const {
        end = min(end, count);
#pragma unroll 1
        for (int i = begin; i < end; i = (i | 31) + 1)
            if (~words[i >> 5] & inside(i, end)) return false;
        return true;
    }
    // Asked beyond the last one too.
    __device__ bool at(int i) const { return words[min(i, count - 1) >> 5] >> (i & 31) & 1; }
};

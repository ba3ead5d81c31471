// Key j of batch entry b is there where its bit is set. Words: the address of the bits, 32 keys to a word, whole words
// per entry; kernels/key_bits.cu packs them.
#pragma once
#include "common/sizes.cuh"
#include "masks/interface.cuh"

struct KeyBits : Part {
    static constexpr int kWords = 1;
    static constexpr bool kSparse = true;
    static constexpr bool kHoles = kRowsAreQueries;  // stationary keys have said what they see by `queries_of`
    const u32* bits;
    int keys;
    __device__ KeyBits(Words& words, const Extents& n, const Segment&, int batch, int)
        : bits(words.pointer<u32>() + static_cast<i64>(batch) * key_words(n.keys)), keys(n.keys) {}

    // Of the word that holds key k, the bits of the keys of [k, k1) in it.
    __device__ static u32 inside(int k, int k1) {
        const int above = (k | 31) + 1 - k1;
        return ~0u << (k & 31) & ~0u >> max(above, 0);
    }
    __device__ bool any_visible(int, int, int k0, int k1) const {
        k1 = min(k1, keys);
#pragma unroll 1
        for (int k = k0; k < k1; k = (k | 31) + 1)
            if (bits[k >> 5] & inside(k, k1)) return true;
        return false;
    }
    __device__ bool full(int, int, int k0, int k1) const {
        k1 = min(k1, keys);
#pragma unroll 1
        for (int k = k0; k < k1; k = (k | 31) + 1)
            if (~bits[k >> 5] & inside(k, k1)) return false;
        return true;
    }
    __device__ Range queries_of(int k0, int k1) const { return {0, any_visible(0, 0, k0, k1) ? kNoLimit : 0}; }
    // Asked beyond the last key too.
    __device__ bool visible(int, int k) const { return bits[min(k, keys - 1) >> 5] >> (k & 31) & 1; }
};

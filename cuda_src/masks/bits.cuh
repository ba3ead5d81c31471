// A bit for each key or each query row of a batch entry, 32 to a word, whole words per entry, and behind those of all
// entries where each begins and ends; kernels/mask_bits.cu makes both. What is padding leaves no holes, and no bit of it
// is read.
#pragma once
#include "common/sizes.cuh"
#include "masks/interface.cuh"

struct Bits {
    const u32* words;  // of all entries
    int start;         // the entry's first of these; negative where all of the span is there
    Range span;        // from the first to behind the last that is there
    __device__ Bits(const u32* words, int entries, int batch, int count) : words(words) {
        const int per_entry = bit_words(count);
        const u32* const found = words + static_cast<i64>(entries) * per_entry + batch * kSpanWords;
        const int end = static_cast<int>(found[1]), begin = end > 0 ? count - static_cast<int>(found[0]) : 0;
        span = {begin, end};
        start = static_cast<int>(found[2]) == end - begin ? -1 : batch * per_entry;
    }

    // Of the word that holds bit i, those of [i, end) in it.
    __device__ static u32 inside(int i, int end) {
        const int above = (i | 31) + 1 - end;
        return ~0u << (i & 31) & ~0u >> max(above, 0);
    }
    __device__ bool any(int begin, int end) const {
        begin = max(begin, span.begin);
        end = min(end, span.end);
        if (start < 0) return begin < end;
#pragma unroll 1
        for (int i = begin; i < end; i = (i | 31) + 1)
            if (words[start + (i >> 5)] & inside(i, end)) return true;
        return false;
    }
    // Of an interval without any beyond the last one.
    __device__ bool all(int begin, int end) const {
        if (begin < span.begin || end > span.end) return false;
        if (start < 0) return true;
#pragma unroll 1
        for (int i = begin; i < end; i = (i | 31) + 1)
            if (~words[start + (i >> 5)] & inside(i, end)) return false;
        return true;
    }
    // Asked beyond the last one too.
    __device__ bool at(int i) const {
        const bool inside = span.contains(i);
        const u32 word = start < 0 ? ~0u : words[start + ((inside ? i : 0) >> 5)];
        return inside & (word >> (i & 31) & 1);
    }
};

// Packs a mask of keys, a byte each, to the bits that masks/ reads: 32 keys to a word, whole words per batch entry, the
// bits beyond the last key 0. A warp makes a word.
#include "common/sizes.cuh"

extern "C" __global__ void __launch_bounds__(SKL_THREADS) streamkl_key_bits(const __grid_constant__ KeyBitsArgs args) {
    const i64 index = static_cast<i64>(blockIdx.x) * SKL_THREADS + threadIdx.x, word = index / 32;
    const int words = key_words(args.count), key = static_cast<int>(word % words) * 32 + static_cast<int>(index % 32);
    const i64 entry = word / words;
    const bool there = entry < args.entries && key < args.count &&
                       reinterpret_cast<const unsigned char*>(args.keys)[entry * args.batch + key * args.column] != 0;
    const u32 bits = __ballot_sync(~0u, there);
    if (index % 32 == 0 && entry < args.entries) reinterpret_cast<u32*>(args.words)[word] = bits;
}

// Packs a mask of keys or of query rows, a byte each, to the bits that masks/ reads: 32 to a word, whole words per
// batch entry, the bits beyond the last one 0. A warp makes a word.
#include "common/sizes.cuh"

extern "C" __global__ void __launch_bounds__(SKL_THREADS)
    streamkl_mask_bits(const __grid_constant__ MaskBitsArgs args) {
    const i64 index = static_cast<i64>(blockIdx.x) * SKL_THREADS + threadIdx.x, word = index / 32;
    const int count = static_cast<int>(args.count), words = bit_words(count);
    const int at = static_cast<int>(word % words) * 32 + static_cast<int>(index % 32);
    const i64 entry = word / words;
    const bool there = entry < args.entries && at < count &&
                       reinterpret_cast<const unsigned char*>(args.bytes)[entry * args.batch + at * args.column] != 0;
    const u32 bits = __ballot_sync(~0u, there);
    if (index % 32 == 0 && entry < args.entries) reinterpret_cast<u32*>(args.words)[word] = bits;
}

// Packs a mask of keys or of query rows, a byte each, to the bits that masks/ reads: 32 to a word, whole words per batch
// entry, the bits beyond the last one 0. A warp makes a word, a block those of one entry. Behind all words each entry has
// kSpanWords more, zero before the launch: sums and maxima over its blocks.
#include "common/sizes.cuh"

extern "C" __global__ void __launch_bounds__(SKL_THREADS)
    streamkl_mask_bits(const __grid_constant__ MaskBitsArgs args) {
    __shared__ u32 span[3];
    constexpr int warps = SKL_THREADS / 32;
    const int count = static_cast<int>(args.count), words = bit_words(count), blocks = ceil_div(words, warps);
    const int entry = blockIdx.x / blocks, word = blockIdx.x % blocks * warps + threadIdx.x / 32,
              lane = threadIdx.x % 32;
    const int at = word * 32 + lane;
    if (threadIdx.x < 3) span[threadIdx.x] = 0;
    __syncthreads();
    const bool there =
        at < count && reinterpret_cast<const unsigned char*>(args.bytes)[entry * args.batch + at * args.column] != 0;
    const u32 bits = __ballot_sync(~0u, there);
    u32* const made = reinterpret_cast<u32*>(args.words);
    if (lane == 0 && word < words) made[static_cast<i64>(entry) * words + word] = bits;
    if (lane == 0 && bits != 0) {
        atomicMax(span, static_cast<u32>(count - word * 32 - (__ffs(bits) - 1)));
        atomicMax(span + 1, static_cast<u32>(word * 32 + 32 - __clz(bits)));
        atomicAdd(span + 2, static_cast<u32>(__popc(bits)));
    }
    __syncthreads();
    u32* const found = made + static_cast<i64>(args.entries) * words + entry * kSpanWords;
    if (threadIdx.x != 0 || span[2] == 0) return;
    atomicMax(found, span[0]);
    atomicMax(found + 1, span[1]);
    atomicAdd(found + 2, span[2]);
}

// Warpgroup matrix products (sm_90a): 128 threads of one warpgroup together multiply tiles in shared memory. Asynchronous:
//
//   wgmma_fence     before the first product, and whenever its registers were touched since
//   products        issued in order; accumulators and operands must be left alone until waited for
//   wgmma_commit    closes a group
//   wgmma_wait<N>   returns when at most N groups are still under way; then `settle` the registers they wrote
#pragma once
#include "common/types.cuh"

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Keeps the compiler from moving uses of these registers above the wait before it.
template <int TILES>
__device__ inline void settle(float (&d)[TILES][4]) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(d[i][j])::"memory");
}

// A matrix descriptor for tiles of 128-byte rows (64 elements) in the 128-byte swizzle, 1024-byte aligned; rows are
// grouped by eight. Used along the row it is K-major; used across the rows (transposed) `chunk` is the distance in bytes
// between neighbouring 64-wide chunks. Adding bytes >> 4 to the descriptor moves its start.
__device__ inline u64 swizzled_descriptor(u32 shared, u32 chunk = 16) {
    constexpr u64 eight_rows = 1024 >> 4, swizzle_128 = 1;
    return static_cast<u64>((shared & 0x3ffff) >> 4) | static_cast<u64>(chunk >> 4) << 16 | eight_rows << 32 | swizzle_128 << 62;
}

#define SKL_SHARED_A "l"(a), "n"(TRANS_A), "n"(TRANS_B)
#define SKL_REGISTER_A "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "n"(TRANS_B)
#define SKL_WGMMA_64(TYPE, A, A_INPUTS, TAIL) \
    asm volatile( \
        "{\n.reg .pred keep;\nsetp.ne.b32 keep, %32, 0;\n" \
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" \
        "%0, %1, %2, %3, %4, %5, %6, %7, " \
        "%8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23, " \
        "%24, %25, %26, %27, %28, %29, %30, %31}, " A ", %33, keep, 1, 1, " TAIL ";\n}" \
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]),\
          "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]), "+f"(d[1][3]),\
          "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),\
          "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3]),\
          "+f"(d[4][0]), "+f"(d[4][1]), "+f"(d[4][2]), "+f"(d[4][3]),\
          "+f"(d[5][0]), "+f"(d[5][1]), "+f"(d[5][2]), "+f"(d[5][3]),\
          "+f"(d[6][0]), "+f"(d[6][1]), "+f"(d[6][2]), "+f"(d[6][3]),\
          "+f"(d[7][0]), "+f"(d[7][1]), "+f"(d[7][2]), "+f"(d[7][3]) \
        : "r"(keep), "l"(b), A_INPUTS)

// d (64x64, fp32; the accumulator layout of fragment.cuh) = a (64x16) * b (16x64), plus d where `keep` is set. Both
// operands in shared memory; TRANS_A, TRANS_B say that the operand's rows run along the depth of the product.
template <bool HALF, int TRANS_A, int TRANS_B>
__device__ inline void wgmma_64(float (&d)[8][4], u64 a, u64 b, int keep) {
    if constexpr (HALF)
        SKL_WGMMA_64("f16", "%34", SKL_SHARED_A, "%35, %36");
    else
        SKL_WGMMA_64("bf16", "%34", SKL_SHARED_A, "%35, %36");
}

// The same with a in registers, as accumulators_to_a packs it.
template <bool HALF, int TRANS_B>
__device__ inline void wgmma_64(float (&d)[8][4], const u32 (&a)[4], u64 b, int keep) {
    if constexpr (HALF)
        SKL_WGMMA_64("f16", "{%34, %35, %36, %37}", SKL_REGISTER_A, "%38");
    else
        SKL_WGMMA_64("bf16", "{%34, %35, %36, %37}", SKL_REGISTER_A, "%38");
}

// Warpgroup matrix products (sm_90a): 128 threads of one warpgroup together multiply tiles in shared memory.
// Asynchronous:
//
//   wgmma_fence     before the first product, and whenever its registers were touched since
//   products        issued in order; accumulators and operands must be left alone until waited for
//   wgmma_commit    closes a group
//   wgmma_wait<N>   returns when at most N groups are still under way; then `fence_accumulators` what they wrote
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
__device__ inline void fence_accumulators(float (&d)[TILES][4]) {
#pragma unroll
    for (int i = 0; i < TILES; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(d[i][j])::"memory");
}

// Has an operand in its registers before products are issued that read it there.
__device__ inline void fence_operand(u32 (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// A matrix descriptor for tiles of 128-byte rows (64 elements) in the 128-byte swizzle, 1024-byte aligned; rows are
// grouped by eight. Used along the row it is K-major; used across the rows (transposed) `chunk` is the distance in
// bytes between neighbouring 64-wide chunks. Adding bytes >> 4 to the descriptor moves its start.
__device__ inline u64 swizzled_descriptor(u32 shared, u32 chunk = 16) {
    constexpr u64 eight_rows = 1024 >> 4, swizzle_128 = 1;
    return static_cast<u64>((shared & 0x3ffff) >> 4) | static_cast<u64>(chunk >> 4) << 16 | eight_rows << 32 |
           swizzle_128 << 62;
}

// Texts of the wrappers below. REGISTERS names the accumulators of so many 8-column tiles, OUTPUTS hands them over;
// operands are numbered after them, which no preprocessor can compute, so each size states its own.
#define SKL_REGISTERS_2 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SKL_OUTPUT(i) "+f"(d[i][0]), "+f"(d[i][1]), "+f"(d[i][2]), "+f"(d[i][3])
#define SKL_OUTPUTS_2 SKL_OUTPUT(0), SKL_OUTPUT(1)
#define SKL_REGISTERS_4 SKL_REGISTERS_2 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SKL_OUTPUTS_4 SKL_OUTPUTS_2, SKL_OUTPUT(2), SKL_OUTPUT(3)
#define SKL_REGISTERS_6 SKL_REGISTERS_4 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define SKL_OUTPUTS_6 SKL_OUTPUTS_4, SKL_OUTPUT(4), SKL_OUTPUT(5)
#define SKL_REGISTERS_8 SKL_REGISTERS_6 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define SKL_OUTPUTS_8 SKL_OUTPUTS_6, SKL_OUTPUT(6), SKL_OUTPUT(7)
#define SKL_REGISTERS_10 SKL_REGISTERS_8 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define SKL_OUTPUTS_10 SKL_OUTPUTS_8, SKL_OUTPUT(8), SKL_OUTPUT(9)
#define SKL_REGISTERS_12 SKL_REGISTERS_10 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define SKL_OUTPUTS_12 SKL_OUTPUTS_10, SKL_OUTPUT(10), SKL_OUTPUT(11)
#define SKL_REGISTERS_14 SKL_REGISTERS_12 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define SKL_OUTPUTS_14 SKL_OUTPUTS_12, SKL_OUTPUT(12), SKL_OUTPUT(13)
#define SKL_REGISTERS_16 SKL_REGISTERS_14 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define SKL_OUTPUTS_16 SKL_OUTPUTS_14, SKL_OUTPUT(14), SKL_OUTPUT(15)

#define SKL_REGISTER_A(a) "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3])

#define SKL_WGMMA_ASM(TYPE, TILES, N, KEEP, A, B, TAIL, ...)                                               \
    asm volatile("{\n.reg .pred keep;\nsetp.ne.b32 keep, " KEEP                                            \
                 ", 0;\n"                                                                                  \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" SKL_REGISTERS_##TILES \
                 "}, " A ", " B ", keep, 1, 1, " TAIL ";\n}"                                               \
                 : SKL_OUTPUTS_##TILES                                                                     \
                 : "r"(keep), "l"(b), __VA_ARGS__)

// wgmma(d, a, b, keep): d (64 x 8 TILES, fp32; the accumulator layout of fragment.cuh) = a (64 x 16) * b (16 x 8
// TILES), plus d where `keep` is set. Both operands in shared memory, or a in registers as accumulators_to_a packs it.
// TRANS_A, TRANS_B say that the operand's rows run along the depth of the product.
#define SKL_WGMMA(TILES, N, KEEP, B, X0, X1, X2, X3, X4)                                                        \
    template <bool HALF, int TRANS_A, int TRANS_B>                                                              \
    __device__ inline void wgmma(float (&d)[TILES][4], u64 a, u64 b, int keep) {                                \
        if constexpr (HALF)                                                                                     \
            SKL_WGMMA_ASM("f16", TILES, N, KEEP, X0, B, X1 ", " X2, "l"(a), "n"(TRANS_A), "n"(TRANS_B));        \
        else                                                                                                    \
            SKL_WGMMA_ASM("bf16", TILES, N, KEEP, X0, B, X1 ", " X2, "l"(a), "n"(TRANS_A), "n"(TRANS_B));       \
    }                                                                                                           \
    template <bool HALF, int TRANS_B>                                                                           \
    __device__ inline void wgmma(float (&d)[TILES][4], const u32(&a)[4], u64 b, int keep) {                     \
        if constexpr (HALF)                                                                                     \
            SKL_WGMMA_ASM("f16", TILES, N, KEEP, "{" X0 ", " X1 ", " X2 ", " X3 "}", B, X4, SKL_REGISTER_A(a),  \
                          "n"(TRANS_B));                                                                        \
        else                                                                                                    \
            SKL_WGMMA_ASM("bf16", TILES, N, KEEP, "{" X0 ", " X1 ", " X2 ", " X3 "}", B, X4, SKL_REGISTER_A(a), \
                          "n"(TRANS_B));                                                                        \
    }

SKL_WGMMA(2, "16", "%8", "%9", "%10", "%11", "%12", "%13", "%14")
SKL_WGMMA(4, "32", "%16", "%17", "%18", "%19", "%20", "%21", "%22")
SKL_WGMMA(6, "48", "%24", "%25", "%26", "%27", "%28", "%29", "%30")
SKL_WGMMA(8, "64", "%32", "%33", "%34", "%35", "%36", "%37", "%38")
SKL_WGMMA(10, "80", "%40", "%41", "%42", "%43", "%44", "%45", "%46")
SKL_WGMMA(12, "96", "%48", "%49", "%50", "%51", "%52", "%53", "%54")
SKL_WGMMA(14, "112", "%56", "%57", "%58", "%59", "%60", "%61", "%62")
SKL_WGMMA(16, "128", "%64", "%65", "%66", "%67", "%68", "%69", "%70")

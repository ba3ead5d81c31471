// What the host passes: one struct by value per kernel. launch.py packs the same fields in the same order and
// compile-time asserts in the kernels compare the sizes. Strides are 64-bit and counted in elements.
#pragma once
#include "common/types.cuh"

struct Tensor4 {  // (B, H, rows, D) through strides, whatever the caller's layout
    u64 pointer;
    i64 batch, head, row, column;
};

struct Tensor3 {  // (B, H, M) row vector through strides
    u64 pointer;
    i64 batch, head, row;
    __device__ float* at(int b, int h, int first = 0) const {
        return reinterpret_cast<float*>(pointer) + b * batch + h * head + first * row;
    }
};

struct Extents {
    int batch, heads, queries, keys;   // B, H, M, N
    int teacher_group, student_group;  // query heads that read one key head
    int tiles;                         // row tiles of this launch per head
    int head_group;                    // heads that run side by side
    int splits;                        // blocks that share the keys of one row tile
    int sequences;                     // that lie one after the other in rows and keys; 0: all is one
    i64 mask[12];                      // of each part of the mask its integers, then its pointers, in the registry's order
};

struct Inputs {
    Tensor4 teacher_q, teacher_k, student_q, student_k;
};

struct ForwardArgs {
    Inputs in;
    Tensor3 value, teacher_lse, student_lse;  // outputs, nats
    Extents n;
    float teacher_scale, student_scale;    // times log2(e): kernels work in base 2
    u64 workspace;                         // partial row states where keys are split: [field][split][B H][M] floats
};

struct GradientArgs {
    Inputs in;
    Tensor3 grad, teacher_lse, student_lse, value;  // per row: upstream gradient and what the forward saved, nats
    Tensor4 out;                                 // gradient of one input
    Extents n;
    float teacher_scale, student_scale;          // times log2(e)
    float out_scale;                             // the plain scale of the side being differentiated
    int share_slots;                             // places for sums of shares per batch entry and head
    u64 share_arrivals, share_sums;              // tile/shares.cuh says what lies there; 0: no memory for it
};

// Both gradients of one side: `base.out` is the keys'.
struct FusedArgs {
    GradientArgs base;
    Tensor4 out_q;
    u64 workspace;  // fused_sm90.cu says what lies there
};

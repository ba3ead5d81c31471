// Helpers of the arguments. The structs themselves, and what lies in workspaces, are described in
// kernels/structs.py, which packs them for a launch and writes their text before a kernel's.
#pragma once
#include "common/types.cuh"

// A row vector from row `first` of a batch entry and head on.
template <class Vector>
__device__ inline float* row_vector(const Vector& x, int b, int h, int first = 0) {
    return reinterpret_cast<float*>(x.pointer) + b * x.batch + h * x.head + first * x.row;
}

// Whether every row of an input whose elements have so many bytes starts on a 16-byte boundary, its columns adjacent.
template <class Tensor>
__device__ inline bool vector_rows(const Tensor& x, int bytes) {
    const u64 steps = (x.batch | x.head | x.row) * static_cast<u64>(bytes);
    return ((x.pointer | steps) & 15) == 0 && x.column == 1;
}

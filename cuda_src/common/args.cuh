// Helpers of the arguments. The structs themselves, and what lies in workspaces, are described in
// kernels/structs.py, which packs them for a launch and writes their text before a kernel's.
#pragma once
#include "common/types.cuh"

// A row vector from row `first` of a batch entry and head on.
template <class Vector>
__device__ inline float* row_vector(const Vector& x, int b, int h, int first = 0) {
    return reinterpret_cast<float*>(x.pointer) + b * x.batch + h * x.head + first * x.row;
}

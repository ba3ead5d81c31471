// What a mask must offer, as `struct Mask` of its own header; a kernel includes exactly one.
//
//   Mask(const Extents& n)                      reads its integers from n.mask, in the registry's order
//   Range keys_of(int q0, int q1)               smallest interval of keys that any row of [q0, q1) may see
//   Range queries_of(int k0, int k1)            smallest interval of rows that may see any key of [k0, k1)
//   bool full(int q0, int q1, int k0, int k1)   every pair of the two intervals is visible (and inside the problem)
//   bool visible(int q, int k)                  this pair is visible (and inside the problem)
//
// Kernels visit the tiles that the intervals name, test `visible` only on tiles that are not full, and fill operand
// rows outside the intervals with zeros, so whatever such memory holds never enters a product.
#pragma once
#include "common/args.cuh"

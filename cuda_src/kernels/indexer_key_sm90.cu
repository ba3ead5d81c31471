// The gradient of the indexer's keys (indexer_gradient/key.cuh) by products of a warpgroup: 16-bit elements that are
// read 16 bytes at a time.
#include "kernels/indexer_gradient/products_sm90.cuh"
#include "kernels/indexer_gradient/key.cuh"

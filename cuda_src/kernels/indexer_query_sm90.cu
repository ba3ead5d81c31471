// Gradients of the indexer's queries and weights (indexer_gradient/query.cuh) by products of a warpgroup: 16-bit
// elements that are read 16 bytes at a time.
#include "kernels/indexer_gradient/products_sm90.cuh"
#include "kernels/indexer_gradient/query.cuh"

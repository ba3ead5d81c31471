// Gradients of the indexer's queries and weights (indexer_gradient/query.cuh) by mma.sync: any element type, strides
// and head dims.
#include "kernels/indexer_gradient/products_sm80.cuh"
#include "kernels/indexer_gradient/query.cuh"

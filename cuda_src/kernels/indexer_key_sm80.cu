// The gradient of the indexer's keys (indexer_gradient/key.cuh) by mma.sync: any element type, strides and head dims.
#include "kernels/indexer_gradient/products_sm80.cuh"
#include "kernels/indexer_gradient/key.cuh"

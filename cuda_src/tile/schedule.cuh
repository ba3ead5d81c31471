// Which piece of the problem a block of threads works on. One grid axis: heads x batch may exceed what y and z can hold.
#pragma once
#include "common/args.cuh"

struct Block {
    int batch, head, tile;
};

// Heads are taken in groups whose streamed operands fit the L2 cache together. Within a group the longest tiles of all
// heads come first: under a mask tiles differ in work, and a long one that starts late would keep the GPU waiting.
__device__ inline Block block_of(const Extents& n, int heads, int pairs, bool last_first) {
    const int per_group = n.head_group * n.tiles, group = blockIdx.x / per_group, index = blockIdx.x % per_group;
    const int size = min(n.head_group, pairs - group * n.head_group);
    const int pair = group * n.head_group + index % size, tile = index / size;
    return {pair / heads, pair % heads, last_first ? n.tiles - 1 - tile : tile};
}

// Which piece of the problem a block of threads works on. One grid axis: heads x batch may exceed what y and z can hold.
#pragma once
#include "common/args.cuh"

struct Block {
    int batch, head, tile;
};

// Heads outermost, so that blocks running together share a head's operands in the L2 cache.
__device__ inline Block block_of(int heads, int tiles, bool last_first) {
    const int pair = blockIdx.x / tiles, tile = blockIdx.x % tiles;
    return {pair / heads, pair % heads, last_first ? tiles - 1 - tile : tile};
}

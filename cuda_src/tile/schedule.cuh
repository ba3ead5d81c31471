// Which piece of the problem a block of threads works on. One grid axis: heads x batch may exceed what y and z can hold.
#pragma once
#include "common/args.cuh"

struct Block {
    int batch, head, tile;
    int split;  // which share of the streamed tiles
};

// Heads are taken in groups whose streamed operands fit the L2 cache together. Within a group the longest tiles of all
// heads come first: under a mask tiles differ in work, and a long one that starts late would keep the GPU waiting.
__device__ inline Block block_of(const Extents& n, int heads, int pairs, bool last_first) {
    const int block = blockIdx.x / n.splits, per_group = n.head_group * n.tiles, group = block / per_group, index = block % per_group;
    const int size = min(n.head_group, pairs - group * n.head_group);
    const int pair = group * n.head_group + index % size, tile = index / size;
    return {pair / heads, pair % heads, last_first ? n.tiles - 1 - tile : tile, static_cast<int>(blockIdx.x % n.splits)};
}

// The block's share of the tiles that cover `rows`, `columns` to a tile.
__device__ inline Range tiles_of(Range rows, int columns, const Block& block, const Extents& n) {
    if (rows.empty()) return {0, 0};
    const int first = rows.begin / columns, end = ceil_div(rows.end, columns), share = ceil_div(end - first, n.splits);
    const int begin = min(first + block.split * share, end);
    return {begin, min(begin + share, end)};
}

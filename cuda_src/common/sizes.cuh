// Sizes that the host computes as well, in kernels/structs.py; a test compares them.
#pragma once
#include "common/types.cuh"

// Words of a batch entry's mask of keys, 32 keys to a word.
__device__ constexpr int key_words(int keys) { return ceil_div(keys, 32); }

// Tiles of `tile` rows; of packed sequences as many as any lengths need (masks/packed.cuh).
__device__ constexpr int row_tiles(int rows, int tile, int sequences) {
    return sequences > 0 ? rows / tile + sequences + 1 : ceil_div(rows, tile);
}

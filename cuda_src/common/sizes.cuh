// Sizes that the host computes as well, in kernels/structs.py; a test compares them.
#pragma once
#include "common/types.cuh"

// Words of so many bits, 32 to a word.
__device__ constexpr int bit_words(int bits) { return ceil_div(bits, 32); }

// Tiles of `tile` rows; of packed sequences as many as any lengths need (masks/packed.cuh).
__device__ constexpr int row_tiles(int rows, int tile, int sequences) {
    return sequences > 0 ? rows / tile + sequences + 1 : ceil_div(rows, tile);
}

// Few queries. Heads that read the same keys of both sides then have the rows of one tile together, kPackedRows to each,
// of which the first are its queries: row r of a tile is query r % kPackedRows of the tile's head r / kPackedRows. A
// tensor map's box reaches over as many heads as that takes, and brings zeros for rows beyond the queries; what it
// brings of heads that read other keys is not used. A strip of 16 rows belongs to one head. 0: all rows of a tile
// belong to one head.
#pragma once
#include "common/args.cuh"
#include "common/config.cuh"

constexpr int kPackedRows = SKL_PACKED_ROWS;
constexpr bool kPacked = kPackedRows > 0;
constexpr int kTileHeads = kPacked ? kRows / kPackedRows : 1;  // of whose rows a tile of queries has some

static_assert(!kPacked || (kPackedRows % 16 == 0 && 64 % kPackedRows == 0), "plan: a head's rows of a packed tile");

// How many heads, one after the other, read the same keys of both sides; one, where they are not packed.
__device__ inline int heads_together(const Extents& n) {
    if constexpr (!kPacked) return 1;
    int a = n.teacher_group, b = n.student_group;
    while (b > 0) {
        const int rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

// Of a tile's row, which head after the tile's first it belongs to, and which query of that it is.
__device__ constexpr int packed_head(int row) { return kPacked ? row / (kPacked ? kPackedRows : 1) : 0; }
__device__ constexpr int packed_query(int row) { return kPacked ? row % (kPacked ? kPackedRows : 1) : row; }

// Few queries. Heads that read the same keys of both sides then have the rows of one tile together, kPackedRows to
// each, of which the first are its queries: row r of a tile is query r % kPackedRows of the tile's head r /
// kPackedRows. A tensor map's box reaches over as many heads as that takes, and brings zeros for rows beyond the
// queries; what it brings of heads that read other keys is not used. A strip of 16 rows belongs to one head. 0: all
// rows of a tile belong to one head.
//
// The heads of a tile are a pack. Kernels that stream queries count packs where others count query heads.
#pragma once
#include "common/args.cuh"
#include "common/config.cuh"

// No constexpr ints but in enums: each is a symbol, and with another one the compiler orders all instructions anew.
enum : int { kPackedRows = SKL_PACKED_ROWS };
enum : bool { kPacked = kPackedRows > 0 };
// Of whose rows a tile of queries has some.
enum : int { kTileHeads = kPacked ? (kRowsAreQueries ? kRows : kColumns) / (kPacked ? kPackedRows : 1) : 1 };

static_assert(!kPacked || (kPackedRows % 16 == 0 && 64 % kPackedRows == 0), "plan: a head's rows of a packed tile");

// How many heads, one after the other, read the same keys of both sides; one, where they are not packed.
template <class X>
__device__ inline int heads_together(const X& n) {
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

// Of heads of which `together`, one after the other, may lie in one tile: the packs of so many of them, the first head
// of a pack, and how many it has.
__device__ inline int packs_of(int heads, int together) {
    if constexpr (!kPacked) return heads;
    return heads / together * ceil_div(together, kTileHeads);
}
__device__ inline int first_head_of(int pack, int together) {
    if constexpr (!kPacked) return pack;
    const int packs = ceil_div(together, kTileHeads);
    return pack / packs * together + pack % packs * kTileHeads;
}
__device__ inline int heads_of_pack(int pack, int together) {
    if constexpr (!kPacked) return 1;
    return min(together - pack % ceil_div(together, kTileHeads) * kTileHeads, static_cast<int>(kTileHeads));
}

// The indexer's score tile (indexer_score/score.cuh) by products of a warpgroup: 16-bit elements that are read 16 bytes
// at a time. A block is a warpgroup, and what it waits for the others of its multiprocessor fill with theirs.
#include "common/args.cuh"
#include "common/config.cuh"
#include "tile/fragment.cuh"
#include "tile/wide_parts.cuh"

using TeacherTile = WideTile<SKL_T_ELEMENT, SKL_T_PART>;
using IndexTile = WideTile<SKL_S_ELEMENT, SKL_S_PART>;

static_assert(kRows == 64 && kThreads == 128 && kColumns == 64, "plan: a block is a warpgroup");

struct Products {
    static constexpr int kAlignment = 1024;
    __device__ static u32 aligned(u32 base) { return (base + 1023) & ~1023u; }
    template <int ROWS, bool VECTOR, class T>
    __device__ static void load(T tile, const HeadView& x, int first, Range valid, Columns columns) {
        static_assert(VECTOR, "plan: elements come 16 bytes at a time");
        load_wide<ROWS>(tile, x, first, valid, columns);
    }
    // What has been copied is read by another unit than other memory.
    __device__ static void arrived() { async_fence(); }
    template <int TILES, class T>
    __device__ static void multiply(Strip<TILES>& s, T queries, int, T keys, int, bool first) {
        wide_scores(s, queries, keys, first);
    }
};

#include "kernels/indexer_score/score.cuh"

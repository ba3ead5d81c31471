// The indexer's score tile (indexer_score/score.cuh) by mma.sync: any element type, strides and head dims.
#include "common/args.cuh"
#include "common/config.cuh"
#include "tile/scores.cuh"
#include "tile/index_parts.cuh"

using TeacherTile = Tile<SKL_T_ELEMENT, SKL_T_PART>;
using IndexTile = Tile<SKL_S_ELEMENT, SKL_S_PART>;

struct Products {
    static constexpr int kAlignment = 0;
    __device__ static u32 aligned(u32 base) { return base; }
    template <int ROWS, bool VECTOR, class T>
    __device__ static void load(T tile, const HeadView& x, int first, Range valid, Columns columns) {
        load_part<ROWS, VECTOR>(tile, x, first, valid, columns);
    }
    __device__ static void arrived() {}
    template <int TILES, class T>
    __device__ static void multiply(Strip<TILES>& s, T queries, int row, T keys, int column, bool first) {
        if (first) clear<TILES>(s);
        add_scores<TILES>(s, queries, row, T{keys.base + T::bytes(column)}, 0, T::kDepth / 16);
    }
};

#include "kernels/indexer_score/score.cuh"

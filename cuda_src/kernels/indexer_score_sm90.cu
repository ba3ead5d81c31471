// The indexer's score tile (indexer_score/score.cuh) by products of a warpgroup: 16-bit elements that are read 16 bytes
// at a time. A block is a warpgroup, and what it waits for the others of its multiprocessor fill with theirs.
#include "common/args.cuh"
#include "common/config.cuh"
#include "ptx/shared.cuh"
#include "tile/fragment.cuh"
#include "tile/index_parts.cuh"
#include "tile/swizzled.cuh"

// Rows of a part as products of warpgroups read them; columns beyond the part, up to whole products, are zeros.
template <int CODE, int DIM>
struct WideTile : SwizzledTile<CODE, round_up(DIM, 16)> {
    using E = Element<CODE>;
    u32 base;
    __device__ explicit WideTile(u32 base) : base(base) {}
};
using TeacherTile = WideTile<SKL_T_ELEMENT, SKL_T_PART>;
using IndexTile = WideTile<SKL_S_ELEMENT, SKL_S_PART>;

static_assert(kRows == 64 && kThreads == 128 && kColumns == 64, "plan: a block is a warpgroup");

struct Products {
    static constexpr int kAlignment = 1024;
    __device__ static u32 aligned(u32 base) { return (base + 1023) & ~1023u; }
    template <int ROWS, bool VECTOR, class T>
    __device__ static void load(T tile, const HeadView& x, int first, Range valid, Columns columns) {
        static_assert(VECTOR, "plan: elements come 16 bytes at a time");
        // A thread keeps its piece of a row, where the pieces divide the threads, and then addition finds its sources.
        constexpr int pieces = 2 * T::kSteps, across = kThreads % pieces == 0 ? pieces : 2 * (pieces / 2 <= 8 ? 8 : 16);
        constexpr int down = kThreads / across;
        const int piece = threadIdx.x % across, row = threadIdx.x / across;
        if (piece < pieces) {
            const int width = 2 * max(0, min(8, columns.count - 8 * piece));
            u64 source = x.base + columns.first * 2 + (static_cast<i64>(first) + row) * x.row + 16 * piece;
            u32 to = tile.base + (piece / 8 * ROWS + row) * 128;
#pragma unroll 2
            for (int r = row; r < ROWS; r += down) {
                cp_async_16(to + ((piece % 8 ^ (r & 7)) << 4), reinterpret_cast<const void*>(source),
                            valid.contains(first + r) ? width : 0);
                source += down * x.row;
                to += down * 128;
            }
        }
    }
    // What has been copied is read by another unit than other memory.
    __device__ static void arrived() { async_fence(); }
    template <int TILES, class T>
    __device__ static void multiply(Strip<TILES>& s, T queries, int, T keys, int, bool first) {
        wgmma_fence();
        multiply_rows<T, kRows, T::kChunks>(s[0], swizzled_descriptor(queries.base), swizzled_descriptor(keys.base), 0,
                                            first ? 0 : -1);
        wgmma_commit();
        wgmma_wait<0>();
        fence_accumulators(s[0]);
    }
};

#include "kernels/indexer_score/score.cuh"

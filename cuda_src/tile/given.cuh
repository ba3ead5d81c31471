// A side that is given: a number for each pair of a query and a key lies in global memory, where other sides have a
// product. The address of a pair is a sum of what its query and its key add to it, so queries and keys are two operands
// here as well, without columns, and kernels handle their tiles like any others. A tile in shared memory says where its
// rows are instead of having them; the score tile of two of these is read, each number by the lane that wants it.
#pragma once
#include "tile/load.cuh"
#include "tile/scores.cuh"

struct GivenRows {
    u64 base;        // what the tile's first row adds to an address, bytes
    i64 step;        // from row to row
    int begin, end;  // the rows of the tile that may be read
};

template <int CODE>
struct Tile<CODE, 0> {
    using E = Element<CODE>;
    static constexpr int kCode = -1;  // no operand of a product
    static constexpr int kHeadDim = 0, kDepth = 0;
    static constexpr int bytes(int) { return 32; }
    u32 base;  // shared-memory address

    __device__ GivenRows& rows() const { return *reinterpret_cast<GivenRows*>(__cvta_shared_to_generic(base)); }
};
static_assert(sizeof(GivenRows) <= Tile<kF32, 0>::bytes(1), "a tile has room for what it says");

// Two neighbours, the first of them at an even place.
template <class E>
__device__ inline float2 load_two(u64 address) {
    if constexpr (E::kBytes == 4)
        return *reinterpret_cast<const float2*>(address);
    else
        return E::widen(*reinterpret_cast<const u32*>(address));
}

template <int ROWS, bool VECTOR, int AT_ONCE = 16, int CODE, class Wanted = Everything>
__device__ inline void load_rows(Tile<CODE, 0> tile, const HeadView& x, int first, Range valid, Wanted = {}) {
    if (threadIdx.x == 0) tile.rows() = {x.base + first * x.row, x.row, valid.begin - first, valid.end - first};
}

// out = the numbers of stationary rows from `row` on and all streamed ones; 0 where either may not be read.
template <int TILES, int CODE>
__device__ inline void scores(Strip<TILES>& out, Tile<CODE, 0> stationary, int row, Tile<CODE, 0> streamed) {
    using E = Element<CODE>;
    const GivenRows& down = stationary.rows();
    const GivenRows& along = streamed.rows();
    const int lane = lane_id(), first = row + Accumulators::first_row(lane), column = Accumulators::first_column(lane);
    const i64 step = along.step;
    const u64 corner = down.base + along.base + first * down.step + column * step;
    const bool inside =
        along.begin <= 0 && along.end >= 8 * TILES && down.begin <= row && down.end >= row + 16 * kWarpTiles;
    const auto read = [&out, &down, corner, step](const auto& pair) {
#pragma unroll
        for (int m = 0; m < kWarpTiles; ++m)
#pragma unroll
            for (int half = 0; half < Accumulators::kRows; ++half) {
                const int below = 16 * m + Accumulators::below(half);
                const u64 from = corner + below * down.step;
#pragma unroll
                for (int n = 0; n < TILES; ++n) {
                    const float2 x = pair(from + 8 * n * step, below, 8 * n);
                    out[m][n][Accumulators::element(half, 0)] = x.x;
                    out[m][n][Accumulators::element(half, 1)] = x.y;
                }
            }
    };
    if (inside) {
        // Neighbours of a row begin at even places unless sequences lie one after the other in it.
        if constexpr (kRowsAreQueries && SKL_TQ_VECTOR && !Mask::kRagged)
            read([](u64 address, int, int) { return load_two<E>(address); });
        else
            read([step](u64 address, int, int) { return make_float2(E::load(address), E::load(address + step)); });
    } else {
        read([&down, &along, first, column, step](u64 address, int below, int beyond) {
            const bool there = first + below >= down.begin && first + below < down.end;
            const auto at = [&along, address, there](int c, i64 further) {
                return there && c >= along.begin && c < along.end ? E::load(address + further) : 0.f;
            };
            return make_float2(at(column + beyond, 0), at(column + beyond + 1, step));
        });
    }
}

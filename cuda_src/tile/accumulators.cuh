// Where the accumulators of a matrix product lie, which nobody else need know. mma.sync and wgmma agree: of 16 rows x 8
// columns a lane holds four elements, 0 and 1 beside each other in row lane / 4, 2 and 3 in row lane / 4 + 8. Four
// lanes share a row.
#pragma once

__device__ inline int lane_id() { return threadIdx.x & 31; }

struct Accumulators {
    static constexpr int kRows = 2;  // that a lane has elements of
    // Where the lane's first element is.
    __device__ static int first_row(int lane) { return lane / 4; }
    __device__ static int first_column(int lane) { return 2 * pair(lane); }
    // Which of the four pairs of neighbouring columns is the lane's.
    __device__ static int pair(int lane) { return lane & 3; }
    // Which of the lane's rows and columns element e belongs to, and the other way round.
    __device__ static constexpr int row(int e) { return e >> 1; }
    __device__ static constexpr int column(int e) { return e & 1; }
    __device__ static constexpr int element(int row, int column) { return 2 * row + column; }
    // How far the lane's row lies below its first.
    __device__ static constexpr int below(int row) { return 8 * row; }

    // What the lanes of a row know becomes known to each of them; one of them writes it.
    template <class State>
    __device__ static void merge_row(State& x) {
        x.merge(x.shuffle(1));
        x.merge(x.shuffle(2));
    }
    __device__ static float sum_row(float x) {
        x += __shfl_xor_sync(~0u, x, 1);
        return x + __shfl_xor_sync(~0u, x, 2);
    }
    __device__ static float largest_of_row(float x) {
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
        return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
    }
    __device__ static bool writes_row(int lane) { return pair(lane) == 0; }
};

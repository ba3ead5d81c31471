// The functions of scores, taken of accumulators. See scores/interface.cuh.
#pragma once
#include "common/types.cuh"

// Columns of a lane's accumulators of which the function of a score is taken at once. Each takes registers meanwhile, and
// the compiler would take as many at once as there are, if there were no branch between them; fewer leave it waiting.
constexpr int kTurnedAtOnce = 2;

// Takes the function of a score of dots, in place, when it comes to the first of so many columns; one that is linear has
// none.
template <class S, int TILES, class N>
__device__ inline void turn(float (&x)[TILES][4], int column, const N& n) {
    if constexpr (!S::kLinear) {
        if (column % kTurnedAtOnce > 0) return;
        float oddness[4 * kTurnedAtOnce];
#pragma unroll
        for (int i = 0; i < 4 * kTurnedAtOnce; ++i) {
            oddness[i] = S::kOdd;
            if (column + i / 4 >= TILES) continue;
            float& y = x[column + i / 4][i % 4];
            y = S::prepare(y, n);
            oddness[i] = S::oddness(y);
        }
#pragma unroll
        for (int step = 1; step < 4 * kTurnedAtOnce; step *= 2)
#pragma unroll
            for (int i = 0; i < 4 * kTurnedAtOnce; i += 2 * step) oddness[i] = fmaxf(oddness[i], oddness[i + step]);
        if (__any_sync(~0u, oddness[0] > S::kOdd)) {
#pragma unroll
            for (int i = 0; i < 4 * kTurnedAtOnce; ++i)
                if (column + i / 4 < TILES) x[column + i / 4][i % 4] = S::tame(x[column + i / 4][i % 4]);
        }
#pragma unroll
        for (int i = 0; i < 4 * kTurnedAtOnce; ++i)
            if (column + i / 4 < TILES) x[column + i / 4][i % 4] = S::finish(x[column + i / 4][i % 4], n);
    }
}

// The functions of scores, taken of accumulators. See scores/interface.cuh.
#pragma once
#include "common/types.cuh"

// Takes the function of a score of dots, in place, of AT_ONCE columns of a lane's accumulators when it comes to the
// first of them; a score that is linear has none. Each takes registers meanwhile, and the compiler would take as many
// at once as there are, if there were no branch between them; fewer leave it waiting.
template <class S, int AT_ONCE = 2, int TILES, class N>
__device__ inline void turn(float (&x)[TILES][4], int column, const N& n) {
    if constexpr (S::kLinear) {
        return;
    } else if constexpr (S::kKnowsAll) {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[column][e] = S::finish(S::prepare(x[column][e], n), n);
    } else {
        if (column % AT_ONCE > 0) return;
        float oddness[4 * AT_ONCE];
#pragma unroll
        for (int i = 0; i < 4 * AT_ONCE; ++i) {
            oddness[i] = 0.f;
            if (column + i / 4 >= TILES) continue;
            float& y = x[column + i / 4][i % 4];
            y = S::prepare(y, n);
            oddness[i] = S::oddness(y);
        }
#pragma unroll
        for (int step = 1; step < 4 * AT_ONCE; step *= 2)
#pragma unroll
            for (int i = 0; i < 4 * AT_ONCE; i += 2 * step) oddness[i] = fmaxf(oddness[i], oddness[i + step]);
        if (__any_sync(~0u, oddness[0] > S::most(n))) {
#pragma unroll
            for (int i = 0; i < 4 * AT_ONCE; ++i)
                if (column + i / 4 < TILES) x[column + i / 4][i % 4] = S::finish_odd(x[column + i / 4][i % 4], n);
        } else {
#pragma unroll
            for (int i = 0; i < 4 * AT_ONCE; ++i)
                if (column + i / 4 < TILES) x[column + i / 4][i % 4] = S::finish(x[column + i / 4][i % 4], n);
        }
    }
}

// Searching sorted memory by a whole warp: 32 probes in the time of one.
#pragma once
#include "common/types.cuh"

// The largest i of [0, last] for which `ok` holds, where it holds up to some i; 0 where it holds for none. All lanes of
// the warp together, with the same arguments. Whatever `ok` says, it is asked about [0, last] only and the answer lies
// there.
template <class Ok>
__device__ inline int last_where(int last, Ok ok) {
    int low = 0, high = last;
    while (low < high) {
        const int step = ceil_div(high - low, 32), probe = low + (static_cast<int>(threadIdx.x & 31) + 1) * step;
        low += step * __popc(__ballot_sync(~0u, probe <= high && ok(probe)));
        high = min(high, low + step - 1);
    }
    return low;
}

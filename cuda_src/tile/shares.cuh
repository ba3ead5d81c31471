// Where tiles of stationary rows are few, several blocks share the steps of one. Counted are those of all query heads
// that a work tile has, one head after the other: the first share takes the first of them, and so on, and none has
// fewer than kLeastSteps but the last one. Lists come shared from the host. Kernels for many tiles (not kShared) are
// without: what sharing takes in registers and instructions is theirs.
#pragma once
#include "tile/schedule.cuh"

constexpr bool kShared = SKL_SHARED;
constexpr int kLeastSteps = SKL_LEAST_STEPS;

// Whether several blocks may have sums of one work tile.
template <class M>
constexpr bool kSumsInParts = kShared || M::kListed;

// Says in `block` which share it has of how many; `steps` are those of each of the work tile's `heads`. Where there is
// no memory for the sums of shares the first one takes all.
template <class M>
__device__ inline void take_share(Block& block, int heads, int steps, const Extents& n, bool memory) {
    if constexpr (M::kListed) {
        if (memory || block.shares <= 1) return;
        block.shares = block.share == 0;
        block.streamed = {0, kNoLimit};
    } else if constexpr (kShared) {
        const int all = heads * steps, size = max(ceil_div(all, memory ? n.splits : 1), kLeastSteps);
        block.share = block.split;
        block.shares = max(ceil_div(all, size), 1);
        block.streamed = {block.share * size, min(block.share * size + size, all)};
        if (block.share >= block.shares) block.shares = 0;
    }
}

// The same where shares of all tiles are as long, about `size` steps, and blocks take those that begin with the same
// query heads together: `block` is of `turn_of`, and of n.splits turns a tile with fewer shares has one in some.
template <class M>
__device__ inline void take_turn(Block& block, int heads, int steps, const Extents& n, int size, bool memory) {
    if constexpr (kShared && !M::kListed) {
        const int all = heads * steps, most = memory ? min(ceil_div(all, size), n.splits) : 1,
                  own = max(ceil_div(all, max(most, 1)), 1), shares = max(ceil_div(all, own), 1);
        block.share = ceil_div(block.split * shares, n.splits);
        block.shares = block.share < shares && block.share * n.splits / shares == block.split ? shares : 0;
        block.streamed = {block.share * own, min(block.share * own + own, all)};
    }
}

// The query heads of a share, of the `heads` from `first` on that the work tile has.
template <class M>
__device__ inline Range heads_of(const Block& block, int first, int heads, int steps) {
    if constexpr (M::kListed || !kShared) return {first, first + heads};
    if (steps == 0) return {first, first + 1};
    return {first + block.streamed.begin / steps, first + ceil_div(block.streamed.end, steps)};
}

// Of the steps of one of these, number `head` of the work tile, those of the share.
template <class M>
__device__ inline Range share_of(Range steps, const Block& block, int head) {
    if constexpr (M::kListed || !kShared) return steps;
    const int before = head * (steps.end - steps.begin);
    return {max(steps.begin, steps.begin + block.streamed.begin - before),
            min(steps.end, steps.begin + block.streamed.end - before)};
}

// Which piece of the problem a block of threads works on. One grid axis: heads x batch may exceed what y and z can
// hold.
#pragma once
#include "common/args.cuh"
#include "common/config.cuh"
#include "masks/interface.cuh"

struct Block : WorkTile {
    int batch, head;
    int split;  // which part of the streamed tiles, where the launch splits those of all
};

// Heads are taken in groups whose streamed operands fit the L2 cache together. Within a group the longest tiles of all
// heads come first: under a mask tiles differ in work, and a long one that starts late would keep the GPU waiting.
__device__ inline Block block_of(int index, const Extents& n, int heads, int pairs, bool last_first) {
    const int block = index / n.splits, per_group = n.head_group * n.tiles, group = block / per_group,
              in_group = block % per_group;
    const int size = min(n.head_group, pairs - group * n.head_group);
    const int pair = group * n.head_group + in_group % size, tile = in_group / size;
    const int number = last_first ? n.tiles - 1 - tile : tile;
    const WorkTile work{number, 0, 1, number * n.splits, {0, kNoLimit}};
    return {work, pair / heads, pair % heads, index % n.splits};
}

// The same with the splits as turns: all tiles of the heads of a group have theirs before any has the next one.
__device__ inline Block turn_of(int index, const Extents& n, int heads, int pairs) {
    const int per_group = n.head_group * n.tiles * n.splits, group = index / per_group, in_group = index % per_group;
    const int size = min(n.head_group, pairs - group * n.head_group);
    const int pair = group * n.head_group + in_group % size, number = in_group / size % n.tiles;
    const WorkTile work{number, 0, 1, number * n.splits, {0, kNoLimit}};
    return {work, pair / heads, pair % heads, in_group / (size * n.tiles)};
}

// The tiles that cover `rows`, `columns` to a tile.
__device__ inline Range covering(Range rows, int columns) {
    return rows.empty() ? Range{0, 0} : Range{rows.begin / columns, ceil_div(rows.end, columns)};
}

// The block's part of `steps`.
__device__ inline Range split_of(Range steps, const Block& block, const Extents& n) {
    const int part = ceil_div(max(steps.end - steps.begin, 0), n.splits),
              begin = min(steps.begin + block.split * part, steps.end);
    return {begin, min(begin + part, steps.end)};
}

// Visits the tiles of streamed rows that a mask leaves for the stationary rows [rows.begin, rows.end), upwards or
// downwards; `steps` are tiles, or entries of the list that the mask has. Cursors made alike agree on the tiles, so
// producers and consumers walk on their own. A list is read one step ahead, because its memory is far.
template <class M, int STEP = 1>
struct Cursor {
    M mask;  // knows the tile the cursor is at
    Range rows;
    int step, stop;
    TileEntry here, next_one;

    __device__ Cursor(const M& mask, Range rows, Range steps)
        : mask(mask),
          rows(rows),
          step(STEP > 0 ? steps.begin : steps.end - 1),
          stop(STEP > 0 ? steps.end : steps.begin - 1) {
        if constexpr (M::kListed) next_one = read(step);
        enter();
    }
    __device__ bool more() const { return STEP > 0 ? step < stop : step > stop; }
    __device__ bool at_last() const {
        return step + STEP == stop;
    }  // of the steps; those behind it may turn out empty too
    __device__ int tile() const { return M::kListed ? here.tile : step; }
    __device__ int row() const { return tile() * kColumns; }  // the first streamed row
    __device__ void next() {
        step += STEP;
        enter();
    }
    // Whether the stationary rows [first, end) meet anything in the tile.
    __device__ bool any_visible(int first, int end) const {
        return kRowsAreQueries ? mask.any_visible(first, end, row(), row() + kColumns)
                               : mask.any_visible(row(), row() + kColumns, first, end);
    }
    // The same, with what the intervals say.
    __device__ bool may_see(int first, int end) const {
        Range met = kRowsAreQueries ? mask.keys_of(first, end) : mask.queries_of(first, end);
        met.intersect({row(), row() + kColumns});
        return !met.empty() && any_visible(first, end);
    }
    // Whether all of these stationary rows see all of the tile.
    __device__ bool full(int first, int end) const {
        return kRowsAreQueries ? mask.full(first, end, row(), row() + kColumns)
                               : mask.full(row(), row() + kColumns, first, end);
    }
    // Whether, of the intervals' rows, these stationary ones meet the streamed row: only sparse masks leave a question.
    __device__ bool streamed_seen(int first, int end, int streamed) const {
        if constexpr (!M::kSparse) return true;
        return kRowsAreQueries ? mask.key_seen(first, end, streamed) : mask.query_seen(first, end, streamed);
    }

private:
    __device__ TileEntry read(int at) const {
        return (STEP > 0 ? at < stop : at > stop) ? mask.entry(at) : TileEntry{0, 0};
    }
    __device__ void enter() {
        for (;;) {
            if constexpr (M::kListed) {
                here = next_one;
                next_one = read(step + STEP);
                mask.enter(rows.begin, row(), here.bits);
            }
            if (!M::kHoles || !more() || any_visible(rows.begin, rows.end)) return;
            step += STEP;
        }
    }
};

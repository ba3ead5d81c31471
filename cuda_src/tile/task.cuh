// What a block of a kernel for one gradient works on. The kernel has included its mask and tile/row_stats.cuh before.
#pragma once
#include "tile/schedule.cuh"

struct Task {
    Block block;
    int first_head, end_head;  // query heads that are summed
    Segment segment;
    int row_count;  // rows of the stationary operand
    Range rows;     // the block's own

    __device__ explicit Task(const Extents& n) {
        const int heads_per_block = kRowsAreQueries ? 1 : kSide == kTeacher ? n.teacher_group : n.student_group;
        const int out_heads = n.heads / heads_per_block;
        block = block_of(blockIdx.x, n, out_heads, n.batch * out_heads, kRowsAreQueries && !Mask::kListed);
        first_head = block.head * heads_per_block;
        end_head = first_head + heads_per_block;
        segment = Mask::locate(n, first_head, block);
        row_count = kRowsAreQueries ? segment.queries : segment.keys;
        rows = {block.tile * kRows, min(block.tile * kRows + kRows, row_count)};
    }
    __device__ Mask mask(const Extents& n, int head) const { return Mask(n, segment, block.batch, head); }
    // The interval of streamed rows that some of these rows meet.
    __device__ static Range streamed_of(const Mask& mask, Range rows) {
        return kRowsAreQueries ? mask.keys_of(rows.begin, rows.end) : mask.queries_of(rows.begin, rows.end);
    }
    __device__ Cursor<Mask> walk(const Mask& mask) const {
        Range tiles = covering(streamed_of(mask, rows), kColumns);
        if constexpr (Mask::kListed) tiles.intersect(block.streamed);
        return {mask, rows, mask.steps_of(rows.begin, tiles)};
    }
    // Whether the resident rows are other ones than those of the head before: the other side may share keys
    // differently.
    __device__ bool new_rows(const Extents& n, int head) const {
        const int other_group = kSide == kTeacher ? n.student_group : n.teacher_group;
        return head == first_head || head / other_group != (head - 1) / other_group;
    }
};

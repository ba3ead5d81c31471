// Sequences lie one after the other: s owns the rows cu_seqlens_q[s] to cu_seqlens_q[s + 1] and sees the keys that
// cu_seqlens_k says. What comes after the last one is a sequence too, with nothing on the other side. A grid has room
// for the tiles of any lengths: sequence s starts with tile start / ROWS + s. Words: whether an offset of the diagonal
// was given (else each sequence ends at its own corner), both addresses, int32.
#pragma once
#include "masks/interface.cuh"
#include "common/search.cuh"

struct Packed : Part {
    static constexpr int kWords = 3;
    static constexpr bool kRagged = true;
    __device__ Packed(Words& words, const Extents&, const Segment&, int, int) { words.at += kWords; }

    // Nobody has checked the numbers: wrong ones may give wrong results, but nothing outside the arrays.
    __device__ static Range span(const int* bounds, int s, int sequences, int total, bool tail) {
        const int begin = max(0, min(bounds[s], total));
        if (s == sequences) return {begin, tail ? total : begin};
        return {begin, max(begin, min(bounds[s + 1], total))};
    }
    template <int ROWS, bool QUERIES>
    __device__ static void locate(Words words, const Extents& n, int, WorkTile& work, Segment& segment) {
        const bool offset_given = words.next();
        const int* const queries = words.pointer<int>();
        const int* const keys = words.pointer<int>();
        const int* const mine = QUERIES ? queries : keys;
        const int total = QUERIES ? n.queries : n.keys, wanted = work.tile;
        const auto start = [mine, total](int s) { return max(0, min(mine[s], total)) / ROWS + s; };
        const int s = last_where(n.sequences, [start, wanted](int i) { return start(i) <= wanted; });
        const Range q = span(queries, s, n.sequences, n.queries, QUERIES),
                    k = span(keys, s, n.sequences, n.keys, !QUERIES);
        segment = {q.end - q.begin, k.end - k.begin, q.begin, k.begin, 0, s};
        if (!offset_given) segment.diagonal = segment.keys - segment.queries;
        work.tile = max(0, wanted - start(s));
    }
};

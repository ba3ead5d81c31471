// The mask of a problem: a pair is visible where every part lets it pass. No part at all hides nothing.
#pragma once
#include "masks/interface.cuh"

// The part that has the list; where there is none, the defaults.
template <class... Parts>
struct ListOf {
    using Type = Part;
};
template <bool FIRST, class First, class... Rest>
struct FirstOr {
    using Type = First;
};
template <class First, class... Rest>
struct FirstOr<false, First, Rest...> : ListOf<Rest...> {};
template <class First, class... Rest>
struct ListOf<First, Rest...> : FirstOr<First::kListed, First, Rest...> {};

template <class... Parts>
struct AllOf : Parts... {
    static constexpr int kParts = sizeof...(Parts);
    static constexpr bool kRagged = (false || ... || Parts::kRagged);
    static constexpr bool kSparse = (false || ... || Parts::kSparse);
    static constexpr bool kHoles = (false || ... || Parts::kHoles);
    static constexpr bool kListed = (false || ... || Parts::kListed);
    static constexpr bool kPicksQueries = (false || ... || Parts::kPicksQueries);
    static constexpr bool kShortens = (false || ... || Parts::kShortens);
    static_assert((0 + ... + Parts::kKnowsQueries) <= 1, "key_seen and query_seen ask parts one by one: see there");
    static_assert((0 + ... + Parts::kListed) <= 1, "a block walks one list");
    using List = typename ListOf<Parts...>::Type;
    Segment segment;  // without the last rows and keys where the mask hides these altogether

    // The segment of a work tile of the kernel's tiles, or of other ones.
    template <int ROWS = kRows, bool QUERIES = kRowsAreQueries>
    __device__ static Segment locate(const Extents& n, int head, WorkTile& work) {
        Segment segment{n.queries, n.keys, 0, 0, 0, 0};
        Words words{n.mask};
        ((Parts::template locate<ROWS, QUERIES>(words, n, head, work, segment), words.at += Parts::kWords), ...);
        return segment;
    }
    __device__ AllOf(const Extents& n, const Segment& segment, int batch, int head)
        : AllOf(n, segment, batch, head, Words{n.mask}) {}

    __device__ Range keys_of(int q0, int q1) const {
        Range keys{0, segment.keys};
        if constexpr (kShortens) q1 = min(q1, segment.queries);
        if (kShortens && q1 <= q0) return {0, 0};
        (keys.intersect(Parts::keys_of(q0, q1)), ...);
        return {keys.begin, max(keys.begin, keys.end)};
    }
    __device__ Range queries_of(int k0, int k1) const {
        Range queries{0, segment.queries};
        if constexpr (kShortens) k1 = min(k1, segment.keys);
        if (kShortens && k1 <= k0) return {0, 0};
        (queries.intersect(Parts::queries_of(k0, k1)), ...);
        return {min(queries.begin, queries.end), queries.end};
    }
    __device__ bool any_visible(int q0, int q1, int k0, int k1) const {
        return (true && ... && Parts::any_visible(q0, q1, k0, k1));
    }
    __device__ bool full(int q0, int q1, int k0, int k1) const {
        return q1 <= segment.queries && k1 <= segment.keys && (true && ... && Parts::full(q0, q1, k0, k1));
    }
    __device__ bool inside(int q, int k) const { return (q < segment.queries) & (k < segment.keys); }
    __device__ bool visible(int q, int k) const {
        return (inside(q, k) & ... & Parts::visible(q, k));  // no branches: parts may be asked about pairs outside
    }
    __device__ bool there(int q) const { return ((q < segment.queries) & ... & Parts::there(q)); }

    // What passes every part alone may still be hidden by all of them together, but not inside strips of 16: there a
    // list says the same of all pairs, and of the others at most one knows queries from one another. Where some of
    // these are picked, only those are asked about that see the key as far as intervals know, which of one key are
    // exact.
    __device__ bool key_seen(int q0, int q1, int k) const {
        const int strip = kListed ? 16 : q1 - q0;
#pragma unroll 1
        for (int q = q0; q < q1; q += strip) {
            Range rows{q, min(q + strip, q1)};
            if constexpr (kPicksQueries) rows.intersect(queries_of(k, k + 1));
            if (kPicksQueries && rows.empty()) continue;
            if (keys_of(rows.begin, rows.end).contains(k) && any_visible(rows.begin, rows.end, k, k + 1)) return true;
        }
        return false;
    }
    __device__ bool query_seen(int k0, int k1, int q) const {
        const int strip = kListed ? 16 : k1 - k0;
#pragma unroll 1
        for (int k = k0; k < k1; k += strip) {
            Range keys = keys_of(q, q + 1);
            keys.intersect({k, min(k + strip, k1)});
            if (!keys.empty() && any_visible(q, q + 1, keys.begin, keys.end)) return true;
        }
        return false;
    }

    __device__ Range steps_of(int first_row, Range tiles) const { return List::steps_of(first_row, tiles); }
    __device__ Range steps_at_once(int first_row, Range tiles) const { return List::steps_at_once(first_row, tiles); }
    __device__ TileEntry entry(int step) const { return List::entry(step); }
    __device__ void enter(int first_row, int first_column, u64 bits) { List::enter(first_row, first_column, bits); }

private:
    __device__ AllOf(const Extents& n, const Segment& segment, int batch, int head, Words words)
        : Parts(words, n, segment, batch, head)..., segment(segment) {
        (Parts::shorten(this->segment), ...);
    }
};

using Mask = AllOf<SKL_MASK_PARTS>;

// What a part of a mask must offer, as a struct of its own header that derives from `Part`, whose defaults hide
// nothing. masks/all.cuh joins the parts of a problem to `struct Mask`, which is what kernels know:
//
//   locate<ROWS, QUERIES>(words, n, head, work, segment)   what the sequence of tile `work.tile` owns, tiles being ROWS
//                                              queries or keys; `tile` becomes the tile inside it
//   Mask(n, segment, batch, head)              reads its words from n.mask, in the registry's order; `head` of queries
//   Range keys_of(int q0, int q1)              smallest interval of keys that any row of [q0, q1) may see
//   Range queries_of(int k0, int k1)           smallest interval of rows that may see any key of [k0, k1)
//   bool any_visible(q0, q1, k0, k1)           false: the intervals name this tile, and still nothing of it is visible
//   bool full(q0, q1, k0, k1)                  every pair of the two intervals is visible (and inside the segment)
//   bool visible(q, k)                         this pair is visible (and inside the segment), if the row is there
//   bool there(q)                              row q is one of those that see anything at all: see kPicksQueries
//   bool key_seen(q0, q1, k)                   some row of [q0, q1) sees key k
//   bool query_seen(k0, k1, q)                 row q sees some key of [k0, k1)
//
// and as constants what it is made of, so that a kernel pays for what there is:
//
//   kRagged   segments differ from block to block, and around a segment lie the rows of others
//   kSparse   rows and keys inside the intervals may still see nothing
//   kHoles    so may whole tiles: `any_visible` can be false
//   kListed   the tiles to visit stand in a list; which work tile a block has follows from one too
//   kKnowsQueries   rows of one strip of 16 see other keys
//   kPicksQueries   some of them are not there, and see nothing at all. Where they are stationary, `full` does not ask:
//             whatever comes of such rows stays their own, and is put aside where it is written. Where they are
//             streamed, a log-sum-exp of minus infinity tells them from others, in tiles that are not full
//   kShortens what it hides are the last rows or keys: `shorten` takes them from the mask's segment, and the other
//             parts are not asked about them: a row whose window lies behind the last key sees nothing
//
// Kernels visit the tiles that the intervals, the list and `any_visible` leave, test `visible` only on tiles that are
// not full, and fill operand rows that are not seen with zeros, so whatever such memory holds never enters a product.
#pragma once
#include "common/args.cuh"
#include "common/config.cuh"

constexpr int kNoLimit = 0x7fffffff;

// Rows and keys of one sequence, and where they start in the arrays. Everything else counts inside the segment.
struct Segment {
    int queries, keys, first_query, first_key;
    int diagonal;  // what the segment adds to offsets of the diagonal
    int sequence;
};

// A tile of stationary rows, and which of the steps past it a block takes: all, or one of several shares. Their sums
// lie in as many slots of a workspace, of which the first is `partial_slot`. Lists come shared, with the tiles of a
// share in `streamed`; tile/shares.cuh shares the others, and there it counts the steps of all heads, one head after
// the other.
struct WorkTile {
    int tile;
    int share, shares;  // 0 shares: nothing to do
    int partial_slot;
    Range streamed;
};

// A mask's words of the arguments, taken one after the other.
struct Words {
    const i64* at;
    __device__ i64 next() { return *at++; }
    __device__ int number() { return static_cast<int>(next()); }
    template <class T>
    __device__ const T* pointer() {
        return reinterpret_cast<const T*>(next());
    }
};

// A step of a list: a tile of streamed rows, and which of its subtiles of 16 x 16 are visible.
struct TileEntry {
    int tile;
    u64 bits;
};

struct Part {
    static constexpr bool kRagged = false, kSparse = false, kHoles = false, kListed = false, kKnowsQueries = false;
    static constexpr bool kPicksQueries = false, kShortens = false;
    static constexpr int kWords = 0;
    template <int ROWS, bool QUERIES>
    __device__ static void locate(Words, const Extents&, int, WorkTile&, Segment&) {}
    __device__ static void shorten(Segment&) {}
    __device__ static Range keys_of(int, int) { return {0, kNoLimit}; }
    __device__ static Range queries_of(int, int) { return {0, kNoLimit}; }
    __device__ static bool any_visible(int, int, int, int) { return true; }
    __device__ static bool full(int, int, int, int) { return true; }
    __device__ static bool visible(int, int) { return true; }
    __device__ static bool there(int) { return true; }
    // Of listed parts only: which entries of the list are tiles of `tiles`; one of them; what is known where the cursor
    // is.
    __device__ static Range steps_of(int, Range tiles) { return tiles; }
    __device__ static Range steps_at_once(int, Range tiles) { return tiles; }
    __device__ static TileEntry entry(int step) { return {step, 0}; }
    __device__ static void enter(int, int, u64) {}
};

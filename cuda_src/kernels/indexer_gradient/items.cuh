// Work of the gradient of the indexer's queries, in units of one key tile for some heads of one row tile. An item is
// all units of these rows and heads, and some more for its end; units are numbered by row tiles, in these by heads, in
// these by keys, and every block of threads has as many of them as the others, one after the other.
//
// A block takes the last item of its share first. That one may go on in the next share, whose block adds what this one
// leaves in memory, and as it takes it last, it hardly ever waits. Blocks wait for those before them only, which have
// been started before.
#pragma once
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/search.cuh"
#include "tile/index_parts.cuh"

// What it takes to begin and end an item, in units.
constexpr int kItemUnits = 6;

// Units of an item of a tile of rows: of its keys, and then those of its end.
__device__ inline int units_of(Range keys) { return (keys.end - keys.begin) / kStripTile + kItemUnits; }

// Of the strip: units before each row tile.
struct Items {
    const int* before;
    int count;  // row tiles, of all batch entries
    __device__ explicit Items(const IndexerArgs& args) : count(args.entries * args.tiles) {
        before = reinterpret_cast<const int*>(args.items);
    }
    __device__ int first_of(int share, int shares) const {
        return static_cast<int>(static_cast<i64>(before[count]) * share / shares);
    }
};

// Walks over a share of them, from its end. All lanes of a warp together.
struct ItemWalk {
    const IndexerArgs& args;
    const Items items;
    int begin, end;                // what is left
    int index = -1;                // of the row tile, in the strip
    Range all;                     // tiles of keys that it sees
    int units;                     // of an item of it
    int first;                     // unit of the item
    bool finishes;                 // whether nothing of the item comes after this
    int tile, batch, group, head;  // the first head, in its group
    Range keys;                    // tiles

    __device__ ItemWalk(const IndexerArgs& args, int share, int shares)
        : args(args), items(args), begin(items.first_of(share, shares)), end(items.first_of(share + 1, shares)) {}
    __device__ bool more() const { return begin < end; }
    __device__ bool starts() const { return begin <= first; }
    __device__ int entry() const { return batch * args.groups + group; }
    // What of the last item is the block's; `heads` is how many an item has.
    __device__ void take(int heads) {
        const int* const before = items.before;
        const int last = end - 1, tiles = args.tiles;
        if (index < 0 || before[index] > last) {
            index = last_where(index < 0 ? items.count - 1 : index - 1,
                               [before, last](int i) { return before[i] <= last; });
            batch = index / tiles;
            tile = args.first_tile + index % tiles;
            all = keys_of_tile(args, batch, tile);
            all = {all.begin / kStripTile, all.end / kStripTile};
            units = all.end - all.begin + kItemUnits;
        }
        const int item = (last - before[index]) / units, parts = ceil_div(args.index_heads, heads);
        first = before[index] + item * units;
        finishes = end == first + units;
        group = item / parts;
        head = item % parts * heads;
        keys = {min(all.begin + max(begin - first, 0), all.end), min(all.begin + end - first, all.end)};
    }
    // On to the item before.
    __device__ void next() { end = max(begin, first); }
};

// Work of the gradient of the indexer's keys, in units of one row tile, one head and one block of keys. Units are
// numbered by blocks of keys, in these by row tiles, in these by heads; every block of threads has as many of them as
// the others, one after the other, so it may begin in the middle of a block of keys. Whoever has the first unit of a
// block of keys adds to the sums, others leave theirs beside them (kernels/indexer_gated_join.cu).
#pragma once
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/search.cuh"
#include "tile/index_parts.cuh"

constexpr int kKeyBlock = kStripBlock;

// Whether the block has keys that a row of the tile sees.
__device__ inline bool may_see(const IndexerArgs& args, int batch, int tile, int block) {
    Range keys = keys_of_tile(args, batch, tile);
    keys.intersect({block * kKeyBlock, (block + 1) * kKeyBlock});
    return !keys.empty();
}

// Of the strip: units before each block of keys.
struct Units {
    const int* before;
    int count;  // blocks of keys, of all batch entries and heads of keys
    __device__ explicit Units(const IndexerArgs& args) : count(args.entries * args.index_key_heads * args.key_blocks) {
        before = reinterpret_cast<const int*>(args.units);
    }
    __device__ int first_of(int share, int shares) const {
        return static_cast<int>(static_cast<i64>(before[count]) * share / shares);
    }
};

// Walks over a share of them. All lanes of a warp together.
struct Walk {
    const IndexerArgs& args;
    const Units units;
    int at, end;
    int entry, batch, block;  // of keys
    int left;                 // units in this block of keys
    int tile, head, heads;    // the head among all that read the keys

    __device__ Walk(const IndexerArgs& args, int share, int shares)
        : args(args),
          units(args),
          at(units.first_of(share, shares)),
          end(units.first_of(share + 1, shares)),
          entry(-1),
          heads(args.groups / args.index_key_heads * args.index_heads) {}
    __device__ bool more() const { return at < end; }
    // On to the block of keys that has the next unit.
    __device__ void start() {
        const int* const before = units.before;
        const int here = at;
        if (entry < 0)
            entry = last_where(units.count - 1, [before, here](int i) { return before[i] <= here; });
        else
            while (before[entry + 1] <= at) ++entry;
        left = min(end, before[entry + 1]) - at;
        batch = entry / args.key_blocks / args.index_key_heads;
        block = entry % args.key_blocks;
        const int unit = at - before[entry];
        head = unit % heads;
        tile = args.first_tile;
        for (int skip = unit / heads;;) {
            const int mine = tile + static_cast<int>(threadIdx.x & 31);
            u32 met = __ballot_sync(~0u, mine < args.first_tile + args.tiles && may_see(args, batch, mine, block));
            const int some = __popc(met);
            if (skip < some) {
                for (; skip > 0; --skip) met &= met - 1;
                tile += __ffs(met) - 1;
                break;
            }
            skip -= some;
            tile += 32;
        }
    }
    __device__ bool begins() const { return at == units.before[entry]; }
    // Units that have the same tile of the strip.
    __device__ int run() const { return min(left, args.index_heads - head % args.index_heads); }
    __device__ int group() const {
        return entry / args.key_blocks % args.index_key_heads * (args.groups / args.index_key_heads) +
               head / args.index_heads;
    }
    __device__ void next(int run) {
        at += run;
        left -= run;
        head += run;
        if (head < heads) return;
        head = 0;
        if (left > 0) do
                ++tile;
            while (!may_see(args, batch, tile, block));
    }
};

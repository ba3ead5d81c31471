// A bit for each key that a mask of keys has and that ids name, whole words per row; a warp has a row of a group, or
// where there are no ids, those of an entry of the batch. Ids that name no key, and those beyond a row's length, leave
// no bit, and repeated ones leave the same.
#include "common/args.cuh"
#include "common/integers.cuh"
#include "common/sizes.cuh"

extern "C" __global__ void __launch_bounds__(SKL_THREADS)
    streamkl_indexer_bits(const __grid_constant__ IndexerRowsArgs args) {
    const int rows = args.ids.pointer ? args.bit_rows : 1;
    const i64 which = static_cast<i64>(blockIdx.x) * (SKL_THREADS / 32) + threadIdx.x / 32;
    if (which >= static_cast<i64>(args.bit_groups) * rows) return;
    const int batch = blockIdx.y, group = static_cast<int>(which / rows),
              row = args.first_row + static_cast<int>(which % rows);
    const int lane = threadIdx.x % 32, words = bit_words(args.keys);
    u32* const bits =
        reinterpret_cast<u32*>(args.bits) + (static_cast<i64>(batch) * args.bit_groups * rows + which) * words;
    const auto there = [&args, batch](int key) {
        return !args.mask.pointer ||
               reinterpret_cast<const unsigned char*>(args.mask.pointer)[batch * args.mask.batch + key * args.mask.row];
    };
    if (!args.ids.pointer) {
        for (int word = 0; word < words; ++word) {
            const int key = 32 * word + lane;
            const u32 found = __ballot_sync(~0u, key < args.keys && there(key));
            if (lane == 0) bits[word] = found;
        }
        return;
    }
    for (int word = lane; word < words; word += 32) bits[word] = 0;
    __syncwarp();
    i64 count = args.chosen;
    if (args.counts.pointer)
        count = min(count, integer_at(args.counts.pointer,
                                      batch * args.counts.batch + group * args.counts.head + row * args.counts.row,
                                      args.wide_counts));
    const i64 base = reinterpret_cast<const int*>(args.bases)[static_cast<i64>(batch) * args.queries + row];
    for (i64 i = lane; i < count; i += 32) {
        const i64 id = integer_at(
            args.ids.pointer, batch * args.ids.batch + group * args.ids.head + row * args.ids.row + i * args.ids.column,
            args.wide_ids);
        if (id < 0 || id >= args.keys - base) continue;
        const int key = static_cast<int>(id + base);
        if (there(key)) atomicOr(bits + (key >> 5), 1u << (key & 31));
    }
}

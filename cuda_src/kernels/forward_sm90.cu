// Forward on Hopper: the mathematics of forward_sm80.cu with asynchronous copies and warpgroup products.
//
//   block     kRows = kGroups x 64 query rows of one head, or of several that read the same keys (tile/packed_rows.cuh),
//             resident in shared memory
//   producer  one thread; streams keys through a ring of kRing pieces, a piece being up to kPieceChunks x 64 columns of
//             kColumns keys of one side; teacher pieces of a tile first, then student pieces. Of a teacher that is given
//             there are boxes of its numbers in place of these, last and for each group its own (tile/given_swizzled.cuh)
//   consumers kGroups warpgroups, 64 rows each: T and S (64 x 64) in registers, absorbed by the row states; they never
//             wait for one another
//
//   barrier   arrivals                         waited for by
//   queries   1 (+ bytes)                      consumers, once
//   full[i]   1 (+ bytes) by the producer      consumers: piece i has arrived
//   empty[i]  one per consumer warp            the producer: piece i may be overwritten
//
// A warpgroup that sees no key of a tile skips its products; the tiles run from the last key to the first, so that
// under a mask the partial ones come first.
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "pipeline/barriers.cuh"
#include "pipeline/ring.cuh"
#include "ptx/registers.cuh"
#include "tile/fragment.cuh"
#include "tile/packed_rows.cuh"
#include "tile/schedule.cuh"
#include "tile/swizzled.cuh"
#include "@mask"
#include "@divergence"
#include "@score"
#include "tile/rows.cuh"

using Teacher = SwizzledTile<SKL_T_ELEMENT, SKL_T_DIM>;
using Student = SwizzledTile<SKL_S_ELEMENT, SKL_S_DIM>;

constexpr int kGroups = kWarps / 4;
constexpr int kTiles = kColumns / 8;
constexpr int kRing = SKL_STAGES;
constexpr int kPieceChunks = SKL_PIECE_CHUNKS;
constexpr int kPieceBytes = kPieceChunks * kColumns * 128;
constexpr int kTeacherPieces = ceil_div(Teacher::kChunks, kPieceChunks);
// Of a teacher that is given, the boxes of each group.
enum : bool { kGiven = Teacher::kDim == 0 };
static_assert(!kGiven || kPieceBytes == Teacher::kBoxBytes, "plan: a piece is a box");
constexpr int kPieces = kTeacherPieces + ceil_div(Student::kChunks, kPieceChunks);
enum : int { kBoxes = Teacher::boxes(kColumns), kAllPieces = kPieces + kGroups * kBoxes };
constexpr bool kLong = Teacher::kSteps > kLongDepth;
constexpr int kFirstHalf = kTeacherPieces / 2;
constexpr int kQueryBytes = Teacher::bytes(kRows) + Student::bytes(kRows);
constexpr int kBarrierBytes = 8 * (2 * kRing + 1);

static_assert(kWarpTiles == 1 && kColumns == 64, "plan: a consumer warpgroup computes 64 x 64 scores");
static_assert(1024 + kQueryBytes + kRing * kPieceBytes + kBarrierBytes == SKL_SMEM_BYTES, "plan: smem_bytes");

using Walk = Cursor<Mask, -1>;

// The queries of a block, its ring of pieces and their barriers, in shared memory.
struct Layout {
    u32 base;
    __device__ u32 teacher_queries() const { return base; }
    __device__ u32 student_queries() const { return base + Teacher::bytes(kRows); }
    __device__ u32 piece(int slot) const { return base + kQueryBytes + slot * kPieceBytes; }
    __device__ u32 full(int slot) const { return piece(kRing) + 8 * slot; }
    __device__ u32 empty(int slot) const { return full(kRing) + 8 * slot; }
    __device__ u32 queries_here() const { return empty(kRing); }
};

// One thread: the block's queries, and tile by tile the pieces of keys, or of what is given in their place.
__device__ inline void produce(const HopperForwardArgs& all, const Layout& lay, const Block& block,
                               const Segment& segment, int first_row, Walk& walk, RingCursor<kRing>& at) {
    const ForwardArgs& args = all.base;
    mbarrier_expect(lay.queries_here(), kQueryBytes);
    load_chunks<kRows>(lay.teacher_queries(), all.teacher_q, lay.queries_here(), 0, Teacher::kChunks,
                       segment.first_query + first_row, block.head, block.batch);
    load_chunks<kRows>(lay.student_queries(), all.student_q, lay.queries_here(), 0, Student::kChunks,
                       segment.first_query + first_row, block.head, block.batch);
    const int head_t = block.head / args.n.teacher_group, head_s = block.head / args.n.student_group;
    for (; walk.more(); walk.next()) {
#pragma unroll
        for (int p = 0; p < kPieces; ++p) {
            const bool teacher = p < kTeacherPieces;
            const int first_chunk = (teacher ? p : p - kTeacherPieces) * kPieceChunks;
            const int chunks = min((teacher ? Teacher::kChunks : Student::kChunks) - first_chunk, kPieceChunks);
            mbarrier_wait(lay.empty(at.slot), at.parity ^ 1);
            mbarrier_expect(lay.full(at.slot), chunks * kColumns * 128);
            load_chunks<kColumns>(lay.piece(at.slot), teacher ? all.teacher_k : all.student_k, lay.full(at.slot),
                                  first_chunk, chunks, segment.first_key + walk.row(), teacher ? head_t : head_s,
                                  block.batch);
            at.advance();
        }
        if constexpr (kGiven) {
            for (int g = 0; g < kGroups; ++g)
                for (int box = 0; box < kBoxes; ++box) {
                    mbarrier_wait(lay.empty(at.slot), at.parity ^ 1);
                    mbarrier_expect(lay.full(at.slot), Teacher::kBoxBytes);
                    load_boxes<Teacher>(lay.piece(at.slot), all.teacher_q, lay.full(at.slot), 1,
                                        segment.first_query + first_row + 64 * g,
                                        segment.first_key + walk.row() + box * Teacher::kBoxKeys,
                                        args.in.teacher_q.head == 0 ? 0 : block.head, block.batch);
                    at.advance();
                }
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads + 128, SKL_MIN_BLOCKS)
    streamkl_forward(const __grid_constant__ HopperForwardArgs all) {
    extern __shared__ unsigned char shared[];
    const ForwardArgs& args = all.base;
    const Extents& n = args.n;
    const int together = heads_together(n), packs = n.heads / together;
    Block block = block_of(blockIdx.x, n, packs, n.batch * packs, !Mask::kListed);
    const int end_head = (block.head + 1) * together;
    if constexpr (kPacked) {  // a tile has all queries of its heads
        block.head = block.head * together + block.tile * kTileHeads;
        block.tile = 0;
    }
    const Segment segment = Mask::locate(n, block.head, block);
    const Mask mask(n, segment, block.batch, block.head);
    const int first_row = block.tile * kRows, end_row = min(first_row + kRows, segment.queries);
    if (Mask::kRagged && first_row >= segment.queries) return;
    // Uniform over the warp by construction, which the compiler must be told: descriptors then live in uniform
    // registers.
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);

    const Layout lay{(static_cast<u32>(__cvta_generic_to_shared(shared)) + 1023) & ~1023u};
    if (threadIdx.x == 0) {
        for (int i = 0; i < kRing; ++i) {
            mbarrier_init(lay.full(i), 1);
            mbarrier_init(lay.empty(i), kWarps * kArrivals);
        }
        mbarrier_init(lay.queries_here(), 1);
        mbarrier_publish();
    }
    __syncthreads();

    const Range tiles = covering(mask.keys_of(first_row, end_row), kColumns);
    Walk walk(mask, {first_row, end_row}, split_of(mask.steps_of(first_row, tiles), block, n));
    RingCursor<kRing> at;

    if (group == kGroups) {
        registers_lower<SKL_PRODUCER_REGISTERS>();
        if (threadIdx.x == kThreads) produce(all, lay, block, segment, first_row, walk, at);
        return;
    }

    registers_raise<SKL_CONSUMER_REGISTERS>();
    const int lane = lane_id(), strip = 16 * ((threadIdx.x / 32) & 3);
    const bool idle = block.head + packed_head(64 * group) >= end_head;
    const int group_row = idle ? segment.queries : first_row + packed_query(64 * group);
    const int group_end = min(group_row + 64, segment.queries);
    const int row = (kPacked ? packed_query(64 * group + strip) : group_row + strip) + Accumulators::first_row(lane);
    const Range mine = mask.keys_of(group_row, group_end);
    RowState state[kLaneRows];
    // Rows of a strip may be of another head than the block's, or of none.
    const int strip_head = kPacked ? block.head + packed_head(64 * group + strip) : block.head;
    start_rows(args, state, block.batch, min(strip_head, end_head - 1), segment, row);

    const u64 q_t = swizzled_descriptor(lay.teacher_queries() + group * 64 * 128),
              q_s = swizzled_descriptor(lay.student_queries() + group * 64 * 128);
    const u64 ring_start = swizzled_descriptor(lay.piece(0));
    const auto release = [&lay](int slot) { warp_arrive(lay.empty(slot)); };
    mbarrier_wait(lay.queries_here(), 0);
    HeldRows<SKL_HELD_STEPS> held;
    held.load<kRows>(lay.teacher_queries(), 16 * (threadIdx.x / 32));

    for (; walk.more(); walk.next()) {
        const int key = walk.row();
        if (group_row >= segment.queries || key >= mine.end || key + kColumns <= mine.begin ||
            (Mask::kListed && !walk.any_visible(group_row, group_end))) {
            for (int p = 0; p < kAllPieces; ++p) {
                warp_wait(lay.full(at.slot), at.parity);  // or two arrivals could fall into one phase
                release(at.slot);
                at.advance();
            }
            continue;
        }
        Strip<kTiles> t, s, rest;  // rest: the second half of a long head dim
        int previous = 0;
#pragma unroll
        for (int p = 0; p < kPieces; ++p) {
            mbarrier_wait(lay.full(at.slot), at.parity);
            const u64 piece = ring_start + static_cast<u64>(at.slot * (kPieceBytes >> 4));
            wgmma_fence();
            if (kLong && p >= kFirstHalf && p < kTeacherPieces)
                multiply_rows<Teacher, kRows, kPieceChunks>(rest[0], q_t, piece, p * kPieceChunks,
                                                            kFirstHalf * kPieceChunks);
            else if (p < kTeacherPieces)
                multiply_rows<Teacher, kRows, kPieceChunks>(t[0], q_t, piece, p * kPieceChunks, 0, held);
            else
                multiply_rows<Student, kRows, kPieceChunks>(s[0], q_s, piece, (p - kTeacherPieces) * kPieceChunks);
            wgmma_commit();
            if (p > 0) {
                wgmma_wait<1>();
                release(previous);
            }
            previous = at.slot;
            at.advance();
        }
        if constexpr (kGiven) {
#pragma unroll
            for (int g = 0; g < kGroups; ++g)
#pragma unroll
                for (int box = 0; box < kBoxes; ++box) {
                    warp_wait(lay.full(at.slot), at.parity);
                    if (g == group)
                        Teacher::read_rows(t[0], box, lay.piece(at.slot), strip + Accumulators::first_row(lane));
                    __syncwarp();
                    release(at.slot);
                    at.advance();
                }
        }
        wgmma_wait<0>();
        fence_accumulators(t[0]);
        fence_accumulators(s[0]);
        if (kLong) {
            fence_accumulators(rest[0]);
            add<kTiles>(t, rest);
        }
        release(previous);
        absorb_tile<kTiles>(state, t, s, walk.mask, row, walk.full(group_row, group_end), key,
                            {args.teacher_numbers, args.student_numbers});
    }
    if constexpr (kPacked) {
        block.head += packed_head(64 * group + strip);
        if (block.head >= end_head) return;
    }
    write_rows(args, block, segment, state, row);
}

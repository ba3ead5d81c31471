// Forward: the divergence of every row and its two log-sum-exps, one pass over the keys, no score ever stored.
//
//   block    kRows query rows of one head; kWarps warps with kWarpTiles x 16 rows each, independent of one another
//   stream   tiles of kColumns keys of both sides, kStages in flight (cp.async)
//   per tile T = Q_t K_t^T and S = Q_s K_s^T in registers, then the row states absorb them; every lane keeps a state
//            of its own for each of its rows (the states are associative), and the four lanes of a row merge at the end
//
// Needs sm_80: cp.async, ldmatrix, mma.sync. One __syncthreads per tile: it says both that tile i has arrived and that
// everybody is done with the buffer that is filled next.
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "pipeline/ring.cuh"
#include "tile/load.cuh"
#include "tile/scores.cuh"
#include "tile/schedule.cuh"
#include "@mask"
#include "@divergence"
#include "@score"
#include "tile/rows.cuh"
#include "tile/common_part.cuh"

using TeacherTile = Tile<SKL_T_ELEMENT, SKL_T_DIM>;
using StudentTile = Tile<SKL_S_ELEMENT, SKL_S_DIM>;

constexpr int kTiles = kColumns / 8;
constexpr int kQueryBytes = TeacherTile::bytes(kRows) + StudentTile::bytes(kRows);
constexpr int kStageBytes = TeacherTile::bytes(kColumns) + StudentTile::bytes(kColumns);

using TeacherCommon = CommonPart<TeacherTile, Score<kTeacher>>;
using StudentCommon = CommonPart<StudentTile, Score<kStudent>>;
constexpr bool kCommon = TeacherCommon::kPossible || StudentCommon::kPossible;
constexpr int kCommonBytes = TeacherCommon::kBytes + StudentCommon::kBytes;

static_assert(kQueryBytes + kStages * kStageBytes + kCommonBytes == SKL_SMEM_BYTES, "plan: smem_bytes");

// What the logits of a row lack of the common parts, which all lanes of a row must ask for together.
struct Offsets {
    static constexpr bool kAny = true;
    TeacherTile tq;
    StudentTile sq;
    TeacherCommon common_t;
    StudentCommon common_s;
    int row;
    Numbers numbers;
    __device__ float2 operator()(int below) const {
        return make_float2(common_t.offset(tq, row + below, numbers.teacher),
                           common_s.offset(sq, row + below, numbers.student));
    }
};

// The keys of both sides, a tile after the other.
struct Keys {
    u32 ring;  // shared memory
    HeadView teacher_view, student_view;
    Range valid;
    Cursor<Mask> ahead;
    __device__ TeacherTile teacher(int stage) const { return {ring + stage * kStageBytes}; }
    __device__ StudentTile student(int stage) const {
        return {ring + stage * kStageBytes + TeacherTile::bytes(kColumns)};
    }
    __device__ void operator()(int i) {
        const int key = ahead.row(), stage = i % kStages;
        load_rows<kColumns, SKL_TK_VECTOR>(teacher(stage), teacher_view, key, valid);
        load_rows<kColumns, SKL_SK_VECTOR>(student(stage), student_view, key, valid);
        ahead.next();
    }
};

extern "C" __global__ void __launch_bounds__(kThreads, SKL_MIN_BLOCKS)
    streamkl_forward(const __grid_constant__ ForwardArgs args) {
    extern __shared__ __align__(16) unsigned char shared[];
    const Extents& n = args.n;
    Block block = block_of(blockIdx.x, n, n.heads, n.batch * n.heads, !Mask::kListed);
    const Segment segment = Mask::locate(n, block.head, block);
    const Mask mask(n, segment, block.batch, block.head);

    const int first_row = block.tile * kRows, end_row = min(first_row + kRows, segment.queries);
    if (Mask::kRagged && first_row >= segment.queries) return;
    const Range rows{first_row, end_row}, keys = mask.keys_of(first_row, end_row);
    const Range steps = mask.steps_of(first_row, covering(keys, kColumns));
    Cursor<Mask> at(mask, rows, split_of(steps, block, n));

    const u32 base = static_cast<u32>(__cvta_generic_to_shared(shared));
    const TeacherTile tq{base};
    const StudentTile sq{base + TeacherTile::bytes(kRows)};
    Keys fetch{base + kQueryBytes,
               head_view<TeacherTile>(args.in.teacher_k, block.batch, block.head / n.teacher_group, segment.first_key),
               head_view<StudentTile>(args.in.student_k, block.batch, block.head / n.student_group, segment.first_key),
               keys, at};

    load_rows<kRows, SKL_TQ_VECTOR>(
        tq, head_view<TeacherTile>(args.in.teacher_q, block.batch, block.head, segment.first_query), first_row, rows);
    load_rows<kRows, SKL_SQ_VECTOR>(
        sq, head_view<StudentTile>(args.in.student_q, block.batch, block.head, segment.first_query), first_row, rows);
    cp_async_commit();
    fill_ring(fetch.ahead, fetch);

    TeacherCommon common_t{base + kQueryBytes + kStages * kStageBytes};
    StudentCommon common_s{common_t.vector + TeacherCommon::kBytes};
    if constexpr (kCommon) {
        const KeySample sample(Cursor<Mask>(mask, rows, steps), keys);
        common_t.find(fetch.teacher_view, sample);
        common_s.find(fetch.student_view, sample);
        __syncthreads();
    }
    const auto leave_common = [&common_t, &common_s, &fetch](int stage) {
        common_t.template leave<kColumns>(fetch.teacher(stage));
        common_s.template leave<kColumns>(fetch.student(stage));
    };

    const int lane = lane_id(), warp_row = (threadIdx.x / 32) * (16 * kWarpTiles);
    const int row = first_row + warp_row + Accumulators::first_row(lane);
    const Numbers numbers{args.teacher_numbers, args.student_numbers};
    RowState state[kLaneRows];
    start_rows(args, state, block.batch, block.head, segment, row);

    for (int i = 0; at.more(); ++i, at.next()) {
        advance_ring(i, fetch.ahead, fetch, leave_common);
        const int key = at.row(), stage = i % kStages;
        Strip<kTiles> t, s;
        scores<kTiles>(t, tq, warp_row, fetch.teacher(stage));
        scores<kTiles>(s, sq, warp_row, fetch.student(stage));
        absorb_tile<kTiles>(state, t, s, at.mask, row, at.full(first_row, end_row), key, numbers);
    }
    if constexpr (kCommon) {
        cp_async_wait<0>();  // a split without tiles has not waited for its queries
        __syncthreads();
        write_rows(args, block, segment, state, row,
                   Offsets{tq, sq, common_t, common_s, warp_row + Accumulators::first_row(lane), numbers});
    } else {
        write_rows(args, block, segment, state, row);
    }
}

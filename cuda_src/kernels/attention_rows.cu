// What gradients of attention read of each row: its log-sum-exp in base 2, and delta, the product of its result with
// the upstream gradient of that, less the upstream gradient of the log-sum-exp. kLanes threads to a row. A row without
// keys has an infinite log-sum-exp, so that all of its weights are 0, and a delta of 0: its upstream gradients, which
// may be anything, are not used. Where there is a place for it, the upstream gradient comes there too, compact, with
// zeros for rows without keys: tensor maps are made for it before it is known how the caller's lies in memory.
#include "common/args.cuh"
#include "common/math.cuh"
#include "tile/element.cuh"

constexpr int kLanes = SKL_LANES;
constexpr int kDim = SKL_VALUE_DIM;
using E = Element<SKL_A_ELEMENT>;
constexpr int kPiece = 16 / E::kBytes;  // elements of 16 bytes

template <class E>
__device__ inline float product(uint4 x, uint4 y) {
    const u32 a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (E::kBytes == 4) {
            sum = fmaf(__uint_as_float(a[i]), __uint_as_float(b[i]), sum);
        } else {
            const float2 p = E::widen(a[i]), q = E::widen(b[i]);
            sum = fmaf(p.x, q.x, fmaf(p.y, q.y, sum));
        }
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(SKL_THREADS)
    streamkl_attention_rows(const __grid_constant__ AttentionRowsArgs args) {
    const i64 all = static_cast<i64>(args.entries) * args.heads * args.queries;
    const i64 index = (static_cast<i64>(blockIdx.x) * SKL_THREADS + threadIdx.x) / kLanes;
    const bool inside = index < all;
    const i64 pair = inside ? index / args.queries : 0;
    const int r = static_cast<int>(inside ? index % args.queries : 0), lane = threadIdx.x % kLanes;
    const int b = static_cast<int>(pair / args.heads), h = static_cast<int>(pair % args.heads);
    const float lse = inside ? *row_vector(args.lse, b, h, r) : -infinity();
    const bool empty = lse == -infinity();
    const auto row_of = [b, h, r](const Tensor4& x) {
        return x.pointer + (b * x.batch + h * x.head + r * x.row) * E::kBytes;
    };
    const u64 out = row_of(args.saved_out), grad = row_of(args.grad), copy = args.copy + index * kDim * E::kBytes;
    const bool wide = vector_rows(args.saved_out, E::kBytes) && vector_rows(args.grad, E::kBytes);
    const int pieces = wide ? kDim / kPiece : 0;
    float sum = 0.f;
    for (int i = lane; inside && i < pieces; i += kLanes) {
        uint4 g = make_uint4(0, 0, 0, 0);
        if (!empty) {
            g = *reinterpret_cast<const uint4*>(grad + 16 * i);
            sum += product<E>(*reinterpret_cast<const uint4*>(out + 16 * i), g);
        }
        if (args.copy != 0) *reinterpret_cast<uint4*>(copy + 16 * i) = g;
    }
    for (int d = pieces * kPiece + lane; inside && d < kDim; d += kLanes) {
        float g = 0.f;
        if (!empty) {
            g = E::load(grad + d * args.grad.column * E::kBytes);
            sum = fmaf(E::load(out + d * args.saved_out.column * E::kBytes), g, sum);
        }
        if (args.copy != 0) E::store(copy + d * E::kBytes, g);
    }
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (!inside || lane > 0) return;
    if (args.grad_lse.pointer != 0 && !empty) sum -= *row_vector(args.grad_lse, b, h, r);
    AttentionRows rows;
    rows.locate(args.workspace, all);
    rows.lse[index] = empty ? infinity() : kLog2e * lse;
    rows.delta[index] = sum;
}

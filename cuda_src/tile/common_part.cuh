// Keys that share a large part. Adding one vector to all keys changes no probability, but the vector is rounded with
// every logit, and a query gradient gets it as often as the row's logit gradients fail to add up to 0. A block that
// owns queries therefore looks at a few keys before it starts; where these lie close together, far from 0, every thread
// takes the vector from the streamed keys that it has loaded itself, between their arrival and the barrier that shows
// them to others. A row's logits then lack the product of its query and the vector, which is known and goes to its
// log-sum-exps.
//
// Only float32 keys: 16-bit ones have exact products, and sums of logit gradients that are rounded to 16 bits are off
// by more. Nor where rows see other keys too, over which alone logit gradients add up to 0. The kernel has included its
// mask and its divergence before.
#pragma once
#include "ptx/thread.cuh"
#include "tile/load.cuh"
#include "tile/schedule.cuh"

constexpr int kSampled = 8;

// A few keys of those that any of the block's rows sees, at fractions i x the golden ratio of them, so that special
// keys at equal distances are not more than a few of these. They are the same for all splits of a row tile's keys.
struct KeySample {
    int key[kSampled];
    bool seen[kSampled];
    bool enough;

    // `at` is at the first of all tiles, `keys` the interval that the rows see. Lists are known a tile at a time. Where
    // a key is hidden, the lanes of a warp look for the next one that is not; every warp finds the same.
    __device__ KeySample(const Cursor<Mask>& at, Range keys) {
        if (Mask::kListed) keys.intersect({at.row(), at.row() + kColumns});
        const int count = keys.end - keys.begin;
        int found = 0;
        enough = at.more() && count > 0;
#pragma unroll
        for (int i = 0; i < kSampled; ++i) {
            key[i] = keys.begin + __umulhi(i * 0x9E3779B9u, static_cast<u32>(max(count, 0)));
            if constexpr (Mask::kSparse) {
                const int next = key[i] + lane_id();
                const u32 visible =
                    __ballot_sync(~0u, enough && next < keys.end && at.streamed_seen(at.rows.begin, at.rows.end, next));
                seen[i] = visible != 0;
                if (seen[i]) key[i] += __ffs(visible) - 1;
            } else {
                seen[i] = enough && at.streamed_seen(at.rows.begin, at.rows.end, key[i]);
            }
            found += seen[i];
        }
        enough = enough && 2 * found >= kSampled;
    }
};

// What the keys of one side, in tiles T and with score S, have in common: nothing, unless it does the same to all
// logits.
template <class T, class S>
struct CommonPart {
    static constexpr bool kPossible = kRowsAreQueries && T::kCode == kF32;
    static constexpr int kBytes = kPossible ? T::kDepth * 4 + 16 : 0;
    // Shared memory, kBytes: the vector, then whether there is one; in registers both would cost the main loop.
    u32 vector;

    __device__ bool large() const { return shared_float(vector + 4 * T::kDepth) != 0.f; }

    // All threads; a barrier must follow. The median of the sample is taken where it is longer than the distance
    // between the second smallest and the second largest: one or two outliers decide nothing, and more of them leave
    // the keys as they are. Every warp computes the same.
    __device__ void find(const HeadView& keys, const KeySample& sample) {
        if constexpr (kPossible) {
            float length = 0.f, spread = 0.f;
#pragma unroll 1
            for (int d = sample.enough ? lane_id() : T::kDepth; d < T::kDepth; d += 32) {
                float x[kSampled];
#pragma unroll
                for (int i = 0; i < kSampled; ++i) {
                    const float* const from =
                        reinterpret_cast<const float*>(keys.base + sample.key[i] * keys.row + d * keys.column);
                    x[i] = d >= T::kHeadDim ? 0.f : sample.seen[i] ? *from : not_a_number();
                }
                // In order; a NaN gives way to what it is compared with.
#pragma unroll
                for (int pass = 0; pass < kSampled; ++pass)
#pragma unroll
                    for (int i = pass & 1; i + 1 < kSampled; i += 2) {
                        const float low = fminf(x[i], x[i + 1]), high = fmaxf(x[i], x[i + 1]);
                        x[i] = low;
                        x[i + 1] = high;
                    }
                const float middle = x[kSampled / 2 - 1], distance = x[kSampled - 2] - x[1];
                length = fmaf(middle, middle, length);
                spread = fmaf(distance, distance, spread);
                if (threadIdx.x < 32) store(d, middle);
            }
#pragma unroll
            for (int step = 16; step > 0; step /= 2) {
                length += __shfl_xor_sync(~0u, length, step);
                spread += __shfl_xor_sync(~0u, spread, step);
            }
            if (threadIdx.x == 0) store(T::kDepth, S::kLinear && !kSomeKeys && length > spread);
        }
    }

    // Takes it from what this thread has loaded into the tile by load_rows<ROWS>, before others read that.
    template <int ROWS>
    __device__ void leave(T tile) const {
        if constexpr (kPossible) {
            if (!large()) return;
            constexpr Grid grid = grid_of<T>();
            const int thread = thread_again();
#pragma unroll 1
            for (int c = thread % grid.across; c < grid.chunks; c += grid.across) {
                const float4 v = shared_float4(vector + 16 * c);
#pragma unroll 4
                for (int r = thread / grid.across; r < (thread / grid.across < grid.down ? ROWS : 0); r += grid.down) {
                    float4& x = *reinterpret_cast<float4*>(__cvta_shared_to_generic(tile.address(r, 4 * c)));
                    x = make_float4(x.x - v.x, x.y - v.y, x.z - v.z, x.w - v.w);
                }
            }
        }
    }

    // The product with row `row` of the queries, for the four lanes of a row together.
    __device__ float times(T queries, int row) const {
        float sum = 0.f;
        if constexpr (kPossible) {
            if (!large()) return 0.f;
#pragma unroll 1
            for (int d = 4 * (lane_id() & 3); d < T::kDepth; d += 16) {
                const float4 q = shared_float4(queries.address(row, d)), v = shared_float4(vector + 4 * d);
                sum = fmaf(q.x, v.x, fmaf(q.y, v.y, fmaf(q.z, v.z, fmaf(q.w, v.w, sum))));
            }
            sum = Accumulators::sum_row(sum);
        }
        return sum;
    }

    // What the logits of that row lack: nothing where the score is not linear, for then no vector is taken.
    template <class N>
    __device__ float offset(T queries, int row, const N& numbers) const {
        if constexpr (S::kLinear) return S::logit(times(queries, row), numbers);
        return 0.f;
    }

private:
    __device__ void store(int d, float x) const {
        *reinterpret_cast<float*>(__cvta_shared_to_generic(vector + 4 * d)) = x;
    }
};

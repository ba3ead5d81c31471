// What the score tiles of the indexer's kernels share: endings, row states, and what becomes of the products of a head.
#pragma once
#include "common/args.cuh"
#include "common/config.cuh"
#include "common/math.cuh"
#include "@score"
#include "tile/fragment.cuh"
#include "tile/index_parts.cuh"
#include "tile/strip.cuh"

// What products mean: the teacher's those of a head, the student's their weighted sum over the heads of a group.
using TeacherScore = SKL_T_SCORE;
using StudentScore = SKL_S_SCORE;
static_assert(TeacherScore::kLinear && StudentScore::kLinear, "plan: what gradients read is had without a slope");

enum Ending { kEndsInRows = 0, kEndsInStrip = 1, kEndsInTarget = 2, kEndsInLse = 3, kEndsInList = 4 };
constexpr int kEnding = SKL_ENDING;
constexpr bool kTeacherIsGiven = SKL_TARGET;
constexpr bool kHasStudent = kEnding != kEndsInTarget && kEnding != kEndsInLse;
constexpr bool kGated = SKL_GATED;
constexpr int kWarpColumns = kColumns / kColumnWarps, kTiles = kWarpColumns / 8;
constexpr bool kKeepsGates = kTiledStrip && kGated && kEnding == kEndsInStrip;
static_assert(IndexerRowRegions::kStates == 4 && IndexerRowRegions::kRowStats == 4, "plan: a float4 for each row");
static_assert(!kTiledStrip || kWarpColumns % kStripTile == 0, "plan: a warp's columns are tiles of the strip");

// Sums of a row over keys: the student's reference and sum, the teacher's mass, and sum t (log2 t - (I - r)).
struct MassState {
    float r, l, mass, terms;
    __device__ void start() {
        r = kUnseenKey;
        l = mass = terms = 0.f;
    }
    static constexpr float kUnseenKey = -2e30f;  // finite, so that it can be subtracted
    __device__ void move(float to) {
        const float d = to - r;
        l *= exp2_approx(-d);
        terms = fmaf(d, mass, terms);
        r = to;
    }
    __device__ void merge(MassState other) {
        const float to = fmaxf(r, other.r);
        move(to);
        other.move(to);
        l += other.l;
        mass += other.mass;
        terms += other.terms;
    }
    __device__ MassState shuffle(int mask) const {
        return {__shfl_xor_sync(~0u, r, mask), __shfl_xor_sync(~0u, l, mask), __shfl_xor_sync(~0u, mass, mask),
                __shfl_xor_sync(~0u, terms, mask)};
    }
};

// t += exp2(logit - lse); of a head that counts nothing, whose lse is infinite, nothing is added whatever s is.
template <bool SOME_COUNT_NOTHING>
__device__ inline void add_masses(Strip<kTiles>& t, const Strip<kTiles>& s, const TeacherNumbers& n,
                                  const float (&lse)[2]) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float against = lse[Accumulators::row(e)];
            const float x = exp2_approx(TeacherScore::logit(s[0][i][e], n, against));
            if constexpr (SOME_COUNT_NOTHING) {
                if (against != infinity()) t[0][i][e] += fmaf(s[0][i][e], 0.f, x);
            } else {
                t[0][i][e] = fmaf(s[0][i][e], 0.f, t[0][i][e] + x);
            }
        }
}

__device__ inline void add_weighted(Strip<kTiles>& logits, const Strip<kTiles>& s, const float (&weight)[2]) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float x = s[0][n][e], w = weight[Accumulators::row(e)];
            logits[0][n][e] =
                kGated ? fmaf(x, 0.f, fmaf(w, fmaxf(x, 0.f), logits[0][n][e])) : fmaf(w, x, logits[0][n][e]);
        }
}

// The lane's elements of one of its rows of a tile: of key number i of them.
__device__ inline int key_of(int first, int i) {
    return first + 8 * (i / 2) + Accumulators::first_column(lane_id()) + i % 2;
}

// Of a tile that its rows see all of.
struct AllKeys {
    __device__ bool visible(int) const { return true; }
};

// Of products of S, with masses or without.
template <class S, bool WITH_MASS, class Numbers, class Keys>
__device__ inline void absorb(MassState& state, const Strip<kTiles>& t, const Strip<kTiles>& dots, Numbers n, int half,
                              const Keys& row, int first_key) {
    float x[2 * kTiles], to = state.r;
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
        const bool seen = row.visible(key_of(first_key, i));
        const float dot = dots[0][i / 2][Accumulators::element(half, i % 2)];
        // An infinite logit of the teacher shows; those of the student do already.
        x[i] = !seen ? MassState::kUnseenKey : WITH_MASS ? S::logit(dot, n) : fmaf(dot, 0.f, S::logit(dot, n));
        to = fmaxf(to, x[i]);
    }
    state.move(to);
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
        const bool seen = row.visible(key_of(first_key, i));
        const float above = x[i] - to;
        state.l += seen ? exp2_approx(above) : 0.f;
        if constexpr (WITH_MASS) {
            const float mass = seen ? t[0][i / 2][Accumulators::element(half, i % 2)] : 0.f;
            state.mass += mass;
            state.terms += mass == 0.f ? 0.f : mass * (log2_approx(mass) - above);
        }
    }
}

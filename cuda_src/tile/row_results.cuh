// What a forward, and what joins its splits, write of a row. Templates on the state, because states of a later pass
// differ.
#pragma once
#include "common/args.cuh"
#include "common/math.cuh"

// A state before any key; of a later pass, with what the pass before has of row `r`.
template <class State>
__device__ inline void start_row(const ForwardArgs& args, State& x, int b, int h, int r, bool inside) {
    x.start();
    if constexpr (State::kResumes) {
        if (inside) x.resume(row_vector(args.moments, b, h, r));
    }
}

// The results of row `r`; OFFSETS: its logits lacked so much in base 2.
template <bool OFFSETS, class State>
__device__ inline void write_row(const ForwardArgs& args, const State& x, int b, int h, int r, float2 offset) {
    float& value = *row_vector(args.value, b, h, r);
    float& lse_t = *row_vector(args.teacher_lse, b, h, r);
    float& lse_s = *row_vector(args.student_lse, b, h, r);
    if constexpr (State::kResumes) {
        x.finish(value, row_vector(args.moments, b, h, r));
        if (!is_finite(value)) {
            lse_t = lse_s = not_a_number();
            if constexpr (kEntropy) *row_vector(args.entropy, b, h, r) = not_a_number();
        }
    } else {
        x.finish(value, lse_t, lse_s);
        if constexpr (OFFSETS) add_offsets(value, lse_t, lse_s, offset.x, offset.y);
    }
    if constexpr (State::kMoments > 0 && !State::kResumes) x.moments(row_vector(args.moments, b, h, r), lse_t);
    if constexpr (kEntropy && !State::kResumes) *row_vector(args.entropy, b, h, r) = x.entropy(lse_t);
}

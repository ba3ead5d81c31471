// What a query row contributes to the gradients of its logits, as gradient kernels keep it. The kernel has included its
// mask before and names its logit gradient.
#pragma once
#include "common/args.cuh"
#include "common/math.cuh"

constexpr int kTopExponent = 14;  // scaled gradients of a narrow type stay below 2^15, half of its largest number

struct RowTerms {
    float lse_t, lse_s;  // base 2
    float weight;        // factor on the logit gradient
    float value;         // base 2
};

// One row's saved statistics from global memory; zeros for a row that sees no key, whose memory may hold anything.
template <class Logit>
__device__ inline RowTerms read_terms(const GradientArgs& args, const Mask& mask, int b, int h, int q) {
    RowTerms x = {0.f, 0.f, 0.f, 0.f};
    if (q >= args.n.queries || mask.keys_of(q, q + 1).empty()) return x;
    x.lse_t = kLog2e * args.teacher_lse.at(b, h)[q * args.teacher_lse.row];
    x.lse_s = kLog2e * args.student_lse.at(b, h)[q * args.student_lse.row];
    x.weight = args.grad.at(b, h)[q * args.grad.row];
    x.value = Logit::kNeedsValue ? kLog2e * args.value.at(b, h)[q * args.value.row] : 0.f;
    return x;
}

// What a query row contributes to the gradients of its logits, as gradient kernels keep it. The kernel has included its
// mask, its divergence and the scores before.
#pragma once
#include "common/args.cuh"
#include "common/math.cuh"
#include "tile/fragment.cuh"
#include "tile/logits.cuh"

// What a query row contributes to the gradients of its logits.
struct RowStats {
    float lse_t, lse_s;  // base 2; then what `turn_references` makes of them
    float weight;        // factor on the logit gradient
    float value;         // base 2
};

// Whether gradients want nothing of a side's log-sum-exp but the factor of its weights.
template <int SIDE>
constexpr bool kWantsFactor = LogitGradient<SKL_GRAD_SIDE>::kOfWeights && Score<SIDE>::kWeighs;

// What they want of it; a row that is not there keeps saying so.
template <int SIDE>
__device__ inline float reference_of(float lse, Numbers numbers) {
    if constexpr (kWantsFactor<SIDE>)
        return lse == -infinity() ? lse : Score<SIDE>::factor_of(numbers.of<SIDE>(), lse);
    else
        return lse;
}

__device__ inline void turn_references(RowStats& row, Numbers numbers) {
    row.lse_t = reference_of<kTeacher>(row.lse_t, numbers);
    row.lse_s = reference_of<kStudent>(row.lse_s, numbers);
}

// The weight of a side, of its accumulator and reference.
template <int SIDE>
__device__ inline float weight_of(float y, float reference, Numbers numbers) {
    if constexpr (Score<SIDE>::kWeighs)
        return Score<SIDE>::weight(y, reference);
    else
        return exp2_approx(Score<SIDE>::logit(y, numbers.of<SIDE>(), reference));
}

// The derivative of a row's value by one dot product of a side, up to a constant and without the weight. Of
// accumulators that have been turned, as the row's log-sum-exps.
template <int SIDE>
__device__ inline float dot_gradient(float t, float s, const RowStats& row, Numbers numbers) {
    if constexpr (kWantsFactor<SIDE>) {
        const float other =
            SIDE == kTeacher ? weight_of<kStudent>(s, row.lse_s, numbers) : weight_of<kTeacher>(t, row.lse_t, numbers);
        return SIDE == kTeacher ? Score<SIDE>::by_dot(t, row.lse_t, other) : Score<SIDE>::by_dot(s, row.lse_s, other);
    }
    float gradient;
    if constexpr (kWantsFactor<1 - SIDE>) {
        gradient = LogitGradient<SIDE>::weigh(weight_of<kTeacher>(t, row.lse_t, numbers),
                                              weight_of<kStudent>(s, row.lse_s, numbers));
    } else {
        const float x = Score<kTeacher>::logit(t, numbers.teacher, row.lse_t);
        const float y = Score<kStudent>::logit(s, numbers.student, row.lse_s);
        gradient = LogitGradient<SIDE>::evaluate(x, y, row.value);
    }
    // `by_dot` of tile/logits.cuh says the same; with the call, the compiler orders the instructions of the one-pass
    // backward anew.
    if constexpr (Score<SIDE>::kLinear)
        return gradient;
    else
        return gradient * Score<SIDE>::slope(SIDE == kTeacher ? t : s, numbers.of<SIDE>());
}

// That constant; `scale` is the side's plain one.
template <int SIDE>
__device__ inline float gradient_factor(float scale) {
    return LogitGradient<SIDE>::kFactor * Score<SIDE>::factor(scale);
}

constexpr int kSide = SKL_GRAD_SIDE;  // the side that is differentiated
using Logit = LogitGradient<kSide>;

// What one side is made of.
template <int SIDE, class Teacher, class Student>
struct OfSide {
    using Type = Teacher;
};
template <class Teacher, class Student>
struct OfSide<kStudent, Teacher, Student> {
    using Type = Student;
};

// Gradients of a type of narrow exponent are scaled by powers of two, their weights by 2^(kTopExponent - exponent).
constexpr int kTopExponent = 14;  // they stay below 2^15, half of the type's largest number
constexpr int kLowestExponent = kTopExponent - 126;

// One row's saved statistics from global memory; zeros for a row that sees no key, whose memory may hold anything, but
// for a log-sum-exp that will be asked whether the row is there. Where intervals cannot tell, the forward's log-sum-exp
// does: no other row has an infinite one. Without branches, so that the reads of several rows are under way together:
// such a row reads that of the head's first one, which is there even where a sequence without rows ends the array.
__device__ inline RowStats read_row_stats(const GradientArgs& args, const Mask& mask, int b, int h, int q) {
    const bool inside = (q < mask.segment.queries) & !mask.keys_of(q, q + 1).empty();
    const int row = inside ? mask.segment.first_query + q : 0;
    const float lse_t = *row_vector(args.teacher_lse, b, h, row);
    const float lse_s = *row_vector(args.student_lse, b, h, row);
    const float weight = *row_vector(args.grad, b, h, row);
    const float value = Logit::kNeedsValue ? *row_vector(args.value, b, h, row) : 0.f;
    const bool seen = inside & !(Mask::kSparse && lse_t == -infinity());
    const float unseen = Mask::kPicksQueries && !kRowsAreQueries ? -infinity() : 0.f;
    return {seen ? kLog2e * lse_t : unseen, seen ? kLog2e * lse_s : 0.f, seen ? weight : 0.f,
            seen ? kLog2e * value : 0.f};
}

// Stats of COLUMNS streamed queries, as floats: all log-sum-exps of the teacher, all of the student, the weights and,
// where the logit gradient needs them, the values. A lane's accumulators belong to pairs of queries, and the eight
// lanes that share a pair get its two floats in one wavefront; of four floats side by side they would take four.
template <int COLUMNS>
struct RowStatsLayout {
    static constexpr int kPerQuery = Logit::kNeedsValue ? 4 : 3;
    static constexpr int kFloats = kPerQuery * COLUMNS;

    __device__ static void write(float* tile, int column, const RowStats& x) {
        tile[column] = x.lse_t;
        tile[COLUMNS + column] = x.lse_s;
        tile[2 * COLUMNS + column] = x.weight;
        if constexpr (Logit::kNeedsValue) tile[3 * COLUMNS + column] = x.value;
    }
    __device__ static float weight(const float* tile, int column) { return tile[2 * COLUMNS + column]; }
    // Of a pair of neighbouring columns, from shared memory.
    __device__ static void read_lse(float (&lse_t)[2], u32 tile, int pair) {
        const float2 x = shared_float2(tile + 8 * pair);
        lse_t[0] = x.x;
        lse_t[1] = x.y;
    }
    __device__ static void read(RowStats (&x)[2], u32 tile, int pair) {
        const auto two = [tile, pair](int vector) { return shared_float2(tile + 4 * COLUMNS * vector + 8 * pair); };
        const float2 lse_t = two(0), lse_s = two(1), weight = two(2);
        const float2 value = Logit::kNeedsValue ? two(3) : float2{0.f, 0.f};
        x[0] = {lse_t.x, lse_s.x, weight.x, value.x};
        x[1] = {lse_t.y, lse_s.y, weight.y, value.y};
    }
};

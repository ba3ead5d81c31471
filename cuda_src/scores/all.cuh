// The scores of both sides. The kernel has included their headers, and its divergence, before.
#pragma once
#include "scores/interface.cuh"

template <int SIDE>
struct ScoreOf {
    using Type = SKL_T_SCORE;
};
template <>
struct ScoreOf<kStudent> {
    using Type = SKL_S_SCORE;
};
template <int SIDE>
using Score = typename ScoreOf<SIDE>::Type;

// What the arguments have of either side for them.
struct Numbers {
    TeacherNumbers teacher;
    StudentNumbers student;
    template <int SIDE>
    __device__ const auto& of() const {
        if constexpr (SIDE == kTeacher)
            return teacher;
        else
            return student;
    }
};

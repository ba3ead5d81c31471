"""The divergence between two attention distributions over the same keys, a teacher's and a student's."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

from .interface import Op, OperandSpec, SavedSpec, Task

InputName = Literal["teacher_q", "teacher_k", "student_q", "student_k"]
Wrt: TypeAlias = tuple[InputName, ...]
INPUT_NAMES: Final[Wrt] = get_args(InputName)
STUDENT: Final[Wrt] = ("student_q", "student_k")

OP = Op(
    name="attention_kl",
    operands=(
        OperandSpec("teacher_q", "teacher", "q", "H", "D_t", max_dim=576),
        OperandSpec("teacher_k", "teacher", "k", "H_t", "D_t", max_dim=576),
        OperandSpec("student_q", "student", "q", "H", "D_s", max_dim=256),
        OperandSpec("student_k", "student", "k", "H_s", "D_s", max_dim=256),
    ),
    like="student_q",
    rows=("kl", "teacher_lse", "student_lse"),
    log_sum_exps=("teacher_lse", "student_lse"),
    asked_rows=(("entropy", "entropy", "teacher_entropy"),),
    ruled_rows=("moments",),
    saved=(
        SavedSpec("grad", "kl"),
        SavedSpec("teacher_lse", "teacher_lse"),
        SavedSpec("student_lse", "student_lse"),
        SavedSpec("kl", "kl", optional=True, field="value", instead="teacher_lse"),
        SavedSpec("moments", "moments", optional=True),
    ),
    wrt=STUDENT,
    forward=Task("forward", outputs=(("value", "kl"), ("teacher_lse", "teacher_lse"), ("student_lse", "student_lse"))),
    gradients=(
        Task("gradient", "teacher", "q", (("out", "teacher_q"),)),
        Task("gradient", "teacher", "k", (("out", "teacher_k"),)),
        Task("gradient", "student", "q", (("out", "student_q"),)),
        Task("gradient", "student", "k", (("out", "student_k"),)),
    ),
    fused=(
        Task("fused", "teacher", "k", (("out_q", "teacher_q"), ("out", "teacher_k"))),
        Task("fused", "student", "k", (("out_q", "student_q"), ("out", "student_k"))),
    ),
    max_gradient_dim=256,
    rules=("divergence", "score", "mask"),
    problem_fields=(
        ("divergence", "divergence"),
        ("return_entropy", "entropy"),
        ("some_keys", "some_keys"),
        ("wide_gradients", "wide_gradients"),
        ("sunk", "sunk"),
    ),
)

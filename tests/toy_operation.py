"""An operation that is none of the package's, for what goes by records: means of values by a softmax, and a weight of
each row that may be absent. It has two results, one of them with columns, both differentiable, and a constant operand.
"""

from __future__ import annotations

from streamkl_cupy.ops import Op, OperandSpec, SavedSpec, Task

MEANS = Op(
    name="means",
    operands=(
        OperandSpec("query", "only", "q", "H", "D", max_dim=64),
        OperandSpec("key", "only", "k", "H_k", "D", max_dim=64),
        OperandSpec("value", "only", "k", "H_k", "D_v", max_dim=64, extra=True),
        OperandSpec("weight", "only", "q", "H", "", extra=True, optional=True),
    ),
    like="query",
    rows=("lse",),
    log_sum_exps=("lse",),
    vectors=(("out", "D_v"),),
    saved=(
        SavedSpec("grad", "out"),
        SavedSpec("lse", "lse"),
        SavedSpec("grad_lse", "lse", optional=True),
    ),
    wrt=("query", "value"),
    forward=Task("forward", outputs=(("out", "out"), ("lse", "lse"))),
    gradients=tuple(
        Task("gradient", "only", rows, (("out", x),)) for x, rows in (("query", "q"), ("value", "k"), ("weight", "q"))
    ),
    fused=(),
    max_gradient_dim=64,
    rules=("mask",),
)

"""Attention itself: of each row the mean of values, weighed by a softmax over the keys that it sees."""

from __future__ import annotations

from typing import Final, Literal, TypeAlias, get_args

from .interface import Op, OperandSpec, SavedSpec, Task

AttentionInput = Literal["query", "key", "value"]
AttentionWrt: TypeAlias = tuple[AttentionInput, ...]
ATTENTION_INPUTS: Final[AttentionWrt] = get_args(AttentionInput)

OP = Op(
    name="sparse_attention",
    operands=(
        OperandSpec("query", "attention", "q", "H", "D", max_dim=256),
        OperandSpec("key", "attention", "k", "H_k", "D", max_dim=256),
        OperandSpec("value", "attention", "k", "H_k", "D_v", max_dim=256, extra=True),
    ),
    like="query",
    rows=("lse",),
    log_sum_exps=("lse",),
    vectors=(("out", "D_v"),),
    saved=(
        SavedSpec("grad", "out"),
        SavedSpec("out", "out", field="saved_out"),
        SavedSpec("lse", "lse"),
        SavedSpec("grad_lse", "lse", optional=True),
    ),
    wrt=ATTENTION_INPUTS,
    forward=Task("attention", outputs=(("out", "out"), ("lse", "lse"))),
    gradients=(
        Task("attention_gradient", "attention", "q", (("out", "query"),)),
        Task("attention_gradient", "attention", "k", (("out", "key"),)),
        Task("attention_gradient", "attention", "k", (("out_value", "value"),)),
    ),
    fused=(
        Task("attention_fused", "attention", "k", (("out_q", "query"), ("out", "key"), ("out_value", "value"))),
        Task("attention_gradient", "attention", "k", (("out", "key"), ("out_value", "value"))),
    ),
    max_gradient_dim=256,
    rules=("score", "mask"),
)

"""The divergence of a lightning indexer's distribution from a teacher's, summed over the heads of a group.

Its arrays are more kinds than queries and keys, and most of them need not be there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final, Literal, TypeAlias, get_args

from .interface import Elements, Op, OperandSpec, SavedSpec, Task

IndexName = Literal["index_q", "index_k", "index_weights"]
IndexWrt: TypeAlias = tuple[IndexName, ...]
WRT: Final[IndexWrt] = get_args(IndexName)
MAX_TEACHER_DIM, MAX_INDEX_DIM, MAX_INDEX_HEADS = 576, 256, 128


def array(name: str, letters: str, elements: Elements, side: str = "", may_lack: str = "") -> OperandSpec:
    """One of a call, by the letters of its axes; only the student's queries and keys are in every call.

    B batch, M query rows, N keys, G groups of heads; H and T heads and columns of the teacher, I and D of the student,
    K, L and J key heads of the teacher, of its rotary part, and of the student, R columns of that part; C chosen keys,
    S ends of sequences.
    """
    before, rows, dim = letters.partition("M" if "M" in letters else "N")
    heads = before.removeprefix("B")
    if not rows:
        heads, dim = "", letters
    most = {"T": MAX_TEACHER_DIM, "R": MAX_TEACHER_DIM, "D": MAX_INDEX_DIM}.get(dim, 0)
    here = name in ("index_q", "index_k")
    extra = name not in ("teacher_q", "teacher_k", "index_q", "index_k")
    which: Literal["q", "k", ""] = "q" if rows == "M" else "k" if rows else ""
    return OperandSpec(name, side, which, heads, dim, most, extra, not here, elements=elements, may_lack=may_lack)


OP = Op(
    name="indexer_kl",
    operands=(
        array("teacher_q", "BHMT", "teacher", "teacher"),
        array("teacher_k", "BKNT", "teacher", "teacher"),
        array("index_q", "BIMD", "index", "index"),
        array("index_k", "BJND", "index", "index", may_lack="J"),
        array("index_weights", "BIM", "number", "index"),
        array("teacher_lse", "BHM", "row number", "teacher"),
        array("teacher_q_rope", "BHMR", "teacher", "teacher"),
        array("teacher_k_rope", "BLNR", "teacher", "teacher"),
        array("target", "BGMN", "row number", "teacher", may_lack="G"),
        array("key_start", "BM", "integer"),
        array("key_end", "BM", "integer"),
        array("key_mask", "BN", "bool"),
        array("topk_indices", "BGMC", "integer", may_lack="G"),
        array("topk_length", "BGM", "integer", may_lack="G"),
        array("cu_seqlens_q", "S", "integer"),
        array("cu_seqlens_k", "S", "integer"),
    ),
    like="index_q",
    rows=("kl", "index_lse", "target_sum"),
    log_sum_exps=("index_lse", "made_lse"),
    # The teacher's log-sum-exps, of each of its heads, where none were given.
    ruled_rows=("made_lse",),
    saved=(
        SavedSpec("grad", "kl"),
        SavedSpec("index_lse", "index_lse"),
        SavedSpec("target_sum", "target_sum"),
        SavedSpec("made_lse", "made_lse", optional=True),
    ),
    wrt=WRT,
    forward=Task("indexer_score", outputs=(("out_value", "kl"), ("out_lse", "index_lse"), ("out_mass", "target_sum"))),
    gradients=(
        Task("indexer_query", "index", "q", (("out_q", "index_q"),)),
        Task("indexer_key", "index", "k", (("out_k", "index_k"),)),
        Task("indexer_query", "index", "q", (("out_weights", "index_weights"),)),
    ),
    fused=(),
    max_gradient_dim=MAX_INDEX_DIM,
    rules=("score",),
    one_batch=False,
)

# What the teacher's heads add up to, of some of the rows.
TARGET = replace(
    OP,
    name="indexer_target",
    operands=tuple(
        x._replace(optional=x.name not in ("teacher_q", "teacher_k"))
        for x in OP.operands
        if x.side != "index" and x.name != "target"
    ),
    like="teacher_q",
    rows=("target",),
    log_sum_exps=(),
    ruled_rows=(),
    saved=(),
    wrt=(),
    forward=Task("indexer_score", outputs=(("target", "target"),)),
    gradients=(),
)

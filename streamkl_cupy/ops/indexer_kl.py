"""The divergence of a lightning indexer's distribution from a teacher's, summed over the heads of a group.

Its arrays are more kinds than queries and keys, and most of them need not be there, so it has a record of its own: each
array by the letters of its axes, in the order of "bhnd".
"""

from __future__ import annotations

from typing import Final, Literal, NamedTuple, TypeAlias, get_args

IndexName = Literal["index_q", "index_k", "index_weights"]
IndexWrt: TypeAlias = tuple[IndexName, ...]
WRT: Final[IndexWrt] = get_args(IndexName)
NAME: Final = "indexer_kl"


class ArraySpec(NamedTuple):
    """One array of a call."""

    name: str
    axes: str
    """B batch, M query rows, N keys, G groups of heads; H and T heads and columns of the teacher, I and D of the
    student, K, L and J key heads of the teacher, of its rotary part, and of the student, R columns of that part;
    C chosen keys, S ends of sequences."""
    kind: Literal["teacher", "index", "number", "row number", "bool", "integer"]
    """What its elements are; those of the teacher, and those of the student, have one type."""
    axis_may_lack: str = ""
    """The letter of an axis that may be left out where its extent is 1."""


ARRAYS: Final = (
    ArraySpec("teacher_q", "BHMT", "teacher"),
    ArraySpec("teacher_k", "BKNT", "teacher"),
    ArraySpec("index_q", "BIMD", "index"),
    ArraySpec("index_k", "BJND", "index", "J"),
    ArraySpec("index_weights", "BIM", "number"),
    ArraySpec("teacher_lse", "BHM", "row number"),
    ArraySpec("teacher_q_rope", "BHMR", "teacher"),
    ArraySpec("teacher_k_rope", "BLNR", "teacher"),
    ArraySpec("target", "BGMN", "row number", "G"),
    ArraySpec("key_start", "BM", "integer"),
    ArraySpec("key_end", "BM", "integer"),
    ArraySpec("key_mask", "BN", "bool"),
    ArraySpec("topk_indices", "BGMC", "integer", "G"),
    ArraySpec("topk_length", "BGM", "integer", "G"),
    ArraySpec("cu_seqlens_q", "S", "integer"),
    ArraySpec("cu_seqlens_k", "S", "integer"),
)
SPECS: Final = {spec.name: spec for spec in ARRAYS}
LIKE: Final = "index_q"
"""Whose framework, device and stream are the call's."""
ROWS: Final = ("kl", "index_lse", "target_sum")
"""Results with one value for each row of each group; the first is what reductions take."""
MAX_TEACHER_DIM, MAX_INDEX_DIM, MAX_INDEX_HEADS = 576, 256, 128

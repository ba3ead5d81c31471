"""The divergence from a distribution that is given, in place of a teacher: the functions, with their documentation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from . import api
from .advice.signatures import public
from .api import documented, loss, outside_programs, value_and_grad
from .ops import ATTENTION_KL_TO
from .problem import STUDENT, Wrt
from .results import A, KLEntropy, KLForwardMass, KLForwardRows, KLGradients, KLSinkGradients

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .api import AnyPlan
    from .options import Layout, Precision, Reduction, SharedToTargets
    from .patterns import BlockPattern

__all__ = [
    "attention_kl_to",
    "attention_kl_to_plan",
    "attention_kl_to_value_and_grad",
    "attention_kl_to_warmup",
]


def _loss(operands: tuple[Any, ...], given: dict[str, Any], **own: Any) -> Any:
    return loss(operands, given, op=ATTENTION_KL_TO, **own)


def _value_and_grad(operands: tuple[Any, ...], given: dict[str, Any], **own: Any) -> Any:
    return value_and_grad(operands, given, op=ATTENTION_KL_TO, **own)


def _plan(operands: tuple[Any, ...], given: dict[str, Any], **own: Any) -> Any:
    return api.plan_of(ATTENTION_KL_TO, operands, given, **own)


def _warmup(operands: tuple[Any, ...], given: dict[str, Any], **own: Any) -> None:
    api.warm_up(ATTENTION_KL_TO, operands, given, **own)


@overload
def attention_kl_to(
    target: A,
    student_q: A,
    student_k: A,
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[False] = False,
    **options: Unpack[SharedToTargets],
) -> A: ...
@overload
def attention_kl_to(
    target: A,
    student_q: A,
    student_k: A,
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[True],
    **options: Unpack[SharedToTargets],
) -> KLEntropy[A]: ...
@overload
def attention_kl_to(
    target: A, student_q: A, student_k: A, *, return_lse: Literal[True], **options: Unpack[SharedToTargets]
) -> KLForwardMass[A] | KLForwardRows[A]: ...
@public(_loss, op=ATTENTION_KL_TO)
@documented
def attention_kl_to(
    target: Any,
    student_q: Any,
    student_k: Any,
    *,
    log_target: bool = False,
    student_scale: float | None = None,
    student_score: str = "dot",
    student_softcap: float | None = None,
    causal: bool = False,
    q_offset: int | None = None,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Any = None,
    query_lengths: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    key_mask: Any = None,
    query_mask: Any = None,
    block_mask: BlockPattern | None = None,
    divergence: str = "kl",
    jsd_beta: float | None = None,
    smoothing: float | None = None,
    row_weight: Any = None,
    reduction: Reduction = "none",
    layout: Layout = "bhnd",
    precision: Precision = "highest",
    return_lse: bool = False,
    return_entropy: bool = False,
    deterministic: bool | None = None,
    student_sink_logits: Any = None,
) -> Any:
    """KL divergence of a student's attention rows from probabilities that are given, which are read a tile at a time.

    For each batch entry, head and query row, over the keys that the row sees,

        P = target    Q = softmax(student_scale q_s k_s^T)    KL = sum_j P_j (log P_j - log Q_j)

    <SOURCE>
    For supervision that is no model's attention, maps that were resized, targets that were kept from before: what takes
    memory is the target, which is the caller's, and nothing of its size is made beside it. Differentiable to first
    order by the student, as `attention_kl` is; the target is a constant.

    A row's probabilities sum to 1 over the keys that it sees. On the CPU a row that has a negative one, another sum or
    some on a hidden key raises, by more than rounding and 1 %. On a GPU values are not looked at: what lies on hidden
    keys has no part, the rest is divided by its sum, return_lse says what that is, and a row that has nothing left is
    NaN. Rows that see no key may hold anything.

    Args:
        target: Probabilities, (B, H, M, N), or (B, 1, M, N) for all heads alike; fewer axes as the student's queries.
            bfloat16, float16, float32, or float64 on the CPU, whatever the student is. Any strides; nothing is copied.
            With layout="bnhd" (B, M, H, N); with cu_seqlens_q (rows, H, keys), of which a sequence has its own keys.
        student_q: Student queries, (B, H, M, D): B batch, H heads, M query rows. D is at most 256.
        student_k: Student keys, (B, H_k, N, D), same dtype as student_q. H_k divides H: query head h reads key head
            h // (H / H_k).
        log_target: The target holds natural logarithms of probabilities; -inf is that of 0.
        <STUDENT>
        <MASKS>
        <RULES>
        <WEIGHT>
        reduction: "none" (w KL per row), "sum", or "mean" = sum(w KL) / sum(w) over rows that see a key, 0 where that
            is 0 / 0.
        return_lse: Also return the log-sum-exps, as constants, and what lies on the keys that a row sees of its
            probabilities, which is 1 but for rounding where nothing is hidden.
        student_sink_logits: A logit per query head, (H,), that takes mass of the student's and has no value; see
            `attention_kl`.
        return_entropy: Also return the entropy of each row of the target, nats, as a constant.

    Returns:
        KL in nats, (B, H, M) or without axes, in float32 (float64 where an input is), of the inputs' framework; with
        return_lse a `KLForwardMass`, with return_entropy alone a `KLEntropy`, and a `KLForwardRows` where there is
        more. "reverse_kl" is infinite where a probability is 0 on a key that the student sees: that row is NaN.

    Accuracy:
        That of `attention_kl`.

    Raises:
        <ERRORS>

    Example:
        >>> import numpy as np, streamkl_cupy
        >>> target, q, k = np.array([[0.25, 0.75]]), np.ones((1, 1)), np.zeros((2, 1))
        >>> round(float(streamkl_cupy.attention_kl_to(target, q, k)[0]), 4)  # KL((1/4, 3/4) || (1/2, 1/2))
        0.1308
    """


@public(_value_and_grad, outside_programs=outside_programs, op=ATTENTION_KL_TO)
@documented
def attention_kl_to_value_and_grad(  # type: ignore[empty-body]  # as are all: see @public
    target: A,
    student_q: A,
    student_k: A,
    *,
    log_target: bool = False,
    student_scale: float | None = None,
    student_score: str = "dot",
    student_softcap: float | None = None,
    causal: bool = False,
    q_offset: int | None = None,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Any = None,
    query_lengths: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    key_mask: Any = None,
    query_mask: Any = None,
    block_mask: BlockPattern | None = None,
    divergence: str = "kl",
    jsd_beta: float | None = None,
    smoothing: float | None = None,
    row_weight: Any = None,
    reduction: Reduction = "mean",
    wrt: Wrt = STUDENT,
    layout: Layout = "bhnd",
    precision: Precision = "highest",
    deterministic: bool | None = None,
    student_sink_logits: Any = None,
) -> tuple[A, KLGradients[A] | KLSinkGradients[A]]:
    """A loss over all rows and its gradients by the student, outside every autograd: one training step in one call.

    loss = sum(w KL) or sum(w KL) / sum(w), and its derivatives by the inputs named in `wrt`; see `attention_kl_to`.
    <SOURCE>

    Args:
        target: Probabilities, as `attention_kl_to` takes them.
        student_q: Student queries, (B, H, M, D).
        student_k: Student keys, (B, H_k, N, D).
        log_target: The target holds natural logarithms of probabilities; -inf is that of 0.
        <STUDENT>
        <MASKS>
        <RULES>
        <WEIGHT>
        reduction: "mean" or "sum"; "none" has no single gradient. A weight of each row is its upstream gradient.
        wrt: "student_q", "student_k" or both, as a tuple.
        student_sink_logits: A logit per query head, (H,), that takes mass of the student's and has no value; see
            `attention_kl`.

    Returns:
        The loss in nats without axes, and `KLGradients`; with a sink `KLSinkGradients`, which has its own too.

    Raises:
        <ERRORS>

    Example:
        >>> import numpy as np, streamkl_cupy
        >>> target, q, k = np.array([[0.25, 0.75]]), np.ones((1, 1)), np.zeros((2, 1))
        >>> loss, grads = streamkl_cupy.attention_kl_to_value_and_grad(target, q, k)
        >>> grads.student_k.ravel().round(6).tolist()  # Q - P
        [0.25, -0.25]
    """


@public(_plan, op=ATTENTION_KL_TO)
@documented
def attention_kl_to_plan(  # type: ignore[empty-body]  # as are all: see @public
    target: Any,
    student_q: Any,
    student_k: Any,
    *,
    log_target: bool = False,
    student_scale: float | None = None,
    student_score: str = "dot",
    student_softcap: float | None = None,
    causal: bool = False,
    q_offset: int | None = None,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Any = None,
    query_lengths: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    key_mask: Any = None,
    query_mask: Any = None,
    block_mask: BlockPattern | None = None,
    divergence: str = "kl",
    jsd_beta: float | None = None,
    smoothing: float | None = None,
    wrt: Wrt = STUDENT,
    arch: str | None = None,
    layout: Layout = "bhnd",
    precision: Precision = "highest",
    return_entropy: bool = False,
    deterministic: bool | None = None,
) -> AnyPlan:
    """What `attention_kl_to` with these arguments would run, printable; see `plan`.

    <SOURCE>

    Args:
        target: Probabilities, as `attention_kl_to` takes them, or anything with a shape and a dtype in their place.
        student_q: Student queries, or the same.
        student_k: Student keys, or the same.
        log_target: The target holds natural logarithms of probabilities; -inf is that of 0.
        <STUDENT>
        <MASKS>
        <RULES>
        wrt: The gradients that are meant: "student_q", "student_k" or both, as a tuple.
        arch: Plan for another GPU, such as "sm_80"; by default for the device of the arrays.
        return_entropy: The entropy of each row of the target is wanted too.

    Returns:
        A plan, frozen and printable.

    Raises:
        <ERRORS>

    Example:
        >>> import numpy as np, streamkl_cupy
        >>> target, q = np.empty((1, 1, 512, 512), np.float32), np.empty((1, 8, 512, 64), np.float16)
        >>> "teacher: given, float32, 1 head" in str(streamkl_cupy.attention_kl_to_plan(target, q, q, arch="sm_90"))
        True
    """


@public(_warmup, op=ATTENTION_KL_TO)
@documented
def attention_kl_to_warmup(
    target: Any,
    student_q: Any,
    student_k: Any,
    *,
    log_target: bool = False,
    student_scale: float | None = None,
    student_score: str = "dot",
    student_softcap: float | None = None,
    causal: bool = False,
    q_offset: int | None = None,
    window: tuple[int | None, int | None] | None = None,
    key_lengths: Any = None,
    query_lengths: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    key_mask: Any = None,
    query_mask: Any = None,
    block_mask: BlockPattern | None = None,
    divergence: str = "kl",
    jsd_beta: float | None = None,
    smoothing: float | None = None,
    wrt: Wrt = STUDENT,
    layout: Layout = "bhnd",
    precision: Precision = "highest",
    return_entropy: bool = False,
    deterministic: bool | None = None,
) -> None:
    """Compile and load all that `attention_kl_to` with these arguments would run; see `warmup`.

    <SOURCE>

    Args:
        target: Probabilities, as `attention_kl_to` takes them, or anything with a shape and a dtype in their place.
        student_q: Student queries, or the same.
        student_k: Student keys, or the same.
        log_target: The target holds natural logarithms of probabilities; -inf is that of 0.
        <STUDENT>
        <MASKS>
        <RULES>
        wrt: The gradients that are meant: "student_q", "student_k" or both, as a tuple.
        return_entropy: The entropy of each row of the target is wanted too.

    Returns:
        None, when everything is in place.

    Raises:
        <ERRORS>

    Example:
        >>> import numpy as np, streamkl_cupy
        >>> target, q = np.empty((1, 1, 64, 64), np.float32), np.empty((1, 8, 64, 64), np.float32)
        >>> streamkl_cupy.attention_kl_to_warmup(target, q, q)
    """

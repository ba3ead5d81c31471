"""The public functions of the indexer: what each does with a call, and below its signature and documentation."""

from __future__ import annotations

import importlib
from typing import Any, TypeAlias

from .. import arrays, frameworks, validate
from ..advice.signatures import documented_by, public
from ..api import outside_programs
from ..arguments import a_kind_of, choice
from ..call import Call, Ready, SavedArrays, runner_for
from ..frameworks.base import FRAMEWORKS
from ..kernels import gpus
from ..numpy_backend import NumPyPlan
from ..ops import INDEXER_KL, INDEXER_TARGET
from ..ops.indexer_kl import WRT, IndexWrt
from ..options import REDUCTIONS, Layout, Reduction
from ..problem import Device
from ..rules import reductions
from . import problem
from .call import call_of, split
from .losses import IndexLoss, inactive, reduced
from .plan import IndexerPlan, gradients_built, make_plan
from .problem import IndexProblem
from .results import IndexerForward, IndexerGradients

__all__ = [
    "IndexerForward",
    "IndexerGradients",
    "indexer_kl",
    "indexer_kl_backward",
    "indexer_kl_forward",
    "indexer_kl_plan",
    "indexer_kl_value_and_grad",
    "indexer_kl_warmup",
    "indexer_target",
]

AnyPlan: TypeAlias = IndexerPlan | NumPyPlan

# Said once, read in the help of every function.
_TEXT = {
    "TEACHER": """teacher_q: Teacher queries, (B, H, M, D_t): B batch, H heads, M query rows; (H, M, D_t) without
            batch. bfloat16, float16, float32 or float64. Any strides; nothing is copied. D_t is at most 576.
        teacher_k: Teacher keys, (B, H_k, N, D_t), same dtype. H_k divides H: query head h reads key head
            h // (H / H_k).""",
    "INDEX": """index_q: Index queries, (B, HI, M, D), HI at most 128, D at most 256; dtype may differ from the
            teacher's.
        index_k: Index keys, (B, N, D), or (B, G, N, D) with a head for each of G groups.
        index_weights: w, (B, HI, M), any floating dtype; None for 1.""",
    "LSE": """teacher_lse: The teacher's log-sum-exps, natural logarithms, (B, H, M) float32, used as they are: what
            of a head's mass lies on keys that the row does not see makes the head weigh less. +inf and -inf mean that
            the head counts nothing. None: made over the keys that the row sees, for one more pass over the teacher.
        teacher_q_rope: A second part of the teacher's queries, (B, H, M, D_r), whose products add up with the first's.
        teacher_k_rope: Its keys, (B, 1, N, D_r) or (B, H_k, N, D_r).""",
    "GIVEN": """target: In place of the teacher (pass None for teacher_q and teacher_k): what its heads add up to,
            (B, M, N) or (B, G, M, N) float32, not normalised; see `indexer_target`.""",
    "OPTIONS": """teacher_scale: Factor on the teacher's products. Default 1 / sqrt(D_t + D_r).
        head_groups: G groups of heads, teacher's and student's alike, each with a distribution of its own; rows are
            (B, G, M) then. None is one group, and rows are (B, M).
        causal: Row i sees keys j <= i + (N - M), so that the last row sees every key.
        q_offset: With causal, replaces N - M. For chunks of the queries.
        compress_ratio: With causal, tokens that a key stands for: row i sees key j where (j + 1) * compress_ratio <=
            i + q_offset + 1, and q_offset is N * compress_ratio - M unless given.
        key_start: (B, M) int32 or int64: row i sees keys from key_start[i] on.
        key_end: The same, keys before key_end[i].
        key_mask: (B, N) bool: which keys there are.
        topk_indices: (B, M, K) or (B, G, M, K) int32 or int64: keys that the row sees. Ids below 0 or beyond the keys
            name none, repeated ones count once, and their order has no effect, on bits either.
        topk_length: (B, M) or (B, G, M): how many of them count, the first ones.
        topk_relative: In packed sequences, whether ids count from the start of the row's own sequence.
        cu_seqlens_q: (S + 1,) int32 or int64, for packed arrays (rows of all sequences, heads, columns), as in
            `attention_kl`; rows are (rows,) or (rows, G), and the layout has no say.
        cu_seqlens_k: The same for keys; both or neither. All conditions that are given have to hold.
        layout: "bhnd" as above, or "bnhd": heads, or groups, after rows in every array that has both.
        deterministic: As in `attention_kl`. Results on the CPU are always equal bits from run to run.""",
    "SCALE": """index_scale: c_i, needed: 1.0 where the weights have HI ** -0.5 * D ** -0.5 in them, as DeepSeek and
            Megatron-LM have it; D ** -0.5 where they have not.
        relu: Whether products pass a ReLU.""",
    "WRT": """wrt: Names of the inputs to differentiate by, of "index_q", "index_k" and "index_weights".""",
    "WEIGHT": """row_weight: Weight of each row, an array that broadcasts to the rows. Default 1 everywhere. A row of
            weight 0 has gradients of exactly 0, and no part in a sum, whatever it holds.""",
    "SOURCE": "One streaming pass over the keys, after StreamKL (arXiv:2606.20005).",
    "ERRORS": """TypeError: wrong kind of array or dtype, arrays of several frameworks, or no index_scale.
        ValueError: shapes or devices that do not fit together, or an unknown option.
        NotImplementedError: gradients of the teacher, and what else is not built; the message lists what is.""",
}


_documented = documented_by(_TEXT)
_LSE_AT = INDEXER_KL.names.index("teacher_lse")


def _door(framework: str) -> Any:
    """The module here for a framework that runs calls in its own programs; None for others."""
    # Imported when its arrays come, since it imports the framework.
    return None if frameworks.door(framework) is None else importlib.import_module(f".{framework}", __package__)


def _loss(placed: tuple[Any, ...], given: dict[str, Any], **own: Any) -> Any:
    asked = IndexLoss(**own)
    _check_loss(asked)
    like = placed[INDEXER_KL.at]
    if frameworks.is_torchs(like):
        # A plain import and a plain call: torch.compile can trace these.
        from .torch import loss

        return loss(*split(INDEXER_KL, placed, given), asked)
    call = call_of(INDEXER_KL, placed, given)
    if (door := _door(frameworks.framework_of(INDEXER_KL.like, like))) is not None:
        return door.loss(call, asked)
    ready = call.ready()
    view = ready.like
    weight = _weight(asked.row_weight, ready)
    if view.framework not in frameworks.OWN:
        named = [*zip(call.op.names, call.operands), ("row_weight", asked.row_weight)]
        FRAMEWORKS[view.framework].check_no_gradient_wanted([(n, x) for n, x in named if x is not None])
    value = _reduced(call, ready, asked._replace(row_weight=weight))
    return frameworks.given_back(view, like, value)


def _check_loss(asked: IndexLoss) -> None:
    if asked.reduction != "none":
        choice("reduction", asked.reduction, REDUCTIONS)
    if not isinstance(asked.return_stats, bool):
        raise TypeError(f"return_stats={asked.return_stats!r} is {a_kind_of(asked.return_stats)}; allowed are booleans")


def _weight(weight: Any, ready: Ready) -> Any:
    if weight is None:
        return None
    # The array itself, which knows its device.
    return validate.row_weight(weight, ready.checked.row_shape, ready.inputs[ready.checked.at])


def _reduced(call: Call, ready: Ready, asked: IndexLoss) -> Any:
    """The rows of a forward as they were asked for."""
    view, lse = ready.like, call.operands[_LSE_AT]
    if lse is not None and view.framework not in frameworks.OWN:  # it is given back with all else
        lse = ready.inputs.teacher_lse.array
    found = tuple([x and x.array for x in ready.forward()])
    with frameworks.on_device(view):
        return reduced(frameworks.namespace(view), found, lse, asked)


def _forward(placed: tuple[Any, ...], given: dict[str, Any]) -> Any:
    call = call_of(INDEXER_KL, placed, given)
    ready = call.ready()
    view = ready.like
    if (door := _door(view.framework)) is not None:
        return door.forward(call)
    stats = _reduced(call, ready, IndexLoss(return_stats=True))
    return frameworks.given_back(view, call.operands[call.op.at], stats)


def _saved(saved: Any, index_lse: Any, target_sum: Any) -> tuple[Any, Any, Any]:
    """What a forward saved, given as a whole or part by part."""
    if saved is None:
        missing = [name for name, x in (("index_lse", index_lse), ("target_sum", target_sum)) if x is None]
        if missing:
            raise TypeError(
                f"{' and '.join(missing)} came neither in saved= nor alone; pass saved=forward, the whole result of "
                f"indexer_kl_forward(...) on the same inputs"
            )
        return index_lse, target_sum, None
    for name, x in (("index_lse", index_lse), ("target_sum", target_sum)):
        if x is not None:
            raise TypeError(f"saved came together with {name}, which it holds already; pass one of them")
    if not all(hasattr(saved, name) for name in ("index_lse", "target_sum", "teacher_lse")):
        raise TypeError(f"saved is {a_kind_of(saved)}; allowed is what indexer_kl_forward returns, whole")
    return saved.index_lse, saved.target_sum, saved.teacher_lse


def _backward(
    arguments: tuple[Any, ...], given: dict[str, Any], *, saved: Any, index_lse: Any, target_sum: Any, wrt: Any
) -> Any:
    grad, *placed = arguments
    index_lse, target_sum, lse = _saved(saved, index_lse, target_sum)
    wrt = problem.wanted(wrt)
    call = call_of(INDEXER_KL, tuple(placed), given)
    _check_wanted(call, wrt)
    teacher_q, given_lse = (call.operands[call.op.names.index(name)] for name in ("teacher_q", "teacher_lse"))
    if teacher_q is not None and given_lse is None and lse is None:
        raise TypeError("teacher_lse is missing; pass that of the forward")
    read = (grad, index_lse, target_sum, lse if teacher_q is not None and given_lse is None else None)
    ready = call.ready(SavedArrays(read))
    ready.checked.backward_bytes(wrt)
    view = ready.like
    if (door := _door(view.framework)) is not None:
        return door.backward(call, read, wrt)
    return frameworks.given_back(view, call.operands[call.op.at], _gradients(ready.backward(wrt)))


def _gradients(found: tuple[Any, ...]) -> IndexerGradients:
    """Those of all operands, of those that can be differentiated by."""
    named = dict(zip(INDEXER_KL.names, found, strict=True))
    return IndexerGradients(*(named[name] for name in WRT))


def _check_wanted(call: Call, wrt: tuple[str, ...]) -> None:
    for name in wrt:
        if call.operands[call.op.names.index(name)] is None:
            raise ValueError(f"wrt names {name!r}, but it is None; leave it out of wrt, or pass it")


def _wanted(call: Call, wrt: Any) -> tuple[str, ...]:
    """Checked names, or those of all that came."""
    came = tuple(name for name in WRT if call.operands[call.op.names.index(name)] is not None)
    names: tuple[str, ...] = came if wrt is None else problem.wanted(wrt)
    _check_wanted(call, names)
    return names


def _value_and_grad(
    placed: tuple[Any, ...], given: dict[str, Any], *, row_weight: Any, reduction: str, wrt: Any
) -> Any:
    call = call_of(INDEXER_KL, placed, given)
    wrt = _wanted(call, wrt)
    choice("reduction", reduction, REDUCTIONS)
    if reduction == "none":
        raise ValueError(
            'reduction="none" leaves no scalar to differentiate; allowed are "mean" and "sum". For a gradient per row '
            "call indexer_kl_forward and indexer_kl_backward"
        )
    ready = call.ready()
    ready.checked.backward_bytes(wrt)
    view, like = ready.like, call.operands[call.op.at]
    weight = _weight(row_weight, ready)
    if weight is not None:
        weight = FRAMEWORKS[view.framework].detached(weight)
    if (door := _door(view.framework)) is not None:
        return door.value_and_grad(call, weight, reduction, wrt)
    rows, xp = ready.forward(), frameworks.namespace(view)
    with frameworks.on_device(view):
        marks = inactive(xp, rows.target_sum.array)
        value, share = reductions.value_and_gradient(xp, rows.kl.array, marks, weight, reduction)
        grad = reductions.spread(xp, value, share, ready.checked.row_shape)
    saved = call.op.Saved(frameworks.describe("grad", grad), rows.index_lse, rows.target_sum, rows.made_lse)
    grads = _gradients(ready.with_saved(saved).backward(wrt))
    return frameworks.given_back(view, like, value), frameworks.given_back(view, like, grads)


def _target(placed: tuple[Any, ...], given: dict[str, Any]) -> Any:
    call = call_of(INDEXER_TARGET, placed, given)
    ready = call.ready()
    view = ready.like
    if (door := _door(view.framework)) is not None:
        return door.target(call)
    return frameworks.given_back(view, call.operands[call.op.at], ready.forward().target.array)


def _plan(placed: tuple[Any, ...], given: dict[str, Any], *, wrt: Any, arch: str | None) -> AnyPlan:
    asked, wrt = _asked(placed, given, wrt, None if arch is None else arrays.cuda(0))
    if asked.device.kind == "cpu":
        found: AnyPlan = runner_for(asked).plan
        return found
    facts = gpus.device_facts(asked.device.index) if arch is None else gpus.facts_for_arch(arch)
    return make_plan(asked, facts, wrt)


def _warmup(placed: tuple[Any, ...], given: dict[str, Any], *, wrt: Any) -> None:
    asked, wrt = _asked(placed, given, wrt, None)
    runner_for(asked).warmup(wrt)


def _asked(
    placed: tuple[Any, ...], given: dict[str, Any], wrt: Any, device: Device | None
) -> tuple[IndexProblem, tuple[str, ...]]:
    """What arrays or stand-ins ask for, with the gradients that are meant."""
    call = call_of(INDEXER_KL, placed, given)
    wrt = _wanted(call, wrt)
    asked: Any = call.problem(device)
    gradients_built(asked, wrt)
    return asked, wrt


@public(_loss, op=INDEXER_KL)
@_documented
def indexer_kl(
    teacher_q: Any,
    teacher_k: Any,
    index_q: Any,
    index_k: Any,
    index_weights: Any = None,
    *,
    index_scale: float,
    teacher_lse: Any = None,
    teacher_q_rope: Any = None,
    teacher_k_rope: Any = None,
    target: Any = None,
    teacher_scale: float | None = None,
    relu: bool = True,
    head_groups: int | None = None,
    causal: bool = False,
    q_offset: int | None = None,
    compress_ratio: int = 1,
    key_start: Any = None,
    key_end: Any = None,
    key_mask: Any = None,
    topk_indices: Any = None,
    topk_length: Any = None,
    topk_relative: bool = False,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    row_weight: Any = None,
    reduction: Reduction = "none",
    layout: Layout = "bhnd",
    return_stats: bool = False,
    deterministic: bool | None = None,
) -> Any:
    """KL divergence of a lightning indexer from the teacher's heads, added up before they are normalised.

    For each batch entry and query row, over the keys that the row sees,

        t = sum_h exp(teacher_scale q_h k_h^T - lse_h)    P = t / sum_j t_j
        I = index_scale sum_h w_h max(q^I_h k^I^T, 0)     Q = softmax(I)
        KL = sum_j P_j (log P_j - log Q_j)

    The M x N matrices of heads are never in memory. Differentiable to first order by index_q, index_k, index_weights
    and row_weight where the arrays are torch's or JAX's; the teacher is a constant, and one that requires a gradient is
    refused. A row that sees no key, or in whose keys no head has mass, has KL 0 and zero gradients, and is not counted
    by a mean.

    <SOURCE>

    Args:
        <TEACHER>
        <INDEX>
        <SCALE>
        <LSE>
        <GIVEN>
        <OPTIONS>
        <WEIGHT>
        reduction: "none" (w KL per row), "sum", or "mean" = sum(w KL) / sum(w) over rows that count, 0 where that is
            0 / 0.
        return_stats: Return an `IndexerForward`, of constants beside the KL: with reduction="sum" it has what ranks
            that share the rows add up, the sum and weight_sum.

    Returns:
        KL in nats, (B, M), with head_groups (B, G, M), or without axes; float32, or float64 where an input is.

    Raises:
        <ERRORS>

    Example:
        >>> import numpy as np, streamkl_cupy
        >>> q, k = np.ones((1, 2, 1, 1)), np.log([[[[3.0], [1.0]], [[1.0], [3.0]]]])  # heads (3/4, 1/4) and (1/4, 3/4)
        >>> index_q, index_k, w = np.ones((1, 1, 1, 1)), np.log([[[3.0], [1.0]]]), np.ones((1, 1, 1))
        >>> kl = streamkl_cupy.indexer_kl(q, k, index_q, index_k, w, index_scale=1.0)
        >>> round(float(kl[0, 0]), 4)  # KL((1/2, 1/2) || (3/4, 1/4))
        0.1438
    """


@public(_forward, outside_programs=outside_programs, op=INDEXER_KL)
@_documented
def indexer_kl_forward(  # type: ignore[empty-body]  # as are all: see @public
    teacher_q: Any,
    teacher_k: Any,
    index_q: Any,
    index_k: Any,
    index_weights: Any = None,
    *,
    index_scale: float,
    teacher_lse: Any = None,
    teacher_q_rope: Any = None,
    teacher_k_rope: Any = None,
    target: Any = None,
    teacher_scale: float | None = None,
    relu: bool = True,
    head_groups: int | None = None,
    causal: bool = False,
    q_offset: int | None = None,
    compress_ratio: int = 1,
    key_start: Any = None,
    key_end: Any = None,
    key_mask: Any = None,
    topk_indices: Any = None,
    topk_length: Any = None,
    topk_relative: bool = False,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    layout: Layout = "bhnd",
    deterministic: bool | None = None,
) -> IndexerForward:
    """Rows of `indexer_kl` outside every autograd: the first half of a hand-written gradient.

    <SOURCE>

    Args:
        <TEACHER>
        <INDEX>
        <SCALE>
        <LSE>
        <GIVEN>
        <OPTIONS>

    Returns:
        `IndexerForward`; its weight_sum is the number of rows that count.

    Raises:
        <ERRORS>

    Example:
        >>> import numpy as np, streamkl_cupy
        >>> q, k = np.ones((1, 2, 1, 1)), np.log([[[[3.0], [1.0]], [[1.0], [3.0]]]])  # heads (3/4, 1/4) and (1/4, 3/4)
        >>> index_q, index_k, w = np.ones((1, 1, 1, 1)), np.log([[[3.0], [1.0]]]), np.ones((1, 1, 1))
        >>> rows = streamkl_cupy.indexer_kl_forward(q, k, index_q, index_k, w, index_scale=1.0)
        >>> float(np.exp(rows.index_lse[0, 0]).round(4)), float(rows.target_sum[0, 0].round(4))  # 3 + 1, two heads
        (4.0, 2.0)
    """


@public(
    _backward,
    "What the forward saved goes by name: saved=forward, the whole result of indexer_kl_forward(...)",
    outside_programs=outside_programs,
    op=INDEXER_KL,
)
@_documented
def indexer_kl_backward(  # type: ignore[empty-body]  # as are all: see @public
    grad: Any,
    teacher_q: Any,
    teacher_k: Any,
    index_q: Any,
    index_k: Any,
    index_weights: Any = None,
    *,
    index_scale: float,
    saved: Any = None,
    index_lse: Any = None,
    target_sum: Any = None,
    wrt: IndexWrt = WRT,
    teacher_lse: Any = None,
    teacher_q_rope: Any = None,
    teacher_k_rope: Any = None,
    target: Any = None,
    teacher_scale: float | None = None,
    relu: bool = True,
    head_groups: int | None = None,
    causal: bool = False,
    q_offset: int | None = None,
    compress_ratio: int = 1,
    key_start: Any = None,
    key_end: Any = None,
    key_mask: Any = None,
    topk_indices: Any = None,
    topk_length: Any = None,
    topk_relative: bool = False,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    layout: Layout = "bhnd",
    deterministic: bool | None = None,
) -> IndexerGradients:
    """Gradients from what the forward saved, outside every autograd: the second half.

    With g = grad of the row and dI = g (Q - P), [s > 0] being 1 everywhere without ReLU,

        dq^I_h = index_scale w_h sum_j dI_j [s_hj > 0] k^I_j        dw_h = index_scale sum_j dI_j max(s_hj, 0)
        dk^I_j = index_scale sum_i,h dI_j w_h [s_hj > 0] q^I_h

    <SOURCE>

    Args:
        grad: Derivative of the loss by each row's KL, in shape and dtype of `kl`; a row of 0 has no gradient at all.
        <TEACHER>
        <INDEX>
        <SCALE>
        saved: The whole result of `indexer_kl_forward`, called with the same inputs and options.
        index_lse: In place of `saved`, with target_sum and teacher_lse, its parts by name.
        target_sum: Likewise.
        <WRT>
        <LSE>
        <GIVEN>
        <OPTIONS>

    Returns:
        `IndexerGradients`, None where `wrt` does not ask.

    Raises:
        <ERRORS>

    Example:
        >>> import numpy as np, streamkl_cupy
        >>> q, k = np.ones((1, 2, 1, 1)), np.log([[[[3.0], [1.0]], [[1.0], [3.0]]]])  # heads (3/4, 1/4) and (1/4, 3/4)
        >>> index_q, index_k, w = np.ones((1, 1, 1, 1)), np.log([[[3.0], [1.0]]]), np.ones((1, 1, 1))
        >>> rows = streamkl_cupy.indexer_kl_forward(q, k, index_q, index_k, w, index_scale=1.0)
        >>> grads = streamkl_cupy.indexer_kl_backward(
        ...     np.ones_like(rows.kl), q, k, index_q, index_k, w, saved=rows, index_scale=1.0
        ... )
        >>> grads.index_k.ravel().round(4).tolist()  # dI = (1/4, -1/4); the second product is 0, where a ReLU is flat
        [0.25, 0.0]
    """


@public(_value_and_grad, outside_programs=outside_programs, op=INDEXER_KL)
@_documented
def indexer_kl_value_and_grad(  # type: ignore[empty-body]  # as are all: see @public
    teacher_q: Any,
    teacher_k: Any,
    index_q: Any,
    index_k: Any,
    index_weights: Any = None,
    *,
    index_scale: float,
    teacher_lse: Any = None,
    teacher_q_rope: Any = None,
    teacher_k_rope: Any = None,
    target: Any = None,
    teacher_scale: float | None = None,
    relu: bool = True,
    head_groups: int | None = None,
    causal: bool = False,
    q_offset: int | None = None,
    compress_ratio: int = 1,
    key_start: Any = None,
    key_end: Any = None,
    key_mask: Any = None,
    topk_indices: Any = None,
    topk_length: Any = None,
    topk_relative: bool = False,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    row_weight: Any = None,
    reduction: Reduction = "mean",
    wrt: IndexWrt | None = None,
    layout: Layout = "bhnd",
    deterministic: bool | None = None,
) -> tuple[Any, IndexerGradients]:
    """A loss over all rows and its gradients, outside every autograd: one training step in one call.

    <SOURCE>

    Args:
        <TEACHER>
        <INDEX>
        <SCALE>
        <LSE>
        <GIVEN>
        <OPTIONS>
        <WEIGHT>
        reduction: "mean" or "sum"; "none" has no single gradient.
        wrt: Names of the inputs to differentiate by; None is all of "index_q", "index_k" and "index_weights" that came.

    Returns:
        The loss in nats without axes, and `IndexerGradients`.

    Raises:
        <ERRORS>

    Example:
        >>> import numpy as np, streamkl_cupy
        >>> q, k = np.ones((1, 2, 1, 1)), np.log([[[[3.0], [1.0]], [[1.0], [3.0]]]])  # heads (3/4, 1/4) and (1/4, 3/4)
        >>> index_q, index_k, w = np.ones((1, 1, 1, 1)), np.log([[[3.0], [1.0]]]), np.ones((1, 1, 1))
        >>> value, grads = streamkl_cupy.indexer_kl_value_and_grad(q, k, index_q, index_k, w, index_scale=1.0)
        >>> round(float(value), 4), grads.index_weights.round(4).ravel().tolist()
        (0.1438, [0.2747])
    """


@public(_target, outside_programs=outside_programs, op=INDEXER_TARGET)
@_documented
def indexer_target(
    teacher_q: Any,
    teacher_k: Any,
    *,
    teacher_lse: Any = None,
    rows: tuple[int, int] | None = None,
    teacher_q_rope: Any = None,
    teacher_k_rope: Any = None,
    teacher_scale: float | None = None,
    head_groups: int | None = None,
    causal: bool = False,
    q_offset: int | None = None,
    compress_ratio: int = 1,
    key_start: Any = None,
    key_end: Any = None,
    key_mask: Any = None,
    topk_indices: Any = None,
    topk_length: Any = None,
    topk_relative: bool = False,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    layout: Layout = "bhnd",
) -> Any:
    """t = sum_h exp(teacher_scale q_h k_h^T - lse_h), not normalised: what ranks that share the heads add up.

    Each rank makes that of its own heads; their sum goes to `indexer_kl` as target=, which normalises it once. Give
    teacher_lse wherever a row's mass lies on keys that it does not see: heads are weighed by it.

    <SOURCE>

    Args:
        <TEACHER>
        rows: (first, end): of these query rows alone, for targets that are made some rows at a time.
        <LSE>
        <OPTIONS>

    Returns:
        (B, M, N), with head_groups (B, G, M, N), float32, or float64 where an input is; 0 where a key is not seen.

    Raises:
        <ERRORS>

    Example:
        >>> import numpy as np, streamkl_cupy
        >>> q, k = np.ones((1, 2, 1, 1)), np.log([[[[3.0], [1.0]], [[1.0], [3.0]]]])  # heads (3/4, 1/4) and (1/4, 3/4)
        >>> lse = streamkl_cupy.attention_kl_forward(q, k, q, k).teacher_lse
        >>> streamkl_cupy.indexer_target(q, k, teacher_lse=lse).ravel().round(4).tolist()  # 3/4 + 1/4 of each key
        [1.0, 1.0]
    """


@public(_plan, op=INDEXER_KL)
@_documented
def indexer_kl_plan(  # type: ignore[empty-body]  # as are all: see @public
    teacher_q: Any,
    teacher_k: Any,
    index_q: Any,
    index_k: Any,
    index_weights: Any = None,
    *,
    index_scale: float,
    teacher_lse: Any = None,
    teacher_q_rope: Any = None,
    teacher_k_rope: Any = None,
    target: Any = None,
    teacher_scale: float | None = None,
    relu: bool = True,
    head_groups: int | None = None,
    causal: bool = False,
    q_offset: int | None = None,
    compress_ratio: int = 1,
    key_start: Any = None,
    key_end: Any = None,
    key_mask: Any = None,
    topk_indices: Any = None,
    topk_length: Any = None,
    topk_relative: bool = False,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    layout: Layout = "bhnd",
    deterministic: bool | None = None,
    wrt: IndexWrt | None = None,
    arch: str | None = None,
) -> AnyPlan:
    """What a call with these arguments would run: kernels, tiles, workspaces. Prints itself; launches nothing.

    In place of arrays it takes anything with a shape and a dtype, as a compact array on the current GPU, or on the CPU
    where there is no usable GPU.

    <SOURCE>

    Args:
        <TEACHER>
        <INDEX>
        <SCALE>
        <LSE>
        <GIVEN>
        <OPTIONS>
        wrt: Names of the inputs to differentiate by; None is all of "index_q", "index_k" and "index_weights" that came.
        arch: Plan for a GPU of this architecture, such as "sm_80" or "sm_90", whether one is here or not.

    Returns:
        A frozen plan; `print` it.

    Raises:
        <ERRORS>

    Example:
        >>> import numpy as np, streamkl_cupy
        >>> q, k = np.empty((1, 16, 4096, 128), np.float16), np.empty((1, 1, 4096, 128), np.float16)
        >>> print(streamkl_cupy.indexer_kl_plan(q, k, q, k, index_scale=1.0, causal=True))  # doctest: +ELLIPSIS
        numpy float32: ...
    """


@public(_warmup, op=INDEXER_KL)
@_documented
def indexer_kl_warmup(
    teacher_q: Any,
    teacher_k: Any,
    index_q: Any,
    index_k: Any,
    index_weights: Any = None,
    *,
    index_scale: float,
    teacher_lse: Any = None,
    teacher_q_rope: Any = None,
    teacher_k_rope: Any = None,
    target: Any = None,
    teacher_scale: float | None = None,
    relu: bool = True,
    head_groups: int | None = None,
    causal: bool = False,
    q_offset: int | None = None,
    compress_ratio: int = 1,
    key_start: Any = None,
    key_end: Any = None,
    key_mask: Any = None,
    topk_indices: Any = None,
    topk_length: Any = None,
    topk_relative: bool = False,
    cu_seqlens_q: Any = None,
    cu_seqlens_k: Any = None,
    layout: Layout = "bhnd",
    deterministic: bool | None = None,
    wrt: IndexWrt | None = None,
) -> None:
    """Compile and load all that a call with these arguments needs, and launch nothing.

    Call it before capturing a CUDA graph or timing a loop. In place of arrays it takes anything with a shape and a
    dtype.

    <SOURCE>

    Args:
        <TEACHER>
        <INDEX>
        <SCALE>
        <LSE>
        <GIVEN>
        <OPTIONS>
        wrt: Names of the inputs to differentiate by; None is all of "index_q", "index_k" and "index_weights" that came.

    Returns:
        None, when everything is in place; on the CPU there is nothing to do.

    Raises:
        <ERRORS>

    Example:
        >>> import numpy as np, streamkl_cupy
        >>> q, k = np.ones((1, 2, 4, 8)), np.ones((1, 2, 4, 8))
        >>> streamkl_cupy.indexer_kl_warmup(q, k, q, k[:, 0], np.ones((1, 2, 4)), index_scale=1.0)
    """

"""The public functions of attention itself: what each does with a call, and below its signature and documentation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np

from . import arrays, frameworks, planning, validate
from .advice.signatures import documented_by, public
from .api import outside_programs
from .arguments import flag
from .arrays import Results
from .call import Call, SavedArrays, runner_for
from .frameworks import describe
from .frameworks.base import DOORS, FRAMEWORKS
from .numpy_backend.elements import narrow
from .ops import SPARSE_ATTENTION
from .ops.sparse_attention import ATTENTION_INPUTS, AttentionWrt
from .options import Layout, Precision
from .problem import Device, Problem
from .results import A, AttentionForward, AttentionGradients
from .rules import states

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .api import AnyPlan
    from .options import SharedByAttention
    from .patterns import BlockPattern

__all__ = [
    "AttentionForward",
    "AttentionGradients",
    "merge_attention_states",
    "sparse_attention",
    "sparse_attention_backward",
    "sparse_attention_forward",
    "sparse_attention_plan",
    "sparse_attention_warmup",
]

_F = TypeVar("_F", bound=Callable[..., Any])

# Said once, read in the help of every function.
_TEXT = {
    "INPUTS": """query: (B, H, M, D): B batch, H heads, M query rows. 3-D (H, M, D) and 2-D (M, D) are allowed when all
            inputs have that many axes. bfloat16, float16, float32, or float64 on the CPU. Any strides; nothing is
            copied.
        key: (B, H_k, N, D), same dtype. H_k divides H: query head h reads key head h // (H / H_k). D is at most 256.
        value: (B, H_k, N, D_v), same dtype. D_v may be another than D, and is at most 256.""",
    "OPTIONS": """scale: Factor on the products q.k; any finite number. Default 1 / sqrt(D).
        softcap: Keep logits softly within it: softcap * tanh(logit / softcap), a positive number. Default: no cap.
        causal: Row i sees keys j <= i + (N - M), so that the last row sees every key.
        q_offset: With causal or window, replaces N - M: row i sees keys j <= i + q_offset. For chunks of the queries.
        window: (left, right): row i sees keys i + (N - M) - left <= j <= i + (N - M) + right; -1 or None is no limit on
            that side. With causal, right is 0.
        key_lengths: (B,) int32, contiguous, B = 1 for inputs without batch: batch entry b has the keys
            j < key_lengths[b], as a cache has that is filled so far. The diagonal stays where it is.
        query_lengths: The same for query rows: batch entry b has the rows i < query_lengths[b]. Those behind them see
            nothing: output 0, log-sum-exp -inf, gradients of 0, whatever such rows hold.
        cu_seqlens_q: (S + 1,) int32, contiguous, for packed inputs (rows of all sequences, H, D): sequence s owns the
            rows cu_seqlens_q[s] to cu_seqlens_q[s + 1] and sees its own keys; i, j, M and N above are its own.
            The layout has no say, and log-sum-exps are (rows, H). Rows after the last sequence see nothing.
        cu_seqlens_k: The same for keys; both or neither. They go with causal, window and q_offset.
        key_mask: (B, N) bool, or (N,) for inputs without batch: which keys each batch entry has. Any strides.
        query_mask: (B, M) bool, or (M,): which query rows each batch entry has, the others being as those behind
            query_lengths. Any strides.
        block_mask: A `streamkl_cupy.patterns.BlockPattern`: which blocks of keys each block of rows sees, per query
            head or for all; work and memory traffic are those of what it lists. All of these but packing combine: a row
            sees a key that every one of them shows it. Without any, this is plain attention.
        layout: "bhnd" as above, or "bnhd" for (B, M, H, D) arrays, whose log-sum-exps are (B, M, H).
        precision: Of products of float32 inputs on CUDA: "highest" is float32 accuracy, "high" is faster with about 16
            bits of mantissa. Other dtypes are exact already.
        deterministic: True asks for bit-equal results from run to run, False for the fastest path. None is what the
            framework is set to, `torch.use_deterministic_algorithms` or the flag `--xla_gpu_deterministic_ops` in
            XLA_FLAGS, and the fastest path where it says nothing.""",
    "WRT": """wrt: Names of the inputs to differentiate by, a tuple such as ("query", "key", "value").""",
    "SOURCE": "The heads of `patterns.sharded` together see everything, after S2-Attention (arXiv:2407.17678).",
    "ERRORS": """TypeError: wrong kind of array or dtype, or arrays of several frameworks.
        ValueError: shapes or devices that do not fit together, or an unknown option.
        NotImplementedError: a combination that is not built; the message lists what is.
        StreamKLError: no usable driver, a failed compilation, or a first compilation under graph capture.""",
}


_documented = documented_by(_TEXT)


def _attend(operands: tuple[Any, ...], given: dict[str, Any], return_lse: bool) -> Any:
    like = operands[SPARSE_ATTENTION.at]
    if frameworks.is_torchs(like):
        from .torch import attend

        return attend(operands, given, return_lse)
    flag("return_lse", return_lse)
    call = Call.of(SPARSE_ATTENTION, operands, given)
    framework = frameworks.framework_of(SPARSE_ATTENTION.like, like)
    door = frameworks.door(framework)
    if door is not None:
        named = zip(SPARSE_ATTENTION.names, operands, strict=True)
        validate.one_framework({name: frameworks.framework_of(name, x) for name, x in named})
        return door.attend(call, return_lse)
    ready = call.ready()
    view = ready.like
    if view.framework not in frameworks.OWN:
        FRAMEWORKS[framework].check_no_gradient_wanted(zip(SPARSE_ATTENTION.names, operands, strict=True))
    result = _results(ready.forward())
    return frameworks.given_back(view, like, result if return_lse else result.out)


def _results(found: Results) -> AttentionForward[Any]:
    return AttentionForward(found.out.array, found.lse.array)


def _forward(operands: tuple[Any, ...], given: dict[str, Any]) -> Any:
    call = Call.of(SPARSE_ATTENTION, operands, given)
    ready = call.ready()
    view = ready.like
    if view.framework in DOORS:
        return frameworks.door(view.framework).attention_forward(call)
    return frameworks.given_back(view, operands[call.op.at], _results(ready.forward()))


def _backward(arguments: tuple[Any, ...], given: dict[str, Any], saved: Any, grad_lse: Any, wrt: Any) -> Any:
    grad, *operands = arguments
    call = Call.of(SPARSE_ATTENTION, tuple(operands), given)
    out, lse = validate.attention_saved(saved)
    wrt = validate.wanted(call.op, wrt)
    ready = call.ready(SavedArrays((grad, out, lse, grad_lse)))
    view = ready.like
    ready.checked.backward_bytes(wrt)
    if view.framework in DOORS:
        return frameworks.door(view.framework).attention_backward(call, (grad, out, lse, grad_lse), wrt)
    grads = AttentionGradients(*ready.backward(wrt))
    return frameworks.given_back(view, operands[call.op.at], grads)


def _plan(operands: tuple[Any, ...], given: dict[str, Any], wrt: Any, arch: str | None) -> Any:
    problem, _ = _problem(operands, given, wrt, None if arch is None else arrays.cuda(0))
    if arch is None:
        return runner_for(problem).plan
    return planning.make_plan(problem, planning.facts_for_arch(arch))


def _warmup(operands: tuple[Any, ...], given: dict[str, Any], wrt: Any) -> None:
    problem, wrt = _problem(operands, given, wrt)
    runner_for(problem).warmup(wrt)


def _problem(
    operands: tuple[Any, ...], given: dict[str, Any], wrt: Any, device: Device | None = None
) -> tuple[Problem, tuple[str, ...]]:
    """What arrays or stand-ins ask for, with the gradients that are meant."""
    call = Call.of(SPARSE_ATTENTION, operands, given)
    wrt = validate.wanted(call.op, wrt)
    problem = call.problem(device)
    validate.gradients_built(problem, wrt)
    return problem, wrt


@overload
def sparse_attention(
    query: A, key: A, value: A, *, return_lse: Literal[False] = False, **options: Unpack[SharedByAttention]
) -> A: ...
@overload
def sparse_attention(
    query: A, key: A, value: A, *, return_lse: Literal[True], **options: Unpack[SharedByAttention]
) -> AttentionForward[A]: ...
@overload
def sparse_attention(
    query: Any, key: Any, value: Any, *, return_lse: bool, **options: Unpack[SharedByAttention]
) -> Any: ...
@public(_attend, op=SPARSE_ATTENTION)
@_documented
def sparse_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    scale: float | None = None,
    softcap: float | None = None,
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
    layout: Layout = "bhnd",
    precision: Precision = "highest",
    return_lse: bool = False,
    deterministic: bool | None = None,
) -> Any:
    """Attention whose heads each see a part of the context, without its M x N matrices.

    For each batch entry, head and query row, over the keys that the row sees,

        P = softmax(scale q k^T)    out = sum_j P_j v_j    lse = log sum_j exp(scale q.k_j)

    <SOURCE>
    The same pattern in `attention_kl` distils a teacher into them. Differentiable to first order, log-sum-exps
    included, where the arrays are torch's (autograd, torch.func, torch.compile) or JAX's (grad, jit, vmap, shard_map).
    A row that sees no key has output 0, log-sum-exp -inf and zero gradients; NaN that a row sees makes its results NaN,
    and memory that no row may see can hold it. CUDA arrays are computed on their GPU, on the caller's current stream;
    CPU arrays in NumPy.

    Args:
        <INPUTS>
        <OPTIONS>
        return_lse: Also return the log-sum-exps, which are differentiated too: `merge_attention_states` takes them, and
            a loss may.

    Returns:
        Outputs (B, H, M, D_v), in dtype and framework of the inputs; with return_lse an `AttentionForward` that holds
        them, and beside them (B, H, M) natural logarithms in float32 (float64 where the inputs are).

    Raises:
        <ERRORS>

    Example:
        >>> import numpy as np, streamkl_cupy
        >>> q, k = np.ones((1, 1)), np.log([[4.0], [3.0], [2.0], [1.0]])
        >>> v = np.array([[1.0], [2.0], [3.0], [4.0]])
        >>> streamkl_cupy.sparse_attention(q, k, v).round(4).tolist()  # weights .4, .3, .2, .1
        [[2.0]]
    """


@public(_forward, outside_programs=outside_programs, op=SPARSE_ATTENTION)
@_documented
def sparse_attention_forward(  # type: ignore[empty-body]  # as are all: see @public
    query: A,
    key: A,
    value: A,
    *,
    scale: float | None = None,
    softcap: float | None = None,
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
    layout: Layout = "bhnd",
    precision: Precision = "highest",
    deterministic: bool | None = None,
) -> AttentionForward[A]:
    """Outputs and log-sum-exps, outside every autograd: a step of a decoder, or the first half of a gradient by hand.

    out = sum_j P_j v_j and lse = log sum_j exp(logit_j), a natural logarithm; see `sparse_attention`.
    <SOURCE>
    Pure: inputs that require gradients are read as they are, and results are detached.

    Args:
        <INPUTS>
        <OPTIONS>

    Returns:
        `AttentionForward`: outputs (B, H, M, D_v) in dtype and framework of the inputs, and log-sum-exps (B, H, M) in
        float32 (float64 where the inputs are).

    Raises:
        <ERRORS>

    Example:
        >>> import numpy as np, streamkl_cupy
        >>> q, k, v = np.ones((1, 1)), np.zeros((2, 1)), np.array([[1.0], [3.0]])
        >>> out, lse = streamkl_cupy.sparse_attention_forward(q, k, v)
        >>> float(out[0, 0]), round(float(lse[0]), 4)  # two equal logits: log 2
        (2.0, 0.6931)
    """


@public(
    _backward,
    "What the forward saved goes by name: saved=forward, the whole result of sparse_attention_forward(...)",
    outside_programs=outside_programs,
    op=SPARSE_ATTENTION,
)
@_documented
def sparse_attention_backward(  # type: ignore[empty-body]  # as are all: see @public
    grad: Any,
    query: A,
    key: A,
    value: A,
    *,
    saved: AttentionForward[Any] | None = None,
    grad_lse: Any = None,
    wrt: AttentionWrt = ATTENTION_INPUTS,
    scale: float | None = None,
    softcap: float | None = None,
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
    layout: Layout = "bhnd",
    precision: Precision = "highest",
    deterministic: bool | None = None,
) -> AttentionGradients[A]:
    """Gradients from what the forward saved, outside every autograd: the second half.

    With G = grad and delta = sum(G * out) - grad_lse of each row,

        dP = G v^T    dS = P (dP - delta)    dq = scale dS k    dk = scale dS^T q    dv = P^T G

    <SOURCE>
    Pure: it may be called again with the same saved values. Gradients of keys and values are summed over the query
    heads that read them. Where the forward has been merged from parts of the keys, what is saved is the merged result,
    and a call for each part gives the part's gradients of keys and values, and its share of those of the queries.

    Args:
        grad: Derivative of the loss by the outputs, (B, H, M, D_v), dtype of the inputs; any strides.
        <INPUTS>
        saved: The whole result of `sparse_attention_forward`, called with the same inputs and options, or of
            `merge_attention_states`.
        grad_lse: Derivative of the loss by the log-sum-exps, (B, H, M), in their dtype. Default 0.
        <WRT>
        <OPTIONS>

    Returns:
        `AttentionGradients`, None where `wrt` does not ask.

    Raises:
        <ERRORS>

    Example:
        >>> import numpy as np, streamkl_cupy
        >>> q, k, v = np.ones((1, 1)), np.log([[1.0], [3.0]]), np.array([[0.0], [4.0]])
        >>> rows = streamkl_cupy.sparse_attention_forward(q, k, v)
        >>> grads = streamkl_cupy.sparse_attention_backward(np.ones((1, 1)), q, k, v, saved=rows)
        >>> grads.value.ravel().round(4).tolist(), grads.key.ravel().round(4).tolist()  # P, and P (v - out)
        ([0.25, 0.75], [-0.75, 0.75])
    """


@public(_plan, op=SPARSE_ATTENTION)
@_documented
def sparse_attention_plan(  # type: ignore[empty-body]  # as are all: see @public
    query: Any,
    key: Any,
    value: Any,
    *,
    scale: float | None = None,
    softcap: float | None = None,
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
    layout: Layout = "bhnd",
    precision: Precision = "highest",
    deterministic: bool | None = None,
    wrt: AttentionWrt = ATTENTION_INPUTS,
    arch: str | None = None,
) -> AnyPlan:
    """What a call with these arguments would run: kernels, tiles, shared memory, grid. Prints itself; launches nothing.

    <SOURCE>
    In place of arrays it takes anything with a shape and a dtype, as a compact array on the current GPU, or on the CPU
    where there is no usable GPU.

    Args:
        <INPUTS>
        <OPTIONS>
        <WRT>
        arch: Plan for a GPU of this architecture, such as "sm_80" or "sm_90", whether one is here or not.

    Returns:
        A frozen plan; `print` it.

    Raises:
        <ERRORS>

    Example:
        >>> import numpy as np, streamkl_cupy
        >>> x = np.empty((2, 8, 4096, 128), np.float32)
        >>> print(streamkl_cupy.sparse_attention_plan(x, x, x, causal=True))  # doctest: +ELLIPSIS
        numpy float32: ...
    """


@public(_warmup, op=SPARSE_ATTENTION)
@_documented
def sparse_attention_warmup(
    query: Any,
    key: Any,
    value: Any,
    *,
    scale: float | None = None,
    softcap: float | None = None,
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
    layout: Layout = "bhnd",
    precision: Precision = "highest",
    deterministic: bool | None = None,
    wrt: AttentionWrt = ATTENTION_INPUTS,
) -> None:
    """Compile, load and configure all that a call with these arguments needs, and launch nothing.

    Call it before capturing a CUDA graph or timing a loop: neither may contain a compilation. In place of arrays it
    takes anything with a shape and a dtype, as a compact array on the current GPU, or on the CPU, where there is
    nothing to do.
    <SOURCE>

    Args:
        <INPUTS>
        <OPTIONS>
        <WRT>

    Returns:
        None, when everything is in place.

    Raises:
        <ERRORS>

    Example:
        >>> import numpy as np, streamkl_cupy
        >>> x = np.empty((2, 8, 4096, 128), np.float16)
        >>> streamkl_cupy.sparse_attention_warmup(x, x, x, causal=True)
    """


def merge_attention_states(outs: Sequence[A], lses: Sequence[A]) -> AttentionForward[A]:
    """Attention over several sets of keys as one, from the attention over each: outputs and log-sum-exps.

        lse = log sum_p exp(lse_p)    out = sum_p exp(lse_p - lse) out_p

    The sets have no key in common: parts of a cache, of a context that is spread over devices, or a prefix that many
    sequences share. It does not matter in which order, or which of them first, parts are merged. A row that sees no key
    of a part has log-sum-exp -inf there, and its output there is not looked at; one that sees none at all has output 0.
    A learned sink, a logit beside the keys that brings no value, is a part too: outputs of 0 beside its logit.

    Differentiable where the arrays are torch's or JAX's; sums are made in the type of the log-sum-exps.

    Args:
        outs: For each part (B, H, M, D_v), in any layout, all of one type and framework.
        lses: For each part (B, H, M), or whatever the outputs have without their last axis, float32 or float64.

    Returns:
        `AttentionForward`: outputs in the type of `outs`, and log-sum-exps.

    Raises:
        TypeError: what are no arrays, arrays of several frameworks, log-sum-exps of another type.
        ValueError: shapes that do not fit together.

    Example:
        >>> import numpy as np, streamkl_cupy
        >>> outs, lses = [np.array([[1.0]]), np.array([[4.0]])], [np.log([2.0]), np.log([1.0])]
        >>> both = streamkl_cupy.merge_attention_states(outs, lses)
        >>> both.out.round(6).tolist(), np.exp(both.lse).round(6).tolist()  # weights 2/3 and 1/3
        ([[2.0]], [3.0])
    """
    outs, lses = validate.states(outs, lses)
    if all(map(frameworks.is_torchs, (*outs, *lses))):
        from .torch import merged

        return AttentionForward(*merged(outs, lses))
    found = {f"{name}[{i}]": x for name, parts in (("outs", outs), ("lses", lses)) for i, x in enumerate(parts)}
    framework = validate.one_framework({name: frameworks.framework_of(name, x) for name, x in found.items()})
    of = FRAMEWORKS[framework]
    if framework in DOORS:  # tracers too, which cannot be read
        return AttentionForward(*states.merged(of.namespace(arrays.CPU), outs, lses))
    views = [describe(name, x) for name, x in found.items()]
    for view in views[1:]:
        validate.same_place(views[0], view)
    like = views[0]
    values = [of.values(name, x) for name, x in found.items()]
    with frameworks.on_device(like):
        out, lse = states.merged(of.namespace(like.device), values[: len(outs)], values[len(outs) :])
    if like.dtype == "bfloat16" and out.dtype == np.float32:  # NumPy has computed for a guest
        out = narrow(out, np.dtype(np.uint16))
    return frameworks.given_back(like, outs[0], AttentionForward(out, lse))

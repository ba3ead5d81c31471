"""The public functions: what each does with a call, and below its signature and documentation.

Each reads as the data flow: parse the call, read its arrays and check them, run it, give results back.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

from . import arrays, frameworks, planning, validate
from .advice.signatures import documented_by, public
from .arguments import choice, listed
from .arrays import ArrayView, Results
from .call import Call, Ready, SavedArrays, runner_for
from .frameworks import describe
from .frameworks.base import DOORS, FRAMEWORKS
from .ops import ATTENTION_KL, OPS, Op
from .options import REDUCTIONS, Layout, LossOptions, Precision, Reduction, with_sunk
from .problem import STUDENT, Device, Problem, Wrt
from .results import A, KLEntropy, KLForward, KLForwardMass, KLForwardRows, KLGradients, KLSinkGradients, rows_of
from .rules import reductions, sinks
from .rules.divergences import DIVERGENCES
from .rules.scores import SCORES
from .rules.sinks import Sinks

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .numpy_backend import NumPyPlan
    from .options import Shared, SharedByLosses
    from .patterns import BlockPattern
    from .planning import Plan
    from .results import Given, Rows, SavedRows

    AnyPlan: TypeAlias = Plan | NumPyPlan

__all__ = [
    "KLEntropy",
    "KLForward",
    "KLForwardMass",
    "KLForwardRows",
    "KLGradients",
    "KLSinkGradients",
    "attention_kl",
    "attention_kl_backward",
    "attention_kl_forward",
    "attention_kl_value_and_grad",
    "plan",
    "warmup",
]

_F = TypeVar("_F", bound=Callable[..., Any])

# Said once, read in the help of every function.
_TEXT = {
    "INPUTS": """teacher_q: Teacher queries, (B, H, M, D_t): B batch, H heads, M query rows. 3-D (H, M, D) and 2-D
            (M, D) are allowed when all four inputs have that many axes. bfloat16, float16, float32, or float64 on the
            CPU. Any strides; nothing is copied.
        teacher_k: Teacher keys, (B, H_k, N, D_t), same dtype as teacher_q. H_k divides H: query head h reads key head
            h // (H / H_k). D_t is at most 576.
        student_q: Student queries, (B, H, M, D_s). D_s is at most 256; dtype may differ from the teacher's.
        student_k: Student keys, (B, H_k, N, D_s); H_k may differ from the teacher's.""",
    "OPTIONS": """<SIDES>
        <MASKS>
        <RULES>""",
    "SIDES": """teacher_scale: Factor on the teacher's q.k products; any finite number. Default 1 / sqrt(D_t).
        student_scale: The same for the student. Default 1 / sqrt(D_s).
        teacher_score: What the logits of the teacher are, by name, of the products q.k:
            <SCORES>.
        student_score: The same for the student.
        teacher_softcap: Keep logits softly within it: softcap * tanh(logit / softcap), a positive number. Default: no
            cap. Not beside "log_dot".
        student_softcap: The same for the student.""",
    "STUDENT": """student_scale: Factor on the student's q.k products; any finite number. Default 1 / sqrt(D_s).
        student_score: What the logits of the student are, by name, of the products q.k:
            <SCORES>.
        student_softcap: Keep logits softly within it: softcap * tanh(logit / softcap), a positive number. Default: no
            cap. Not beside "log_dot".""",
    "MASKS": """causal: Row i sees keys j <= i + (N - M), so that the last row sees every key.
        q_offset: With causal or window, replaces N - M: row i sees keys j <= i + q_offset. For chunks of the queries.
        window: (left, right): row i sees keys i + (N - M) - left <= j <= i + (N - M) + right; -1 or None is no limit on
            that side. With causal, right is 0.
        key_lengths: (B,) int32, contiguous, B = 1 for inputs without batch: batch entry b has the keys
            j < key_lengths[b]. The diagonal stays where it is.
        query_lengths: The same for query rows: batch entry b has the rows i < query_lengths[b]. Those behind them see
            nothing: KL 0, log-sum-exps -inf, gradients of 0, and not counted by a mean, whatever such rows hold.
        cu_seqlens_q: (S + 1,) int32, contiguous, for packed inputs (rows of all sequences, H, D): sequence s owns the
            rows cu_seqlens_q[s] to cu_seqlens_q[s + 1] and sees its own keys; i, j, M and N above are its own.
            The layout has no say, and row results are (rows, H). Rows after the last sequence see nothing.
        cu_seqlens_k: The same for keys; both or neither. They go with causal, window and q_offset.
        key_mask: (B, N) bool, or (N,) for inputs without batch: which keys each batch entry has. Any strides.
        query_mask: (B, M) bool, or (M,): which query rows each batch entry has, the others being as those behind
            query_lengths. Any strides.
        block_mask: A `streamkl_cupy.patterns.BlockPattern`: which blocks of keys each block of rows sees, per head.
            All of these but packing combine: a row sees a key that every one of them shows it, and both distributions,
            the teacher's too, are normalised over these keys alone.""",
    "RULES": """divergence: Which one, by name, of rows P of the teacher and Q of the student:
            <DIVERGENCES>.
        jsd_beta: Of "jsd", above 0 and below 1: how much the teacher counts. Default 0.5.
        smoothing: Of "jsd", 0 and more, less than 1: P and Q are (1 - smoothing) P + smoothing / n and the same of Q,
            over the n keys that the row sees. Default 0.
        layout: "bhnd" as above, or "bnhd" for (B, M, H, D) arrays, whose row results are (B, M, H).
        precision: Of products of float32 inputs on CUDA: "highest" is float32 accuracy, "high" is faster with about 16
            bits of mantissa. Other dtypes are exact already.
        deterministic: True asks for bit-equal results from run to run, False for the fastest path. None is what the
            framework is set to, `torch.use_deterministic_algorithms` or the flag `--xla_gpu_deterministic_ops` in
            XLA_FLAGS, and the fastest path where it says nothing.""",
    "WRT": """wrt: Names of the inputs to differentiate by, a tuple such as ("student_q", "student_k").""",
    "WEIGHT": """row_weight: Weight w of each row, an array that broadcasts to the rows. Default 1 everywhere. Weight 0
            keeps a row of NaN out of the value, not out of the gradients, as 0 x NaN is NaN: NaN in padded query rows
            reaches their own query gradients and all key gradients of their heads. Pack such sequences with
            cu_seqlens_q and cu_seqlens_k, or slice the padding away.""",
    "ERRORS": """TypeError: wrong kind of array or dtype, or arrays of several frameworks.
        ValueError: shapes or devices that do not fit together, or an unknown option.
        NotImplementedError: a combination that is not built; the message lists what is.
        StreamKLError: no usable driver, a failed compilation, or a first compilation under graph capture.""",
    "SINKS": """teacher_sink_logits: A logit per query head, (H,), that takes mass and has no value: one more outcome of
            each row that sees a key, included in log-sum-exps and entropies; rows that see none stay as they are, and
            so do heads whose logit is -inf. Only beside student_sink_logits, as the KL would be infinite, and the other
            way round with <SINKS_OF_STUDENTS>. Built for <SINKS_OF_ALL>.
        student_sink_logits: The same for the student, allowed alone.""",
    "DENSE": """dense_teacher_lse: teacher_lse of the same call without what restricts its keys, a natural logarithm
            (one in base 2, as other libraries keep it, must be multiplied by log(2) first). The result then has a
            fourth field, teacher_mass = exp(teacher_lse - dense_teacher_lse): the teacher's mass on the keys that the
            row sees, 0 where it sees none. A mass above 1 raises on the CPU; on a GPU values are not looked at.""",
    "ENTROPY": """return_entropy: Also return the teacher's entropy of each row, -sum_j P_j log P_j in nats, of the same
            pass and as a constant; 0 where the row sees no key.""",
    "DIVERGENCES": ";\n            ".join(
        textwrap.fill(f'"{name}" is {entry.formula}', 100, subsequent_indent=" " * 16)
        for name, entry in DIVERGENCES.items()
    ),
    "SCORES": ";\n            ".join(
        f'"{name}" is {entry.formula}' + (", of a scale of 1 by default" if entry.positive else "")
        for name, entry in SCORES.items()
    ),
    "NEEDS_VALUE": ",\n            ".join(
        f'gradients of "{name}" to the {" and the ".join(entry.needs_value)}'
        for name, entry in DIVERGENCES.items()
        if entry.needs_value
    ),
    "SINKS_OF_STUDENTS": listed(name for name, x in DIVERGENCES.items() if x.weighing and x.weighing.side == 1),
    "SINKS_OF_ALL": listed(name for name, x in DIVERGENCES.items() if x.weighing),
    "SOURCE": "One streaming pass over the keys, after StreamKL (arXiv:2606.20005).",
}


documented = documented_by(_TEXT)


def outside_programs(run: Callable[..., Any], *args: Any, **own: Any) -> Any:
    from . import torch

    return torch.outside_programs(run, *args, **own)


def loss(
    operands: tuple[Any, ...],
    given: dict[str, Any],
    *,
    op: Op = ATTENTION_KL,
    return_entropy: bool = False,
    **own: Any,
) -> Any:
    """A divergence of rows, reduced, whose operation has a teacher and a student."""
    asked, like = LossOptions(**own), operands[op.at]
    if return_entropy is not False:
        given = {**given, "return_entropy": return_entropy}
    if frameworks.is_torchs(like):
        # A plain import and a plain call, before anything else: torch.compile can trace these.
        from .torch import loss as of_tensors

        return of_tensors(op, operands, given, asked)
    call = Call.of(op, operands, with_sunk(given, asked))
    validate.loss(asked)
    sunk = call.options.sunk and validate.sinks(asked.sinks, call.options, asked)
    row_weight = asked.row_weight
    framework = frameworks.framework_of(op.like, like)
    door = frameworks.door(framework)
    if row_weight is not None or door is not None:
        found = {name: frameworks.framework_of(name, x) for name, x in zip(op.names, operands, strict=True)}
        if row_weight is not None:
            found["row_weight"] = validate.weight_framework(row_weight, framework)
        validate.one_framework(found)
    if door is not None:
        return door.loss(call, asked)
    ready = call.ready()
    view = ready.like
    weight = None
    if row_weight is not None:
        weight = validate.row_weight(row_weight, ready.checked.row_shape, ready.inputs[call.op.at])
    if view.framework not in frameworks.OWN:
        named = zip((*op.names, "row_weight"), (*operands, row_weight), strict=True)
        FRAMEWORKS[framework].check_no_gradient_wanted((name, x) for name, x in named if x is not None)
    dense = _dense_rows(asked.dense_teacher_lse, ready)
    sinks = _sink_logits(asked.sinks, ready) if sunk else None
    stats = ready.forward()
    if sinks is not None:
        _sink(stats, sinks, ready)
    kl, teacher_lse = stats.kl.array, stats.teacher_lse.array
    if weight is not None or asked.reduction != "none":
        with frameworks.on_device(view):
            kl = reductions.reduce_rows(frameworks.namespace(view), kl, teacher_lse, weight, asked.reduction)
    result = kl
    if asked.return_lse:
        result = _row_results(op, view, kl, stats, dense)
    elif stats.teacher_entropy is not None:
        result = KLEntropy(kl, stats.teacher_entropy.array)
    return frameworks.given_back(view, like, result)


def _sink_logits(given: Sinks, ready: Ready) -> Sinks:
    """Sinks' logits, checked, as they broadcast to the rows."""
    checked = ready.checked
    like = ready.inputs[checked.at]

    def one(name: str, z: Any) -> Any:
        z = FRAMEWORKS[like.framework].detached(validate.sink_logits(name, z, like))
        return z.reshape(validate.sink_shape(name, z, checked.row_shape, checked.problem.layout == "bnhd"))

    return Sinks(*[None if z is None else one(f"{side}_sink_logits", z) for side, z in zip(Sinks._fields, given)])


def _by_sinks(rows: list[Any], given: Sinks, ready: Ready) -> list[Any]:
    """Gradients by sinks' logits, from the upstream gradient, values and log-sum-exps of rows."""
    like = ready.inputs[ready.checked.at]
    xp = frameworks.namespace(like)
    with frameworks.on_device(like):
        grad, *found = rows
        spread = Sinks(*[None if z is None else sinks.spread(xp, z, found[0]) for z in given])
        both = sinks.gradients(xp, grad, tuple(found), spread, ready.checked.problem.divergence)
        return [None if z is None else sinks.summed(xp, x, z) for x, z in zip(both, given, strict=True)]


def _sink(stats: Results, given: Sinks, ready: Ready) -> None:
    """Change rows to those with sinks, in place."""
    like, divergence = ready.inputs[ready.checked.at], ready.checked.problem.divergence
    xp = frameworks.namespace(like)
    rows = (stats.kl.array, stats.teacher_lse.array, stats.student_lse.array)
    with frameworks.on_device(like):
        spread = Sinks(*[None if z is None else sinks.spread(xp, z, rows[0]) for z in given])
        if stats.teacher_entropy is not None and spread.teacher is not None:
            entropy = stats.teacher_entropy.array
            entropy[...] = sinks.entropy_with_sink(xp, entropy, rows[1], spread.teacher)
        for row, x in zip(rows, sinks.with_sinks(xp, rows, spread, divergence), strict=True):
            row[...] = x


def _forward(
    operands: tuple[Any, ...], given: dict[str, Any], dense_teacher_lse: Any, return_entropy: bool, **of_sinks: Any
) -> Any:
    if return_entropy is not False:
        given = {**given, "return_entropy": return_entropy}
    asked = LossOptions(dense_teacher_lse=dense_teacher_lse, **of_sinks)
    call = Call.of(ATTENTION_KL, operands, with_sunk(given, asked))
    sunk = call.options.sunk and validate.sinks(asked.sinks, call.options, asked)
    ready = call.ready()
    dense = _dense_rows(dense_teacher_lse, ready)
    like = ready.like
    if like.framework in DOORS:
        return frameworks.door(like.framework).forward(call, asked)
    found = _sink_logits(asked.sinks, ready) if sunk else None
    stats = ready.forward()
    if found is not None:
        _sink(stats, found, ready)
    return frameworks.given_back(like, operands[call.op.at], _row_results(call.op, like, stats.kl.array, stats, dense))


def _backward(
    arguments: tuple[Any, ...],
    given: dict[str, Any],
    saved: Any,
    wrt: Any,
    teacher_sink_logits: Any,
    student_sink_logits: Any,
    **parts: Any,
) -> KLGradients[Any] | KLSinkGradients[Any]:
    grad, *operands = arguments
    asked = LossOptions(teacher_sink_logits=teacher_sink_logits, student_sink_logits=student_sink_logits)
    call = Call.of(ATTENTION_KL, tuple(operands), with_sunk(given, asked))
    sunk = call.options.sunk and validate.sinks(asked.sinks, call.options)
    teacher_lse, student_lse, kl, moments = validate.saved_rows(saved, **parts)
    wrt = validate.wanted(call.op, wrt)
    moments = validate.rows_given(call.op, kl, moments, call.options.divergence, wrt)
    ready = call.ready(SavedArrays((grad, teacher_lse, student_lse, kl, moments)))
    like = ready.like
    ready.checked.backward_bytes(wrt)
    if sunk and kl is None:
        raise ValueError(
            "gradients by sinks need the row values: pass the whole result of attention_kl_forward as saved=, or its "
            "kl as kl="
        )
    if like.framework in DOORS:
        grads: Any = frameworks.door(like.framework).backward(call, (grad, teacher_lse, student_lse, kl, moments), wrt)
    else:
        grads = KLGradients(*ready.backward(wrt))
    if sunk:
        named = zip(("grad", "kl", "teacher_lse", "student_lse"), (grad, kl, teacher_lse, student_lse), strict=True)
        rows = [describe(name, x).array for name, x in named]
        grads = KLSinkGradients(*grads, *_by_sinks(rows, _sink_logits(asked.sinks, ready), ready))
    found: KLGradients[Any] | KLSinkGradients[Any] = frameworks.given_back(like, operands[call.op.at], grads)
    return found


def value_and_grad(
    operands: tuple[Any, ...],
    given: dict[str, Any],
    row_weight: Any,
    reduction: str,
    wrt: Any,
    op: Op = ATTENTION_KL,
    **of_sinks: Any,
) -> tuple[Any, KLGradients[Any] | KLSinkGradients[Any]]:
    """The same with its gradients, for who has no autograd."""
    asked = LossOptions(row_weight, reduction, **of_sinks)
    call = Call.of(op, operands, with_sunk(given, asked))
    sunk = call.options.sunk and validate.sinks(asked.sinks, call.options)
    wrt = validate.wanted(call.op, wrt)
    choice("reduction", reduction, REDUCTIONS)
    if reduction == "none":
        raise ValueError(
            'reduction="none" leaves no scalar to differentiate; allowed are "mean" and "sum". For a gradient per row '
            "call attention_kl_forward and attention_kl_backward"
        )
    ready = call.ready()
    like = ready.inputs[call.op.at]
    framework = FRAMEWORKS[like.framework]
    ready.checked.backward_bytes(wrt)
    if row_weight is not None:
        row_weight = framework.detached(validate.row_weight(row_weight, ready.checked.row_shape, like))
    if like.framework in DOORS:
        return frameworks.door(like.framework).value_and_grad(call, asked._replace(row_weight=row_weight), wrt)  # type: ignore[no-any-return]
    given_sinks = _sink_logits(asked.sinks, ready) if sunk else None
    stats = ready.forward()
    if given_sinks is not None:
        _sink(stats, given_sinks, ready)
    xp = frameworks.namespace(like)
    with frameworks.on_device(like):
        lse = None if ready.checked.every_row_sees else stats.teacher_lse.array
        value, share = reductions.value_and_gradient(xp, stats.kl.array, lse, row_weight, reduction)
        grad = reductions.spread(xp, value, share, ready.checked.row_shape)
    saved = call.op.Saved(describe("grad", grad), stats.teacher_lse, stats.student_lse, stats.kl, stats.moments)
    found = zip(op.names, ready.with_saved(saved).backward(wrt), strict=True)
    grads: Any = KLGradients(**{name: x for name, x in found if x is not None})
    if given_sinks is not None:
        rows = [grad, stats.kl.array, stats.teacher_lse.array, stats.student_lse.array]
        grads = KLSinkGradients(*grads, *_by_sinks(rows, given_sinks, ready))
    give = functools.partial(frameworks.given_back, like, operands[call.op.at])
    return give(value), give(grads)


def _plan(operands: tuple[Any, ...], given: dict[str, Any], op: str, **own: Any) -> Any:
    return plan_of(OPS[choice("op", op, (ATTENTION_KL.name,))], operands, given, **own)


def plan_of(
    op: Op, operands: tuple[Any, ...], given: dict[str, Any], wrt: Any, arch: str | None, return_entropy: bool
) -> Any:
    """What a call of a divergence would run."""
    given = {**given, "return_entropy": return_entropy}
    problem, _ = _problem(op, operands, given, wrt, None if arch is None else arrays.cuda(0))
    if arch is None:
        return runner_for(problem).plan
    return planning.make_plan(problem, planning.facts_for_arch(arch))


def _warmup(operands: tuple[Any, ...], given: dict[str, Any], op: str, **own: Any) -> None:
    warm_up(OPS[choice("op", op, (ATTENTION_KL.name,))], operands, given, **own)


def warm_up(op: Op, operands: tuple[Any, ...], given: dict[str, Any], wrt: Any, return_entropy: bool) -> None:
    """Have that compiled and loaded."""
    given = {**given, "return_entropy": return_entropy}
    problem, wrt = _problem(op, operands, given, wrt)
    runner_for(problem).warmup(wrt)


def _problem(
    op: Op, operands: tuple[Any, ...], given: dict[str, Any], wrt: Any, device: Device | None = None
) -> tuple[Problem, Wrt]:
    """What arrays or stand-ins ask for, with the gradients that are meant."""
    call = Call.of(op, operands, given)
    wrt = validate.wanted(call.op, wrt)
    problem = call.problem(device)
    validate.gradients_built(problem, wrt)
    return problem, wrt


def _dense_rows(dense: Any, ready: Ready) -> ArrayView | None:
    if dense is None:
        return None
    view = describe("dense_teacher_lse", dense)
    validate.row_array(view, ready.checked.row_shape, ready.checked.stat_dtype, ready.inputs[ready.checked.at])
    return view._replace(array=FRAMEWORKS[view.framework].detached(view.array))


def _row_results(op: Op, like: ArrayView, kl: Any, stats: Results, dense: ArrayView | None) -> Any:
    """What a forward gave, with `kl` as it is asked for, and the teacher's mass where its dense log-sum-exps came."""
    _, teacher_lse, student_lse, *others = [None if view is None else view.array for view in stats]
    mass = None
    if dense is not None:
        if dense.device.kind == "cpu":
            validate.dense_lse(arrays.host(stats.teacher_lse), arrays.host(dense))
        with frameworks.on_device(like):
            mass = reductions.teacher_mass(frameworks.namespace(like), teacher_lse, dense.array)
    elif op.given_sides:
        with frameworks.on_device(like):
            mass = reductions.target_mass(frameworks.namespace(like), teacher_lse)
    return rows_of(kl, teacher_lse, student_lse, mass, *others)


@overload
def attention_kl(
    teacher_q: Given,
    teacher_k: Given,
    student_q: Given,
    student_k: Given,
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[False] = False,
    **options: Unpack[SharedByLosses],
) -> Rows: ...
@overload
def attention_kl(
    teacher_q: Given,
    teacher_k: Given,
    student_q: Given,
    student_k: Given,
    *,
    return_lse: Literal[True],
    dense_teacher_lse: None = None,
    return_entropy: Literal[False] = False,
    **options: Unpack[SharedByLosses],
) -> KLForward[Rows]: ...
@overload
def attention_kl(
    teacher_q: Given,
    teacher_k: Given,
    student_q: Given,
    student_k: Given,
    *,
    return_lse: Literal[True],
    dense_teacher_lse: Given,
    return_entropy: Literal[False] = False,
    **options: Unpack[SharedByLosses],
) -> KLForwardMass[Rows]: ...
@overload
def attention_kl(
    teacher_q: Given,
    teacher_k: Given,
    student_q: Given,
    student_k: Given,
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[True],
    **options: Unpack[SharedByLosses],
) -> KLEntropy[Rows]: ...
@overload
def attention_kl(
    teacher_q: Given,
    teacher_k: Given,
    student_q: Given,
    student_k: Given,
    *,
    return_lse: Literal[True],
    dense_teacher_lse: Any = None,
    return_entropy: Literal[True],
    **options: Unpack[SharedByLosses],
) -> KLForwardRows[Rows]: ...
@overload
def attention_kl(
    teacher_q: A,
    teacher_k: A,
    student_q: A,
    student_k: A,
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[False] = False,
    **options: Unpack[SharedByLosses],
) -> A: ...
@overload
def attention_kl(
    teacher_q: A,
    teacher_k: A,
    student_q: A,
    student_k: A,
    *,
    return_lse: Literal[True],
    dense_teacher_lse: None = None,
    return_entropy: Literal[False] = False,
    **options: Unpack[SharedByLosses],
) -> KLForward[A]: ...
@overload
def attention_kl(
    teacher_q: A,
    teacher_k: A,
    student_q: A,
    student_k: A,
    *,
    return_lse: Literal[True],
    dense_teacher_lse: A,
    return_entropy: Literal[False] = False,
    **options: Unpack[SharedByLosses],
) -> KLForwardMass[A]: ...
@overload
def attention_kl(
    teacher_q: A,
    teacher_k: A,
    student_q: A,
    student_k: A,
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[True],
    **options: Unpack[SharedByLosses],
) -> KLEntropy[A]: ...
@overload
def attention_kl(
    teacher_q: A,
    teacher_k: A,
    student_q: A,
    student_k: A,
    *,
    return_lse: Literal[True],
    dense_teacher_lse: Any = None,
    return_entropy: Literal[True],
    **options: Unpack[SharedByLosses],
) -> KLForwardRows[A]: ...
@overload
def attention_kl(
    teacher_q: Any,
    teacher_k: Any,
    student_q: Any,
    student_k: Any,
    *,
    return_lse: bool,
    dense_teacher_lse: Any = None,
    return_entropy: bool = False,
    **options: Unpack[SharedByLosses],
) -> Any: ...
@public(loss)
@documented
def attention_kl(
    teacher_q: Any,
    teacher_k: Any,
    student_q: Any,
    student_k: Any,
    *,
    teacher_scale: float | None = None,
    student_scale: float | None = None,
    teacher_score: str = "dot",
    student_score: str = "dot",
    teacher_softcap: float | None = None,
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
    dense_teacher_lse: Any = None,
    return_entropy: bool = False,
    deterministic: bool | None = None,
    teacher_sink_logits: Any = None,
    student_sink_logits: Any = None,
) -> Any:
    """KL divergence of a student's attention rows from a teacher's, without their M x N matrices.

    For each batch entry, head and query row, over the keys that the row sees,

        P = softmax(teacher_scale q_t k_t^T)    Q = softmax(student_scale q_s k_s^T)
        KL = sum_j P_j (log P_j - log Q_j)

    <SOURCE>
    Differentiable to first order where the arrays are torch's (autograd, torch.func, torch.compile) or JAX's (grad,
    jit, vmap, shard_map). A row that sees no key has KL 0, log-sum-exps -inf and zero gradients; NaN or Inf that a row
    sees makes its KL NaN. CUDA arrays are computed on their GPU, on the caller's current stream; CPU arrays in NumPy.

    Args:
        <INPUTS>
        <OPTIONS>
        <WEIGHT>
        reduction: "none" (w KL per row), "sum", or "mean" = sum(w KL) / sum(w) over rows that see a key, 0 where that
            is 0 / 0.
        return_lse: Also return the log-sum-exps, as constants.
        <DENSE>
        <ENTROPY>
        <SINKS>

    Returns:
        KL in nats, (B, H, M) or without axes, in float32 (float64 where an input is), of the inputs' framework; with
        return_lse a `KLForward` that holds it (with dense_teacher_lse a `KLForwardMass`), with return_entropy alone a
        `KLEntropy`, and a `KLForwardRows` where there is more.

    Accuracy:
        |error| <= 2e-6 (1 + KL) + 6e-8 c on ordinary data, against float64 on the same rounded inputs, where c is how
        far KL moves when every product behind a logit moves by its own size.

    Raises:
        <ERRORS>

    Example:
        >>> import numpy as np, streamkl_cupy
        >>> q = np.ones((1, 1), np.float32)
        >>> k_t, k_s = np.log([[1.0], [3.0]]).astype(np.float32), np.zeros((2, 1), np.float32)
        >>> round(float(streamkl_cupy.attention_kl(q, k_t, q, k_s)[0]), 4)  # KL((1/4, 3/4) || (1/2, 1/2))
        0.1308
    """


@overload
def attention_kl_forward(
    teacher_q: Given,
    teacher_k: Given,
    student_q: Given,
    student_k: Given,
    *,
    dense_teacher_lse: None = None,
    return_entropy: Literal[False] = False,
    teacher_sink_logits: Any = None,
    student_sink_logits: Any = None,
    **options: Unpack[Shared],
) -> KLForward[Rows]: ...
@overload
def attention_kl_forward(
    teacher_q: Given,
    teacher_k: Given,
    student_q: Given,
    student_k: Given,
    *,
    dense_teacher_lse: Given,
    return_entropy: Literal[False] = False,
    teacher_sink_logits: Any = None,
    student_sink_logits: Any = None,
    **options: Unpack[Shared],
) -> KLForwardMass[Rows]: ...
@overload
def attention_kl_forward(
    teacher_q: Given,
    teacher_k: Given,
    student_q: Given,
    student_k: Given,
    *,
    dense_teacher_lse: Any = None,
    return_entropy: Literal[True],
    teacher_sink_logits: Any = None,
    student_sink_logits: Any = None,
    **options: Unpack[Shared],
) -> KLForwardRows[Rows]: ...
@overload
def attention_kl_forward(
    teacher_q: A,
    teacher_k: A,
    student_q: A,
    student_k: A,
    *,
    dense_teacher_lse: None = None,
    return_entropy: Literal[False] = False,
    teacher_sink_logits: Any = None,
    student_sink_logits: Any = None,
    **options: Unpack[Shared],
) -> KLForward[A]: ...
@overload
def attention_kl_forward(
    teacher_q: A,
    teacher_k: A,
    student_q: A,
    student_k: A,
    *,
    dense_teacher_lse: A,
    return_entropy: Literal[False] = False,
    teacher_sink_logits: Any = None,
    student_sink_logits: Any = None,
    **options: Unpack[Shared],
) -> KLForwardMass[A]: ...
@overload
def attention_kl_forward(
    teacher_q: A,
    teacher_k: A,
    student_q: A,
    student_k: A,
    *,
    dense_teacher_lse: Any = None,
    return_entropy: Literal[True],
    teacher_sink_logits: Any = None,
    student_sink_logits: Any = None,
    **options: Unpack[Shared],
) -> KLForwardRows[A]: ...
@public(_forward, outside_programs=outside_programs)
@documented
def attention_kl_forward(  # type: ignore[empty-body]  # as are all: see @public
    teacher_q: Any,
    teacher_k: Any,
    student_q: Any,
    student_k: Any,
    *,
    teacher_scale: float | None = None,
    student_scale: float | None = None,
    teacher_score: str = "dot",
    student_score: str = "dot",
    teacher_softcap: float | None = None,
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
    layout: Layout = "bhnd",
    precision: Precision = "highest",
    dense_teacher_lse: Any = None,
    return_entropy: bool = False,
    deterministic: bool | None = None,
    teacher_sink_logits: Any = None,
    student_sink_logits: Any = None,
) -> KLForward[Any] | KLForwardMass[Any] | KLForwardRows[Any]:
    """Row values and log-sum-exps, outside every autograd: the first half of a hand-written gradient.

    KL = sum_j P_j (log P_j - log Q_j) and LSE = log sum_j exp(logit_j), natural logarithms; see `attention_kl`.
    <SOURCE>
    Pure: inputs that require gradients are read as they are, and results are detached.

    Args:
        <INPUTS>
        <OPTIONS>
        <DENSE>
        <ENTROPY>
        <SINKS>

    Returns:
        `KLForward` of (B, H, M) arrays, float32 (float64 where an input is), of the inputs' framework; with
        dense_teacher_lse a `KLForwardMass`, with return_entropy a `KLForwardRows`; so where the divergence has moments.

    Accuracy:
        |error of KL| <= 2e-6 (1 + KL) + 6e-8 c on ordinary data, where c is how far KL moves when every product behind
        a logit moves by its own size.

    Raises:
        <ERRORS>

    Example:
        >>> import numpy as np, streamkl_cupy
        >>> q, k = np.ones((1, 1), np.float32), np.zeros((2, 1), np.float32)
        >>> rows = streamkl_cupy.attention_kl_forward(q, k, q, k)
        >>> float(rows.kl[0]), round(float(rows.teacher_lse[0]), 4)  # two equal logits: log 2
        (0.0, 0.6931)
    """


@public(
    _backward,
    "What the forward saved goes by name: saved=forward, the whole result of attention_kl_forward(...), or "
    "teacher_lse=, student_lse= and kl=, which look alike",
    outside_programs=outside_programs,
)
@documented
def attention_kl_backward(  # type: ignore[empty-body]  # as are all: see @public
    grad: Any,
    teacher_q: A,
    teacher_k: A,
    student_q: A,
    student_k: A,
    *,
    saved: SavedRows | None = None,
    teacher_lse: Any = None,
    student_lse: Any = None,
    kl: Any = None,
    moments: Any = None,
    wrt: Wrt = STUDENT,
    teacher_scale: float | None = None,
    student_scale: float | None = None,
    teacher_score: str = "dot",
    student_score: str = "dot",
    teacher_softcap: float | None = None,
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
    layout: Layout = "bhnd",
    precision: Precision = "highest",
    deterministic: bool | None = None,
    teacher_sink_logits: Any = None,
    student_sink_logits: Any = None,
) -> KLGradients[A]:
    """Gradients from what the forward saved, outside every autograd: the second half.

    With g = grad of the row,

        dS = g (Q - P)                               dq_s = student_scale dS k_s      dk_s = student_scale dS^T q_s
        dT = g P ((log P - log Q) - KL)              dq_t = teacher_scale dT k_t      dk_t = teacher_scale dT^T q_t

    <SOURCE>
    Pure: it may be called again with the same saved values. Key gradients are summed over the query heads that
    read the key.

    Args:
        grad: Derivative of the loss by each row's KL (per nat), (B, H, M), dtype of `kl`; any strides, so an expanded
            scalar too.
        <INPUTS>
        saved: The whole result of `attention_kl_forward`, called with the same inputs and options.
        teacher_lse: In place of `saved`, its parts one by one; by name only, because all of them look alike.
        student_lse: Likewise.
        kl: Likewise; needed only for
            <NEEDS_VALUE>.
        moments: Likewise; needed only where the forward returned some.
        <WRT>
        <SINKS>
            Those of the forward: without them query gradients may lack a part.
        <OPTIONS>

    Returns:
        `KLGradients`, None where `wrt` does not ask; with sinks `KLSinkGradients`, which has theirs too.

    Accuracy:
        Relative L2 error <= 4e-3 for bfloat16, 5e-4 for float16 and 1e-5 for float32 inputs. Gradients below 6e-5, as
        those of a mean over many rows, have fewer digits in float16. Where the mean key is rho times as long as keys
        are spread, query gradients of 16-bit inputs on a GPU have bounds sqrt(1 + rho^2) times as large, and those of
        float32 inputs, of keys too, rho / 5 times from rho = 5 on.

    Raises:
        <ERRORS>

    Example:
        >>> import numpy as np, streamkl_cupy
        >>> q, k_t, k_s = np.ones((1, 1)), np.log([[1.0], [3.0]]), np.zeros((2, 1))
        >>> rows = streamkl_cupy.attention_kl_forward(q, k_t, q, k_s)
        >>> grads = streamkl_cupy.attention_kl_backward(np.ones(1), q, k_t, q, k_s, saved=rows, wrt=("student_k",))
        >>> grads.student_k.ravel().round(4).tolist()  # Q - P = (1/2, 1/2) - (1/4, 3/4)
        [0.25, -0.25]
    """


@overload
def attention_kl_value_and_grad(
    teacher_q: A,
    teacher_k: A,
    student_q: A,
    student_k: A,
    *,
    row_weight: Any = None,
    reduction: Literal["sum", "mean"] = "mean",
    wrt: Wrt = STUDENT,
    teacher_sink_logits: A | None = None,
    student_sink_logits: A,
    **options: Unpack[Shared],
) -> tuple[A, KLSinkGradients[A]]: ...
@overload
def attention_kl_value_and_grad(
    teacher_q: Given,
    teacher_k: Given,
    student_q: Given,
    student_k: Given,
    *,
    row_weight: Any = None,
    reduction: Literal["sum", "mean"] = "mean",
    wrt: Wrt = STUDENT,
    teacher_sink_logits: Any = None,
    student_sink_logits: Any = None,
    **options: Unpack[Shared],
) -> tuple[Rows, KLGradients[Given]]: ...
@overload
def attention_kl_value_and_grad(
    teacher_q: A,
    teacher_k: A,
    student_q: A,
    student_k: A,
    *,
    row_weight: Any = None,
    reduction: Literal["sum", "mean"] = "mean",
    wrt: Wrt = STUDENT,
    teacher_sink_logits: Any = None,
    student_sink_logits: Any = None,
    **options: Unpack[Shared],
) -> tuple[A, KLGradients[A]]: ...
@public(value_and_grad, outside_programs=outside_programs)
@documented
def attention_kl_value_and_grad(  # type: ignore[empty-body]  # as are all: see @public
    teacher_q: Any,
    teacher_k: Any,
    student_q: Any,
    student_k: Any,
    *,
    teacher_scale: float | None = None,
    student_scale: float | None = None,
    teacher_score: str = "dot",
    student_score: str = "dot",
    teacher_softcap: float | None = None,
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
    teacher_sink_logits: Any = None,
    student_sink_logits: Any = None,
) -> tuple[Any, KLGradients[Any] | KLSinkGradients[Any]]:
    """A loss over all rows and its gradients, outside every autograd: one training step in one call.

    loss = sum(w KL) or sum(w KL) / sum(w), and its derivatives by the inputs named in `wrt`; see `attention_kl` and
    `attention_kl_backward`.
    <SOURCE>

    Args:
        <INPUTS>
        <OPTIONS>
        <WEIGHT>
        reduction: "mean" or "sum"; "none" has no single gradient.
        <WRT>
        <SINKS>

    Returns:
        The loss in nats without axes, and `KLGradients`; with sinks `KLSinkGradients`, which has theirs too.

    Accuracy:
        As for `attention_kl` and `attention_kl_backward`.

    Raises:
        <ERRORS>

    Example:
        >>> import numpy as np, streamkl_cupy
        >>> q, k_t, k_s = np.ones((1, 1)), np.log([[1.0], [3.0]]), np.zeros((2, 1))
        >>> loss, grads = streamkl_cupy.attention_kl_value_and_grad(q, k_t, q, k_s)
        >>> round(float(loss), 4), grads.student_k.ravel().round(4).tolist()
        (0.1308, [0.25, -0.25])
    """


@public(_plan)
@documented
def plan(  # type: ignore[empty-body]  # as are all: see @public
    teacher_q: Any,
    teacher_k: Any,
    student_q: Any,
    student_k: Any,
    *,
    teacher_scale: float | None = None,
    student_scale: float | None = None,
    teacher_score: str = "dot",
    student_score: str = "dot",
    teacher_softcap: float | None = None,
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
    layout: Layout = "bhnd",
    precision: Precision = "highest",
    deterministic: bool | None = None,
    return_entropy: bool = False,
    wrt: Wrt = STUDENT,
    op: Literal["attention_kl"] = "attention_kl",
    arch: str | None = None,
) -> AnyPlan:
    """What a call with these arguments would run: kernels, tiles, shared memory, grid. Prints itself; launches nothing.

    <SOURCE>
    The plan says how that pass is cut into blocks and tiles. In place of arrays it takes anything with a shape and a
    dtype, as a compact array on the current GPU, or on the CPU where there is no usable GPU.

    Args:
        <INPUTS>
        <OPTIONS>
        return_entropy: With the teacher's entropy of each row.
        <WRT>
        op: The operation that is asked about; "attention_kl" is the only one.
        arch: Plan for a GPU of this architecture, such as "sm_80" or "sm_90", whether one is here or not.

    Returns:
        A frozen plan; `print` it.

    Raises:
        <ERRORS>

    Example:
        >>> import numpy as np, streamkl_cupy
        >>> q = np.empty((2, 8, 4096, 128), np.float16)
        >>> print(streamkl_cupy.plan(q, q, q, q, causal=True, arch="sm_90"))  # doctest: +ELLIPSIS
        attention KL on cuda:0: B=2 H=8 M=4096 N=4096, mask causal...
    """


@public(_warmup)
@documented
def warmup(
    teacher_q: Any,
    teacher_k: Any,
    student_q: Any,
    student_k: Any,
    *,
    teacher_scale: float | None = None,
    student_scale: float | None = None,
    teacher_score: str = "dot",
    student_score: str = "dot",
    teacher_softcap: float | None = None,
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
    layout: Layout = "bhnd",
    precision: Precision = "highest",
    deterministic: bool | None = None,
    return_entropy: bool = False,
    wrt: Wrt = STUDENT,
    op: Literal["attention_kl"] = "attention_kl",
) -> None:
    """Compile, load and configure all that a call with these arguments needs, and launch nothing.

    Call it before capturing a CUDA graph or timing a loop: neither may contain a compilation. Compiled kernels are also
    kept on disk, so a second process starts faster. In place of arrays it takes anything with a shape and a dtype, as a
    compact array on the current GPU, or on the CPU, where there is nothing to do.
    <SOURCE>

    Args:
        <INPUTS>
        <OPTIONS>
        return_entropy: With the teacher's entropy of each row.
        <WRT>
        op: The operation to make ready; "attention_kl" is the only one.

    Returns:
        None, when everything is in place.

    Raises:
        <ERRORS>

    Example:
        >>> import numpy as np, streamkl_cupy
        >>> q = np.empty((2, 8, 4096, 128), np.float16)
        >>> streamkl_cupy.warmup(q, q, q, q, causal=True)
    """

"""Arguments in, a frozen `Problem` out, or an error that names the argument, what came and what is allowed.

TypeError is for kinds and dtypes, ValueError for shapes and options, NotImplementedError for what is not built. Nothing
here touches the contents of an array, and nothing has been launched or allocated when it raises.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arguments import a_kind_of, choice, listed, with_article
from .arrays import ArrayView, Inputs, MaskArrays
from .frameworks import conversion, framework_of
from .frameworks.base import dtype_label, known
from .ops import Op, OperandSpec
from .options import LAYOUTS, REDUCTIONS, LossOptions, settings
from .planning import no_gradients
from .problem import Operand, Problem, Side, canonical_strides, compact_strides
from .rules import masks as rules
from .rules.divergences import DIVERGENCES, given_parameters
from .rules.scores import SCORES
from .rules.scores.given import LOG_PROBABILITY, PROBABILITY
from .rules.sinks import Sinks
from .rules.sinks import check as check_sinks

MAX_SCALE = 2e38  # times log2(e) it must still be a float32


def _example(op: Op) -> str:
    names = ", ".join(f'"{name}"' for name in op.wrt)
    return f"wrt=({names})"


def wanted(op: Op, wrt: Any) -> tuple[str, ...]:
    """The names of `wrt`, checked."""
    if isinstance(wrt, str):
        raise TypeError(f"wrt={wrt!r} is a string; write it as a tuple: wrt=({wrt!r},)")
    if not isinstance(wrt, (tuple, list)):
        raise TypeError(f"wrt is {a_kind_of(wrt)}; pass a tuple of argument names, such as {_example(op)}")
    for name in wrt:
        if not isinstance(name, str) or name not in op.by:
            raise ValueError(f"wrt names {name!r}; allowed are {listed(op.by)}")
    if not wrt:
        raise ValueError(f"wrt is empty; name at least one input, such as {_example(op)}")
    if len(set(wrt)) != len(wrt):
        raise ValueError(f"wrt={tuple(wrt)!r} names an input twice; name each once")
    return tuple(wrt)


@lru_cache(maxsize=256)
def reads_value(op: Op, divergence: str, wrt: tuple[str, ...]) -> tuple[str, ...]:
    """The inputs among those named whose gradients read the row's value."""
    return op.on(DIVERGENCES[divergence].needs_value, wrt)


def rows_given(op: Op, kl: Any, moments: Any, divergence: str, wrt: tuple[str, ...]) -> Any:
    """Refuse gradients that read the row's value or moments where none came; the moments, where they are read."""
    reading = reads_value(op, divergence, wrt)
    if kl is None and reading:
        raise ValueError(
            f"wrt asks for {reading[0]}, whose gradient needs the row values: pass the whole result of "
            f"attention_kl_forward as saved=, or its kl as kl="
        )
    if not DIVERGENCES[divergence].moments:
        return None
    if moments is None:
        raise ValueError(
            f"gradients of {divergence!r} need the moments of the rows: pass the whole result of attention_kl_forward "
            f"as saved=, or its moments as moments="
        )
    return moments


def saved_rows(
    saved: Any, teacher_lse: Any, student_lse: Any, kl: Any, moments: Any = None
) -> tuple[Any, Any, Any, Any]:
    """What a forward saved, given as a whole or part by part: both log-sum-exps, and the values and moments if there
    are any."""
    parts = {"teacher_lse": teacher_lse, "student_lse": student_lse, "kl": kl, "moments": moments}
    given = [name for name, x in parts.items() if x is not None]
    if saved is None:
        missing = [name for name in ("teacher_lse", "student_lse") if name not in given]
        if missing:
            raise TypeError(
                f"{' and '.join(missing)} came neither in saved= nor alone; pass saved=forward, the whole result of "
                f"attention_kl_forward(...) on the same inputs"
            )
        return teacher_lse, student_lse, kl, moments
    if given:
        raise TypeError(f"saved came together with {given[0]}, which it holds already; pass one of them")
    try:
        if getattr(saved.kl, "shape", None) == ():
            raise TypeError(
                "saved.kl is one number, a sum or a mean; pass the result of attention_kl_forward, or of "
                'attention_kl with reduction="none"'
            )
        return saved.teacher_lse, saved.student_lse, saved.kl, getattr(saved, "moments", None)
    except AttributeError:
        raise TypeError(
            f"saved is {a_kind_of(saved)}; allowed is what attention_kl_forward returns, whole: the three arrays of "
            f"its rows look alike, so a plain sequence of them could be in any order"
        ) from None


def attention_saved(saved: Any) -> tuple[Any, Any]:
    """Outputs and log-sum-exps that a forward saved."""
    if saved is None:
        raise TypeError(
            "saved is missing; pass saved=forward, the whole result of sparse_attention_forward(...) on the same inputs"
        )
    try:
        return saved.out, saved.lse
    except AttributeError:
        raise TypeError(
            f"saved is {a_kind_of(saved)}; allowed is what sparse_attention_forward or merge_attention_states "
            f"returns, with its fields out and lse"
        ) from None


def gradients_built(problem: Problem, wrt: tuple[str, ...]) -> None:
    """Refuse gradients that no kernel computes."""
    if problem.device.kind != "cuda":
        return
    op = problem.operation
    lacking = {side: reason for side in op.sides if (reason := no_gradients(problem, side))}
    for side, reason in lacking.items():
        if op.on((side,), wrt):
            rest = op.on(set(op.sides) - set(lacking), op.names)
            names = " and ".join(x.name for x in op.side(side))
            raise NotImplementedError(
                f"gradients to {names} are {reason}; built for it: wrt of {listed(rest) or 'nothing'}"
            )


def one_framework(found: dict[str, str]) -> str:
    """The framework that all named arguments share."""
    (first, framework), *rest = found.items()
    for name, other in rest:
        if other != framework:
            if known(other).prevails > known(framework).prevails:
                way = conversion(first, framework, other)
            else:
                way = conversion(name, other, framework)
            raise TypeError(
                f"{first} is {with_article(framework)} array, but {name} is {with_article(other)} array; all arrays of "
                f"a call come from one framework, because no copy is made behind your back. Convert one of them: {way}"
            )
    return framework


def not_of(framework: str, name: str, x: Any) -> TypeError:
    """The error about an input that is not of the framework of student_q, for those who know it before they read."""
    if x is None:
        return TypeError(f"{name} is None, not an array; it is needed in every call")
    other = "dlpack" if hasattr(x, "__dlpack__") and not isinstance(x, np.ndarray) else "numpy"
    return TypeError(
        f"{name} is {a_kind_of(x)}; allowed here are {framework} arrays, as all arrays of a call come from one "
        f"framework. Make one: {conversion(name, other, framework)}"
    )


def to_problem(op: Op, inputs: Inputs, chosen: Any, masks: MaskArrays | None = None) -> Problem:
    """Check views against each other and freeze what they ask for."""
    first = inputs[0]
    for view in inputs[1:]:
        same_place(first, view)
    masks = masks or {}
    for x in masks.values():
        same_place(first, x)
    given = {name: view.shape for name, view in masks.items()}
    packing = rules.packing(given)
    if packing is not None:
        packing.check(chosen, given, {view.name: view.shape for view in inputs})
        chosen = chosen._replace(layout=packing.layout)
    extents = _operands(op, inputs, chosen.layout)
    q, k = op.pair(op.operand[op.like].side)
    batch, heads, queries, _ = extents[q.name]
    keys = extents[k.name][2]
    sizes = rules.Extents(batch, heads, queries, keys, len(first.shape))
    _check_mask_arrays(masks, sizes)
    asked = rules.Asked(chosen, given, sizes, packing.sequences(given) if packing is not None else 0)
    rules.check(asked)
    operands = {x.name: _operand(x, extents[x.name], chosen.layout) for x in inputs}
    sides = {side: _side(op, side, operands, chosen) for side in op.sides}
    if "float64" not in [side.dtype for side in sides.values()]:
        for name, side in sides.items():
            _check_float32(op, name, side)
    return Problem(
        batch=batch,
        heads=heads,
        queries=queries,
        keys=keys,
        distributions=tuple(sides.values()),
        mask=rules.spec_of(asked),
        device=first.device,
        layout=chosen.layout,
        rank=len(first.shape),
        deterministic=bool(chosen.deterministic),
        sequences=asked.sequences,
        parameters=given_parameters(chosen._asdict()),
        op=op.name,
        extras=tuple(operands[x.name] for x in op.operands if x.extra),
        settings=settings(op, chosen),
        **{field: getattr(chosen, option) for option, field in op.problem_fields},
    )


def _check_mask_arrays(masks: MaskArrays, extents: rules.Extents) -> None:
    """Check shapes and strides of those that were given."""
    for name, view in masks.items():
        if misfit := rules.ARRAYS[name].misfit(view.shape, extents):
            raise ValueError(f"{name}: shape {view.shape}{misfit}")
        if not rules.ARRAYS[name].bits and view.strides != compact_strides(view.shape):
            raise ValueError(
                f"{name}: stride {view.strides[0]} between its {view.shape[0]} elements; allowed is 1, a contiguous "
                f"array. Pass {known(view.framework).contiguous(name, view.device)}"
            )


def same_place(first: ArrayView, view: ArrayView) -> None:
    """One framework and one device for all arrays of a call."""
    if view.framework != first.framework:
        one_framework({first.name: first.framework, view.name: view.framework})
    if view.device is not first.device:
        same_device(first.name, first.device, view.name, view.device)


def row_array(view: ArrayView, row_shape: tuple[int, ...], dtype: str, like: ArrayView) -> None:
    """Check an array with one value per query row: grad, kl or a log-sum-exp."""
    if view.shape != row_shape or view.dtype != dtype:
        one_per_row(view.name, view, row_shape, dtype)
    same_place(like, view)


def saved_array(view: ArrayView, result: str, shape: tuple[int, ...], dtype: str, like: ArrayView) -> None:
    """Check an array that a backward reads: a result of the forward, or a derivative of one."""
    if len(shape) < len(like.shape):
        row_array(view, shape, dtype, like)
        return
    if view.shape != shape:
        what = "of the forward, which gave" if view.name == result else f"the derivative of {result}, which has"
        raise ValueError(f"{view.name}: shape {view.shape}, but it is {what} {shape}")
    if view.dtype != dtype:
        raise TypeError(f"{view.name}: dtype {view.dtype}, but {result} of this call is {dtype}; convert it")
    same_place(like, view)


# The checks from here to `weights` read no memory, and are plain enough for torch.compile to trace.


def one_per_row(name: str, x: Any, row_shape: tuple[int, ...], dtype: Any) -> None:
    """Check shape and dtype of what has one value per query row."""
    if tuple(x.shape) != tuple(row_shape):
        raise ValueError(
            f"{name}: shape {tuple(x.shape)}, but there is one value per query row: expected {tuple(row_shape)}"
        )
    if x.dtype != dtype:
        raise TypeError(f"{name}: dtype {x.dtype}, but the rows of this call are {dtype}; convert it")


def same_device(first: str, here: Any, name: str, there: Any) -> None:
    """One device for all arrays of a call."""
    if here != there:
        raise ValueError(
            f"{first} is on {here}, but {name} is on {there}; all arrays of a call live on one device. "
            f"Move {name} first"
        )


def loss(asked: LossOptions) -> None:
    """Check how row values are to be reduced, and what is asked for beside them."""
    if type(asked.reduction) is not str or asked.reduction not in REDUCTIONS:
        choice("reduction", asked.reduction, REDUCTIONS)
    if asked.dense_teacher_lse is not None and not asked.return_lse:
        raise ValueError("dense_teacher_lse gives the teacher's mass beside the log-sum-exps: pass return_lse=True too")


def weights(weight: Any, row_shape: tuple[int, ...]) -> None:
    """Check that weights are real numbers that broadcast to the rows."""
    label = dtype_label(weight.dtype)
    if not label.startswith(("float", "bfloat", "int", "uint", "bool")):
        raise TypeError(f"row_weight has dtype {label}; allowed are real numbers and bool")
    shape, full = tuple(weight.shape), tuple(row_shape)
    if len(shape) > len(full) or not all(n == 1 or n == m for n, m in zip(reversed(shape), reversed(full))):
        raise ValueError(f"row_weight: shape {shape} does not broadcast to the rows {full}")


def dense_lse(lse: NDArray[Any], dense: NDArray[Any]) -> None:
    """Check, where values can be read, that no row sees more of the teacher than there is of it."""
    # Rounding is relative to what the logits are made of, which both hold; a wrong base or scale is off by far more.
    slack = np.where(np.isfinite(dense), 1e-2 * (1 + np.abs(dense)), 0)
    above = lse > dense + slack
    if above.any():
        at = tuple(int(i) for i in np.unravel_index(np.argmax(above), above.shape))
        raise ValueError(
            f"dense_teacher_lse{list(at)} is {dense[at]:.6g}, but the keys that the row sees have {lse[at]:.6g} "
            f"already, so its teacher_mass would be above 1. Pass teacher_lse of the same call without masks; it is a "
            f"natural logarithm: multiply one in base 2 by log(2)"
        )


def states(outs: Any, lses: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Check outputs and log-sum-exps of parts of the keys against each other."""
    for name, parts in (("outs", outs), ("lses", lses)):
        if not isinstance(parts, (tuple, list)):
            raise TypeError(f"{name} is {a_kind_of(parts)}; pass a list of arrays, one for each part of the keys")
    if len(outs) != len(lses) or not outs:
        raise ValueError(f"outs has {len(outs)} arrays and lses {len(lses)}; pass both of each part, and one at least")
    for i, (out, lse) in enumerate(zip(outs, lses)):
        for name, x, like in ((f"outs[{i}]", out, outs[0]), (f"lses[{i}]", lse, lses[0])):
            if not hasattr(x, "shape") or not hasattr(x, "dtype"):
                raise TypeError(f"{name} is {a_kind_of(x)}; allowed are arrays of one framework")
            if tuple(x.shape) != tuple(like.shape) or dtype_label(x.dtype) != dtype_label(like.dtype):
                first = f"{name[:4]}[0]"
                raise ValueError(
                    f"{name}: shape {tuple(x.shape)} and dtype {dtype_label(x.dtype)}, but {first} has "
                    f"{tuple(like.shape)} and {dtype_label(like.dtype)}; parts are of the same rows"
                )
    if not outs[0].shape or tuple(lses[0].shape) != tuple(outs[0].shape[:-1]):
        raise ValueError(
            f"lses[0]: shape {tuple(lses[0].shape)}, but outs[0] has {tuple(outs[0].shape)}; log-sum-exps have one "
            f"value for each of its rows: expected {tuple(outs[0].shape[:-1])}"
        )
    if dtype_label(lses[0].dtype) not in ("float32", "float64"):
        raise TypeError(
            f"lses[0] has dtype {dtype_label(lses[0].dtype)}; allowed are float32 and float64, as they were returned"
        )
    return tuple(outs), tuple(lses)


def sinks(given: Sinks, options: Any, asked: LossOptions | None = None) -> bool:
    """Check sinks before anything is read; whether there are any."""
    check_sinks(given, options.divergence)
    some = any(z is not None for z in given)
    if some and asked is not None and asked.dense_teacher_lse is not None:
        raise NotImplementedError(
            "dense_teacher_lse beside sinks: a mass of keys is built without sinks; take the log-sum-exps of both "
            "calls, return_lse=True, and exp(lse - dense_lse) of what is meant"
        )
    return some


def sink_shape(name: str, z: Any, row_shape: Sequence[int], heads_last: bool) -> tuple[int, ...]:
    """Check the shape and dtype of a sink's logits, one for each head; the shape that broadcasts to the rows."""
    heads = 1 if len(row_shape) == 1 else row_shape[-1 if heads_last else -2]
    if tuple(z.shape) != (heads,):
        raise ValueError(
            f"{name}: shape {tuple(z.shape)}, but there is one logit for each of the {heads} query heads: expected "
            f"({heads},)"
        )
    label = dtype_label(z.dtype)
    if not label.startswith(("float", "bfloat")):
        raise TypeError(f"{name} has dtype {label}; allowed are floating-point numbers")
    return (heads,) if heads_last or len(row_shape) == 1 else (heads, 1)


def sink_logits(name: str, z: Any, like: ArrayView) -> Any:
    """A sink's logits as the rows' library takes them."""
    if not hasattr(z, "shape") or isinstance(z, np.generic):
        raise TypeError(
            f"{name} is {a_kind_of(z)}; pass an array of the inputs' framework, one logit for each query head"
        )
    one_framework({like.name: like.framework, name: framework_of(name, z)})
    z = known(like.framework).values(name, z)
    same_device(like.name, getattr(like.array, "device", None), name, getattr(z, "device", None))
    return z


def weight_framework(weight: Any, framework: str) -> str:
    """The framework of weights, which must be an array; `framework` is that of the inputs."""
    if not hasattr(weight, "shape") or isinstance(weight, np.generic):
        raise TypeError(
            f"row_weight is {a_kind_of(weight)}; pass an array of the inputs' framework, that broadcasts to the rows: "
            f"{conversion('row_weight', 'numpy', framework)}"
        )
    return framework_of("row_weight", weight)


def row_weight(weight: Any, row_shape: tuple[int, ...], like: ArrayView) -> Any:
    """Weights as the rows' library takes them: real numbers of the inputs' framework that broadcast to the rows."""
    one_framework({like.name: like.framework, "row_weight": weight_framework(weight, like.framework)})
    weight = known(like.framework).values("row_weight", weight)
    same_device(like.name, getattr(like.array, "device", None), "row_weight", getattr(weight, "device", None))
    weights(weight, row_shape)
    return weight


_Extents = dict[str, tuple[int, int, int, int]]


def _operands(op: Op, views: Sequence[ArrayView], layout: str) -> _Extents:
    """Check operands against each other, as the operation says; (batch, heads, rows, columns) of each."""
    first = views[0]
    rank = len(first.shape)
    if not 2 <= rank <= 4:
        raise ValueError(
            f"{first.name}: shape {first.shape} has {rank} axes; allowed are 4, {LAYOUTS[layout]}, "
            f"3 without batch, and 2 without heads"
        )
    for view in views[1:]:
        if len(view.shape) != rank:
            raise ValueError(
                f"{view.name}: shape {view.shape} has {len(view.shape)} axes, but {first.name} {first.shape} has "
                f"{rank}; all inputs have the same number"
            )
    extents = {view.name: _extents(view, layout) for view in views}
    of = {view.name: view for view in views}
    for side in op.sides:
        _one_type(op, [of[x.name] for x in op.side(side)])
    for x, axis, other in op.alike:
        _must_agree(x, other, axis, extents)
    for x in op.operands:
        dim = extents[x.name][3]
        if op.given(x.side):
            continue
        if dim < 1:
            raise ValueError(f"{x.name}: head dim 0; allowed are 1 to {x.max_dim} for the {x.side}")
        if dim > x.max_dim:
            raise NotImplementedError(f"{x.name}: head dim {dim}; built are 1 to {x.max_dim} for the {x.side}")
    for q, k in (op.pair(side) for side in op.sides if not op.given(side)):
        _divide(k.name, extents[k.name][1], q.name, extents[q.name][1])
    return extents


def _one_type(op: Op, views: Sequence[ArrayView]) -> None:
    """Check the element types of the operands of a side."""
    for view in views:
        if view.dtype == "float64" and view.device.kind == "cuda":
            raise TypeError(
                f"{view.name} is float64 on {view.device}; allowed on CUDA are bfloat16, float16 and float32. "
                f"Convert to float32, or compute on the CPU, which has float64"
            )
    first = views[0]
    for view in views[1:]:
        if view.dtype != first.dtype:
            differ = f" ({' and '.join(op.sides)} may differ)" if len(op.sides) > 1 else ""
            raise TypeError(
                f"{view.name} is {view.dtype}, but {first.name} is {first.dtype}; queries and keys of one side share "
                f"a dtype{differ}"
            )


def _divide(name: str, key_heads: int, other: str, heads: int) -> None:
    if (key_heads == 0) != (heads == 0) or (key_heads and heads % key_heads):
        raise ValueError(
            f"{name}: {key_heads} key heads do not divide the {heads} query heads of {other}; every key head must "
            f"serve the same number of query heads"
        )


def _must_agree(x: OperandSpec, other: OperandSpec, axis: int, extents: _Extents) -> None:
    have, want = extents[x.name][axis], extents[other.name][other.axes.index(x.axes[axis])]
    if have != want and not (axis == 1 and other.one_for_all and want == 1):
        q = x.rows == "q"
        what, plural = (
            ("batch", "batch entries"),
            ("query heads" if q else "key heads", "heads"),
            ("queries", "rows") if q else ("keys", "keys"),
            ("head dim", "columns"),
        )[axis]
        hint = "; an op that sums over a teacher's heads is not built" if what == "query heads" else ""
        if axis == 1 and other.one_for_all:
            hint = f"; but one head of {other.name} may stand for all"
        raise ValueError(
            f"{x.name}: {have} {plural}, but {other.name} has {want}; both must share the {what} axis{hint}"
        )


def _extents(view: ArrayView, layout: str) -> tuple[int, int, int, int]:
    b, h, r, d = canonical_strides(view.shape, len(view.shape), layout, trailing=1)
    rank = len(view.shape)
    return (b if rank == 4 else 1, h if rank >= 3 else 1, r, d)


def _side(op: Op, side: str, operands: dict[str, Operand], chosen: Any) -> Side:
    def asked(what: str, default: Any) -> Any:
        return getattr(chosen, op.option(side, what), default)

    if given := op.given(side):
        keys = operands[op.pair(op.operand[op.like].side)[1].name].rows
        return _given_side(operands[given.name], keys, chosen)
    q, k = (operands[x.name] for x in op.pair(side))
    scale, name, softcap = asked("scale", None), asked("score", Side.score), asked("softcap", Side.softcap)
    score = SCORES[name]
    if scale is None:
        scale = 1.0 if score.positive else 1.0 / math.sqrt(q.dim)
    named = {what: op.option(side, what) for what in ("scale", "score", "softcap")}
    if score.positive and scale <= 0:
        raise ValueError(
            f"{named['scale']}={scale} beside {named['score']}={name!r}, whose logits are {score.formula}; allowed are "
            f"positive numbers, and 1 is the default"
        )
    if softcap is not None and not score.proportional:
        capped = listed(other for other, x in SCORES.items() if x.proportional)
        raise ValueError(
            f"{named['softcap']}={softcap} beside {named['score']}={name!r}; built are caps of {capped}, whose logits "
            f"are proportional to the scale. Leave one of the two out"
        )
    return Side(q, k, float(scale), name, softcap)


def _given_side(x: Operand, keys: int, chosen: Any) -> Side:
    """A side that is read from one array: what its queries and its keys add to the address of a pair."""
    batch, head, row, column = x.strides
    q = replace(x, dim=0, strides=(batch, head if x.heads > 1 else 0, row, 0))
    k = replace(x, rows=keys, dim=0, strides=(0, 0, column, 0))
    return Side(q, k, 1.0, LOG_PROBABILITY.name if chosen.log_target else PROBABILITY.name)


def _check_float32(op: Op, name: str, side: Side) -> None:
    """Check that float32 can hold the factors of a side."""
    scale, softcap = op.option(name, "scale"), op.option(name, "softcap")
    if abs(side.scale) > MAX_SCALE:
        raise ValueError(
            f"{scale}={side.scale} is beyond what float32 arithmetic can hold; allowed are magnitudes up to "
            f"{MAX_SCALE:g}"
        )
    cap = side.softcap
    if cap is not None and not (cap <= MAX_SCALE and abs(side.scale) <= cap * MAX_SCALE):
        raise ValueError(
            f"{softcap}={cap} is beyond what float32 arithmetic can hold beside a scale of {side.scale:g}; "
            f"allowed are {abs(side.scale) / MAX_SCALE:g} to {MAX_SCALE:g}"
        )


def _operand(view: ArrayView, extents: tuple[int, int, int, int], layout: str) -> Operand:
    b, h, r, d = canonical_strides(view.strides, len(view.shape), layout, trailing=1)
    return Operand(extents[1], extents[2], extents[3], view.dtype, (b, h, r, d), view.ptr % 16 == 0)

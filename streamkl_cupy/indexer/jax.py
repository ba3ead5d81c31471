"""JAX: `indexer_kl` under grad, jit, vmap, scan, remat and shard_map.

Every call, an eager one too, is a `jax.pure_callback` on the host, inside a `custom_vjp` whose backward is itself one
that refuses to be differentiated.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from .. import frameworks, validate
from ..arrays import CPU
from ..autodiff.jax import marked
from ..ops.indexer_kl import ARRAYS, WRT
from .call import IndexCall, Rows
from .losses import IndexLoss, reduced
from .options import NAMES, IndexOptions
from .problem import TEACHER_IS_CONSTANT, IndexProblem, standin, to_problem

_AT = tuple(NAMES.index(name) for name in WRT)
_CONSTANT = tuple(i for i, spec in enumerate(ARRAYS) if spec.kind in ("teacher", "row number"))
_NO_SECOND_ORDER = (
    "streamkl_cupy.indexer_kl has first-order gradients only: its backward cannot be differentiated again."
)
_NO_FORWARD_MODE = (
    "streamkl_cupy.indexer_kl has reverse-mode gradients only: it cannot propagate a forward-mode tangent (jax.jvp, "
    "jacfwd, linearize, hessian). Use jax.grad, vjp or jacrev."
)
_Result: Any = jax.ShapeDtypeStruct  # not annotated in JAX


def loss(call: IndexCall, asked: IndexLoss) -> Any:
    """`indexer_kl` of a call with JAX arrays."""
    named = {**call.named, **({} if asked.row_weight is None else {"row_weight": asked.row_weight})}
    for name, x in named.items():
        if not isinstance(x, jax.Array):
            raise validate.not_of("jax", name, x)
    _check(call)
    try:
        return _jitted(call.arrays, asked.row_weight, options=call.options, asked=asked._replace(row_weight=None))
    except TypeError as error:
        if "custom_vjp" not in str(error):
            raise
        raise TypeError(_NO_FORWARD_MODE) from error


@functools.partial(jax.jit, static_argnames=("options", "asked"))
def _jitted(arrays: tuple[Any, ...], row_weight: Any, *, options: IndexOptions, asked: IndexLoss) -> Any:
    # Inside shard_map all vary alike; the transpose of that, a sum over devices that share an input, is JAX's own.
    given = _there(arrays)
    alike = iter(marked(given, given))
    arrays = tuple(None if x is None else next(alike) for x in arrays)
    kl, index_lse, target_sum, lse = _rows(options, *arrays)
    # Stopped, so that a loss on these has gradient zero by declaration, as with torch.
    index_lse, target_sum, lse = jax.lax.stop_gradient((index_lse, target_sum, lse))
    if row_weight is not None:
        like = frameworks.standin("index_q", kl, CPU)._replace(framework="jax")
        validate.row_weight(row_weight, kl.shape, like)
    given = arrays[NAMES.index("teacher_lse")]
    return reduced(
        jnp, (kl, index_lse, target_sum, lse if given is None else given), asked._replace(row_weight=row_weight)
    )


def _check(call: IndexCall) -> IndexProblem:
    """Refuse at trace time what the callback would refuse."""
    views = {}
    for name, x in call.named.items():
        placed = None if isinstance(x, jax.core.Tracer) else next(iter(x.devices()))
        platform = jax.default_backend() if placed is None else placed.platform
        if platform != "cpu":
            raise NotImplementedError(f"indexer_kl of arrays on {platform} is not built; built are arrays on the CPU")
        views[name] = standin(name, x, "jax", CPU)
    return to_problem(views, call.options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(options: IndexOptions, *arrays: Any) -> tuple[Any, ...]:
    return _forward(options, arrays)


def _rows_fwd(options: IndexOptions, *arrays: Any) -> tuple[tuple[Any, ...], Any]:
    for i in _CONSTANT:
        if arrays[i] is not None and arrays[i].perturbed:
            raise NotImplementedError(f"{NAMES[i]} is differentiated by: {TEACHER_IS_CONSTANT}")
    values = tuple(None if x is None else x.value for x in arrays)
    rows = _rows(options, *values)
    # Which gradients are wanted travels as the extent of an array without elements; see `attention_kl`.
    wanted = sum(1 << n for n, i in enumerate(_AT) if arrays[i] is not None and arrays[i].perturbed)
    return rows, (values, rows, jnp.zeros((wanted, 0), bool))


def _rows_bwd(options: IndexOptions, residuals: Any, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    arrays, (_, index_lse, target_sum, lse), wanted = residuals
    wrt = tuple(name for n, name in enumerate(WRT) if wanted.shape[0] >> n & 1)
    found: list[Any] = [None] * len(arrays)
    grad = cotangents[0]
    if wrt and not isinstance(grad, jax.custom_derivatives.SymbolicZero):
        grads = _backward_once(options, wrt, arrays, (grad, index_lse, target_sum, lse))
        for i, name in zip(_AT, WRT, strict=True):
            found[i] = grads.get(name)
    return tuple(found)


_rows.defvjp(_rows_fwd, _rows_bwd, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _backward_once(options: IndexOptions, wrt: tuple[str, ...], arrays: Any, saved: Any) -> dict[str, Any]:
    return _backward(options, wrt, arrays, saved)


def _backward_once_fwd(options: IndexOptions, wrt: tuple[str, ...], arrays: Any, saved: Any) -> Any:
    return _backward(options, wrt, arrays, saved), None


def _backward_once_bwd(options: IndexOptions, wrt: tuple[str, ...], residuals: None, cotangents: Any) -> NoReturn:
    raise NotImplementedError(_NO_SECOND_ORDER)


_backward_once.defvjp(_backward_once_fwd, _backward_once_bwd)


def _forward(options: IndexOptions, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Trace a forward: kl, index_lse, target_sum, and the teacher's log-sum-exps, None where they were given."""
    problem = _check(IndexCall(arrays, options))
    makes = "teacher_q" in problem.given and "teacher_lse" not in problem.given
    shapes = [problem.row_shape] * 3 + ([problem.shape("BHM")] if makes else [])
    results = tuple(_Result(shape, problem.stat_dtype) for shape in shapes)

    def callback(*given: Any) -> tuple[Any, ...]:
        rows = IndexCall(_on_host(given), options).ready().forward()
        return tuple(np.asarray(x) for x in (rows if makes else rows[:3]))

    rows = jax.pure_callback(callback, results, *arrays, vmap_method="sequential")
    return (*marked(rows, _there(arrays)), *(() if makes else (None,)))


def _backward(options: IndexOptions, wrt: tuple[str, ...], arrays: tuple[Any, ...], saved: Any) -> dict[str, Any]:
    """Trace a backward: the gradients named in `wrt`."""
    named = dict(zip(NAMES, arrays, strict=True))
    results = {name: _Result(named[name].shape, named[name].dtype) for name in wrt}

    def callback(*given: Any) -> dict[str, Any]:
        grad, index_lse, target_sum, lse = _on_host(given[: len(saved)])
        call = IndexCall(_on_host(given[len(saved) :]), options)
        rows = Rows(None, index_lse, target_sum, call.named.get("teacher_lse") if lse is None else lse)
        return {name: np.asarray(x) for name, x in call.ready().backward(grad, rows, wrt).items()}

    found: dict[str, Any] = jax.pure_callback(callback, results, *saved, *arrays, vmap_method="sequential")
    return dict(zip(found, marked(found.values(), _there((*saved, *arrays))), strict=True))


def _there(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x for x in arrays if x is not None)


def _on_host(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(None if x is None else np.asarray(x) for x in arrays)

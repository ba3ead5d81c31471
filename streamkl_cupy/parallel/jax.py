"""JAX: ranks along an axis of a mesh, inside of `shard_map`, and a derivative that is a strategy's own.

All ranks are one program, so a rank's number is not known while it is written: what a rank computes by itself is a
branch for each, between collectives that all of them have. Shapes are equal on all ranks and options are static, so
there is nothing to agree on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
from jax.custom_derivatives import SymbolicZero

from .. import jax as plain
from ..call import Call
from ..options import MASK_ARRAYS, LossOptions, Options
from ..results import KLForwardRows
from .engine import NAMES
from .job import Job
from .ranks import Pending
from .setup import Asked, Plain, job_without_exchange
from .strategies import TABLE

_T = TypeVar("_T")
_lax: Any = jax.lax  # not annotated in all versions


class AxisRanks:
    """The devices along an axis of a mesh."""

    posts = False
    jobs: ClassVar[dict[Any, Any]] = {}  # nothing is kept but programs

    def __init__(self, axis: str, size: int, varying: frozenset[Any]) -> None:
        """`varying`: all axes of the mesh along which the shards differ."""
        self.axis, self.size, self._varying = axis, size, varying

    @property
    def rank(self) -> int:
        raise NotImplementedError("a rank's number is not known while a program is written")

    @property
    def key(self) -> Any:
        return (self.axis, self.size)

    def all_gather(self, x: Any) -> Pending:
        found = _lax.all_gather(x, self.axis)
        return lambda: found

    def reduce_scatter(self, x: Any) -> Pending:
        found = _lax.psum_scatter(x, self.axis)
        return lambda: found

    def all_to_all(self, x: Any) -> Any:
        return _lax.all_to_all(x, self.axis, 0, 0, tiled=True)

    def all_reduce(self, x: Any) -> Any:
        return _lax.psum(x, self.axis)

    def shift(self, xs: tuple[Any, ...]) -> Callable[[], tuple[Any, ...]]:
        around = [(rank, (rank + 1) % self.size) for rank in range(self.size)]
        found = tuple(_lax.ppermute(x, self.axis, around) for x in xs)
        return lambda: found

    def post(self, sent: Any, room: Any) -> Any:
        raise NotImplementedError("what a program moves is known to the compiler, which says when")

    def exchange(self, numbers: Sequence[int], like: Any) -> list[list[int]]:
        return [list(numbers)] * self.size

    def check(self, name: str, x: Any) -> None:
        pass

    def here(self, compute: Callable[[int], _T]) -> _T:
        def branch(rank: int) -> _T:
            # What a branch makes of nothing is the same everywhere, but not what the other branches have there.
            found: _T = jax.tree.map(functools.partial(_declared, self._varying), compute(rank))
            return found

        branches = [functools.partial(branch, rank) for rank in range(self.size)]
        found: _T = _lax.switch(_lax.axis_index(self.axis), branches)
        return found


class Traced:
    """The plain operation in programs."""

    def forward(self, call: Call) -> KLForwardRows[Any]:
        rows = plain.forward(call, LossOptions())
        return KLForwardRows(rows.kl, rows.teacher_lse, rows.student_lse, moments=getattr(rows, "moments", None))

    def backward(self, saved: tuple[Any, ...], call: Call, wrt: tuple[str, ...]) -> tuple[Any, ...]:
        return tuple(plain.backward(call, saved, wrt))


class Static(NamedTuple):
    """What a program is written for."""

    axis: str
    size: int
    options: Options
    given: tuple[tuple[str, Any], ...]
    asked: Asked

    def job(self, inputs: Sequence[Any], masks: Sequence[Any]) -> Job:
        found = {name: x for name, x in zip(MASK_ARRAYS, masks) if x is not None}
        call = Plain(self.options, found, dict(self.given))
        ranks = AxisRanks(self.axis, self.size, _axes(inputs[0]))
        return job_without_exchange(ranks, Traced(), inputs, call, self.asked)


def rows(static: Static, inputs: Sequence[Any], masks: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Values and log-sum-exps of this rank's rows, with their derivative."""
    given = tuple(masks.get(name) for name in MASK_ARRAYS)
    everything = (_lax.axis_index(static.axis), *inputs, *masks.values())
    axes = frozenset[Any]().union(*map(_axes, everything))
    inputs, given = jax.tree.map(functools.partial(_declared, axes), (tuple(inputs), given))
    kl, teacher_lse, student_lse, *_ = _rows(static, *inputs, given)
    return kl, _lax.stop_gradient(teacher_lse), _lax.stop_gradient(student_lse)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(static: Static, *arrays: Any) -> tuple[Any, ...]:
    *inputs, masks = arrays
    job = static.job(inputs, masks)
    return tuple(TABLE[job.strategy].forward(job, inputs)[0])


def _rows_forward(static: Static, *arrays: Any) -> tuple[tuple[Any, ...], Any]:
    *primals, masks = arrays
    inputs, masks = tuple(p.value for p in primals), tuple(None if m is None else m.value for m in masks)
    job = static.job(inputs, masks)
    found, kept = TABLE[job.strategy].forward(job, inputs)
    # As the extent of an array without elements: what is static must not lie in the tree of the residuals.
    wanted = sum(1 << i for i, p in enumerate(primals) if p.perturbed)
    return tuple(found), (
        inputs,
        masks,
        tuple(found),
        kept if static.asked.keep else None,
        jax.numpy.zeros((wanted, 0), bool),
    )


def _rows_backward(static: Static, residuals: Any, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    inputs, masks, found, kept, wanted = residuals
    wrt = tuple(name for i, name in enumerate(NAMES) if wanted.shape[0] >> i & 1)
    if not wrt:
        return (None,) * (len(NAMES) + 1)
    results, grad = KLForwardRows(*found), cotangents[0]
    if isinstance(grad, SymbolicZero):
        grad = jax.numpy.zeros_like(results.kl)
    job = static.job(inputs, masks)
    return (*TABLE[job.strategy].backward(job, grad, inputs, results, kept, wrt), None)


_rows.defvjp(_rows_forward, _rows_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def total(axis: str, x: Any) -> Any:
    """The sum over an axis, of which every device's own part has the derivative 1."""
    return _lax.psum(x, axis)


def _total_forward(axis: str, x: Any) -> tuple[Any, None]:
    return _lax.psum(x, axis), None


def _total_backward(axis: str, residuals: None, grad: Any) -> tuple[Any]:
    return (_declared(_axes(_lax.axis_index(axis)) | _axes(grad), grad),)


total.defvjp(_total_forward, _total_backward)


def axis_size(axis: str) -> int:
    """How many devices there are along an axis, inside of `shard_map`."""
    try:
        return int(_lax.axis_size(axis))
    except NameError as cause:
        raise ValueError(
            f"axis_name={axis!r} is no axis here; call inside of jax.shard_map over a mesh that has it, with shards"
        ) from cause


def _declared(axes: frozenset[Any], x: Any) -> Any:
    """The array, declared to vary along these axes of the mesh."""
    names = tuple(axes - _axes(x))
    return _lax.pcast(x, names, to="varying") if names else x


def _axes(x: Any) -> frozenset[Any]:
    aval: Any = jax.typeof(x)
    varying: frozenset[Any] = aval.manual_axis_type.varying if hasattr(aval, "manual_axis_type") else aval.vma  # < 0.10
    return varying

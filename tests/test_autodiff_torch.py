"""What differentiates by torch, asked with an operation that is none of the package's: its logits are times the
weights, and its results added up over heads, so that rows are not those of an operand."""

from __future__ import annotations

import gc
import importlib
import math
import weakref
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import toy_operation

from streamkl_cupy import options, patterns
from streamkl_cupy.call import Call
from streamkl_cupy.ops import SavedSpec
from streamkl_cupy.options import NO_MASKS, TABLES
from streamkl_cupy.patterns.pattern import pattern_of
from streamkl_cupy.rules import reductions

torch = pytest.importorskip("torch")
autodiff = importlib.import_module("streamkl_cupy.autodiff.torch")

# With one more result where it is asked for, and one that is saved.
MEANS = replace(
    toy_operation.MEANS,
    name="sums_of_means",
    asked_rows=(("entropy", "entropy", "entropy"),),
    saved=(*toy_operation.MEANS.saved[:2], SavedSpec("out", "out"), *toy_operation.MEANS.saved[2:]),
    problem_fields=(("return_entropy", "entropy"),),
)


class Chosen(NamedTuple):
    """Its options."""

    scale: float | None = None
    q_offset: int | None = None
    window: tuple[int, int] | None = None
    block_mask: Any = None
    layout: str = "bhnd"
    return_entropy: bool = False


ROWS = {name: TABLES["attention_kl"][name] for name in Chosen._fields[1:]}
NAMES = ("query", "value", "weight")


def dense(query: Any, key: Any, value: Any, weight: Any = None, scale: float | None = None) -> Any:
    """By torch's own functions, which differentiate themselves."""
    s = (1 / math.sqrt(query.shape[-1]) if scale is None else scale) * query @ key.transpose(-1, -2)
    z = s if weight is None else s * weight[..., None]
    p = torch.softmax(z, -1)
    rows = (torch.logsumexp(z, -1), p @ value, -torch.special.xlogy(p, p).sum(-1))
    return MEANS.Results(*(x.sum(1, keepdim=True) for x in rows))


def row_shape(call: Call) -> tuple[int, ...]:
    batch, _, rows, _ = call.operands[0].shape
    return batch, 1, rows


class Ready:
    """A call that computes by the definition, and notes what it is asked for."""

    def __init__(self, call: Call, saved: Any, seen: list[Any]) -> None:
        self.call, self.saved, self.seen = call, saved, seen
        self.checked = SimpleNamespace(every_row_sees=True, row_shape=row_shape(call))

    def _results(self) -> Any:
        with torch.no_grad():
            found = dense(*self.call.operands, self.call.options.scale)
        return found if self.call.options.return_entropy else found._replace(entropy=None)

    def forward(self) -> Any:
        self.seen.append("forward")
        return MEANS.Results(*(None if x is None else SimpleNamespace(array=x) for x in self._results()))

    def empty_results(self) -> Any:
        found = (None if x is None else torch.full_like(x, math.nan) for x in self._results())
        return MEANS.Results(*(None if x is None else SimpleNamespace(array=x) for x in found))

    def launch(self, views: Any) -> None:
        for view, x in zip(views, self.forward()):
            if view is not None:
                view.array.copy_(x.array)

    def backward(self, wrt: tuple[str, ...]) -> tuple[Any, ...]:
        q, k, v, weight = self.call.operands
        saved = MEANS.Saved(*self.saved.arrays)
        self.seen.append((*wrt, saved.grad_lse is not None))
        for name, x in self._results()._asdict().items():
            if name != "entropy":
                torch.testing.assert_close(getattr(saved, name), x)
                assert name != "out" or saved.grad.shape == x.shape
        w = torch.ones_like(q[..., 0]) if weight is None else weight
        scale = 1 / math.sqrt(q.shape[-1]) if self.call.options.scale is None else self.call.options.scale
        s = scale * q @ k.transpose(-1, -2)
        p = torch.softmax(s * w[..., None], -1)
        by = saved.grad @ v.transpose(-1, -2)
        by = p * (by - (p * by).sum(-1, keepdim=True) + (0 if saved.grad_lse is None else saved.grad_lse[..., None]))
        found = {
            "query": scale * (by * w[..., None]) @ k,
            "value": p.transpose(-1, -2) @ saved.grad,
            "weight": (by * s).sum(-1),
        }
        return tuple(found[name].contiguous() if name in wrt else None for name in MEANS.names)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(options.OPTIONS, MEANS.name, Chosen)
        patch.setitem(TABLES, MEANS.name, {"scale": TABLES["attention_kl"]["teacher_scale"], **ROWS})
        patch.setitem(options._DEFAULTS, MEANS.name, Chosen())
        patch.setitem(options._MAY_BE_NONE, MEANS.name, frozenset(Chosen._fields[:4]))
        autodiff.register(MEANS, row_shape)
        yield
        del autodiff._operators[MEANS.name]


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the backend was asked for."""
    found: list[Any] = []
    monkeypatch.setattr(Call, "ready", lambda self, saved=None: Ready(self, saved, found))
    return found


def means(query: Any, key: Any, value: Any, weight: Any = None, **given: Any) -> Any:
    """What a door has of it."""
    operands = (query, key, value, weight)
    call, traced = autodiff.asked(MEANS, operands, given)
    if traced or not autodiff.unwatched((*operands, *call.masks)):
        rows = autodiff.there(call, autodiff.results(call, traced))
    elif autodiff.differentiated(operands):
        rows = autodiff.step(call, call.ready(), MEANS.results)
    else:
        rows = autodiff.tensors(call.ready().forward())
    return MEANS.Results(*rows)


def numbers(rng: np.random.Generator, *shape: int) -> Any:
    return torch.from_numpy(rng.standard_normal(shape))


def operands(rng: np.random.Generator, weighted: bool = True, lead: tuple[int, ...] = (2,)) -> tuple[Any, ...]:
    x = tuple(numbers(rng, *lead, 3, *s) for s in ((5, 4), (7, 4), (7, 6), (5,)))
    return x if weighted else (*x[:3], None)


def leaves(x: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(t if t is None or i == 1 else t.detach().requires_grad_() for i, t in enumerate(x))


def loss(found: Any, by: tuple[Any, Any]) -> Any:
    """What both differentiable results have a part in, or one."""
    return sum((x * w).sum() for x, w in zip(found, by) if w is not None)


def by_leaves(value: Any, x: tuple[Any, ...], **how: Any) -> tuple[Any, ...]:
    return tuple(torch.autograd.grad(value, [t for t in x if t is not None and t.requires_grad], **how))


def expected(x: tuple[Any, ...], by: tuple[Any, Any], **own: Any) -> tuple[Any, ...]:
    x = leaves(x)
    return by_leaves(loss(dense(*x, **own), by), x, materialize_grads=True)


def plainly(x: tuple[Any, ...], by: tuple[Any, Any]) -> Any:
    x = leaves(x)
    return by_leaves(loss(means(*x), by), x)


def recorded(x: tuple[Any, ...], by: tuple[Any, Any]) -> Any:
    x = leaves(x)
    grads = by_leaves(loss(means(*x), by), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="sums_of_means has first-order gradients only"):
        grads[0].sum().backward()
    return grads


def by_the_operator(x: tuple[Any, ...], by: tuple[Any, Any]) -> Any:
    x = leaves(x)
    found = autodiff._operators[MEANS.name].forward(*x, *NO_MASKS, *Chosen())
    return by_leaves(loss(found, by), x)


def transformed(x: tuple[Any, ...], by: tuple[Any, Any]) -> Any:
    argnums = tuple(i for i in (0, 2, 3) if x[i] is not None)
    return torch.func.grad(lambda *a: loss(means(*a), by), argnums)(*x)


def compiled(x: tuple[Any, ...], by: tuple[Any, Any]) -> Any:
    x = leaves(x)
    function = torch.compile(lambda *a: loss(means(*a), by), fullgraph=True, backend="aot_eager")
    return by_leaves(function(*x), x)


@pytest.mark.filterwarnings("ignore")  # of the compiler's own making
@pytest.mark.parametrize("parts", ["out", "lse", "both"])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("way", [plainly, recorded, by_the_operator, transformed, compiled])
def test_gradients_of_each_result_and_of_both(
    way: Any, weighted: bool, parts: str, rng: np.random.Generator, seen: list[Any]
) -> None:
    x = operands(rng, weighted)
    by = (numbers(rng, 2, 1, 5) if parts != "out" else None, numbers(rng, 2, 1, 5, 6) if parts != "lse" else None)
    grads = way(x, by)
    assert len(grads) == 2 + weighted
    for g, e in zip(grads, expected(x, by)):
        torch.testing.assert_close(g, e)
    # A derivative that is optional and does not come is none; the other one is zeros.
    assert seen == ["forward", (*NAMES[: 2 + weighted], parts != "out")]


def test_only_what_is_asked_for(rng: np.random.Generator, seen: list[Any]) -> None:
    x = operands(rng)
    one = (*x[:3], x[3].requires_grad_())
    by = (None, numbers(rng, 2, 1, 5, 6))
    call, _ = autodiff.asked(MEANS, one, {"scale": -0.3})
    out = autodiff.step(call, call.ready(), ("out",))
    (grad,) = torch.autograd.grad((out * by[1]).sum(), one[3])
    torch.testing.assert_close(grad, expected(x, by, scale=-0.3)[2])
    assert seen == ["forward", ("weight", False)]
    del seen[:]
    found = means(*(t.detach() for t in x), return_entropy=True)
    torch.testing.assert_close(found, dense(*x))
    assert means(*x[:3]).entropy is None


@pytest.mark.parametrize("reduction", ["sum", "mean", "weighted"])
@pytest.mark.parametrize("long", [False, True])
def test_a_step_reduces_the_first_result_beside_another(reduction: str, long: bool, rng: np.random.Generator) -> None:
    x, by = leaves(operands(rng)), numbers(rng, 2, 1, 5, 6)
    weight = torch.rand(2, 1, 5, dtype=torch.float64) if reduction == "weighted" else None
    how = "sum" if weight is not None else reduction

    def reduced(rows: Any, every_row_sees: bool) -> Any:
        assert every_row_sees
        return reductions.value_and_gradient(torch, rows[0], None, weight, how)

    def whole(value: Any, out: Any) -> Any:
        return torch.autograd.grad(3 * value + (out * by).sum(), [x[0], x[2], x[3]], create_graph=long)

    call, _ = autodiff.asked(MEANS, x, {})
    found = whole(*autodiff.step(call, call.ready(), ("lse", "out"), reduced))
    rows = dense(*x)
    value = reductions.reduce_rows(torch, rows.lse, None, weight, how)
    for g, e in zip(found, torch.autograd.grad(3 * value + (rows.out * by).sum(), [x[0], x[2], x[3]])):
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("in_dims", [(0, 0, 0, 0), (1, None, 2, 1)])
def test_batches_become_one_larger_batch(
    weighted: bool, in_dims: tuple[Any, ...], rng: np.random.Generator, seen: list[Any]
) -> None:
    x = operands(rng, weighted, (3, 2))
    dims = in_dims if weighted else (*in_dims[:3], None)
    each = [[t if d is None or t is None else t[i] for t, d in zip(x, dims)] for i in range(3)]
    if dims[1] is None:
        each = [[a, each[0][1][0], *rest] for a, _, *rest in each]
        x = (x[0], x[1][0], *x[2:])
    mapped = tuple(t if d is None or t is None else t.movedim(0, d) for t, d in zip(x, dims))
    by = (numbers(rng, 2, 1, 5), numbers(rng, 2, 1, 5, 6))
    argnums = (0, 2, 3) if weighted else (0, 2)
    gradients = torch.func.grad(lambda *a: loss(means(*a, scale=0.7), by), argnums)
    found = torch.vmap(gradients, in_dims=dims)(*mapped)
    assert seen == ["forward", (*NAMES[: 2 + weighted], True)]
    for i, one in enumerate(each):
        for g, e in zip(found, expected(tuple(one), by, scale=0.7)):
            torch.testing.assert_close(g[i], e)


@pytest.mark.parametrize("weighted", [True, False])
def test_operators_pass_torchs_own_checks(weighted: bool, rng: np.random.Generator) -> None:
    x, known = operands(rng, weighted), autodiff._operators[MEANS.name]
    rest = (*NO_MASKS, *Chosen(scale=0.4, return_entropy=True))
    lse, out, entropy = known.forward(*x, *rest)
    assert entropy.shape == lse.shape
    torch.library.opcheck(known.forward, (*x, *rest))
    wanted = [True, False, True, weighted]
    torch.library.opcheck(known.backward, (torch.rand_like(out), lse, out, None, wanted, *x, *rest))


def test_a_pattern_lives_as_long_as_what_a_backward_reads(rng: np.random.Generator) -> None:
    """Which is a differentiable result here: autograd keeps another tensor of the same memory."""
    x, by = leaves(operands(rng)), (numbers(rng, 2, 1, 5), numbers(rng, 2, 1, 5, 6))
    pattern = patterns.from_dense(np.array([[True]]), queries=5, keys=7, block=16)
    key, gone = pattern.key.tobytes().hex(), weakref.ref(pattern)
    given = autodiff._with_key(Chosen(block_mask=pattern))
    found = loss(autodiff._operators[MEANS.name].forward(*x, *NO_MASKS, *given), by)
    del pattern
    gc.collect()
    assert pattern_of(key) is gone()
    for g, e in zip(by_leaves(found, x), expected(x, by)):
        torch.testing.assert_close(g, e)
    del found
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("way", ["step", "transform", "operator"])
def test_a_gradient_by_a_constant_is_refused(way: str, rng: np.random.Generator) -> None:
    query, key, *rest = operands(rng)
    key.requires_grad_()
    ways = {
        "step": lambda: means(query, key, *rest),
        "transform": lambda: torch.func.grad(lambda k: means(query, k, *rest).lse.sum())(key.detach()),
        "operator": lambda: autodiff._operators[MEANS.name].forward(query, key, *rest, *NO_MASKS, *Chosen()),
    }
    with pytest.raises(NotImplementedError, match=r"key requires a gradient.*pass key\.detach\(\)"):
        ways[way]()


def test_an_operand_that_is_needed_is_not_none(rng: np.random.Generator) -> None:
    x = operands(rng)
    with pytest.raises(TypeError, match="value is None, not an array"):
        means(*x[:2], None, x[3])

"""Warnings about calls that are probably not meant: they come once, name the call that is, and never in vain."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import streamkl_cupy
from streamkl_cupy import arrays, call, frameworks
from streamkl_cupy.advice import hints
from streamkl_cupy.ops import ATTENTION_KL
from streamkl_cupy.options import Options
from streamkl_cupy.problem import INPUT_NAMES
from streamkl_cupy.validate import to_problem

FUNCTIONS = ("attention_kl", "attention_kl_forward", "attention_kl_value_and_grad")
EMPTY = r"causal with 7 query rows and 5 keys: .*first 2 rows see no key.*q_offset=0.*q_offset=-2 if this is meant"
MAPS = r"all four arrays look like attention maps.*takes queries and keys.*\(p \* \(log\(p\) - log\(q\)\)\)\.sum\(-1\)"
LAYOUT = r"student_q of shape \(2, 1024, 8, 16\) means 1024 heads of 8 rows each; .*pass layout=\"bnhd\""


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "_said", set())
    for kept in ("_looks", "_checked"):
        monkeypatch.setattr(call, kept, {})


@pytest.fixture(params=["numpy", "torch"])
def make(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    if request.param == "numpy":
        return np.asarray
    torch: Any = pytest.importorskip("torch")
    return lambda x: torch.from_numpy(np.array(x))


def softmax(x: Any) -> Any:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def said(function: str, x: list[Any], **options: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        getattr(streamkl_cupy, function)(*x, **options)
    assert all(w.category is UserWarning for w in caught)
    assert all(w.filename == __file__ for w in caught)
    return [str(w.message) for w in caught]


def normal(rng: np.random.Generator, *shapes: tuple[int, ...]) -> list[Any]:
    return [rng.standard_normal(shape).astype("f") for shape in shapes]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_maps_for_queries_and_keys(function: str, make: Any, rng: np.random.Generator) -> None:
    maps = [make(softmax(x)) for x in normal(rng, *[(2, 3, 6, 6)] * 4)]
    (text,) = said(function, maps)
    _matches(MAPS, text)
    assert not said(function, [x[:1] for x in maps])  # once
    hints._said.clear()
    assert said(function, [make(softmax(x)) for x in normal(rng, *[(9, 4)] * 4)])


def _matches(pattern: str, text: str) -> None:
    with pytest.raises(UserWarning, match=pattern):
        raise UserWarning(text)


def test_maps_in_half_precision(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    maps = [torch.from_numpy(softmax(x)) for x in normal(rng, *[(3, 64, 64)] * 4)]
    for dtype in (torch.float16, torch.bfloat16):
        hints._said.clear()
        call._looks.clear()
        call._checked.clear()
        _matches(MAPS, *said("attention_kl", [x.to(dtype) for x in maps]))


def test_what_looks_a_little_like_maps(rng: np.random.Generator) -> None:
    maps = [softmax(x) for x in normal(rng, *[(2, 6, 6)] * 4)]
    for at in range(4):
        mixed = list(maps)
        mixed[at] = rng.standard_normal((2, 6, 6)).astype("f")
        assert not said("attention_kl", mixed)
        mixed[at] = maps[at] * 1.1
        assert not said("attention_kl", mixed)
    units = [np.eye(6, dtype="f")[rng.integers(0, 6, (2, 6))] for _ in INPUT_NAMES]
    assert not said("attention_kl", units)  # one-hot vectors are queries and keys of some
    assert not said("attention_kl", [np.ones((4, 1), "f")] * 4)
    assert not said("attention_kl", [np.zeros((4, 6), "f")] * 4)
    assert not said("attention_kl", [np.full((4, 6), np.nan, "f")] * 4)
    assert not said("attention_kl", [np.ones((0, 6), "f")] * 4)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_diagonals_that_leave_rows_empty(function: str, make: Any, rng: np.random.Generator) -> None:
    x = [make(a) for a in normal(rng, (2, 7, 8), (2, 5, 8), (2, 7, 8), (2, 5, 8))]
    assert not said(function, x)
    assert not said(function, x, causal=True, q_offset=-2)
    assert not said(function, x, causal=True, q_offset=0)
    assert not said(function, x, window=(2, None))
    assert not said(function, x, window=(2, 2))
    _matches(EMPTY, *said(function, x, causal=True))
    assert not said(function, [a[..., :4] for a in x], causal=True)  # once
    hints._said.clear()
    _matches("a window with 7 query rows and 5 keys: .*first 1 rows", *said(function, x, window=(2, 1)))


def test_packed_sequences_have_diagonals_of_their_own(rng: np.random.Generator) -> None:
    x = normal(rng, (7, 2, 8), (5, 2, 8), (7, 2, 8), (5, 2, 8))
    assert not said(
        "attention_kl", x, causal=True, cu_seqlens_q=np.array([0, 3, 7], "i4"), cu_seqlens_k=np.array([0, 3, 5], "i4")
    )


def test_rows_and_heads_in_the_other_order(make: Any) -> None:
    x = [make(np.zeros((2, 1024, 8, 16), "f"))] * 4
    _matches(LAYOUT, *said("attention_kl", x))
    hints._said.clear()
    assert not said("attention_kl", x, layout="bnhd")
    grouped = [make(np.zeros((1, 1024, h, 16), "f")) for h in (8, 2, 8, 2)]
    assert said("attention_kl", grouped)


@pytest.mark.parametrize(
    "q, k",
    [
        ((2, 128, 64, 16), (2, 128, 64, 16)),  # as many heads as any model has
        ((1, 1024, 49, 16), (1, 1024, 49, 16)),  # a batch of windows, folded into the heads
        ((2, 512, 1, 16), (2, 512, 700, 16)),  # decoding
        ((2, 512, 64, 16), (2, 8, 64, 16)),  # grouped heads
        ((2, 512, 200, 16), (2, 512, 200, 16)),
    ],
)
def test_many_heads_may_be_meant(q: Any, k: Any) -> None:
    views = ATTENTION_KL.Inputs(
        *(frameworks.describe(n, np.empty(s, np.float16)) for n, s in zip(INPUT_NAMES, (q, k, q, k)))
    )
    problem = to_problem(ATTENTION_KL, views, Options())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hints.look(views._replace(), Options(), problem)


def test_gpu_arrays_are_looked_at_by_shape_only(rng: np.random.Generator) -> None:
    """Views that say they are on a GPU, with an address that nobody may read."""
    made = [frameworks.describe(n, x) for n, x in zip(INPUT_NAMES, normal(rng, *[(2, 7, 8), (2, 5, 8)] * 2))]
    views = ATTENTION_KL.Inputs(*(v._replace(device=arrays.cuda(0), ptr=16, array=None) for v in made))
    options = Options(causal=True)
    with pytest.warns(UserWarning, match=EMPTY):
        hints.look(views, options, to_problem(ATTENTION_KL, views, options))


def test_nothing_is_looked_at_twice(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(hints, "look", lambda *given: seen.append(given))
    x = normal(rng, *[(2, 5, 8)] * 4)
    for _ in range(3):
        streamkl_cupy.attention_kl(*x)
    streamkl_cupy.plan(*x)
    streamkl_cupy.warmup(*x)
    assert len(seen) == 1


@pytest.mark.filterwarnings("ignore")  # of the compiler's own making, and different in every release
def test_tracing_says_nothing(rng: np.random.Generator) -> None:
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = [torch.from_numpy(a) for a in normal(rng, (2, 7, 8), (2, 5, 8), (2, 7, 8), (2, 5, 8))]
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        streamkl_cupy.attention_kl(*map(mode.from_tensor, x), causal=True)
    assert not hints._said
    compiled = torch.compile(streamkl_cupy.attention_kl, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*x, causal=True), streamkl_cupy.attention_kl(*x, causal=True))
    assert hints._said == {"empty rows"}

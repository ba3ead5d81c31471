"""Every score of the registry, and caps: formulas, halves on the host, headers, calls on both backends by float64."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Jax, JaxCuda, Torch, TorchCuda
from numpy.typing import NDArray

import streamkl_cupy
from streamkl_cupy import validate
from streamkl_cupy.cli import catalogue
from streamkl_cupy.compiler.source import cuda_root, flatten
from streamkl_cupy.kernels.gpus import facts_for_arch
from streamkl_cupy.kernels.structs import args_of
from streamkl_cupy.launch import template
from streamkl_cupy.numpy_backend import plan as cut
from streamkl_cupy.planning import make_plan
from streamkl_cupy.problem import INPUT_NAMES
from streamkl_cupy.rules.scores import SCORES, capped
from streamkl_cupy.rules.scores.interface import LOG2E, Score
from streamkl_cupy.testing import reference
from streamkl_cupy.testing.compare import check_same_bits
from streamkl_cupy.testing.problems import MASK_OPTIONS, Case, make, upstream

Array = NDArray[Any]
CAP = 3.5
CASES = {
    name: SCORES[score] if cap is None else capped(SCORES[score], CAP)
    for name, (score, cap) in catalogue.SCORE_CASES.items()
}
of_every_score = pytest.mark.parametrize("score", CASES.values(), ids=CASES)
SCALES = (0.125, -0.7, 3.0, 0.0)
# Of the teacher and the student: each with another one, and both under caps.
PAIRS = [
    ("dot", "log_dot"),
    ("log_dot", "dot+softcap"),
    ("dot+softcap", "dot+softcap"),
    ("relu", "relu+softcap"),
    *((name, name) for name in SCORES if name not in ("dot", "log_dot", "relu")),
]
of_pairs = pytest.mark.parametrize("pair", PAIRS, ids="/".join)


def scales(score: Score) -> list[float]:
    return [x for x in SCALES if x > 0 or not score.positive]


def dots(rng: np.random.Generator) -> Array:
    x: Array = rng.standard_normal((2, 3, 50)) * 10.0 ** rng.uniform(-3, 3, (2, 3, 50))
    return x


@of_every_score
def test_a_logit_is_what_its_formula_says(score: Score, rng: np.random.Generator) -> None:
    for scale in scales(score):
        x = dots(rng)
        expected = eval(score.formula, {**vars(np), "dot": x, "scale": scale, "softcap": CAP})
        np.testing.assert_allclose(score.pair_logits(x, scale), expected, rtol=1e-12)
        assert score.pair_logits(x.astype(np.float32), scale).dtype == np.float32


@of_every_score
def test_slopes_are_derivatives_and_bounded(score: Score, rng: np.random.Generator) -> None:
    for scale in scales(score):
        x = dots(rng)
        slopes = np.broadcast_to(score.pair_slopes(x, scale), x.shape)
        assert np.abs(slopes).max() <= score.largest_slope
        step = 1e-5 * np.abs(x)  # some have a kink at 0
        logits = score.pair_logits(x, scale)
        rise = (score.pair_logits(x + step, scale) - score.pair_logits(x - step, scale)) / (2 * step)
        off = np.abs(score.factor(scale) * slopes - rise)
        assert (off <= 1e-6 * np.abs(rise) + 1e-15 * np.abs(logits) / step).all()


@of_every_score
def test_tiles_have_what_pairs_have(score: Score, rng: np.random.Generator) -> None:
    for scale in scales(score):
        x = dots(rng)
        slopes = np.full(x.shape, np.nan)
        logits = score.tile_logits(x.copy(), scale, None if score.linear else slopes)
        np.testing.assert_allclose(logits, score.pair_logits(x, scale) * LOG2E, rtol=1e-12, atol=1e-300)
        np.testing.assert_array_equal(score.tile_logits(x.copy(), scale, None), logits)
        if not score.linear:
            np.testing.assert_allclose(slopes, np.broadcast_to(score.pair_slopes(x, scale), x.shape), rtol=1e-9)


# What the host has in place of the special-function unit, and of a warp.
MATH = """
#include <algorithm>
#include <cmath>
#define __device__
#define __any_sync(lanes, odd) (odd)
using std::max;
using std::min;
enum Side { kTeacher, kStudent };
"""
UNIT = """
#pragma once
inline float exp2_approx(float x) { return exp2f(x); }
inline float log2_approx(float x) { return log2f(x); }
inline float reciprocal_approx(float x) { return 1.f / x; }
"""
ASK = """
#include "@score"
#include "tile/turn.cuh"
constexpr int kTiles = 6;
template <class S>
void ask_of(float (&x)[kTiles][4], const TeacherNumbers& n, float* logits, float* slopes) {
    for (int c = 0; c < kTiles; ++c) turn<S>(x, c, n);
    for (int i = 0; i < 4 * kTiles; ++i) {
        const float y = x[i / 4][i % 4];
        logits[i] = S::logit(y, n, 2.5f) + 2.5f;
        if constexpr (S::kLinear)
            slopes[i] = 1.f;
        else
            slopes[i] = S::slope(y, n);
    }
}
extern "C" void ask(int count, float* dots, const float* numbers, float plain, float* logits, float* slopes,
                    float* facts) {
    using S = Score<kTeacher>;
    const auto& n = *reinterpret_cast<const TeacherNumbers*>(numbers);
    for (int i = 0; i < count; i += 4 * kTiles)
        ask_of<S>(*reinterpret_cast<float (*)[kTiles][4]>(dots + i), n, logits + i, slopes + i);
    facts[0] = S::factor(plain);
    facts[1] = S::kLinear;
}
"""


@pytest.mark.parametrize(
    ("score", "short"),
    [
        *(pytest.param(score, 0, id=name) for name, score in CASES.items()),
        *(pytest.param(score, 1, id=f"{name}, short") for name, score in CASES.items() if score.cap_header),
    ],
)
def test_the_entry_says_what_the_header_says(
    score: Score, short: int, rng: np.random.Generator, tmp_path: Path
) -> None:
    """The header is compiled for the host, also with the shorter tanh that gradients of 16-bit products take."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    root = Path(shutil.copytree(cuda_root(), tmp_path / "cuda_src"))
    (root / "ptx/math.cuh").write_text(UNIT)
    (root / "kernels/ask.cu").write_text(ASK)
    names = tuple(score.numbers(1.0))
    structs = [field.type for field in args_of(names, names).forward.fields if field.name.endswith("_numbers")]
    prologue = "\n".join(x.text for x in structs if not isinstance(x, str))
    constants = {"SKL_T_SCORE": score.struct, "SKL_S_SCORE": score.struct, "SKL_SHORT_TANH": short}
    text = MATH + flatten("kernels/ask.cu", constants, {"score": (*score.headers, "scores/all.cuh")}, root, prologue)
    path = tmp_path / "ask.cpp"
    path.write_text(text)
    subprocess.run([compiler, "-std=c++17", "-O1", "-shared", "-fPIC", path, "-o", path.with_suffix(".so")], check=True)
    ask = ctypes.CDLL(str(path.with_suffix(".so"))).ask
    x = dots(rng).astype(np.float32).ravel()[:288]
    x[:3] = np.nan, np.inf, -np.inf
    for scale in scales(score):
        turned, (logits, slopes) = x.copy(), np.empty((2, x.size), np.float32)
        facts, numbers = np.empty(2, np.float32), np.array([*score.numbers(scale).values()], np.float32)
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (logits, slopes, facts)]
        ask(x.size, *(ctypes.c_void_p(a.ctypes.data) for a in (turned, numbers)), ctypes.c_float(scale), *pointers)
        with np.errstate(invalid="ignore", over="ignore"):
            expected = score.pair_logits(x.astype(np.float64), scale) * LOG2E
            wanted = np.broadcast_to(score.pair_slopes(x.astype(np.float64), scale), x.shape)
        bound = 3e-6 if short else 1e-6
        np.testing.assert_allclose(logits[3:], expected[3:], rtol=bound, atol=bound)
        np.testing.assert_array_equal(np.isfinite(logits), np.isfinite(expected))
        np.testing.assert_allclose(slopes[3:], wanted[3:], rtol=3e-6, atol=1e-6)
        assert np.abs(slopes[3:]).max() <= score.largest_slope
        assert facts[0] == pytest.approx(score.factor(scale), rel=1e-6)
        assert bool(facts[1]) == score.linear


def options_of(side: str, case: str, cap: float = CAP) -> dict[str, Any]:
    name, _, capped_too = case.partition("+")
    return {f"{side}_score": name, **({f"{side}_softcap": cap} if capped_too else {})}


def problem(
    rng: np.random.Generator, pair: tuple[str, str], name: str = "gaussian", dtypes: Any = "float32", **how: Any
) -> Case:
    """Of data that the scores of the teacher and the student are for: features of logarithms are not negative, and
    where a kink is, products are exact and often 0."""
    case = make(name, dtypes=dtypes, seed=int(rng.integers(2**31)), **how)
    arrays, options = list(case.arrays), {**case.options}
    for side, asked, at in zip(("teacher", "student"), pair, (0, 2), strict=True):
        options |= options_of(side, asked)
        score = SCORES[options[f"{side}_score"]]
        for i in (at, at + 1):
            if score.positive:
                arrays[i] = np.abs(arrays[i])
            elif score.name == "relu":
                arrays[i] = np.round(np.clip(2 * arrays[i], -8, 8)) / 2
        if score.positive:
            options.pop(f"{side}_scale", None)
    return case._replace(arrays=(arrays[0], arrays[1], arrays[2], arrays[3]), options=options)


def wanted(pair: tuple[str, str], dtype: str, device: str) -> tuple[str, ...]:
    """What is built."""
    steep = [side for side, x in zip(("teacher", "student"), pair, strict=True) if CASES[x].largest_slope > 1]
    narrow = device == "cuda" and dtype == "float16"
    return tuple(name for name in INPUT_NAMES if not (narrow and name.startswith(tuple(steep))))


@of_pairs
@pytest.mark.parametrize(
    "name, dtype, options",
    [
        ("gaussian", "float32", {}),
        ("realistic", "bfloat16", {"causal": True}),
        ("gaussian", "float16", {"window": (40, 7), "divergence": "reverse_kl"}),
        ("near_equal", "float32", {"causal": True, "deterministic": True}),
    ],
)
def test_calls(
    core: Any,
    pair: tuple[str, str],
    dtype: str,
    name: str,
    options: dict[str, Any],
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over many tiles on the CPU too."""
    for key, value in {"QUERY_TILE": 16, "KEY_TILE": 32, "BLOCK_ELEMENTS": 1024, "LONGEST_KEY_TILE": 64}.items():
        monkeypatch.setattr(cut, key, value)
    how = {key: x for key, x in options.items() if key == "deterministic"}
    case = problem(
        rng, pair, name, dtype, B=2, H=4, M=70, N=150, D_t=64, D_s=40, teacher_key_heads=2, student_key_heads=1,
        **{key: x for key, x in options.items() if key not in how},
    )  # fmt: skip
    grad = upstream(rng, (2, 4, 70))
    core.judge(case, grad, wrt=wanted(pair, dtype, core.device), **how)


@of_pairs
def test_beside_every_mask(core: Any, pair: tuple[str, str], rng: np.random.Generator, turn: Any) -> None:
    """On a GPU, which compiles for each, beside one half of them or the other."""
    masks = [*MASK_OPTIONS.items()]
    for mask, ask in masks if core.device == "cpu" else turn((masks[::2], masks[1::2]), PAIRS.index(pair)):
        B, M, N = 1 if mask == "packed" else 2, 40, 75
        case = problem(
            rng, pair, B=B, H=2, M=M, N=N, D_t=16, D_s=24, dtypes=("float32", "bfloat16"), **ask(rng, B, M, N)
        )
        grad = upstream(rng, reference.forward(*case.arrays, **case.options).kl.shape)
        core.judge(case, grad, wrt=INPUT_NAMES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_that_are_not_positive(core: Any, dtype: str, rng: np.random.Generator) -> None:
    """Features that are often 0, and signed ones, as integers, whose products are exact."""
    shape, zero = {"B": 1, "H": 2, "M": 60, "N": 90, "D_t": 4, "D_s": 3, "dtypes": dtype}, 2.0**-126
    for low in (0, -2):
        case = problem(rng, ("log_dot", "log_dot"), **shape)
        integers = [rng.integers(low, 3, x.shape).astype(np.float32) for x in case.arrays]
        case = case._replace(arrays=tuple(integers))
        products = integers[2] @ integers[3].swapaxes(-1, -2)
        assert (products <= 0).any()
        rows, _ = core.judge(case, upstream(rng, (1, 2, 60)), wrt=INPUT_NAMES)
        assert np.isfinite(core.numpy(rows.kl)).all()
        expected = np.log(np.maximum(products, zero).sum(-1))
        np.testing.assert_allclose(core.numpy(rows.student_lse), expected, rtol=1e-5, atol=1e-5)


def test_nan_and_inf_are_not_silent(core: Any, rng: np.random.Generator) -> None:
    for pair in PAIRS:
        for bad in (np.nan, np.inf):
            for at in range(4):
                case = problem(rng, pair, H=1, M=9, N=11, D_t=8)
                case.arrays[at][0, 0, 5, 3] = bad
                rows = streamkl_cupy.attention_kl_forward(*core.arrays(case), **case.options)
                lost = np.isnan(core.numpy(rows.kl))[0, 0]
                assert lost.all() if at % 2 else lost[5] and lost.sum() == 1, (pair, bad, at)


FAMILY_DIMS = [[(64, 64), (72, 80)], [(128, 128), (576, 128)]]


@pytest.fixture(params=["sm80", "sm90"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, cupy_only: Any) -> Iterator[str]:
    """Plans with one family, and with the portable one where that cannot."""
    import test_families

    if request.param == "sm90" and test_families.gpus.device_facts(0).compute_capability != (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0")
    test_families.use(monkeypatch, request.param, "sm80")
    yield request.param
    test_families.forget_plans()


@pytest.mark.gpu
@of_pairs
@pytest.mark.parametrize("dims", FAMILY_DIMS)
def test_every_kernel_family(
    family: str, cupy_only: Any, rng: np.random.Generator, turn: Any, pair: tuple[str, str], dims: list[tuple[int, int]]
) -> None:
    """Passes and kernels of one gradient; without atomics the same bits each time. Of two head dims one, by turns."""
    D_t, D_s = turn(dims, PAIRS.index(pair))
    case = problem(
        rng, pair, dtypes="bfloat16", H=4, M=300, N=333, D_t=D_t, D_s=D_s, teacher_key_heads=2, student_key_heads=1,
        causal=True,
    )  # fmt: skip
    grad = upstream(rng, (1, 4, 300))
    wrt = INPUT_NAMES[2:] if D_t > 256 else INPUT_NAMES
    inputs = cupy_only.arrays(case)
    found = [cupy_only.judge(case, grad, arrays=inputs, wrt=wrt, deterministic=how)[1] for how in (False, True, True)]
    for name, first, second in zip(INPUT_NAMES, found[1], found[2], strict=True):
        if first is not None:
            check_same_bits(name, cupy_only.numpy(first), cupy_only.numpy(second))


@of_pairs
def test_gradients_are_finite_differences(pair: tuple[str, str]) -> None:
    rng = np.random.default_rng(5)
    case = problem(rng, pair, M=3, N=5, D_t=3, D_s=2, dtypes="float64")
    arrays = [x + 0.1 * rng.random(x.shape) for x in case.arrays]  # no product is 0
    grad = rng.standard_normal((1, 1, 3))
    grads = reference.backward(grad, *arrays, **case.options).value
    for which, x in enumerate(arrays):
        direction, sums = rng.standard_normal(x.shape), []
        for sign in (1e-6, -1e-6):
            moved = [a + sign * direction if i == which else a for i, a in enumerate(arrays)]
            sums.append((grad * reference.forward(*moved, **case.options).kl).sum())
        assert (grads[which] * direction).sum() == pytest.approx((sums[0] - sums[1]) / 2e-6, rel=1e-6, abs=1e-8)


def dense(torch: Any, x: list[Any], pair: tuple[str, str]) -> Any:
    """The loss by torch's own functions, of teachers and students with one key head to a query head."""
    logs = []
    for asked, q, k in zip(pair, x[::2], x[1::2], strict=True):
        name, _, capped_too = asked.partition("+")
        products = q @ k.mT
        scaled = products / q.shape[-1] ** 0.5
        y = {"dot": scaled, "relu": torch.relu(scaled), "log_dot": products.clamp(min=2.0**-126).log()}[name]
        logs.append(torch.log_softmax(CAP * torch.tanh(y / CAP) if capped_too else y, -1))
    p, q = logs
    return (p.exp() * (p - q)).sum(-1).mean()


PUBLIC = [pair for pair in PAIRS if {x.partition("+")[0] for x in pair} <= {"dot", "relu", "log_dot"}]


@pytest.mark.parametrize("pair", PUBLIC, ids="/".join)
@pytest.mark.parametrize("kind", [Torch, pytest.param(TorchCuda, marks=pytest.mark.gpu)])
def test_torch_differentiates(kind: Any, rng: Any, pair: tuple[str, str]) -> None:
    backend, torch = kind(), pytest.importorskip("torch")
    wide = backend.device == "cpu"
    case = problem(rng, pair, H=2, M=20, N=30, D_t=16, dtypes="float64" if wide else "float32")
    x = [a.requires_grad_() for a in backend.arrays(case)]
    value = streamkl_cupy.attention_kl(*x, reduction="mean", **case.options)
    got = torch.autograd.grad(value, x)
    y = [a.detach().double().requires_grad_() for a in x]
    expected = dense(torch, y, pair)
    assert value.item() == pytest.approx(expected.item(), rel=1e-10 if wide else 1e-5)
    for g, e in zip(got, torch.autograd.grad(expected, y), strict=True):
        torch.testing.assert_close(g.double(), e, rtol=1e-8 if wide else 1e-3, atol=1e-11 if wide else 1e-6)


def test_torch_compile_and_vmap(rng: Any) -> None:
    """A cap that changes from call to call is no other program."""
    backend, torch = Torch(), pytest.importorskip("torch")
    case = problem(rng, ("relu", "dot+softcap"), B=3, H=2, M=8, N=12, D_t=16)
    x = backend.arrays(case)
    options = {key: value for key, value in case.options.items() if key != "student_softcap"}
    call = functools.partial(streamkl_cupy.attention_kl, **options)
    testing = pytest.importorskip("torch._dynamo.testing")
    torch._dynamo.reset()
    counter = testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda cap, *x: call(*x, student_softcap=cap), backend=counter, fullgraph=True)
    for cap in (CAP, 2.0, 1.5, 1.25):
        torch.testing.assert_close(compiled(cap, *x), call(*x, student_softcap=cap))
    assert counter.frame_count <= 2
    torch.testing.assert_close(
        torch.vmap(functools.partial(call, student_softcap=CAP))(*x), call(*x, student_softcap=CAP)
    )


@pytest.mark.parametrize("kind", [Jax, pytest.param(JaxCuda, marks=pytest.mark.gpu)])
def test_jax_differentiates(kind: Any, rng: Any) -> None:
    backend = kind()
    jax = backend.xp
    for pair in PUBLIC:
        case = problem(rng, pair, B=2, H=2, M=20, N=30, D_t=16)
        loss = functools.partial(streamkl_cupy.attention_kl, reduction="sum", **case.options)
        x = backend.arrays(case)
        value, grads = jax.jit(jax.value_and_grad(loss, argnums=range(4)))(*x)
        expected = reference.forward(*case.arrays, **case.options).kl
        assert float(value) == pytest.approx(expected.sum(), rel=1e-5)
        wanted = reference.backward(np.ones(expected.shape), *case.arrays, **case.options).value
        for name, g, e in zip(INPUT_NAMES, grads, wanted, strict=True):
            np.testing.assert_allclose(backend.numpy(g), e, rtol=1e-3, atol=2e-5, err_msg=name)
        rows = jax.vmap(lambda *x, options=case.options: streamkl_cupy.attention_kl(*x, **options))(*x)
        np.testing.assert_allclose(backend.numpy(rows), expected, rtol=1e-4, atol=1e-5)


@of_pairs
def test_plans_have_their_headers(pair: tuple[str, str]) -> None:
    plan = make_plan(catalogue.problem((64, 64), catalogue.ELEMENT_TYPES[0], scores=pair), facts_for_arch("sm_90"))
    passes = [fused.main for fused in plan.fused]
    assert passes
    for kernel in (plan.forward, *passes, *(kernel for _, kernel in plan.gradients)):
        for score in map(CASES.__getitem__, pair):
            assert all(f'"{header}"' in kernel.text for header in score.headers)
        others = {SCORES[x.partition("+")[0]].header for x in pair}
        assert not any(f'"{score.header}"' in kernel.text for score in SCORES.values() if score.header not in others)
    for side, asked in zip(("teacher", "student"), pair, strict=True):
        name, _, capped_too = asked.partition("+")
        (line,) = re.findall(rf"^  {side}: D=.*$", str(plan), re.MULTILINE)
        assert (f", score {name}" in line) == (name != "dot")
        assert (", softcap 30" in line) == bool(capped_too)


def test_a_cap_is_a_number_in_the_arguments() -> None:
    x = np.empty((2, 512, 64), np.float16)
    plans = [streamkl_cupy.plan(x, x, x, x, arch="sm_90", teacher_softcap=cap) for cap in (30.0, 50, None)]
    texts = [{kernel.text for _, kernel in plan.gradients} | {plan.forward.text} for plan in plans]
    assert texts[0] == texts[1]
    assert not texts[0] & texts[2]
    plain = streamkl_cupy.plan(x, x, x, x, arch="sm_90")
    assert plans[2] == plain
    for plan, cap in zip(plans, (30.0, 50.0, None), strict=True):
        for kernel in (plan.forward, plan.gradient("teacher_q"), *(fused.main for fused in plan.fused)):
            packed = template(plan.problem, kernel)

            def number(name: str, kernel: Any = kernel, packed: bytes = packed) -> float:
                (at,) = (leaf.offset for path, leaf in kernel.args.leaves.items() if path.endswith(f"_numbers.{name}"))
                return float(np.frombuffer(packed, np.float32, 1, at)[0])

            if cap is not None:
                assert number("cap") == pytest.approx(cap * LOG2E)


@pytest.mark.parametrize("name", SCORES)
def test_the_readme_has_the_formula(name: str) -> None:
    readme = " ".join((Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8").split())
    assert f'`"{name}"`: `{SCORES[name].formula}`' in readme


@pytest.mark.parametrize(
    "options, error, text",
    [
        ({"teacher_score": "cosine"}, ValueError, r"teacher_score='cosine'.*\"dot\", \"log_dot\".*\"relu\""),
        ({"student_score": 3}, TypeError, "student_score"),
        ({"student_softcap": 0}, ValueError, r"student_softcap=0.0; allowed are positive finite numbers, and None"),
        ({"teacher_softcap": -30.0}, ValueError, "teacher_softcap=-30.0"),
        ({"teacher_softcap": float("nan")}, ValueError, "teacher_softcap=nan"),
        ({"teacher_softcap": float("inf")}, ValueError, "teacher_softcap=inf"),
        ({"teacher_softcap": True}, TypeError, "teacher_softcap is"),
        ({"teacher_softcap": "30"}, TypeError, r"float\(teacher_softcap\)"),
        ({"teacher_softcap": np.ones(2)}, TypeError, "calls of their own"),
        ({"teacher_softcap": 1e-45}, ValueError, "teacher_softcap=.* beyond what float32"),
        ({"student_softcap": 30, "student_score": "log_dot"}, ValueError, "student_softcap=30.0 beside student_score="),
        ({"student_scale": 0, "student_score": "log_dot"}, ValueError, "student_scale=0.0 beside .*positive numbers"),
    ],
)
def test_what_has_no_meaning_is_refused(options: dict[str, Any], error: type[Exception], text: str) -> None:
    x = np.ones((4, 8), np.float32)
    with pytest.raises(error, match=text):
        streamkl_cupy.attention_kl(x, x, x, x, **options)


def test_float16_gradients_of_steep_scores_are_refused() -> None:
    assert [name for name, x in SCORES.items() if x.largest_slope > 1] == ["log_dot"]
    half, wide = (
        catalogue.problem((64, 64), types, scores=("dot", "log_dot")) for types in catalogue.ELEMENT_TYPES[1::-1]
    )
    facts = facts_for_arch("sm_90")
    text = r"float16 on CUDA for scores with slopes of at most 1, .* those of 'log_dot' reach 8.5\S*; bfloat16"
    with pytest.raises(NotImplementedError, match=f'{text}.*wrt of "teacher_q", "teacher_k"$'):
        validate.gradients_built(half, ("teacher_q", "student_q"))
    validate.gradients_built(half, ("teacher_q",))
    plan = make_plan(half, facts)
    assert [name for name, _ in plan.gradients] == ["teacher_q", "teacher_k"]
    assert [fused.side for fused in plan.fused] == ["teacher"]
    assert "student: no gradients (built in float16" in str(plan)
    with pytest.raises(NotImplementedError, match=f"wrt 'student_k'.*{text}"):
        plan.gradient("student_k")
    validate.gradients_built(wide, INPUT_NAMES)
    assert len(make_plan(wide, facts).gradients) == 4

"""Every score of the registry: its formula, its halves on the host, its header, and calls on both backends by float64.

No option asks for a score yet, so calls get theirs by the problem.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from streamkl_cupy import validate
from streamkl_cupy.arrays import Saved
from streamkl_cupy.call import Call, runner_for
from streamkl_cupy.cli import catalogue
from streamkl_cupy.compiler.source import cuda_root, flatten
from streamkl_cupy.frameworks import describe
from streamkl_cupy.kernels.gpus import facts_for_arch
from streamkl_cupy.numpy_backend import plan as cut
from streamkl_cupy.numpy_backend.block import LOG2E
from streamkl_cupy.ops import ATTENTION_KL
from streamkl_cupy.planning import make_plan
from streamkl_cupy.problem import INPUT_NAMES
from streamkl_cupy.rules.scores import SCORES
from streamkl_cupy.rules.scores.interface import Meaning
from streamkl_cupy.testing import reference
from streamkl_cupy.testing.compare import check_gradients, check_lse, check_rows
from streamkl_cupy.testing.problems import make, upstream

Array = NDArray[Any]
of_every_score = pytest.mark.parametrize("score", SCORES)
MEANINGS = [
    pytest.param(meaning, id=f"{name}-{side}")
    for name, entry in SCORES.items()
    for side, meaning in zip(("teacher", "student"), entry.sides, strict=True)
]
HEADERS = [
    pytest.param(entry.header, side, meaning, id=f"{name}-{side}")
    for name, entry in SCORES.items()
    for side, meaning in enumerate(entry.sides)
]
SCALES = (0.125, -0.7, 3.0, 0.0)


def dots(rng: np.random.Generator) -> Array:
    return rng.standard_normal((2, 3, 50)) * 10.0 ** rng.uniform(-3, 3, (2, 3, 50))


@pytest.mark.parametrize("meaning", MEANINGS)
@pytest.mark.parametrize("scale", SCALES)
def test_a_logit_is_what_its_formula_says(meaning: Meaning, scale: float, rng: np.random.Generator) -> None:
    x = dots(rng)
    expected = eval(meaning.formula, {**vars(np), "dot": x, "scale": scale})
    np.testing.assert_allclose(meaning.pair_logits(x, scale), expected, rtol=1e-12)
    assert meaning.pair_logits(x.astype(np.float32), scale).dtype == np.float32


@pytest.mark.parametrize("meaning", MEANINGS)
@pytest.mark.parametrize("scale", SCALES)
def test_slopes_are_derivatives_and_bounded(meaning: Meaning, scale: float, rng: np.random.Generator) -> None:
    x = dots(rng)
    slopes = np.broadcast_to(meaning.pair_slopes(x, scale), x.shape)
    assert np.abs(slopes).max() <= meaning.largest_slope
    step = 1e-5 * np.maximum(np.abs(x), 1e-2)
    rise = meaning.pair_logits(x + step, scale) - meaning.pair_logits(x - step, scale)
    size = np.abs(meaning.pair_logits(x, scale)).max(initial=1e-300)
    np.testing.assert_allclose(
        meaning.factor(scale) * slopes, rise / (2 * step), rtol=1e-6, atol=1e-9 * size / step.min()
    )


@pytest.mark.parametrize("meaning", MEANINGS)
@pytest.mark.parametrize("scale", SCALES)
def test_tiles_have_what_pairs_have(meaning: Meaning, scale: float, rng: np.random.Generator) -> None:
    x = dots(rng)
    logits = meaning.tile_logits(x.copy(), scale * LOG2E)
    np.testing.assert_allclose(logits, meaning.pair_logits(x, scale) * LOG2E, rtol=1e-12)
    slopes = np.ones(x.shape)
    if meaning.tile_slopes is not None:
        meaning.tile_slopes(logits, scale * LOG2E, slopes)
    np.testing.assert_allclose(slopes, np.broadcast_to(meaning.pair_slopes(x, scale), x.shape), rtol=1e-6, atol=1e-9)


SHIM = """
#include <algorithm>
#include <cmath>
#define __device__
using std::max;
using std::min;
"""

ASK = """
#include "@score"
extern "C" void ask(int count, const float* dots, float scale, float plain, float* logits, float* less, float* slopes,
                    float* facts) {
    using S = Score<ASKED_SIDE>;
    for (int i = 0; i < count; ++i) {
        logits[i] = S::logit(dots[i], scale);
        less[i] = S::logit(dots[i], scale, 2.5f);
        slopes[i] = S::slope(logits[i], scale);
    }
    facts[0] = S::factor(plain);
    facts[1] = S::kLinear;
}
"""


@pytest.mark.parametrize("header, side, meaning", HEADERS)
def test_the_entry_says_what_the_header_says(
    header: str, side: int, meaning: Meaning, rng: np.random.Generator, tmp_path: Path
) -> None:
    """The header is compiled for the host."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    root = Path(shutil.copytree(cuda_root(), tmp_path / "cuda_src"))
    (root / "kernels/ask.cu").write_text(ASK)
    text = SHIM + flatten("kernels/ask.cu", {"ASKED_SIDE": side}, {"score": header}, root)
    path = tmp_path / "ask.cpp"
    path.write_text(text)
    subprocess.run([compiler, "-std=c++17", "-O1", "-shared", "-fPIC", path, "-o", path.with_suffix(".so")], check=True)
    ask = ctypes.CDLL(str(path.with_suffix(".so"))).ask
    x = dots(rng).astype(np.float32).ravel()
    for scale in SCALES:
        logits, less, slopes = np.empty((3, x.size), np.float32)
        facts = np.empty(2, np.float32)
        pointers = [ctypes.c_void_p(a.ctypes.data) for a in (logits, less, slopes, facts)]
        factors = ctypes.c_float(scale * LOG2E), ctypes.c_float(scale)
        ask(x.size, ctypes.c_void_p(x.ctypes.data), *factors, *pointers)
        expected = meaning.pair_logits(x.astype(np.float64), scale)
        np.testing.assert_allclose(logits, expected * LOG2E, rtol=1e-6, atol=1e-30)
        np.testing.assert_allclose(less, expected * LOG2E - 2.5, rtol=1e-6, atol=1e-6 * 2.5)
        np.testing.assert_allclose(
            slopes, np.broadcast_to(meaning.pair_slopes(x.astype(np.float64), scale), x.shape), rtol=1e-6, atol=1e-6
        )
        assert np.abs(slopes).max() <= meaning.largest_slope
        assert facts[0] == pytest.approx(meaning.factor(scale), rel=1e-6)
        assert bool(facts[1]) == meaning.linear


def with_score(ready: Any, score: str) -> Any:
    """A checked call, as if it had asked for that score."""
    problem = replace(ready.checked.problem, score=score)
    runner = runner_for(problem)
    checked = ready.checked._replace(runner=runner, problem=problem, workspace_bytes=runner.workspace_bytes)
    return ready._replace(checked=checked)


@of_every_score
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "name, options",
    [
        ("gaussian", {}),
        ("realistic", {"causal": True}),
        ("spiky", {}),
        ("signed_scale", {"window": (40, 7)}),
        ("near_equal", {"causal": True, "deterministic": True}),
    ],
)
def test_calls(
    core: Any,
    score: str,
    dtype: str,
    name: str,
    options: dict[str, Any],
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over many tiles on the CPU too."""
    for key, value in {"QUERY_TILE": 16, "KEY_TILE": 32, "BLOCK_ELEMENTS": 1024, "LONGEST_KEY_TILE": 64}.items():
        monkeypatch.setattr(cut, key, value)
    how = {"deterministic": options["deterministic"]} if "deterministic" in options else {}
    case = make(
        name, B=2, H=4, M=70, N=150, D_t=64, D_s=40, teacher_key_heads=2, student_key_heads=1, dtypes=dtype,
        seed=int(rng.integers(2**31)), **{key: x for key, x in options.items() if key not in how},
    )  # fmt: skip
    case.options["teacher_scale"] = case.options.get("teacher_scale", 0.125) * rng.uniform(0.9, 1.1)
    expected = reference.forward(*case.arrays, score=score, **case.options)
    arrays = core.arrays(case)
    ready = with_score(Call.of(ATTENTION_KL, arrays, {**case.options, **how}).ready(), score)
    core.poison(arrays)
    rows = ready.forward()
    check_rows("kl", core.numpy(rows.kl.array), expected, hard=case.hard, dtype="float32")
    for view, lse in ((rows.teacher_lse, expected.teacher_lse), (rows.student_lse, expected.student_lse)):
        check_lse(view.name, core.numpy(view.array), lse, expected.largest, "float32", None)
    grad = upstream(rng, expected.kl.shape)
    core.poison(arrays)
    saved = Saved(describe("grad", core.array(grad, "float32")), rows.teacher_lse, rows.student_lse, rows.kl)
    grads = ready._replace(saved=saved).backward(INPUT_NAMES)
    wanted = reference.backward(grad, *case.arrays, score=score, **case.options)
    check_gradients(tuple(core.numpy(x) for x in grads), wanted, case.dtypes, hard=case.hard_gradients)


@of_every_score
def test_gradients_are_finite_differences(score: str) -> None:
    case = make("gaussian", M=3, N=5, D_t=3, D_s=2, dtypes="float64", seed=3, teacher_scale=-0.7, student_scale=0.9)
    rng = np.random.default_rng(1)
    grad = rng.standard_normal((1, 1, 3))
    grads = reference.backward(grad, *case.arrays, score=score, **case.options).value
    for which, x in enumerate(case.arrays):
        direction, sums = rng.standard_normal(x.shape), []
        for sign in (1e-6, -1e-6):
            moved = [a + sign * direction if i == which else a for i, a in enumerate(case.arrays)]
            sums.append((grad * reference.forward(*moved, score=score, **case.options).kl).sum())
        assert (grads[which] * direction).sum() == pytest.approx((sums[0] - sums[1]) / 2e-6, rel=1e-6, abs=1e-8)


@of_every_score
def test_plans_have_its_header(score: str) -> None:
    plan = make_plan(catalogue.problem((64, 64), catalogue.ELEMENT_TYPES[1], score=score), facts_for_arch("sm_90"))
    passes = [fused.main for fused in plan.fused]
    for kernel in (plan.forward, *passes, *(kernel for _, kernel in plan.gradients)):
        assert f'"{SCORES[score].header}"' in kernel.text
    assert score == "dot" or f", score {score}\n" in str(plan)


@of_every_score
def test_the_readme_has_the_formula(score: str) -> None:
    readme = " ".join((Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8").split())
    for meaning in SCORES[score].sides:
        assert f"`{meaning.formula}`" in readme


def test_float16_gradients_of_steep_scores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    dot = SCORES["dot"]
    monkeypatch.setitem(SCORES, "steep", replace(dot, name="steep", student=replace(dot.student, largest_slope=2.0)))
    half, wide = (catalogue.problem((64, 64), types, score="steep") for types in catalogue.ELEMENT_TYPES[1::-1])
    facts = facts_for_arch("sm_90")
    text = r"float16 on CUDA for scores with slopes of at most 1, .* those of 'steep' reach 2; bfloat16"
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

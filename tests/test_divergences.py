"""Every divergence of the registry on every backend, kernel family, mask and dtype: all rows and gradients by float64.

Other tests take one divergence through everything that changes the path through a kernel. These take each through what
asks the divergence: row states and their merging, logit gradients, the row's value and the exponents of narrow types.
"""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Jax, JaxCuda, Torch, TorchCuda

import streamkl_cupy
from streamkl_cupy.compiler.nvrtc import Build, build
from streamkl_cupy.compiler.source import cuda_root, flatten
from streamkl_cupy.errors import CompilerError
from streamkl_cupy.numpy_backend import plan as cut
from streamkl_cupy.problem import INPUT_NAMES
from streamkl_cupy.rules.divergences import DIVERGENCES
from streamkl_cupy.rules.masks import MASKS
from streamkl_cupy.testing import reference
from streamkl_cupy.testing.problems import MASK_OPTIONS, RECIPES, make, upstream

pytestmark = pytest.mark.parametrize("divergence", DIVERGENCES)
SMALL = {"QUERY_TILE": 16, "KEY_TILE": 32, "BLOCK_ELEMENTS": 1024, "LONGEST_KEY_TILE": 64}


def seed_of(rng: np.random.Generator) -> int:
    return int(rng.integers(2**31))


def place(divergence: str) -> int:
    return [*DIVERGENCES].index(divergence)


def rows_of(case: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = case.arrays[0].shape[:-1]
    return shape


def test_every_dtype_on_every_backend(backend: Any, rng: Any, divergence: str) -> None:
    for dtypes in (*backend.dtypes, ("bfloat16", "float32")):
        case = make(
            B=2, H=4, M=70, N=130, D_t=64, D_s=40, teacher_key_heads=2, student_key_heads=1, dtypes=dtypes,
            seed=seed_of(rng), causal=True, divergence=divergence,
        )  # fmt: skip
        entropy = bool(rng.integers(2))
        backend.judge(case, upstream(rng, rows_of(case)), plain="float64" not in dtypes, entropy=entropy)


@pytest.mark.parametrize("mask", MASKS)
def test_every_mask(core: Any, rng: Any, turn: Any, divergence: str, mask: str) -> None:
    """Of the types a GPU, which compiles for each, has one by turns."""
    types = "float16", "float32"
    for dtype in types if core.device == "cpu" else [turn(types, place(divergence), [*MASKS].index(mask))]:
        B, M, N = 1 if mask == "packed" else 2, 90, 150
        case = make(
            B=B, H=2, M=M, N=N, D_t=64, student_key_heads=1, dtypes=dtype, seed=seed_of(rng), divergence=divergence,
            **MASK_OPTIONS[mask](rng, B, M, N),
        )  # fmt: skip
        core.judge(case, upstream(rng, rows_of(case)), entropy=bool(rng.integers(2)))


@pytest.mark.parametrize("name", sorted(RECIPES))
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_hard_and_ordinary_problems(
    core: Any, rng: Any, divergence: str, name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over many tiles on the CPU too, where a scale of its own has each problem planned afresh."""
    for key, value in SMALL.items():
        monkeypatch.setattr(cut, key, value)
    case = make(name, H=2, M=75, N=700, D_t=64, dtypes=dtype, seed=seed_of(rng), divergence=divergence)
    case.options["teacher_scale"] = case.options.get("teacher_scale", 0.125) * rng.uniform(0.9, 1.1)
    # Large logits take float16 gradients out of range; smaller upstream gradients keep them in it.
    core.judge(case, upstream(rng, rows_of(case)) * np.float32(1e-3 if name == "huge" else 1), entropy=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_upstream_of_all_sizes(core: Any, rng: Any, divergence: str, dtype: str) -> None:
    case = make(H=2, M=150, N=260, D_t=64, dtypes=dtype, seed=seed_of(rng), divergence=divergence)
    core.judge(case, upstream(rng, rows_of(case), "wild"))
    _, grads = core.judge(case, np.zeros(rows_of(case), np.float32))
    assert all((core.numpy(x) == 0).all() for x in grads)


@pytest.mark.parametrize("offset", [30, 100])
def test_keys_with_a_large_common_part(core: Any, rng: Any, divergence: str, offset: float) -> None:
    case = make(H=2, M=40, N=300, D_t=64, seed=seed_of(rng), divergence=divergence)
    for i in (1, 3):
        case.arrays[i][...] = reference.rounded(case.arrays[i] + offset * rng.standard_normal(64), "float32")
    exact = reference.forward(*case.arrays, **case.options).kl
    found = core.numpy(streamkl_cupy.attention_kl(*core.arrays(case), **case.options))
    np.testing.assert_allclose(found, exact, rtol=4e-6, atol=4e-6)


def test_few_rows_against_many_keys(core: Any, rng: Any, divergence: str) -> None:
    """On a GPU the keys are split over blocks, whose states are merged."""
    for name, dtype in (("gaussian", "float32"), ("rising", "bfloat16"), ("spiky", "float16")):
        case = make(name, M=3, N=9000, D_t=64, dtypes=dtype, seed=seed_of(rng), divergence=divergence)
        core.judge(case, upstream(rng, rows_of(case), "ones"), entropy=bool(rng.integers(2)))


@pytest.mark.parametrize("wrt", [names for n in (1, 2) for names in itertools.combinations(INPUT_NAMES, n)], ids=str)
def test_any_gradients_with_the_value_or_without(core: Any, rng: Any, divergence: str, wrt: tuple[str, ...]) -> None:
    """Who needs the row's value is told so; who does not may leave it out."""
    case = make(H=2, M=50, N=60, D_t=64, dtypes="float16", seed=seed_of(rng), divergence=divergence)
    rows, grads = core.judge(case, np.ones(rows_of(case), np.float32), wrt=wrt)
    backward = functools.partial(
        streamkl_cupy.attention_kl_backward, core.array(np.ones(rows_of(case)), "float32"), *core.arrays(case),
        teacher_lse=rows.teacher_lse, student_lse=rows.student_lse, wrt=wrt, deterministic=True, **case.options,
    )  # fmt: skip
    if DIVERGENCES[divergence].moments:
        with pytest.raises(ValueError, match="need the moments of the rows"):
            backward()
        backward = functools.partial(backward, moments=rows.moments)
    if any(name.startswith(DIVERGENCES[divergence].needs_value) for name in wrt):
        with pytest.raises(ValueError, match="needs the row values"):
            backward()
        return
    for name, x, whole in zip(INPUT_NAMES, backward(), grads, strict=True):
        if x is not None:
            np.testing.assert_allclose(core.numpy(x), core.numpy(whole), rtol=2e-3, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", INPUT_NAMES)
def test_visible_nan_and_inf_are_not_silent(core: Any, rng: Any, divergence: str, name: str, bad: float) -> None:
    case = make(M=50, N=50, D_t=64, dtypes="bfloat16", seed=seed_of(rng), causal=True, divergence=divergence)
    case.arrays[INPUT_NAMES.index(name)][0, 0, 20, 3] = bad
    rows = streamkl_cupy.attention_kl_forward(*core.arrays(case), **case.options, return_entropy=True)
    sees = np.arange(50) == 20 if name.endswith("_q") else np.arange(50) >= 20
    for name, x in zip(rows._fields, rows, strict=True):
        if name not in ("teacher_mass", "moments"):
            np.testing.assert_array_equal(np.isnan(core.numpy(x))[0, 0], sees, err_msg=name)


def test_equal_distributions(core: Any, rng: Any, divergence: str) -> None:
    """Most divergences have 0 there, and no logit matters to first order: they are exact to more than in general."""
    case = make("realistic", M=100, N=900, D_t=64, dtypes="bfloat16", seed=seed_of(rng))
    q, k = core.arrays(case)[:2]
    exact = reference.forward(*case.arrays[:2] * 2, divergence=divergence)
    found = core.numpy(streamkl_cupy.attention_kl(q, k, q, k, divergence=divergence))
    # A cross-entropy is the entropy there, which hangs on logits as always: each of them is rounded once.
    bound = 1e-6 * (1 + np.abs(exact.kl)) + 2.0**-24 * exact.condition
    assert (np.abs(found - exact.kl) <= bound).all(), (np.abs(found - exact.kl) / bound).max()


@pytest.mark.filterwarnings("ignore")  # of the compiler's own making
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", [Torch, pytest.param(TorchCuda, marks=pytest.mark.gpu)])
def test_torch_differentiates(kind: Any, rng: Any, divergence: str, compiled: bool) -> None:
    backend = kind()
    torch = backend.xp
    case = make(H=2, M=20, N=30, D_t=16, seed=seed_of(rng), divergence=divergence)
    x = [a.requires_grad_() for a in backend.arrays(case)]
    loss = functools.partial(streamkl_cupy.attention_kl, reduction="sum", **case.options)
    if compiled:
        torch.compiler.reset()
        loss = torch.compile(loss, fullgraph=True, backend="aot_eager")
    value = loss(*x)
    same(backend, case, value.item(), torch.autograd.grad(value, x))


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("kind", [Jax, pytest.param(JaxCuda, marks=pytest.mark.gpu)])
def test_jax_differentiates(kind: Any, rng: Any, divergence: str, jitted: bool) -> None:
    backend = kind()
    case = make(H=2, M=20, N=30, D_t=16, seed=seed_of(rng), divergence=divergence)
    loss = functools.partial(streamkl_cupy.attention_kl, reduction="sum", **case.options)
    function = backend.xp.value_and_grad(loss, argnums=range(4))
    value, grads = (backend.xp.jit(function) if jitted else function)(*backend.arrays(case))
    same(backend, case, float(value), grads)


def same(backend: Any, case: Any, value: float, grads: Any) -> None:
    expected = reference.forward(*case.arrays, **case.options).kl
    assert value == pytest.approx(expected.sum(), rel=1e-5)
    wanted = reference.backward(np.ones(expected.shape), *case.arrays, **case.options).value
    for name, x, e in zip(INPUT_NAMES, grads, wanted, strict=True):
        np.testing.assert_allclose(backend.numpy(x), e, rtol=1e-4, atol=1e-5, err_msg=name)


FAMILY_DIMS = [(64, 64), (128, 128), (72, 80), (192, 128), (576, 128)]


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
@pytest.mark.parametrize("D_t, D_s", FAMILY_DIMS)
def test_every_kernel_family(
    family: str, cupy_only: Any, rng: Any, turn: Any, divergence: str, D_t: int, D_s: int
) -> None:
    """With one of the 16-bit types, by turns: each divergence and each pair of head dims has both."""
    dtype = turn(("bfloat16", "float16"), place(divergence), FAMILY_DIMS.index((D_t, D_s)))
    case = make(
        H=4, M=300, N=333, D_t=D_t, D_s=D_s, teacher_key_heads=2, student_key_heads=1, dtypes=dtype,
        seed=seed_of(rng), causal=True, divergence=divergence,
    )  # fmt: skip
    wrt = INPUT_NAMES[2:] if D_t > 256 else INPUT_NAMES
    for deterministic in (False, True):
        cupy_only.judge(case, upstream(rng, rows_of(case)), wrt=wrt, deterministic=deterministic)


def test_plans_name_it(divergence: str) -> None:
    x = np.empty((2, 512, 64), np.float16)
    plan = streamkl_cupy.plan(x, x, x, x, divergence=divergence, arch="sm_90")
    assert plan.problem.divergence == divergence
    for kernel in (plan.forward, *(kernel for _, kernel in plan.gradients)):
        assert DIVERGENCES[divergence].header in kernel.text
    assert divergence == "kl" or f", {divergence}\n" in str(plan)


def test_the_entry_says_what_the_header_says(divergence: str, tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="needs CuPy and the NVRTC it brings")
    entry = DIVERGENCES[divergence]
    root = tmp_path / "cuda_src"
    shutil.copytree(cuda_root(), root)
    claims = [f"sizeof(RowState) == {4 * entry.state_floats}", f"RowState::kMoments == {entry.moments}"]
    for side, factor in zip(("teacher", "student"), entry.factors, strict=True):
        gradient = f"LogitGradient<k{side.title()}>"
        claims.append(f"{gradient}::kNeedsValue == {int(side in entry.needs_value or entry.moments > 0)}")
        claims.append(f"{gradient}::kFactor - {factor!r} < 1e-6 && {factor!r} - {gradient}::kFactor < 1e-6")

    def built(checks: list[str]) -> Build:
        lines = [f'static_assert({check}, "{n}");' for n, check in enumerate(checks)]
        text = '#include "@divergence"\nextern "C" __global__ void nothing() {}\n' + "\n".join(lines) + "\n"
        (root / "kernels/ask.cu").write_text(text)
        return build(flatten("kernels/ask.cu", {}, {"divergence": entry.header}, root), "sm_80")

    built(claims)
    for claim in claims:
        with pytest.raises(CompilerError, match="static assertion"):
            built([f"!({claim})"])

"""Entropy, and divergences beside KL: identities between them, numbers of their own, ways of calling, refusals."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest
from conftest import Jax, JaxCuda, Torch, TorchCuda, examples
from hypothesis import given
from hypothesis import strategies as st
from test_properties import cases

import streamkl_cupy
from streamkl_cupy.ops import ATTENTION_KL
from streamkl_cupy.problem import INPUT_NAMES
from streamkl_cupy.rules.divergences import DIVERGENCES
from streamkl_cupy.rules.masks import MASKS
from streamkl_cupy.testing import reference
from streamkl_cupy.testing.problems import MASK_OPTIONS, make, upstream

NUMBERS = ("jsd_beta", "smoothing")


def rows_of(case: Any) -> tuple[int, ...]:
    shape: tuple[int, ...] = case.arrays[0].shape[:-1]
    return shape


@examples(12)
@given(cases())
def test_cross_entropy_is_kl_and_entropy(core: Any, case: Any) -> None:
    inputs = core.arrays(case)
    rows = streamkl_cupy.attention_kl_forward(*inputs, **case.options, return_entropy=True)
    crossed = streamkl_cupy.attention_kl(*inputs, **case.options, divergence="cross_entropy")
    kl, entropy, found = map(core.numpy, (rows.kl, rows.teacher_entropy, crossed))
    np.testing.assert_allclose(found, kl + entropy, rtol=1e-5, atol=4e-5 if case.hard else 1e-5)
    assert (entropy >= -1e-5).all()


@examples(8)
@given(cases(), st.sampled_from(sorted(DIVERGENCES)))
def test_entropy_is_that_of_the_teacher_with_any_divergence(core: Any, case: Any, divergence: str) -> None:
    inputs = core.arrays(case)
    call = functools.partial(streamkl_cupy.attention_kl, *inputs, **case.options, divergence=divergence)
    exact = reference.forward(*case.arrays, **case.options).entropy
    found = call(return_entropy=True)
    alone = core.numpy(call())
    np.testing.assert_allclose(core.numpy(found.kl), alone, rtol=1e-5, atol=1e-5)
    bound = 2e-6 * (1 + exact) + 2.0**-22 * reference.forward(*case.arrays, **case.options).entropy_condition
    assert (np.abs(core.numpy(found.teacher_entropy) - exact) <= 4 * bound).all()


def sides_swapped(case: Any) -> tuple[Any, dict[str, Any]]:
    scales = {"teacher_scale": "student_scale", "student_scale": "teacher_scale"}
    return (*case.arrays[2:], *case.arrays[:2]), {scales.get(name, name): x for name, x in case.options.items()}


@examples(8)
@given(cases(dtypes="float64", D_s=16, D_t=16), st.floats(0.01, 0.99), st.sampled_from([0.0, 0.01, 0.3]))
def test_jsd_swapped_is_jsd_of_the_other_share(case: Any, beta: float, smoothing: float) -> None:
    """So at one half it is symmetric; and it lies between 0 and what a mixture can cost."""
    numbers = {"divergence": "jsd", "smoothing": smoothing}
    one = streamkl_cupy.attention_kl(*case.arrays, **case.options, **numbers, jsd_beta=beta)
    arrays, options = sides_swapped(case)
    other = streamkl_cupy.attention_kl(*arrays, **options, **numbers, jsd_beta=1 - beta)
    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    assert (one > -1e-12).all()
    assert (one <= -beta * np.log(beta) - (1 - beta) * np.log(1 - beta) + 1e-12).all()


@pytest.mark.parametrize("smoothing", [0.0, 0.02])
def test_ends_of_jsd_approach_kl(rng: Any, smoothing: float) -> None:
    case = make(H=2, M=30, N=50, D_t=16, dtypes="float64", seed=int(rng.integers(2**31)))
    smooth = functools.partial(streamkl_cupy.attention_kl, *case.arrays, divergence="jsd", smoothing=smoothing)
    log_p, log_q = (
        np.log((1 - smoothing) * np.exp(x - np.log(np.exp(x).sum(-1, keepdims=True))) + smoothing / 50)
        for x in ((q @ k.swapaxes(-1, -2)) / 4 for q, k in (case.arrays[:2], case.arrays[2:]))
    )
    forth = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    back = (np.exp(log_q) * (log_q - log_p)).sum(-1)
    np.testing.assert_allclose(smooth(jsd_beta=1e-7) / 1e-7, forth, rtol=1e-4)
    np.testing.assert_allclose(smooth(jsd_beta=1 - 1e-7) / 1e-7, back, rtol=1e-4)


@pytest.mark.parametrize("mask", [None, *MASKS])
def test_numbers_of_jsd_under_every_mask(core: Any, rng: Any, mask: str | None) -> None:
    B, M, N = 1 if mask == "packed" else 2, 90, 150
    numbers = {"jsd_beta": float(rng.uniform(0.05, 0.95)), "smoothing": float(rng.choice([1e-3, 0.2]))}
    options = {} if mask is None else MASK_OPTIONS[mask](rng, B, M, N)
    for dtype in ("bfloat16", "float32"):
        case = make(
            B=B, H=2, M=M, N=N, D_t=64, student_key_heads=1, dtypes=dtype, seed=int(rng.integers(2**31)),
            divergence="jsd", **numbers, **options,
        )  # fmt: skip
        core.judge(case, upstream(rng, rows_of(case)), entropy=bool(rng.integers(2)))


@pytest.mark.parametrize("name", ["spiky", "huge", "near_equal", "rising"])
def test_numbers_of_jsd_on_hard_problems(core: Any, rng: Any, name: str) -> None:
    """With keys that are split over blocks on a GPU."""
    for M, smoothing in itertools.product((5, 70), (0.0, 1e-3)):
        case = make(
            name, H=2, M=M, N=5000 if M == 5 else 300, D_t=64, seed=int(rng.integers(2**31)), divergence="jsd",
            jsd_beta=0.1, smoothing=smoothing,
        )  # fmt: skip
        core.judge(case, upstream(rng, rows_of(case)) * np.float32(1e-3 if name == "huge" else 1))


# Doors


def asked(rng: Any) -> tuple[Any, Any, Any, Any, Any]:
    """A case with everything that a door passes on: it, its rows and gradients, the loss, and this summed."""
    options = {"divergence": "jsd", "jsd_beta": 0.3, "smoothing": 0.01}
    case = make(B=3, H=2, M=20, N=30, D_t=16, seed=int(rng.integers(2**31)), **options)
    exact = reference.forward(*case.arrays, **case.options)
    wanted = reference.backward(np.ones(rows_of(case)), *case.arrays, **case.options).value
    loss = functools.partial(streamkl_cupy.attention_kl, return_entropy=True, **case.options)

    def summed(*x: Any) -> Any:
        found = loss(*x)
        return found.kl.sum(), found.teacher_entropy

    return case, exact, wanted, loss, summed


@pytest.mark.filterwarnings("ignore")  # of the compiler's own making
@pytest.mark.parametrize("kind", [Torch, pytest.param(TorchCuda, marks=pytest.mark.gpu)])
def test_torch(kind: Any, rng: Any) -> None:
    backend = kind()
    torch = backend.xp
    case, exact, wanted, loss, summed = asked(rng)
    torch.compiler.reset()
    mapped = torch.vmap(summed)
    for call in (summed, torch.compile(summed, fullgraph=True, backend="aot_eager"), mapped):
        x = [a.requires_grad_() for a in backend.arrays(case)]
        value, entropy = call(*x)
        assert call is mapped or not entropy.requires_grad  # a vmapped function is torch's own
        grads = torch.autograd.grad(value.sum(), x)
        np.testing.assert_allclose(backend.numpy(entropy), exact.entropy, rtol=1e-5, atol=1e-5)
        assert value.sum().item() == pytest.approx(exact.kl.sum(), rel=1e-5)
        for name, g, e in zip(INPUT_NAMES, grads, wanted, strict=True):
            np.testing.assert_allclose(backend.numpy(g), e, rtol=1e-4, atol=1e-5, err_msg=name)
    weight = torch.ones(rows_of(case)[-1:]).to(x[0].device).requires_grad_()
    whole = loss(*x, return_lse=True, row_weight=weight, reduction="sum")
    whole.kl.backward()
    np.testing.assert_allclose(backend.numpy(weight.grad), exact.kl.sum(axis=(0, 1)), rtol=1e-4, atol=1e-6)
    grad_of = torch.func.grad(lambda *y: loss(*y).kl.sum(), argnums=(2,))(*(a.detach() for a in x))
    np.testing.assert_allclose(backend.numpy(grad_of[0]), wanted[2], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [Jax, pytest.param(JaxCuda, marks=pytest.mark.gpu)])
def test_jax(kind: Any, rng: Any) -> None:
    backend = kind()
    jax = backend.xp
    case, exact, wanted, _, summed = asked(rng)
    x = backend.arrays(case)
    function = jax.value_and_grad(summed, argnums=range(4), has_aux=True)
    for call in (function, jax.jit(function), jax.vmap(function)):
        (value, entropy), grads = call(*x)
        assert float(value.sum()) == pytest.approx(exact.kl.sum(), rel=1e-5)
        np.testing.assert_allclose(backend.numpy(entropy), exact.entropy, rtol=1e-5, atol=1e-5)
        for name, g, e in zip(INPUT_NAMES, grads, wanted, strict=True):
            np.testing.assert_allclose(backend.numpy(g), e, rtol=1e-4, atol=1e-5, err_msg=name)
    value, explicit = streamkl_cupy.attention_kl_value_and_grad(*x, reduction="sum", **case.options)
    np.testing.assert_allclose(backend.numpy(explicit.student_q), wanted[2], rtol=1e-4, atol=1e-5)


def test_results_have_what_was_asked_for(rng: Any) -> None:
    x = make(H=2, M=20, N=30, D_t=16, seed=int(rng.integers(2**31))).arrays
    call = functools.partial(streamkl_cupy.attention_kl, *x)
    assert isinstance(call(return_entropy=True), streamkl_cupy.KLEntropy)
    mean = call(return_entropy=True, reduction="mean")
    assert mean.kl.shape == ()
    assert mean.teacher_entropy.shape == (1, 2, 20)
    dense = call(return_lse=True).teacher_lse
    rows = call(return_lse=True, return_entropy=True, dense_teacher_lse=dense, causal=True)
    assert isinstance(rows, streamkl_cupy.KLForwardRows)
    assert rows.moments is None
    assert ((rows.teacher_mass > 0) & (rows.teacher_mass <= 1 + 1e-5)).all()
    forward = streamkl_cupy.attention_kl_forward(*x, divergence="cosine")
    assert forward.teacher_entropy is None
    assert forward.moments.shape[:-1] == forward.kl.shape
    empty = streamkl_cupy.attention_kl_forward(*x, divergence="jsd", causal=True, q_offset=-31, return_entropy=True)
    assert all((a == b).all() for a, b in zip(empty[:3], (0, -np.inf, -np.inf)))
    assert (empty.teacher_entropy == 0).all()


# Refusals


@pytest.mark.parametrize(
    "given_options, text",
    [
        ({"divergence": "js"}, "divergence='js' is unknown; allowed are .*\"jsd\""),
        ({"jsd_beta": 0.5}, r"jsd_beta=0\.5 is no number of divergence='kl'; it is one of \"jsd\": leave it out"),
        ({"divergence": "cosine", "smoothing": 0.1}, "smoothing=0.1 is no number of divergence='cosine'"),
        ({"divergence": "jsd", "jsd_beta": 0}, 'jsd_beta=0 is an end.*meant is "kl"'),
        ({"divergence": "jsd", "jsd_beta": 1.0}, 'jsd_beta=1 is an end.*meant is "reverse_kl"'),
        ({"divergence": "jsd", "jsd_beta": 1.5}, "jsd_beta=1.5 is not in between; allowed are numbers above 0"),
        ({"divergence": "jsd", "jsd_beta": float("nan")}, "jsd_beta=nan is not in between"),
        ({"divergence": "jsd", "smoothing": 1.0}, "smoothing=1 is out of range; allowed are 0 and more"),
        ({"divergence": "jsd", "smoothing": -0.1}, "smoothing=-0.1 is out of range"),
    ],
)
@pytest.mark.parametrize("module", ["numpy", "torch"])
def test_numbers_that_cannot_be(module: str, given_options: dict[str, Any], text: str) -> None:
    x = np.zeros((3, 4), np.float32)
    if module == "torch":
        x = pytest.importorskip("torch").zeros(3, 4)
    with pytest.raises(ValueError, match=text):
        streamkl_cupy.attention_kl(x, x, x, x, **given_options)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("bad", [True, "0.5", [0.5]])
def test_numbers_of_other_kinds(name: str, bad: Any) -> None:
    x = np.zeros((3, 4), np.float32)
    with pytest.raises(TypeError, match=rf"{name} is an? .*; allowed is a number"):
        streamkl_cupy.attention_kl(x, x, x, x, divergence="jsd", **{name: bad})


def test_smoothing_has_no_float16_gradients_on_a_gpu() -> None:
    x = np.empty((2, 512, 64), np.float16)
    with pytest.raises(NotImplementedError, match="student_q and student_k are built for bfloat16 and float32 on CUDA"):
        streamkl_cupy.plan(x, x, x, x, divergence="jsd", smoothing=0.1, arch="sm_90")
    assert streamkl_cupy.plan(x, x, x, x, divergence="jsd", jsd_beta=0.2, arch="sm_90").gradients


def test_plans_have_each_pass(rng: Any) -> None:
    q, k = np.empty((2, 8, 64), np.float32), np.empty((2, 20000, 64), np.float32)
    plan = streamkl_cupy.plan(q, k, q, k, divergence="jsd", jsd_beta=0.25, arch="sm_90", return_entropy=True)
    assert "jsd, jsd_beta 0.25, entropy" in str(plan)
    first, second = plan.passes
    assert "#define SKL_PASS 1" in second[0].text
    assert "#define SKL_JSD_BETA 0.25f" in first[0].text
    assert [step.kernels[0].name for step in plan.forward_steps(True)] == ["forward", "combine"] * 2
    assert [step.kernels[0].name for step in plan.forward_steps(False)] == ["forward"] * 2
    steps = plan.backward_steps(("student_q", "student_k"), plan.backward_bytes(("student_q", "student_k")))
    assert [step.kernels[0].task.kind for step in steps] == ["saved_rows", "gradient", "gradient"]
    assert len({step.placed[0][1] for step in steps}) == 1
    (made,) = (step for step in steps if step.reads == ATTENTION_KL.saved_fields)
    assert dict(made.placed).keys() == {"workspace"}
    assert set(DIVERGENCES["jsd"].parameters) == set(NUMBERS)

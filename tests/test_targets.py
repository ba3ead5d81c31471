"""`attention_kl_to`: a target of probabilities in place of a teacher, in every framework, against float64."""

from __future__ import annotations

import functools
import inspect
import itertools
import pydoc
import re
import tracemalloc
from typing import Any, NamedTuple

import numpy as np
import pytest
from conftest import CuPy, Jax, Torch

import streamkl_cupy
from streamkl_cupy import options
from streamkl_cupy.cli import catalogue
from streamkl_cupy.compiler.nvrtc import build
from streamkl_cupy.rules.divergences import DIVERGENCES
from streamkl_cupy.rules.masks import MASKS
from streamkl_cupy.rules.scores.given import GIVEN
from streamkl_cupy.testing import reference
from streamkl_cupy.testing.compare import ROW_BOUND, check_lse, check_rows
from streamkl_cupy.testing.problems import MASK_OPTIONS, upstream

GRADIENTS = {"float64": 1e-12, "float32": 1e-5, "float16": 5e-4, "bfloat16": 4e-3}


class Problem(NamedTuple):
    """A target, a student and options; the target has NaN where no row of a head that reads it sees a key."""

    target: Any
    student: tuple[Any, Any]
    options: dict[str, Any]
    dtypes: tuple[str, str]

    def arrays(self, core: Any) -> tuple[Any, ...]:
        return (core.array(self.target, self.dtypes[0]), *(core.array(x, self.dtypes[1]) for x in self.student))

    def options_of(self, core: Any) -> dict[str, Any]:
        known = MASK_ARRAYS & self.options.keys()
        return self.options | {name: core.mask_array(self.options[name]) for name in known}

    @property
    def exact(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the definition takes: a number for each NaN, which no row sees."""
        nothing = -np.inf if self.options.get("log_target") else 0.0
        return (np.where(np.isnan(self.target), nothing, self.target), *self.student), self.options


MASK_ARRAYS = frozenset(array.name for part in MASKS.values() for array in part.arrays)


def problem(
    rng: np.random.Generator, dtypes: tuple[str, str], mask: str = "causal", *, holes: bool = True, **options: Any
) -> Problem:
    """A random one: normal students, targets whose logits are thrice as wide, some of them 0; one head of it or all."""
    packed = mask == "packed"
    B, H, M, N = 1 if packed else 2, 4, int(rng.integers(30, 150)), int(rng.integers(30, 300))
    options = {**MASK_OPTIONS[mask](rng, B, M, N), **options} if mask != "none" else options
    masks = {name: x for name, x in options.items() if name in reference.MASK_NAMES}
    seen = np.broadcast_to(reference.visible((B, H, M, N), masks), (B, H, M, N))
    heads = int(rng.choice([1, H]))
    p = np.exp(3 * rng.standard_normal((B, heads, M, N))) * seen[:, :heads]
    if holes:
        p *= rng.random(p.shape) < 0.8
    total = p.sum(-1, keepdims=True)
    # A row that lost all that it sees gets it back.
    p = np.where(total > 0, p, seen[:, :heads])
    p = p / np.maximum(p.sum(-1, keepdims=True), 1e-30)
    with np.errstate(divide="ignore"):
        target = reference.rounded(np.log(p) if options.get("log_target") else p, dtypes[0])
    target = np.where(seen.any(axis=1, keepdims=True) if heads == 1 else seen, target, np.nan)
    q, k = (rng.standard_normal((B, h, n, 32)) for h, n in ((H, M), (int(rng.choice([1, 2, 4])), N)))
    student = reference.rounded(q, dtypes[1]), reference.rounded(k, dtypes[1])
    if packed or options.get("layout") == "bnhd":
        target, *student = (x.swapaxes(1, 2)[0] if packed else x.swapaxes(1, 2) for x in (target, *student))
    return Problem(target, tuple(student), options, dtypes)


def check(core: Any, case: Problem, rng: np.random.Generator) -> None:
    """Rows, their entropies and gradients against float64, in poisoned memory."""
    exact, options = case.exact
    compute = "float64" if "float64" in case.dtypes else "float32"
    expected = reference.forward_to(*exact, **options)
    arrays, given = case.arrays(core), case.options_of(core)
    core.poison(arrays[1:])
    rows = streamkl_cupy.attention_kl_to(*arrays, **given, return_lse=True, return_entropy=True)
    check_rows("kl", core.numpy(rows.kl), expected, dtype=compute)
    of_entropy = expected._replace(kl=expected.entropy, condition=expected.entropy_condition)
    check_rows("entropy", core.numpy(rows.teacher_entropy), of_entropy, hard=True, dtype=compute)
    for name in ("teacher_lse", "student_lse"):
        check_lse(name, core.numpy(getattr(rows, name)), getattr(expected, name), expected.largest, compute)
    np.testing.assert_allclose(core.numpy(rows.teacher_mass), np.exp(expected.teacher_lse), atol=1e-5)
    grad = upstream(rng, expected.kl.shape)
    core.poison(arrays[1:])
    loss, grads = streamkl_cupy.attention_kl_to_value_and_grad(
        *arrays, **given, row_weight=core.array(grad, compute), reduction="sum"
    )
    size = (np.abs(grad) * (1 + expected.kl)).sum()  # the sum itself may cancel
    np.testing.assert_allclose(core.numpy(loss), (grad * expected.kl).sum(), rtol=0, atol=ROW_BOUND * size)
    wanted = reference.backward_to(grad, *exact, **options)
    assert grads.teacher_q is None
    assert grads.teacher_k is None
    for found, value, magnitude in zip(grads[2:], wanted.value[2:], wanted.magnitude[2:], strict=True):
        got = core.numpy(found)
        assert core.dtype(found) == case.dtypes[1]
        assert (got[magnitude == 0] == 0).all()
        # Where rows see one key each, only roundings of what cancels are left.
        size = max(np.linalg.norm(value), 0.1 * np.linalg.norm(magnitude))
        assert np.linalg.norm(got - value) <= GRADIENTS[case.dtypes[1]] * size


def some_types(core: Any, rng: np.random.Generator) -> tuple[str, str]:
    target, student = rng.choice([x for x in core.dtypes if x != "bfloat16" or core.name != "numpy"], 2)
    return str(target), str(student)


@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_rows_and_gradients_of_every_divergence(core: Any, rng: Any, divergence: str, log_target: bool) -> None:
    numbers = {"jsd_beta": 0.3, "smoothing": 0.1} if divergence == "jsd" else {}
    dtypes = some_types(core, rng)
    if divergence == "reverse_kl":  # for which float16 has not the range
        dtypes = ("float32", dtypes[1])
    if numbers and core.device == "cuda":
        dtypes = (dtypes[0], "float32")
    options = {"divergence": divergence, "log_target": log_target, **numbers}
    check(core, problem(rng, dtypes, holes=divergence != "reverse_kl", **options), rng)


@pytest.mark.parametrize("mask", ["none", *MASKS])
def test_rows_and_gradients_under_every_mask(core: Any, rng: Any, mask: str) -> None:
    layout = str(rng.choice(["bhnd", "bnhd"]))
    case = problem(rng, some_types(core, rng), mask, log_target=bool(rng.integers(2)), layout=layout)
    check(core, case, rng)


def test_a_target_that_is_a_teachers_map(core: Any, rng: Any) -> None:
    """Strided on purpose: rows lie further apart than they are long, and begin at odd places."""
    teacher_q, teacher_k, student_q, student_k = rng.standard_normal((4, 2, 3, 65, 32))
    log_p = teacher_q @ teacher_k.swapaxes(-1, -2) / np.sqrt(32)
    log_p -= np.log(np.exp(log_p).sum(-1, keepdims=True))
    wide = np.full((2, 3, 65, 90), np.nan)
    wide[..., 3:68] = np.exp(log_p)
    inputs = [core.array(x, "float32") for x in (teacher_q, teacher_k, student_q, student_k)]
    target = core.array(wide, "float32")[..., 3:68]
    for divergence in ("kl", "jsd"):
        between = streamkl_cupy.attention_kl_value_and_grad(*inputs, divergence=divergence)
        to = streamkl_cupy.attention_kl_to_value_and_grad(target, *inputs[2:], divergence=divergence)
        np.testing.assert_allclose(core.numpy(to[0]), core.numpy(between[0]), rtol=1e-5)
        for a, b in zip(to[1][2:], between[1][2:], strict=True):
            assert np.linalg.norm(core.numpy(a) - core.numpy(b)) < 2e-5 * np.linalg.norm(core.numpy(b))


def test_nothing_of_a_targets_size_is_made(rng: Any) -> None:
    n = 3000
    target = np.full((n, n), 1 / n, np.float32)
    q, k = rng.standard_normal((2, n, 8)).astype(np.float32)
    tracemalloc.start()
    try:
        streamkl_cupy.attention_kl_to_value_and_grad(target, q, k)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < target.nbytes / 2


def test_a_long_row_of_few_queries(core: Any, rng: Any) -> None:
    """Of which a GPU splits the keys over blocks."""
    p = np.exp(3 * rng.standard_normal((1, 1, 5, 6000)))
    p *= rng.random(p.shape) < 0.5
    target = reference.rounded(p / p.sum(-1, keepdims=True), "float32")
    student = tuple(reference.rounded(rng.standard_normal((1, 2, n, 32)), "float32") for n in (5, 6000))
    check(core, Problem(target, student, {}, ("float32", "float32")), rng)


def test_a_probability_of_0_is_exact(core: Any, rng: Any) -> None:
    """0 log 0 is 0, and the logit's gradient there is Q; where the divergence is infinite the row is NaN."""
    target, q, k = np.array([[0.0, 1.0, 0.0]] * 2), np.ones((2, 1)), rng.standard_normal((3, 1))
    target[1] = 1 / 3
    for log_target, one in itertools.product([False, True], ["bfloat16" if core.name == "cupy" else "float32"]):
        with np.errstate(divide="ignore"):
            t = core.array(np.log(target) if log_target else target, one)
        arrays = (t, core.array(q, "float32"), core.array(k, "float32"))
        call = functools.partial(streamkl_cupy.attention_kl_to, *arrays, log_target=log_target)
        log_q = k[:, 0] - np.log(np.exp(k).sum())
        # Of the second row's bfloat16 logarithms each is as far off as the others.
        assert abs(core.numpy(call())[0] + log_q[1]) < 1e-5
        assert core.numpy(call(divergence="cosine", return_entropy=True).teacher_entropy)[0] == 0
        back = core.numpy(call(divergence="reverse_kl"))
        assert np.isnan(back[0])
        assert abs(back[1] - (np.exp(log_q) * (log_q + np.log(3))).sum()) < 1e-5
        _, grads = streamkl_cupy.attention_kl_to_value_and_grad(
            *arrays, log_target=log_target, row_weight=core.array([1.0, 0.0], "float32"), reduction="sum"
        )
        np.testing.assert_allclose(core.numpy(grads.student_k)[:, 0], np.exp(log_q) - target[0], atol=1e-6)


def inputs_of(rng: np.random.Generator, dtype: Any = np.float32, heads: int = 2) -> tuple[Any, Any, Any]:
    p = np.exp(rng.standard_normal((2, heads, 7, 9)))
    p /= p.sum(-1, keepdims=True)
    return (
        p.astype(dtype),
        rng.standard_normal((2, 2, 7, 8)).astype(dtype),
        rng.standard_normal((2, 1, 9, 8)).astype(dtype),
    )


def test_frameworks_agree_and_differentiate(backend: Any, rng: Any) -> None:
    x = inputs_of(rng, heads=int(rng.choice([1, 2])))
    weight = rng.random((2, 1, 7))
    expected, grads = streamkl_cupy.attention_kl_to_value_and_grad(*x, row_weight=weight)
    arrays = [backend.array(a, "float32") for a in x]
    given = backend.array(weight, "float32")
    value, found = streamkl_cupy.attention_kl_to_value_and_grad(*arrays, row_weight=given)
    np.testing.assert_allclose(backend.numpy(value), expected, rtol=1e-5)
    for a, b in zip(found[2:], grads[2:], strict=True):
        np.testing.assert_allclose(backend.numpy(a), b, atol=1e-6)

    def loss(q: Any, k: Any) -> Any:
        return streamkl_cupy.attention_kl_to(arrays[0], q, k, row_weight=given, reduction="mean")

    if isinstance(backend, Torch):
        q, k = (a.clone().requires_grad_() for a in arrays[1:])
        differentiated = backend.xp.autograd.grad(loss(q, k), (q, k))
    elif isinstance(backend, Jax):
        differentiated = backend.xp.grad(loss, argnums=(0, 1))(*arrays[1:])
    else:
        np.testing.assert_allclose(backend.numpy(loss(*arrays[1:])), expected, rtol=1e-5)
        return
    for a, b in zip(differentiated, grads[2:], strict=True):
        np.testing.assert_allclose(backend.numpy(a), b, atol=1e-6)


def test_torch_compiles_it_and_maps_over_it(rng: Any) -> None:
    torch = pytest.importorskip("torch")
    target, q, k = (torch.from_numpy(x) for x in inputs_of(rng, heads=1))
    rows = streamkl_cupy.attention_kl_to(target, q, k)
    q.requires_grad_()

    def loss(scale: float) -> Any:
        return streamkl_cupy.attention_kl_to(target, q, k, student_scale=scale, reduction="sum")

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for scale in (0.3, 0.7):
        torch.testing.assert_close(
            *(torch.autograd.grad(f(scale), q)[0] for f in (compiled, loss)), rtol=1e-5, atol=1e-6
        )
    mapped = torch.func.vmap(streamkl_cupy.attention_kl_to)(target, q.detach(), k)
    torch.testing.assert_close(mapped, rows)


@pytest.mark.parametrize("framework", [Torch, Jax])
def test_a_target_is_a_constant(framework: Any, rng: Any) -> None:
    made = framework()
    target, q, k = (made.array(x, "float32") for x in inputs_of(rng))
    if made.name == "torch-cpu":
        with pytest.raises(NotImplementedError, match=r"target requires a gradient.*pass target\.detach\(\)"):
            streamkl_cupy.attention_kl_to(target.requires_grad_(), q, k)
        return
    with pytest.raises(NotImplementedError, match=r"target.*jax\.lax\.stop_gradient\(target\)"):
        made.xp.grad(lambda t: streamkl_cupy.attention_kl_to(t, q, k, reduction="sum"))(target)


def test_what_is_no_distribution_raises_on_the_cpu(rng: Any) -> None:
    p, q, k = inputs_of(rng, np.float64)
    to = streamkl_cupy.attention_kl_to
    with pytest.raises(ValueError, match=r"target sums to 1\.5 in row 0 of batch entry 0, head 0; .*log_target=True"):
        to(1.5 * p, q, k)
    one = p.copy()
    one[1, 1, 3] *= 1.02
    with pytest.raises(ValueError, match=r"sums to 1\.02 in row 3 of batch entry 1, head 1"):
        to(one, q, k)
    to(one, q, k, query_mask=np.arange(7) != np.array([[9], [3]]))  # nobody asks about a row that is not there
    with pytest.raises(ValueError, match=r"target holds -[\d.]+ in row 0.*log_target=True"):
        to(np.log(p), q, k)
    with pytest.raises(ValueError, match=r"target has exponentials that sum to .*without log_target"):
        to(p, q, k, log_target=True)
    with pytest.raises(ValueError, match=r"target has a mass of [\d.]+ on keys hidden from row [0-5].*set it to 0"):
        to(p, q, k, causal=True)
    with pytest.raises(ValueError, match=r"mass of .* on keys hidden"):
        to(np.log(p), q, k, causal=True, log_target=True)
    hidden = np.where(np.arange(9) <= np.arange(7)[:, None] + 2, p, 0)
    hidden /= hidden.sum(-1, keepdims=True)
    rows = to(np.where(hidden > 0, hidden, np.nan), q, k, causal=True)  # what nobody sees may be anything
    np.testing.assert_array_equal(rows, to(hidden, q, k, causal=True))
    one = hidden.copy()
    one[0, 1, 2, 0] = np.nan
    assert np.argwhere(np.isnan(to(one, q, k, causal=True))).tolist() == [[0, 1, 2]]


def test_rounded_logarithms_are_a_distribution(rng: Any) -> None:
    """Of 20,000 keys alike, whose logarithms in bfloat16 are all off by the same."""
    torch = pytest.importorskip("torch")
    target = torch.full((3, 20000), -float(np.log(20000))).bfloat16()
    q, k = torch.randn(3, 8), torch.randn(20000, 8)
    kept = streamkl_cupy.attention_kl_to(target, q, k, log_target=True, return_lse=True)
    even = torch.full((3, 20000), 1 / 20000)
    torch.testing.assert_close(kept.kl, streamkl_cupy.attention_kl_to(even, q, k), rtol=1e-4, atol=1e-5)
    assert (kept.teacher_mass - 1).abs().max() < 0.05


@pytest.mark.gpu
def test_hidden_mass_on_a_gpu_is_left_out_and_told(rng: Any) -> None:
    gpu = CuPy()
    p, q, k = inputs_of(rng)
    p[1, 1, 4, :6] = 0
    p[0, 0, 2, :5] = 0  # nothing that row 2 sees
    seen = np.arange(9) <= np.arange(7)[:, None] + 2
    rows = streamkl_cupy.attention_kl_to(*(gpu.array(x, "float32") for x in (p, q, k)), causal=True, return_lse=True)
    mass = np.where(seen, p, 0).sum(-1)
    lost = mass == 0
    assert lost.any()
    assert np.isnan(gpu.numpy(rows.kl)[lost]).all()
    np.testing.assert_allclose(gpu.numpy(rows.teacher_mass)[~lost], mass[~lost], rtol=1e-5)
    with np.errstate(invalid="ignore"):
        expected = reference.forward_to(np.where(seen, p, 0) / mass[..., None], q, k, causal=True).kl
    np.testing.assert_allclose(gpu.numpy(rows.kl)[~lost], expected[~lost], atol=1e-5)


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda p, q, k: (p[..., :8], q, k), "student_k: 9 keys, but target has 8; both must share the keys axis"),
        (lambda p, q, k: (p[:, :, :6], q, k), "student_q: 7 rows, but target has 6"),
        (
            lambda p, q, k: (np.repeat(p, 2, 1)[:, :3], q, k),
            "4?.*heads, but target has 3.*one head of target may stand",
        ),
        (lambda p, q, k: (p[:1], q, k), "student_q: 2 batch entries, but target has 1"),
        (lambda p, q, k: (p[0], q, k), r"student_q: shape .* has 4 axes, but target \(2, 7, 9\) has 3"),
    ],
)
def test_shapes_that_do_not_fit(rng: Any, change: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        streamkl_cupy.attention_kl_to(*change(*inputs_of(rng)))


def test_calls_that_do_not_fit(rng: Any) -> None:
    p, q, k = inputs_of(rng)
    with pytest.raises(
        TypeError, match=r"attention_kl_to\(\) needs .*student_k missing\. It takes the target, and the"
    ):
        streamkl_cupy.attention_kl_to(p, q)
    with pytest.raises(TypeError, match=r"attention_kl_to\(\) has no option 'teacher_scale'"):
        streamkl_cupy.attention_kl_to(p, q, k, teacher_scale=1.0)
    with pytest.raises(TypeError, match="log_target"):
        streamkl_cupy.attention_kl_to(p, q, k, log_target=0.5)
    with pytest.raises(ValueError, match='wrt names \'target\'; allowed are "student_q", "student_k"'):
        streamkl_cupy.attention_kl_to_value_and_grad(p, q, k, wrt=("target",))


@pytest.mark.parametrize(
    "name", ["attention_kl_to", *(f"attention_kl_to_{x}" for x in ("value_and_grad", "plan", "warmup"))]
)
def test_signatures_have_every_option(name: str) -> None:
    function = getattr(streamkl_cupy, name)
    parameters, text = inspect.signature(function).parameters, inspect.getdoc(function) or ""
    for option, row in options.TABLES["attention_kl_to"].items():
        if row.shared:
            assert parameters[option].default == options.OPTIONS["attention_kl_to"]._field_defaults[option]
    for option in options.SHARED["attention_kl_to"]:
        assert re.search(rf"^ +{option}: \S", text, re.M), option
    assert max(map(len, pydoc.plain(pydoc.render_doc(function)).splitlines())) <= 120


def test_plans_say_what_runs_and_why() -> None:
    t, q = np.empty((1, 1, 4096, 4096), np.float32), np.empty((1, 8, 4096, 128), np.float16)
    text = str(streamkl_cupy.attention_kl_to_plan(t, q, q, arch="sm_90"))
    assert "teacher: given, float32, 1 head" in text
    assert "forward: kernels/forward_sm90.cu" in text
    assert "both gradients of the student: kernels/fused_sm90.cu" in text
    assert "student_k: kernels/gradient_sm80.cu" in text
    assert "not sm90: it computes both sides, and one is given" in text
    assert "teacher: no gradients" in text
    streamkl_cupy.attention_kl_to_warmup(*(x[:, :1, :64, :64] for x in (t, q, q)), wrt=("student_q",))


def test_other_lengths_compile_nothing() -> None:
    def texts(rows: int, keys: int) -> set[str]:
        t, q, k = (np.empty((1, 16, *shape), np.float32) for shape in ((rows, keys), (rows, 64), (keys, 64)))
        plan = streamkl_cupy.attention_kl_to_plan(t, q, k, arch="sm_90")
        return {kernel.text for kernel in (plan.forward, *(kernel for _, kernel in plan.gradients))}

    assert texts(4096, 4096) == texts(4096, 8192) == texts(8192, 4100)


def test_kernels_compile(rng: np.random.Generator) -> None:
    """Some of the hardest; a product more or less does not make them, so the rules are those of most calls."""
    pytest.importorskip("cupy", reason="needs CuPy and the NVRTC it brings")
    pairs = ("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "float32")
    types, arch = [catalogue.ElementTypes(*x) for x in pairs], str(rng.choice(catalogue.ARCHS))
    listed, refused = catalogue.entries(
        arch,
        [(128, 128)],
        types,
        masks=("none", "padding", "everything"),
        scores=[(name, "dot") for name in GIVEN],
    )
    assert refused == []
    kernels = [
        x.kernel for x in catalogue.hardest(listed) if x.kernel.name in ("forward", "student_q", "student_k", "student")
    ]
    assert {x.family for x in kernels} == {"sm80", *(["sm90"] if arch == "sm_90" else [])}
    for i in rng.choice(len(kernels), 3, replace=False):
        built = build(kernels[i].text, kernels[i].arch)
        assert (built.spill_bytes, built.notes) == (0, ()), kernels[i]

"""PyTorch: every way torch can differentiate, batch, trace or capture a call, against the dense definition."""

from __future__ import annotations

import gc
import importlib
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from conftest import check_looked_up

import streamkl_cupy
from streamkl_cupy import call, frameworks, patterns
from streamkl_cupy.call import SavedArrays
from streamkl_cupy.frameworks.base import known
from streamkl_cupy.options import NO_MASKS, Options
from streamkl_cupy.problem import INPUT_NAMES
from streamkl_cupy.testing import reference

torch = pytest.importorskip("torch")
front = importlib.import_module("streamkl_cupy.torch")
autodiff = importlib.import_module("streamkl_cupy.autodiff.torch")
attention_kl = front.attention_kl

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NO_MASK = NO_MASKS
DEFAULTS = tuple(Options())
TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def operators_of_kl() -> Any:
    return autodiff._operators["attention_kl"]


def operands(
    device: str = "cpu", *, dtype: Any = torch.float32, seed: int = 0, grad: Any = (), **extent: int
) -> list[Any]:
    e = {"B": 2, "H": 4, "M": 5, "N": 7, "D_t": 8, "D_s": 16, "K_t": 4, "K_s": 2, **extent}
    shapes = (
        (e["B"], e["H"], e["M"], e["D_t"]),
        (e["B"], e["K_t"], e["N"], e["D_t"]),
        (e["B"], e["H"], e["M"], e["D_s"]),
        (e["B"], e["K_s"], e["N"], e["D_s"]),
    )
    rng = np.random.default_rng(seed)
    made = [torch.tensor(rng.standard_normal(s), dtype=dtype, device=device) for s in shapes]
    return [x.requires_grad_(name in grad) for name, x in zip(INPUT_NAMES, made)]


def wide(x: Any) -> Any:
    return x.detach().double().cpu().numpy()


def dense_kl(inputs: Any, **options: Any) -> Any:
    return reference.forward(*map(wide, inputs), **options).kl


def dense_grads(inputs: Any, row_grad: Any, **options: Any) -> Any:
    return reference.backward(row_grad, *map(wide, inputs), **options).value


def close(actual: Any, expected: Any, tolerance: float = 2e-5) -> None:
    a, e = wide(actual) if isinstance(actual, torch.Tensor) else actual, np.asarray(expected)
    assert a.shape == e.shape
    assert np.linalg.norm(a - e) <= tolerance * (np.linalg.norm(e) + 1e-3), np.abs(a - e).max()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What the CPU backend was asked for, call by call: ("forward",), or the names of the gradients."""
    from streamkl_cupy import numpy_backend

    seen: list[tuple[str, ...]] = []
    runner = numpy_backend.Runner
    forward, backward = runner.forward, runner.backward

    def spy_forward(self: Any, *args: Any) -> None:
        seen.append(("forward",))
        forward(self, *args)

    def spy_backward(self: Any, inputs: Any, saved: Any, outputs: Any, *args: Any) -> None:
        seen.append(tuple(name for name, out in zip(INPUT_NAMES, outputs) if out is not None))
        backward(self, inputs, saved, outputs, *args)

    monkeypatch.setattr(runner, "forward", spy_forward)
    monkeypatch.setattr(runner, "backward", spy_backward)
    return seen


# The short way, of steps that nothing but autograd looks on, and the ways back from it


class Mode(torch.utils._python_dispatch.TorchDispatchMode):
    """Sees every operation, and changes none."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which operators the backward went through; none on the short way."""
    seen: list[str] = []
    known = operators_of_kl()
    real = known.backward
    monkeypatch.setattr(known, "backward", lambda *args: seen.append("backward") or real(*args))
    return seen


def plainly(value: Any, leaf: Any, upstream: Any) -> Any:
    return torch.autograd.grad(value, leaf, upstream)[0]


def recorded(value: Any, leaf: Any, upstream: Any) -> Any:
    return torch.autograd.grad(value, leaf, upstream, create_graph=True)[0]


def batched(value: Any, leaf: Any, upstream: Any) -> Any:
    both = torch.stack([upstream, 2 * upstream])
    one, two = torch.autograd.grad(value, leaf, both, is_grads_batched=True)[0]
    close(two, 2 * wide(one))
    return one


def watched(value: Any, leaf: Any, upstream: Any) -> Any:
    with Mode() as mode:
        found = plainly(value, leaf, upstream)
    assert any("attention_kl_backward" in name for name in mode.seen)
    return found


def negated(value: Any, leaf: Any, upstream: Any) -> Any:
    """A gradient whose memory holds the opposite sign."""
    return plainly(value, leaf, torch._neg_view(-upstream))


def of_no_memory(value: Any, leaf: Any, upstream: Any) -> Any:
    zero = plainly(value, leaf, torch._efficientzerotensor(upstream.shape, device=upstream.device))
    assert not zero.any()
    return torch.zeros_like(zero)


def in_anomaly_mode(value: Any, leaf: Any, upstream: Any) -> Any:
    with torch.autograd.detect_anomaly(check_nan=False):
        return plainly(value, leaf, upstream)


def in_a_thread(value: Any, leaf: Any, upstream: Any) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(plainly, value, leaf, upstream).result()


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:Anomaly Detection")
@pytest.mark.parametrize(
    "way, long",
    [
        (plainly, False), (recorded, True), (batched, True), (watched, True), (negated, None), (of_no_memory, None),
        (in_anomaly_mode, False), (in_a_thread, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("options", ["plain", "window", "keys", "weights", "weights and keys", "own weights"])
def test_backward_takes_the_long_way_where_somebody_looks_on(
    device: str, way: Any, long: bool | None, reduction: str, options: str, operators: list[str]
) -> None:
    x = operands(device, grad=["student_q"], M=6, N=5)
    given: dict[str, Any] = {"window": {"window": (1, 0)}}.get(options, {})
    if "keys" in options:
        given["key_mask"] = torch.tensor([[True] * 5, [False] * 5], device=device)
    dense = {name: x if name == "window" else wide(x).astype(bool) for name, x in given.items()}
    used = np.broadcast_to(np.isfinite(reference.forward(*map(wide, x), **dense).teacher_lse), (2, 4, 6))
    if "weights" in options:
        given["row_weight"] = torch.rand(4, 1, device=device).requires_grad_(options == "own weights")
        used = used * wide(given["row_weight"])
    value = attention_kl(*x, reduction=reduction, **given)
    upstream = torch.rand_like(value.detach())
    share = wide(upstream) * used / (used.sum() if reduction == "mean" else 1)
    close(value, {"none": lambda y: y, "sum": np.sum, "mean": lambda y: y.sum() / used.sum()}[reduction](
        dense_kl(x, **dense) * used
    ))  # fmt: skip
    expected = dense_grads(x, share, **dense).student_q * (way is not of_no_memory)
    close(way(value, x[2], upstream), expected, 1e-4)
    if long is not None:  # a product with shares of rows has memory again
        assert bool(operators) == long


def test_a_forward_that_is_looked_on_goes_through_the_operators() -> None:
    x = operands(grad=["student_q"])
    with Mode() as mode:
        value = attention_kl(*x, reduction="sum")
    assert any("attention_kl_forward" in name for name in mode.seen)
    value.backward()
    close(x[2].grad, dense_grads(x, np.ones((2, 4, 5))).student_q)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("which", range(4))
def test_what_changes_between_forward_and_backward_is_noticed(device: str, which: int, reduction: str) -> None:
    leaves = operands(device, grad=INPUT_NAMES)
    x = [t * 1 for t in leaves]
    value = attention_kl(*x, reduction=reduction)
    x[which].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.sum().backward()
    for lse in (0, 1):
        value, *rows = attention_kl(*leaves, reduction=reduction, return_lse=True)
        rows[lse].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            value.sum().backward()
    mask = torch.ones(2, 7, dtype=torch.bool, device=device)
    value = attention_kl(*leaves, key_mask=mask, reduction=reduction)
    mask[0, 0] = False
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.sum().backward()


def test_results_are_tensors_of_their_own(device: str) -> None:
    """Whatever memory they share, no change of one concerns another."""
    x = operands(device, grad=["student_q"])
    kl, teacher_lse, student_lse = attention_kl(*x, return_lse=True)
    before = [t.detach().clone() for t in (teacher_lse, student_lse)]
    kl.mul_(3)
    assert torch.equal(teacher_lse, before[0])
    assert torch.equal(student_lse, before[1])
    kl.sum().backward()
    close(x[2].grad, 3 * dense_grads(x, np.ones((2, 4, 5))).student_q)


def test_a_graph_that_is_freed_says_so() -> None:
    x = operands(grad=["student_q"])
    value = attention_kl(*x, reduction="mean")
    value.backward(retain_graph=True)
    value.backward()
    close(x[2].grad, 2 * dense_grads(x, np.full((2, 4, 5), 1 / 40)).student_q)
    with pytest.raises(RuntimeError, match="second time"):
        value.backward()


def test_saved_tensors_pass_the_hooks(device: str) -> None:
    """Each of them, as often as it is read; what comes back is what counts."""
    x = operands(device, grad=INPUT_NAMES)
    packed: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t.clone()):
        value = attention_kl(*x, reduction="mean")
    for name, t in zip(INPUT_NAMES, x):
        assert any(t is other for other in packed), name
    value.backward()
    for t, expected in zip(x, dense_grads(x, np.full((2, 4, 5), 1 / 40))):
        close(t.grad, expected)


@pytest.mark.parametrize("name", ["part", "empty_on_cpu", "empty_on_current_gpu"])
def test_names_that_torch_may_drop_are_done_without(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frameworks.base.known("torch"), name, None)
    test_gradient_function_may_run_twice_and_kl_may_be_scaled_in_place()
    test_results_are_tensors_of_their_own(device)


# Operators


@pytest.mark.parametrize("wanted", [(False, False, True, True), (True, True, True, True), (False, True, False, False)])
def test_operators_pass_torchs_own_checks(device: str, wanted: tuple[bool, ...]) -> None:
    x = operands(device)
    rows = operators_of_kl().forward(*x, *NO_MASK, *DEFAULTS)
    torch.library.opcheck(operators_of_kl().forward, (*x, *NO_MASK, *DEFAULTS))
    grad = torch.ones_like(rows[0])
    saved = (grad, rows[1], rows[2], rows[0], None)
    torch.library.opcheck(operators_of_kl().backward, (*saved, list(wanted), *x, *NO_MASK, *DEFAULTS))


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("teacher", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("student", [torch.float64, torch.float16])
def test_fake_results_look_like_real_ones(teacher: Any, student: Any, layout: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = [y.to(dtype) for y, dtype in zip(operands(), (teacher, teacher, student, student))]
    if layout == "bnhd":
        x = [t.transpose(1, 2) for t in x]
    options = Options(
        student_scale=0.5, causal=True, q_offset=3, window=(5, 0), layout=layout, deterministic=True,
        return_entropy=bool(np.random.default_rng().integers(2)),
    )  # fmt: skip
    real = operators_of_kl().forward(*x, *NO_MASK, *options)
    grads = operators_of_kl().backward(real[0], *real[1:3], real[0], None, [True] * 4, *x, *NO_MASK, *options)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake_x = [mode.from_tensor(t) for t in x]
        fake = operators_of_kl().forward(*fake_x, *NO_MASK, *options)
        fake_grads = operators_of_kl().backward(
            fake[0], *fake[1:3], fake[0], None, [True] * 4, *fake_x, *NO_MASK, *options
        )
    for a, b in zip((*real, *grads), (*fake, *fake_grads)):
        assert (a.shape, a.dtype, a.stride(), a.device) == (b.shape, b.dtype, b.stride(), b.device)


def test_importing_again_registers_again() -> None:
    importlib.reload(front)
    x = operands(grad=["student_q"])
    front.attention_kl(*x).sum().backward()
    close(x[2].grad, dense_grads(x, np.ones((2, 4, 5))).student_q)


def test_operator_called_directly_differentiates_once() -> None:
    x = operands(grad=["student_q"])
    rows = operators_of_kl().forward(*x, *NO_MASK, *DEFAULTS)
    (grad,) = torch.autograd.grad(rows[0].sum(), x[2], create_graph=True)
    close(grad, dense_grads(x, np.ones((2, 4, 5))).student_q)
    with pytest.raises(NotImplementedError, match="streamkl_cupy"):
        grad.sum().backward()


# Values and gradients


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_value_and_gradients(device: str, dtype: Any, causal: bool) -> None:
    x = operands(device, dtype=dtype, grad=INPUT_NAMES, M=65, N=33 if causal else 130)
    kl = attention_kl(*x, causal=causal)
    assert kl.dtype == torch.float32
    close(kl, dense_kl(x, causal=causal), 1e-5)
    row_grad = np.random.default_rng(1).standard_normal(kl.shape).astype(np.float32)
    kl.backward(torch.from_numpy(row_grad).to(device))
    for t, expected in zip(x, dense_grads(x, row_grad, causal=causal)):
        assert t.grad.dtype == dtype
        close(t.grad, expected, TOLERANCE[dtype])


def test_float64_gradcheck_on_the_cpu() -> None:
    x = operands(dtype=torch.float64, grad=INPUT_NAMES, B=1, H=2, M=3, N=4, D_t=2, D_s=3, K_t=1, K_s=2)
    assert torch.autograd.gradcheck(lambda *a: attention_kl(*a, causal=True, q_offset=1), x)


@pytest.mark.parametrize(
    "names", [("student_q",), ("student_k",), ("teacher_q", "teacher_k"), ("student_q", "teacher_k"), INPUT_NAMES]
)
def test_only_wanted_gradients_are_computed(names: tuple[str, ...], launches: list[tuple[str, ...]]) -> None:
    x = operands(grad=names)
    attention_kl(*x, reduction="sum").backward()
    expected = dense_grads(x, np.ones((2, 4, 5)))
    assert launches == [("forward",), tuple(n for n in INPUT_NAMES if n in names)]
    for name, t, e in zip(INPUT_NAMES, x, expected):
        assert (t.grad is not None) == (name in names)
        if t.grad is not None:
            close(t.grad, e)


def test_no_gradient_takes_the_direct_way(launches: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("the autograd.Function was used")

    monkeypatch.setattr(autodiff._Transformed, "apply", refuse)
    x = operands(grad=INPUT_NAMES)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            kl = attention_kl(*x)
        assert not kl.requires_grad
        close(kl, dense_kl(x))
    attention_kl(*(t.detach() for t in x))
    attention_kl(*(torch.nn.Parameter(t.detach(), requires_grad=False) for t in x))
    assert launches == [("forward",)] * 4


def test_upstream_none_expanded_and_strided(device: str) -> None:
    x = operands(device, grad=["student_q", "student_k"])
    kl, teacher_lse, student_lse = attention_kl(*x, return_lse=True)
    assert not teacher_lse.requires_grad
    assert not student_lse.requires_grad
    (kl.detach() * 2 + x[2].sum() * 0).sum().backward()
    assert not x[2].grad.any()
    for row_grad in (
        torch.ones((), device=device).expand(2, 4, 5),
        torch.arange(40.0, device=device).view(5, 4, 2).permute(2, 1, 0),
    ):
        grads = torch.autograd.grad(kl, x[2:], row_grad, retain_graph=True)
        expected = dense_grads(x, wide(row_grad))
        close(grads[0], expected.student_q)
        close(grads[1], expected.student_k)


def test_gradient_function_may_run_twice_and_kl_may_be_scaled_in_place() -> None:
    x = operands(grad=["student_q"])
    kl = attention_kl(*x)
    kl.mul_(3)
    first = torch.autograd.grad(kl.sum(), x[2], retain_graph=True)[0]
    second = torch.autograd.grad(kl.sum(), x[2])[0]
    assert torch.equal(first, second)
    close(first, 3 * dense_grads(x, np.ones((2, 4, 5))).student_q)


def test_views_of_any_stride(device: str) -> None:
    x = operands(device, D_t=8, D_s=8, K_t=4, K_s=4)
    views = [
        x[0].transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack([x[1], x[1]], -1)[..., 0],
        torch.cat([x[2], x[2]], 2)[:, :, :5],
        x[3][:, :1].expand(-1, 4, -1, -1),
    ]
    assert not any(v.is_contiguous() for v in views)
    plain = [x[0], x[1], x[2], x[3][:, :1].repeat(1, 4, 1, 1)]
    views, plain = ([t.requires_grad_() for t in (v.detach() for v in ts)] for ts in (views, plain))
    for a, b in zip(
        torch.autograd.grad(attention_kl(*views).sum(), views), torch.autograd.grad(attention_kl(*plain).sum(), plain)
    ):
        assert a.is_contiguous()
        close(a, wide(b))


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_row_weight_is_differentiable(device: str, reduction: str) -> None:
    x = operands(device, grad=["student_q"], M=6, N=4)  # causal: the first two rows see no key
    weight = torch.rand(2, 1, 6, device=device)
    weight[..., 0] = torch.nan
    weight.requires_grad_()
    value = attention_kl(*x, causal=True, row_weight=weight, reduction=reduction)
    upstream = torch.rand_like(value)
    got = torch.autograd.grad(value, [weight, x[2]], upstream)

    kl = torch.from_numpy(dense_kl(x, causal=True)).requires_grad_()
    w = weight.detach().double().cpu().requires_grad_()
    used = torch.where(torch.arange(6) < 2, 0.0, w.expand(2, 4, 6))
    total = {"none": kl * used, "sum": (kl * used).sum(), "mean": (kl * used).sum() / used.sum()}[reduction]
    close(value, wide(total))
    row_grad, weight_grad = torch.autograd.grad(total, [kl, w], upstream.double().cpu())
    close(got[0], wide(weight_grad), 1e-4)
    close(got[1], dense_grads(x, wide(row_grad), causal=True).student_q, 1e-4)


def test_mean_over_no_mass_is_zero_with_zero_gradients(device: str) -> None:
    x = operands(device, grad=["student_q"])
    loss = attention_kl(*x, row_weight=torch.zeros(5, device=device), reduction="mean")
    loss.backward()
    assert loss.item() == 0
    assert not x[2].grad.any()


@pytest.mark.parametrize("extent", [{"M": 0}, {"N": 0}, {"B": 0}])
def test_empty(device: str, extent: dict[str, int]) -> None:
    x = operands(device, grad=INPUT_NAMES, **extent)
    kl, lse, _ = attention_kl(*x, return_lse=True)
    assert not kl.any()
    assert torch.isneginf(lse).all()
    kl.sum().backward()
    assert all(t.grad.shape == t.shape and not t.grad.any() for t in x)


def test_module_parameters_train() -> None:
    x = operands()
    weight = torch.nn.Parameter(torch.eye(16))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = attention_kl(x[0], x[1], x[2] @ weight, x[3], reduction="mean")
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)


# Errors


def test_arguments_are_refused_by_name() -> None:
    x = operands()
    weight = torch.ones(5)
    with pytest.raises(TypeError, match=r"student_k is a .*ndarray"):
        attention_kl(*x[:3], x[3].numpy())
    with pytest.raises(TypeError, match="row_weight is a float"):
        attention_kl(*x, row_weight=2.0)
    with pytest.raises(ValueError, match=r"row_weight: shape \(3,\) does not broadcast"):
        attention_kl(*x, row_weight=weight[:3])
    with pytest.raises(ValueError, match="reduction="):
        attention_kl(*x, reduction="avg")
    with pytest.raises(ValueError, match="teacher_k"):
        attention_kl(x[0].requires_grad_(), x[1][..., :3], *x[2:])


def second_order(inputs: Any) -> Any:
    (grad,) = torch.autograd.grad(attention_kl(*inputs).sum(), inputs[2], create_graph=True)
    return grad


@pytest.mark.parametrize("mixed", [False, True])
def test_second_order_is_refused(device: str, mixed: bool) -> None:
    x = operands(device, grad=["student_q"])
    penalty = second_order(x).square().sum()
    if mixed:  # another path to the input must not hide the missing term
        penalty = penalty + x[2].square().sum()
    with pytest.raises(NotImplementedError, match="streamkl_cupy"):
        penalty.backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own decompositions use it
def test_second_order_by_transforms_is_refused() -> None:
    x = operands()

    def loss(q: Any) -> Any:
        return attention_kl(x[0], x[1], q, x[3], reduction="sum")

    for second in (
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum()),
        torch.func.jacrev(torch.func.jacrev(loss)),
        torch.func.hessian(loss),
    ):
        with pytest.raises(NotImplementedError, match="streamkl_cupy"):
            second(x[2])


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own decompositions use it
def test_forward_mode_is_refused_and_never_zero() -> None:
    x = operands()

    def rows(q: Any) -> Any:
        return attention_kl(x[0], x[1], q, x[3])

    with pytest.raises(NotImplementedError, match="streamkl_cupy"):
        torch.func.jvp(rows, (x[2],), (x[2],))
    with pytest.raises(NotImplementedError, match="streamkl_cupy"):
        torch.func.jacfwd(rows)(x[2])
    with torch.autograd.forward_ad.dual_level(), pytest.raises(NotImplementedError, match="streamkl_cupy"):
        rows(torch.autograd.forward_ad.make_dual(x[2], x[2]))


# torch.func


def test_func_grad_and_jacrev(device: str) -> None:
    x = operands(device, B=1, H=2, M=3, K_t=1, K_s=2)
    grads = torch.func.grad(lambda *a: attention_kl(*a, reduction="sum"), argnums=(0, 1, 2, 3))(*x)
    for g, e in zip(grads, dense_grads(x, np.ones((1, 2, 3)))):
        close(g, e)

    def rows(q: Any) -> Any:
        return attention_kl(x[0], x[1], q, x[3])

    jacobian = torch.func.jacrev(rows)(x[2])
    assert jacobian.shape == (1, 2, 3, *x[2].shape)
    for h in range(2):
        for m in range(3):
            one = np.zeros((1, 2, 3))
            one[0, h, m] = 1
            close(jacobian[0, h, m], dense_grads(x, one).student_q)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_batched_gradients_of_autograd() -> None:
    x = operands(B=1, H=2, M=3, K_t=1, K_s=2, grad=["student_q"])
    basis = torch.eye(6).view(6, 1, 2, 3)
    (batched,) = torch.autograd.grad(attention_kl(*x), x[2], basis, is_grads_batched=True)
    for one, got in zip(basis, batched):
        close(got, dense_grads(x, wide(one)).student_q)


@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize(
    "in_dims", [(0, 0, 0, 0), (1, 1, 1, 1), (None, None, 0, 0), (None, None, 1, None), (0, 1, None, 0)]
)
def test_vmap_equals_a_loop(device: str, rank: int, layout: str, in_dims: tuple[int | None, ...]) -> None:
    x = operands(device, D_t=4, D_s=4, K_t=4, K_s=4)
    if layout == "bnhd":
        x = [t.transpose(1, 2) for t in x]
    if rank < 4:
        x = [t[0] for t in x]
    if rank < 3:
        x = [t[:, 0] if layout == "bnhd" else t[0] for t in x]
    size = 3
    mapped = [t if d is None else torch.stack([t, 2 * t, -t], d) for t, d in zip(x, in_dims)]

    def call(*a: Any) -> Any:
        return attention_kl(*a, layout=layout, causal=True)

    batched = torch.vmap(call, in_dims=in_dims)(*mapped)
    grads = torch.vmap(torch.func.grad(lambda *a: call(*a).sum(), argnums=(1, 2, 3)), in_dims=in_dims)(*mapped)
    shared = torch.func.grad(lambda *a: torch.vmap(call, in_dims=in_dims)(*a).sum(), argnums=(2, 3))(*mapped)
    sums = [torch.zeros_like(t) for t in x]
    for i in range(size):
        one = [t if d is None else t.select(d, i).contiguous() for t, d in zip(mapped, in_dims)]
        close(batched[i], wide(call(*one)))
        alone = torch.func.grad(lambda *a: call(*a).sum(), argnums=(1, 2, 3))(*one)
        for g, e in zip(grads, alone):
            close(g[i], wide(e))
        for k in (2, 3):
            sums[k] += alone[k - 1]
            if in_dims[k] is not None:
                close(shared[k - 2].select(in_dims[k], i), wide(alone[k - 1]))
    for k in (2, 3):
        if in_dims[k] is None:
            close(shared[k - 2], wide(sums[k]), 1e-5)


def test_vmap_is_one_launch(launches: list[tuple[str, ...]]) -> None:
    x = operands()
    torch.vmap(torch.vmap(attention_kl))(*(t.repeat_interleave(4 // t.shape[1], 1) for t in x))
    assert launches == [("forward",)]


# Compilers and other machinery


@pytest.fixture
def fresh_compiler() -> None:
    torch.compiler.reset()


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore")  # of the compiler's own making, and different in every release
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_equals_eager(device: str, backend: str, dynamic: bool) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend(backend)

    def loss(weight: Any, *a: Any) -> Any:
        return attention_kl(*a, causal=True, row_weight=weight, reduction="mean") * 2

    compiled = torch.compile(loss, fullgraph=True, backend=counter, dynamic=dynamic)
    for M, N in ((5, 7), (6, 9), (11, 12)):
        x = operands(device, grad=INPUT_NAMES, M=M, N=N, seed=M)
        weight = torch.rand(M, device=device)
        value = compiled(weight, *x)
        grads = torch.autograd.grad(value, x)
        expected = loss(weight, *x)
        close(value, wide(expected))
        for g, e in zip(grads, torch.autograd.grad(expected, x)):
            close(g, wide(e), 1e-5)
    assert counter.frame_count == (1 if dynamic else 3)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore")
def test_compiled_without_gradients_and_with_log_sum_exps(device: str) -> None:
    x = operands(device)
    compiled = torch.compile(
        lambda *a: streamkl_cupy.attention_kl(*a, teacher_scale=0.3, return_lse=True),
        fullgraph=True,
        backend="aot_eager",
    )
    for a, b in zip(compiled(*x), attention_kl(*x, teacher_scale=0.3, return_lse=True)):
        assert torch.equal(a, b)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore")
def test_compiled_func_grad_is_right_or_refused_but_never_zero() -> None:
    x = operands()

    def gradient(q: Any) -> Any:
        return torch.func.grad(lambda s: attention_kl(x[0], x[1], s, x[3], reduction="sum"))(q)

    try:
        got = torch.compile(gradient, backend="aot_eager")(x[2])
    except RuntimeError:
        return
    close(got, dense_grads(x, np.ones((2, 4, 5))).student_q)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore")
def test_compiled_vmap() -> None:
    x = operands(K_t=4, K_s=4)
    compiled = torch.compile(lambda *a: torch.vmap(attention_kl)(*a), backend="aot_eager")
    close(compiled(*x), dense_kl(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_leaves_inputs_alone(device: str, dtype: Any) -> None:
    x = operands(device, dtype=dtype, grad=INPUT_NAMES)
    outside = attention_kl(*x)
    with torch.autocast(device, dtype=torch.bfloat16):
        inside = attention_kl(*x)
        inside.sum().backward()
    assert inside.dtype == torch.float32
    assert torch.equal(inside, outside)
    assert all(t.grad.dtype == dtype for t in x)


@pytest.mark.gpu
def test_gradient_scaler_steps() -> None:
    weight = torch.nn.Parameter(torch.eye(64, device="cuda"))
    x = operands("cuda", dtype=torch.float16, D_t=64, D_s=64, M=64, N=64)
    optimizer, scaler = torch.optim.SGD([weight], lr=0.1), torch.amp.GradScaler("cuda")
    before = weight.detach().clone()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = attention_kl(x[0], x[1], x[2] @ weight, x[3], reduction="mean")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.isfinite(weight).all()
    assert not torch.equal(weight, before)


def test_checkpoint(device: str) -> None:
    from torch.utils.checkpoint import checkpoint

    x = operands(device, grad=INPUT_NAMES)
    checkpoint(lambda *a: attention_kl(*(t * 1 for t in a)).sum(), *x, use_reentrant=False).backward()
    for t, e in zip(x, dense_grads(x, np.ones((2, 4, 5)))):
        close(t.grad, e)


def test_saved_values_do_not_outlive_the_graph() -> None:
    x = operands(grad=["student_q"])
    x[0] = x[0] * 1
    alive = weakref.ref(x[0])
    loss = attention_kl(*x).sum()
    loss.backward()
    del x, loss
    gc.collect()
    assert alive() is None


def test_the_graph_keeps_the_pattern() -> None:
    """Nobody else may: operators are handed its digest, and the cache of calls forgets."""
    x = operands(grad=["student_q"])
    queries, keys = x[0].shape[-2], x[1].shape[-2]
    loss = attention_kl(*x, block_mask=patterns.local(16, queries=queries, keys=keys, block=16)).sum()
    for cache in (call._looks, call._checked, call._runners):
        cache.clear()
    gc.collect()
    loss.backward()
    assert x[2].grad is not None


def test_explicit_functions_are_detached() -> None:
    x = operands(grad=INPUT_NAMES)
    rows = streamkl_cupy.attention_kl_forward(*x)
    assert not rows.kl.requires_grad
    value, grads = streamkl_cupy.attention_kl_value_and_grad(*x, reduction="sum")
    assert not value.requires_grad
    close(grads.student_q, dense_grads(x, np.ones((2, 4, 5))).student_q)


def test_top_level_function_comes_here(device: str) -> None:
    x = operands(device, grad=INPUT_NAMES)
    streamkl_cupy.attention_kl(*x, reduction="mean").backward()
    for t, e in zip(x, dense_grads(x, np.full((2, 4, 5), 1 / 40))):
        close(t.grad, e)


@pytest.mark.gpu
def test_two_devices_are_refused_in_one_call() -> None:
    x = operands("cuda")
    with pytest.raises(ValueError, match="student_k"):
        attention_kl(*x[:3], x[3].cpu())
    with pytest.raises(ValueError, match="row_weight"):
        attention_kl(*x, row_weight=torch.ones(5))


@pytest.mark.gpu
def test_expanded_heads_are_not_copied() -> None:
    keys = torch.randn(1, 1, 4096, 576, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(1, 128, 16, 576, dtype=torch.bfloat16, device="cuda")
    sq, sk = (torch.randn(1, 128, n, 64, dtype=torch.bfloat16, device="cuda") for n in (16, 4096))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    kl = attention_kl(q, keys.expand(1, 128, 4096, 576), sq, sk)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - start < 64 << 20
    close(kl, wide(attention_kl(q, keys, sq, sk)), 1e-5)


@pytest.mark.gpu
def test_a_call_like_one_before_is_looked_up() -> None:
    x = operands("cuda", dtype=torch.bfloat16, M=64, N=64, D_t=64, D_s=64)
    check_looked_up(lambda: attention_kl(*x), 48)
    check_looked_up(lambda: attention_kl(*x, causal=True, reduction="mean"), 50)


def test_what_is_looked_up_is_what_reading_would_say(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of calls like one before every address, shape and stride, which is what a kernel gets; and they are looked up,
    those too in which a tensor stands twice."""
    recalled, after, found, later, kept = call._recalled, autodiff._after, [], [], []

    def alone(views: Any) -> list[Any]:
        inputs, masks, saved = views
        return [x and (*x[:6], x.ptr) for x in (*inputs, *(masks or {}).values(), *(saved or ()))]

    def as_read(ready: Any, made: Any, rows: Any) -> None:
        read = made._read(rows)
        assert alone(ready.views) == alone(read.views)
        assert ready.checked is read.checked

    def compared(framework: Any, made: Any, rows: Any) -> Any:
        ready = recalled(framework, made, rows)
        if ready is not None:
            as_read(ready, made, rows)
            found.append((made.op.name, rows is not None))
        return ready

    def compared_after(look: Any, of: Any, options: Any, arrays: Any, rows: Any) -> Any:
        count = len(found)
        ready = after(look, of, options, arrays, rows)
        if look is not None:
            operands, masks = arrays[: of.at_masks], arrays[of.at_masks :]
            as_read(ready, call.Call(of.op, operands, options, masks or NO_MASKS), SavedArrays(rows, True, True))
            if len(found) == count:
                later.append(of.op.name)
        return ready

    known("torch")  # of a framework that nobody has met nothing is remembered
    monkeypatch.setattr(call, "_recalled", compared)
    monkeypatch.setattr(autodiff, "_after", compared_after)
    for i in range(4):
        tq, tk, sq, sk = operands(device, seed=i, M=16, N=16)
        sq, sk = sq.requires_grad_(), sk.requires_grad_()
        mask = torch.arange(32, device=device).reshape(2, 16) % (i + 2) > 0
        weights = torch.ones(2, 4, 16, device=device, requires_grad=True)
        attention_kl(tq, tk, sq, sk, key_mask=mask, causal=True, reduction="sum").backward()
        out, lse = front.sparse_attention(sq, sk, sk, return_lse=True)
        (out.sum() + lse.sum()).backward()
        streamkl_cupy.attention_kl_to(torch.softmax(tq @ tq.mT, -1), sq, sk, reduction="sum").backward()
        streamkl_cupy.indexer_kl(tq, tk, sq, sk[:, :1], weights, index_scale=1.0, reduction="sum").backward()
        rows = streamkl_cupy.attention_kl_forward(tq, tk, sq.detach(), sk.detach())
        kept.append((tq, tk, sq, sk, rows))  # so that addresses differ
        streamkl_cupy.attention_kl_backward(rows.kl + 1, tq, tk, sq.detach(), sk.detach(), saved=rows)
    names = ("attention_kl", "sparse_attention", "attention_kl_to", "indexer_kl")
    assert {*found} == {(name, back) for name in names for back in (False, True)}
    assert found.count(("attention_kl", True)) == 4, "of autograd once, of explicit ones thrice"
    assert {*later} == {"attention_kl", "attention_kl_to"}, "backwards that a forward's look knows"


def test_subclasses_of_parameters_keep_their_gradient(device: str) -> None:
    class Named(torch.nn.Parameter):
        pass

    tq, tk, sq, sk = operands(device)
    q = Named(sq.detach().clone())
    sq.requires_grad_()
    streamkl_cupy.attention_kl(tq, tk, q, sk, reduction="sum").backward()
    wanted = torch.autograd.grad(attention_kl(tq, tk, sq, sk, reduction="sum"), sq)[0]
    close(q.grad, wide(wanted))


def test_scales_are_constants(device: str) -> None:
    x = operands(device)
    with pytest.raises(TypeError, match="student_scale requires a gradient, but scales are constants; pass float"):
        attention_kl(*x, student_scale=torch.nn.Parameter(torch.tensor(0.5)))

"""What reaches the backend that computes: a kernel has no one to ask, and on the CPU a slip is often made good."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import streamkl_cupy
from streamkl_cupy import numpy_backend, patterns
from streamkl_cupy.arrays import host
from streamkl_cupy.options import MASK_ARRAYS
from streamkl_cupy.problem import INPUT_NAMES
from streamkl_cupy.testing.problems import make

FRAMEWORKS = ["numpy", "torch", "jax"]


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the CPU backend was handed, call by call, as arrays by name in copies of their own."""
    seen: list[Any] = []
    runner = numpy_backend.Runner
    forward, backward = runner.forward, runner.backward

    def copies(views: Any) -> dict[str, Any]:
        return {name: None if x is None else host(x).copy() for name, x in views._asdict().items()}

    def note(self: Any, what: str, inputs: Any, outputs: Any, saved: Any, args: Any, kwargs: Any) -> None:
        masks = kwargs.get("masks", args[2] if len(args) > 2 else None)
        seen.append(
            SimpleNamespace(
                what=what,
                problem=self.problem,
                inputs=copies(inputs),
                views=inputs,
                outputs=[name for name, x in outputs._asdict().items() if x is not None],
                saved=None if saved is None else copies(saved),
                masks={name: host(x).copy() for name, x in (masks or {}).items()},
            )
        )

    def spy_forward(self: Any, inputs: Any, outputs: Any, *args: Any, **kwargs: Any) -> None:
        note(self, "forward", inputs, outputs, None, args, kwargs)
        forward(self, inputs, outputs, *args, **kwargs)

    def spy_backward(self: Any, inputs: Any, saved: Any, outputs: Any, *args: Any, **kwargs: Any) -> None:
        note(self, "backward", inputs, outputs, saved, args, kwargs)
        backward(self, inputs, saved, outputs, *args, **kwargs)

    monkeypatch.setattr(runner, "forward", spy_forward)
    monkeypatch.setattr(runner, "backward", spy_backward)
    return seen


def to(framework: str, x: Any) -> Any:
    if framework == "numpy" or x is None:
        return x
    module = pytest.importorskip(framework if framework == "torch" else "jax.numpy")
    return module.asarray(np.array(x))


def wanted(argnums: tuple[int, ...]) -> list[str]:
    return [INPUT_NAMES[i] for i in argnums]


def explicit(x: Any, grad: Any, argnums: tuple[int, ...], **options: Any) -> None:
    rows = streamkl_cupy.attention_kl_forward(*x, **options)
    streamkl_cupy.attention_kl_backward(grad, *x, saved=rows, wrt=wanted(argnums), **options)


def value_and_grad(x: Any, grad: Any, argnums: tuple[int, ...], **options: Any) -> None:
    streamkl_cupy.attention_kl_value_and_grad(*x, row_weight=grad, wrt=wanted(argnums), reduction="sum", **options)


def torch_autograd(x: Any, grad: Any, argnums: tuple[int, ...], **options: Any) -> None:
    for i in argnums:
        x[i].requires_grad_()
    streamkl_cupy.attention_kl(*x, **options).backward(grad)


def torch_func(x: Any, grad: Any, argnums: tuple[int, ...], **options: Any) -> None:
    def loss(*x: Any) -> Any:
        return (streamkl_cupy.attention_kl(*x, **options) * grad).sum()

    pytest.importorskip("torch").func.grad(loss, argnums)(*x)


def torch_operator(x: Any, grad: Any, argnums: tuple[int, ...], **options: Any) -> None:
    """As programs of torch.compile and torch.export run."""
    torch = pytest.importorskip("torch")
    for i in argnums:
        x[i].requires_grad_()
    masks = tuple(options.pop(name, None) for name in MASK_ARRAYS)
    program = torch.export.export(_Module(options, masks), tuple(x)).module()
    program(*x).backward(grad)


def _Module(options: Any, masks: Any) -> Any:
    class Module(pytest.importorskip("torch").nn.Module):  # type: ignore[misc]
        def forward(self, *x: Any) -> Any:
            return streamkl_cupy.attention_kl(*x, **dict(zip(MASK_ARRAYS, masks)), **options)

    return Module()


def jax_grad(x: Any, grad: Any, argnums: tuple[int, ...], **options: Any) -> None:
    def loss(*x: Any) -> Any:
        return (streamkl_cupy.attention_kl(*x, **options) * grad).sum()

    jax = pytest.importorskip("jax")
    jax.block_until_ready(jax.jit(jax.grad(loss, argnums))(*x))


@pytest.fixture(autouse=True)
def jax_on_the_cpu() -> Iterator[None]:
    """Where there is a GPU, JAX would put everything on it, and these look at what NumPy's runner is handed."""
    try:
        import jax
    except ImportError:
        yield
        return
    with jax.default_device(jax.devices("cpu")[0]):
        yield


WAYS = {
    "numpy explicit": ("numpy", explicit),
    "numpy value and grad": ("numpy", value_and_grad),
    "torch explicit": ("torch", explicit),
    "torch value and grad": ("torch", value_and_grad),
    "torch autograd": ("torch", torch_autograd),
    "torch func": ("torch", torch_func),
    "torch exported": ("torch", torch_operator),
    "jax explicit": ("jax", explicit),
    "jax value and grad": ("jax", value_and_grad),
    "jax grad": ("jax", jax_grad),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("argnums", [(0,), (1,), (2,), (3,), (1, 2), (2, 3)], ids=str)
def test_a_backward_reads_the_rows_that_its_gradients_need(
    way: str, argnums: tuple[int, ...], handed: list[Any], rng: np.random.Generator
) -> None:
    """The CPU would compute KL again where it is missing; a kernel would read whatever lies there."""
    framework, call = WAYS[way]
    case = make("gaussian", B=2, H=4, M=5, N=7, D_t=6, D_s=3, student_key_heads=2, seed=int(rng.integers(1 << 30)))
    grad = rng.standard_normal((2, 4, 5)).astype(np.float32)
    x = [to(framework, a) for a in case.arrays]
    rows = streamkl_cupy.attention_kl_forward(*case.arrays)
    handed.clear()
    call(x, to(framework, grad), argnums)
    given = handed[-1]
    assert [seen.what for seen in handed] == ["forward", "backward"]
    assert given.outputs == wanted(argnums)
    for name, a in zip(INPUT_NAMES, case.arrays, strict=True):
        np.testing.assert_array_equal(given.inputs[name], a)
    np.testing.assert_array_equal(given.saved["grad"], grad)
    for name in ("teacher_lse", "student_lse"):
        np.testing.assert_array_equal(given.saved[name], getattr(rows, name), err_msg=name)
    if min(argnums) < 2:
        np.testing.assert_array_equal(given.saved["kl"], rows.kl)
    elif not way.endswith(("explicit", "value and grad")):  # all rows come along there
        assert given.saved["kl"] is None


SPARSE = patterns.local(16, queries=33, keys=40, block=16)
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "scales": ({"teacher_scale": -0.25, "student_scale": 0.75}, {}),
    "one scale": ({"student_scale": 0.0}, {}),
    "precision": ({"precision": "high"}, {"precision": "high"}),
    "deterministic": ({"deterministic": True}, {"deterministic": True}),
    "causal": ({"causal": True}, {"mask": {"q_offset": 7}}),
    "offset": ({"causal": True, "q_offset": -3}, {"mask": {"q_offset": -3}}),
    "window": ({"window": (5, 2)}, {"mask": {"left": 5, "right": 2, "q_offset": 7}}),
    "pattern": ({"block_mask": SPARSE}, {"blocks": SPARSE.digest}),
    "lengths": ({"key_lengths": np.array([40, 11], np.int32)}, {}),
    "keys": ({"key_mask": np.arange(80).reshape(2, 40) % 3 > 0}, {}),
}


@pytest.mark.parametrize(
    "way", ["torch autograd", "torch exported", "jax grad", *(f"{x} explicit" for x in FRAMEWORKS)]
)
@pytest.mark.parametrize("name", OPTIONS)
def test_options_reach_the_forward_and_the_backward(
    way: str, name: str, handed: list[Any], rng: np.random.Generator
) -> None:
    framework, call = WAYS[way]
    layout = str(rng.choice(["bhnd", "bnhd"]))
    given, expected = OPTIONS[name]
    case = make("gaussian", B=2, H=4, M=33, N=40, D_t=16, D_s=4, teacher_key_heads=2, layout=layout)
    options = {key: to(framework, x) if key in MASK_ARRAYS else x for key, x in given.items()}
    grad = to(framework, np.ones((2, 4, 33) if layout == "bhnd" else (2, 33, 4), np.float32))
    call([to(framework, a) for a in case.arrays], grad, (1, 2), layout=layout, **options)
    assert [seen.what for seen in handed] == ["forward", "backward"]
    for seen in handed:
        problem = seen.problem
        assert (problem.batch, problem.heads, problem.queries, problem.keys) == (2, 4, 33, 40)
        assert [problem.operand(x).heads for x in INPUT_NAMES] == [4, 2, 4, 4]
        assert [problem.operand(x).dim for x in INPUT_NAMES] == [16, 16, 4, 4]
        assert problem.layout == layout
        scales = given.get("teacher_scale", 1 / 4), given.get("student_scale", 1 / 2)
        assert (problem.side("teacher").scale, problem.side("student").scale) == scales
        assert problem.setting("precision", "highest") == expected.get("precision", "highest")
        assert problem.deterministic == expected.get("deterministic", False)
        params = {key: x for key, x in dict(problem.mask.params).items() if key in ("left", "right", "q_offset")}
        assert params == expected.get("mask", {})
        assert problem.mask.blocks == expected.get("blocks")
        arrays = {key: x for key, x in given.items() if key in MASK_ARRAYS}
        assert seen.masks.keys() == arrays.keys()
        for key, x in arrays.items():
            np.testing.assert_array_equal(seen.masks[key], x)


def place(x: Any, strides: tuple[int, ...], index: tuple[int, ...]) -> Any:
    """The element that a kernel reads at (batch, head, row, ...) of an array."""
    address = x.ctypes.data + x.itemsize * sum(i * s for i, s in zip(index, strides, strict=True))
    return np.ctypeslib.as_array((np.ctypeslib.ctypes.c_byte * x.itemsize).from_address(address)).view(x.dtype)[0]


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("views", [False, True])
def test_strides_lead_to_every_element(layout: str, rank: int, views: bool, handed: list[Any], rng: Any) -> None:
    """Of the operands, of rows and of gradients, whatever the layout and the number of axes."""
    B, H = 3 if rank == 4 else 1, 4 if rank > 2 else 1
    case = make("gaussian", B=B, H=H, M=5, N=6, D_t=7, D_s=2, teacher_key_heads=max(H // 2, 1), layout=layout)
    axes = {4: (0, 1, 2, 3), 3: (1, 2, 3), 2: (2, 3) if layout == "bhnd" else (1, 3)}[rank]
    x = [a.reshape([a.shape[i] for i in axes]) for a in case.arrays]
    if views:  # every second number of larger arrays along the last axis but one, and back to front along the first
        x = [np.repeat(a, 2, axis=-2)[..., ::2, :][::-1] for a in x]
    options = {"layout": layout} if rank > 2 else {}
    rows = streamkl_cupy.attention_kl_forward(*x, **options)
    problem = handed[0].problem
    swapped = layout == "bnhd" and rank > 2

    def index(b: int, h: int, r: int, *d: int) -> tuple[int, ...]:
        return (b, *((r, h) if swapped else (h, r)), *d)[4 - rank :] if rank > 2 else (r, *d)

    grads = streamkl_cupy.attention_kl_backward(np.ones_like(rows.kl), *x, saved=rows, wrt=INPUT_NAMES, **options)
    for name, a, g in zip(INPUT_NAMES, x, grads, strict=True):
        operand = problem.operand(name)
        assert problem.input_shape(name) == a.shape
        for _ in range(20):
            at = tuple(int(rng.integers(n)) for n in (B, operand.heads, operand.rows, operand.dim))
            assert place(a, operand.strides, at) == a[index(*at)], name
            assert place(g, problem.compact_input_strides(name), at) == g[index(*at)], name
    assert problem.row_shape == rows.kl.shape
    for row in rows:
        for _ in range(20):
            at = tuple(int(rng.integers(n)) for n in (B, H, 5))
            assert place(row, problem.row_strides(), at) == row[index(*at)]


def test_alignment_is_of_each_operand(handed: list[Any]) -> None:
    case = make("gaussian", M=4, N=4, D_t=8)
    for which in range(5):
        x = list(case.arrays)
        if which < 4:
            x[which] = _shifted(x[which])
        streamkl_cupy.attention_kl(*x)
        assert [handed[-1].problem.operand(name).aligned for name in INPUT_NAMES] == [i != which for i in range(4)]


def _shifted(x: Any) -> Any:
    """The same numbers, 4 bytes behind a 16-byte boundary."""
    room = np.empty(x.size + 9, x.dtype)
    start = (-room.ctypes.data // 4) % 4 + 1
    moved = room[start : start + x.size].reshape(x.shape)
    moved[...] = x
    return moved

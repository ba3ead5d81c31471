"""Arrays of frameworks that are known through DLPack alone: results in their own type, or a refusal with a way out."""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import streamkl_cupy
from streamkl_cupy import arrays
from streamkl_cupy.frameworks import base, describe
from streamkl_cupy.frameworks import numpy as numpy_framework
from streamkl_cupy.numpy_backend.elements import narrow
from streamkl_cupy.problem import INPUT_NAMES
from streamkl_cupy.testing import attention, reference
from streamkl_cupy.testing.compare import check_gradients, check_lse, check_rows
from streamkl_cupy.testing.problems import make


class Bare:
    """A DLPack producer of no framework."""

    def __init__(self, x: Any, device: tuple[int, int] | None = None, versioned: bool = True) -> None:
        self.x, self.device, self.versioned = x, device, versioned
        self.shape, self.dtype = x.shape, x.dtype

    def __dlpack_device__(self) -> Any:
        return self.device or self.x.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        if not self.versioned and "max_version" in options:
            raise TypeError("unexpected keyword max_version")
        return self.x.__dlpack__(**options)


class Own(Bare):
    """An array of a small framework of its own, which keeps its numbers in NumPy's or CuPy's arrays."""

    def __array_namespace__(self) -> Any:
        return OWN


def _own(x: Any) -> Own:
    on_cpu = x.__dlpack_device__()[0] == 1
    return Own((np if on_cpu else sys.modules["cupy"]).from_dlpack(x))


OWN = SimpleNamespace(from_dlpack=_own)


class Framework:
    """Makes arrays of a guest and reads them back."""

    dtypes: tuple[str, ...] = ("float32", "float16", "float64")
    path = "numpy"

    def array(self, x: Any) -> Any:
        raise NotImplementedError

    def bfloat16(self, x: Any) -> Any:
        raise NotImplementedError

    def numpy(self, x: Any) -> Any:
        return np.asarray(x)


class OwnFramework(Framework):
    def array(self, x: Any) -> Any:
        return Own(np.array(x))

    def numpy(self, x: Any) -> Any:
        return x.x


class OwnOnCuda(Framework):
    dtypes = ("float32", "float16")
    path = "cupy"

    def array(self, x: Any) -> Any:
        return Own(pytest.importorskip("cupy").asarray(x))

    def numpy(self, x: Any) -> Any:
        return x.x.get()


class Strict(Framework):
    dtypes = ("float32", "float64")

    def __init__(self) -> None:
        self.xp = pytest.importorskip("array_api_strict", reason="needs array-api-strict, which is not installed")

    def array(self, x: Any) -> Any:
        return self.xp.asarray(np.array(x))


def _alone(name: str, other: str) -> Any:
    if other in sys.modules:
        pytest.skip(f"{name} and {other} crash in one process: run this with -k {name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they have to say while they are imported
        return pytest.importorskip(name, reason=f"needs {name}, which is not installed")


class TensorFlow(Framework):
    dtypes = ("float32", "float16", "bfloat16", "float64")

    def __init__(self) -> None:
        self.tf = _alone("tensorflow", "paddle")

    def array(self, x: Any) -> Any:
        return self.tf.constant(x)

    def bfloat16(self, x: Any) -> Any:
        return self.tf.cast(self.tf.constant(x), self.tf.bfloat16)

    def numpy(self, x: Any) -> Any:
        return (self.tf.cast(x, self.tf.float32) if x.dtype == self.tf.bfloat16 else x).numpy()


class Paddle(Framework):
    dtypes = ("float32", "float16", "bfloat16", "float64")

    def __init__(self) -> None:
        self.paddle = _alone("paddle", "tensorflow")

    def array(self, x: Any) -> Any:
        return self.paddle.to_tensor(x, place="cpu")

    def bfloat16(self, x: Any) -> Any:
        return self.array(x).astype("bfloat16")

    def numpy(self, x: Any) -> Any:
        return (x.astype("float32") if x.dtype == self.paddle.bfloat16 else x).numpy()


KINDS = {
    "own": OwnFramework,
    "array_api_strict": Strict,
    "tensorflow": TensorFlow,
    "paddle": Paddle,
    "own on cuda": pytest.param(OwnOnCuda, marks=pytest.mark.gpu),
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def guest(request: pytest.FixtureRequest) -> Any:
    return request.param()


def inputs(guest: Any, case: Any) -> list[Any]:
    dtype = case.dtypes[0]
    return [guest.bfloat16(x.astype("f")) if dtype == "bfloat16" else guest.array(x.astype(dtype)) for x in case.arrays]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_forward_and_backward(guest: Any, dtype: str, rng: np.random.Generator) -> None:
    if dtype not in guest.dtypes:
        pytest.skip(f"this framework has no {dtype} here")
    case = make("gaussian", B=2, H=4, M=7, N=9, D_t=8, D_s=16, teacher_key_heads=2, seed=rng.integers(99), dtypes=dtype)
    x = inputs(guest, case)
    kind, stat = type(x[0]), "float64" if dtype == "float64" else "float32"
    expected = reference.forward(*case.arrays)

    rows = streamkl_cupy.attention_kl_forward(*x)
    assert isinstance(rows, streamkl_cupy.KLForward)
    assert {type(r) for r in rows} == {kind}
    assert {base.dtype_label(r.dtype) for r in rows} == {stat}
    check_rows("kl", guest.numpy(rows.kl), expected, dtype=stat)
    check_lse("teacher_lse", guest.numpy(rows.teacher_lse), expected.teacher_lse, expected.largest, stat)

    grad = rng.standard_normal(expected.kl.shape).astype(stat)
    grads = streamkl_cupy.attention_kl_backward(
        guest.array(grad), *x, teacher_lse=rows.teacher_lse, student_lse=rows.student_lse, kl=rows.kl, wrt=INPUT_NAMES
    )
    assert {type(g) for g in grads} == {kind}
    assert {base.dtype_label(g.dtype) for g in grads} == {dtype}
    check_gradients(tuple(map(guest.numpy, grads)), reference.backward(grad, *case.arrays), case.dtypes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_and_what_merges_its_parts(guest: Any, dtype: str, rng: np.random.Generator) -> None:
    if dtype not in guest.dtypes:
        pytest.skip(f"this framework has no {dtype} here")
    case = make("gaussian", B=2, H=2, M=7, N=7, D_t=8, seed=rng.integers(99), dtypes=dtype)
    q, k, v, other = inputs(guest, case)
    whole = attention.forward(*case.arrays[:3])
    far = attention.forward(case.arrays[0], case.arrays[3], case.arrays[2])
    rows = [streamkl_cupy.sparse_attention_forward(q, x, v) for x in (k, other)]
    merged = streamkl_cupy.merge_attention_states([r.out for r in rows], [r.lse for r in rows])
    grads = streamkl_cupy.sparse_attention_backward(rows[0].out, q, k, v, saved=rows[0])
    share = 1 / (1 + np.exp(far.lse - whole.lse))[..., None]
    both = share * whole.out.value + (1 - share) * far.out.value
    wanted = attention.backward(whole.out.value, None, *case.arrays[:3])
    for x, y in zip(
        (rows[0].out, merged.out, *grads), (whole.out.value, both, *(t.value for t in wanted)), strict=True
    ):
        assert type(x) is type(q)
        assert base.dtype_label(x.dtype) == dtype
        error = np.linalg.norm(guest.numpy(x) - y) / np.linalg.norm(y)
        assert error < (1e-5 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_values_are_of_the_caller(guest: Any, reduction: str) -> None:
    case = make("gaussian", B=2, H=2, M=5, N=6, D_t=8, seed=3)
    x = inputs(guest, case)
    kl = streamkl_cupy.attention_kl(*x, reduction=reduction)
    assert type(kl) is type(x[0])
    expected = reference.forward(*case.arrays).kl
    wanted = {"none": expected, "sum": expected.sum(), "mean": expected.mean()}[reduction]
    np.testing.assert_allclose(guest.numpy(kl), wanted, rtol=1e-5, atol=1e-6)
    both = streamkl_cupy.attention_kl(*x, reduction=reduction, return_lse=True)
    assert {type(r) for r in both} == {type(x[0])}
    if reduction != "none":
        value, grads = streamkl_cupy.attention_kl_value_and_grad(*x, reduction=reduction, wrt=("student_k",))
        assert (type(value), tuple(value.shape)) == (type(x[0]), ())
        assert [type(g) for g in grads] == [type(None), type(None), type(None), type(x[0])]


def test_arrays_beside_the_inputs(guest: Any, rng: np.random.Generator) -> None:
    case = make("gaussian", B=2, H=2, M=5, N=6, D_t=8, seed=4)
    x = inputs(guest, case)
    mask = rng.random((2, 6)) > 0.3
    mask[:, 0] = True
    lengths = np.array([3, 6], np.int32)
    weight = rng.random((2, 1, 5)) > 0.3
    plain = {"key_mask": mask, "key_lengths": lengths, "query_lengths": lengths - 1, "query_mask": weight[:, 0]}
    plain["row_weight"] = weight
    options = {name: guest.array(x) for name, x in plain.items()}
    value, grads = streamkl_cupy.attention_kl_value_and_grad(*x, reduction="sum", **options)
    expected, wanted = streamkl_cupy.attention_kl_value_and_grad(*case.arrays, reduction="sum", **plain)
    np.testing.assert_allclose(guest.numpy(value), expected, rtol=1e-5)
    np.testing.assert_allclose(guest.numpy(grads.student_k), wanted.student_k, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        guest.numpy(streamkl_cupy.attention_kl(*x, reduction="sum", **options)), expected, rtol=1e-5
    )
    dense = streamkl_cupy.attention_kl_forward(*x).teacher_lse
    for rows in (
        streamkl_cupy.attention_kl_forward(*x, causal=True, dense_teacher_lse=dense),
        streamkl_cupy.attention_kl(*x, causal=True, return_lse=True, dense_teacher_lse=dense),
    ):
        assert isinstance(rows, streamkl_cupy.KLForwardMass)
        assert {type(r) for r in rows} == {type(x[0])}
        assert (guest.numpy(rows.teacher_mass) < 1 + 1e-5).all()
    packed = make("gaussian", B=1, H=2, M=8, N=8, D_t=8, seed=5).arrays
    flat = [guest.array(np.ascontiguousarray(a[0].swapaxes(0, 1)).astype("f")) for a in packed]
    ends = guest.array(np.array([0, 3, 8], np.int32))
    kl = guest.numpy(streamkl_cupy.attention_kl(*flat, cu_seqlens_q=ends, cu_seqlens_k=ends))
    first = reference.forward(*(a[:, :, :3] for a in packed)).kl[0].T
    np.testing.assert_allclose(kl[:3], first, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 2, 5), (2, 0, 5), (2, 2, 0)])
def test_nothing_at_all(guest: Any, shape: tuple[int, ...]) -> None:
    x = [guest.array(np.zeros((*shape, 8), np.float32))] * 4
    kl = streamkl_cupy.attention_kl(*x)
    assert (type(kl), tuple(kl.shape)) == (type(x[0]), shape)
    value, grads = streamkl_cupy.attention_kl_value_and_grad(*x)
    assert float(guest.numpy(value)) == 0
    assert tuple(grads.student_k.shape) == (*shape, 8)


def test_results_own_their_memory(guest: Any) -> None:
    """What was handed over stays what it is, whatever is computed or dropped afterwards."""
    x = inputs(guest, make("gaussian", B=2, H=2, M=5, N=6, D_t=8, seed=6))
    rows = streamkl_cupy.attention_kl_forward(*x)
    kept = [np.array(guest.numpy(r)) for r in rows]
    for seed in range(5):
        streamkl_cupy.attention_kl_value_and_grad(*inputs(guest, make("gaussian", M=5, N=6, D_t=8, seed=seed)))
        gc.collect()
    for r, copy in zip(rows, kept, strict=True):
        np.testing.assert_array_equal(guest.numpy(r), copy)


def test_mixtures(guest: Any) -> None:
    case = make("gaussian", B=1, H=1, M=5, N=5, D_t=8, seed=7)
    x = inputs(guest, case)
    if guest.path != "numpy":
        pytest.skip("NumPy arrays are on another device")
    rows = streamkl_cupy.attention_kl_forward(*case.arrays)
    mask, ends = np.ones((1, 5), bool), np.array([5], np.int32)
    functions = (
        streamkl_cupy.attention_kl,
        streamkl_cupy.attention_kl_forward,
        streamkl_cupy.attention_kl_value_and_grad,
        streamkl_cupy.plan,
        streamkl_cupy.warmup,
    )
    for function in functions:
        for at, name in enumerate(INPUT_NAMES):
            mixed = list(x)
            mixed[at] = case.arrays[at]
            with pytest.raises(TypeError, match=rf"{name} is a numpy array|but {name} is|teacher_q is a numpy array"):
                function(*mixed)
        for option in ({"key_mask": mask}, {"key_lengths": ends}):
            with pytest.raises(TypeError, match=rf"but {next(iter(option))} is a numpy array.*one framework"):
                function(*x, **option)
    for option in ("key_mask", "key_lengths"):
        theirs = guest.array(mask if option == "key_mask" else ends)
        with pytest.raises(
            TypeError, match=f"teacher_q is a numpy array, but {option} is an? .* array; .*one framework"
        ):
            streamkl_cupy.attention_kl(*case.arrays, **{option: theirs})
    for function in functions[:1] + functions[2:3]:
        with pytest.raises(TypeError, match=r"row_weight is a numpy array.*one framework"):
            function(*x, row_weight=np.ones(5, "f"), reduction="sum")
        with pytest.raises(TypeError, match=r"is a numpy array, but row_weight is an? .*one framework"):
            function(*case.arrays, row_weight=guest.array(np.ones(5, "f")), reduction="sum")
    with pytest.raises(TypeError, match=r"but dense_teacher_lse is a numpy array.*one framework"):
        streamkl_cupy.attention_kl_forward(*x, dense_teacher_lse=rows.teacher_lse)
    with pytest.raises(TypeError, match=r"but grad is a numpy array.*one framework"):
        streamkl_cupy.attention_kl_backward(
            rows.kl, *x, teacher_lse=rows.teacher_lse, student_lse=rows.student_lse, wrt=("student_q",)
        )


# What cannot be served says how it can


@pytest.mark.parametrize("name", ["attention_kl", "attention_kl_forward", "attention_kl_value_and_grad", "plan"])
def test_bare_producers_are_refused(name: str) -> None:
    x = np.ones((4, 3, 8), np.float32)
    text = (
        r"(teacher|student)_q is .*Bare, which has neither an __array_namespace__.*np\.from_dlpack\(.*_q\) or torch\."
    )
    with pytest.raises(TypeError, match=text):
        getattr(streamkl_cupy, name)(*map(Bare, x))
    with pytest.raises(TypeError, match=r"student_k is .*Bare"):
        getattr(streamkl_cupy, name)(*x[:3], Bare(x[3]))
    with pytest.raises(TypeError, match=r"cupy\.from_dlpack\(q\) or torch\.from_dlpack\(q\)"):
        describe("q", Bare(x, device=(2, 0)))


def test_wrappers_whose_namespace_makes_something_else() -> None:
    class Wrapper(Bare):
        def __array_namespace__(self) -> Any:
            return np

    with pytest.raises(TypeError, match=r"q is .*Wrapper, but .*from_dlpack makes a numpy\.ndarray, .*another type"):
        describe("q", Wrapper(np.ones(3)))


def test_arrays_with_a_cuda_address_only() -> None:
    lent = SimpleNamespace(__cuda_array_interface__={})
    with pytest.raises(
        TypeError, match=r"q is .*no __dlpack__.*cupy\.asarray\(q\) or torch\.as_tensor\(q, device='cuda"
    ):
        describe("q", lent)


def test_other_devices() -> None:
    far = Own(np.ones(3))
    describe("q", far)
    far.device = (8, 0)
    with pytest.raises(TypeError, match=r"q is on DLPack device \(8, 0\); allowed are CUDA and CPU"):
        describe("q", far)


@pytest.mark.parametrize("versioned", [True, False])
def test_views_are_read_in_place(versioned: bool) -> None:
    base = np.arange(48.0).reshape(2, 4, 6)
    frozen = base.view()
    frozen.flags.writeable = False
    for x in (
        base,
        base[:, ::-1],
        base[..., ::2],
        base.swapaxes(0, 1),
        np.broadcast_to(base[:, :1], base.shape),
        frozen,
    ):
        if x.flags.writeable or versioned:  # the old form cannot say that memory is read only
            view = describe("q", Own(x, versioned=versioned))
            assert (view.framework, view.shape) == (describe("q", Own(base)).framework, x.shape)
            assert (view.ptr, view.strides) == (describe("q", x).ptr, describe("q", x).strides)
            np.testing.assert_array_equal(arrays.host(view), x)


def test_two_frameworks_of_one_name_are_two() -> None:
    def framework() -> Any:
        class Array(Bare):
            def __array_namespace__(self) -> Any:
                return space

        space = SimpleNamespace(from_dlpack=lambda x: Array(np.from_dlpack(x)))
        return Array

    first, second = framework(), framework()
    x = np.ones((3, 8), np.float32)
    for kind in (first, second, first):
        assert type(streamkl_cupy.attention_kl(*[kind(x)] * 4)) is kind


def test_bfloat16_needs_no_numpy_type(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Its bits travel as uint16 both ways, also where nobody has imported ml_dtypes."""
    monkeypatch.setattr(numpy_framework, "TYPES", {**numpy_framework.TYPES, "bfloat16": np.dtype(np.uint16)})
    sent: list[int] = []

    class Half(Bare):
        """Says bfloat16 in its struct, as NumPy cannot."""

        def __init__(self, bits: Any) -> None:
            super().__init__(bits)
            self.dtype = "bfloat16"

        def __array_namespace__(self) -> Any:
            return SPACE

        def __dlpack__(self, **options: Any) -> Any:
            return dlpack._Declared(self.x, dlpack.BFLOAT).__dlpack__(**options)

    def take(x: Any) -> Any:
        if isinstance(x, Half):
            return x
        if not isinstance(x, dlpack._Declared):
            return Own(np.from_dlpack(x))
        sent.append(x.code)
        return Half(np.from_dlpack(dlpack._Declared(x, dlpack.UNSIGNED)))

    from streamkl_cupy.frameworks import dlpack

    SPACE = SimpleNamespace(from_dlpack=take)
    bits = [narrow(rng.standard_normal((3, 8)), np.dtype(np.uint16)) for _ in range(4)]
    values = [(b.astype(np.uint32) << 16).view(np.float32) for b in bits]
    value, grads = streamkl_cupy.attention_kl_value_and_grad(*map(Half, bits), reduction="sum")
    expected = streamkl_cupy.attention_kl_value_and_grad(*values, reduction="sum")
    np.testing.assert_allclose(value.x, expected[0], rtol=1e-6)
    np.testing.assert_array_equal(grads.student_q.x, narrow(expected[1].student_q, np.dtype(np.uint16)))
    assert sent == [dlpack.BFLOAT] * 2


def test_memory_is_kept_while_results_are_computed() -> None:
    x = np.ones((3, 8), np.float32)
    lent = Own(x)
    view = describe("q", lent)
    alive = weakref.ref(x)
    del x, lent
    gc.collect()
    assert alive() is not None
    np.testing.assert_array_equal(arrays.host(view), 1)


# Gradients that the guest's own differentiation would take for zero


class Wanting(Own):
    requires_grad = True


@pytest.mark.parametrize("name", [*INPUT_NAMES, "row_weight"])
def test_gradients_that_would_be_missing(name: str) -> None:
    given = {n: Own(np.ones((3, 8), np.float32)) for n in INPUT_NAMES} | {"row_weight": Own(np.ones(3, np.float32))}
    streamkl_cupy.attention_kl(**given)
    given[name] = Wanting(given[name].x)
    with pytest.raises(
        TypeError, match=f"{name} has requires_grad=True.*silently be missing.*attention_kl_value_and_grad"
    ):
        streamkl_cupy.attention_kl(**given)
    streamkl_cupy.attention_kl_value_and_grad(**given)


def test_tensorflow_tapes() -> None:
    tf = TensorFlow().tf
    x = [tf.random.normal((2, 5, 8)) for _ in INPUT_NAMES]
    weight = tf.ones(5)
    for at, name in enumerate((*INPUT_NAMES, "row_weight")):
        with tf.GradientTape() as tape:
            tape.watch((*x, weight)[at])
            with pytest.raises(
                TypeError, match=rf"{name} is watched by a tf\.GradientTape.*inside tf\.custom_gradient"
            ):
                streamkl_cupy.attention_kl(*x, row_weight=weight)
            with tape.stop_recording():
                streamkl_cupy.attention_kl(*x, row_weight=weight)
            streamkl_cupy.attention_kl_value_and_grad(*x, row_weight=weight)
    with tf.GradientTape() as tape:
        tape.watch(tf.ones(3))  # a tape that has other things to do
        streamkl_cupy.attention_kl(*x)
    with (
        tf.autodiff.ForwardAccumulator(x[2], tf.ones_like(x[2])),
        pytest.raises(TypeError, match=r"student_q is watched by a tf\.autodiff\.ForwardAccumulator"),
    ):
        streamkl_cupy.attention_kl(*x)


def test_tensorflow_custom_gradient() -> None:
    """The way out that the refusal names."""
    tf = TensorFlow().tf
    x = [tf.random.normal((2, 5, 8)) for _ in INPUT_NAMES]

    @tf.custom_gradient
    def loss(q: Any, k: Any) -> Any:
        value, grads = streamkl_cupy.attention_kl_value_and_grad(*x[:2], q, k, reduction="sum")
        return value, lambda upstream: (upstream * grads.student_q, upstream * grads.student_k)

    with tf.GradientTape() as tape:
        tape.watch(x[2:])
        value = 2 * loss(*x[2:])
    expected, wanted = streamkl_cupy.attention_kl_value_and_grad(*(a.numpy() for a in x), reduction="sum")
    np.testing.assert_allclose(value, 2 * expected, rtol=1e-6)
    for got, right in zip(tape.gradient(value, x[2:]), wanted[2:], strict=True):
        np.testing.assert_allclose(got, 2 * right, rtol=1e-6)


def test_tensorflow_tensors_without_memory() -> None:
    tf = TensorFlow().tf
    x = tf.ones((5, 8))
    for odd in (tf.Variable(x), tf.sparse.from_dense(x), tf.RaggedTensor.from_row_splits([1.0, 2.0], [0, 1, 2])):
        with pytest.raises(TypeError, match=r"student_q is .*no memory to read.*tf\.convert_to_tensor\(student_q\)"):
            streamkl_cupy.attention_kl(x, x, odd, x)

    @tf.function
    def traced(q: Any) -> Any:
        with pytest.raises(
            TypeError, match=r"student_q is .*SymbolicTensor.*tf\.function call through tf\.py_function"
        ):
            streamkl_cupy.attention_kl(x, x, q, x)
        return q

    traced(x)


def test_paddle_gradients() -> None:
    paddle = Paddle().paddle
    x = [paddle.randn([2, 5, 8]) for _ in INPUT_NAMES]
    x[2].stop_gradient = False
    with pytest.raises(TypeError, match=r"student_q has stop_gradient=False.*inside paddle\.autograd\.PyLayer"):
        streamkl_cupy.attention_kl(*x)
    with paddle.no_grad():
        kl = streamkl_cupy.attention_kl(*x, reduction="sum")
    expected, wanted = streamkl_cupy.attention_kl_value_and_grad(*(a.numpy() for a in x), reduction="sum")
    np.testing.assert_allclose(kl.numpy(), expected, rtol=1e-6)

    class Loss(paddle.autograd.PyLayer):  # type: ignore[name-defined, misc]
        @staticmethod
        def forward(ctx: Any, q: Any) -> Any:
            value, grads = streamkl_cupy.attention_kl_value_and_grad(*x[:2], q, x[3], reduction="sum")
            ctx.save_for_backward(grads.student_q)
            return value

        @staticmethod
        def backward(ctx: Any, upstream: Any) -> Any:
            (grad,) = ctx.saved_tensor()
            return upstream * grad

    (2 * Loss.apply(x[2])).backward()
    np.testing.assert_allclose(x[2].grad.numpy(), 2 * wanted.student_q, rtol=1e-6)
    weight = paddle.create_parameter([5], "float32")
    x[2].stop_gradient = True
    with pytest.raises(TypeError, match="row_weight has stop_gradient=False"):
        streamkl_cupy.attention_kl(*x, row_weight=weight)


def test_paddle_tensors_without_memory() -> None:
    paddle = Paddle().paddle
    gone = paddle.ones([5, 8])
    x = paddle.ones([5, 8])
    streamkl_cupy.attention_kl(x, x, x, x)
    gone._clear()
    with pytest.raises(TypeError, match=r"student_k: this paddle\.Tensor could not be read through DLPack"):
        streamkl_cupy.attention_kl(x, x, x, gone)


def test_devices_of_one_namespace() -> None:
    xp = Strict().xp
    x = xp.ones((5, 8), dtype=xp.float32, device=xp.Device("device1"))
    assert streamkl_cupy.attention_kl(x, x, x, x).device == x.device


@pytest.mark.gpu
def test_handed_over_memory_is_not_the_pools() -> None:
    """CuPy would give memory that the caller drops to the next array at once, while other streams still read it."""
    cupy = pytest.importorskip("cupy")
    x = [Own(cupy.random.standard_normal((2, 64, 32), dtype="float32")) for _ in INPUT_NAMES]
    streamkl_cupy.attention_kl_value_and_grad(*x)
    pool = cupy.get_default_memory_pool()
    gc.collect()  # what other tests have left in cycles would be given back in between
    before = pool.used_bytes()
    value, grads = streamkl_cupy.attention_kl_value_and_grad(*x)
    assert pool.used_bytes() == before
    with cupy.cuda.Stream(non_blocking=True) as stream:
        again = streamkl_cupy.attention_kl(*x, reduction="mean")
    stream.synchronize()
    np.testing.assert_allclose(value.x.get(), again.x.get(), rtol=1e-6)
    expected = streamkl_cupy.attention_kl_value_and_grad(*(a.x for a in x))[1]
    np.testing.assert_array_equal(grads.student_q.x.get(), expected.student_q.get())

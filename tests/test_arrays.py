"""Arrays of every framework, read without a copy, and refused with the right words."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import warnings
import weakref
from typing import Any

import numpy as np
import pytest

from streamkl_cupy import arrays, frameworks
from streamkl_cupy.arrays import host
from streamkl_cupy.errors import install
from streamkl_cupy.frameworks import describe, dlpack

BASE = np.arange(2 * 3 * 5 * 8, dtype=np.float32).reshape(2, 3, 5, 8)
NUMPY_VIEWS = {
    "compact": BASE,
    "transposed": BASE.transpose(0, 2, 1, 3),
    "every second column": BASE[..., ::2],
    "reversed": BASE[:, :, ::-1, ::-1],
    "broadcast": np.broadcast_to(BASE[:, :1], BASE.shape),
    "one element in": BASE[..., 1:],
    "read only": np.broadcast_to(BASE, BASE.shape),
    "empty": BASE[:, :, :0],
    "half": BASE.astype(np.float16),
    "double": BASE.astype(np.float64),
}


@pytest.mark.parametrize("x", NUMPY_VIEWS.values(), ids=NUMPY_VIEWS)
def test_numpy_views_are_read_in_place(x: Any) -> None:
    view = describe("q", x)
    assert (view.framework, str(view.device), view.dtype, view.shape) == ("numpy", "cpu", x.dtype.name, x.shape)
    same = host(view)
    np.testing.assert_array_equal(same, x)
    if x.size:
        assert same.__array_interface__["data"][0] == x.__array_interface__["data"][0]
        assert same.strides == x.strides


def test_host_keeps_the_memory_alive() -> None:
    x = BASE.copy()
    alive = weakref.ref(x)
    same = host(describe("q", x))
    del x
    gc.collect()
    assert alive() is not None
    np.testing.assert_array_equal(same, BASE)


def test_bfloat16_of_ml_dtypes() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = BASE.astype(ml_dtypes.bfloat16)[:, ::-1]
    view = describe("q", x)
    assert (view.dtype, view.strides) == ("bfloat16", (120, -40, 8, 1))
    np.testing.assert_array_equal(host(view), x.view(np.uint16))
    assert frameworks.empty(view, (2, 3), "bfloat16").array.dtype == x.dtype


def test_strides_of_axes_of_one_do_not_matter() -> None:
    compact = BASE[:1, :, :1]
    odd = np.lib.stride_tricks.as_strided(compact, compact.shape, (7, *compact.strides[1:2], 3, 4))
    assert describe("q", odd).strides == describe("q", compact).strides == (120, 40, 8, 1)
    assert describe("q", np.lib.stride_tricks.as_strided(BASE, (2, 0, 3), (5, 1, 9))).strides == (0, 3, 1)


def test_unaligned_numpy_is_refused() -> None:
    record = np.zeros(6, dtype=[("flag", "u1"), ("x", "f4")])["x"].reshape(2, 3)
    with pytest.raises(ValueError, match=r"teacher_q: .*byte strides \(15, 5\) .*numpy\.array\(teacher_q, order='C'\)"):
        describe("teacher_q", record)
    shifted = np.frombuffer(bytes(4 * 6 + 1), np.float32, 6, offset=1).reshape(2, 3)
    with pytest.raises(ValueError, match="whole multiples of the 4-byte float32"):
        describe("teacher_q", shifted)


@pytest.mark.parametrize(
    "x, text",
    [
        (BASE.astype(int), "student_k has dtype int64; allowed are bfloat16"),
        (BASE.astype(complex), "dtype complex128"),
        (BASE > 0, "dtype bool"),
        (BASE.astype(object), "dtype object"),
        (BASE.astype(str), "dtype <U"),
        (BASE.astype(">f4"), "dtype >f4; .* native byte order"),
        (np.ma.masked_array(BASE), r"student_k is a masked array.*student_k\.filled"),
        ([[1.0, 2.0]], r"student_k is a list, not an array; .*np\.asarray\(student_k"),
        ((1.0, 2.0), "is a tuple, not an array"),
        (1.0, "is a float, not an array"),
        (None, "student_k is None, not an array"),
        (np.float32(1), "is a numpy.float32, not an array"),
    ],
)
def test_refused_kinds(x: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        describe("student_k", x)


def test_float8_is_refused() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with pytest.raises(TypeError, match="has dtype float8_e4m3fn; allowed are"):
        describe("student_k", BASE.astype(ml_dtypes.float8_e4m3fn))


def test_no_framework_is_imported() -> None:
    code = (
        "import sys, numpy as np, streamkl_cupy\n"
        "x = np.ones((2, 3), np.float32)\n"
        "streamkl_cupy.attention_kl_value_and_grad(x, x, x, x)\n"
        "print(sorted({'torch', 'jax', 'cupy', 'ml_dtypes'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_cupy_missing_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=re.escape(install.cuda())):
        frameworks.cupy.cupy_module()
    assert frameworks.current_gpu() is None


# torch


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch")


def test_torch_is_read_in_place(torch: Any) -> None:
    x = torch.from_numpy(BASE.copy())
    for y in (x, x.transpose(1, 2), x[..., ::2], x[:, :1].expand(2, 3, 5, 8), torch.nn.Parameter(x), x[:0]):
        view = describe("q", y)
        assert (view.framework, view.dtype, view.ptr) == ("torch", "float32", y.data_ptr())
        assert type(view.shape) is tuple
        np.testing.assert_array_equal(host(view), y.detach().numpy())
    half = x.to(torch.bfloat16)
    np.testing.assert_array_equal(host(describe("q", half)), half.view(torch.int16).numpy().view(np.uint16))


def test_torch_subclasses_with_memory_are_fine(torch: Any) -> None:
    class Named(torch.Tensor):
        pass

    x = torch.ones(2, 3).as_subclass(Named)
    assert describe("q", x).framework == "torch"


def test_torch_kinds_without_plain_memory(torch: Any) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        fake = torch.ones(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8)
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])
        compressed = torch.eye(3).to_sparse_csr()
    for x, text in (
        (torch.ones(2, 3, device="meta"), r"teacher_k is on the meta device.*plan and warmup take it"),
        (fake, "teacher_k is a FakeTensor.* outside torch.compile"),
        (torch.eye(3).to_sparse(), r"not a dense tensor \(layout torch.sparse_coo"),
        (compressed, "not a dense tensor"),
        (nested, "not a dense tensor .*nested True"),
        (quantized, r"quantized .*teacher_k\.dequantize\(\)"),
        (torch.tensor([[1 + 2j]]).conj().imag, r"negative bit .*teacher_k\.resolve_neg\(\)"),
        (torch.tensor([[1 + 2j]]).conj(), "dtype torch.complex64; allowed are"),
        (torch.ones(2, 3, dtype=torch.int32), r"dtype torch.int32; .*teacher_k\.to\(torch\.float32\)"),
        (torch.ones(2, 3).to(torch.float8_e4m3fn), "dtype torch.float8_e4m3fn"),
        (torch.ones(2, 3) > 0, "dtype torch.bool"),
    ):
        with pytest.raises(TypeError, match=text):
            describe("teacher_k", x)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch.func.jvp uses it
def test_torch_transforms(torch: Any) -> None:
    def look(x: Any) -> Any:
        with pytest.raises(TypeError, match=r"teacher_q is a tensor inside a torch\.func transform.*attention_kl"):
            describe("teacher_q", x)
        return x.sum()

    torch.vmap(look)(torch.ones(2, 3))
    torch.func.grad(look)(torch.ones(2, 3))
    torch.func.jvp(look, (torch.ones(2),), (torch.ones(2),))
    torch.func.functionalize(look)(torch.ones(2))


def test_torch_streams(torch: Any) -> None:
    """The private question is used where it exists, the public one where not."""
    framework = frameworks.torch.Torch(torch)
    framework.raw_stream = lambda index: 70 + index
    assert framework.stream(arrays.cuda(3)) == 73

    class Streams:
        class cuda:
            @staticmethod
            def current_stream(index: int) -> Any:
                return type("Stream", (), {"cuda_stream": 80 + index})

    framework.raw_stream, framework.torch = None, Streams
    assert framework.stream(arrays.cuda(2)) == 82
    assert frameworks.stream_of(describe("q", torch.ones(2, 3))) == 0


def test_torch_allocates_plain_tensors(torch: Any) -> None:
    x = describe("q", torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True))
    out = frameworks.empty(x, (4, 5), "bfloat16")
    assert (out.array.dtype, out.strides, out.array.requires_grad) == (torch.bfloat16, (5, 1), False)
    rows = frameworks.empty_rows(x, ("a", "b", "c"), (2, 3), "float32")
    assert [view.name for view in rows] == ["a", "b", "c"]
    for plane, view in enumerate(rows):
        assert view.ptr == view.array.data_ptr() == rows[0].ptr + plane * 24
        assert view.strides == view.array.stride() == (3, 1)


# JAX


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax")


def test_jax_is_read_in_place(jax: Any) -> None:
    for dtype in ("float32", "bfloat16"):
        x = jax.device_put(jax.numpy.asarray(BASE, dtype), jax.devices("cpu")[0])
        view = describe("q", x)
        assert (view.framework, str(view.device), view.dtype, view.shape) == ("jax", "cpu", dtype, BASE.shape)
        np.testing.assert_array_equal(host(view), np.asarray(x).view(np.uint16 if dtype == "bfloat16" else np.float32))


def test_jax_kinds_that_hold_no_numbers(jax: Any) -> None:
    def look(x: Any) -> Any:
        assert frameworks.framework_of("teacher_q", x) == "jax"
        assert frameworks.is_standin("teacher_q", x)
        with pytest.raises(TypeError, match=r"teacher_q is a JAX tracer.*call attention_kl, .*not the"):
            describe("teacher_q", x)
        return x.sum()

    jax.jit(look)(BASE)
    jax.grad(look)(BASE)
    jax.vmap(look)(BASE)
    gone = jax.numpy.ones((2, 3))
    gone.delete()
    with pytest.raises(ValueError, match="teacher_q is a deleted JAX array"):
        describe("teacher_q", gone)
    with pytest.raises(TypeError, match="teacher_q has dtype key<fry>"):
        describe("teacher_q", jax.random.key(0))


class _Spread:
    """What a JAX array over two devices answers."""

    dtype = np.dtype(np.float32)

    def is_deleted(self) -> bool:
        return False

    def devices(self) -> set[str]:
        return {"a", "b"}


def test_jax_spread_over_devices(jax: Any) -> None:
    with pytest.raises(ValueError, match=r"q is spread over 2 devices; call inside jax.shard_map"):
        frameworks.jax.JAX(jax).read("q", _Spread())


# CuPy, by an imitation: reading touches no driver.


class _Data:
    def __init__(self, ptr: int, device_id: int) -> None:
        self.ptr, self.device_id = ptr, device_id


class _FakeCuPyArray:
    def __init__(self, x: Any, device: int = 0) -> None:
        self.data = _Data(x.__array_interface__["data"][0], device)
        self.shape, self.strides, self.dtype, self.size = x.shape, x.strides, x.dtype, x.size


def test_cupy_reading() -> None:
    view = frameworks.cupy.CuPy(None).read("q", _FakeCuPyArray(BASE.transpose(0, 2, 1, 3), device=1))
    assert (view.framework, str(view.device), view.strides) == ("cupy", "cuda:1", (120, 8, 40, 1))


class _Event:
    done = False

    def record(self, stream: Any) -> None:
        assert stream == "current"


class _FakeCuPy:
    """The part of CuPy that keeping borrowed memory needs."""

    def __init__(self) -> None:
        self.events: list[_Event] = []
        self.cuda = self

    def Device(self, index: int) -> Any:
        from contextlib import nullcontext

        return nullcontext()

    def Event(self, disable_timing: bool) -> _Event:
        self.events.append(_Event())
        return self.events[-1]

    def get_current_stream(self) -> str:
        return "current"


def test_borrowed_memory_is_kept_until_the_gpu_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = _FakeCuPy()
    monkeypatch.setattr(dlpack, "cupy_module", lambda: cupy)

    class Owner:
        pass

    def lend() -> weakref.ref[Owner]:
        owner = Owner()
        view = describe("q", BASE)._replace(framework="guest", device=arrays.cuda(0), array=owner)
        frameworks.hold((view, None))
        return weakref.ref(owner)

    first = lend()
    second = lend()
    assert first() is not None
    assert second() is not None
    for event in cupy.events:
        event.done = True
    third = lend()
    assert first() is None
    assert third() is not None
    dlpack._lent.clear()


def test_own_memory_is_not_held() -> None:
    view = describe("q", BASE)
    frameworks.hold((view, view._replace(framework="guest"), view._replace(device=arrays.cuda(0)), None))
    assert not dlpack._lent


# Stand-ins


def test_standins(torch: Any, jax: Any) -> None:
    for x in (
        torch.empty(2, 3, device="meta", dtype=torch.bfloat16),
        jax.ShapeDtypeStruct((2, 3), "bfloat16"),
        type("Shape", (), {"shape": [2, 3], "dtype": "bfloat16"}),
    ):
        assert frameworks.is_standin("q", x)
        view = frameworks.standin("q", x, arrays.CPU)
        assert (view.shape, view.strides, view.dtype, view.ptr) == ((2, 3), (3, 1), "bfloat16", 0)
    for real in (BASE, torch.ones(2), jax.numpy.ones(2)):
        assert not frameworks.is_standin("q", real)
    with pytest.raises(TypeError, match="teacher_q is a list; allowed are arrays, and objects with a shape"):
        frameworks.standin("teacher_q", [1], arrays.CPU)
    with pytest.raises(TypeError, match="teacher_q has dtype int32"):
        frameworks.standin("teacher_q", type("Shape", (), {"shape": (2,), "dtype": np.int32}), arrays.CPU)

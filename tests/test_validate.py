"""Every bad call, by the type and the text of its error; and that nothing was launched."""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import streamkl_cupy
from streamkl_cupy import arrays, call, validate
from streamkl_cupy.arguments import a_kind_of
from streamkl_cupy.frameworks import describe
from streamkl_cupy.ops import ATTENTION_KL, OperandSpec
from streamkl_cupy.options import Options, parse
from streamkl_cupy.problem import INPUT_NAMES

S = dict(zip(INPUT_NAMES, [(2, 4, 7, 8), (2, 2, 9, 8), (2, 4, 7, 16), (2, 1, 9, 16)], strict=True))


@pytest.fixture(autouse=True)
def _nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runner:
        plan = "a plan"
        workspace_bytes = 0

        def __init__(self, problem: Any) -> None:
            pass

        def warmup(self, wrt: Any) -> None:
            raise AssertionError("warmed up")

        def backward_bytes(self, wrt: Any) -> int:
            return 0

        def forward(self, *args: Any) -> None:
            raise AssertionError("launched")

        backward = forward

    monkeypatch.setattr(call, "_looks", {})
    monkeypatch.setattr(call, "_checked", {})
    monkeypatch.setattr(call, "_runners", {})
    monkeypatch.setattr(call, "backend", lambda device: type("Backend", (), {"Runner": Runner}))


def views(device: Any = arrays.CPU, dtypes: dict[str, str] | None = None, **shapes: tuple[int, ...]) -> Any:
    """Views of arrays with the given shapes, by default a good call."""
    made = []
    for name, shape in {**S, **shapes}.items():
        x = np.zeros(shape, (dtypes or {}).get(name, "float32"))
        made.append(describe(name, x)._replace(device=device))
    return ATTENTION_KL.Inputs(*made)


def arrays_like(**shapes: Any) -> list[Any]:
    return [np.zeros(shape, np.float32) for shape in {**S, **shapes}.values()]


def test_a_good_call() -> None:
    problem = validate.to_problem(ATTENTION_KL, views(), Options(causal=True, teacher_scale=-2.0))
    assert (problem.batch, problem.heads, problem.queries, problem.keys) == (2, 4, 7, 9)
    assert (problem.side("teacher").dim, problem.side("student").dim) == (8, 16)
    assert (problem.side("teacher").group, problem.side("student").group) == (2, 4)
    assert (problem.side("teacher").scale, problem.side("student").scale) == (-2.0, 0.25)
    assert problem.mask["q_offset"] == 2
    assert problem.side("teacher").q.strides == (4 * 7 * 8, 7 * 8, 8, 1)


def test_layout_and_rank() -> None:
    shapes = {name: (b, r, h, d) for name, (b, h, r, d) in S.items()}
    problem = validate.to_problem(ATTENTION_KL, views(**shapes), Options(layout="bnhd"))
    assert problem.row_shape == (2, 7, 4)
    assert problem.side("teacher").q.strides == (7 * 4 * 8, 8, 4 * 8, 1)
    three = validate.to_problem(ATTENTION_KL, views(**{name: shape[1:] for name, shape in S.items()}), Options())
    assert (three.batch, three.row_shape, three.side("teacher").k.heads) == (1, (4, 7), 2)
    two = validate.to_problem(ATTENTION_KL, views(**{name: shape[2:] for name, shape in S.items()}), Options())
    assert (two.heads, two.row_shape, two.side("teacher").q.strides) == (1, (7,), (0, 0, 8, 1))


@pytest.mark.parametrize("given, kept", [(0, 0), (-3, -3), (-(10**12), -7), (10**12, 9), (9, 9)])
def test_offsets_beyond_the_ends_change_nothing(given: int, kept: int) -> None:
    assert validate.to_problem(ATTENTION_KL, views(), Options(causal=True, q_offset=given)).mask["q_offset"] == kept


def test_extents_of_zero_are_fine() -> None:
    problem = validate.to_problem(
        ATTENTION_KL, views(**{n: (0, 0, 0, s[3]) for n, s in S.items()}), Options(causal=True)
    )
    assert problem.row_shape == (0, 0, 0)


@pytest.mark.parametrize(
    "shapes, error, text",
    [
        ({"student_k": (2, 1, 7, 16)}, ValueError, "student_k: 7 keys, but teacher_k has 9; both must share the keys"),
        ({"student_q": (2, 4, 6, 16)}, ValueError, "student_q: 6 rows, but teacher_q has 7; .* queries axis"),
        ({"student_q": (2, 8, 7, 16)}, ValueError, "student_q: 8 heads, but teacher_q has 4; .*sums over a teacher's"),
        (
            {"student_q": (3, 4, 7, 16), "student_k": (3, 1, 9, 16)},
            ValueError,
            "student_q: 3 batch entries, but teacher_q has 2; both must share the batch axis",
        ),
        ({"teacher_k": (1, 2, 9, 8)}, ValueError, "teacher_k: 1 batch entries, but teacher_q has 2"),
        (
            {"teacher_k": (2, 3, 9, 8)},
            ValueError,
            "teacher_k: 3 key heads do not divide the 4 query heads of teacher_q",
        ),
        ({"teacher_k": (2, 0, 9, 8)}, ValueError, "teacher_k: 0 key heads do not divide"),
        ({"teacher_k": (2, 2, 9, 9)}, ValueError, "teacher_k: 9 columns, but teacher_q has 8; .* head dim axis"),
        ({"teacher_q": (8,)}, ValueError, r"teacher_q: shape \(8,\) has 1 axes; allowed are 4, \(batch, heads"),
        ({"teacher_q": (1, 2, 4, 7, 8)}, ValueError, "has 5 axes"),
        ({"student_k": (1, 9, 16)}, ValueError, r"student_k: shape \(1, 9, 16\) has 3 axes, but teacher_q"),
        ({"student_q": (2, 4, 7, 0), "student_k": (2, 1, 9, 0)}, ValueError, "student_q: head dim 0; allowed are 1 to"),
        (
            {"student_q": (2, 4, 7, 257), "student_k": (2, 1, 9, 257)},
            NotImplementedError,
            "student_q: head dim 257; built are 1 to 256 for the student",
        ),
        (
            {"teacher_q": (2, 4, 7, 577), "teacher_k": (2, 2, 9, 577)},
            NotImplementedError,
            "teacher_q: head dim 577; built are 1 to 576 for the teacher",
        ),
    ],
)
def test_shapes(shapes: Any, error: Any, text: str) -> None:
    for function in (streamkl_cupy.attention_kl, streamkl_cupy.attention_kl_forward, streamkl_cupy.plan):
        with pytest.raises(error, match=text):
            function(*arrays_like(**shapes))


def test_dtypes() -> None:
    with pytest.raises(TypeError, match="student_k is float16, but student_q is float32; queries and keys of one side"):
        validate.to_problem(ATTENTION_KL, views(dtypes={"student_k": "float16"}), Options())
    with pytest.raises(
        TypeError, match=r"teacher_q is float64 on cuda:0; allowed on CUDA are .* or compute on the CPU"
    ):
        validate.to_problem(ATTENTION_KL, views(arrays.cuda(0), dict.fromkeys(INPUT_NAMES, "float64")), Options())
    mixed = validate.to_problem(ATTENTION_KL, views(dtypes={"teacher_q": "float64", "teacher_k": "float64"}), Options())
    assert mixed.stat_dtype == "float64"


def test_devices_and_frameworks() -> None:
    good = views(arrays.cuda(0))
    for other, text in ((arrays.cuda(1), "cuda:1"), (arrays.CPU, "cpu")):
        with pytest.raises(ValueError, match=f"teacher_q is on cuda:0, but student_q is on {text}; .*one device"):
            validate.to_problem(ATTENTION_KL, good._replace(student_q=good.student_q._replace(device=other)), Options())
    torch = pytest.importorskip("torch")
    x = arrays_like()
    mixed = [*x[:3], torch.zeros(S["student_k"])]
    with pytest.raises(TypeError, match=r"teacher_q is a numpy array, but student_k is a torch array; .*one framework"):
        streamkl_cupy.attention_kl(*mixed)
    with pytest.raises(TypeError, match="teacher_q is a numpy array, but student_k is a torch array"):
        streamkl_cupy.attention_kl_forward(*mixed)
    with pytest.raises(TypeError, match=r"student_k is a list; allowed"):
        streamkl_cupy.attention_kl(*(torch.zeros(S[n]) for n in INPUT_NAMES[:3]), [[0.0]])
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match="teacher_q is a jax array, but teacher_k is a numpy array"):
        streamkl_cupy.attention_kl(jax.numpy.zeros(S["teacher_q"]), x[1], jax.numpy.zeros(S["student_q"]), x[3])


def test_explicit_functions_name_odd_torch_tensors() -> None:
    torch = pytest.importorskip("torch")
    x = [torch.zeros(S[n]) for n in INPUT_NAMES]
    x[2] = torch.zeros(S["student_q"], device="meta")
    with pytest.raises(TypeError, match="student_q is on the meta device"):
        streamkl_cupy.attention_kl_forward(*x)


def test_explicit_functions_refuse_tracers() -> None:
    jax = pytest.importorskip("jax")
    x = [jax.numpy.zeros(S[n]) for n in INPUT_NAMES]
    for function in (streamkl_cupy.attention_kl_forward, streamkl_cupy.attention_kl_value_and_grad):
        with pytest.raises(TypeError, match="teacher_q is a JAX tracer"):
            jax.jit(function)(*x)
    x[1].delete()
    with pytest.raises(ValueError, match="teacher_k is a deleted JAX array"):
        streamkl_cupy.attention_kl_forward(*x)


OPTIONS = [
    ({"teacher_scale": float("nan")}, ValueError, "teacher_scale=nan is not finite"),
    ({"student_scale": float("inf")}, ValueError, "student_scale=inf is not finite"),
    ({"student_scale": "1"}, TypeError, "student_scale is a str; allowed are a number"),
    ({"student_scale": True}, TypeError, "student_scale is a bool; allowed are a number"),
    ({"student_scale": 1j}, TypeError, "student_scale is a complex; allowed are a number"),
    ({"student_scale": [1.0]}, TypeError, "student_scale is a list"),
    ({"student_scale": np.ones(1)}, TypeError, "student_scale is a numpy.ndarray; .* array without axes"),
    ({"teacher_scale": 10**400}, ValueError, "teacher_scale is beyond what a float can hold"),
    ({"deterministic": 1}, TypeError, "deterministic=1 is an int; allowed are True, False and None"),
    ({"causal": 1}, TypeError, "causal=1 is an int; allowed are True and False"),
    ({"causal": "yes"}, TypeError, "causal='yes' is a str"),
    ({"q_offset": 1}, ValueError, "q_offset=1 moves the diagonal of causal and window, .*neither; pass causal=True"),
    ({"q_offset": 1.0, "causal": True}, TypeError, "q_offset=1.0 is a float; allowed is an integer"),
    ({"q_offset": True, "causal": True}, TypeError, "q_offset=True is a bool; allowed is an integer"),
    ({"q_offset": np.bool_(1), "causal": True}, TypeError, "q_offset=np.True_ is a numpy.bool"),
    ({"q_offset": "3", "causal": True}, TypeError, "q_offset='3' is a str"),
    ({"layout": "bhdn"}, ValueError, 'layout=\'bhdn\' is unknown; allowed are "bhnd", "bnhd"'),
    ({"layout": None}, TypeError, "layout is a NoneType; allowed are"),
    ({"precision": "tf32"}, ValueError, 'precision=\'tf32\' is unknown; allowed are "highest", "high"'),
    ({"deterministic": 1}, TypeError, "deterministic=1 is an int"),
]


def test_types_have_their_article() -> None:
    words = [a_kind_of(x) for x in (3, object(), np.zeros(1), "", np.uint8(1), None)]
    assert words == ["an int", "an object", "a numpy.ndarray", "a str", "a numpy.uint8", "a NoneType"]
    package = Path(streamkl_cupy.__file__).parent
    by_hand = re.compile(r"\ban? \{kind(_of\(|\})")
    assert [path.name for path in package.rglob("*.py") if by_hand.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("options, error, text", OPTIONS)
def test_options(options: Any, error: Any, text: str) -> None:
    x = arrays_like()
    rows = np.zeros((2, 4, 7), np.float32)
    # Equal values of another type must not slip through a cache that knows the right ones.
    streamkl_cupy.plan(*x, causal=True, q_offset=1, teacher_scale=1.0, student_scale=1.0, deterministic=True)
    for function, given in (
        (streamkl_cupy.attention_kl, x),
        (streamkl_cupy.attention_kl_forward, x),
        (functools.partial(streamkl_cupy.attention_kl_backward, teacher_lse=rows, student_lse=rows), (rows, *x)),
        (streamkl_cupy.attention_kl_value_and_grad, x),
        (streamkl_cupy.plan, x),
        (streamkl_cupy.warmup, x),
    ):
        with pytest.raises(error, match=text):
            function(*given, **options)


def test_numbers_of_every_kind_are_one_option() -> None:
    expected, _ = parse(ATTENTION_KL, {"teacher_scale": 0.5, "causal": True, "q_offset": 3})
    kinds: list[Any] = [np.float32(0.5), np.float64(0.5), np.array(0.5, np.float16)]
    for module in ("torch", "jax.numpy"):
        library = pytest.importorskip(module)
        kinds.append(getattr(library, "tensor", library.asarray)(0.5))
    for scale in kinds:
        chosen, _ = parse(ATTENTION_KL, {"teacher_scale": scale, "causal": np.bool_(True), "q_offset": np.int64(3)})
        assert chosen == expected
        assert type(chosen.teacher_scale) is float
        assert type(chosen.q_offset) is int
    assert parse(ATTENTION_KL, {"teacher_scale": 1})[0].teacher_scale == 1.0


def test_traced_scale() -> None:
    jax = pytest.importorskip("jax")
    with pytest.raises(TypeError, match=r"teacher_scale is a .*Tracer; allowed are a number known now \(not traced\)"):
        jax.jit(lambda scale: parse(ATTENTION_KL, {"teacher_scale": scale})[0].teacher_scale)(1.0)


@pytest.mark.parametrize(
    "wrt, error, text",
    [
        ("student_q", TypeError, r"wrt='student_q' is a string; write it as a tuple: wrt=\('student_q',\)"),
        ((), ValueError, r"wrt is empty; name at least one input"),
        (("student_v",), ValueError, 'wrt names \'student_v\'; allowed are "teacher_q", "teacher_k"'),
        ((["student_q"],), ValueError, r"wrt names \['student_q'\]"),
        (("student_q", "student_q"), ValueError, "names an input twice"),
        (None, TypeError, r"wrt is a NoneType; pass a tuple of argument names, such as wrt=\("),
    ],
)
def test_wrt(wrt: Any, error: Any, text: str) -> None:
    x = arrays_like()
    rows = np.zeros((2, 4, 7), np.float32)
    for function, given in (
        (functools.partial(streamkl_cupy.attention_kl_backward, teacher_lse=rows, student_lse=rows), (rows, *x)),
        (streamkl_cupy.attention_kl_value_and_grad, x),
        (streamkl_cupy.plan, x),
        (streamkl_cupy.warmup, x),
    ):
        with pytest.raises(error, match=text):
            function(*given, wrt=wrt)


def test_teacher_gradient_needs_kl() -> None:
    rows = np.zeros((2, 4, 7), np.float32)
    with pytest.raises(
        ValueError,
        match=r"wrt asks for teacher_k, whose gradient needs the row values: pass the whole .* or its kl as kl=",
    ):
        streamkl_cupy.attention_kl_backward(
            rows, *arrays_like(), teacher_lse=rows, student_lse=rows, wrt=("teacher_k",)
        )


def test_teacher_gradient_of_wide_heads_on_cuda() -> None:
    wide = views(arrays.cuda(0), teacher_q=(2, 4, 7, 576), teacher_k=(2, 2, 9, 576))
    problem = validate.to_problem(ATTENTION_KL, wide, Options())
    validate.gradients_built(problem, ("student_q",))
    with pytest.raises(
        NotImplementedError, match="head dims up to 256 on CUDA, but the teacher's is 576; built for it"
    ):
        validate.gradients_built(problem, ("teacher_k",))
    x = arrays_like(teacher_q=(2, 4, 7, 576), teacher_k=(2, 2, 9, 576))
    with pytest.raises(NotImplementedError, match="head dims up to 256 on CUDA"):
        streamkl_cupy.plan(*x, wrt=("teacher_q",), arch="sm_90")


@pytest.mark.parametrize("name", ["grad", "teacher_lse", "student_lse", "kl"])
def test_saved_rows(name: str) -> None:
    torch = pytest.importorskip("torch")
    rows = np.zeros((2, 4, 7), np.float32)
    order = ("grad", "teacher_lse", "student_lse", "kl")

    def call(odd: Any) -> None:
        given = {n: odd if n == name else rows for n in order}
        streamkl_cupy.attention_kl_backward(given.pop("grad"), *arrays_like(), **given)

    with pytest.raises(ValueError, match=rf"{name}: shape \(2, 7, 4\), .*expected \(2, 4, 7\)"):
        call(rows.reshape(2, 7, 4))
    with pytest.raises(TypeError, match=f"{name}: dtype float64, but the rows of this call are float32"):
        call(rows.astype(np.float64))
    with pytest.raises(TypeError, match=f"{name} has dtype int64"):
        call(rows.astype(int))
    with pytest.raises(TypeError, match=f"student_q is a numpy array, but {name} is a torch array"):
        call(torch.from_numpy(rows))
    with pytest.raises(TypeError, match=f"{name} is a list, not an array"):
        call(rows.tolist())
    problem = validate.to_problem(ATTENTION_KL, views(), Options())
    away = describe(name, rows)._replace(device=arrays.cuda(0))
    with pytest.raises(ValueError, match=f"student_q is on cpu, but {name} is on cuda:0"):
        validate.row_array(away, problem.row_shape, problem.stat_dtype, views().student_q)


def test_reduction() -> None:
    x = arrays_like()
    for function in (streamkl_cupy.attention_kl, streamkl_cupy.attention_kl_value_and_grad):
        with pytest.raises(ValueError, match='reduction=\'avg\' is unknown; allowed are "none", "sum", "mean"'):
            function(*x, reduction="avg")
        with pytest.raises(TypeError, match="reduction is a NoneType"):
            function(*x, reduction=None)
    with pytest.raises(ValueError, match='reduction="none" leaves no scalar to differentiate'):
        streamkl_cupy.attention_kl_value_and_grad(*x, reduction="none")


def test_row_weight() -> None:
    torch = pytest.importorskip("torch")
    x = arrays_like()
    for function in (streamkl_cupy.attention_kl, streamkl_cupy.attention_kl_value_and_grad):
        for shape in ((3,), (2, 4, 7, 1), (2, 2, 4, 7), (4, 4, 7)):
            with pytest.raises(ValueError, match=r"row_weight: shape .* does not broadcast to the rows \(2, 4, 7\)"):
                function(*x, row_weight=np.ones(shape), reduction="mean")
        with pytest.raises(TypeError, match="is a numpy array, but row_weight is a torch array"):
            function(*x, row_weight=torch.ones(7), reduction="sum")
        with pytest.raises(TypeError, match="row_weight has dtype complex128; allowed are real numbers and bool"):
            function(*x, row_weight=np.ones(7, complex), reduction="sum")
        for plain in (1.0, [1.0], np.float32(1)):
            with pytest.raises(TypeError, match=r"row_weight is a .*; pass an array"):
                function(*x, row_weight=plain, reduction="sum")


def test_row_weight_on_another_device() -> None:
    torch = pytest.importorskip("torch")
    x = [torch.zeros(S[n]) for n in INPUT_NAMES]
    away = torch.ones(7, device="meta")
    with pytest.raises(ValueError, match=r"student_q is on cpu, but row_weight is on meta; .*Move row_weight first"):
        streamkl_cupy.attention_kl_value_and_grad(*x, row_weight=away)


def test_plan_and_warmup_ask_for_shapes() -> None:
    with pytest.raises(
        TypeError, match="teacher_q is a list; allowed are arrays, and objects with a shape of integers and a dtype"
    ):
        streamkl_cupy.plan([1.0], *arrays_like()[1:])
    with pytest.raises(ValueError, match="sm_12"):
        streamkl_cupy.plan(*arrays_like(), arch="sm_12")


@pytest.mark.parametrize("function", [streamkl_cupy.plan, streamkl_cupy.warmup])
def test_op(function: Any) -> None:
    with pytest.raises(ValueError, match="op='indexer_kl' is unknown; allowed are \"attention_kl\""):
        function(*arrays_like(), op="indexer_kl")


def test_operands_are_checked_as_their_operation_says() -> None:
    """Of one whose record has one side, with three operands: the third has the keys' heads and rows, not their dim."""
    side = ("query", "q", "H", "D"), ("key", "k", "H_k", "D"), ("value", "k", "H_k", "D_v")
    specs = tuple(OperandSpec(name, "side", rows, heads, dim, 256, name == "value") for name, rows, heads, dim in side)
    op = dataclasses.replace(ATTENTION_KL, name="third", operands=specs, like="query", wrt=("query",))
    good = {"query": (2, 4, 7, 8), "key": (2, 2, 9, 8), "value": (2, 2, 9, 5)}

    def check(**shapes: tuple[int, ...]) -> Any:
        given = [describe(name, np.zeros(shape, np.float32)) for name, shape in {**good, **shapes}.items()]
        return validate._operands(op, given, "bhnd")

    assert check() == good
    for name, shape, text in [
        ("key", (2, 2, 9, 7), "key: 7 columns, but query has 8; both must share the head dim axis"),
        ("value", (2, 4, 9, 5), "value: 4 heads, but key has 2; both must share the key heads axis"),
        ("value", (2, 2, 8, 5), "value: 8 keys, but key has 9; both must share the keys axis"),
        ("value", (1, 2, 9, 5), "value: 1 batch entries, but query has 2; both must share the batch axis"),
        ("query", (2, 3, 7, 8), "key: 2 key heads do not divide the 3 query heads of query"),
    ]:
        with pytest.raises(ValueError, match=re.escape(text)):
            check(**{name: shape})
    with pytest.raises(NotImplementedError, match="value: head dim 257; built are 1 to 256 for the side"):
        check(value=(2, 2, 9, 257))

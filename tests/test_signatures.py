"""Calls that do not fit: wrong keywords, wrong numbers and wrong kinds of arguments are answered with what is meant."""

from __future__ import annotations

import importlib
import inspect
import pickle
import pydoc
import re
from typing import Any

import numpy as np
import pytest

import streamkl_cupy
from streamkl_cupy import options
from streamkl_cupy.advice import signatures
from streamkl_cupy.ops import ATTENTION_KL
from streamkl_cupy.problem import INPUT_NAMES

X = np.random.default_rng().standard_normal((4, 2, 5, 8)).astype(np.float32)
PUBLIC = {
    name: getattr(streamkl_cupy, name)
    for name in (
        "attention_kl",
        "attention_kl_forward",
        "attention_kl_backward",
        "attention_kl_value_and_grad",
        "plan",
        "warmup",
    )
}


def front(module: str) -> tuple[Any, list[Any]]:
    """The differentiable function of a framework, and inputs for it."""
    xp = pytest.importorskip({"torch": "torch", "jax": "jax.numpy"}[module])
    make = xp.from_numpy if module == "torch" else xp.asarray
    return importlib.import_module(f"streamkl_cupy.{module}").attention_kl, [make(x.copy()) for x in X]


def functions() -> list[Any]:
    return [pytest.param(lambda name=name: (PUBLIC[name], list(X)), id=name) for name in PUBLIC] + [
        pytest.param(lambda name=name: front(name), id=name) for name in ("torch", "jax")
    ]


# What people write -> what the answer must name.
WRITTEN = {
    "is_causal": r"say causal=True.*first.*q_offset=0",
    "attn_mask": r"key_mask, \(B, N\) bool, True where there is a key.*causal, window.*block_mask",
    "mask": "key_mask",
    "key_padding_mask": r"True where there is padding.*key_mask=~key_padding_mask",
    "temperature": r"teacher_scale=1 / \(T \* D_t\*\*0\.5\).*multiply the loss by T\*\*2",
    "scale": "teacher_scale and student_scale",
    "softmax_scale": "teacher_scale and student_scale",
    "window_size": r"window=\(left, right\); -1 is no limit",
    "sliding_window": r"causal=True, window=\(sliding_window - 1, 0\)",
    "query_seq_lengths": r"query_lengths, \(B,\) int32.*cu_seqlens_q",
    "key_value_seq_lengths": r"key_lengths, \(B,\) int32",
    "cu_seqlens": "cu_seqlens_q and cu_seqlens_k; one array may be given for both",
    "cu_seqlens_kv": "say cu_seqlens_k",
    "max_seqlen_q": "leave it out",
    "dropout_p": "leave it out",
    "enable_gqa": "leave it out: grouped heads are told by the shapes",
    "weights": "say row_weight",
    "qkv_format": 'layout="bnhd"',
    "value": "values have no part in it; the arrays are teacher_q",
    # typing errors
    "causl": r"is causal meant\?",
    "key_length": r"is key_lengths meant\?",
    "student_scales": r"is student_scale meant\?",
    "determinstic": r"is deterministic meant\?",
    "block_masks": r"is block_mask meant\?",
    "zzz": "there are .*block_mask, causal",
}


@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("function", functions())
def test_wrong_keywords(function: Any, written: str) -> None:
    call, x = function()
    if call.__name__ == "attention_kl_backward":
        x = [X[0, ..., 0], *x]
    text = rf"^{call.__name__}\(\) has no option '{written}': .*{WRITTEN[written]}"
    with pytest.raises(TypeError, match=text):
        call(*x, **{written: 1})
    with pytest.raises(TypeError, match=text):
        call(**dict(zip(INPUT_NAMES, x)), causal=True, **{written: 1})


def test_every_answer_names_what_exists() -> None:
    known = set().union(*(inspect.signature(f).parameters for f in PUBLIC.values()))
    for written, answer in signatures._MEANT.items():
        assert written not in known
        named = set(re.findall(r"\b([a-z_]+)(?==)", answer)) - {written}
        assert named <= known, (written, named - known)
        assert "leave it out" in answer or "not built" in answer or any(name in answer for name in known), written


def test_options_of_another_function() -> None:
    with pytest.raises(
        TypeError, match=r"attention_kl_forward\(\) has no option 'row_weight': it is one of attention_kl,"
    ):
        streamkl_cupy.attention_kl_forward(*X, row_weight=np.ones(5))
    with pytest.raises(
        TypeError, match=r"attention_kl\(\) has no option 'wrt': it is one of .*attention_kl_value_and_grad"
    ):
        streamkl_cupy.attention_kl(*X, wrt=("student_q",))


@pytest.mark.parametrize("function", functions())
def test_too_few_arrays(function: Any) -> None:
    call, x = function()
    first = ["grad"] if call.__name__ == "attention_kl_backward" else []
    x = x[:1] * len(first) + x
    hint = "comes first" if first else "not attention maps"
    for count in (2, 3):
        missing = ", ".join((*first, *INPUT_NAMES)[count : 4 + len(first)])
        with pytest.raises(TypeError, match=rf"{call.__name__}\(\) needs .*, but {count} came: {missing}.*{hint}"):
            call(*x[:count])
    with pytest.raises(TypeError, match=r"student_k.* missing"):
        call(*x[: len(first)], **dict(zip(INPUT_NAMES[:3], x[len(first) :])))


@pytest.mark.parametrize(
    "extra, text",
    [
        (True, r"Options are named: is causal=True meant\?"),
        (0.5, "Options are named: teacher_scale=0.5"),
        (X[0], "Values have no part in it, and masks are named: key_mask"),
        ("mean", "Options are named$"),
    ],
    ids=["bool", "number", "array", "word"],
)
@pytest.mark.parametrize("function", [p for p in functions() if p.id != "attention_kl_backward"])
def test_too_many_arguments(function: Any, extra: Any, text: str) -> None:
    call, x = function()
    with pytest.raises(TypeError, match=rf"{call.__name__}\(\) takes 4 arguments by position, .*but 5 came\. {text}"):
        call(*x, extra)


def test_a_text_of_ones_own_for_too_many() -> None:
    def run(arrays: Any, given: Any, **own: Any) -> Any:
        return arrays, given, own

    @signatures.public(run, too_many="Saved rows are named: saved=rows")
    def half(grad: Any, x: Any, *, causal: bool = False, saved: Any = None, wrt: Any = "x") -> Any: ...

    assert half(1, x=2, saved=3) == ((1, 2), {}, {"saved": 3, "wrt": "x"})
    assert half(x=2, grad=1, causal=True) == ((1, 2), {"causal": True}, {"saved": None, "wrt": "x"})
    with pytest.raises(
        TypeError, match=r"half\(\) takes 2 arguments by position, grad, x, but 3 came. Saved rows are named"
    ):
        half(1, 2, 3)


def test_inputs_by_name() -> None:
    named = dict(zip(INPUT_NAMES, X, strict=True))
    np.testing.assert_array_equal(streamkl_cupy.attention_kl(**named), streamkl_cupy.attention_kl(*X))
    np.testing.assert_array_equal(
        streamkl_cupy.attention_kl(X[0], X[1], student_k=X[3], student_q=X[2]), streamkl_cupy.attention_kl(*X)
    )
    with pytest.raises(TypeError, match="multiple values for argument 'teacher_q'"):
        streamkl_cupy.attention_kl(*X, teacher_q=X[0])


@pytest.mark.parametrize("function", functions())
def test_functions_stay_what_they_are(function: Any) -> None:
    call, _ = function()
    assert pickle.loads(pickle.dumps(call)) is call
    parameters = inspect.signature(call).parameters
    assert list(parameters) == list(inspect.signature(call.__wrapped__).parameters)
    assert "student_k" in parameters
    assert parameters["causal"].default is False
    text = pydoc.plain(pydoc.render_doc(call))
    assert max(map(len, text.splitlines())) <= 120
    assert "'Any'" not in text
    assert "    causal: bool = False,\n" in text


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer does
@pytest.mark.parametrize("whose", ["streamkl_cupy", "streamkl_cupy.torch"])
@pytest.mark.parametrize("direct", [True, False])
def test_torch_compile_traces_it(whose: str, direct: bool) -> None:
    torch = pytest.importorskip("torch")
    function = importlib.import_module(whose).attention_kl
    x = [torch.from_numpy(a.copy()) for a in X]
    x[2].requires_grad_()

    def loss(*inputs: Any) -> Any:
        return function(*inputs, causal=True, student_scale=0.3, reduction="mean") * 2

    value = torch.compile(function if direct else loss, backend="aot_eager", fullgraph=True)(*x)
    torch.testing.assert_close(value, function(*x) if direct else loss(*x))


# The options of signatures are those of the table


def shared_options(function: Any) -> dict[str, Any]:
    """Those parameters that are no arrays and not this function's alone, with their defaults."""
    parameters = list(inspect.signature(function).parameters.values())
    return {
        p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.name in options.SHARED["attention_kl"]
    }


@pytest.mark.parametrize("function", functions())
def test_every_function_has_every_option(function: Any) -> None:
    call, _ = function()
    given = shared_options(call)
    shared = [name for name, row in options.TABLES["attention_kl"].items() if row.shared]
    assert given == {**dict.fromkeys(options.MASK_ARRAYS), **{x: options.Options._field_defaults[x] for x in shared}}
    assert [name for name in given if name in options.TABLES["attention_kl"]] == shared
    assert [name for name in given if name in options.MASK_ARRAYS] == list(options.MASK_ARRAYS)


@pytest.mark.parametrize("function", functions())
def test_what_a_default_says_is_what_leaving_it_out_means(function: Any) -> None:
    call, _ = function()
    parsed, masks = options.parse(ATTENTION_KL, shared_options(call))
    assert parsed == options.Options()
    assert masks is options.NO_MASKS


def of_checker(name: str) -> dict[str, str]:
    """Fields of a class that is there for type checkers alone, with those of its base."""
    found = re.search(rf"class {name}\((\w+), total=False\):\n(.*?)\n\n\n?    ?(?=class|\S)", SOURCE, re.S)
    assert found, name
    base = {} if found[1] == "TypedDict" else of_checker(found[1])
    return base | dict(re.findall(r"^        (\w+): (.*)$", found[2], re.M))


SOURCE = inspect.getsource(options)


def test_the_checker_sees_every_option() -> None:
    """Functions with several signatures share their options by name, in the words of the one that people read."""
    seen = of_checker("Shared")
    for name in ("attention_kl", "attention_kl_forward", "attention_kl_value_and_grad"):
        parameters = inspect.signature(PUBLIC[name]).parameters
        assert seen == {option: parameters[option].annotation for option in shared_options(PUBLIC[name])}


def test_torch_operators_take_every_option() -> None:
    torch = pytest.importorskip("torch")
    importlib.import_module("streamkl_cupy.torch")
    for operator, first in (("attention_kl_forward", 0), ("attention_kl_backward", 6)):
        schema = getattr(torch.ops.streamkl, operator).default._schema
        names = [argument.name for argument in schema.arguments][first:]
        assert names == [*INPUT_NAMES, *options.MASK_ARRAYS, *options.TABLES["attention_kl"], "numbers"]


def test_documentation_has_every_option() -> None:
    for function in PUBLIC.values():
        for name in shared_options(function):
            assert re.search(rf"^ +{name}: \S", inspect.getdoc(function) or "", re.M), (function.__name__, name)


# Kinds of arguments, and where another one is meant


def test_arrays_of_another_framework() -> None:
    torch = pytest.importorskip("torch")
    jnp = pytest.importorskip("jax.numpy")
    numbers = list(X)
    tensors = [torch.from_numpy(x.copy()) for x in X]
    traced = [jnp.asarray(x) for x in X]
    for x, text in (
        (
            [*numbers[:2], *tensors[2:]],
            r"teacher_q is a numpy\.ndarray; .*Make one: torch\.as_tensor\(teacher_q, device=",
        ),
        ([*traced[:2], *tensors[2:]], r"teacher_q is a .*; .*Make one: torch\.from_dlpack\(teacher_q\)"),
        (
            [*tensors[:2], *numbers[2:]],
            r"Convert one of them: torch\.as_tensor\(student_q, device=|student_q\.numpy|teacher",
        ),
        ([*numbers[:2], *traced[2:]], r"Convert one of them: jax\.numpy\.asarray\(teacher_q\)"),
        ([*traced[:2], *numbers[2:]], r"Convert one of them: (np|jax\.numpy)\.asarray\(student_q\)"),
    ):
        with pytest.raises(TypeError, match=text):
            streamkl_cupy.attention_kl(*x)


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("at, name", list(enumerate(INPUT_NAMES)))
def test_none_for_an_input(framework: str, at: int, name: str) -> None:
    x = list(X) if framework == "numpy" else front(framework)[1]
    x[at] = None
    with pytest.raises(TypeError, match=f"{name} is None, not an array; it is needed in every call"):
        streamkl_cupy.attention_kl(*x)


@pytest.mark.parametrize(
    "framework, way",
    [
        ("numpy", r"np\.asarray\(row_weight\)"),
        ("torch", r"torch\.as_tensor\(row_weight, device=student_q\.device\)"),
        ("jax", r"jax\.numpy\.asarray\(row_weight\)"),
    ],
)
def test_a_list_of_weights(framework: str, way: str) -> None:
    x = list(X) if framework == "numpy" else front(framework)[1]
    with pytest.raises(TypeError, match=rf"row_weight is a list; .*{way}"):
        streamkl_cupy.attention_kl(*x, row_weight=[1.0] * 5, reduction="sum")


def test_scales_of_other_kinds() -> None:
    with pytest.raises(TypeError, match=r"teacher_scale is a str; .*float\(teacher_scale\)"):
        streamkl_cupy.attention_kl(*X, teacher_scale="0.5")
    for scales in ([0.5, 0.5], np.ones((2, 1, 1))):
        with pytest.raises(TypeError, match=r"student_scale is a .*multiply these by them"):
            streamkl_cupy.attention_kl(*X, student_scale=scales)


@pytest.mark.parametrize("transform", ["jvp", "jacfwd", "hessian"])
def test_forward_mode_of_jax(transform: str) -> None:
    """Ours where the transform sees the call; JAX's own words where a jit or checkpoint of the caller is between."""
    jax = pytest.importorskip("jax")
    _, x = front("jax")

    def loss(q: Any) -> Any:
        return streamkl_cupy.attention_kl(*x[:2], q, x[3], reduction="sum")

    def run(f: Any) -> Any:
        return jax.jvp(f, (x[2],), (x[2],)) if transform == "jvp" else getattr(jax, transform)(f)(x[2])

    with pytest.raises(TypeError, match=r"attention_kl has reverse-mode gradients only.*Use jax\.grad, vjp or jacrev"):
        run(loss)
    for between in (jax.jit, jax.checkpoint):
        with pytest.raises(TypeError, match="custom_vjp"):
            run(between(loss))

"""Keys that share a large part, which changes no probability: values and query gradients as good as without it.

Offsets are in units of the keys' spread. Real rows are those of a language model whose values came out worst.
"""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest
from conftest import EXAMPLES
from numpy.typing import NDArray

import streamkl_cupy
from streamkl_cupy import patterns
from streamkl_cupy.numpy_backend.block import SAMPLED_KEYS, common_part
from streamkl_cupy.problem import INPUT_NAMES
from streamkl_cupy.testing import reference
from streamkl_cupy.testing.compare import GRADIENT_BOUND, check_lse, check_rows
from streamkl_cupy.testing.problems import Case, make, upstream

Array = NDArray[Any]
DTYPES = ["bfloat16", "float16", "float32"]
OFFSETS = [3, 10, 30, 100]


def shifted(rng: Any, case: Case, offset: float) -> Case:
    """The case with a vector of that length per element, another one for each head, added to the keys of both sides."""
    arrays = [x.copy() for x in case.arrays]
    for i in (1, 3):
        axis = 1 if case.options.get("layout") == "bnhd" or "cu_seqlens_q" in case.options else 2
        shape = [1 if n == axis - (4 - arrays[i].ndim) else size for n, size in enumerate(arrays[i].shape)]
        vector = rng.standard_normal(shape)
        vector *= offset / np.sqrt(np.square(vector).mean(axis=-1, keepdims=True))
        arrays[i] = reference.rounded(arrays[i] + vector, case.dtype_of_inputs[i])
    a, b, c, d = arrays
    return case._replace(arrays=(a, b, c, d))


def run(core: Any, case: Case, grad: Array) -> tuple[Any, dict[str, Array]]:
    """Rows and query gradients of a case in poisoned memory."""
    inputs = core.arrays(case)
    core.poison(inputs)
    rows = streamkl_cupy.attention_kl_forward(*inputs, **core.options(case))
    saved = {"teacher_lse": rows.teacher_lse, "student_lse": rows.student_lse, "kl": rows.kl}
    upstream_rows = core.array(grad, core.dtype(rows.kl))
    grads = streamkl_cupy.attention_kl_backward(upstream_rows, *inputs, **saved, wrt=INPUT_NAMES, **core.options(case))
    return rows, {name: core.numpy(getattr(grads, name)) for name in ("teacher_q", "student_q")}


def check_values(core: Any, case: Case, kl: Any, expected: reference.Rows, left: Array) -> None:
    """Rounded products of the common part are no excuse, those of what is `left` of the keys are.

    But on a GPU keys of 16 bits are taken as they are.
    """
    if core.device == "cuda" and set(case.dtypes) != {"float32"}:
        check_rows("kl", core.numpy(kl), expected, unit=2.0**-24)
    else:
        check_rows("kl", core.numpy(kl), expected._replace(condition=left))


def judge(core: Any, case: Case, grad: Array, offset: float) -> None:
    """Hold values, log-sum-exps and query gradients to what docs/accuracy.md says of a common part of that size."""
    expected = reference.forward(*case.arrays, **case.options)
    wanted = reference.backward(grad, *case.arrays, **case.options).value
    rows, grads = run(core, case, grad)
    check_values(core, case, rows.kl, expected, 0 * expected.condition)
    for name in ("teacher_lse", "student_lse"):
        check_lse(name, core.numpy(getattr(rows, name)), getattr(expected, name), expected.largest)
    for i, (name, x) in enumerate(grads.items()):
        dtype = case.dtypes[i]
        bound = GRADIENT_BOUND[dtype] * (max(1, offset / 5) if dtype == "float32" else np.hypot(1, offset))
        e = getattr(wanted, name)
        error = float(np.linalg.norm(x - e) / np.linalg.norm(e))
        assert error < bound, f"{name}: relative L2 error {error:.3g}, allowed {bound:.3g}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("D", [40, 64, 128])
def test_a_common_part_of_the_keys(core: Any, rng: Any, dtype: str, offset: float, D: int) -> None:
    for causal in (False, True):
        shape: dict[str, Any] = {"B": 2, "H": 4, "M": 150, "N": 400, "D_t": D, "teacher_key_heads": 2}
        case = make(**shape, dtypes=dtype, seed=int(rng.integers(2**31)), causal=causal)
        judge(core, shifted(rng, case, offset), upstream(rng, (2, 4, 150)), offset)


def masks(rng: Any, name: str, B: int, H: int, M: int, N: int) -> dict[str, Any]:
    """Options of a mask by name; each row sees some keys."""
    if name == "lengths":
        return {"key_lengths": rng.integers(N // 2, N, B).astype(np.int32)}
    if name == "keys":
        return {"key_mask": rng.random((B, N)) < 0.4, "causal": False}
    if name == "window":
        return {"window": (40, 11)}
    if name == "blocks":
        return {
            "block_mask": patterns.local(64, queries=M, keys=N, causal=False) | patterns.sinks(16, queries=M, keys=N)
        }
    assert name == "packed"
    return {
        "cu_seqlens_q": np.array([0, M // 3, M // 3, M], np.int32),
        "cu_seqlens_k": np.array([0, N // 2, N // 2 + 3, N], np.int32),
    }


@pytest.mark.parametrize("offset", [10, 100])
@pytest.mark.parametrize("mask", ["lengths", "keys", "window", "blocks", "packed"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_hidden_keys_decide_nothing(core: Any, rng: Any, mask: str, offset: float, bad: float) -> None:
    """Memory that no row sees may hold anything; what all other keys share is found and taken away."""
    B, H, M, N = 1 if mask == "packed" else 2, 2, 190, 300
    case = make(B=B, H=H, M=M, N=N, D_t=64, seed=int(rng.integers(2**31)), **masks(rng, mask, B, H, M, N))
    case = shifted(rng, case, offset)
    grid = {name: x for name, x in case.options.items() if name not in ("layout", "teacher_scale", "student_scale")}
    seen = np.broadcast_to(reference.visible((B, H, M, N), grid), (B, H, M, N)).any(axis=2)
    for i in (1, 3):
        if mask != "packed":
            case.arrays[i][~seen] = bad
    judge(core, case, upstream(rng, (M, H) if mask == "packed" else (B, H, M)), offset)


@pytest.mark.parametrize("offset", [10, 100])
@pytest.mark.parametrize("M", [1, 20])
def test_few_rows_against_many_keys(core: Any, rng: Any, M: int, offset: float) -> None:
    """On a GPU the keys are split over blocks, whose states are merged."""
    for options in ({}, {"key_mask": rng.random((1, 9000)) < 0.3}, {"causal": True, "q_offset": 5000}):
        case = make(H=2, M=M, N=9000, D_t=64, seed=int(rng.integers(2**31)), **options)
        judge(core, shifted(rng, case, offset), np.ones((1, 2, M), np.float32), offset)


@pytest.mark.parametrize("types", [("float32", "bfloat16"), ("float16", "float32")], ids="-".join)
def test_one_side_of_another_type(core: Any, rng: Any, types: tuple[str, str]) -> None:
    case = make(H=2, M=150, N=300, D_t=64, D_s=40, dtypes=types, seed=int(rng.integers(2**31)))
    judge(core, shifted(rng, case, 30), upstream(rng, (1, 2, 150)), 30)


@pytest.mark.parametrize("D_t, D_s", [(192, 64), (256, 256), (576, 128), (3, 5)])
def test_head_dims_at_the_ends(core: Any, rng: Any, D_t: int, D_s: int) -> None:
    case = shifted(rng, make(H=2, M=70, N=150, D_t=D_t, D_s=D_s, seed=int(rng.integers(2**31))), 30)
    expected = reference.forward(*case.arrays, **case.options)
    rows = streamkl_cupy.attention_kl_forward(*core.arrays(case), **case.options)
    check_values(core, case, rows.kl, expected, 0 * expected.condition)
    for name in ("teacher_lse", "student_lse"):
        check_lse(name, core.numpy(getattr(rows, name)), getattr(expected, name), expected.largest)


@pytest.mark.parametrize("N", [1, 2, 3, 7])
def test_few_keys(core: Any, rng: Any, N: int) -> None:
    case = shifted(rng, make(H=2, M=30, N=N, D_t=32, seed=int(rng.integers(2**31))), 30)
    rows, grads = run(core, case, np.ones((1, 2, 30), np.float32))
    expected = reference.forward(*case.arrays)
    check_values(core, case, rows.kl, expected, 0 * expected.condition)
    if N == 1:
        assert all((x == 0).all() for x in grads.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_visible_bad_keys_reach_exactly_the_rows_that_see_them(core: Any, rng: Any, dtype: str, bad: float) -> None:
    case = shifted(rng, make(H=2, M=90, N=90, D_t=32, dtypes=dtype, seed=int(rng.integers(2**31)), causal=True), 30)
    case.arrays[1][0, 1, 60, 3] = bad
    rows = streamkl_cupy.attention_kl_forward(*core.arrays(case), **case.options)
    sees = np.zeros((1, 2, 90), bool)
    sees[0, 1, 60:] = True
    for x in rows:
        np.testing.assert_array_equal(np.isnan(core.numpy(x)), sees)


@pytest.mark.parametrize("size", [1e4, 1e20])
def test_a_few_huge_keys_among_ordinary_ones(core: Any, rng: Any, size: float) -> None:
    """Keys beyond all others, the first one among them, must not become what is taken from the others."""
    case = make(H=2, M=64, N=256, D_t=32, seed=int(rng.integers(2**31)))
    for i in (1, 3):
        case.arrays[i][:, :, [0, 100, 200], :] = -size * np.sign(case.arrays[i - 1].mean(axis=2, keepdims=True))
        case.arrays[i - 1][...] = np.abs(case.arrays[i - 1]) * np.sign(case.arrays[i - 1].mean(axis=2, keepdims=True))
    # Those keys have no weight in any row.
    expected = reference.forward(
        *(np.delete(x, [0, 100, 200], axis=2) if i % 2 else x for i, x in enumerate(case.arrays))
    )
    rows = streamkl_cupy.attention_kl_forward(*core.arrays(case))
    check_rows("kl", core.numpy(rows.kl), expected)


def test_what_counts_as_common(rng: Any) -> None:
    keys = rng.standard_normal((3, SAMPLED_KEYS, 64))
    assert common_part(keys) is None
    vector = 10 * rng.standard_normal((3, 1, 64))
    found = common_part(keys + vector)
    assert found is not None
    assert np.linalg.norm(found - vector, axis=-1).max() < np.linalg.norm(keys, axis=-1).max()
    one = common_part(np.concatenate([keys[:1], keys[1:] + vector[1:]]))
    assert one is not None
    assert (one[0] == 0).all()
    assert (one[1:] != 0).all()
    for bad in (np.nan, np.inf, -np.inf, 1e30):
        some = keys + vector
        some[:, 2] = bad
        found = common_part(some)
        assert found is not None
        assert np.linalg.norm(found - vector, axis=-1).max() < 2 * np.linalg.norm(keys, axis=-1).max()
        some[:, [0, 4, 5, 7]] = bad
        with np.errstate(all="ignore"):
            found = common_part(some)
        assert found is None or np.isfinite(found).all()


def real_rows() -> dict[str, tuple[Array, list[Array]]]:
    """By layer and head: the numbers of the rows, and their queries and the keys up to the last of them, both sides."""
    with np.load(EXAMPLES / "data" / "smollm2_hard_rows.npz") as data:
        heads = sorted(name.removesuffix("_rows") for name in data if name.endswith("_rows"))
        assert json.loads(str(data["provenance"]))["model_licence"] == "Apache-2.0"
        return {h: (data[f"{h}_rows"], [data[f"{h}_{name}"] for name in INPUT_NAMES]) for h in heads}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 30, 100])
def test_the_worst_rows_of_a_language_model(core: Any, rng: Any, dtype: str, offset: float) -> None:
    """Row r sees keys 0 to r: a batch entry per row. With an offset the error must not grow with it."""
    for head, (places, arrays) in real_rows().items():
        assert re.fullmatch(r"layer\d+_head\d", head)
        q = [x[:, None, None] for x in (arrays[0], arrays[2])]
        k = [np.broadcast_to(x, (len(places), 1, *x.shape)).copy() for x in (arrays[1], arrays[3])]
        options = {"key_lengths": (places + 1).astype(np.int32)}
        a, b, c, d = (reference.rounded(x, dtype) for x in (q[0], k[0], q[1], k[1]))
        case = Case(head, (a, b, c, d), options, (dtype, dtype), False, True)
        if offset == 0:
            core.judge(case, upstream(rng, (len(places), 1, 1), "ones"))
            continue
        moved = shifted(rng, case, offset * 2.0)  # these keys have a spread of 1 to 2 per element
        expected = reference.forward(*moved.arrays, **options)
        rows = streamkl_cupy.attention_kl_forward(*core.arrays(moved), **core.options(moved))
        left = reference.forward(*case.arrays, **options).condition
        check_values(core, moved, rows.kl, expected, 2 * left)

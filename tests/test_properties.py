"""What must hold for any input: identities of the divergence, and invariances of the computation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import examples
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import streamkl_cupy
from streamkl_cupy.problem import INPUT_NAMES
from streamkl_cupy.testing import reference
from streamkl_cupy.testing.problems import Case, make

Array = NDArray[Any]

ORDINARY = ["gaussian", "realistic", "signed_scale", "near_equal", "zero_scale"]
ANY = [*ORDINARY, "rising", "falling", "crossing", "spiky"]


@pytest.fixture(scope="module", params=["numpy", pytest.param("cupy", marks=pytest.mark.gpu)])
def where(request: pytest.FixtureRequest) -> str:
    """Examples share it: hypothesis runs many under one fixture."""
    return str(request.param)


@pytest.fixture(scope="module")
def backend_of(where: str) -> Any:
    from conftest import CuPy, NumPy

    return NumPy() if where == "numpy" else CuPy()


@st.composite
def cases(draw: Any, names: list[str] = ANY, **fixed: Any) -> Case:
    """Small problems of every shape and type; `fixed` overrides."""
    heads = draw(st.sampled_from([(1, 1, 1), (2, 2, 1), (4, 2, 4), (6, 3, 2)]))
    shape = {
        "B": draw(st.integers(1, 2)),
        "H": heads[0],
        "teacher_key_heads": heads[1],
        "student_key_heads": heads[2],
        "M": draw(st.integers(1, 70)),
        "N": draw(st.integers(1, 140)),
        "D_t": draw(st.sampled_from([1, 3, 8, 16, 33, 64])),
        "D_s": draw(st.sampled_from([1, 4, 16, 32, 64])),
        "dtypes": draw(st.sampled_from(["float32", "float16", "bfloat16", ("bfloat16", "float32")])),
        "seed": draw(st.integers(0, 2**31)),
        **fixed,
    }
    causal = draw(st.booleans())
    offset = draw(st.none() | st.integers(-80, 150)) if causal else None
    return make(draw(st.sampled_from(names)), **shape, causal=causal, q_offset=offset)


def forward(backend: Any, case: Case, arrays: Any = None) -> tuple[Array, Array, Array]:
    rows = streamkl_cupy.attention_kl_forward(*(backend.arrays(case) if arrays is None else arrays), **case.options)
    kl, teacher_lse, student_lse = (backend.numpy(x) for x in rows)
    return kl, teacher_lse, student_lse


def gradients(backend: Any, case: Case, grad: Array, wrt: tuple[str, ...] = INPUT_NAMES) -> list[Array | None]:
    arrays = backend.arrays(case)
    rows = streamkl_cupy.attention_kl_forward(*arrays, **case.options)
    g = backend.array(grad, "float32")
    found = streamkl_cupy.attention_kl_backward(g, *arrays, saved=rows, wrt=wrt, **case.options)
    return [None if x is None else backend.numpy(x) for x in found]


def slack(case: Case) -> Array:
    """How far apart two float32 results of the same row may be.

    What is taken from all keys as their common part depends on where they lie. In rows that rise over many nats it may
    be far from the keys that count, whose logits then are rounded as the largest one is.
    """
    rows = reference.forward(*case.arrays, **case.options)
    bound: Array = 4e-6 * (1 + rows.kl) + 2.0**-20 * rows.condition
    return bound + 2.0**-20 * rows.largest if case.hard else bound


@examples(25)
@given(case=cases())
def test_equal_distributions_have_no_divergence(backend_of: Any, case: Case) -> None:
    q, k = case.arrays[:2]
    scale = case.options.get("teacher_scale")
    options = {**case.options, "student_scale": scale, "teacher_scale": scale}
    same = case._replace(arrays=(q, k, q, k), options=options, dtypes=(case.dtypes[0],) * 2)
    kl, teacher_lse, student_lse = forward(backend_of, same)
    np.testing.assert_allclose(kl, 0, atol=1e-6)
    np.testing.assert_allclose(teacher_lse, student_lse, rtol=1e-6, atol=1e-6)


@examples(25)
@given(case=cases())
def test_never_negative(backend_of: Any, case: Case) -> None:
    kl, teacher_lse, student_lse = forward(backend_of, case)
    size = np.maximum(np.abs(teacher_lse), np.abs(student_lse))
    assert (kl >= -1e-6 * (1 + np.where(np.isfinite(size), size, 0))).all()
    assert ((kl == 0) | np.isfinite(teacher_lse)).all()


@examples(15)
@given(case=cases(["gaussian"], M=40, N=60, D_t=16, D_s=16))
def test_direction_matters(backend_of: Any, case: Case) -> None:
    tq, tk, sq, sk = case.arrays
    dtypes = case.dtypes[::-1]
    there = forward(backend_of, case)[0]
    back = forward(backend_of, case._replace(arrays=(sq, sk, tq, tk), dtypes=dtypes))[0]
    several = np.isfinite(there) & (there > 1e-3)
    assert not several.any() or np.abs(there - back)[several].max() > 1e-4


@examples(25)
@given(case=cases(ORDINARY, dtypes="float32"), shifts=st.tuples(st.integers(-16, 16), st.integers(-16, 16)))
def test_constant_on_all_logits_of_a_row_changes_nothing(backend_of: Any, case: Case, shifts: tuple[int, int]) -> None:
    """A feature that is constant over the keys shifts every logit of a row alike: KL stays, each LSE moves by it."""
    arrays = []
    for i, x in enumerate(case.arrays):
        extra = np.full((*x.shape[:-1], 1), 1.0 if i % 2 else shifts[i // 2], x.dtype)
        arrays.append(np.concatenate([x, extra], axis=-1))
    scales = {}
    for side, x in (("teacher", case.arrays[0]), ("student", case.arrays[2])):
        given_scale = case.options.get(f"{side}_scale")
        scales[f"{side}_scale"] = x.shape[-1] ** -0.5 if given_scale is None else given_scale
    options = {**case.options, **scales}
    kl, *lse = forward(backend_of, case._replace(options=options))
    shifted = case._replace(arrays=tuple(arrays), options=options)
    kl_shifted, *lse_shifted = forward(backend_of, shifted)
    assert (np.abs(kl_shifted - kl) <= 2 * slack(shifted)).all()
    for a, b, shift, scale in zip(lse_shifted, lse, shifts, scales.values(), strict=True):
        np.testing.assert_allclose(a, b + shift * scale, rtol=3e-6, atol=3e-5)


@examples(25)
@given(case=cases(), seed=st.integers(0, 2**31))
def test_order_of_keys_does_not_matter(backend_of: Any, case: Case, seed: int) -> None:
    tq, tk, sq, sk = case.arrays
    order = np.random.default_rng(seed).permutation(tk.shape[2])
    case = case._replace(options={**case.options, "causal": False, "q_offset": None})
    permuted = case._replace(arrays=(tq, tk[:, :, order], sq, sk[:, :, order]))
    assert (np.abs(forward(backend_of, case)[0] - forward(backend_of, permuted)[0]) <= slack(case)).all()


@examples(25)
@given(case=cases(), cut=st.floats(0, 1))
def test_key_axis_splits_and_merges(backend_of: Any, case: Case, cut: float) -> None:
    """Two parts' rows merge exactly by their log-sum-exps: each part weighs P's share of mass in it.

    KL = sum_i w_i (KL_i + log w_i - log v_i) with w, v the parts' shares of the teacher's and the student's mass.
    """
    tq, tk, sq, sk = case.arrays
    keys = tk.shape[2]
    at = round(cut * keys)
    offset = case.options["q_offset"]
    offset = keys - tq.shape[2] if offset is None else offset
    parts = []
    for start, stop in ((0, at), (at, keys)):
        part = case._replace(arrays=(tq, tk[:, :, start:stop], sq, sk[:, :, start:stop]))
        if case.options["causal"]:
            part = part._replace(options={**case.options, "q_offset": offset - start})
        parts.append(forward(backend_of, part))
    kl, teacher_lse, student_lse = forward(backend_of, case)
    kls, lse_t, lse_s = (np.stack(x) for x in zip(*parts, strict=True))
    whole_t, whole_s = (np.logaddexp.reduce(x, axis=0) for x in (lse_t, lse_s))
    seen = np.isfinite(whole_t)
    np.testing.assert_array_equal(np.isfinite(teacher_lse), seen)
    np.testing.assert_allclose(teacher_lse[seen], whole_t[seen], rtol=3e-6, atol=3e-5)
    np.testing.assert_allclose(student_lse[seen], whole_s[seen], rtol=3e-6, atol=3e-5)
    # A part without keys has share 0 on both sides and takes no part.
    holds = np.isfinite(lse_t)
    log_w, log_v = (
        np.subtract(x, y, where=holds, out=np.zeros(x.shape)) for x, y in ((lse_t, whole_t), (lse_s, whole_s))
    )
    terms = np.where(holds, np.exp(log_w) * (kls + log_w - log_v), 0)
    size = np.maximum(np.abs(np.where(seen, whole_t, 0)), np.abs(np.where(seen, whole_s, 0)))
    # The parts' log-sum-exps were rounded to float32, and KL multiplies the error of the shares.
    allowed = 2 * slack(case) + 1e-6 * (1 + size) * (1 + np.abs(kl))
    assert (np.abs(np.where(seen, terms.sum(axis=0), 0) - kl) <= allowed).all()


@examples(25)
@given(case=cases(), which=st.sets(st.integers(0, 3), min_size=1), step=st.integers(2, 3))
def test_views_equal_copies(backend_of: Any, case: Case, which: set[int], step: int) -> None:
    arrays = list(backend_of.arrays(case))
    for i in which:
        x = case.arrays[i]
        wide = np.full((*x.shape[:2], x.shape[2] * step, x.shape[3] + 1), np.nan)
        wide[:, :, ::step, 1:] = x
        arrays[i] = backend_of.array(wide, case.dtype_of_inputs[i])[:, :, ::step, 1:]
    kl, kl_of_views = forward(backend_of, case)[0], forward(backend_of, case, arrays)[0]
    assert (np.abs(kl - kl_of_views) <= slack(case)).all()


@examples(20)
@given(case=cases(ORDINARY, dtypes="float32"))
def test_logit_gradients_of_a_row_sum_to_zero(backend_of: Any, case: Case) -> None:
    """Shifting every key by one vector adds a constant to each row's logits, so key gradients along it cancel.

    Per row: with a constant feature appended to the keys, the query gradient along it is scale x sum_j dLogit_j.
    """
    arrays = [
        np.concatenate([x, np.full((*x.shape[:-1], 1), float(i % 2), x.dtype)], axis=-1)
        for i, x in enumerate(case.arrays)
    ]
    wide = case._replace(arrays=tuple(arrays))
    kl = forward(backend_of, wide)[0]
    _, _, lse = forward(backend_of, wide)
    dq_t, _, dq_s, _ = gradients(backend_of, wide, np.ones(kl.shape))
    size = 1 + np.where(np.isfinite(lse), np.abs(lse), 0)
    assert dq_t is not None
    assert dq_s is not None
    assert (np.abs(dq_s[..., -1]) <= 4e-6 * size).all()
    assert (np.abs(dq_t[..., -1]) <= 4e-6 * size * (1 + 20 * np.maximum(kl, 0)) + 1e-5).all()


@examples(20)
@given(case=cases(), cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)))
def test_chunks_of_queries_equal_one_call(backend_of: Any, case: Case, cuts: tuple[float, float]) -> None:
    """Causal chunks by q_offset: rows and query gradients are the pieces, key gradients add up."""
    tq, tk, sq, sk = case.arrays
    rows, keys = tq.shape[2], tk.shape[2]
    offset = case.options["q_offset"]
    offset = keys - rows if offset is None else offset
    case = case._replace(options={**case.options, "causal": True, "q_offset": offset})
    grad = np.random.default_rng(rows).standard_normal(tq.shape[:3])
    whole, whole_kl = gradients(backend_of, case, grad), forward(backend_of, case)[0]
    a, b = sorted(round(cut * rows) for cut in cuts)
    pieces, kls = [], []
    for part in (slice(0, a), slice(a, b), slice(b, rows)):
        options = {**case.options, "q_offset": offset + part.start}
        chunk = case._replace(arrays=(tq[:, :, part], tk, sq[:, :, part], sk), options=options)
        pieces.append(gradients(backend_of, chunk, grad[:, :, part]))
        kls.append(forward(backend_of, chunk)[0])
    assert (np.abs(np.concatenate(kls, axis=2) - whole_kl) <= slack(case)).all()
    wanted = reference.backward(grad, *case.arrays, **case.options)
    for i, name in enumerate(INPUT_NAMES):
        parts = [piece[i] for piece in pieces]
        joined = np.concatenate(parts, axis=2) if name.endswith("_q") else sum(parts)  # type: ignore[arg-type]
        # Three roundings to 16 bits on one side, one on the other.
        unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-20}[case.dtype_of_inputs[i]]
        size, noise, rough = (np.linalg.norm(x[i]) for x in (wanted.value, wanted.noise, wanted.sensitivity))
        allowed = 4 * unit * (size + noise) + 2.0**-21 * rough + 1e-7 * np.sqrt(joined.size)
        assert np.linalg.norm(joined - whole[i]) <= allowed, name


@examples(20)
@given(case=cases(ORDINARY))
def test_reductions_are_of_the_rows(backend_of: Any, case: Case) -> None:
    kl, teacher_lse, _ = forward(backend_of, case)
    weight = np.random.default_rng(kl.size).uniform(0, 2, kl.shape).astype(np.float32)
    for reduction in ("none", "sum", "mean"):
        for w in (None, weight):
            given_weight = None if w is None else backend_of.array(w, "float32")
            value = streamkl_cupy.attention_kl(
                *backend_of.arrays(case), row_weight=given_weight, reduction=reduction, **case.options
            )
            expected = reference.reduce(kl, teacher_lse, w, reduction)
            np.testing.assert_allclose(backend_of.numpy(value), expected, rtol=2e-5, atol=1e-5)

"""The judge itself: the dense reference against closed forms, finite differences and its own other routes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from streamkl_cupy.rules.divergences import DIVERGENCES
from streamkl_cupy.testing import reference
from streamkl_cupy.testing.problems import RECIPES, make, upstream

Array = NDArray[Any]

MASKED: list[dict[str, Any]] = [{}, {"causal": True}, {"causal": True, "q_offset": -2}, {"causal": True, "q_offset": 9}]


def scores(*keys: float) -> Array:
    """Keys whose scores are these, for a query of 1 and a scale of 1 at D = 1."""
    return np.array(keys)[:, None]


ONE = np.ones((1, 1))


@pytest.mark.parametrize(
    "teacher, student, expected",
    [
        ([0, 0], [0, -200], 100 - math.log(2)),
        ([0, -300], [-300, 0], 300),
        ([math.log(0.9), math.log(0.1)], [0, 0], 0.9 * math.log(1.8) + 0.1 * math.log(0.2)),
        ([0, 0, -300], [0, 0, -300], 0),
        ([5], [-7], 0),
    ],
)
def test_closed_forms(teacher: list[float], student: list[float], expected: float) -> None:
    rows = reference.forward(ONE, scores(*teacher), ONE, scores(*student))
    assert rows.kl[0] == pytest.approx(expected, abs=1e-12)
    assert rows.teacher_lse[0] == pytest.approx(np.logaddexp.reduce(teacher), abs=1e-12)
    assert rows.student_lse[0] == pytest.approx(np.logaddexp.reduce(student), abs=1e-12)


def test_gradient_of_closed_forms() -> None:
    grads = reference.backward(np.ones(1), ONE, scores(0, 0), ONE, scores(0, -200)).value
    np.testing.assert_allclose(grads.student_q, [[100.0]])
    np.testing.assert_allclose(grads.student_k[:, 0], [0.5, -0.5])
    np.testing.assert_allclose(grads.teacher_k[:, 0], [-50, 50])


@pytest.mark.parametrize("divergence", sorted(DIVERGENCES))
@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("options", MASKED)
def test_gradients_are_finite_differences(divergence: str, layout: str, options: dict[str, Any]) -> None:
    case = make(
        "gaussian", B=2, H=4, M=3, N=5, D_t=3, D_s=2, teacher_key_heads=2, student_key_heads=1,
        dtypes="float64", layout=layout, seed=3, teacher_scale=-0.7, student_scale=0.9, **options,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    shape = (2, 4, 3) if layout == "bhnd" else (2, 3, 4)
    grad = rng.standard_normal(shape)
    grads = reference.backward(grad, *case.arrays, divergence=divergence, **case.options).value

    def loss(arrays: list[Array]) -> float:
        return float((grad * reference.forward(*arrays, divergence=divergence, **case.options).kl).sum())

    step = 1e-5
    for i, x in enumerate(case.arrays):
        direction = rng.standard_normal(x.shape)
        moved = [[y + s * direction if j == i else y for j, y in enumerate(case.arrays)] for s in (step, -step)]
        slope = (loss(moved[0]) - loss(moved[1])) / (2 * step)
        assert float((grads[i] * direction).sum()) == pytest.approx(slope, rel=1e-7, abs=1e-8)


# The definition once more, one pair at a time in extended precision: it shares no code with the reference.


def sees(options: dict[str, Any], M: int, N: int, b: int, h: int, i: int, j: int) -> bool:
    """Whether row i of a head sees key j, in the words of the README."""
    if "cu_seqlens_q" in options:
        ends = (
            zip(options["cu_seqlens_q"], options["cu_seqlens_q"][1:]),
            zip(*(options["cu_seqlens_k"][a:] for a in (0, 1))),
        )
        for (q0, q1), (k0, k1) in zip(*ends):
            if q0 <= i < q1:
                inner = {key: x for key, x in options.items() if not key.startswith("cu_")}
                return bool(k0 <= j < k1) and sees(inner, q1 - q0, k1 - k0, b, h, i - q0, j - k0)
        return False
    offset = options.get("q_offset")
    diagonal = i + (N - M if offset is None else offset)
    if options.get("causal") and j > diagonal:
        return False
    left, right = options.get("window") or (None, None)
    if left not in (None, -1) and j < diagonal - left:
        return False
    if right not in (None, -1) and j > diagonal + right:
        return False
    if "key_lengths" in options and j >= options["key_lengths"][b]:
        return False
    if "query_lengths" in options and i >= options["query_lengths"][b]:
        return False
    if "key_mask" in options and not np.atleast_2d(options["key_mask"])[b, j]:
        return False
    if "query_mask" in options and not np.atleast_2d(options["query_mask"])[b, i]:
        return False
    if "block_mask" in options:
        pattern = options["block_mask"]
        head = h if pattern.heads > 1 else 0
        row = pattern.dense()[head, i // pattern.query_block]
        return bool(row[j // pattern.key_block])
    return True


def longhand(grad: Array, arrays: tuple[Array, ...], options: dict[str, Any]) -> tuple[list[Array], list[list[Array]]]:
    """Rows as `reference.Rows` has them and gradients as `reference.Gradients`, inputs in the order (B, H, row, D)."""
    exact = [np.asarray(x, np.longdouble) for x in arrays]
    scales = [
        options.get(f"{s}_scale") or exact[i].shape[3] ** np.longdouble(-0.5)
        for s, i in (("teacher", 0), ("student", 2))
    ]
    B, H, M, _ = exact[0].shape
    N = exact[1].shape[2]
    rows = [np.zeros((B, H, M), np.longdouble) for _ in range(7)]
    rows[1:3] = [x - np.inf for x in rows[1:3]]
    sums = [[np.zeros(x.shape, np.longdouble) for x in exact] for _ in range(4)]
    for b, h, i in np.ndindex(B, H, M):
        seen = [j for j in range(N) if sees(options, M, N, b, h, i, j)]
        if not seen:
            continue
        heads = [h * x.shape[1] // H for x in exact]
        q = [exact[side][b, h, i] for side in (0, 2)]
        k = [exact[side + 1][b, heads[side + 1]][seen] for side in (0, 2)]
        logits = [c * (x @ y.T) for c, x, y in zip(scales, q, k)]
        sizes = [abs(c) * (abs(x) @ abs(y).T) for c, x, y in zip(scales, q, k)]
        lse = [x.max() + np.log(np.exp(x - x.max()).sum()) for x in logits]
        log_p, log_q = (x - total for x, total in zip(logits, lse))
        p, q_ = np.exp(log_p), np.exp(log_q)
        kl = (p * (log_p - log_q)).sum()
        terms = [p * (log_p - log_q - kl), q_ - p]
        worst = [p * (1 + abs(log_p - log_q) + abs(kl)), p + q_]
        condition = sum((abs(d) * size).sum() for d, size in zip(terms, sizes))
        entropy = -(p * log_p).sum()
        of_entropy = (abs(p * (log_p + entropy)) * sizes[0]).sum()
        for array, x in zip(rows, (kl, *lse, max(x.max() for x in sizes), condition, entropy, of_entropy)):
            array[b, h, i] = x
        for n, side in enumerate((0, 2)):
            d, size = (grad[b, h, i] * scales[n] * x for x in (terms[n], worst[n]))
            rough = abs(size) * (1 + sizes[0] + sizes[1])
            for into, x, power in zip(sums, (d, abs(size), d**2, rough), (None, 1, 2, 1)):
                operands = [y if power is None else abs(y) ** power for y in (q[n], k[n])]
                into[side][b, h, i] = x @ operands[1]
                for j, value in zip(seen, x):
                    into[side + 1][b, heads[side + 1], j] += value * operands[0]
    sums[2] = [np.sqrt(x) for x in sums[2]]
    return rows, sums


def some_blocks(heads: int, rng: np.random.Generator) -> Any:
    """All that the reference asks of a pattern, with blocks smaller than a pattern may have."""
    blocks = rng.random((heads, 4, 3)) < 0.5
    return SimpleNamespace(heads=heads, query_block=2, key_block=3, dense=lambda: blocks)


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "q_offset": -2},
        {"window": (3, 1)},
        {"window": (2, None), "causal": True, "q_offset": 4},
        {"window": (-1, 0), "q_offset": 1},
        {"window": (0, -1)},
        {"key_lengths": [9, 4]},
        {"key_mask": "random", "causal": True},
        {"query_mask": "random", "window": (2, 3)},
        {"block_mask": 1},
        {"block_mask": 4, "causal": True, "key_lengths": [2, 8], "query_lengths": [7, 3]},
        {"cu_seqlens_q": [0, 3, 3, 6], "cu_seqlens_k": [1, 3, 5, 9]},
        {"cu_seqlens_q": [1, 4, 7], "cu_seqlens_k": [0, 5, 8], "causal": True},
        {"cu_seqlens_q": [0, 4, 7], "cu_seqlens_k": [0, 5, 9], "window": (1, 1), "q_offset": 1},
    ],
    ids=str,
)
def test_reference_is_the_definition_one_pair_at_a_time(
    options: dict[str, Any], layout: str, rng: np.random.Generator
) -> None:
    packed = "cu_seqlens_q" in options
    B = 1 if packed else 2
    given: dict[str, Any] = {"teacher_scale": -0.7} if rng.random() < 0.5 else {"student_scale": 1.3}
    for name, x in options.items():
        if x == "random":
            x = rng.random((B, 9 if name == "key_mask" else 7)) < 0.6
        given[name] = some_blocks(x, rng) if name == "block_mask" else np.array(x) if isinstance(x, list) else x
    case = make(
        "gaussian", B=B, H=4, M=7, N=9, D_t=3, D_s=2, teacher_key_heads=2, student_key_heads=1,
        dtypes="float64", layout=layout, seed=int(rng.integers(1 << 30)), **given,
    )  # fmt: skip
    swap = packed or layout == "bnhd"

    def canonical(x: Array) -> Array:
        x = x[None] if packed else x
        return x.swapaxes(1, 2) if swap else x

    grad = rng.standard_normal((B, 4, 7))
    rows, sums = longhand(grad, tuple(canonical(x) for x in case.arrays), given)
    found = reference.forward(*case.arrays, **case.options)
    for name, a, e in zip(found._fields, found, rows, strict=True):
        np.testing.assert_allclose(canonical(a), e.astype(float), rtol=1e-12, atol=1e-13, err_msg=name)
    callers = grad.swapaxes(1, 2) if swap else grad
    gradients = reference.backward(callers[0] if packed else callers, *case.arrays, **case.options)
    for field, fours in zip(gradients._fields, sums, strict=True):
        for name, a, e in zip(reference.Grads._fields, getattr(gradients, field), fours, strict=True):
            np.testing.assert_allclose(canonical(a), e.astype(float), rtol=1e-11, atol=1e-13, err_msg=f"{field} {name}")


def evaluated(entry: Any, p: Array, q: Array) -> Any:
    """The formula of a divergence, of numbers at their defaults; after a comma it says what M is."""
    names: dict[str, Any] = {"P": p, "Q": q, "log": np.log, "sqrt": np.sqrt, "sum": np.sum}
    names |= {name: parameter.default for name, parameter in entry.parameters.items()}
    value, _, mixture = entry.formula.partition(", M = ")
    if mixture:
        names["M"] = eval(mixture, names)
    return eval(value, names)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_a_divergence_is_what_its_formula_says(divergence: str, rng: np.random.Generator) -> None:
    case = make("gaussian", M=6, N=9, D_t=3, dtypes="float64", seed=int(rng.integers(2**31)), student_scale=2.0)
    log_p, log_q = (
        c * q @ k.T - np.log(np.exp(c * q @ k.T).sum(axis=-1, keepdims=True))
        for c, q, k in zip((3**-0.5, 2.0), (x[0, 0] for x in case.arrays[::2]), (x[0, 0] for x in case.arrays[1::2]))
    )
    found = reference.forward(*case.arrays, divergence=divergence, **case.options).kl
    expected = [evaluated(DIVERGENCES[divergence], p, q) for p, q in zip(np.exp(log_p), np.exp(log_q))]
    np.testing.assert_allclose(found[0, 0], expected, rtol=1e-12)


def test_causal_is_aligned_at_the_end() -> None:
    seen = reference.visible((1, 1, 3, 2), {"causal": True})
    assert seen[0, 0].tolist() == [[False, False], [True, False], [True, True]]


def test_empty_rows_and_invisible_memory() -> None:
    q, k = np.full((3, 1), np.nan), np.full((4, 1), np.nan)
    q[1:], k[:2] = 1, [[0], [math.log(3)]]
    options: dict[str, Any] = {"causal": True, "q_offset": -1, "teacher_scale": 1.0, "student_scale": 1.0}
    student_k = np.where(np.isnan(k), k, 0)
    rows = reference.forward(q, k, q, student_k, **options)
    np.testing.assert_allclose(rows.kl, [0, 0, 0.75 * math.log(1.5) + 0.25 * math.log(0.5)], atol=1e-15)
    assert rows.teacher_lse[0] == -np.inf
    grads = reference.backward(np.array([np.nan, 1, 1]), q, k, q, student_k, **options).value
    np.testing.assert_allclose(grads.student_k[:, 0], [0.25, -0.25, 0, 0], atol=1e-15)
    assert grads.student_q[0] == 0
    assert all(np.isfinite(x).all() for x in grads)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("which", range(4))
def test_visible_nan_reaches_its_rows_and_only_those(bad: float, which: int) -> None:
    case = make("gaussian", M=5, N=5, D_t=3, dtypes="float64", causal=True)
    case.arrays[which][0, 0, 3, 1] = bad
    rows = reference.forward(*case.arrays, **case.options)
    expected = [False, False, False, True, which % 2 == 1]
    assert np.isnan(rows.kl[0, 0]).tolist() == expected
    grads = reference.backward(np.ones((1, 1, 5)), *case.arrays, **case.options).value
    # The rows that see it and the keys that these see, of either side, for its KL is in both.
    keys = [True] * 4 + [which % 2 == 1]
    for name, x in zip(grads._fields, grads, strict=True):
        reached = np.array(expected if name.endswith("_q") else keys)
        assert np.isnan(x[0, 0, reached]).all(), name
        assert np.isfinite(x[0, 0, ~reached]).all(), name


def test_reductions() -> None:
    # Rows of two "ranks": [0.4] and [0.1, 0.1, 0.1]; the mean of means would be 0.25.
    kl, lse = np.array([0.4, 0.1, 0.1, 0.1, 7.0]), np.array([0, 0, 0, 0, -np.inf])
    assert reference.reduce(kl, lse, None, "mean") == pytest.approx(0.175)
    assert reference.reduce(kl, lse, None, "sum") == pytest.approx(0.7)
    assert reference.reduce(kl, lse, [2, 0, 1, 0.5, np.nan], "mean") == pytest.approx(0.95 / 3.5)
    assert reference.reduce(kl, lse, 0, "mean") == 0
    assert reference.reduce(kl, lse, 2, "none").tolist() == pytest.approx([0.8, 0.2, 0.2, 0.2, 0])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rounding_is_to_nearest_even(dtype: str, rng: np.random.Generator) -> None:
    types: dict[str, Any] = {"float32": np.float32, "float16": np.float16}
    if dtype == "bfloat16":
        types[dtype] = pytest.importorskip("ml_dtypes").bfloat16
    x = np.concatenate([rng.standard_normal(2000) * 10.0 ** rng.integers(-6, 5, 2000), [1 + 2**-8, 1 + 3 * 2**-8]])
    x = np.concatenate([x, [0, np.inf, -np.inf, np.nan, 1e-40]]).astype(np.float32)
    np.testing.assert_array_equal(reference.rounded(x, dtype), x.astype(types[dtype]).astype(np.float32))


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_problems_are_seeded_exact_and_what_they_say(name: str) -> None:
    shape: dict[str, Any] = {"B": 2, "H": 4, "M": 33, "N": 65, "D_t": 16, "D_s": 8, "student_key_heads": 2}
    case = make(name, **shape, dtypes=("bfloat16", "float16"), seed=5, causal=True)
    again = make(name, **shape, dtypes=("bfloat16", "float16"), seed=5, causal=True)
    assert all(np.array_equal(a, b) for a, b in zip(case.arrays, again.arrays, strict=True))
    assert [x.shape for x in case.arrays] == [(2, 4, 33, 16), (2, 4, 65, 16), (2, 4, 33, 8), (2, 2, 65, 8)]
    for x, dtype in zip(case.arrays, case.dtype_of_inputs, strict=True):
        assert np.array_equal(reference.rounded(x, dtype), x)
    rows = reference.forward(*case.arrays, **case.options)
    assert np.isfinite(rows.kl).all()
    assert rows.kl.max() > 1e-7


def test_problems_are_as_hard_as_they_claim() -> None:
    shape: dict[str, Any] = {"M": 50, "N": 400, "D_t": 32, "dtypes": "float64"}
    rows = {name: reference.forward(*make(name, **shape).arrays, **make(name, **shape).options) for name in RECIPES}
    assert rows["near_equal"].kl.max() < 1e-4
    assert rows["huge"].largest.max() > 8e3
    assert np.median(rows["spiky"].kl) > 20
    assert rows["crossing"].kl.min() > 10
    assert rows["zero_scale"].student_lse == pytest.approx(math.log(400))


def test_upstream_kinds() -> None:
    rng = np.random.default_rng(0)
    wild = upstream(rng, (400,), "wild")
    assert (wild == 0).sum() == 80
    assert np.abs(wild).max() > 1e3
    assert 0 < np.abs(wild[wild != 0]).min() < 1e-5
    assert (upstream(rng, (5,), "ones") == 1).all()
    assert (upstream(rng, (400,)) < 0).any()


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("axes", [2, 3])
def test_fewer_axes_are_axes_of_one(layout: str, axes: int, rng: np.random.Generator) -> None:
    case = make("gaussian", H=1 if axes == 2 else 3, M=4, N=5, D_t=3, layout=layout, causal=True, dtypes="float64")
    fewer = tuple(x.reshape([n for n in x.shape if n != 1] if axes == 2 else x.shape[1:]) for x in case.arrays)
    assert {x.ndim for x in fewer} == {axes}
    whole, rows = (reference.forward(*x, **case.options) for x in (case.arrays, fewer))
    grad = rng.standard_normal(whole.kl.shape)
    expected = [*whole, *reference.backward(grad, *case.arrays, **case.options).value]
    found = [*rows, *reference.backward(grad.reshape(rows.kl.shape), *fewer, **case.options).value]
    for a, e, n in zip(found, expected, len(rows) * [axes - 1] + 4 * [axes], strict=True):
        assert a.ndim == n
        np.testing.assert_array_equal(a.ravel(), e.ravel())


@pytest.mark.parametrize("options", [*MASKED, {"layout": "bnhd", "key_lengths": np.array([0, 7])}])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float16"), ("float16", "bfloat16")])
@pytest.mark.parametrize("scale", [None, 60.0])
def test_plain_computation_is_near(
    options: dict[str, Any], dtypes: tuple[str, str], scale: float | None, rng: np.random.Generator
) -> None:
    """By the type of each side; with large logits too, of either sign, where exponentials must be of differences."""
    given = {} if scale is None else {"teacher_scale": scale, "student_scale": -scale}
    case = make(
        "gaussian", B=2, H=2, M=20, N=30, D_t=8, student_key_heads=1, dtypes=dtypes, **given, **options,
        seed=int(rng.integers(1 << 30)),
    )  # fmt: skip
    expected = reference.forward(*case.arrays, **case.options)
    grad = upstream(rng, expected.kl.shape)
    kl, grads = reference.plain(grad, *case.arrays, dtypes=dtypes, **case.options)
    assert (np.abs(kl - expected.kl) <= 1e-5 * (1 + expected.kl) + 1e-6 * expected.condition).all()
    gradients = reference.backward(grad, *case.arrays, **case.options)
    for i, (a, dtype) in enumerate(zip(grads, case.dtype_of_inputs, strict=True)):
        np.testing.assert_array_equal(a, reference.rounded(a, dtype))
        one = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24}[dtype]
        allowed = one * (np.abs(gradients.value[i]) + 20 * gradients.noise[i]) + 4e-6 * gradients.sensitivity[i]
        allowed += (scale or 1) * (3e-6 if dtype == "float16" else 1e-7)  # of its numbers next to zero
        assert (np.abs(a - gradients.value[i]) <= allowed).all(), i
        if dtype != "float32" and scale is None:  # rounded before the second product too, which the last does not undo
            some = gradients.value[i] != 0
            assert (a != reference.rounded(gradients.value[i], dtype))[some].mean() > 0.1


@pytest.mark.parametrize("divergence", [name for name, entry in DIVERGENCES.items() if entry.zeros])
def test_a_probability_of_0_loosens_no_bound(divergence: str, rng: np.random.Generator) -> None:
    """Its logit stands for minus infinity and has no rounding; that of a tiny one has as much as it is large."""
    target = rng.random((1, 1, 5, 7)) * (rng.random(7) < 0.5)
    target[..., 0], target[..., 1] = 1, 0
    grad, q, k = (rng.standard_normal((1, 1, *shape)) for shape in ((5,), (5, 8), (7, 8)))
    found = []
    for given in (target, np.where(target == 0, 1e-30, target)):
        rows = reference.forward_to(given, q, k, divergence=divergence)
        found.append((rows.condition, *reference.backward_to(grad, given, q, k, divergence=divergence).sensitivity[2:]))
    for none, tiny in zip(*found, strict=True):
        assert (none <= tiny * (1 + 1e-6)).all()

"""Named problems are what their sentences say, by what a call makes of them: logits, rows, parts of masks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from streamkl_cupy.rules.masks.blocks import drawn_pattern
from streamkl_cupy.testing import problems
from streamkl_cupy.testing.problems import MASK_OPTIONS, RECIPES, Case, make, upstream
from streamkl_cupy.testing.reference import rounded

Array = NDArray[Any]
HARD = {"rising", "falling", "crossing", "spiky", "huge"}


def case(name: str, rng: np.random.Generator, **more: Any) -> Case:
    given = {"M": 400, "N": 500, "D_t": 64, "D_s": 48, "dtypes": "float64", "seed": int(rng.integers(1 << 30)), **more}
    return make(name, **given)


def logits(of: Case) -> tuple[Array, Array]:
    """(B, H, M, N) of the teacher and of the student, key heads repeated."""
    found = []
    for side, (q, k) in zip(("teacher", "student"), (of.arrays[:2], of.arrays[2:]), strict=True):
        scale = of.options.get(f"{side}_scale", q.shape[-1] ** -0.5)
        found.append(scale * q @ np.repeat(k, q.shape[1] // k.shape[1], 1).swapaxes(-1, -2))
    return found[0], found[1]


def test_which_problems_are_hard() -> None:
    assert {name for name, recipe in RECIPES.items() if recipe.hard} == HARD
    for name in RECIPES:
        of = make(name, dtypes=("float16", "bfloat16"))
        assert of.name == name
        assert (of.hard, of.hard_gradients) == (name in HARD, name in HARD | {"near_equal"})
        assert of.dtype_of_inputs == ("float16", "float16", "bfloat16", "bfloat16")
        for x, dtype in zip(of.arrays, of.dtype_of_inputs, strict=True):
            assert np.array_equal(rounded(x, dtype), x)
            # The values are of that type and of no narrower one.
            assert (dtype == "float16") == (not np.array_equal(rounded(x, "bfloat16"), x))


@pytest.mark.parametrize("name", ["gaussian", "signed_scale", "zero_scale"])
def test_ordinary_inputs(name: str, rng: np.random.Generator) -> None:
    of = case(name, rng, H=4, teacher_key_heads=2, student_key_heads=1)
    assert [x.shape for x in of.arrays] == [(1, 4, 400, 64), (1, 2, 500, 64), (1, 4, 400, 48), (1, 1, 500, 48)]
    for x in of.arrays:
        assert abs(x.mean()) < 6 / x.size**0.5
        assert x.std() == pytest.approx(1, abs=6 / x.size**0.5)
        assert abs(x[..., 1:] * x[..., :-1]).mean() == pytest.approx(2 / np.pi, abs=0.05)
    scales = {"signed_scale": (-0.3, 0.2), "zero_scale": (None, 0.0)}.get(name, (None, None))
    assert (of.options.get("teacher_scale"), of.options.get("student_scale")) == scales


def test_realistic_heads(rng: np.random.Generator) -> None:
    """A sink that every query leans to by a few nats, features of unlike scales, clusters."""
    of = case("realistic", rng, H=3)
    for x, q, k in zip(logits(of), of.arrays[::2], of.arrays[1::2], strict=True):
        lean = x[..., 0] - x[..., 1:].mean(axis=-1)
        assert 2 < lean.mean() < 6
        assert (lean > 0).mean() > 0.75
        spread = k[0, 0, 1:].std(axis=0)
        # Logarithms are even from -1.7 to 1.7.
        assert 8 < spread.max() / spread.min() < 60
        assert np.log(spread).std() == pytest.approx(3.4 / 12**0.5, rel=0.35)
        # What one side has more of the other has less of, with what clusters add: 0.64 to a variance of 1.
        assert (spread * q[0, 0].std(axis=0)).mean() == pytest.approx(1.64, rel=0.15)
        np.testing.assert_allclose(k[:, :, 0], np.broadcast_to(k[0, 0, 0], k[:, :, 0].shape))
        assert np.corrcoef(np.log(k[0, 0, 0]), np.log(spread))[0, 1] > 0.95
        assert k[0, 0, 0].mean() == pytest.approx(0.5 * spread.mean() / 1.64**0.5, rel=0.15)
        # Keys in 8 places: after the first ones hardly any is far from all before it.
        some = k[0, 0, 1:150] / spread
        places = some[:, None] - some
        near = (places**2).sum(axis=-1)
        same = np.sort(near[~np.eye(len(near), dtype=bool)])
        assert same[: len(same) // 20].mean() < 0.75 * same[-len(same) // 2 :].mean()


@pytest.mark.parametrize("name, rises", [("rising", (40, 40)), ("falling", (-40, -40)), ("crossing", (40, -40))])
def test_logits_that_change_along_the_keys(name: str, rises: tuple[int, int], rng: np.random.Generator) -> None:
    of = case(name, rng, M=1000, D_t=16, D_s=32)
    for x, q, rise in zip(logits(of), of.arrays[::2], rises, strict=True):
        assert q[..., 0].min() >= 1
        assert q[..., 0].mean() == pytest.approx(1 + 0.25 * (2 / np.pi) ** 0.5, abs=0.02)
        each = np.polyfit(np.arange(500), x[0, 0].T, 1)[0] * 499 / q[0, 0, :, 0]
        assert each.mean() == pytest.approx(rise, abs=0.25)
        rest = x[0, 0] - np.linspace(0, rise, 500) * q[0, 0, :, :1]
        dim = q.shape[-1]
        assert rest.std() == pytest.approx(((dim - 1) / dim) ** 0.5, rel=0.1)


@pytest.mark.parametrize("name, size, signs", [("spiky", 30, (1, 1)), ("huge", 2500, (1, -1))])
def test_large_logits(name: str, size: int, signs: tuple[int, int], rng: np.random.Generator) -> None:
    """Of one standard deviation, whatever the head dim is."""
    of = case(name, rng)
    for x, side, sign, dim in zip(logits(of), ("teacher", "student"), signs, (64, 48), strict=True):
        assert x.std() == pytest.approx(size, rel=0.05)
        assert of.options[f"{side}_scale"] == pytest.approx(sign * size / dim**0.5)
    top = [x.argmax(axis=-1) for x in logits(of)]
    assert (top[0] == top[1]).mean() < 0.05


@pytest.mark.parametrize("dims, heads", [((64, 48), (4, 2)), ((24, 32), (2, 4)), ((16, 16), (1, 4))])
def test_a_student_near_its_teacher(dims: tuple[int, int], heads: tuple[int, int], rng: np.random.Generator) -> None:
    of = case("near_equal", rng, H=4, D_t=dims[0], D_s=dims[1], teacher_key_heads=heads[0], student_key_heads=heads[1])
    teacher, student = logits(of)
    assert teacher.std() == pytest.approx(1, rel=0.1)
    # Noise of 1e-3 in queries and in keys, of all columns.
    assert (student - teacher).std() == pytest.approx(2**0.5 * 1e-3, rel=0.3)
    assert all((x[..., min(dims) :] == 0).all() for x in of.arrays[:2])


def test_what_is_not_given_is_small_and_alike() -> None:
    assert [x.shape for x in make(dtypes="float64").arrays] == [(1, 1, 64, 64)] * 4
    assert [x.shape for x in make(H=6, D_t=5, N=7).arrays] == [(1, 6, n, 5) for n in (64, 7, 64, 7)]
    swapped = make(B=2, H=3, M=4, N=5, D_t=6, layout="bnhd")
    assert [x.shape for x in swapped.arrays] == [(2, n, 3, 6) for n in (4, 5, 4, 5)]
    assert swapped.options == {"layout": "bnhd"}
    packed = make(H=3, M=4, N=5, D_t=6, cu_seqlens_q=problems.cumulative([1, 3]))
    assert [x.shape for x in packed.arrays] == [(n, 3, 6) for n in (4, 5, 4, 5)]
    assert packed.options["cu_seqlens_q"].tolist() == [0, 1, 4]
    # What is passed on goes before what the recipe has.
    assert make("huge", teacher_scale=1.5).options["teacher_scale"] == 1.5


def test_random_options_of_masks_take_every_kind(rng: np.random.Generator) -> None:
    B, M, N = 50, 21, 33
    windows = [x for _ in range(300) for x in MASK_OPTIONS["window"](rng, B, M, N)["window"]]
    assert {None, -1, 0, 1, 17, M, 10**6} < set(windows)
    assert {x for x in windows if x not in (None, -1, 10**6)} <= set(range(N + 1))
    for name, most in (("lengths", N), ("query_lengths", M)):
        ((option, drawn),) = MASK_OPTIONS[name](rng, 4000, M, N).items()
        assert option == {"lengths": "key_lengths"}.get(name, name)
        assert (drawn.dtype, set(drawn.tolist())) == (np.int32, set(range(most + 1)))
        assert (drawn == 0).mean() == pytest.approx(0.2 + 0.8 / (most + 1), abs=0.05)
    for name, count, shares in (("keys", N, (0.05, 0.5, 0.95)), ("query_mask", M, (0.05, 0.5, 0.95))):
        drawn = [next(iter(MASK_OPTIONS[name](rng, B, M, N).values())) for _ in range(40)]
        assert {x.shape for x in drawn} == {(B, count)}
        assert {min(shares, key=lambda share: abs(share - x.mean())) for x in drawn} == set(shares)
        assert all(min(abs(share - x.mean()) for share in shares) < 0.1 for x in drawn)
    counts = set()
    for _ in range(60):
        found = MASK_OPTIONS["packed"](rng, 1, M, N)
        assert list(found) == ["cu_seqlens_q", "cu_seqlens_k"]
        for ends, total in zip(found.values(), (M, N), strict=True):
            assert (ends[0], ends.dtype) == (0, np.int32)
            assert (np.diff(ends) >= 0).all()
            assert ends[-1] <= total
        assert len({len(ends) for ends in found.values()}) == 1
        counts.add(len(found["cu_seqlens_q"]) - 1)
    assert counts == set(range(1, 7))
    assert MASK_OPTIONS["causal"](rng, B, M, N) == {"causal": True}
    blocks = [MASK_OPTIONS["blocks"](rng, B, 600, 700)["block_mask"] for _ in range(40)]
    assert {(x.heads, x.queries, x.keys) for x in blocks} == {(1, 600, 700)}
    assert {x.query_block for x in blocks} == {x.key_block for x in blocks} == {16, 32, 48, 128}
    assert any(x.query_block != x.key_block for x in blocks)
    assert {min((0.1, 0.4, 0.9), key=lambda share: abs(share - x.dense().mean())) for x in blocks} == {0.1, 0.4, 0.9}
    assert drawn_pattern(rng, 3, 40, 50).heads == 3


def test_upstream_gradients(rng: np.random.Generator) -> None:
    wild = upstream(rng, (50, 100), "wild")
    assert (wild.dtype, (wild.ravel()[::5] == 0).all(), (wild == 0).sum()) == (np.float32, True, 1000)
    sizes = np.log10(np.abs(wild[wild != 0]))
    assert -6 <= sizes.min() < -5.9
    assert 3.9 < sizes.max() <= 4
    assert sizes.mean() == pytest.approx(-1, abs=0.3)
    assert (wild > 0).mean() == pytest.approx(0.4, abs=0.04)
    mixed = upstream(rng, (50, 100))
    assert (mixed == 0).sum() == 1000
    assert mixed[mixed != 0].std() == pytest.approx(1, abs=0.06)
    ones = upstream(rng, (2, 3), "ones")
    assert (ones.dtype, ones.tolist()) == (np.float32, [[1.0] * 3] * 2)

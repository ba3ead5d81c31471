"""Problems by name: seeded inputs that are ordinary, and inputs that are hard in one known way each.

    case = make("near_equal", M=1000, N=777, heads=8, teacher_key_heads=2, dtypes="bfloat16", seed=3)
    kl = attention_kl(*case.arrays, **case.options)

Arrays are float32 (float64 where asked) and hold values of the requested type exactly, so that a cast to it, by
whatever framework, changes nothing and a float64 reference sees the very same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..rules.masks import MASKS, Extents, Part
from .reference import rounded

Array = NDArray[Any]


class Case(NamedTuple):
    """Inputs and options of one call."""

    name: str
    arrays: tuple[Array, Array, Array, Array]
    options: dict[str, Any]
    dtypes: tuple[str, str]
    """Element types of the teacher's and of the student's arrays."""
    hard: bool
    """Whether the rounding of logits shows in every result: they are large, or rows nearly one-hot."""
    hard_gradients: bool
    """The same for gradients: also where teacher and student nearly cancel."""

    @property
    def dtype_of_inputs(self) -> tuple[str, str, str, str]:
        teacher, student = self.dtypes
        return teacher, teacher, student, student


class Shape(NamedTuple):
    """Extents of a problem."""

    B: int
    H: int
    M: int
    N: int
    D_t: int
    D_s: int
    teacher_key_heads: int
    student_key_heads: int


def shape_of(H: int = 1, D_t: int = 64, **others: int) -> Shape:
    """One with what is not given: 64 rows and keys, the student's head dim the teacher's, no heads that share keys."""
    defaults = {"B": 1, "M": 64, "N": 64, "D_s": D_t, "teacher_key_heads": H, "student_key_heads": H}
    return Shape(**{"H": H, "D_t": D_t, **defaults, **others})


Four = tuple[Array, Array, Array, Array]
Generator = Callable[[np.random.Generator, Shape], tuple[Four, dict[str, Any]]]


class Recipe(NamedTuple):
    """One named kind of problem."""

    make: Generator
    hard: bool
    cancels: bool = False


def make(
    name: str = "gaussian",
    *,
    dtypes: str | tuple[str, str] = "float32",
    layout: str = "bhnd",
    seed: int = 0,
    **given: Any,
) -> Case:
    """Inputs of the recipe `name`, rounded to `dtypes` (one name, or teacher's and student's), with the options to use.

    What is given besides are extents, as `Shape` names them, and options, which are passed on to the call and go before
    the recipe's own. With `cu_seqlens_q` the inputs are packed: M and N count the rows and keys of all sequences, and B
    is 1.
    """
    recipe = RECIPES[name]
    extents = {key: given[key] for key in Shape._fields if given.get(key) is not None}
    options = {key: x for key, x in given.items() if key not in Shape._fields}
    shape = shape_of(**extents)
    pair = (dtypes, dtypes) if isinstance(dtypes, str) else dtypes
    arrays, own = recipe.make(np.random.default_rng(seed), shape)
    types = (pair[0], pair[0], pair[1], pair[1])
    a, b, c, d = (rounded(x, dtype) for x, dtype in zip(arrays, types, strict=True))
    if layout == "bnhd" or "cu_seqlens_q" in options:
        a, b, c, d = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (a, b, c, d))
    if "cu_seqlens_q" in options:
        a, b, c, d = (x[0] for x in (a, b, c, d))
    return Case(
        name, (a, b, c, d), {**own, "layout": layout, **options}, pair, recipe.hard, recipe.hard or recipe.cancels
    )


def cumulative(lengths: Sequence[int]) -> Array:
    """Where sequences of these lengths begin and end, as packed ones need it."""
    return np.cumsum([0, *lengths]).astype(np.int32)


def _drawing(part: Part) -> Callable[[np.random.Generator, int, int, int], dict[str, Any]]:
    return lambda rng, B, M, N: part.drawn(rng, Extents(B, 1, M, N))


# Random options that ask for each part of masks, for inputs of these extents.
MASK_OPTIONS = {name: _drawing(part) for name, part in MASKS.items()}


def upstream(rng: np.random.Generator, shape: tuple[int, ...], kind: str = "mixed") -> Array:
    """Per-row upstream gradients in float32: "ones", "mixed" signs with every fifth row 0, or "wild": 1e-6 to 1e4."""
    if kind == "ones":
        return np.ones(shape, np.float32)
    g = rng.standard_normal(shape)
    if kind == "wild":
        g = np.sign(g) * 10.0 ** rng.uniform(-6, 4, shape)
    g.ravel()[::5] = 0
    return g.astype(np.float32)


def _normal(rng: np.random.Generator, s: Shape) -> Four:
    return (
        rng.standard_normal((s.B, s.H, s.M, s.D_t)),
        rng.standard_normal((s.B, s.teacher_key_heads, s.N, s.D_t)),
        rng.standard_normal((s.B, s.H, s.M, s.D_s)),
        rng.standard_normal((s.B, s.student_key_heads, s.N, s.D_s)),
    )


def _gaussian(rng: np.random.Generator, s: Shape) -> tuple[Four, dict[str, Any]]:
    return _normal(rng, s), {}


def _realistic(rng: np.random.Generator, s: Shape) -> tuple[Four, dict[str, Any]]:
    """What trained heads look like: a sink at key 0, keys in a few clusters, feature scales that differ by 30."""
    arrays = _normal(rng, s)
    for q, k in (arrays[:2], arrays[2:]):
        dim = q.shape[-1]
        spread = np.exp(rng.uniform(-1.7, 1.7, dim))
        centres = 0.8 * rng.standard_normal((8, dim))
        k += centres[rng.integers(8, size=k.shape[:-1])]
        q += centres[rng.integers(8, size=q.shape[:-1])]
        k *= spread
        q /= spread
        if s.N:
            # Every query agrees with the sink by a few nats.
            k[:, :, 0] = spread * 0.5
            q += 1 / spread
    return arrays, {}


def _ramps(teacher: float, student: float) -> Generator:
    """Logits that change linearly over the keys, by so many nats in all, on top of noise."""

    def generate(rng: np.random.Generator, s: Shape) -> tuple[Four, dict[str, Any]]:
        arrays = _normal(rng, s)
        for (q, k), rise in zip((arrays[:2], arrays[2:]), (teacher, student), strict=True):
            q[..., 0] = 1 + 0.25 * np.abs(q[..., 0])
            k[..., 0] = np.linspace(0, rise * math.sqrt(q.shape[-1]), s.N)
        return arrays, {}

    return generate


def _spiky(rng: np.random.Generator, s: Shape) -> tuple[Four, dict[str, Any]]:
    """Nearly one-hot rows on both sides, mostly on different keys: every row's answer hangs on underflowed tails."""
    arrays = _normal(rng, s)
    # Logits of standard deviation 30, whatever D is.
    return arrays, {"teacher_scale": 30 / math.sqrt(s.D_t), "student_scale": 30 / math.sqrt(s.D_s)}


def _huge(rng: np.random.Generator, s: Shape) -> tuple[Four, dict[str, Any]]:
    """Logits up to about 1e4 on both sides."""
    arrays = _normal(rng, s)
    return arrays, {"teacher_scale": 2500 / math.sqrt(s.D_t), "student_scale": -2500 / math.sqrt(s.D_s)}


def _signed_scale(rng: np.random.Generator, s: Shape) -> tuple[Four, dict[str, Any]]:
    return _normal(rng, s), {"teacher_scale": -0.3, "student_scale": 0.2}


def _zero_scale(rng: np.random.Generator, s: Shape) -> tuple[Four, dict[str, Any]]:
    """A uniform student: its gradients are exactly 0."""
    return _normal(rng, s), {"student_scale": 0.0}


def _near_equal(rng: np.random.Generator, s: Shape) -> tuple[Four, dict[str, Any]]:
    """The student is the teacher plus noise of 1e-3: KL is the small difference of large sums.

    With unlike D or key heads the common part of both is what they share, zero beyond it, at one scale.
    """
    tq, tk, sq, sk = _normal(rng, s)
    common = min(s.D_t, s.D_s)
    heads = math.gcd(s.teacher_key_heads, s.student_key_heads)
    base = rng.standard_normal((s.B, heads, s.N, common))
    sq[:] *= 1e-3
    sk[:] *= 1e-3
    tq[..., common:] = 0
    tk[..., common:] = 0
    tk[..., :common] = np.repeat(base, s.teacher_key_heads // heads, axis=1)
    sq[..., :common] += tq[..., :common]
    sk[..., :common] += np.repeat(base, s.student_key_heads // heads, axis=1)
    scale = 1 / math.sqrt(common)
    return (tq, tk, sq, sk), {"teacher_scale": scale, "student_scale": scale}


RECIPES: dict[str, Recipe] = {
    # Independent normal queries and keys, default scales.
    "gaussian": Recipe(_gaussian, False),
    # A sink, clusters, uneven features, as in trained heads.
    "realistic": Recipe(_realistic, False),
    # Both sides grow along the keys: references move at every tile.
    "rising": Recipe(_ramps(40, 40), True),
    # Both sides fall along the keys: late tiles underflow.
    "falling": Recipe(_ramps(-40, -40), True),
    # The teacher grows where the student falls.
    "crossing": Recipe(_ramps(40, -40), True),
    # Nearly one-hot rows, mostly on different keys.
    "spiky": Recipe(_spiky, True),
    # Logits of up to 1e4, student scale negative.
    "huge": Recipe(_huge, True),
    # Negative teacher scale.
    "signed_scale": Recipe(_signed_scale, False),
    # Student scale 0.
    "zero_scale": Recipe(_zero_scale, False),
    # Student = teacher + 1e-3 noise.
    "near_equal": Recipe(_near_equal, False, cancels=True),
}

"""Distil a teacher's causal attention into query and key projections with a quarter of its head dimension.

The teacher is layer 15 of SmolLM2-135M (9 query heads, 3 key heads, head dimension 64). The student sees the same
hidden states and learns W_q and W_k of head dimension 16, so that its attention rows come close to the teacher's in KL
divergence. One call gives the loss and the gradients to the student's queries and keys; the rest is a matrix product
and Adam, in array code that runs on NumPy and on CuPy. The first 256 tokens train the student; the queries of the last
64 are held out.

    python examples/distill.py --steps 200 --out distill.png
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from _shared import PICTURES, array_library, install, need, new_file, rate, sample, training_options, whole

Array = Any  # numpy.ndarray or cupy.ndarray
ROPE_BASE = 1e5
TRAIN = 256


class Student:
    """Two projections from hidden states (N, C) to rotated queries (H, N, D) and keys (H_k, N, D)."""

    def __init__(self, xp: ModuleType, width: int, heads: tuple[int, int], dim: int, seed: int) -> None:
        self.xp = xp
        rng = np.random.default_rng(seed)  # drawn by NumPy whatever xp is, so that both start from the same weights
        first = [rng.standard_normal((width, h * dim), dtype="float32") / width**0.5 for h in heads]
        self.weights = [xp.asarray(w, dtype="float32") for w in first]
        self.dim = dim

    def _rotate(self, x: Array, sign: int) -> Array:
        """Rotary positions; a rotation's transpose is the rotation back, so `sign=-1` is its gradient."""
        xp = self.xp
        angle = xp.arange(x.shape[1])[:, None] * ROPE_BASE ** (-xp.arange(0, self.dim, 2) / self.dim)
        cos, sin = xp.cos(angle).astype("float32"), sign * xp.sin(angle).astype("float32")
        a, b = x[..., 0::2], x[..., 1::2]
        return xp.stack([a * cos - b * sin, a * sin + b * cos], axis=-1).reshape(x.shape)

    def project(self, hidden: Array) -> list[Array]:
        """Queries and keys."""
        split = [(hidden @ w).reshape(len(hidden), -1, self.dim).swapaxes(0, 1) for w in self.weights]
        return [self._rotate(x, 1) for x in split]

    def gradients(self, hidden: Array, grads: tuple[Array, Array]) -> list[Array]:
        """From gradients to queries and keys to gradients to the weights."""
        back = [self._rotate(g.astype("float32"), -1) for g in grads]
        return [hidden.T @ g.swapaxes(0, 1).reshape(len(hidden), -1) for g in back]


class Adam:
    """Adam without weight decay, in place; the learning rate falls to zero along half a cosine."""

    def __init__(self, xp: ModuleType, weights: list[Array], rate: float, steps: int) -> None:
        self.xp, self.weights, self.rate, self.steps = xp, weights, rate, steps
        self.first = [xp.zeros_like(w) for w in weights]
        self.second = [xp.zeros_like(w) for w in weights]
        self.t = 0

    def step(self, gradients: list[Array]) -> None:
        xp = self.xp
        rate = self.rate * (1 + math.cos(math.pi * self.t / self.steps)) / 2
        self.t += 1
        for w, g, m, v in zip(self.weights, gradients, self.first, self.second, strict=True):
            m += 0.1 * (g - m)
            v += 0.01 * (g * g - v)
            w -= rate * (m / (1 - 0.9**self.t)) / (xp.sqrt(v / (1 - 0.99**self.t)) + 1e-8)


def attention_map(xp: ModuleType, q: Array, k: Array, lse: Array) -> Array:
    """Attention weights (H, M, N) for the plot, from the log-sum-exps that the forward pass returns."""
    q, k = q.astype("float32"), xp.repeat(k.astype("float32"), len(q) // len(k), axis=0)
    logits = q @ k.swapaxes(1, 2) / q.shape[-1] ** 0.5
    m, n = logits.shape[1:]
    return xp.where(xp.tri(m, n, n - m, dtype=bool), xp.exp(logits - lse[..., None]), 0)


def to_numpy(x: Array) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else x.get()


def plot(
    path: Path,
    train: list[float],
    checks: list[tuple[int, float]],
    kl: np.ndarray,
    teacher: np.ndarray,
    student: np.ndarray,
    pieces: np.ndarray,
    dim: int,
) -> None:
    """Loss curves, the held-out attention maps of one head, and one of its rows with the words it attends to."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import LogNorm

    blue, orange = "#1f4e79", "#e07b39"
    head = int(teacher[..., 0].mean(axis=-1).argmin())  # the head that leans least on the first token: most to look at
    row = int(np.argsort(kl[head])[kl.shape[1] // 2])  # the median row of it: neither the best nor the worst match
    n = teacher.shape[-1]

    plt.rcParams |= {"font.size": 9, "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left"}
    figure = plt.figure(figsize=(11, 6.6), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[1.2, 1], hspace=0.06)
    axes = top.subplots(1, 3)
    bars = bottom.subplots()

    axes[0].semilogy(range(1, len(train) + 1), train, color=blue, label="training rows")
    axes[0].semilogy(*zip(*checks, strict=True), color=orange, marker="o", markersize=3, label="held-out rows")
    axes[0].set(title="Mean KL(teacher || student)", xlabel="step", ylabel="nats", box_aspect=1)
    axes[0].yaxis.set_major_formatter("{x:g}")
    axes[0].grid(color="0.9")
    axes[0].legend(frameon=False)
    axes[0].spines[["top", "right"]].set_visible(False)

    ticks = range(TRAIN, n + 1, 16)
    for axis, name, weights in zip(axes[1:], ("Teacher", "Student"), (teacher, student), strict=True):
        image = axis.imshow(
            np.ma.masked_equal(weights[head], 0),
            norm=LogNorm(1e-4, 1),
            cmap="magma_r",
            extent=(0, n, n, TRAIN),  # all keys: the first ones often weigh most
            aspect="auto",
            interpolation="nearest",
        )
        axis.set(
            title=f"{name}, head {head}, held-out queries",
            xlabel="key position",
            xticks=range(0, n + 1, 64),
            yticks=ticks,
        )
    axes[1].set_ylabel("query position")
    top.colorbar(image, ax=axes, shrink=0.8, label="attention weight", extend="min")

    keys = np.sort(np.argsort(teacher[head, row])[-18:])
    x = np.arange(len(keys))
    bars.bar(x - 0.2, teacher[head, row, keys], 0.4, color=blue, label="teacher, head dimension 64")
    bars.bar(x + 0.2, student[head, row, keys], 0.4, color=orange, label=f"student, head dimension {dim}")

    def word(token: int) -> str:
        """As it can be read: also one that is a space or ends a line."""
        return repr(str(pieces[token]))[1:-1].strip() or "space"

    bars.set_xticks(x, [f"{word(j)}\n{j}" for j in keys])
    bars.set_title(
        f"The 18 keys that query {TRAIN + row} “{word(TRAIN + row)}” of head {head} weighs most in the teacher "
        f"(the median held-out row, KL {kl[head, row]:.2f} nats)"
    )
    bars.set(ylabel="attention weight", xlabel="key: token and position", xlim=(-0.7, len(keys) - 0.3))
    bars.legend(frameon=False)
    bars.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def student_options(parser: argparse.ArgumentParser) -> None:
    """What both distillations can be told."""
    training_options(parser, steps=200)
    parser.add_argument(
        "--dim",
        type=whole(2, 256, step=2),  # rotary positions take pairs
        default=16,
        metavar="D",
        help="head dimension of the student, even (%(default)s)",
    )
    parser.add_argument("--rate", type=rate, default=0.01, help="peak learning rate of Adam (%(default)s)")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32", help="of Q and K")
    parser.add_argument("--cpu", action="store_true", help="use NumPy even where a GPU is usable")


def halved(**losses: bool) -> None:
    """Leave with one line where a loss did not fall enough: how far options lead is known only afterwards."""
    if short := [name.replace("_", "-") for name, enough in losses.items() if not enough]:
        sys.exit(f"The {' and '.join(short)} loss did not halve; try more --steps, a larger --dim or another --rate.")


def dtype_of(name: str) -> Any:
    """NumPy's type of a name; bfloat16 is a package's."""
    return need("ml_dtypes", "pip install ml_dtypes, or use --dtype float16").bfloat16 if name == "bfloat16" else name


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="example: python examples/distill.py --steps 300 --dim 32 --dtype bfloat16 --out distill.png",
    )
    student_options(parser)
    parser.add_argument(
        "--out", type=new_file(*PICTURES), default="distill.png", metavar="PNG", help="plot (%(default)s)"
    )
    parser.add_argument("--no-plot", action="store_true", help="train only")
    options = parser.parse_args()
    streamkl = need("streamkl_cupy", install())
    tqdm = need("tqdm", install("examples")).tqdm
    if not options.no_plot:
        need("matplotlib", f"{install('examples')}, or pass --no-plot")
    dtype = dtype_of(options.dtype)
    xp = array_library(options.cpu)
    data = sample()
    hidden = xp.asarray(data["layer15_hidden"], dtype="float32")
    teacher_q, teacher_k = (xp.asarray(data[f"layer15_{x}"].astype(dtype)) for x in "qk")
    student = Student(xp, hidden.shape[1], (len(teacher_q), len(teacher_k)), options.dim, options.seed)
    adam = Adam(xp, student.weights, options.rate, options.steps)
    print(f"{xp.__name__} arrays, {options.dtype}: head dimension {teacher_q.shape[-1]} -> {options.dim}")

    late, seen = slice(TRAIN, None), slice(None, TRAIN)

    def held_out() -> tuple[Any, Array, Array]:
        """The last 64 queries against all 320 keys: causal, and so aligned to the last key."""
        q, k = (x.astype(dtype) for x in student.project(hidden))
        return streamkl.attention_kl_forward(teacher_q[:, late], teacher_k, q[:, late], k, causal=True), q[:, late], k

    rows = len(teacher_q) * TRAIN
    train: list[float] = []
    checks = [(0, float(held_out()[0].kl.mean()))]
    with tqdm(range(1, options.steps + 1), unit="step") as bar:
        for step in bar:
            q, k = (x.astype(dtype) for x in student.project(hidden[seen]))
            # Differentiate the sum: gradients of a mean over 2304 rows would underflow in float16.
            total, grads = streamkl.attention_kl_value_and_grad(
                teacher_q[:, seen], teacher_k[:, seen], q, k, causal=True, reduction="sum"
            )
            adam.step([g / rows for g in student.gradients(hidden[seen], (grads.student_q, grads.student_k))])
            train.append(float(total) / rows)
            if step % 10 == 0 or step == options.steps:
                checks.append((step, float(held_out()[0].kl.mean())))
            bar.set_postfix(train=f"{train[-1]:.3f}", held_out=f"{checks[-1][1]:.3f}")

    print(f"training rows: KL {train[0]:.3f} -> {train[-1]:.3f} nats")
    print(f"held-out rows: KL {checks[0][1]:.3f} -> {checks[-1][1]:.3f} nats")
    if not options.no_plot:
        stats, q, k = held_out()
        maps = [
            to_numpy(attention_map(xp, *side))
            for side in ((teacher_q[:, late], teacher_k, stats.teacher_lse), (q, k, stats.student_lse))
        ]
        plot(options.out, train, checks, to_numpy(stats.kl), *maps, data["pieces"], options.dim)
        print(f"wrote {options.out}")
    halved(training=train[-1] < 0.5 * train[0], held_out=checks[-1][1] < 0.5 * checks[0][1])
    print("The student's attention follows its teacher's.")


if __name__ == "__main__":
    main()

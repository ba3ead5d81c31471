"""Warm up a lightning indexer: learn from dense attention which keys of each row a sparse one should keep.

The teacher is layer 15 of SmolLM2-135M (9 query heads on 3 key heads, head dimension 64). The indexer sees the same
hidden states and learns queries and a weight for each of a few small heads, and one small key per token, such that
softmax(sum_h w_h ReLU(q_h . k)) comes close to the teacher's heads added up. The first 256 tokens train it; for the
rows of the last 64 its best keys are held against those that the teacher attends to most. `indexer_kl` gives loss and
gradients on NumPy arrays, or differentiates in PyTorch or JAX; Adam is the same for all of them.

    python examples/indexer_warmup.py --plot warmup.png
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from _shared import PICTURES, install, need, new_file, rate, sample, training_options, whole
from distill import ROPE_BASE, TRAIN, Adam, Student

Array = np.ndarray
Gradients = Callable[[list[Array]], tuple[float, list[Array]]]


class Indexer:
    """Projections from hidden states (N, C) to index queries (HI, N, D), keys (N, D) and weights (HI, N)."""

    def __init__(self, width: int, heads: int, dim: int, seed: int) -> None:
        self.student = Student(np, width, (heads, 1), dim, seed)
        self.weights = [*self.student.weights, np.full((width, heads), 1 / width, np.float32)]
        self.dim = dim
        # Weights come without the scales that some models have in them, so these are the scale of the logits.
        self.scale = heads**-0.5 * dim**-0.5

    def index(self, hidden: Array) -> tuple[Array, Array, Array]:
        q, k = self.student.project(hidden)
        return q, k[0], (hidden @ self.weights[2]).T

    def chained(self, hidden: Array, grads: Any) -> list[Array]:
        """From gradients to queries, keys and weights to those of the projections."""
        first = self.student.gradients(hidden, (grads.index_q, grads.index_k[None]))
        return [*first, hidden.T @ grads.index_weights.T]

    def rotations(self, tokens: int) -> tuple[Array, Array]:
        """Cosines and sines of the rotary positions, (N, D / 2)."""
        angle = np.arange(tokens)[:, None] * ROPE_BASE ** (-np.arange(0, self.dim, 2) / self.dim)
        return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def of_numpy(streamkl: Any, indexer: Indexer, teacher: tuple[Array, Array], hidden: Array) -> Gradients:
    def run(weights: list[Array]) -> tuple[float, list[Array]]:
        index_q, index_k, index_weights = indexer.index(hidden)
        loss, grads = streamkl.indexer_kl_value_and_grad(
            *teacher, index_q, index_k, index_weights, index_scale=indexer.scale, causal=True
        )
        return float(loss), indexer.chained(hidden, grads)

    return run


def of_torch(streamkl: Any, indexer: Indexer, teacher: tuple[Array, Array], hidden: Array) -> Gradients:
    torch = need("torch", f"{install('torch')}, or leave out --framework")
    q, k, states, cos, sin = map(torch.from_numpy, (*teacher, hidden, *indexer.rotations(len(hidden))))

    def run(weights: list[Array]) -> tuple[float, list[Array]]:
        own = [torch.from_numpy(w).requires_grad_() for w in weights]
        index = projected(torch, states, own, cos, sin)
        loss = streamkl.indexer_kl(q, k, *index, index_scale=indexer.scale, causal=True, reduction="mean")
        return float(loss.detach()), [g.numpy() for g in torch.autograd.grad(loss, own)]

    return run


def of_jax(streamkl: Any, indexer: Indexer, teacher: tuple[Array, Array], hidden: Array) -> Gradients:
    jax = need("jax", f"{install('jax')}, or leave out --framework")
    jnp = jax.numpy
    q, k, states, cos, sin = map(jnp.asarray, (*teacher, hidden, *indexer.rotations(len(hidden))))

    def loss(own: list[Any]) -> Any:
        index = projected(jnp, states, own, cos, sin)
        return streamkl.indexer_kl(q, k, *index, index_scale=indexer.scale, causal=True, reduction="mean")

    step = jax.jit(jax.value_and_grad(loss))

    def run(weights: list[Array]) -> tuple[float, list[Array]]:
        value, grads = step([jnp.asarray(w) for w in weights])
        return float(value), [np.asarray(g) for g in grads]

    return run


FRAMEWORKS = {"numpy": of_numpy, "torch": of_torch, "jax": of_jax}


def projected(xp: Any, hidden: Any, weights: list[Any], cos: Any, sin: Any) -> tuple[Any, Any, Any]:
    """What `Indexer.index` does, in a framework that differentiates it."""
    index = []
    for w in weights[:2]:
        x = (hidden @ w).reshape(len(hidden), -1, 2 * cos.shape[1]).swapaxes(0, 1)
        a, b = x[..., 0::2], x[..., 1::2]
        index.append(xp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape))
    return index[0], index[1][0], (hidden @ weights[2]).T


def recall(target: Array, logits: Array, keep: int) -> Array:
    """(rows,), which share of each row's `keep` best keys of the teacher are among those of the indexer."""
    best, chosen = (np.argpartition(-x, keep, axis=-1)[:, :keep] for x in (target, logits))
    return np.array([len(np.intersect1d(a, b)) / keep for a, b in zip(best, chosen, strict=True)])


def plot(path: Path, train: list[float], before: Array, after: Array, keep: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (loss, bars) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    loss.semilogy(range(1, len(train) + 1), train, color="#1f4e79")
    loss.set(title="KL(teacher's heads added up || indexer)", xlabel="step", ylabel="nats")
    rows = np.arange(TRAIN, TRAIN + len(before))
    bars.plot(rows, before, color="0.6", label="before")
    bars.plot(rows, after, color="#1f4e79", label="after the warm-up")
    bars.set(title=f"Of the teacher's best {keep} keys, found by the indexer", xlabel="held-out row", ylim=(0, 1.02))
    bars.legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="example: python examples/indexer_warmup.py --framework torch --plot warmup.png",
    )
    training_options(parser, steps=150)
    parser.add_argument("--framework", choices=list(FRAMEWORKS), default="numpy", help="%(default)s")
    parser.add_argument("--heads", type=whole(1, 128), default=4, metavar="N", help="index heads (%(default)s)")
    parser.add_argument(
        "--dim", type=whole(2, 256, step=2), default=32, metavar="N", help="index head dimension (%(default)s)"
    )
    parser.add_argument("--rate", type=rate, default=0.01, metavar="R", help="Adam's learning rate (%(default)s)")
    parser.add_argument("--keep", type=whole(1, 128), default=32, metavar="N", help="keys of a row (%(default)s)")
    parser.add_argument("--plot", type=new_file(*PICTURES), metavar="PNG", help="draw loss and recall into this file")
    options = parser.parse_args()
    streamkl = need("streamkl_cupy", install())
    if options.plot:
        need("matplotlib", f"{install('examples')}, or leave out --plot")
    data = sample()
    hidden = data["layer15_hidden"].astype(np.float32)
    teacher_q, teacher_k = (data[f"layer15_{x}"].astype(np.float32) for x in "qk")
    print(
        f"{options.framework}: {len(teacher_q)} heads of the teacher, {options.heads} of the indexer, of {options.dim}"
    )

    indexer = Indexer(hidden.shape[1], options.heads, options.dim, options.seed)
    adam = Adam(np, indexer.weights, options.rate, options.steps)
    gradients = FRAMEWORKS[options.framework](
        streamkl, indexer, (teacher_q[:, :TRAIN], teacher_k[:, :TRAIN]), hidden[:TRAIN]
    )
    # What the heads of the held-out rows add up to, over all keys that each of them sees.
    target = streamkl.indexer_target(teacher_q[:, TRAIN:], teacher_k, causal=True)

    def held_out() -> tuple[float, Array]:
        """KL of the last 64 rows, and how many of the teacher's best keys the indexer finds in each."""
        q, k, w = indexer.index(hidden)
        late = (None, None, q[:, TRAIN:], k, w[:, TRAIN:])
        kl = streamkl.indexer_kl(*late, target=target, index_scale=indexer.scale, causal=True, reduction="mean")
        logits = np.einsum("hm,hmn->mn", w[:, TRAIN:], np.maximum(q[:, TRAIN:] @ k.T, 0))
        return float(kl), recall(target, np.where(target > 0, logits, -np.inf), options.keep)

    kl_before, before = held_out()
    train = []
    for _ in range(options.steps):
        loss, grads = gradients(indexer.weights)
        adam.step(grads)
        train.append(loss)
    kl_after, after = held_out()

    print(f"training rows: KL {train[0]:.3f} -> {train[-1]:.3f} nats")
    print(f"held-out rows: KL {kl_before:.3f} -> {kl_after:.3f} nats")
    print(f"of the teacher's best {options.keep} keys found: {before.mean():.1%} -> {after.mean():.1%}")
    if options.plot:
        plot(options.plot, train, before, after, options.keep)
        print(f"wrote {options.plot}")
    assert after.mean() > before.mean(), "the indexer finds no more of the teacher's keys than before; try more --steps"
    print("The indexer has learned where the teacher looks.")


if __name__ == "__main__":
    main()

"""Distil a language model's dense attention into a student whose heads each see their own shard of the context, run it.

The teacher is layer 15 of SmolLM2-135M (9 query heads, 3 key heads, head dimension 64), dense and causal. The student
sees the same hidden states and learns its own W_q and W_k, but attends sparsely: every head sees a band near the row,
the first keys, and its own stripes of blocks, so that the heads together see everything. `block_mask` restricts both
sides to what a head sees, and the teacher's weights there are rescaled to sum to 1; `teacher_mass` says how much they
summed to before, which is what the pattern keeps of the teacher, and what a row weighs in the loss. The first 256
tokens train the student; the queries of the last 64 are held out. At last the student runs: `sparse_attention` with its
queries and keys and the hidden states as values (the sample has no others), beside the dense teacher's outputs, and
beside what the teacher's own weights give on the same pattern, which is what KL aims at. Runs on CuPy
arrays where a CUDA GPU is usable and on NumPy arrays otherwise.

    python examples/sparse_student.py --plot sparse.png
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
from _shared import PICTURES, array_library, install, need, new_file, sample, whole
from distill import TRAIN, Adam, Student, dtype_of, halved, student_options, to_numpy

HEADS = 9


def add_result(figure: Any, train: list[float], before: np.ndarray, after: np.ndarray) -> None:
    """What training came to, in the two cells that the pictures of nine heads and their union leave free."""
    grid = figure.axes[0].get_gridspec()
    loss, bars = (figure.add_subplot(grid[2, column]) for column in (2, 3))
    loss.semilogy(range(1, len(train) + 1), train, color="#1f4e79")
    loss.set_title("KL of the training rows, nats", fontsize=9)
    loss.set_xlabel("step", fontsize=7)
    heads = np.arange(len(before))
    bars.bar(heads - 0.2, before, 0.4, color="0.75", label="before")
    bars.bar(heads + 0.2, after, 0.4, color="#1f4e79", label="after training")
    bars.set_title("KL of the held-out rows, nats", fontsize=9)
    bars.set_xlabel("head", fontsize=7)
    bars.set_xticks(heads)
    bars.set_ylim(0, 1.2 * max(before.max(), after.max()))  # room for the legend
    bars.legend(frameon=False, fontsize=7, ncols=2, loc="upper center")
    for axis in (loss, bars):
        axis.tick_params(which="both", labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        "What each head of the sparse student sees, and how close it comes to its teacher\n"
        "blue: visited blocks; orange: the causal diagonal; in titles: the share of the teacher's attention kept",
        fontsize=10,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").partition("\n")[0],
        epilog="example: python examples/sparse_student.py --stride 9 --dense-heads 1 --plot sparse.png",
    )
    student_options(parser)
    for name, kind, default, text in (
        ("block", whole(16, 128, step=16), 16, "tokens per block of the pattern"),
        ("window", whole(0), 32, "keys behind the row that every head sees"),
        ("stride", whole(1), 8, "beyond, a head sees one block in so many"),
        ("sink", whole(0), 1, "first keys that every head sees, 0 for none"),
        ("dense-heads", whole(0, HEADS), 0, "last heads that see everything"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, metavar="N", help=f"{text} (%(default)s)")
    parser.add_argument(
        "--groups",
        choices=["differ", "share"],
        default="differ",
        help="stripes of heads with one key head (%(default)s)",
    )
    parser.add_argument("--plot", type=new_file(*PICTURES), metavar="PNG", help="draw the patterns into this file")
    options = parser.parse_args()
    streamkl = need("streamkl_cupy", install())
    tqdm = need("tqdm", install("examples")).tqdm
    if options.plot:
        need("matplotlib", f"{install('examples')}, or leave out --plot")
    dtype = dtype_of(options.dtype)
    xp = array_library(options.cpu)
    data = sample()
    hidden = xp.asarray(data["layer15_hidden"], dtype="float32")
    teacher_q, teacher_k = (xp.asarray(data[f"layer15_{x}"].astype(dtype)) for x in "qk")
    heads, tokens = teacher_q.shape[:2]

    def pattern_of(queries: int, keys: int) -> Any:
        """What the last `queries` of `keys` tokens see: rows of one pattern, however the queries are cut."""
        return streamkl.patterns.sharded(
            heads,
            key_heads=len(teacher_k),
            groups=options.groups,
            window=options.window,
            stride=options.stride,
            sink=options.sink,
            dense_heads=options.dense_heads,
            block=options.block,
            queries=queries,
            keys=keys,
            causal=True,
        )

    late, seen = slice(TRAIN, None), slice(None, TRAIN)
    try:
        pattern, train_rows, late_rows = (
            pattern_of(tokens, tokens),
            pattern_of(TRAIN, TRAIN),
            pattern_of(tokens - TRAIN, tokens),
        )
    except ValueError as error:  # what no option alone can be told
        parser.error(f"--dense-heads with --groups: {error}")
    print(f"{xp.__name__} arrays, {options.dtype}: head dimension {teacher_q.shape[-1]} -> {options.dim}")
    print(
        f"a head sees {pattern.density:.0%} of its context in blocks of {options.block} tokens, all heads together "
        f"{pattern.coverage().fraction:.0%}"
    )

    student = Student(xp, hidden.shape[1], (heads, len(teacher_k)), options.dim, options.seed)
    adam = Adam(xp, student.weights, options.rate, options.steps)

    def held_out() -> Any:
        """KL of the last 64 queries against all 320 keys, per head."""
        q, k = (x.astype(dtype) for x in student.project(hidden))
        kl = streamkl.attention_kl(teacher_q[:, late], teacher_k, q[:, late], k, causal=True, block_mask=late_rows)
        return to_numpy(kl).mean(axis=-1)

    def kept_by(mask: Any, rows: slice) -> Any:
        """The teacher against itself: what of its attention a pattern lets through, row by row."""
        teacher = (teacher_q[:, rows], teacher_k[:, : rows.stop]) * 2
        lse = streamkl.attention_kl_forward(*teacher, causal=True).teacher_lse
        return streamkl.attention_kl_forward(*teacher, causal=True, block_mask=mask, dense_teacher_lse=lse).teacher_mass

    # As many values as keys have heads, each as wide as the rest of the hidden state allows.
    values = xp.ascontiguousarray(hidden.reshape(tokens, len(teacher_k), -1).swapaxes(0, 1)).astype(dtype)

    def off(q: Any, k: Any) -> Any:
        """How far outputs of the last 64 queries are from the dense teacher's, per head: relative L2."""
        sparse = streamkl.sparse_attention(q[:, late], k, values, causal=True, block_mask=late_rows)
        dense = to_numpy(streamkl.sparse_attention(teacher_q[:, late], teacher_k, values, causal=True))
        norm = np.linalg.norm(dense, axis=(1, 2))
        return np.linalg.norm(to_numpy(sparse) - dense, axis=(1, 2)) / norm

    weight = kept_by(train_rows, seen)
    rows = float(weight.sum())
    train: list[float] = []
    before, outputs_before = held_out(), off(*(x.astype(dtype) for x in student.project(hidden)))
    with tqdm(range(options.steps), unit="step") as bar:
        for _ in bar:
            q, k = (x.astype(dtype) for x in student.project(hidden[seen]))
            # Differentiate the sum: gradients of a mean over 2304 rows would underflow in float16.
            total, grads = streamkl.attention_kl_value_and_grad(
                teacher_q[:, seen],
                teacher_k[:, seen],
                q,
                k,
                causal=True,
                block_mask=train_rows,
                row_weight=weight,
                reduction="sum",
            )
            adam.step([g / rows for g in student.gradients(hidden[seen], (grads.student_q, grads.student_k))])
            train.append(float(total) / rows)
            bar.set_postfix(train=f"{train[-1]:.3f}")
    after, outputs_after = held_out(), off(*(x.astype(dtype) for x in student.project(hidden)))
    kept = to_numpy(kept_by(pattern, slice(0, tokens))).mean(axis=-1)
    closest = off(teacher_q, teacher_k)

    print("head  sees  keeps of the teacher  held-out KL in nats")
    for head in range(heads):
        density = pattern.select(head).density
        print(f"{head:>4}{density:>6.0%}{kept[head]:>22.1%}{before[head]:>13.3f} -> {after[head]:.3f}")
    print("head  outputs off by    with the teacher's own weights by")
    for head in range(heads):
        print(f"{head:>4}{outputs_before[head]:>8.1%} -> {outputs_after[head]:.1%}{closest[head]:>14.1%}")
    print(f"training rows: KL {train[0]:.3f} -> {train[-1]:.3f} nats")
    print(f"held-out rows: KL {before.mean():.3f} -> {after.mean():.3f} nats")
    if options.plot:
        figure = pattern.plot(range(heads))
        for head, axis in enumerate(figure.axes[:heads]):
            axis.set_title(f"head {head}: {kept[head]:.0%} of the teacher", fontsize=9)
        add_result(figure, train, before, after)
        figure.savefig(options.plot, dpi=150)
        print(f"wrote {options.plot}")
    assert np.all((kept > 0) & (kept < 1 + 1e-5)), "attention kept must be a part of the pattern"
    assert outputs_after.mean() < outputs_before.mean(), "outputs must come closer"
    halved(training=train[-1] < 0.5 * train[0], held_out=after.mean() < 0.5 * before.mean())
    print("The sparse student's attention follows its teacher's.")


if __name__ == "__main__":
    main()

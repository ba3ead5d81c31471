"""A layer of sparse attention in PyTorch: it learns from a dense one, decodes with a cache, and runs in shards.

The dense layer has random weights and reads the hidden states of layer 15 of SmolLM2-135M. The sparse one has the same
values, learns queries and keys of its own, and its heads see a band near the row, the first keys, and stripes that
differ. It learns by two terms: the KL of its attention, which counts a row by what the pattern keeps of the dense
weights, and the distance of its outputs. Then it runs as in serving, a prompt in two chunks and then token by token.
With --ranks every rank is a process that has some of the key heads, and their part of the one pattern.

    python examples/sparse_attention_torch.py --steps 40 --ranks 2
"""

import argparse
import tempfile

from _shared import install, need, sample, training_options, whole

HEADS, KEY_HEADS, DIM, BLOCK = 8, 4, 32, 32
SPLIT = (0, 0, 0, 1)  # heads are rows of the weights of queries, keys and values, and columns of those of outputs


def heads_of(weights, x):
    """Queries, keys and values of some hidden states, (N, heads, DIM) each."""
    return [(x @ w.T).unflatten(-1, (-1, DIM)) for w in weights[:3]]


def attention_layer(weights, x, pattern, cache=None):
    """The layer's outputs of the last rows of a context, and its cache with them; without a pattern it is dense."""
    import torch

    from streamkl_cupy import sparse_attention

    q, k, v = heads_of(weights, x)
    if cache is not None:
        k, v = torch.cat([cache[0], k]), torch.cat([cache[1], v])
    rows = None if pattern is None else pattern.rows(len(k) - len(q), len(k), keys=len(k))
    out = sparse_attention(q[None], k[None], v[None], causal=True, block_mask=rows, layout="bnhd")[0]
    return out.flatten(1) @ weights[3].T, (k, v)


def on_a_rank(rank, ranks, meeting, weights, x, pattern, wanted):
    """What one process of several does: its heads, and the sum of all outputs."""
    import torch
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    mine = [w.chunk(ranks, dim)[rank] for w, dim in zip(weights, SPLIT, strict=True)]
    # Of the whole pattern: one that each rank made for itself would begin its stripes at the same place.
    part = pattern.select(range(rank * HEADS // ranks, (rank + 1) * HEADS // ranks))
    out, _ = attention_layer(mine, x, part)
    distributed.all_reduce(out)
    torch.testing.assert_close(out, wanted, atol=1e-4, rtol=1e-3)
    distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="example: python examples/sparse_attention_torch.py --steps 40 --ranks 2",
    )
    training_options(parser, steps=40)
    parser.add_argument("--cpu", action="store_true", help="use the CPU even where a GPU is usable")
    parser.add_argument(
        "--ranks", type=whole(1, KEY_HEADS), default=1, metavar="N", help="processes that share the heads (%(default)s)"
    )
    options = parser.parse_args()
    if KEY_HEADS % options.ranks:
        parser.error(f"argument --ranks: {options.ranks} does not divide the {KEY_HEADS} key heads")
    torch = need("torch", install("torch"))
    streamkl = need("streamkl_cupy", install())

    device = "cuda" if torch.cuda.is_available() and not options.cpu else "cpu"
    torch.manual_seed(options.seed)
    x = torch.from_numpy(sample()["layer15_hidden"]).float().to(device)
    x = x - x.mean(0)
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    tokens, width = x.shape
    sizes = ((HEADS * DIM, width), (KEY_HEADS * DIM, width), (KEY_HEADS * DIM, width), (width, HEADS * DIM))
    dense = [torch.randn(size, device=device) * size[1] ** -0.5 for size in sizes]
    fresh = [torch.randn_like(w) * width**-0.5 for w in dense[:2]]
    weights = [*map(torch.nn.Parameter, fresh), *dense[2:]]
    pattern = streamkl.patterns.sharded(
        HEADS, key_heads=KEY_HEADS, window=BLOCK, stride=KEY_HEADS, sink=1, queries=tokens, block=BLOCK, causal=True
    )
    print(
        f"torch {torch.__version__} on {device}: a head sees {pattern.density:.0%} of its context, all heads together "
        f"{pattern.coverage().fraction:.0%}; a decoder keeps {max(pattern.kv_budget())} blocks of {tokens // BLOCK}"
    )

    with torch.no_grad():
        q, k, v = (a[None] for a in heads_of(dense, x))
        options_of = {"causal": True, "layout": "bnhd"}
        lse = streamkl.sparse_attention(q, k, v, return_lse=True, **options_of).lse
        rows = streamkl.attention_kl_forward(q, k, q, k, block_mask=pattern, dense_teacher_lse=lse, **options_of)
        kept, target = rows.teacher_mass, attention_layer(dense, x, None)[0]
    print(f"the pattern keeps {kept.mean():.0%} of the dense attention")

    optimiser = torch.optim.AdamW(weights[:2], lr=3e-3)
    losses = []
    for step in range(options.steps):
        sq, sk, _ = (a[None] for a in heads_of(weights, x))
        kl = streamkl.attention_kl(q, k, sq, sk, block_mask=pattern, row_weight=kept, reduction="mean", **options_of)
        out, _ = attention_layer(weights, x, pattern)
        error = (out - target).square().mean() / target.square().mean()
        optimiser.zero_grad()
        loss = kl + error
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step:4}   KL {kl.item():.4f} nats   error of outputs {error.item():.4f}")
    assert losses[-1] < 0.5 * losses[0], "the loss did not halve"

    with torch.no_grad():
        whole_prompt, _ = attention_layer(weights, x, pattern)
        parts, cache = [], None
        for first, last in ((0, 128), (128, 256), *((i, i + 1) for i in range(256, tokens))):
            out, cache = attention_layer(weights, x[first:last], pattern, cache)
            parts.append(out)
    torch.testing.assert_close(torch.cat(parts), whole_prompt, atol=1e-3, rtol=1e-3)
    print(f"a prompt in two chunks and {tokens - 256} tokens one by one have the outputs of the whole")
    if options.ranks > 1:
        shared = [a.detach().cpu() for a in (*weights, x, whole_prompt)]
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(
                on_a_rank,
                (options.ranks, f"{folder}/meeting", shared[:4], shared[4], pattern, shared[5]),
                options.ranks,
            )
        print(f"{options.ranks} ranks with {KEY_HEADS // options.ranks} key heads each have them too")
    print("The sparse layer follows the dense one.")


if __name__ == "__main__":
    main()

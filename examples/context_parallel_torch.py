"""One sequence over several processes in PyTorch: each holds a shard, loss and gradients are those of the whole.

Every process calls `streamkl_cupy.parallel.attention_kl` with its shard and the process group that is there. Then each
strategy is checked against one process that has the whole sequence, with what it moves and how long it takes.

    python examples/context_parallel_torch.py                        two processes: gloo on the CPU, NCCL on two GPUs
    torchrun --nproc-per-node 4 examples/context_parallel_torch.py   as many as torchrun starts
"""

import argparse
import os
import socket
import time

from _shared import install, need, whole

STRATEGIES = ("all_gather", "a2a", "all_gather_queries", "p2p")


def shares(rank, size, options):
    """What one process does."""
    torch = need("torch", install("torch"))
    streamkl = need("streamkl_cupy", install())
    from streamkl_cupy import parallel

    dist = torch.distributed
    cuda = not options.cpu and torch.cuda.device_count() >= size
    if cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=size)
    device, dtype = (f"cuda:{rank}", torch.bfloat16) if cuda else ("cpu", torch.float32)
    tokens, heads, key_heads = options.tokens, 4 * size, 2 * size
    make = torch.Generator().manual_seed(options.seed)  # the same on every process
    whole_inputs = [
        torch.randn(1, n, tokens, 64, generator=make).to(device, dtype) for n in (heads, key_heads, heads, key_heads)
    ]
    if rank == 0:
        print(f"{size} processes over {dist.get_backend()}, {tokens} tokens, {heads} heads over {key_heads}, {dtype}")

    # One process with all of it: what the others must agree with.
    inputs = [x.clone().requires_grad_(i > 1) for i, x in enumerate(whole_inputs)]
    expected = streamkl.attention_kl(*inputs, causal=True, reduction="mean")
    expected.backward()
    grads = [inputs[2].grad, inputs[3].grad]

    for strategy in STRATEGIES:
        # Of 2 * size chunks this process holds chunk `rank` and the one as far from the end: causal work is even.
        mine = [parallel.shard(x, 2, rank, size).contiguous() for x in whole_inputs]
        for x in mine[2:]:
            x.requires_grad_()
        parallel.warmup(*mine, causal=True, strategy=strategy)
        dist.barrier()
        start = time.perf_counter()
        loss = parallel.attention_kl(*mine, causal=True, reduction="mean", strategy=strategy)
        loss.backward()
        if cuda:
            torch.cuda.synchronize()
        took = time.perf_counter() - start

        off = abs(loss.item() - expected.item())
        apart = max(
            ((x.grad - parallel.shard(grad, 2, rank, size)).float().norm() / grad.float().norm()).item()
            for x, grad in zip(mine[2:], grads)
        )
        assert off <= 2e-6 * (1 + expected.item()), (strategy, off)
        assert apart <= (5e-3 if cuda else 1e-5), (strategy, apart)
        if rank == 0:
            plan = parallel.plan(*mine, size=size, causal=True, strategy=strategy)
            moved = (plan.traffic.forward + plan.traffic.backward) / 2**20
            print(f"{strategy:<18}  loss {loss.item():.6f}, off by {off:.0e}, {moved:7.2f} MiB, {took * 1e3:8.2f} ms")
    if rank == 0:
        print("Every strategy gives what one process gives.")
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], epilog="example: python examples/context_parallel_torch.py --ranks 2"
    )
    parser.add_argument("--ranks", type=whole(1, 64), default=2, help="processes, where torchrun starts none (2)")
    parser.add_argument("--tokens", type=whole(1), default=512, help="of the whole sequence (%(default)s)")
    parser.add_argument("--seed", type=whole(0), default=0, help="of the numbers (%(default)s)")
    parser.add_argument("--cpu", action="store_true", help="gloo on the CPU even where there are GPUs")
    options = parser.parse_args()
    torch = need("torch", install("torch"))
    if "RANK" in os.environ:
        shares(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), options)
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    torch.multiprocessing.spawn(shares, (options.ranks, options), nprocs=options.ranks)


if __name__ == "__main__":
    main()

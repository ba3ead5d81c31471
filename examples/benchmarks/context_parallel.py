"""Times of sharded calls on the GPUs of one host, beside one GPU, in one run: every strategy, both ownerships.

    python examples/benchmarks/context_parallel.py --out results            needs two GPUs, torch and NCCL
    python examples/benchmarks/context_parallel.py --ranks 4 --shapes 8/2/262144 --strategies all_gather a2a

A shape is query heads / key heads / tokens, causal, D = 128, bfloat16; the backward is of both student gradients. Times
are medians of the slowest rank. Each row is also compared with one GPU: the largest difference of a value, and the
student's key gradients by relative L2 norm.
"""

from __future__ import annotations

import argparse
import csv
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import streamkl_cupy as skl
from streamkl_cupy import parallel as cp

SHAPES = ("8/8/32768", "8/8/131072", "32/8/32768", "8/2/262144")
CASES = (
    ("all_gather", "zigzag", 1),
    ("all_gather", "zigzag", 2),
    ("all_gather", "contiguous", 1),
    ("a2a", "zigzag", 1),
    ("a2a", "contiguous", 1),
    ("all_gather_queries", "zigzag", 1),
    ("p2p", "zigzag", 1),
)
D, STUDENT = 128, ("student_q", "student_k")


def clock(call: Callable[[], Any], repeats: int) -> float:
    """Milliseconds of the slowest rank, median."""
    for _ in range(2):
        call()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        dist.barrier()
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    found = torch.tensor(sorted(times)[repeats // 2], device="cuda")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found.item())


def peak(call: Callable[[], Any]) -> float:
    """GiB that a call takes beyond what there was."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def one_shape(
    rank: int, size: int, shape: str, cases: list[tuple[str, str, int]], repeats: int
) -> list[dict[str, Any]]:
    """Rows of the table."""
    heads, key_heads, tokens = map(int, shape.split("/"))
    make = torch.Generator(device="cuda").manual_seed(torch.initial_seed() % 2**31)  # the same on all ranks
    full = [
        torch.randn(1, h, tokens, D, device="cuda", dtype=torch.bfloat16, generator=make)
        for h in (heads, key_heads, heads, key_heads)
    ]
    whole = skl.attention_kl_forward(*full, causal=True)
    up = torch.ones_like(whole.kl)
    grads = skl.attention_kl_backward(up, *full, saved=whole, causal=True, wrt=STUDENT)
    one = (
        clock(lambda: skl.attention_kl_forward(*full, causal=True), repeats),
        clock(lambda: skl.attention_kl_backward(up, *full, saved=whole, causal=True, wrt=STUDENT), repeats),
    )
    rows = [{"shape": shape, "strategy": "one GPU", "forward_ms": one[0], "backward_ms": one[1]}]
    for strategy, ownership, groups in cases:
        if strategy == "a2a" and key_heads % size:
            continue
        mine = [cp.shard(x, 2, rank, size, ownership).contiguous() for x in full]
        for x in mine[2:]:
            x.requires_grad_()
        options: dict[str, Any] = {"causal": True, "strategy": strategy, "ownership": ownership}
        options["head_groups"] = groups if strategy == "all_gather" else None

        def forward(mine: list[Any] = mine, options: dict[str, Any] = options) -> Any:
            return cp.attention_kl(*mine, **options)

        kl = forward()
        ones = torch.ones_like(kl)

        def backward(kl: Any = kl, ones: Any = ones, mine: list[Any] = mine) -> Any:
            return torch.autograd.grad(kl, mine[2:], ones, retain_graph=True)

        dq, dk = backward()
        off = (kl - cp.shard(whole.kl, 2, rank, size, ownership)).abs().max()
        want = cp.shard(grads.student_k, 2, rank, size, ownership).float()
        apart = (dk.float() - want).norm() / want.norm()
        del dq, dk, want
        errors = torch.stack([off, apart])
        dist.all_reduce(errors, dist.ReduceOp.MAX)
        row = {
            "shape": shape,
            "strategy": strategy,
            "ownership": ownership,
            "head_groups": groups,
            "forward_ms": clock(forward, repeats),
            "backward_ms": clock(backward, repeats),
            "forward_gib": peak(forward),
            "backward_gib": peak(backward),
            "kl_off": float(errors[0]),
            "student_k_apart": float(errors[1]),
        }
        row |= {"forward_x": one[0] / row["forward_ms"], "backward_x": one[1] / row["backward_ms"]}
        rows.append(row)
        del kl, mine
    return rows


def work(rank: int, size: int, port: int, seed: int, args: argparse.Namespace) -> None:
    """One rank."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(size)}
    torch.cuda.set_device(rank)
    torch.manual_seed(seed)
    dist.init_process_group("nccl", rank=rank, world_size=size, device_id=torch.device("cuda", rank))
    cases = [x for x in CASES if x[0] in args.strategies]
    rows = []
    for shape in args.shapes:
        rows += one_shape(rank, size, shape, cases, args.repeats)
        torch.cuda.empty_cache()
        if rank == 0:
            for row in rows:
                if row["shape"] == shape:
                    print(
                        " ".join(f"{k}={v:.4g}" if isinstance(v, float) else str(v) for k, v in row.items()), flush=True
                    )
    if rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        with (args.out / "context_parallel.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[-1]))
            writer.writeheader()
            writer.writerows(rows)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="GPUs (%(default)s)")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), metavar="H/Hk/N", help="default: %(default)s")
    parser.add_argument("--strategies", nargs="+", default=sorted({x[0] for x in CASES}), help="default: all")
    parser.add_argument("--repeats", type=int, default=5, help="of each time (%(default)s)")
    parser.add_argument("--port", type=int, default=29512, help="of the rendezvous on this host (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("streamkl-bench"), metavar="DIR", help="results (%(default)s)")
    args = parser.parse_args()
    mp.spawn(work, (args.ranks, args.port, torch.seed() % 2**31, args), nprocs=args.ranks)


if __name__ == "__main__":
    main()

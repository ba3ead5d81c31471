"""`python -m streamkl_cupy bench --op context_parallel`: sharded calls on the GPUs of this host, beside one GPU.

Every strategy and both ownerships take turns in one run, causal, bfloat16, D = 128; the backward is of both student
gradients, through autograd. Times are medians of the slowest rank. Beside them is what can be written by hand over
torch.distributed and the plain operation. Each row is compared with one GPU too: the largest difference of a value, and
the student's key gradients by relative L2 norm.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import os
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import parallel
from ..api import attention_kl_backward, attention_kl_forward
from .values import results

SHAPES = ((8, 8, 32768), (8, 8, 131072), (32, 8, 32768), (8, 2, 262144))
DIM = 128
REPEATS = 3
LONG = 20.0
"""Milliseconds from which one call of a turn is enough."""


class Case(NamedTuple):
    """One way to share a call out."""

    strategy: str
    ownership: str
    head_groups: int | None = None


CASES = (
    Case("all_gather", "zigzag"),
    Case("all_gather", "zigzag", 2),
    Case("all_gather", "contiguous"),
    Case("a2a", "zigzag"),
    Case("a2a", "contiguous"),
    Case("all_gather_queries", "zigzag"),
    Case("all_gather_queries", "contiguous"),
    Case("p2p", "zigzag"),
    Case("p2p", "contiguous"),
)
FIELDS = (
    *("heads", "key_heads", "tokens", "ranks", "strategy", "ownership", "head_groups"),
    *("forward_ms", "backward_ms", "forward_times_one", "backward_times_one", "forward_bytes", "backward_bytes"),
    *("forward_peak_bytes", "backward_peak_bytes", "kl_off", "student_k_apart", "forward_host_us"),
)


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit code."""
    torch = importlib.import_module("torch")
    there, ranks = torch.cuda.device_count(), options.ranks
    if there < ranks:
        raise ValueError(f"--ranks {ranks}, but there are {there} GPUs; a rank has one of its own")
    shapes: Sequence[tuple[int, int, int]] = SHAPES
    if options.sizes or options.heads:
        heads = options.heads or 8
        shapes = [(heads, heads, n) for n in options.sizes or (32768, 131072)]
    if wrong := [n for _, _, n in shapes if n % (2 * ranks)]:
        raise ValueError(f"--sizes {wrong[0]} are not {2 * ranks} equal chunks, two for each of {ranks} ranks")
    base = results(options.out, options.name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn = importlib.import_module("torch.multiprocessing").spawn
    seed = int(np.random.default_rng().integers(2**31))
    spawn(work, (ranks, port, seed, shapes, f"{base}.csv"), nprocs=ranks)
    print(f"wrote {base}.csv")
    return 0


def work(rank: int, size: int, port: int, seed: int, shapes: Sequence[tuple[int, int, int]], path: str) -> None:
    """One rank, in a process of its own."""
    torch: Any = importlib.import_module("torch")
    dist = torch.distributed
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=size, device_id=torch.device("cuda", rank))
    bench = _Rank(torch, rank, size)
    found: list[dict[str, Any]] = []
    for shape in shapes:
        for row in bench.rows(shape, seed):
            found.append(row)
            if rank == 0:
                show(row)
                write(Path(path), found)
        torch.cuda.empty_cache()
    dist.destroy_process_group()


def show(row: dict[str, Any]) -> None:
    """A line of a row."""
    shape = f"{row['heads']} over {row['key_heads']} x {row['tokens']}"
    how = f"{row['strategy']}, {row['ownership']}" if row["ownership"] else row["strategy"]
    how += f", {row['head_groups']} steps" if (row["head_groups"] or 1) > 1 else ""
    times = f"forward {row['forward_ms']:9.3f} ms {row['forward_times_one']:5.2f} x"
    times += f"   backward {row['backward_ms']:9.3f} ms {row['backward_times_one']:5.2f} x"
    print(f"{shape:<22} {how:<34} {times}", flush=True)


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """All rows so far."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)


class _Rank:
    """What one rank measures."""

    def __init__(self, torch: Any, rank: int, size: int) -> None:
        self.torch, self.rank, self.size = torch, rank, size

    def rows(self, shape: tuple[int, int, int], seed: int) -> list[dict[str, Any]]:
        """One GPU and all cases, in turns."""
        torch, (heads, key_heads, tokens) = self.torch, shape
        make = torch.Generator(device="cuda").manual_seed(seed)  # the same numbers on all ranks
        full = [
            torch.randn(1, n, tokens, DIM, device="cuda", dtype=torch.bfloat16, generator=make)
            for n in (heads, key_heads, heads, key_heads)
        ]
        whole = attention_kl_forward(*full, causal=True)
        ones = torch.ones_like(whole.kl)

        def forward() -> Any:
            return attention_kl_forward(*full, causal=True)

        def backward() -> Any:
            return attention_kl_backward(ones, *full, saved=whole, causal=True)

        student_k = backward().student_k
        cases = [case for case in CASES if case.strategy != "a2a" or key_heads % self.size == 0]
        cases = [case for case in cases if key_heads % (case.head_groups or 1) == 0]
        calls: list[tuple[Callable[[], Any], Callable[[], Any]]] = [(forward, backward)]
        blank = dict.fromkeys(FIELDS)
        found = [blank | dict(zip(FIELDS, (*shape, 1, "one GPU")))]
        found.append(blank | dict(zip(FIELDS, (*shape, self.size, "by hand", "zigzag"))))
        calls.append(self._by_hand(full))
        for case in cases:
            row, *pair = self._case(case, full, whole.kl, student_k)
            found.append(blank | dict(zip(FIELDS, (*shape, self.size, *case))) | row)
            calls.append((pair[0], pair[1]))
        times: list[list[tuple[float, float]]] = [[] for _ in calls]
        for _ in range(REPEATS):
            for taken, (first, second) in zip(times, calls):
                taken.append((self._clock(first), self._clock(second)))
        for row, taken in zip(found, times):
            row["forward_ms"], row["backward_ms"] = (float(x) for x in np.median(taken, axis=0))
            for name in ("forward", "backward"):
                row[f"{name}_times_one"] = found[0][f"{name}_ms"] / row[f"{name}_ms"]
        return found

    def _by_hand(self, full: Sequence[Any]) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Keys gathered and put in order, a call for each of the two chunks, and sums of gradients scattered."""
        torch, rank, size = self.torch, self.rank, self.size
        dist, chunks = torch.distributed, (rank, 2 * size - 1 - rank)
        chunk = full[0].shape[2] // (2 * size)
        queries = [[x[:, :, i * chunk : (i + 1) * chunk].contiguous() for x in full[::2]] for i in chunks]
        mine = [parallel.shard(x, 2, rank, size).contiguous() for x in full[1::2]]
        ones = torch.ones(1, full[0].shape[1], chunk, device="cuda")

        def gathered(x: Any) -> Any:
            out = torch.empty(size, *x.shape, device="cuda", dtype=x.dtype)
            dist.all_gather_into_tensor(out, x)
            return parallel.unshard(list(out), 2)

        def forward() -> Any:
            teacher_k, student_k = map(gathered, mine)
            rows = [
                attention_kl_forward(q_t, teacher_k, q_s, student_k, causal=True, q_offset=i * chunk)
                for i, (q_t, q_s) in zip(chunks, queries)
            ]
            return teacher_k, student_k, rows

        teacher_k, student_k, rows = forward()

        def backward() -> Any:
            total, of_queries = None, []
            for i, (q_t, q_s), saved in zip(chunks, queries, rows):
                options = {"saved": saved, "causal": True, "q_offset": i * chunk}
                grads = attention_kl_backward(ones, q_t, teacher_k, q_s, student_k, **options)
                of_queries.append(grads.student_q)
                total = grads.student_k.float() if total is None else total.add_(grads.student_k)
            sent = torch.stack([parallel.shard(total, 2, i, size) for i in range(size)])
            out = torch.empty_like(sent[0])
            dist.reduce_scatter_tensor(out, sent)
            return of_queries, out.to(student_k.dtype)

        return forward, backward

    def _case(self, case: Case, full: Sequence[Any], kl: Any, student_k: Any) -> tuple[dict[str, Any], Any, Any]:
        """What does not take time of a case, and its two calls."""
        torch = self.torch
        mine = [parallel.shard(x, 2, self.rank, self.size, case.ownership).contiguous() for x in full]
        for x in mine[2:]:
            x.requires_grad_()

        def forward() -> Any:
            return parallel.attention_kl(*mine, causal=True, **case._asdict())

        rows = forward()
        ones = torch.ones_like(rows)

        def backward() -> Any:
            return torch.autograd.grad(rows, mine[2:], ones, retain_graph=True)

        wanted = parallel.shard(student_k, 2, self.rank, self.size, case.ownership).float()
        apart = (backward()[1].float() - wanted).norm() / wanted.norm()
        off = (rows.detach() - parallel.shard(kl, 2, self.rank, self.size, case.ownership)).abs().max()
        worst = torch.stack([off, apart])
        torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
        moved = parallel.plan(*mine, size=self.size, rank=self.rank, causal=True, **case._asdict()).traffic
        row = {
            "forward_bytes": moved.forward,
            "backward_bytes": moved.backward,
            "forward_peak_bytes": self._peak(forward),
            "backward_peak_bytes": self._peak(backward),
            "kl_off": float(worst[0]),
            "student_k_apart": float(worst[1]),
            "forward_host_us": self._host(forward),
        }
        return row, forward, backward

    def _clock(self, call: Callable[[], Any]) -> float:
        """Milliseconds of the slowest rank after one call: the median of three, or of a long one the first."""
        torch, times = self.torch, list[float]()
        while len(times) < (2 if times and times[0] > LONG else 4):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.distributed.barrier()
            torch.cuda.synchronize()
            start.record()
            call()
            end.record()
            torch.cuda.synchronize()
            slowest = torch.tensor(start.elapsed_time(end), device="cuda")
            torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
            times.append(float(slowest))
        return float(np.median(times[1:]))

    def _host(self, call: Callable[[], Any]) -> float:
        """Microseconds of the host, of a call that finds an idle GPU: the median of five."""
        times = []
        for _ in range(5):
            self.torch.distributed.barrier()
            self.torch.cuda.synchronize()
            start = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - start))
        self.torch.cuda.synchronize()
        return float(np.median(times))

    def _peak(self, call: Callable[[], Any]) -> int:
        """Bytes that a call takes at most, beyond what there was."""
        cuda = self.torch.cuda
        cuda.synchronize()
        before = cuda.memory_allocated()
        cuda.reset_peak_memory_stats()
        call()
        cuda.synchronize()
        return int(cuda.max_memory_allocated() - before)

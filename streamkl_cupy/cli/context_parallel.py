"""`python -m streamkl_cupy bench --op context_parallel`: sharded calls on the GPUs of this host, beside one GPU.

Every strategy and both ownerships take turns in one run, causal, bfloat16, D = 128; the backward is of both student
gradients, through autograd, as that of one GPU is. Times are medians of the slowest rank. Beside them are what can be
written by hand over torch.distributed and the plain operation, and torch's own context-parallel attention beside its
attention on one GPU.
Then every strategy with each kind of mask. Each row is compared with one GPU too: the largest difference of a value, as
a part of 1 + KL, and the student's gradients by relative L2 norm; one that is too far off is an exit code of 1.

With `--device cpu` processes over gloo do the same in float64, to try the command where there are no GPUs.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import parallel, patterns
from ..api import attention_kl, attention_kl_backward, attention_kl_forward
from .values import results

Shape = tuple[int, int, int]
"""Query heads, key heads, tokens."""


class Machine(NamedTuple):
    """Where ranks are."""

    device: str
    backend: str
    dtype: str
    shapes: tuple[Shape, ...]
    masked: Shape
    """Of the calls with masks."""
    block: int
    """Of the pattern."""
    apart: float
    """How far gradients may be from those of one device, relative L2 norm."""


MACHINES = {
    "cuda": Machine(
        *("cuda", "nccl", "bfloat16"),
        ((8, 8, 32768), (8, 8, 131072), (32, 8, 32768), (8, 2, 262144)),
        (8, 2, 16384),
        block=64,
        apart=5e-3,
    ),
    "cpu": Machine("cpu", "gloo", "float64", ((2, 2, 128),), (4, 2, 128), block=16, apart=1e-9),
}
OFF = 4e-6
"""How far values may be from those of one device, as a part of 1 + KL."""
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
    *("heads", "key_heads", "tokens", "mask", "ranks", "strategy", "ownership", "head_groups"),
    *("forward_ms", "backward_ms", "forward_times_one", "backward_times_one", "forward_bytes", "backward_bytes"),
    *("forward_peak_bytes", "backward_peak_bytes", "kl_off", "student_q_apart", "student_k_apart", "right"),
    *("forward_host_us", "backward_host_us"),
)
Row = dict[str, Any]
Calls = tuple[Callable[[], Any], Callable[[], Any]]
"""A forward and its backward."""


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit code."""
    torch = importlib.import_module("torch")
    machine, ranks = MACHINES[options.device or "cuda"], options.ranks
    if machine.device == "cuda" and (there := torch.cuda.device_count()) < ranks:
        raise ValueError(f"--ranks {ranks}, but there are {there} GPUs; a rank has one of its own")
    if options.sizes or options.heads:
        heads = options.heads or 8
        shapes = tuple((heads, heads, n) for n in options.sizes or (machine.shapes[0][2],))
        machine = machine._replace(shapes=shapes, masked=shapes[0])
    if wrong := [n for _, _, n in machine.shapes if n % (2 * ranks)]:
        raise ValueError(f"--sizes {wrong[0]} are not {2 * ranks} equal chunks, two for each of {ranks} ranks")
    base = results(options.out, options.name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn = importlib.import_module("torch.multiprocessing").spawn
    seed, path = int(np.random.default_rng().integers(2**31)), Path(f"{base}.csv")
    spawn(work, (ranks, port, seed, machine, str(path)), nprocs=ranks)
    print(f"wrote {path}")
    with path.open(newline="", encoding="utf-8") as file:
        return 1 if any(row["right"] == "False" for row in csv.DictReader(file)) else 0


def work(rank: int, size: int, port: int, seed: int, machine: Machine, path: str) -> None:
    """One rank, in a process of its own."""
    torch: Any = importlib.import_module("torch")
    dist = torch.distributed
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    on: dict[str, Any] = {}
    if machine.device == "cuda":
        torch.cuda.set_device(rank)
        on["device_id"] = torch.device("cuda", rank)
    dist.init_process_group(machine.backend, rank=rank, world_size=size, **on)
    bench = _Rank(torch, rank, size, machine)
    found: list[Row] = []
    try:
        for rows in bench.all(seed):
            found += rows
            if rank == 0:
                for row in rows:
                    show(row)
                write(Path(path), found)
            if machine.device == "cuda":
                torch.cuda.empty_cache()
    finally:
        dist.destroy_process_group()


def show(row: dict[str, Any]) -> None:
    """A line of a row."""
    shape = f"{row['heads']} over {row['key_heads']} x {row['tokens']}"
    how = f"{row['strategy']}, {row['ownership']}" if row["ownership"] else row["strategy"]
    how += f", {row['head_groups']} steps" if (row["head_groups"] or 1) > 1 else ""
    how = f"{row['mask']}: {how}" if row["mask"] else how
    times = f"forward {row['forward_ms']:9.3f} ms {row['forward_times_one']:5.2f} x"
    times += f"   backward {row['backward_ms']:9.3f} ms {row['backward_times_one']:5.2f} x"
    off = "" if row["right"] is None else f"   off {row['kl_off']:.0e}, {row['student_k_apart']:.0e}"
    print(f"{shape:<22} {how:<46} {times}{off}{'  WRONG' if row['right'] is False else ''}", flush=True)


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """All rows so far."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows)


class _Rank:
    """What one rank measures."""

    def __init__(self, torch: Any, rank: int, size: int, machine: Machine) -> None:
        self.torch, self.rank, self.size, self.machine = torch, rank, size, machine

    def all(self, seed: int) -> Iterator[list[Row]]:
        """Rows of every shape, then of every mask."""
        for shape in self.machine.shapes:
            yield self.rows(shape, self._inputs(shape, seed))
            yield self._attention(shape)
        shape = self.machine.masked
        full = self._inputs(shape, seed)
        for name, options in self._masks(shape, seed).items():
            cases = [Case(strategy, "zigzag") for strategy in dict.fromkeys(case.strategy for case in CASES)]
            operands = [x[0].transpose(0, 1).contiguous() for x in full] if name == "packed" else full
            yield self.rows(shape, operands, cases, {"mask": name, **options})

    def _inputs(self, shape: Shape, seed: int) -> list[Any]:
        """The whole sequence, the same numbers on all ranks."""
        torch, (heads, key_heads, tokens), machine = self.torch, shape, self.machine
        make = torch.Generator(device=machine.device).manual_seed(seed)
        how = {"device": machine.device, "dtype": getattr(torch, machine.dtype), "generator": make}
        return [torch.randn(1, n, tokens, DIM, **how) for n in (heads, key_heads, heads, key_heads)]

    def _masks(self, shape: Shape, seed: int) -> dict[str, dict[str, Any]]:
        """Options in positions of the whole sequence. A pattern is cut between its blocks, so chunks must be made of
        them."""
        torch, (heads, _, tokens), machine = self.torch, shape, self.machine
        make = torch.Generator(device=machine.device).manual_seed(seed + 1)
        bounds = [0, tokens // 9, tokens // 3, tokens // 3 + 1, tokens - tokens // 7, tokens]
        packed = torch.tensor(bounds, dtype=torch.int32, device=machine.device)
        found: dict[str, dict[str, Any]] = {
            "offset": {"causal": True, "q_offset": -tokens // 5},
            "window": {"causal": True, "window": (tokens // 8, 0)},
            "key mask": {
                "causal": True,
                "key_mask": torch.rand(1, tokens, device=machine.device, generator=make) < 0.7,
            },
            "packed": {"causal": True, "cu_seqlens_q": packed, "cu_seqlens_k": packed},
        }
        if tokens % (2 * self.size * machine.block) == 0:
            how: dict[str, Any] = {"queries": tokens, "block": machine.block}
            stripes = patterns.strided(8, [head % 8 for head in range(heads)], **how)
            found["pattern"] = {
                "causal": True,
                "block_mask": patterns.local(tokens // 16, causal=True, **how) | stripes,
            }
        return found

    def rows(
        self, shape: Shape, full: Sequence[Any], cases: Sequence[Case] = CASES, options: dict[str, Any] | None = None
    ) -> list[Row]:
        """One device and all cases, in turns."""
        torch, (_, key_heads, _) = self.torch, shape
        options = {"causal": True} if options is None else dict(options)
        mask = options.pop("mask", None)
        whole = attention_kl_forward(*full, **options)
        ones = torch.ones_like(whole.kl)

        one = attention_kl_backward(ones, *full, saved=whole, **options)
        leaves = [x.detach().requires_grad_(i >= 2) for i, x in enumerate(full)]

        def forward() -> Any:
            return attention_kl(*leaves, **options)

        rows = forward()

        def backward() -> Any:
            return torch.autograd.grad(rows, leaves[2:], ones, retain_graph=True)

        cases = [case for case in cases if case.strategy != "a2a" or key_heads % self.size == 0]
        cases = [case for case in cases if key_heads % (case.head_groups or 1) == 0]
        calls: list[Calls] = [(forward, backward)]
        blank: Row = dict.fromkeys(FIELDS) | {"mask": mask}
        found = [blank | self._of(shape, "one GPU" if self.machine.device == "cuda" else "one process", ranks=1)]
        if mask is None:
            found.append(blank | self._of(shape, "by hand", "zigzag"))
            calls.append(self._by_hand(full))
        for case in cases:
            row, pair = self._case(case, full, (whole.kl, one.student_q, one.student_k), options)
            found.append(blank | self._of(shape, *case) | row)
            calls.append(pair)
        self._take_turns(found, calls)
        return found

    def _of(self, shape: Shape, *case: Any, ranks: int | None = None) -> Row:
        names = ("heads", "key_heads", "tokens", "ranks", "strategy", "ownership", "head_groups")
        return dict(zip(names, (*shape, ranks or self.size, *case)))

    def _take_turns(self, found: Sequence[Row], calls: Sequence[Calls]) -> None:
        """Time calls, into their rows; the first is what the others are compared with."""
        times: list[list[tuple[float, float]]] = [[] for _ in calls]
        for turn in range(REPEATS):
            # Each turn begins elsewhere: the clock of a GPU falls with the work that it has just had.
            begin = turn * len(calls) // REPEATS
            for i in (*range(begin, len(calls)), *range(begin)):
                first, second = calls[i]
                times[i].append((self._clock(first), self._clock(second)))
        for row, taken in zip(found, times):
            row["forward_ms"], row["backward_ms"] = (float(x) for x in np.median(taken, axis=0))
            for name in ("forward", "backward"):
                row[f"{name}_times_one"] = found[0][f"{name}_ms"] / row[f"{name}_ms"]

    def _attention(self, shape: Shape) -> list[Row]:
        """torch's attention on one device and by its own context parallelism, where that runs: how well another
        operation is shared out."""
        torch, (heads, key_heads, tokens) = self.torch, shape
        if heads != key_heads:
            return []
        try:
            experimental = importlib.import_module("torch.distributed.tensor.experimental")
            mesh = torch.distributed.device_mesh.init_device_mesh(
                self.machine.device, (self.size,), mesh_dim_names=("cp",)
            )
            context = experimental.context_parallel
            how = {"device": self.machine.device, "dtype": getattr(torch, self.machine.dtype)}
            buffers = [torch.randn(1, heads, tokens, DIM, **how) for _ in range(3)]
            found = [self._of(shape, "torch attention", ranks=1), self._of(shape, "torch context_parallel")]
            found = [dict.fromkeys(FIELDS) | row for row in found]
            self._take_turns(found[:1], [self._attend(buffers)])
            with context(mesh, buffers=buffers, buffer_seq_dims=(2, 2, 2)):
                self._take_turns(found[1:], [self._attend(buffers)])
        except Exception as error:
            if self.rank == 0:
                print(f"torch context_parallel did not run: {type(error).__name__}: {error}", flush=True)
            return []
        for name in ("forward", "backward"):
            found[1][f"{name}_times_one"] = found[0][f"{name}_ms"] / found[1][f"{name}_ms"]
        return found

    def _attend(self, buffers: Sequence[Any]) -> Calls:
        torch = self.torch
        leaves = [x.detach().requires_grad_() for x in buffers]

        def forward() -> Any:
            return torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True)

        out = forward()
        ones = torch.ones_like(out)
        return forward, lambda: torch.autograd.grad(out, leaves, ones, retain_graph=True)

    def _by_hand(self, full: Sequence[Any]) -> Calls:
        """Keys gathered and put in order, a call for each of the two chunks, and sums of gradients scattered."""
        torch, rank, size = self.torch, self.rank, self.size
        dist, chunks = torch.distributed, (rank, 2 * size - 1 - rank)
        # Renamed in torch 2.13.
        gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        chunk = full[0].shape[2] // (2 * size)
        queries = [[x[:, :, i * chunk : (i + 1) * chunk].contiguous() for x in full[::2]] for i in chunks]
        mine = [parallel.shard(x, 2, rank, size).contiguous() for x in full[1::2]]

        def gathered(x: Any) -> Any:
            out = torch.empty(size, *x.shape, device=self.machine.device, dtype=x.dtype)
            gather(out.flatten(0, 1), x)
            return parallel.unshard(list(out), 2)

        def forward() -> Any:
            teacher_k, student_k = map(gathered, mine)
            rows = [
                attention_kl_forward(q_t, teacher_k, q_s, student_k, causal=True, q_offset=i * chunk)
                for i, (q_t, q_s) in zip(chunks, queries)
            ]
            return teacher_k, student_k, rows

        teacher_k, student_k, rows = forward()
        ones = torch.ones_like(rows[0].kl)

        def backward() -> Any:
            total, of_queries = None, []
            for i, (q_t, q_s), saved in zip(chunks, queries, rows):
                options = {"saved": saved, "causal": True, "q_offset": i * chunk}
                grads = attention_kl_backward(ones, q_t, teacher_k, q_s, student_k, **options)
                of_queries.append(grads.student_q)
                total = grads.student_k.float() if total is None else total.add_(grads.student_k)
            sent = torch.stack([parallel.shard(total, 2, i, size) for i in range(size)])
            out = torch.empty_like(sent[0])
            scatter(out, sent.flatten(0, 1))
            return of_queries, out.to(student_k.dtype)

        return forward, backward

    def _case(
        self, case: Case, full: Sequence[Any], one: tuple[Any, Any, Any], options: dict[str, Any]
    ) -> tuple[Row, Calls]:
        """What does not take time of a case, and its two calls; `one` is what one device gives."""
        torch, axis = self.torch, 0 if "cu_seqlens_q" in options else 2

        def own(x: Any) -> Any:
            return parallel.shard(x, axis, self.rank, self.size, case.ownership)

        how: dict[str, Any] = {**case._asdict(), **options}
        mine = [own(x).contiguous() for x in full]
        for x in mine[2:]:
            x.requires_grad_()

        def forward() -> Any:
            return parallel.attention_kl(*mine, **how)

        rows = forward()
        ones = torch.ones_like(rows)

        def backward() -> Any:
            return torch.autograd.grad(rows, mine[2:], ones, retain_graph=True)

        kl, *grads = (own(x) for x in one)
        off = [((rows.detach() - kl).abs() / (1 + kl)).max().double()]
        off += [(x.double() - y.double()).norm() / y.double().norm() for x, y in zip(backward(), grads)]
        worst = torch.stack(off)
        torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
        kl_off, *apart = worst.tolist()
        moved = parallel.plan(*mine, size=self.size, rank=self.rank, **how).traffic
        row = {
            "forward_bytes": moved.forward,
            "backward_bytes": moved.backward,
            "forward_peak_bytes": self._peak(forward),
            "backward_peak_bytes": self._peak(backward),
            "kl_off": kl_off,
            "student_q_apart": apart[0],
            "student_k_apart": apart[1],
            "right": kl_off <= OFF and max(apart) <= self.machine.apart,
            "forward_host_us": self._host(forward),
            "backward_host_us": self._host(backward),
        }
        return row, (forward, backward)

    def _wait(self) -> None:
        if self.machine.device == "cuda":
            self.torch.cuda.synchronize()

    def _milliseconds(self, call: Callable[[], Any]) -> float:
        """Of one call: on a GPU by its own clock."""
        torch = self.torch
        if self.machine.device == "cpu":
            start = time.perf_counter()
            call()
            return 1e3 * (time.perf_counter() - start)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last))

    def _clock(self, call: Callable[[], Any]) -> float:
        """Milliseconds of the slowest rank after one call: the median of three, or of a long one the first."""
        torch, times = self.torch, list[float]()
        while len(times) < (2 if times and times[0] > LONG else 4):
            torch.distributed.barrier()
            self._wait()
            slowest = torch.tensor(self._milliseconds(call), device=self.machine.device)
            torch.distributed.all_reduce(slowest, torch.distributed.ReduceOp.MAX)
            times.append(float(slowest))
        return float(np.median(times[1:]))

    def _host(self, call: Callable[[], Any]) -> float:
        """Microseconds of the host, of a call that finds an idle GPU: the median of five."""
        times = []
        for _ in range(5):
            self.torch.distributed.barrier()
            self._wait()
            start = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - start))
        self._wait()
        return float(np.median(times))

    def _peak(self, call: Callable[[], Any]) -> int | None:
        """Bytes that a call takes of a GPU at most, beyond what there was."""
        if self.machine.device == "cpu":
            return None
        cuda = self.torch.cuda
        cuda.synchronize()
        before = cuda.memory_allocated()
        cuda.reset_peak_memory_stats()
        call()
        cuda.synchronize()
        return int(cuda.max_memory_allocated() - before)

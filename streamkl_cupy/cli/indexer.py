"""`python -m streamkl_cupy bench --op indexer_kl`: the KL of an indexer beside the same written in torch.

Causal, the teacher's log-sum-exps given unless --make-lse, weights of the heads in float32. Peers are torch's own
functions, eager and compiled, on matrices of M x N; on a GPU a program in Triton, where that is installed; and what
--yardstick names, a module with `forward(q, k, index_q, index_k, weights, lse, index_scale)` and `backward(grad, saved,
...)` of the same, which gets what the forward gave. A peer whose matrices would not fit says so.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .. import frameworks
from ..indexer.api import indexer_kl_backward, indexer_kl_forward, indexer_kl_value_and_grad
from ..testing.timing import DeviceTimer, HostTimer, Outcome, Timer, Variant, host_cost, measure
from .peers import module_of
from .values import positive, results

COLUMNS = (
    *("n", "batch", "heads", "key_heads", "index_heads", "teacher_dim", "index_dim", "lse", "peer", "pass"),
    *("ms", "p20", "p80", "samples", "extra_bytes", "times_ours", "status", "card", "torch", "date"),
)
SIZES = {"cuda": (4096, 8192, 16384), "cpu": (512,)}
PASSES = ("forward", "backward", "value_and_grad")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what only this is told."""
    group = parser.add_argument_group("of --op indexer_kl")
    group.add_argument(
        "--index-heads", type=positive, nargs="+", default=[8, 64], metavar="H", help="of the student (8 64)"
    )
    group.add_argument("--make-lse", action="store_true", help="the teacher's log-sum-exps are made, not given")


class Case(NamedTuple):
    """What is timed."""

    n: int
    batch: int
    heads: int
    key_heads: int
    index_heads: int
    teacher_dim: int
    index_dim: int
    lse: str
    """Whether log-sum-exps are "given" or "made"."""


def cases_of(options: argparse.Namespace, device: str) -> list[Case]:
    """Those that the options ask for."""
    heads = options.heads or 16
    lse = "made" if options.make_lse else "given"
    return [
        Case(n, options.batch, heads, options.key_heads or 1, index_heads, pair[0], pair[1], lse)
        for pair in options.dims or [(128, 128)]
        for index_heads in options.index_heads
        for n in options.sizes or SIZES[device]
    ]


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit code."""
    torch: Any = importlib.import_module("torch")
    device = options.device or ("cuda" if frameworks.current_gpu() is not None else "cpu")
    timer: Timer = DeviceTimer() if device == "cuda" else HostTimer()
    base = results(options.out, options.name)
    known = {
        "card": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    other = None if options.yardstick is None else module_of(options.yardstick)
    found: list[dict[str, Any]] = []
    for case in cases_of(options, device):
        bench = Bench(torch, case, device, other)
        variants = bench.variants([name for name in PASSES if name in (options.passes or PASSES)])
        outcomes = measure(
            [Variant(" ".join(key), prepare) for key, prepare in variants.items()],
            timer,
            rounds=options.rounds,
            seconds=options.seconds or 0.2,
        )
        ours: dict[str, float] = {}
        for (peer, name), outcome in zip(variants, outcomes, strict=True):
            found.append({**row_of(case, peer, name, outcome, ours), **known})
            print(line(found[-1]), flush=True)
        with Path(f"{base}.csv").open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(found)
        if device == "cuda":
            cost = host_cost(bench.ours("forward")(0), timer)
            print(f"a forward costs the host {cost.median * 1e3:.0f} us")
    print(f"wrote {base}.csv")
    return 1 if any(row["peer"] == "streamkl" and row["status"] != "ok" for row in found) else 0


class Bench:
    """Calls of one case on one device."""

    def __init__(self, torch: Any, case: Case, device: str, other: Any) -> None:
        self.torch, self.case = torch, case
        self.others = {} if other is None else {"yardstick": other}
        if device == "cuda" and importlib.util.find_spec("triton") is not None:
            self.others["triton"] = importlib.import_module(".triton_indexer", __package__)
        dtype = torch.bfloat16 if device == "cuda" else torch.float32
        b, n = case.batch, case.n

        def fresh(*shape: int, dtype: Any = dtype) -> Any:
            return torch.randn(*shape, device=device, dtype=dtype)

        self.teacher = fresh(b, case.heads, n, case.teacher_dim), fresh(b, case.key_heads, n, case.teacher_dim)
        index = fresh(b, case.index_heads, n, case.index_dim), fresh(b, n, case.index_dim)
        self.student = *index, fresh(b, case.index_heads, n, dtype=torch.float32)
        self.options = {"index_scale": (case.index_heads * case.index_dim) ** -0.5, "causal": True}
        made = indexer_kl_forward(*self.teacher, *self.student, **self.options)
        self.lse, self.grad = made.teacher_lse, fresh(b, n, dtype=torch.float32)
        self.mean = torch.full_like(self.grad, 1 / self.grad.numel())
        if case.lse == "given":
            self.options["teacher_lse"] = self.lse

    def variants(self, passes: Sequence[str]) -> dict[tuple[str, str], Callable[[int], Any]]:
        """By peer and pass; this package is the first of each pass."""
        whole = self.torch.compile(self.rows, dynamic=False)
        found: dict[tuple[str, str], Callable[[int], Any]] = {}
        for name in passes:
            found["streamkl", name] = self.ours(name)
            found["eager", name] = self.peer(name, self.rows)
            found["compile", name] = self.peer(name, whole)
            found |= {(key, name): self.module(module, name) for key, module in self.others.items()}
        return found

    def ours(self, name: str) -> Callable[[int], Any]:
        """Of this package, by the explicit functions."""
        x, options = (*self.teacher, *self.student), self.options

        def prepare(_: int) -> Any:
            if name == "forward":
                return lambda: indexer_kl_forward(*x, **options)
            if name == "value_and_grad":
                return lambda: indexer_kl_value_and_grad(*x, **options)
            saved = indexer_kl_forward(*x, **options)
            return lambda: indexer_kl_backward(self.grad, *x, saved=saved, **options)

        return prepare

    def module(self, of: Any, name: str) -> Callable[[int], Any]:
        """Of a module that joins in."""
        x = (*self.teacher, *self.student, self.lse if self.case.lse == "given" else None, self.options["index_scale"])

        def prepare(_: int) -> Any:
            if name == "forward":
                return lambda: of.forward(*x)
            if name == "value_and_grad":
                return lambda: of.backward(self.mean, of.forward(*x), *x)
            saved = of.forward(*x)
            return lambda: of.backward(self.grad, saved, *x)

        return prepare

    def peer(self, name: str, rows: Callable[..., Any]) -> Callable[[int], Any]:
        """Of a differentiable function of torch's."""
        torch, lse = self.torch, self.lse if self.case.lse == "given" else None

        def prepare(_: int) -> Any:
            leaves = [x.detach().requires_grad_() for x in self.student]
            if name == "forward":

                def forward() -> Any:
                    with torch.no_grad():
                        return rows(*self.teacher, *self.student, lse)

                return forward
            if name == "value_and_grad":
                return lambda: torch.autograd.grad(rows(*self.teacher, *leaves, lse).mean(), leaves)
            value = rows(*self.teacher, *leaves, lse)
            return lambda: torch.autograd.grad(value, leaves, self.grad, retain_graph=True)

        return prepare

    def rows(self, q: Any, k: Any, index_q: Any, index_k: Any, weights: Any, lse: Any) -> Any:
        """KL of each row, as one would write it: the matrices of all heads of a side at once."""
        torch = self.torch
        n, group = q.shape[2], q.shape[1] // k.shape[1]
        future = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        logits = (q.unflatten(1, (-1, group)) @ k.mT[:, :, None] * q.shape[-1] ** -0.5).flatten(1, 2).float()
        logits = logits.masked_fill(future, -torch.inf)
        lse = torch.logsumexp(logits, -1) if lse is None else lse
        target = torch.exp(logits - lse[..., None]).sum(1)
        target = target / target.sum(-1, keepdim=True)
        scores = torch.relu(index_q @ index_k.mT[:, None]).float()
        index = (weights[..., None] * scores).sum(1) * self.options["index_scale"]
        log_q = torch.log_softmax(index.masked_fill(future, torch.finfo(torch.float32).min), -1)
        return (torch.special.xlogy(target, target) - target * log_q).sum(-1)


def row_of(case: Case, peer: str, name: str, outcome: Outcome, ours: dict[str, float]) -> dict[str, Any]:
    """One line of the results; `ours` has the times of this package by pass."""
    timing = outcome.timing
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= {**case._asdict(), "peer": peer, "pass": name, "status": outcome.error or "ok"}
    if timing is not None:
        row |= {"ms": timing.median, "p20": timing.p20, "p80": timing.p80, "samples": timing.samples}
        row["extra_bytes"] = outcome.memory.allocated if outcome.memory else None
        if peer == "streamkl":
            ours[name] = timing.median
        if name in ours:
            row["times_ours"] = round(timing.median / ours[name], 3)
    return row


def line(row: dict[str, Any]) -> str:
    """For people."""
    begin = f"{row['n']:>7} HI {row['index_heads']:<3} {row['peer']:>9} {row['pass']:<14}"
    if row["ms"] is None:
        return f"{begin} {row['status']}"
    times = "" if row["times_ours"] is None else f"   {row['times_ours']:.2f} times ours"
    return f"{begin}{row['ms']:>10.3f} ms{times}"

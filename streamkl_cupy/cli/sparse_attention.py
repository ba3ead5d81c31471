"""`python -m streamkl_cupy bench --op sparse_attention`: attention on sharded patterns beside dense attention.

Patterns are `patterns.sharded` of so many local blocks up to the row and one in a stride before them, causal. Each is
run by this package, forward and backward, beside this package without a pattern and torch's dense attention (cuDNN's on
a GPU). Two peers run the same pattern where they are asked for: FlexAttention, whose mask is made in blocks of at least
128 tokens, and timed in a pass of its own; and the Triton kernels of the paper's authors, if their package is
installed, which choose among their configurations at the first call. Efficiency is the dense time over ours, divided by
the reduction: pairs of the dense causal matrix over pairs that the pattern shows. 1 is a kernel as fast per pair as the
dense one. With --decode, one row of each of several sequences against a long cache.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .. import frameworks, patterns
from ..attention import sparse_attention_backward, sparse_attention_forward
from ..patterns import BlockPattern
from ..testing.timing import DeviceTimer, HostTimer, Outcome, Timer, Variant, host_cost, measure
from .values import positive, results, whole

COLUMNS = (
    *("case", "n", "batch", "heads", "key_heads", "dim", "block", "dense_heads", "reduction", "peer", "pass"),
    *("ms", "p20", "p80", "samples", "extra_bytes", "efficiency", "status", "card", "torch", "date"),
)
DENSE = {"cuda": "cudnn", "cpu": "torch"}
FLEX_BLOCK = 128
"""Tokens of the least block for which FlexAttention has kernels of this head dim."""
SIZES = {"cuda": (16384, 65536), "cpu": (1024,)}


def local_and_stride(text: str) -> tuple[int, int]:
    """Type of an option: local:stride in blocks."""
    local, _, stride = text.partition(":")
    if not (local.isdigit() and stride.isdigit() and int(local) >= 1 and int(stride) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is no pattern; write local:stride in blocks, such as 8:16")
    return int(local), int(stride)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what only this is told."""
    group = parser.add_argument_group("of --op sparse_attention")
    group.add_argument(
        "--patterns", type=local_and_stride, nargs="+", default=[(8, 16), (8, 32)], metavar="L:S",
        help="local blocks and stride (8:16 8:32)",
    )  # fmt: skip
    group.add_argument("--key-heads", type=positive, metavar="H", help="default: as many as heads")
    group.add_argument("--block", type=whole(16, 128, 16), default=64, metavar="N", help="of patterns (%(default)s)")
    group.add_argument(
        "--dense-heads", type=whole(0, 65536), default=0, metavar="N", help="last heads that see all (%(default)s)"
    )
    group.add_argument("--flex", action="store_true", help="FlexAttention too, compiled for each pattern")
    group.add_argument("--dkernel", action="store_true", help="the Triton kernels of the package dkernel too")
    group.add_argument("--decode", action="store_true", help="one row for each batch entry, forward only")


class Shape(NamedTuple):
    """What all cases of a run share."""

    device: str
    batch: int
    heads: int
    key_heads: int
    dim: int
    block: int
    dense_heads: int
    decode: bool
    flex: bool
    dkernel: bool


def run(options: argparse.Namespace) -> int:
    """Carry the command out; the exit code."""
    torch: Any = importlib.import_module("torch")
    importlib.import_module("torch.nn.attention")
    device = options.device or ("cuda" if frameworks.current_gpu() is not None else "cpu")
    timer: Timer = DeviceTimer() if device == "cuda" else HostTimer()
    heads = options.heads or 16
    shape = Shape(
        device, options.batch, heads, options.key_heads or heads, options.dims[0][0] if options.dims else 128,
        options.block, options.dense_heads, options.decode, options.flex, options.dkernel,
    )  # fmt: skip
    base = results(options.out, options.name)
    known = {
        "card": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
    }
    found: list[dict[str, Any]] = []
    for n in options.sizes or SIZES[device]:
        dense: dict[str, float] = {}
        for case in (Case(shape, n), *(Case(shape, n, *pair) for pair in options.patterns)):
            bench = Bench(torch, case)
            variants = bench.variants()
            outcomes = measure(
                [Variant(" ".join(key), prepare) for key, prepare in variants.items()],
                timer,
                rounds=options.rounds,
                seconds=options.seconds or 0.2,
            )
            for (peer, name), outcome in zip(variants, outcomes, strict=True):
                found.append({**row_of(bench, peer, name, outcome, dense), **known})
                print(line(found[-1]), flush=True)
            if bench.mask_ms is not None:
                found.append({**row_of(bench, "flex", "mask", Outcome(), dense), **known, "ms": bench.mask_ms})
                print(line(found[-1]), flush=True)
            write(Path(f"{base}.csv"), found)
        if device == "cuda":
            cost = host_cost(bench.ours("forward")(0), timer)
            print(f"a forward costs the host {cost.median * 1e3:.0f} us")
    print(f"wrote {base}.csv")
    return 1 if any(row["peer"] == "streamkl" and row["status"] != "ok" for row in found) else 0


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """All rows so far."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


def pairs(pattern: BlockPattern) -> int:
    """Pairs of row and key that all heads of a pattern show beside causal=True."""
    total, diagonal = 0, pattern.keys - pattern.queries
    for head in range(pattern.heads):
        offsets = pattern.row_offsets[head]
        row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        first_key = pattern.key_blocks[offsets[0] : offsets[-1]].astype(np.int64) * pattern.key_block
        width = np.minimum(pattern.key_block, pattern.keys - first_key)
        for step in range(pattern.query_block):
            i = row * pattern.query_block + step
            seen = np.clip(i + diagonal + 1 - first_key, 0, width)
            total += int(seen[i < pattern.queries].sum())
    return total


class Case(NamedTuple):
    """A size and a pattern; without a stride the dense matrix."""

    shape: Shape
    n: int
    local: int = 0
    stride: int = 0

    @property
    def rows(self) -> int:
        return 1 if self.shape.decode else self.n

    def pattern(self) -> BlockPattern | None:
        s = self.shape
        if not self.stride:
            return None
        return patterns.sharded(
            s.heads, key_heads=s.key_heads, window=(self.local - 1) * s.block, stride=self.stride, queries=self.rows,
            keys=self.n, block=s.block, causal=True, dense_heads=s.dense_heads,
        )  # fmt: skip


class Bench:
    """Calls of one case on one device."""

    def __init__(self, torch: Any, case: Case) -> None:
        s = case.shape
        self.torch, self.case = torch, case
        dtype = torch.bfloat16 if s.device == "cuda" else torch.float32

        def fresh(heads: int, n: int) -> Any:
            return torch.randn(s.batch, heads, n, s.dim, device=s.device, dtype=dtype)

        self.given = fresh(s.heads, case.rows), fresh(s.key_heads, case.n), fresh(s.key_heads, case.n)
        self.grad = fresh(s.heads, case.rows)
        self.pattern = case.pattern()
        every = s.heads * (case.n if s.decode else case.n * (case.n + 1) // 2)
        self.mask_ms: float | None = None
        self.reduction = 1.0 if self.pattern is None else every / max(pairs(self.pattern), 1)

    def variants(self) -> dict[tuple[str, str], Callable[[int], Any]]:
        """By peer and pass."""
        s = self.case.shape
        passes = ("forward",) if s.decode else ("forward", "backward")
        found = {("streamkl", name): self.ours(name) for name in passes}
        if self.pattern is None:
            found |= {(DENSE[s.device], name): self.peer(name, self.dense) for name in passes}
            return found
        peers = [(name, make) for name, make in (("flex", self.flex), ("dkernel", self.dkernel)) if getattr(s, name)]
        for peer, make in peers:
            attend = make(self.pattern)
            found |= {(peer, name): self.peer(name, attend) for name in passes}
        return found

    def ours(self, name: str) -> Callable[[int], Any]:
        """Of this package, by the explicit functions."""
        x, pattern = self.given, self.pattern

        def prepare(_: int) -> Any:
            if name == "forward":
                return lambda: sparse_attention_forward(*x, causal=True, block_mask=pattern)
            saved = sparse_attention_forward(*x, causal=True, block_mask=pattern)
            return lambda: sparse_attention_backward(self.grad, *x, saved=saved, causal=True, block_mask=pattern)

        return prepare

    def peer(self, name: str, attend: Callable[..., Any]) -> Callable[[int], Any]:
        """Of a differentiable function of torch's."""
        torch = self.torch
        x = [t.detach().requires_grad_() for t in self.given]

        def prepare(_: int) -> Any:
            if name == "forward":
                return lambda: attend(*self.given)
            out = attend(*x)
            return lambda: torch.autograd.grad(out, x, self.grad, retain_graph=True)

        return prepare

    def dense(self, *x: Any) -> Any:
        """Causal, or of a row that sees all keys."""
        attention, case = self.torch.nn.attention, self.case
        backend = attention.SDPBackend.CUDNN_ATTENTION if x[0].is_cuda else attention.SDPBackend.MATH
        with attention.sdpa_kernel(backend):
            return self.torch.nn.functional.scaled_dot_product_attention(
                *x, is_causal=not case.shape.decode, enable_gqa=case.shape.heads != case.shape.key_heads
            )

    def flex(self, pattern: BlockPattern) -> Callable[..., Any]:
        """Compiled, its mask made once, of whole blocks and of those in which each pair is asked."""
        flex: Any = importlib.import_module("torch.nn.attention.flex_attention")
        torch, case = self.torch, self.case
        listed = torch.from_numpy(pattern.dense()).to(case.shape.device)
        heads, (block, wide) = len(listed), (pattern.query_block, max(pattern.query_block, FLEX_BLOCK))
        start = time.perf_counter()
        diagonal = case.n - case.rows
        rows, keys = (torch.arange(count, device=listed.device) * block for count in listed.shape[1:])
        shown = listed & (rows[:, None] + block - 1 + diagonal >= keys)
        whole = listed & (rows[:, None] + diagonal >= keys + block - 1)
        size = wide // block

        def joined(blocks: Any, beyond: bool) -> Any:
            """By wide blocks, of which some reach beyond the pattern: (heads, rows, keys, blocks of one)."""
            ends = [x for n in reversed(blocks.shape[1:]) for x in (0, -n % size)]
            full = torch.nn.functional.pad(blocks, ends, value=beyond)
            _, down, across = (x // size for x in full.shape)
            return full.view(heads, down, size, across, size).transpose(2, 3).flatten(3)

        some, every = joined(shown, False).any(-1), joined(whole, True).all(-1)

        def lists(blocks: Any) -> tuple[Any, Any]:
            order = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True)
            return blocks.sum(-1, dtype=torch.int32)[None], order.to(torch.int32)[None]

        def visible(_: Any, h: Any, i: Any, j: Any) -> Any:
            return listed[h % heads, i // block, j // block] & (i + diagonal >= j)

        mask = flex.BlockMask.from_kv_blocks(
            *lists(some & ~every), *lists(some & every), BLOCK_SIZE=wide, mask_mod=visible,
            seq_lengths=(case.rows, case.n),
        )  # fmt: skip
        if listed.is_cuda:
            torch.cuda.synchronize()
        self.mask_ms = 1e3 * (time.perf_counter() - start)
        compiled = torch.compile(flex.flex_attention, dynamic=False)
        return lambda *x: compiled(*x, block_mask=mask, enable_gqa=case.shape.heads != case.shape.key_heads)

    def dkernel(self, pattern: BlockPattern) -> Callable[..., Any]:
        """Of arrays whose key heads are as many as those of queries: equal ones are repeated."""
        package: Any = importlib.import_module("dkernel")
        shape, listed = self.case.shape, self.torch.from_numpy(pattern.dense())
        heads = listed.repeat(shape.heads // len(listed), 1, 1) if len(listed) == 1 else listed
        attention = package.SparseAttention(pattern.query_block, heads, seq_dim=2).to(shape.device)
        return lambda *x: attention(*x)


def row_of(bench: Bench, peer: str, name: str, outcome: Outcome, dense: dict[str, float]) -> dict[str, Any]:
    """One line of the results; `dense` has the times of dense attention, of this size."""
    case, timing = bench.case, outcome.timing
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= {field: x for field, x in case.shape._asdict().items() if field in COLUMNS}
    row |= {"case": f"{case.local}:{case.stride}" if case.stride else "dense", "n": case.n}
    row |= {"reduction": round(bench.reduction, 3), "peer": peer, "pass": name, "status": outcome.error or "ok"}
    if timing is not None:
        row |= {"ms": timing.median, "p20": timing.p20, "p80": timing.p80, "samples": timing.samples}
        row["extra_bytes"] = outcome.memory.allocated if outcome.memory else None
        if peer in DENSE.values():
            dense[name] = timing.median
        if name in dense:
            row["efficiency"] = round(dense[name] / timing.median / bench.reduction, 3)
    return row


def line(row: dict[str, Any]) -> str:
    """For people."""
    begin = f"{row['n']:>8} {row['case']:>6} {row['peer']:>9} {row['pass']:<9}"
    if row["ms"] is None:
        return f"{begin} {row['status']}"
    efficiency = "" if row["efficiency"] is None else f"   efficiency {row['efficiency']:.2f}"
    return f"{begin}{row['ms']:>10.3f} ms   reduction {row['reduction']:.2f}{efficiency}"

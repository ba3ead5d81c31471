"""Sparse attention beside dense attention in one run: how much of what a pattern leaves out is saved.

Patterns are `patterns.sharded` of --local blocks up to the row and one in --stride before them, causal. Each is run by
this package, forward and backward, beside this package without a pattern and torch's dense attention (cuDNN's on a
GPU), and FlexAttention with the same blocks under --flex. Efficiency is the dense time over ours, divided by the
reduction: pairs of the dense causal matrix over pairs that the pattern shows. 1 is a kernel as fast per pair as the
dense one. --decode times a row of each of several sequences against a long cache instead.

    python examples/benchmarks/sparse_attention.py --sizes 16k 64k --patterns 8:16 8:32 --out examples/benchmarks
    python examples/benchmarks/sparse_attention.py --decode --sizes 128k --batch 16 --heads 32 --key-heads 8
"""

from __future__ import annotations

import argparse
import csv
import datetime
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import streamkl_cupy
from streamkl_cupy import patterns
from streamkl_cupy.patterns import BlockPattern
from streamkl_cupy.testing.timing import DeviceTimer, HostTimer, Outcome, Variant, host_cost, measure

COLUMNS = (
    *("case", "n", "heads", "key_heads", "dim", "block", "local", "stride", "reduction", "peer", "pass"),
    *("ms", "p20", "p80", "samples", "extra_bytes", "efficiency", "status", "card", "torch", "date"),
)
DENSE = {"cuda": "cudnn", "cpu": "torch"}


def size(text: str) -> int:
    """16k, 65536."""
    try:
        number = int(text[:-1]) * 1024 if text[-1:] in ("k", "K") else int(text)
    except ValueError:
        number = 0
    if not 64 <= number <= 2**24:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of rows from 64 to 16384k")
    return number


def shape_of(text: str) -> tuple[int, int]:
    """local:stride in blocks."""
    local, _, stride = text.partition(":")
    if not (local.isdigit() and stride.isdigit() and int(local) >= 1 and int(stride) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r} is no pattern; write local:stride in blocks, such as 8:16")
    return int(local), int(stride)


def block_of(text: str) -> int:
    if not text.isdigit() or int(text) not in range(16, 129, 16):
        raise argparse.ArgumentTypeError(f"{text!r} is no size of blocks; allowed are multiples of 16 up to 128")
    return int(text)


def counted(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= 65536:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to 65536")
    return int(text)


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


def whole_heads(text: str) -> int:
    return 0 if text == "0" else counted(text)


def seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; allowed are seconds above 0")
    return number


class Case(NamedTuple):
    """A size and a pattern, None for the dense matrix."""

    options: Any
    n: int
    local: int = 0
    stride: int = 0

    def pattern(self, rows: int) -> BlockPattern | None:
        o = self.options
        if not self.stride:
            return None
        return patterns.sharded(
            o.heads, key_heads=o.key_heads, window=(self.local - 1) * o.block, stride=self.stride, queries=rows,
            keys=self.n, block=o.block, causal=True, dense_heads=o.dense_heads,
        )  # fmt: skip


class Bench:
    """Calls of one case on one device."""

    def __init__(self, torch: Any, case: Case, rows: int) -> None:
        o = case.options
        self.torch, self.case, self.rows = torch, case, rows
        dtype = torch.bfloat16 if o.device == "cuda" else torch.float32

        def fresh(heads: int, n: int) -> Any:
            return torch.randn(o.batch, heads, n, o.dim, device=o.device, dtype=dtype)

        self.given = fresh(o.heads, rows), fresh(o.key_heads, case.n), fresh(o.key_heads, case.n)
        self.grad = fresh(o.heads, rows)
        self.pattern = case.pattern(rows)

    def ours(self, name: str) -> Callable[[int], Any]:
        x, options = self.given, {"causal": True, "block_mask": self.pattern}

        def prepare(_: int) -> Any:
            if name == "forward":
                return lambda: streamkl_cupy.sparse_attention_forward(*x, **options)
            saved = streamkl_cupy.sparse_attention_forward(*x, **options)
            return lambda: streamkl_cupy.sparse_attention_backward(self.grad, *x, saved=saved, **options)

        return prepare

    def peer(self, name: str, attend: Callable[..., Any]) -> Callable[[int], Any]:
        torch = self.torch
        x = [t.detach().requires_grad_() for t in self.given]

        def prepare(_: int) -> Any:
            if name == "forward":
                return lambda: attend(*self.given)
            out = attend(*x)
            return lambda: torch.autograd.grad(out, x, self.grad, retain_graph=True)

        return prepare

    def dense(self, *x: Any) -> Any:
        attention = self.torch.nn.attention
        backend = attention.SDPBackend.CUDNN_ATTENTION if x[0].is_cuda else attention.SDPBackend.MATH
        with attention.sdpa_kernel(backend):
            grouped = x[0].shape[1] != x[1].shape[1]
            causal = self.rows == self.case.n
            return self.torch.nn.functional.scaled_dot_product_attention(*x, is_causal=causal, enable_gqa=grouped)

    def flex(self) -> Callable[..., Any]:
        """Compiled, its mask made of the pattern's blocks once."""
        flex = __import__("torch.nn.attention.flex_attention", fromlist=["flex_attention"])
        torch, pattern, device = self.torch, self.pattern, self.case.options.device
        assert pattern is not None
        listed, diagonal = pattern.dense(), np.arange(pattern.grid.row_blocks)
        cut = listed & (np.arange(listed.shape[2]) >= diagonal[:, None])

        def lists(blocks: np.ndarray) -> tuple[Any, Any]:
            counts, order = blocks.sum(-1), np.argsort(~blocks, axis=-1, kind="stable")
            return tuple(torch.from_numpy(a.astype(np.int32))[None].to(device) for a in (counts, order))  # type: ignore[return-value]

        mask = flex.BlockMask.from_kv_blocks(
            *lists(cut), *lists(listed & ~cut), BLOCK_SIZE=pattern.query_block,
            mask_mod=lambda b, h, i, j: i >= j, seq_lengths=(self.rows, self.case.n),
        )  # fmt: skip
        compiled = torch.compile(flex.flex_attention, dynamic=False)
        grouped = self.case.options.heads != self.case.options.key_heads
        return lambda *x: compiled(*x, block_mask=mask, enable_gqa=grouped)


def run(torch: Any, options: argparse.Namespace) -> list[dict[str, Any]]:
    timer = DeviceTimer() if options.device == "cuda" else HostTimer()
    card = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    known = {"card": card, "torch": torch.__version__, "date": datetime.date.today().isoformat()}
    found: list[dict[str, Any]] = []
    for n in options.sizes:
        rows = 1 if options.decode else n
        passes = ("forward",) if options.decode else ("forward", "backward")
        dense: dict[str, float] = {}
        for case in (Case(options, n), *(Case(options, n, *shape) for shape in options.patterns)):
            bench = Bench(torch, case, rows)
            every = options.heads * (n if options.decode else n * (n + 1) // 2)
            reduction = 1.0 if bench.pattern is None else every / pairs(bench.pattern)
            variants = {("streamkl", name): bench.ours(name) for name in passes}
            if bench.pattern is None:
                variants |= {(DENSE[options.device], name): bench.peer(name, bench.dense) for name in passes}
            elif options.flex:
                attend = bench.flex()
                variants |= {("flex", name): bench.peer(name, attend) for name in passes}
            outcomes = measure(
                [Variant(" ".join(key), prepare) for key, prepare in variants.items()],
                timer,
                rounds=options.rounds,
                seconds=options.seconds,
            )
            for (peer, name), outcome in zip(variants, outcomes, strict=True):
                found.append({**row_of(case, reduction, peer, name, outcome, dense), **known})
                print(line(found[-1]))
        if options.device == "cuda":
            cost = host_cost(bench.ours("forward")(0), timer)
            print(f"a forward costs the host {cost.median * 1e3:.0f} us")
    return found


def row_of(
    case: Case, reduction: float, peer: str, name: str, outcome: Outcome, dense: dict[str, float]
) -> dict[str, Any]:
    """One line of the results; `dense` has the times of dense attention, of this size."""
    o, timing = case.options, outcome.timing
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= {"case": "dense" if not case.stride else f"{case.local}:{case.stride}", "n": case.n, "heads": o.heads}
    row |= {"key_heads": o.key_heads, "dim": o.dim, "block": o.block, "local": case.local, "stride": case.stride}
    row |= {"reduction": round(reduction, 3), "peer": peer, "pass": name, "status": outcome.error or outcome.status}
    if timing is not None:
        row |= {"ms": timing.median, "p20": timing.p20, "p80": timing.p80, "samples": timing.samples}
        row["extra_bytes"] = outcome.memory.allocated if outcome.memory else None
        if peer in DENSE.values():
            dense[name] = timing.median
        if name in dense:
            row["efficiency"] = round(dense[name] / timing.median / reduction, 3)
    return row


def line(row: dict[str, Any]) -> str:
    if row["ms"] is None:
        return f"{row['n']:>8} {row['case']:>6} {row['peer']:>9} {row['pass']:<9} {row['status']}"
    efficiency = "" if row["efficiency"] is None else f"   efficiency {row['efficiency']:.2f}"
    return (
        f"{row['n']:>8} {row['case']:>6} {row['peer']:>9} {row['pass']:<9}{row['ms']:>10.3f} ms   "
        f"reduction {row['reduction']:.2f}{efficiency}"
    )


def main() -> None:
    text = __doc__ or ""
    parser = argparse.ArgumentParser(
        description=text.partition("\n")[0],
        epilog="example:" + text.partition("instead.")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="(%(default)s)")
    parser.add_argument("--sizes", type=size, nargs="+", default=[16384, 65536], metavar="N", help="rows (16k 64k)")
    parser.add_argument(
        "--patterns", type=shape_of, nargs="+", default=[(8, 16), (8, 32)], metavar="L:S",
        help="local blocks and stride (8:16 8:32)",
    )  # fmt: skip
    for name, default, what in (
        ("batch", 1, "batch entries"),
        ("heads", 16, "query heads"),
        ("key-heads", 0, "key heads, as many by default"),
        ("dim", 128, "head dimension"),
        ("rounds", 6, "turns of each"),
    ):
        parser.add_argument(f"--{name}", type=counted, default=default, metavar="N", help=f"{what} (%(default)s)")
    parser.add_argument("--block", type=block_of, default=64, metavar="N", help="(%(default)s)")
    parser.add_argument(
        "--dense-heads", type=whole_heads, default=0, metavar="N", help="last heads that see all (%(default)s)"
    )
    parser.add_argument("--seconds", type=seconds, default=0.1, metavar="S", help="of each pass (%(default)s)")
    parser.add_argument("--flex", action="store_true", help="FlexAttention too, which is compiled for each pattern")
    parser.add_argument("--decode", action="store_true", help="one row for each sequence, forward only")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write sparse_attention.csv into this folder")
    options = parser.parse_args()
    options.key_heads = options.key_heads or options.heads
    try:
        import torch
        import torch.nn.attention
    except ImportError:
        parser.error("the benchmark needs torch; install streamkl-cupy[torch]")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("no usable GPU; pass --device cpu with small --sizes")
    found = run(torch, options)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        path = options.out / "sparse_attention.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(found)
        print(f"wrote {path}")
    if any(row["status"] != "ok" and row["peer"] == "streamkl" for row in found):
        sys.exit(1)


if __name__ == "__main__":
    main()
